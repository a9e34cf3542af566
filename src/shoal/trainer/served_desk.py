"""Where `shoal scale` reaches a run with servers: the same letters as to the coordinator of an elastic run.

The run's folder says where it listens, and has the keys for it, for its owner alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from shoal.elastic.access import Access, control_folder
from shoal.elastic.messages import MOST_BYTES, OPERATOR, Refused, Scale, Welcome, decode_letter, encode
from shoal.engines.world import LOOPBACK
from shoal.wire.curve import Keys, Server

_AT_ONCE = 16
_PAUSE_SECONDS = 0.1


class Desk:
    """Belongs to the thread that made it. Without a folder for the run there is none, and nobody can ask."""

    def __init__(self, run: str, run_dir: Path | None, scale: Callable[[int | None, int | None], str | None]) -> None:
        """`scale` takes the numbers of workers and of servers, and returns why not."""
        self._run, self._scale = run, scale
        self._folder = None if run_dir is None else control_folder(run_dir, run_dir)
        self._looked = 0.0
        self._server: Server | None = None
        if self._folder is None:
            return
        keys = Keys.make()
        shutil.rmtree(self._folder, ignore_errors=True)  # of a supervisor that was killed
        self._folder.mkdir(mode=0o700, parents=True)
        keys.write(self._folder)
        self._server = Server(keys, LOOPBACK, limit=MOST_BYTES)
        Access(run, self._folder, keys).publish(self._server.endpoint)

    def look(self, now: float) -> None:
        """Answer all who have asked. May be called often."""
        if now - self._looked < _PAUSE_SECONDS:
            return
        self._looked = now
        for _ in range(_AT_ONCE):
            message = None if self._server is None else self._server.receive()
            if message is None or self._server is None:
                return
            answer = self._answer(message[1])
            if answer is not None:
                self._server.send(message[0], encode(answer))

    def _answer(self, payload: bytes) -> Welcome | Refused | None:
        try:
            letter = decode_letter(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None
        if letter.run != self._run or letter.name != OPERATOR or not isinstance(letter.body, Scale):
            return None
        why = self._scale(letter.body.workers, letter.body.servers)
        return Welcome() if why is None else Refused(why)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
