"""Numbers that are not negative, and of very different sizes, in 8 bits: as their fourth roots."""

from __future__ import annotations

from torch import Tensor

from shoal.comm.codecs.contract import State
from shoal.comm.codecs.int8 import Int8Codec


class RootCodec:
    """A `Codec` for squares of gradients, without feedback. Keeps numbers down to 4·10⁻⁹ of the largest of a block."""

    name = "int8"
    fixed = True

    def __init__(self, block: int = 256) -> None:
        self.block = block
        self._inner = Int8Codec(block, "nearest")

    def encode(self, tensor: Tensor, state: State) -> Tensor:
        return self._inner.encode(tensor.sqrt().sqrt_(), State(key=state.key))

    def decode(self, payload: Tensor, out: Tensor, *, gauge: Tensor | None = None, add: bool = False) -> None:
        roots = out.new_empty(out.shape)
        self._inner.decode(payload, roots)
        squares = roots.square_().square_()
        out.add_(squares) if add else out.copy_(squares)

    def most_bytes(self, count: int) -> int:
        return self._inner.most_bytes(count)
