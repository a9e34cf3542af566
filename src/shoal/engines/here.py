"""Whether this process runs the script for a worker, started so by the script's first process."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from shoal.engines.world import World
from shoal.wire.link import Link

VARIABLE = "SHOAL_WORKER"
"""Of the environment: seat, descriptor of the link, process id of the parent, and scratch folder, with colons."""


@dataclass(frozen=True)
class Here:
    """This process, if it runs the script for a worker."""

    seat: int
    link: Link
    scratch: Path


def here() -> Here | None:
    """The place of this process among those that run the script for its first process; None in any other one."""
    return _read(os.getpid())


@cache
def _read(pid: int) -> Here | None:
    seat, descriptor, parent, scratch = (os.environ.pop(VARIABLE, "") + ":::").split(":", 3)
    # a program that such a process has started before it came here has the variable, too
    if not seat or os.getppid() != int(parent):
        return None
    return Here(int(seat), Link(socket.socket(fileno=int(descriptor))), Path(scratch.rstrip(":")))


def is_main_process() -> bool:
    """False in the processes of a script that runs once per worker, but for the one that tells and keeps the run."""
    world = World.detect(os.environ)
    return here() is None if world is None else world.rank == 0
