"""Running a function on every worker, here or where a launcher has put this process, and getting its values back."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shoal.comm.group import make_group
from shoal.core import errors
from shoal.core.errors import CheckpointError, ConfigError, GroupError, RemoteTraceback, ShoalError, WorkerError
from shoal.core.events import AnyEvent, Notice, Stop
from shoal.core.spec import Local
from shoal.data.parcel import seal, unseal
from shoal.engines.local import Crew, Ended, LocalEngine, Message
from shoal.engines.script import ended, run_script_on, take_listener
from shoal.engines.world import World
from shoal.trainer.channel import (
    INTERRUPTED,
    PREEMPTED,
    STOPPED,
    Channel,
    DirectChannel,
    LinkChannel,
    StopSignals,
    leave_sigterm_to_the_supervisor,
)
from shoal.trainer.messages import Decided, Failed, Happened, Returned, StopAsked, decode_up, encode
from shoal.trainer.session import Saving, Session
from shoal.wire.link import Link, LinkClosed

if TYPE_CHECKING:
    from shoal.checkpoint import Loaded

Listen = Callable[[AnyEvent], Stop | None]

_TIMEOUT = timedelta(minutes=30)
_MEETING_TIMEOUT = timedelta(minutes=5)
_FAREWELL_TIMEOUT = timedelta(seconds=10)
_LOOPBACK = "127.0.0.1"
_POLL_SECONDS = 0.2
_ROOT_CAUSE_SECONDS = 2.0
"""How long to wait for the worker whose end broke the others' group."""

_MOST_TEXT = 200_000
"""Characters of a message or a traceback."""
_SIGNAL_NOTICE = {
    PREEMPTED: "SIGTERM: stopping after the step in progress, with a checkpoint",
    INTERRUPTED: "Ctrl-C: stopping after the step in progress, with a checkpoint; press it again to end at once",
}

MOST_WORKERS = max(64, 16 * (os.cpu_count() or 1))
"""More than that on this machine is a mistake, and would take minutes to find out."""


