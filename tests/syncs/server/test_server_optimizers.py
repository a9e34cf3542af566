"""The optimizers of all shards together are the user's: same weights, same state, resumed in both directions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.core.errors import ConfigError
from shoal.data.parcel import seal, unseal
from shoal.syncs.server import optimizers
from shoal.syncs.server.cutting import LARGEST, cut

Maker = Callable[[list[dict[str, Any]]], Optimizer]

SHAPES = {"table": (61, 37), "weight": (40, 33), "bias": (33,), "scale": (), "kernel": (8, 3, 5, 5), "nothing": (0, 4)}
FROZEN, UNCOVERED = "frozen", "uncovered"

MAKERS: dict[str, Maker] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "foreach": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, weight_decay=0.01),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True),
    "tensor rate": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(0.01)),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01, initial_accumulator_value=0.1, lr_decay=0.1),
    "adadelta": lambda groups: torch.optim.Adadelta(groups),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01),
    "centered": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.9, centered=True),
    "rprop": lambda groups: torch.optim.Rprop(groups, lr=0.01),
    "adamax": lambda groups: torch.optim.Adamax(groups),
    "nadam": lambda groups: torch.optim.NAdam(groups),
    "radam": lambda groups: torch.optim.RAdam(groups),
    "asgd": lambda groups: torch.optim.ASGD(groups, t0=2),
}
WHOLE: dict[str, Maker] = {"adafactor": lambda groups: torch.optim.Adafactor(groups)}


class Model:
    """Parameters in two groups, one that is frozen, and one that the optimizer does not have."""

    def __init__(self, maker: Maker, seed: int = 0, *, named: bool = False, only: int | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        shapes = SHAPES | {FROZEN: (3, 3), UNCOVERED: (9,)}
        self.params = {
            name: nn.Parameter(torch.randn(shape, generator=generator), requires_grad=name != FROZEN)
            for name, shape in shapes.items()
            if only is None or len(shape) == only
        }
        # Not the order of the model; and the second group has other options.
        covered = sorted(self.params.keys() - {UNCOVERED})
        half = len(covered) // 2
        members = [[(name, self.params[name]) if named else self.params[name] for name in covered[half:]]]
        members += [[(name, self.params[name]) if named else self.params[name] for name in covered[:half]]]
        self.optimizer = maker([{"params": members[0]}, {"params": members[1], "lr": 0.02}])

    def trained(self) -> list[tuple[str, Tensor]]:
        return [(name, param) for name, param in self.params.items() if param.requires_grad]

    def gradients(self, step: int) -> dict[str, Tensor]:
        """In some steps some parameters have none; `bias` has none in the first two."""
        generator = torch.Generator().manual_seed(100 + step)
        drawn = {name: torch.randn(param.shape, generator=generator) for name, param in self.trained()}
        absent = {0: {"bias"}, 1: {"bias", "weight"}, 3: {"table", "scale"}}.get(step, set())
        if optimizers.needs_whole(self.optimizer):
            absent |= {"nothing"}  # Adafactor divides by the number of elements, and Muon by a norm
        return {name: gradient for name, gradient in drawn.items() if name not in absent}

    def step(self, step: int) -> None:
        gradients = self.gradients(step)
        for name, param in self.trained():
            param.grad = gradients.get(name)
        self.optimizer.step()


class Servers:
    """One optimizer for each shard, over an area that holds all weights."""

    def __init__(self, model: Model, shards: int, largest: int = LARGEST) -> None:
        params, whole = model.trained(), optimizers.needs_whole(model.optimizer)
        self.cut = cut(params, whole=whole, shards=shards, largest=largest)
        self.setup: Any = SimpleNamespace(cut=self.cut, params=params, optimizer=model.optimizer, tables=())
        self.weights = self.area({name: param.detach() for name, param in params})
        self.numbers = range(len(self.cut.shards))
        self.made = [optimizers.make(self.setup, number, self.part(self.weights, number)) for number in self.numbers]

    def area(self, values: dict[str, Tensor]) -> Tensor:
        area = torch.zeros(self.cut.size, dtype=torch.uint8)
        for number, name in enumerate(self.cut.names):
            if name in values:
                self.cut.view(area, number).copy_(values[name])
        return area

    def part(self, area: Tensor, shard: int) -> Tensor:
        return area[self.cut.shards[shard].start : self.cut.shards[shard].stop]

    def step(self, gradients: dict[str, Tensor]) -> None:
        area = self.area(gradients)
        for number, optimizer in enumerate(self.made):
            params = optimizers.parameters(optimizer, self.setup, number)
            views = self.cut.pieces(self.part(area, number), number)
            for piece, param, view in zip(self.cut.shards[number].pieces, params, views, strict=True):
                if param is not None:
                    param.grad = view.view(param.shape) if self.cut.names[piece.param] in gradients else None
            optimizer.step()

    def trees(self) -> dict[int, Any]:
        return {n: optimizers.state(optimizer, self.setup, n) for n, optimizer in enumerate(self.made)}

    def joined(self) -> dict[str, Any]:
        """By way of the parcels that trees travel in."""
        return optimizers.join(self.setup, {n: unseal(*_sealed(tree)) for n, tree in self.trees().items()})

    def values(self) -> dict[str, Tensor]:
        return {name: self.cut.view(self.weights, number) for number, name in enumerate(self.cut.names)}


def _sealed(tree: Any) -> tuple[bytes, list[bytearray]]:
    header, buffers = seal(tree)
    return header, [bytearray(buffer) for buffer in buffers]


def same(one: Any, other: Any, where: str = "") -> None:
    """Equal trees; tensors of equal shape, dtype and numbers."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        assert isinstance(one, Tensor) and isinstance(other, Tensor), where
        assert one.dtype == other.dtype, where
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-7, msg=lambda text: f"{where}: {text}")
    elif isinstance(one, dict):
        assert isinstance(other, dict) and one.keys() == other.keys(), where
        for key in one:
            same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert type(one) is type(other) and len(one) == len(other), where
        for number, pair in enumerate(zip(one, other, strict=True)):
            same(*pair, f"{where}/{number}")
    else:
        assert one == other, where


