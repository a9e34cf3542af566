"""What the codecs of this package claim: the values with which they go through the suites, and examples of claims."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.comm.codecs.cast import CastCodec, RawCodec
from shoal.comm.codecs.int8 import Int8Codec
from shoal.comm.codecs.lossless import LosslessCodec
from shoal.comm.codecs.make import make_summing
from shoal.comm.codecs.onebit import OneBitCodec
from shoal.comm.codecs.powersgd import PowerSGDCodec
from shoal.comm.codecs.topk import TopKCodec
from shoal.core.spec import parse
from shoal.testing.codec_sums import SumClaim
from shoal.testing.codecs import Claim


def relative(part: float, of_largest: float = 0.0) -> Callable[[Tensor], Tensor]:
    def bound(numbers: Tensor) -> Tensor:
        return part * numbers.abs() + of_largest * (numbers.abs().max() if numbers.numel() else 0.0)

    return bound


def of_scale(block: int, part: float) -> Callable[[Tensor], Tensor]:
    """A part of the largest number in each block."""

    def bound(numbers: Tensor) -> Tensor:
        largest = [piece.abs().max().expand(piece.numel()) for piece in numbers.split(block) if piece.numel()]
        return part * torch.cat(largest) if largest else numbers

    return bound


ZEROED = 127 * 1.2e-38
"""Blocks of int8 whose largest number is smaller have no scale."""
CLAIMS = {
    "none": Claim(RawCodec, kept=1.0, error=relative(0.0)),
    "fp16": Claim(lambda: CastCodec("fp16"), kept=1 - 2.0**-22, error=relative(2.0**-11, 2.0**-30)),
    "bf16": Claim(lambda: CastCodec("bf16"), kept=1 - 2.0**-16, error=relative(2.0**-8), tiny=1e-40),
    "int8": Claim(Int8Codec, kept=1 - 256 / 254**2, error=of_scale(256, 1 / 253.9), tiny=ZEROED),
    "int8 by 8": Claim(lambda: Int8Codec(8), kept=1 - 8 / 254**2, error=of_scale(8, 1 / 253.9), tiny=ZEROED),
    "int8 stochastic": Claim(
        lambda: Int8Codec(256, "stochastic"),
        kept=1 - 256 / 127**2,
        error=of_scale(256, 1 / 126.9),
        unbiased=True,
        tiny=ZEROED,
    ),
    "onebit": Claim(OneBitCodec, kept=1 / 1024),
    "onebit by 64": Claim(lambda: OneBitCodec(64), kept=1 / 64),
    "topk exact": Claim(lambda: TopKCodec(0.05, "exact"), kept=0.05),
    "topk sampled": Claim(lambda: TopKCodec(0.05, "sampled"), kept=0.025),
    "powersgd": Claim(lambda: PowerSGDCodec(2, 16), kept=1 / 16),
    "lossless none": Claim(lambda: LosslessCodec(RawCodec(), "zstd"), kept=1.0, error=relative(0.0)),
    "lossless int8": Claim(
        lambda: LosslessCodec(Int8Codec(), "lz4"), kept=1 - 256 / 254**2, error=of_scale(256, 1 / 253.9), tiny=ZEROED
    ),
    "lossless topk": Claim(lambda: LosslessCodec(TopKCodec(0.05, "exact"), "zstd"), kept=0.05),
}


def summed(spec: str, close: float, *, conserves: bool = True, bounded: float = 20.0) -> SumClaim:
    return SumClaim(lambda group, shapes: make_summing(parse("codec", spec), group, shapes), close, conserves, bounded)


SUMS = {
    "none": summed("none", 1e-6),
    "fp16": summed("fp16", 1e-3, conserves=False),
    "fp16:feedback=true": summed("fp16:feedback=true", 1e-3, conserves=False),
    "bf16": summed("bf16", 1e-2, conserves=False),
    "bf16:feedback=true": summed("bf16:feedback=true", 1e-2, conserves=False),
    "int8": summed("int8", 0.03),
    "int8:rounding=stochastic": summed("int8:rounding=stochastic,block=64,feedback=false", 0.05, conserves=False),
    "onebit": summed("onebit:block=64", 1.0),
    "topk": summed("topk:density=0.05,correction=false,mask=false", 1.0),
    "topk with momentum": summed("topk:density=0.05,threshold=exact", 1.0, conserves=False, bounded=200.0),
    "powersgd": summed("powersgd:rank=2", 1.0),
    "none, zstd": summed("none:lossless=zstd", 1e-6),
    "fp16, zstd": summed("fp16:feedback=true,lossless=zstd", 2e-3, conserves=False),
    "int8, lz4": summed("int8:lossless=lz4", 0.03),
    "topk, zstd": summed("topk:density=0.05,correction=false,mask=false,lossless=zstd", 1.0),
    "powersgd, zstd": summed("powersgd:rank=2,lossless=zstd", 1.0),
}
