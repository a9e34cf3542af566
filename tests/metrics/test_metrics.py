from __future__ import annotations

import doctest
import json
import math
import threading
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ConfigError, DataError
from shoal.data import tree
from shoal.metrics import metrics as metrics_module
from shoal.metrics.metrics import (
    AUC,
    F1,
    Accuracy,
    Metric,
    Perplexity,
    Precision,
    compute_all,
    make_metrics,
    needs_loss,
)

COUNTED = [
    "accuracy",
    "precision",
    "precision_micro",
    "recall",
    "recall_micro",
    "f1",
    "f1_macro",
    "f1_micro",
]
WAYS = (1, 2, 3, 7)
quick = settings(max_examples=40, deadline=None, database=None)


def travelled(state: Any) -> Any:
    """`state` as another worker receives it: its structure through text, its tensors as bytes of their own."""
    structure, tensors = tree.pack(state)
    return tree.unpack(json.loads(json.dumps(structure)), [tensor.clone() for tensor in tensors])


def evaluated(
    specs: Sequence[str | Metric], prediction: Any, target: Any, ways: int, batch: int = 3
) -> dict[str, float]:
    """The results when `ways` workers evaluate contiguous parts in batches and every worker merges in order."""
    bounds = [len(target) * worker // ways for worker in range(ways + 1)]
    states = []
    for begin, end in pairwise(bounds):
        own = make_metrics(specs)
        for at in range(begin, end, batch):
            until = min(at + batch, end)
            for metric in own:
                metric.update(prediction[at:until], target[at:until])
        states.append([travelled(metric.state()) for metric in own])
    merged = make_metrics(specs)
    for worker_states in states:
        for metric, state in zip(merged, worker_states, strict=True):
            metric.merge(state)
    return compute_all(merged)


def single(spec: str | Metric, prediction: Any, target: Any) -> float:
    metric = make_metrics([spec])[0]
    metric.update(prediction, target)
    (value,) = compute_all([metric]).values()
    return value


def expected_counts(true: Any, predicted: Any) -> dict[str, float]:
    def score(function: Callable[..., float], average: str) -> float:
        return float(function(true, predicted, average=average, zero_division=0))

    return {
        "accuracy": float(reference.accuracy_score(true, predicted)),
        "precision": score(reference.precision_score, "macro"),
        "precision_micro": score(reference.precision_score, "micro"),
        "recall": score(reference.recall_score, "macro"),
        "recall_micro": score(reference.recall_score, "micro"),
        "f1": score(reference.f1_score, "macro"),
        "f1_macro": score(reference.f1_score, "macro"),
        "f1_micro": score(reference.f1_score, "micro"),
    }


# ---- against scikit-learn, for any number of workers ------------------------------------------------------------


@quick
@given(st.lists(st.tuples(st.integers(-2, 6), st.integers(-2, 6)), min_size=1, max_size=40))
def test_counts_agree_with_scikit_learn_and_do_not_depend_on_the_split(pairs: list[tuple[int, int]]) -> None:
    predicted, true = (torch.tensor(labels) for labels in zip(*pairs, strict=True))
    whole = evaluated(COUNTED, predicted, true, 1, batch=len(pairs))
    assert whole == pytest.approx(expected_counts(true.numpy(), predicted.numpy()), rel=1e-12, abs=1e-15)
    for ways in WAYS:
        assert evaluated(COUNTED, predicted, true, ways) == whole


@quick
@given(st.integers(0, 2**31), st.integers(1, 30), st.integers(2, 6))
def test_class_scores_agree_with_scikit_learn(seed: int, samples: int, classes: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    # few distinct values, so that ties occur
    scores = torch.randint(-2, 3, (samples, classes), generator=draw).float()
    true = torch.randint(0, classes, (samples,), generator=draw)
    expected = expected_counts(true.numpy(), scores.numpy().argmax(-1))
    for ways in WAYS:
        assert evaluated(COUNTED, scores, true, ways) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@quick
@given(
    st.lists(
        st.tuples(st.one_of(st.integers(-2, 2).map(float), st.floats(-1e6, 1e6)), st.booleans()),
        min_size=1,
        max_size=40,
    )
)
def test_auc_agrees_with_scikit_learn_and_does_not_depend_on_the_split(pairs: list[tuple[float, bool]]) -> None:
    scores, true = np.array([score for score, _ in pairs]), np.array([label for _, label in pairs])
    whole = evaluated(["auc"], scores, true, 1, batch=len(pairs))["auc"]
    if true.all() or not true.any():
        assert math.isnan(whole)
        return
    assert whole == pytest.approx(reference.roc_auc_score(true, scores), rel=1e-12, abs=1e-12)
    for ways in WAYS:
        assert evaluated(["auc"], scores, true, ways)["auc"] == whole


@quick
@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3)), min_size=1, max_size=40))
def test_errors_agree_with_scikit_learn_for_any_split(pairs: list[tuple[float, float]]) -> None:
    predicted, true = (np.array(values) for values in zip(*pairs, strict=True))
    expected = {
        "mse": float(reference.mean_squared_error(true, predicted)),
        "rmse": float(reference.root_mean_squared_error(true, predicted)),
        "mae": float(reference.mean_absolute_error(true, predicted)),
    }
    for ways in WAYS:
        assert evaluated(["mse", "rmse", "mae"], predicted, true, ways) == pytest.approx(expected, rel=1e-12)


