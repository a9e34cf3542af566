"""What was settled about buckets, as bytes: a group that is made anew need not measure again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from hashlib import blake2b

import msgspec
from torch import nn

from shoal.comm.plan import Settled

_MOST_BYTES = 4096
_MOST_BYTES_EACH = 64
"""Bytes at most, and for each parameter: three numbers, of 9 bytes or less."""


class Knowledge(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Order, cap and figures of buckets for certain parameters."""

    params: bytes
    """The digest of the parameters, and of the cap that was given for them."""
    cap: int
    order: list[int]
    """The parameters' numbers, in the order in which their gradients arrive."""
    often: list[int]
    """Those whose gradients arrive in parts."""
    latency: float
    bandwidth: float
    buckets: list[int]

    @property
    def settled(self) -> Settled:
        return Settled(self.latency, self.bandwidth, self.buckets)


def note(params: bytes, cap: int, order: Sequence[int], often: Collection[int], settled: Settled) -> bytes:
    """A `Knowledge` as bytes."""
    figures = settled.latency, settled.bandwidth, settled.buckets
    return msgspec.msgpack.encode(Knowledge(params, cap, list(order), sorted(often), *figures))


def digest_of(params: Sequence[tuple[str, nn.Parameter]], cap: int | None) -> bytes:
    """Equal for parameters of the same names, shapes and kinds in the same order, and the same given cap."""
    text = repr([(name, tuple(param.shape), str(param.dtype), param.device.type) for name, param in params])
    return blake2b(f"{text}{cap}".encode(), digest_size=16).digest()


def fitting(data: bytes | None, params: bytes, count: int) -> Knowledge | None:
    """What `data` says about the `count` parameters of this digest; None if it is about others, or makes no sense."""
    if data is None or len(data) > _MOST_BYTES + _MOST_BYTES_EACH * count:
        return None
    try:
        known = msgspec.msgpack.decode(data, type=Knowledge)
    except msgspec.DecodeError:
        return None
    whole = sorted(known.order) == list(range(count)) and set(known.often) <= set(range(count))
    return known if known.params == params and whole and known.cap > 0 else None
