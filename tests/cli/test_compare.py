"""`shoal compare`: what differs, side by side and as a plot."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner, Result

from shoal.cli import compare
from shoal.cli.plot import curve_of
from shoal.cli.text import ago
from shoal.core.errors import ConfigError, RunNotFound
from shoal.core.events import AnyEvent, EvalDone, RunStarted, ServerFacts, ServersSeen, StepDone, WorkerSeen
from shoal.core.settings import Setting
from shoal.core.traffic import Flow, Traffic
from shoal.store.recorder import Recorder
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
    return tmp_path


def stored(run_id: str, losses: Sequence[float], *, rate: float = 0.1, accuracy: float | None = None) -> None:
    config = {"rate": Setting(rate, "script"), "seed": Setting(0, "default")}
    start = RunStarted(
        step=0, run_id=run_id, run_dir=None, workers=2, total_steps=len(losses), steps_per_epoch=5,
        samples_per_epoch=40, batch_size=8,
    )  # fmt: skip
    happened = [at(1000.0, start)]
    for step, loss in enumerate(losses, 1):
        done = StepDone(step=step, epoch=0, loss=loss, samples=8, rates=[rate], time=1000.0 + step, logs={"aux": loss})
        happened.append(at(1000.0 + step, done))
    if accuracy is not None:
        measured = EvalDone(step=len(losses), epoch=0, metrics={"accuracy": accuracy})
        happened.append(at(1000.0 + len(losses), measured))
    with Store.open() as store:
        writer = RunWriter(store, NewRun(id=run_id, name=run_id, created=1000.0, workers=2, config=config))
        writer.begin()
        writer.write(happened, RunEnd(status="complete", step=len(losses), loss=losses[-1] if losses else None))


def shoal(*args: str) -> Result:
    app = typer.Typer()
    app.callback()(lambda: None)
    compare.register(app)
    return CliRunner().invoke(app, ["compare", *args])


def test_only_what_differs_is_shown_with_its_origin() -> None:
    stored("a", [2.0, 1.0], rate=0.1, accuracy=0.5)
    stored("b", [2.0, 0.25], rate=0.3, accuracy=0.75)
    text = shoal("a", "b").stdout
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.split()}
    assert rows["rate"] == ["0.1", "(script)", "0.3", "(script)"]
    assert "seed" not in rows
    assert rows["loss"] == ["1", "0.25", "(-0.75)"]
    assert rows["accuracy"] == ["0.5", "0.75", "(+0.25)"]
    assert rows["steps"] == ["2", "2"]


def test_what_exchange_took_is_compared() -> None:
    stored("a", [2.0, 1.0])
    stored("b", [2.0, 1.0])
    assert "exposed" not in shoal("a", "b").stdout, "of runs that sent nothing, nothing is said"
    for run_id, exposed in (("c", 2.0), ("d", 0.5)):
        sent = Traffic([Flow("gradient", "none", "memory", 1 << 20, 4)], 3, 2 * exposed, exposed)
        with Store.open() as store:
            writer = RunWriter(store, NewRun(id=run_id, name=run_id, created=1000.0, workers=2))
            writer.begin()
            writer.write([WorkerSeen(step=1, worker=0, samples=8, seconds={}, traffic=sent)])
    lines = shoal("c", "d", "a").stdout.splitlines()
    rows = {line.split("seconds")[0].strip(): line.split()[2:] for line in lines if " seconds " in line}
    assert rows["exposed"] == ["2.0", "s", "0.50", "s", "(-75.0%)", "–"]
    assert rows["exchange"] == ["4.0", "s", "1.0", "s", "(-75.0%)", "–"]
    figures = json.loads(shoal("c", "a", "--json").stdout)["figures"]
    assert figures["exposed seconds"] == [2.0, None] and figures["bytes sent"] == [1 << 20, 0]


def test_what_exchange_took_is_not_told_of_servers() -> None:
    """Their workers push and pull, and no group's operation has a beginning and an end that could be timed."""
    for run_id, operations in (("group", 3), ("servers", 0)):
        sent = Traffic(
            [Flow("gradient", "none", "memory", 1 << 20, 4)], operations, float(operations), 0.5 * operations
        )
        with Store.open() as store:
            writer = RunWriter(store, NewRun(id=run_id, name=run_id, created=1000.0, workers=2))
            writer.begin()
            writer.write([WorkerSeen(step=1, worker=0, samples=8, seconds={}, traffic=sent)])
    figures = json.loads(shoal("group", "servers", "--json").stdout)["figures"]
    assert figures["exchange seconds"] == [3.0, None] and figures["exposed seconds"] == [1.5, None]
    assert figures["bytes sent"] == [1 << 20, 1 << 20]


