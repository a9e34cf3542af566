"""What the user has started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from shoal.engines.program import origin, script

TELL = "from shoal.engines.program import in_package, origin, script; print(script(), origin(), in_package())"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "package").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "package" / "part.py").write_text(TELL)
    (tmp_path / "part.py").write_text(f"import os; os.chdir('elsewhere'); {TELL}")
    return tmp_path


def started(folder: Path, *words: str, given: str = "") -> list[str]:
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, input=given, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.split()


def test_a_file_by_its_path_wherever_it_goes(folder: Path) -> None:
    file = str(folder / "part.py")
    assert started(folder, "part.py") == [file, file, "False"]
    file = str(folder / "package" / "part.py")
    assert started(folder, "-m", "package.part") == [file, file, "True"]


@pytest.mark.parametrize("words", [["-c", TELL], ["-"], []])
def test_what_is_in_no_file_has_its_folder(folder: Path, words: list[str]) -> None:
    assert started(folder, *words, given=TELL) == ["None", str(folder), "False"]


def test_a_notebook_is_told_by_who_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "ipykernel_launcher.py"), "-f", "kernel.json"])
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    monkeypatch.chdir(tmp_path)
    assert script() is None and origin() == tmp_path
    monkeypatch.setenv("JPY_SESSION_NAME", str(tmp_path / "jupyter.ipynb"))
    assert script() is None and origin() == tmp_path / "jupyter.ipynb"
    main.__dict__["__vsc_ipynb_file__"] = str(tmp_path / "code.ipynb")
    assert origin() == tmp_path / "code.ipynb"