def agree(model: Model, servers: Servers) -> None:
    for name, value in servers.values().items():
        same(model.params[name].detach(), value, name)
    same(model.optimizer.state_dict(), servers.joined())


@pytest.mark.parametrize(("shards", "largest"), [(1, LARGEST), (1, 100), (2, LARGEST), (5, 100), (12, LARGEST)])
@pytest.mark.parametrize("maker", MAKERS | WHOLE)
def test_servers_do_what_one_process_does(maker: str, shards: int, largest: int) -> None:
    make = (MAKERS | WHOLE)[maker]
    model, servers = Model(make), Servers(Model(make), shards, largest)
    if maker in MAKERS:
        assert len(servers.cut.shards) == shards
    same(model.optimizer.state_dict(), servers.joined())
    for step in range(6):
        model.step(step)
        servers.step(model.gradients(step))
        agree(model, servers)
    assert not torch.equal(model.params["table"], Model(make).params["table"])
    assert torch.equal(model.params[UNCOVERED], Model(make).params[UNCOVERED])


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon() -> None:
    def muon(groups: list[dict[str, Any]]) -> Optimizer:
        return torch.optim.Muon(groups, lr=0.01)

    model, servers = Model(muon, only=2), Servers(Model(muon, only=2), 4)
    for step in range(2, 5):
        model.step(step)
        servers.step(model.gradients(step))
    agree(model, servers)


@pytest.mark.parametrize("maker", MAKERS | WHOLE)
@pytest.mark.parametrize("done", [0, 1, 3])
def test_resume_in_both_directions(maker: str, done: int) -> None:
    """Servers, a checkpoint, one process, a checkpoint, other servers: as if it had been one process all along."""
    make = (MAKERS | WHOLE)[maker]
    straight, servers = Model(make), Servers(Model(make), 5, largest=100)
    for step in range(done):
        straight.step(step)
        servers.step(straight.gradients(step))
    alone = Model(make, seed=1)
    _resume(alone, servers)
    for step in range(done, done + 2):
        straight.step(step)
        alone.step(step)
    same(straight.optimizer.state_dict(), alone.optimizer.state_dict())
    again = Servers(alone, 3)
    same(straight.optimizer.state_dict(), again.joined())
    for step in range(done + 2, done + 4):
        straight.step(step)
        again.step(straight.gradients(step))
    agree(straight, again)


def _resume(model: Model, servers: Servers) -> None:
    with torch.no_grad():
        for name, value in servers.values().items():
            model.params[name].copy_(value)
    model.optimizer.load_state_dict(servers.joined())


@pytest.mark.parametrize("maker", MAKERS | WHOLE)
def test_a_tree_makes_a_replica(maker: str) -> None:
    """A copy of a shard goes on exactly as the shard does."""
    make = (MAKERS | WHOLE)[maker]
    model, servers = Model(make), Servers(Model(make), 5)
    for step in range(3):
        servers.step(model.gradients(step))
    other = Servers(Model(make), 5)
    other.weights.copy_(servers.weights)
    for number, tree in servers.trees().items():
        optimizers.load(other.made[number], other.setup, number, tree)
    for step in range(3, 5):
        servers.step(model.gradients(step))
        other.step(model.gradients(step))
    assert torch.equal(servers.weights, other.weights)
    same(servers.joined(), other.joined())


