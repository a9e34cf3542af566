"""The display as lines: choosing a mode, plain and quiet progress, warnings that repeat, what workers print."""

from __future__ import annotations

import io
import subprocess
import sys
import tracemalloc
from types import SimpleNamespace

import msgspec
import pytest

from shoal.core.errors import ConfigError
from shoal.core.events import (
    EvalDone,
    Event,
    ExchangeSettled,
    Notice,
    Preparing,
    RunEnded,
    RunFailed,
    RunStarted,
    StepDone,
    WorkerSeen,
)
from shoal.monitor.display.display import Display
from shoal.monitor.display.live import LiveView, run_lines
from shoal.monitor.display.notebook import NotebookView, page
from shoal.monitor.display.plain import PlainView
from shoal.monitor.display.tally import Tally


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def start(step: int = 0, workers: int = 2, total: int = 10) -> RunStarted:
    return RunStarted(
        step=step,
        run_id="r1",
        run_dir="runs/r1",
        workers=workers,
        total_steps=total,
        steps_per_epoch=5,
        samples_per_epoch=40,
    )


def done(step: int, loss: float = 0.5) -> StepDone:
    return StepDone(step=step, epoch=step // 5, loss=loss, samples=8, rates=[0.1])


def end(step: int = 10) -> RunEnded:
    return RunEnded(step=step, loss=0.25, metrics={}, reason="complete")


def seen(worker: int, seconds: float) -> WorkerSeen:
    told = {"compute": 0.5 * seconds, "exchange": 0.25 * seconds, "data": 0.125 * seconds, "idle": 0.125 * seconds}
    return WorkerSeen(step=1, worker=worker, samples=int(10 * seconds), seconds=told, memory=3 << 30)


@pytest.fixture
def terminal_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")


def test_plain_lines() -> None:
    clock, stream = Clock(), io.StringIO()
    display = Display("plain", stream=stream, clock=clock)
    display(start(step=2))
    display(done(3))
    clock.now += 6
    display(done(4))
    display(EvalDone(step=5, epoch=0, metrics={"loss": 0.123456, "accuracy": 0.5}))
    display(end())
    display.close()
    assert stream.getvalue().splitlines() == [
        "shoal: r1: 10 steps on 2 workers, from step 2 in runs/r1",
        "shoal: step 4/10  epoch 1  loss 0.5  3 samples/s  18 s left",
        "shoal: step 5/10  epoch 1  evaluation: loss 0.1235  accuracy 0.5",
        "shoal: complete at step 10/10  loss 0.25",
    ]


SETTLED = ExchangeSettled(
    step=3,
    collective="shm",
    reason="all workers are on\none host\x1b[2J",
    hosts=[0, 0],
    latency=11e-6,
    bandwidth=5.5 * 2**30,
    buckets=[4 << 20, 1 << 20],
)
SETTLED_WORDS = (
    "exchange: shared memory, 2 buckets of up to 4.0 MiB, latency 11 µs, 5.5 GiB/s; all workers are on one host"
)


def test_plain_says_how_workers_exchange() -> None:
    stream = io.StringIO()
    display = Display("plain", stream=stream, clock=Clock())
    display(start())
    display(SETTLED)
    assert stream.getvalue().splitlines()[1:] == [f"shoal: {SETTLED_WORDS}"]


def test_plain_says_no_more_than_was_measured() -> None:
    stream = io.StringIO()
    display = Display("plain", stream=stream, clock=Clock())
    display(start())
    display(msgspec.structs.replace(SETTLED, latency=0.0, bandwidth=0.0, buckets=[]))
    assert stream.getvalue().splitlines()[1:] == ["shoal: exchange: shared memory; all workers are on one host"]


class FromTheFuture(Event, frozen=True, tag=True, kw_only=True):
    """An event of which no display knows."""

    words: str


@pytest.mark.parametrize("mode", ["plain", "rich", "quiet", "json"])
def test_an_event_that_is_not_known_is_no_trouble(mode: str, terminal_type: None) -> None:
    stream = Terminal() if mode == "rich" else io.StringIO()
    display = Display(mode, stream=stream, clock=Clock())
    display(start())
    display(FromTheFuture(step=1, words="what?"))  # type: ignore[arg-type]
    display(SETTLED)
    display(end())
    display.close()
    assert ("what?" in stream.getvalue()) == (mode == "json")


@pytest.mark.parametrize("verbose", [False, True])
def test_a_terminal_says_how_workers_exchange_when_asked_for_more(verbose: bool) -> None:
    tally = Tally(Clock())
    for event in (start(), SETTLED):
        tally.see(event)
    lines = [line.plain for line in run_lines(tally, 120, verbose=verbose, ascii_only=False)]
    assert (SETTLED_WORDS in lines) == verbose
    assert (SETTLED_WORDS in page(tally, [], verbose=verbose)) == verbose
    tally.see(start())
    assert tally.settled is None


def test_plain_verbose_adds_a_line_per_worker() -> None:
    clock, stream = Clock(), io.StringIO()
    display = Display("plain", stream=stream, verbose=True, clock=clock)
    display(start())
    clock.now += 6
    display(seen(1, 6.0))
    display(seen(0, 6.0))
    display(done(1))
    told = "10 samples/s  compute 50%  exchange 25%  data wait 12%  rest 12%  3.0 GiB"
    assert stream.getvalue().splitlines()[2:] == [f"shoal: worker 0  {told}", f"shoal: worker 1  {told}"]


def test_plain_tells_of_preparing_only_when_it_takes_long() -> None:
    clock, stream = Clock(), io.StringIO()
    display = Display("plain", stream=stream, clock=clock)
    display(Preparing(step=0, what="reading checkpoint", done=0, total=720, unit="MB"))
    display(Preparing(step=0, what="reading checkpoint", done=720, total=720, unit="MB"))
    display(Preparing(step=0, what="indexing"))
    clock.now += 1
    display.tick()
    assert stream.getvalue() == ""
    clock.now += 2
    display.tick()
    display.tick()
    display(Preparing(step=0, what="indexing", done=5, total=10, unit="files"))
    assert stream.getvalue() == "shoal: indexing\n"
    display(Preparing(step=0, what="indexing", done=10, total=10, unit="files"))
    clock.now += 100
    display.tick()
    assert stream.getvalue() == "shoal: indexing\nshoal: indexing 10/10 files\n"


def test_plain_goes_to_what_stderr_is_now(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display("plain")
    display(start())
    assert capsys.readouterr() == ("", "shoal: r1: 10 steps on 2 workers in runs/r1\n")


def test_quiet_prints_warnings_and_what_workers_print(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display("quiet")
    for event in (start(), done(1), Notice(step=1, text="look here"), Notice(step=1, text="look here"), end()):
        display(event)
    display.output(0, "out", "a result\n")
    display.close()
    assert capsys.readouterr() == ("a result\n", "shoal: look here\nshoal: once more: look here\n")


def test_repeated_warnings_are_counted_and_told_at_the_end() -> None:
    stream = io.StringIO()
    display = Display("plain", stream=stream)
    for _ in range(42):
        display.warn("shoal: the disk is slow")
    for step in range(10):
        display(Notice(step=step, text=f"step {step} took {step * 1.5} s"))
    display.warn("x" * 500)
    display.warn("x" * 500)
    before = stream.getvalue().splitlines()
    display.close()
    display.close()
    assert before[:4] == ["shoal: the disk is slow", *(f"shoal: step {i} took {i * 1.5} s" for i in range(3))]
    assert len(before) == 5
    assert stream.getvalue().splitlines()[5:] == [
        "shoal: 41 more times: the disk is slow",
        "shoal: 7 more times, with other numbers: step 0 took 0.0 s",
        f"shoal: once more: {'x' * 97}...",
    ]


def test_words_that_differ_are_different_warnings() -> None:
    stream = io.StringIO()
    display = Display("plain", stream=stream)
    for word in ("a", "b", "c", "d", "e"):
        display.warn(f"{word} is 1")
    display.close()
    assert len(stream.getvalue().splitlines()) == 5


def test_warnings_take_bounded_memory() -> None:
    stream = io.StringIO()
    display = Display("plain", stream=stream)
    for number in range(1000):
        display.warn("".join(chr(ord("a") + int(digit)) for digit in str(number)))
    display.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 201
    assert lines[-1] == "shoal: 800 more warnings of other kinds"


def test_after_close_it_begins_anew() -> None:
    stream = io.StringIO()
    display = Display("plain", stream=stream)
    for _ in range(2):
        display(start())
        display.warn("again")
        display(end())
        display.close()
    lines = stream.getvalue().splitlines()
    assert lines[:3] == lines[3:]
    assert len(lines) == 6


def test_the_next_run_is_told_apart_without_close() -> None:
    stream = io.StringIO()
    display = Display("plain", stream=stream)
    display.warn("before")
    display(start())
    display.warn("before")
    display(end())
    display(start())
    display.warn("before")
    lines = [line for line in stream.getvalue().splitlines() if "before" in line]
    assert lines == ["shoal: before", "shoal: once more: before", "shoal: before"]


@pytest.mark.parametrize("mode", ["plain", "quiet", "rich"])
def test_output_is_passed_on_exactly_where_there_is_no_terminal(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(mode)
    display(start(workers=4))
    capsys.readouterr()
    display.output(3, "out", "a\r\x1b[2Kb\n\nc")
    display.output(2, "err", "wrong\n")
    assert capsys.readouterr() == ("a\r\x1b[2Kb\n\nc", "wrong\n")


@pytest.mark.usefixtures("terminal_type")
def test_output_is_exact_in_a_pipe_beside_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    display = Display("rich", stream=terminal)
    display(start(workers=4))
    display.output(3, "out", "a\r\x1b[2Kb\n")
    display.close()
    assert capsys.readouterr().out == "a\r\x1b[2Kb\n"


def test_a_stream_that_has_gone_ends_nothing() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    closed = io.StringIO()
    closed.close()
    for stream in (Gone(), closed):
        for mode in ("plain", "json"):
            display = Display(mode, stream=stream)
            display(start())
            display.warn("a")
            display(end())
            display.close()


def test_text_that_the_stream_cannot_encode() -> None:
    raw = io.BytesIO()
    display = Display("plain", stream=io.TextIOWrapper(raw, encoding="ascii"))
    display.warn("5 µs, \udcff")
    assert raw.getvalue() == b"shoal: 5 \\xb5s, \\udcff\n"


@pytest.mark.parametrize(
    ("mode", "stream", "term", "view"),
    [
        ("auto", Terminal(), "xterm", LiveView),
        ("auto", Terminal(), "dumb", PlainView),
        ("auto", io.StringIO(), "xterm", PlainView),
        ("rich", Terminal(), "xterm", LiveView),
        ("rich", io.StringIO(), "xterm", PlainView),
        ("plain", Terminal(), "xterm", PlainView),
    ],
)
def test_mode(mode: str, stream: io.StringIO, term: str, view: type[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    assert type(Display(mode, stream=stream)._make_view()) is view


@pytest.mark.parametrize(("kernel", "view"), [(object(), NotebookView), (None, PlainView)])
def test_a_kernel_is_a_notebook_and_a_shell_is_not(
    kernel: object, view: type[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = SimpleNamespace(kernel=kernel)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    assert type(Display("auto")._make_view()) is view


def test_unknown_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="'fancy'; it must be one of auto, rich, plain, json, quiet"):
        Display("fancy")
    with pytest.raises(ConfigError, match="'stdout'; it must be one of out, err"):
        Display("plain").output(0, "stdout", "text\n")


def test_plain_imports_neither_rich_nor_ipython() -> None:
    program = (
        "import sys; from shoal.monitor.display.display import Display; d = Display(); d.warn('a'); d.close()\n"
        "print(sorted({'rich', 'IPython', 'torch', 'numpy'} & set(sys.modules)))"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (finished.stdout, finished.stderr) == ("[]\n", "shoal: a\n")


@pytest.mark.usefixtures("terminal_type")
@pytest.mark.parametrize("mode", ["plain", "rich", "json"])
def test_memory_is_flat_over_many_steps(mode: str) -> None:
    class Sink(Terminal):
        def write(self, text: str) -> int:
            return len(text)

    clock = Clock()
    display = Display(mode, stream=Sink(), verbose=True, clock=clock)
    display(start(total=100_000))

    def steps(first: int, last: int) -> None:
        for step in range(first, last):
            clock.now += 0.01
            display(done(step))
            if step % 100 == 0:
                display(seen(step // 100 % 3, clock.now))
                display.output(0, "err", "")
                display.warn(f"{step} is odd")

    def ours() -> int:
        # Rich keeps the widths of the last few thousand texts, which is bounded as well, but takes long to be reached
        mine = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/shoal/monitor/*")])
        return sum(trace.size for trace in mine.traces)

    tracemalloc.start()
    try:
        steps(1, 1200)
        before = ours()
        steps(1200, 2400)
        grown = ours() - before
    finally:
        tracemalloc.stop()
    display(RunFailed(step=1, error="x"))
    display.close()
    assert grown < 10_000
