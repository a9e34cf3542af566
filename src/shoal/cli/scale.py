"""`shoal scale`: another number of workers, or servers, for a run that is under way."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.folder import read_about
from shoal.cli.output import write
from shoal.cli.references import complete_run, open_store
from shoal.core.errors import ConfigError, RunDirError, RunNotFound, ShoalError
from shoal.monitor.wording import counted, one_line

if TYPE_CHECKING:
    from shoal.cluster.access import Access
    from shoal.cluster.messages import Refused, Welcome

ABOUT = """\
Have a run go on with another number of workers. It is asked while it is under
way: new workers get their state from the others and join between two steps;
those that are too many leave between two steps. Nothing is trained twice or
left out, and the batch stays that of all workers together.

A run can have fewer workers than it began with; for more, the script says how
many there may be:
  Trainer(..., workers=2, max_workers=6)

Runs with sync="server" can have another number of servers at any time: their
parameters move between two steps, and nothing is lost.

[bold]Examples[/bold]
  [cyan]shoal scale last 4[/cyan]
  [cyan]shoal scale runs/mnist 1[/cyan]          a run's folder, with or without a store
  [cyan]shoal scale last --servers 4[/cyan]
"""

CONTROL = "control"
"""The folder inside a run's folder in which its coordinator says where it is."""
ANSWER_SECONDS = 5.0
_REPEAT_SECONDS = 0.5


def register(app: typer.Typer) -> None:
    """Add `shoal scale`."""
    app.command(name="scale", help=ABOUT, short_help="Have a run go on with more or fewer workers or servers.")(scale)


def scale(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="The id of a run, the beginning of one, 'last', a name or tag that one run has, or a run's folder.",
            autocompletion=complete_run,
        ),
    ],
    workers: Annotated[
        int | None, typer.Argument(metavar="[N]", min=1, max=4095, help="How many workers from now on.")
    ] = None,
    servers: Annotated[
        int | None, typer.Option("--servers", metavar="M", min=1, max=64, help="How many servers from now on.")
    ] = None,
) -> None:
    """Ask one run for another number of workers or servers."""
    if workers is None and servers is None:
        raise ConfigError("how many? Say `shoal scale RUN N` for workers, or `shoal scale RUN --servers M`")
    run_id, folder = _locate(run)
    access = _access(run_id, folder, servers=servers is not None)
    answer = ask(access, workers, servers)
    refusal = getattr(answer, "why", None)
    if refusal is not None:
        raise ConfigError(f"{run_id} was not changed: {refusal}")
    asked = [counted(number, what) for number, what in ((workers, "worker"), (servers, "server")) if number is not None]
    when = "as soon as a step ends with all of them" if servers is None else "as soon as they have their parts"
    write(f"{one_line(run_id)} goes on with {' and '.join(asked)} {when}\n")


def _locate(ref: str) -> tuple[str, Path]:
    """The id and the folder of a run that is under way. Raises ShoalError if it is none, or has no folder."""
    path = Path(ref).expanduser()
    if path.is_dir() and (about := read_about(path)):
        run_id = str(about.get("run_id") or path.name)
        if not _is_held(path):
            raise _not_under_way(run_id, "no process holds its folder")
        return run_id, path
    if os.sep in ref:
        raise RunNotFound(f"{ref} is not the folder of a run: there is no run.json in it")
    from shoal.store.values import RUNNING

    with open_store() as store:
        info = store.find(ref)
    if info.status != RUNNING:
        raise _not_under_way(info.id, f"it is {info.status}")
    if info.run_dir is None:
        raise RunDirError(f"{info.id} has no folder in which it could be reached; give runs a run_dir")
    return info.id, Path(info.run_dir)


def _is_held(folder: Path) -> bool:
    """Whether the process that locked the folder is there."""
    from shoal.store.liveness import is_there

    try:
        return is_there(int((folder / ".lock").read_text()))
    except (OSError, ValueError):
        return False


def _not_under_way(run_id: str, why: str) -> RunDirError:
    return RunDirError(
        f"{run_id} is not under way ({why}), so nothing of it can change. To go on from its checkpoint with another "
        f"number of workers, start it with --resume {run_id} --workers N"
    )


def _access(run_id: str, folder: Path, *, servers: bool = False) -> Access:
    """The way to the run's coordinator. Raises ShoalError if it has none, or it is for somebody else."""
    from shoal.cluster.access import Access
    from shoal.wire.curve import read_client_keys

    control = folder / CONTROL
    if not control.is_dir() and servers:
        raise ConfigError(f"{run_id} has no servers: it was not started with sync='server'")
    if not control.is_dir():
        raise ConfigError(
            f"{run_id} cannot change its number of workers: it has no coordinator. Its workers were started by a "
            "launcher, or by an earlier version"
        )
    return Access(run=run_id, folder=control, keys=read_client_keys(control))


def ask(
    access: Access, workers: int | None, servers: int | None = None, *, seconds: float = ANSWER_SECONDS
) -> Welcome | Refused:
    """Ask until there is an answer. Raises RunDirError if there is none in time, ConfigError if the files are wrong."""
    import msgspec

    from shoal.cluster.messages import MOST_BYTES, OPERATOR, Letter, Refused, Scale, Welcome, decode_down, encode
    from shoal.wire.curve import Client

    endpoint = access.endpoint()
    if endpoint is None:
        raise RunDirError(f"{access.run} has no coordinator yet; try again when its first step is done")
    deadline, life, number = time.monotonic() + seconds, secrets.randbits(60), 0
    with Client(endpoint, access.keys, limit=MOST_BYTES) as client:
        while (left := deadline - time.monotonic()) > 0:
            number += 1
            client.send(encode(Letter(access.run, OPERATOR, life, number, Scale(workers, servers))))
            payload = client.receive(min(left, _REPEAT_SECONDS))
            if payload is None:
                continue
            try:
                answer = decode_down(payload)
            except (msgspec.MsgspecError, ValueError):
                raise ShoalError(
                    f"the coordinator of {access.run} answered with something that this version of Shoal does not "
                    "know; use the version that the run was started with"
                ) from None
            if isinstance(answer, Welcome | Refused):
                return answer
    raise RunDirError(
        f"{access.run} gave no answer within {seconds:g} s at {endpoint}: it is over or was killed, or the command "
        "runs where it cannot be reached. Look with `shoal runs`, and try again if it is under way"
    )
