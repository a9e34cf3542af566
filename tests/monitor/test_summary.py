"""What is kept of a run's events for its report: bounded, honest, and the same from the store."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from shoal.core.events import (
    AnyEvent,
    CheckpointSaved,
    EpochDone,
    EvalDone,
    ExchangeSettled,
    Notice,
    Preparing,
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
from shoal.monitor.report.series import Series
from shoal.monitor.report.summary import MOST_SERIES, MOST_TEXT, Baseline, Summary, as_setting, shortened
from shoal.store.values import CheckpointRow, EventRow, RunInfo, StepRow, WorkerRow

BEGIN = 1_000_000.0


class TimedSummary(Summary):
    """Events happen when the clock says; steps have a time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock

    def __call__(self, event: AnyEvent) -> None:
        timed = isinstance(event, StepDone)
        super().__call__(event if timed else msgspec.structs.replace(event, time=self._clock()))


def started(step: int = 0, run_id: str = "a-1", **changes: Any) -> RunStarted:
    event = RunStarted(
        step=step,
        run_id=run_id,
        name="a",
        config={"clip": 1.0},
        run_dir="/runs/a-1",
        workers=2,
        total_steps=100,
        steps_per_epoch=10,
        samples_per_epoch=80,
        batch_size=8,
    )
    return msgspec.structs.replace(event, **changes)


