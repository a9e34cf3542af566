"""The report in a terminal, and the advice that goes with it."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from rich.console import Console

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
from shoal.core.traffic import Flow, Traffic
from shoal.monitor.report import terminal
from shoal.monitor.report.advice import advice
from shoal.monitor.report.convergence import Cost
from shoal.monitor.report.summary import PARTS, Baseline, Summary
from shoal.monitor.report.terminal import cells_of, print_report

BEGIN = 1_000_000.0
EVIL = "[bold red]<script>\x1b[2J\x1b]0;title\x07\u202e"


class TimedSummary(Summary):
    """Events happen when the clock says; steps have a time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock

    def __call__(self, event: AnyEvent) -> None:
        timed = isinstance(event, StepDone)
        super().__call__(event if timed else msgspec.structs.replace(event, time=self._clock()))


def run(
    *,
    seconds: float = 100.0,
    shares: dict[str, float] | None = None,
    slow: float = 1.0,
    loss: float = 0.5,
    **config: Any,
) -> Summary:
    """A run on two workers, up to its last step."""
    clock = [BEGIN]
    summary = TimedSummary(lambda: clock[0])
    facts: dict[str, Any] = {"total_steps": 200, "steps_per_epoch": 100, "samples_per_epoch": 800, "batch_size": 8}
    summary(RunStarted(step=0, run_id="a-1", name="a", run_dir="/runs/a-1", workers=2, config=config, **facts))
    for step in range(1, 101):
        event = StepDone(step=step, epoch=0, loss=loss, samples=8, rates=[0.1], time=BEGIN + step * seconds / 100)
        summary(event)
    clock[0] = BEGIN + seconds
    spent = {part: 0.0 for part in PARTS} | {"compute": 1.0} | (shares or {})
    for worker in (0, 1):
        each = {part: seconds * share for part, share in spent.items()}
        each["compute"] *= slow if worker == 1 else 1.0
        sent = Traffic(
            [Flow("gradient", "none", "memory", 1 << 20, 200)], 200, each["exchange"] + 0.02 * seconds, each["exchange"]
        )
        summary(WorkerSeen(step=100, worker=worker, samples=400, seconds=each, traffic=sent, memory=1 << 30))
    return summary


def shown(summary: Summary, encoding: str = "utf-8", width: int = 100) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_report(summary, Console(file=stream, width=width))
    stream.flush()
    raw = stream.buffer
    assert isinstance(raw, io.BytesIO)
    return raw.getvalue().decode(encoding)


def test_a_complete_run() -> None:
    summary = run(shares={"compute": 0.7, "exchange": 0.2, "data": 0.1}, slow=1.05)
    summary(EvalDone(step=100, epoch=0, metrics={"loss": 0.6, "accuracy": 0.9}))
    summary(Notice(step=100, text="look"))
    summary(RunEnded(step=100, loss=0.5, metrics={"loss": 0.6, "accuracy": 0.9}, reason="complete"))
    summary.baseline = Baseline("a-0", 1, 4.0)
    text = shown(summary)
    for words in (
        "a: complete, 100 steps in 1 min 40 s on 2 workers",
        "0.5 (step 1: 0.5) · evaluation: loss 0.6, accuracy 0.9",
        "8 samples/s, 1 steps/s · 2 times one worker (efficiency 100%, against a-0)",
        "exchange 20%",
        "20.5 KiB per step, 2.0 MiB in all: gradient 2.0 MiB (memory)",
        "0.22 s per step, 0.20 s of it exposed (20% of step time) · 46.5 KiB/s",
        "worker 1 computed longest, 2% above the mean · peak memory 1.0 GiB (worker 0)",
        "1 notice",
        "/runs/a-1/report.html",
        "shoal show a-1",
    ):
        assert words in text, f"{words}\n{text}"
    assert "Resume" not in text and len(text.splitlines()) <= 14


def test_how_workers_exchange_is_said_in_ascii_too() -> None:
    summary = run()
    shape: dict[str, Any] = {"hosts": [0, 0], "latency": 1e-5, "bandwidth": 1e9, "buckets": [1 << 20, 10]}
    summary(ExchangeSettled(step=3, collective="shm", reason=EVIL, **shape))
    assert re.search(r"^Exchange .*shared memory, 2 buckets of up to 1.0 MiB$", shown(summary, width=140), re.MULTILINE)
    for worker in (0, 1):
        sent = Traffic([Flow("gradient", "none", "memory", 10, 1)], 1, 3e-4, 1e-4)
        summary(
            WorkerSeen(step=100, worker=worker, samples=1, seconds={"compute": 1.0, "exchange": 1e-4}, traffic=sent)
        )
    assert "3.0 us per step, 1.0 us of it exposed" in shown(summary, encoding="ascii", width=140)


