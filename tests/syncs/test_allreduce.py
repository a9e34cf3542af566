from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.group import Group, SoloGroup
from shoal.core.errors import ConfigError
from shoal.core.slices import evenly
from shoal.syncs import allreduce
from shoal.syncs.allreduce import AloneExchange, BucketExchange, Exchange, TreeExchange
from shoal.syncs.exchanges import make_exchange
from shoal.testing.ranks import run_ranks

SIZES = [1, 2, 3, 4]


def on(size: int, fn: Callable[[Group], Any]) -> list[Any]:
    return [fn(SoloGroup())] if size == 1 else run_ranks(size, fn)


def net() -> nn.ModuleList:
    """Layers of three dtypes; the last one is used by every third atom only."""
    torch.manual_seed(0)
    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.float32]
    return nn.ModuleList(nn.Linear(5, 5, dtype=kind) for kind in kinds)


def loss(layers: nn.ModuleList, step: int, atom: int) -> Tensor:
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(1000 * step + atom))
    used = list(layers)[:3] + ([layers[3]] if atom % 3 == 0 else [])
    return torch.stack([layer(x.to(layer.weight.dtype)).square().mean().double() for layer in used]).sum()


def one_step(exchange: Exchange, group: Group, layers: nn.ModuleList, step: int, atoms: int) -> dict[str, Any]:
    mine = evenly(atoms, group.size)[group.rank]
    exchange.open(atoms, 5)
    counted = torch.zeros(3)
    for atom in mine:
        if atom == mine[-1]:
            exchange.arm()
        loss(layers, step, atom).backward()
        sums = torch.tensor([1.0, 1 / (3 + atom), float(atom)])
        if exchange.by_atom:
            exchange.atom_done(atom, sums)
        else:
            counted += sums
    used = exchange.used()
    total, flags = exchange.finish(counted, torch.tensor([1.0, float(group.rank)]))
    return {
        "sums": total.clone(),
        "flags": flags.clone(),
        "used": used,
        "grads": [None if param.grad is None else param.grad.clone() for param in layers.parameters()],
    }


def steps(by_atom: bool, counts: list[int]) -> Callable[[Group], list[dict[str, Any]]]:
    def fn(group: Group) -> list[dict[str, Any]]:
        layers = net()
        exchange = make_exchange(group, list(layers.named_parameters()), by_atom=by_atom)
        values = [one_step(exchange, group, layers, step, atoms) for step, atoms in enumerate(counts)]
        exchange.close()
        return values

    return fn


COUNTS = [8, 24, 7, 1, 2, 3]
"""Atoms of the steps; from the third-last on there are fewer of them than members in a group of four."""


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Any]]:
    return steps(True, COUNTS)(SoloGroup())


@pytest.mark.parametrize("size", SIZES)
def test_the_tree_is_bitwise_equal_for_any_number_of_members(size: int, alone: list[dict[str, Any]]) -> None:
    for values in on(size, steps(True, COUNTS)):
        for value, expected in zip(values, alone, strict=True):
            assert torch.equal(value["sums"], expected["sums"])
            assert value["flags"].tolist() == [size, sum(range(size))]
            for own, one in zip(value["grads"], expected["grads"], strict=True):
                assert own.dtype == one.dtype and torch.equal(own, one)


def test_a_tree_in_small_chunks_is_the_same(monkeypatch: pytest.MonkeyPatch, alone: list[dict[str, Any]]) -> None:
    monkeypatch.setattr(allreduce, "_CHUNK", 7)
    for values in run_ranks(3, steps(True, COUNTS)):
        for value, expected in zip(values, alone, strict=True):
            assert all(torch.equal(*pair) for pair in zip(value["grads"], expected["grads"], strict=True))


