"""Questions to the store of a term, and their answers, over a connection of the main thread."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from shoal.cluster.member.writing import Writing
from shoal.cluster.messages import MOST_ANSWER, Gathered, Held, Put, Question, decode_down
from shoal.wire.curve import Client, Keys

SLICE_SECONDS = 0.02
"""Of waiting, between which it is seen whether the term is over."""
_REPEAT_SECONDS, _LONGEST_REPEAT = 0.25, 1.0
"""Until a question without an answer is asked again: the first time, and at most, doubling. Others may take long."""


class Questions:
    """Asks the coordinator about keys. Belongs to the thread and the process that made it."""

    def __init__(self, endpoint: str, keys: Keys, writing: Writing) -> None:
        self._endpoint = endpoint
        self._writing = writing
        self._client = Client(endpoint, keys, limit=MOST_ANSWER)
        self._answers: dict[int, Held | Gathered] = {}
        self._awaited: set[int] = set()
        self.refused = 0
        """The highest number of a question that was not waited for and could not be answered."""

    def reconnect_if_moved(self, endpoint: str) -> None:
        if endpoint != self._endpoint:
            self._endpoint = endpoint
            self._client.reconnect(endpoint)

    def number(self) -> int:
        return self._writing.question()

    def tell(self, body: Put) -> None:
        """Say this without waiting for the answer. Later questions of this connection are answered after it."""
        self._client.send(self._writing.letter(body))

    def ask(self, bodies: list[Question], seconds: float, stop: Callable[[], None]) -> list[Held | Gathered]:
        """The answers, in order. `stop` is called again and again while there are none, and may raise.

        Raises TimeoutError after so many seconds. Questions may be sent several times; they have the same effect.
        """
        until = time.monotonic() + seconds
        patience = _REPEAT_SECONDS
        self._awaited = {body.number for body in bodies}
        self._answers.clear()
        try:
            while len(self._answers) < len(bodies):
                for body in bodies:
                    if body.number not in self._answers:
                        self._client.send(self._writing.letter(body))
                self._listen(min(until, time.monotonic() + patience), stop)
                patience = min(2 * patience, _LONGEST_REPEAT)
                if time.monotonic() >= until and len(self._answers) < len(bodies):
                    raise TimeoutError
            return [self._answers[body.number] for body in bodies]
        finally:
            self._awaited = set()

    def close(self) -> None:
        self._client.close()

    def _listen(self, until: float, stop: Callable[[], None]) -> None:
        """Until all answers are there, or that time has come."""
        while len(self._answers) < len(self._awaited):
            stop()
            left = until - time.monotonic()
            payload = self._client.receive(min(SLICE_SECONDS, max(0.0, left)))
            if payload is not None:
                self._take(payload)
            elif left <= 0:
                return

    def _take(self, payload: bytes) -> None:
        try:
            body = decode_down(payload)
        except (msgspec.MsgspecError, ValueError):
            return
        if isinstance(body, Held | Gathered):
            if body.number in self._awaited:
                self._answers[body.number] = body
            elif isinstance(body, Held) and body.gone:
                self.refused = max(self.refused, body.number)
