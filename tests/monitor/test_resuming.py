"""How to go on with a stored run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.core.settings import Setting
from shoal.monitor.resuming import stored_resume_command
from shoal.store.values import RunInfo

SCRIPT = "/home/me/work/train.py"
PYTHON = "/opt/venv/bin/python3.11"
SHOAL = "/opt/venv/bin/shoal"


def run(command: list[str], **changes: Any) -> RunInfo:
    texts = dict.fromkeys(("name", "host", "user", "version"), "")
    numbers = dict.fromkeys(("batch_size", "total_steps", "steps_per_epoch", "samples_per_epoch", "resumes", "pid"), 0)
    nothing = dict.fromkeys(("ended", "loss", "run_dir", "git_commit", "git_dirty", "error", "traceback"))
    values: dict[str, Any] = {
        "id": "tide-1", "status": "killed", "created": 1.0, "updated": 2.0, "workers": 2, "step": 14, "metrics": {},
        "seconds": 1.0, "command": command, "script": SCRIPT, "pid_started": 0.0, "config": {}, "environment": {},
        "bytes_sent": 0, "tags": [],
    }  # fmt: skip
    return RunInfo(**(texts | numbers | nothing | values | changes))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([PYTHON, SHOAL, "run", "train.py"], f"shoal run {SCRIPT} --resume tide-1"),
        (
            [PYTHON, SHOAL, "run", "-w", "4", "../work/train.py", "--resume", "last", "--", "--lr", "1", "a b"],
            f"shoal run -w 4 {SCRIPT} --resume tide-1 -- --lr 1 'a b'",
        ),
        (
            [PYTHON, "-m", "shoal.cli", "run", "train.py", "--resume=x", "--", "--resume", "y"],
            f"shoal run {SCRIPT} --resume tide-1 -- --resume y",
        ),
        ([PYTHON, "train.py"], f"shoal run {SCRIPT} --resume tide-1"),
        ([PYTHON, "-u", "-X", "dev", "train.py", "-m", "2"], f"shoal run {SCRIPT} --resume tide-1 -- -m 2"),
        ([PYTHON, "-m", "train", "--lr", "1"], f"shoal run {SCRIPT} --resume tide-1 -- --lr 1"),
        ([PYTHON, "-m", "work.train", "--lr", "1"], "Trainer(..., resume='tide-1')"),
        ([], f"shoal run {SCRIPT} --resume tide-1  # with the same arguments"),
        ([PYTHON, "other.py", "1"], f"shoal run {SCRIPT} --resume tide-1  # with the same arguments"),
    ],
)
def test_what_was_typed_is_in_it(command: list[str], words: str) -> None:
    assert stored_resume_command(run(command)) == words


def test_a_demo_and_what_no_script_made() -> None:
    demo = run([PYTHON, SHOAL, "demo", "digits", "-w", "3"], script=SHOAL)
    assert stored_resume_command(demo) == "shoal demo digits -w 3 --resume tide-1"
    for script, command in [("", [PYTHON, "-c", "train()"]), (SHOAL, [PYTHON, SHOAL, "bench"]), ("", [])]:
        assert stored_resume_command(run(command, script=script)) == "Trainer(..., resume='tide-1')"

    kernel = run([PYTHON, "-m", "ipykernel_launcher", "-f", "kernel.json"], script="/lib/ipykernel_launcher.py")
    assert stored_resume_command(kernel) == "Trainer(..., resume='tide-1')"
    loop = run([PYTHON, "-c", "train()"], script="", config={"fn": Setting("train", "script")}, run_dir="/runs/x")
    assert stored_resume_command(loop) == "shoal.launch(..., resume='/runs/x')"


def test_a_folder_of_its_own_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    at_home = run([PYTHON, "train.py"], run_dir=str(tmp_path / "runs" / "tide-1"))
    assert stored_resume_command(at_home).endswith("--resume tide-1")
    own = run([PYTHON, "train.py"], run_dir=str(tmp_path / "my run"))
    assert stored_resume_command(own).endswith(f"--resume '{tmp_path / 'my run'}'")
