"""Cross-validation: train on all folds but one, evaluate on that one, for each fold."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

import torch
from torch.utils.data import Subset

from shoal.core import settings
from shoal.core.atoms import Course
from shoal.core.errors import ConfigError
from shoal.core.keys import derive
from shoal.core.permutation import Permutation
from shoal.core.slices import evenly
from shoal.data.fetch import check_data
from shoal.trainer.configure import spelt
from shoal.trainer.result import Result
from shoal.trainer.trainer import Trainer


@dataclass(frozen=True)
class CrossValidation:
    """Figures of every fold, and over folds."""

    folds: list[dict[str, float]]
    """Loss and metrics on the fold that was left out."""
    results: list[Result]
    mean: dict[str, float]
    std: dict[str, float]
    """Standard deviation over the folds (of these folds, not an estimate for more)."""


@spelt
def cross_validate(trainer: Trainer, folds: int = 5) -> CrossValidation:
    """Fit the trainer once per fold, each time from the weights its model has now, and evaluate on the fold left out.

    Folds are cut from a permutation keyed by the trainer's seed: equal sizes, every sample in exactly one. The model
    keeps the weights it came with. `epochs` mean passes over the data without the fold.
    """
    size = check_data(trainer.recipe.data, "data", trainer.recipe.collate)
    if isinstance(folds, bool) or not isinstance(folds, int) or not 2 <= folds <= size:
        raise ConfigError(f"folds={folds!r}; it must be a whole number from 2 to the number of samples ({size})")
    order = Permutation(size, derive(trainer.seed, "folds")).span(0, size).tolist()
    initial = copy.deepcopy(trainer.model.state_dict())
    figures, results = [], []
    try:
        for number, positions in enumerate(evenly(size, folds)):
            held_out = sorted(order[positions.start : positions.stop])
            rest = sorted(order[: positions.start] + order[positions.stop :])
            trainer.model.load_state_dict(initial)
            fold = _fold(trainer, number, rest)
            with settings.without_reports():
                results.append(fold.fit())
            figures.append(fold.evaluate(Subset(trainer.recipe.data, held_out)))
    finally:
        with torch.no_grad():
            trainer.model.load_state_dict(initial)
    names = list(figures[0])
    return CrossValidation(
        folds=figures,
        results=results,
        mean={name: fmean(figure[name] for figure in figures) for name in names},
        std={name: pstdev(figure[name] for figure in figures) for name in names},
    )


def _fold(trainer: Trainer, number: int, indices: list[int]) -> Trainer:
    fold = copy.copy(trainer)
    recipe = trainer.recipe
    course = Course(len(indices), recipe.batch_size)
    epochs = recipe.total_steps // recipe.steps_per_epoch
    total = epochs * course.steps_per_epoch if recipe.exact_steps is None else recipe.exact_steps
    changes: dict[str, Any] = {"data": Subset(recipe.data, indices), "eval_data": None}
    changes |= {"total_steps": total, "steps_per_epoch": course.steps_per_epoch}
    fold.recipe = dataclasses.replace(recipe, **changes)
    fold.average = None
    fold.resume = None
    fold.name = f"{trainer.name}-fold{number}"
    fold.run_dir = None if trainer.run_dir is None else trainer.run_dir / f"fold-{number}"
    return fold
