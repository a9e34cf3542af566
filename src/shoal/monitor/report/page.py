"""The report of a run as one HTML page that needs nothing else: no network, no script. Whatever came from the run is
escaped, and the page's policy allows styles and nothing more. Each part has a limit, so that the page stays small."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.core.settings import DEFAULT, FLAG
from shoal.monitor.report.advice import advice
from shoal.monitor.report.charts import MOST_DRAWN, Line, escape, line_chart, stacked_bar
from shoal.monitor.report.moments import Moment
from shoal.monitor.report.series import Series
from shoal.monitor.report.served import NOTE, servers_body
from shoal.monitor.report.style import STYLE
from shoal.monitor.report.summary import PARTS, Summary, shortened
from shoal.monitor.report.tables import MOST_VALUE, columns_table, cut, settings_table, table, within
from shoal.monitor.report.words import balance_words, outcome_words
from shoal.monitor.traffic import TITLES, exchange_facts, flow_rows
from shoal.monitor.wording import counted, duration, environment_words, figure, moment, percent, size, times
from shoal.store.values import COMPLETE, FAILED, RUNNING, STOPPED

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
MOST_METRICS, MOST_LOGS = 5, 4
"""Charts of each."""
MOST_BARS = 32
MOST_EVENTS = 50_000
MOST_TRACE = 24_000
"""Characters of a traceback before it is escaped, which may double it or worse."""

_LOOK = {COMPLETE: ("good", "✓"), STOPPED: ("good", "✓"), RUNNING: ("plain", "…"), FAILED: ("bad", "✕")}


def render_html(summary: Summary) -> str:
    """The page. Does not raise for any run: no steps, no evaluation, losses that are not finite, hostile text."""
    title = cut(summary.name or summary.run_id or "run", 200)
    body = "".join(
        [
            _header(summary, title),
            _failure(summary),
            _tiles(summary),
            _advice(summary),
            _two("".join(_charts(summary))),
            _not_drawn(summary),
            _where_time_went(summary),
            _two(_memory(summary) + _bytes(summary)) if summary.workers else "",
            _traffic(summary),
            _servers(summary),
            f'<div class="two top"><div class="stack">{_resume(summary)}{_facts(summary)}{_environment(summary)}</div>'
            f'<div class="stack">{_configuration(summary)}</div></div>',
            _events(summary),
        ]
    )
    version = f" {escape(cut(summary.version, 40))}" if summary.version else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} · Shoal</title><style>{STYLE}</style></head>"
        f"<body><main>{body}<footer>Made by Shoal{version}. This page is complete in itself.</footer></main></body>"
        "</html>\n"
    )


def _two(body: str) -> str:
    """Side by side where there is room."""
    return f'<div class="two">{body}</div>' if body else ""


def _if_empty(summary: Summary, text: str) -> str:
    """What stands in place of a part that has nothing to show. Of a run that failed it is left out."""
    return "" if summary.outcome == FAILED else text


def _header(summary: Summary, title: str) -> str:
    look, sign = _LOOK.get(summary.outcome, ("warn", "■"))
    when = f"started {moment(summary.started)} · " if summary.started else ""
    resumes = summary.counts["resume"]
    again = f", resumed {counted(resumes, 'time')}" if resumes else ""
    return (
        f"<header><h1>{escape(title)}</h1>"
        f'<p><span class="badge {look}">{sign} {escape(cut(outcome_words(summary), 100))}</span></p>'
        f'<p class="soft">{when}{duration(summary.wall_seconds)} on {counted(summary.planned_workers, "worker")}{again}'
        f' · <span class="mono">{escape(cut(summary.run_id, 200))}</span></p></header>'
    )


def _failure(summary: Summary) -> str:
    if not summary.error and not summary.traceback:
        return ""
    who = "The run" if summary.failed_worker is None else f"Worker {summary.failed_worker}"
    trace = escape(shortened(summary.traceback, MOST_TRACE))
    trace = trace if len(trace) <= 2 * MOST_TRACE else escape(shortened(summary.traceback, MOST_TRACE // 3))
    box = f'<div class="trace" tabindex="0"><pre>{trace}</pre></div>' if trace else ""
    after = "before the first step" if summary.step == 0 else f"after step {summary.step:,}"
    return (
        f'<section class="card failure"><h2>{who} failed {after}</h2>'
        f'<p class="error">{escape(cut(summary.error, 1000))}</p>{box}{_command(summary)}</section>'
    )


def _command(summary: Summary) -> str:
    """How to go on. Without a checkpoint there is nothing to go on from."""
    if not summary.how_to_resume:
        return ""
    if not summary.has_checkpoint:
        return '<p class="soft">There is no checkpoint yet to go on from: start it again.</p>'
    return (
        f'<p class="soft">To go on from the last checkpoint:</p><code class="command">{_command_text(summary)}</code>'
    )


def _command_text(summary: Summary) -> str:
    return escape(cut(summary.how_to_resume, 1000))


def _tiles(summary: Summary) -> str:
    tiles = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(cut(words, 80))}</span></div>'
        for value, words in _figures(summary)
    )
    return f'<section class="tiles">{tiles}</section>' if tiles else ""


def _figures(summary: Summary) -> Iterator[tuple[str, str]]:
    last = summary.loss.last
    if summary.final_loss is not None:
        yield figure(summary.final_loss), "loss, mean over the last epoch"
    elif last is not None:
        yield figure(last.value), f"loss of step {last.step:,}"
    for name, value in list(summary.metrics.items())[:4]:
        yield figure(value), f"{name}, last evaluation"
    if summary.samples_per_second is not None:
        yield figure(summary.samples_per_second), "samples per second"
        yield figure(summary.steps_per_second), "steps per second"
    if summary.efficiency is not None and summary.speedup is not None and summary.baseline is not None:
        yield (
            percent(summary.efficiency),
            f"efficiency: {times(summary.speedup, 3)} times the speed of {_against(summary)}",
        )
    if any(summary.peak_memory.values()):
        yield size(max(summary.peak_memory.values())), "peak memory of a worker"
    if summary.counts["notice"]:
        yield f"{summary.counts['notice']:,}", "notice, see events" if summary.counts["notice"] == 1 else "notices"


def _against(summary: Summary) -> str:
    number = summary.baseline.workers if summary.baseline else 1
    return "one worker" if number == 1 else counted(number, "worker")


def _advice(summary: Summary) -> str:
    hint = advice(summary)
    return f'<section class="card advice">{escape(hint)}</section>' if hint else ""


def _charts(summary: Summary) -> Iterator[str]:
    trained, evaluated = _line("train", summary.loss), _line("evaluation", summary.evaluations.get("loss"), second=True)
    if summary.loss.count:
        yield line_chart("Loss", [trained, evaluated], empty="The loss was never finite.")
    else:
        yield _if_empty(summary, line_chart("Loss", [evaluated], empty="No step was done."))
    metrics = [name for name in summary.evaluations if name != "loss"]
    for name in metrics[:MOST_METRICS]:
        lines = [_line("train", summary.logs.get(name)), _line("evaluation", summary.evaluations[name], second=True)]
        yield line_chart(cut(name, 80), lines, empty="It was never finite.")
    logs = [name for name in summary.logs if name not in summary.evaluations]
    for name in logs[:MOST_LOGS]:
        yield line_chart(cut(name, 80), [_line("", summary.logs[name])], empty="It was never finite.")
    if not summary.evaluations:
        yield _if_empty(summary, line_chart("Evaluation", [], empty="The run made no evaluation."))
    if summary.rate.count:
        yield line_chart("Learning rate", [_line("", summary.rate, band=False)], from_zero=True)
    if summary.norm.count:
        yield line_chart("Norm of the gradient", [_line("", summary.norm)], empty="It was never finite.")
    speed = [_line("", summary.throughput, band=False)]
    empty = "The speed shows from the second step on."
    chart = line_chart("Samples per second", speed, over="time", from_zero=True, empty=empty)
    yield chart if summary.throughput.count else _if_empty(summary, chart)
    if summary.exchange.count:
        times = [_time_line("exchange", summary.exchange), _time_line("exposed", summary.exposed, colour="c1")]
        yield line_chart("Exchange in a step, ms", times, from_zero=True, empty="It was never finite.")


def _not_drawn(summary: Summary) -> str:
    metrics = sum(name != "loss" for name in summary.evaluations)
    logs = sum(name not in summary.evaluations for name in summary.logs)
    more = max(0, metrics - MOST_METRICS) + max(0, logs - MOST_LOGS) + len(summary.names_left_out)
    return f'<p class="note">{counted(more, "more series is", "more series are")} not drawn here.</p>' if more else ""


def _line(label: str, series: Series | None, *, second: bool = False, band: bool = True) -> Line:
    """With a band, the line is of means and its ends are dots; a rate of one step is noise, and has neither."""
    if series is None:
        return Line(label, [])
    points = series.points(MOST_DRAWN, ends=second)
    averaged = len(points) < series.count
    ends = [end for end in (series.first, series.last) if end is not None and averaged and band and not second]
    return Line(label, points, colour="c1" if second else "c0", dots=second, band=band and not second, ends=ends)


def _time_line(label: str, series: Series, colour: str = "c0") -> Line:
    return Line(label, series.points(MOST_DRAWN, ends=False), colour=colour, band=False)


def _section(title: str, body: str, note: str = "") -> str:
    note = f'<p class="note">{note}</p>' if note else ""
    return f'<section class="card"><h2>{title}</h2>{body}{note}</section>'


def _shown_workers(summary: Summary) -> list[int]:
    """The first of them, and the slowest."""
    numbers = sorted(summary.workers)
    shown = numbers[:MOST_BARS]
    if summary.slowest is not None and summary.slowest[0] not in shown:
        shown[-1] = summary.slowest[0]
    return shown


def _left_out(summary: Summary) -> str:
    more = len(summary.workers) - MOST_BARS
    return f"{counted(more, 'more worker is', 'more workers are')} not drawn." if more > 0 else ""


def _where_time_went(summary: Summary) -> str:
    shares = summary.shares
    if not shares:
        return _if_empty(summary, _section("Where time went", '<p class="empty">No worker told of its time.</p>'))
    legend = "".join(f'<span><i class="box {p}"></i>{p} <b>{percent(shares[p])}</b></span>' for p in PARTS)
    whole = max(sum(worker.seconds.values()) for worker in summary.workers.values())
    rows = []
    for number in _shown_workers(summary):
        seconds = summary.workers[number].seconds
        parts = [(part, f"{part} {duration(seconds.get(part, 0.0))}", seconds.get(part, 0.0)) for part in PARTS]
        total = sum(seconds.values())
        rows.append(f"<span>worker {number}</span>{stacked_bar(parts, whole)}<span>{duration(total)}</span>")
    balance = balance_words(summary)
    notes = " ".join(
        [
            f"{balance[0].upper()}{balance[1:]}." if balance else "",
            "Exchange includes waiting for slower workers; idle is start-up and end.",
            _left_out(summary),
        ]
    )
    body = f'<div class="legend">{legend}</div><div class="bars">{"".join(rows)}</div>'
    return _section("Where time went", body, notes.strip())


def _memory(summary: Summary) -> str:
    most = max(summary.peak_memory.values(), default=0)
    if not most:
        return _if_empty(summary, _section("Memory", '<p class="empty">No worker told of its memory.</p>'))
    return _section(
        "Memory, at its peak",
        _plain_bars({n: summary.peak_memory.get(n, 0) for n in _shown_workers(summary)}),
        f"Looked at about once a second; memory that workers share counts for each. {_left_out(summary)}",
    )


def _bytes(summary: Summary) -> str:
    sent = {number: summary.sent[number] for number in _shown_workers(summary)}
    if not any(sent.values()):
        return _if_empty(summary, _section("Bytes sent", '<p class="empty">Nothing was sent between workers.</p>'))
    each = f"{size(summary.bytes_per_step)} per step, " if summary.bytes_per_step else ""
    return _section(
        "Bytes sent", _plain_bars(sent), f"{each}{size(summary.bytes_sent)} in all. {_left_out(summary)}".strip()
    )


def _traffic(summary: Summary) -> str:
    """Nothing for one worker, and where no account was kept."""
    account = summary.account
    if not account:
        return ""
    sent = columns_table(TITLES, flow_rows(account), words=3)
    told = table((name, cut(value, MOST_VALUE)) for name, value in exchange_facts(account))
    note = (
        "Bytes, messages and what is over all workers are of the whole run, the rest is of its last start. Exchange "
        "counts each moment once; exposed is what was not hidden behind compute. Times per step are means over workers."
    )
    return _section("Traffic", f'<div class="two traffic"><div class="wide">{sent}</div><div>{told}</div></div>', note)


def _servers(summary: Summary) -> str:
    body = servers_body(summary)
    return _section("Servers", body, NOTE) if body else ""


def _plain_bars(amounts: dict[int, int]) -> str:
    whole = max(amounts.values())
    rows = []
    for number, amount in amounts.items():
        bar = stacked_bar([("compute", size(amount), amount)], whole)
        rows.append(f"<span>worker {number}</span>{bar}<span>{size(amount)}</span>")
    return f'<div class="bars">{"".join(rows)}</div>'


def _facts(summary: Summary) -> str:
    epochs = f"{summary.step / summary.steps_per_epoch:.3g}" if summary.steps_per_epoch else "–"
    rate = summary.rate.first
    facts = {
        "Run": summary.run_id,
        "Name": summary.name,
        "Folder": summary.run_dir,
        "Started": moment(summary.started),
        "Ended": moment(summary.ended) if summary.ended else "",
        "Steps": f"{summary.step:,} of {summary.total_steps:,}" if summary.total_steps else f"{summary.step:,}",
        "Epochs": epochs,
        "Samples per epoch": f"{summary.samples_per_epoch:,}",
        "Batch size": f"{summary.batch_size:,}" if summary.batch_size else "",
        "Optimizer": ", ".join(summary.optimizers),
        "Parameters": f"{summary.parameters:,}" if summary.parameters else "",
        "Learning rate": f"{figure(rate.value)} in step {rate.step:,}" if rate is not None else "",
        "Resumes": f"{summary.counts['resume']:,}" if summary.counts["resume"] else "",
        "Evaluations": f"{summary.counts['evaluation']:,}",
        "Checkpoints": f"{summary.counts['checkpoint']:,}",
        "Last checkpoint": summary.in_folder(summary.last_checkpoint or ""),
        "Git commit": summary.git_commit or "",
        "Compared with": f"{summary.baseline.run_id} ({_against(summary)})" if summary.baseline else "",
    }
    return _section("Facts", table((key, cut(text, MOST_VALUE)) for key, text in facts.items() if text))


def _resume(summary: Summary) -> str:
    """Where the run failed, its own box says it."""
    if summary.error or summary.traceback or not summary.how_to_resume or not summary.run_id:
        return ""
    if summary.outcome != COMPLETE:
        return _section("How to go on", _command(summary))
    if not summary.has_checkpoint:
        return ""
    return _section(
        "How to go on", f'<p class="soft">It is complete: ask for more steps or epochs.</p>{_command(summary)}'
    )


def _environment(summary: Summary) -> str:
    if not summary.environment:
        return ""
    rows = [(key, cut(value, MOST_VALUE)) for key, value in environment_words(summary.environment)]
    return _section("Environment", table(rows))


def _configuration(summary: Summary) -> str:
    if not summary.config:
        return _if_empty(summary, _section("Configuration", '<p class="empty">Nothing is known of it.</p>'))
    defaults = {key: setting for key, setting in summary.config.items() if setting.origin == DEFAULT}
    said = {key: setting for key, setting in summary.config.items() if key not in defaults}
    said = dict(sorted(said.items(), key=lambda item: item[1].origin != FLAG))
    folded = ""
    if defaults:
        folded = f"<details><summary>{counted(len(defaults), 'default')}</summary>{settings_table(defaults)}</details>"
    return _section("Configuration", (settings_table(said) if said else "") + folded)


def _events(summary: Summary) -> str:
    moments = list(summary.moments())
    if not moments:
        return _section("Events", '<p class="empty">Nothing happened that is worth a line.</p>')
    rows = (_event(event, summary) for event in moments)
    shown = "".join(within(rows, MOST_EVENTS, '<li class="gap">Later events are in the run store only.</li>'))
    counts = ", ".join(counted(number, kind) for kind, number in summary.counts.items() if number)
    left_out = summary.moments_left_out
    notes = [
        f"In all: {counts}." if counts else "",
        f"{counted(left_out, 'line')} from the middle of the run left out." if left_out else "",
    ]
    return _section("Events", f'<ol class="events">{shown}</ol>', " ".join(notes).strip())


def _event(event: Moment, summary: Summary) -> str:
    since = duration(event.time - summary.started) if summary.started is not None else "–"
    look = {"failure": "bad", "notice": "warn", "best": "good", "resume": "plain"}.get(event.kind, "soft")
    times = f" <b>× {event.times:,}</b>" if event.times > 1 else ""
    when = f'<span class="soft" title="{moment(event.time)}">{since}</span>'
    return (
        f'<li>{when}<span class="soft">step {event.step:,}</span>'
        f'<span class="{look}">{event.kind}</span><span>{escape(event.text)}{times}</span></li>'
    )
