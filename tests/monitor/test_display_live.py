"""The display in a terminal: what is on the screen, at any width, with anything printed in between."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator

import pytest

from shoal.core.events import EvalDone, Preparing, RunEnded, RunFailed, RunStarted, StepDone, WorkerSeen
from shoal.monitor.display.display import Display

_TOKEN = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|(\r|\n)|([^\x1b\r\n]+)")


class Screen:
    """A terminal of which the display may use only what is implemented here. Lines that scrolled off are kept."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.cursor = True
        self._lines: list[list[str]] = [[]]
        self._x = self._y = 0

    def feed(self, text: str) -> None:
        at = 0
        while at < len(text):
            token = _TOKEN.match(text, at)
            assert token, f"not understood: {text[at : at + 20]!r}"
            at = token.end()
            arguments, command, control, printed = token.groups()
            if command:
                self._command(arguments, command)
            elif control == "\r":
                self._x = 0
            elif control == "\n":
                self._x = 0
                self._down()
            else:
                for character in printed:
                    self._put(character)

    def _command(self, arguments: str, command: str) -> None:
        if (arguments, command) in (("?25", "l"), ("?25", "h")):
            self.cursor = command == "h"
        elif command == "A":
            top = max(0, len(self._lines) - self.rows)
            self._y = max(top, self._y - int(arguments))
        elif command == "K":
            assert arguments == ""
            del self._lines[self._y][self._x :]
        elif command == "J":
            assert arguments == ""
            del self._lines[self._y][self._x :]
            del self._lines[self._y + 1 :]
        else:
            assert command == "m", f"not understood: {arguments}{command}"

    def _down(self) -> None:
        self._y += 1
        if self._y == len(self._lines):
            self._lines.append([])

    def _put(self, character: str) -> None:
        if self._x == self.columns:
            self._x = 0
            self._down()
        line = self._lines[self._y]
        line.extend(" " * (self._x + 1 - len(line)))
        line[self._x] = character
        self._x += 1

    def resize(self, columns: int) -> None:
        """Break the lines that are wider, as terminals do; the cursor stays behind the character it was behind."""
        assert self._y == len(self._lines) - 1 and self._x == len(self._lines[-1])
        broken = [line[at : at + columns] for line in self._lines for at in range(0, max(1, len(line)), columns)]
        self.columns, self._lines = columns, broken
        self._y, self._x = len(broken) - 1, len(broken[-1])

    @property
    def lines(self) -> list[str]:
        shown = ["".join(line).rstrip() for line in self._lines]
        while shown and not shown[-1]:
            shown.pop()
        return shown


class Terminal(io.StringIO):
    """A stream of a terminal with a size that can be set; what is written appears on `screen` when it is flushed."""

    def __init__(self, device: int, columns: int, rows: int) -> None:
        super().__init__()
        self._device = device
        self.screen = Screen(columns, rows)
        self.flushes = 0
        self.set_size(columns, rows)

    def set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._device, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._device

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def flush(self) -> None:
        self.flushes += bool(self.getvalue())
        self.screen.feed(self.getvalue())
        self.seek(0)
        self.truncate()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setenv("TERM", "xterm-256color")
    master, slave = pty.openpty()
    yield slave
    os.close(slave)
    os.close(master)


def start(workers: int = 4, total: int = 1000, name: str = "") -> RunStarted:
    return RunStarted(
        step=0,
        run_id="digits-3f2a",
        name=name,
        run_dir="runs/digits",
        workers=workers,
        total_steps=total,
        steps_per_epoch=250,
        samples_per_epoch=16000,
    )


