"""The notebook among the examples runs, as in Jupyter, and leaves no kernel behind."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

NOTEBOOK = Path(__file__).parent.parent / "examples" / "notebook.ipynb"
DEADLINE = 60
"""Seconds for one cell."""


def text_of(notebook: nbformat.NotebookNode) -> str:
    """What the cells printed."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs)


@pytest.fixture
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep what Jupyter, IPython and Shoal write out of the user's home."""
    for variable in ("SHOAL_HOME", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    return tmp_path


def test_the_notebook_trains_and_its_kernel_ends(own_folders: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear the outputs before keeping the notebook"
    client = nbclient.NotebookClient(
        notebook, timeout=DEADLINE, kernel_name="python3", resources={"metadata": {"path": str(own_folders)}}
    )
    pids: list[int] = []
    client.on_cell_start = lambda cell, cell_index: pids.append(client.km.provisioner.pid)
    client.execute()
    printed = text_of(notebook)
    assert "right after 115 steps on 2 workers" in printed
    assert "guessed [" in printed
    assert len(set(pids)) == 1
    assert not psutil.pid_exists(pids[0]), "the kernel is still there"
    assert any((own_folders / "shoal_home" / "runs").iterdir()), "the run was kept elsewhere"
