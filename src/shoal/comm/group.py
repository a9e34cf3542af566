"""Groups: what workers do together. `Group` is the contract; `make_group` in `choose` makes one.

The contract, which `shoal.testing.groups` checks for every implementation:

- *Order.* Members call the same operations in the same order, with contiguous tensors of equal shape and dtype.
- *Ownership.* What is handed to `sum`, and what goes into and comes out of `start_swap` and `start_gather`, belongs to
  the group until `wait` returns: it may be neither read nor written. All other operations are complete when they
  return. What they return belongs to the caller.
- *Result.* A sum is bitwise equal on all members, and depends on the values, the shape and the members only.
- *Threads.* A group is used by one thread, the one that made it. Signal handlers run while an operation waits.
- *Progress.* Unless the group `progresses`, an operation may do so only while its member is inside a call of the group.
- *Errors.* If a member dies or leaves, whatever the others wait for, now or later, raises `GroupError` on each of them
  within a second, and nothing of the group is left behind. A group that has raised is broken: every later operation
  raises.
- *Revocation.* `revoke` breaks the group for its member, from any thread and at any moment, for a reason that only its
  caller knows. The member's own thread raises `GroupError` with that reason within 50 ms; the others see it leave.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from shoal.comm.account import Account
from shoal.core.errors import GroupError
from shoal.core.traffic import CONTROL, GRADIENT

CPU = torch.device("cpu")
REVOKED = "the group was revoked"
"""The reason where none is given."""


class Work(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Block until the result is in the buffer. Raises `GroupError` if a peer went away. Twice is once."""


class Group(Protocol):
    """Members 0 … size−1. See the module's text for what holds of every operation."""

    rank: int
    size: int
    collective: str
    """solo, gloo, nccl, shm or hierarchical."""
    reason: str
    """Why this collective was chosen, for people."""
    hosts: tuple[int, ...]
    """For each member the number of its host; hosts are numbered in order of their first member."""
    account: Account
    """What this member has sent."""
    progresses: bool
    """Whether operations under way go on while the member does something else."""

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        """A flat buffer of zeros where sums of it, or of contiguous parts of it, are fastest. All members call this."""

    def release(self, buffer: Tensor) -> None:
        """What `buffer` returned is summed no more; its memory goes when no tensor shows it any longer.

        No operation: it neither waits for other members nor needs them to call it.
        """

    def sum(self, buffer: Tensor, kind: str = GRADIENT) -> Work:
        """Start replacing `buffer` by the sum over all members."""

    def scatter_sum(self, buffer: Tensor, kind: str = GRADIENT) -> Tensor:
        """The sum over all members of row `rank` of `buffer`, whose first dimension is the group's size."""

    def swap(self, rows: Tensor, kind: str = GRADIENT) -> Tensor:
        """What each member has for this one: row i of the result is row `rank` of member i's `rows`.

        The first dimension of `rows` is the group's size. They are only moved: any dtype will do.
        """

    def start_swap(self, rows: Tensor, kind: str = GRADIENT) -> tuple[Tensor, Work]:
        """Start a `swap`: what it will return, and the work after which that is there."""

    def gather(self, buffer: Tensor, kind: str = CONTROL) -> Tensor:
        """All members' buffers, stacked along a new first dimension in order of rank."""

    def start_gather(self, buffer: Tensor, kind: str = GRADIENT) -> tuple[Tensor, Work]:
        """Start a `gather`, as `start_swap` starts a swap."""

    def gather_bytes(self, data: bytes, kind: str = CONTROL, purpose: str = "gather_bytes") -> list[bytes]:
        """All members' byte strings, which may differ in length, in order of rank.

        `purpose` is what it is for, in a few words. Members that do it for different ones raise `GroupError`, which
        names both.
        """

    def broadcast(self, buffer: Tensor, kind: str = CONTROL) -> None:
        """Replace `buffer` by that of member 0."""

    def barrier(self) -> None:
        """Return when all members have called it; what each wrote to shared places before is seen by all after."""

    def descriptors(self) -> Iterable[int]:
        """File descriptors that a forked child must close, so that peers notice this member's death."""

    def revoke(self, why: str) -> None:
        """Break the group: its thread raises `GroupError(why)` from whatever it waits for, now or later.

        From any thread, whatever the group's own is doing. Returns at once; only the first time counts, and after
        `close` it does nothing. Peers see this member as having left.
        """

    def close(self) -> None:
        """Leave. No operation may be under way; peers that still wait for this member raise. Twice is once."""


class Done:
    """Work that is complete."""

    def wait(self) -> None:
        return None


class AtOnce:
    """What groups have in common whose swaps and gathers are complete when they return."""

    progresses = False

    def start_swap(self: Group, rows: Tensor, kind: str = GRADIENT) -> tuple[Tensor, Work]:
        return self.swap(rows, kind), Done()

    def start_gather(self: Group, buffer: Tensor, kind: str = GRADIENT) -> tuple[Tensor, Work]:
        return self.gather(buffer, kind), Done()


class SoloGroup(AtOnce):
    """A group of one: everything is complete at once and nothing is sent."""

    rank = 0
    size = 1
    collective = "solo"
    reason = "there is one worker"
    hosts: tuple[int, ...] = (0,)

    def __init__(self) -> None:
        self.account = Account()
        self._revoked = ""

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        self._refuse_revoked()
        return torch.zeros(numel, dtype=dtype, device=device)

    def release(self, buffer: Tensor) -> None:
        return None

    def sum(self, buffer: Tensor, kind: str = GRADIENT) -> Work:
        self._refuse_revoked()
        return Done()

    def scatter_sum(self, buffer: Tensor, kind: str = GRADIENT) -> Tensor:
        self._refuse_revoked()
        return buffer[0].clone()

    def swap(self, rows: Tensor, kind: str = GRADIENT) -> Tensor:
        self._refuse_revoked()
        return rows.clone()

    def gather(self, buffer: Tensor, kind: str = CONTROL) -> Tensor:
        self._refuse_revoked()
        return buffer.unsqueeze(0).clone()

    def gather_bytes(self, data: bytes, kind: str = CONTROL, purpose: str = "gather_bytes") -> list[bytes]:
        self._refuse_revoked()
        return [data]

    def broadcast(self, buffer: Tensor, kind: str = CONTROL) -> None:
        self._refuse_revoked()

    def barrier(self) -> None:
        self._refuse_revoked()

    def descriptors(self) -> Iterable[int]:
        return ()

    def revoke(self, why: str) -> None:
        self._revoked = self._revoked or why or REVOKED

    def close(self) -> None:
        return None

    def _refuse_revoked(self) -> None:
        if self._revoked:
            raise GroupError(self._revoked)


def bytes_of(buffer: Tensor) -> Tensor:
    """The same memory as bytes: what is only moved need not be of a type that can be added."""
    return buffer.view(-1).view(torch.uint8)


def numbers_of(buffer: Tensor) -> Tensor:
    """The same memory as numbers that can be added one by one."""
    return torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer.view(-1)
