"""Whether a codec is worth its while: in words, and by measurement of a group."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.comm.plan import Settled
from shoal.core.spec import Int8
from shoal.syncs.encoding import Encoding
from shoal.syncs.worth import Worth, judged
from shoal.testing.fake_group import FakeGroup, run_members

MB = 1 << 20


def test_one_that_does_not_pay_is_told_with_what_would() -> None:
    # 10 MB at 1 ms a megabyte are 10 ms; waiting for the encoded ones took 7
    told = judged("int8", 10 * MB, encoding=9e-3, waited=7e-3, sums=(0.0, 1e-3), members=2)
    assert told.note == "encode 9 ms, saves 3.04 ms at 8.4 Gbit/s: use none"
    assert (told.codec, told.encoding, told.buckets) == ("int8", 9e-3, [10 * MB])
    assert told.saved == pytest.approx(3.04e-3, rel=0.01)


def test_one_that_pays_is_told_without_advice() -> None:
    told = judged("onebit", 100 * MB, encoding=0.05, waited=0.1, sums=(1e-3, 0.081), members=4)
    assert told.note == "encode 50 ms, saves 7.93e+03 ms at 0.16 Gbit/s"
    assert told.latency == 1e-3
    assert told.bandwidth == pytest.approx(100 * MB / 8.03, rel=0.01)


def test_the_rate_counts_what_each_member_sends_and_receives() -> None:
    rates = [judged("int8", 10 * MB, 0.0, 0.0, (0.0, 1e-3), members).note.split(" at ")[1] for members in (2, 3, 4)]
    assert rates == ["8.4 Gbit/s", "11 Gbit/s", "13 Gbit/s"]


def test_more_waiting_than_a_plain_sum_would_take_saves_nothing() -> None:
    told = judged("int8", 2 * MB, encoding=1e-3, waited=0.5, sums=(0.0, 1e-3), members=2)
    assert told.note.startswith("encode 1 ms, saves 0 ms") and told.note.endswith(": use none")
    assert told.saved < 0


@pytest.mark.parametrize("size", [1, 4096, 100_000])
def test_no_rate_is_told_of_few_bytes_and_none_of_no_time(size: int) -> None:
    told = judged("int8", size, 1e-3, 2e-3, (1e-3, 1.1e-3), 2)
    assert "Gbit/s" not in told.note
    free = judged("int8", size, 0.0, 0.0, (0.0, 0.0), 2)
    assert free.note == "encode 0 ms, saves 0 ms" and free.bandwidth == 0.0


# -- over a group ------------------------------------------------------------------------------------------------------


def encoding() -> Encoding:
    param = nn.Parameter(torch.zeros(64, 64))
    return Encoding(Int8(), torch.optim.SGD([param], lr=0.1), [("weight", param)])


def steps(worth: Worth, scratch: torch.Tensor, times: list[tuple[float, float]]) -> None:
    for encoding_seconds, waited in times:
        worth.begin(scratch)
        worth.end(encoding_seconds, waited)


def test_members_judge_alike_after_four_steps_and_the_first_does_not_count() -> None:
    def member(group: FakeGroup) -> tuple[Settled | None, Settled | None, Settled | None]:
        kept, scratch = encoding(), torch.zeros(4096)
        worth = Worth(group, kept)
        slow = 1.0 + group.rank  # member 0 came last, and waited for nobody
        steps(worth, scratch, [(9.0, 9.0), (0.25, slow), (0.25, slow), (0.25, slow)])
        before = kept.settled
        worth.begin(scratch)
        first = kept.settled
        steps(worth, scratch, [(5.0, 5.0)] * 6)
        return before, first, kept.settled

    found = run_members(3, member)
    assert all(told == found[0][1] for _, told, _ in found)
    for before, first, later in found:
        assert before is None and first is later and first is not None
        assert first.encoding == 0.25 and first.codec == "int8"
        assert first.saved == pytest.approx(-1.0, abs=0.2)
        assert first.note.endswith("use none")


@pytest.mark.parametrize("why", ["not wanted", "known", "alone", "nothing"])
def test_nothing_is_measured_where_there_is_nothing_to_judge(why: str) -> None:
    def member(group: FakeGroup) -> tuple[Settled | None, int]:
        kept = encoding()
        if why == "known":
            kept.settled = Settled(0.0, 0.0, [], note="from before")
        worth = Worth(group, kept, judged=why != "not wanted")
        scratch = torch.zeros(0 if why == "nothing" else 512)
        steps(worth, scratch, [(0.1, 0.1)] * 8)
        return kept.settled, group.account.now().bytes

    for told, sent in run_members(1 if why == "alone" else 2, member):
        assert sent == 0
        assert told is None if why != "known" else told is not None and told.note == "from before"