@quick
@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 50)), min_size=1, max_size=20), st.sampled_from(WAYS))
def test_perplexity_is_of_all_losses_together(batches: list[tuple[float, int]], ways: int) -> None:
    total = make_metrics(["perplexity"])
    for part in np.array_split(np.array(batches), ways):
        (own,) = make_metrics(["perplexity"])
        assert needs_loss(own)
        for loss, weight in part:
            own.update_loss(loss, weight)
        total[0].merge(travelled(own.state()))
    expected = math.exp(sum(loss for loss, _ in batches) / sum(weight for _, weight in batches))
    assert compute_all(total)["perplexity"] == pytest.approx(expected, rel=1e-12)


def test_sums_are_float64_and_counts_do_not_saturate() -> None:
    count = 2**25 + 1  # float32 cannot count so far
    metric = Accuracy()
    metric.merge({"correct": count, "count": count})
    metric.update([1], [0])
    assert metric.compute() == count / (count + 1)
    large = torch.full((1000,), 1.0) + torch.linspace(0, 1e-3, 1000)
    assert single("mse", large, torch.zeros(1000)) == pytest.approx(float(large.double().square().mean()), rel=1e-14)
    # the difference is taken in float64, too: in float16 it would be rounded
    half = torch.tensor([2048.0], dtype=torch.float16)
    assert single("mae", half, torch.tensor([0.25], dtype=torch.float16)) == 2047.75


# ---- what a prediction may look like ----------------------------------------------------------------------------


def test_sequences_of_class_scores_and_ignored_positions() -> None:
    scores = torch.tensor([[[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]], [[0.6, 0.4], [math.nan, 0.0], [5.0, 1.0]]])
    target = torch.tensor([[1, 1, 1], [0, -100, -100]])
    assert single("accuracy", scores, target) == 3 / 4
    assert single("accuracy", scores[:, :, :], target.unsqueeze(-1)) == 3 / 4
    assert single("f1_micro", scores, target) == 3 / 4


def test_the_ignored_label_can_be_chosen() -> None:
    predicted, target = torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 1, 2])
    assert single("accuracy:ignore=1", predicted, target) == 1.0
    assert single("accuracy", predicted, target) == 3 / 4
    assert single("precision:average=micro,ignore=1", predicted, target) == 1.0
    assert single("recall_macro:ignore=0", predicted, target) == 0.75
    assert single("auc:ignore=7", [0.1, 0.9, 0.5], [0, 1, 7]) == 1.0
    # ignored in every form in which a target may come
    assert single("accuracy", [0.9, 0.1], np.array([1.0, -100.0])) == 1.0


