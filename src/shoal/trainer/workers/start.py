"""What the workers of a run start from, and how many there are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shoal.checkpoint.saving import Saving
from shoal.cluster.board import Place
from shoal.cluster.channel.channel import Channel
from shoal.cluster.supervisor.stopping import KEPT
from shoal.comm.choose import make_group
from shoal.comm.group import Group
from shoal.core.errors import ConfigError
from shoal.core.events import Notice
from shoal.core.spec import AnyCodec, Local, NoCodec
from shoal.engines.world import World
from shoal.trainer.session import Session

if TYPE_CHECKING:
    from shoal.checkpoint import Checkpoints, Loaded
    from shoal.cluster.channel.elastic import ElasticChannel
    from shoal.cluster.member.control import Control
    from shoal.trainer.workers.standing import Standing

Body = Callable[[Session], Any]

GROUP_TIMEOUT = timedelta(minutes=30)
REACH_SECONDS = 1.0
"""How long a host may take to answer before a run that may change its members goes on without it."""

MOST_WORKERS = max(1024, 16 * (os.cpu_count() or 1))
"""More than that on this machine is a mistake, and would take minutes to find out."""


@dataclass(frozen=True)
class Start:
    """What the workers of a run start from. Workers get it by fork, or make it themselves: it is never sent."""

    seed: int = 0
    deterministic: bool = False
    strict: bool = False
    collective: str = "auto"
    codec: AnyCodec = field(default_factory=NoCodec)
    run_id: str = ""
    run_dir: Path | None = None
    checkpoint_every: int | None = None
    keep: int = 3
    meta: Mapping[str, Any] = field(default_factory=dict)
    loaded: Loaded | None = None
    kept: str = KEPT
    made_before: bool = False
    """Whether model and data were made before the workers parted: then all have the same ones."""

    @property
    def logs(self) -> Path | None:
        """Where workers log what they print; None leaves it on the screen."""
        return None if self.run_dir is None else self.run_dir / "logs"

    def group(
        self,
        store: Any,
        rank: int,
        size: int,
        device: torch.device,
        *,
        host: str | None,
        channel: Channel,
        reach: float = 10.0,
        notes: bool = True,
    ) -> Group:
        """The group of all workers, once they have met."""
        return make_group(
            store,
            rank,
            size,
            device,
            timeout=GROUP_TIMEOUT,
            host=host,
            collective=self.collective,
            run=self.run_id,
            warn=lambda text: channel.emit(Notice(step=0, text=text)),
            reach=reach,
            notes=notes,
        )

    def saving(self, channel: Channel) -> Saving:
        """Where and when the worker that checkpoints does so."""
        folder = None if self.run_dir is None else self.run_dir / "checkpoints"
        if folder is None:
            return Saving(channel)

        def make() -> Checkpoints:
            # here, as elsewhere in this package: `from shoal import Trainer` must not take long
            from shoal.checkpoint import Checkpoints

            return Checkpoints(folder, keep=self.keep, warn=lambda text: channel.emit(Notice(step=0, text=text)))

        return Saving(channel, make, self.checkpoint_every, self.meta)

    def standing(
        self,
        control: Control,
        channel: ElasticChannel,
        place: Place,
        seat: int,
        *,
        device: torch.device,
        host: str,
        faults: Any | None = None,
    ) -> Standing:
        """The part of a worker in a run whose members may change."""
        # here, as elsewhere in this package: `from shoal import Trainer` must not take long
        from shoal.trainer.workers.standing import Standing

        def make_group(store: Any, rank: int, size: int) -> Group:
            # no notes: the coordinator, who keeps the store, watches the members itself
            return self.group(store, rank, size, device, host=host, channel=channel, reach=REACH_SECONDS, notes=False)

        return Standing(control, channel, place, seat, make_group, faults)

    def session(
        self,
        group: Group,
        channel: Channel,
        device: torch.device,
        *,
        workers: int,
        standing: Standing | None = None,
    ) -> Session:
        """The session of one of so many workers. With `standing` it meets the others once that begins."""
        saving = self.saving(channel)
        saving.take_on(standing is None and group.rank == 0)
        return Session(
            group,
            channel,
            device=device,
            seed=self.seed,
            deterministic=self.deterministic,
            strict=self.strict,
            codec=self.codec,
            saving=saving,
            loaded=self.loaded,
            spare_cores=max(0.0, len(os.sched_getaffinity(0)) - workers) / workers,
            starts_equal=self.made_before or workers == 1,
            run_id=self.run_id,
            run_dir=None if self.run_dir is None else str(self.run_dir),
            standing=standing,
        )


def check_workers(workers: object) -> int:
    if isinstance(workers, bool) or not isinstance(workers, int):
        raise ConfigError(f"workers={workers!r} is of type {type(workers).__name__}; use a whole number of at least 1")
    if not 1 <= workers <= MOST_WORKERS:
        raise ConfigError(
            f"workers={workers} is outside 1…{MOST_WORKERS}; use about as many as there are cores ({os.cpu_count()})"
        )
    return workers


def default_workers(engine: Local) -> int:
    """As many workers as the launcher has started, or as this process may use GPUs or else cores."""
    world = World.detect(os.environ)
    if world is not None:
        return world.size
    gpus = torch.cuda.device_count() if is_spmd(engine) else 0
    return gpus or len(os.sched_getaffinity(0))


def is_spmd(engine: Local) -> bool:
    """Whether the script runs once per worker, so that each makes its model and its data itself."""
    return is_launched() or engine.start == "script" or (engine.start == "auto" and torch.cuda.is_available())


def is_launched() -> bool:
    """Whether a launcher has started this process as one of the workers."""
    return World.detect(os.environ) is not None


def import_for_training() -> None:
    """What the first optimizer would import, a second of it: once here, before the fork, instead of in every worker."""
    for module in ("torch._dynamo", "torch.distributed"):
        import_module(module)


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Within: torch takes deterministic algorithms where it has them."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if wanted:
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
