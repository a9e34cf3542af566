"""`shoal bench comm`: what it costs the workers of a run to talk to each other, here."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from shoal.cli.bench_table import profile_as_text, short_size, short_time
from shoal.cli.output import write, write_json
from shoal.cli.text import Screen
from shoal.core.errors import ConfigError
from shoal.core.linkfit import Point, fit, merged
from shoal.core.profile import Machine, Measured, Profile, profile_path, save

if TYPE_CHECKING:
    from shoal.core.events import AnyEvent
    from shoal.trainer.session import Session

ABOUT = """\
Measure this machine. `shoal bench comm` measures what it costs workers to
talk to each other.
"""

COMM_ABOUT = """\
Measure how long workers take to exchange messages, from a few bytes to 100 MB.

Starts workers as a training would, lets them exchange messages of growing
size, and prints a table with latency, bandwidth and a fit of both: so many
microseconds, and so many nanoseconds per byte. The result is kept as a
profile. Nothing is written to your run store. Stop other work first: the
table shows the machine as it is, busy or not.

[bold]Examples[/bold]
  [cyan]shoal bench comm[/cyan]                        2 workers, about 20 seconds
  [cyan]shoal bench comm -w 4 --collective all[/cyan]  shared memory beside gloo
  [cyan]shoal bench comm --to 1MB --seconds 3[/cyan]   small messages, quickly
  [cyan]shoal bench comm --operations sum,barrier[/cyan]
  [cyan]shoal bench comm --json --no-save | jq .measured[/cyan]

