"""A shard: every sample counts exactly once, mirrors are equal bit for bit, and the result is that of one optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.core.atoms import Course
from shoal.core.errors import AuditError, ShoalError
from shoal.data.parcel import from_bytes, to_bytes
from shoal.syncs.server import optimizers
from shoal.syncs.server.messages import Apply, Lease, Record
from shoal.syncs.server.setup import Setup
from shoal.syncs.server.shard import Holding, Overlap, Unfit
from shoal.syncs.server.used import is_used, pack_used

from .setups import area_of, gradient, hold, make_setup, part, sample_gradient, samples

ALL = pack_used([True] * 4)


def order(step: int, scale: float = 1.0, **more: Any) -> Apply:
    return Apply(step=step, scale=scale, loss=more.pop("loss", math.nan), **more)


def room(holding: Holding) -> Tensor:
    """Memory for a sum, with what the step before it left there."""
    return torch.full_like(holding.weights, 0xC1)


def take_all(setup: Setup, holding: Holding, step: int, used: bytes = ALL, scale: float = 1.0) -> None:
    middle = samples(setup, step) // 2
    into = room(holding)
    for lease in (Lease(step, 0, middle), Lease(step, middle, samples(setup, step))):
        assert holding.take(lease, part(setup, gradient(setup, lease), holding.number), used, scale, into)


def plain(
    setup: Setup, steps: int, scale: float = 1.0, used: tuple[bool, ...] = (True,) * 4, loss: float = math.nan
) -> tuple[Tensor, list[float]]:
    """What one process makes of the same gradients, as an area; and the rates of its last step."""
    params = [param.detach().clone().requires_grad_() for _, param in setup.params]
    optimizer = setup.extra["make_optimizer"](params)
    schedule = setup.make_schedule(optimizer) if setup.make_schedule is not None else None
    rates: list[float] = []
    for step in range(steps):
        total = [torch.zeros_like(param) for param in params]
        for position in range(samples(setup, step)):
            total = [one + other for one, other in zip(total, sample_gradient(setup, step, position), strict=True)]
        for param, one, has in zip(params, total, used, strict=True):
            param.grad = one.detach() * scale if has else None
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        optimizer.step()
        if schedule is not None:
            wants = isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)
            schedule.step(loss) if wants else schedule.step()
    return area_of(setup, params), rates


def close_to(setup: Setup, area: Tensor, shard: int, weights: Tensor) -> None:
    close_to_each_other(setup, shard, weights, part(setup, area, shard))


def kinds() -> list[Any]:
    optim = torch.optim
    made: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
        "sgd": lambda params: optim.SGD(params, lr=0.1),
        "nesterov": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        "nesterov on lists": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
        "adamw": lambda params: optim.AdamW(params, lr=0.01),
        "fused adamw": lambda params: optim.AdamW(params, lr=0.01, fused=True),
        "adagrad": lambda params: optim.Adagrad(params, lr=0.1),
        "rmsprop": lambda params: optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
        "rprop": lambda params: optim.Rprop(params, lr=0.01),
        "adadelta": lambda params: optim.Adadelta(params, lr=0.5, weight_decay=0.1),
        "adamax": lambda params: optim.Adamax(params, lr=0.01),
        "nadam": lambda params: optim.NAdam(params, lr=0.01),
        "radam": lambda params: optim.RAdam(params, lr=0.01),
        "asgd": lambda params: optim.ASGD(params, lr=0.01),
        "adafactor": lambda params: optim.Adafactor(params, lr=0.01),
    }
    return [pytest.param(make, id=name) for name, make in made.items()]


# -- by step -----------------------------------------------------------------------------------------------------------


def thirds(setup: Setup, step: int) -> list[Lease]:
    count = samples(setup, step)
    edges = [0, count // 3, 2 * count // 3, count]
    return [Lease(step, start, stop) for start, stop in pairwise(edges)]


@pytest.mark.parametrize("durability", ["none", "peer", "disk"])
@pytest.mark.parametrize("settles", [None, 1, 2, 3], ids=["never settled", "after 1", "after 2", "after 3"])
@pytest.mark.parametrize("lent", [(True, True, True), (True, False, True), (False, True, True)], ids=str)
@pytest.mark.parametrize("leases", [1, 2, 3])
def test_gradients_are_added_where_their_workers_left_them(
    durability: str, settles: int | None, lent: tuple[bool, ...], leases: int
) -> None:
    """Until they are settled those that are lent stay as they are; then, and the others at once, they are written over.

    Never is one changed by the server.
    """
    setup = make_setup(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), durability=durability)
    scales = (1.0, 0.5, 2.0)
    for shard in range(len(setup.cut.shards)):
        holding, expected = hold(setup, shard), hold(setup, shard)
        for step in range(2):
            parts = {1: [Lease(step, 0, samples(setup, step))], 3: thirds(setup, step)}
            parts[2] = [Lease(step, 0, parts[3][1].stop), parts[3][2]]
            into, plainly, slots = room(holding), room(holding), []
            for number, (lease, scale, on) in enumerate(zip(parts[leases], scales, lent, strict=False), 1):
                came = part(setup, gradient(setup, lease), shard)
                assert expected.take(lease, came, ALL, scale, plainly)
                slot = came.clone()
                assert holding.take(lease, slot, ALL, scale, into, lent=on)
                assert torch.equal(slot, came)
                if on:
                    slots.append((slot, came))
                else:
                    slot.fill_(0xAB)
                if settles == number:
                    holding.settle(step)
                    assert not holding.lends(step)
                    for slot, _ in slots:
                        slot.fill_(0xAB)
                    slots.clear()
            assert holding.close(step).ranges == [(lease.start, lease.stop) for lease in parts[leases]]
            holding.apply(order(step, 0.25))
            expected.apply(order(step, 0.25))
            assert all(torch.equal(slot, came) for slot, came in slots)
            close_to_each_other(setup, shard, holding.weights, expected.weights)


def close_to_each_other(setup: Setup, shard: int, one: Tensor, other: Tensor) -> None:
    pairs = zip(setup.cut.pieces(one, shard), setup.cut.pieces(other, shard), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("make", kinds())
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_steps_are_those_of_one_optimizer_and_a_mirror_may_share_the_sum(
    make: Callable[[list[Tensor]], torch.optim.Optimizer], scale: float
) -> None:
    setup = make_setup(make)
    expected, _ = plain(setup, 3, scale)
    for shard in range(len(setup.cut.shards)):
        holder, mirror = hold(setup, shard), hold(setup, shard)
        for step in range(3):
            take_all(setup, holder, step)
            mirror.give(holder.close(step), holder.sum_of(step))
            before = holder.sum_of(step).clone()
            total = holder.sum_of(step)
            holder.apply(order(step, scale))
            assert torch.equal(total, before), "the mirror has not applied it yet"
            mirror.apply(order(step, scale))
            assert torch.equal(holder.weights, mirror.weights)
        close_to(setup, expected, shard, holder.weights)


@pytest.mark.parametrize("durability", ["none", "disk"])
def test_without_mirrors_the_sum_is_scaled_where_it_lies(durability: str) -> None:
    setup = make_setup(durability=durability)
    expected, _ = plain(setup, 1, 0.5)
    holding = hold(setup, 0)
    take_all(setup, holding, 0)
    total = holding.sum_of(0)
    twice = setup.cut.pieces(total, 0)[0].clone()
    holding.apply(order(0, 0.5))
    close_to(setup, expected, 0, holding.weights)
    torch.testing.assert_close(setup.cut.pieces(total, 0)[0] * 2, twice)


def test_types_may_be_mixed() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float32)
    setup = make_setup(lambda params: torch.optim.SGD(params, lr=0.1), dtypes=dtypes)
    expected, _ = plain(setup, 1)
    for shard in range(len(setup.cut.shards)):
        holding = hold(setup, shard)
        lease = Lease(0, 0, samples(setup, 0))
        assert holding.take(lease, part(setup, gradient(setup, lease), shard), ALL, 1.0, room(holding))
        holding.apply(order(0))
        for mine, other in zip(
            setup.cut.pieces(holding.weights, shard), setup.cut.pieces(part(setup, expected, shard), shard), strict=True
        ):
            torch.testing.assert_close(mine, other)


def test_each_push_has_a_scale_of_its_own() -> None:
    setup = make_setup()
    holding = hold(setup, 0)
    end = samples(setup, 0)
    into = room(holding)
    first, second = Lease(0, 0, 1), Lease(0, 1, end)
    one, other = (part(setup, gradient(setup, lease), 0) for lease in (first, second))
    before = one.clone()
    holding.take(first, one, ALL, 0.5, into)
    holding.take(second, other, ALL, 0.25, into)
    expected = setup.cut.pieces(one, 0)[0] * 0.5 + setup.cut.pieces(other, 0)[0] * 0.25
    torch.testing.assert_close(setup.cut.pieces(holding.sum_of(0), 0)[0], expected)
    assert torch.equal(one, before)


def test_what_nobody_used_is_passed_over() -> None:
    setup = make_setup()  # AdamW decays the weights of what has a gradient of zeros
    used = (True, False, True, False)
    expected, _ = plain(setup, 2, used=used)
    start = area_of(setup, [param for _, param in setup.params])
    assert not torch.equal(setup.cut.view(expected, 0), setup.cut.view(start, 0))
    assert torch.equal(setup.cut.view(expected, 1), setup.cut.view(start, 1))
    for shard in range(len(setup.cut.shards)):
        holding = hold(setup, shard)
        for step in range(2):
            middle = samples(setup, step) // 2
            into = room(holding)
            # each parameter that is used is so by one of two workers
            for lease, bits in (
                (Lease(step, 0, middle), [True, False, False, False]),
                (Lease(step, middle, samples(setup, step)), [False, False, True, False]),
            ):
                holding.take(lease, part(setup, gradient(setup, lease), shard), pack_used(bits), 1.0, into)
            holding.apply(order(step))
        close_to(setup, expected, shard, holding.weights)


def test_used_is_one_bit_for_each() -> None:
    bits = [True, False, False, True, False, False, False, True, False, True]
    packed = pack_used(bits)
    assert packed == bytes([0b10001001, 0b10])
    assert [is_used(packed, number) for number in range(10)] == bits


def test_the_norm_is_that_of_all_that_is_used() -> None:
    setup = make_setup()
    squares = []
    for shard in range(len(setup.cut.shards)):
        holding = hold(setup, shard)
        take_all(setup, holding, 0, pack_used([True, True, False, True]))
        squares.append(holding.norm(0))
    lease = Lease(0, 0, samples(setup, 0))
    area = gradient(setup, lease)
    flat = torch.cat([setup.cut.view(area, number).double().reshape(-1) for number in (0, 1, 3)])
    assert math.fsum(squares) == pytest.approx(float(flat.square().sum()), rel=1e-6)


@pytest.mark.parametrize("number, finite", [(1e30, True), (math.inf, False), (math.nan, False)])
def test_the_norm_of_large_numbers_is_finite_and_of_infinite_ones_not(number: float, finite: bool) -> None:
    setup = make_setup()
    holding = hold(setup, 0)
    lease = Lease(0, 0, samples(setup, 0))
    area = torch.zeros_like(holding.weights)
    setup.cut.pieces(area, 0)[0][5] = number
    holding.take(lease, area, ALL, 1.0, room(holding))
    assert math.isfinite(holding.norm(0)) == finite
    if finite:
        assert holding.norm(0) == pytest.approx(1e60, rel=1e-6)


def test_a_step_needs_all_its_samples() -> None:
    setup = make_setup()
    holding = hold(setup, 0)
    before = holding.weights.clone()
    with pytest.raises(AuditError, match="no gradients of step 0"):
        holding.apply(order(0))
    lease = Lease(0, 0, samples(setup, 0) - 1)
    holding.take(lease, part(setup, gradient(setup, lease), 0), ALL, 1.0, room(holding))
    for call in (lambda: holding.close(0), lambda: holding.apply(order(0))):
        with pytest.raises(AuditError, match="each must come once"):
            call()
    assert torch.equal(holding.weights, before)
    assert issubclass(AuditError, ShoalError)


@pytest.mark.parametrize("ranges", [[(0, 3), (2, 8)], [(0, 8), (0, 8)], [(0, 4)], [(4, 8)], [(0, 8), (8, 9)], []])
def test_a_mirror_refuses_a_record_that_is_no_partition(ranges: list[tuple[int, int]]) -> None:
    setup = make_setup()
    assert samples(setup, 0) == 8
    holding = hold(setup, 0)
    with pytest.raises(AuditError):
        holding.give(Record(0, ranges, ALL), torch.zeros_like(holding.weights))


def test_steps_are_applied_in_order_and_once() -> None:
    setup = make_setup()
    holding = hold(setup, 0)
    for step in range(2):
        take_all(setup, holding, step)
    with pytest.raises(AuditError, match="told to apply step 1"):
        holding.apply(order(1))
    holding.apply(order(0))
    after = holding.weights.clone()
    holding.apply(order(0))
    assert torch.equal(holding.weights, after) and holding.version == 1
    holding.apply(order(1))
    assert holding.version == 2
    assert holding.ledger() == (2, 16)


def test_the_last_step_of_an_epoch_is_shorter() -> None:
    setup = make_setup(course=Course(size=11, batch=8))
    holding = hold(setup, 0)
    for step in range(2):
        take_all(setup, holding, step)
        holding.apply(order(step))
    assert holding.ledger() == (2, 11)


def test_a_lease_counts_once() -> None:
    setup = make_setup()
    holding = hold(setup, 0)
    into = room(holding)
    lease = Lease(0, 2, 5)
    given = part(setup, gradient(setup, lease), 0)
    assert not holding.has(lease)
    assert holding.take(lease, given, ALL, 1.0, into)
    once = into.clone()
    assert holding.has(lease)
    assert not holding.take(lease, given, ALL, 1.0, into)
    assert torch.equal(into, once)
    for start, stop in ((0, 3), (4, 8), (3, 4), (0, 8)):
        with pytest.raises(Overlap, match="overlaps the positions 2 to 4"):
            holding.take(Lease(0, start, stop), given, ALL, 1.0, into)
    assert torch.equal(into, once)
    holding.forget_open()
    assert not holding.has(lease)
    take_all(setup, holding, 0)
    holding.apply(order(0))
    assert holding.has(lease) and not holding.take(lease, given, ALL, 1.0, into)


@pytest.mark.parametrize("lease", [Lease(0, 0, 9), Lease(0, -1, 2), Lease(0, 3, 3), Lease(20, 0, 1)])
def test_what_is_not_in_the_run_is_refused(lease: Lease) -> None:
    setup = make_setup()
    holding = hold(setup, 0)
    with pytest.raises(Unfit):
        holding.take(lease, torch.zeros_like(holding.weights), ALL, 1.0, room(holding))


def test_what_has_the_wrong_size_is_refused() -> None:
    setup = make_setup()
    holding = hold(setup, 0)
    right, lease = torch.zeros_like(holding.weights), Lease(0, 0, 8)
    for gradient_, used, into in ((right[1:], ALL, right), (right, b"", right), (right, ALL, right[64:])):
        with pytest.raises(Unfit):
            holding.take(lease, gradient_, used, 1.0, into)
    assert not holding.has(lease)
    for bad in (right[1:], right.float()):
        with pytest.raises(Unfit):
            holding.move_to(bad)


# -- schedules ---------------------------------------------------------------------------------------------------------


def schedules() -> list[Any]:
    rates = torch.optim.lr_scheduler
    made: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
        "linear": lambda optimizer: rates.LinearLR(optimizer, total_iters=4),
        "cosine": lambda optimizer: rates.CosineAnnealingLR(optimizer, 10),
        "one cycle": lambda optimizer: rates.OneCycleLR(optimizer, 0.1, total_steps=20),
        "plateau": lambda optimizer: rates.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
    }
    return [pytest.param(make, id=name) for name, make in made.items()]


@pytest.mark.parametrize("make_schedule", schedules())
def test_schedules_go_on_across_copies(make_schedule: Callable[[torch.optim.Optimizer], Any]) -> None:
    setup = make_setup(make_schedule=make_schedule)
    expected, rates = plain(setup, 6, loss=1.0)
    holding = hold(setup, 1)
    for step in range(6):
        take_all(setup, holding, step)
        holding.apply(order(step, loss=1.0))
        state = from_bytes(to_bytes(holding.state()))
        holding = hold(setup, 1)
        holding.load(state)
    assert holding.rates == pytest.approx(rates, rel=1e-12)
    close_to(setup, expected, 1, holding.weights)


def test_a_schedule_of_evaluations_is_told_before_the_step() -> None:
    setup = make_setup(
        make_schedule=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    )
    holding = hold(setup, 0)
    rates = []
    for step, metric in enumerate([None, 1.0, None, 2.0, None]):
        take_all(setup, holding, step)
        holding.apply(order(step, metric=metric))
        rates.append(holding.rates[0])
    assert rates == [0.01, 0.01, 0.01, 0.005, 0.005]


def test_a_run_that_resumes_has_the_rates_of_its_checkpoint() -> None:
    def make_schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)

    first = make_setup(make_schedule=make_schedule)
    held = [hold(first, shard) for shard in range(len(first.cut.shards))]
    for holding in held:
        for step in range(2):
            take_all(first, holding, step)
            holding.apply(order(step, keep=step == 1, state=True))
    kept = [holding.kept(2) for holding in held]

    later = make_setup(make_schedule=make_schedule)
    trees = {shard: one["optimizer"] for shard, one in enumerate(kept)}
    later.optimizer.load_state_dict(optimizers.join(first, trees))
    object.__setattr__(later, "version", 2)
    object.__setattr__(later, "schedule_state", kept[0]["schedule"])
    for shard, holding in enumerate(held):
        again = Holding(later, shard, kept[shard]["weights"].clone(), 2)
        for one in (holding, again):
            take_all(first, one, 2)
            one.apply(order(2))
        assert again.rates == holding.rates
        assert torch.equal(again.weights, holding.weights)


# -- copies ------------------------------------------------------------------------------------------------------------


def test_a_copy_has_what_is_closed_and_not_what_is_open() -> None:
    setup = make_setup()
    holding = hold(setup, 0)
    for step in range(3):
        take_all(setup, holding, step)
    holding.apply(order(0))
    holding.close(1)
    mirror = hold(setup, 0)
    mirror.load(from_bytes(to_bytes(holding.state())))
    assert mirror.version == 1 and mirror.ledger() == holding.ledger() == (1, 8)
    assert mirror.is_closed(0) and mirror.is_closed(1) and not mirror.is_closed(2)
    holding.apply(order(1))
    mirror.apply(order(1))
    assert torch.equal(mirror.weights, holding.weights)
    with pytest.raises(AuditError):
        mirror.apply(order(2))


def test_a_state_does_not_change_with_what_it_was_made_of() -> None:
    setup = make_setup()
    holding = hold(setup, 0)
    take_all(setup, holding, 0)
    holding.apply(order(0, keep=True, state=True))
    state, kept = holding.state(), holding.kept(1)
    before = to_bytes([state, kept])
    for step in range(1, 3):
        take_all(setup, holding, step)
        holding.apply(order(step))
    assert to_bytes([state, kept]) == before


def test_a_copy_has_the_versions_that_are_kept() -> None:
    setup = make_setup()
    holding, mirror = hold(setup, 0), hold(setup, 0)
    take_all(setup, holding, 0)
    holding.apply(order(0, keep=True, state=True))
    take_all(setup, holding, 1)
    holding.apply(order(1))
    mirror.load(from_bytes(bytes(to_bytes(holding.state()))))
    assert mirror.keeps(1) and not mirror.keeps(2)
    assert to_bytes(mirror.kept(1)) == to_bytes(holding.kept(1))


def test_versions_are_kept_until_they_are_let_go() -> None:
    setup = make_setup()
    holding = hold(setup, 0)
    holding.keep(state=False)
    first = holding.weights.clone()
    for step in range(2):
        take_all(setup, holding, step)
        holding.apply(order(step, keep=step == 1, state=True))
    assert torch.equal(holding.kept(0)["weights"], first) and holding.kept(0)["optimizer"] is None
    assert not holding.keeps(1)
    assert torch.equal(holding.kept(2)["weights"], holding.weights)
    assert holding.kept(2)["optimizer"]["pieces"][0] is not None
    holding.let_go(2)
    holding.let_go(7)
    assert holding.keeps(0) and not holding.keeps(2)


@pytest.mark.parametrize("make", [kinds()[3], kinds()[-1]])
def test_weights_may_move(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> None:
    setup = make_setup(make)
    staying, moving = hold(setup, 1), hold(setup, 1)
    for step in range(3):
        for holding in (staying, moving):
            take_all(setup, holding, step)
            holding.apply(order(step))
        left = moving.weights
        moving.move_to(torch.zeros_like(left))
        assert moving.weights is not left
        left.fill_(255)
        assert torch.equal(moving.weights, staying.weights)


# -- by arrival --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("through", [True, False])
def test_every_push_is_a_step_when_it_arrives(scale: float, through: bool) -> None:
    setup = make_setup(apply="arrival")
    leases = [Lease(0, 0, 3), Lease(1, 0, 8), Lease(0, 3, 8), Lease(1, 0, 8), Lease(0, 0, 3)]
    rates = [3 / 8, 1.0, 5 / 8, 1.0, 3 / 8]
    params = [param.detach().clone().requires_grad_() for _, param in setup.params]
    optimizer = torch.optim.AdamW(params, lr=0.01)
    for lease, rate in list(zip(leases, rates, strict=True))[:3]:
        optimizer.param_groups[0]["lr"] = 0.01 * rate
        area = gradient(setup, lease)
        for number, param in enumerate(params):
            param.grad = setup.cut.view(area, number) * scale
        optimizer.step()
    expected = area_of(setup, params)
    for shard in range(len(setup.cut.shards)):
        holder, mirror = hold(setup, shard), hold(setup, shard)
        for lease, rate in zip(leases, rates, strict=True):
            given = part(setup, gradient(setup, lease), shard)
            before = given.clone()
            into = room(holder) if through else None
            repeated = holder.has(lease)
            record = holder.arrive(lease, given, ALL, scale, rate, into)
            assert torch.equal(given, before)
            assert (record is None) == repeated
            if record is not None:
                if into is None:
                    into = room(holder)
                    for one, other in zip(setup.cut.pieces(into, shard), setup.cut.pieces(given, shard), strict=True):
                        one.copy_(other * scale)
                for _ in range(2):
                    mirror.replay(record, into)
            if lease == Lease(1, 0, 8):
                joined = hold(setup, shard)
                joined.load(from_bytes(to_bytes(mirror.state())))
                mirror = joined
            assert torch.equal(holder.weights, mirror.weights)
        close_to(setup, expected, shard, holder.weights)
        before = holder.weights.clone()
        for holding in (holder, mirror):
            holding.forget_open()
            holding.apply(order(0))
            holding.apply(order(1))
            assert (holding.version, holding.ledger(), holding.rates) == (2, (2, 16), [0.01])
        assert torch.equal(holder.weights, before)


def test_a_mirror_that_hears_late_of_the_end_of_a_step_steps_at_the_rates_of_its_holder() -> None:
    def halving(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    setup = make_setup(apply="arrival", make_schedule=halving)
    holder, mirror = hold(setup, 0), hold(setup, 0)
    replays = []
    for lease in (Lease(0, 0, 8), Lease(1, 0, 8)):
        into = room(holder)
        record = holder.arrive(lease, part(setup, gradient(setup, lease), 0), ALL, 1.0, 1.0, into)
        assert record is not None
        replays.append((record, into))
        if lease.step == 0:
            holder.apply(order(0))
    for record, into in replays:
        mirror.replay(record, into)
    mirror.apply(order(0))
    assert torch.equal(holder.weights, mirror.weights)


def test_the_rates_of_a_step_of_arrivals_are_those_that_its_pushes_were_applied_with() -> None:
    """Also of a push that came before the end of the step before, and if an evaluation lowers the rate at its end."""
    setup = make_setup(
        apply="arrival",
        make_schedule=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
    )
    holding = hold(setup, 0)

    def arrive(lease: Lease, rate: float) -> None:
        holding.arrive(lease, part(setup, gradient(setup, lease), 0), ALL, 1.0, rate)

    told = []
    for step, metric in enumerate([1.0, 2.0, None]):
        if step != 2:
            arrive(Lease(step, 0, 2), 0.25)
        if step == 1:
            arrive(Lease(2, 0, 2), 0.25)
        arrive(Lease(step, 2, 8), 0.75)
        copied = hold(setup, 0)
        copied.load(from_bytes(to_bytes(holding.state())))
        for one in (holding, copied):
            one.apply(order(step, metric=metric))
        assert copied.rates == holding.rates
        told.append(holding.rates[0])
    assert told == pytest.approx([0.01, 0.01, 0.01 * 0.25 + 0.005 * 0.75])


def test_a_step_of_arrivals_needs_all_its_samples() -> None:
    setup = make_setup(apply="arrival")
    holding = hold(setup, 0)
    lease = Lease(0, 0, 3)
    given = part(setup, gradient(setup, lease), 0)
    holding.arrive(lease, given, ALL, 1.0, 0.375)
    with pytest.raises(Overlap):
        holding.arrive(Lease(0, 1, 3), given, ALL, 1.0, 0.25)
    with pytest.raises(AuditError, match="0 to 2; each must come once"):
        holding.apply(order(0))


# -- anything may happen -----------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_whatever_happens_every_sample_counts_once(data: st.DataObject) -> None:
    """Pushes of open steps in any order, some twice; holders die, and with them what was not closed."""
    setup = make_setup(durability="peer")
    steps, ahead = 4, 2
    expected, _ = plain(setup, steps, 0.5)
    shard = data.draw(st.integers(0, len(setup.cut.shards) - 1))
    cuts = [sorted(data.draw(st.sets(st.integers(1, samples(setup, step) - 1)))) for step in range(steps)]
    leases = [
        [Lease(step, start, stop) for start, stop in zip([0, *edges], [*edges, samples(setup, step)], strict=True)]
        for step, edges in enumerate(cuts)
    ]
    gradients = {lease: part(setup, gradient(setup, lease), shard) for step in leases for lease in step}
    holder, mirror = hold(setup, shard), hold(setup, shard)
    sums = {step: room(holder) for step in range(steps)}
    counted: dict[Lease, int] = {}
    while holder.version < steps:
        version = holder.version
        open_steps = range(version, min(version + ahead, steps))
        for lease in data.draw(st.permutations([lease for step in open_steps for lease in leases[step]])):
            had = holder.has(lease)
            for _ in range(data.draw(st.integers(1, 2))):
                if holder.take(lease, gradients[lease], ALL, 1.0, sums[lease.step]):
                    assert not had
                    had = True
                    counted[lease] = counted.get(lease, 0) + 1
            happening = data.draw(st.sampled_from(["nothing", "nothing", "nothing", "death", "closing", "forgetting"]))
            if happening == "closing" and all(holder.has(one) for one in leases[version]):
                mirror.give(holder.close(version), holder.sum_of(version))
            if happening == "forgetting":
                holder.forget_open()
            if happening == "death":
                # the mirror is promoted; a new one starts as a copy of it
                holder = mirror
                holder.move_to(torch.empty_like(holder.weights))
                mirror = hold(setup, shard)
                mirror.load(holder.state())
            if happening in ("death", "forgetting"):
                counted = {one: times for one, times in counted.items() if holder.has(one)}
        if not all(holder.has(lease) for lease in leases[version]):
            continue
        record, total = holder.close(version), holder.sum_of(version)
        mirror.give(record, total)
        first, second = data.draw(st.permutations([holder, mirror]))
        first.apply(order(version, 0.5))
        second.apply(order(version, 0.5))
        assert torch.equal(holder.weights, mirror.weights)
        assert record.ranges == [(lease.start, lease.stop) for lease in leases[version]]
        assert {lease: counted.get(lease) for lease in leases[version]} == dict.fromkeys(leases[version], 1)
    assert holder.ledger() == mirror.ledger() == (steps, setup.course.samples_before(steps))
    close_to(setup, expected, shard, holder.weights)
