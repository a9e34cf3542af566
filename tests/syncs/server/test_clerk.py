"""The clerk of a run with servers, in a world without processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from shoal.checkpoint import Checkpoints, load_newest
from shoal.checkpoint.saving import Saving
from shoal.cluster.channel.channel import PREEMPTED, STOPPED
from shoal.cluster.elasticity import EverythingLost
from shoal.core.atoms import Course
from shoal.core.errors import NotFiniteError, WorkerError
from shoal.core.events import (
    AnyEvent,
    CheckpointSaved,
    EpochDone,
    EvalDone,
    Notice,
    RunEnded,
    RunStarted,
    StepDone,
)
from shoal.core.spec import NoCodec, Server
from shoal.data.parcel import seal
from shoal.layouts.single import Change
from shoal.syncs.recipe import Recipe
from shoal.syncs.server import messages as said
from shoal.syncs.server.clerk.clerk import LONG_SECONDS, Clerk, Facts
from shoal.syncs.server.clerk.saving import resumed
from shoal.syncs.server.cutting import cut
from shoal.syncs.server.messages import FIRST_SERVER, Lease
from shoal.syncs.server.setup import Memory, Setup
from shoal.testing.clerk_world import SimWorker, World

STEPS = 8


class Tells:
    def __init__(self, world: World) -> None:
        self._world = world

    def emit(self, event: AnyEvent) -> None:
        self._world.tell(event)

    decide = emit

    def stop_asked(self) -> str | None:
        return None

    def flush(self) -> None:
        return None


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 32), nn.Linear(32, 40))


def make_world(
    *,
    seed: int = 0,
    workers: int = 3,
    model: nn.Module | None = None,
    total: int = STEPS,
    version: int = 0,
    clip: float | None = None,
    plateau: bool = False,
    eval_every: int | None = None,
    folder: Path | None = None,
    every: int | None = None,
    resume: bool = False,
    **spec: Any,
) -> World:
    model = make_model() if model is None else model
    params: list[tuple[str, Tensor]] = list(model.named_parameters())
    layout = cut(params, shards=4)
    course = Course(50, 16)

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

    optimizer = torch.optim.SGD(list(model.named_parameters()), lr=0.5, momentum=0.9)
    loaded = None if not resume or folder is None else load_newest(folder, print)
    if loaded is not None:
        model.load_state_dict(loaded.trees["model"])
        optimizer.load_state_dict(loaded.trees["optimizer"])
        version = loaded.step
    setup = Setup(
        run="run",
        keys=cast(Any, None),
        spec=Server(**spec),
        course=course,
        total=total,
        version=version,
        cut=layout,
        params=params,
        optimizer=optimizer,
        make_schedule=schedule if plateau else None,
        schedule_state=None,
        clip=clip,
        codec=NoCodec(),
        memory={"here": Memory(layout.size, len(layout.shards), seats=4, steps=6)},
    )
    recipe = Recipe(
        loss=cast(Any, None),
        optimizer=cast(Any, None),
        schedule=None,
        data=None,
        eval_data=None if eval_every is None else [0],
        collate=None,
        data_workers=None,
        predict=None,
        metrics=[],
        batch_size=16,
        exact_steps=None,
        total_steps=total,
        steps_per_epoch=4,
        clip=clip,
        micro_batch=None,
        ema=None,
        eval_every=eval_every,
    )
    world = World(setup, seed)
    saving = None
    if folder is not None:
        saving = Saving(Tells(world), lambda: Checkpoints(folder, warn=print), every)
        saving.take_on(True)
    world.clerk = Clerk(
        setup,
        recipe,
        world,
        model=model,
        facts=Facts("id", None, workers),
        saving=saving,
        resumed=None if loaded is None else resumed(loaded, setup),
    )
    world.clerk.begin(world.now)
    for seat in range(workers):
        world.start_worker(seat)
    return world


def told(world: World, kind: type[Any]) -> list[Any]:
    return [event for event in world.events if isinstance(event, kind)]


def assert_whole(world: World, steps: int = STEPS) -> None:
    """Every step was applied once, in order, everywhere, and the model has the result."""
    assert [event.step for event in told(world, StepDone)] == list(range(1, steps + 1))
    assert world.clerk.outcome()["steps"] == steps
    for param in world.clerk.state().parameters():
        bytes_of = param.detach().contiguous().view(-1).view(torch.uint8)
        assert bytes_of.eq(steps).all()  # the servers of this world count in every byte
    for server in world.servers.values():
        assert all(shard.version == steps for shard in server.shards.values())


MODES = [
    {"mode": "bsp"},
    {"mode": "ssp", "staleness": 2},
    {"mode": "async"},
    {"mode": "bsp", "servers": 1},
    {"mode": "bsp", "durability": "none", "servers": 3},
    {"mode": "ssp", "durability": "disk"},
    {"mode": "ssp", "apply": "arrival"},
]


@pytest.mark.parametrize("spec", MODES, ids=repr)
@pytest.mark.parametrize("seed", range(3))
def test_every_step_is_applied_once(spec: dict[str, Any], seed: int) -> None:
    world = make_world(seed=seed, **spec)
    world.run()
    assert_whole(world)
    assert isinstance(world.events[0], RunStarted) and isinstance(world.events[-1], RunEnded)
    assert [event.step for event in told(world, EpochDone)] == [4, 8]
    assert sorted(world.departed) == [] and not told(world, Notice)
    steps = told(world, StepDone)
    assert all(step.loss == 1.0 and step.logs == {"log": 1.0} and step.rates == [0.5] for step in steps)
    assert [step.samples for step in steps] == [16, 16, 16, 2] * 2


def closes(spec: dict[str, Any]) -> bool:
    return spec.get("durability", "peer") != "none" and spec.get("apply") != "arrival"


@pytest.mark.parametrize("spec", MODES, ids=repr)
def test_close_only_where_it_is_needed(spec: dict[str, Any]) -> None:
    world = make_world(**spec)
    seen: list[type] = []
    world.watch = lambda seat, message: seen.append(type(message))
    world.run()
    assert (said.Close in seen) == closes(spec)


SURVIVORS = [
    {"mode": "bsp"},
    {"mode": "bsp", "servers": 1},
    {"mode": "ssp", "staleness": 2, "servers": 3},
    {"mode": "async"},
    {"mode": "ssp", "apply": "arrival"},
    {"mode": "ssp", "durability": "disk"},
    {"mode": "bsp", "durability": "disk", "servers": 1},
]


@pytest.mark.parametrize("spec", SURVIVORS, ids=repr)
@pytest.mark.parametrize("seed", range(12))
def test_deaths_at_any_moment(spec: dict[str, Any], seed: int, tmp_path: Path) -> None:
    """Servers die one at a time, the next when the last one's place is filled again; workers whenever."""
    options: dict[str, Any] = {"folder": tmp_path, "every": 3, "eval_every": 5} if seed % 2 else {}
    world = make_world(seed=seed, total=16, **options, **spec)
    deaths = 0
    for _ in range(200_000):
        if world.clerk.finished:
            break
        world.step()
        places = world.clerk._places
        safe = places.settled and not places.missing() and len(world.servers) == len(places.numbers)
        # what is kept for an evaluation or a checkpoint is not copied: then a second death may lose it
        safe = safe and all(one.keepers >= places.having() for one in world.clerk._keeping.kept.values())
        safe = safe or (not places.placed and bool(world.servers))
        if safe and deaths < 6 and world.random.random() < 0.004:
            deaths += 1
            world.kill(FIRST_SERVER + world.random.choice(sorted(world.servers)))
        if world.workers and world.random.random() < 0.003:
            seat = world.random.choice(sorted(world.workers))
            world.kill(seat)
        for seat in range(3):
            if seat not in world.workers and not world.up.get(seat) and world.random.random() < 0.02:
                world.start_worker(seat)
    assert world.clerk.finished, world.clerk._waits_for()
    assert_whole(world, 16)


