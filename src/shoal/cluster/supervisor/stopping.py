"""What is said when a signal asks a run to stop."""

from __future__ import annotations

import time

from shoal.cluster.channel.channel import INTERRUPTED, PREEMPTED
from shoal.cluster.supervisor.stuck import Stuck

KEPT = "with a checkpoint"
"""What is left of a run that a signal ends, in the words that follow `stopping after the step in progress`."""
_SIGNALS = {PREEMPTED: ("SIGTERM", ""), INTERRUPTED: ("Ctrl-C", "; press it again to end at once")}


def signal_notice(reason: str, stuck: Stuck, kept: str = KEPT) -> str | None:
    """What to say when a run is asked to stop, if a signal asks: what it does, and what it waits for.

    `kept`: see `KEPT`.
    """
    if reason not in _SIGNALS:
        return None
    name, more = _SIGNALS[reason]
    text, waits = f"{name}: stopping after the step in progress, {kept}{more}", stuck.stopping(time.monotonic())
    return f"{text} ({waits})" if waits else text
