"""Parts of sparse tables: rows that come count once, mirrors are equal, and nothing is believed unchecked."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.core.atoms import Course
from shoal.core.errors import AuditError
from shoal.core.spec import NoCodec, Server
from shoal.data.parcel import from_bytes, to_bytes
from shoal.syncs.server.intake import Unsound
from shoal.syncs.server.messages import Apply, Fetch, Lease, Push, Rows, Touched
from shoal.syncs.server.optimizers import join
from shoal.syncs.server.rows import RowAnswers, RowsIntake
from shoal.syncs.server.setup import Setup
from shoal.syncs.server.shard import Unfit
from shoal.syncs.server.table_client import in_groups
from shoal.syncs.server.table_shard import TableHolding
from shoal.syncs.server.tables import (
    empty_cut,
    first_weights,
    held_bytes,
    make_tables,
    pack,
    part_of,
    put_part,
    summed,
    unpack,
)
from shoal.syncs.server.used import pack_used

ROWS, WIDTH = 1000, 6
USED, UNUSED = pack_used([True]), pack_used([False])
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "sparseadam": lambda params: torch.optim.SparseAdam(params, lr=0.1),
}


def make_setup(
    optimizer: str = "sgd", *, device: str = "cpu", dtype: torch.dtype = torch.float32, **spec: Any
) -> Setup:
    generator = torch.Generator().manual_seed(1)
    weight = nn.Parameter(torch.randn(ROWS, WIDTH, generator=generator).to(dtype).to(device))
    cut, tables = make_tables(empty_cut(), [("t.weight", weight, 5)])
    return Setup(
        run="r",
        keys=None,  # type: ignore[arg-type]  # nothing is sent
        spec=Server(**spec),
        course=Course(size=24, batch=8),
        total=20,
        version=0,
        cut=cut,
        params=[],
        optimizer=OPTIMIZERS[optimizer]([weight]),
        make_schedule=None,
        schedule_state=None,
        clip=None,
        codec=NoCodec(),
        memory={},
        tables=tables,
    )


def hold(setup: Setup, shard: int) -> TableHolding:
    here = part_of(setup, shard)
    assert here is not None
    return TableHolding(setup, shard, first_weights(setup, here).view(-1).view(torch.uint8), 0)


def gradient(setup: Setup, shard: int, *rows: int, value: float = 1.0) -> Tensor:
    here = part_of(setup, shard)
    assert here is not None
    return pack(torch.tensor(rows, dtype=torch.int64), torch.full((len(rows), WIDTH), value))


def order(step: int, scale: float = 1.0, **more: Any) -> Apply:
    return Apply(step, scale, math.nan, **more)


NOWHERE = torch.empty(0, dtype=torch.uint8)
HALVES = (Lease(0, 0, 4), Lease(0, 4, 8))


# -- cutting -----------------------------------------------------------------------------------------------------------


def test_parts_have_all_rows_once_and_balance() -> None:
    setup = make_setup()
    (table,) = setup.tables
    whole = torch.full((ROWS, WIDTH), math.nan)
    for shard in range(table.first, table.first + table.parts):
        here = part_of(setup, shard)
        assert here is not None
        put_part(here, whole, first_weights(setup, here).view(-1).view(torch.uint8))
    assert torch.equal(whole, table.param.detach())
    sizes = held_bytes(setup)
    assert len(sizes) == table.parts == 5 and sum(sizes) == ROWS * WIDTH * 4
    assert max(sizes) - min(sizes) <= WIDTH * 4


def test_small_tables_have_fewer_parts_and_none_is_empty() -> None:
    found = [(f"t{rows}", nn.Parameter(torch.zeros(rows, 2000)), None) for rows in (1, 3, 100)]
    _, tables = make_tables(empty_cut(), found)
    assert [table.parts for table in tables] == [1, 3, 12]
    assert all(table.size(part) > 0 for table in tables for part in range(table.parts))


def test_tables_on_meta_are_made_by_seed_and_part() -> None:
    setup = make_setup(device="meta")
    again, other = make_setup(device="meta"), make_setup(device="meta")
    object.__setattr__(other, "seed", 1)
    parts = [part_of(setup, shard) for shard in range(setup.tables[0].parts)]
    made = [first_weights(setup, here) for here in parts if here is not None]
    assert all(
        torch.equal(one, first_weights(again, here)) for one, here in zip(made, parts, strict=True) if here is not None
    )
    assert parts[0] is not None and not torch.equal(made[0], first_weights(other, parts[0]))
    assert not torch.equal(made[0], made[1])
    assert not made[0][1].any() and made[0][0].all(), "row 5, for padding, is row 1 of part 0"


# -- one part ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_are_stepped_as_in_one_process(optimizer: str) -> None:
    setup = make_setup(optimizer)
    holding = hold(setup, 2)
    weight = nn.Parameter(first_weights(setup, part_of(setup, 2)))  # type: ignore[arg-type]
    plain = OPTIMIZERS[optimizer]([weight])
    for step in range(2):
        for number, half in enumerate(((4, 8), (0, 4))):  # in whatever order they come
            rows = (1, 7) if number else (7, 30)
            assert holding.take(Lease(step, *half), gradient(setup, 2, *rows), USED, 1.0, NOWHERE)
        assert holding.close(step).ranges == [(0, 4), (4, 8)]
        assert holding.norm(step) == pytest.approx((1 + 4 + 1) * WIDTH)
        holding.apply(order(step, 0.5))
        rows = torch.tensor([[1, 7, 30]])
        values = torch.tensor([0.5, 1.0, 0.5])[:, None].expand(3, WIDTH)
        with torch.sparse.check_sparse_tensor_invariants(False):
            weight.grad = torch.sparse_coo_tensor(rows, values, weight.shape)
            plain.step()
    assert torch.allclose(holding.rows(torch.arange(200)), weight.detach(), atol=1e-6)
    assert holding.version == 2 and holding.ledger() == (2, 16)


def test_a_lease_counts_once_and_not_in_part() -> None:
    setup = make_setup()
    holding = hold(setup, 0)
    assert holding.take(HALVES[0], gradient(setup, 0, 3), USED, 1.0, NOWHERE)
    assert not holding.take(HALVES[0], gradient(setup, 0, 3), USED, 1.0, NOWHERE)
    with pytest.raises(Unfit, match="overlaps"):
        holding.take(Lease(0, 2, 6), gradient(setup, 0, 3), USED, 1.0, NOWHERE)
    with pytest.raises(AuditError, match="each must come once"):
        holding.close(0)


def test_a_step_that_touches_nothing_leaves_the_part_as_it_is() -> None:
    setup = make_setup("sparseadam")
    holding = hold(setup, 0)
    before = holding.weights.clone()
    for lease in HALVES:
        holding.take(lease, NOWHERE, UNUSED, 1.0, NOWHERE)
    holding.apply(order(0))
    assert torch.equal(holding.weights, before)
    assert holding.state()["optimizer"]["table"] is None, "an optimizer passes over what nobody used"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_mirrors_and_copies_are_equal_bit_for_bit(optimizer: str) -> None:
    setup = make_setup(optimizer)
    holder, mirror = hold(setup, 1), hold(setup, 1)
    for step in range(3):
        for start in (0, 4):
            rows = sorted({step, start + 10, 40})
            holder.take(Lease(step, start, start + 4), gradient(setup, 1, *rows, value=0.3), USED, 0.7, NOWHERE)
        record = holder.close(step)
        mirror.give(record, holder.sum_of(step).clone())
        holder.apply(order(step, 0.9))
        mirror.apply(order(step, 0.9))
        if step == 1:
            fresh = hold(setup, 1)
            fresh.load(from_bytes(to_bytes(mirror.state())))
            mirror = fresh
    assert torch.equal(holder.weights, mirror.weights)
    assert holder.ledger() == mirror.ledger()


def test_arrivals_are_replayed_with_the_rate_that_they_had() -> None:
    setup = make_setup(apply="arrival")
    holder, mirror = hold(setup, 0), hold(setup, 0)
    packed = gradient(setup, 0, 2, 9)
    scaled = torch.empty_like(packed)
    before = holder.rows(torch.tensor([2])).clone()
    record = holder.arrive(HALVES[0], packed, USED, 0.5, 0.25, scaled)
    assert record is not None and holder.arrive(HALVES[0], packed, USED, 0.5, 0.25) is None
    mirror.replay(record, scaled)
    assert torch.equal(holder.weights, mirror.weights)
    moved = before - holder.rows(torch.tensor([2]))
    assert torch.allclose(moved, torch.full_like(moved, 0.1 * 0.5 * 0.25))


@pytest.mark.parametrize(
    "packed",
    [
        torch.zeros(31, dtype=torch.uint8),
        pack(torch.tensor([3, 3]), torch.zeros(2, WIDTH)),
        pack(torch.tensor([-1]), torch.zeros(1, WIDTH)),
        pack(torch.tensor([200]), torch.zeros(1, WIDTH)),
        pack(torch.arange(201), torch.zeros(201, WIDTH)),
    ],
    ids=["torn", "twice", "negative", "beyond", "too many"],
)
def test_rows_that_are_not_of_the_part_are_refused(packed: Tensor) -> None:
    holding = hold(make_setup(), 0)
    before = holding.weights.clone()
    with pytest.raises(Unfit):
        holding.take(HALVES[0], packed, USED, 1.0, NOWHERE)
    assert not holding.has(HALVES[0]) and torch.equal(before, holding.weights)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_parts_join_to_the_state_that_torch_has(optimizer: str) -> None:
    setup = make_setup(optimizer)
    (table,) = setup.tables
    states = {}
    for shard in range(table.parts):
        holding = hold(setup, shard)
        for lease in HALVES:
            holding.take(lease, gradient(setup, shard, 4), USED, 1.0, NOWHERE)
        holding.apply(order(0, keep=True, state=True))
        states[shard] = holding.kept(1)["optimizer"]
    weight = nn.Parameter(table.param.detach().clone())
    plain = OPTIMIZERS[optimizer]([weight])
    rows = torch.arange(4 * table.parts, 5 * table.parts)
    with torch.sparse.check_sparse_tensor_invariants(False):
        weight.grad = torch.sparse_coo_tensor(rows[None], torch.full((len(rows), WIDTH), 2.0), weight.shape)
        plain.step()
    ours, theirs = join(setup, states), plain.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for key, value in theirs["state"].get(0, {}).items():
        torch.testing.assert_close(torch.as_tensor(ours["state"][0][key]), torch.as_tensor(value))


# -- what comes and is asked -------------------------------------------------------------------------------------------


def frame(tensor: Tensor) -> memoryview:
    return memoryview(bytes(tensor.view(torch.uint8).numpy()))


def test_rows_wait_for_their_push_and_are_of_its_sender_and_lease() -> None:
    setup = make_setup()
    intake = RowsIntake(setup)
    packed = gradient(setup, 1, 3)
    intake.take(b"a", "worker-0", Touched(HALVES[0], [1]), [frame(packed)])
    push = Push(HALVES[0], [1, 2], 0, USED)
    assert torch.equal(intake.gradient(b"a", "worker-0", push, 1), packed)
    for peer, sender, shard in ((b"b", "worker-0", 1), (b"a", "worker-1", 1), (b"a", "worker-0", 2)):
        with pytest.raises(Unsound, match="have not come"):
            intake.gradient(peer, sender, push, shard)
    assert not intake.gradient(b"x", "worker-9", Push(HALVES[0], [1], 0, UNUSED), 1).numel()
    with pytest.raises(Unsound):
        intake.take(b"a", "worker-0", Touched(HALVES[0], [99]), [frame(packed)])
    with pytest.raises(Unsound):
        intake.take(b"a", "worker-0", Touched(HALVES[0], [1]), [frame(packed)[:-1]])


def test_questions_are_answered_when_the_version_is_there() -> None:
    setup = make_setup()
    holding = hold(setup, 0)
    said: list[tuple[Any, list[memoryview]]] = []
    refused: list[str] = []
    answers = RowAnswers(
        setup, lambda peer, body, frames: said.append((body, frames)), lambda peer, why: refused.append(why)
    )
    rows = torch.tensor([0, 4, 9])
    answers.ask(b"a", Fetch(7, 1, [0]), [frame(rows)], {0: holding})
    assert not said
    for lease in HALVES:
        holding.take(lease, gradient(setup, 0, 4), USED, 1.0, NOWHERE)
    holding.apply(order(0, keep=True))
    answers.answer({0: holding})
    (body, frames) = said.pop()
    assert body == Rows(7, 1, [0])
    assert torch.equal(torch.frombuffer(bytearray(frames[0]), dtype=torch.float32).view(3, WIDTH), holding.rows(rows))
    kept = holding.rows(rows).clone()
    for lease in HALVES:
        holding.take(Lease(1, lease.start, lease.stop), gradient(setup, 0, 4), USED, 1.0, NOWHERE)
    holding.apply(order(1))
    answers.ask(b"a", Fetch(8, 1, [0], exact=True), [frame(rows)], {0: holding})
    (_, frames) = said.pop()
    assert torch.equal(torch.frombuffer(bytearray(frames[0]), dtype=torch.float32).view(3, WIDTH), kept)
    answers.ask(b"a", Fetch(9, 2, [0], exact=True), [frame(rows)], {0: holding})
    assert refused == ["version 2 is not kept"] and not said
    with pytest.raises(Unfit):
        answers.ask(b"a", Fetch(10, 0, [0]), [frame(torch.tensor([200]))], {0: holding})
    with pytest.raises(Unsound):
        answers.ask(b"a", Fetch(11, 0, [1]), [frame(rows)], {0: holding})


def test_sums_have_each_row_once_in_rising_order() -> None:
    rows, values = summed(
        [torch.tensor([1, 5]), torch.tensor([0, 5])], [torch.ones(2, 1), torch.ones(2, 1)], torch.empty(0), 1
    )
    assert rows.tolist() == [0, 1, 5] and values.view(-1).tolist() == [1.0, 1.0, 2.0]
    here = part_of(make_setup(), 0)
    assert here is not None
    rows, values = unpack(here, pack(torch.tensor([2]), torch.full((1, WIDTH), 3.0)))
    assert rows.tolist() == [2] and values.tolist() == [[3.0] * WIDTH]


def test_groups_have_all_shards_and_none_is_too_large() -> None:
    sizes = [1 << 20] * 9 + [30 << 20, 1]
    groups = list(in_groups(range(11), sizes.__getitem__))
    assert [shard for group in groups for shard in group] == list(range(11))
    assert all(len(group) == 1 or sum(sizes[shard] for shard in group) <= 4 << 20 for group in groups)