@pytest.mark.parametrize(
    "kind", [said.Close, said.Apply, said.Begin, said.Placement, said.Send], ids=lambda k: k.__name__
)
@pytest.mark.parametrize("durability", ["peer", "disk"])
@pytest.mark.parametrize("seed", range(6))
def test_a_server_dies_when_it_is_told_something(kind: type, durability: str, seed: int) -> None:
    world = make_world(seed=seed, durability=durability)
    victims: list[int] = []

    def watch(seat: int, message: Any) -> None:
        if isinstance(message, kind) and not victims and seat >= FIRST_SERVER and getattr(message, "step", 3) == 3:
            victims.append(seat)

    world.watch = watch
    killed = False
    while not world.clerk.finished:
        world.step()
        if victims and not killed and world.random.random() < 0.2:
            killed = True
            world.kill(victims[0])
    assert_whole(world)


def test_load_is_even_again_after_a_death() -> None:
    world = make_world(mode="ssp", total=40)
    while world.clerk.version < 5:
        world.step()
    before = world.clerk._places.holders
    world.kill(FIRST_SERVER)
    world.run()
    assert_whole(world, 40)
    after = world.clerk._places.holders
    assert {holder.server for holder in before} == {holder.server for holder in after} == {0, 1}
    assert all(holder.mirror is not None for holder in after)
    assert "server 0 died; the servers that have copies" in told(world, Notice)[0].text


