"""The progress display: one door to all ways of showing a run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from shoal.core.errors import ConfigError
from shoal.core.events import AnyEvent, Notice, RunStarted
from shoal.core.settings import PROGRESS
from shoal.monitor.display.notices import Notices
from shoal.monitor.display.outlet import WORKER_STREAMS, View, can_redraw, in_notebook
from shoal.monitor.display.plain import PlainView, QuietView


class Display:
    """Listens to events and shows them; may see several runs after each other.

    Modes: `auto` is a cell's output in a notebook, `rich` in a terminal, `plain` elsewhere; `rich` draws a few lines
    over and over, and is plain where there is no terminal that can do so (or another display is drawn on it);
    `plain` prints lines; `json` prints every event as a line for machines (see `JsonView`); `quiet` prints only
    warnings. Progress goes to `stream`, by default what `sys.stderr` is when it is written; JSON lines by default to
    `sys.stdout`. `verbose` adds what each worker does.

    All methods are called on one thread, the one that forks workers if any are forked: the display has no thread, and
    draws from `__call__` and `tick` at most eight times a second. Nothing is raised because of a stream that has gone.
    """

    def __init__(
        self,
        mode: str = "auto",
        *,
        verbose: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if mode not in PROGRESS:
            raise ConfigError(f"progress is {mode!r}; it must be one of {', '.join(PROGRESS)}")
        self._mode = mode
        self._verbose = verbose
        self._stream = stream
        self._clock = clock
        self._view: View | None = None
        self._notices = Notices()
        self._runs = 0

    def __call__(self, event: AnyEvent) -> None:
        view = self._view or self._open()
        if isinstance(event, RunStarted):
            self._runs += 1
            if self._runs > 1:
                self._tell_counts(view)
        if isinstance(event, Notice) and not view.tells_all:
            if not event.quiet:
                self.warn(event.text)
        else:
            view.event(event)

    def tick(self) -> None:
        """Let time be seen to pass. To be called about every 0.2 s while nothing happens."""
        if self._view is not None:
            self._view.tick()

    def warn(self, text: str) -> None:
        """Say something that a person should know.

        The same text is printed once, and of texts that differ only in numbers three; how often others came is
        told by `close`, or when the next run starts.
        """
        view = self._view or self._open()
        text = text.removeprefix("shoal: ")
        if view.tells_all or self._notices.is_news(text):
            view.say(text)

    def output(self, worker: int, stream: str, text: str) -> None:
        """Pass on whole lines, with their ends, that a worker printed to its standard output ("out") or error ("err").

        They go to this process's `sys.stdout` or `sys.stderr`: exactly as they are, unless that is a terminal with a
        rich display. There they appear above the display, without what would move the cursor, and begin with
        `[worker]` if there is more than one.
        """
        if stream not in WORKER_STREAMS:
            raise ConfigError(f"output of a worker's stream {stream!r}; it must be one of {', '.join(WORKER_STREAMS)}")
        if text:
            (self._view or self._open()).output(worker, stream, text)

    def close(self) -> None:
        """Leave the final state on the screen and the terminal as it was. May be called again, and at any time.

        A display that is used after it was closed begins anew.
        """
        view, self._view = self._view, None
        if view is None:
            return
        try:
            view.close()
        finally:
            self._tell_counts(view)
            self._runs = 0

    def _tell_counts(self, view: View) -> None:
        notices, self._notices = self._notices, Notices()
        for line in notices.counts():
            view.say(line)

    def _open(self) -> View:
        self._view = self._make_view()
        return self._view

    def _make_view(self) -> View:
        if self._mode == "quiet":
            return QuietView(self._stream)
        if self._mode == "json":
            from shoal.monitor.display.jsonlines import JsonView

            return JsonView(self._stream, clock=self._clock)
        if self._mode != "plain" and self._stream is None and in_notebook():
            from shoal.monitor.display.notebook import NotebookView

            return NotebookView(verbose=self._verbose, clock=self._clock)
        if self._mode != "plain" and can_redraw(self._stream or sys.stderr):
            from shoal.monitor.display.region import is_in_use

            if not is_in_use():
                from shoal.monitor.display.live import LiveView

                return LiveView(self._stream, verbose=self._verbose, clock=self._clock)
        return PlainView(self._stream, verbose=self._verbose, clock=self._clock)
