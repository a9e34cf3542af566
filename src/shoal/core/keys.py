"""Random keys: one number for each thing that needs randomness, derived from the run's seed and never from a rank."""

from __future__ import annotations

from hashlib import blake2b


def derive(*parts: int | str) -> int:
    """A number of 63 bits that depends on all parts and their order, equal on every machine."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1
