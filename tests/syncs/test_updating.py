from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shoal.syncs.updating import update

Make = Callable[[Iterable[nn.Parameter]], Optimizer]
OWN: dict[str, Make] = {
    "adam": lambda params: Adam(params, lr=1e-2),
    "adam, decay": lambda params: Adam(params, lr=1e-2, weight_decay=0.1),
    "adamw": lambda params: AdamW(params, lr=1e-2),
    "adamw, amsgrad": lambda params: AdamW(params, lr=1e-2, amsgrad=True),
    "adamw, maximize": lambda params: AdamW(params, lr=1e-2, maximize=True),
    "adamw, without decay": lambda params: AdamW(params, lr=1e-2, betas=(0.5, 0.9), eps=1e-3, weight_decay=0.0),
}
LEFT_ALONE: dict[str, Make] = {
    "foreach": lambda params: AdamW(params, foreach=True),
    "not foreach": lambda params: AdamW(params, foreach=False),
    "not fused": lambda params: AdamW(params, fused=False),
    "a tensor as rate": lambda params: AdamW(params, lr=torch.tensor(1e-2)),
    "sgd": lambda params: SGD(params, lr=1e-2, momentum=0.9),
    "adagrad": Adagrad,
    "rmsprop": RMSprop,
}


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((17, 33), (33,), ())]


