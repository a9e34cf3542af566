"""Groups inside one process: members are threads that meet at a table. For tests of what works over a group.

    totals = run_members(3, lambda group: summed(group))

Nothing is sent, so hundreds of operations take milliseconds. A buffer under way holds numbers that nobody can mistake
for a result, and a member that fails breaks the group for all others, as a real one does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from shoal.comm.account import Account
from shoal.comm.group import CPU, Done, Work
from shoal.core.errors import GroupError
from shoal.core.traffic import CONTROL, GRADIENT, MEMORY

Result = TypeVar("Result")


class Table:
    """Where the members of one group lay down what the others take."""

    def __init__(self, size: int, seconds: float) -> None:
        self.places: list[Any] = [None] * size
        self._seconds = seconds
        self._barrier = threading.Barrier(size)

    def exchange(self, rank: int, operation: str, value: Any) -> list[Any]:
        """All members' values, in order of rank. Raises `GroupError` if one is missing or does something else."""
        self.places[rank] = (operation, value)
        self._meet()
        found = list(self.places)
        self._meet()
        if any(name != operation for name, _ in found):
            raise GroupError(f"members call different operations: {', '.join(name for name, _ in found)}")
        return [value for _, value in found]

    def leave(self) -> None:
        """Break the group for everybody."""
        self._barrier.abort()

    def _meet(self) -> None:
        try:
            self._barrier.wait(self._seconds)
        except threading.BrokenBarrierError:
            raise GroupError("a member went away, or did not come in time") from None


class _Landing:
    """A sum under way: what comes of it is put into the buffer by `wait`."""

    def __init__(self, buffer: Tensor, total: Tensor) -> None:
        self._buffer = buffer
        self._total: Tensor | None = total

    def wait(self) -> None:
        if self._total is not None:
            self._buffer.copy_(self._total)
            self._total = None


class FakeGroup:
    """One member's view, with the operations of `shoal.comm.group.Group`. Used by its own thread."""

    collective = "fake"
    reason = "a test asked for it"
    progresses = True

    def __init__(self, table: Table, rank: int, hosts: tuple[int, ...] | None = None) -> None:
        self.rank = rank
        self.size = len(table.places)
        self.hosts = hosts or (0,) * self.size
        self.account = Account()
        self._table = table
        self._broken = ""

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        self._exchange("buffer", numel)
        return torch.zeros(numel, dtype=dtype, device=device)

    def release(self, buffer: Tensor) -> None:
        return None

    def sum(self, buffer: Tensor, kind: str = GRADIENT) -> Work:
        parts = self._exchange("sum", buffer.clone())
        _refuse_unequal("sum", parts)
        if self.size == 1:
            return Done()
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        self._sent(kind, 2 * (self.size - 1) * buffer.nbytes // self.size)
        buffer.fill_(torch.nan if buffer.is_floating_point() else 77)
        return _Landing(buffer, total)

    def scatter_sum(self, buffer: Tensor, kind: str = GRADIENT) -> Tensor:
        parts = self._exchange("scatter_sum", buffer.clone())
        total: Tensor = parts[0][self.rank].clone()
        for part in parts[1:]:
            total += part[self.rank]
        self._sent(kind, (self.size - 1) * buffer[0].nbytes)
        return total

    def start_gather(self, buffer: Tensor, kind: str = GRADIENT) -> tuple[Tensor, Work]:
        return _not_yet(self.gather(buffer, kind))

    def start_swap(self, rows: Tensor, kind: str = GRADIENT) -> tuple[Tensor, Work]:
        return _not_yet(self.swap(rows, kind))

    def gather(self, buffer: Tensor, kind: str = CONTROL) -> Tensor:
        parts = self._exchange("gather", buffer.clone())
        _refuse_unequal("gather", parts)
        self._sent(kind, (self.size - 1) * buffer.nbytes)
        return torch.stack(parts)

    def swap(self, rows: Tensor, kind: str = GRADIENT) -> Tensor:
        if rows.shape[0] != self.size:
            raise GroupError(f"swap: {rows.shape[0]} rows were given, and there are {self.size} members")
        parts = self._exchange("swap", rows.clone())
        _refuse_unequal("swap", parts)
        self._sent(kind, rows.nbytes - rows[0].nbytes)
        return torch.stack([part[self.rank] for part in parts])

    def gather_bytes(self, data: bytes, kind: str = CONTROL, purpose: str = "gather_bytes") -> list[bytes]:
        self._sent(kind, (self.size - 1) * len(data))
        return self._exchange(purpose, bytes(data))

    def broadcast(self, buffer: Tensor, kind: str = CONTROL) -> None:
        buffer.copy_(self._exchange("broadcast", buffer.clone())[0])

    def barrier(self) -> None:
        self._exchange("barrier", None)

    def descriptors(self) -> Iterable[int]:
        return ()

    def revoke(self, why: str) -> None:
        self._broken = self._broken or why
        self._table.leave()

    def close(self) -> None:
        self._broken = self._broken or "the group is closed"

    def _exchange(self, operation: str, value: Any) -> list[Any]:
        if self._broken:
            raise GroupError(self._broken)
        return self._table.exchange(self.rank, operation, value)

    def _sent(self, kind: str, size: int) -> None:
        self.account.sent(kind, MEMORY, size, 1)


def run_members(
    size: int, fn: Callable[[FakeGroup], Result], *, seconds: float = 30.0, hosts: tuple[int, ...] | None = None
) -> list[Result]:
    """`fn(group)` on each of `size` members, in threads that have ended when this returns; what each returned.

    The first error that is not only the consequence of another is raised. `seconds` bounds each wait for others.
    """
    table = Table(size, seconds)
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size
    threads = torch.get_num_threads()

    def member(rank: int) -> None:
        torch.set_num_threads(threads)
        group = FakeGroup(table, rank, hosts)
        try:
            results[rank] = fn(group)
        except BaseException as error:
            errors[rank] = error
            table.leave()

    crew = [threading.Thread(target=member, args=(rank,), name=f"member {rank}") for rank in range(size)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    met = [error for error in errors if error is not None]
    if met:
        raise next((error for error in met if not isinstance(error, GroupError)), met[0])
    return results


def _not_yet(found: Tensor) -> tuple[Tensor, Work]:
    """What was found, of which nothing is there before the work is waited for."""
    nothing = torch.full_like(found, torch.nan if found.is_floating_point() else 77)
    return nothing, _Landing(nothing, found)


def _refuse_unequal(operation: str, parts: list[Tensor]) -> None:
    kinds = {(tuple(part.shape), part.dtype) for part in parts}
    if len(kinds) > 1:
        raise GroupError(f"{operation}: members brought tensors of {len(kinds)} kinds: {sorted(map(str, kinds))}")
