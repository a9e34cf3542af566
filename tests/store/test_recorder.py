"""The recorder never makes a run wait, never breaks it, and loses nothing that it need not lose."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.core.events import CheckpointSaved, EvalDone, Notice, Preparing, RunStarted, StepDone
from shoal.store import connect, recorder, writing
from shoal.store.recorder import Recorder
from shoal.store.store import Store
from shoal.store.values import NewRun, RunEnd

Until = Callable[[Callable[[], bool]], None]
COMPLETE = RunEnd(status="complete")


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "WRITE_SECONDS", 0.02)
    monkeypatch.setattr(recorder, "RETRY_SECONDS", 0.02)


def new_run(run_id: str = "r1", **changes: object) -> NewRun:
    values = {"name": "n", "created": time.time(), "workers": 1, "git_commit": "known", "environment": {"a": 1}}
    return NewRun(id=run_id, **{**values, **changes})


def started(run_id: str = "r1", step: int = 0) -> RunStarted:
    shape = {"workers": 1, "total_steps": 9, "steps_per_epoch": 3, "samples_per_epoch": 24, "batch_size": 8}
    return RunStarted(step=step, run_id=run_id, run_dir=None, **shape)


def step(number: int) -> StepDone:
    return StepDone(step=number, epoch=0, loss=1.0 / number, samples=8, rates=[0.1])


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "shoal-recorder"]


def refuse(text: str) -> None:
    raise AssertionError(f"a warning: {text}")


def test_records(url: str) -> None:
    record = Recorder(new_run(), url=url, warn=refuse)
    record(started())
    for number in range(1, 1501):
        record(step(number))
    record(EvalDone(step=1500, epoch=0, metrics={"accuracy": 0.5}))
    record.close(RunEnd(status="complete", step=1500, loss=0.25, metrics={"accuracy": 0.5}))
    record.close(COMPLETE)
    with Store.open(url) as store:
        run = store.find("r1")
        assert (run.status, run.step, run.loss, run.metrics) == ("complete", 1500, 0.25, {"accuracy": 0.5})
        assert (run.batch_size, run.total_steps, run.pid) == (8, 9, os.getpid())
        assert [row.step for row in store.steps("r1")] == list(range(1, 1501))


def test_a_checkpoint_is_written_at_once(file_url: str, until: Until, monkeypatch: pytest.MonkeyPatch) -> None:
    """With it the steps before it, which a resumed run does not do again."""
    monkeypatch.setattr(recorder, "WRITE_SECONDS", 60.0)
    record = Recorder(new_run(), url=file_url, warn=refuse)
    record(started())
    record(step(1))
    record(CheckpointSaved(step=1, path="/c/1", best=False))
    with Store.open(file_url) as store:
        until(lambda: bool(store.runs()) and len(store.checkpoints("r1")) == 1)
        assert [row.step for row in store.steps("r1")] == [1]
        record(step(2))
        record(CheckpointSaved(step=2, path="/c/2", best=False))
        until(lambda: len(store.checkpoints("r1")) == 2)
        assert [row.step for row in store.steps("r1")] == [1, 2]
    record.close(COMPLETE)


def test_what_the_maker_leaves_out_is_found_out(file_url: str) -> None:
    record = Recorder(new_run(git_commit=None, environment={}, script=__file__), url=file_url, warn=refuse)
    record.close(RunEnd(status="failed", error="before the first step"))
    with Store.open(file_url) as store:
        run = store.find("r1")
    assert (run.status, run.error, run.pid) == ("failed", "before the first step", os.getpid())
    assert run.environment["python"] and run.boot and run.host


def test_a_thread_only_from_the_first_event_on(file_url: str, until: Until) -> None:
    record = Recorder(new_run(), url=file_url, warn=refuse)
    record(Preparing(step=0, what="indexing"))
    assert threads() == []
    record(started())
    assert threads() == ["shoal-recorder"]
    record.close(COMPLETE)
    assert threads() == []


def test_in_a_child_it_does_nothing(file_url: str, tmp_path: Path) -> None:
    record = Recorder(new_run(), url=file_url, warn=refuse)

    def child() -> None:
        record(started())
        record.close(COMPLETE)
        os._exit(len(threads()))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(20)
    assert process.exitcode == 0 and list(tmp_path.iterdir()) == []
    record(started())
    record.close(COMPLETE)
    with Store.open(file_url) as store:
        assert store.find("r1").status == "complete"


def test_the_caller_imports_no_sqlalchemy() -> None:
    code = """
