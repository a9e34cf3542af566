"""Finding out which codec is fastest here, of those that leave the loss as it is.

The first steps go as they are, until it is settled how. If waiting for the exchange is a noticeable part of them, some
steps are taken with each codec that could be faster, and the fastest stays. All of these are steps of the training like
any other: what a codec has not sent when another one takes over is sent by that one.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from statistics import median

import msgspec
import torch
from torch import Tensor

from shoal.comm.codecs.memory import RESIDUAL
from shoal.comm.group import Group
from shoal.comm.plan import Settled
from shoal.core.spec import AnyCodec, Fp16, Int8, NoCodec, PowerSGD
from shoal.core.traffic import CONTROL
from shoal.syncs.allreduce import BucketExchange, Exchange, Params, Weighing
from shoal.syncs.encoded import EncodedExchange
from shoal.syncs.encoding import Encoding

ARMS: tuple[tuple[AnyCodec, float], ...] = (
    (NoCodec(), 1.0),
    (PowerSGD(), 0.03),
    (Int8(), 0.26),
    (Fp16(), 0.5),
)
"""What is tried, in this order, with the share of bytes that each sends at best."""
NONE = 0
TIMED_STEPS = 4
"""Steps with an arm that are timed; the one before them is not."""
NOTICEABLE = 0.03
"""Share of a step that must go into waiting for the exchange: there is nothing to win with less."""
CLOSE = 1.5
"""Arms whose times differ by less than this factor are timed once more, as one may have met a slow spell."""


class _Known(msgspec.Struct, frozen=True, array_like=True):
    """What was settled, for another group of the same parameters."""

    arm: int
    note: str
    inner: bytes | None


class Trial:
    """Member 0's figures. Pure: seconds in, the next arm out."""

    def __init__(self) -> None:
        self.arm = NONE
        self._times: dict[int, list[float]] = {}
        self._waits: list[float] = []
        self._round: list[float] = []
        self._ready = False
        self._again: list[int] | None = None

    def step(self, seconds: float, waited: float, *, settled: bool) -> int | None:
        """A step with `arm` has taken so long. Sets the arm of the next one; the winner, once that is known.

        `settled`: whether the arm has found out all about itself; what it takes before is not its time.
        """
        if not settled:
            return None
        if not self._ready:
            self._ready = True  # the first does not count
            return None
        self._round.append(seconds)
        if self.arm == NONE:
            self._waits.append(waited)
        if len(self._round) < TIMED_STEPS:
            return None
        self._times.setdefault(self.arm, []).extend(self._round)
        self._round, self._ready = [], False
        return self._next()

    def _next(self) -> int | None:
        seconds = {arm: typical(times) for arm, times in self._times.items()}
        best = min(seconds, key=lambda arm: (seconds[arm], arm))
        if self._again is None:
            waited = median(self._waits)
            if waited < NOTICEABLE * seconds[NONE]:
                return NONE
            for arm, (_, share) in enumerate(ARMS):
                if arm not in seconds and seconds[NONE] - waited * (1.0 - share) < seconds[best]:
                    self.arm = arm
                    return None
            close = [arm for arm in seconds if seconds[arm] < CLOSE * seconds[best]]
            self._again = close if len(close) > 1 else []
        if self._again:
            self.arm = self._again.pop()
            return None
        return best

    def figures(self) -> str:
        """What was measured, fastest first, for people."""
        seconds = sorted((typical(times), arm) for arm, times in self._times.items())
        return ", ".join(f"{ARMS[arm][0].name} {second * 1e3:.3g} ms" for second, arm in seconds)

    @property
    def waited(self) -> float:
        """The share of a step without codec that goes into waiting for the exchange."""
        return median(self._waits) / typical(self._times[NONE]) if self._waits else 0.0


