"""`shoal runs`, `show`, `tag` and `rm` on a store with a few runs."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner, Result

from shoal.cli import compare, rm, runs, show, tag
from shoal.cli.circumstances import Trained
from shoal.cli.references import complete_run
from shoal.cli.text import Screen
from shoal.core.errors import ConfigError, RunDirError, RunNotFound
from shoal.core.events import (
    AnyEvent,
    CheckpointSaved,
    EvalDone,
    ExchangeSettled,
    RunStarted,
    ServerFacts,
    ServersSeen,
    StepDone,
    WorkerSeen,
)
from shoal.core.settings import Setting
from shoal.core.traffic import Flow, Traffic
from shoal.monitor.traffic import Account
from shoal.store.liveness import this_process
from shoal.store.store import Store
from shoal.store.values import NewRun, RunEnd
from shoal.store.writing import RunWriter

PROGRAM = """
import sys, typer
from shoal.cli import rm, runs, show, tag

app = typer.Typer(pretty_exceptions_enable=False)
app.callback()(lambda: None)
for command in (runs, show, tag, rm):
    command.register(app)
app()
"""
LOSSES = (2.0, 1.0, math.nan, 0.5)


def at(time: float, event: AnyEvent) -> AnyEvent:
    """The event as it happened at that time."""
    return msgspec.structs.replace(event, time=time)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SHOAL_STORE", raising=False)
    return tmp_path


def stored(
    run_id: str,
    *,
    name: str = "digits",
    status: str = "complete",
    created: float = 1000.0,
    folder: Path | None = None,
    error: str | None = None,
) -> str:
    """A run of four steps in the store. One that is running is run by this process."""
    config = {"workers": Setting(2, "flag"), "batch_size": Setting(8, "script"), "codec": Setting("none", "default")}
    alive = this_process()
    new = NewRun(
        id=run_id, name=name, created=created, workers=2, run_dir=str(folder) if folder else None, script="train.py",
        command=["train.py", "--note", "two words"], config=config, environment={"python": "3.11.2"},
        git_commit="abc123", git_dirty=True, version="0.1.0", host=alive.host, pid=alive.pid,
        pid_started=alive.started, boot=alive.boot,
    )  # fmt: skip
    start = RunStarted(
        step=0,
        run_id=run_id,
        run_dir=None,
        workers=2,
        total_steps=4,
        steps_per_epoch=2,
        samples_per_epoch=15,
        batch_size=8,
        parameters=1234,
        optimizers=["AdamW"],
    )
    happened = [at(created, start)]
    for step, loss in enumerate(LOSSES, 1):
        done = StepDone(step=step, epoch=(step - 1) // 2, loss=loss, samples=8, rates=[0.1], time=created + step)
        happened.append(at(created + step, done))
    happened.append(at(created + 5, EvalDone(step=4, epoch=1, metrics={"accuracy": 0.875})))
    happened.append(at(created + 5, WorkerSeen(step=4, worker=0, samples=15, seconds={"compute": 3.0, "idle": 1.0})))
    if folder is not None:
        saved = folder / "checkpoints" / "step-000000004"
        saved.mkdir(parents=True)
        (saved / "model.safetensors").write_bytes(b"x" * 5000)
        (saved / "manifest.json").write_text("{}")
        (folder / "run.json").write_text(json.dumps({"run_id": run_id}))
        happened.append(at(created + 5, CheckpointSaved(step=4, path=str(saved), best=True)))
    end = None if status == "running" else RunEnd(status=status, step=4, loss=0.5, error=error, traceback=error)
    with Store.open() as store:
        writer = RunWriter(store, new)
        writer.begin()
        writer.write(happened, end)
    return run_id


def shoal(*args: str, input: str | None = None) -> Result:
    app = typer.Typer()
    app.callback()(lambda: None)
    for command in (runs, show, tag, rm):
        command.register(app)
    return CliRunner().invoke(app, args, input=input)


def ids() -> list[str]:
    with Store.open(create=False) as store:
        return [run.id for run in store.runs()]


def test_an_empty_store_says_what_to_do_first(home: Path) -> None:
    told = shoal("runs")
    assert told.exit_code == 0
    assert "shoal demo" in told.stdout
    assert json.loads(shoal("runs", "--json").stdout) == []
    assert not (home / "home").exists(), "looking makes nothing"


def test_a_pipe_gets_every_column_newest_first() -> None:
    stored("old-1", created=1000.0)
    stored("new\tone-2", name="other\n\x1b[31mname", status="failed", created=2000.0)
    lines = [line.split("\t") for line in shoal("runs").stdout.splitlines()]
    assert lines[0][:4] == ["id", "name", "status", "created"]
    assert [line[0] for line in lines[1:]] == ["new one-2", "old-1"]
    assert {len(line) for line in lines} == {11}
    row = dict(zip(lines[0], lines[1], strict=True))
    assert (row["name"], row["status"], row["steps"], row["loss"]) == ("other name", "failed", "4/4", "0.5")
    assert (row["metrics"], row["seconds"], row["samples/s"]) == ("accuracy=0.875", "5", "6")


def test_filters_and_limit() -> None:
    for number in range(4):
        stored(f"r-{number}", name="a" if number % 2 else "b", status="failed" if number == 3 else "complete",
               created=number)  # fmt: skip
    shoal("tag", "r-2", "best")

    def listed(*args: str) -> list[str]:
        return [run["id"] for run in json.loads(shoal("runs", "--json", *args).stdout)]

    assert listed("-n", "2") == ["r-3", "r-2"]
    assert listed("-n", "2", "--all") == ["r-3", "r-2", "r-1", "r-0"]
    assert listed("--name", "a") == ["r-3", "r-1"]
    assert listed("--status", "failed") == ["r-3"]
    assert listed("--tag", "best") == ["r-2"]
    assert "No run is like that" in shoal("runs", "--name", "zebra").stdout
    assert shoal("runs", "--status", "tired").exit_code == 2
    assert shoal("runs", "-n", "0").exit_code == 2


@pytest.mark.parametrize(("width", "there", "gone"), [(80, "loss", "samples/s"), (200, "samples/s", None)])
def test_a_terminal_gets_what_fits(width: int, there: str, gone: str | None) -> None:
    stored("digits-20261115-223530-0008", created=time.time() - 200)
    shoal("tag", "last", "a" * 40)
    with Store.open() as store:
        text = runs.list_as_text(store.runs(), Screen(width, color=True), now=time.time())
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert plain != text
    assert max(map(len, plain.splitlines())) <= width
    assert "digits-20261115-223530-0008  " in plain and "✓ complete" in plain and "3 min ago" in plain
    assert there in plain
    assert gone is None or gone not in plain


def test_show_tells_everything(home: Path) -> None:
    stored("digits-1", folder=home / "digits-1")
    (home / "digits-1" / "report.html").write_text("")
    shoal("tag", "digits-1", "best")
    text = shoal("show", "digits").stdout
    for part in (
        "✓ complete", "4 of 4", "tags", "best", "train.py --note 'two words'",
        "AdamW", "1,234", "0.1 in the first step",
        "abc123, with changes",        "1 default not shown", "flag    2", "python  3.11.2", "step 4: ", "report.html",
        f"shoal run train.py --resume {home / 'digits-1'} -- --note 'two words'",
    ):  # fmt: skip
        assert part in text, part
    assert re.search(r"accuracy +0.875\n", text)
    assert re.search(r"worker .* compute +idle", text) and "75%" in text
    assert "×" in text.partition("Loss")[2], "the loss that is not a number is seen in the curve"
    assert "codec" not in text and "codec" in shoal("show", "digits", "--config").stdout
    assert "EvalDone" not in text and "EvalDone" in shoal("show", "digits", "--events").stdout


def test_show_of_a_failed_run_ends_with_the_traceback() -> None:
    stored("bad-1", status="failed", error="ValueError: item 3\n  in __getitem__\x1b[2J")
    text = shoal("show", "last").stdout
    assert re.search(r"error +ValueError: item 3\n", text)
    assert text.endswith("Traceback\nValueError: item 3\n  in __getitem__\n")


def test_a_run_cannot_speak_to_a_terminal() -> None:
    """Colours are put on after what comes from the run is cleaned."""
    stored("a-1", name="n\x1b[2J\x1b]0;title\x07", status="failed", error="bad\x1b[8m\x1b[31m")
    with Store.open() as store:
        run = store.find("last")
        told = show._run_as_text(run, Trained(), [], [], Account(), [], [], Screen(80, color=True), defaults=False)
        told += compare.render([run, run], [{}, {}], Screen(80, color=True))
    sequences = set(re.findall(r"\x1b[^m]*m", told))
    assert sequences <= {"\x1b[31m", "\x1b[0m", "\x1b[1m", "\x1b[2m"}, sequences
    assert re.search(r"error +\x1b\[31mbad\x1b\[0m", told) and re.search(r"name +n *\n", told)
    assert told.count("\x1b[31m") == 4, "one for the error, and three for the status"


SETTLED = ExchangeSettled(
    step=2,
    collective="shm",
    reason="all workers are on one host",
    hosts=[0, 0],
    latency=11e-6,
    bandwidth=5.5 * 2**30,
    buckets=[4 << 20, 1 << 20],
)


def sent_more(run_id: str, settled: ExchangeSettled = SETTLED) -> None:
    """The run goes on from step 2 for two steps, on two workers that tell what they send."""
    flows = [Flow("gradient", "none", "memory", 8 << 20, 16), Flow("control", "none", "memory", 400, 8)]
    sent = Traffic(flows, operations=6, exchange=0.08, exposed=0.02)
    seconds = {"compute": 0.3, "exchange": 0.02, "data": 0.08, "idle": 7.0}
    shape = {"total_steps": 4, "steps_per_epoch": 2, "samples_per_epoch": 15, "batch_size": 8}
    happened: list[AnyEvent] = [RunStarted(step=2, run_id=run_id, run_dir=None, workers=2, **shape), settled]
    done = StepDone(step=3, epoch=1, loss=0.7, samples=8, rates=[0.1], traffic=Traffic(flows, 3, 0.04, 0.01))
    happened += [done, msgspec.structs.replace(done, step=4)]
    happened += [WorkerSeen(step=4, worker=worker, samples=16, seconds=seconds, traffic=sent) for worker in (0, 1)]
    with Store.open() as store:
        writer = RunWriter(store, NewRun(id=run_id, name="digits", created=1.0, workers=2))
        writer.begin()
        writer.write(happened, RunEnd(status="complete", step=4, loss=0.5))


def test_show_has_the_traffic() -> None:
    stored("digits-1", status="failed")
    sent_more("digits-1")
    section = shoal("show", "last").stdout.partition("\nTraffic\n")[2].partition("\nConfiguration")[0]
    assert [line.split() for line in section.splitlines()[:4]] == [
        ["kind", "codec", "link", "bytes", "messages", "per", "step"],
        ["gradient", "none", "memory", "16.0", "MiB", "32", "8.0", "MiB"],
        ["control", "none", "memory", "800", "bytes", "16", "400", "bytes"],
        [],
    ]
    told = dict(line.strip().split(maxsplit=1) for line in section.splitlines()[4:] if line)
    assert told == {
        "operations": "3 per step, 15 per second",
        "exchange": "40 ms per step, 0.16 s over all workers",
        "exposed": "10 ms per step (5% of step time), 40 ms over all workers",
        "bandwidth": "100 MiB/s while a worker exchanged, 5.5 GiB/s summed in the first steps",
        "latency": "11 µs for the smallest sum",
        "collective": "shared memory; all workers are on one host",
        "hosts": "1, with 2 workers",
        "buckets": "2: 4.0 MiB, 1.0 MiB",
    }
    again = shoal("show", "last", "--events").stdout
    assert "ExchangeSettled  collective=shm" in again


def test_show_of_an_exchange_that_was_not_measured() -> None:
    stored("digits-1")
    sent_more("digits-1", msgspec.structs.replace(SETTLED, latency=0.0, bandwidth=0.0, buckets=[]))
    text = shoal("show", "last", "--events").stdout
    section = text.partition("\nTraffic\n")[2].partition("\nConfiguration")[0]
    assert "latency" not in text and "buckets" not in text and "summed in the first steps" not in text
    assert "shared memory; all workers are on one host" in section and "1, with 2 workers" in section
    assert "ExchangeSettled  collective=shm reason=" in text
    told = json.loads(shoal("show", "last", "--json").stdout)["traffic"]["settled"]
    assert told["collective"] == "shm" and told["hosts"] == [0, 0]
    assert told["latency"] is None and told["bandwidth"] is None and told["buckets"] is None


def test_show_says_nothing_of_traffic_where_there_is_none() -> None:
    stored("digits-1")
    assert "Traffic" not in shoal("show", "last").stdout
    told = json.loads(shoal("show", "last", "--json").stdout)["traffic"]
    assert told["flows"] == [] and told["bytes"] == 0 and told["settled"] is None


def test_traffic_as_json() -> None:
    stored("digits-1")
    sent_more("digits-1")
    told = json.loads(shoal("show", "last", "--json").stdout)
    traffic = told["traffic"]
    assert traffic["flows"][0]["bytes"] == told["run"]["traffic"]["flows"][0]["bytes"] == 16 << 20
    assert traffic["exposed_share"] == pytest.approx(0.05) and traffic["settled"]["buckets"] == [4 << 20, 1 << 20]
    assert traffic["exposed"] == pytest.approx(0.04) and traffic["operations_per_second"] == pytest.approx(15)
    assert told["workers"][1]["traffic"]["operations"] == 6


def test_show_as_json() -> None:
    stored("digits-1")
    told = json.loads(shoal("show", "last", "--json", "--events").stdout)
    assert told["run"]["config"]["workers"] == {"value": 2, "origin": "flag"}
    assert [event["kind"] for event in told["events"]] == ["RunStarted", "EvalDone"]
    assert "events" not in json.loads(shoal("show", "last", "--json").stdout)


def test_show_writes_a_page(home: Path) -> None:
    pytest.importorskip("shoal.monitor.report.page")
    stored("digits-1")
    page = home / "page.html"
    assert "Wrote" in shoal("show", "last", "--html", str(page)).stdout
    assert "digits-1" in page.read_text()
    assert isinstance(shoal("show", "last", "--html", str(page)).exception, ConfigError), "it is there already"


def test_a_run_without_steps_or_of_one_step_can_be_shown() -> None:
    with Store.open() as store:
        RunWriter(store, NewRun(id="none-1", name="none", created=1.0, workers=1)).begin()
    told = shoal("show", "none-1")
    assert told.exit_code == 0 and "0 of 0" in told.stdout
    assert "\t0\t\t" in shoal("runs").stdout


@pytest.mark.parametrize("command", [["show", "x"], ["tag", "x", "t"], ["rm", "x", "--yes"]])
def test_an_unknown_run(command: list[str]) -> None:
    stored("digits-1")
    assert isinstance(shoal(*command).exception, RunNotFound)


def test_tags_are_added_and_removed() -> None:
    stored("digits-1")
    assert shoal("tag", "last", "b", "a", "paper/t:2_x.y-z").stdout == "digits-1: a, b, paper/t:2_x.y-z\n"
    assert shoal("tag", "a", "b", "never", "--remove").stdout == "digits-1: a, paper/t:2_x.y-z\n"
    assert shoal("tag", "last", "a", "paper/t:2_x.y-z", "--remove").stdout == "digits-1: no tags\n"


@pytest.mark.parametrize("tag", ["two words", "a,b", "", "x" * 65, "a\n", "last", "é", "٣"])
def test_what_cannot_be_a_tag(tag: str) -> None:
    stored("digits-1")
    assert isinstance(shoal("tag", "last", "good", tag).exception, ConfigError)
    with Store.open() as store:
        assert store.find("last").tags == []


def test_a_tag_of_another_origin_can_be_removed() -> None:
    stored("digits-1")
    with Store.open() as store:
        store.tag("digits-1", ["é x"])
    assert shoal("tag", "last", "é x", "--remove").stdout == "digits-1: no tags\n"


def test_rm_removes_rows_and_folder(home: Path) -> None:
    stored("a-1", folder=home / "a-1")
    stored("b-2", folder=home / "b-2")
    told = shoal("rm", "a-1", "a-1", "--yes")
    assert told.exit_code == 0, told.output
    assert str(home / "a-1") in told.stdout and "KiB" in told.stdout
    assert not (home / "a-1").exists() and (home / "b-2").is_dir()
    assert ids() == ["b-2"]
    assert shoal("rm", "b-2", "--yes", "--keep-folder").exit_code == 0
    assert (home / "b-2" / "checkpoints").is_dir() and ids() == []


def test_rm_needs_a_yes(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored("a-1", folder=home / "a-1")
    refused = shoal("rm", "a-1")
    assert isinstance(refused.exception, ConfigError) and "--yes" in str(refused.exception)
    monkeypatch.setattr(rm, "_is_answered", lambda: True)
    for answer in ("n\n", "\n"):
        told = shoal("rm", "a-1", input=answer)
        assert told.exit_code == 1 and "Nothing was removed" in told.stdout
        assert ids() == ["a-1"] and (home / "a-1" / "run.json").exists()
    assert shoal("rm", "a-1", input="y\n").exit_code == 0
    assert ids() == [] and not (home / "a-1").exists()


def test_rm_leaves_a_run_that_is_running(home: Path) -> None:
    stored("a-1", folder=home / "a-1")
    stored("busy-1", status="running", folder=home / "busy-1")
    assert isinstance(shoal("rm", "a-1", "busy-1", "--yes").exception, RunDirError)
    assert sorted(ids()) == ["a-1", "busy-1"] and (home / "a-1").is_dir(), "all or none"


@pytest.mark.parametrize("about", [None, "[]", '{"run_id": "other"}', "not json"])
def test_rm_leaves_a_folder_that_is_not_the_runs(home: Path, about: str | None) -> None:
    stored("a-1", folder=home / "a-1")
    (home / "a-1" / "run.json").unlink()
    if about is not None:
        (home / "a-1" / "run.json").write_text(about)
    told = shoal("rm", "a-1", "--yes")
    assert told.exit_code == 0 and "stays" in told.stdout
    assert ids() == [] and (home / "a-1" / "checkpoints").is_dir()


def test_rm_leaves_what_the_run_did_not_write(home: Path) -> None:
    project = home / "project"
    stored("a-1", folder=project)
    (project / "train.py").write_text("precious")
    (project / "earlier" / "old-1").mkdir(parents=True)
    shoal("rm", "a-1", "--yes")
    assert sorted(path.name for path in project.iterdir()) == ["earlier", "train.py"]
    stored("b-1", folder=home / "own")
    shoal("rm", "b-1", "--yes")
    assert not (home / "own").exists()


def test_rm_does_not_follow_a_link(home: Path) -> None:
    stored("a-1", folder=home / "real")
    (home / "link").symlink_to(home / "real")
    (home / "real" / "logs").symlink_to(home / "elsewhere")
    (home / "elsewhere").mkdir()
    (home / "elsewhere" / "kept").write_text("")
    assert shoal("rm", "a-1", "--yes").exit_code == 0
    assert (home / "elsewhere" / "kept").exists()


def test_a_folder_that_cannot_be_removed_keeps_its_row(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored("a-1", folder=home / "a-1")

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("shutil.rmtree", refuse)
    assert isinstance(shoal("rm", "a-1", "--yes").exception, RunDirError)
    assert ids() == ["a-1"]


def test_completion_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    stored("a-1", name="alpha")
    stored("b-1", name="twice")
    stored("b-2", name="twice")
    assert complete_run("")[0][0] == "last"
    assert [word for word, _ in complete_run("a")] == ["a-1", "alpha"]
    assert [word for word, _ in complete_run("t")] == [], "a name of two runs means neither"
    monkeypatch.setenv("SHOAL_STORE", "nonsense://")
    assert complete_run("") == []


def test_a_reader_that_leaves_early_is_no_error() -> None:
    stored("a-1")
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "runs"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ)
    )
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, b"")


@pytest.mark.parametrize(
    "command", [["runs"], ["show", "last"], ["export", "last"], ["compare", "last", "last"], ["--version"], ["--help"]]
)
def test_a_full_disk_at_the_other_end_is_one_line(command: list[str]) -> None:
    stored("a-1")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "shoal.cli", *command],
            stdout=full,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": ""},
            timeout=60,
        )
    told = b"shoal: cannot write to standard output: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_without_a_standard_output() -> None:
    stored("a-1")
    done = subprocess.run(
        ["/bin/sh", "-c", f"exec {sys.executable} -m shoal.cli runs >&-"], stderr=subprocess.PIPE, timeout=60
    )
    assert done.returncode == 0 and done.stderr == b""


def test_an_error_cannot_speak_to_a_terminal() -> None:
    stored("a-1", name="n\x1b[2J")
    stored("a-2", name="n\x1b[2J")
    done = subprocess.run([sys.executable, "-m", "shoal.cli", "show", "a-\x1b[31m"], capture_output=True, timeout=60)
    assert done.returncode == 3 and b"\x1b" not in done.stderr
    done = subprocess.run([sys.executable, "-m", "shoal.cli", "show", "a-"], capture_output=True, timeout=60)
    assert done.returncode == 3 and b"a-2" in done.stderr and b"\x1b" not in done.stderr


def test_listing_imports_nothing_heavy() -> None:
    stored("a-1")
    finished = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", PROGRAM, "show", "last"], capture_output=True, text=True, timeout=60
    )
    assert finished.returncode == 0, finished.stderr
    imported = {line.rpartition("|")[2].strip() for line in finished.stderr.splitlines()}
    assert "shoal.store.store" in imported
    assert not imported & {"torch", "numpy", "matplotlib", "rich.console", "pyarrow"}


def served(run_id: str, sync: str, pace: float, created: float) -> None:
    """A run of 200 steps on two servers, with a loss that falls the slower the larger `pace` is."""
    shape = {"total_steps": 200, "steps_per_epoch": 10, "samples_per_epoch": 80, "batch_size": 8}
    happened: list[AnyEvent] = [RunStarted(step=0, run_id=run_id, run_dir=None, workers=2, **shape)]
    for step in range(1, 201):
        happened.append(StepDone(step=step, epoch=0, loss=1 + math.exp(-step / pace), samples=8, rates=[0.1]))
    both = [ServerFacts(number=number, shards=6, bytes=1 << 20, mirrored=6, pushes=400) for number in (0, 1)]
    happened.append(ServersSeen(step=200, servers=both, staleness=[390, 10, 0], replaced=1))
    config = {"sync": Setting(sync, "flag")}
    with Store.open() as store:
        writer = RunWriter(store, NewRun(id=run_id, name="tide", created=created, workers=2, config=config))
        writer.begin()
        writer.write(happened, RunEnd(status="complete", step=200, loss=1.0))


def test_show_has_the_servers(tmp_path: Path) -> None:
    served("tide-1", "server", 25.0, 1000.0)
    served("tide-2", "server:mode=ssp,staleness=2", 50.0, 2000.0)
    section = shoal("show", "tide-2").stdout.partition("\nServers\n")[2].partition("\nConfiguration")[0]
    heads, first, second, empty, *facts = section.splitlines()
    assert heads.split() == [
        "server",
        "shards",
        "weights",
        "copies",
        "pushes",
        "repeated",
        "received",
        "sent",
        "applying",
    ]
    assert first.split() == ["0", "6", "1.0", "MiB", "6", "400", "0", "shared", "memory", "shared", "memory", "0", "s"]
    assert second.split()[0] == "1" and empty == ""
    told = dict(line.strip().split(maxsplit=1) for line in facts if line)
    samples = told.pop("samples")
    assert told == {
        "sync": "ssp (staleness 2) on 2 servers",
        "staleness": "gradients computed with weights that lacked 0 steps: 98%, 1: 2%",
        "mean": "staleness  0.025 steps",
        "replaced": "1 server that had died",
    }
    assert re.fullmatch(
        r"needed (1\.9|2\.0)\d times the samples of run tide-1 \(bsp\) to reach loss 1\.\d+: "
        "lower staleness=, or use mode=bsp",
        samples,
    )
    data = json.loads(shoal("show", "tide-2", "--json").stdout)["servers"]
    assert data["mean_staleness"] == 0.025 and data["replaced"] == 1 and len(data["servers"]) == 2
    assert data["samples"]["run_id"] == "tide-1" and data["samples"]["ratio"] == pytest.approx(2.0, rel=0.06)
    assert "ServersSeen" not in shoal("show", "tide-2", "--events").stdout, "they have a section of their own"
    page = tmp_path / "page.html"
    assert shoal("show", "tide-2", "--html", str(page)).exit_code == 0
    assert "<h2>Servers</h2>" in page.read_text() and "times the samples of run tide-1" in page.read_text()


def test_show_of_a_run_without_staleness_says_nothing_of_samples() -> None:
    served("tide-1", "server", 25.0, 1000.0)
    served("tide-2", "server", 50.0, 2000.0)
    text = shoal("show", "tide-2").stdout
    assert "bsp on 2 servers" in text and "times the samples" not in text
    stored("digits-1")
    assert "Servers" not in shoal("show", "digits-1").stdout
    assert json.loads(shoal("show", "digits-1", "--json").stdout)["servers"] is None
