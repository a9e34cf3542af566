"""`shoal run`, as a user types it."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import get_type_hints

import pytest

from shoal.cli import run
from shoal.core import spec
from tests.warm import Warm

Shoal = Callable[..., subprocess.CompletedProcess[str]]

SCRIPT = """
import sys
import torch
from torch import nn
from shoal import Trainer


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if "--bug" in sys.argv and index == 40:
            return self.table[index]
        return torch.tensor([index / 64])


def loss(model, batch):
    if "--talk" in sys.argv:
        print("a worker speaks")
    return (model(batch) - batch**2).square().mean()


result = Trainer(
    nn.Linear(1, 1),
    loss,
    lambda params: torch.optim.SGD(params, lr=0.1),
    Squares(),
    batch_size=16,
    steps=int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 6,
    workers=1,
).fit()
print("RESULT", result.workers, result.steps, sys.argv[1:], __name__, __file__)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("WORD = 'found'\n")
    return tmp_path


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "shoal.cli", *args]


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "SHOAL_HOME": str(folder / "home"), "COLUMNS": "160", "NO_COLOR": "1"}


@pytest.fixture(scope="module")
def shoal() -> Iterator[Shoal]:
    """What a user would type in a folder, sooner."""
    with Warm() as warm:
        yield lambda folder, *args: warm.run("-m", "shoal.cli", *args, folder=folder, environment=environment(folder))


def cold(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*args), cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=90, check=False
    )


def test_flags_beat_the_script_and_the_rest_is_the_scripts(folder: Path, shoal: Shoal) -> None:
    done = cold(folder, "run", "train.py", "--workers", "2", "--", "--lr", "3")
    assert done.returncode == 0, done.stderr
    assert "RESULT 2 6 ['--lr', '3'] __main__ train.py" in done.stdout
    assert "6 steps on 2 workers" in done.stderr and "report.html" in done.stderr
    # the run is in the store, by the name of the script
    listed = shoal(folder, "runs", "--json")
    (run,) = json.loads(listed.stdout)
    assert (run["name"], run["status"], run["workers"], run["step"]) == ("train", "complete", 2, 6)
    shown = shoal(folder, "show", "last")
    assert re.search(r"workers +flag +2", shown.stdout), shown.stdout


def test_epochs_beat_steps_of_the_script(folder: Path, shoal: Shoal) -> None:
    done = shoal(folder, "run", "train.py", "--epochs", "1", "--quiet")
    assert done.returncode == 0 and "RESULT 1 4 " in done.stdout
    assert done.stderr == ""


def test_show_config(folder: Path, shoal: Shoal) -> None:
    done = shoal(folder, "run", "train.py", "--workers", "2", "--show-config")
    assert done.returncode == 0 and "RESULT" not in done.stdout
    lines = [line.split()[:3] for line in done.stdout.splitlines()]
    assert ["workers", "flag", "2"] in lines and ["batch_size", "script", "16"] in lines
    assert not (folder / "home").exists()


def test_json_lines(folder: Path, shoal: Shoal) -> None:
    done = shoal(folder, "run", "train.py", "--json", "--workers", "2", "--", "--talk")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    kinds = [line["event"] for line in lines]
    assert kinds.count("step_done") == 6 and kinds[-1] == "run_ended"
    assert sum("a worker speaks" in str(line) for line in lines) >= 2
    assert all(line.startswith(("{", "RESULT")) for line in done.stdout.splitlines())