def stepped(step: int, loss: float = 1.0, when: float | None = None, **more: Any) -> StepDone:
    when = BEGIN + step if when is None else when
    return StepDone(step=step, epoch=step // 10, loss=loss, samples=8, rates=[0.1, 0.2], time=when, **more)


def seen(worker: int, *, compute: float = 6.0, memory: int = 100, sent: int = 1000) -> WorkerSeen:
    seconds = {"compute": compute, "exchange": 2.0, "data": 1.0, "eval": 0.5, "checkpoint": 0.25, "idle": 0.25}
    traffic = Traffic([Flow("gradient", "none", "memory", sent, 4)], operations=10, exchange=3.0, exposed=1.5)
    return WorkerSeen(step=10, worker=worker, samples=40, seconds=seconds, traffic=traffic, memory=memory)


def listening() -> tuple[Summary, list[float]]:
    clock = [BEGIN]
    return TimedSummary(lambda: clock[0]), clock


def test_a_series_keeps_every_point_while_it_is_short() -> None:
    series = Series(most=8)
    for step in range(1, 9):
        series.add(step, step / 10, step * 2.0)
    assert [(point.step, point.value) for point in series.points()] == [(n, n * 2.0) for n in range(1, 9)]


@pytest.mark.parametrize("most", [7, 8])
@pytest.mark.parametrize("count", [9, 10, 16, 17, 100, 1001])
def test_a_long_series_is_averaged_evenly_and_keeps_its_ends(count: int, most: int) -> None:
    series = Series(most=most)
    for step in range(1, count + 1):
        series.add(step, float(step), float(step))
    buckets = series._points
    assert 4 <= len(buckets) <= most and series.count == count
    assert sum(point.weight for point in buckets) == count
    assert sum(point.total for point in buckets) == count * (count + 1) / 2
    assert len({point.weight for point in buckets[:-1]}) == 1
    points = series.points()
    assert (points[0].step, points[0].value, points[-1].step, points[-1].value) == (1, 1.0, count, float(count))
    assert [point.step for point in points] == sorted({point.step for point in points})
    assert (series.least, series.largest) == (1.0, float(count))


def test_fewer_points_can_be_asked_for() -> None:
    series = Series(most=100)
    for step in range(1, 91):
        series.add(step, float(step), float(step % 2))
    points = series.points(10)
    assert len(points) <= 12 and points[0].step == 1 and points[-1].step == 90
    assert {(point.low, point.high, point.value) for point in points[1:-1] if point.weight % 2 == 0} <= {
        (0.0, 1.0, 0.5)
    }


def test_a_series_that_was_cut_to_nothing_keeps_its_new_first_value() -> None:
    series = Series(most=4)
    for step in range(1, 21):
        series.add(step, 0.0, 9.0)
    series.cut(0)
    assert series.points() == [] and series.first is None
    for step in range(1, 5):
        series.add(step, 0.0, float(step))
    assert [point.value for point in (series.points()[0], series.points()[-1])] == [1.0, 4.0]
    assert [point.value for point in series.points(ends=False)] == [2.5]


def test_values_that_are_not_finite_are_counted_and_left_out_of_means() -> None:
    series = Series(most=4)
    for step, value in enumerate([1.0, math.nan, 3.0, math.inf, math.nan, math.nan, 2.0, 2.0], start=1):
        series.add(step, 0.0, value)
    assert (series.not_finite, series.first_not_finite) == (4, 2)
    values = [point.value for point in series._points]
    assert values[:2] == [1.0, 3.0] and math.isnan(values[2]) and values[3] == 2.0


def test_a_rate_is_weighted_by_its_seconds() -> None:
    series = Series(most=2)
    for step, (samples, seconds) in enumerate([(10.0, 1.0), (10.0, 9.0), (1.0, 1.0)], start=1):
        series.add(step, 0.0, samples, seconds)
    assert series._points[0].value == 2.0


def test_memory_is_bounded() -> None:
    summary, _ = listening()
    summary(started())
    for step in range(1, 6001):
        summary(stepped(step, logs={f"log {step}": 1.0, "always": 2.0}))
        summary(EvalDone(step=step, epoch=0, metrics={f"metric {step}": 1.0}))
        summary(CheckpointSaved(step=step, path=f"/runs/a-1/checkpoints/{step}", best=False))
        summary(Notice(step=step, text=f"{step} " + "x" * 5000))
        summary(seen(step))
    assert len(summary.loss._points) <= 2000 and len(summary.logs) == len(summary.evaluations) == MOST_SERIES
    assert len(summary.moments()) <= 200 and all(len(moment.text) <= MOST_TEXT for moment in summary.moments())
    assert summary.counts == {"notice": 6000, "resume": 0, "checkpoint": 6000, "evaluation": 6000}
    assert summary.moments_left_out == 18_001 - len(summary.moments())
    assert len(summary.workers) == 4096 and len(summary.names_left_out) <= MOST_SERIES
    assert sys.getsizeof(summary.loss._points) < 50_000


def test_routine_does_not_push_out_what_is_rare() -> None:
    summary, clock = listening()
    summary(started())
    for step in range(1, 1001):
        clock[0] += 1
        summary(CheckpointSaved(step=step, path="/runs/a-1/checkpoints/x", best=step == 500))
        if step == 500:
            summary(Notice(step=step, text="look"))
    kinds = [moment.kind for moment in summary.moments()]
    assert kinds.count("notice") == 1 and kinds[0] == "start" and kinds.index("notice") == 51
    assert summary.moments()[1].text == "checkpoints/x"


def test_a_repeated_notice_is_one_line() -> None:
    summary, _ = listening()
    summary(started())
    for step in range(5):
        summary(Notice(step=step, text="again"))
    assert [(moment.text, moment.times) for moment in summary.moments() if moment.kind == "notice"] == [("again", 5)]


def test_a_run_from_start_to_end() -> None:
    summary, clock = listening()
    summary(Preparing(step=0, what="indexing"))
    summary(started())
    for step in range(1, 11):
        summary(stepped(step, 1 / step, norm=2.0))
    clock[0] = BEGIN + 10
    summary(EvalDone(step=10, epoch=0, metrics={"loss": 0.5}))
    summary(EpochDone(step=10, epoch=0, loss=0.3))
    for memory in (300, 200):
        summary(seen(0, memory=memory))
    summary(seen(1, compute=7.0))
    clock[0] = BEGIN + 12
    summary(RunEnded(step=10, loss=0.3, metrics={"loss": 0.5}, reason="complete"))
    assert (summary.outcome, summary.wall_seconds, summary.final_loss) == ("complete", 12.0, 0.3)
    assert (summary.samples_per_second, summary.steps_per_second) == (8.0, 1.0)
    assert summary.peak_memory == {0: 300, 1: 100} and summary.bytes_sent == 2000 and summary.bytes_per_step == 200
    assert summary.shares["compute"] == pytest.approx(13 / 21) and sum(summary.shares.values()) == pytest.approx(1)
    assert summary.slowest == (1, pytest.approx(7 / 6.5))
    assert summary.config == {"clip": Setting(1.0, "script")}
    assert summary.rate.last is not None and summary.rate.last.value == 0.1
    assert summary.report_path == "/runs/a-1/report.html" and summary.how_to_resume == "Trainer(..., resume='a-1')"


def test_efficiency_is_the_speedup_for_each_worker() -> None:
    summary, clock = listening()
    summary(started(workers=4))
    for step in range(1, 11):
        summary(stepped(step))
    clock[0] = BEGIN + 20
    summary(RunEnded(step=10, loss=0.3, metrics={}, reason="complete"))
    assert summary.speedup is None and summary.efficiency is None
    summary.baseline = Baseline("a-0", 1, 2.0)
    assert summary.speedup == pytest.approx(80 / 20 / 2.0) and summary.efficiency == pytest.approx(0.5)
    summary.baseline = Baseline("a-0", 1, 0.0)
    assert summary.efficiency is None


def test_another_run_begins_anew_and_keeps_what_the_owner_set() -> None:
    summary, _ = listening()
    summary.environment = {"python": "3"}
    summary(started())
    summary(stepped(1))
    summary(Notice(step=1, text="old"))
    summary(RunFailed(step=1, error="bad", traceback="trace", worker=1))
    summary(started(run_id="b-2"))
    assert (summary.run_id, summary.outcome, summary.error, summary.loss.count) == ("b-2", "running", "", 0)
    assert [moment.kind for moment in summary.moments()] == ["start"] and summary.environment == {"python": "3"}


def test_a_resume_forgets_the_steps_that_are_done_again() -> None:
    summary, clock = listening()
    summary(started())
    for step in range(1, 8):
        summary(stepped(step, math.nan if step == 7 else 1.0))
    summary(seen(0))
    clock[0] = BEGIN + 8
    summary(RunFailed(step=7, error="bad", traceback="trace", worker=1))
    clock[0] = BEGIN + 1000
    summary(started(5))
    for step in range(6, 9):
        summary(stepped(step, 2.0, when=BEGIN + 1000 + step - 5))
    summary(seen(0))
    points = summary.loss.points()
    assert [point.step for point in points] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [point.value for point in points[4:]] == [1.0, 2.0, 2.0, 2.0]
    assert points[5].elapsed == 9.0 and summary.wall_seconds == 11.0
    assert (summary.outcome, summary.error, summary.counts["resume"]) == ("running", "", 1)
    assert summary.loss.not_finite == 0 and summary.bytes_sent == 2000
    assert [moment.kind for moment in summary.moments()] == ["start", "failure", "resume"]


def info(**changes: Any) -> RunInfo:
    facts: dict[str, Any] = {
        "id": "a-1", "name": "a", "status": "killed", "created": BEGIN, "updated": BEGIN + 11, "ended": None,
        "workers": 2, "batch_size": 8, "total_steps": 100, "steps_per_epoch": 10, "samples_per_epoch": 80, "step": 10,
        "loss": 0.1, "metrics": {"loss": 0.5}, "seconds": 11.0, "resumes": 0, "run_dir": "/runs/a-1",
        "script": "my train.py", "command": [], "host": "h", "user": "u", "pid": 1, "pid_started": 0.0,
        "config": {"clip": Setting(1.0, "flag")}, "environment": {"python": "3"}, "git_commit": "abc",
        "git_dirty": False, "version": "0.3", "error": None, "traceback": None, "bytes_sent": 2000, "tags": [],
    }  # fmt: skip
    return RunInfo(**(facts | changes))


def stored_steps() -> list[StepRow]:
    return [StepRow(n, BEGIN + n, n // 10, 1 / n, 8, 0.1, 2.0, {"x": 1.0}) for n in range(1, 11)]


def stored_workers() -> list[WorkerRow]:
    return [WorkerRow(n, 40, dict(seen(n).seconds), 1000, 100, 7, "h") for n in range(2)]


def test_a_killed_run_has_a_summary_from_its_rows() -> None:
    rows = [
        EventRow(BEGIN + 10.5, 10, "EvalDone", {"epoch": 0, "metrics": {"loss": 0.5}}),
        EventRow(BEGIN + 10.6, 10, "CheckpointSaved", {"path": "/runs/a-1/c/10", "best": True}),
        EventRow(BEGIN + 10.7, 10, "Notice", {"text": "look"}),
        EventRow(BEGIN + 10.8, 10, "FromTheFuture", {"text": "?"}),
        EventRow(BEGIN + 10.9, 10, "Notice", {"words": "not what a notice has"}),
    ]
    saved = [
        CheckpointRow(5, BEGIN + 5, "/runs/a-1/c/5", False),
        CheckpointRow(10, BEGIN + 10.6, "/runs/a-1/c/10", True),
    ]
    summary = Summary.from_store(info(), stored_steps(), rows, saved, stored_workers())
    assert (summary.outcome, summary.wall_seconds, summary.step, summary.run_id) == ("killed", 11.0, 10, "a-1")
    assert [moment.kind for moment in summary.moments()] == ["start", "checkpoint", "evaluation", "best", "notice"]
    assert summary.counts == {"notice": 1, "resume": 0, "checkpoint": 2, "evaluation": 1}
    assert summary.samples_per_second == 8.0 and summary.bytes_per_step == 200 and len(summary.workers) == 2
    assert summary.config["clip"].origin == "flag" and summary.environment == {"python": "3"}
    assert summary.resume_command == "shoal run 'my train.py' --resume /runs/a-1  # with the same arguments"
    assert summary.logs["x"].count == 10


def test_thinned_rows_give_the_same_speed() -> None:
    summary = Summary.from_store(info(), stored_steps()[::3], [], [], [])
    assert (summary.samples_per_second, summary.steps_per_second) == (8.0, 1.0)


def test_the_store_gives_the_summary_that_events_gave() -> None:
    live, _ = listening()
    start = started()
    live(start)
    rows = [EventRow(BEGIN, 0, "RunStarted", {k: getattr(start, k) for k in start.__struct_fields__ if k != "step"})]
    for step in range(1, 11):
        live(stepped(step, 1 / step, norm=2.0, logs={"x": 1.0}))
    stored = Summary.from_store(info(status="running"), stored_steps(), rows, [], [])
    for one, other in [(live.loss, stored.loss), (live.rate, stored.rate), (live.throughput, stored.throughput)]:
        assert [(p.step, p.elapsed, p.value) for p in one.points()] == [
            (p.step, p.elapsed, p.value) for p in other.points()
        ]
    assert live.run_dir == stored.run_dir and live.planned_workers == stored.planned_workers


def test_a_start_recorded_by_a_later_clock_still_comes_first() -> None:
    start = started()
    data = {name: getattr(start, name) for name in start.__struct_fields__ if name != "step"}
    summary = Summary.from_store(info(), stored_steps(), [EventRow(BEGIN + 5, 0, "RunStarted", data)], [], [])
    assert summary.loss.count == 10 and summary.started == BEGIN + 1


SETTLED: dict[str, Any] = {
    "collective": "shm",
    "reason": "one host",
    "hosts": [0, 0],
    "latency": 1e-5,
    "bandwidth": 1e9,
    "buckets": [10, 4],
}


def test_the_account_follows_workers_and_steps() -> None:
    summary, _ = listening()
    summary(started())
    assert not summary.account and summary.exchange.count == 0
    for step in range(1, 11):
        summary(stepped(step, traffic=Traffic(operations=1, exchange=0.004, exposed=0.001 * step)))
    summary(ExchangeSettled(step=3, **SETTLED))
    summary(seen(0))
    summary(seen(0))
    summary(seen(1))
    account = summary.account
    assert (account.total.bytes, account.since.bytes, account.workers, account.steps) == (2000, 2000, 2, 10)
    assert account.seconds == 18.0, "of steps: neither evaluation nor checkpoints"
    assert account.settled is not None and account.settled.buckets == [10, 4]
    assert [point.value for point in summary.exchange.points()] == pytest.approx([4.0] * 10)
    assert [point.value for point in summary.exposed.points()] == pytest.approx(list(range(1, 11)))
    assert [moment.kind for moment in summary.moments()] == ["start", "exchange"]


def test_bytes_per_step_leave_out_what_was_sent_once_to_measure() -> None:
    summary, _ = listening()
    summary(started())
    summary(stepped(10))
    flows = [Flow("gradient", "none", "memory", 1000, 4), Flow("measurement", "none", "memory", 7000, 9)]
    summary(msgspec.structs.replace(seen(0), traffic=Traffic(flows, 10, 3.0, 1.5)))
    assert summary.bytes_sent == 8000 and summary.bytes_per_step == 100


def test_a_resume_adds_up_what_was_sent() -> None:
    summary, _ = listening()
    summary(started())
    for step in range(1, 8):
        summary(stepped(step, traffic=Traffic(exchange=0.001, exposed=0.001)))
    summary(ExchangeSettled(step=3, **SETTLED))
    summary(seen(0))
    summary(seen(1))
    summary(RunFailed(step=7, error="bad", worker=1))
    summary(started(5))
    assert summary.settled is None and summary.account.total.bytes == 2000 and summary.account.since.bytes == 0
    assert [point.step for point in summary.exchange.points()] == [1, 2, 3, 4, 5]
    summary(stepped(6, traffic=Traffic(exchange=0.002, exposed=0.001)))
    summary(seen(0, sent=500))
    account = summary.account
    assert (account.total.bytes, account.total.exchange, account.since.bytes) == (2500, 9.0, 500)
    assert (account.steps, account.workers) == (1, 1) and summary.bytes_sent == 2500


def test_the_account_of_a_stored_run() -> None:
    sent = Traffic([Flow("gradient", "none", "memory", 1000, 4)], operations=10, exchange=3.0, exposed=1.5)
    total = Traffic([Flow("gradient", "none", "memory", 9000, 44)], operations=90, exchange=30.0, exposed=15.0)
    workers = [WorkerRow(n, 40, dict(seen(n).seconds), 1000, 100, 7, "h", sent) for n in range(2)]
    steps = [StepRow(n, BEGIN + n, 0, 1.0, 8, 0.1, None, {}, 100, 4, 1, 0.004, 0.001) for n in range(1, 11)]
    rows = [EventRow(BEGIN + 3.5, 3, "ExchangeSettled", SETTLED)]
    summary = Summary.from_store(info(bytes_sent=9000, traffic=total), steps, rows, [], workers)
    account = summary.account
    assert (account.total, account.since.bytes, account.steps) == (total, 2000, 10)
    assert summary.bytes_sent == 9000 and account.settled is not None and account.settled.step == 3
    assert [point.value for point in summary.exposed.points()] == pytest.approx([1.0] * 10)


def test_a_run_recorded_before_has_bytes_and_no_account() -> None:
    summary = Summary.from_store(info(), stored_steps(), [], [], stored_workers())
    assert not summary.account and summary.exchange.count == 0
    assert summary.sent == {0: 1000, 1: 1000} and summary.bytes_sent == 2000


def test_a_run_without_rows_has_a_summary() -> None:
    summary = Summary.from_store(info(step=0, seconds=0.0, loss=None, script="", bytes_sent=0), [], [], [], [])
    assert summary.samples_per_second is None and summary.shares == {} and summary.bytes_per_step is None
    assert summary.how_to_resume == "Trainer(..., resume='/runs/a-1')"


def test_settings_in_either_form() -> None:
    assert as_setting({"value": 1, "origin": "flag"}) == Setting(1, "flag")
    assert as_setting(Setting(1, "default")) == Setting(1, "default")
    assert as_setting({"value": 1}) == Setting({"value": 1}, "script")


def test_a_long_text_keeps_its_beginning_and_more_of_its_end() -> None:
    text = shortened("a" * 100 + "b" * 100, 40)
    assert text.startswith("a" * 10 + "\n…") and text.endswith("…\n" + "b" * 30) and "160 characters" in text


def test_what_servers_told_last_is_kept_until_the_next_start() -> None:
    summary, _ = listening()
    summary(started())
    seen = ServersSeen(step=5, servers=[ServerFacts(number=0, shards=1, bytes=2)], staleness=[3])
    summary(msgspec.structs.replace(seen, replaced=1))
    summary(seen)
    assert summary.servers is not None and summary.servers.replaced == 0 and summary.servers.staleness == [3]
    summary(started(5))
    assert summary.servers is None


def test_a_stored_run_has_its_servers() -> None:
    seen = ServersSeen(step=10, time=BEGIN + 10, servers=[ServerFacts(number=0, shards=1, bytes=2)], staleness=[3])
    data = {key: value for key, value in msgspec.to_builtins(seen).items() if key not in ("type", "step", "time")}
    rows = [EventRow(BEGIN + 10, 10, "ServersSeen", data)]
    summary = Summary.from_store(info(), stored_steps(), rows, [], [])
    assert summary.servers == seen