import sys, threading
from shoal.store.recorder import Recorder
from shoal.store.values import NewRun
start, threading.Thread.start = threading.Thread.start, lambda thread: None
from shoal.core.events import Notice
Recorder(NewRun(id="r", name="n", created=1.0, workers=1), warn=print)(Notice(step=0, text="x"))
sys.exit("sqlalchemy" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_no_store(tmp_path: Path) -> None:
    record = Recorder(new_run(), url="none", warn=refuse)
    record(started())
    assert threads() == []
    record.close(COMPLETE)


def test_a_store_that_cannot_be_used_is_said_once_and_on_our_thread(
    tmp_path: Path, file_url: str, until: Until
) -> None:
    (tmp_path / "shoal.db").write_text("garbage" * 1000)
    said: list[tuple[str, str]] = []
    record = Recorder(new_run(), url=file_url, warn=lambda text: said.append((threading.current_thread().name, text)))
    record(started())
    until(lambda: threads() == [])
    for number in range(1, 50):
        record(step(number))
    record.close(COMPLETE)
    ((thread, text),) = said
    assert thread == threading.current_thread().name and "not recorded" in text and "shoal.db" in text


def test_whatever_goes_wrong_is_a_warning(file_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a slip")

    monkeypatch.setattr(writing, "_add_events", fail)
    said: list[str] = []
    record = Recorder(new_run(), url=file_url, warn=said.append)
    record(started())
    record.close(COMPLETE)
    assert len(said) == 1 and "RuntimeError: a slip" in said[0]


def test_a_locked_store_is_waited_for(
    file_url: str, tmp_path: Path, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "BUSY_SECONDS", 0.01)
    Store.open(file_url).close()
    said: list[str] = []
    monkeypatch.setattr(recorder, "PATIENCE_SECONDS", 0.1)
    lock = sqlite3.connect(tmp_path / "shoal.db", isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    record = Recorder(new_run(), url=file_url, warn=said.append)
    record(started())

    def warned() -> bool:
        record(Notice(step=0, text="still here"))
        return bool(said)

    until(warned)
    for number in range(1, 100):
        record(step(number))
    lock.execute("ROLLBACK")
    lock.close()
    record.close(COMPLETE)
    assert len(said) == 1 and "in use by other processes" in said[0] and "tried again" in said[0]
    with Store.open(file_url) as store:
        assert store.find("r1").status == "complete" and len(store.steps("r1")) == 99


def test_the_end_does_not_wait_for_ever(file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store.open(file_url).close()
    monkeypatch.setattr(recorder, "CLOSE_SECONDS", 0.2)
    lock = sqlite3.connect(tmp_path / "shoal.db", isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    said: list[str] = []
    record = Recorder(new_run(), url=file_url, warn=said.append)
    record(started())
    record.close(COMPLETE)
    assert len(said) == 1 and "not waiting" in said[0]
    lock.execute("ROLLBACK")
    lock.close()
    for thread in threading.enumerate():
        if thread.name == "shoal-recorder":
            thread.join(20)
    with Store.open(file_url) as store:
        assert store.find("r1").status == "complete", "what was late is written all the same"


def test_memory_is_bounded_and_the_oldest_steps_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MOST_WAITING", 100)
    waiting = recorder._Waiting()
    waiting.add(started())
    counts = [waiting.add(step(number)) for number in range(1, 1001)]
    waiting.add(Notice(step=1000, text="kept"))
    assert max(counts) <= 100
    taken = waiting.take()
    assert isinstance(taken[0], RunStarted) and taken[-2].step == 1000
    steps = [event.step for event in taken if isinstance(event, StepDone)]
    assert steps == list(range(1001 - len(steps), 1001)) and waiting.dropped == 1000 - len(steps)
    for _ in range(300):
        assert waiting.add(Notice(step=1, text="many")) <= 100


def test_signs_of_life(file_url: str, until: Until, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "HEARTBEAT_SECONDS", 0.1)
    record = Recorder(new_run(), url=file_url, warn=refuse)
    record(started())
    with Store.open(file_url) as store:
        until(lambda: bool(store.runs()))
        first = store.find("r1").updated
        until(lambda: store.find("r1").updated > first + 0.2)
        assert store.find("r1").status == "running"
    record.close(COMPLETE)


def test_a_connection_that_breaks_is_made_again(postgresql_server: str, until: Until) -> None:
    import psycopg

    name = "broken_connection"
    with psycopg.connect(postgresql_server, autocommit=True) as admin:
        admin.execute(f"CREATE SCHEMA {name}")
        url = f"{postgresql_server}?options=-csearch_path%3D{name}"
        record = Recorder(new_run(), url=url, warn=refuse)
        record(started())
        record(step(1))
        with Store.open(url) as store:
            until(lambda: bool(store.runs()) and store.find("r1").step == 1)
        ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'shoal'"
        assert admin.execute(ended).fetchall()
        for number in range(2, 50):
            record(step(number))
        record.close(COMPLETE)
        with Store.open(url) as store:
            assert len(store.steps("r1")) == 49 and store.find("r1").status == "complete"


def record_many(url: str, run_id: str, steps: int) -> None:
    said: list[str] = []
    record = Recorder(new_run(run_id), url=url, warn=said.append)
    record(started(run_id))
    for number in range(1, steps + 1):
        record(step(number))
        if number % 50 == 0:
            time.sleep(0.03)  # so that there are many writes, not one
    record.close(COMPLETE)
    os._exit(1 if said else 0)


def test_many_runs_at_once_into_one_store(url: str) -> None:
    """Six processes write while this one reads; the store is made by whoever is first."""
    many, steps = 6, 300
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=record_many, args=(url, f"run{n}", steps)) for n in range(many)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 60
    with Store.open(url) as store:
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            for run in store.runs():
                assert len(store.steps(run.id, most=50)) <= 50
            time.sleep(0.01)
        for process in processes:
            process.join(20)
        assert [process.exitcode for process in processes] == [0] * many
        assert sorted(run.id for run in store.runs(status="complete")) == [f"run{n}" for n in range(many)]
        for number in range(many):
            assert [row.step for row in store.steps(f"run{number}")] == list(range(1, steps + 1))


def test_a_killed_run_is_shown_as_killed(file_url: str, until: Until) -> None:
    def child() -> None:
        record = Recorder(new_run(), url=file_url, warn=refuse)
        record(started())
        record(step(1))
        signal.pause()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    with Store.open(file_url) as store:
        until(lambda: bool(store.runs()) and store.find("r1").step == 1)
        assert store.find("r1").status == "running"
        os.kill(process.pid or 0, signal.SIGKILL)
        until(lambda: store.find("r1").status == "killed")  # also before anyone has asked how it ended
        process.join(20)
        assert store.find("r1").status == "killed" and len(store.steps("r1")) == 1
        record = Recorder(new_run(), url=file_url, warn=refuse)
        record(started(step=0))
        record.close(COMPLETE)
        run = store.find("r1")
        assert (run.status, run.resumes) == ("complete", 1) and store.steps("r1") == []