def test_the_exposed_exchange_is_the_one_that_the_bar_shows() -> None:
    text = shown(run(shares={"compute": 0.5, "exchange": 0.25, "data": 0.0, "idle": 0.25}), width=140)
    assert "exchange 25%" in text and "0.25 s of it exposed (33% of step time)" in text


def test_where_nothing_was_measured_only_the_choice_is_said() -> None:
    summary = run()
    shape: dict[str, Any] = {"hosts": [0, 0], "latency": 0.0, "bandwidth": 0.0, "buckets": []}
    summary(ExchangeSettled(step=3, collective="shm", reason="one host", **shape))
    assert re.search(r"^Exchange .* · shared memory; one host$", shown(summary, width=140), re.MULTILINE)


def test_servers_are_told_of_and_what_staleness_cost() -> None:
    summary = run()
    assert "Servers" not in shown(summary) and "Samples" not in shown(summary)
    both = [ServerFacts(number=number, shards=6, bytes=1, pushes=9) for number in (0, 1)]
    summary(ServersSeen(step=100, servers=both, staleness=[96, 3, 1, 0], replaced=1))
    summary.cost = Cost("a-0", "bsp", 2.1, 1.05, "lower staleness=")
    text = shown(summary, width=200)
    assert re.search(
        "^Servers +2 servers, gradients lacked 0.05 steps on average, 1 replaced · gradients computed with weights "
        "that lacked 0 steps: 96%, 1: 3%, 2: 1%$",
        text,
        re.MULTILINE,
    )
    assert re.search(
        r"^Samples +needed 1.05 times the samples of run a-0 \(bsp\) to reach loss 2.1$", text, re.MULTILINE
    )
    summary.cost = Cost("a-0", "bsp", 2.1, 1.5, "lower staleness=")
    text = shown(summary, width=200)
    assert re.search("^Advice +It needed 1.50 times .*: lower staleness=.$", text, re.MULTILINE)
    assert "Samples" not in text, "it is said once"


def test_one_worker_and_old_runs_say_nothing_of_exchange() -> None:
    summary = run()
    for worker in (0, 1):
        summary(WorkerSeen(step=100, worker=worker, samples=400, seconds={"compute": 1.0}))
    text = shown(summary)
    assert "Exchange" not in text and "Sent" not in text
    summary.stored_bytes = 3 << 20
    assert re.search(r"^Sent +3.0 MiB in all$", shown(summary), re.MULTILINE)


def test_a_failed_run_says_how_to_resume() -> None:
    summary = run()
    summary(RunFailed(step=100, error="ValueError: no label\nat all", traceback="…", worker=1))
    summary.resume_command = "shoal run train.py --resume a-1"
    assert "Resume" not in shown(summary), "there is nothing to go on from"
    summary(CheckpointSaved(step=90, path="/runs/a-1/checkpoints/step-000000090", best=False))
    text = shown(summary)
    assert "failed after 100 of 200 steps" in text and "ValueError: no label at all" in text
    assert re.search(r"^Resume +shoal run train.py --resume a-1$", text, re.MULTILINE)
    assert len(text.splitlines()) <= 14


def test_a_run_of_which_nothing_is_known() -> None:
    text = shown(Summary())
    assert "running, 0 steps" in text and len(text.splitlines()) == 1


def test_text_from_the_run_is_neither_markup_nor_terminal_sequences() -> None:
    summary = TimedSummary(lambda: BEGIN)
    facts: dict[str, Any] = {"workers": 1, "total_steps": 1, "steps_per_epoch": 1, "samples_per_epoch": 1}
    summary(RunStarted(step=0, run_id=EVIL, name=EVIL, run_dir=EVIL, **facts))
    summary(EvalDone(step=0, epoch=0, metrics={EVIL: 1.0}))
    summary(CheckpointSaved(step=0, path=EVIL, best=False))
    summary(RunFailed(step=0, error=EVIL, traceback=EVIL))
    summary.resume_command = EVIL
    text = shown(summary)
    assert "\x1b" not in text and "\u202e" not in text and text.count("[bold red]<script>") >= 5


def full_run() -> Summary:
    """With every line, and the widest of them."""
    summary = run(shares=dict.fromkeys(PARTS, 1 / len(PARTS)), slow=2.0)
    metrics = {"loss": 0.6, "accuracy": 0.9, "precision": 0.123456, "recall": 0.98765, "perplexity": 1234.5}
    summary(EvalDone(step=100, epoch=0, metrics=metrics))
    summary(Notice(step=100, text="look"))
    summary(CheckpointSaved(step=100, path="/runs/a-1/checkpoints/step-000000100", best=False))
    summary(RunEnded(step=100, loss=0.5, metrics=metrics, reason="interrupted"))
    summary.baseline = Baseline("digits-20261115-220418-11aa", 1, 4.0)
    summary.resume_command = "shoal run train.py --resume " + "a" * 100
    return summary


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_every_line_fits_the_terminal(width: int, encoding: str) -> None:
    lines = shown(full_run(), encoding, width).splitlines()
    copied = [line for line in lines if line.startswith("Resume")]
    assert len(copied) == 1 and copied[0].endswith("a" * 100), "a command is not broken"
    assert [line for line in lines if len(line) > width and line not in copied] == []
    assert all(line[0].strip() or line.startswith(" " * 11) for line in lines), "what follows stands below the text"