def test_a_second_death_after_copies_are_there_again() -> None:
    world = make_world(total=40)
    for number in (0, 1, 0):
        goal = world.clerk.version + 5
        while world.clerk.version < goal or world.clerk._places.missing() or len(world.servers) < 2:
            world.step()
        world.kill(FIRST_SERVER + number)
    world.run()
    assert_whole(world, 40)


def test_both_copies_lost() -> None:
    world = make_world(total=40)
    while world.clerk.version < 5:
        world.step()
    world.kill(FIRST_SERVER)
    world.kill(FIRST_SERVER + 1)
    with pytest.raises(EverythingLost, match="its copy was lost before"):
        world.run()


def test_without_copies_a_death_loses_everything() -> None:
    world = make_world(durability="none")
    while world.clerk.version < 2:
        world.step()
    world.kill(FIRST_SERVER + 1)
    with pytest.raises(EverythingLost, match="durability=none"):
        world.run()


def test_servers_that_die_at_once_every_time() -> None:
    world = make_world()
    world.watch = lambda seat, message: world.kill(seat) if isinstance(message, said.Begin) else None
    with pytest.raises(WorkerError, match="servers of the run ended 11 times"):
        world.run()


def test_all_workers_gone_and_back() -> None:
    world = make_world()
    while world.clerk.version < 3:
        world.step()
    for seat in list(world.workers):
        world.kill(seat)
    for _ in range(200):
        world.step()
    assert not world.clerk.workers
    world.start_worker(1)
    world.run()
    assert_whole(world)


def test_departing_after_the_lease() -> None:
    world = make_world(mode="ssp")
    while world.clerk.version < 2:
        world.step()
    world.clerk.depart(1, world.now)
    world.run()
    assert 1 in world.departed and 1 not in world.clerk.workers
    assert_whole(world)


@pytest.mark.parametrize("reason", [STOPPED, PREEMPTED])
@pytest.mark.parametrize("spec", MODES, ids=repr)
def test_stop(reason: str, spec: dict[str, Any], tmp_path: Path) -> None:
    world = make_world(folder=tmp_path, eval_every=1, **spec)

    def heard(event: AnyEvent) -> None:
        if isinstance(event, StepDone) and event.step == 3:
            world.clerk.stop(reason)

    world.heard = heard
    world.run()
    assert_whole(world, 4)
    assert world.clerk.outcome()["stopping"] == world.events[-1].reason == reason  # type: ignore[union-attr]
    assert [event.step for event in told(world, EvalDone)] == [1, 2, 3, 4][: 4 if reason == STOPPED else 3]
    loaded = load_newest(tmp_path, print)
    assert loaded is not None and loaded.step == 4


def test_stop_at_any_moment(tmp_path: Path) -> None:
    for seed in range(30):
        folder = tmp_path / str(seed)
        world = make_world(folder=folder, seed=seed, mode="ssp", durability="none" if seed % 2 else "peer")
        for _ in range(seed * 12):
            world.step()
        if world.clerk.finished:
            continue
        before = world.clerk.version
        world.clerk.stop(STOPPED)
        world.run()
        assert before <= world.clerk.version <= min(STEPS, before + 2)
        assert_whole(world, world.clerk.version)


