"""Workers that run the script, each in a process of its own (`shoal.engines.script`): the runs of such a script.

Each process of the script counts the calls that start a run. In the first process such a call supervises; in the
others it takes part, or, where that run was over before they came, has its outcome, which the first process keeps in
files until the script ends. So all of them come out of it with the same values, and a process that is started late, to
replace one that died, finds its way to the run that is under way.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import torch

from shoal.cluster.access import Access, control_folder
from shoal.cluster.board import Board
from shoal.cluster.channel.channel import StopSignals, leave_sigterm_to_the_supervisor
from shoal.cluster.channel.messages import Begin, Over, decode_down, encode
from shoal.cluster.elasticity import Elasticity
from shoal.cluster.logs import Tail, flush_output
from shoal.cluster.roster.membership import Plan
from shoal.cluster.supervisor.failure import NOWHERE, describe
from shoal.cluster.supervisor.supervisor import COORDINATOR_SEAT, Supervisor
from shoal.cluster.supervisor.watch import Watcher
from shoal.comm.shm.segment import sweep
from shoal.core import errors
from shoal.core.errors import CheckpointError, ConfigError, ShoalError, WorkerError
from shoal.data.parcel import from_bytes, to_bytes, unseal
from shoal.engines.here import Here, here
from shoal.engines.script import ScriptCrew
from shoal.engines.stacks import Stacks
from shoal.trainer.workers.elastic import cleared, plan_of, seats_of
from shoal.trainer.workers.start import Body, Start
from shoal.trainer.workers.worker import Task, be_coordinator, be_worker
from shoal.wire.curve import Keys, read_client_keys
from shoal.wire.link import Link, LinkClosed

if TYPE_CHECKING:
    from shoal.checkpoint import Loaded

_LAST = 1 << 30
"""The number of a run that never comes: there is no other one."""


class _Coordinated(msgspec.Struct, frozen=True):
    """What the coordinator of a run is told; it is forked from a process that may be older than the run."""

    run: str
    folder: str
    plan: Plan


class _Outcome(msgspec.Struct, frozen=True):
    """What came of a run: the values of its workers, as a parcel, or the error that it ended with."""

    values: bytes = b""
    error: str = ""
    message: str = ""


def run_scripted(
    body: Body, start: Start, elasticity: Elasticity, watch: Watcher, signals: StopSignals | None
) -> list[Any]:
    """As `run_elastic`, on workers that run the script: in its first process, and in each of the others."""
    place = here()
    if place is not None:
        return _taking_part(place).run(body, start, elasticity)
    return _supervising().run(body, start, elasticity, watch, signals)


def landing_file(name: str) -> Path:
    """Where all processes of the script have tensors in common for the next run. The folder may not be there yet."""
    place = here()
    if place is not None:
        return folder_of(place.scratch, _taking_part(place).runs + 1) / name
    first = _supervising()
    first.refuse_two()
    return folder_of(first.crew.scratch, first.runs + 1) / name


def folder_of(scratch: Path, number: int) -> Path:
    """What the processes of the script have in common for one run."""
    return scratch / f"run-{number}"


# -- the first process -------------------------------------------------------------------------------------------------

_first: _First | None = None


def _supervising() -> _First:
    global _first
    if _first is None:
        _first = _First()
    return _first


class _First:
    """The process that the user started, as the supervisor of its runs, one after the other."""

    def __init__(self) -> None:
        self.runs = 0
        """That are over, or given up for another attempt."""
        self._busy = False
        self._keys = Keys.make()
        self.crew = ScriptCrew(COORDINATOR_SEAT, self._coordinate, leave_sigterm_to_the_supervisor)
        self._stacks = Stacks(self.crew.scratch / "stacks")
        self._owner = os.getpid()
        folder_of(self.crew.scratch, 1).mkdir()
        atexit.register(self._end)

    def run(
        self, body: Body, start: Start, elasticity: Elasticity, watch: Watcher, signals: StopSignals | None
    ) -> list[Any]:
        self.refuse_two()
        self._busy = True
        try:
            if elasticity.before:  # another attempt at the same run: the workers are to come to it once
                self.runs -= 1
            return self._run(body, start, elasticity, watch, signals)
        finally:
            self.runs += 1
            folder_of(self.crew.scratch, self.runs + 1).mkdir(exist_ok=True)
            self._busy = False

    def refuse_two(self) -> None:
        if self._busy:
            raise ConfigError(
                "a run was started while another one of this script is under way, by a callback or in another thread: "
                "workers that are started by script (engine='local:start=script', or with CUDA) are in one run at a "
                "time. Start it when that one is over"
            )

    def _run(
        self, body: Body, start: Start, elasticity: Elasticity, watch: Watcher, signals: StopSignals | None
    ) -> list[Any]:
        refuse_without_gpu(elasticity.most)
        number = self.runs + 1
        folder = folder_of(self.crew.scratch, number)
        control = control_folder(start.run_dir, folder)
        board = Board(seats_of(elasticity), folder / f"board-{elasticity.before}")
        outcome = _Outcome(error=WorkerError.__name__)
        returned: list[int] = []
        try:
            with Tail(start.logs, 0, watch.output) as tail, cleared(start.run_dir):
                control.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._keys.write(control)
                told = _Coordinated(start.run_id, str(control), plan_of(start, elasticity))
                (self.crew.scratch / "coordinated").write_bytes(msgspec.msgpack.encode(told))
                self.crew.begin(
                    encode(self._order(number, body, start, control, board, elasticity)),
                    lambda seat, pid: board.see(seat).pid == pid,
                )
                supervisor = Supervisor(self.crew, board, elasticity, watch, signals, tail, self._stacks, start.kept)
                try:
                    values = [unseal(bytes(parcel), buffers) for parcel, *buffers in supervisor.watch()]
                    outcome, returned = _Outcome(values=to_bytes(values)), supervisor.returned
                except BaseException as error:
                    outcome = _Outcome(error=describe(error, NOWHERE).kind, message=str(error))
                    raise
                finally:
                    _write(folder, outcome)
                    self.crew.finish(returned, encode(Over(number)))
            return values
        finally:
            sweep()

    def _order(
        self, number: int, body: Body, start: Start, control: Path, board: Board, elasticity: Elasticity
    ) -> Begin:
        return Begin(
            number=number,
            what=body.__qualname__,
            run_id=start.run_id,
            run_dir=None if start.run_dir is None else str(start.run_dir),
            control=str(control),
            board=f"board-{elasticity.before}",
            seats=board.seats,
            meta=dict(start.meta),
            checkpoint=None if start.loaded is None else str(start.loaded.path),
        )

    def _coordinate(self, seat: int, link: Link, scratch: Path) -> None:
        told = msgspec.msgpack.decode((scratch / "coordinated").read_bytes(), type=_Coordinated)
        be_coordinator(link, Access(told.run, Path(told.folder), self._keys), told.plan, None)

    def _end(self) -> None:
        if os.getpid() == self._owner:
            self.crew.farewell(encode(Over(_LAST)))
            self._stacks.close()


# -- the others --------------------------------------------------------------------------------------------------------

_other: _Other | None = None


def _taking_part(place: Here) -> _Other:
    global _other
    if _other is None:
        _other = _Other(place)
    return _other


@dataclass
class _Other:
    """A process that was started for a worker."""

    place: Here
    runs: int = 0
    """That it has come out of."""
    heard: Begin | Over | None = None
    """The newest word of the first process."""

    def __post_init__(self) -> None:
        with suppress(OSError):
            Stacks.answer_at(self.place.scratch / "stacks")

    def run(self, body: Body, start: Start, elasticity: Elasticity) -> list[Any]:
        """Take part in the next run, and return its outcome; or only that, if it is over."""
        number = self.runs + 1
        with suppress(ValueError):  # signals are the main thread's
            # a terminal sends this to every process: what it means is for the first one to decide
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            leave_sigterm_to_the_supervisor()
        word = self._await_word(number)
        if isinstance(word, Begin) and word.number == number:
            self._take_part(word, body, start, elasticity)
        self.runs = number
        return _read(folder_of(self.place.scratch, number))

    def _await_word(self, number: int) -> Begin | Over:
        """What the first process says of this run, or of a later one."""
        try:
            while self.heard is None or self.heard.number < number:
                message = decode_down(self.place.link.recv()[0])
                if isinstance(message, Begin | Over):
                    self.heard = message
        except LinkClosed:
            _leave()
        if not _path(folder_of(self.place.scratch, number)).exists() and self.heard.number > number:
            _leave()  # the first process has ended without this run
        return self.heard

    def _take_part(self, order: Begin, body: Body, start: Start, elasticity: Elasticity) -> None:
        folder = folder_of(self.place.scratch, order.number)
        start = replace(
            start,
            run_id=order.run_id,
            run_dir=None if order.run_dir is None else Path(order.run_dir),
            meta=order.meta,
            loaded=_loaded(order.checkpoint, start.loaded),
        )
        access = Access(order.run_id, Path(order.control), read_client_keys(Path(order.control)))
        task = Task(_the_same(body, order), start, elasticity, device=device_of(self.place.seat))
        threads, over = torch.get_num_threads(), False
        with _own_output(start.logs is not None), suppress(SystemExit):
            over = be_worker(self.place.seat, self.place.link, access, Board(order.seats, folder / order.board), task)
        if not over:
            _leave()
        torch.set_num_threads(threads)


def _the_same(body: Body, order: Begin) -> Body:
    """`body`, if it is what the first process has run; else one that fails with the reason."""
    if order.what == body.__qualname__:
        return body

    def refuse(session: Any) -> NoReturn:
        raise ConfigError(
            f"this worker's script has come to another call ({body.__qualname__}) than the process that you started "
            f"({order.what}): every process of the script must make the same calls of fit(), evaluate(), predict() and "
            "launch(), in the same order"
        )

    return refuse


def device_of(seat: int) -> torch.device:
    """Where the worker in this seat computes: on a GPU of its own, if there are any."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", seat % torch.cuda.device_count())


