"""`shoal export`: a run as csv, json and parquet."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner, Result

from shoal.cli import export, output
from shoal.core.errors import ConfigError, RunNotFound
from shoal.core.events import AnyEvent, EvalDone, RunStarted, StepDone, WorkerSeen
from shoal.core.traffic import Flow, Traffic
from shoal.store.store import Store
from shoal.store.values import NewRun, RunEnd
from shoal.store.writing import RunWriter


def at(time: float, event: AnyEvent) -> AnyEvent:
    """The event as it happened at that time."""
    return msgspec.structs.replace(event, time=time)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SHOAL_STORE", raising=False)
    start = RunStarted(
        step=0,
        run_id="a",
        run_dir=None,
        workers=1,
        total_steps=3,
        steps_per_epoch=3,
        samples_per_epoch=24,
        batch_size=8,
    )
    steps = [
        StepDone(
            step=1, epoch=0, loss=2.5, samples=8, rates=[0.1], norm=1.0, time=1001.0, logs={"aux": 1.0, "loss": 7.0}
        ),
        StepDone(step=2, epoch=0, loss=math.nan, samples=8, rates=[], time=1002.0),
        StepDone(step=3, epoch=0, loss=math.inf, samples=8, rates=[0.1], time=1003.0, logs={"zeta": 3.0}),
    ]
    happened = [at(1000.0, start), *(at(step.time, step) for step in steps)]
    happened.append(at(1003.0, EvalDone(step=3, epoch=0, metrics={"accuracy": math.nan})))
    happened.append(at(1003.0, WorkerSeen(step=3, worker=0, samples=24, seconds={"compute": 3.0})))
    with Store.open() as store:
        writer = RunWriter(store, NewRun(id="a", name="a", created=1000.0, workers=1))
        writer.begin()
        writer.write(happened, RunEnd(status="complete", step=3, loss=1.0))
    return tmp_path


def shoal(*args: str) -> Result:
    app = typer.Typer()
    app.callback()(lambda: None)
    export.register(app)
    return CliRunner().invoke(app, ["export", *args])


def test_csv_has_a_column_for_every_figure() -> None:
    told = shoal("a")
    assert told.exit_code == 0, told.output
    rows = list(csv.DictReader(io.StringIO(told.stdout)))
    names = ["step", "time", "epoch", "loss", "samples", "rate", "norm"]
    traffic = ["bytes_sent", "messages", "operations", "exchange", "exposed"]
    assert list(rows[0]) == [*names, *traffic, "aux", "log.loss", "zeta"]
    assert {row[name] for row in rows for name in traffic} == {""}
    assert [row["loss"] for row in rows] == ["2.5", "nan", "inf"]
    assert [row["log.loss"] for row in rows] == ["7.0", "", ""]
    assert (rows[1]["rate"], rows[1]["norm"], rows[2]["zeta"]) == ("", "", "3.0")


def test_json_has_everything_and_null_for_what_is_not_a_number() -> None:
    told = json.loads(shoal("last", "--format", "json").stdout, parse_constant=pytest.fail)
    assert set(told) == {"run", "steps", "flows", "events", "checkpoints", "workers"}
    assert told["run"]["id"] == "a"
    assert [step["loss"] for step in told["steps"]] == [2.5, None, None]
    assert told["events"][-1]["data"]["metrics"] == {"accuracy": None}
    assert told["workers"][0]["seconds"] == {"compute": 3.0}
    assert told["checkpoints"] == []


def test_parquet_can_be_read_back(home: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    target = home / "steps.parquet"
    assert shoal("a", "-o", str(target)).exit_code == 0
    table = parquet.read_table(target)
    assert table.schema.metadata[b"shoal.run"] == b"a"
    assert table["step"].to_pylist() == [1, 2, 3]
    losses = table["loss"].to_pylist()
    assert losses[0] == 2.5 and math.isnan(losses[1]) and math.isinf(losses[2])
    assert table["rate"].to_pylist() == [0.1, None, 0.1]


def test_what_was_sent_is_exported(home: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    flow = Flow("gradient", "none", "memory", 100, 4)
    with Store.open() as store:
        writer = RunWriter(store, NewRun(id="b", name="b", created=2000.0, workers=2))
        writer.begin()
        done = StepDone(step=1, epoch=0, loss=1.0, samples=8, rates=[0.1], traffic=Traffic([flow], 3, 0.5, 0.25))
        alone = StepDone(step=2, epoch=0, loss=1.0, samples=8, rates=[0.1], logs={"exposed": 7.0})
        sent = WorkerSeen(step=1, worker=0, samples=8, seconds={}, traffic=Traffic([flow], 3, 0.5, 0.25))
        writer.write([done, alone, sent], RunEnd(status="complete", step=2))
    first, second = csv.DictReader(io.StringIO(shoal("b").stdout))
    names = ("bytes_sent", "messages", "operations", "exchange", "exposed")
    assert [first[name] for name in names] == ["100", "4", "3", "0.5", "0.25"]
    assert [second[name] for name in names] == [""] * 5 and second["log.exposed"] == "7.0"
    told = json.loads(shoal("b", "--format", "json").stdout)
    assert told["flows"] == [{"step": 1, **json.loads(msgspec.json.encode(flow))}]
    assert told["steps"][0]["exposed"] == 0.25 and told["run"]["traffic"] == told["workers"][0]["traffic"]
    shoal("b", "-o", str(home / "b.parquet"))
    table = parquet.read_table(home / "b.parquet")
    assert table["bytes_sent"].to_pylist() == [100, None] and str(table["messages"].type) == "int64"
    assert table["exposed"].to_pylist() == [0.25, None]


def test_parquet_goes_into_a_pipe_but_not_onto_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    assert shoal("a", "--format", "parquet").stdout_bytes[:4] == b"PAR1"
    monkeypatch.setattr(export, "_is_terminal", lambda: True)
    refused = shoal("a", "--format", "parquet").exception
    assert isinstance(refused, ConfigError) and "-o" in str(refused)


def test_without_pyarrow_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused = shoal("a", "--format", "parquet").exception
    assert isinstance(refused, ConfigError) and "pip install 'shoal[parquet]'" in str(refused)


def test_the_ending_of_the_file_says_the_format(home: Path) -> None:
    for name, begins in (("x.json", "{"), ("x.csv", "step,"), ("x", "step,")):
        told = shoal("a", "-o", str(home / name))
        assert told.exit_code == 0 and str(home / name) in told.stderr
        assert (home / name).read_text().startswith(begins)
    assert sorted(path.name for path in home.iterdir()) == ["home", "x", "x.csv", "x.json"]
    refused = shoal("a", "-o", str(home / "x.xlsx")).exception
    assert isinstance(refused, ConfigError) and ".csv, .json or .parquet" in str(refused)
    assert shoal("a", "-o", str(home / "x.xlsx"), "--format", "csv").exit_code == 0
    umask = os.umask(0)
    os.umask(umask)
    assert (home / "x.csv").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_file_that_is_there_stays(home: Path) -> None:
    (home / "x.csv").write_text("mine")
    refused = shoal("a", "-o", str(home / "x.csv")).exception
    assert isinstance(refused, ConfigError) and "--force" in str(refused)
    assert (home / "x.csv").read_text() == "mine"
    assert shoal("a", "-o", str(home / "x.csv"), "--force").exit_code == 0
    assert (home / "x.csv").read_text().startswith("step,")


def test_a_file_that_comes_meanwhile_stays(home: Path) -> None:
    target = home / "x.csv"

    def fill(path: Path) -> None:
        path.write_text("ours")
        target.write_text("theirs")

    with pytest.raises(ConfigError):
        output.write_file(target, fill, force=False)
    assert [path.name for path in home.iterdir() if path.is_file()] == ["x.csv"]
    assert target.read_text() == "theirs"


def test_what_fails_half_way_leaves_nothing(home: Path) -> None:
    def fill(path: Path) -> None:
        path.write_text("half")
        raise KeyboardInterrupt

    (home / "x.csv").write_text("before")
    with pytest.raises(KeyboardInterrupt):
        output.write_file(home / "x.csv", fill, force=True)
    assert [path.name for path in home.iterdir() if path.is_file()] == ["x.csv"]
    assert (home / "x.csv").read_text() == "before"


@pytest.mark.parametrize("name", ["gone/x.csv", "home"])
def test_where_nothing_can_be_written(home: Path, name: str) -> None:
    assert isinstance(shoal("a", "-o", str(home / name)).exception, ConfigError)


def test_devices_and_dash() -> None:
    assert shoal("a", "-o", "/dev/null").exit_code == 0
    assert shoal("a", "-o", "-").stdout.startswith("step,")


def test_wrong_use() -> None:
    assert shoal("a", "--format", "xml").exit_code == 2
    assert isinstance(shoal("zebra").exception, RunNotFound)
