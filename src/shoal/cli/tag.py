"""`shoal tag`: words by which runs are found again."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from shoal.cli.output import write
from shoal.cli.references import Run, open_store
from shoal.core.errors import ConfigError
from shoal.monitor.wording import one_line

ABOUT = """\
Give a run tags, or take some away, and say which it has. A tag that only one run
has can be used wherever a run is asked for.

[bold]Examples[/bold]
  [cyan]shoal tag last baseline paper/table-2[/cyan]
  [cyan]shoal tag last paper/table-2 --remove[/cyan]
  [cyan]shoal runs --tag baseline[/cyan]
"""

_TAG = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")


def register(app: typer.Typer) -> None:
    """Add `shoal tag`."""
    app.command(name="tag", help=ABOUT, short_help="Give a run tags.")(tag)


def tag(
    run: Run,
    tags: Annotated[
        list[str], typer.Argument(metavar="TAG", help="Letters (a-z, A-Z), digits and . _ : / -, 64 at most.")
    ],
    remove: Annotated[bool, typer.Option("--remove", help="Take these tags away.")] = False,
) -> None:
    """Change the tags of one run."""
    for name in tags:
        if not remove and not _TAG.fullmatch(name):
            raise ConfigError(f"{name!r} cannot be a tag: it must be 1 to 64 letters (a-z, A-Z), digits or . _ : / -")
    with open_store() as store:
        info = store.find(run)
        left = store.tag(info.id, remove=tags) if remove else store.tag(info.id, add=tags)
    write(f"{one_line(info.id)}: {one_line(', '.join(left)) or 'no tags'}\n")
