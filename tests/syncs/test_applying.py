"""Measuring, clipping and applying gradients: as plain PyTorch does, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf, nan, sqrt

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from shoal.syncs.applying import Applier, Average, OwnGradients, clipping

DTYPES = {
    "single": [torch.float32],
    "double": [torch.float64],
    "half": [torch.bfloat16],
    "mixed": [torch.float32, torch.bfloat16, torch.float64],
    "complex": [torch.complex64, torch.float32],
}


def parameters(dtypes: list[torch.dtype], seed: int) -> list[nn.Parameter]:
    """With gradients; the last one has none."""
    generator = torch.Generator().manual_seed(seed)
    params = []
    for number in range(5):
        dtype = dtypes[number % len(dtypes)]
        made = [torch.randn(7 * number + 1, 3, generator=generator).to(dtype) for _ in range(2)]
        params.append(nn.Parameter(made[0]))
        params[-1].grad = made[1] * 10.0 ** (seed % 3 - 1) if number < 4 else None
    return params


def grads(params: list[nn.Parameter]) -> list[Tensor | None]:
    return [param.grad for param in params]


@pytest.mark.parametrize("clip", [1e-3, 0.7, 1.0, 30.0, 1e6])
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_clipping_is_that_of_torch_bit_for_bit(dtypes: list[torch.dtype], clip: float) -> None:
    for seed in range(20):
        theirs, mine = parameters(dtypes, seed), parameters(dtypes, seed)
        wanted = torch.nn.utils.clip_grad_norm_(theirs, clip)
        gradients = OwnGradients(grads(mine))
        measured = Applier.measure(gradients)
        assert measured.finite and measured.norm == float(wanted) and gradients.precision == wanted.dtype
        gradients.place(clipping(measured.norm, clip, gradients.precision))
        for own, their in zip(grads(mine), grads(theirs), strict=True):
            assert (own is None and their is None) or torch.equal(own, their)  # type: ignore[arg-type]


def test_the_root_of_a_square_is_the_norm() -> None:
    for norm in torch.randn(2000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).exp().tolist():
        assert sqrt(norm * norm) == norm


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_what_is_not_finite_is_found(bad: float) -> None:
    params = parameters([torch.float32], 0)
    assert params[2].grad is not None
    params[2].grad[3, 1] = bad
    assert not Applier.measure(OwnGradients(grads(params))).finite


def test_no_gradients_at_all_have_the_norm_zero_and_are_left_alone() -> None:
    gradients = OwnGradients([None, None])
    assert Applier.measure(gradients) == (0.0, True)
    gradients.place(clipping(0.0, 1.0))


def test_apply_scales_first_and_steps_within_what_it_is_given() -> None:
    params = [nn.Parameter(torch.ones(3))]
    params[0].grad = torch.full((3,), 4.0)
    seen: list[tuple[str, float]] = []

    @contextmanager
    def within() -> Iterator[None]:
        assert params[0].grad is not None
        seen.append(("before", float(params[0].grad[0])))
        yield
        seen.append(("after", float(params[0].detach()[0])))

    Applier(torch.optim.SGD(params, lr=0.5)).apply(OwnGradients(grads(params)), 0.25, within=within())
    assert seen == [("before", 1.0), ("after", 0.5)]


def test_rates_that_are_given_hold_for_one_step() -> None:
    params = [nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))]
    applier = Applier(torch.optim.SGD([{"params": [param], "lr": 1.0} for param in params]))
    for param in params:
        param.grad = torch.ones(1)
    applier.apply(OwnGradients(grads(params)), rates=[0.5, 0.25])
    assert [float(param.detach()) for param in params] == [0.5, 0.75] and applier.rates() == [1.0, 1.0]

    def fails() -> None:
        raise RuntimeError("no step")

    vars(applier.optimizer)["step"] = fails
    with pytest.raises(RuntimeError, match="no step"):
        applier.apply(OwnGradients(grads(params)), rates=[0.5, 0.25])
    assert applier.rates() == [1.0, 1.0]


def test_a_step_ends_with_the_average_and_the_schedule() -> None:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.0)
    average = Average(model, 0.75)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    applier = Applier(optimizer, StepLR(optimizer, 1, gamma=0.5), average)
    model.weight.grad = torch.full((1, 1), -4.0)
    applier.apply(OwnGradients([model.weight.grad]))
    assert applier.rates() == [1.0] and not average.values[0].any(), "not before the step has ended"
    applier.end(nan)
    applier.evaluated(9.0)  # which this schedule does not go by
    assert applier.rates() == [0.5] and float(average.values[0]) == 1.0 and not applier.by_loss


def test_a_schedule_that_goes_by_losses_gets_those_of_evaluations_or_of_steps() -> None:
    def applier() -> Applier:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        return Applier(optimizer, ReduceLROnPlateau(optimizer, patience=0, factor=0.5))

    by_steps, by_evaluations = applier(), applier()
    assert by_steps.by_loss
    for loss in (1.0, 2.0):
        by_steps.end(loss)
        by_evaluations.end(nan)
    assert by_steps.rates() == [0.5] and by_evaluations.rates() == [1.0]
    for loss in (1.0, 2.0):
        by_evaluations.evaluated(loss)
    assert by_evaluations.rates() == [0.5]
