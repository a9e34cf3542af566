"""Which workers share a host, and hosts that cannot reach each other."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from shoal.comm import topology
from shoal.comm.choose import make_group
from shoal.comm.group import Group, SoloGroup
from shoal.comm.topology import HostsApart, Place, _Answer, _knock, host_identity, own_address
from shoal.core.errors import GroupError
from shoal.testing.lab import Lab, why_no_lab
from shoal.testing.ranks import RanksFailed, run_ranks

needs_lab = pytest.mark.skipif(why_no_lab() is not None, reason=f"no lab: {why_no_lab()}")


def test_processes_of_one_host_have_one_identity() -> None:
    told = run_ranks(3, lambda group: [host_identity(), list(group.hosts)])
    assert {identity for identity, _ in told} == {host_identity()}
    assert all(hosts == [0, 0, 0] for _, hosts in told)


def test_a_name_without_an_address() -> None:
    with pytest.raises(GroupError, match=r"'no\.such\.host\.invalid', has no address"):
        own_address("no.such.host.invalid")


def test_what_is_said_of_a_host_that_does_not_answer() -> None:
    here = Place(0, "a", "127.0.0.1")
    answer = _knock(here, [(Place(1, "b", "127.0.0.1"), 1)], 1.0)
    said = answer.said
    assert answer.missed == [1]
    assert said.startswith("127.0.0.1 (host b) cannot be reached from 127.0.0.1 (host a): ")
    assert "firewalls" in said
    assert _knock(here, [], 1.0) == _Answer()
    many = _knock(here, [(Place(host, f"b{host}", "127.0.0.1"), 1) for host in range(1, 21)], 5.0)
    assert many.missed == list(range(1, 21))
    assert many.said.count("cannot be reached") == 8
    assert "and 12 more; look at routes" in many.said


class GatheringStore:
    """A store for threads that can only gather, and counts the questions of each member."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self._words: dict[str, dict[int, bytes]] = {}
        self._changed = threading.Condition()

    def gather(self, key: str, rank: int, size: int, value: bytes) -> list[bytes]:
        with self._changed:
            self.asked[threading.current_thread().name] += 1
            words = self._words.setdefault(key, {})
            assert words.setdefault(rank, value) == value
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: len(words) == size, timeout=10)
            return [words[member] for member in range(size)]


def told_on_hosts(hosts: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> tuple[dict[int, Any], list[int]]:
    """What worker m on host `hosts[m]` learns of the places and of who can reach whom; the questions of each."""
    store, told = GatheringStore(), dict[int, Any]()
    monkeypatch.setattr(topology, "host_identity", lambda: f"host {hosts[int(threading.current_thread().name)]}")

    def meet(rank: int) -> None:
        places = topology.where_all_are(store, rank, len(hosts), "127.0.0.1")
        try:
            topology.refuse_unreachable(store, rank, places, 5.0)
            told[rank] = [place.host for place in places]
        except HostsApart as error:
            told[rank] = error.pairs

    threads = [threading.Thread(target=meet, args=(rank,), name=str(rank)) for rank in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return told, [store.asked[str(rank)] for rank in range(len(hosts))]


@pytest.mark.parametrize("each", [1, 4])
def test_questions_of_a_member_however_many_there_are(each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [host for host in range(3) for _ in range(each)]
    told, asked = told_on_hosts(hosts, monkeypatch)
    assert told == {rank: hosts for rank in range(len(hosts))}
    assert asked == [3 if rank % each == 0 else 2 for rank in range(len(hosts))]


def test_all_learn_from_one_who_is_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    knock = topology._knock

    def knock_in_vain(me: Place, others: Any, reach: float) -> _Answer:
        return _Answer([2], "no way") if me.host == 0 else knock(me, others, reach)

    monkeypatch.setattr(topology, "_knock", knock_in_vain)
    told, _ = told_on_hosts([0, 0, 1, 2], monkeypatch)
    assert told == {rank: [(0, 3), (1, 3)] for rank in range(4)}


@needs_lab
def test_hosts_of_a_lab_are_told_apart_by_what_they_share_not_by_name() -> None:
    with Lab(hosts=2) as lab:
        told = run_ranks(4, lambda group: [group.collective, list(group.hosts)], lab=lab)
    assert told == [["hierarchical", [0, 0, 1, 1]]] * 4


@needs_lab
@pytest.mark.parametrize("collective", ["gloo", "hierarchical"])
def test_a_host_that_cannot_be_reached_is_named_with_its_address(
    collective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(make_group.__kwdefaults__, "reach", 1.0)
    with Lab(hosts=2) as lab:
        lab.cut(lab.hosts[1])
        with pytest.raises(RanksFailed) as caught:
            run_ranks(4, lambda group: None, lab=lab, collective=collective)
        first, second = lab.hosts
    for rank in range(4):
        assert f"rank {rank}: " in str(caught.value)
    there, here = f"{second.address} (host {second.name})", f"{first.address} (host {first.name})"
    assert f"{there} cannot be reached from {here}" in str(caught.value)
    assert str(caught.value).count("HostsApart: ") == 4


class Nobody(SoloGroup):
    """What a worker has whose hosts are apart."""

    def __init__(self, apart: HostsApart) -> None:
        super().__init__()
        self.pairs = [list(pair) for pair in apart.pairs]
        self.said = str(apart)


@needs_lab
@pytest.mark.parametrize("collective", ["gloo", "hierarchical"])
def test_all_workers_learn_who_cannot_reach_whom(collective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a host that reaches all others."""

    def meet(*args: Any, **kwargs: Any) -> Group:
        try:
            return make_group(*args, **kwargs, reach=0.5)
        except HostsApart as apart:
            return Nobody(apart)

    def told(group: Group) -> list[Any]:
        return [group.pairs, group.said] if isinstance(group, Nobody) else []

    monkeypatch.setattr("shoal.testing.ranks.make_group", meet)
    with Lab(hosts=3) as lab:
        assert run_ranks(5, told, lab=lab, collective=collective) == [[]] * 5
        lab.cut(lab.hosts[0], lab.hosts[2])
        answers = run_ranks(5, told, lab=lab, collective=collective)
    assert all(answer == answers[0] for answer in answers)
    assert answers[0][0] == [[0, 4], [1, 4]]
