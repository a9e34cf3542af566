"""What a report needs to know of a run, collected from its events in bounded memory, or from the run store."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal.core import events as ev
from shoal.core.settings import SCRIPT, Setting
from shoal.core.traffic import Traffic, together
from shoal.monitor.report.convergence import Cost
from shoal.monitor.report.moments import Kept, Moment
from shoal.monitor.report.replay import replayed
from shoal.monitor.report.series import Series
from shoal.monitor.resuming import in_python, stored_resume_command
from shoal.monitor.traffic import Account, measured, settled_words, step_seconds
from shoal.monitor.wording import counted
from shoal.store.values import COMPLETE, FAILED, RUNNING, CheckpointRow, EventRow, RunInfo, StepRow, WorkerRow

MOST_SERIES = 24
"""Of logs, and of metrics; what has other names is counted, not kept."""
MOST_MOMENTS = 200
MOST_WORKERS = 4_096
MOST_TEXT = 500
"""Characters of a notice that are kept."""
MOST_TRACEBACK = 100_000
_ROUTINE = ("evaluation", "checkpoint", "best")
PARTS = ("compute", "exchange", "data", "eval", "checkpoint", "idle")


class Baseline(msgspec.Struct, frozen=True):
    """A run of the same name on fewer workers, one as a rule, to compare with."""

    run_id: str
    workers: int
    samples_per_second: float
    """Over the whole run, from start to end."""


class Summary:
    """A listener: give it events in order, from one thread; read it at any time from the same thread.

    A `RunStarted` of another run begins anew; one of the same run is a resume. The owner may set what events do not
    tell: `environment`, `git_commit`, `baseline`, `cost`, `resume_command`, `version`; they stay until it changes them.
    """

    def __init__(self) -> None:
        self.environment: dict[str, Any] = {}
        self.git_commit: str | None = None
        self.baseline: Baseline | None = None
        self.cost: Cost | None = None
        self.resume_command: str | None = None
        self.version = ""
        self.recorded = True
        """Whether the run store has it."""
        self._reset()

    def _reset(self) -> None:
        self.run_id = self.name = self.run_dir = ""
        self.config: dict[str, Setting] = {}
        self.planned_workers = 0
        self.total_steps = self.steps_per_epoch = self.samples_per_epoch = self.batch_size = 0
        self.parameters = 0
        self.optimizers: list[str] = []
        self.outcome = RUNNING
        self.error = self.traceback = ""
        self.failed_worker: int | None = None
        self.final_loss: float | None = None
        self.metrics: dict[str, float] = {}
        self.step = self.epoch = self.start_step = 0
        self.started: float | None = None
        self.resumed: float | None = None
        self.ended: float | None = None
        self.stored_seconds = self._seconds_before = 0.0
        self.stored_bytes = self._bytes_before = 0
        self.sent: dict[int, int] = {}
        """Bytes by worker, since the last start."""
        self._stored_traffic = self._traffic_before = Traffic()
        self.settled: ev.ExchangeSettled | None = None
        self.servers: ev.ServersSeen | None = None
        self.exchange, self.exposed = Series(), Series()
        """Milliseconds of worker 0 in each step."""
        self.loss, self.rate, self.norm, self.throughput = Series(), Series(), Series(), Series()
        self.logs: dict[str, Series] = {}
        self.evaluations: dict[str, Series] = {}
        self.names_left_out: set[str] = set()
        self.counts = {"notice": 0, "resume": 0, "checkpoint": 0, "evaluation": 0}
        self._routine, self._rare = Kept(MOST_MOMENTS // 2), Kept(MOST_MOMENTS // 2)
        self.workers: dict[int, ev.WorkerSeen] = {}
        self.peak_memory: dict[int, int] = {}
        self.last_checkpoint: str | None = None
        self._timed_steps, self._timed_samples, self._timed_seconds = 0, 0, 0.0
        self._first_step = self._arrived = 0
        self._before: tuple[int, float] | None = None

    def __call__(self, event: ev.AnyEvent) -> None:
        when = event.time
        if isinstance(event, ev.StepDone):
            self._step_done(event, when)
        elif isinstance(event, ev.WorkerSeen):
            self._worker_seen(event)
        elif isinstance(event, ev.ServersSeen):
            self.servers = event
        elif isinstance(event, ev.RunStarted):
            self._started(event, when)
        elif isinstance(event, ev.EvalDone):
            self._evaluated(event, when)
        elif isinstance(event, ev.CheckpointSaved):
            kind = "best" if event.best else "checkpoint"
            self._count("checkpoint", event.step, when, self.in_folder(event.path), shown_as=kind)
            self.last_checkpoint = event.path
        elif isinstance(event, ev.ExchangeSettled):
            self.settled = event
            self._keep(Moment(when, event.step, "exchange", settled_words(event)[:MOST_TEXT]))
        elif isinstance(event, ev.Notice):
            self._count("notice", event.step, when, event.text)
        elif isinstance(event, ev.RunFailed):
            self._failed(event, when)
        elif isinstance(event, ev.RunEnded):
            self._ended(event, when)

    def _started(self, event: ev.RunStarted, when: float) -> None:
        again = bool(self.run_id) and event.run_id == self.run_id
        if again:
            self._seconds_before = self.seconds_until(self.ended or self._last_heard())
            self._bytes_before += sum(self.sent.values())
            self._traffic_before = together([self._traffic_before, self._traffic_since_start()])
            self._forget_after(event.step)
        else:
            self._reset()
            self.started, self._first_step = when, event.step
        self.run_id, self.name, self.run_dir = event.run_id, event.name, event.run_dir or ""
        self.config = {key: as_setting(value) for key, value in event.config.items()}
        self.planned_workers, self.total_steps = event.workers, event.total_steps
        self.steps_per_epoch, self.samples_per_epoch = event.steps_per_epoch, event.samples_per_epoch
        self.batch_size, self.parameters, self.optimizers = event.batch_size, event.parameters, list(event.optimizers)
        self.step = self.start_step = event.step
        self.resumed = when
        self.outcome, self.error, self.traceback, self.failed_worker, self.ended = RUNNING, "", "", None, None
        self._before = None
        self._timed_steps, self._timed_samples, self._timed_seconds = 0, 0, 0.0
        self.workers.clear()
        self.sent.clear()
        self.settled = self.servers = None
        if again or event.step:
            self._count("resume", event.step, when, f"went on with {counted(event.workers, 'worker')}")
        else:
            self._keep(Moment(when, event.step, "start", f"started with {counted(event.workers, 'worker')}"))

    def _forget_after(self, step: int) -> None:
        for series in (
            self.loss,
            self.rate,
            self.norm,
            self.throughput,
            self.exchange,
            self.exposed,
            *self.logs.values(),
            *self.evaluations.values(),
        ):
            series.cut(step)

    def _step_done(self, event: ev.StepDone, when: float) -> None:
        elapsed = self.seconds_until(when)
        self.step, self.epoch = event.step, event.epoch
        self.loss.add(event.step, elapsed, event.loss)
        if event.rates:
            self.rate.add(event.step, elapsed, event.rates[0])
        if event.norm is not None:
            self.norm.add(event.step, elapsed, event.norm)
        for name, value in event.logs.items():
            self._add_named(self.logs, name, event.step, elapsed, value)
        if event.traffic is not None:
            self.exchange.add(event.step, elapsed, 1e3 * event.traffic.exchange)
            self.exposed.add(event.step, elapsed, 1e3 * event.traffic.exposed)
        self._time_step(event, when, elapsed)

    def _time_step(self, event: ev.StepDone, when: float, elapsed: float) -> None:
        """Rows from the store may leave steps out: each row then stands for those since the row before."""
        if self._before is not None and when > self._before[1]:
            steps, seconds = event.step - self._before[0], when - self._before[1]
            self._timed_steps += steps
            self._timed_samples += steps * event.samples
            self._timed_seconds += seconds
            self.throughput.add(event.step, elapsed, steps * event.samples, seconds)
        if self._before is None or when > self._before[1]:
            self._before = (event.step, when)

    def _add_named(self, into: dict[str, Series], name: str, step: int, elapsed: float, value: float) -> None:
        series = into.get(name)
        if series is None:
            if len(into) >= MOST_SERIES:
                if len(self.names_left_out) < MOST_SERIES:
                    self.names_left_out.add(name)
                return
            series = into[name] = Series()
        series.add(step, elapsed, value)

    def _evaluated(self, event: ev.EvalDone, when: float) -> None:
        self.metrics = dict(event.metrics)
        for name, value in event.metrics.items():
            self._add_named(self.evaluations, name, event.step, self.seconds_until(when), value)
        figures = ", ".join(f"{name} {value:.4g}" for name, value in event.metrics.items())
        self._count("evaluation", event.step, when, figures)

    def _worker_seen(self, event: ev.WorkerSeen) -> None:
        if event.worker in self.workers or len(self.workers) < MOST_WORKERS:
            self.workers[event.worker] = event
            self.sent[event.worker] = event.bytes_sent
            self.peak_memory[event.worker] = max(event.memory, self.peak_memory.get(event.worker, 0))

    def _failed(self, event: ev.RunFailed, when: float) -> None:
        self.outcome, self.ended, self.failed_worker = FAILED, when, event.worker
        self.error, self.traceback = event.error, shortened(event.traceback, MOST_TRACEBACK)
        self._keep(Moment(when, event.step, "failure", event.error[:MOST_TEXT]))

    def _ended(self, event: ev.RunEnded, when: float) -> None:
        self.outcome, self.ended, self.step = event.reason, when, event.step
        self.final_loss = event.loss
        self.metrics = dict(event.metrics) or self.metrics
        self._keep(Moment(when, event.step, "end", event.reason))

    def _count(self, counted: str, step: int, when: float, text: str, shown_as: str = "") -> None:
        self.counts[counted] += 1
        self._keep(Moment(when, step, shown_as or counted, text[:MOST_TEXT]))

    def _keep(self, moment: Moment) -> None:
        """Evaluations and checkpoints apart from the rest, so that they do not push it out. A notice that was made
        before is counted there."""
        moment.order = self._arrived = self._arrived + 1
        if moment.kind in _ROUTINE:
            self._routine.add(moment)
            return
        for kept in self._rare:
            if moment.kind == kept.kind == "notice" and kept.text == moment.text:
                kept.times += 1
                return
        self._rare.add(moment)

    def moments(self) -> list[Moment]:
        """What is worth listing, in the order in which it happened."""
        return list(heapq.merge(self._rare, self._routine, key=lambda moment: moment.order))

    @property
    def moments_left_out(self) -> int:
        return self._rare.left_out + self._routine.left_out

    def in_folder(self, path: str) -> str:
        """A path as seen from the run's folder."""
        return path.removeprefix(f"{self.run_dir}/") if self.run_dir else path

    def seconds_until(self, when: float) -> float:
        """Spent by this run at `when`, without the time between its starts."""
        return self._seconds_before + (max(0.0, when - self.resumed) if self.resumed is not None else 0.0)

    def _last_heard(self) -> float:
        return self._before[1] if self._before else self.resumed or 0.0

    @property
    def wall_seconds(self) -> float:
        """Of all starts together; up to the last step where the run did not say that it ended."""
        return self.stored_seconds or self.seconds_until(self.ended or self._last_heard())

    @property
    def samples_per_second(self) -> float | None:
        """Of the last start, from its first step to its last. None with fewer than two steps."""
        return self._timed_samples / self._timed_seconds if self._timed_seconds > 0 else None

    @property
    def steps_per_second(self) -> float | None:
        return self._timed_steps / self._timed_seconds if self._timed_seconds > 0 else None

    @property
    def overall_samples_per_second(self) -> float | None:
        """From start to end, start-up and evaluations included. None without a step."""
        steps = self.step if self.stored_seconds else self.step - self._first_step
        return steps * self.batch_size / self.wall_seconds if steps > 0 and self.wall_seconds > 0 else None

    @property
    def shares(self) -> dict[str, float]:
        """Of the workers' time since the last start, by what it went into; they add up to 1. Empty if not known."""
        sums = {part: sum(worker.seconds.get(part, 0.0) for worker in self.workers.values()) for part in PARTS}
        total = sum(sums.values())
        return {part: value / total for part, value in sums.items()} if total > 0 else {}

    @property
    def bytes_sent(self) -> int:
        return max(self.stored_bytes, self._bytes_before + sum(self.sent.values()))

    def _traffic_since_start(self) -> Traffic:
        return together([worker.traffic for worker in self.workers.values()])

    @property
    def account(self) -> Account:
        """Of the traffic. Empty for one worker, and where nothing is known of it."""
        since = self._traffic_since_start()
        return Account(
            total=max(self._stored_traffic, together([self._traffic_before, since]), key=lambda total: total.bytes),
            since=since,
            workers=len(self.workers),
            steps=self.step - self.start_step,
            seconds=sum(step_seconds(worker.seconds) for worker in self.workers.values()),
            waited=sum(worker.seconds.get("exchange", 0.0) for worker in self.workers.values()),
            settled=self.settled,
        )

    @property
    def bytes_per_step(self) -> float | None:
        """Of all workers since the last start, without what was sent once to measure."""
        steps = self.step - self.start_step
        lasting = sum(self.sent.values()) - measured(self._traffic_since_start())
        return lasting / steps if steps > 0 else None

    @property
    def slowest(self) -> tuple[int, float] | None:
        """The worker that computed longest, and its time divided by the mean. None with fewer than two workers."""
        times = {number: worker.seconds.get("compute", 0.0) for number, worker in self.workers.items()}
        mean = sum(times.values()) / len(times) if times else 0.0
        if len(times) < 2 or mean <= 0:
            return None
        number = max(times, key=lambda worker: times[worker])
        return number, times[number] / mean

    @property
    def speedup(self) -> float | None:
        """Against the baseline, both over the whole run; None where one of them is not known."""
        mine = self.overall_samples_per_second
        if mine is None or self.baseline is None or not self.baseline.samples_per_second > 0:
            return None
        return mine / self.baseline.samples_per_second

    @property
    def efficiency(self) -> float | None:
        """The speedup divided by how many times as many workers the run had."""
        if self.speedup is None or self.baseline is None or not self.planned_workers:
            return None
        return self.speedup * self.baseline.workers / self.planned_workers

    @property
    def report_path(self) -> str:
        return str(Path(self.run_dir) / "report.html") if self.run_dir else ""

    @property
    def how_to_resume(self) -> str:
        return self.resume_command or (in_python(self.config, self.run_id) if self.run_id else "")

    @property
    def has_checkpoint(self) -> bool:
        return bool(self.counts["checkpoint"] or self.start_step)

    @classmethod
    def from_store(
        cls,
        info: RunInfo,
        steps: Sequence[StepRow],
        events: Sequence[EventRow],
        checkpoints: Sequence[CheckpointRow],
        workers: Sequence[WorkerRow],
    ) -> Summary:
        """The same from stored rows, of a run in whatever state. Steps may have been thinned out. Rows of a kind that
        this version does not know are left out."""
        summary = cls()
        for event in replayed(info, steps, events, checkpoints):
            summary(event)
        for row in workers:
            seen = {name: getattr(row, name) for name in row.__struct_fields__ if name != "bytes_sent"}
            summary(ev.WorkerSeen(step=info.step, time=info.updated, **seen))
            summary.sent[row.worker] = row.bytes_sent  # known also of runs that kept no account
        summary._correct(info)
        return summary

    def _correct(self, info: RunInfo) -> None:
        """What the store knows better than the events it kept."""
        self.outcome, self.step, self.config = info.status, info.step, dict(info.config) or self.config
        self.ended = info.ended or (None if info.status == RUNNING else info.updated)
        self.error, self.traceback = info.error or "", shortened(info.traceback or "", MOST_TRACEBACK)
        self.stored_seconds, self.stored_bytes, self._stored_traffic = info.seconds, info.bytes_sent, info.traffic
        self.metrics = dict(info.metrics) or self.metrics
        self.final_loss = info.loss if info.status == COMPLETE else self.final_loss
        self.counts["resume"] = max(self.counts["resume"], info.resumes)
        self.environment, self.git_commit, self.version = dict(info.environment), info.git_commit, info.version
        self.resume_command = stored_resume_command(info)


def as_setting(value: Any) -> Setting:
    """A value of the configuration with its origin; a bare value is the script's."""
    if isinstance(value, Setting):
        return value
    if isinstance(value, Mapping) and set(value) == {"value", "origin"}:
        return Setting(value["value"], str(value["origin"]))
    return Setting(value, SCRIPT)


def shortened(text: str, most: int) -> str:
    """The beginning and the end of a text that is too long: a traceback says most at its end."""
    if len(text) <= most:
        return text
    head = most // 4
    return f"{text[:head]}\n… {len(text) - most:,} characters left out …\n{text[head - most :]}"
