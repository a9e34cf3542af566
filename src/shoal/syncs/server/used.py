"""Which parameters have a gradient, as bits: an optimizer passes over those that nobody used, as in one process."""

from __future__ import annotations

from collections.abc import Sequence


def pack_used(used: Sequence[bool]) -> bytes:
    """One bit for each parameter; that of parameter n is bit n % 8, counted from the lowest, of byte n // 8."""
    bits = sum(1 << number for number, one in enumerate(used) if one)
    return bits.to_bytes(used_bytes(len(used)), "little")


def used_bytes(params: int) -> int:
    """The length of `pack_used` for so many parameters."""
    return -(-params // 8)


def is_used(used: bytes, param: int) -> bool:
    return bool(used[param // 8] >> (param % 8) & 1)


def either(one: bytes, other: bytes) -> bytes:
    """Used in one or the other."""
    return (int.from_bytes(one, "little") | int.from_bytes(other, "little")).to_bytes(len(one), "little")
