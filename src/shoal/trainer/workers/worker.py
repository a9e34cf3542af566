"""What the processes of a run do: its workers, and its coordinator."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from shoal.cluster.access import Access
from shoal.cluster.board import Board
from shoal.cluster.channel.channel import flushing, leave_sigterm_to_the_supervisor
from shoal.cluster.channel.elastic import ElasticChannel
from shoal.cluster.channel.messages import Departed, Failed, Returned
from shoal.cluster.coordinator.coordinator import serve
from shoal.cluster.elasticity import Elasticity
from shoal.cluster.logs import EXIT_FAILED, begin_log, flush_output, log_failure
from shoal.cluster.member.control import Control, Finished, Left
from shoal.cluster.roster.membership import Plan
from shoal.cluster.supervisor.directing import Led
from shoal.cluster.supervisor.failure import whole_traceback
from shoal.comm.group import SoloGroup
from shoal.core.errors import GroupError, ShoalError
from shoal.core.version import __version__
from shoal.data.parcel import seal
from shoal.engines.heap import keep_freed_memory
from shoal.engines.places import Place, enter
from shoal.engines.world import LOOPBACK
from shoal.trainer.session import Session
from shoal.trainer.workers.describing import describe_here
from shoal.trainer.workers.standing import CannotJoin
from shoal.trainer.workers.start import Body, Start, deterministic_algorithms
from shoal.wire.link import Link, LinkClosed


def be_coordinator(link: Link, access: Access, plan: Plan, place: Place | None) -> None:
    """From the first moment of the coordinator's process to its last.

    If it ends because the supervisor is gone, nobody else is left to remove the folder with the run's keys.
    """
    leave_sigterm_to_the_supervisor()
    if place is not None:
        enter(place)
    serve(access, plan, link, _address(place))
    if link.poll(0):  # at its end: there is nothing else that could have come after the last word
        shutil.rmtree(access.folder, ignore_errors=True)


@dataclass(frozen=True)
class Task:
    """What a worker is there for."""

    body: Body | None
    start: Start
    elasticity: Elasticity
    place: Place | None = None
    """The lab host that it runs on."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    led: Led | None = None
    """In place of a body."""


def be_worker(seat: int, link: Link, access: Access, board: Board, task: Task) -> bool:
    """From the first moment of a worker's process to its last, or to the end of the run: then True.

    The supervisor's end does not end it: what it has in hand is checkpointed first, which is the session's part.
    """
    leave_sigterm_to_the_supervisor()
    begin_log(task.start.logs, seat)
    if task.device.type == "cpu":
        torch.set_num_threads(1)
        keep_freed_memory()
    else:
        torch.cuda.set_device(task.device)
    return _Worker(seat, link, access, board, task).run()


class _Worker:
    def __init__(self, seat: int, link: Link, access: Access, board: Board, task: Task) -> None:
        self._seat = seat
        self._link = link
        self._access = access
        self._on_board = board.place(seat)
        self._on_board.begin(os.getpid())
        self._task = task
        self._channel = ElasticChannel(link)
        self._control: Control | None = None
        self._session: Session | None = None

    def run(self) -> bool:
        failed: Failed | None = None
        try:
            if self._task.led is None:
                self._train()
            else:
                self._work(self._task.led)
        except LinkClosed:
            # only one that is led finds that here: without its director it has nothing that is worth keeping
            flush_output()
            os._exit(EXIT_FAILED)
        except (Left, Finished) as leaving:
            self._depart(str(leaving), told=isinstance(leaving, CannotJoin))
            return False
        except BaseException as error:
            failed = describe_here(error, self._session)
            if self._task.start.logs is not None:
                log_failure(self._seat, whole_traceback(error))
        # outside the except block: see comm.group
        if failed is not None:
            flush_output()
            self._close_session()
            self._channel.last_words()
            self._channel.give(failed)
        self._on_board.done()
        # Peers may still be in their last operation; the supervisor ends this process when all are done.
        goes_on = self._channel.await_end()
        self._let_go()
        if failed is not None:
            sys.exit(EXIT_FAILED)
        if goes_on and self._session is not None:
            self._close_session()
            self._session.leave_group()
        return goes_on

    def _enter(self) -> Control:
        if self._task.place is not None:
            enter(self._task.place)
        control = self._control = Control(self._access, self._seat, self._on_board, self._link.fileno())
        return control

    def _work(self, led: Led) -> None:
        task, control = self._task, self._enter()
        control.enter(__version__, b"")
        session = self._session = led.session(self._seat, self._channel, self._on_board)
        # the director tells of steps; what is found in forwards, every worker finds, and the first one tells
        self._channel.speak(self._seat == 0)
        with deterministic_algorithms(task.start.deterministic), flushing(self._channel):
            led.work(session, self._link, task.place, control.attend)

    def _train(self) -> None:
        task, start = self._task, self._task.start
        self._control = self._enter()
        elasticity = task.elasticity
        standing = start.standing(
            self._control,
            self._channel,
            self._on_board,
            self._seat,
            device=task.device,
            host=_address(task.place),
            faults=elasticity.faults,
        )
        session = self._session = start.session(
            SoloGroup(), self._channel, task.device, workers=elasticity.workers, standing=standing
        )
        with deterministic_algorithms(start.deterministic), flushing(self._channel):
            standing.begin(session)
            if standing.joining:
                # what it is told of the run until it takes part in it
                session.rank, session.workers = self._seat, elasticity.workers
            assert task.body is not None
            value = task.body(session)
            session.finish_saving()
        if standing.broken and not standing.finished:
            raise GroupError("the members of the run have changed, after this worker's loop had ended")
        self._channel.complete()
        flush_output()
        parcel, buffers = seal(value)
        self._channel.give(Returned(standing.finished), [parcel, *buffers])

    def _depart(self, why: str, *, told: bool) -> None:
        if self._session is not None:
            self._channel.emit(self._session.seen())
        self._close_session()
        self._channel.flush()
        flush_output()
        self._channel.give(Departed(why, tell=told))
        self._let_go()

    def _close_session(self) -> None:
        if self._session is not None:
            with suppress(ShoalError):  # there is something more important to say
                self._session.close()

    def _let_go(self) -> None:
        if self._control is not None:
            self._control.close()


def _address(place: Place | None) -> str:
    return LOOPBACK if place is None else place.address
