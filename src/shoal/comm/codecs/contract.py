"""What a codec is, and how encoded numbers add up.

A *codec* makes a payload, which is a tensor of bytes, from numbers, and numbers from a payload. What holds of each:

- *Input.* A flat, contiguous tensor of single precision on the CPU or an accelerator, which is not changed. (Other
  dtypes and views are the caller's matter: see `flat`.)
- *Feedback.* Where the state has a residual, what is encoded is tensor + residual, and what decoding the payload will
  lose of it is written to the state's shadow. The residual itself stays as it is: a step that is done again starts from
  it. After a step that counts the two are swapped by whoever owns them (`Memory`).
- *Not finite.* Numbers that are not finite decode to numbers that are not finite, at least one in each payload that
  had some, and never come into a shadow: where that would be, the shadow is the old residual.
- *Determinism.* A payload depends on tensor, state and its key only.
- *Payloads* have a header (`payload`) that tells codec, count, length and a sum over their bytes. Decoding one that is
  damaged, too long, or of something else raises `PayloadError`, before anything is allocated or changed.

Payloads add up in one of four ways, each of which is a `Summing` over a group: in place, where the encoded numbers can
be added as they are (`cast`); in two phases, where each member adds up a chunk and encodes the sum again (`twophase`);
by gathering sparse parts (`sparse`); and as factors of matrices (`lowrank`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shoal.comm.codecs.memory import Memory


@dataclass
class State:
    """What a codec knows of one stretch of numbers besides the numbers themselves. All tensors have their length."""

    residual: Tensor | None = None
    """What was lost in the last step that counts; only read."""
    shadow: Tensor | None = None
    """Takes what is lost in this one; written completely by `encode`. There if and only if there is a residual."""
    gauge: Tensor | None = None
    """Positive numbers that are equal on all members: encoded is tensor / gauge, and decoding multiplies by it.
    Where an optimizer divides by such numbers, errors are spread as it weighs them."""
    key: int = 0
    """For random numbers: another one in each step, worker and stretch."""


class Codec(Protocol):
    """Encodes stretches of numbers. Has no state of its own: one object may serve any number of stretches."""

    name: str
    """As in the spec: fp16, bf16, int8, topk, powersgd, onebit."""
    fixed: bool
    """Whether every payload of so many numbers has the same length, `most_bytes` of them."""

    def encode(self, tensor: Tensor, state: State) -> Tensor:
        """The payload: a flat tensor of bytes whose length is a multiple of 8."""

    def decode(self, payload: Tensor, out: Tensor, *, gauge: Tensor | None = None, add: bool = False) -> None:
        """Write the numbers of a payload into `out`, which has as many; with `add` add them to what is there."""

    def most_bytes(self, count: int) -> int:
        """The length of the longest payload of so many numbers."""


class Summing(Protocol):
    """Sums vectors of a fixed length over the members of a group, encoded. All members call it, in the same order."""

    name: str

    def sum(self, flat: Tensor, memory: Memory, *, key: int = 0, gauge: Tensor | None = None) -> None:
        """Replace `flat` by the sum over all members, or what the codec makes of it: the same bits on all members.

        `flat` is single precision, contiguous. What it loses goes to the shadows of `memory` (see there); nothing of
        `memory` that counts is changed. `key` is the same on all members.
        """


def flat(tensor: Tensor) -> Tensor:
    """Any tensor of floating point numbers as a codec takes it; a copy unless it is one already."""
    return tensor.detach().to(torch.float32).contiguous().view(-1)
