"""What to compute for a proof, and what follows from it: pure logic, a conversation of questions and answers.

If the loss is a mean over samples (or a sum and a weight), if what it draws is keyed by sample, and if samples do not
see each other, then the whole is what its parts add up to. If it is not, further parts tell why.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise

import numpy as np

from shoal.draws.sites import SHARED, Rule, Seen, Shape, guess, learn

BOUND = 2e-6
"""Right ones are off by 1e-7, wrong ones by 1e-5 and more."""
HALF_BOUND = 2e-2
"""Where numbers of 16 bits compute."""
PARTS = 5
"""Into which samples are cut to find out whether a loss is a quotient of sums."""
_MOST_TURNS = 8
"""Sites whose samples may vary faster that are tried one by one."""


class Kind(StrEnum):
    PROVEN = "proven"
    UNPROVEN = "unproven"
    """It could not be computed in parts."""
    SUM = "sum"
    WEIGHTED = "weighted"
    COUPLED = "coupled"
    EITHER = "either"
    """One of the last two: there are too few samples to tell."""
    UNKEYED = "unkeyed"
    STATEFUL = "stateful"


@dataclass(frozen=True)
class Ask:
    """Compute the samples start … stop−1. `rules` are what is known of draws; `double`: in double precision."""

    start: int
    stop: int
    rules: dict[int, Rule]
    double: bool = False
    still: bool = False
    """Whether all samples draw the same numbers."""


@dataclass(frozen=True)
class Taken:
    """What came of a part. In double precision it may have none: then it could not be computed so."""

    samples: int
    total: float
    """Loss times weight."""
    weight: float
    given: bool = False
    """Whether the loss came as (sum, weight), or its weight was counted."""
    counted: bool = False
    """Whether its weight was counted."""
    half: bool = False
    seen: tuple[Seen, ...] = ()
    past: str = ""
    """What has drawn past us, if anything."""
    own: tuple[str, ...] = ()
    """What was drawn with generators of the user's own."""
    others: tuple[str, ...] = ()
    """Which of Python's and numpy's generators were drawn from."""
    permuted: bool = False
    changed: dict[str, float] = field(default_factory=dict)
    """Numbers that tracked modules keep beside parameters and buffers, after this part, where they changed in it."""

    @property
    def loss(self) -> float:
        return self.total / self.weight if self.weight else float("nan")


@dataclass(frozen=True)
class Finding:
    kind: Kind
    gap: float = 0.0
    detail: str = ""
    rules: dict[int, Rule] = field(default_factory=dict)
    by_forward: str = ""
    draws: bool = False
    others: bool = False
    """Whether Python's or numpy's generator was drawn from."""
    unit: float = 1.0
    """Weight of a sample, where the loss's weight is counted by us."""


Examination = Generator[Ask, Taken, Finding]
"""Questions, answers, and what came of it."""


