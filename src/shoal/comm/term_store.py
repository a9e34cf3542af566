"""The store of a term, as torch and Shoal's own groups want it for meeting: its keys are kept by the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import msgspec
from torch._C._distributed_c10d import Store

from shoal.cluster.member.control import Control
from shoal.cluster.member.questions import Questions
from shoal.cluster.messages import MOST_VALUE, Add, Gather, Gathered, Get, Held, Lasting, Put, Question


def store_of(control: Control, term: int) -> TermStore:
    """The store of this term, for this thread. The one before must not be used any longer.

    Whoever uses it keeps it: what torch keeps of it is not enough, without its Python part it has no methods.
    """
    return TermStore(control.questions(), term, control.why_over, control.remember_key)


class TermStore(Store):
    """Keys of one term, for the thread that has `questions`.

    Whatever waits here raises RuntimeError as soon as the term is known to be over, and after the store's timeout.
    Torch calls these methods from C++, and names their arguments by place.
    """

    def __init__(
        self,
        questions: Questions,
        term: int,
        why_over: Callable[[int], str | None],
        remember: Callable[[Lasting], None],
    ) -> None:
        super().__init__()
        self._questions = questions
        self._term = term
        self._why_over = why_over
        self._remember = remember
        self._first = questions.number()
        self._over = ""

    def set(self, key: str, value: str | bytes) -> None:
        """Returns before the coordinator has it. What this worker asks afterwards is answered afterwards."""
        self._refuse_if_over()
        body = Put(self._questions.number(), self._term, key, _fitting(key, value))
        self._remember(body)
        self._questions.tell(body)

    def gather(self, key: str, rank: int, size: int, value: bytes) -> list[bytes]:
        """Hand in this member's word; those of all `size` members, in order of rank, once all have."""
        body = Gather(self._questions.number(), self._term, key, rank, size, _fitting(key, value))
        # to a new coordinator it is said by another thread, which has no use for the answer
        self._remember(msgspec.structs.replace(body, wait=False))
        (answer,) = self._ask([body], self._limit())
        return answer.words if isinstance(answer, Gathered) else []

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._values(keys, self._limit())

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._values(keys, self._limit() if timeout is None else timeout)

    def add(self, key: str, amount: int) -> int:
        body = Add(self._questions.number(), self._term, key, amount)
        self._remember(body)
        (held,) = self._held([body], self._limit())
        return int(held.value or b"0")

    def check(self, keys: Sequence[str]) -> bool:
        numbers = self._questions.number
        held = self._held([Get(numbers(), self._term, key, wait=False) for key in keys], self._limit())
        return all(one.value is not None for one in held)

    def clone(self) -> TermStore:
        """This store itself: it is of one thread."""
        return self

    def has_extended_api(self) -> bool:
        return False

    def num_keys(self) -> int:
        raise NotImplementedError("the store of a term does not count its keys")

    def delete_key(self, key: str) -> bool:
        raise NotImplementedError("the store of a term keeps its keys until the term is over")

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        raise NotImplementedError("the store of a term does not compare: let one member set the key")

    def _limit(self) -> timedelta:
        """What `set_timeout` of the base class has set."""
        limit: timedelta = cast(Any, self).timeout
        return limit

    def _values(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        held = self._held([Get(self._questions.number(), self._term, key) for key in keys], timeout)
        return [one.value or b"" for one in held]

    def _held(self, bodies: Sequence[Question], timeout: timedelta) -> list[Held]:
        return [answer for answer in self._ask(bodies, timeout) if isinstance(answer, Held)]

    def _ask(self, bodies: Sequence[Question], timeout: timedelta) -> list[Held | Gathered]:
        self._refuse_if_over()
        try:
            answers = self._questions.ask(list(bodies), timeout.total_seconds(), self._refuse_if_over)
        except TimeoutError:
            wanted = ", ".join(body.key for body in bodies[:4])
            raise RuntimeError(
                f"the members of term {self._term} did not all come to meet: after {timeout.total_seconds():g} s "
                f"this was not complete: {wanted}"
            ) from None
        if any(isinstance(answer, Held) and answer.gone for answer in answers):
            # the control thread may not have heard of it yet
            self._over = f"term {self._term} is over, says the coordinator"
            self._refuse_if_over()
        return answers

    def _refuse_if_over(self) -> None:
        why = self._why_over(self._term) or self._over
        if why:
            raise RuntimeError(why)
        if self._questions.refused > self._first:
            raise RuntimeError(f"the coordinator keeps no more keys of term {self._term}: it is over, or has too many")


def _fitting(key: str, value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else bytes(value)
    if len(data) > MOST_VALUE:
        raise ValueError(f"a value of {len(data)} bytes for {key!r}; at most {MOST_VALUE} fit into a term's store")
    return data
