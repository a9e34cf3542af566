"""Workers forked from this process: their side, and the supervisor's."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from shoal.comm.shm.segment import sweep
from shoal.core.errors import ShoalError
from shoal.core.events import Notice, Stop
from shoal.data.parcel import seal, unseal
from shoal.elastic.board import Board
from shoal.engines.heap import keep_freed_memory
from shoal.engines.local import Crew, Ended, LocalEngine, Message
from shoal.engines.places import Place, enter, spread
from shoal.engines.stacks import Stacks
from shoal.trainer.channel import (
    INTERRUPTED,
    PREEMPTED,
    STOPPED,
    LinkChannel,
    StopSignals,
    flushing,
    leave_sigterm_to_the_supervisor,
)
from shoal.trainer.failure import as_error, describe, ended_error, whole_traceback
from shoal.trainer.logs import Tail, begin_log, log_failure
from shoal.trainer.messages import Decided, Failed, Happened, Returned, StopAsked, decode_up, encode
from shoal.trainer.session import Session
from shoal.trainer.start import (
    GROUP_TIMEOUT,
    LOOPBACK,
    ROOT_CAUSE_SECONDS,
    Body,
    Start,
    deterministic_algorithms,
)
from shoal.trainer.stuck import Stuck
from shoal.trainer.vigil import Vigil
from shoal.trainer.watch import Watcher
from shoal.wire.link import Link, LinkClosed

_TICK_SECONDS = 0.1
_LAST_WORDS_SECONDS = 0.5
"""How long the end of a run waits for worker 0 when another one has failed."""
_SIGNALS = {PREEMPTED: ("SIGTERM", ""), INTERRUPTED: ("Ctrl-C", "; press it again to end at once")}


def signal_notice(reason: str, stuck: Stuck, kept: str = Start.kept) -> str | None:
    """What to say when a run is asked to stop, if a signal asks: what it does, and what it waits for.

    `kept`: see `Start`.
    """
    if reason not in _SIGNALS:
        return None
    name, more = _SIGNALS[reason]
    text, waits = f"{name}: stopping after the step in progress, {kept}{more}", stuck.stopping(time.monotonic())
    return f"{text} ({waits})" if waits else text


def run_forked(
    body: Body,
    start: Start,
    workers: int,
    watch: Watcher,
    signals: StopSignals | None,
    hosts: Sequence[Place] = (),
) -> list[Any]:
    """`body(session)` on workers forked from this process; what each of them returned.

    With `hosts`, the hosts of a lab, the workers run there. Only they move: supervisor and workers speak over sockets
    that are open before, and meet through a file.
    """
    places = spread(hosts, workers) if hosts else [None] * workers
    board = Board(workers)

    def main(rank: int, link: Link, scratch: Path) -> None:
        stacks.answer()
        _worker(rank, workers, link, scratch, body, start, places[rank], board)

    try:
        with (
            closing(Stacks()) as stacks,
            Tail(start.logs, workers, watch.output) as tail,
            LocalEngine().start(workers, main, warm=leave_sigterm_to_the_supervisor) as crew,
        ):
            stuck = Stuck(board, stacks, lambda: range(workers), watch.urge)
            with stuck.explaining():
                return _Supervisor(crew, watch, signals, tail, stuck, start.kept).watch()
    finally:
        # workers that were all ended while they met, or while they made room for gradients
        sweep()


def _worker(
    rank: int,
    workers: int,
    link: Link,
    scratch: Path,
    body: Body,
    start: Start,
    place: Place | None,
    board: Board,
) -> None:
    leave_sigterm_to_the_supervisor()
    begin_log(start.logs, rank)
    torch.set_num_threads(1)
    keep_freed_memory()
    channel = LinkChannel(link, speaks=rank == 0)
    session: Session | None = None
    failed: Failed | None = None
    try:
        if place is not None:
            enter(place)
        distributed: Any = import_module("torch.distributed")
        store = distributed.FileStore(str(scratch / "store"), workers)
        address = LOOPBACK if place is None else place.address
        group = start.group(store, rank, workers, torch.device("cpu"), host=address, channel=channel)
        on_board = board.place(rank)
        on_board.begin(os.getpid())
        session = start.session(group, channel, torch.device("cpu"), place=on_board)
        vigil = _vigil(board, session, channel)
        watched = vigil.kept() if workers > 1 else nullcontext()
        with deterministic_algorithms(start.deterministic), watched, flushing(channel):
            value = body(session)
            session.finish_saving()
        on_board.done()
        channel.flush()
        _flush_output()
        parcel, buffers = seal(value)
        link.send(encode(Returned()), [parcel, *buffers])
    except LinkClosed:
        os._exit(1)
    except BaseException as error:
        failed = describe(error, session)
        if start.logs is not None:
            log_failure(rank, whole_traceback(error))
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


def _vigil(board: Board, session: Session, channel: LinkChannel) -> Vigil:
    return Vigil(
        board,
        session.rank,
        session.workers,
        GROUP_TIMEOUT.total_seconds(),
        tell=channel.urge,
        end=session.group.revoke,
        within=lambda: session.asking,
    )


def _flush_output() -> None:
    """What user code printed: the process will be killed, not left to end by itself."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