def typical(times: list[float]) -> float:
    """The lower quartile: whatever else the machine does only adds to a step."""
    return sorted(times)[len(times) // 4]


class AutoExchange:
    """See `Exchange` for what its methods mean. One at a time of several exchanges does the work."""

    by_atom = False

    def __init__(
        self, group: Group, params: Params, encoding: Encoding, knowledge: bytes | None = None, seed: int = 0
    ) -> None:
        self._group = group
        self._params = params
        self._encoding = encoding
        self._seed = seed
        self._made: dict[int, Exchange] = {}
        self._trial: Trial | None = Trial() if encoding.count else None
        self._arm, self._note, self._inner = NONE, "", None
        if not encoding.count:
            self._note = "auto: none, as no tensor is large enough to be encoded"
        self._begun: tuple[float, float] | None = None
        known = _read(knowledge)
        if known is not None:
            self._trial, self._arm, self._note, self._inner = None, known.arm, known.note, known.inner
        self._sending: EncodedExchange | None = None
        self._unsent: bool | None = None
        """Whether another codec may have left something to be sent, on any member; None while that is not known."""
        self._now = self._exchange(self._arm)

    def _exchange(self, arm: int) -> Exchange:
        made = self._made.get(arm)
        if made is None:
            codec = ARMS[arm][0]
            if arm != NONE or self._group.size == 1:
                tried = self._trial is not None
                made = EncodedExchange(self._group, self._encoding, self._seed, codec, judged=False, trial=tried)
            else:
                made = BucketExchange(self._group, self._params, self._inner)
            self._made[arm] = made
        return made

    # -- a step --------------------------------------------------------------------------------------------------------

    def open(self, atoms: int, vectors: int, doubles: int = 0) -> None:
        if self._trial is not None and self._group.size > 1:
            self._judge(self._trial)
        if self._sending is not None:
            self._sending.close()
            self._sending, self._unsent = None, False
        if self._unsent is None:  # not all of them have been here before
            mine = b"unsent" if self._encoding.memory.has(RESIDUAL) else b""
            self._unsent = any(self._group.gather_bytes(mine, CONTROL))
        before, self._now = self._now, self._exchange(self._arm)
        if self._now is not before:
            self._encoding.memory.fold()
        if self._arm != NONE:
            self._unsent = True
        elif self._unsent and self._group.size > 1:
            self._now = self._sending = EncodedExchange(
                self._group, self._encoding, self._seed, NoCodec(), judged=False
            )
        self._now.open(atoms, vectors, doubles)

    def _judge(self, trial: Trial) -> None:
        now, waited = time.perf_counter(), self._group.account.exposed
        winner = None
        if self._begun is not None and self._sending is None:
            settled = self._arm != NONE or self._now.settled() is not None
            winner = trial.step(now - self._begun[0], waited - self._begun[1], settled=settled)
        told = torch.tensor([trial.arm if winner is None else winner, winner is not None])
        self._group.broadcast(told, CONTROL)
        self._arm, over = int(told[0]), bool(told[1])
        trial.arm = self._arm
        if over:
            self._note = self._group_note(trial)
            self._trial = None
            self._let_go(keep=self._arm)
        self._begun = time.perf_counter(), self._group.account.exposed

    def _group_note(self, trial: Trial) -> str:
        text = f"auto: {ARMS[self._arm][0].name}, as a step takes {trial.figures()}"
        if self._arm == NONE:
            text += f"; {trial.waited:.0%} of it is waiting for the exchange"
        data = self._group.gather_bytes(text.encode(), CONTROL)  # all have the one of member 0, who has the figures
        return data[0].decode()

    def _let_go(self, keep: int) -> None:
        for arm, exchange in list(self._made.items()):
            if arm != keep:
                exchange.close()
                del self._made[arm]
            elif isinstance(exchange, EncodedExchange):
                exchange.stay()

    def arm(self, *, weighted: bool = False) -> None:
        self._now.arm(weighted=weighted)

    def atom_done(self, atom: int, sums: Tensor, doubles: Tensor | None = None) -> None:
        return None

    def used(self) -> list[bool]:
        return self._now.used()

    @property
    def weighs(self) -> bool:
        return self._now.weighs

    def finish(
        self, sums: Tensor, flags: Tensor, weighing: Weighing | None = None, doubles: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self._now.finish(sums, flags, weighing, doubles)

    def applying(self, scale: float = 1.0) -> AbstractContextManager[None]:
        return self._now.applying(scale)

    # -- what others ask -----------------------------------------------------------------------------------------------

    def digest(self) -> bytes:
        return b"auto" + self._now.digest()

    def settled(self) -> Settled | None:
        if self._trial is not None:
            return None
        inner = self._now.settled() or Settled(0.0, 0.0, [])
        return inner._replace(codec=ARMS[self._arm][0].name, note=self._note)

    def knowledge(self) -> bytes | None:
        if self._trial is not None:
            return None
        inner = self._now.knowledge() if self._arm == NONE else self._inner
        return msgspec.msgpack.encode(_Known(self._arm, self._note, inner))

    def close(self, *, with_group: bool = False) -> None:
        for exchange in self._made.values():
            exchange.close(with_group=with_group)
        if self._sending is not None:
            self._sending.close(with_group=with_group)
        self._made, self._sending = {}, None


def _read(knowledge: bytes | None) -> _Known | None:
    if knowledge is None:
        return None
    try:
        known = msgspec.msgpack.decode(knowledge, type=_Known)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return known if 0 <= known.arm < len(ARMS) else None
