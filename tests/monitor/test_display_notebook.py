"""The display in a notebook: one output, updated in place."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.core.events import EvalDone, Notice, Preparing, RunEnded, RunStarted, StepDone, WorkerSeen
from shoal.monitor.display.display import Display


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Cell:
    """Stands for IPython's `display`: keeps what each output shows now."""

    def __init__(self) -> None:
        self.outputs: list[dict[str, str]] = []
        self.updates = 0

    def display(self, bundle: dict[str, str], *, raw: bool, display_id: bool) -> SimpleNamespace:
        assert raw and display_id
        self.outputs.append(bundle)
        at = len(self.outputs) - 1

        def update(bundle: dict[str, str], *, raw: bool) -> None:
            self.outputs[at] = bundle
            self.updates += 1

        return SimpleNamespace(update=update)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    cell = Cell()
    shell = SimpleNamespace(kernel=object())
    modules: dict[str, Any] = {
        "IPython": SimpleNamespace(get_ipython=lambda: shell),
        "IPython.display": SimpleNamespace(display=cell.display),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return cell


def start(run_id: str = "r1") -> RunStarted:
    return RunStarted(
        step=0,
        run_id=run_id,
        run_dir=None,
        workers=2,
        total_steps=1000,
        steps_per_epoch=500,
        samples_per_epoch=500,
    )


def done(step: int) -> StepDone:
    return StepDone(step=step, epoch=0, loss=0.5, samples=8, rates=[0.1])


def end() -> RunEnded:
    return RunEnded(step=1000, loss=0.25, metrics={}, reason="complete")


def test_one_output_with_the_figures_and_the_final_line(cell: Cell) -> None:
    clock = Clock()
    display = Display(clock=clock, verbose=True)
    display(Preparing(step=0, what="indexing", done=1, total=2))
    assert "indexing 1/2" in cell.outputs[0]["text/html"]
    display(start("<b>r1</b>"))
    for step in range(1, 1001):
        clock.now += 0.01
        display(done(step))
    display(WorkerSeen(step=9, worker=1, samples=80, seconds={"compute": 3.0, "data": 1.0}, memory=1 << 30))
    display(EvalDone(step=9, epoch=0, metrics={"accuracy": 0.5}))
    display(Notice(step=9, text="a & b"))
    display(end())
    display.warn("a & b")
    display.close()
    assert len(cell.outputs) == 1
    assert 35 <= cell.updates <= 50
    html, text = cell.outputs[0]["text/html"], cell.outputs[0]["text/plain"]
    assert "&lt;b&gt;r1" in html and "<b>r1" not in html
    assert "a &amp; b" in html
    assert "width:100.0%" in html
    assert "1.0 GiB" in html
    assert "indexing" not in html
    assert text.splitlines()[-4:] == [
        "compute 75%  exchange 0%  data wait 25%  rest 0%",
        "shoal: a & b",
        "shoal: complete at step 1000/1000  loss 0.25",
        "shoal: once more: a & b",
    ]


def test_preparing_that_no_run_follows_leaves_nothing(cell: Cell) -> None:
    display = Display()
    display(Preparing(step=0, what="indexing"))
    display.close()
    assert "indexing" not in cell.outputs[0]["text/html"]


def test_each_run_has_its_own_output(cell: Cell) -> None:
    display = Display()
    for name in ("first", "second"):
        display(start(name))
        display(end())
    display.close()
    display(start("third"))
    display.close()
    assert [
        name in output["text/plain"] for name, output in zip(("first", "second", "third"), cell.outputs, strict=True)
    ]
    assert "first" not in cell.outputs[1]["text/plain"]
    assert cell.outputs[1]["text/plain"].count("complete at") == 1


def test_what_workers_print_goes_to_the_cell(cell: Cell, capsys: pytest.CaptureFixture[str]) -> None:
    display = Display()
    display(start())
    display.output(1, "out", "hello\n")
    display.output(1, "err", "oh\n")
    assert capsys.readouterr() == ("hello\n", "oh\n")


CELL = """
import sys, time
from shoal.core.events import RunEnded, RunStarted, StepDone
from shoal.monitor.display.display import Display
display = Display()
display(RunStarted(step=0, run_id="r1", run_dir=None, workers=1, total_steps=3, steps_per_epoch=3, samples_per_epoch=3))
for step in range(1, 4):
    time.sleep(0.3)
    display(StepDone(step=step, epoch=0, loss=0.5, samples=1, rates=[0.1]))
    display.output(0, "out", f"worker {step}\\n")
display(RunEnded(step=3, loss=0.5, metrics={}, reason="complete"))
display.close()
assert "rich" not in sys.modules
"""


def test_in_a_real_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    for variable in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    updates = []

    class Client(nbclient.NotebookClient):  # type: ignore[misc,name-defined]
        def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
            updates.append(msg["msg_type"])
            return super().process_message(msg, cell, cell_index)

    client = Client(notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    asyncio.run(client.async_execute())
    outputs = notebook.cells[0].outputs
    shown = [output for output in outputs if output.output_type == "display_data"]
    assert len(shown) == 1
    assert shown[0].data["text/plain"].endswith("shoal: complete at step 3/3  loss 0.5")
    assert "complete at step 3/3" in shown[0].data["text/html"]
    assert updates.count("update_display_data") >= 3
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert printed == "worker 1\nworker 2\nworker 3\n"
