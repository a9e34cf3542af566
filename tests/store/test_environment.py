"""What a run ran on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.store import environment
from shoal.store.environment import git_state


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("WANDB_API_KEY", "geheim")
    found = environment.environment()
    assert found["variables"]["OMP_NUM_THREADS"] == "3" and "geheim" not in str(found)
    assert found["packages"]["torch"] and found["packages"]["numpy"]
    assert found["cores"] >= 1 and found["memory"] > 2**20


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; from shoal.store.environment import environment; environment(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_git(tmp_path: Path) -> None:
    assert git_state(tmp_path / "none") == (None, None)
    assert git_state(tmp_path) == (None, None)
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) == (None, None)
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert git_state(tmp_path) == (commit, False)
    (tmp_path / "untracked").write_text("1")
    assert git_state(tmp_path) == (commit, False)
    (tmp_path / "a").write_text("2")
    assert git_state(tmp_path) == (commit, True)


def test_a_git_that_hangs_or_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "git"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(environment, "GIT_SECONDS", 0.1)
    begun = time.monotonic()
    assert git_state(tmp_path) == (None, None) and time.monotonic() - begun < 10
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) == (None, None)
