"""The values of membership: a process as it is known, what survives a restart, and the choices between processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias

import msgspec

from shoal.cluster.messages import Beat, Down, Ended, Ready, ToEngine, name_of
from shoal.cluster.roster.suspicion import Suspicion

_MOST_LIVES = 16
"""Ended lives remembered of one seat: whose letters may still be on their way."""
_MOST_DEATHS = 64
_WITHIN_STEPS = 100


class Plan(msgspec.Struct, frozen=True):
    """What a run asks for: so many workers, at least `least`, never more than `most`."""

    workers: int
    least: int
    most: int
    version: str
    run: str
    before: int = 0
    """No term has this number or a lower one: those were of a membership that was lost as a whole."""
    replaces: bool = True
    """Whether a process that is lost is replaced; else its loss ends the run."""
    deaths: int = 10
    """By one signal, within 100 steps, are no accidents any longer, and end the run; 0 if any number is meant."""
    meets: bool = True
    """Whether the members of a term form a group, and have the state of the run. Else a term stands as soon as it is
    declared, and nobody has to leave it for the next one."""
    seats: int = 0
    """So many seats are given in turn: what the last process of one has left behind may still be in use. 0: the lowest
    seat that is free."""
    servers: int = 0
    """There may be so many servers, which are the engine's matter."""


@dataclass(frozen=True)
class Tell:
    """Say this to the worker (or operator) of that name."""

    name: str
    body: Down


Order: TypeAlias = Tell | ToEngine


class Member(msgspec.Struct, frozen=True, array_like=True):
    """One process as a member of a term. Another process in the same seat has the same name, but not the same life."""

    name: str
    life: int


class Death(msgspec.Struct, frozen=True, array_like=True):
    """A process died while it computed these positions of a step."""

    step: int
    first: int
    last: int


class Killed(msgspec.Struct, frozen=True, array_like=True):
    """A process was ended by this signal, when the run was at this step."""

    signal: int
    step: int


class Occupied(msgspec.Struct, frozen=True, array_like=True):
    """What is kept of a process."""

    seat: int
    life: int | None
    holds: bool
    was_ready: bool
    leaving: bool
    lost: bool
    killed: bool


class Kept(msgspec.Struct):
    """What survives the coordinator: written before any order that follows from it leaves."""

    target: int
    term: int = 0
    """The highest number ever declared or heard of."""
    members: list[Member] = []
    stands: bool = False
    """All members have formed the term, and nothing has broken it."""
    stood: list[Member] = []
    """The members of the last term that stood."""
    signature: bytes | None = None
    held: bool = False
    """Some process had the run's state at some time."""
    complete: bool = False
    failed: bool = False
    deaths: list[Death] = []
    killed: list[Killed] = []
    """By signals that nobody here has sent, the last ones."""
    ended: dict[int, list[int]] = {}
    """Lives that are over, by seat."""
    seats: list[Occupied] = []
    next_seat: int = 0
    """Where seats are given in turn."""


encode_kept = msgspec.msgpack.Encoder().encode
decode_kept = msgspec.msgpack.Decoder(Kept).decode


@dataclass(eq=False)
class Process:
    """What is known of the process in a seat, from the order to start it until the engine says that it has ended."""

    seat: int
    life: int | None = None
    """None until it has said hello and was welcome."""
    holds: bool = False
    was_ready: bool = False
    leaving: bool = False
    """It has been told to end."""
    lost: bool = False
    """It counts for nothing any longer, though the engine has not yet said that it ended."""
    killed: bool = False
    """By our own order."""

    refused: bool = False
    ready: Ready | None = None
    """Its last word, while it is in no term."""
    formed: int = 0
    """The last term of which it said that the group stands."""
    holding: bool = False
    """It was told that there is no term for now."""
    beat: Beat | None = None
    suspicion: Suspicion = field(default_factory=Suspicion)
    look_after: float = 0.0
    lost_at: float = 0.0
    silence_said: bool = False

    @property
    def name(self) -> str:
        return name_of(self.seat)

    @property
    def counts(self) -> bool:
        """Whether it takes part, or may come to."""
        return not (self.lost or self.leaving or self.refused)

    def kept(self) -> Occupied:
        return Occupied(self.seat, self.life, self.holds, self.was_ready, self.leaving, self.lost, self.killed)


def process_of(kept: Occupied) -> Process:
    return Process(kept.seat, kept.life, kept.holds, kept.was_ready, kept.leaving, kept.lost, kept.killed)


def by_rank(processes: Iterable[Process]) -> list[Process]:
    """Ready processes in the order of a term: those with the run's state, the furthest first; then by seat."""

    def place(process: Process) -> tuple[bool, int, int]:
        assert process.ready is not None
        return not process.holds, -process.ready.position, process.seat

    return sorted((process for process in processes if process.ready is not None), key=place)


def free_seats(taken: Iterable[int], first: int = 0, seats: int = 0) -> Iterator[int]:
    """Without end, the lowest first; or those of so many, in turn from `first` on."""
    occupied = frozenset(taken)
    order = ((first + number) % seats for number in range(seats)) if seats else count()
    return (seat for seat in order if seat not in occupied)


def to_expel(ranks: Sequence[Process], unreached: dict[str, list[str]]) -> tuple[Process, list[str]] | None:
    """Which member has to go, so that the others can form a group, and whom it has no link with.

    The one with most broken pairs; of several, the highest rank. Never the only one that has the run's state.
    """
    names = {process.name for process in ranks}
    pairs = {
        frozenset((who, whom))
        for who, missing in unreached.items()
        for whom in missing
        if who != whom and {who, whom} <= names
    }
    holders = [process for process in ranks if process.holds]

    def broken(process: Process) -> int:
        return sum(process.name in pair for pair in pairs)

    choice = [
        (broken(process), rank, process)
        for rank, process in enumerate(ranks)
        if broken(process) and holders != [process]
    ]
    if not choice:
        return None
    _, _, worst = max(choice, key=lambda entry: entry[:2])
    apart = sorted(name for pair in pairs if worst.name in pair for name in pair - {worst.name})
    return worst, apart


def remember_life(ended: dict[int, list[int]], process: Process) -> None:
    """From now on, letters of this life are ignored."""
    lives = ended.setdefault(process.seat, [])
    if process.life is not None and process.life not in lives:
        lives.append(process.life)
        del lives[:-_MOST_LIVES]


def second_death(deaths: list[Death], ended: Ended) -> Death | None:
    """Note a death; the positions that it has in common with an earlier one of the same step, if any."""
    if not ended.computing or ended.positions is None:
        return None
    death = Death(ended.step, *ended.positions)
    common = None
    for other in deaths:
        first, last = max(other.first, death.first), min(other.last, death.last)
        if other.step == death.step and first <= last:
            common = Death(death.step, first, last)
    deaths.append(death)
    del deaths[:-_MOST_DEATHS]
    return common


def too_many(killed: list[Killed], ended: Ended, most: int) -> bool:
    """Note a death by a signal; whether it is the last of so many by that signal within a hundred steps."""
    if ended.signal is None or not most:
        return False
    killed.append(Killed(ended.signal, ended.step))
    del killed[:-_MOST_DEATHS]
    same = [death for death in killed if death.signal == ended.signal and death.step > ended.step - _WITHIN_STEPS]
    return len(same) >= most
