"""When parts of the gradients may leave: as soon as backward has come through all parameters of each, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from shoal.core.errors import ConfigError

Params = Sequence[tuple[str, nn.Parameter]]

WATCHED = 2
"""Steps in which nothing leaves before the end of backward: some gradients may arrive in several parts."""


class Leaving:
    """Counts gradients as they arrive during a backward, and calls `leave` with each part that is complete.

    Parts leave in their order, on all members alike: one that is complete before those ahead of it waits for them. The
    last one is left to the caller, as is what does not become complete, because a parameter is not used.
    """

    def __init__(self, parts: Sequence[Params], leave: Callable[[int], None]) -> None:
        self._parts = parts[:-1]
        self._leave = leave
        self._missing: list[int] = []
        self._seen: set[int] = set()
        self._often: set[int] = set()
        """Parts with a gradient that arrives in several parts itself."""
        self._hooks: list[Any] = []
        self._watched = 0
        self.left = 0
        """Parts that have left in this step."""

    def open(self) -> None:
        """A step begins: nothing has left."""
        self.left, self._missing = 0, []

    def arm(self) -> None:
        """The next backward is the last of the step."""
        self._missing = [len(part) for part in self._parts]
        self._seen.clear()
        if not self._hooks:
            for number, part in enumerate(self._parts):
                for name, param in part:
                    if param.requires_grad:  # one that does not is missing, and its part waits for the end
                        self._hooks.append(param.register_post_accumulate_grad_hook(self._hook(number, name)))

    def stop(self) -> None:
        """The backward is over."""
        self._watched += bool(self._missing)
        self._missing = []

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._missing = [], []

    def _hook(self, number: int, name: str) -> Callable[[Tensor], None]:
        def arrived(param: Tensor) -> None:
            if self._missing:
                self._arrive(number, name, id(param))

        return arrived

    def _arrive(self, number: int, name: str, param: int) -> None:
        if param in self._seen:
            # reentrant checkpointing
            self._often.add(number)
            if number < self.left:
                raise ConfigError(
                    f"the gradient of {name!r} arrived again after it had been sent: backward reached this parameter "
                    "in one more part than in earlier steps; use torch.utils.checkpoint with use_reentrant=False"
                )
            return
        self._seen.add(param)
        self._missing[number] -= 1
        while self.left < len(self._parts) and not self._missing[self.left]:
            if self._watched < WATCHED or self.left in self._often:
                return
            self._leave(self.left)

    @property
    def armed(self) -> bool:
        """Whether it is within the last backward of a step."""
        return bool(self._missing)
