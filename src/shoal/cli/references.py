"""What every command on the run store begins with: the store, and the run that is meant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shoal.store.store import Store

_COMPLETIONS = 200


def open_store() -> Store:
    """The run store, which is not made by looking for it. Raises StoreError."""
    from shoal.store.store import Store

    return Store.open(create=False)


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
