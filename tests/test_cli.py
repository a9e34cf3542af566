"""The `shoal` command, as a user starts it."""

from __future__ import annotations

import os
import re
import resource
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import shoal

ROOT = Path(__file__).parent.parent


def run_shoal(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoal.cli", *args],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "COLUMNS": "160", "NO_COLOR": "1", **(env or {})},
    )


def cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_help_teaches() -> None:
    finished = run_shoal("--help")
    assert finished.returncode == 0, finished.stderr
    for part in ("trains any PyTorch model", "shoal demo", "from shoal import Trainer", "trainer.fit()", "--version"):
        assert part in finished.stdout


def test_no_arguments_show_the_help() -> None:
    assert "shoal run train.py --workers 4" in run_shoal().stdout


@pytest.mark.parametrize("args", [["--help"], ["demo", "--help"], ["--version"]])
def test_help_and_version_do_not_import_torch(args: list[str]) -> None:
    finished = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "shoal.cli", *args], capture_output=True, text=True, timeout=60
    )
    imported = {line.rpartition("|")[2].strip() for line in finished.stderr.splitlines()}
    assert finished.returncode == 0
    assert "shoal.cli.main" in imported
    assert not imported & {"torch", "numpy", "sklearn"}


def test_help_is_quick() -> None:
    taken = []
    for _ in range(5):
        # CPU time: on a busy machine the clock on the wall measures the neighbours.
        start = cpu_seconds_of_children()
        run_shoal("--help")
        taken.append(cpu_seconds_of_children() - start)
    assert statistics.median(taken) < 0.4


def test_version() -> None:
    finished = run_shoal("--version")
    assert (finished.returncode, finished.stdout) == (0, f"shoal {shoal.__version__}\n")


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["dmo"], "demo"),
        (["demo", "cats"], "digits"),
        (["demo", "--wrokers", "2"], "--workers"),
        (["demo", "--workers", "two"], "--workers"),
    ],
)
def test_wrong_usage_says_what_is_right(args: list[str], hint: str) -> None:
    finished = run_shoal(*args)
    assert finished.returncode == 2
    assert hint in finished.stderr
    assert "Traceback" not in finished.stderr


def test_demo_without_scikit_learn_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "sklearn.py").write_text("raise ImportError('No module named sklearn')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    finished = run_shoal("demo", env={"PYTHONPATH": path})
    assert finished.returncode == 2
    assert "pip install 'shoal[demo]'" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_demo_refuses_what_the_trainer_refuses() -> None:
    finished = run_shoal("demo", "--workers", "100000")
    assert finished.returncode == 2
    assert finished.stderr.startswith("shoal: workers=100000 is outside 1…")
    assert "Traceback" not in finished.stderr


def test_demo_trains_and_says_what_happened(tmp_path: Path) -> None:
    finished = run_shoal("demo", "--workers", "2", "--epochs", "4", env={"SHOAL_HOME": str(tmp_path)})
    assert finished.returncode == 0, finished.stdout + finished.stderr
    right = re.search(r"names ([\d.]+)% of 359 digits right", finished.stdout)
    assert right is not None and float(right[1]) > 90
    assert "--resume last --epochs 8" in finished.stdout
    for part in ("complete, 92 steps", "on 2 workers", "samples/s", "compute"):
        assert part in finished.stderr
    assert str(tmp_path) in finished.stderr, "runs go to SHOAL_HOME"


def test_the_installed_script_is_this_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"shoal": "shoal.cli.main:main"}