def done(step: int, loss: float = 0.5) -> StepDone:
    return StepDone(step=step, epoch=step // 250, loss=loss, samples=64, rates=[0.1])


def seen(worker: int, seconds: float) -> WorkerSeen:
    told = {"compute": 0.7 * seconds, "exchange": 0.18 * seconds, "data": 0.06 * seconds, "eval": 0.06 * seconds}
    return WorkerSeen(step=1, worker=worker, samples=int(160 * seconds), seconds=told, memory=512 << 20)


def train(display: Display, clock: Clock, seconds: int, workers: int = 4) -> None:
    """Ten steps a second."""
    step = 0
    for second in range(1, seconds + 1):
        for _ in range(10):
            step, clock.now = step + 1, clock.now + 0.1
            display(done(step))
        for worker in range(workers):
            display(seen(worker, second))
    clock.now += 0.2
    display.tick()


def test_all_figures_at_80_columns(device: int) -> None:
    clock, terminal = Clock(), Terminal(device, 80, 24)
    display = Display("auto", stream=terminal, clock=clock)
    display(start())
    display(EvalDone(step=0, epoch=0, metrics={"loss": 0.341, "accuracy": 0.912}))
    train(display, clock, 30)
    assert not terminal.screen.cursor
    lines = terminal.screen.lines
    assert lines == [
        f"{'digits-3f2a  4 workers':<55}step 300/1000  epoch 2/4",
        "━" * 21 + "╸" + "─" * 52 + "  30%",
        "loss 0.5  last 0.5",
        "evaluation at step 0:  loss 0.341  accuracy 0.912",
        "640 samples/s  0:30 elapsed  1:09 left",
        "compute 70%  exchange 18%  data wait 6%  rest 6%",
    ]
    display(RunEnded(step=1000, loss=0.25, metrics={}, reason="complete"))
    display.tick()
    display.close()
    display.close()
    assert terminal.screen.cursor
    assert terminal.screen.lines[1].endswith("━ 100%")
    assert terminal.screen.lines[2:4] == lines[2:4]
    assert terminal.screen.lines[-1] == "shoal: complete at step 1000/1000  loss 0.25"
    assert len(terminal.screen.lines) == 7


def test_a_wide_terminal_needs_fewer_lines(device: int) -> None:
    clock, terminal = Clock(), Terminal(device, 120, 24)
    display = Display("auto", stream=terminal, clock=clock)
    display(start())
    train(display, clock, 10)
    assert terminal.screen.lines[-1] == (
        "640 samples/s  0:10 elapsed  1:29 left    compute 70%  exchange 18%  data wait 6%  rest 6%"
    )
    display.close()


def test_verbose_has_a_line_per_worker(device: int) -> None:
    clock, terminal = Clock(), Terminal(device, 80, 24)
    display = Display("auto", stream=terminal, verbose=True, clock=clock)
    display(start())
    train(display, clock, 20)
    assert terminal.screen.lines[5:] == [
        "folder runs/digits",
        "worker  samples/s  compute  exchange  data wait  rest   memory",
        *(f"     {worker}        160      70%       18%         6%    6%  512 MiB" for worker in range(4)),
    ]
    display.close()


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (40, 24), (40, 6), (20, 10), (5, 3), (200, 50)])
def test_nothing_breaks_at_any_size(device: int, columns: int, rows: int) -> None:
    clock, terminal = Clock(), Terminal(device, max(11, columns), rows)
    terminal.set_size(columns, rows)
    display = Display("auto", stream=terminal, verbose=True, clock=clock)
    display.warn("one")
    display(start(workers=40, name="a name\nwith \x1b[2J signs"))
    display(EvalDone(step=0, epoch=0, metrics={f"metric{number}" * 4: float("nan") for number in range(12)}))
    train(display, clock, 3, workers=40)
    for number in range(5):
        display.warn("abcde"[number])
        display.tick()
    assert terminal.screen.lines[0] == "shoal: one"
    height = len(terminal.screen.lines) - 6
    assert height < rows
    display.close()
    said = [line for line in terminal.screen.lines if line.startswith("shoal: ")]
    assert said == ["shoal: one", *(f"shoal: {letter}" for letter in "abcde")]
    assert len([line for line in terminal.screen.lines if line.startswith("digits-3")]) == 1
    if (columns, rows) == (80, 24):
        assert re.fullmatch(r"and \d+ more workers", terminal.screen.lines[-1])


