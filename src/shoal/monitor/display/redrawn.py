"""What displays that are drawn over and over have in common: when to draw, and when to leave a state for good."""

from __future__ import annotations

import abc
from collections.abc import Callable

from shoal.core.events import AnyEvent, RunEnded, RunFailed, RunStarted
from shoal.monitor.display import phrases
from shoal.monitor.display.tally import Tally


class RedrawnView(abc.ABC):
    """Draws at most once in `seconds_apart`, when something happens or time passes; runs no thread of its own."""

    tells_all = False
    seconds_apart = 0.125

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tally = Tally(clock)
        self._shown = False
        self._drawn = 0.0

    def event(self, event: AnyEvent) -> None:
        begins = isinstance(event, RunStarted)
        if begins and self._shown and self._tally.run is not None:
            self._finish()
        self._tally.see(event)
        if isinstance(event, RunEnded):
            self._finish()
            self.say(phrases.ended(event, self._tally.total))
        elif isinstance(event, RunFailed):
            self._finish()
        elif self._tally.end is None:
            self._show(at_once=begins)

    def tick(self) -> None:
        if self._shown:
            self._show(at_once=False)

    def close(self) -> None:
        self._finish()

    def _show(self, *, at_once: bool) -> None:
        now = self._clock()
        if not self._shown:
            self._shown = at_once = True
            self._begin()
        if at_once or now - self._drawn >= self.seconds_apart:
            self._drawn = now
            self._draw()

    def _finish(self) -> None:
        if not self._shown:
            return
        self._shown = False
        keep = self._tally.run is not None
        try:
            if keep:
                self._draw()
            else:
                self._tally.preparing = None
        finally:
            self._leave(keep=keep)

    @abc.abstractmethod
    def say(self, text: str) -> None: ...

    @abc.abstractmethod
    def output(self, worker: int, stream: str, text: str) -> None: ...

    @abc.abstractmethod
    def _begin(self) -> None: ...

    @abc.abstractmethod
    def _draw(self) -> None: ...

    @abc.abstractmethod
    def _leave(self, *, keep: bool) -> None:
        """What was drawn last stays, or goes."""
