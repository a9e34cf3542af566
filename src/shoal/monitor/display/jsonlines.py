"""Progress for machines: a JSON object per line on standard output, one for every event."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import msgspec

from shoal.core.events import AnyEvent, Event, ServersSeen, StepDone, WorkerSeen
from shoal.monitor.display.outlet import put

_FLUSH_SECONDS = 0.2
_HELD_LINES = 1000
_WORD = re.compile(r"(?<!^)(?=[A-Z])")


class JsonView:
    """Every event, with all its fields.

    Each object has "event", the kind of event in snake case ("run_started", "step_done", "worker_seen", ...), and
    "time" in seconds since 1970. A figure that is not finite (NaN, an infinite loss) is null. Warnings come as
    "notice" events, every time they are given; what a worker printed as {"event": "output", "time", "worker",
    "stream": "out" or "err", "text"}. Lines are written at once, those of steps and workers at most 0.2 s later.
    """

    tells_all = True

    def __init__(self, stream: TextIO | None, *, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock
        self._held: list[str] = []
        self._flushed = clock()
        self._names: dict[type[Event], str] = {}
        self._step = 0

    def event(self, event: AnyEvent) -> None:
        self._step = event.step
        kind = type(event)
        name = self._names.get(kind)
        if name is None:
            name = self._names[kind] = _WORD.sub("_", kind.__name__).lower()
        fields = msgspec.structs.asdict(event)
        moment = fields.pop("time")
        self._hold({"event": name, "time": moment, **fields}, soon=kind not in (StepDone, WorkerSeen, ServersSeen))

    def tick(self) -> None:
        if self._held and self._clock() - self._flushed >= _FLUSH_SECONDS:
            self._flush()

    def say(self, text: str) -> None:
        self._hold({"event": "notice", "time": time.time(), "step": self._step, "text": text}, soon=True)

    def output(self, worker: int, stream: str, text: str) -> None:
        told = {"event": "output", "time": time.time(), "worker": worker, "stream": stream, "text": text}
        self._hold(told, soon=True)

    def close(self) -> None:
        self._flush()

    def _hold(self, fields: dict[str, Any], *, soon: bool) -> None:
        self._held.append(_encoded(fields))
        if soon or len(self._held) >= _HELD_LINES or self._clock() - self._flushed >= _FLUSH_SECONDS:
            self._flush()

    def _flush(self) -> None:
        lines, self._held, self._flushed = self._held, [], self._clock()
        if lines:
            put(self._stream or sys.stdout, "\n".join(lines) + "\n")


def _encoded(fields: dict[str, Any]) -> str:
    try:
        return msgspec.json.encode(fields, enc_hook=str).decode()
    except UnicodeEncodeError:
        # half a character, as in a file name that is no UTF-8
        return msgspec.json.encode(_whole(fields), enc_hook=str).decode()


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_whole(key): _whole(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(item) for item in value]
    return value