def test_floats_of_the_targets_shape_are_probabilities_with_a_tie_for_class_0() -> None:
    assert single("accuracy", torch.tensor([0.0, 0.5, 0.51, 1.0]), torch.tensor([0, 0, 1, 1])) == 1.0
    assert single("accuracy", torch.tensor([0.5]), torch.tensor([1])) == 0.0


@pytest.mark.parametrize(
    "prediction, target",
    [
        (torch.tensor([True, False, True]), torch.tensor([1, 1, 1])),
        (torch.tensor([1, 0, 1], dtype=torch.uint8), torch.tensor([1.0, 1.0, 1.0])),
        (np.array([1, 0, 1], dtype=np.uint16), np.array([True, True, True])),
        (np.array([1, 0, 1])[::-1], [1, 1, 1]),
        ([1, 0, 1], (1, 1, 1)),
        ([0.7, 0.2, 0.9], [[1], [1], [1]]),
        (torch.tensor([[0.7], [0.2], [0.9]]), torch.tensor([1, 1, 1])),
        (torch.tensor([[0.7], [0.2], [0.9]]), torch.tensor([[1], [1], [1]])),
        (torch.tensor([[1], [0], [1]]), torch.tensor([1, 1, 1])),
        (torch.tensor([[0.0, 2.0], [2.0, 0.0], [1.0, 3.0]], requires_grad=True), torch.tensor([[1], [1], [1]])),
        (torch.tensor([[0.0, 2.0], [2.0, 0.0], [1.0, 3.0]]).bfloat16(), torch.tensor([1, 1, 1])),
        (torch.tensor([[0.0, 2.0], [2.0, 0.0], [1.0, 3.0]]).to(torch.float8_e4m3fn), torch.tensor([1, 1, 1])),
        (torch.tensor([[False, True], [True, False], [False, True]]), torch.tensor([1, 1, 1])),
        ([torch.tensor([0.0, 2.0]), torch.tensor([2.0, 0.0]), torch.tensor([1.0, 3.0])], [1, 1, 1]),
        (torch.tensor([[-math.inf, 2.0], [2.0, -math.inf], [1.0, 3.0]]), torch.tensor([1, 1, 1])),
    ],
)
def test_all_forms_of_labels_give_the_same_accuracy(prediction: Any, target: Any) -> None:
    assert single("accuracy", prediction, target) == 2 / 3
    assert single("recall_micro", prediction, target) == 2 / 3


def test_numbers_are_batches_of_one() -> None:
    assert single("accuracy", 1, 1) == 1.0
    assert single("accuracy", [0.1, 0.2, 0.7], 2) == 1.0
    assert single("mse", 3.0, 1) == 4.0
    assert single("mae", np.float32(0.5), torch.tensor(1.0)) == 0.5


def test_lists_of_floats_keep_float64() -> None:
    assert single("mae", [1.0 + 1e-12], [1.0]) == pytest.approx(1e-12, rel=1e-3)


def test_auc_takes_scores_of_both_classes_and_any_real_scores() -> None:
    logits = torch.tensor([[2.0, 1.0], [0.0, 5.0], [1.0, 1.0], [3.0, 4.0]])
    target = torch.tensor([0, 1, 1, 0])
    expected = reference.roc_auc_score(target, logits[:, 1] - logits[:, 0])
    assert single("auc", logits, target) == expected == 0.75
    assert single("auc", logits, target.unsqueeze(-1).float()) == expected
    assert single("auc", (logits[:, 1] - logits[:, 0]).unsqueeze(-1), target) == expected
    assert single("auc", [-100, 3, 3], [False, True, True]) == 1.0
    assert single("auc", [0.0, -0.0], [1, 0]) == 0.5
    assert single("auc", torch.tensor([0.5, 9.0]), torch.tensor([0, -100])) != 1.0


