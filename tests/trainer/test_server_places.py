"""Where the processes of a run with servers are, in a lab."""

from __future__ import annotations

from shoal.core.seats import FIRST_SERVER
from shoal.engines.places import Place
from shoal.trainer.workers.elastic import Places


def hosts(count: int) -> list[Place]:
    return [Place("abcdef"[number], f"10.77.0.{2 + number}", 1) for number in range(count)]


def names(places: Places, *seats: int) -> str:
    return "".join(place.name for place in map(places.of, seats) if place is not None)


def test_without_a_lab_all_are_here() -> None:
    places = Places([], 2)
    assert places.of(0) is None and places.of(FIRST_SERVER) is None
    assert places.addresses() == [places.address(FIRST_SERVER)]


def test_servers_share_hosts_with_workers_if_there_are_no_others() -> None:
    places = Places(hosts(2), 4)
    assert names(places, *range(4)) == "aabb"
    assert names(places, *(FIRST_SERVER + number for number in range(3))) == "aba"


def test_servers_have_the_hosts_that_no_worker_has() -> None:
    places = Places(hosts(6), 4)
    assert names(places, *range(4)) == "abcd"
    assert names(places, *(FIRST_SERVER + number for number in range(3))) == "efe"


def test_a_worker_that_joins_later_has_a_host_too() -> None:
    assert names(Places(hosts(3), 2), 2, 3) == "ca"