def made(run_id: str, rate: float = 0.1, optimizer: str = "AdamW", torch: str = "2.13.0", **changes: Any) -> None:
    """A run of which Shoal knows more than the Trainer's arguments."""
    values: dict[str, Any] = {
        "script": "/home/ada/train.py",
        "command": ["python", "train.py"],
        "git_commit": "0123456789abcdef",
        "environment": {"python": "3.11.7", "packages": {"torch": torch}},
        "config": {"optimizer": Setting("<lambda>", "script")},
    }
    new = NewRun(id=run_id, name=run_id, created=1000.0, workers=2, **{**values, **changes})
    shape: dict[str, Any] = {"total_steps": 1, "steps_per_epoch": 5, "samples_per_epoch": 40, "batch_size": 8}
    start = RunStarted(step=0, run_id=run_id, run_dir=None, workers=2, parameters=1234, optimizers=[optimizer], **shape)
    done = StepDone(step=1, epoch=0, loss=1.0, samples=8, rates=[rate])
    with Store.open() as store:
        writer = RunWriter(store, new)
        writer.begin()
        writer.write([start, done], RunEnd(status="complete", step=1, loss=1.0))


def test_what_else_differs_is_told() -> None:
    made("a")
    made(
        "b", rate=0.3, optimizer="SGD", torch="2.12.0", git_dirty=True, command=["python", "train.py", "--rate", "0.3"]
    )
    text = shoal("a", "b").stdout
    assert "What differs\n" in text and "Nothing" not in text
    rows = [line.split(maxsplit=1) for line in text.partition("What differs")[2].partition("Figures")[0].splitlines()]
    told = {row[0]: row[1] for row in rows if len(row) == 2}
    assert told["script's"].split() == ["arguments", "–", "--rate", "0.3"]
    assert told["optimizer"].split() == ["AdamW", "SGD"]
    assert told["learning"].split() == ["rate", "0.1", "0.3"]
    assert told["git"].split() == ["commit", "0123456789ab", "0123456789ab", "with", "changes"]
    assert told["torch"].split() == ["2.13.0", "2.12.0"]
    assert not {"parameters", "python", "script", "workers"} & set(told)
    assert json.loads(shoal("a", "b", "--json").stdout)["differences"]["optimizer"] == ["AdamW", "SGD"]


def test_where_nothing_differs_no_more_is_said_than_is_known() -> None:
    made("a")
    made("b")
    text = shoal("a", "b").stdout
    assert "Nothing that Shoal knows of differs.\n" in text and "What differs" not in text
    stored("c", [1.0], rate=0.1)
    stored("d", [1.0], rate=0.3)
    assert "What else differs" in shoal("c", "d").stdout


def test_as_json() -> None:
    stored("a", [1.0], rate=0.1)
    stored("b", [math.nan], rate=0.3)
    told = json.loads(shoal("a", "b", "--json").stdout)
    assert [run["id"] for run in told["runs"]] == ["a", "b"]
    assert told["config"] == {"rate": [{"value": 0.1, "origin": "script"}, {"value": 0.3, "origin": "script"}]}
    assert told["figures"]["loss"] == [1.0, None]


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_runs_of_all_kinds_are_drawn(home: Path, ending: str) -> None:
    stored("long", [2.0 / (1 + step) if step != 70 else math.nan for step in range(150)], accuracy=0.5)
    stored("short", [2.0, math.nan, math.inf])
    stored("none", [])
    target = home / f"out.{ending}"
    told = shoal("long", "long", "short", "none", "--plot", str(target))
    assert told.exit_code == 0, told.output
    assert f"Wrote {target}" in told.stdout
    begins = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending]
    assert target.read_bytes().startswith(begins)
    assert [path.name for path in home.iterdir() if path.name != "home"] == [target.name], "nothing is left beside it"


def test_a_metric_of_the_evaluation_and_a_logged_figure_are_drawn(home: Path) -> None:
    stored("a", [2.0, 1.0], accuracy=0.5)
    stored("b", [2.0, 1.0], accuracy=0.6)
    assert shoal("a", "b", "--plot", str(home / "1.png"), "--metric", "accuracy").exit_code == 0
    assert shoal("a", "b", "--plot", str(home / "2.png"), "--metric", "aux").exit_code == 0
    refused = shoal("a", "b", "--plot", str(home / "3.png"), "--metric", "acuracy").exception
    assert isinstance(refused, ConfigError) and "accuracy, aux, loss" in str(refused)
    assert not (home / "3.png").exists()


def test_pauses_are_left_out_of_the_time() -> None:
    stored("a", [2.0, 1.0])
    again = RunStarted(
        step=2,
        run_id="a",
        run_dir=None,
        workers=2,
        total_steps=3,
        steps_per_epoch=5,
        samples_per_epoch=40,
        batch_size=8,
    )
    done = StepDone(step=3, epoch=0, loss=0.5, samples=8, rates=[0.1], time=9001.0)
    with Store.open() as store:
        writer = RunWriter(store, NewRun(id="a", name="a", created=1000.0, workers=2))
        writer.begin()
        writer.write([at(9000.0, again), at(9001.0, done)], RunEnd(status="complete", step=3))
        curve = curve_of(store, store.find("a"), "loss")
    assert curve.seconds == [1.0, 2.0, 3.0]


