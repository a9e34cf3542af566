"""What a run with servers knows of itself between steps, its evaluations, and its checkpoints.

Servers keep the weights (and the optimizer's state) of single versions; the rest of a checkpoint is taken down here at
the same version (`Snapshot`). Both are put together when the servers' parts have come. A checkpoint has the format that
it has where workers exchange gradients, so that a run can be resumed with another sync.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.checkpoint.replan import new_length
from shoal.core.progress import Progress
from shoal.data.parcel import seal
from shoal.layouts.restore import refuse_other_course, restore, session_tree
from shoal.layouts.single import Buffers, Change
from shoal.layouts.soundness import refuse_not_finite
from shoal.syncs.applying import Applier
from shoal.syncs.recipe import Recipe, Record
from shoal.syncs.server.embeddings import load_tables
from shoal.syncs.server.optimizers import join

if TYPE_CHECKING:
    from shoal.checkpoint import Loaded
    from shoal.checkpoint.saving import Saving
    from shoal.syncs.server.setup import Setup


class Resumed(NamedTuple):
    """Where a run goes on: what its checkpoint says besides weights, optimizer and schedule."""

    record: Record
    session: Mapping[str, Any]
    """See `session_tree`. The values of buffers are in the model."""


def resumed(loaded: Loaded, setup: Setup) -> Resumed:
    """Read it. Raises `CheckpointMismatch` if the checkpoint is of another course through the data."""
    refuse_other_course(loaded.trees["session"], setup.course, setup.seed)
    record = Record()
    restore("record", record, loaded)
    return Resumed(record, loaded.trees["session"])


@dataclass
class Snapshot:
    """A version that servers keep, and what belongs to it."""

    version: int
    session: dict[str, Any]
    """See `session_tree`."""
    buffers: dict[str, Tensor]
    """Those that change, by name."""
    values: dict[int, Tensor]
    """The same by number, for workers."""
    save: bool
    """Whether it is to be checkpointed in any case."""
    evaluate: bool
    """Whether its evaluation is not done yet."""
    evaluating: bool = False
    """Whether a worker is at it."""
    best: bool = False
    metric: float | None = None
    """Of its evaluation, for a schedule that goes by these."""
    sent_for: bool = False
    keepers: set[int] = field(default_factory=set)
    """Servers that keep it."""
    parts: dict[int, dict[str, Any]] = field(default_factory=dict)
    """What has come, by shard."""


class Story:
    """What the loop of a run remembers: losses, buffers, evaluations. All of it is in every checkpoint."""

    def __init__(self, setup: Setup, recipe: Recipe, model: nn.Module, start: Resumed | None) -> None:
        self._setup, self._model = setup, model
        self.record = Record() if start is None else start.record
        self.progress = Progress() if start is None else Progress(start.session["logs"], start.session["epoch"])
        self.buffers = Buffers([model])
        self.buffers.use(recipe.buffers)
        if start is not None:
            self.buffers.resume(start.session["buffers"], start.session.get("counts"))
        self._parcel: tuple[bytes | memoryview, ...] | None = None
        self.steps_on_eval = recipe.eval_data is not None and _goes_by_loss(setup)
        """Whether the schedule is one that is stepped on the loss of evaluations."""

    def learn(self, samples: int, buffers: Sequence[Change]) -> None:
        """A step was applied. `buffers` is what its forwards made of them, in order of positions."""
        if buffers:
            self.buffers.open(samples)
            self.buffers.learn(buffers)
            self._parcel = None

    def values(self) -> dict[int, Tensor]:
        """The buffers that change, by number."""
        return {number: self.buffers._value(number) for number in self.buffers.known}

    def parcel(self) -> tuple[bytes | memoryview, ...]:
        """The buffers of a frame for a worker: nothing, if the model has no buffers that change."""
        if self._parcel is None:
            self._parcel = parcel({number: value.clone() for number, value in self.values().items()})
        return self._parcel

    def snapshot(self, version: int, *, save: bool, evaluate: bool) -> Snapshot:
        values = {number: value.detach().clone() for number, value in self.values().items()}
        numbers = {id(self.buffers._value(number)): number for number in values}
        named = self._model.named_buffers(remove_duplicate=False)
        names = {name: values[numbers[id(buffer)]] for name, buffer in named if id(buffer) in numbers}
        session = session_tree(version, self._setup.course, self._setup.seed, self.progress, self.buffers)
        return Snapshot(version, session, names, values, save, evaluate)

    # -- evaluations ---------------------------------------------------------------------------------------------------

    def evaluated(self, snapshot: Snapshot, metrics: dict[str, float]) -> None:
        snapshot.evaluate = snapshot.evaluating = False
        snapshot.best = self.record.take(snapshot.version, metrics)
        if self.steps_on_eval:
            snapshot.metric = metrics["loss"]


class Keeping:
    """The versions that servers keep for the clerk, and what becomes of them."""

    def __init__(self, setup: Setup, model: nn.Module, story: Story, saving: Saving | None) -> None:
        self._setup, self._model, self._story, self._saving = setup, model, story, saving
        named = dict(model.named_parameters())
        own = {id(param): param for param in named.values()}
        self._params = [own.get(id(tensor), named.get(name)) for name, tensor in setup.params]
        self.kept: dict[int, Snapshot] = {}

    @property
    def saves(self) -> bool:
        return self._saving is not None and self._saving.mine

    def wish(self) -> tuple[int | None, bool]:
        """Every how many steps to checkpoint, and whether now; not for the time that has passed, if one for that is
        under way."""
        if self._saving is None or not self.saves:
            return None, False
        return self._saving.every, self._saving.late and not any(one.save for one in self.kept.values())

    def evaluating(self) -> Snapshot | None:
        """The version that is to be evaluated."""
        return next((one for one in self.kept.values() if one.evaluate), None)

    def ready(self) -> Snapshot | None:
        """The lowest version whose servers' parts are to be sent for, if there is none before it to be waited for."""
        first = min(self.kept.values(), key=lambda one: one.version, default=None)
        return None if first is None or first.evaluate or first.sent_for else first

    def take(self, version: int, parts: Mapping[int, dict[str, Any]]) -> Snapshot | None:
        """Parts of some shards have come; the snapshot if these were the last."""
        snapshot = self.kept.get(version)
        if snapshot is None:
            return None
        for shard, part in parts.items():
            if not 0 <= shard < len(self._setup.cut.shards):
                raise ValueError(f"a server has sent shard {shard}; there are {len(self._setup.cut.shards)}")
            snapshot.parts.setdefault(shard, part)
        return snapshot if len(snapshot.parts) == len(self._setup.cut.shards) else None

    @torch.no_grad()
    def load(self, snapshot: Snapshot) -> None:
        """Give the model these weights. A checkpoint that is being written from it has them first."""
        if self._saving is not None:
            self._saving.wait_copied()
        cut = self._setup.cut
        area = torch.empty(cut.size, dtype=torch.uint8)
        for shard in (shard for shard in cut.shards if shard.size):
            area[shard.start : shard.stop].copy_(snapshot.parts[shard.number]["weights"])
        for number, param in enumerate(self._params):
            if param is None:
                raise ValueError(f"the model has no parameter {cut.names[number]!r}")
            param.copy_(cut.view(area, number))
        load_tables(self._model, self._setup, snapshot.parts)

    def save(self, snapshot: Snapshot) -> None:
        """Begin to checkpoint a version whose weights are in the model."""
        assert self._saving is not None
        refuse_not_finite(list(self._model.named_parameters()), snapshot.version)
        self._saving.begin(
            snapshot.version,
            self.trees(snapshot),
            # those that do not change were written with the model; these here are copies of their own
            volatile=[buffer for buffer in self._model.buffers()],
            best=snapshot.best,
        )

    def trees(self, snapshot: Snapshot) -> dict[str, Any]:
        """All that a checkpoint of this version holds. The weights are those of the model."""
        setup = self._setup
        model = self._model.state_dict()
        model.update({name: value for name, value in snapshot.buffers.items() if name in model})
        first = snapshot.parts[0]
        optimizer = join(setup, {shard: part["optimizer"] for shard, part in snapshot.parts.items()})
        trees: dict[str, Any] = {"model": model, "optimizer": optimizer}
        if setup.make_schedule is not None:
            trees["schedule"] = first["schedule"]
            if snapshot.metric is not None:
                trees["schedule"] = _stepped(setup, optimizer, first["schedule"], snapshot.metric)
        trees["record"] = copy.deepcopy(self._story.record.state_dict())
        trees["session"] = snapshot.session
        return trees


