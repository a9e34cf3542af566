"""SGD whose momentum is the workers': where all is sent it is that of torch, for every parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.codecs.memory import RESIDUAL
from shoal.comm.codecs.sparse import MOMENTUM
from shoal.comm.group import Group
from shoal.core.spec import AnyCodec, Int8, NoCodec, OneBit, TopK
from shoal.syncs.allreduce import Weighing
from shoal.syncs.encoded import EncodedExchange
from shoal.syncs.encoding import Encoding
from shoal.syncs.momentum import add_decay, factors, left_to_workers
from shoal.testing.fake_group import FakeGroup, run_members

SHAPES = {"large": (40, 32), "other": (36, 30), "bias": (32,), "scale": ()}
LARGE = ("large", "other")
EVERYTHING = TopK(density=1.0, threshold="exact", mask=False)


def drawn(step: int, rank: int, name: str) -> Tensor:
    seed = 1000 * step + 10 * rank + len(name)
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))


class Worker:
    """Parameters, SGD and an exchange."""

    def __init__(self, group: Group, codec: AnyCodec, **options: Any) -> None:
        self.group = group
        self.params = {name: nn.Parameter(drawn(999, 0, name)) for name in SHAPES}
        self.optimizer = torch.optim.SGD(self.params.values(), **{"lr": 0.125, **options})
        self.encoding = Encoding(codec, self.optimizer, list(self.params.items()))
        self.exchange = EncodedExchange(group, self.encoding, seed=5, judged=False)

    def step(self, number: int, unused: tuple[str, ...] = (), weight: float | None = None) -> None:
        """`weight`: of all samples of the step, of which there are 8, each worker having its part of it."""
        self.exchange.open(1, 1, 1)
        for name, param in self.params.items():
            times = 1.0 if weight is None else weight / 8
            param.grad = None if name in unused else times * drawn(number, self.group.rank, name)
        weighing = None if weight is None else Weighing(8, None)
        own = 0.0 if weight is None else weight / self.group.size
        self.exchange.finish(torch.zeros(0), torch.ones(1), weighing, torch.tensor([own], dtype=torch.float64))
        for name in unused:
            self.params[name].grad = None
        with self.exchange.applying():
            self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in self.params.items()}


def by_torch(size: int, steps: int, unused: Callable[[int], tuple[str, ...]] = lambda step: (), **options: Any) -> Any:
    """What SGD makes of the same sums in one process."""
    params = {name: nn.Parameter(drawn(999, 0, name)) for name in SHAPES}
    optimizer = torch.optim.SGD(params.values(), **{"lr": 0.125, **options})
    for step in range(steps):
        for name, param in params.items():
            total = torch.stack([drawn(step, rank, name) for rank in range(size)]).sum(0)
            param.grad = None if name in unused(step) else total
        optimizer.step()
    return {name: param.detach() for name, param in params.items()}


SETTINGS: list[dict[str, Any]] = [
    {"momentum": 0.9},
    {"momentum": 0.9, "weight_decay": 0.3},
    {"momentum": 0.5, "weight_decay": 0.3, "maximize": True},
    {"momentum": 0.9, "maximize": True},
    {"weight_decay": 0.3},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.3},
    {"momentum": 0.9, "dampening": 0.5},
]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_where_all_is_sent_it_is_sgd(settings: dict[str, Any], size: int) -> None:
    """For large parameters and for small ones. What is sent has 16 bits, and what that loses is sent later."""

    def member(group: FakeGroup) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        one = Worker(group, EVERYTHING, **settings)
        for step in range(12):
            one.step(step)
        group_now = one.optimizer.param_groups[0]
        assert all(group_now[name] == value for name, value in settings.items())
        rest = one.encoding.memory.parts().get(RESIDUAL, torch.zeros(one.encoding.count))
        return one.weights(), one.encoding.keyed({RESIDUAL: rest})[RESIDUAL]

    found, truth = run_members(size, member), by_torch(size, 12, **settings)
    for name in SHAPES:
        assert all(torch.equal(weights[name], found[0][0][name]) for weights, _ in found)
    for name in ("bias", "scale"):
        torch.testing.assert_close(found[0][0][name], truth[name], rtol=1e-5, atol=1e-5)
    moved = max(float((truth[name] - drawn(999, 0, name)).abs().max()) for name in LARGE)
    for name in LARGE:
        rest = torch.stack([rests[name] for _, rests in found]).sum(0)
        turned = 1.0 if settings.get("maximize") else -1.0
        whole = found[0][0][name] + turned * 0.125 * rest
        torch.testing.assert_close(whole, truth[name], rtol=0, atol=(2e-3 if len(settings) > 1 else 2e-5) * moved)


@pytest.mark.parametrize("codec", [EVERYTHING, TopK(density=0.1, threshold="exact")], ids=str)
def test_momentum_and_what_is_kept_of_a_parameter_that_nobody_uses_are_kept_on(codec: AnyCodec) -> None:
    """As in SGD, which does nothing at all to one that has no gradient."""

    def member(group: FakeGroup) -> list[dict[str, Tensor]]:
        one = Worker(group, codec, momentum=0.9, weight_decay=0.1)
        for step in range(3):
            one.step(step)
        told = []
        for step in (3, 4):
            kinds = one.encoding.keyed(one.encoding.parts())
            told.append({kind: by_name["other"].clone() for kind, by_name in kinds.items()} | one.weights())
            one.step(step, unused=("other", "bias"))
        kinds = one.encoding.keyed(one.encoding.parts())
        return [*told, {kind: by_name["other"].clone() for kind, by_name in kinds.items()} | one.weights()]

    for before, between, after in run_members(2, member):
        for what in (RESIDUAL, MOMENTUM, "other", "bias"):
            assert torch.equal(before[what], after[what]), what
        assert float(before[MOMENTUM].abs().max()) > 0
        assert not torch.equal(between["large"], after["large"])


def test_a_parameter_that_only_some_steps_use_moves_as_with_sgd() -> None:
    def unused(step: int) -> tuple[str, ...]:
        return ("other", "scale") if step % 4 else ()

    def member(group: FakeGroup) -> dict[str, Tensor]:
        one = Worker(group, EVERYTHING, momentum=0.9)
        for step in range(12):
            one.step(step, unused(step))
        return one.weights()

    found, truth = run_members(2, member)[0], by_torch(2, 12, unused, momentum=0.9)
    for name in SHAPES:
        torch.testing.assert_close(found[name], truth[name], rtol=0, atol=2e-3 * float(truth[name].abs().max()))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_what_steps_weigh_changes_nothing(momentum: float) -> None:
    """Gradients are sums over samples: those of a step that weighs 128 times more are as much larger."""

    def member(group: FakeGroup, weights: list[float]) -> list[dict[str, Tensor]]:
        one = Worker(group, TopK(density=0.05, threshold="exact"), momentum=momentum)
        log = []
        for step, weight in enumerate(weights):
            one.step(step, weight=weight)
            log.append(one.weights())
        return log

    varying = [1024.0 if step % 8 else 8.0 for step in range(24)]
    found = run_members(2, lambda group: member(group, varying))
    steady = run_members(2, lambda group: member(group, [8.0] * 24))
    for step, logs in enumerate(zip(*found, *steady, strict=True)):
        for name in SHAPES:
            assert all(torch.equal(log[name], logs[0][name]) for log in logs), (step, name)


# -- onebit ------------------------------------------------------------------------------------------------------------

ONEBIT: list[dict[str, Any]] = [
    *SETTINGS,
    {"momentum": 0.9, "dampening": 0.5, "maximize": True, "weight_decay": 0.1},
    {"momentum": 0.9, "dampening": 1.0},
    {"momentum": 1.0},
]


@pytest.mark.parametrize("settings", ONEBIT, ids=str)
def test_with_onebit_it_is_sgd_with_what_was_sent(settings: dict[str, Any]) -> None:
    """What a step applies is its gradients, and what waited before it without what waits after it."""

    def member(group: FakeGroup) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        one, waiting = Worker(group, OneBit(block=64), **settings), []
        for step in range(8):
            one.step(step)
            rest = one.encoding.keyed(one.encoding.parts())[RESIDUAL]
            waiting.append({name: value.clone() for name, value in rest.items()})
        return one.weights(), waiting

    found = run_members(2, member)
    params = {name: nn.Parameter(drawn(999, 0, name)) for name in SHAPES}
    optimizer = torch.optim.SGD(params.values(), **{"lr": 0.125, **settings})
    before = {name: torch.zeros(SHAPES[name]) for name in LARGE}
    for step in range(8):
        for name, param in params.items():
            param.grad = drawn(step, 0, name) + drawn(step, 1, name)
        for name in LARGE:
            after = found[0][1][step][name] + found[1][1][step][name]
            params[name].grad += before[name] - after
            before[name] = after
        optimizer.step()
    for name, param in params.items():
        assert torch.equal(found[0][0][name], found[1][0][name])
        moved = float((param.detach() - drawn(999, 0, name)).abs().max())
        torch.testing.assert_close(found[0][0][name], param.detach(), rtol=0, atol=1e-5 * moved)


def test_with_onebit_momentum_learns_as_with_int8() -> None:
    """Momentum of decoded gradients would end with 1.26 times the loss."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(5, 12, generator=generator)
    targets = torch.randint(0, 5, (1024,), generator=generator)
    inputs = centres[targets] + 1.2 * torch.randn(1024, 12, generator=generator)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = nn.Sequential(nn.Linear(12, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 5))

    def member(group: FakeGroup, codec: AnyCodec) -> float:
        torch.set_num_threads(1)
        net = copy.deepcopy(first)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        exchange = EncodedExchange(group, Encoding(codec, optimizer, list(net.named_parameters())), judged=False)
        order = torch.Generator().manual_seed(2)
        for _ in range(80):
            mine = torch.randint(0, 1024, (64,), generator=order)[group.rank * 32 :][:32]
            exchange.open(1, 1, 1)
            (nn.functional.cross_entropy(net(inputs[mine]), targets[mine]) / 2).backward()
            exchange.finish(torch.zeros(0), torch.ones(1), None, torch.zeros(1, dtype=torch.float64))
            with exchange.applying():
                optimizer.step()
        with torch.no_grad():
            return float(nn.functional.cross_entropy(net(inputs), targets))

    plain, encoded = (run_members(2, partial(member, codec=codec))[0] for codec in (Int8(), OneBit()))
    assert encoded < 1.1 * plain


