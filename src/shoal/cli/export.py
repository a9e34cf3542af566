"""`shoal export`: the figures of a run as csv, json or parquet."""

from __future__ import annotations

import csv
import importlib
import io
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.output import refuse_to_overwrite, write_bytes, write_file
from shoal.cli.references import Run, open_store
from shoal.core.errors import ConfigError

if TYPE_CHECKING:
    from shoal.store.store import Store
    from shoal.store.values import RunInfo, StepRow

ABOUT = """\
Write the figures of a run to a file, or to the next command.

[bold]csv[/bold]      one line per step, one column per figure
[bold]json[/bold]     everything: the run, its steps, flows, events, checkpoints and workers
[bold]parquet[/bold]  the steps, for pandas, polars or DuckDB ([cyan]pip install 'shoal\\[parquet]'[/cyan])

Times are seconds since 1970. A loss that is not a number is nan in csv and
parquet, and null in json, which has no word for it.

[bold]Examples[/bold]
  [cyan]shoal export last > steps.csv[/cyan]          the newest run
  [cyan]shoal export last -o steps.parquet[/cyan]     the format by the file's ending
  [cyan]shoal export digits --format json | jq .run[/cyan]
"""

TRAFFIC_COLUMNS = ("bytes_sent", "messages", "operations", "exchange", "exposed")
"""Of worker 0 in that step; none where there is one worker."""
STEP_COLUMNS = ("step", "time", "epoch", "loss", "samples", "rate", "norm", *TRAFFIC_COLUMNS)


class Format(StrEnum):
    """What a run can be written as."""

    CSV = "csv"
    JSON = "json"
    PARQUET = "parquet"


def register(app: typer.Typer) -> None:
    """Add `shoal export`."""
    app.command(name="export", help=ABOUT, short_help="Write a run's figures as csv, json or parquet.")(export)


def export(
    run: Run,
    format: Annotated[
        Format | None, typer.Option("--format", help="By default what the ending of FILE says; csv without a FILE.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to. Without it: standard output.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over FILE if it is there.")] = False,
) -> None:
    """Write one run."""
    chosen = format or _format_of(output)
    if output is not None and str(output) != "-":
        refuse_to_overwrite(output, force)
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


def _format_of(output: Path | None) -> Format:
    """What the file's ending says; csv where there is none. Raises ConfigError for an ending that is no format."""
    if output is None or str(output) == "-":
        return Format.CSV
    ending = output.suffix.lstrip(".").lower()
    if not ending:
        return Format.CSV
    if ending not in set(Format):
        raise ConfigError(
            f"-o {output}: the file ends in .{ending}, which is no format that a run can be written as; "
            "let it end in .csv, .json or .parquet, or say which it is with --format csv, json or parquet"
        )
    return Format(ending)


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
        "flows": list(store.flows(run.id)),
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
    whole = ("step", "epoch", "samples", "bytes_sent", "messages", "operations")
    columns = {
        name: pyarrow.array(values, pyarrow.int64() if name in whole else pyarrow.float64())
        for name, values in step_table(steps).items()
    }
    table = pyarrow.table(columns).replace_schema_metadata({"shoal.run": run.id, "shoal.name": run.name})
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(table, sink)
    return bytes(sink.getvalue())