def test_a_bug_in_the_data_set_is_the_last_thing_on_the_screen(folder: Path, shoal: Shoal) -> None:
    done = shoal(folder, "run", "train.py", "--workers", "2", "--", "--bug")
    assert done.returncode == 1
    screen = done.stderr.rstrip().splitlines()
    assert "  AttributeError: 'Squares' object has no attribute 'table'" in screen[-12:]
    assert any("return self.table[index]" in line for line in screen[-12:])
    assert not any("shoal/trainer" in line for line in screen)
    facts = "\n".join(screen[-7:])
    assert re.search(r"^  worker [01] of 2 · step \d · data positions \d+–\d+ of the epoch$", facts, re.MULTILINE)
    assert "  at train.py:14 in __getitem__\n" in facts
    assert "  hint: get that item by itself to see the cause: data[40]\n" in facts
    (log,) = re.findall(r"^  log:  (.*)$", facts, re.MULTILINE)
    assert "AttributeError" in Path(log).read_text()
    assert re.search(r"^  run:  shoal show train-\S+$", facts, re.MULTILINE)
    assert done.stderr.count("AttributeError: 'Squares'") <= 2, "once in the message, once in the traceback"
    (run,) = json.loads(shoal(folder, "runs", "--json").stdout)
    assert run["status"] == "failed" and "data[40] could not be fetched" in run["error"]
    assert "AttributeError" in (Path(run["run_dir"]) / "report.html").read_text()


def test_python_shows_the_same_last_lines(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "train.py", "--bug"],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 1
    assert "  hint: get that item by itself to see the cause: data[40]" in done.stderr.splitlines()[-5:]


def test_an_error_of_the_script_itself_looks_as_with_python(folder: Path, shoal: Shoal) -> None:
    (folder / "bad.py").write_text("def f():\n    return 1 / 0\n\nf()\n")
    done = shoal(folder, "run", "bad.py")
    plain = subprocess.run([sys.executable, "bad.py"], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.replace(str(folder) + "/", "") == plain.stderr.replace(str(folder) + "/", "")


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        ("print('hello')", 2, ["ended without training", "made no Trainer", "from shoal import Trainer"]),
        ("import sys; sys.exit(7)", 7, []),
        ("import sys; sys.exit('no luck')", 1, ["no luck"]),
        ("raise SystemExit", 2, ["ended without training"]),
        ("import beside; assert beside.WORD == 'found'; import sys; sys.exit(5)", 5, []),
    ],
)
def test_scripts_that_do_not_train(folder: Path, source: str, code: int, words: list[str], shoal: Shoal) -> None:
    (folder / "odd.py").write_text(source)
    done = shoal(folder, "run", "odd.py")
    assert done.returncode == code, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


def test_a_trainer_that_is_never_fitted(folder: Path, shoal: Shoal) -> None:
    (folder / "unfit.py").write_text(SCRIPT.replace(").fit()", ")").replace("\nprint(", "\n# print("))
    done = shoal(folder, "run", "unfit.py")
    assert done.returncode == 2 and "made a Trainer and never called fit()" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["gone.py"], ["there is no file gone.py"]),
        (["trian.py"], ["there is no file trian.py; did you mean train.py?"]),
        (["."], [". is a folder; name a Python file", "such as"]),
        ([], ["Missing argument"]),
        (["train.py", "--workers=-1"], ["--workers", "greater than or equal to 1"]),
        (["train.py", "--workers", "0"], ["--workers", "greater than or equal to 1"]),
        (["train.py", "--workers", "two"], ["--workers", "valid integer"]),
        (["train.py", "--codec", "fp61"], ["codec='fp61' is not available", "'none'"]),
        (["train.py", "--lr", "3"], ["--lr", "after `--`"]),
        (["train.py", "--wrokers", "3"], ["--wrokers", "--workers"]),
        (["train.py", "--epochs", "1", "--steps", "3"], ["--epochs and --steps"]),
        (["train.py", "--json", "--plain"], ["--json and --plain"]),
        (["train.py", "--metrics-port", "99999"], ["--metrics-port", "65535"]),
        (["train.py", "--metrics-port", "0", "--metrics-host", "0.0.0.0"], ["key"]),
    ],
)
def test_bad_input(folder: Path, args: list[str], words: list[str], shoal: Shoal) -> None:
    done = shoal(folder, "run", *args)
    assert done.returncode == 2, done.stderr
    said = re.sub(r"\s*[│\n]\s*", " ", done.stderr)
    assert all(word in said for word in words), done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "home").exists()


def test_a_refused_argument_points_into_the_script(folder: Path, shoal: Shoal) -> None:
    done = shoal(folder, "run", "train.py", "--clip", "-3")
    assert done.returncode == 2
    assert 'File "train.py", line 24' in done.stderr and "clip=-3.0; it must be a number above 0" in done.stderr
    assert "trainer.py" not in done.stderr


