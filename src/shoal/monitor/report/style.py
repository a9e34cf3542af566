"""How the report's page looks. Colours are Okabe and Ito's, which most colour-blind people tell apart."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark;
  --paper: #f6f7f9; --card: #fff; --ink: #1b2430; --soft: #5b6675; --rule: #dfe3e8; --grid: #e8ebef;
  --good: #00704f; --bad: #b3261e; --warn: #8a5a00; --badpaper: #fdf1ef; --accent: #005e94;
  --c0: #0072b2; --c1: #d55e00; --compute: #0072b2; --exchange: #e69f00; --data: #d55e00; --eval: #56b4e9;
  --checkpoint: #cc79a7; --idle: #b8bfc8; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #12161b; --card: #1a2027; --ink: #e3e8ee; --soft: #9aa6b4; --rule: #2d3640; --grid: #28303a;
  --good: #4cc9a0; --bad: #ff8a80; --warn: #f0b84a; --badpaper: #2a1a1b; --accent: #6cbcf0;
  --c0: #4aa8e8; --c1: #ff9248; --compute: #2f8fd0; --exchange: #e6ab2e; --data: #e8702a; --eval: #86cdf5;
  --checkpoint: #d895bb; --idle: #56616d; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); overflow-wrap: anywhere;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 28px 24px 40px; }
header { margin-bottom: 20px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 6px; font-weight: 650; letter-spacing: -.01em; }
h2 { font-size: 16px; margin: 0 0 10px; font-weight: 650; }
p { margin: 0 0 8px; }
code, pre, .mono { font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.badge { display: inline-block; padding: 1px 10px; border: 1.5px solid currentColor; border-radius: 99px;
  font-weight: 600; font-size: 13px; margin-right: 8px; }
.good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); } .plain { color: var(--accent); }
.soft { color: var(--soft); } .note { color: var(--soft); font-size: 13px; margin: 10px 0 0; }
.card, .chart { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 16px 18px;
  margin: 0; min-width: 0; }
section, section.card { margin-top: 16px; }
.two { display: grid; grid-template-columns: minmax(0, 1fr); gap: 16px; margin-top: 16px; }
.two section.card { margin-top: 0; } .two.top { align-items: start; }
.stack { display: grid; gap: 16px; min-width: 0; align-content: start; }
.two > .chart { display: flex; flex-direction: column; } .two > .chart > .empty { flex: 1; align-content: center; }
.failure { background: var(--badpaper); border-color: var(--bad); border-left-width: 5px; }
.failure h2 { color: var(--bad); }
.failure .error { font-weight: 600; }
.trace { display: flex; flex-direction: column-reverse; max-height: 420px; overflow: auto; background: var(--card);
  border: 1px solid var(--rule); border-radius: 6px; margin: 10px 0; }
.trace pre { margin: 0; padding: 10px 12px; width: max-content; white-space: pre; overflow-wrap: normal;
  font-size: 12.5px; }
.command { display: block; background: var(--paper); border: 1px solid var(--rule); border-radius: 6px;
  padding: 7px 10px; white-space: pre-wrap; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(148px, 1fr)); gap: 12px; }
.tile { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 11px 14px; min-width: 0; }
.tile b { display: block; font-size: 21px; line-height: 1.3; font-weight: 620; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 12.5px; display: block; line-height: 1.4; }
.advice { border-left: 5px solid var(--c0); }
figcaption { display: flex; flex-wrap: wrap; gap: 2px 14px; justify-content: space-between; margin-bottom: 14px; }
figcaption b { font-weight: 620; }
.key { color: var(--soft); font-size: 12.5px; display: flex; flex-wrap: wrap; gap: 0 12px; }
.key i { display: inline-block; margin-right: 5px; vertical-align: middle; }
i.line { width: 18px; border-top: 2.5px solid; } i.line.c1 { border-top-style: dashed; }
i.box { width: 11px; height: 11px; border-radius: 2px; }
.plot { display: grid; grid-template: 190px 22px / 50px minmax(0, 1fr); margin-right: 14px; }
.plot svg { width: 100%; height: 190px; overflow: visible; display: block; }
.ys, .xs { position: relative; color: var(--soft); font-size: 11.5px; font-variant-numeric: tabular-nums;
  overflow-wrap: normal; white-space: nowrap; }
.ys span { position: absolute; right: 9px; transform: translateY(-50%); }
.xs { grid-column: 2; } .xs span { position: absolute; top: 5px; transform: translateX(-50%); }
.grid { stroke: var(--grid); fill: none; vector-effect: non-scaling-stroke; }
.curve { fill: none; stroke: currentColor; stroke-width: 1.8; stroke-linejoin: round;
  vector-effect: non-scaling-stroke; }
g.c1 .curve { stroke-dasharray: 6 4; }
.dot { stroke: currentColor; stroke-width: 7; stroke-linecap: round; vector-effect: non-scaling-stroke; }
.band { fill: currentColor; opacity: .16; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); }
.empty { color: var(--soft); text-align: center; margin: 0; padding: 14px 12px; border: 1px dashed var(--rule);
  border-radius: 6px; }
.bars { display: grid; grid-template-columns: max-content minmax(0, 1fr) max-content; gap: 7px 12px;
  align-items: center; font-size: 13px; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
.bar { width: 100%; height: 18px; display: block; border-radius: 3px; background: var(--grid); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin-bottom: 12px; font-size: 13.5px; }
.legend i { display: inline-block; margin-right: 6px; }
.compute { fill: var(--compute); background: var(--compute); }
.exchange { fill: var(--exchange); background: var(--exchange); }
.data { fill: var(--data); background: var(--data); }
.eval { fill: var(--eval); background: var(--eval); }
.checkpoint { fill: var(--checkpoint); background: var(--checkpoint); }
.idle { fill: var(--idle); background: var(--idle); }
details { margin-top: 10px; }
details summary { cursor: pointer; font-size: 13.5px; color: var(--soft, inherit); padding: 4px 0; }
table { border-collapse: collapse; width: 100%; table-layout: fixed; font-size: 13.5px; }
th, td { text-align: left; vertical-align: top; padding: 5px 10px 5px 0; border-top: 1px solid var(--grid); }
tr:first-child > * { border-top: 0; }
th { font-weight: 400; color: var(--soft); width: 36%; }
thead th { font-size: 12px; } td.origin { color: var(--soft); } td.flag { color: var(--c1); font-weight: 600; }
td.script { color: var(--accent); font-weight: 600; }
.settings th { width: 34%; } .settings .value { width: auto; } .settings .from { width: 64px; }
.columns { table-layout: auto; font-variant-numeric: tabular-nums; } .columns th { width: auto; }
.columns td, .columns th { overflow-wrap: normal; } .number { text-align: right; white-space: nowrap; }
.columns tr > :last-child { padding-right: 0; }
.two.traffic { margin-top: 0; gap: 10px 32px; } .wide { overflow-x: auto; min-width: 0; } .traffic th { width: 26%; }
.traffic .columns th { width: auto; }
.events { list-style: none; margin: 0; padding: 0; font-size: 13.5px; }
.events li { display: grid; grid-template-columns: 88px 84px 96px minmax(0, 1fr); gap: 0 10px; padding: 5px 0;
  border-top: 1px solid var(--grid); font-variant-numeric: tabular-nums; }
.events li:first-child { border-top: 0; }
.events .gap { display: block; color: var(--soft); text-align: center; }
footer { color: var(--soft); font-size: 12.5px; margin-top: 20px; }
@media (min-width: 860px) { .two { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  .two > .chart:last-child:nth-child(odd) { grid-column: 1 / -1; } }
@media (max-width: 560px) {
  main { padding: 18px 12px 28px; } h1 { font-size: 22px; } .card, .chart { padding: 13px 12px; }
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 8px; } .tile b { font-size: 18px; }
  .events li { grid-template-columns: auto auto 1fr; } .events li > :last-child { grid-column: 1 / -1; }
  .plot { margin-right: 10px; } .columns { font-size: 12px; } .columns td, .columns th { padding-right: 6px; } }
@media print { body { background: #fff; } .trace { max-height: none; }
  .trace pre { width: auto; white-space: pre-wrap; } .card, .chart { break-inside: avoid; } }
"""
