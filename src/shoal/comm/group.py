"""Groups: what workers do together.

`Group` is the contract; `SoloGroup` is a group of one, `BackendGroup` runs on gloo, or on NCCL for tensors on CUDA.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.core.errors import GroupError


class Work(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Block until the result is in the buffer. Raises `GroupError` if a peer went away."""


class Group(Protocol):
    """Members 0 … size−1 that call the same operations in the same order.

    Called from one thread. Tensors are contiguous, of equal shape and dtype on all members. A buffer handed to `sum`
    belongs to the group until `wait` returns. Any operation may raise `GroupError`; the group is broken from then on.
    """

    rank: int
    size: int
    bytes_sent: int
    """What this member has sent so far, by the algorithm's own arithmetic (headers not counted)."""

    def sum(self, buffer: Tensor) -> Work:
        """Start replacing `buffer` by the sum over all members; bitwise equal everywhere."""

    def gather(self, buffer: Tensor) -> Tensor:
        """All members' buffers, stacked along a new first dimension in order of rank."""

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """All members' byte strings, which may differ in length, in order of rank."""

    def broadcast(self, buffer: Tensor) -> None:
        """Replace `buffer` by that of member 0."""

    def descriptors(self) -> Iterable[int]:
        """File descriptors that a forked child must close, so that peers notice this member's death."""

    def close(self) -> None:
        """Leave. No operation may be under way."""


class _Done:
    def wait(self) -> None:
        return None


class SoloGroup:
    """A group of one: everything is complete at once and nothing is sent."""

    rank = 0
    size = 1
    bytes_sent = 0

    def sum(self, buffer: Tensor) -> Work:
        return _Done()

    def gather(self, buffer: Tensor) -> Tensor:
        return buffer.unsqueeze(0).clone()

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def broadcast(self, buffer: Tensor) -> None:
        return None

    def descriptors(self) -> Iterable[int]:
        return ()

    def close(self) -> None:
        return None


class _BackendWork:
    def __init__(self, work: Any, what: str) -> None:
        self._work = work
        self._what = what

    def wait(self) -> None:
        _guarded(self._what, self._work.wait)


class BackendGroup:
    """A group on torch's own backends: `control` moves bytes and CPU tensors, `device` those on accelerators."""

    def __init__(self, rank: int, size: int, control: Any, device: Any | None, descriptors: Sequence[int] = ()) -> None:
        self.rank = rank
        self.size = size
        self.bytes_sent = 0
        self._control = control
        self._device = device
        self._descriptors = tuple(descriptors)

    def sum(self, buffer: Tensor) -> Work:
        # ring: each member sends every chunk but its own twice
        self.bytes_sent += 2 * (self.size - 1) * buffer.nbytes // self.size
        backend = self._for(buffer)
        numbers = torch.view_as_real(buffer) if buffer.is_complex() else buffer
        return _BackendWork(_guarded("sum", lambda: backend.allreduce([numbers])), "sum")

    def gather(self, buffer: Tensor) -> Tensor:
        stacked = buffer.new_empty((self.size, *buffer.shape))
        if buffer.numel():
            self.bytes_sent += (self.size - 1) * buffer.nbytes
            backend = self._for(buffer)
            rows = [_bytes_of(row) for row in stacked.unbind()]
            _guarded("gather", lambda: backend.allgather([rows], [_bytes_of(buffer)]).wait())
        return stacked

    def gather_bytes(self, data: bytes) -> list[bytes]:
        lengths = self.gather(torch.tensor([len(data)])).flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = self.gather(padded)
        return [rows[rank, :length].numpy().tobytes() for rank, length in enumerate(lengths)]

    def broadcast(self, buffer: Tensor) -> None:
        if buffer.numel():
            self.bytes_sent += buffer.nbytes if self.rank == 0 else 0
            backend = self._for(buffer)
            _guarded("broadcast", lambda: backend.broadcast(_bytes_of(buffer), 0).wait())

    def descriptors(self) -> Iterable[int]:
        return self._descriptors

    def close(self) -> None:
        self._control = self._device = None

    def _for(self, buffer: Tensor) -> Any:
        return self._control if self._device is None or buffer.device.type == "cpu" else self._device


def _bytes_of(buffer: Tensor) -> Tensor:
    """The same memory as bytes: what is only moved need not be of a type that the backend can add."""
    return buffer.view(-1).view(torch.uint8)


def _guarded(what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    # Raised outside the except block: a traceback that holds the broken group's frames keeps its sockets open, and
    # peers further along the ring would wait for their timeout instead of seeing them close.
    raise GroupError(f"{what} over the group broke: {reason}")


def make_group(
    store: Any, rank: int, size: int, device: torch.device, *, timeout: timedelta, host: str | None = None
) -> Group:
    """Meet the other members through `store` (a `torch.distributed.Store`): gloo, and NCCL where `device` is CUDA.

    Gloo listens at the address of `host`, or where this machine's name points if it is None.
    """
    if size == 1:
        return SoloGroup()
    distributed: Any = import_module("torch.distributed")
    before = _sockets()
    gloo = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_default_device() if host is None else gloo.create_device(hostname=host)]
    control = _guarded("meeting", lambda: gloo(distributed.PrefixStore("gloo", store), rank, size, options))
    accelerated = None
    if device.type == "cuda":
        nccl_options = distributed.ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout
        accelerated = distributed.ProcessGroupNCCL(distributed.PrefixStore("nccl", store), rank, size, nccl_options)
    return BackendGroup(rank, size, control, accelerated, sorted(_sockets() - before))


def _sockets() -> set[int]:
    found: set[int] = set()
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return found
    for name in names:
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.add(int(name))
        except OSError:
            continue
    return found
