"""What workers print: it is kept in files, and shown."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.cluster.logs import ERR, OUT, Tail, log_failure, log_path

SAMPLES, BATCH = 24, 8


def trainer(folder: Path, loss: Callable[[nn.Module, Tensor], Any], **changed: Any) -> shoal.Trainer:
    given: dict[str, Any] = {
        "model": lambda: nn.Linear(1, 1),
        "loss": loss,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.01),
        "data": torch.arange(SAMPLES, dtype=torch.float32).unsqueeze(1) / SAMPLES,
        "batch_size": BATCH,
        "workers": 2,
        "data_workers": 0,
        "run_dir": folder,
    }
    return shoal.Trainer(**(given | changed))


def talkative(model: nn.Module, batch: Tensor) -> Tensor:
    # by every way there is
    print("said by print")
    print("said on stderr", file=sys.stderr)
    os.write(1, b"said by a library\n")
    loss: Tensor = model(batch).square().mean()
    return loss


def test_all_that_workers_print_is_kept_and_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path, talkative, steps=2).fit()
    shown = capfd.readouterr()
    for worker in range(2):
        assert log_path(tmp_path / "logs", worker, OUT).read_text() == "said by print\nsaid by a library\n" * 2
        assert log_path(tmp_path / "logs", worker, ERR).read_text() == "said on stderr\n" * 2
    assert (shown.out.count("said by print"), shown.out.count("said by a library")) == (4, 4)
    assert "said on stderr" not in shown.out


def test_what_all_workers_say_on_stderr_is_shown_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def warned(model: nn.Module, batch: Tensor) -> Tensor:
        print("train.py:3: UserWarning: the tide is late", file=sys.stderr)
        return talkative(model, batch)

    trainer(tmp_path, warned, workers=3, steps=1).fit()
    shown = capfd.readouterr().err
    assert shown.count("UserWarning: the tide is late") == 1
    assert "lines on stderr were the same on several workers" in shown and str(tmp_path / "logs") in shown
    assert all("tide" in log_path(tmp_path / "logs", worker, ERR).read_text() for worker in range(3))


def test_a_worker_that_fails_keeps_its_whole_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def failing(model: nn.Module, batch: Tensor) -> Tensor:
        if torch.utils.data.get_worker_info() is None and float(batch.sum()) >= 0:
            print("before the end")
        raise LookupError("deep down")

    with pytest.raises(shoal.WorkerError) as caught:
        trainer(tmp_path, failing).fit()
    worker = caught.value.worker
    assert worker is not None
    log = log_path(tmp_path / "logs", worker, ERR).read_text()
    # every frame in the log, only the user's in the error, and neither of them printed by the run itself
    assert "workers/worker.py" in log and "LookupError: deep down" in log
    assert "workers/worker.py" not in caught.value.__notes__[0] and "in failing" in caught.value.__notes__[0]
    shown = capfd.readouterr()
    assert "Traceback" not in shown.err and "before the end" in shown.out
    assert f"  log:  {log_path(tmp_path / 'logs', worker, ERR)}" in caught.value.__notes__[0]


def test_a_crash_in_native_code_leaves_its_stack(tmp_path: Path) -> None:
    def crash(model: nn.Module, batch: Tensor) -> Tensor:
        import ctypes

        ctypes.string_at(0)
        raise AssertionError

    with pytest.raises(shoal.WorkerError, match="SIGSEGV"):
        trainer(tmp_path, crash, workers=1).fit()
    assert "in crash" in log_path(tmp_path / "logs", 0, ERR).read_text()


def test_a_resumed_run_adds_to_its_logs(tmp_path: Path) -> None:
    trainer(tmp_path, talkative, steps=1, workers=1).fit()
    trainer(tmp_path, talkative, steps=2, workers=1, resume="last").fit()
    assert log_path(tmp_path / "logs", 0, OUT).read_text().count("said by print") == 2


def test_a_run_that_prints_nothing_leaves_no_logs(tmp_path: Path) -> None:
    trainer(tmp_path, lambda model, batch: model(batch).square().mean(), steps=1).fit()
    assert not (tmp_path / "logs").exists()


# -- the tail by itself ------------------------------------------------------------------------------------------------


def test_the_tail_gives_whole_lines_in_order(tmp_path: Path) -> None:
    told: list[tuple[int, str, str]] = []
    with Tail(tmp_path / "logs", 2, lambda *what: told.append(what)) as tail:
        with open(log_path(tmp_path / "logs", 1, OUT), "a") as file:
            file.write("one\ntw")
            file.flush()
            assert tail.look()
            assert told == [(1, OUT, "one\n")]
            file.write("o\n50 %\r")
            file.flush()
            tail.look()
            assert told[1:] == [(1, OUT, "two\n50 %\r")]
            file.write("no end")
        assert not told[2:]
    assert told[2:] == [(1, OUT, "no end")]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["worker-1.out"]


def test_the_tail_keeps_a_traceback_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    with Tail(tmp_path / "logs", 1, lambda worker, stream, text: told.append(text)) as tail:
        path = log_path(tmp_path / "logs", 0, ERR)
        with open(path, "a") as file:
            monkeypatch.setattr(sys, "stderr", file)
            print("a warning", file=sys.stderr)
            log_failure(0, "Traceback ...")
            assert tail.look()
            print("from a thread that goes on", file=sys.stderr)
            monkeypatch.undo()
    assert told == ["a warning\n"]
    assert "Traceback ..." in path.read_text() and "goes on" in path.read_text()


def test_bytes_that_are_no_text_are_shown_all_the_same(tmp_path: Path) -> None:
    told: list[str] = []
    with Tail(tmp_path / "logs", 1, lambda worker, stream, text: told.append(text)):
        log_path(tmp_path / "logs", 0, OUT).write_bytes(b"caf\xe9\n")
    assert told == ["caf\N{REPLACEMENT CHARACTER}\n"]


def test_a_folder_that_cannot_be_made_leaves_output_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    with Tail(tmp_path / "logs", 2, lambda *what: None) as tail:
        assert tail.folder is None and not tail.look()