@pytest.mark.parametrize("seed", range(5))
def test_evaluation_goes_on_when_the_evaluator_dies(seed: int, tmp_path: Path) -> None:
    world = make_world(seed=seed, eval_every=3, folder=tmp_path, mode="ssp")
    world.metric = lambda version: {3: 2.0, 6: 1.0, 8: 3.0}[version]
    killed: list[int] = []

    def watch(seat: int, message: Any) -> None:
        if isinstance(message, said.Evaluate) and len(killed) < 2:
            killed.append(seat)

    world.watch = watch
    while not world.clerk.finished:
        world.step()
        for seat in killed:
            if seat in world.workers and world.workers[seat].evaluates is not None:
                world.kill(seat)
        for seat in range(3):
            if seat not in world.workers and not world.up.get(seat):
                world.start_worker(seat)
    assert_whole(world)
    assert len(killed) == 2
    assert [(event.step, event.metrics["loss"]) for event in told(world, EvalDone)] == [(3, 2.0), (6, 1.0), (8, 3.0)]
    best = [event.step for event in told(world, CheckpointSaved) if event.best]
    assert best == [3, 6]
    assert world.clerk.outcome()["metrics"] == {"loss": 3.0}


def test_a_schedule_that_goes_by_evaluations(tmp_path: Path) -> None:
    world = make_world(plateau=True, eval_every=2, folder=tmp_path, every=2, mode="async")
    world.metric = lambda version: 1.0
    world.run()
    assert {step: order.metric for step, order in world.orders.items()} == {
        step: 1.0 if step in (2, 4, 6) else None for step in range(STEPS)
    }
    assert all(order.loss != order.loss for order in world.orders.values())
    loaded = load_newest(tmp_path, print)
    assert loaded is not None and loaded.step == 8
    # the servers of this world make a new schedule each time: only the last evaluation has been told to this one
    assert loaded.trees["schedule"]["best"] == 1.0 and loaded.trees["schedule"]["last_epoch"] == 1


def test_a_schedule_that_goes_by_the_loss() -> None:
    world = make_world(plateau=True)
    world.run()
    assert all(order.loss == 1.0 and order.metric is None for order in world.orders.values())


def test_clipping() -> None:
    world = make_world(clip=0.5, durability="none")
    world.run()
    norm = len(world.setup.cut.shards) ** 0.5
    assert [step.norm for step in told(world, StepDone)] == pytest.approx([norm] * STEPS)
    assert [order.scale for order in world.orders.values()] == pytest.approx([0.5 / (norm + 1e-6)] * STEPS)


def test_a_loss_that_is_not_finite() -> None:
    world = make_world()
    world.loss = lambda lease: float("nan") if lease.step == 2 and lease.start == 0 else 1.0
    with pytest.raises(NotFiniteError, match=r"the loss is nan in step 3 on worker \d \(positions 32–") as caught:
        world.run()
    assert caught.value.step == 2 and caught.value.positions is not None


def test_a_gradient_that_is_not_finite() -> None:
    world = make_world()
    said_closed = World._to_clerk

    def broken(self: World, seat: int) -> None:
        message, buffers = self.up[seat][0]
        if isinstance(message, said.Closed):
            self.up[seat][0] = said.Closed(message.step, float("inf")), buffers
        said_closed(self, seat)

    world._to_clerk = broken.__get__(world)  # type: ignore[method-assign]
    with pytest.raises(NotFiniteError, match="the loss is 1, but the norm of its gradient is inf in step 1"):
        world.run()


def test_checkpoints_are_those_of_other_syncs(tmp_path: Path) -> None:
    world = make_world(folder=tmp_path, every=3, total=7, plateau=True)
    world.run()
    assert [event.step for event in told(world, CheckpointSaved)] == [3, 6, 7]
    loaded = load_newest(tmp_path, print)
    assert loaded is not None
    assert set(loaded.trees) == {"model", "optimizer", "schedule", "record", "session"}
    assert loaded.trees["session"] == {
        "loop": 0,
        "step": 7,
        "seed": 0,
        "size": 50,
        "batch": 16,
        "logs": ["log"],
        "buffers": [],
        "counts": {},
        "epoch": [48.0, 48.0],
    }
    assert loaded.trees["record"] == {"metrics": {}, "best": None, "bests": [], "evaluated": 0, "planned": 7}
    model = make_model()
    model.load_state_dict(loaded.trees["model"])
    torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9).load_state_dict(loaded.trees["optimizer"])
    again = make_world(folder=tmp_path, total=9, resume=True, plateau=True)
    again.run()
    assert [event.step for event in told(again, StepDone)] == [8, 9]
    assert not told(again, Notice), "a plateau does not depend on the number of steps"