@dataclass(frozen=True)
class Start:
    """What the workers of a run start from. Workers get it by fork, or make it themselves: it is never sent."""

    seed: int = 0
    deterministic: bool = False
    run_id: str = ""
    run_dir: Path | None = None
    checkpoint_every: int | None = None
    keep: int = 3
    meta: Mapping[str, Any] = field(default_factory=dict)
    loaded: Loaded | None = None

    def session(self, group: Any, channel: Channel, device: torch.device, *, starts_equal: bool) -> Session:
        checkpoints = None
        if self.run_dir is not None and group.rank == 0:
            # here, as elsewhere in this package: `from shoal import Trainer` must not take long
            from shoal.checkpoint import Checkpoints

            checkpoints = Checkpoints(
                self.run_dir / "checkpoints",
                keep=self.keep,
                warn=lambda text: channel.emit(Notice(step=0, text=text)),
            )
        return Session(
            group,
            channel,
            device=device,
            seed=self.seed,
            deterministic=self.deterministic,
            saving=Saving(checkpoints, self.checkpoint_every, self.meta),
            loaded=self.loaded,
            spare_cores=max(0.0, len(os.sched_getaffinity(0)) - group.size) / group.size,
            starts_equal=starts_equal,
            run_id=self.run_id,
            run_dir=None if self.run_dir is None else str(self.run_dir),
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
    """Whether the script runs once per worker, so that this process is a worker itself."""
    return (
        World.detect(os.environ) is not None
        or engine.start == "script"
        or (engine.start == "auto" and torch.cuda.is_available())
    )


def is_main_process() -> bool:
    """False on the workers other than worker 0 of a script that runs once per worker."""
    world = World.detect(os.environ)
    return world is None or world.rank == 0


def run(
    body: Callable[[Session], Any],
    start: Start,
    *,
    workers: int,
    engine: Local,
    listen: Listen,
    signals: StopSignals | None = None,
) -> list[Any]:
    """`body(session)` on every worker; what each returned, in order of rank.

    What `signals` ask for reaches the loop of the session; without them a signal does what it does anywhere.
    """
    if is_spmd(engine):
        return _run_here(body, start, workers, listen, signals)
    return _run_forked(body, start, workers, listen, signals)


# -- the script runs once per worker -----------------------------------------------------------------------------------

_runs = 0
"""Runs so far in this process: each meets under a name of its own. All workers of a script count alike."""


def _run_here(
    body: Callable[[Session], Any], start: Start, workers: int, listen: Listen, signals: StopSignals | None
) -> list[Any]:
    global _runs
    world = World.detect(os.environ) or run_script_on(workers)
    _runs += 1
    device = _device(world)
    threads = torch.get_num_threads()
    channel = DirectChannel(listen if world.rank == 0 else None, signals)
    if workers != world.size:
        channel.emit(
            Notice(step=0, text=f"workers={workers}, but {world.launcher} has started {world.size}: using these")
        )
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    try:
        store = _meet(world, _runs)
        host = _LOOPBACK if world.address in ("localhost", _LOOPBACK, "::1") else None
        group = make_group(store, world.rank, world.size, device, timeout=_TIMEOUT, host=host)
        try:
            session = start.session(group, channel, device, starts_equal=world.size == 1)
            _refuse_other_checkpoints(session, start.loaded)
            with _deterministic(start.deterministic), closing(session):
                value = body(session)
                session.finish_saving()
                values = session.gather(value)
            _farewell(store, world)
            return values
        finally:
            group.close()
    except GroupError as error:
        for end in ended(_ROOT_CAUSE_SECONDS):
            error.add_note(f"{end}; what it said is printed above")
        raise
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Within: torch takes deterministic algorithms where it has them."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if wanted:
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


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
    found = session.gather(None if loaded is None else str(loaded.path.name))
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
                master_listen_fd=take_listener(),
            )
        prefix = f"shoal/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{number}"
        store = distributed.PrefixStore(prefix, _store)
        if _all_said(store, "here", world, _MEETING_TIMEOUT, until=lambda: ended(well=True)):
            return store
        absent = [str(rank) for rank in range(world.size) if not store.check([f"here/{rank}"])]
        failed = f"workers {', '.join(absent)} did not come"
    except (RuntimeError, ValueError) as error:
        failed = str(error).splitlines()[0]
    raise GroupError(
        f"worker {world.rank} of {world.size} could not meet the others at {world.address}:{world.port} "
        f"({failed}); check MASTER_ADDR and MASTER_PORT, and that all {world.size} workers were started"
    )


def _all_said(store: Any, word: str, world: World, timeout: timedelta, *, until: Callable[[], Any]) -> bool:
    """Say a word, and wait until all workers have said it, or `until` holds. RuntimeError if the store is gone."""
    store.set(f"{word}/{world.rank}", b"")
    store.add(word, 1)
    deadline, pause = time.monotonic() + timeout.total_seconds(), 0.001
    # not by store.wait: torch would print a warning each time that it comes back without success
    while store.add(word, 0) < world.size:
        if time.monotonic() > deadline or until():
            return False
        time.sleep(pause)
        pause = min(2 * pause, _POLL_SECONDS)
    return True


def _farewell(store: Any, world: World) -> None:
    """Nobody leaves while another may still be in the last operation. Who serves the store may be gone first."""
    with suppress(RuntimeError):
        _all_said(store, "done", world, _FAREWELL_TIMEOUT, until=ended)


# -- workers forked from this process ----------------------------------------------------------------------------------


def _run_forked(
    body: Callable[[Session], Any], start: Start, workers: int, listen: Listen, signals: StopSignals | None
) -> list[Any]:
    def main(rank: int, link: Link, scratch: Path) -> None:
        _worker(rank, workers, link, scratch, body, start)

    with LocalEngine().start(workers, main, warm=leave_sigterm_to_the_supervisor) as crew:
        return _Supervisor(crew, listen, signals).watch()


