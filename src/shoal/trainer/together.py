"""How many samples have to be computed together, because BatchNorm cannot normalise a single value.

That happens where a sample has one value per channel, as behind a linear layer, and a forward has one sample: perhaps
only in the short last step of an epoch, after hours. So it is found out before the first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from shoal.core.atoms import LEAST_ATOMS, Course
from shoal.core.errors import ConfigError
from shoal.core.keys import derive
from shoal.core.slices import deal, forwards, forwards_by_atom
from shoal.data.device import moved
from shoal.data.fetch import Fetcher, Positions, check_data
from shoal.layouts.single import uses_batch_statistics
from shoal.proof.loss import read_loss

if TYPE_CHECKING:
    from shoal.syncs.recipe import Recipe
    from shoal.trainer.session import Session

_ALONE = "more than 1 value per channel"
"""What torch says."""


def samples_together(session: Session, model: nn.Module, recipe: Recipe, *, start: int, least: int = 1) -> int:
    """How many in the steps from `start` on: 2 if one alone would fail. All workers come to the same.

    `least`: so many are computed together anyway. Raises `ConfigError` if a step has to compute one alone.
    """
    if not uses_batch_statistics(model):
        return least
    course = Course(check_data(recipe.data, "data", recipe.collate), recipe.batch_size)
    sizes, limit, apart = sizes_of(course, start, recipe.total_steps), recipe.micro_batch, session.deterministic

    def lone(least: int) -> list[int]:
        members = range(1, max(session.workers, recipe.most_workers) + 1)
        return [size for size in sizes if has_lone(size, members, limit, apart=apart, least=least)]

    if not lone(least) or not any(session.gather(_fails_alone(session, model, recipe))):
        return least
    left = lone(2)
    if left:
        raise ConfigError(refusal(course, left[0], limit, apart=apart))
    return 2


def likely_together(modules: Iterable[nn.Module]) -> int:
    """The same where the loss is not known: `BatchNorm1d` is used for values that are not images."""
    parts = (part for module in modules for part in module.modules())
    return 2 if any(isinstance(part, nn.BatchNorm1d) and part.training for part in parts) else 1


def sizes_of(course: Course, start: int, total: int) -> list[int]:
    """The samples that the steps `start` … `total` − 1 have, each number once."""
    end = (start // course.steps_per_epoch + 1) * course.steps_per_epoch
    return sorted({course.step(number).samples for number in (start, end - 1, end) if number < total})


def has_lone(samples: int, members: Sequence[int], limit: int | None, *, apart: bool, least: int) -> bool:
    """Whether a forward of a step has a single sample, with any of these numbers of workers; `apart`: by atoms."""
    if apart:  # the same forwards for any number of workers
        return any(part.samples == 1 for part in forwards_by_atom(range(samples), limit, samples))
    return any(
        part.samples == 1
        for count in members
        for own in deal(samples, count, least=least)
        for part in forwards(own, limit, least=least)
    )


def _fails_alone(session: Session, model: nn.Module, recipe: Recipe) -> bool:
    """Whether the loss of one sample fails for that reason: tried where it leaves no trace."""

    def fetch(start: int, stop: int) -> Any:
        wanted = Positions(range(start, stop), derive(session.seed, "data", 0), start)
        (batch,) = Fetcher(recipe.data, recipe.collate).fetch((wanted,))
        return moved(batch, session.device)

    rehearsal = session.rehearsal(fetch, at=(0, 0), first=0, samples=1, norms=True)
    for batch in rehearsal.play():
        try:
            rehearsal.take(read_loss(recipe.loss(model, batch), training=True))
        except Exception as error:
            rehearsal.fell(error)
    return rehearsal.finding is not None and _ALONE in rehearsal.finding.detail


def refusal(course: Course, samples: int, limit: int | None, *, apart: bool) -> str:
    """Why a step of so many samples cannot be computed, and what to set."""
    norm = "BatchNorm in train mode cannot normalise a single sample"
    if limit == 1:
        return f"micro_batch=1: {norm}; set micro_batch=2 or more"
    told = f"data has {course.size} samples, batch_size={course.batch}"
    if samples > 1 and apart:
        return (
            f"deterministic=True computes a step in parts that do not depend on the workers, and a step of {samples} "
            f"samples ({told}) has parts of one: {norm}. Have {2 * LEAST_ATOMS} or more in every step, also in the "
            f"last one of an epoch, leave out micro_batch=, or set deterministic=False"
        )
    if course.batch == 1 or course.size == 1:
        return f"{told}: {norm}; set batch_size=2 or more, and have so many samples"
    return (
        f"the last step of an epoch has one sample ({told}): {norm}; set batch_size={_other_batch(course)}, or leave "
        "one sample out of data="
    )


def _other_batch(course: Course) -> int:
    """The nearest that leaves no sample alone."""
    near = sorted(range(2, 2 * course.batch + 1), key=lambda batch: (abs(batch - course.batch), batch))
    return next((batch for batch in near if course.size % batch != 1), course.size)
