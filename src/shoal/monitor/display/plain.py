"""Progress as plain lines: at the start, every few seconds, at each evaluation, at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TextIO

from shoal.core.events import (
    AnyEvent,
    EvalDone,
    ExchangeSettled,
    Preparing,
    RunEnded,
    RunStarted,
    ServersSeen,
    StepDone,
    WorkerSeen,
)
from shoal.monitor.display import phrases
from shoal.monitor.display.outlet import pass_on, put
from shoal.monitor.display.tally import WorkerTally
from shoal.monitor.wording import one_line

_SECONDS = 5.0
_PREPARING_SECONDS = 2.0


class QuietView:
    """Warnings alone, and what workers print."""

    tells_all = False

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def event(self, event: AnyEvent) -> None:
        return None

    def tick(self) -> None:
        return None

    def say(self, text: str) -> None:
        put(self._stream or sys.stderr, f"shoal: {text}\n")

    def output(self, worker: int, stream: str, text: str) -> None:
        pass_on(stream, text)

    def close(self) -> None:
        return None


class PlainView(QuietView):
    """A line every five seconds; `verbose` adds one per worker to it, and one for the servers if there are any."""

    def __init__(self, stream: TextIO | None, *, verbose: bool, clock: Callable[[], float]) -> None:
        super().__init__(stream)
        self._verbose = verbose
        self._clock = clock
        self._printed = self._began = clock()
        self._total = self._step = self._samples = 0
        self._workers: dict[int, WorkerTally] = {}
        self._servers: ServersSeen | None = None
        self._preparing: Preparing | None = None
        self._prepare_at = 0.0
        self._told_of_it = False

    def event(self, event: AnyEvent) -> None:
        if isinstance(event, StepDone):
            self._on_step(event)
        elif isinstance(event, WorkerSeen):
            if self._verbose:
                self._workers.setdefault(event.worker, WorkerTally(self._began)).see(event, self._clock())
        elif isinstance(event, ServersSeen):
            self._servers = event
        elif isinstance(event, RunStarted):
            self._on_start(event)
        elif isinstance(event, EvalDone):
            self.say(phrases.evaluated(event, self._total))
        elif isinstance(event, ExchangeSettled):
            self.say(phrases.settled(event))
        elif isinstance(event, Preparing):
            self._on_preparing(event)
        elif isinstance(event, RunEnded):
            self.say(phrases.ended(event, self._total))

    def tick(self) -> None:
        if self._preparing is not None and self._clock() >= self._prepare_at:
            self._say_preparing(self._preparing)

    def _on_start(self, event: RunStarted) -> None:
        self._preparing = None
        self._total, self._step, self._samples = event.total_steps, event.step, 0
        self._workers, self._servers = {}, None
        self._printed = self._began = self._clock()
        self.say(phrases.started(event))

    def _on_step(self, event: StepDone) -> None:
        self._preparing = None
        self._samples += event.samples
        now = self._clock()
        passed = now - self._printed
        if passed < _SECONDS:
            return
        rate = self._samples / passed
        left = (self._total - event.step) * passed / max(1, event.step - self._step)
        eta = f"  {left:.0f} s left" if self._total > 0 else ""
        self.say(
            f"step {phrases.of(event.step, self._total)}  epoch {event.epoch + 1}  loss {event.loss:.4g}  {rate:.0f} "
            f"samples/s{eta}"
        )
        for number, worker in sorted(self._workers.items()):
            self.say(phrases.joined(phrases.worker_items(number, worker)))
        if self._verbose and self._servers is not None:
            self.say(phrases.served(self._servers))
        self._printed, self._samples, self._step = now, 0, event.step

    def _on_preparing(self, event: Preparing) -> None:
        """Say nothing of what is done in a moment."""
        if self._preparing is None or self._preparing.what != event.what:
            self._prepare_at = self._clock() + _PREPARING_SECONDS
            self._told_of_it = False
        self._preparing = event
        if 0 < event.total <= event.done:
            if self._told_of_it:
                self._say_preparing(event)
            self._preparing = None
        else:
            self.tick()

    def _say_preparing(self, event: Preparing) -> None:
        self._told_of_it = True
        self._prepare_at = self._clock() + _SECONDS
        self.say(f"{one_line(event.what)} {phrases.prepared(event)}".rstrip())
