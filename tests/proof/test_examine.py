"""What follows from a loss on a whole batch and on parts of it, with losses that are plain functions of numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shoal.draws.sites import Rule, Seen
from shoal.proof.examine import BOUND, HALF_BOUND, Ask, Finding, Kind, Taken, examine, gap_of, parts_of
from shoal.proof.words import by_forward, left, sentence

ALL = 64
_GENERATOR = np.random.default_rng(0)
LOSSES = _GENERATOR.uniform(0.5, 3.0, ALL)
"""Of each sample."""
CLASSES = np.where(_GENERATOR.uniform(size=ALL) < 0.3, 10.0, 1.0)
MASKS = _GENERATOR.uniform(size=(ALL, 9)) < 0.6
TOKENS = _GENERATOR.uniform(0.5, 3.0, (ALL, 9))
SCORES = _GENERATOR.normal(size=(ALL, ALL))
GUESSES, TRUTHS = _GENERATOR.uniform(size=ALL), (_GENERATOR.uniform(size=ALL) < 0.4).astype(float)
MASKS[:, 0] = True

UNSPLIT = (Kind.WEIGHTED, Kind.COUPLED)
Part = Callable[[slice], float]


def mean(part: slice) -> float:
    return float(LOSSES[part].mean())


def class_weighted(part: slice) -> float:
    return float((LOSSES * CLASSES)[part].sum() / CLASSES[part].sum())


def masked(part: slice) -> float:
    return float((TOKENS * MASKS)[part].sum() / MASKS[part].sum())


def dice(smooth: float) -> Part:
    def loss(part: slice) -> float:
        guesses, truths = GUESSES[part], TRUTHS[part]
        return float(1 - (2 * (guesses * truths).sum() + smooth) / (guesses.sum() + truths.sum() + smooth))

    return loss


def info_nce(part: slice) -> float:
    scores = SCORES[part, part]
    return float((np.log(np.exp(scores).sum(1)) - np.diag(scores)).mean())


def triplet(part: slice) -> float:
    """The hardest of the others: 0 for a sample alone."""
    scores = np.abs(SCORES[part, part])
    return float(np.maximum(scores.max(1) - 2.0, 0.0).mean())


def selected(part: slice) -> float:
    """A mean over the samples that are marked, which some parts have none of."""
    marked = LOSSES[part][TRUTHS[part] > 0]
    return float(marked.mean()) if len(marked) else float("nan")


def run(
    answer: Callable[[Ask], Taken], samples: int = ALL, known: dict[int, Rule] | None = None, *, thorough: bool = False
) -> Finding:
    """Play an examination to its end."""
    examination = examine(samples, known or {}, thorough=thorough)
    ask = next(examination)
    while True:
        try:
            ask = examination.send(answer(ask))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def single(value: float) -> float:
    return float(np.float32(value))


def answering(loss: Part, **facts: Any) -> Callable[[Ask], Taken]:
    """A loss that is taken for a mean, in the precision that is asked for."""

    def answer(ask: Ask) -> Taken:
        count = ask.stop - ask.start
        value = loss(slice(ask.start, ask.stop))
        return Taken(count, (value if ask.double else single(value)) * count, float(count), **facts)

    return answer


def test_parts_are_two_and_unequal_where_that_can_be() -> None:
    assert [parts_of(samples) for samples in (2, 3, 4, 5, 8, 64)] == [(1, 1), (1, 2), (1, 3), (1, 4), (3, 5), (24, 40)]


@pytest.mark.parametrize("samples", [2, 3, 5, 9, ALL])
@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (mean, Kind.PROVEN),
        (lambda part: float(LOSSES[part].sum()), Kind.SUM),
        (masked, Kind.WEIGHTED),
        (dice(1.0), Kind.WEIGHTED),
        (info_nce, Kind.COUPLED),
        (lambda part: float(np.sqrt(LOSSES[part].mean())), Kind.COUPLED),
        (lambda part: float(LOSSES[part].mean() + GUESSES[part].sum()), Kind.COUPLED),
    ],
    ids=["mean", "sum", "masked", "dice", "in-batch negatives", "root", "mean and sum"],
)
def test_losses_are_told_apart(loss: Part, kind: Kind, samples: int) -> None:
    if samples < 5 and kind in (Kind.WEIGHTED, Kind.COUPLED):
        kind = Kind.EITHER
    assert run(answering(loss), samples).kind is kind
    single_only = run(_without_double(answering(loss)), samples).kind
    # in single precision some curves look like quotients of sums: then only what to write is wrong
    assert single_only is kind or (kind is Kind.COUPLED and single_only is Kind.WEIGHTED)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("samples", [24, 32, ALL])
def test_losses_that_are_often_nothing_are_no_weighted_means(samples: int, double: bool) -> None:
    answer = answering(triplet) if double else _without_double(answering(triplet))
    assert run(answer, samples).kind is Kind.COUPLED


def test_parts_in_which_nothing_counts_are_left_out() -> None:
    assert run(answering(selected)).kind is Kind.WEIGHTED


def _without_double(answer: Callable[[Ask], Taken]) -> Callable[[Ask], Taken]:
    return lambda ask: Taken(0, 0.0, 0.0) if ask.double else answer(ask)


@pytest.mark.parametrize("loss", [class_weighted, dice(0.0), dice(5.0)], ids=["classes", "dice", "smooth dice"])
def test_quotients_of_sums_are_weighted_means(loss: Part) -> None:
    found = run(answering(loss))
    assert found.kind is Kind.WEIGHTED and 1e-4 < found.gap < 1.0


def test_a_weighted_mean_is_found_in_few_samples_or_in_all() -> None:
    asked: list[Ask] = []

    def run_with(loss: Part) -> Finding:
        asked.clear()

        def answer(ask: Ask) -> Taken:
            asked.append(ask)
            return answering(loss)(ask)

        return run(answer)

    assert run_with(masked).kind is Kind.WEIGHTED and sum(ask.stop - ask.start for ask in asked) < 6 * ALL
    late = np.where(np.arange(ALL) < 20, 1.0, CLASSES)  # the first ones are all of one class
    assert run_with(lambda part: float((LOSSES * late)[part].sum() / late[part].sum())).kind is Kind.WEIGHTED
    assert len(asked) == 3 + 3 + 1 + 15 + 15


@pytest.mark.parametrize("double", [True, False])
def test_parts_that_happen_to_weigh_the_same_are_not_enough_where_it_matters(double: bool) -> None:
    counts = np.array([0, 1, 1, 1, 0, 1, 1, 1, 0])  # 2 of the first 3, and 4 of the other 6

    def loss(part: slice) -> float:
        total = counts[part].sum()
        return float((LOSSES[:9] * counts)[part].sum() / total) if total else float("nan")

    answer = answering(loss) if double else _without_double(answering(loss))
    assert run(answer, 9).kind is Kind.PROVEN
    assert run(answer, 9, thorough=True).kind not in (Kind.PROVEN, Kind.UNPROVEN)
    assert run(answering(mean), 9, thorough=True).kind is Kind.PROVEN
    assert run(answering(mean), 2, thorough=True).kind is Kind.PROVEN


def test_a_sum_with_its_weight_is_proven() -> None:
    def answer(ask: Ask) -> Taken:
        part = slice(ask.start, ask.stop)
        total, weight = single((LOSSES * CLASSES)[part].sum()), float(CLASSES[part].sum())
        return Taken(ask.stop - ask.start, total, weight, given=True)

    assert run(answer).kind is Kind.PROVEN
    # a weight that is the same for a part and for the whole is none
    assert run(lambda ask: replace(answer(ask), weight=7.0)).kind is Kind.COUPLED


@pytest.mark.parametrize(("each", "unit"), [(9.0, 9.0), (1.0, 1.0), (0.5, 1.0), (2.5, 1.0)])
def test_the_unit_is_that_of_counted_targets(each: float, unit: float) -> None:
    def answer(counted: bool) -> Callable[[Ask], Taken]:
        def of(ask: Ask) -> Taken:
            count = ask.stop - ask.start
            return Taken(count, each * count, each * count, given=True, counted=counted)

        return of

    assert run(answer(counted=True)).unit == unit
    assert run(answer(counted=False)).unit == 1.0


@pytest.mark.parametrize("size", [3e3, 5e5])
def test_cancellation_is_no_gap_if_double_precision_has_none(size: float) -> None:
    def cancelled(part: slice) -> float:
        return float(np.float32(LOSSES[part].mean() + size) - np.float32(size))

    def answer(ask: Ask) -> Taken:
        return (answering(mean) if ask.double else answering(cancelled))(ask)

    found = run(answer)
    assert found.kind is Kind.PROVEN and found.gap > BOUND
    assert run(_without_double(answer)).kind in UNSPLIT
    # what is left in double precision is no rounding
    assert run(lambda ask: answering(masked)(ask) if ask.double else answer(ask)).kind is Kind.WEIGHTED


def test_half_types_have_their_own_bound() -> None:
    def rough(part: slice) -> float:
        return float(LOSSES[part].mean() * (1 + 0.3 * HALF_BOUND * (part.stop - part.start == ALL)))

    assert run(answering(rough, half=True)).kind is Kind.PROVEN
    assert run(answering(rough)).kind is not Kind.PROVEN
    assert run(answering(lambda part: float(LOSSES[part].sum()), half=True)).kind is Kind.SUM
    assert run(answering(lambda part: float(SCORES[part, part].max()), half=True)).kind in UNSPLIT


def test_a_single_sample_shows_nothing() -> None:
    seen = (Seen(5, 1, (1, 4)),)
    found = run(answering(mean, seen=seen), 1)
    assert found.kind is Kind.UNPROVEN and "single sample" in found.detail and found.draws


@pytest.mark.parametrize("where", [(0, ALL), (0, 24), (24, ALL)])
def test_what_is_not_finite_proves_nothing(where: tuple[int, int]) -> None:
    found = run(answering(lambda part: float("nan") if (part.start, part.stop) == where else 1.0))
    assert found.kind is Kind.UNPROVEN and "not finite" in found.detail


def test_a_part_that_weighs_nothing_is_no_gap() -> None:
    """As where all targets of a part are ignored."""

    def answer(ask: Ask) -> Taken:
        counting = max(0, min(ask.stop, 20) - ask.start)
        return Taken(ask.stop - ask.start, 2.0 * counting, float(counting), given=True, counted=True)

    assert run(answer).kind is Kind.PROVEN
    nothing = [Taken(2, 0.0, 0.0, given=True), Taken(1, 0.0, 0.0, given=True)]
    assert gap_of(nothing[0], nothing[1:]) == 0.0


def test_the_gap_is_relative_to_what_parts_differ_by() -> None:
    near_zero = [Taken(4, 4e-9, 4.0), Taken(2, 2.0, 2.0), Taken(2, -2.0, 2.0)]
    assert gap_of(near_zero[0], near_zero[1:]) == pytest.approx(5e-10)


class Counter:
    """A loss that depends on how often it was computed."""

    def __init__(self, step: float = 1.0, name: str = "calls") -> None:
        self.calls, self._step, self._name = 0.0, step, name

    def __call__(self, ask: Ask) -> Taken:
        self.calls += self._step
        count = ask.stop - ask.start
        changed = {self._name: self.calls} if self._name else {}
        return Taken(count, mean(slice(ask.start, ask.stop)) * count * self.calls, float(count), changed=changed)


def test_a_number_that_each_forward_moves_is_a_state() -> None:
    found = run(Counter())
    assert found.kind is Kind.STATEFUL and found.detail == "calls" and found.gap > 0.1
    # without effect so far, as where an annealing has not begun
    quiet = Counter()
    found = run(lambda ask: replace(answering(mean)(ask), changed=quiet(ask).changed))
    assert found.kind is Kind.STATEFUL and found.detail == "calls"
    # somewhere that nobody sees
    assert run(Counter(name="")).kind is Kind.STATEFUL
    # a number that is set anew, such as the last batch's size, is none
    found = run(lambda ask: replace(answering(mean)(ask), changed={"size": float(ask.stop - ask.start)}))
    assert found.kind is Kind.PROVEN


def test_a_generator_of_its_own_is_named() -> None:
    numbers = np.random.default_rng(1)
    found = run(answering(lambda part: float(numbers.normal()), own=("torch.randn",)))
    assert (found.kind, found.detail) == (Kind.UNKEYED, "torch.randn")
    # drawn from, and of no effect
    assert run(answering(mean, own=("torch.randn",))).kind is Kind.PROVEN
    # seeded alike in each forward: then it is by place in the part
    by_place = answering(lambda part: float((LOSSES[part] * SCORES[0, : part.stop - part.start]).mean()))
    assert run(lambda ask: replace(by_place(ask), own=("torch.rand",))).kind is Kind.UNKEYED
    found = run(lambda ask: replace(by_place(ask), others=("numpy's generator",)))
    assert found.kind is Kind.UNKEYED and found.detail.startswith("numpy's generator")


def test_a_permutation_is_named() -> None:
    found = run(answering(info_nce, permuted=True))
    assert (found.kind, found.detail) == (Kind.COUPLED, "torch.randperm")


def drawing(loss: Callable[[Ask, Rule], float], shape: Callable[[int], tuple[int, ...]]) -> Callable[[Ask], Taken]:
    """A loss that draws at site 5, by the rule that is known or by a guess."""

    def answer(ask: Ask) -> Taken:
        count = ask.stop - ask.start
        drawn = shape(count)
        rule = ask.rules.get(5) or (Rule(0) if drawn[0] % count == 0 else Rule(-1))
        return Taken(count, loss(ask, rule) * count, float(count), seen=(Seen(5, count, drawn),))

    return answer


def test_rules_are_learnt_and_what_was_guessed_wrong_is_computed_again() -> None:
    asked: list[Ask] = []

    def loss(ask: Ask, rule: Rule) -> float:
        asked.append(ask)
        return mean(slice(ask.start, ask.stop)) if rule == Rule(1) else float(ask.stop)

    # in the whole the first dimension looks like samples, and is none
    found = run(drawing(loss, lambda count: (ALL, count)))
    assert found.kind is Kind.PROVEN and found.rules == {5: Rule(1)} and found.draws
    assert [ask.rules for ask in asked] == [{}] * 3 + [{5: Rule(1)}] * 3


def test_samples_that_vary_faster_are_found_by_trying() -> None:
    def loss(ask: Ask, rule: Rule) -> float:
        return mean(slice(ask.start, ask.stop)) if rule.inner else float(ask.stop)

    found = run(drawing(loss, lambda count: (4 * count, 3)))
    assert found.kind is Kind.PROVEN and found.rules == {5: Rule(0, inner=True)}
    # if that is no better, it is not this
    found = run(drawing(lambda ask, _: info_nce(slice(ask.start, ask.stop)), lambda count: (4 * count, 3)))
    assert found.kind is Kind.COUPLED and found.rules == {5: Rule(0)}


def test_a_draw_whose_shape_holds_no_samples_is_told_of_by_its_shape() -> None:
    found = run(drawing(lambda ask, _: info_nce(slice(ask.start, ask.stop)), lambda count: (4 * count + 1, 3)))
    assert found.kind is Kind.UNKEYED and "257 × 3" in found.detail and found.by_forward == found.detail
    # one draw for all samples is none of these
    assert run(drawing(lambda ask, _: mean(slice(ask.start, ask.stop)), lambda _: (1,))).kind is Kind.PROVEN


def test_what_is_drawn_past_us_ends_it() -> None:
    found = run(answering(mean, past="on cuda"))
    assert found.kind is Kind.UNPROVEN and found.by_forward == "on cuda" and found.draws


@pytest.mark.parametrize("kind", list(Kind))
def test_each_kind_has_one_sentence_that_says_what_to_write(kind: Kind) -> None:
    text = sentence(Finding(kind, gap=0.0312, detail="something"))
    if kind in (Kind.PROVEN, Kind.UNPROVEN):
        assert text == ""
        return
    assert text.endswith("(docs/losses.md)")
    assert kind is Kind.STATEFUL or "off by 3e-02" in text
    assert any(word in text for word in ("return (sum, ", "per sample", "after_step=", "default generator"))


def test_sentences_name_what_was_found() -> None:
    assert "'calls'" in sentence(Finding(Kind.STATEFUL, detail="calls"))
    assert "the model or the loss remembers something" in sentence(Finding(Kind.STATEFUL))
    assert "by torch.randperm" in sentence(Finding(Kind.COUPLED, detail="torch.randperm"))
    assert "torch.randn" in sentence(Finding(Kind.UNKEYED, detail="torch.randn"))
    assert "on cuda" in by_forward("on cuda") and "'seen'" in left("seen")
