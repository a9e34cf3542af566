"""The works of run.py by name: their batches, who runs them, and how fast Shoal must be. Without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """`batch` is global, over all workers, and that of works.py. `hand`: see HAND."""

    batch: int
    hand: float | None = None


STEADY = {"gpt": Entry(32), "mlp": Entry(128)}
RANDOM = {
    "gpt-dropout": Entry(32, hand=1.03),
    "cnn": Entry(64, hand=1.03),
    "encoder": Entry(32, hand=1.03),
    "bert": Entry(32, hand=1.03),
    "vae": Entry(128, hand=0.97),
    "denoiser": Entry(128, hand=0.97),
    "lstm": Entry(32, hand=0.97),
    "gru": Entry(32, hand=0.97),
}
DRY = {f"{name}:dry": Entry(entry.batch) for name, entry in RANDOM.items()}
FUSED = {f"{name}:fused": Entry(entry.batch) for name, entry in RANDOM.items()}
ROSTER = STEADY | RANDOM | DRY | FUSED

HAND = {name: entry.hand for name, entry in ROSTER.items() if entry.hand is not None}
"""The lower end of the interval of Shoal's speed relative to the hand-written loop must not be below this."""
PLAIN = dict.fromkeys(RANDOM, 1.0)
"""The median of its speed relative to one plain process must not be below this."""

BATCH = {name: entry.batch for name, entry in ROSTER.items()}
GROUPS = {
    "all": [*STEADY, *RANDOM],
    "steady": list(STEADY),
    "random": list(RANDOM),
    "dry": list(DRY),
    "fused": list(FUSED),
}


def default_arms(work: str) -> tuple[str, ...]:
    return ("shoal", "hand", "lightning", "accelerate") if work in STEADY else ("shoal", "hand", "plain")