def parcel(values: Mapping[int, Tensor]) -> tuple[bytes | memoryview, ...]:
    """The buffers of a frame: none for no values."""
    if not values:
        return ()
    header, buffers = seal(dict(values))
    return header, *buffers


def replanned(setup: Setup, planned: int | None) -> str | None:
    """What to say of the schedule, if the run that resumes it has another length than was planned."""
    if setup.make_schedule is None or setup.schedule_state is None or planned in (None, setup.total):
        return None
    schedule = setup.make_schedule(_stand_in(setup.optimizer.state_dict()["param_groups"]))
    return new_length(schedule, schedule.state_dict(), setup.schedule_state, planned, setup.total)


def _goes_by_loss(setup: Setup) -> bool:
    stand_in = _stand_in(setup.optimizer.state_dict()["param_groups"])
    return setup.make_schedule is not None and Applier(stand_in, setup.make_schedule(stand_in)).by_loss


def _stand_in(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer with the options of these groups and next to no parameters, to make a schedule for."""
    options = [{key: value for key, value in group.items() if key not in ("params", "param_names")} for group in groups]
    return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], **each} for each in options], lr=0.0)


def _stepped(setup: Setup, optimizer: dict[str, Any], state: dict[str, Any], metric: float) -> dict[str, Any]:
    """A schedule after this evaluation, of which servers hear with their next step. Changes `optimizer`'s rates."""
    assert setup.make_schedule is not None
    stand_in = _stand_in(optimizer["param_groups"])
    schedule = setup.make_schedule(stand_in)
    schedule.load_state_dict(copy.deepcopy(state))
    for group, told in zip(stand_in.param_groups, optimizer["param_groups"], strict=True):
        group["lr"] = told["lr"]
    schedule.step(metric)
    for group, told in zip(stand_in.param_groups, optimizer["param_groups"], strict=True):
        told["lr"] = group["lr"]
    return dict(schedule.state_dict())
