"""Byte strings of any length, by a group's gather of rows of equal length.

Before the strings go, each member tells the others the length of its own and what it is for. So a member that is in
another operation is named before anybody allocates what its bytes seem to ask for. It is told by a swap, which little
else is: gloo ends the process where members of different sizes meet in one kind of operation.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from shoal.comm.group import Group
from shoal.core.errors import SAME_ORDER, GroupError

HEAD = 127
"""Bytes that tell of a string; no round number, so that people can be told what a swap of such rows is."""
_FIXED = struct.Struct("<QQ")
_MARK = 0x5348_4F41_4C2D_7773
"""What a head begins with; another operation's bytes do not."""


def gather_bytes_by_rows(group: Group, data: bytes, kind: str, purpose: str) -> list[bytes]:
    heads = group.swap(_head(len(data), purpose).repeat(group.size, 1), kind)
    lengths = _lengths(group, [bytes(head.numpy()) for head in heads])
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    if data:
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = group.gather(padded, kind)
    return [rows[rank, :length].numpy().tobytes() for rank, length in enumerate(lengths)]


def hint(size: int) -> str:
    """What people may know a swap of so many bytes by."""
    return " (session.gather and session.sum begin so)" if size and size % HEAD == 0 else ""


def _head(length: int, purpose: str) -> Tensor:
    head = bytearray(_FIXED.pack(_MARK, length) + purpose.encode())[:HEAD]
    return torch.frombuffer(head.ljust(HEAD, b"\0"), dtype=torch.uint8)


def _lengths(group: Group, heads: list[bytes]) -> list[int]:
    """Of all members' strings, if all have come for the same purpose."""
    purposes = [_purpose(head) for head in heads]
    mine = purposes[group.rank]
    for rank, theirs in enumerate(purposes):
        if theirs != mine:
            text = f"worker {group.rank} is in {mine} and worker {rank} in {theirs}; {SAME_ORDER}"
            group.revoke(text)
            raise GroupError(text)
    return [_FIXED.unpack_from(head)[1] for head in heads]


def _purpose(head: bytes) -> str:
    if _FIXED.unpack_from(head)[0] != _MARK:
        return "another operation"
    return head[_FIXED.size :].rstrip(b"\0").decode(errors="replace")
