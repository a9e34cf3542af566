"""What all members have to know of each other before they have a group: a word of each, through the store they meet by.

A store that can gather does it with one message of each member and one answer to it. Torch's own stores are asked for
the key of every member, as they are asked by torch.
"""

from __future__ import annotations

from typing import Any, Protocol, cast, runtime_checkable


@runtime_checkable
class Gathers(Protocol):
    """A store with a way of its own to gather."""

    def gather(self, key: str, rank: int, size: int, value: bytes) -> list[bytes]: ...


def gather(store: Any, key: str, rank: int, size: int, value: bytes) -> list[bytes]:
    """The words of all `size` members, in order of rank; waits for them. Each key is used once by every member."""
    if isinstance(store, Gathers):
        return store.gather(key, rank, size, value)
    store.set(f"{key}/{rank}", value)
    return cast(list[bytes], store.multi_get([f"{key}/{member}" for member in range(size)]))