def import_for_training() -> None:
    """What the first optimizer would import, a second of it: once here, before the fork, instead of in every worker."""
    for module in ("torch._dynamo", "torch.distributed"):
        import_module(module)


def _worker(rank: int, workers: int, link: Link, scratch: Path, body: Callable[[Session], Any], start: Start) -> None:
    leave_sigterm_to_the_supervisor()
    torch.set_num_threads(1)
    channel = LinkChannel(link, speaks=rank == 0)
    session: Session | None = None
    failed: Failed | None = None
    try:
        distributed: Any = import_module("torch.distributed")
        store = distributed.FileStore(str(scratch / "store"), workers)
        group = make_group(store, rank, workers, torch.device("cpu"), timeout=_TIMEOUT, host=_LOOPBACK)
        session = start.session(group, channel, torch.device("cpu"), starts_equal=True)
        with _deterministic(start.deterministic):
            value = body(session)
            session.finish_saving()
        channel.flush()
        _flush_output()
        parcel, buffers = seal(value)
        link.send(encode(Returned()), [parcel, *buffers])
    except LinkClosed:
        os._exit(1)
    except BaseException as error:
        failed = _failure(error, session)
    # outside the except block: see comm.group
    if failed is not None:
        _flush_output()
        with suppress(LinkClosed):
            if session is not None:
                session.close()
            channel.flush()
            link.send(encode(failed))
    # Peers may still be in their last operation; the supervisor ends this process when all are done.
    with suppress(LinkClosed):
        while True:
            link.recv()


def _flush_output() -> None:
    """What user code printed: the process will be killed, not left to end by itself."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _failure(error: BaseException, session: Session | None) -> Failed:
    where, step, positions = _where(session)
    if isinstance(error, WorkerError) and error.step is not None:
        step, positions = error.step, error.positions
    name = type(error).__name__
    if getattr(errors, name, type(error)) is not type(error):
        # a user's own class that is called like one of ours
        name = f"{type(error).__module__}.{type(error).__qualname__}"
    return Failed(
        kind=name,
        message=_text(lambda: str(error)),
        traceback=_text(lambda: "".join(traceback.format_exception(error)).rstrip()),
        where=where,
        step=step,
        positions=positions,
        culprit=error.worker if isinstance(error, WorkerError) else None,
        secondary=isinstance(error, GroupError),
    )


def _where(session: Session | None) -> tuple[str, int | None, tuple[int, int] | None]:
    """Where a worker is: in words, its step, and the positions of the global batch."""
    if session is None or session.where is None:
        return "", None, None
    if session.evaluating:
        return f" in the evaluation after step {session.step}", session.step, None
    at = session.where
    positions = at.start, at.stop - 1
    return f" at step {at.step} (positions {positions[0]}–{positions[1]} of its epoch)", at.step, positions


def _text(make: Callable[[], str]) -> str:
    """Text that can be sent, whatever a user's exception says of itself."""
    try:
        text = make()
    except Exception as error:
        text = f"(what it says cannot be shown: {type(error).__name__})"
    if len(text) > _MOST_TEXT:
        half, left_out = _MOST_TEXT // 2, len(text) - _MOST_TEXT
        text = f"{text[:half]}\n... {left_out} characters left out ...\n{text[-half:]}"
    return text.encode(errors="backslashreplace").decode()