[bold]Exit codes[/bold]  0 done · 1 a worker failed · 2 wrong usage · 130 Ctrl-C
"""

ROUNDS = 3
"""Of each collective where several are compared: a machine that slows down for a while slows down all of them."""
_MOST_SIZE = 16_000_000_000
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmg]?i?b?)", re.IGNORECASE)
_UNITS = {"": 1, "k": 1000, "ki": 1 << 10, "m": 1000**2, "mi": 1 << 20, "g": 1000**3, "gi": 1 << 30}


class Collective(StrEnum):
    """How workers may exchange messages."""

    AUTO = "auto"
    SHM = "shm"
    GLOO = "gloo"
    HIERARCHICAL = "hierarchical"
    NCCL = "nccl"
    ALL = "all"


@dataclass(frozen=True)
class Plan:
    """What to measure. Sizes are in bytes; `seconds` is for everything together."""

    workers: int
    engine: str
    collectives: Sequence[str]
    operations: Sequence[str]
    sizes: Sequence[int]
    seconds: float

    @property
    def rounds(self) -> int:
        return ROUNDS if len(self.collectives) > 1 else 1

    @property
    def starts(self) -> list[str]:
        """The collective of each start of the workers; every other round goes the other way."""
        order = [list(self.collectives), list(reversed(self.collectives))]
        return [collective for number in range(self.rounds) for collective in order[number % 2]]


class Part(msgspec.Struct):
    """What came of one start of the workers."""

    collective: str
    reason: str
    hosts: list[int]
    points: dict[str, list[Point]]


def register(app: typer.Typer) -> None:
    """Add `shoal bench`."""
    bench = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help=ABOUT)
    bench.callback()(lambda: None)
    bench.command(name="comm", help=COMM_ABOUT, short_help="Measure what it costs workers to talk to each other.")(comm)
    app.add_typer(bench, name="bench", short_help="Measure what this machine can do.")


def comm(
    workers: Annotated[int, typer.Option("--workers", "-w", min=2, help="Processes that exchange messages.")] = 2,
    collective: Annotated[
        Collective, typer.Option(help="How they do it: what a run would choose (auto), one way, or all that there are.")
    ] = Collective.AUTO,
    lab: Annotated[
        str | None, typer.Option(metavar="NAME", help="Put the workers into the hosts of this lab.", show_default=False)
    ] = None,
    smallest: Annotated[str, typer.Option("--from", metavar="SIZE", help="The smallest message.")] = "4B",
    largest: Annotated[str, typer.Option("--to", metavar="SIZE", help="The largest: 64KB, 1MiB, 0.5GB.")] = "100MB",
    operations: Annotated[
        str,
        typer.Option(
            metavar="LIST", help="Of sum, sum_any, broadcast, gather, scatter_sum, barrier, with commas; or all."
        ),
    ] = "sum",
    seconds: Annotated[
        float, typer.Option(min=0.1, help="How long to measure; on a slow link the largest sizes are left out.")
    ] = 20.0,
    as_json: Annotated[bool, typer.Option("--json", help="The profile as one line of JSON, and nothing else.")] = False,
    keep_as: Annotated[
        str | None, typer.Option("--save", metavar="NAME", help="Name of the profile.", show_default="local-WORKERS")
    ] = None,
    no_save: Annotated[bool, typer.Option("--no-save", help="Do not keep a profile.")] = False,
) -> None:
    """Measure, show and keep."""
    if keep_as is not None and no_save:
        raise ConfigError(f"--save {keep_as} and --no-save were given; use one of them")
    home, name = _home(), keep_as or f"{lab or 'local'}-{workers}"
    if not no_save:
        profile_path(home, name)  # what cannot be a name is refused before anything is measured
    plan = Plan(
        workers,
        f"local:lab={lab}" if lab else "local",
        _collectives(collective, lab),
        _operations(operations),
        sizes_between(parse_size("--from", smallest), parse_size("--to", largest), workers),
        seconds,
    )
    with Progress(shown=not as_json) as progress:
        profile, reasons = _measure(plan, progress)
    if not _is_main_process():
        return
    path = None if no_save else save(profile, home, name)
    if as_json:
        write_json(profile)
    else:
        write(profile_as_text(profile, reasons, plan.sizes[-1], Screen.now()))
        write("" if path is None else f"\nKept as profile {name}: {path}\n")


# -- what was asked for ------------------------------------------------------------------------------------------------


def parse_size(option: str, text: str) -> int:
    """Bytes. KB is 1000, KiB 1024. Raises ConfigError."""
    found = _SIZE.fullmatch(text.strip())
    unit = found["unit"].lower().removesuffix("b") if found else ""
    if found is None or unit not in _UNITS:
        raise ConfigError(f"{option} {text!r} is not a size; write it as 4B, 64KB, 1MiB or 0.5GB")
    size = int(float(found["number"]) * _UNITS[unit])
    if not 4 <= size <= _MOST_SIZE:
        raise ConfigError(f"{option} {text} is {size:,} bytes; it must be between 4 bytes and {_MOST_SIZE:,}")
    return size


def sizes_between(smallest: int, largest: int, workers: int) -> list[int]:
    """From the smallest on, each twice the one before; and the largest. Raises ConfigError for what does not fit."""
    if smallest > largest:
        raise ConfigError(f"--from {smallest:,} bytes is more than --to {largest:,} bytes; it must not be")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 2 * workers * largest > memory:
        raise ConfigError(
            f"--to {short_size(largest)} with {workers} workers takes about {short_size(2 * workers * largest)} of "
            f"memory; this machine has {short_size(memory)}. Use a smaller --to, or fewer workers"
        )
    sizes = [smallest]
    while 2 * sizes[-1] < largest:
        sizes.append(2 * sizes[-1])
    return [*sizes, largest] if sizes[-1] < largest else sizes


def _collectives(collective: Collective, lab: str | None) -> list[str]:
    if collective is not Collective.ALL:
        return [collective.value]
    return ["gloo", "hierarchical"] if lab else ["gloo", "shm"]


def _operations(text: str) -> list[str]:
    from shoal.comm.bench import OPERATIONS

    names = [word.strip().replace("-", "_") for word in text.split(",") if word.strip()]
    if names == ["all"]:
        return list(OPERATIONS)
    unknown = [name for name in names if name not in OPERATIONS]
    if unknown or not names:
        raise ConfigError(f"--operations {text!r}: use one or more of {', '.join(OPERATIONS)}, with commas, or all")
    return list(dict.fromkeys(names))


def _home() -> Path:
    from shoal.store.home import shoal_home

    return shoal_home()


def _is_main_process() -> bool:
    from shoal.engines.here import is_main_process

    return is_main_process()


# -- measuring ---------------------------------------------------------------------------------------------------------


class Progress:
    """What is being done, on stderr: a line that is rewritten in a terminal, else a line for each start of workers."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._live = shown and sys.stderr.isatty()
        self._last = ""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._clear()

    def begin(self, what: str) -> None:
        """Workers are being started."""
        if self._live:
            self.point(what)
        elif self._shown:
            self._write(f"shoal bench: {what}\n")

    def point(self, what: str) -> None:
        """Something small is done."""
        if self._live:
            self._clear()
            self._last = what
            self._write(what)

    def say(self, what: str) -> None:
        """Something that a person should know, shown or not."""
        self._clear()
        self._write(f"shoal: {what}\n")

    def _clear(self) -> None:
        if self._last:
            self._write("\r" + " " * len(self._last) + "\r")
            self._last = ""

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def _measure(plan: Plan, progress: Progress) -> tuple[Profile, dict[str, str]]:
    """The profile, and why each collective was chosen."""
    import socket

    from torch import __version__ as torch_version

    from shoal.comm.bench import memcpy_bandwidth

    progress.begin("copying memory")
    bandwidth = memcpy_bandwidth()
    parts = []
    with _unrecorded():
        for number, collective in enumerate(plan.starts):
            which = f", round {number // len(plan.collectives) + 1} of {plan.rounds}" if plan.rounds > 1 else ""
            progress.begin(f"{plan.workers} workers, {collective}{which}")
            parts.append(_run(plan, collective, progress))
    profile = Profile(
        made=time.time(),
        host=socket.gethostname(),
        workers=plan.workers,
        hosts=parts[0].hosts,
        machine=Machine(len(os.sched_getaffinity(0)), bandwidth, str(torch_version)),
        measured=summarised(parts),
    )
    return profile, {part.collective: part.reason for part in parts}


