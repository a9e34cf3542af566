"""`shoal scale`: asking a run that is under way, and what is said when that cannot be."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from shoal.cli import scale
from shoal.cluster.access import Access
from shoal.cluster.messages import MOST_BYTES, OPERATOR, Down, Letter, Refused, Scale, Welcome, decode_letter, encode
from shoal.core.errors import ConfigError, RunDirError, RunNotFound, ShoalError
from shoal.store.liveness import this_process
from shoal.store.store import Store
from shoal.store.values import NewRun, RunEnd
from shoal.store.writing import RunWriter
from shoal.wire.curve import Keys, Server
from shoal.wire.runkeys import CLIENT_FILE

SECONDS = 10.0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of run a-1, which this process holds."""
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SHOAL_STORE", raising=False)
    monkeypatch.setattr(scale, "_REPEAT_SECONDS", 0.05)
    folder = tmp_path / "a-1"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"run_id": "a-1"}))
    (folder / ".lock").write_text(str(os.getpid()))
    return folder


def record(folder: Path | None, *, running: bool = True) -> None:
    alive = this_process()
    new = NewRun(
        id="a-1", name="a", created=time.time(), workers=2, run_dir=str(folder) if folder else None,
        host=alive.host, pid=alive.pid, pid_started=alive.started, boot=alive.boot,
    )  # fmt: skip
    with Store.open() as store:
        writer = RunWriter(store, new)
        writer.begin()
        writer.write([], None if running else RunEnd(status="complete"))


class Coordinator:
    """Answers letters, as the real one does."""

    def __init__(self, folder: Path, answer: Callable[[Letter], Down | bytes | None]) -> None:
        self.letters: list[Letter] = []
        self._answer = answer
        self._access = Access(run="a-1", folder=folder / "control", keys=Keys.make())
        self._stop, self._ready = False, threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        assert self._ready.wait(SECONDS)

    def _serve(self) -> None:
        self._access.keys.write(self._access.folder)
        with Server(self._access.keys, "127.0.0.1", limit=MOST_BYTES) as server:
            self._access.publish(server.endpoint)
            self._ready.set()
            while not self._stop:
                server.wait(0.02)
                while (message := server.receive()) is not None:
                    self.letters.append(decode_letter(message[1]))
                    answer = self._answer(self.letters[-1])
                    if answer is not None:
                        server.send(message[0], answer if isinstance(answer, bytes) else encode(answer))

    def close(self) -> None:
        self._stop = True
        self._thread.join(SECONDS)


@pytest.fixture
def coordinate(folder: Path) -> Iterator[Callable[[Callable[[Letter], Down | bytes | None]], Coordinator]]:
    started: list[Coordinator] = []

    def start(answer: Callable[[Letter], Down | bytes | None]) -> Coordinator:
        started.append(Coordinator(folder, answer))
        return started[-1]

    yield start
    for one in started:
        one.close()


Coordinate = Callable[[Callable[[Letter], Down | bytes | None]], Coordinator]


def shoal(*args: str) -> Result:
    app = typer.Typer()
    app.callback()(lambda: None)
    scale.register(app)
    return CliRunner().invoke(app, ["scale", *args])


def complaint(*args: str) -> ShoalError:
    result = shoal(*args)
    assert isinstance(result.exception, ShoalError), result.output
    return result.exception


@pytest.mark.parametrize("by", ["last", "a-1", "folder"])
def test_a_run_is_asked_and_its_answer_told(folder: Path, coordinate: Coordinate, by: str) -> None:
    record(folder)
    coordinator = coordinate(lambda letter: Welcome())
    result = shoal(str(folder) if by == "folder" else by, "4")
    assert result.exit_code == 0, result.output
    assert "a-1 goes on with 4 workers" in result.output
    letter = coordinator.letters[0]
    assert (letter.run, letter.name, letter.body) == ("a-1", OPERATOR, Scale(4))


def test_a_folder_is_enough_without_a_store(folder: Path, coordinate: Coordinate) -> None:
    coordinate(lambda letter: Welcome())
    assert "goes on with 1 worker " in shoal(str(folder), "1").output


