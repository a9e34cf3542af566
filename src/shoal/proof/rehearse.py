"""The rehearsal: the examination of a loss, played where it leaves no trace.

It is played where the first batch is yielded, so that the Trainer and own loops share it: in a fork of the worker,
whose loop gets parts of the batch instead of it, and whose output is dropped. Every worker plays the same samples and
comes to the same finding, so nobody waits for a verdict, and no death can lose it. Where there is no fork (CUDA), the
Trainer's loss is played in the worker itself, and what changed is put back (`inplace`). An own loop is not: an error
in a part of the batch would end it.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import select
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.data.tree import mapped
from shoal.draws import here
from shoal.draws.forward import PAST, Forward, Keying, seed_of
from shoal.draws.sites import as_tree, from_tree
from shoal.engines.lifeline import die_with_parent
from shoal.engines.openfiles import OpenFile, open_files, separate
from shoal.proof import counted
from shoal.proof.examine import Ask, Examination, Finding, Kind, Taken, examine
from shoal.proof.inplace import Kept, let_go_of_gradient, state_of

if TYPE_CHECKING:
    from shoal.proof.loss import Loss

MOST_SAMPLES = 64
_PATIENCE = 30.0
"""Seconds without a word from the fork, in which it did not compute either, after which it is given up. A lock that
another thread held may keep it."""
_BUSY = 0.1
"""Share of the time that it computes, if it computes."""
_HALF = (torch.float16, torch.bfloat16)
_NUMBERS = (int, float)

_NOT_COMPUTED = Taken(samples=0, total=0.0, weight=0.0)

Fetch = Callable[[int, int], Any]
"""The samples start … stop−1 of those to be examined, as a batch of their own."""


class _Told(msgspec.Struct, frozen=True, array_like=True):
    """What the fork tells of its finding."""

    kind: str
    gap: float
    detail: str
    rules: list[list[int]]
    by_forward: str
    draws: bool
    others: bool
    unit: float


class Rehearsal:
    """Made for one examination of samples at `first` … `first + samples − 1` of a step; see `play`."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        keying: Keying,
        fetch: Fetch,
        *,
        seed: tuple[int, int, int],
        first: int,
        samples: int,
        catches: bool,
        norms: bool = False,
        thorough: bool = False,
    ) -> None:
        """`seed` is that of the run, the step and its phase. `catches`: errors of the loss are told of by `fell`.

        With `norms`, BatchNorm is in the mode that it is in. Else it does not train: it couples samples by design,
        which is said elsewhere. `thorough`: see `examine`.
        """
        self.finding: Finding | None = None
        self.left = ""
        """What has changed and could not be put back, if there was no fork."""
        self._modules = modules
        self._keying = keying
        self._fetch = fetch
        self._seed = seed_of(*seed)
        self._first = first
        self._samples = samples
        self._catches = catches
        self._norms = norms
        self._thorough = thorough
        self._pipe: int | None = None
        self._ask: Ask | None = None
        self._taken: Taken | None = None
        self._suspected: list[Finding] = []
        self._forward: Forward | None = None
        self._half = False
        self._numbers: dict[str, float] = {}

    # -- in the worker -------------------------------------------------------------------------------------------------

    def play(self) -> Iterator[Any]:
        """Batches to compute, in a fork that never gets to their end; none in the worker, which then has `finding`."""
        if not _can_fork():
            yield from self._in_place()
            return
        read, write = os.pipe()
        for stream in (sys.stdout, sys.stderr):
            _flush(stream)
        parent, files = os.getpid(), open_files()
        with warnings.catch_warnings():
            # Python 3.12 warns of forking beside threads; the fork uses none of theirs, and one that hangs is ended
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            os.close(read)
            self._pipe = write
            self._begin(parent, files)
            yield from self._batches()
            self._leave(self.finding or Finding(Kind.UNPROVEN))
        os.close(write)
        try:
            self.finding = _read(read, pid)
        except BaseException:
            _end(pid)
            raise
        finally:
            os.close(read)

    def _in_place(self) -> Iterator[Any]:
        if not self._catches:
            self.finding = Finding(Kind.UNPROVEN, detail="an own loop is tried in a fork only, and there is none here")
            return
        kept = Kept(self._modules)
        entering = self._watch_autocast()
        try:
            with _eager():
                yield from self._batches()
        finally:
            _set_autocast(entering)
            self.left = kept.put_back()

    # -- in the fork ---------------------------------------------------------------------------------------------------

    def _begin(self, parent: int, files: list[OpenFile]) -> None:
        global _playing
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        # they may lead elsewhere, and so may handlers
        sys.stdout = sys.stderr = open(nothing, "w", closefd=False)  # noqa: SIM115
        logging.disable()
        separate(files)
        # what is garbage here is garbage in the worker too, and its finalizers are for there
        gc.disable()
        torch.set_num_threads(1)
        _playing = self
        self._watch_autocast()
        _eager().__enter__()
        for module in self._modules:
            for param in module.parameters():
                let_go_of_gradient(param)

    def _watch_autocast(self) -> Any:
        """From now on it is seen; returns what was there before."""
        enter: Any = torch.amp.autocast_mode.autocast.__enter__

        def entering(context: Any) -> Any:
            self._half = self._half or getattr(context, "fast_dtype", None) in _HALF
            return enter(context)

        _set_autocast(entering)
        return enter

    def _batches(self) -> Iterator[Any]:
        for part in [part for module in self._modules for part in module.modules()]:
            if isinstance(part, _BatchNorm) and not self._norms:
                part.training = False
        rules = dict(self._keying.rules)
        examination: Examination = examine(self._samples, rules, self._suspected, thorough=self._thorough)
        answer: Taken | None = None
        while True:
            try:
                self._ask = examination.send(answer)  # type: ignore[arg-type]
            except StopIteration as end:
                self.finding = end.value
                return
            self._word()
            ask, self._taken = self._ask, None
            if ask.double and not self._catches:
                answer = _NOT_COMPUTED
                continue
            batch = self._fetch(ask.start, ask.stop)
            yield from self._part(ask, batch)
            if self.finding is not None:
                return
            if self._taken is None:
                self.finding = Finding(Kind.UNPROVEN, detail="a batch was used without step.backward(loss)")
                return
            answer = self._taken

    def _part(self, ask: Ask, batch: Any) -> Iterator[Any]:
        doubled = _double(self._modules) if ask.double else []
        self._open(ask)
        try:
            yield _doubled(batch) if ask.double else batch
        except GeneratorExit:
            # before anything else: what catches the error there is not to go on in the fork
            self._leave(
                Finding(Kind.UNPROVEN, detail="the loop was left in a part of the batch, by an error or a break")
            )
            raise
        finally:
            here.enter(None)
            counted.end()
            _undouble(doubled)

    def _open(self, ask: Ask) -> None:
        self._keying.fresh = dict(ask.rules)
        positions = range(self._first + ask.start, self._first + ask.stop)
        self._numbers = _numbers(self._modules)
        self._forward = Forward(self._keying, positions, self._seed, recording=True, still=ask.still)
        self._forward.begin()
        self._generators = _generators()
        here.enter(self._forward)
        counted.begin()

    def take(self, loss: Loss) -> None:
        """The loss of the part that was yielded last. Several of them in one part add up."""
        ask, forward = self._ask, self._forward
        assert ask is not None and forward is not None
        count = ask.stop - ask.start
        weight = float(count) if loss.weight is None else loss.weight
        value = float(loss.value.detach())
        total = value * (weight if loss.mean else 1.0) if weight else 0.0
        if self._taken is not None:
            self._taken = replace(self._taken, total=self._taken.total + total)
            return
        now = _numbers(self._modules)
        self._taken = Taken(
            samples=count,
            total=total,
            weight=weight,
            given=loss.weight is not None,
            counted=loss.weight is not None and loss.mean,
            half=self._half or self._halves(loss.value),
            seen=tuple(forward.seen),
            past=_past(forward),
            own=tuple(forward.own),
            others=tuple(self._moved()),
            permuted=forward.permuted,
            changed={name: value for name, value in now.items() if self._numbers.get(name) != value},
        )

    def _moved(self) -> list[str]:
        """Which of the generators beside torch's were drawn from."""
        names = "Python's generator", "numpy's generator"
        return [name for name, now, then in zip(names, _generators(), self._generators, strict=True) if now != then]

    def _halves(self, value: Tensor) -> bool:
        dtypes = {param.dtype for module in self._modules for param in module.parameters()}
        if value.dtype in _HALF or not dtypes.isdisjoint(_HALF):
            return True
        # around all of it, so that it was entered before
        casts = any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
        return casts or torch.get_float32_matmul_precision() != "highest"

    def fell(self, error: BaseException) -> None:
        """The loss raised an error. This does not return in a fork, unless it was a trial in double precision."""
        if self._ask is not None and self._ask.double and self._catches:
            self._taken = _NOT_COMPUTED
            return
        why = f"{type(error).__name__} in a part of the batch: {error}"[:300]
        # what is known by then stays known, though its reason cannot be found
        self._leave(self._suspected[-1] if self._suspected else Finding(Kind.UNPROVEN, detail=why))

    def give_up(self, why: str) -> None:
        """What the loop is about to do cannot be done here."""
        self._leave(Finding(Kind.UNPROVEN, detail=why))

    def _word(self) -> None:
        if self._pipe is not None:
            os.write(self._pipe, b".")

    def _leave(self, finding: Finding) -> None:
        if self._pipe is None:  # there is no fork to be left
            self.finding = finding
            return
        told = _Told(
            str(finding.kind),
            finding.gap,
            finding.detail,
            as_tree(finding.rules),
            finding.by_forward,
            finding.draws,
            finding.others,
            finding.unit,
        )
        os.write(self._pipe, b"!" + msgspec.msgpack.encode(told))
        os._exit(0)