def summarised(parts: Sequence[Part]) -> list[Measured]:
    """All rounds together, by what the workers have used, which may be another collective than was asked for."""
    rounds: dict[tuple[str, str], list[list[Point]]] = {}
    for part in parts:
        for operation, points in part.points.items():
            rounds.setdefault((operation, part.collective), []).append(points)
    found = []
    for (operation, collective), several in rounds.items():
        points = merged(several)
        found.append(Measured(collective, operation, points, fit(points)))
    return found


@contextmanager
def _unrecorded() -> Iterator[None]:
    """Within: workers that are launched leave no record, and nothing on the screen that is not said here."""
    from shoal.core.settings import Settings, using
    from shoal.store.home import NO_STORE

    with (
        open(os.devnull, "w") as nowhere,
        using(Settings(progress="quiet", stream=nowhere, store=NO_STORE, report=False)),
    ):
        yield


def _run(plan: Plan, collective: str, progress: Progress) -> Part:
    from shoal import launch

    share = plan.seconds / len(plan.starts) / len(plan.operations)

    def body(session: Session) -> Any:
        return msgspec.to_builtins(_measure_on_worker(session, plan, share))

    values = launch(
        body, workers=plan.workers, engine=plan.engine, collective=collective, callbacks=[_listener(progress)]
    )
    return msgspec.convert(values[0], Part)


def _measure_on_worker(session: Session, plan: Plan, seconds: float) -> Part:
    from shoal.comm.bench import measure
    from shoal.core.events import Preparing

    group = session.group
    points: dict[str, list[Point]] = {}
    for operation in plan.operations:

        def on_point(point: Point, operation: str = operation) -> bool:
            size, took = short_size(point.bytes), short_time(point.seconds)
            # `Preparing` because it is the one event that does not make a run of it
            session.channel.emit(Preparing(step=0, what=f"{operation} over {group.collective}, {size}: {took}"))
            session.channel.flush()
            return session.channel.stop_asked() is not None

        points[operation] = measure(
            group, operation, plan.sizes, budget_seconds=seconds, on_point=on_point, device=session.device
        )
        session.agree_on_stop()
        if session.stopping is not None:
            break
    return Part(group.collective, group.reason, list(group.hosts), points)


def _listener(progress: Progress) -> Callable[[AnyEvent], None]:
    from shoal.core.events import Notice, Preparing

    def listen(event: AnyEvent) -> None:
        if isinstance(event, Preparing):
            progress.point(event.what)
        elif isinstance(event, Notice):
            progress.say(_in_our_words(event.text))

    return listen


def _in_our_words(notice: str) -> str:
    """A signal makes a training end with a checkpoint; here there is none."""
    signal = notice.partition(":")[0]
    if signal in ("Ctrl-C", "SIGTERM"):
        return f"{signal}: stopping after the size in progress; Ctrl-C again ends at once"
    return notice
