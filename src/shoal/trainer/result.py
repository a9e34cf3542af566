"""What a finished run gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from shoal.store.history import History


@dataclass(frozen=True)
class Result:
    """The outcome of `Trainer.fit`. Figures that add up over workers are of all workers together."""

    run_id: str
    run_dir: Path
    steps: int
    """Steps of the run so far, those before a resume included."""
    epochs: int
    """Complete passes over the data."""
    loss: float
    """Mean training loss over the last epoch, or over as much of it as was trained."""
    metrics: dict[str, float]
    """The last evaluation: "loss" and the metrics asked for. Empty without eval_data."""
    samples: int
    """Samples trained on, those before a resume included."""
    workers: int
    wall_seconds: float
    bytes_sent: int
    """What all workers sent each other, without headers."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Mean over workers of the seconds in compute, exchange, data, eval, checkpoint, and idle (the rest)."""
    stopped: str | None = None
    """Why the run ended before its time, if a callback's decision ended it."""
    history: History = field(default_factory=History, repr=False, compare=False)
    """The learning curve: loss, rates, logs and evaluations by step."""