# -- the parts ---------------------------------------------------------------------------------------------------------


def sgd(**options: Any) -> tuple[torch.optim.SGD, nn.Parameter]:
    param = nn.Parameter(torch.full((2,), 2.0))
    return torch.optim.SGD([param], lr=1.0, **options), param


def test_whose_momentum_it_is() -> None:
    mine = sgd(momentum=0.9, dampening=0.25)[0]
    assert factors(mine, TopK()) == (0.9, 0.75)
    for codec in (TopK(correction=False), Int8(), NoCodec()):
        assert factors(mine, codec) == (0.0, 1.0)
    assert factors(sgd(momentum=0.9, nesterov=True)[0], TopK()) == (0.0, 1.0)
    assert factors(torch.optim.AdamW(sgd()[0].param_groups[0]["params"]), TopK()) == (0.0, 1.0)
    two = [{"params": [nn.Parameter(torch.zeros(1))], "momentum": momentum} for momentum in (0.9, 0.5)]
    assert factors(torch.optim.SGD(two, lr=1.0), TopK()) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("options", "codec", "added"),
    [
        ({"momentum": 0.9, "weight_decay": 0.5}, TopK(), 0.25),
        ({"momentum": 0.9, "weight_decay": 0.5, "maximize": True}, TopK(), -0.25),
        # the optimizer's own
        ({"weight_decay": 0.5}, TopK(), 0.0),
        ({"momentum": 0.9, "weight_decay": 0.5}, Int8(), 0.0),
        ({"momentum": 0.9}, TopK(), 0.0),
    ],
    ids=str,
)
def test_each_of_four_members_adds_a_quarter_of_the_decay(
    options: dict[str, Any], codec: AnyCodec, added: float
) -> None:
    optimizer, param = sgd(**options)
    grad = torch.ones(2)
    add_decay(optimizer, codec, [("weight", param)], [grad], 4)
    assert grad.tolist() == [1.0 + added] * 2


def test_options_are_put_back_after_a_step_that_fails() -> None:
    optimizer, param = sgd(momentum=0.9, weight_decay=0.5)

    @contextmanager
    def failing() -> Iterator[None]:
        with pytest.raises(RuntimeError, match="on purpose"), left_to_workers(optimizer, TopK(), []):
            assert optimizer.param_groups[0]["momentum"] == optimizer.param_groups[0]["weight_decay"] == 0.0
            yield
            raise RuntimeError("on purpose")

    with failing():
        pass
    assert optimizer.param_groups[0]["momentum"] == 0.9 and optimizer.param_groups[0]["weight_decay"] == 0.5
    assert param.tolist() == [2.0, 2.0]