def test_the_legend_of_the_time_is_broken_between_its_entries() -> None:
    lines = shown(full_run(), width=60).splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith("Time"))
    assert lines[place : place + 3] == [
        "Time       ███████▓▓▓▓▓▒▒▒▒░░░░░▚▚▚▚·····",
        "           █ compute 23%  ▓ exchange 15%  ▒ data 15%",
        "           ░ eval 15%  ▚ checkpoint 15%  · idle 15%",
    ]
    wide = shown(full_run(), width=140)
    assert "·····  █ compute 23%  ▓ exchange 15%" in wide, "beside the bar where there is room"


def test_in_a_notebook_the_report_is_one_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed: list[str] = []
    monkeypatch.setattr(terminal, "in_notebook", lambda: True)
    monkeypatch.setattr("builtins.print", lambda text, **how: printed.append(text))
    assert shown(full_run()) == "", "nothing goes to the console"
    (text,) = printed
    lines = text.splitlines()
    assert lines[0].startswith("Run ") and lines[-1].startswith("Look ") and text.endswith("\n") and "\x1b" not in text
    assert max(len(line) for line in lines if not line.startswith("Resume")) <= terminal.NOTEBOOK_WIDTH


def test_a_terminal_without_unicode_gets_ascii() -> None:
    summary = run(shares={"compute": 0.6, "exchange": 0.4})
    summary(RunEnded(step=100, loss=0.5, metrics={"größe": 1.0}, reason="complete"))
    text = shown(summary, encoding="ascii")
    assert "##################============" in text and "gr??e 1" in text


@pytest.mark.parametrize("width", [1, 7, 30, 100])
def test_a_bar_has_as_many_cells_as_it_is_wide(width: int) -> None:
    shares = dict(zip(PARTS, (0.61, 0.004, 0.3, 0.05, 0.036, 0.0), strict=True))
    cells = cells_of(shares, width)
    assert sum(cells.values()) == width
    assert all(abs(cells[part] - shares[part] * width) <= 1 for part in PARTS)


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ({"compute": 0.37, "data": 0.63}, "63% of the time workers waited for data: raise data_workers= (now 1)"),
        ({"compute": 0.5, "exchange": 0.5}, "50% of the time went into exchanging gradients"),
        ({"compute": 0.65, "eval": 0.35}, "raise eval_every="),
        ({"compute": 0.85, "checkpoint": 0.15}, "raise checkpoint_every="),
        ({"compute": 0.3, "data": 0.25, "exchange": 0.45}, "exchanging gradients"),
    ],
)
def test_advice_names_what_costs_most(shares: dict[str, float], words: str) -> None:
    assert words in advice(run(shares=shares, data_workers=1))
    assert words in shown(run(shares=shares, data_workers=1)).replace("\n", " ")


def test_there_is_no_advice_below_the_thresholds_or_for_a_short_run() -> None:
    below = {"compute": 0.05, "data": 0.19, "exchange": 0.38, "eval": 0.29, "checkpoint": 0.09}
    assert advice(run(shares=below)) == ""
    assert advice(run(shares={"compute": 0.1, "data": 0.9}, seconds=9.0)) == ""
    assert advice(Summary()) == ""


def test_a_slow_worker_is_named_and_the_exchange_is_not_blamed_for_it() -> None:
    assert "Worker 1 computed 1.33 times as long" in advice(run(shares={"compute": 0.5, "exchange": 0.5}, slow=2.0))


def test_a_loss_that_is_not_finite_comes_first() -> None:
    words = advice(run(shares={"compute": 0.1, "data": 0.9}, loss=float("nan")))
    assert "not finite in 100 steps, the first of them step 1" in words


def test_too_many_workers_are_said_to_be_so() -> None:
    summary = run()
    summary.baseline = Baseline("a-0", 1, 7.5)
    assert "2 workers were 1.1 times as fast as one" not in advice(summary)
    summary.baseline = Baseline("a-0", 1, 10.0)
    assert "2 workers were 0.8 times as fast as one" in advice(summary)
    summary.baseline = Baseline("a-0", 1, 2000.0)
    assert "2 workers were 0.004 times as fast as one" in advice(summary)
    assert "0.004 times one worker" in shown(summary)