class _Supervisor:
    """Watches a crew until every worker has returned; the first failure ends all of them."""

    def __init__(
        self, crew: Crew, watch: Watcher, signals: StopSignals | None, tail: Tail, stuck: Stuck, kept: str
    ) -> None:
        self._crew = crew
        self._kept = kept
        self._watch = watch
        self._signals = signals
        self._tail = tail
        self._stuck = stuck
        self._ticked = 0.0
        self._values: dict[int, Any] = {}
        self._step = 0
        self._decided: str | None = None
        self._passed_on = False

    def watch(self) -> list[Any]:
        while len(self._values) < self._crew.workers:
            self._pass_on_stop()
            arrival = self._crew.next(_TICK_SECONDS)
            self._tick()
            if isinstance(arrival, Ended):
                self._hear_worker_0(arrival.worker)
                raise ended_error(arrival, self._tail.folder)
            if isinstance(arrival, Message):
                self._take(arrival)
        return [self._values[rank] for rank in range(self._crew.workers)]

    def _tick(self) -> None:
        if time.monotonic() - self._ticked > _TICK_SECONDS:
            self._tail.look()
            self._watch.tick()
            self._ticked = time.monotonic()
            self._stuck.look(self._ticked)

    def _wanted(self) -> str | None:
        return (self._signals.asked if self._signals is not None else None) or self._decided

    def _pass_on_stop(self) -> None:
        wanted = self._wanted()
        if wanted is not None and not self._passed_on:
            self._passed_on = True
            self._crew.send(0, encode(StopAsked(wanted)))
            if (text := signal_notice(wanted, self._stuck, self._kept)) is not None:
                self._watch(Notice(step=self._step, text=text))

    def _take(self, arrival: Message) -> None:
        message = decode_up(arrival.header)
        if isinstance(message, Returned):
            parcel, *buffers = arrival.buffers
            self._values[arrival.worker] = unseal(bytes(parcel), buffers)
        elif isinstance(message, Failed):
            error = self._root_cause(arrival.worker, message)
            if not message.secondary:
                self._hear_worker_0(arrival.worker)
            raise error
        else:
            self._tell(message)

    def _tell(self, message: Happened) -> None:
        for event in message.events:
            self._step = event.step
            if isinstance(self._watch(event), Stop):
                self._decided = STOPPED
        if message.ask:
            self._crew.send(0, encode(Decided(self._wanted())))

    def _hear_worker_0(self, failed: int) -> None:
        """Take in what worker 0 has still to tell of the run: it sends events in batches.

        The end of the worker that failed breaks the exchange that worker 0 is in, or comes to; then it tells.
        """
        if failed == 0:
            return
        self._crew.kill(failed)
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            arrival = self._crew.next(left)
            if arrival is None:
                return
            if isinstance(arrival, Ended):
                if arrival.worker == 0:
                    return
                continue
            message = decode_up(arrival.header)
            if isinstance(message, Happened):
                self._tell(message)
            elif arrival.worker == 0:
                return

    def _root_cause(self, worker: int, failed: Failed) -> ShoalError:
        """The failure to show: if this worker only lost its peers, the one that left first."""
        while failed.secondary:
            arrival = self._crew.next(ROOT_CAUSE_SECONDS)
            if isinstance(arrival, Ended):
                return ended_error(arrival, self._tail.folder)
            if arrival is None:
                break
            message = decode_up(arrival.header)
            if isinstance(message, Happened):
                self._tell(message)
            elif isinstance(message, Failed) and not message.secondary:
                worker, failed = arrival.worker, message
        return as_error(worker, self._crew.workers, failed, self._tail.folder)
