"""Payloads compressed once more, without loss, by zstd or lz4; and whether that pays.

Gradients look like noise to these: what can be saved is mostly in signs and exponents, so the bytes of wider numbers
are sorted by their place in the number first.
"""

from __future__ import annotations

import importlib
import struct
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.comm.codecs.contract import Codec, State, Summing
from shoal.comm.codecs.memory import Memory
from shoal.comm.codecs.payload import HEADER_BYTES, opened, room, seal
from shoal.comm.group import Group
from shoal.core.errors import ConfigError, PayloadError
from shoal.core.traffic import MEASUREMENT

METHODS = ("zstd", "lz4")
_PACKAGES = {"zstd": "zstandard", "lz4": "lz4.block"}
_FLAGS = {"stored": 0, "zstd": 1, "lz4": 2}
_LEVEL = 1
"""Of zstd. Higher ones take longer and save nothing on gradients."""
_LENGTHS = struct.Struct("<QQ")
"""Before the compressed bytes: their number, and that of the payload they make."""
_MOST_FOR_LZ4 = 0x7E000000
"""Bytes: more is not compressed by it in one piece, and stored as it is."""
_MARGIN = 0.98
"""Less is saved by chance."""
_WIDTHS = {"none": 4, "fp16": 2, "bf16": 2, "topk": 2}
"""Bytes of the numbers in a codec's body, which are sorted; others are left in their order."""


def choose_method(method: str) -> str:
    """zstd or lz4; of `auto` what is installed. Raises `ConfigError` if that is none."""
    wanted = METHODS if method == "auto" else (method,)
    for name in wanted:
        if name not in _PACKAGES:
            raise ConfigError(f"lossless={method!r} is not known; use auto, zstd or lz4")
        if _module(name) is not None:
            return name
    packages = " or ".join(_PACKAGES[name].split(".")[0] for name in wanted)
    raise ConfigError(f"lossless={method} needs the package {packages}: pip install shoal[lossless]")


def _module(name: str) -> Any:
    try:
        return importlib.import_module(_PACKAGES[name])
    except ImportError:
        return None


