"""What workers have still to send, where others may go on with it: who has which part of it afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.codecs.memory import RESIDUAL
from shoal.comm.group import SoloGroup
from shoal.core.spec import AnyCodec, Int8, PowerSGD, TopK
from shoal.syncs.encoding import Encoding
from shoal.syncs.private import Holding, Private, as_tree, from_tree, parts
from shoal.testing.fake_group import FakeGroup, run_members

SHAPE = (32, 40)
COUNT = 32 * 40
NOTHING, READ, SUM, PART = Holding


def encoding(own: float | None = None, codec: AnyCodec | None = None) -> Encoding:
    """That of a worker that has `own` still to send of every number."""
    params = [("weight", nn.Parameter(torch.zeros(SHAPE))), ("bias", nn.Parameter(torch.zeros(4)))]
    optimizer = torch.optim.SGD([param for _, param in params], lr=0.1)
    made = Encoding(codec or Int8(), optimizer, params)
    if own is not None:
        made.memory.take({RESIDUAL: torch.full((COUNT,), own)}, 1)
    return made


def value(encoding: Encoding, kind: str = RESIDUAL) -> float | None:
    """What all numbers of a private vector are; None if there is none."""
    found = encoding.memory.parts().get(kind)
    if found is None:
        return None
    assert bool((found == found[0]).all())
    return float(found[0])


def worker(holding: Holding, whole: float, own: float) -> tuple[Private, Encoding]:
    """One that has this of a sum, `whole`, of which `own` is its own part."""
    private, kept = Private(), encoding(own if holding >= SUM else None)
    if holding == READ:
        private.read({RESIDUAL: torch.full((COUNT,), whole)})
    if holding == SUM:
        private.pool(SoloGroup(), [encoding(whole)])
    private.holds = holding >= SUM
    assert private.holding == holding
    return private, kept


@pytest.mark.parametrize(
    ("held", "shares"),
    [
        # a fresh run
        ([NOTHING, NOTHING], [None, None]),
        # resumed: all have read the same sum, or only those whose checkpoint has one
        ([READ], [12.0]),
        ([READ, READ, READ], [4.0, 4.0, 4.0]),
        ([READ, NOTHING, READ], [6.0, None, 6.0]),
        # a planned change: those who stay share all that there was, who comes has nothing
        ([SUM, SUM], [6.0, 6.0]),
        ([SUM, SUM, NOTHING], [6.0, 6.0, None]),
        ([SUM], [12.0]),
        # who has read a checkpoint, and comes to those who go on, has nothing of it: it is out of date
        ([SUM, SUM, READ], [6.0, 6.0, None]),
        ([PART, READ], [1.0, None]),
        # a break: each has what it had, also those who had pooled it before
        ([PART, PART], [1.0, 1.0]),
        ([PART, NOTHING], [1.0, None]),
        ([PART, SUM, SUM], [1.0, 1.0, 1.0]),
        ([SUM, NOTHING, PART, READ], [1.0, None, 1.0, None]),
    ],
    ids=lambda case: "-".join(one.name if isinstance(one, Holding) else str(one) for one in case),
)
def test_who_has_which_part_afterwards(held: list[Holding], shares: list[float | None]) -> None:
    for number, (holding, expected) in enumerate(zip(held, shares, strict=True)):
        private, kept = worker(holding, whole=12.0, own=1.0)
        private.share([int(one) for one in held], [kept])
        assert value(kept) == expected, f"member {number}"
        # nothing has been exchanged in the term as yet: it holds what it held
        assert private.holding == holding
        private.stands()
        # it has been in a term now, and has its part
        assert private.holding == PART
        private.share([PART], [kept])
        assert value(kept) == expected


@pytest.mark.parametrize(
    ("held", "then", "shares"),
    [
        # by `then` some of the first term's members have gone, or others have come: places in `held`, or what one holds
        ([READ, READ, READ], [0, 2], [6.0, 6.0]),
        ([READ, NOTHING, READ], [0, 1], [12.0, None]),
        ([SUM, SUM, NOTHING], [0, 1], [6.0, 6.0]),
        ([SUM, SUM, NOTHING], [1], [12.0]),
        ([SUM, SUM], [0, 1, NOTHING], [6.0, 6.0, None]),
        ([SUM], [0, READ], [12.0, None]),
        # the first term had one who came as a part's owner, and shared nothing
        ([PART, SUM, SUM], [1, 2], [6.0, 6.0]),
        ([NOTHING, NOTHING], [0, 1], [None, None]),
    ],
    ids=lambda case: "-".join(one.name if isinstance(one, Holding) else str(one) for one in case),
)
def test_after_a_term_that_did_not_stand_all_is_shared_once_more(
    held: list[Holding], then: list[int | Holding], shares: list[float | None]
) -> None:
    workers = [worker(holding, whole=12.0, own=1.0) for holding in held]
    for private, kept in workers:
        private.share([int(one) for one in held], [kept])
    members = [worker(one, 12.0, 1.0) if isinstance(one, Holding) else workers[one] for one in then]
    again = [int(private.holding) for private, _ in members]
    for private, kept in members:
        private.share(again, [kept])
        private.stands()
    assert [value(kept) for _, kept in members] == shares
    assert all(private.holding == PART for private, _ in members)


def test_a_term_that_stood_leaves_each_its_part_though_it_breaks_later() -> None:
    members = [worker(SUM, whole=12.0, own=1.0) for _ in range(3)]
    for private, kept in members:
        private.share([SUM] * 3, [kept])
        private.stands()
    for private, kept in members[:2]:
        private.share([private.holding] * 2, [kept])
        assert value(kept) == 4.0


def test_what_a_checkpoint_had_is_not_read_again_in_a_term_after_one_that_stood() -> None:
    private, kept = worker(READ, whole=12.0, own=0.0)
    private.share([READ, READ], [kept])
    private.stands()
    kept.memory.take({RESIDUAL: torch.full((COUNT,), 0.25)}, 1)  # most of it has been sent
    private.share([PART], [kept])
    private.share([READ, PART], [kept])
    assert value(kept) == 0.25


def test_what_was_pooled_is_forgotten_with_its_step() -> None:
    private, kept = worker(SUM, whole=12.0, own=1.0)
    private.forget()
    assert private.holding == PART
    private.share([SUM, PART], [kept])
    assert value(kept) == 1.0


def test_pooling_adds_up_what_members_have_and_changes_nothing() -> None:
    def member(group: FakeGroup) -> tuple[float, float | None, Holding]:
        private, kept = Private(), encoding([1.0, None, 5.0][group.rank])
        private.holds = True
        if group.rank == 1:  # one that has another kind of vector than the others
            kept.memory.take({"momentum": torch.full((COUNT,), 0.5)}, 1)
        (sums,) = private.pool(group, [kept])
        assert sorted(sums) == ["momentum", RESIDUAL]
        assert bool((sums["momentum"] == 0.5).all())
        assert value(kept) == [1.0, None, 5.0][group.rank]
        return float(sums[RESIDUAL][7]), value(kept), private.holding

    assert run_members(3, member) == [(6.0, 1.0, SUM), (6.0, None, SUM), (6.0, 5.0, SUM)]


def test_what_the_second_phase_keeps_is_pooled_and_shared_too() -> None:
    def member(group: FakeGroup) -> tuple[Tensor, Tensor]:
        private, kept = Private(), encoding(1.0)
        start = group.rank * COUNT // 2
        [(_, shadow)] = kept.memory.owned((start, start + COUNT // 2))
        shadow.fill_(8.0)
        kept.memory.commit()
        private.holds = True
        (sums,) = private.pool(group, [kept])
        private.share([SUM, SUM], [kept])
        return sums[RESIDUAL], kept.memory.parts()[RESIDUAL]

    for sums, after in run_members(2, member):
        assert bool((sums == 10.0).all()) and bool((after == 5.0).all())


def test_several_optimizers_have_their_own_sums() -> None:
    private, kept = Private(), [encoding(), encoding()]
    for whole in (3.0, 9.0):
        private.read({RESIDUAL: torch.full((COUNT,), whole)})
    private.share([READ, READ, READ], kept)
    assert [value(one) for one in kept] == [1.0, 3.0]


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_has_the_sums_by_parameter_and_gives_them_back() -> None:
    kept = encoding(2.0, PowerSGD(rank=2))
    kept.steps = 5
    _, shadow = kept.memory.shared("powersgd rank 2", lambda: torch.zeros(6))
    shadow.copy_(torch.arange(6.0))
    kept.memory.commit()
    (tree,) = as_tree([kept], Private().pool(SoloGroup(), [kept]))
    assert list(tree["private"][RESIDUAL]) == ["weight"]
    assert tuple(tree["private"][RESIDUAL]["weight"].shape) == SHAPE
    other = encoding(codec=PowerSGD(rank=2))
    totals = from_tree(tree, other)
    assert bool((totals[RESIDUAL] == 2.0).all()) and totals[RESIDUAL].shape == (COUNT,)
    assert other.steps == 5 and other.memory.common()["powersgd rank 2"].tolist() == list(range(6))
    assert value(other) is None  # it is shared out when it is known who is there


def test_what_another_codec_had_to_send_means_nothing() -> None:
    (tree,) = as_tree([encoding(2.0)], [{RESIDUAL: torch.full((COUNT,), 6.0)}])
    other, private = encoding(codec=TopK()), Private()
    private.read(from_tree(tree, other))
    private.share([READ, READ], [other])
    assert not other.memory.has() and other.steps == 0


def test_a_worker_that_joins_is_told_nothing_private() -> None:
    (tree,) = as_tree([encoding(2.0)], None)
    assert "private" not in tree
    assert from_tree(tree, encoding()) == {}


def test_where_nobody_can_be_asked_a_worker_keeps_its_own() -> None:
    (own,) = parts([encoding(2.0)])
    assert bool((own[RESIDUAL] == 2.0).all())
    assert parts([encoding()]) == [{}]
