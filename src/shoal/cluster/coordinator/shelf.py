"""The keys through which the members of a term meet: kept by the coordinator, for one term at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.cluster.messages import MOST_GATHERED, Add, Gather, Gathered, Get, Held, Question

MOST_KEYS = 100_000
MOST_TOTAL = 64 << 20
"""Bytes of all keys and values of a term."""
MOST_WAITING = 100_000
"""Questions without an answer yet."""

Answer = tuple[bytes, Held | Gathered]
"""To whom, and what."""


@dataclass
class _Gathering:
    """Words that members hand in under one key, and who waits for those of all."""

    of: int
    words: dict[int, bytes] = field(default_factory=dict)
    size: int = 0
    """Bytes of the words."""
    waiting: dict[tuple[bytes, int], None] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.words) == self.of


@dataclass
class Shelf:
    """The keys of the newest term, and who waits for one. Pure: answers are returned for the caller to send."""

    term: int = 0
    """The only term whose keys can be asked for."""
    open: bool = False
    """Whether they still can: not once it is broken."""
    _values: dict[str, bytes] = field(default_factory=dict)
    _bytes: int = 0
    _gatherings: dict[str, _Gathering] = field(default_factory=dict)
    _waiting: dict[str, dict[tuple[bytes, int], None]] = field(default_factory=dict)
    _questions: int = 0
    _sums: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """What each addition was answered with, so that a repeated one is not counted again."""

    def begin(self, term: int) -> list[Answer]:
        """A newer term is declared: who waits for a key of the one before waits in vain."""
        if term <= self.term:
            return []
        answers = self._close()
        self.term, self.open = term, True
        return answers

    def end(self, term: int) -> list[Answer]:
        """This term is broken."""
        return self._close() if term == self.term else []

    def ask(self, peer: bytes, life: int, body: Question) -> list[Answer]:
        """A worker's question: the answers, to it or to others, that can be given now."""
        if body.term != self.term or not self.open:
            return [(peer, Held(body.number, gone=True))]
        if isinstance(body, Get):
            return self._get(peer, body)
        if isinstance(body, Add):
            return self._add(peer, life, body)
        if isinstance(body, Gather):
            return self._gather(peer, body)
        if not self._keep(body.key, body.value):
            return [(peer, Held(body.number, gone=True))]
        return [(peer, Held(body.number)), *self._tell(body.key)]

    def _get(self, peer: bytes, body: Get) -> list[Answer]:
        value = self._values.get(body.key)
        if value is not None or not body.wait:
            return [(peer, Held(body.number, value))]
        return self._let_wait(self._waiting.setdefault(body.key, {}), peer, body.number)

    def _let_wait(self, waiting: dict[tuple[bytes, int], None], peer: bytes, number: int) -> list[Answer]:
        if self._questions >= MOST_WAITING:
            return [(peer, Held(number, gone=True))]
        self._questions += (peer, number) not in waiting
        waiting[peer, number] = None
        return []

    def _gather(self, peer: bytes, body: Gather) -> list[Answer]:
        gathering = self._gatherings.get(body.key) or _Gathering(body.of)
        if body.at >= body.of or body.of != gathering.of or not self._keep_word(gathering, body):
            return [(peer, Held(body.number, gone=True))]
        if not gathering.complete and body.wait:
            return self._let_wait(gathering.waiting, peer, body.number)
        answers: list[Answer] = [] if body.wait else [(peer, Held(body.number))]
        if gathering.complete:
            words = [gathering.words[at] for at in range(gathering.of)]
            waiting, gathering.waiting = gathering.waiting, {}
            self._questions -= len(waiting)
            asked = {**waiting, (peer, body.number): None} if body.wait else waiting
            answers += [(whom, Gathered(number, words)) for whom, number in asked]
        return answers

    def _keep_word(self, gathering: _Gathering, body: Gather) -> bool:
        """False if there is no room. A word that was handed in before stays: what is said again is the same."""
        if body.at in gathering.words:
            return True
        grown = len(body.value) + (0 if gathering.words else len(body.key.encode()))
        if gathering.size + len(body.value) > MOST_GATHERED or not self._has_room(not gathering.words, grown):
            return False
        self._gatherings[body.key] = gathering
        gathering.words[body.at] = body.value
        gathering.size += len(body.value)
        self._bytes += grown
        return True

    def _add(self, peer: bytes, life: int, body: Add) -> list[Answer]:
        known = self._sums.get((life, body.number))
        if known is not None:
            return [(peer, Held(body.number, known))]
        before = self._values.get(body.key, b"0")
        # a sum of additions has few digits; what somebody put there instead may be anything
        sound = len(before) <= 32 and before.removeprefix(b"-").isdigit() and len(self._sums) < MOST_KEYS
        total = b"%d" % (int(before) + body.amount) if sound else b""
        if not sound or not self._keep(body.key, total):
            return [(peer, Held(body.number, gone=True))]
        self._sums[life, body.number] = total
        return [(peer, Held(body.number, total)), *self._tell(body.key)]

    def _has_room(self, new_key: bool, grown: int) -> bool:
        keys = len(self._values) + len(self._gatherings) + new_key
        return keys <= MOST_KEYS and self._bytes + grown <= MOST_TOTAL

    def _keep(self, key: str, value: bytes) -> bool:
        """False if there is no room."""
        before = self._values.get(key)
        grown = len(value) - len(before) if before is not None else len(key.encode()) + len(value)
        if not self._has_room(before is None, grown):
            return False
        self._values[key] = value
        self._bytes += grown
        return True

    def _tell(self, key: str) -> list[Answer]:
        """The answers to those who waited for this key."""
        waiting = self._waiting.pop(key, {})
        self._questions -= len(waiting)
        return [(peer, Held(number, self._values[key])) for peer, number in waiting]

    def _close(self) -> list[Answer]:
        waiting = [*self._waiting.values(), *(gathering.waiting for gathering in self._gatherings.values())]
        answers: list[Answer] = [(peer, Held(number, gone=True)) for asked in waiting for peer, number in asked]
        self._values, self._gatherings, self._waiting, self._sums = {}, {}, {}, {}
        self._bytes = self._questions = 0
        self.open = False
        return answers