def test_a_question_that_was_lost_is_asked_again(folder: Path, coordinate: Coordinate) -> None:
    coordinator = coordinate(lambda letter: Welcome() if letter.number > 2 else None)
    assert shoal(str(folder), "3").exit_code == 0
    numbers = [letter.number for letter in coordinator.letters]
    assert numbers == sorted(set(numbers)) and len({letter.life for letter in coordinator.letters}) == 1


def test_a_refusal_is_told_in_the_coordinators_words(folder: Path, coordinate: Coordinate) -> None:
    coordinate(lambda letter: Refused("9 workers were asked for; max_workers is 6"))
    error = complaint(str(folder), "9")
    assert isinstance(error, ConfigError) and error.exit_code == 2
    assert str(error) == "a-1 was not changed: 9 workers were asked for; max_workers is 6"


def test_servers_are_asked_for_too(folder: Path, coordinate: Coordinate) -> None:
    coordinator = coordinate(lambda letter: Welcome())
    result = shoal(str(folder), "--servers", "3")
    assert result.exit_code == 0 and "a-1 goes on with 3 servers as soon as" in result.output
    assert "2 workers and 1 server " in shoal(str(folder), "2", "--servers", "1").output
    bodies = [letter.body for letter in coordinator.letters]
    assert bodies[0] == Scale(None, 3) and bodies[-1] == Scale(2, 1)


def test_neither_workers_nor_servers(folder: Path) -> None:
    assert "--servers M" in str(complaint(str(folder)))


def test_a_run_without_servers(folder: Path) -> None:
    record(folder)
    assert "has no servers" in str(complaint("last", "--servers", "2"))


@pytest.mark.parametrize("number", ["0", "-1", "5000", "many"])
def test_a_number_that_cannot_be_is_refused_before_anybody_is_asked(folder: Path, number: str) -> None:
    assert shoal(str(folder), number).exit_code == 2


def test_no_answer_in_time(folder: Path, coordinate: Coordinate, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinate(lambda letter: None)
    access = scale._access("a-1", folder)
    began = time.monotonic()
    with pytest.raises(RunDirError, match=r"no answer within 0\.3 s at tcp://127"):
        scale.ask(access, 3, seconds=0.3)
    assert 0.3 <= time.monotonic() - began < 3.0
    assert scale.ANSWER_SECONDS == 5.0


def test_an_answer_of_another_version(folder: Path, coordinate: Coordinate) -> None:
    coordinate(lambda letter: b"\x91\xa5Maybe")
    assert "version that the run was started with" in str(complaint(str(folder), "3"))


def test_a_run_that_is_over(folder: Path) -> None:
    record(folder, running=False)
    error = complaint("last", "3")
    assert isinstance(error, RunDirError) and "not under way (it is complete)" in str(error)
    assert "--resume a-1" in str(error)


def test_a_folder_that_nobody_holds(folder: Path) -> None:
    (folder / ".lock").write_text("999999999")
    assert "not under way" in str(complaint(str(folder), "3"))
    (folder / ".lock").unlink()
    assert "not under way" in str(complaint(str(folder), "3"))


def test_a_run_without_a_folder(folder: Path) -> None:
    record(None)
    assert "has no folder" in str(complaint("last", "3"))


def test_a_run_that_cannot_change(folder: Path) -> None:
    record(folder)
    error = complaint("last", "3")
    assert isinstance(error, ConfigError)
    assert "it has no coordinator" in str(error)


def test_a_coordinator_that_has_not_started(folder: Path) -> None:
    Keys.make().write(folder / "control")
    assert "no coordinator yet" in str(complaint(str(folder), "3"))


def test_keys_that_others_could_read(folder: Path, coordinate: Coordinate) -> None:
    coordinator = coordinate(lambda letter: Welcome())
    (folder / "control" / CLIENT_FILE).chmod(0o644)
    error = complaint(str(folder), "3")
    assert isinstance(error, ConfigError) and "may be read by others" in str(error)
    assert coordinator.letters == []


def test_a_run_that_is_not_there(folder: Path) -> None:
    record(folder)
    assert isinstance(complaint("b-7", "3"), RunNotFound)
    assert isinstance(complaint(str(folder / "control"), "3"), RunNotFound)


def test_it_is_a_command_of_shoal_that_teaches() -> None:
    from shoal.cli.main import app

    result = CliRunner().invoke(app, ["scale", "--help"])
    assert result.exit_code == 0
    assert "shoal scale last 4" in result.output and "max_workers" in result.output