def test_a_start_that_is_told_late_counts_from_when_it_was(home: Path) -> None:
    """Workers are steps ahead when the start of a run is recorded: it happened before them all the same."""
    shape: dict[str, Any] = {"total_steps": 4, "steps_per_epoch": 5, "samples_per_epoch": 40, "batch_size": 8}

    def start(step: int, time: float) -> RunStarted:
        return RunStarted(step=step, time=time, run_id="a", run_dir=None, workers=2, **shape)

    def done(step: int, time: float) -> StepDone:
        return StepDone(step=step, time=time, epoch=0, loss=1.0, samples=8, rates=[0.1])

    for events in (
        [start(0, 1000.0), done(1, 1001.0), done(2, 1002.0)],
        [start(2, 9000.0), done(3, 9001.0), done(4, 9002.0)],
    ):
        recorder = Recorder(NewRun(id="a", name="a", created=1000.0, workers=2), warn=pytest.fail)
        for event in events:
            recorder(event)  # long after the times of the events
        recorder.close(RunEnd(status="interrupted"))
    with Store.open(create=False) as store:
        curve = curve_of(store, store.find("a"), "loss")
        starts = [event for event in store.events("a") if event.kind == "RunStarted"]
        seconds = store.find("a").seconds
    assert curve.seconds == [1.0, 2.0, 3.0, 4.0], "the pause is left out, and no step is before the start"
    assert [event.time for event in starts] == [1000.0, 9000.0] and "time" not in starts[0].data
    assert seconds == 4.0


def test_the_pause_begins_with_the_last_that_was_heard() -> None:
    stored("a", [2.0, 1.0], accuracy=0.5)
    shape: dict[str, Any] = {"total_steps": 3, "steps_per_epoch": 5, "samples_per_epoch": 40, "batch_size": 8}
    again = RunStarted(step=2, time=9000.0, run_id="a", run_dir=None, workers=2, **shape)
    with Store.open() as store:
        writer = RunWriter(store, NewRun(id="a", name="a", created=1000.0, workers=2))
        writer.begin()
        evaluated = EvalDone(step=2, time=1010.0, epoch=0, metrics={"accuracy": 0.5})
        writer.write([evaluated, again, at(9001.0, StepDone(step=3, epoch=0, loss=0.5, samples=8, rates=[0.1]))])
        assert curve_of(store, store.find("a"), "loss").seconds == [1.0, 2.0, 11.0]


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["a"], "two runs or more"),
        (["a", "a", "--plot", "x.gif"], ".png, .svg, .pdf"),
        (["a", "a", "--plot", "."], "end in"),
    ],
)
def test_wrong_use(args: list[str], part: str) -> None:
    stored("a", [1.0])
    refused = shoal(*args).exception
    assert isinstance(refused, ConfigError) and part in str(refused)


def test_an_unknown_run() -> None:
    stored("a", [1.0])
    assert isinstance(shoal("a", "zebra").exception, RunNotFound)


def test_without_matplotlib_it_says_what_to_install(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored("a", [1.0])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    refused = shoal("a", "a", "--plot", str(home / "x.png")).exception
    assert isinstance(refused, ConfigError) and "pip install 'shoal[plot]'" in str(refused)


def test_a_plot_that_is_there_stays(home: Path) -> None:
    stored("a", [1.0])
    (home / "x.svg").write_text("mine")
    assert isinstance(shoal("a", "a", "--plot", str(home / "x.svg")).exception, ConfigError)
    assert (home / "x.svg").read_text() == "mine"
    assert shoal("a", "a", "--plot", str(home / "x.svg"), "--force").exit_code == 0


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "just now"), (59, "59 s ago"), (200, "3 min ago"), (7200, "2 h ago"), (2e5, "2 d ago")]
)
def test_ago(seconds: float, text: str) -> None:
    assert ago(seconds) == text


def test_servers_are_compared_where_a_run_has_them() -> None:
    facts = ServerFacts(number=0, shards=1, bytes=8, pushes=3)
    syncs = {"a": "allreduce", "b": "server:mode=ssp,staleness=3"}
    for run_id, sync in syncs.items():
        config = {"sync": Setting(sync, "flag")}
        seen: list[AnyEvent] = [ServersSeen(step=1, servers=[facts], staleness=[1, 1])] if run_id == "b" else []
        with Store.open() as store:
            writer = RunWriter(store, NewRun(id=run_id, name=run_id, created=1000.0, workers=2, config=config))
            writer.begin()
            writer.write(seen, RunEnd(status="complete"))
    lines = [line.split() for line in shoal("a", "b").stdout.splitlines()]
    assert ["A", "a", "✓", "complete", "allreduce"] in lines
    assert ["B", "b", "✓", "complete", "ssp", "(staleness", "3)", "on", "2", "servers"] in lines
    assert ["mean", "staleness", "–", "0.5"] in lines
    assert json.loads(shoal("a", "b", "--json").stdout)["figures"]["mean staleness"] == [None, 0.5]
    alone = shoal("a", "a").stdout
    assert "staleness" not in alone and "allreduce" not in alone, "of runs without servers, nothing is said"
