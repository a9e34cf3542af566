"""`shoal compare`: what differs, side by side and as a plot."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner, Result

from shoal.cli import compare
from shoal.cli.plot import curve_of
from shoal.cli.text import ago
from shoal.core.errors import ConfigError, RunNotFound
from shoal.core.events import AnyEvent, EvalDone, RunStarted, StepDone
from shoal.core.settings import Setting
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
