"""The report's page: what it says, that it is safe, small and quick, and that it fits a browser's window."""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.core.events import (
    AnyEvent,
    CheckpointSaved,
    EvalDone,
    ExchangeSettled,
    Notice,
    RunEnded,
    RunFailed,
    RunStarted,
    ServerFacts,
    ServersSeen,
    StepDone,
    WorkerSeen,
)
from shoal.core.settings import Setting
from shoal.core.traffic import Flow, Traffic
from shoal.monitor.report.convergence import Cost
from shoal.monitor.report.page import render_html
from shoal.monitor.report.summary import Baseline, Summary

BEGIN = 1_760_000_000.0
EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&\x1b[31m\u202e\ud800"
LONG_PATH = "/data/" + "a-very-long-folder-name-without-any-space" * 6
CONFIG = {
    "batch_size": {"value": 256, "origin": "script"},
    "workers": {"value": 4, "origin": "flag"},
    "data_workers": {"value": None, "origin": "default"},
    "optimizer": {"value": "train.make_optimizer", "origin": "script"},
    "seed": {"value": 0, "origin": "default"},
    "clip": {"value": 1.0, "origin": "flag"},
    "eval_every": {"value": 200, "origin": "script"},
    "deterministic": {"value": False, "origin": "default"},
    "run_dir": {"value": LONG_PATH, "origin": "script"},
}
FLOWS = [Flow("gradient", "none", "memory", 70_778_880, 24), Flow("control", "none", "memory", 10_000, 2)]
SETTLED = ExchangeSettled(
    step=20,
    collective="shm",
    reason="all workers are on one host",
    hosts=[0, 0, 0, 0],
    latency=11e-6,
    bandwidth=5.8e9,
    buckets=[4 << 20] * 11 + [1 << 20],
)


class TimedSummary(Summary):
    """Events happen when the clock says; steps have a time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock

    def __call__(self, event: AnyEvent) -> None:
        timed = isinstance(event, StepDone)
        super().__call__(event if timed else msgspec.structs.replace(event, time=self._clock()))


def started(step: int = 0, *, workers: int = 4, total: int = 2000, run_id: str = "digits-7f3a") -> RunStarted:
    return RunStarted(
        step=step,
        run_id=run_id,
        name="digits",
        config=CONFIG,
        run_dir=f"{LONG_PATH}/digits-7f3a",
        workers=workers,
        total_steps=total,
        steps_per_epoch=200,
        samples_per_epoch=51_200,
        batch_size=256,
    )


def stepped(step: int, loss: float) -> StepDone:
    rate = 3e-3 * min(1.0, step / 100) * (0.5 + 0.5 * math.cos(math.pi * step / 2000))
    return StepDone(
        step=step,
        epoch=step // 200,
        loss=loss,
        samples=256,
        rates=[rate],
        norm=1.5 + math.sin(step / 7) / 2,
        logs={"accuracy": 1 - loss / 3},
        traffic=Traffic(FLOWS, 13, 0.011 + 0.002 * math.sin(step / 9), 0.004 + 0.001 * math.sin(step / 9)),
        time=BEGIN + 0.5 + step * 0.05 + 0.005 * math.sin(step),
    )


def curve(step: int) -> float:
    return 2.2 * math.exp(-step / 400) + 0.08 + 0.05 * math.sin(step * 1.7) * math.exp(-step / 900)


def seen(worker: int, step: int, *, slow: float = 1.0) -> WorkerSeen:
    total = step * 0.05
    seconds = {"compute": 0.784 * total * slow, "exchange": total * (0.88 - 0.784 * slow), "data": 0.05 * total}
    return WorkerSeen(
        step=step,
        worker=worker,
        samples=step * 64,
        seconds=seconds | {"eval": 0.05 * total, "checkpoint": 0.01 * total, "idle": 0.01 * total},
        traffic=Traffic(
            [Flow(flow.kind, flow.codec, flow.link, step * flow.bytes, step * flow.messages) for flow in FLOWS],
            13 * step,
            0.22 * total,
            0.08 * total,
        ),
        memory=(410 + 9 * worker) << 20,
        host="node-1",
    )


def good_run(steps: int = 2000) -> Summary:
    clock = [BEGIN]
    summary = TimedSummary(lambda: clock[0])
    summary(started())
    for step in range(1, steps + 1):
        summary(stepped(step, curve(step)))
        clock[0] = BEGIN + 0.5 + step * 0.05
        if step % 200 == 0:
            summary(EvalDone(step=step, epoch=step // 200, metrics={"loss": curve(step) * 1.1, "accuracy": 0.97}))
            summary(
                CheckpointSaved(
                    step=step, path=f"{LONG_PATH}/digits-7f3a/checkpoints/step-{step:09d}", best=step == 1800
                )
            )
    summary(SETTLED)
    for worker in range(4):
        summary(seen(worker, steps, slow=1.08 if worker == 2 else 1.0))
    summary(Notice(step=steps, text="the schedule has ended"))
    summary(RunEnded(step=steps, loss=0.081, metrics={"loss": 0.09, "accuracy": 0.9722}, reason="complete"))
    summary.environment = {"python": "3.11.9", "torch": "2.13.0", "host": "node-1", "cores": 8, "OMP_NUM_THREADS": "2"}
    summary.git_commit = "0f3c9a7be1d24c5f8a9b7c6d5e4f3a2b1c0d9e8f"
    summary.baseline = Baseline("digits-11aa", 1, 1480.0)
    summary.version = "0.3.0"
    return summary


def served_run() -> Summary:
    """On two servers, one of which others reach over the network."""
    summary = good_run(200)
    near = ServerFacts(number=0, shards=6, bytes=24 << 20, mirrored=6, pushes=800, repeated=3, seconds=1.5)
    far = ServerFacts(number=1, shards=6, bytes=24 << 20, mirrored=6, pushes=800, received=3 << 30, sent=5 << 30)
    summary(ServersSeen(step=200, servers=[near, far], staleness=[768, 24, 8, 0, 0], replaced=1))
    summary.config["sync"] = Setting("server:mode=ssp,staleness=4", "flag")
    summary.cost = Cost("digits-bb22", "bsp", 0.21, 1.42, "lower staleness=, or use mode=bsp")
    return summary


def failed_run() -> Summary:
    clock = [BEGIN]
    summary = TimedSummary(lambda: clock[0])
    summary(started())
    for step in range(1, 121):
        summary(stepped(step, curve(step)))
    clock[0] = BEGIN + 8
    summary(CheckpointSaved(step=100, path="/runs/step-100", best=False))
    frames = [
        f'  File "{LONG_PATH}/module_{n}.py", line {n}, in __getitem__\n    return self.inner[{n}]' for n in range(60)
    ]
    trace = "Traceback (most recent call last):\n" + "\n".join(frames) + "\nValueError: sample 1234 has no label"
    summary(RunFailed(step=120, error="ValueError: sample 1234 has no label", traceback=trace, worker=2))
    summary.resume_command = "shoal run train.py --resume digits-7f3a"
    return summary


def one_step() -> Summary:
    summary = TimedSummary(lambda: BEGIN + 1)
    summary(started(workers=1, total=1))
    summary(stepped(1, 2.3))
    summary(RunEnded(step=1, loss=2.3, metrics={}, reason="complete"))
    return summary


def resumed_run() -> Summary:
    """Interrupted and resumed three times, with far more events than are kept."""
    clock = [BEGIN]
    summary = TimedSummary(lambda: clock[0])
    step = 0
    for part in range(4):
        clock[0] = BEGIN + step * 0.05 + part * 7200
        summary(started(step, workers=4 - part % 2))
        for _ in range(400):
            step += 1
            clock[0] += 0.05
            summary(msg_at(stepped(step, curve(step)), clock[0]))
            if step % 4 == 0:
                summary(CheckpointSaved(step=step, path=f"/runs/digits-7f3a/checkpoints/step-{step:09d}", best=False))
            if step % 50 == 0:
                summary(Notice(step=step, text=f"worker 1 was slow for {step} ms: {LONG_PATH}"))
                summary(Notice(step=step, text="the learning rate is zero"))
        reason = "complete" if part == 3 else "interrupted"
        for worker in range(4 - part % 2):
            summary(seen(worker, 400))
        summary(RunEnded(step=step, loss=curve(step), metrics={}, reason=reason))
    return summary


def msg_at(event: StepDone, when: float) -> StepDone:
    return msgspec.structs.replace(event, time=when)


def no_steps() -> Summary:
    summary = TimedSummary(lambda: BEGIN)
    summary(started())
    summary(RunEnded(step=0, loss=math.nan, metrics={}, reason="interrupted"))
    return summary


def never_finite() -> Summary:
    summary = TimedSummary(lambda: BEGIN)
    summary(started())
    for step in range(1, 20):
        summary(stepped(step, math.nan if step % 2 else math.inf))
    summary(EvalDone(step=19, epoch=0, metrics={"loss": math.nan, "accuracy": -math.inf}))
    return summary


def evil_run() -> Summary:
    """The same hostile text wherever a run can put text."""
    summary = TimedSummary(lambda: BEGIN)
    config = {EVIL: {"value": EVIL, "origin": EVIL}, "list": [EVIL], "object": object()}
    facts: dict[str, Any] = {"workers": 1, "total_steps": 1, "steps_per_epoch": 1, "samples_per_epoch": 1}
    summary(RunStarted(step=0, run_id=EVIL, name=EVIL, run_dir=EVIL, config=config, **facts))
    summary(StepDone(step=1, epoch=0, loss=1.0, samples=1, rates=[0.1], logs={EVIL: 1.0}, time=BEGIN))
    summary(EvalDone(step=1, epoch=0, metrics={EVIL + "2": 1.0}))
    summary(CheckpointSaved(step=1, path=EVIL, best=True))
    summary(Notice(step=1, text=EVIL))
    sent = Traffic([Flow(EVIL, EVIL, EVIL, 10, 1)], 1, 1.0, 1.0)
    summary(WorkerSeen(step=1, worker=0, samples=1, seconds={"compute": 1.0}, traffic=sent))
    summary(msgspec.structs.replace(SETTLED, collective=EVIL, reason=EVIL))
    summary(ServersSeen(step=1, servers=[ServerFacts(number=0, shards=1, bytes=1, host=EVIL)], staleness=[1]))
    summary(RunFailed(step=1, error=EVIL, traceback=EVIL))
    summary.environment, summary.git_commit, summary.version = {EVIL: EVIL}, EVIL, EVIL
    summary.baseline, summary.resume_command = Baseline(EVIL, 1, 1.0), EVIL
    summary.cost = Cost(EVIL, EVIL, 1.0, 2.0, EVIL)
    return summary


@functools.cache
def largest_page() -> str:
    """Everything that a page could hold, in characters that grow most when escaped."""
    clock = [BEGIN]
    summary = TimedSummary(lambda: clock[0])
    quotes = '"' * 5000
    config = {f"{quotes}{n}": {"value": [quotes], "origin": quotes} for n in range(300)}
    odd = [Flow(quotes, f"{quotes}{n}", quotes, 10**15, 10**9) for n in range(200)]
    facts: dict[str, Any] = {"workers": 500, "total_steps": 9999, "steps_per_epoch": 10, "samples_per_epoch": 10}
    summary(RunStarted(step=0, run_id=quotes, name=quotes, run_dir=quotes, config=config, batch_size=1, **facts))
    for step in range(1, 2502):
        clock[0] += 0.1
        wild = {f"{quotes[:300]}{n}": math.sin(step * n) for n in range(40)}
        summary(
            msg_at(
                StepDone(step=step, epoch=0, loss=wild[f"{quotes[:300]}3"], samples=1, rates=[1], logs=wild), clock[0]
            )
        )
        if step % 5 == 0:
            summary(Notice(step=step, text=f"{step}{quotes}"))
            summary(EvalDone(step=step, epoch=0, metrics={f"{quotes[:250]}{n}": math.cos(step * n) for n in range(40)}))
    for worker in range(500):
        summary(msgspec.structs.replace(seen(worker, 5000), traffic=Traffic(odd, 10**9, 1e4, 1e3)))
    shape: dict[str, Any] = {"hosts": list(range(500)), "latency": 1e-5, "bandwidth": 1e9, "buckets": [1 << 20] * 5000}
    summary(ExchangeSettled(step=20, collective=quotes, reason=quotes, **shape))
    many = [ServerFacts(number=n, shards=10**9, bytes=10**15, pushes=10**12, received=10**15) for n in range(64)]
    summary(ServersSeen(step=5000, servers=many, staleness=[10**9] * 1000, replaced=10**9))
    summary.cost = Cost(quotes, "allreduce", 1e-300, 1e9, "lower staleness=, or use mode=bsp")
    summary(RunFailed(step=5000, error=quotes, traceback=quotes * 100))
    summary.environment = {f"{quotes}{n}": quotes for n in range(300)}
    summary.git_commit = summary.version = summary.resume_command = quotes
    return render_html(summary)


RUNS = {
    "good": good_run,
    "served": served_run,
    "failed": failed_run,
    "one step": one_step,
    "resumed": resumed_run,
    "no steps": no_steps,
    "never finite": never_finite,
    "evil": evil_run,
    "empty": Summary,
}


class Tags(HTMLParser):
    """Which tags and attributes a page has, and that every tag is closed in order."""

    VOID = frozenset({"meta"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes.update(name for name, _ in attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes.update(name for name, _ in attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("name", RUNS)
def test_a_page_is_well_formed_and_complete_in_itself(name: str) -> None:
    page = render_html(RUNS[name]())
    tags = Tags(page)
    assert not tags.open
    assert not tags.names & {"script", "img", "link", "iframe", "object", "a", "form"}
    assert not tags.attributes & {"href", "src", "onerror", "onclick", "onload"}
    assert "default-src 'none'" in page and not re.search(r"url\(|@import|https?:", page)
    assert not re.search(r"\bnan\b|\binf\b", re.sub(r"<[^>]*>", "", page.replace("NaN", ""))) or name == "never finite"
    page.encode("utf-8")


def test_servers_have_a_part_of_the_page() -> None:
    page = render_html(served_run())
    section = page.partition("<h2>Servers</h2>")[2].partition("</section>")[0]
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", section)
    assert cells[:9] == ["0", "6", "24.0 MiB", "6", "800", "3", "shared memory", "shared memory", "1.5 s"]
    assert cells[9:18] == ["1", "6", "24.0 MiB", "6", "800", "0", "3.0 GiB", "5.0 GiB", "0 s"]
    bars = re.findall(r"<span>([^<]*)</span><svg.*?</svg><span>([^<]*)</span>", section)
    assert bars == [("0", "96%"), ("1", "3%"), ("2", "1%")]
    assert {"ssp (staleness 4) on 2 servers", "0.05 steps", "1 server that had died"} <= set(cells)
    told = (
        "needed 1.42 times the samples of run digits-bb22 (bsp) to reach loss 0.21: lower staleness=, or use mode=bsp"
    )
    assert told in cells and f"It {told}." in Tags(page).text
    assert "<h2>Servers</h2>" not in render_html(good_run(20))


def test_what_came_from_the_run_is_text() -> None:
    page = render_html(evil_run())
    assert "<script" not in page and "<img" not in page
    assert "\x1b" not in page and "\u202e" not in page
    shown = Tags(page).text
    # Title, heading, facts, configuration, environment, error, traceback, events and charts.
    assert shown.count("<script>alert(1)</script>") >= 21


def test_drawings_have_no_values_that_are_not_numbers() -> None:
    for make in RUNS.values():
        for data in re.findall(r'(?: d|style|x|width)="([^"]*)"', render_html(make())):
            assert not re.search(r"nan|inf", data), data


def test_a_good_run_says_how_it_went() -> None:
    text = Tags(render_html(good_run())).text
    for words in ("complete, 2,000 steps", "0.9722", "86%", "Worker 2 computed longest", "digits-11aa", "437 MiB"):
        assert words in text
    for words in ("Loss", "accuracy", "Learning rate", "Samples per second", "Where time went", "Environment"):
        assert words in text
    assert re.search(r"workers\s*4\s*flag", text) and re.search(r"seed\s*0\s*default", text)


def test_the_traffic_of_a_run() -> None:
    tags = Tags(render_html(good_run()))
    told = tags.text
    for words in (
        "gradientnonememory527 GiB192,000270 MiB",
        "controlnonememory76.3 MiB16,00039.1 KiB",
        "operations13 per step",
        "exchange11 ms per step, 1 min 28 s over all workers",
        "exposed4.0 ms per step (9% of step time), 32 s over all workers",
        "latency11 µs for the smallest sum",
        "collectiveshared memory; all workers are on one host",
        "hosts1, with 4 workers",
        "buckets12 of 1.0 MiB to 4.0 MiB",
        "Exchange in a step, ms",
    ):
        assert words in told, f"{words}\n{told[told.index('Traffic') :][:900]}"


def test_of_an_exchange_that_was_not_measured_there_are_no_zeros() -> None:
    summary = good_run()
    summary(msgspec.structs.replace(SETTLED, latency=0.0, bandwidth=0.0, buckets=[]))
    told = Tags(render_html(summary)).text.partition("Traffic")[2].partition("Facts")[0]
    assert "collectiveshared memory; all workers are on one host" in told and "hosts1, with 4 workers" in told
    assert "buckets" not in told and "latency" not in told and "summed in the first steps" not in told


def test_a_run_without_an_account_has_no_such_part() -> None:
    summary = TimedSummary(lambda: BEGIN)
    summary(started(workers=1))
    summary(msgspec.structs.replace(stepped(1, 1.0), traffic=None))
    summary(WorkerSeen(step=1, worker=0, samples=1, seconds={"compute": 1.0}))
    told = Tags(render_html(summary)).text
    assert "Traffic" not in told and "Exchange in a step" not in told


def test_a_failure_is_on_top_with_the_way_on() -> None:
    page = render_html(failed_run())
    assert page.index("Worker 2 failed after step 120") < page.index('class="tiles"')
    assert page.index("in __getitem__") < page.index('class="tiles"')
    assert "shoal run train.py --resume digits-7f3a" in page


def test_without_a_checkpoint_there_is_nothing_to_resume() -> None:
    assert "no checkpoint yet" in render_html(no_steps())
    assert "How to go on" not in render_html(one_step())


def test_empty_states_are_said() -> None:
    assert "No step was done." in render_html(no_steps())
    assert "The loss was never finite." in render_html(never_finite())
    page = render_html(one_step())
    assert "The run made no evaluation." in page and "from the second step on" in page and 'class="dot"' in page


def test_a_run_that_failed_early_has_no_empty_parts() -> None:
    summary = TimedSummary(lambda: BEGIN)
    summary(started())
    summary(RunFailed(step=0, error="ValueError: no", traceback="Traceback\n  x\n  ^", worker=1))
    page = render_html(summary)
    assert 'class="empty"' not in page and 'class="two"></div>' not in page
    assert 'class="trace"' in page and "Events" in page and "Facts" in page


def test_what_is_trained_is_among_the_facts() -> None:
    summary = TimedSummary(lambda: BEGIN)
    summary(msgspec.structs.replace(started(), parameters=12_345, optimizers=["AdamW", "SGD"]))
    summary(stepped(1, 2.0))
    page = render_html(summary)
    for name, value in (("Optimizer", "AdamW, SGD"), ("Parameters", "12,345")):
        assert f"<th>{name}</th><td>{value}</td>" in page
    assert re.search(r"<th>Learning rate</th><td>[\d.e-]+ in step 1</td>", page)


def test_the_header_says_how_often_a_run_was_resumed() -> None:
    header = render_html(resumed_run()).partition("</header>")[0]
    assert "on 3 workers, resumed 3 times" in header
    assert "resumed" not in render_html(good_run(20)).partition("</header>")[0]


def test_many_events_are_kept_within_bounds_and_counted() -> None:
    page = render_html(resumed_run())
    assert "64 notices, 3 resumes, 400 checkpoints" in page and "lines from the middle of the run left out" in page
    assert page.count("went on with") == 3 and "× 32" in page


def test_any_page_is_small() -> None:
    assert len(largest_page().encode()) < 300_000


def test_a_page_is_quick() -> None:
    summary = good_run()
    taken = []
    for _ in range(3):
        begun = time.process_time()
        render_html(summary)
        taken.append(time.process_time() - begun)
    assert min(taken) < 0.1


def test_gaps_are_not_drawn_over() -> None:
    summary = TimedSummary(lambda: BEGIN)
    summary(started())
    for step in range(1, 31):
        summary(stepped(step, math.nan if 10 <= step < 20 else 1 / step))
    loss = re.search(r'aria-label="Loss.*?class="curve" d="([^"]*)"', render_html(summary))
    assert loss is not None and loss[1].count("M") == 2


def chromium() -> Any:
    """A browser without a window; skips where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not Path("/usr/bin/chromium").exists():
        pytest.skip("there is no /usr/bin/chromium")
    return playwright.sync_playwright()


@contextmanager
def browser() -> Iterator[Any]:
    with chromium() as started_playwright:
        found = started_playwright.chromium.launch(
            executable_path="/usr/bin/chromium",
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        try:
            yield found
        finally:
            found.close()


CLIPPED = """[...document.querySelectorAll("*")].filter(one => getComputedStyle(one).overflowY !== "visible"
    && one.scrollHeight > one.clientHeight + 1 && !one.matches(".trace, svg, svg *, html, body"))
    .map(one => one.className)"""
"""Boxes that hide a part of what is in them. A long traceback does, and shows its end."""
TRACE_LINES = """(() => { const found = document.querySelector(".trace pre"); if (!found) return null;
    const style = getComputedStyle(found), inside = found.clientHeight - 2 * parseFloat(style.paddingTop);
    const lines = found.textContent.replace(/\\n$/, "").split("\\n").length;
    return [Math.round(inside / parseFloat(style.lineHeight)), lines]; })()"""
"""As drawn, and as written."""


def test_pages_fit_a_browser_at_both_widths(tmp_path: Path) -> None:
    files = []
    for name, page in [*((name, render_html(make())) for name, make in RUNS.items()), ("largest", largest_page())]:
        files.append(tmp_path / f"{name}.html")
        files[-1].write_text(page, encoding="utf-8")
    said: list[str] = []
    asked: list[str] = []
    with browser() as found:
        view = found.new_page()
        view.on("console", lambda message: said.append(message.text))
        view.on("pageerror", lambda error: said.append(str(error)))
        view.on("request", lambda request: asked.append(request.url))
        for file in files:
            view.goto(file.as_uri())
            for width in (1280, 400):
                view.set_viewport_size({"width": width, "height": 900})
                extent = view.evaluate("document.documentElement.scrollWidth")
                assert extent <= width, f"{file.name} is {extent} px wide in a window of {width}"
                clipped = view.evaluate(CLIPPED)
                assert clipped == [], f"{file.name}: {clipped} scroll inside a window of {width}"
                lines = view.evaluate(TRACE_LINES)
                assert lines is None or lines[0] == lines[1], f"{file.name}: a line of the traceback is broken"
    assert (asked, said) == ([file.as_uri() for file in files], [])
