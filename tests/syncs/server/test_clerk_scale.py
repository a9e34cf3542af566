"""Servers that are added and drained while the clerk's run goes on, in a world without processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.core.events import Notice, ServersSeen
from shoal.core.spec import MOST_SERVERS
from shoal.syncs.server import messages as said
from shoal.syncs.server.clerk import load as clerk_load
from shoal.syncs.server.clerk.places import Places
from shoal.syncs.server.messages import FIRST_SERVER
from shoal.testing.clerk_world import World
from tests.syncs.server.test_clerk import assert_whole, make_world, told

SPECS = [
    {"mode": "bsp"},
    {"mode": "ssp", "staleness": 2, "servers": 3},
    {"mode": "async", "servers": 1},
    {"mode": "ssp", "apply": "arrival"},
    {"mode": "bsp", "durability": "none"},
    {"mode": "ssp", "apply": "arrival", "durability": "none", "servers": 1},
    {"mode": "ssp", "durability": "disk"},
]


def until(world: World, version: int) -> None:
    while world.clerk.version < version and not world.clerk.finished:
        world.step()


def scale(world: World, servers: int) -> None:
    assert world.clerk.scale_servers(servers, world.now) is None


@pytest.mark.parametrize("spec", SPECS, ids=repr)
@pytest.mark.parametrize("counts", [(3,), (1,), (4, 2), (1, 4, 1)], ids=repr)
@pytest.mark.parametrize("seed", range(2))
def test_as_many_servers_as_asked_for(spec: dict[str, Any], counts: tuple[int, ...], seed: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"folder": tmp_path, "every": 3, "eval_every": 5} if seed else {}
    world = make_world(seed=seed, total=40, **options, **spec)
    for turn, servers in enumerate(counts):
        until(world, 10 * turn + 2)
        scale(world, servers)
        until(world, 10 * turn + 10)
        places = world.clerk._places
        expected = servers + (places.durability == "peer" and servers == 1)
        assert len(places.numbers) == expected == len(world.servers), "it takes longer than eight steps"
        assert len(places.holding()) == servers
        assert {holder.mirror is not None for holder in places.holders} == {places.durability == "peer"}
    world.run()
    assert_whole(world, 40)
    assert [server.number for server in told(world, ServersSeen)[-1].servers] == places.numbers
    asked = {"servers": 2, **spec}["servers"], *counts
    changes = [
        f"the run goes on with {n} server{'s' * (n > 1)}" for was, n in zip(asked, counts, strict=False) if was != n
    ]
    assert [notice.text for notice in told(world, Notice)] == changes


def has_copy(places: Places, shard: int) -> bool:
    """Whether another server than its holder has all of a shard."""
    holder = places.holders[shard]
    copied = holder.mirror is not None and shard not in places._copying.get(holder.mirror, ())
    return copied or holder.spare is not None


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.get("durability") != "none"], ids=repr)
@pytest.mark.parametrize("seed", range(8))
def test_deaths_while_servers_come_and_go(spec: dict[str, Any], seed: int, tmp_path: Path) -> None:
    """One server at a time dies, at any moment of a move too."""
    options: dict[str, Any] = {"folder": tmp_path, "every": 4} if seed % 2 else {}
    world = make_world(seed=seed, total=40, **options, **spec)
    deaths, in_moves = 0, 0
    for _ in range(400_000):
        if world.clerk.finished:
            break
        world.step()
        places = world.clerk._places
        if places.placed and world.random.random() < 0.005:
            world.clerk.scale_servers(world.random.randint(1, 5), world.now)
        whole = places.durability == "disk" or all(has_copy(places, shard) for shard in range(len(places.holders)))
        heard = not any(waiting for seat, waiting in world.up.items() if seat >= FIRST_SERVER)
        if places.placed and whole and heard and deaths < 8 and not world.clerk._keeping.kept:
            alive = [number for number in places._endpoints if number in world.servers]
            if world.random.random() < (0.05 if places._goal is not None else 0.002) and alive:
                deaths += 1
                in_moves += places._goal is not None
                world.kill(FIRST_SERVER + world.random.choice(alive))
    assert world.clerk.finished, world.clerk._waits_for()
    assert deaths
    assert_whole(world, 40)


def test_a_copy_is_never_given_up_for_a_move() -> None:
    """While a server gets a copy, two others have the shard: the holder may die."""
    world = make_world(total=40, servers=3)
    until(world, 3)
    scale(world, 4)
    spares = []

    def watch(seat: int, message: Any) -> None:
        if isinstance(message, said.Placement):
            for before, after in zip(world.clerk._places.holders, message.holders, strict=True):
                spares.append(after.spare)
                assert after.mirror is not None and before == after

    world.watch = watch
    world.run()
    assert_whole(world, 40)
    assert set(spares) > {None}


def test_load_is_even_over_those_that_came() -> None:
    world = make_world(total=30)
    until(world, 3)
    scale(world, 4)
    world.run()
    places = world.clerk._places
    assert sorted(len(places.held_by(number)) for number in places.numbers) == [1, 1, 1, 1]
    assert sorted(len(places._shards_of(number)) for number in places.numbers) == [2, 2, 2, 2]


def test_what_cannot_be_is_said() -> None:
    world = make_world()
    assert "just being started" in str(world.clerk.scale_servers(2, world.now))
    until(world, 2)
    for servers in (0, MOST_SERVERS + 1):
        assert f"1 to {MOST_SERVERS}" in str(world.clerk.scale_servers(servers, world.now))
    world.run()
    assert "about to end" in str(world.clerk.scale_servers(3, world.now))


def slow(world: World, number: int, factor: float) -> None:
    """Let a server take longer to apply what it has."""

    def applies(server: int, shards: int) -> float:
        return 0.01 * shards * (factor if server == number else 1.0)

    world.applies = applies


@pytest.mark.parametrize(("factor", "moves"), [(1.0, False), (1.2, False), (3.0, True)])
def test_shards_leave_a_server_that_is_slow(factor: float, moves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clerk_load, "PAUSE_SECONDS", 1.5)
    world = make_world(total=120, durability="none")
    slow(world, 1, factor)
    world.run()
    assert_whole(world, 120)
    places = world.clerk._places
    assert len(places.held_by(1)) == (1 if moves else 2)
    assert places.term == (3 if moves else 1), "it moved more than once"


def test_little_to_apply_is_not_worth_a_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clerk_load, "PAUSE_SECONDS", 1.5)
    world = make_world(total=120, durability="none")
    world.applies = lambda server, shards: 1e-5 * shards * (10 if server == 1 else 1)
    world.run()
    assert world.clerk._places.term == 1