def gradients(params: Sequence[Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(1 + step)
    for number, param in enumerate(params):
        # one has none in the first steps, as where a layer is not used
        drawn = torch.randn(param.shape, generator=generator).mul_(10.0 ** (-step % 4)).to(param.dtype)
        param.grad = None if number == 1 and step < 2 else drawn


def watched(optimizer: Optimizer) -> list[Any]:
    """Fills with what the groups say about fused kernels while a step runs."""
    seen: list[Any] = []
    step: Any = optimizer.step

    def stepping() -> None:
        seen.extend(group.get("fused") for group in optimizer.param_groups)
        step()

    vars(optimizer)["step"] = stepping
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OWN)
def test_a_fused_step_is_the_plain_one(name: str, dtype: torch.dtype) -> None:
    plain, fused = parameters(dtype), parameters(dtype)
    slow, quick = OWN[name](plain), OWN[name](fused)
    seen = watched(quick)
    for step in range(12):
        for params in (plain, fused):
            gradients(params, step)
        before = [None if param.grad is None else param.grad.clone() for param in fused]
        slow.step()
        update(quick)
        for param, grad in zip(fused, before, strict=True):
            if param.grad is None or grad is None:
                assert param.grad is grad
            else:
                assert torch.equal(param.grad, grad)  # a server lends them
    assert seen == [True] * 12
    bound = 1e-6 if dtype == torch.float32 else 1e-14
    for mine, theirs in zip(fused, plain, strict=True):
        assert (mine - theirs).norm() <= bound * theirs.norm()
    assert quick.param_groups[0]["fused"] is None
    assert {key: sorted(entry) for key, entry in quick.state_dict()["state"].items()} == {
        key: sorted(entry) for key, entry in slow.state_dict()["state"].items()
    }


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_the_user_has_chosen_is_left_alone(name: str) -> None:
    params, others = parameters(), parameters()
    mine, theirs = LEFT_ALONE[name](params), LEFT_ALONE[name](others)
    chosen, seen = copy.copy(mine.param_groups[0].get("fused")), watched(mine)
    for step in range(3):
        for each in (params, others):
            gradients(each, step)
        update(mine)
        theirs.step()
    assert seen == [chosen] * 3
    assert all(torch.equal(one, other) for one, other in zip(params, others, strict=True))


def test_an_optimizer_of_the_users_is_left_alone() -> None:
    class Mine(AdamW):
        pass

    params = parameters()
    optimizer = Mine(params)
    gradients(params, 5)
    seen = watched(optimizer)
    update(optimizer)
    assert seen == [None]


def test_types_without_a_fused_kernel_are_left_alone() -> None:
    half, whole = parameters(torch.bfloat16), parameters()
    optimizer = AdamW([{"params": half}, {"params": whole}])
    for params in (half, whole):
        gradients(params, 5)
    seen = watched(optimizer)
    update(optimizer)
    assert seen == [None, True]


@pytest.mark.parametrize("where", ["parameter", "gradient", "state"])
def test_tensors_that_do_not_lie_in_order_are_left_alone(where: str) -> None:
    """The fused kernel would pair the wrong numbers."""
    params, others = [nn.Parameter(torch.randn(4, 3, 5, 5))], [nn.Parameter(torch.zeros(4, 3, 5, 5))]
    if where == "parameter":
        params[0].data = params[0].data.to(memory_format=torch.channels_last)
    others[0].data = params[0].data.clone()
    mine, theirs = AdamW(params), AdamW(others)
    for step in range(3):
        for each in (params, others):
            gradients(each, step)
            assert each[0].grad is not None
            if where == "gradient":
                each[0].grad = each[0].grad.to(memory_format=torch.channels_last)
        update(mine)
        theirs.step()
        if where == "state":
            moments = mine.state[params[0]]
            moments["exp_avg"] = moments["exp_avg"].to(memory_format=torch.channels_last)
    assert torch.allclose(params[0], others[0], rtol=1e-6, atol=1e-7)


def test_a_failed_step_leaves_the_groups_as_they_were() -> None:
    params = parameters()
    optimizer = AdamW(params)
    gradients(params, 5)

    def fail() -> None:
        assert optimizer.param_groups[0]["fused"] is True
        raise RuntimeError("step")

    vars(optimizer)["step"] = fail
    with pytest.raises(RuntimeError, match="step"):
        update(optimizer)
    assert optimizer.param_groups[0]["fused"] is None


@pytest.mark.parametrize("every", [False, True])
def test_a_hook_may_put_other_gradients_there(every: bool) -> None:
    params, others = parameters(), parameters()
    mine, theirs = AdamW(params), AdamW(others)

    def turn(optimizer: Any, *_: Any) -> None:
        for param in optimizer.param_groups[0]["params"]:
            if param.dim() == 2:
                param.grad = param.grad.t().contiguous().t()

    handles = (
        [register_optimizer_step_pre_hook(turn)]
        if every
        else [each.register_step_pre_hook(turn) for each in (mine, theirs)]
    )
    for step in range(3):
        for each in (params, others):
            gradients(each, step)
        update(mine)
        theirs.step()
    for handle in handles:
        handle.remove()
    assert all(torch.equal(one, other) for one, other in zip(params, others, strict=True))


def test_a_state_may_hold_anything() -> None:
    params = parameters()
    optimizer = AdamW(params)
    for step in range(3, 6):
        gradients(params, step)
        update(optimizer)
        optimizer.state[params[0]]["seen"] = step


def test_a_state_of_plain_steps_goes_on() -> None:
    plain, fused = parameters(), parameters()
    slow, quick = AdamW(plain), AdamW(fused)
    for step in range(6):
        gradients(plain, step)
        slow.step()
        if step == 2:
            quick.load_state_dict(copy.deepcopy(slow.state_dict()))
            for mine, theirs in zip(fused, plain, strict=True):
                mine.data.copy_(theirs.data)
        if step > 2:
            gradients(fused, step)
            update(quick)
    for mine, theirs in zip(fused, plain, strict=True):
        assert (mine - theirs).norm() <= 1e-6 * theirs.norm()


def test_a_hook_that_runs_after_the_step_costs_nothing() -> None:
    params, others = parameters(), parameters()
    mine, theirs = AdamW(params), AdamW(others, fused=True)
    called: list[bool] = []
    mine.register_step_post_hook(lambda *_: called.append(True))
    for step in range(3):
        for each in (params, others):
            gradients(each, step)
        update(mine)
        theirs.step()
    assert called == [True] * 3
    assert all(torch.equal(one, other) for one, other in zip(params, others, strict=True))
