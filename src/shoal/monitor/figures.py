"""The figures of a run that tracking services get, from its events: thinned to a bounded rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from shoal.core.events import AnyEvent, EvalDone, RunStarted, ServersSeen, StepDone, WorkerSeen
from shoal.monitor.servers import mean_staleness

FIRST_STEPS = 100
"""So many steps are logged one by one, however fast they are."""
STEP_SECONDS = 0.1
"""After those, the mean of the steps of so many seconds is one point."""
SPEED_SECONDS = 1.0
"""Samples per second are averaged over at least so long."""
WORKER_SECONDS = 10.0
"""Between two points of one worker, and of the servers."""


class Point(msgspec.Struct, frozen=True):
    """Figures of one step, by name (`train/loss`). `time` in seconds since 1970."""

    step: int
    time: float
    values: dict[str, float]


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A nested mapping as pairs whose names have dots: {"a": {"b": 1}} is a.b = 1."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def facts(started: RunStarted) -> dict[str, Any]:
    """The configuration of a run to be logged, with what every run has."""
    known = {
        "run_id": started.run_id,
        "workers": started.workers,
        "batch_size": started.batch_size,
        "total_steps": started.total_steps,
        "samples_per_epoch": started.samples_per_epoch,
        "parameters": started.parameters,
        "optimizer_class": ", ".join(started.optimizers),
    }
    return {**known, **dict(flat(started.config))}


class Speed:
    """Samples per second, averaged over `SPEED_SECONDS` and more."""

    def __init__(self) -> None:
        self.value: float | None = None
        """The newest average, None before there is one."""
        self._since: float | None = None
        self._samples = 0

    def add(self, done: StepDone) -> float | None:
        """Count a step; the new average if one is due."""
        now = done.time
        if self._since is None or now < self._since:
            self._since, self._samples = now, 0  # the samples of the first step were computed before it
            return None
        self._samples += done.samples
        return self._average(now) if now - self._since >= SPEED_SECONDS else None

    def rest(self, now: float) -> float | None:
        """At the end of a run too short for an average: what there is."""
        return self._average(now) if self.value is None and self._since is not None and now > self._since else None

    def _average(self, now: float) -> float:
        assert self._since is not None
        self.value = self._samples / (now - self._since)
        self._since, self._samples = now, 0
        return self.value


class Figures:
    """The points of one run, from its events, in bounded memory and at a bounded rate. For one thread."""

    def __init__(self) -> None:
        self._steps = 0
        self._step, self._now = 0, 0.0
        self._last: StepDone | None = None
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._logged = 0.0
        self._speed = Speed()
        self._new_speed: float | None = None
        self._workers: dict[int, WorkerSeen] = {}
        self._workers_logged: dict[int, float] = {}
        self._servers: ServersSeen | None = None
        self._servers_logged = -WORKER_SECONDS

    def take(self, event: AnyEvent) -> list[Point]:
        """The points that are due with this event."""
        if isinstance(event, StepDone):
            return self._take_step(event)
        if isinstance(event, WorkerSeen):
            return self._take_worker(event)
        if isinstance(event, ServersSeen):
            return self._take_servers(event)
        if isinstance(event, EvalDone):
            return [Point(event.step, event.time, {f"eval/{name}": value for name, value in event.metrics.items()})]
        return []

    def rest(self) -> list[Point]:
        """What was held back, at the end of the run."""
        points = []
        speed = self._speed.rest(self._now)
        if speed is not None:
            points.append(Point(self._step, self._now, {"train/samples_per_second": speed}))
        if self._last is not None:
            points.append(self._point(self._last, self._now))
        points += [self._worker_point(seen) for seen in self._workers.values()]
        points += [] if self._servers is None else [_servers_point(self._servers)]
        self._workers, self._servers = {}, None
        return points

    def _take_step(self, done: StepDone) -> list[Point]:
        now = done.time
        self._step, self._now = done.step, now
        self._steps += 1
        self._last = done
        values = {"loss": done.loss}
        if done.norm is not None:
            values["norm"] = done.norm
        if done.traffic is not None:
            values |= {"exchange_seconds": done.traffic.exchange, "exposed_seconds": done.traffic.exposed}
        self._add(values | done.logs)
        self._new_speed = self._speed.add(done) or self._new_speed
        # a clock that was set back must not silence the run
        if self._steps > FIRST_STEPS and 0 <= now - self._logged < STEP_SECONDS:
            return []
        return [self._point(done, now)]

    def _add(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] = self._counts.get(name, 0) + 1

    def _point(self, done: StepDone, now: float) -> Point:
        values = {f"train/{name}": total / self._counts[name] for name, total in self._sums.items()}
        for group, rate in enumerate(done.rates):
            values["train/learning_rate" if group == 0 else f"train/learning_rate_{group}"] = rate
        if self._new_speed is not None:
            values["train/samples_per_second"] = self._new_speed
        self._sums, self._counts, self._last, self._new_speed, self._logged = {}, {}, None, None, now
        return Point(done.step, now, values)

    def _take_worker(self, seen: WorkerSeen) -> list[Point]:
        now = seen.time
        if 0 <= now - self._workers_logged.get(seen.worker, -WORKER_SECONDS) < WORKER_SECONDS:
            self._workers[seen.worker] = seen
            return []
        self._workers.pop(seen.worker, None)
        self._workers_logged[seen.worker] = now
        return [self._worker_point(seen)]

    def _worker_point(self, seen: WorkerSeen) -> Point:
        total = sum(seen.seconds.values())
        values = {part: seconds / total for part, seconds in seen.seconds.items()} if total > 0 else {}
        values |= {"memory_bytes": float(seen.memory), "bytes_sent": float(seen.bytes_sent)}
        return Point(seen.step, seen.time, {f"worker-{seen.worker}/{name}": value for name, value in values.items()})

    def _take_servers(self, seen: ServersSeen) -> list[Point]:
        if 0 <= seen.time - self._servers_logged < WORKER_SECONDS:
            self._servers = seen
            return []
        self._servers, self._servers_logged = None, seen.time
        return [_servers_point(seen)]


def _servers_point(seen: ServersSeen) -> Point:
    mean = mean_staleness(seen)
    values = {"servers/replaced": float(seen.replaced)} | ({} if mean is None else {"servers/mean_staleness": mean})
    for facts in seen.servers:
        told = {"pushes": facts.pushes, "apply_seconds": facts.seconds, "bytes_received": facts.received}
        values |= {f"server-{facts.number}/{name}": float(value) for name, value in told.items()}
    return Point(seen.step, seen.time, values)
