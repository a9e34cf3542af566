"""Progress as plain lines on stderr: at the start, every few seconds, at each evaluation, at the end."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from shoal.core.events import AnyEvent, EvalDone, Notice, RunEnded, RunStarted, StepDone

_SECONDS = 5.0


class Progress:
    """Listens to events and prints some of them."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._total = 0
        self._printed = time.monotonic()
        self._samples = 0
        self._step = 0
        self._warned: dict[str, int] = {}

    def __call__(self, event: AnyEvent) -> None:
        if isinstance(event, StepDone):
            self._on_step(event)
        elif isinstance(event, RunStarted):
            self._on_start(event)
        elif isinstance(event, EvalDone):
            figures = "  ".join(f"{name} {value:.4g}" for name, value in event.metrics.items())
            self._say(f"step {event.step}/{self._total}  epoch {event.epoch + 1}  evaluation: {figures}")
        elif isinstance(event, Notice):
            self.warn(event.text)
        elif isinstance(event, RunEnded):
            self._say(f"{event.reason} at step {event.step}/{self._total}  loss {event.loss:.4g}")

    def warn(self, text: str) -> None:
        """Print something a person should know; the same text once."""
        self._warned[text] = self._warned.get(text, 0) + 1
        if self._warned[text] == 1:
            self._say(text.removeprefix("shoal: "))

    def _on_start(self, event: RunStarted) -> None:
        self._total, self._step, self._samples = event.total_steps, event.step, 0
        self._printed = time.monotonic()
        workers = "1 worker" if event.workers == 1 else f"{event.workers} workers"
        begins = f", from step {event.step}" if event.step else ""
        where = f" in {event.run_dir}" if event.run_dir else ""
        self._say(f"{event.run_id or 'run'}: {event.total_steps} steps on {workers}{begins}{where}")

    def _on_step(self, event: StepDone) -> None:
        self._samples += event.samples
        now = time.monotonic()
        if now - self._printed < _SECONDS:
            return
        rate = self._samples / (now - self._printed)
        left = (self._total - event.step) * (now - self._printed) / max(1, event.step - self._step)
        self._say(
            f"step {event.step}/{self._total}  epoch {event.epoch + 1}  loss {event.loss:.4g}  {rate:.0f} "
            f"samples/s  {left:.0f} s left"
        )
        self._printed, self._samples, self._step = now, 0, event.step

    def _say(self, text: str) -> None:
        print(f"shoal: {text}", file=self._stream or sys.stderr, flush=True)
