"""Where a launcher runs the script once per worker."""

from __future__ import annotations

import os
import time
from contextlib import closing, suppress
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from shoal.cluster.channel.channel import DirectChannel, StopSignals
from shoal.cluster.supervisor.watch import Watcher
from shoal.core.errors import CheckpointError, ConfigError, GroupError
from shoal.core.events import Notice
from shoal.engines.heap import keep_freed_memory
from shoal.engines.world import LOOPBACK, World
from shoal.trainer.session import Session
from shoal.trainer.workers.describing import explain
from shoal.trainer.workers.start import Body, Start, deterministic_algorithms

if TYPE_CHECKING:
    from shoal.checkpoint import Loaded

_MEETING_TIMEOUT = timedelta(minutes=5)
_FAREWELL_TIMEOUT = timedelta(seconds=10)
_POLL_SECONDS = 0.2

_runs = 0
"""Runs so far in this process: each meets under a name of its own. All workers of a script count alike."""


def run_here(body: Body, start: Start, workers: int, watch: Watcher, signals: StopSignals | None) -> list[Any]:
    """`body(session)` on this process, which is one of the workers; what each of them returned."""
    global _runs
    world = World.detect(os.environ)
    assert world is not None
    _runs += 1
    device = _device(world)
    threads = torch.get_num_threads()
    channel = DirectChannel(watch if world.rank == 0 else None, signals)
    if workers != world.size:
        channel.emit(
            Notice(step=0, text=f"workers={workers}, but {world.launcher} has started {world.size}: using these")
        )
    if device.type == "cpu":
        torch.set_num_threads(1)
        keep_freed_memory()
    else:
        torch.cuda.set_device(device)
    try:
        store = _meet(world, _runs)
        host = LOOPBACK if world.address in ("localhost", LOOPBACK, "::1") else None
        group = start.group(store, world.rank, world.size, device, host=host, channel=channel)
        try:
            session = start.session(group, channel, device, workers=world.size)
            _refuse_other_checkpoints(session, start.loaded)
            with deterministic_algorithms(start.deterministic), closing(session):
                try:
                    value = body(session)
                except Exception as error:
                    explain(error, session)
                    raise
                session.finish_saving()
                values = session.gather_for("the end of the run", value)
            _farewell(store, world)
            return values
        finally:
            group.close()
    finally:
        torch.set_num_threads(threads)


def _device(world: World) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if world.local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"worker {world.rank} has no GPU: it is number {world.local_rank + 1} on its machine, which has "
            f"{torch.cuda.device_count()}; use as many workers as there are GPUs, or set CUDA_VISIBLE_DEVICES= to "
            "nothing to train on CPU"
        )
    return torch.device("cuda", world.local_rank)


def _refuse_other_checkpoints(session: Session, loaded: Loaded | None) -> None:
    """Each worker has read the checkpoint itself; one that sees other files would train something else."""
    found = session.gather_for("the start of the run", None if loaded is None else str(loaded.path.name))
    if any(name != found[0] for name in found):
        said = ", ".join(f"worker {rank}: {name or 'none'}" for rank, name in enumerate(found))
        raise CheckpointError(
            f"the workers found different checkpoints to resume from ({said}); give run_dir= a folder that all share"
        )


_store: Any = None


def _meet(world: World, number: int) -> Any:
    """The store of this run, once all workers are there. torchrun serves one itself; else worker 0 does."""
    global _store
    distributed: Any = import_module("torch.distributed")
    failed = ""
    try:
        if _store is None:
            _store = distributed.TCPStore(
                world.address,
                world.port,
                world.size,
                is_master=world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
                timeout=_MEETING_TIMEOUT,
                wait_for_workers=False,
            )
        prefix = f"shoal/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{number}"
        store = distributed.PrefixStore(prefix, _store)
        if _all_said(store, "here", world, _MEETING_TIMEOUT):
            return store
        absent = [str(rank) for rank in range(world.size) if not store.check([f"here/{rank}"])]
        failed = f"workers {', '.join(absent)} did not come"
    except (RuntimeError, ValueError) as error:
        failed = str(error).splitlines()[0]
    raise GroupError(
        f"worker {world.rank} of {world.size} could not meet the others at {world.address}:{world.port} "
        f"({failed}); check MASTER_ADDR and MASTER_PORT, and that all {world.size} workers were started"
    )


def _all_said(store: Any, word: str, world: World, timeout: timedelta) -> bool:
    """Say a word, and wait until all workers have said it. RuntimeError if the store is gone."""
    store.set(f"{word}/{world.rank}", b"")
    store.add(word, 1)
    deadline, pause = time.monotonic() + timeout.total_seconds(), 0.001
    # not by store.wait: torch would print a warning each time that it comes back without success
    while store.add(word, 0) < world.size:
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _POLL_SECONDS)
    return True


def _farewell(store: Any, world: World) -> None:
    """Nobody leaves while another may still be in the last operation. Who serves the store may be gone first."""
    with suppress(RuntimeError):
        _all_said(store, "done", world, _FAREWELL_TIMEOUT)