def test_ctrl_c_and_resume(folder: Path, shoal: Shoal) -> None:
    """The whole way that a person goes: start, interrupt, look, go on."""
    running = subprocess.Popen(
        command("run", "train.py", "--json", "--name", "long", "--", "--steps", "100000"),
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    for line in running.stdout:
        if '"step_done"' in line:
            break
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert (
        "stopped by Ctrl-C at step" in err and "go on with: shoal run train.py --json --name long --resume long-" in err
    )
    (run,) = json.loads(shoal(folder, "runs", "--json").stdout)
    assert run["status"] == "interrupted" and run["step"] > 0
    again = shoal(folder, "run", "train.py", "--resume", run["id"], "--steps", str(run["step"] + 2))
    assert again.returncode == 0, again.stderr
    (after,) = json.loads(shoal(folder, "runs", "--json").stdout)
    assert (after["status"], after["step"], after["resumes"]) == ("complete", run["step"] + 2, 1)


def recorded(folder: Path) -> bool:
    file = folder / "home" / "shoal.db"
    if not file.exists():
        return False
    with closing(sqlite3.connect(file)) as store, suppress(sqlite3.OperationalError):
        return bool(store.execute("SELECT count(*) FROM shoal_runs").fetchone()[0])
    return False


def test_a_killed_run_is_shown_as_such_and_resumed(folder: Path, shoal: Shoal) -> None:
    running = subprocess.Popen(
        command("run", "train.py", "--workers", "2", "--checkpoint-every", "5", "--plain", "--", "--steps", "100000"),
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while not (list(folder.glob("home/runs/*/checkpoints/step-*/manifest.json")) and recorded(folder)):
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        running.kill()
        running.wait()
    (run,) = json.loads(shoal(folder, "runs", "--json").stdout)
    assert run["status"] == "killed"
    checkpoints = sorted(folder.glob("home/runs/*/checkpoints/step-*"))
    step = int(checkpoints[-1].name.removeprefix("step-"))
    again = shoal(folder, "run", "train.py", "--resume", "last", "--steps", str(step + 1))
    assert again.returncode == 0, again.stderr
    assert f"from step {step}" in again.stderr


def test_own_loops_run_too(folder: Path, shoal: Shoal) -> None:
    (folder / "loop.py").write_text(
        textwrap.dedent(
            """
            import torch, shoal

            def train(session):
                net = torch.nn.Linear(1, 1)
                optimizer = torch.optim.SGD(net.named_parameters(), lr=0.1)
                session.track(net=net, optimizer=optimizer)
                for step in session.steps(torch.ones(8, 1), batch_size=4, epochs=1):
                    for batch in step:
                        step.backward(net(batch).square().mean())
                    step.apply(optimizer)
                return session.workers

            print("WORKERS", shoal.launch(train, 1))
            """
        )
    )
    done = shoal(folder, "run", "loop.py", "--workers", "2")
    assert done.returncode == 0 and "WORKERS [2, 2]" in done.stdout, done.stderr
    (run,) = json.loads(shoal(folder, "runs", "--json").stdout)
    assert (run["name"], run["status"], run["step"]) == ("loop", "complete", 2)


def test_a_home_that_cannot_be_written_is_said_once_and_the_run_goes_on(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("a file where a folder should be")
    done = subprocess.run(
        command("run", "train.py", "--run-dir", str(folder / "run")),
        cwd=folder,
        env={**environment(folder), "SHOAL_HOME": str(tmp_path / "blocked")},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("This run is not recorded") == 1, done.stderr
    assert (folder / "run" / "report.html").exists()
    assert "shoal show" not in done.stderr


@pytest.mark.parametrize("kind", spec.KINDS)
def test_the_help_of_a_flag_names_every_word_that_it_takes(kind: str) -> None:
    (option,) = get_type_hints(run.run, include_extras=True)[kind].__metadata__
    assert [cls.name for cls in spec.KINDS[kind] if cls.name not in option.help] == []
