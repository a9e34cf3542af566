"""`shoal logs`: what the workers printed."""

from __future__ import annotations

import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.folder import read_about
from shoal.cli.output import write
from shoal.cli.references import complete_run, open_store
from shoal.core.errors import EXIT_INTERRUPTED, ConfigError, RunDirError, RunNotFound, ShoalError
from shoal.monitor.wording import clean, counted

if TYPE_CHECKING:
    from shoal.store.values import RunInfo

ABOUT = """\
Show what the workers of a run printed: standard output, then standard error,
worker by worker. With several workers each line begins with the worker's
number.

[bold]Examples[/bold]
  [cyan]shoal logs last[/cyan]                   everything the newest run printed
  [cyan]shoal logs last -f[/cyan]                go on as it prints, until the run is over
  [cyan]shoal logs last --worker 2 --lines 50[/cyan]
  [cyan]shoal logs runs/mnist[/cyan]             a run's folder, with or without a store
"""

_NAME = re.compile(r"worker-(\d{1,9})\.(out|err)")
_BLOCK = 1 << 20
_LONGEST_LINE = 1 << 16
"""Bytes. What is longer is shown in parts: it has to fit into memory."""
_LINES_AT_ONCE = 1000
_POLL_SECONDS = 0.2
_STATUS_SECONDS = 1.0
_COLORS = ("cyan", "yellow", "green", "magenta", "blue", "bright_cyan", "bright_yellow", "bright_green")


def register(app: typer.Typer) -> None:
    """Add `shoal logs`."""
    app.command(name="logs", help=ABOUT, short_help="Show what the workers of a run printed.")(logs)


def logs(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="The id of a run, the beginning of one, 'last', a name or tag that one run has, or a run's folder.",
            autocompletion=complete_run,
        ),
    ],
    worker: Annotated[int | None, typer.Option("--worker", "-w", min=0, help="Only this worker.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run is over, or Ctrl-C.")] = False,
    lines: Annotated[
        int | None, typer.Option("--lines", min=0, help="Only the last lines of every file, this many.")
    ] = None,
) -> None:
    """Print the logs of one run."""
    folder, is_running, workers = _locate(run)
    files = log_files(folder, worker)
    printer = _Printer(folder, prefixed=worker is None, workers=workers)
    if worker is not None and not files and not (follow and worker < workers and is_running()):
        raise ConfigError(_unknown_worker(folder, worker, workers))
    if not files and not follow:
        typer.echo(f"No worker has printed anything: there are no logs in {clean(str(folder / 'logs'))}", err=True)
        return
    try:
        if follow:
            _follow(folder, worker, lines, printer, is_running)
        else:
            for path in files:
                printer.show(path, read_lines(path, lines))
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def log_files(folder: Path, worker: int | None = None) -> list[Path]:
    """The logs in a run's folder, by worker, output before errors."""
    found = []
    for path in (folder / "logs").glob("worker-*.*"):
        name = _NAME.fullmatch(path.name)
        if name and worker in (None, int(name[1])):
            found.append((int(name[1]), name[2] == "err", path))
    return [path for _, _, path in sorted(found)]


def log_workers(folder: Path) -> list[int]:
    """The workers that have a log, in order."""
    return sorted({_worker_of(path) for path in log_files(folder)})


def read_lines(path: Path, last: int | None = None) -> Iterator[bytes]:
    """The lines of a file without their ends, or the last of them. A file that is gone has none."""
    try:
        with path.open("rb") as file:
            whole = _lines_of(file)
            yield from whole if last is None else deque(whole, maxlen=last)
    except FileNotFoundError:
        return


def _lines_of(file: Any) -> Iterator[bytes]:
    while line := file.readline(_LONGEST_LINE):
        yield line.removesuffix(b"\n")