@pytest.mark.parametrize(("before", "after"), [(100, 50), (80, 40), (60, 100)])
def test_resize(device: int, before: int, after: int) -> None:
    clock, terminal = Clock(), Terminal(device, before, 40)
    display = Display("auto", stream=terminal, clock=clock)
    display.warn("above")
    display(start())
    train(display, clock, 3)
    terminal.screen.resize(after)
    terminal.set_size(after, 40)
    clock.now += 1
    display.tick()
    lines = terminal.screen.lines
    assert lines[0] == "shoal: above"
    assert lines[1].startswith("digits-3f2a")
    bars = [line for line in lines if "─" in line]
    assert [len(bar) for bar in bars] == [after - 1]
    assert len([line for line in lines if "compute 70%" in line]) == 1
    display.close()


def test_preparing_has_a_bar_or_a_spinner_and_leaves_nothing(device: int) -> None:
    clock, terminal = Clock(), Terminal(device, 80, 24)
    display = Display("auto", stream=terminal, clock=clock)
    display(Preparing(step=0, what="reading checkpoint", done=120, total=720, unit="MB"))
    assert terminal.screen.lines == [f"reading checkpoint  {'━' * 5}╸{'─' * 34}  120/720 MB"]
    display(Preparing(step=0, what="indexing"))
    clock.now += 3
    display.tick()
    assert re.fullmatch(r"[⠀-⣿] indexing  0:03", terminal.screen.lines[0])
    display.close()
    assert terminal.screen.lines == []
    assert terminal.screen.cursor
    display(Preparing(step=0, what="indexing"))
    display(start())
    assert "indexing" not in "".join(terminal.screen.lines)
    for so_far in (3, 7):
        clock.now += 1
        display(Preparing(step=0, what="reading checkpoint", done=so_far, total=7, unit="MB"))
        assert ("reading checkpoint" in terminal.screen.lines[-1]) == (so_far < 7)
    display.close()


def test_a_failed_run_leaves_its_last_state_and_a_second_run_begins_below(device: int) -> None:
    clock, terminal = Clock(), Terminal(device, 80, 24)
    display = Display("auto", stream=terminal, clock=clock)
    display(start())
    train(display, clock, 2)
    display(RunFailed(step=20, error="broken"))
    left = terminal.screen.lines
    assert "step 20/1000" in left[0]
    assert "broken" not in "".join(left)
    clock.now += 10
    display.tick()
    display(seen(0, 3))
    assert terminal.screen.lines == left
    assert terminal.screen.cursor
    display(start(total=7))
    display.close()
    assert terminal.screen.lines[: len(left)] == left
    assert "step 0/7" in terminal.screen.lines[len(left)]


def test_a_stall_is_told(device: int) -> None:
    clock, terminal = Clock(), Terminal(device, 80, 24)
    display = Display("auto", stream=terminal, clock=clock)
    display(start())
    train(display, clock, 2)
    clock.now += 59.8
    display.tick()
    assert "no step for 1:00" in "".join(terminal.screen.lines)
    display.close()


