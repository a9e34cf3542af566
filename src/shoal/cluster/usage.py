"""Where a worker's time and memory went."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass


@dataclass
class Times:
    """Seconds of this worker, by what they went into. What is left of `loop` is compute."""

    loop: float = 0.0
    exchange: float = 0.0
    data: float = 0.0
    eval: float = 0.0
    checkpoint: float = 0.0

    def shares(self, wall: float) -> dict[str, float]:
        parts = {"exchange": self.exchange, "data": self.data, "eval": self.eval, "checkpoint": self.checkpoint}
        compute = max(0.0, self.loop - sum(parts.values()))
        return {"compute": compute, **parts, "idle": max(0.0, wall - compute - sum(parts.values()))}


def resident_bytes() -> int:
    """Memory of this process that is in use now, what it shares with others included."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
