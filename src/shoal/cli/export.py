"""`shoal export`, and what every command on the run store begins with: the run that is meant, and where output goes."""

from __future__ import annotations

import csv
import importlib
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.core.errors import ConfigError

if TYPE_CHECKING:
    from shoal.store.store import Store
    from shoal.store.values import RunInfo, StepRow

ABOUT = """\
Write the figures of a run to a file, or to the next command.

[bold]csv[/bold]      one line per step, one column per figure
[bold]json[/bold]     everything: the run, its steps, events, checkpoints and workers
[bold]parquet[/bold]  the steps, for pandas, polars or DuckDB ([cyan]pip install 'shoal\\[parquet]'[/cyan])

Times are seconds since 1970. A loss that is not a number is nan in csv and
parquet, and null in json, which has no word for it.

[bold]Examples[/bold]
  [cyan]shoal export last > steps.csv[/cyan]          the newest run
  [cyan]shoal export last -o steps.parquet[/cyan]     the format by the file's ending
  [cyan]shoal export digits --format json | jq .run[/cyan]
"""

STEP_COLUMNS = ("step", "time", "epoch", "loss", "samples", "rate", "norm")
NOTHING = "–"
_STEERING = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|(?P<odd>[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069])"
)
_COMPLETIONS = 200
_STEPS_OF_A_PAGE = 5000


class Format(StrEnum):
    """What a run can be written as."""

    CSV = "csv"
    JSON = "json"
    PARQUET = "parquet"


def complete_run(incomplete: str) -> list[tuple[str, str]]:
    """What RUN may be, with a word about each, for the shell. Never raises: a shell that completes shows no errors."""
    try:
        with open_store() as store:
            runs = store.runs(limit=_COMPLETIONS)
    except Exception:
        return []
    found = {"last": "the newest run"} if runs else {}
    for run in runs:
        found.setdefault(run.id, run.status)
    for run in runs:
        if sum(other.name == run.name for other in runs) == 1:
            found.setdefault(run.name, run.status)
    return [(word, about) for word, about in found.items() if word.startswith(incomplete)]


Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="The id of a run, the beginning of one, 'last', or a name or tag that one run has.",
        autocompletion=complete_run,
    ),
]
Runs = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN",
        help="Ids of runs, beginnings of ids, 'last', or names or tags that one run has.",
        autocompletion=complete_run,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="For machines: JSON on one line.")]


def register(app: typer.Typer) -> None:
    """Add `shoal export`."""
    app.command(name="export", help=ABOUT, short_help="Write a run's figures as csv, json or parquet.")(export)


def export(
    run: Run,
    format: Annotated[
        Format | None, typer.Option("--format", help="By default what the ending of FILE says, else csv.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to. Without it: standard output.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over FILE if it is there.")] = False,
) -> None:
    """Write one run."""
    chosen = format or _format_of(output)
    if output is not None and str(output) != "-":
        _refuse_to_overwrite(output, force)
    elif chosen is Format.PARQUET and _is_terminal():
        raise ConfigError("Parquet is not for reading on a screen: give a file with -o FILE.parquet")
    with open_store() as store:
        data = _encoded(store, store.find(run), chosen)
    if output is None or str(output) == "-":
        write_bytes(data)
    else:
        write_file(output, lambda path: path.write_bytes(data), force=force)
        typer.echo(f"Wrote {output} ({len(data):,} bytes)", err=True)


def _is_terminal() -> bool:
    return sys.stdout.isatty()


def open_store() -> Store:
    """The run store, which is not made by looking for it. Raises StoreError."""
    from shoal.store.store import Store

    return Store.open(create=False)


def write(text: str) -> None:
    """Put `text` on standard output now. Ends the command quietly if nobody reads it any more (`| head`)."""
    with _reader_may_leave():
        try:
            sys.stdout.write(text)
        except UnicodeEncodeError:
            encoding = sys.stdout.encoding
            sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()


def write_bytes(data: bytes) -> None:
    """As `write`, byte for byte."""
    with _reader_may_leave():
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


@contextmanager
def _reader_may_leave() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        # What is still buffered has to go somewhere when the process flushes at its end.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        raise typer.Exit(0) from None


def write_json(value: Any) -> None:
    """One line. What is not a number becomes null."""
    import msgspec

    write(msgspec.json.encode(value).decode() + "\n")


def write_file(target: Path, fill: Callable[[Path], object], *, force: bool) -> None:
    """Have `fill` write a file beside `target` and give it its name when it is complete.

    A file that is there is kept unless `force`. Raises ConfigError if the file cannot be written.
    """
    _refuse_to_overwrite(target, force)
    try:
        if target.exists() and not target.is_file():
            fill(target)  # a device or a pipe: there is nothing to put in its place
            return
        # The ending stays: it tells matplotlib the format.
        beside = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
        try:
            fill(beside)
            _rename(beside, target, force)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written ({error.strerror or error}); give a file in a folder that you may write to"
        ) from None


def _rename(beside: Path, target: Path, force: bool) -> None:
    if force:
        beside.replace(target)
        return
    try:
        os.link(beside, target)  # unlike a rename it never replaces what came there meanwhile
    except FileExistsError:
        _refuse_to_overwrite(target, force)
    except OSError:  # a file system without links
        beside.replace(target)


def _refuse_to_overwrite(target: Path, force: bool) -> None:
    if target.is_dir():
        raise ConfigError(f"{target} is a folder; give the name of a file")
    if target.is_file() and not force:
        raise ConfigError(f"{target} is there already; give another name, or --force to write over it")


def _format_of(output: Path | None) -> Format:
    ending = output.suffix.lstrip(".").lower() if output is not None else ""
    return Format(ending) if ending in set(Format) else Format.CSV


