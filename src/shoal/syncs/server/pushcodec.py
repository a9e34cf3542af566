"""How a gradient travels to servers on other hosts: in which parts, and encoded with what.

The bytes of a shard are cut into *stretches*, each of which travels as one part: together they have all parameters,
and perhaps what lies between these. What has a codec is single precision; all else travels as it is. Where a codec is
worse for numbers that lie between parameters (`onebit` has no zero) or for more than one matrix at a time
(`powersgd`), stretches end there.

Each worker keeps what encoding has lost of its own pushes, and adds it to the next one (`comm.codecs.memory`).
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from shoal.comm.codecs.blocks import mixed
from shoal.comm.codecs.cast import CastCodec
from shoal.comm.codecs.contract import Codec, State
from shoal.comm.codecs.int8 import Int8Codec
from shoal.comm.codecs.memory import Memory
from shoal.comm.codecs.onebit import OneBitCodec
from shoal.comm.codecs.powersgd import PowerSGDCodec
from shoal.comm.codecs.topk import TopKCodec
from shoal.core.errors import PayloadError
from shoal.core.spec import AnyCodec, AutoCodec, Bf16, Fp16, Int8, NoCodec, OneBit, PowerSGD, TopK
from shoal.syncs.server.messages import Lease

if TYPE_CHECKING:
    from shoal.syncs.server.cutting import Cut

PART_BYTES = 1 << 20
"""Of a part that travels as it is: small enough that the first leaves early, large enough to cost little each."""
ENCODED_BYTES = 2 << 20
"""Of a part that is encoded, before that; a whole matrix (`powersgd`) may have more."""
_ROWS = struct.Struct("<II")
"""Before a payload of powersgd: the rows of its matrix, and the same with all bits changed."""
_MOST_ROWS = (1 << 32) - 1
_FIRST_DENSITY = 0.25


class Stretch(NamedTuple):
    """Bytes start … stop−1 of the area, all of one shard, which travel together."""

    shard: int
    start: int
    stop: int
    params: tuple[int, ...]
    """Those that have bytes in it."""
    encoded: bool
    rows: int = 1
    """As a matrix (`powersgd`)."""


def note(spec: AnyCodec) -> str:
    """What of the codec is not used with servers, in words; empty if all is."""
    if isinstance(spec, AutoCodec):
        return (
            "codec auto is measured with allreduce only: pushes to servers travel as they are; name a codec to use it"
        )
    said = []
    if spec.lossless:
        said.append(f"lossless={spec.lossless} is not used with servers")
    if isinstance(spec, TopK) and (spec.clip or spec.correction):
        said.append(
            "topk's correction, mask and clip are not used with servers: momentum acts on the servers, and the "
            "Trainer's clip bounds the gradient of the step"
        )
    return "; ".join(said)


def has_codec(spec: AnyCodec) -> bool:
    return not isinstance(spec, NoCodec | AutoCodec)


# -- stretches ---------------------------------------------------------------------------------------------------------


def stretches(cut: Cut, spec: AnyCodec) -> list[Stretch]:
    """All of them, by shard and by where they begin."""
    found: list[Stretch] = []
    for shard in cut.shards:
        grains = _grains(cut, shard.number, spec)
        whole: list[Stretch] = []
        for grain in grains:
            last = whole[-1] if whole else None
            if last is not None and _fit(last, grain, spec):
                params = last.params + tuple(param for param in grain.params if param not in last.params)
                whole[-1] = last._replace(stop=grain.stop, params=params)
            else:
                whole.append(grain)
        found += [stretch for stretch in whole if stretch.params]
    return found


def _fit(one: Stretch, other: Stretch, spec: AnyCodec) -> bool:
    """Whether two neighbours may travel as one."""
    if one.encoded != other.encoded or one.rows > 1 or other.rows > 1:
        return False
    if isinstance(spec, OneBit) and one.encoded and bool(one.params) != bool(other.params):
        return False
    return other.stop - one.start <= (ENCODED_BYTES if one.encoded else PART_BYTES)


def _grains(cut: Cut, number: int, spec: AnyCodec) -> list[Stretch]:
    """A shard in pieces of parameters, none too large, and what lies between them."""
    shard = cut.shards[number]
    found: list[Stretch] = []
    at = shard.start
    encoded = False
    for piece in shard.portions:
        dtype = cut.dtypes[piece.param]
        size = dtype.itemsize
        base = cut.offsets[piece.param]
        start, stop = base + piece.start * size, base + piece.stop * size
        if start == stop:
            continue
        encoded = has_codec(spec) and dtype == torch.float32
        if at < start:
            found.append(Stretch(number, at, start, (), _between(at, start, encoded)))
        if encoded and isinstance(spec, PowerSGD):
            found += _matrix(cut, number, piece.param, piece.start, piece.stop)
        else:
            most = ENCODED_BYTES if encoded else PART_BYTES
            found += [
                Stretch(number, first, min(first + most, stop), (piece.param,), encoded)
                for first in range(start, stop, most)
            ]
        at = stop
    if at < shard.stop:
        found.append(Stretch(number, at, shard.stop, (), _between(at, shard.stop, encoded)))
    return found


def _between(start: int, stop: int, encoded: bool) -> bool:
    return encoded and start % 4 == 0 and stop % 4 == 0


def _matrix(cut: Cut, number: int, param: int, first: int, last: int) -> list[Stretch]:
    """Elements first … last−1 of a parameter: what is of rows that are not whole, and whole rows between these."""
    shape, base = cut.shapes[param], cut.offsets[param]
    count = 1
    for length in shape:
        count *= length
    width = count // shape[0] if len(shape) > 1 and shape[0] else 0
    if width:
        top, bottom = -(-first // width) * width, last // width * width
        if 2 * width <= bottom - top <= _MOST_ROWS * width:
            edges = [(first, top, 1), (top, bottom, (bottom - top) // width), (bottom, last, 1)]
            return [
                Stretch(number, base + 4 * start, base + 4 * stop, (param,), True, rows)
                for start, stop, rows in edges
                if start < stop
            ]
    return [Stretch(number, base + 4 * first, base + 4 * last, (param,), True)]


# -- encoding ----------------------------------------------------------------------------------------------------------


class PushCodec:
    """One worker's: encodes stretches of its pushes, and remembers what that loses until it is sent."""

    def __init__(self, spec: AnyCodec, cut: Cut, *, seat: int, seed: int) -> None:
        self.spec = spec
        self.note = note(spec)
        self._cut = cut
        self._seat, self._seed = seat, seed
        self._feedback = has_codec(spec) and bool(getattr(spec, "feedback", True))
        self._memories: dict[int, Memory] = {}

    def open(self) -> None:
        """A push begins: what an earlier one that was not acknowledged has lost does not count."""
        for memory in self._memories.values():
            memory.open()

    def encode(self, lease: Lease, stretch: Stretch, area: Tensor, used: Sequence[bool]) -> Tensor:
        """The payload of a stretch of the gradient in `area`; to be called once in a push.

        What is kept of parameters that are not used in this push stays where it is: servers may leave these out.
        """
        numbers = area[stretch.start : stretch.stop].view(torch.float32)
        state = State(key=mixed(self._seed, self._seat, lease.step, lease.start, stretch.start))
        kept: list[tuple[slice, Tensor]] = []
        if self._feedback:
            residual, state.shadow = (vector[self._within(stretch)] for vector in self._memory(stretch).private())
            unused = [param for param in stretch.params if not used[param]]
            if unused:
                kept = [(where, residual[where].clone()) for where in self._where(stretch, unused)]
                residual = residual.clone()
                for where, _ in kept:
                    residual[where] = 0
            state.residual = residual
        payload = _codec(self.spec, stretch.rows, lease.step).encode(numbers, state)
        for where, values in kept:
            if state.shadow is not None:
                state.shadow[where] += values
        if isinstance(self.spec, PowerSGD):
            head = torch.frombuffer(bytearray(_ROWS.pack(stretch.rows, stretch.rows ^ _MOST_ROWS)), dtype=torch.uint8)
            payload = torch.cat([head, payload])
        return payload

    def commit(self, shard: int) -> None:
        """All of a push that is for this shard is acknowledged."""
        if shard in self._memories:
            self._memories[shard].commit()

    def residual(self, shard: int) -> Tensor | None:
        """What is still to be sent of a shard, live; None if nothing was ever lost. Does not count as being used."""
        memory = self._memories.get(shard)
        return None if memory is None else memory.parts().get("residual")

    def _memory(self, stretch: Stretch) -> Memory:
        memory = self._memories.get(stretch.shard)
        if memory is None:
            shard = self._cut.shards[stretch.shard]
            memory = self._memories[stretch.shard] = Memory(-(-(shard.stop - shard.start) // 4), torch.device("cpu"))
        return memory

    def _within(self, stretch: Stretch) -> slice:
        """Where its numbers are among those of the shard, which begins at a multiple of 64 bytes."""
        first = self._cut.shards[stretch.shard].start
        return slice((stretch.start - first) // 4, (stretch.stop - first) // 4)

    def _where(self, stretch: Stretch, params: Sequence[int]) -> list[slice]:
        """Where numbers of these parameters are in a stretch."""
        found = []
        for piece in self._cut.shards[stretch.shard].portions:
            if piece.param in params:
                base = self._cut.offsets[piece.param] - stretch.start
                start, stop = (base + 4 * piece.start) // 4, (base + 4 * piece.stop) // 4
                found.append(slice(max(0, start), min(stop, (stretch.stop - stretch.start) // 4)))
        return found


def decode_part(codec_spec: AnyCodec, payload: memoryview, out: Tensor) -> None:
    """Write what a worker encoded into `out`: the bytes start … stop of its `Part`, as bytes or as single precision.

    Raises `PayloadError` if it is damaged, too long or of something else, before anything is allocated or changed.
    """
    if not has_codec(codec_spec):
        raise PayloadError(f"an encoded part came, and codec {codec_spec.name} encodes nothing")
    numbers = _numbers(out)
    rows, payload = 1, memoryview(payload).cast("B")
    if isinstance(codec_spec, PowerSGD):
        if len(payload) < _ROWS.size:
            raise PayloadError(f"a payload of powersgd has {len(payload)} bytes, and needs the rows of its matrix")
        rows, check = _ROWS.unpack(payload[: _ROWS.size])
        payload = payload[_ROWS.size :]
        if check != rows ^ _MOST_ROWS or not 1 <= rows <= max(1, numbers.numel()):
            raise PayloadError(f"a payload of powersgd has {rows} rows for {numbers.numel()} numbers")
    codec = _codec(codec_spec, rows, None)
    most = codec.most_bytes(numbers.numel())
    if not 0 < len(payload) <= most:
        raise PayloadError(
            f"a payload of {len(payload)} bytes came; {numbers.numel()} numbers with {codec.name} take at most {most}"
        )
    codec.decode(_aligned(payload), numbers)


def _numbers(out: Tensor) -> Tensor:
    if out.dtype == torch.float32:
        return out
    if out.dtype != torch.uint8 or out.numel() % 4 or out.storage_offset() % 4:
        raise PayloadError(f"an encoded part came for {out.numel()} bytes that are not single precision")
    return out.view(torch.float32)


def _aligned(payload: memoryview) -> Tensor:
    """The bytes as a tensor that is only read, at an address where words of 8 bytes may lie."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the memory may be read-only, and nobody writes to it
        tensor = torch.frombuffer(payload, dtype=torch.uint8)
    return tensor if tensor.data_ptr() % 8 == 0 else tensor.clone()


def _codec(spec: AnyCodec, rows: int, step: int | None) -> Codec:
    """For a step, or to decode what is of any."""
    match spec:
        case Fp16() | Bf16():
            return CastCodec(spec.name)
        case Int8():
            return Int8Codec(spec.block, spec.rounding)
        case OneBit():
            return OneBitCodec(spec.block)
        case TopK():
            return TopKCodec(_density(spec, step), spec.threshold)
        case PowerSGD():
            return PowerSGDCodec(spec.rank, rows)
        case _:
            raise PayloadError(f"codec {spec.name} encodes nothing")


def _density(spec: TopK, step: int | None) -> float:
    """It falls by the same factor in each step of the warm-up."""
    if not spec.warmup:
        return spec.density
    passed = 0.0 if step is None else min(1.0, step / spec.warmup)
    falling = _FIRST_DENSITY * float((spec.density / _FIRST_DENSITY) ** passed)
    return max(spec.density, falling)