class Tail:
    """A file that grows: each `read` gives the lines that were completed since the last."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self._path = path
        self._position = position
        self._identity: tuple[int, int] | None = None
        self._partial = b""

    def read(self) -> Iterator[bytes]:
        """A file that became shorter, or another of its name, is read from its beginning."""
        try:
            with self._path.open("rb") as file:
                self._notice_replacement(file.fileno())
                file.seek(self._position)
                while block := file.read(_BLOCK):
                    self._position += len(block)
                    *complete, self._partial = (self._partial + block).split(b"\n")
                    yield from complete
                    if len(self._partial) > _LONGEST_LINE:
                        yield from self.rest()
        except FileNotFoundError:
            return

    def rest(self) -> Iterator[bytes]:
        """The last line, which has no end yet."""
        partial, self._partial = self._partial, b""
        if partial:
            yield partial

    def _notice_replacement(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        identity = status.st_dev, status.st_ino
        if status.st_size < self._position or self._identity not in (None, identity):
            self._position, self._partial = 0, b""
        self._identity = identity


def _follow(
    folder: Path, worker: int | None, lines: int | None, printer: _Printer, is_running: Callable[[], bool]
) -> None:
    tails: dict[Path, Tail] = {}
    if lines is not None:
        for path in log_files(folder, worker):
            tails[path] = Tail(path, _start_of_last(path, lines))
    running, asked = is_running(), time.monotonic()
    while True:
        if running and time.monotonic() - asked >= _STATUS_SECONDS:
            running, asked = is_running(), time.monotonic()
        # The question comes before the reading: what was printed before the end is read after it.
        for path in log_files(folder, worker):
            tail = tails.setdefault(path, Tail(path))
            printer.show(path, tail.read())
        if not running:
            break
        time.sleep(_POLL_SECONDS)
    for path, tail in tails.items():
        printer.show(path, tail.rest())


def _start_of_last(path: Path, lines: int) -> int:
    """Where the last `lines` lines begin, a last one without an end included."""
    starts = deque([0], maxlen=lines + 1)
    with path.open("rb") as file:
        while file.readline(_LONGEST_LINE):
            starts.append(file.tell())
    return starts[0]


def _locate(ref: str) -> tuple[Path, Callable[[], bool], int]:
    """The run's folder, a function that says whether it still runs, and how many workers it has (0: not known)."""
    path = Path(ref).expanduser()
    if path.is_dir() and (read_about(path) or (path / "logs").is_dir()):
        return path, *_of_folder(path)
    if os.sep in ref:
        raise RunNotFound(f"{ref} is not the folder of a run: there is neither run.json nor logs in it")
    with open_store() as store:
        run = store.find(ref)
    if run.run_dir is None:
        raise RunDirError(f"{run.id} has no folder, so the output of its workers was not kept; give runs a run_dir")
    if not Path(run.run_dir).is_dir():
        raise RunDirError(f"The folder of {run.id} is gone: {run.run_dir}")
    return Path(run.run_dir), lambda: _still_runs(run.id), run.workers


def _of_folder(folder: Path) -> tuple[Callable[[], bool], int]:
    """Without a row in the store, a run runs as long as the process that locked its folder."""
    about = read_about(folder)
    run = _known(str(about.get("run_id") or ""))
    if run is not None:
        return (lambda: _still_runs(run.id)), run.workers
    workers = about.get("workers")
    return (lambda: _holder_lives(folder)), workers if isinstance(workers, int) else 0


def _known(run_id: str) -> RunInfo | None:
    try:
        with open_store() as store:
            run = store.find(run_id)
            return run if run.id == run_id else None
    except ShoalError:
        return None


def _still_runs(run_id: str) -> bool:
    from shoal.store.values import RUNNING

    run = _known(run_id)
    return run is not None and run.status == RUNNING


def _holder_lives(folder: Path) -> bool:
    try:
        holder = int((folder / ".lock").read_text())
    except (OSError, ValueError):
        return False
    return Path(f"/proc/{holder}").exists()


def _unknown_worker(folder: Path, worker: int, workers: int) -> str:
    there = log_workers(folder)
    if there:
        named = ", ".join(map(str, there[:16])) + (", …" if len(there) > 16 else "")
        return f"--worker {worker}: there is no log of that worker; there are logs of {named}"
    number = counted(workers, "worker") if workers else "no known number of workers"
    return f"--worker {worker}: no worker has printed anything (the run has {number})"


def _worker_of(path: Path) -> int:
    name = _NAME.fullmatch(path.name)
    return int(name[1]) if name else -1


class _Printer:
    """Prints lines, with the worker in front where there are several."""

    def __init__(self, folder: Path, *, prefixed: bool, workers: int) -> None:
        self._folder = folder
        self._prefixed = prefixed
        self._workers = workers

    def show(self, path: Path, lines: Iterator[bytes]) -> None:
        prefix = self._prefix(_worker_of(path))
        # By the block: a write for every line would make a long log slow, the whole of it would fill the memory.
        while block := list(islice(lines, _LINES_AT_ONCE)):
            write("".join(f"{prefix}{line.decode(errors='replace')}\n" for line in block))

    def _prefix(self, worker: int) -> str:
        if not self._prefixed or max(self._workers, len(log_workers(self._folder))) <= 1:
            return ""
        prefix = f"[{worker}]"
        return (typer.style(prefix, fg=_COLORS[worker % len(_COLORS)]) if sys.stdout.isatty() else prefix) + " "