def test_a_trailing_one_is_dropped_only_if_the_rest_fits() -> None:
    column, row = torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 4.0])
    assert single("mse", column, row) == single("mse", row, column) == 2.0
    with pytest.raises(DataError, match=r"\(2, 1\).*\(1, 2\).*nothing is broadcast"):
        single("mse", column, row.unsqueeze(0))


def test_macro_averages_over_classes_that_occur_on_either_side() -> None:
    # class 9 is only predicted, class 4 is only true: both count as 0
    predicted, target = torch.tensor([0, 0, 9]), torch.tensor([0, 0, 4])
    assert single("precision", predicted, target) == 1 / 3
    assert single("recall", predicted, target) == 1 / 3
    assert single("f1", predicted, target) == 1 / 3


def test_labels_may_be_far_apart() -> None:
    metric = F1()
    metric.update([10**15, -7, 3], [10**15, -7, 4])
    assert metric.state()["counts"].shape == (4, 3)
    assert metric.compute() == 0.5


# ---- nothing to measure -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*COUNTED, "auc", "mse", "rmse", "mae", "perplexity"])
def test_nothing_seen_is_nan_and_merges_as_nothing(name: str) -> None:
    (empty,) = make_metrics([name])
    assert math.isnan(compute_all([empty])[name])
    (merged,) = make_metrics([name])
    merged.merge(travelled(empty.state()))
    assert math.isnan(compute_all([merged])[name])


@pytest.mark.parametrize("name", [*COUNTED, "auc", "mse"])
def test_empty_batches_count_as_nothing(name: str) -> None:
    for empty in ([], torch.zeros(0), torch.zeros(0, 1), np.zeros(0, dtype=np.int64)):
        assert math.isnan(single(name, empty, empty))
    if name != "mse":
        assert math.isnan(single(name, torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64)))
        assert math.isnan(single(name, torch.zeros(3, 2), torch.full((3,), -100)))


def test_a_worker_without_data_changes_nothing() -> None:
    names = [*COUNTED, "auc"]
    predicted, target = torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0])
    assert evaluated(names, predicted, target, 7) == evaluated(names, predicted, target, 1)


def test_auc_of_one_class_is_nan() -> None:
    assert math.isnan(single("auc", [0.1, 0.9], [1, 1]))
    assert math.isnan(single("auc", [0.1, 0.9], [0, 0]))


def test_perplexity_beyond_floats_is_infinite_and_refuses_predictions() -> None:
    metric = Perplexity()
    metric.update_loss(1e6, 1)
    assert metric.compute() == math.inf
    with pytest.raises(ConfigError, match="update_loss"):
        metric.update([1], [1])