def test_time_for_a_checkpoint_comes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.checkpoint.saving.CHECKPOINT_SECONDS", -1.0)
    world = make_world(folder=tmp_path, mode="async", total=30)
    while not world.clerk.finished:
        world.step()
        under_way = [one.version for one in world.clerk._keeping.kept.values() if one.save]
        assert len(under_way) <= 1 or max(under_way) == 30
    assert_whole(world, 30)


def test_nothing_is_closed_before_servers_follow_the_placement() -> None:
    """Else what they said of a step under an earlier placement could be taken for an answer."""
    world = make_world(servers=3, total=20)
    while world.clerk.version < 3:
        world.step()
    places = world.clerk._places
    before = places.term
    world.kill(FIRST_SERVER)
    while places.term == before:
        world.step()
    term = places.term
    assert not places.settled
    for number in (1, 2):
        shards = dict.fromkeys(places.held_by(number), world.clerk.version)
        assert not places.holds(number, said.Holds(term - 1, shards, {}), world.clerk.version)
        assert not places.settled
    for number in (1, 2):
        places.holds(number, said.Holds(term, {}, {}), world.clerk.version)
    assert places.settled


def test_nothing_left_to_train(tmp_path: Path) -> None:
    make_world(folder=tmp_path).run()
    again = make_world(folder=tmp_path, resume=True)
    assert again.clerk.finished
    assert [type(event) for event in again.events] == [Notice, RunStarted, RunEnded]


@pytest.mark.parametrize("mode", ["bsp", "async"])
def test_buffers_are_means_over_samples(mode: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(40, 32), nn.BatchNorm1d(32))
    world = make_world(model=model, mode=mode, folder=tmp_path)
    starts: set[tuple[int, float]] = set()

    def made(worker: SimWorker, samples: int) -> list[Any]:
        assert worker.work is None
        mean = worker.buffers[0] if worker.buffers else torch.zeros(32)
        starts.add((worker.read or 0, float(mean[0])))
        changes = [
            Change(0, 0, samples, 2, (mean + 1.0).flatten() * samples),
            Change(2, 0, samples, 2, torch.tensor([1.0 * samples])),
        ]
        header, buffers = seal([changes, []])
        return [header, *[bytearray(each) for each in buffers]]

    world.made = made
    world.run()
    assert int(model[1].num_batches_tracked) == STEPS  # type: ignore[arg-type]
    if mode == "bsp":
        assert starts == {(step, float(step)) for step in range(STEPS)}
        assert model[1].running_mean.tolist() == [8.0] * 32  # type: ignore[union-attr, operator]
    loaded = load_newest(tmp_path, print)
    assert loaded is not None and loaded.trees["session"]["buffers"] == [0, 2]
    assert torch.equal(loaded.trees["model"]["1.running_mean"], model[1].running_mean)  # type: ignore[arg-type]


def test_staleness_is_bounded() -> None:
    world = make_world(mode="ssp", staleness=2, total=30)
    reads: list[int] = []
    hear = world.clerk.hear

    def listening(seat: int, message: Any, buffers: Any, now: float) -> None:
        if isinstance(message, said.Done):
            reads.append(message.lease.step - message.read)
        hear(seat, message, buffers, now)

    world.clerk.hear = listening  # type: ignore[method-assign]
    world.run()
    assert max(reads) <= 2


def test_long_waits_are_told_once() -> None:
    world = make_world()
    while world.clerk.version < 2:
        world.step()
    for seat in list(world.workers):
        world.kill(seat)
    for _ in range(300):
        world.step()
    for _ in range(3):
        world.now += LONG_SECONDS + 1
        world.clerk.tick(world.now)
    notices = [event.text for event in told(world, Notice)]
    assert notices == ["nothing has moved for 30 s: there is no worker"]


def test_complaints() -> None:
    world = make_world()
    world.clerk.hear(FIRST_SERVER, said.Complaint("the disk is slow"), (), world.now)
    assert told(world, Notice)[0].text == "the disk is slow"
    with pytest.raises(WorkerError, match="the books differ"):
        world.clerk.hear(FIRST_SERVER, said.Complaint("the books differ", fatal=True), (), world.now)


def test_a_lease_of_a_step_that_is_not_there() -> None:
    world = make_world()
    while world.clerk.version < 2:
        world.step()
    done = said.Done(Lease(99, 0, 1), 0, 0.1, 1.0, 1.0)
    world.clerk.hear(0, done, (), world.now)  # it has no such lease: nothing happens
    world.run()
    assert_whole(world)