def test_a_tree_does_not_change_with_its_optimizer() -> None:
    model = Model(MAKERS["tensor rate"])
    servers = Servers(Model(MAKERS["tensor rate"]), 2)
    servers.step(model.gradients(2))
    trees = servers.trees()
    kept = copy.deepcopy(trees)
    servers.made[0].param_groups[0]["lr"].fill_(5.0)
    servers.step(model.gradients(2))
    same(trees, kept)
    optimizers.load(servers.made[0], servers.setup, 0, trees[0])
    servers.step(model.gradients(2))
    same(trees, kept)


def test_the_template_does_not_change() -> None:
    model = Model(MAKERS["adam"])
    model.step(2)
    before = copy.deepcopy(model.optimizer.state_dict())
    weights = {name: param.detach().clone() for name, param in model.params.items()}
    servers = Servers(model, 5)
    servers.step(model.gradients(2))
    servers.joined()
    same(model.optimizer.state_dict(), before)
    same({name: param.detach() for name, param in model.params.items()}, weights)


def test_a_schedule_on_the_shards_is_in_the_joined_options() -> None:
    make = MAKERS["momentum"]
    model, servers = Model(make), Servers(Model(make), 5)

    def schedule(optimizer: Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 0.5**n, lambda n: 1 / (1 + n)])

    whole, parts = schedule(model.optimizer), [schedule(optimizer) for optimizer in servers.made]
    for step in range(3):
        model.step(step)
        servers.step(model.gradients(step))
        whole.step()
        for part in parts:
            part.step()
    agree(model, servers)
    assert [group["lr"] for group in servers.joined()["param_groups"]] == pytest.approx([0.1 / 8, 0.02 / 4])
    # Loading keeps the dicts that a schedule works on.
    optimizers.load(servers.made[0], servers.setup, 0, servers.trees()[0])
    parts[0].step()
    assert servers.made[0].param_groups[0]["lr"] == pytest.approx(0.1 / 16)


def test_names_of_parameters_are_kept() -> None:
    model = Model(MAKERS["adam"], named=True)
    servers = Servers(Model(MAKERS["adam"], named=True), 3)
    model.step(0)
    servers.step(model.gradients(0))
    assert "param_names" in servers.joined()["param_groups"][0]
    agree(model, servers)


def test_options_for_a_gpu_are_kept_but_not_used() -> None:
    """`capturable` cannot be used where servers compute; a checkpoint still has what the user has set."""

    def capturable(groups: list[dict[str, Any]]) -> Optimizer:
        return torch.optim.Adam(groups, lr=torch.tensor(0.01), capturable=True, foreach=True)

    plain, servers = Model(MAKERS["tensor rate"]), Servers(Model(capturable), 5)
    for step in range(3):
        plain.step(step)
        servers.step(plain.gradients(step))
    joined = servers.joined()
    assert [(group["capturable"], group["foreach"]) for group in joined["param_groups"]] == [(True, True)] * 2
    same(plain.optimizer.state_dict()["state"], joined["state"])
    back = Model(capturable)
    back.optimizer.load_state_dict(joined)
    again = Servers(back, 2)
    again.weights.copy_(again.area(servers.values()))
    plain.step(3)
    again.step(plain.gradients(3))
    for name, value in again.values().items():
        same(plain.params[name].detach(), value, name)


def test_a_momentum_that_is_none() -> None:
    model = Model(MAKERS["momentum"])
    for group in model.optimizer.param_groups:
        for param in group["params"]:
            model.optimizer.state[param]["momentum_buffer"] = None
    servers = Servers(model, 3)
    same(model.optimizer.state_dict(), servers.joined())
    other = Model(MAKERS["momentum"])
    other.step(2)
    servers.step(other.gradients(2))
    for name, value in servers.values().items():
        same(other.params[name].detach(), value, name)


def test_numbers_of_another_layout_in_memory() -> None:
    """The state of a parameter in channels-last layout is cut by its elements, not by its memory."""
    model = Model(MAKERS["adam"])
    param = model.params["kernel"]
    param.data = param.data.to(memory_format=torch.channels_last)
    other = Model(MAKERS["adam"])
    model.step(2)
    other.step(2)
    assert not model.optimizer.state[param]["exp_avg"].is_contiguous()
    servers = Servers(model, 12)
    model.step(3)
    other.step(3)
    servers.step(other.gradients(3))
    agree(other, servers)