def parts_of(samples: int) -> tuple[int, int]:
    """Two unequal parts, where that can be."""
    first = max(1, samples * 3 // 8)
    return first, samples - first


def gap_of(whole: Taken, parts: Sequence[Taken]) -> float:
    """How far the parts are from adding up to the whole, relative to the loss or to what parts of it differ by."""
    total, weight = sum(part.total for part in parts), sum(part.weight for part in parts)
    if not weight or not whole.weight:
        return 0.0 if weight == whole.weight else float("inf")
    losses = [part.loss for part in parts if part.weight]
    scale = max(abs(whole.loss), max(losses) - min(losses), 1e-30)
    gap = abs(whole.loss - total / weight) / scale
    return max(gap, abs(whole.weight - weight) / whole.weight) if whole.given else gap


def examine(
    samples: int, known: dict[int, Rule], suspected: list[Finding] | None = None, *, thorough: bool = False
) -> Examination:
    """Examine a loss on so many samples. Ends early, and well, with a single one: there is nothing to be seen.

    `thorough`: in three parts, as a few samples may happen to weigh the same in both of two.
    Once it is known that something is wrong, and only the reason is asked for, that is put into `suspected`.
    """
    if samples < 2:
        only = yield Ask(0, samples, known)
        return Finding(Kind.UNPROVEN, detail="there is a single sample", draws=bool(only.seen), by_forward=only.past)
    edges = edges_of(samples, thorough=thorough)
    first = yield from _apart(edges, known)
    past = next((taken.past for taken in first if taken.past), "")
    if past:
        return Finding(Kind.UNPROVEN, detail="its random numbers are drawn past Shoal", by_forward=past, draws=True)
    rules, multiples, doubtful = _learnt(first, known)
    taken = first if _as_used(first, rules, known) else (yield from _apart(edges, {**known, **rules}))
    draws = any(each.seen or each.own for each in taken)
    others = any(each.others for each in taken)
    found = Finding(Kind.PROVEN, rules=rules, draws=draws, others=others, unit=_unit(taken[0]))
    if not all(math.isfinite(each.total) for each in taken):
        return replace(found, kind=Kind.UNPROVEN, detail="the loss of a part of the batch is not finite")
    bound = HALF_BOUND if any(each.half for each in taken) else BOUND
    gap = gap_of(taken[0], taken[1:])
    if gap > bound and multiples:
        rules, taken, gap = yield from _turned(edges, known, rules, multiples, taken, bound)
        found = replace(found, rules=rules)
    counted = _counting(taken)
    if counted:
        return replace(found, kind=Kind.STATEFUL, gap=gap, detail=counted)
    if not gap > bound:
        return replace(found, gap=gap)
    double = False
    if bound == BOUND:
        doubled = yield from _doubled(edges, {**known, **rules})
        if doubled is not None:
            rest = gap_of(doubled[0], doubled[1:])
            if rest <= bound:
                return replace(found, gap=gap)  # rounding, where large terms cancel
            taken, gap, double = doubled, rest, True
    if suspected is not None:
        suspected.append(replace(found, kind=Kind.EITHER, gap=gap))
    kind, detail = yield from _reason(edges, {**known, **rules}, taken, bound, double)
    if kind in (Kind.COUPLED, Kind.EITHER) and doubtful:
        shape = " × ".join(map(str, doubtful[0]))
        why = f"a draw of shape {shape} has no dimension that goes with the samples"
        return replace(found, kind=Kind.UNKEYED, gap=gap, detail=why, by_forward=why)
    return replace(found, kind=kind, gap=gap, detail=detail)


def edges_of(samples: int, *, thorough: bool) -> list[int]:
    """Where samples are cut."""
    if thorough and samples >= 8:
        return [0, samples // 4, samples * 5 // 8, samples]
    return [0, parts_of(samples)[0], samples]


def _apart(
    edges: Sequence[int], rules: dict[int, Rule], *, double: bool = False, still: bool = False
) -> Generator[Ask, Taken, list[Taken]]:
    """All samples, and then each part."""
    taken = []
    for start, stop in ((0, edges[-1]), *pairwise(edges)):
        taken.append((yield Ask(start, stop, rules, double, still)))
    return taken


def _doubled(edges: Sequence[int], rules: dict[int, Rule]) -> Generator[Ask, Taken, list[Taken] | None]:
    """The same in double precision; None where that cannot be done."""
    taken = yield from _apart(edges, rules, double=True)
    return taken if all(each.samples for each in taken) else None


def _learnt(taken: Sequence[Taken], known: dict[int, Rule]) -> tuple[dict[int, Rule], list[int], list[Shape]]:
    """New rules; where samples may vary faster; shapes that change from part to part and hold no samples."""
    seen = [one for each in taken for one in each.seen if one.site not in known]
    rules, multiples = learn(seen)
    doubtful = []
    for number, rule in rules.items():
        shapes = {one.shape for one in seen if one.site == number}
        if rule == SHARED and len(shapes) > 1:
            doubtful.append(max(shapes))
    return rules, multiples, doubtful


def _as_used(taken: Sequence[Taken], rules: dict[int, Rule], known: dict[int, Rule]) -> bool:
    """Whether the guesses that the first parts were computed with are what was learnt."""
    seen = [one for each in taken for one in each.seen if one.site not in known]
    return all(guess(one.samples, one.shape) == rules[one.site] for one in seen)


def _turned(
    edges: Sequence[int],
    known: dict[int, Rule],
    rules: dict[int, Rule],
    multiples: list[int],
    taken: list[Taken],
    bound: float,
) -> Generator[Ask, Taken, tuple[dict[int, Rule], list[Taken], float]]:
    """Try whether samples vary faster: at all sites where they may, and at each of them alone."""
    best = rules, taken, gap_of(taken[0], taken[1:])
    tries = [multiples]
    if 1 < len(multiples) <= _MOST_TURNS:
        tries += [[one] for one in multiples]
    for turned in tries:
        tried = {**rules, **{one: rules[one]._replace(inner=True) for one in turned}}
        again = yield from _apart(edges, {**known, **tried})
        gap = gap_of(again[0], again[1:])
        if gap < best[2]:
            best = tried, again, gap
        if gap <= bound:
            break
    # no better than before: then it is not this
    return best if best[2] <= bound else (rules, taken, gap_of(taken[0], taken[1:]))


def _unit(whole: Taken) -> float:
    """So many targets has a sample, if they are counted and all samples are alike."""
    each = whole.weight / whole.samples if whole.counted else 1.0
    return each if each >= 1.0 and each == int(each) else 1.0


def _counting(taken: Sequence[Taken]) -> str:
    """A number of the model that each forward moves by as much: a counter."""
    for name in taken[0].changed:
        if all(name in each.changed for each in taken):
            moves = [later.changed[name] - sooner.changed[name] for sooner, later in pairwise(taken)]
            if moves[0] and all(move == moves[0] for move in moves):
                return name
    return ""


def _reason(
    edges: Sequence[int], rules: dict[int, Rule], taken: Sequence[Taken], bound: float, double: bool
) -> Generator[Ask, Taken, tuple[Kind, str]]:
    samples = edges[-1]
    whole, *parts = taken
    again = yield Ask(0, samples, rules, double)
    if again.total != whole.total:
        return _unsteady(again)
    if whole.own:
        return Kind.UNKEYED, whole.own[0]
    if not whole.given:
        summed = sum(part.loss for part in parts)
        if abs(whole.loss - summed) <= bound * 10 * max(abs(summed), 1e-30):
            return Kind.SUM, ""
    if whole.permuted:
        return Kind.COUPLED, "torch.randperm"
    # most often a few samples show it; else, as where few of them count, only all of them do
    for some in sorted({min(samples, PARTS), samples}):
        if some >= PARTS and (yield from _is_weighted(some, rules, double)):
            return Kind.WEIGHTED, ""
    if whole.others:
        return Kind.UNKEYED, f"{' and '.join(whole.others)}; or samples see each other"
    if whole.seen:
        still = yield from _apart(edges, rules, double=double, still=True)
        if all(each.samples for each in still) and gap_of(still[0], still[1:]) <= bound:
            return Kind.UNKEYED, "it draws in a loop over samples, or collate changes their order"
    return (Kind.COUPLED if samples >= PARTS else Kind.EITHER), ""


def _unsteady(taken: Taken) -> tuple[Kind, str]:
    """The same samples gave another loss."""
    if taken.own:
        return Kind.UNKEYED, taken.own[0]
    if taken.changed:
        return Kind.STATEFUL, next(iter(taken.changed))
    return Kind.STATEFUL, ""


def _is_weighted(samples: int, rules: dict[int, Rule], double: bool) -> Generator[Ask, Taken, bool]:
    """Whether the loss is a quotient of sums over samples, perhaps with constants added to both.

    For the loss L of some samples that means L · (their weights + a constant) = their sums + another one. Over all runs
    of adjacent ones among five parts these are fifteen equations, linear in twelve unknowns: they have a solution if it
    is such a quotient, and else almost never.
    """
    edges = [samples * number // PARTS for number in range(PARTS + 1)]
    found: dict[tuple[int, int], float] = {}
    for start in range(PARTS):
        for stop in range(start + 1, PARTS + 1):
            taken = yield Ask(edges[start], edges[stop], rules, double)
            if not taken.samples:
                return False
            found[start, stop] = taken.loss
    losses = np.array(list(found.values()))
    whole = found[0, PARTS]
    spread = float(np.nanmax(np.abs(losses - whole)))
    sizes = np.diff(edges)
    parts = sum(size * found[number, number + 1] for number, size in enumerate(sizes)) / sizes.sum()
    if not math.isfinite(whole) or abs(parts - whole) <= BOUND * spread:
        return False  # nothing can be seen in these samples
    # a part in which nothing counts has no loss, and tells nothing
    finite = {run: loss for run, loss in found.items() if math.isfinite(loss)}
    rows = np.zeros((len(finite), 2 * PARTS + 2))
    for row, ((start, stop), loss) in zip(rows, finite.items(), strict=True):
        row[start:stop] = row[PARTS] = (loss - whole) / spread
        row[PARTS + 1 + start : PARTS + 1 + stop] = row[2 * PARTS + 1] = -1.0
    if len(rows) <= rows.shape[1]:
        return False
    _, values, vectors = np.linalg.svd(rows)
    noise = max(10.0 * (1e-12 if double else 1e-6) * max(1.0, abs(whole) / spread), 1e-9) * values[0]
    weights = vectors[-1, : PARTS + 1]
    one_sign = min(-weights.min(), weights.max()) <= 1e-3 * np.abs(weights).max() or weights.max() <= 0.0
    # one solution, and weights that are such: where most losses are 0 there are many
    return bool(values[-1] <= noise < values[-2] and one_sign)
