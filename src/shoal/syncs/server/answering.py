"""Who has asked a server for weights, and waits for a version that is not there yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from shoal.syncs.server.frames import as_frame
from shoal.syncs.server.messages import Pull, Said, Weights

if TYPE_CHECKING:
    from shoal.syncs.server.shard import Holding

_MOST_WAITING = 8
"""Pulls of one worker."""


@dataclass
class _Asked:
    pull: Pull
    told: set[int] = field(default_factory=set)
    """Shards that were answered with."""


class Answering:
    """Answers each pull, for some shards at a time, as they come to have the version.

    So a worker reads the first ones while a step is still being applied to the others.
    """

    def __init__(
        self, say: Callable[[bytes, Said, list[memoryview]], None], refuse: Callable[[bytes, str], None]
    ) -> None:
        self._say, self._refuse = say, refuse
        self._waiting: dict[bytes, list[_Asked]] = {}
        self._copies: dict[int, tuple[int, Tensor]] = {}
        """For each shard a version and its weights, which do not change while they are being sent."""

    def ask(self, peer: bytes, pull: Pull, shown: Mapping[int, Holding]) -> None:
        """Answer now, or when the version is there."""
        waiting = self._waiting.setdefault(peer, [])
        waiting.append(_Asked(pull))
        del waiting[:-_MOST_WAITING]
        self._answer_to(peer, shown)

    def answer(self, shown: Mapping[int, Holding]) -> None:
        """Versions have changed."""
        for peer in list(self._waiting):
            self._answer_to(peer, shown)

    def forget(self, changed: set[int]) -> None:
        """The weights of these shards have changed within a version; empties the set."""
        while changed:
            self._copies.pop(changed.pop(), None)

    def placed(self) -> None:
        """Who waits must ask again, under the new placement: other shards may be held here now."""
        self._copies.clear()
        waiting, self._waiting = self._waiting, {}
        for peer, pulls in waiting.items():
            for _ in pulls:
                self._refuse(peer, "there is a new placement")

    def _answer_to(self, peer: bytes, shown: Mapping[int, Holding]) -> None:
        later = []
        for asked in self._waiting[peer]:
            pull = asked.pull
            there = {shard: holding for shard, holding in shown.items() if holding.version >= pull.version}
            if pull.exact:
                if len(there) == len(shown):
                    self._answer_exactly(peer, pull, shown)
                else:
                    later.append(asked)
                continue
            new = {shard: holding for shard, holding in there.items() if shard not in asked.told}
            if new or not shown:
                frames = [] if pull.near else [self._live(shard, holding) for shard, holding in new.items()]
                version = min((holding.version for holding in new.values()), default=pull.version)
                self._say(peer, Weights(pull.number, version, list(new)), frames)
                asked.told.update(new)
            if not shown.keys() <= asked.told:
                later.append(asked)
        if later:
            self._waiting[peer] = later
        else:
            del self._waiting[peer]

    def _answer_exactly(self, peer: bytes, pull: Pull, shown: Mapping[int, Holding]) -> None:
        """These travel always: what lies in shared memory may be newer."""
        if not all(holding.keeps(pull.version) for holding in shown.values()):
            self._refuse(peer, f"version {pull.version} is not kept")
            return
        frames = [as_frame(holding.pulled_of(pull.version)) for holding in shown.values()]
        self._say(peer, Weights(pull.number, pull.version, list(shown)), frames)

    def _live(self, shard: int, holding: Holding) -> memoryview:
        copy = self._copies.get(shard)
        if copy is None or copy[0] != holding.version:
            copy = self._copies[shard] = (holding.version, holding.pulled.clone())
        return as_frame(copy[1])
