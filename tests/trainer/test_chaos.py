"""A short, seeded part of the chaos in benchmarks/chaos.py: whatever goes wrong, the training ends as its calm twin."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.testing.chaos import Trial


@pytest.mark.parametrize(("seed", "deterministic"), [(1, False), (2, True)])
def test_a_troubled_training_ends_as_its_calm_twin(seed: int, deterministic: bool, tmp_path: Path) -> None:
    trial = Trial.drawn(seed, faults=5, deterministic=deterministic)
    outcome = trial.run(tmp_path)
    assert not outcome.problems, "\n".join(map(str, [f"{trial.plan!r}", *outcome.problems]))
    assert len(outcome.fired) >= 3
    assert all(seconds is not None for _, _, seconds in outcome.fired)