@pytest.mark.parametrize("by_atom", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_gradients_are_those_of_one_plain_process(size: int, by_atom: bool) -> None:
    values = on(size, steps(by_atom, COUNTS))
    for step, atoms in enumerate(COUNTS):
        plain = net()
        for atom in range(atoms):
            loss(plain, step, atom).backward()
        for value in values:
            for own, param in zip(value[step]["grads"], plain.parameters(), strict=True):
                expected = torch.zeros_like(param) if param.grad is None else param.grad
                found = torch.zeros_like(param) if own is None else own
                tolerance = 3e-2 if param.dtype == torch.bfloat16 else 1e-5
                torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
            expected = torch.tensor([atoms, sum(1 / (3 + atom) for atom in range(atoms)), sum(range(atoms))])
            torch.testing.assert_close(value[step]["sums"], expected)


@pytest.mark.parametrize("by_atom", [True, False])
def test_each_member_says_which_parameters_it_used(by_atom: bool) -> None:
    def fn(group: Group) -> list[bool]:
        layers = net()
        exchange = make_exchange(group, list(layers.named_parameters()), by_atom=by_atom)
        used: list[bool] = one_step(exchange, group, layers, 0, 3)["used"]
        return used

    first, second, third = run_ranks(3, fn)
    assert first == [True] * 8
    assert second == third == [True] * 6 + [False] * 2


def test_what_is_made_for_whom() -> None:
    params = list(net().named_parameters())
    assert isinstance(make_exchange(SoloGroup(), params, by_atom=False), AloneExchange)
    assert isinstance(make_exchange(SoloGroup(), params, by_atom=True), TreeExchange)

    def fn(group: Group) -> list[str]:
        return [type(make_exchange(group, params, by_atom=by_atom)).__name__ for by_atom in (False, True)]

    assert run_ranks(2, fn)[0] == [BucketExchange.__name__, TreeExchange.__name__]


def test_the_tree_refuses_sparse_gradients() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    exchange = TreeExchange(SoloGroup(), list(table.named_parameters()))
    exchange.open(1, 0)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="'weight' has a sparse gradient"):
        exchange.atom_done(0, torch.zeros(0))


@pytest.mark.parametrize("by_atom", [True, False])
def test_members_with_other_models_have_other_digests(by_atom: bool) -> None:
    def fn(group: Group) -> list[bytes]:
        same = make_exchange(group, list(net().named_parameters()), by_atom=by_atom)
        layer = nn.Linear(3 + group.rank, 3)
        other = make_exchange(group, list(layer.named_parameters()), by_atom=by_atom)
        return [same.digest(), other.digest()]

    (same, other), (same_there, other_there) = run_ranks(2, fn)
    assert same == same_there and other != other_there


def test_what_was_settled_is_handed_on_to_the_next_exchange() -> None:
    def fn(group: Group) -> list[Any]:
        layers = net()
        params = list(layers.named_parameters())
        first = make_exchange(group, params, by_atom=False)
        assert first.knowledge() is None
        for step in range(8):
            one_step(first, group, layers, step, 4)
        knowledge = first.knowledge()
        assert knowledge is not None
        first.close()
        second = make_exchange(group, params, by_atom=False, knowledge=knowledge)
        assert second.settled() == first.settled() and second.knowledge() == knowledge
        assert make_exchange(group, params[1:], by_atom=False, knowledge=knowledge).settled() is None
        left: list[int] = []
        group.account.departing.passed = lambda: left.append(1)  # type: ignore[method-assign]
        one_step(second, group, layers, 0, 4)
        assert left
        return [knowledge, make_exchange(group, params, by_atom=True, knowledge=knowledge).knowledge()]

    first, second = run_ranks(2, fn)
    assert first == second and first[1] is None


def test_the_tree_says_when_something_leaves() -> None:
    layers, left = net(), list[int]()
    for by_atom in (True, False):
        group = SoloGroup()
        group.account.departing.passed = lambda: left.append(1)  # type: ignore[method-assign]
        exchange = make_exchange(group, list(layers.named_parameters()), by_atom=by_atom)
        one_step(exchange, group, layers, 0, 3)
        assert len(left) == 4, "one for each dtype and one for the vectors; alone, nothing leaves"