class _Supervisor:
    """Watches a crew until every worker has returned; the first failure ends all of them."""

    def __init__(self, crew: Crew, listen: Listen, signals: StopSignals | None) -> None:
        self._crew = crew
        self._listen = listen
        self._signals = signals
        self._values: dict[int, Any] = {}
        self._step = 0
        self._decided: str | None = None
        self._passed_on = False

    def watch(self) -> list[Any]:
        while len(self._values) < self._crew.workers:
            self._pass_on_stop()
            arrival = self._crew.next(_POLL_SECONDS)
            if isinstance(arrival, Ended):
                raise _ended(arrival)
            if isinstance(arrival, Message):
                self._take(arrival)
        return [self._values[rank] for rank in range(self._crew.workers)]

    def _wanted(self) -> str | None:
        return (self._signals.asked if self._signals is not None else None) or self._decided

    def _pass_on_stop(self) -> None:
        wanted = self._wanted()
        if wanted is not None and not self._passed_on:
            self._passed_on = True
            self._crew.send(0, encode(StopAsked(wanted)))
            if wanted in _SIGNAL_NOTICE:
                self._listen(Notice(step=self._step, text=_SIGNAL_NOTICE[wanted]))

    def _take(self, arrival: Message) -> None:
        message = decode_up(arrival.header)
        if isinstance(message, Returned):
            parcel, *buffers = arrival.buffers
            self._values[arrival.worker] = unseal(bytes(parcel), buffers)
        elif isinstance(message, Failed):
            raise self._root_cause(arrival.worker, message)
        else:
            self._tell(message)

    def _tell(self, message: Happened) -> None:
        for event in message.events:
            self._step = event.step
            if self._listen(event) is not None:
                self._decided = STOPPED
        if message.ask:
            self._crew.send(0, encode(Decided(self._wanted())))

    def _root_cause(self, worker: int, failed: Failed) -> ShoalError:
        """The failure to show: if this worker only lost its peers, the one that left first."""
        while failed.secondary:
            arrival = self._crew.next(_ROOT_CAUSE_SECONDS)
            if isinstance(arrival, Ended):
                return _ended(arrival)
            if arrival is None:
                break
            message = decode_up(arrival.header)
            if isinstance(message, Failed) and not message.secondary:
                worker, failed = arrival.worker, message
        return _as_error(worker, failed)


def _as_error(worker: int, failed: Failed) -> ShoalError:
    cause = RemoteTraceback(f"on worker {worker}:\n\n{failed.traceback}\n")
    kind = getattr(errors, failed.kind, None)
    error: ShoalError
    if isinstance(kind, type) and issubclass(kind, WorkerError):
        culprit = worker if failed.culprit is None else failed.culprit
        error = kind(failed.message, worker=culprit, step=failed.step, positions=failed.positions)
    elif isinstance(kind, type) and issubclass(kind, ShoalError):
        error = kind(failed.message)
    else:
        if failed.kind == "SystemExit":
            what = f"called sys.exit({failed.message})"
        else:
            what = f"raised {failed.kind}: {failed.message}" if failed.message else f"raised {failed.kind}"
        error = WorkerError(
            f"worker {worker} {what}{failed.where}{_hint(failed)}",
            worker=worker,
            step=failed.step,
            positions=failed.positions,
        )
    error.__cause__ = cause
    return error


def _hint(failed: Failed) -> str:
    if failed.kind in ("MemoryError", "OutOfMemoryError") or "can't allocate memory" in failed.message:
        return ". It ran out of memory: set micro_batch= to compute fewer samples at once, or use fewer workers"
    return ""


def _ended(end: Ended) -> WorkerError:
    if end.signal is None:
        return WorkerError(
            f"worker {end.worker} left with exit code {end.code} in the middle of the run; look for os._exit in "
            "the code it runs",
            worker=end.worker,
        )
    import signal

    name = signal.Signals(end.signal).name
    why = ""
    if end.signal == signal.SIGKILL:
        why = "; most often the machine ran out of memory: set micro_batch=, or use fewer workers"
    elif end.signal in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT):
        why = "; a native library crashed in it: run with PYTHONFAULTHANDLER=1 to see where"
    return WorkerError(f"worker {end.worker} was killed by {name}{why}", worker=end.worker)
