"""What a member sees of the first steps: when gradients arrive, and how long the exchange takes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from shoal.comm.measure import finished
from shoal.comm.plan import Costs, Gradient


class Watch:
    """The steps of one layout, as the member's own clock sees them."""

    def __init__(self) -> None:
        self.times: list[float] = []
        """Of each step: seconds from the beginning of the last backward to the end of the exchange."""
        self.armed = False
        """Whether gradients may leave during backward."""
        self.begin()

    def begin(self) -> None:
        """A step, or the last backward of it, begins."""
        self.arrivals: dict[int, float] = {}
        """Seconds since then, in order, for each parameter whose gradient is there."""
        self.begun = time.perf_counter()
        self.backward = 0.0
        self.exchange = 0.0
        """Seconds in sums, and in waiting for them."""

    def arrived(self, number: int) -> None:
        self.arrivals[number] = time.perf_counter() - self.begun

    def end_backward(self, device: torch.device) -> None:
        if not self.armed:
            return
        ahead = time.perf_counter() - self.begun
        finished(device)
        self.backward = time.perf_counter() - self.begun
        # The thread runs ahead of an accelerator; gradients arrive when that has computed them.
        stretch = self.backward / max(ahead, 1e-9)
        self.arrivals = {number: at * stretch for number, at in self.arrivals.items()}

    def end(self, device: torch.device) -> None:
        finished(device)
        self.times.append(time.perf_counter() - self.begun)

    @property
    def seconds(self) -> float:
        """Of the quickest step but the first, which is slowed by what happens once."""
        return min(self.times[1:] or self.times)


class Trial(Watch):
    """Steps with a layout that is predicted to be about as good as the one before it."""

    def __init__(self, gradients: Sequence[Gradient], costs: Costs, rival: float) -> None:
        super().__init__()
        self.gradients = gradients
        self.costs = costs
        self.rival = rival
        """Seconds of a step with the layout before."""