def test_it_is_drawn_at_most_eight_times_a_second(device: int) -> None:
    clock, terminal = Clock(), Terminal(device, 80, 24)
    display = Display("auto", stream=terminal, clock=clock)
    display(start(total=100_000))
    terminal.flushes = 0
    for step in range(10_000):
        clock.now += 0.001
        display(done(step + 1))
        display.tick()
    assert 70 <= terminal.flushes <= 81
    display.close()


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_without_colours_and_without_unicode(device: int, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(Terminal, "encoding", encoding)
    written = []
    monkeypatch.setattr(Terminal, "write", lambda self, text: written.append(text) or len(text))
    clock = Clock()
    display = Display("auto", stream=Terminal(device, 80, 24), clock=clock)
    display(start())
    train(display, clock, 2)
    display(Preparing(step=0, what="indexing"))
    display.close()
    text = "".join(written)
    assert re.search(r"\x1b\[(\d+;)*3\d", text) is None
    assert text.isascii() == (encoding == "ascii")


def test_a_second_display_meanwhile_prints_lines_above(device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(device, 80, 24)
    monkeypatch.setattr(sys, "stderr", terminal)
    first, second = Display(), Display()
    first(start())
    second(start(total=7))
    second(RunEnded(step=7, loss=0.1, metrics={}, reason="complete"))
    second.close()
    assert terminal.screen.lines[:2] == [
        "shoal: digits-3f2a: 7 steps on 4 workers in runs/digits",
        "shoal: complete at step 7/7  loss 0.1",
    ]
    assert terminal.screen.lines[2].startswith("digits-3f2a  4 workers")
    first.close()
    assert sys.stderr is terminal


PROGRAM = """
import logging, os, sys, threading
from shoal.core.events import RunStarted, StepDone
from shoal.monitor.display.display import Display

logging.basicConfig(format="logged %(message)s")
display = Display()
print("before")
display(RunStarted(step=0, run_id="r1", run_dir=None, workers=2, total_steps=40, steps_per_epoch=40,
                   samples_per_epoch=40))
readable, writable = os.pipe()
if os.fork() == 0:
    os.dup2(writable, 1)
    print("from a worker", flush=True)
    sys.exit(0)
os.wait()
assert os.read(readable, 1000) == b"from a worker\\n"
for step in range(1, 41):
    display(StepDone(step=step, epoch=0, loss=1.0, samples=1, rates=[0.1]))
    if step % 4 == 0:
        display.output(1, "out", f"out {step}\\n" + "wide " * 30 + "\\n")
        display.output(0, "err", f"10%\\r100% \\x1b[2A\\x1b[31m{step}\\n")
        print("printed", end=" ")
        print(step)
        logging.warning("%d", step)
        thread = threading.Thread(target=print, args=("thread", step))
        thread.start()
        thread.join()
    display.tick()
print("begun", end="")
assert threading.active_count() == 1
try:
    raise KeyboardInterrupt
finally:
    if "close" in sys.argv:
        display.close()
        assert type(sys.stdout).__name__ == "TextIOWrapper"
        assert logging.getLogger().handlers[0].stream is sys.stderr
"""


@pytest.mark.parametrize("columns", [80, 40])
@pytest.mark.parametrize("how", ["close", "forget"])
def test_all_that_is_printed_meanwhile_in_a_real_terminal(device: int, columns: int, how: str) -> None:
    screen = run_in_terminal(PROGRAM, how, columns=columns, rows=24)
    lines = screen.lines
    assert lines[0] == "before"
    for step in range(4, 41, 4):
        at = lines.index(f"[1] out {step}")
        rest = "".join(line.ljust(columns) for line in lines[at + 1 :])
        expected = ("[1] " + "wide " * 30).ljust(columns * -(-154 // columns))
        assert rest.startswith(expected)
        at += 1 + len(expected) // columns
        assert lines[at : at + 4] == [f"[0] 100% {step}", f"printed {step}", f"logged {step}", f"thread {step}"]
    assert len([line for line in lines if line.startswith("r1  2 workers")]) == 1
    assert len([line for line in lines if line.endswith("%")]) == 1
    assert "begun" in "".join(lines)
    assert lines[-1] == "KeyboardInterrupt" if how == "close" else "KeyboardInterrupt" in lines
    assert screen.cursor


def run_in_terminal(program: str, *arguments: str, columns: int, rows: int) -> Screen:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdin=slave, stdout=slave, stderr=slave, env=environment
    )
    os.close(slave)
    late = threading.Timer(60, process.kill)
    late.start()
    chunks = []
    # the other end is closed when the process ends
    with contextlib.suppress(OSError):
        while chunk := os.read(master, 65536):
            chunks.append(chunk)
    process.wait()
    late.cancel()
    late.join()
    os.close(master)
    screen = Screen(columns, rows)
    screen.feed(b"".join(chunks).decode().replace("\r\n", "\n"))
    return screen