# ---- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, prediction, target, message",
    [
        ("accuracy", torch.tensor([0.2, -3.5]), torch.tensor([0, 1]), r"-3\.5.*\[0, 1\].*sigmoid.*\(2, C\)"),
        ("accuracy", torch.tensor([0.2, math.nan]), torch.tensor([0, 1]), r"nan.*\[0, 1\]"),
        ("f1", torch.tensor([0.2, 0.9]), torch.tensor([0, 3]), r"label 3.*from 0 to 1.*probabilities"),
        ("accuracy", torch.zeros(4, 3), torch.zeros(5), r"\(4, 3\).*\(5,\)"),
        ("accuracy", torch.zeros(4, 3, 5), torch.zeros(4, 5), r"\(4, 3, 5\).*\(4, 5\).*classes last.*movedim"),
        ("accuracy", torch.zeros(3), torch.zeros(1), r"\(3,\).*\(1,\)"),
        ("accuracy", torch.zeros(4, 0), torch.zeros(4), r"\(4, 0\).*\(4,\)"),
        ("accuracy", torch.zeros(2, 3), torch.tensor([0, 255]), r"label 255.*from 0 to 2.*3 classes.*ignore"),
        ("accuracy", torch.zeros(2, 3), torch.tensor([0, -1]), r"label -1.*from 0 to 2"),
        ("accuracy", torch.tensor([[0.0, math.nan]]), torch.tensor([0]), "NaN"),
        ("accuracy", torch.tensor([1, 0]), torch.tensor([0.5, 1.0]), r"0\.5.*whole numbers"),
        ("accuracy", torch.tensor([1, 0]), torch.tensor([math.inf, 1.0]), r"inf.*whole numbers"),
        ("accuracy", torch.tensor([1, 0]), torch.tensor([math.nan, 1.0]), r"nan.*whole numbers"),
        ("accuracy", {"logits": 1}, torch.tensor([1]), r"dict.*tensors, numpy arrays, lists or numbers"),
        ("accuracy", ["cat"], [1], r"\['cat'\].*list"),
        ("accuracy", [[1, 2], [3]], [1, 2], "no regular array"),
        ("mse", torch.zeros(2, dtype=torch.complex64), torch.zeros(2), "complex64.*real"),
        ("mse", torch.zeros(3), torch.zeros(2), r"\(3,\).*\(2,\)"),
        ("auc", torch.zeros(4, 3), torch.zeros(4), r"\(4, 3\).*\(4,\).*two classes"),
        ("auc", torch.zeros(2), torch.tensor([0, 2]), r"label 2.*two classes"),
        ("auc", torch.tensor([0.0, math.nan]), torch.tensor([0, 1]), "NaN"),
    ],
)
def test_bad_predictions_are_refused(name: str, prediction: Any, target: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"^{name}: .*{message}"):
        single(name, prediction, target)


@pytest.mark.parametrize(
    "specs, message",
    [
        (["acuracy"], r"'acuracy'.*did you mean 'accuracy'.*valid names are accuracy, auc, .* and rmse"),
        (["AUC"], "did you mean 'auc'"),
        (["zzzz"], r"unknown metric 'zzzz'; valid names"),
        (["f1:averge=micro"], r"'averge'.*did you mean 'average'.*valid keys are average and ignore"),
        (["f1:average=micr"], r"'micr'.*did you mean 'micro'.*macro or micro"),
        (["f1_micro:average=macro"], r"'average'.*valid keys are ignore"),
        (["accuracy:ignore=x"], "ignore='x'.*integer"),
        (["accuracy:ignore"], "key=value"),
        (["accuracy:ignore="], "key=value"),
        (["accuracy:ignore=1,ignore=2"], "twice"),
        (["accuracy:"], "colon"),
        (["mse:ignore=1"], "mse has no settings"),
        ("accuracy", r"must be a list.*\['accuracy'\]"),
        (7, "must be a list"),
        (["accuracy", "accuracy:ignore=0"], "two entries that are called 'accuracy'"),
        ([Accuracy], r"class Accuracy.*Accuracy\(\)"),
        ([3], r"3 of type int.*lacks state, merge, compute, reset and update;"),
    ],
)
def test_bad_specs_are_refused(specs: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_metrics(specs)


def test_an_average_given_to_the_class_is_checked_too() -> None:
    with pytest.raises(ConfigError, match="macro or micro"):
        Precision(average="weighted")  # type: ignore[arg-type]


# ---- names, copies and metrics of one's own ---------------------------------------------------------------------


def test_names_of_results() -> None:
    specs = ["f1", "f1:average=micro", "precision:average=macro", "accuracy:ignore=0", "recall_micro: ignore = 1"]
    assert [metric.name for metric in make_metrics(specs)] == [
        "f1",
        "f1_micro",
        "precision_macro",
        "accuracy",
        "recall_micro",
    ]
    assert make_metrics(["recall_micro: ignore = 1"])[0].ignore == 1  # type: ignore[attr-defined]
    assert [metric.name for metric in make_metrics(["accuracy", Accuracy(ignore=0, name="words")])] == [
        "accuracy",
        "words",
    ]


def test_only_perplexity_needs_the_loss() -> None:
    names = sorted(metrics_module._BUILT_INS)
    assert [metric.name for metric in make_metrics(names) if needs_loss(metric)] == ["perplexity"]
    assert [metric.name for metric in make_metrics(names)] == names


class Histogram:
    """A metric of a user: no base class, a dict as result, settings of its own."""

    def __init__(self, name: str, limits: list[float]) -> None:
        self.name = name
        self.limits = limits
        self.reset()

    def reset(self) -> None:
        self.below = [0 for _ in self.limits]

    def update(self, prediction: Any, target: Any) -> None:
        self.below = [
            count + int((prediction < limit).sum()) for count, limit in zip(self.below, self.limits, strict=True)
        ]

    def state(self) -> Any:
        return {"below": self.below}

    def merge(self, state: Any) -> None:
        self.below = [mine + other for mine, other in zip(self.below, state["below"], strict=True)]

    def compute(self) -> dict[str, float]:
        return {f"{limit:g}": count for limit, count in zip(self.limits, self.below, strict=True)}


def test_a_metric_of_the_user_is_copied_reset_and_merged() -> None:
    pattern = Histogram("below", [0.5, 2])
    values = torch.arange(10) / 4
    pattern.update(values, None)
    for ways in WAYS:
        assert evaluated([pattern], values, values, ways) == {"below_0.5": 2.0, "below_2": 8.0}
    assert pattern.below == [2, 8]
    assert not needs_loss(make_metrics([pattern])[0])


def test_results_that_are_no_numbers_or_collide_are_refused() -> None:
    class Odd(Histogram):
        def compute(self) -> Any:
            return "high"

    with pytest.raises(ConfigError, match=r"'odd'.*'high'.*number"):
        compute_all([Odd("odd", [])])
    with pytest.raises(ConfigError, match="'below_1'"):
        compute_all([Histogram("below", [1.0]), Accuracy(name="below_1")])
    assert compute_all([Histogram("below", [])]) == {}


def test_objects_that_cannot_serve_are_refused() -> None:
    locked = Histogram("locked", [])
    locked.limits = [threading.Lock()]  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="'locked' cannot be deep-copied"):
        make_metrics([locked])
    with pytest.raises(ConfigError, match="name"):
        make_metrics([Histogram("", [])])
    nameless: Any = Histogram("x", [])
    nameless.needs_loss = True
    with pytest.raises(ConfigError, match="lacks update_loss;"):
        make_metrics([nameless])