def _can_fork() -> bool:
    """A fork of a process that has used CUDA cannot use it."""
    return hasattr(os, "fork") and not (torch.cuda.is_available() and torch.cuda.is_initialized())


_playing: Rehearsal | None = None


def playing() -> Rehearsal | None:
    """In the fork of a rehearsal: that one."""
    return _playing


def _set_autocast(enter: Any) -> None:
    setattr(torch.amp.autocast_mode.autocast, "__enter__", enter)  # noqa: B010


def _eager() -> AbstractContextManager[Any]:
    """Within, nothing is compiled."""
    set_stance: Any = torch.compiler.set_stance
    return set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _past(forward: Forward) -> str:
    if forward.past:
        return forward.past
    return PAST if forward.moved() else ""


def _end(pid: int) -> None:
    """Also if it has ended."""
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _computed(pid: int) -> float:
    """Seconds that a process has computed."""
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as stat:
        times = stat.read().rpartition(b")")[2].split()[11:13]
        return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _read(pipe: int, pid: int) -> Finding:
    """What the fork found. It is dead afterwards."""
    told, computed = b"", _computed(pid)
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while True:
        if not poll.poll(1000.0 * _PATIENCE):
            before, computed = computed, _computed(pid)
            if computed - before > _BUSY * _PATIENCE:
                continue  # a large model
            _end(pid)
            return Finding(Kind.UNPROVEN, detail=f"nothing was heard of it for {_PATIENCE:.0f} s")
        data = os.read(pipe, 1 << 16)
        if not data:
            break
        told += data
    _, status = os.waitpid(pid, 0)
    _, mark, body = told.partition(b"!")
    if not mark:
        return Finding(Kind.UNPROVEN, detail=f"its process ended with status {status}")
    found = msgspec.msgpack.decode(body, type=_Told)
    return Finding(
        Kind(found.kind),
        found.gap,
        found.detail,
        from_tree(found.rules),
        found.by_forward,
        found.draws,
        found.others,
        found.unit,
    )


