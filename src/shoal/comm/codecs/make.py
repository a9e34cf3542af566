"""From a codec's spec to what sums with it over a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from shoal.comm.codecs.cast import CastCodec, CastSum, RawCodec
from shoal.comm.codecs.contract import Codec, Summing
from shoal.comm.codecs.int8 import Int8Codec
from shoal.comm.codecs.lossless import LosslessCodec, LosslessSum, choose_method
from shoal.comm.codecs.lowrank import LowRankSum
from shoal.comm.codecs.memory import Memory
from shoal.comm.codecs.onebit import OneBitCodec
from shoal.comm.codecs.sparse import SparseSum
from shoal.comm.codecs.twophase import TwoPhaseSum
from shoal.comm.group import Done, Group, Work
from shoal.core.errors import ConfigError
from shoal.core.spec import AnyCodec, AutoCodec, Bf16, Fp16, Int8, NoCodec, OneBit, PowerSGD, TopK
from shoal.core.traffic import GRADIENT


def make_summing(spec: AnyCodec, group: Group, shapes: Sequence[tuple[int, ...]]) -> Summing:
    """What sums a vector in which tensors of `shapes` lie one after the other. No operation of the group.

    Raises `ConfigError` for `auto`, which is decided by measurement before, and if a package is missing.
    """
    plain = _plain(spec, group, shapes)
    if isinstance(spec, AutoCodec) or not spec.lossless:
        return plain
    method = choose_method(spec.lossless)
    return LosslessSum(group, plain, _packed(spec, group, shapes, method), method)


def _plain(spec: AnyCodec, group: Group, shapes: Sequence[tuple[int, ...]]) -> Summing:
    match spec:
        case NoCodec():
            return PlainSum(group)
        case Fp16() | Bf16():
            return CastSum(group, spec.name, spec.feedback)
        case Int8():
            return TwoPhaseSum(group, Int8Codec(spec.block, spec.rounding), spec.feedback)
        case OneBit():
            return TwoPhaseSum(group, OneBitCodec(spec.block), True)
        case TopK():
            return SparseSum(group, spec)
        case PowerSGD():
            return LowRankSum(group, spec.rank, shapes)
        case AutoCodec():
            raise ConfigError("codec auto sums nothing itself: the first steps decide which codec is used")


def _packed(spec: AnyCodec, group: Group, shapes: Sequence[tuple[int, ...]], method: str) -> Summing:
    """The same with payloads that are compressed. What is summed in place becomes a sum in two phases."""
    if isinstance(spec, PowerSGD):
        return LowRankSum(cast(Group, Packing(group, method)), spec.rank, shapes)
    if isinstance(spec, TopK):
        return SparseSum(group, spec, wrap=lambda codec: LosslessCodec(codec, method))
    codec, feedback = _two_phase(spec)
    return TwoPhaseSum(group, LosslessCodec(codec, method), feedback)


def _two_phase(spec: AnyCodec) -> tuple[Codec, bool]:
    match spec:
        case Fp16() | Bf16():
            return CastCodec(spec.name), spec.feedback
        case Int8():
            return Int8Codec(spec.block, spec.rounding), spec.feedback
        case OneBit():
            return OneBitCodec(spec.block), True
        case _:
            return RawCodec(), False


class PlainSum:
    """Nothing is encoded, nothing is lost; what an earlier codec left in memory is sent."""

    name = "none"

    def __init__(self, group: Group) -> None:
        self._group = group

    def sum(self, flat: Tensor, memory: Memory, *, key: int = 0, gauge: Tensor | None = None) -> None:
        memory.fold()
        if not memory.has():
            self._group.sum(flat).wait()
            return
        residual, shadow = memory.private()
        flat.add_(residual)
        shadow.zero_()
        self._group.sum(flat).wait()
        if not bool(torch.isfinite(flat).all()):
            shadow.copy_(residual)


class Packing:
    """A group whose sums of single precision are added in two phases, compressed. All else is the group's own.

    For what sums few numbers by itself, such as the factors of matrices. Sums are complete when they return.
    """

    def __init__(self, group: Group, method: str) -> None:
        self._group = group
        self._summing = TwoPhaseSum(group, LosslessCodec(RawCodec(), method), False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def sum(self, buffer: Tensor, kind: str = GRADIENT) -> Work:
        if buffer.dtype != torch.float32:
            return self._group.sum(buffer, kind)
        account = self._group.account
        label = account.codec
        try:
            self._summing.sum(buffer.view(-1), Memory(buffer.numel(), buffer.device))
        finally:
            account.codec = label
        return Done()
