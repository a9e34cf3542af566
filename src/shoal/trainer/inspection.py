"""What a loss does besides giving a loss, and a loop besides its steps: looked for in a few steps, and said once.

A worker computes a part of a step, in one forward or in several. So whatever a loss or a loop does besides, it does
once per forward or with a part of the gradient, and the result is not that of one process.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from shoal.cluster.channel.channel import DirectChannel
from shoal.layouts.soundness import fingerprint, is_plain
from shoal.trainer.hooks import find_bent
from shoal.trainer.saying import say

if TYPE_CHECKING:
    from shoal.trainer.session import Session

Params = Iterable[tuple[str, nn.Parameter]]

_ONCE_PER_STEP = "once per step: in Trainer(after_step=fn(model)), or after step.apply in an own loop"

LEFT = (
    "{name!r} came with a gradient, of a backward before training. It is dropped: every step begins without gradients, "
    "where one process that did not clear them would add it to its first step. Call model.zero_grad() before training"
)
INNER = (
    "the gradient of {name!r} was changed while a loss was computed: by a .backward() inside the loss, or by hand. "
    "What is added so counts once per forward, whatever part of the batch that has, and a step has several forwards: "
    "the result depends on the number of workers. Return all parts of the loss as one instead: return main + penalty"
)
CLEARED = (
    "the gradient of {name!r} was cleared between two batches of a step, as by optimizer.zero_grad() in `for batch in "
    "step`: what the step's earlier batches gave is lost. Leave it out: every step begins without gradients"
)
BY_HAND = (
    "the gradient of {name!r} was changed between step.backward and step.apply, as clip_grad_norm_ does. There it is "
    "what this worker has of the step, so each worker clips by another norm, and the result depends on their number. "
    "Write step.apply(optimizer, clip=1.0); for anything else, optimizer.register_step_pre_hook runs after the sum"
)
NO_EFFECT = (
    "the gradient of {name!r} was changed between step.backward and step.apply, as clip_grad_norm_ does. That has no "
    "effect: with deterministic=True gradients are taken after each atom. Write step.apply(optimizer, clip=1.0); for "
    "anything else, optimizer.register_step_pre_hook runs after the sum"
)
BENT = (
    "{name!r} has a gradient hook that is not linear (it clips, rounds, adds, or cannot be judged). It gets the "
    "gradient of each forward, a part of the step's, and the sum of what it makes of the parts is not what it makes of "
    "the sum: the result depends on the number of workers. Use clip=, or optimizer.register_step_pre_hook, which runs "
    "after the sum"
)
FROZEN = (
    "{name!r}, which no optimizer trains, was changed while a loss was computed. A step has one forward or more on "
    "every worker, so it is changed once for each of them, from a part of the batch, and nothing keeps it equal on all "
    f"workers. Change it {_ONCE_PER_STEP}; what a forward has to change itself belongs into a buffer"
)
TRAINED = (
    "{name!r}, which an optimizer trains, was changed while a loss was computed. A step has one forward or more on "
    "every worker, so it is changed once for each of them, from a part of the batch: the result depends on the number "
    f"of workers. Change it {_ONCE_PER_STEP}"
)
CALLED_BACK = (
    "{name!r} was changed by a callback. Callbacks run on worker 0 alone, so the other workers have another value. "
    f"Change it {_ONCE_PER_STEP}"
)


class _Mark(NamedTuple):
    """A gradient as it was: torch counts changes in place."""

    tensor: int
    version: int


class Inspection:
    """One worker's. It looks in the steps 1, 4, 16, 64, … that it computes, so that on the whole it costs nothing.

    These are not among the steps by whose times the exchange of gradients is settled.

    `begin` before the first step; then in each phase of a step `open`, for each batch `forward`, for each of its losses
    `loss_done` and `backward_done`, then `close`, and `apply` for each optimizer.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._begun = False
        self._first: int | None = None
        self._number = self._last = -1
        self._parts = 0
        self._looks = False
        self._partial = False
        self._said: set[str] = set()
        self._tried: set[int] = set()
        self._marks: dict[int, _Mark | None] = {}
        self._before: dict[str, bytes] = {}

    def begin(self) -> None:
        """Training begins: gradients are those from before. Where members may change, that is before they meet."""
        if not self._begun:
            self._begun = True
            self._say(LEFT, next((name for name, param in self._session.all_params() if _weighs(param.grad)), None))

    def open(self, number: int) -> None:
        """A phase of this step begins; the gradients of the one before are still there."""
        if self._first is None:
            self._first = number
            self.begin()
        self._number = number
        self._looks = _is_looked_at(number - self._first + 1)
        self._partial = False
        self._before = {}

    def forward(self, samples: int, of: int) -> None:
        """A forward of so many of the step's samples comes next. One that has them all is that of one process."""
        begins = samples < of and not self._partial
        if begins:
            self._partial = True
            self._count_part()
        if not self._looks:
            return
        if begins:
            self._say(BENT, find_bent(self._session.all_params(), self._tried))
            self._before = self._fingerprints()
        self.backward_done()

    def loss_done(self) -> None:
        """A loss is there, and its backward comes next."""
        if not self._looks or not self._partial:
            return
        for name, param in self._session.all_params():
            before = self._marks.get(id(param))
            if id(param) in self._marks and _mark(param) != before:
                self._say(CLEARED if before is not None and not _weighs(param.grad) else INNER, name)
                return

    def backward_done(self) -> None:
        """The gradients are what they should be."""
        if self._looks:
            self._marks = {id(param): _mark(param) for _, param in self._session.all_params()}

    def close(self) -> None:
        """All batches of the phase are computed."""
        if not self._looks:
            return
        if self._partial:
            trained = {id(param) for _, param in self._session.all_params()}
            now = self._fingerprints()
            for name, param in self._session.named_params():
                if name in self._before and self._before[name] != now[name]:
                    self._say(TRAINED if id(param) in trained else FROZEN, name)
        self._before = {}
        if self._session.deterministic and not self._session.overlapped:
            # there is none left to be changed by hand, which would go unseen
            for _, param in self._session.all_params():
                param.grad = torch.zeros_like(param)
        self.backward_done()

    def apply(self, params: Params, *, partial: bool) -> None:
        """These gradients are summed next; `partial` if this worker's are not the step's."""
        if not self._looks or self._session.overlapped:
            return
        for name, param in params:
            if id(param) in self._marks and self._marks.pop(id(param)) != _mark(param):
                if self._session.deterministic:
                    self._say(NO_EFFECT, name)
                elif partial:
                    self._say(BY_HAND, name)

    def before_telling(self) -> None:
        """Callbacks may run next, in this process if the script runs once per worker."""
        if self._looks and self._session.workers > 1 and isinstance(self._session.channel, DirectChannel):
            self._before = self._fingerprints()

    def after_telling(self) -> None:
        if self._before:
            before, now = self._before, self._fingerprints()
            self._before = {}
            self._say(CALLED_BACK, next((name for name in now if before.get(name, now[name]) != now[name]), None))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _count_part(self) -> None:
        """Look in the first step that this worker computes a part of, also if it had whole ones before."""
        if self._number != self._last:
            self._last = self._number
            self._parts += 1
        self._looks = self._looks or _is_looked_at(self._parts)

    def _say(self, text: str, name: str | None) -> None:
        """Once of each kind."""
        if name is not None and text not in self._said:
            self._said.add(text)
            say(self._session, text.format(name=name))

    def _fingerprints(self) -> dict[str, bytes]:
        return {name: fingerprint(param) for name, param in self._session.named_params() if is_plain(param)}


def _is_looked_at(count: int) -> bool:
    """Whether it is a power of four."""
    return count > 0 and count.bit_count() == 1 and count.bit_length() % 2 == 1


def _mark(param: Tensor) -> _Mark | None:
    return None if param.grad is None else _Mark(id(param.grad), param.grad._version)


def _weighs(gradient: Tensor | None) -> bool:
    return gradient is not None and bool((gradient.coalesce().values() if gradient.is_sparse else gradient).any())