def _generators() -> tuple[Any, bytes]:
    """The states of those that are not torch's."""
    state: Any = np.random.get_state(legacy=False)
    return random.getstate(), repr((state["state"]["pos"], state["state"]["key"].tobytes())).encode()


def _flush(stream: Any) -> None:
    with suppress(OSError, ValueError, AttributeError):  # closed, or none
        stream.flush()


def _numbers(modules: Sequence[nn.Module]) -> dict[str, float]:
    """Numbers among the modules' plain attributes, by name."""
    found: dict[str, float] = {}
    for root in modules:
        for name, module in root.named_modules():
            for key, value in vars(module).items():
                if type(value) in _NUMBERS and key != "training":
                    found[f"{name}.{key}" if name else key] = value
    return found


def _double(modules: Sequence[nn.Module]) -> list[tuple[Tensor, Tensor]]:
    """Make parameters and buffers double; what they were."""
    kept = []
    for module in modules:
        for tensor in state_of(module):
            if tensor.dtype == torch.float32:
                kept.append((tensor, tensor.data))
                tensor.data = tensor.data.double()
    return kept


def _undouble(kept: Sequence[tuple[Tensor, Tensor]]) -> None:
    for tensor, data in kept:
        tensor.data = data


def _doubled(tree: Any) -> Any:
    return mapped(
        tree, lambda leaf: leaf.double() if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 else leaf
    )