def _encoded(store: Store, run: RunInfo, format: Format) -> bytes:
    match format:
        case Format.CSV:
            return steps_as_csv(store.steps(run.id)).encode()
        case Format.JSON:
            return everything_as_json(store, run)
        case Format.PARQUET:
            return steps_as_parquet(run, store.steps(run.id))


def step_table(steps: list[StepRow]) -> dict[str, list[Any]]:
    """The columns of the steps by name. What a step does not have is None.

    A logged figure has its own name, or `log.NAME` if that is the name of another column.
    """
    table: dict[str, list[Any]] = {name: [getattr(step, name) for step in steps] for name in STEP_COLUMNS}
    for name in sorted({name for step in steps for name in step.logs}):
        title = f"log.{name}" if name in STEP_COLUMNS else name
        table[title] = [step.logs.get(name) for step in steps]
    return table


def steps_as_csv(steps: list[StepRow]) -> str:
    """A header and a line per step. Missing values are empty, those that are not numbers are nan and inf."""
    table = step_table(steps)
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(table)
    lines.writerows(zip(*table.values(), strict=True))
    return text.getvalue()


def everything_as_json(store: Store, run: RunInfo) -> bytes:
    """All that the store holds of a run. A row is a line, so that `grep` and `diff` are of use."""
    import msgspec

    encode = msgspec.json.encode
    lists: dict[str, list[Any]] = {
        "steps": list(store.steps(run.id)),
        "events": list(store.events(run.id)),
        "checkpoints": list(store.checkpoints(run.id)),
        "workers": list(store.workers(run.id)),
    }
    parts = [b'"run":' + encode(run)]
    parts += [b'"%s":[\n%s\n]' % (name.encode(), b",\n".join(map(encode, rows))) for name, rows in lists.items()]
    return b"{\n" + b",\n".join(parts) + b"\n}\n"


def steps_as_parquet(run: RunInfo, steps: list[StepRow]) -> bytes:
    """The columns of `step_table`; the metadata has the run's id and name. Raises ConfigError without pyarrow."""
    try:
        pyarrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            "Parquet is written by pyarrow, which is not installed. Install it with: pip install 'shoal[parquet]'   "
            "(or: pip install pyarrow), or take --format csv"
        ) from error
    whole = ("step", "epoch", "samples")
    columns = {
        name: pyarrow.array(values, pyarrow.int64() if name in whole else pyarrow.float64())
        for name, values in step_table(steps).items()
    }
    table = pyarrow.table(columns).replace_schema_metadata({"shoal.run": run.id, "shoal.name": run.name})
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(table, sink)
    return bytes(sink.getvalue())


def run_as_page(store: Store, run: RunInfo) -> str:
    """The report of a run, as one HTML file."""
    from shoal.monitor.page import render_html
    from shoal.monitor.summary import Summary

    steps = store.steps(run.id, most=_STEPS_OF_A_PAGE)
    rows = store.events(run.id), store.checkpoints(run.id), store.workers(run.id)
    return render_html(Summary.from_store(run, steps, *rows))


def samples_done(run: RunInfo) -> int:
    """Those of all steps done; the last batch of an epoch may be short."""
    if not run.steps_per_epoch:
        return run.step * run.batch_size
    epochs, steps = divmod(run.step, run.steps_per_epoch)
    return epochs * run.samples_per_epoch + steps * run.batch_size


def speed(run: RunInfo) -> float | None:
    """Samples per second, over all its starts."""
    return samples_done(run) / run.seconds if run.seconds > 0 and run.step else None


def runs_as_lines(runs: Sequence[RunInfo]) -> str:
    """A header and a line per run, with tabs between the columns: for `cut`, `sort` and spreadsheets."""
    rows = [["id", "name", "status", "created", "steps", "loss", "metrics", "workers", "samples/s", "seconds", "tags"]]
    for run in runs:
        metrics = " ".join(f"{name}={value:.6g}" for name, value in run.metrics.items())
        numbers = ("" if value is None else f"{value:.6g}" for value in (run.loss, speed(run), run.seconds))
        loss, rate, seconds = numbers
        row = [run.id, run.name, run.status, moment(run.created), steps_of(run), loss, metrics, str(run.workers)]
        rows.append([*row, rate, seconds, ",".join(run.tags)])
    return "".join("\t".join(map(one_line, row)) + "\n" for row in rows)


def one_line(text: str) -> str:
    """Safe to show in a row of a table."""
    return " ".join(clean(text).split())


def clean(text: str) -> str:
    """Text from a run, safe to show: what could steer a terminal is left out or shown as �."""
    return _STEERING.sub(lambda found: "�" if found["odd"] else "", text.replace("\r\n", "\n"))


def figure(value: float | None) -> str:
    """Four digits: 0.1234, 12,340, 1.234e-05."""
    if value is None:
        return NOTHING
    if value != value:
        return "NaN"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 or isinstance(value, int) else f"{value:.4g}"


def size(count: float) -> str:
    """Bytes: 12 bytes, 1.5 MiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def duration(seconds: float) -> str:
    """3.2 s, 4 min 12 s, 2 h 05 min, 3 d 04 h."""
    whole = round(seconds)
    for large, name, small, below in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= large:
            return f"{whole // large} {name} {whole % large // small:02d} {below}"
    return f"{seconds:.1f} s"


def moment(when: float) -> str:
    """In local time, with its offset."""
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(when))


def steps_of(run: RunInfo) -> str:
    """Done and to do."""
    return f"{run.step}/{run.total_steps}" if run.total_steps else str(run.step)
