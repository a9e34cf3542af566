"""A run without training: a coordinator in a process of its own, a test in the place of its engine, and controls."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed  # once here, not in every worker

from shoal.cluster.access import Access
from shoal.cluster.board import Board, Place
from shoal.cluster.coordinator.coordinator import serve
from shoal.cluster.member.control import Control
from shoal.cluster.messages import Changed, Closing, FromEngine, Present, Term, ToEngine, decode_to_engine, encode
from shoal.cluster.roster.membership import Plan
from shoal.wire.curve import Keys
from shoal.wire.link import Link, LinkClosed

VERSION, SIGNATURE = "1.0", b"the model"


def forked(body: Callable[[], None]) -> int:
    """A process that runs `body` and ends; its pid. It leaves with 1, and a traceback, if that raises."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        body()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class Stage:
    """One run. The engine's part is played by the test: it hears with `expect` and says with `report`."""

    def __init__(self, folder: Path, workers: int, least: int = 1) -> None:
        folder.mkdir(mode=0o700)
        self.access = Access("a-run", folder, Keys.make())
        self.plan = Plan(workers, least, max(workers, 8), VERSION, "a-run")
        self.board = Board(8)
        self.pid = 0
        self.link: Link | None = None
        self.heard: list[ToEngine] = []
        self.controls: list[Control] = []
        self.lifelines: list[tuple[socket.socket, socket.socket]] = []

    # -- the coordinator -----------------------------------------------------------------------------------------------

    def start(self, present: list[int] | None = None) -> None:
        """Fork the coordinator. `present` is said to it first; at the first start, nobody is there."""
        mine, its = Link.pair()

        def body() -> None:
            mine.close()
            serve(self.access, self.plan, its, "127.0.0.1")

        self.pid, self.link = forked(body), mine
        its.close()
        self.report(Present(present or []))

    def report(self, message: FromEngine) -> None:
        assert self.link is not None
        self.link.send(encode(message))

    def expect(self, kind: type[Any], seconds: float = 5.0) -> Any:
        """The next message of this kind from the coordinator; others are kept in `heard`."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            assert self.link is not None
            if not self.link.poll(max(0.0, until - time.monotonic())):
                break
            message = decode_to_engine(self.link.recv()[0])
            self.heard.append(message)
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} in {seconds} s; heard {self.heard}")

    def rest(self) -> list[ToEngine]:
        """All that a coordinator which has ended had said."""
        with suppress(LinkClosed):
            while self.link is not None:
                self.heard.append(decode_to_engine(self.link.recv()[0]))
        return self.heard

    def kill(self) -> None:
        """kill -9 the coordinator."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.pid = 0
        self.hang_up()

    def hang_up(self) -> None:
        if self.link is not None:
            self.link.close()
            self.link = None

    def ended(self, seconds: float = 5.0) -> int:
        """The exit code of the coordinator, which must end by itself."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        raise AssertionError(f"the coordinator did not end within {seconds} s")

    # -- workers -------------------------------------------------------------------------------------------------------

    def place(self, seat: int) -> Place:
        place = self.board.place(seat)
        place.begin(os.getpid())
        return place

    def control(self, seat: int, access: Access | None = None) -> Control:
        """A control of this process; closed with the stage."""
        lifeline = socket.socketpair()
        self.lifelines.append(lifeline)
        control = Control(access or self.access, seat, self.place(seat), lifeline[0].fileno())
        self.controls.append(control)
        return control

    def entered(self, *seats: int) -> list[Control]:
        controls = [self.control(seat) for seat in seats]
        for control in controls:
            control.enter(VERSION, SIGNATURE)
        return controls

    def on_workers(self, seats: list[int], fn: Callable[[Control, Term], Any], seconds: float = 15.0) -> list[Any]:
        """`fn(control, term)` in a process for each seat, all members of one term; what each returned."""
        links = [Link.pair() for _ in seats]

        def body(seat: int, link: Link) -> None:
            torch.set_num_threads(1)
            control = Control(self.access, seat, self.place(seat), link.fileno())
            control.enter(VERSION, SIGNATURE)
            value = fn(control, control.await_term(0, False))
            link.send(msgspec.msgpack.encode(value))
            link.recv()  # until all are done
            control.close()

        pids = [
            forked(lambda seat=seat, pair=pair: body(seat, pair[1])) for seat, pair in zip(seats, links, strict=True)
        ]
        until = time.monotonic() + seconds
        try:
            for mine, its in links:
                its.close()
                assert mine.poll(max(0.0, until - time.monotonic())), "a worker is not done"
            values = [msgspec.msgpack.decode(mine.recv()[0]) for mine, _ in links]
            for mine, _ in links:
                mine.send(b"")
            codes = [os.waitstatus_to_exitcode(os.waitpid(pids.pop(0), 0)[1]) for _ in links]
            assert codes == [0] * len(seats)
            return values
        finally:
            for mine, _ in links:
                mine.close()
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def all_terms(self, controls: list[Control], position: int = 0, holds: bool = False) -> list[Term]:
        """What each awaits, each on a thread of its own."""
        found: dict[int, Term] = {}

        def wait(index: int) -> None:
            found[index] = controls[index].await_term(position, holds)

        threads = [threading.Thread(target=wait, args=(index,), daemon=True) for index in range(len(controls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(found) == len(controls), f"only {sorted(found)} of {len(controls)} have a term"
        return [found[index] for index in range(len(controls))]

    def formed(self, controls: list[Control], position: int = 0, holds: bool = False) -> Term:
        """The term that they all get, formed and standing."""
        terms = self.all_terms(controls, position, holds)
        assert len({(term.number, tuple(term.members)) for term in terms}) == 1, terms
        for control in controls:
            control.formed(terms[0].number)
        assert self.expect(Changed).term == terms[0].number
        return terms[0]

    def close(self) -> None:
        for control in self.controls:
            control.close()
        for pair in self.lifelines:
            for end in pair:
                end.close()
        if self.pid and self.link is not None:
            try:
                self.report(Closing())
                assert self.ended() == 0
            except (LinkClosed, AssertionError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise
        self.hang_up()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    """Makes a stage for so many workers, whose coordinator runs."""
    stages: list[Stage] = []

    def make(workers: int, least: int = 1, start: bool = True) -> Stage:
        stages.append(Stage(tmp_path / f"run-{len(stages)}", workers, least))
        if start:
            stages[-1].start()
        return stages[-1]

    yield make
    for one in stages:
        one.close()
