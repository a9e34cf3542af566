"""Groups on torch's own backends: gloo, and NCCL for tensors on CUDA."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any, NoReturn

import torch
from torch import Tensor

from shoal.comm.account import Account
from shoal.comm.connections import Connections
from shoal.comm.gathering import gather
from shoal.comm.graves import bury, keep_until_complete
from shoal.comm.group import CPU, REVOKED, Done, Work, bytes_of, numbers_of
from shoal.comm.strings import gather_bytes_by_rows, hint
from shoal.comm.whereabouts import At, Whereabouts
from shoal.core.errors import GroupError
from shoal.core.traffic import CONTROL, GRADIENT, LOOPBACK, NETWORK

_SLICE = timedelta(milliseconds=20)
"""How long to wait at a time before looking whether the peers are still connected, and the group still wanted."""
_LOOKS = 3
"""How often in a row a connection must be seen ended: gloo may be about to tell why."""
_STRAY_SECONDS = 1.0
"""How long to wait before looking whether the others are in another operation, and between two looks."""
_TELL_SECONDS = 0.5
"""How long to wait for what the others are in, where gloo has broken for no reason that a death could have."""
_PEER_LEFT = "closed", "reset"
"""What gloo says of a peer that went away: if because of this, then after it had told."""


class BackendWork:
    """An operation of one of torch's backends."""

    def __init__(self, work: Any, what: str, at: At, group: BackendGroup, patience: Callable[[Any], None]) -> None:
        self._work = work
        self._at = at
        self._what = what
        self._group = group
        self._patience = patience

    def is_complete(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        complete: bool = self._work is None or self._work.is_completed()
        return complete

    def wait(self) -> None:
        if self._work is None:
            self._group.refuse_broken()
            return
        account = self._group.account
        account.enter()
        self._group.enter(self._at)
        try:
            self._group.guarded(self._what, lambda: self._patience(self._work))
        finally:
            self._work = None  # it keeps the backend, and with it the sockets
            self._group.forget_completed()
            account.leave()
            account.done()


class BackendGroup:
    """A group on torch's own backends: `control` moves bytes and CPU tensors, `device` those on accelerators."""

    progresses = True

    def __init__(
        self,
        rank: int,
        hosts: Sequence[int],
        control: Any,
        device: Any | None = None,
        connections: Connections | None = None,
        reason: str = "",
        whereabouts: Whereabouts | None = None,
    ) -> None:
        self.rank = rank
        self.size = len(hosts)
        self.hosts = tuple(hosts)
        self.collective = "gloo" if device is None else "nccl"
        self.reason = reason
        self.account = Account()
        self.patience: Callable[[Any], None] = self._wait
        """How to wait for one of gloo's own works."""
        self.counts = 1
        """What each call counts for in the account's operations."""
        self._control = control
        self._device = device
        self._connections = connections or Connections()
        self._broken = ""
        self._revoked = ""
        self._under_way: deque[Any] = deque()
        self._whereabouts = whereabouts
        self._at = At(0, "")
        self._started_so_far = 0
        self._looked = 0.0

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        self.refuse_broken()
        return torch.zeros(numel, dtype=dtype, device=device)

    def release(self, buffer: Tensor) -> None:
        return None

    def sum(self, buffer: Tensor, kind: str = GRADIENT) -> BackendWork:
        # ring: each member sends every chunk but its own twice
        steps = 2 * (self.size - 1)
        self.account.sent(kind, self._link_to(self.rank - 1), steps * buffer.nbytes // self.size, steps)
        backend, numbers = self._for(buffer), numbers_of(buffer)
        return self._started("sum", backend, buffer, lambda: backend.allreduce([numbers]))

    def scatter_sum(self, buffer: Tensor, kind: str = GRADIENT) -> Tensor:
        # gloo's own reduce_scatter takes 1.5 to 3 times as long as its all-reduce
        total = buffer.clone()
        self.sum(total, kind).wait()
        return total[self.rank].clone()

    def swap(self, rows: Tensor, kind: str = GRADIENT) -> Tensor:
        swapped, work = self.start_swap(rows, kind)
        work.wait()
        return swapped

    def start_swap(self, rows: Tensor, kind: str = GRADIENT) -> tuple[Tensor, Work]:
        swapped = torch.empty_like(rows)
        if not rows.numel():
            return swapped, Done()
        for peer in range(self.size):
            if peer != self.rank:
                self.account.sent(kind, self._link_to(peer), rows.nbytes // self.size, 1)
        backend, given, taken = self._for(rows), bytes_of(rows), bytes_of(swapped)
        return swapped, self._started("swap", backend, rows, lambda: backend.alltoall_base(taken, given, [], []))

    def gather(self, buffer: Tensor, kind: str = CONTROL) -> Tensor:
        stacked, work = self.start_gather(buffer, kind)
        work.wait()
        return stacked

    def start_gather(self, buffer: Tensor, kind: str = GRADIENT) -> tuple[Tensor, Work]:
        stacked = buffer.new_empty((self.size, *buffer.shape))
        if not buffer.numel():
            return stacked, Done()
        self.account.sent(kind, self._link_to(self.rank + 1), (self.size - 1) * buffer.nbytes, self.size - 1)
        backend, given, rows = self._for(buffer), bytes_of(buffer), [bytes_of(row) for row in stacked.unbind()]
        return stacked, self._started("gather", backend, buffer, lambda: backend.allgather([rows], [given]))

    def gather_bytes(self, data: bytes, kind: str = CONTROL, purpose: str = "gather_bytes") -> list[bytes]:
        return gather_bytes_by_rows(self, data, kind, purpose)

    def broadcast(self, buffer: Tensor, kind: str = CONTROL) -> None:
        if buffer.numel():
            for child in _children(self.rank, self.size):
                self.account.sent(kind, self._link_to(child), buffer.nbytes, 1)
            backend = self._for(buffer)
            self._started("broadcast", backend, buffer, lambda: backend.broadcast(bytes_of(buffer), 0)).wait()

    def barrier(self) -> None:
        self.sum(torch.zeros(1), CONTROL).wait()

    def descriptors(self) -> Iterable[int]:
        return tuple(self._connections.descriptors())

    def revoke(self, why: str) -> None:
        if not self._revoked and not self._broken:
            self._revoked = why or REVOKED
            self._connections.end()  # gloo notices at once, here and at the peers

    def close(self) -> None:
        if self._revoked:
            self.give_up(self._revoked)
        self._control = self._device = None
        bury()

    def _started(self, what: str, backend: Any, buffer: Tensor, start: Callable[[], Any]) -> BackendWork:
        self.account.begun(self.counts)
        at = At(self._started_so_far, _said(what, buffer))
        self._started_so_far += 1
        self.enter(at)
        work = self.guarded(what, start)
        if backend is self._control:
            self._under_way.append(work)
        return BackendWork(work, what, at, self, self._patience(backend))

    def enter(self, at: At) -> None:
        """This member is in that operation from now on."""
        self._at, self._looked = at, time.monotonic()

    def refuse_strayed(self) -> None:
        """For those who wait: now and then, whether another member waits for something else. Raises `GroupError`."""
        if self._whereabouts is not None and time.monotonic() - self._looked > _STRAY_SECONDS:
            self._looked = time.monotonic()
            self._tell_where()
            text = self._whereabouts.strayed(self._at)
            if text:
                raise GroupError(text)

    def _tell_where(self) -> None:
        if self._whereabouts is not None and not self._revoked:
            self._whereabouts.tell(self._at)

    def _strayed(self, trouble: str) -> str:
        """Why the group broke, if another member was in another operation: it breaks as well, and tells."""
        if self._whereabouts is None or self._revoked:
            return ""
        left = any(word in trouble for word in _PEER_LEFT)
        return self._whereabouts.strayed(self._at, 0.0 if left else _TELL_SECONDS)

    def forget_completed(self) -> None:
        """Works end in the order in which they began, but for those of a group that breaks."""
        while self._under_way and self._under_way[0].is_completed():
            self._under_way.popleft()

    def _patience(self, backend: Any) -> Callable[[Any], None]:
        return self.patience if backend is self._control else _wait_for_stream

    def guarded(self, what: str, call: Callable[[], Any]) -> Any:
        """What `call` returns. If it breaks, so does the group: its sockets close, and peers that wait notice."""
        self.refuse_broken()
        if not self._broken:
            try:
                return guarded(what, call)
            except GroupError as error:
                trouble = str(error)
            except BaseException as error:
                self.give_up(f"{type(error).__name__} interrupted a {what} over the group")
                raise
            if not self._broken:  # else the host broke meanwhile, and why is known
                self._tell_where()
                self.give_up(trouble)
                self._broken = self._strayed(trouble) or self._broken
        raise GroupError(self._broken)

    def give_up(self, why: str) -> None:
        """The group is broken. Peers are told, and nobody waits for operations under way, not even the destructor."""
        if not self._broken:
            self._broken = self._revoked or why
            self._connections.end()
            keep_until_complete(self._control, self._under_way)
            self._control = self._device = None
            self._under_way = deque()

    def refuse_broken(self) -> None:
        """Raises `GroupError` if the group is broken."""
        if self._revoked:
            self.give_up(self._revoked)
        if self._broken:
            raise GroupError(self._broken)

    def _wait(self, work: Any) -> None:
        """In slices, so that signal handlers run, and that a death which gloo overlooked is seen (about 1 in 100)."""
        gone = 0
        while not work.is_completed():
            try:
                work.wait(_SLICE)
                return
            except RuntimeError as error:
                if work.is_completed():
                    break
                if "timed out" not in str(error).lower():
                    raise
            if self._revoked:
                self.abandon()
            self.refuse_strayed()
            gone = gone + 1 if self.lost_peer() else 0
            if gone > _LOOKS:
                self.abandon()
        work.wait()

    def abandon(self) -> NoReturn:
        """Give up an operation that will never end: a peer is gone, and gloo has overlooked it."""
        raise RuntimeError("a peer has closed its connection")

    def lost_peer(self) -> bool:
        """Whether the connection to a peer has ended; gloo is told of that too, but may not tell those who wait."""
        return self._connections.any_ended()

    def _link_to(self, peer: int) -> str:
        return LOOPBACK if self.hosts[peer % self.size] == self.hosts[self.rank] else NETWORK

    def _for(self, buffer: Tensor) -> Any:
        backend = self._control if self._device is None or buffer.device.type == "cpu" else self._device
        if backend is None:
            raise GroupError(self._broken or "the group is closed")
        return backend


def _said(what: str, buffer: Tensor) -> str:
    """An operation in words."""
    return f"a {what} of {buffer.nbytes} bytes{hint(buffer.nbytes) if what == 'swap' else ''}"


def _wait_for_stream(work: Any) -> None:
    """NCCL's works: the stream waits, not this thread."""
    work.wait()


def _children(rank: int, size: int) -> list[int]:
    """Whom a member passes a broadcast on to, in a binomial tree with member 0 at its root."""
    lowest = rank & -rank if rank else 1 << (size - 1).bit_length()
    steps = [1 << at for at in range(lowest.bit_length() - 1)]
    return [rank + step for step in steps if rank + step < size]


def guarded(what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    # Raised outside the except block: a traceback that holds the broken group's frames keeps its sockets open, and
    # peers further along the ring would wait for their timeout instead of seeing them close.
    raise GroupError(f"{what} over the group broke: {reason}")


def make_gloo(store: Any, rank: int, size: int, *, timeout: timedelta, host: str | None) -> tuple[Any, Connections]:
    """Meet the other members through `store`; gloo's process group, and its connections.

    It listens at the address of `host`, or where this machine's name points if it is None.
    """
    bury()
    distributed: Any = import_module("torch.distributed")
    gloo = distributed.ProcessGroupGloo
    made: list[Any] = []

    def meet() -> None:
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [gloo.create_default_device() if host is None else gloo.create_device(hostname=host)]
        made.append(gloo(distributed.PrefixStore("gloo", store), rank, size, options))

    opened: Connections = guarded("meeting", lambda: Connections.opened_by(meet))
    mine = opened.ports()
    words = gather(store, "gloo-ports", rank, size, ",".join(map(str, mine)).encode())
    told = [text.decode().split(",") for text in words]
    return made[0], opened.between(mine, {int(port) for ports in told for port in ports if port})


def make_nccl(store: Any, rank: int, size: int, *, timeout: timedelta) -> Any:
    distributed: Any = import_module("torch.distributed")
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return distributed.ProcessGroupNCCL(distributed.PrefixStore("nccl", store), rank, size, options)