def refuse_without_gpu(workers: int) -> None:
    if torch.cuda.is_available() and workers > torch.cuda.device_count():
        raise ConfigError(
            f"{workers} workers, and this machine has {torch.cuda.device_count()} GPUs; use as many workers as there "
            "are GPUs, or set CUDA_VISIBLE_DEVICES= to nothing to train on CPU"
        )


def _loaded(wanted: str | None, own: Loaded | None) -> Loaded | None:
    """The checkpoint that the run goes on from. One that comes late finds another one as the last."""
    if wanted is None:
        return None
    if own is not None and str(own.path) == wanted:
        return own
    from shoal.checkpoint import load

    try:
        return load(Path(wanted))
    except CheckpointError:
        return own  # the run has got on, and keeps newer ones: this worker gets the state from the others


@contextmanager
def _own_output(logged: bool) -> Iterator[None]:
    """Within: stdout and stderr may be led elsewhere. Afterwards they are what they were."""
    if not logged:
        yield
        return
    streams, kept = (sys.stdout, sys.stderr), [os.dup(1), os.dup(2)]
    flush_output()
    try:
        yield
    finally:
        flush_output()
        for number, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.stdout, sys.stderr = streams


def _leave() -> NoReturn:
    """End here, not in the user's code: nobody waits for what it would do."""
    flush_output()
    os._exit(0)


# -- outcomes ----------------------------------------------------------------------------------------------------------


def _path(folder: Path) -> Path:
    return folder / "outcome"


def _write(folder: Path, outcome: _Outcome) -> None:
    beside = folder / "outcome.new"
    beside.write_bytes(msgspec.msgpack.encode(outcome))
    beside.replace(_path(folder))


def _read(folder: Path) -> list[Any]:
    """The values of a run that is over. Raises what it ended with."""
    outcome = msgspec.msgpack.decode(_path(folder).read_bytes(), type=_Outcome)
    if not outcome.error:
        values: list[Any] = from_bytes(outcome.values)
        return values
    kind = getattr(errors, outcome.error, None)
    raise (
        kind(outcome.message)
        if isinstance(kind, type) and issubclass(kind, ShoalError)
        else WorkerError(outcome.message)
    )