@pytest.mark.parametrize("metric", [AUC(), F1()])
def test_states_are_neither_altered_nor_kept(metric: Metric) -> None:
    scores = torch.tensor([0.1, 0.4, 0.35, 0.8], dtype=torch.float64)
    target = torch.tensor([0, 0, 1, 1])
    metric.update(scores, target)
    result = metric.compute()
    scores.zero_()
    assert metric.compute() == result
    state, before = metric.state(), [tensor.clone() for tensor in tree.pack(metric.state())[1]]
    (merged,) = make_metrics([metric])
    merged.merge(state)
    merged.update([0.9, 0.9], [0, 1])
    assert all(torch.equal(now, then) for now, then in zip(tree.pack(state)[1], before, strict=True))
    expected = merged.compute()
    for tensor in tree.pack(state)[1]:
        tensor.zero_()
    assert merged.compute() == expected


def test_reset_forgets_everything() -> None:
    for name in [*COUNTED, "auc", "mse", "mae", "rmse"]:
        (metric,) = make_metrics([name])
        metric.update([1, 0, 1], [0, 0, 1])
        assert not math.isnan(compute_all([metric])[name])
        metric.reset()
        assert math.isnan(compute_all([metric])[name])


def test_no_warnings_from_read_only_arrays() -> None:
    labels = np.array([1, 0])
    labels.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert single("accuracy", labels, labels) == 1.0


def test_the_examples_in_the_docstrings_run() -> None:
    outcome = doctest.testmod(metrics_module)
    assert outcome.attempted > 5
    assert outcome.failed == 0