class LosslessCodec:
    """A codec whose payloads are those of another, compressed; what does not become smaller is stored as it is.

    `method` is zstd, lz4 or auto. Raises `ConfigError` if the package for it is not installed.
    """

    fixed = False

    def __init__(self, codec: Codec, method: str = "auto") -> None:
        self.method = choose_method(method)
        self.name = f"{codec.name}+{self.method}"
        self.inner = codec
        self.block = int(getattr(codec, "block", 8))
        self._width = _WIDTHS.get(codec.name, 1)

    def encode(self, tensor: Tensor, state: State) -> Tensor:
        plain = self.inner.encode(tensor, state)
        packed = compressed(_sorted(plain, self._width), self.method)
        if packed is None or _LENGTHS.size + len(packed) >= plain.numel():
            return self._stored(plain, tensor.numel())
        payload = room(-(-(_LENGTHS.size + len(packed)) // 8) * 8, tensor.device)
        content = _LENGTHS.pack(len(packed), plain.numel()) + packed
        body = payload[HEADER_BYTES:]
        body[: len(content)].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        body[len(content) :].zero_()
        return seal(payload, "lossless", tensor.numel(), _FLAGS[self.method])

    def _stored(self, plain: Tensor, count: int) -> Tensor:
        payload = room(plain.numel(), plain.device)
        payload[HEADER_BYTES:].copy_(plain)
        return seal(payload, "lossless", count, _FLAGS["stored"])

    def decode(self, payload: Tensor, out: Tensor, *, gauge: Tensor | None = None, add: bool = False) -> None:
        body, flags = opened(payload, "lossless", out.numel())
        if flags == _FLAGS["stored"]:
            plain = body
        elif flags == _FLAGS[self.method]:
            plain = self._unpacked(body, out)
        else:
            raise PayloadError(f"a payload with flags {flags} came where one compressed by {self.method} was expected")
        self.inner.decode(plain, out, gauge=gauge, add=add)

    def _unpacked(self, body: Tensor, out: Tensor) -> Tensor:
        most = self.inner.most_bytes(out.numel())
        if body.numel() < _LENGTHS.size:
            raise PayloadError(f"a compressed payload of {body.numel()} bytes is shorter than the lengths before it")
        content = memoryview(body.cpu().numpy().data)
        length, plain = _LENGTHS.unpack(content[: _LENGTHS.size])
        if not HEADER_BYTES <= plain <= most or plain % 8:
            raise PayloadError(f"a compressed payload says that it holds {plain} bytes; {most} is the most it may hold")
        if not length <= body.numel() - _LENGTHS.size < length + 8:
            raise PayloadError(f"a compressed payload says that it has {length} bytes, and not that many came")
        found = decompressed(content[_LENGTHS.size : _LENGTHS.size + length], plain, self.method)
        return _in_order(torch.frombuffer(bytearray(found), dtype=torch.uint8), self._width).to(out.device)

    def most_bytes(self, count: int) -> int:
        return HEADER_BYTES + self.inner.most_bytes(count)


def compressed(content: Tensor, method: str) -> bytes | None:
    """The bytes of a tensor in fewer bytes, perhaps; None if there are too many for the method."""
    data = content.cpu().numpy()
    if method == "zstd":
        return bytes(_module("zstd").ZstdCompressor(level=_LEVEL).compress(data))
    if data.nbytes > _MOST_FOR_LZ4:
        return None
    return bytes(_module("lz4").compress(data, store_size=False))


def decompressed(content: memoryview, length: int, method: str) -> bytes:
    """Exactly `length` bytes, for which memory is taken only if the content may hold them. Raises `PayloadError`."""
    module = _module(method)
    try:
        if method == "zstd":
            claimed = module.get_frame_parameters(content).content_size
            if claimed != length:
                raise PayloadError(f"a frame of zstd claims {claimed} bytes where {length} were expected")
            found = module.ZstdDecompressor().decompress(content, max_output_size=length, allow_extra_data=False)
        else:
            found = module.decompress(content, uncompressed_size=length)
    except (
        getattr(module, "ZstdError", ValueError),
        getattr(module, "LZ4BlockError", ValueError),
        ValueError,
    ) as error:
        raise PayloadError(f"a payload compressed by {method} cannot be read: {error}") from error
    if len(found) != length:
        raise PayloadError(f"a payload compressed by {method} holds {len(found)} bytes where {length} were expected")
    return bytes(found)


def _sorted(plain: Tensor, width: int) -> Tensor:
    """The bytes of the body, those of equal significance together. The header stays in front."""
    if width == 1:
        return plain
    body = plain[HEADER_BYTES:].view(-1, width).t().reshape(-1)
    return torch.cat([plain[:HEADER_BYTES], body])


def _in_order(content: Tensor, width: int) -> Tensor:
    if width == 1:
        return content
    body = content[HEADER_BYTES:].view(width, -1).t().reshape(-1)
    return torch.cat([content[:HEADER_BYTES], body])


class LosslessSum:
    """Sums by one of two summings, the plain one and one whose payloads are compressed: by the one that is faster.

    The first steps take turns. Each turn is timed on all members, and its slowest member counts. What was found is
    kept as a shared vector of the memory: it is equal on all members, is told to those that join, and a step that is
    done again is done the same way. It is found anew when the number of members changes.
    """

    def __init__(
        self,
        group: Group,
        plain: Summing,
        packed: Summing,
        method: str,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = plain.name
        self._group = group
        self.ways = (plain, packed)
        """Both, for whoever has more to tell them than `sum` takes."""
        self._method = method
        self._clock = clock
        self._trial = Trial(())

    @property
    def decision(self) -> str:
        """What is used and why, in words; equal on all members. As of the last sum."""
        return self._trial.in_words(self._method)

    def sum(self, flat: Tensor, memory: Memory, *, key: int = 0, gauge: Tensor | None = None) -> None:
        known, shadow = memory.shared(f"lossless {self.name}", lambda: torch.zeros(Trial.LENGTH, device=memory.device))
        trial = Trial(tuple(known.tolist()))
        if trial.members != self._group.size:
            trial = Trial((float(self._group.size), *(0.0,) * (Trial.LENGTH - 1)))
        way = trial.way()
        if trial.over:
            self.ways[way].sum(flat, memory, key=key, gauge=gauge)
        else:
            trial = trial.after(*self._timed(way, flat, memory, key, gauge))
        shadow.copy_(torch.tensor(trial.numbers))
        self._trial = trial

    def _timed(self, way: int, flat: Tensor, memory: Memory, key: int, gauge: Tensor | None) -> tuple[float, float]:
        """Sum, and the seconds and bytes of the member that had most of each. Equal on all members."""
        self._group.barrier()
        sent, begin = self._group.account.now().bytes, self._clock()
        self.ways[way].sum(flat, memory, key=key, gauge=gauge)
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)
        seconds, size = self._clock() - begin, self._group.account.now().bytes - sent
        own = torch.tensor([seconds, size], dtype=torch.float64, device=flat.device)
        slowest, most = self._group.gather(own, MEASUREMENT).amax(0).tolist()
        return slowest, most


class Trial:
    """What is known of the two ways, 0 plain and 1 compressed. A value: from equal numbers comes an equal decision."""

    TURNS = 3
    """Of each way. The first of each does not count: memory is taken and pages are touched in it."""
    LENGTH = 4 + 2 * TURNS
    """Members, turns that were taken, bytes of each way, and the seconds of each turn."""

    def __init__(self, numbers: tuple[float, ...]) -> None:
        self.numbers = numbers

    @property
    def members(self) -> int:
        return int(self.numbers[0]) if self.numbers else 0

    @property
    def over(self) -> bool:
        return self.members == 1 or (self.members > 1 and self._taken == 2 * self.TURNS)

    @property
    def _taken(self) -> int:
        return int(self.numbers[1])

    def way(self) -> int:
        """The one that is used in the next step."""
        if self.members == 1:
            return 0
        if not self.over:
            return self._taken % 2
        return int(self._pays())

    def seconds(self) -> tuple[float, float]:
        """The fastest of the turns that count, of each way: what disturbs a turn only makes it longer."""
        turns = self.numbers[4:]
        return min(turns[2::2]), min(turns[3::2])

    def _pays(self) -> bool:
        plain, packed = self.seconds()
        return packed < _MARGIN * plain

    def after(self, seconds: float, size: float) -> Trial:
        """With one turn more."""
        numbers, taken = list(self.numbers), self._taken
        numbers[1] = taken + 1.0
        numbers[2 + taken % 2] = size
        numbers[4 + taken] = seconds
        return Trial(tuple(numbers))

    def in_words(self, method: str) -> str:
        if self.members == 1:
            return f"lossless {method}: there is one member, nothing is sent: not used"
        if not self.over:
            return f"lossless {method} is being measured"
        (plain, packed), before, now = self.seconds(), self.numbers[2], self.numbers[3]
        share = round(100 * (1 - now / before)) if before else 0
        saves = f"saves {share} % of bytes" if share >= 0 else f"adds {-share} % of bytes"
        times = f"a sum takes {1e3 * packed:.3g} ms with it and {1e3 * plain:.3g} ms without"
        if self._pays():
            return f"lossless {method} {saves}, and {times}: used"
        return f"lossless {method} {saves}, but {times}: not used"