def test_mixed_dtypes() -> None:
    params = [nn.Parameter(torch.randn(900, dtype=dtype)) for dtype in (torch.float64, torch.bfloat16, torch.float32)]
    template = torch.optim.AdamW([nn.Parameter(param.detach().clone()) for param in params], lr=0.1)
    optimizer = torch.optim.AdamW(params, lr=0.1)
    model: Any = SimpleNamespace(
        optimizer=template,
        trained=lambda: [(str(number), param) for number, param in enumerate(template.param_groups[0]["params"])],
    )
    servers = Servers(model, 4)
    for _ in range(3):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
        servers.step({str(number): param.grad for number, param in enumerate(params) if param.grad is not None})
    for number, param in enumerate(params):
        same(param.detach(), servers.values()[str(number)])
    same(optimizer.state_dict(), servers.joined())


def test_a_shard_without_anything_to_train() -> None:
    """All that lies in a shard may be missing in the optimizer."""
    params = [("a", nn.Parameter(torch.ones(600))), ("b", nn.Parameter(torch.ones(600)))]
    model: Any = SimpleNamespace(optimizer=torch.optim.Adam([params[1][1]], lr=0.5), trained=lambda: params)
    servers = Servers(model, 2)
    servers.step({"a": torch.ones(600), "b": torch.ones(600)})
    assert torch.equal(servers.values()["a"], torch.ones(600))
    assert (servers.values()["b"] < 1).all()
    assert list(servers.joined()["state"]) == [0]


# -- which optimizers --------------------------------------------------------------------------------------------------


class Unknown(Optimizer):
    def __init__(self, params: Any, rate: float = 0.1) -> None:
        super().__init__(params, {"rate": rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["peak"] = torch.maximum(state.get("peak", torch.zeros_like(param)), param.grad.abs())
                    state["steps"] = state.get("steps", 0) + 1
                    param.sub_(group["rate"] * param.grad / state["peak"].clamp(min=1e-9))


class Elementwise(Unknown):
    works_on = "elements"


class Whole(Unknown):
    works_on = "tensors"


class Mistaken(Unknown):
    works_on = "rows"


class Subclass(torch.optim.Adam):
    """Nobody knows what else it does."""


class Stubborn(Elementwise):
    def __init__(self, params: Any, secret: float) -> None:
        super().__init__(params)


class PerRow(Elementwise):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["rows"] = torch.zeros(max(param.shape, default=1) + 1)


@pytest.mark.parametrize("kind", [Elementwise, Whole])
def test_a_class_that_says_how_it_works(kind: type[Unknown]) -> None:
    model, servers = Model(kind), Servers(Model(kind), 5)
    assert optimizers.needs_whole(model.optimizer) == (kind is Whole)
    for step in range(4):
        model.step(step)
        servers.step(model.gradients(step))
    agree(model, servers)


def one(kind: Any, **options: Any) -> Optimizer:
    optimizer = kind([nn.Parameter(torch.zeros(3, 3))], **options)
    assert isinstance(optimizer, Optimizer)
    return optimizer


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (torch.optim.LBFGS, "LBFGS.*AdamW"),
        (torch.optim.SparseAdam, "SparseAdam only for tables"),
        (Unknown, r'how Unknown works.*Unknown.works_on = "elements".*"tensors".*allreduce'),
        (Subclass, "how Subclass works"),
        (Mistaken, "Mistaken.works_on is 'rows'"),
    ],
)
def test_refusals_name_the_class(kind: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        optimizers.needs_whole(one(kind))


def test_a_constructor_that_wants_more() -> None:
    with pytest.raises(ConfigError, match=r"Stubborn cannot be made.*secret"):
        Servers(Model(lambda groups: Stubborn(groups, secret=1.0)), 2)


def test_a_state_that_is_not_by_element() -> None:
    model = Model(PerRow)
    model.step(2)
    with pytest.raises(ConfigError, match=r"PerRow keeps 'rows' of shape .*works_on = \"tensors\""):
        Servers(model, 2)


def test_an_optimizer_of_other_parameters() -> None:
    model: Any = SimpleNamespace(optimizer=one(torch.optim.SGD), trained=lambda: [("a", nn.Parameter(torch.ones(4)))])
    with pytest.raises(ConfigError, match="none of the parameters"):
        Servers(model, 1)


def test_a_shard_that_is_missing() -> None:
    servers = Servers(Model(MAKERS["adam"]), 3)
    with pytest.raises(ValueError, match="shards 1 are missing"):
        optimizers.join(servers.setup, {n: tree for n, tree in servers.trees().items() if n != 1})


def test_a_tree_of_another_shard() -> None:
    servers = Servers(Model(MAKERS["adam"]), 12)
    with pytest.raises(ValueError, match="is not of shard 0"):
        optimizers.load(servers.made[0], servers.setup, 0, servers.trees()[11])
