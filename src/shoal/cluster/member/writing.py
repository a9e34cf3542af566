"""How a client of the coordinator writes its letters."""

from __future__ import annotations

import itertools
import secrets

from shoal.cluster.messages import Letter, Up, encode


class Writing:
    """One process's hand: its name, its life, and numbers that grow. Any thread, any number of sockets."""

    def __init__(self, run: str, name: str) -> None:
        self.name = name
        self.life = secrets.randbits(62)
        self._run = run
        # `next` of a count is one step of the interpreter: two threads never get the same number
        self._letters = itertools.count(1)
        self._questions = itertools.count(1)

    def letter(self, body: Up) -> bytes:
        """A new letter, also where the body was sent before."""
        return encode(Letter(self._run, self.name, self.life, next(self._letters), body))

    def question(self) -> int:
        """A number for a question to the store of a term."""
        return next(self._questions)
