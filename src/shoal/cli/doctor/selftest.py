"""The doctor's self-test: a real training on 2 workers, in a child process that cannot outlast its time."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.cli.doctor.checks import Finding, fail, ok, shorten, warn
from shoal.cli.doctor.child import Ran, run_child
from shoal.cli.doctor.trial import STAGE

SECONDS = 5.0
"""How long it should take at most, once torch is imported: that depends on the disk, and is quicker the next time."""
HARD_SECONDS = 30.0
"""When it is ended, and counts as one that hangs."""
CLOSE = 1e-6
"""By how much weights may differ between 1 worker and 2."""

_FIGURES = ("difference", "start_seconds", "step_seconds", "exchange_bytes_per_second", "seconds")


def run_trial(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    seconds: float = HARD_SECONDS,
    tell: Callable[[str], None] | None = None,
) -> Ran:
    """Run `command`, a trial (see `trial`). On the main thread. `tell` hears of its stages.

    It has a home of its own, in a temporary folder, and no run store, so nothing of it stays. One that cannot be
    started is one that failed.
    """

    def watch(errors: str) -> None:
        stage = _stage(errors)
        if tell is not None and stage:
            tell(stage)

    try:
        with tempfile.TemporaryDirectory(prefix="shoal-doctor-", ignore_cleanup_errors=True) as folder:
            alone = {
                "SHOAL_HOME": str(Path(folder, "home")),
                "SHOAL_STORE": "none",
                "SHOAL_PROGRESS": "quiet",
                # where the child is killed, what it made there goes with this folder
                "TMPDIR": folder,
            }
            return run_child(command, env={**env, **alone}, seconds=seconds, folder=Path(folder), watch=watch)
    except OSError as error:
        return Ran(1, "", f"it could not be started: {error}", 0.0)


def judge(ran: Ran) -> Finding:
    """What the end of a trial means."""
    if ran.code != 0:
        return _failed(ran)
    figures = _figures(ran.output)
    if figures is None:
        return _failed(ran)
    details = {**figures, "whole_seconds": round(ran.seconds, 3)}
    if not figures["difference"] <= CLOSE:
        return fail(
            f"2 workers and 1 worker gave weights that differ by {figures['difference']:.1g}; at most {CLOSE:g} is "
            "rounding",
            "Do not trust results of several workers here. Please report it with the output of `shoal doctor --json`.",
            **details,
        )
    found = (
        f"2 workers trained as 1 does: trained in {figures['seconds']:.1f} s ({ran.seconds:.1f} s with importing "
        "torch), workers started in "
        f"{1000 * figures['start_seconds']:.0f} ms, a step took {1000 * figures['step_seconds']:.1f} ms, "
        f"8 MB summed at {figures['exchange_bytes_per_second'] / 1e9:.2g} GB/s"
    )
    if figures["seconds"] > SECONDS:
        return warn(
            f"{found}. That is slow: once torch is imported it should take less than {SECONDS:g} s",
            "A busy machine (uptime, top), or a slow disk or network file system under the Python environment or the "
            "temporary folder are the usual reasons.",
            **details,
        )
    return ok(found, **details)


def _failed(ran: Ran) -> Finding:
    last = [line for line in ran.last_lines() if not line.startswith(STAGE)]
    stage = _stage(ran.errors)
    at = f" while {stage}" if stage else ""
    said = f"; it last said: {shorten(last[-1])}" if last else ""
    if ran.code is None:
        fix = (
            "Workers wait for each other and one does not come. Look at the warnings above; then at what stops a "
            "process from talking to itself: a firewall, a sandbox, a debugger."
        )
    else:
        fix = "The last line is the reason; `shoal doctor --json` has the lines before it."
    return fail(
        f"the trial with 2 workers {ran.how()}{at}{said}",
        fix,
        code=ran.code,
        stage=stage,
        last_lines=last,
        whole_seconds=round(ran.seconds, 3),
    )


def _figures(output: str) -> dict[str, Any] | None:
    """The figures in the last line; None if they are not there, or not numbers."""
    try:
        figures = json.loads(output.strip().splitlines()[-1])
        return {name: float(figures[name]) for name in _FIGURES}
    except (ValueError, IndexError, KeyError, TypeError):
        return None


def _stage(errors: str) -> str:
    stages = [line.removeprefix(STAGE) for line in errors.splitlines() if line.startswith(STAGE)]
    return stages[-1] if stages else ""
