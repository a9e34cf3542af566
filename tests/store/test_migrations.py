"""Old stores become present ones, newer ones are left alone, and nobody gets in another's way."""

from __future__ import annotations

import multiprocessing
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import inspect

from shoal.core.errors import StoreError
from shoal.core.events import RunStarted, StepDone, WorkerSeen
from shoal.core.traffic import Flow, Traffic
from shoal.store import migrations, schema
from shoal.store.connect import engine_of, parse
from shoal.store.store import Store
from shoal.store.values import NewRun
from shoal.store.writing import RunWriter

RUN = """INSERT INTO shoal_runs (id, name, status, created, updated, workers, step, loss, script, command, host,
    username, pid, pid_started, config, environment, version) VALUES ('old', 'digits', 'complete', 1, 2, 4, 1, 0.5,
    'train.py', '["train.py"]', 'box', 'ada', 7, 8, '{"clip": {"value": 1.0, "origin": "flag"}}', '{}', '0.1')"""
STEP = "INSERT INTO shoal_steps (run, step, time, epoch, loss, samples) VALUES (1, 1, 3.5, 0, 0.5, 8)"

WORKER = "INSERT INTO shoal_workers VALUES (1, 0, 8, '{}', 50, 1, 2, 'box')"


def make_version_1(url: str) -> None:
    """As the first release made it, with a run in it."""
    engine = engine_of(parse(url))
    migrations.migrate(engine, "", to=1)
    with migrations.writing(engine) as connection:
        connection.exec_driver_sql(RUN)
        connection.exec_driver_sql(STEP)
    engine.dispose()


def make_version_2(url: str) -> None:
    """As the release after it made it, with a run that sent something."""
    engine = engine_of(parse(url))
    migrations.migrate(engine, "", to=2)
    with migrations.writing(engine) as connection:
        connection.exec_driver_sql(RUN)
        connection.exec_driver_sql(STEP)
        connection.exec_driver_sql("UPDATE shoal_runs SET bytes_sent = 50, status = 'failed', boot = 'b'")
        connection.exec_driver_sql(WORKER)
    engine.dispose()


def version(url: str) -> int:
    engine = engine_of(parse(url))
    with engine.connect() as connection:
        found = migrations.version_of(connection)
    engine.dispose()
    return found


def test_a_store_of_the_first_version_is_brought_up(url: str) -> None:
    make_version_1(url)
    assert version(url) == 1
    with Store.open(url) as store:
        run = store.find("digits")
        assert (run.id, run.loss, run.workers, run.command, run.boot) == ("old", 0.5, 4, ["train.py"], "")
        assert run.config["clip"].value == 1.0
        assert [row.loss for row in store.steps("old")] == [0.5]
    assert version(url) == migrations.VERSION == 3


def test_a_store_without_an_account_of_traffic_is_brought_up(url: str) -> None:
    make_version_2(url)
    with Store.open(url) as store:
        assert (store.find("old").bytes_sent, store.traffic("old"), store.flows("old")) == (50, Traffic(), [])
        assert [(row.bytes_sent, row.traffic) for row in store.workers("old")] == [(50, Traffic())]
        (step,) = store.steps("old")
        assert (step.loss, step.bytes_sent, step.messages, step.exchange) == (0.5, None, None, None)
        writer = RunWriter(store, NewRun(id="old", name="digits", created=1.0, workers=4))
        writer.begin()
        sent = Traffic([Flow("gradient", "none", "memory", 7, 1)])
        shape = {"workers": 4, "total_steps": 9, "steps_per_epoch": 9, "samples_per_epoch": 9}
        start = RunStarted(step=1, run_id="old", run_dir=None, **shape)
        done = StepDone(step=2, epoch=0, loss=0.25, samples=8, rates=[], traffic=sent)
        writer.write([start, done, WorkerSeen(step=2, worker=0, samples=8, seconds={}, traffic=sent)])
        assert (store.find("old").bytes_sent, store.traffic("old")) == (57, sent)
        assert [row.bytes_sent for row in store.steps("old")] == [None, 7]
    assert version(url) == migrations.VERSION


def test_tables_are_as_queries_see_them(store: Store) -> None:
    with store.writing() as connection:
        there = inspect(connection)
        for table in schema.tables.sorted_tables:
            # Columns of a primary key are never NULL; SQLite says otherwise of some.
            columns = {column["name"]: column["nullable"] for column in there.get_columns(table.name)}
            columns |= dict.fromkeys((column.name for column in table.primary_key), False)
            assert columns == {column.name: column.nullable for column in table.columns}
            keys = there.get_pk_constraint(table.name)["constrained_columns"]
            assert keys == [column.name for column in table.primary_key]
        indexed = {tuple(index["column_names"]) for index in there.get_indexes("shoal_runs")}
        assert {("created",), ("name",)} <= indexed


def test_a_version_that_fails_leaves_the_one_before(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_version_1(url)
    broken = (*migrations.MIGRATIONS[:1], (*migrations.MIGRATIONS[1], "CREATE TABLE shoal_broken (oh no"))
    with monkeypatch.context() as patch:
        patch.setattr(migrations, "MIGRATIONS", broken)
        with pytest.raises(StoreError):
            Store.open(url)
    assert version(url) == 1
    with Store.open(url) as store:
        assert store.find("old").boot == ""


def test_a_newer_store_is_left_alone(url: str) -> None:
    with Store.open(url) as store, store.writing() as connection:
        connection.exec_driver_sql("UPDATE shoal_meta SET value = '99'")
    for create in (True, False):
        with pytest.raises(StoreError, match=r"version 99, .* up to 3\. Upgrade shoal .*Nothing was changed"):
            Store.open(url, create=create)
    assert version(url) == 99


def test_a_newer_file_keeps_its_bytes(tmp_path: Path, file_url: str) -> None:
    file = tmp_path / "shoal.db"
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE shoal_meta (name TEXT PRIMARY KEY, value TEXT)")
        connection.execute("INSERT INTO shoal_meta VALUES ('schema_version', '4')")
    connection.close()
    before = file.read_bytes()
    with pytest.raises(StoreError, match="version 4"):
        Store.open(file_url)
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


def open_together(
    url: str, barrier: multiprocessing.synchronize.Barrier, failures: multiprocessing.queues.SimpleQueue[str]
) -> None:
    try:
        barrier.wait(20)
        with Store.open(url) as store:
            store.runs()
    except BaseException as error:
        failures.put(repr(error))
        raise


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
def test_opened_by_many_at_the_same_time(url: str, old: bool) -> None:
    if old:
        make_version_1(url)
    many = 5
    context = multiprocessing.get_context("fork")
    barrier, failures = context.Barrier(many), context.SimpleQueue()
    processes = [context.Process(target=open_together, args=(url, barrier, failures)) for _ in range(many)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    codes = [process.exitcode for process in processes]
    assert codes == [0] * many, [] if failures.empty() else failures.get()
    failures.close()
    assert version(url) == migrations.VERSION


def test_a_version_that_is_no_number(file_url: str) -> None:
    with Store.open(file_url) as store, store.writing() as connection:
        connection.exec_driver_sql("UPDATE shoal_meta SET value = 'x'")
    with pytest.raises(StoreError, match="'x', which is not a number"):
        Store.open(file_url)
