"""Workers that run the script once each, without a launcher: where memory cannot be shared by fork (CUDA).

The process that the user started becomes worker 0. It starts the same command again for every other worker, with the
variables that torchrun would set, so that they find their place by `World.detect` like under any launcher.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
from functools import partial

from shoal.core.errors import ConfigError
from shoal.engines.lifeline import die_with_parent
from shoal.engines.world import World

_FAREWELL_SECONDS = 60.0
_world: World | None = None
_others: list[subprocess.Popen[bytes]] = []


def run_script_on(workers: int) -> World:
    """Start this script `workers`−1 more times; this process is worker 0. Later calls return the same world."""
    global _world
    if _world is not None:
        if _world.size != workers:
            raise ConfigError(
                f"workers={workers}, but this script already runs on {_world.size}; use one number throughout"
            )
        return _world
    command = _command()
    address, port = "127.0.0.1", _free_port()
    for rank in range(1, workers):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "MASTER_ADDR": address, "MASTER_PORT": port}
        environment = {**os.environ, **{key: str(value) for key, value in place.items()}}
        _others.append(subprocess.Popen(command, env=environment, preexec_fn=partial(die_with_parent, os.getpid())))
    atexit.register(_wait_for_others)
    _world = World(rank=0, size=workers, local_rank=0, address=address, port=port, launcher="script")
    return _world


def ended_badly() -> list[tuple[int, int]]:
    """(rank, exit code) of the other workers that have ended with an error."""
    codes = [(rank, process.poll()) for rank, process in enumerate(_others, start=1)]
    return [(rank, code) for rank, code in codes if code]


def _command() -> list[str]:
    if not sys.argv or not sys.argv[0] or sys.argv[0] == "-c" or not os.path.exists(sys.argv[0]):
        raise ConfigError(
            "the script cannot be run once per worker: this process was not started from a file; put the code "
            "into one, or start it with torchrun"
        )
    return [sys.executable, *sys.orig_argv[1:]]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for_others() -> None:
    """At exit: the others may still be busy with what the script does after training, and die with this process."""
    for process in _others:
        try:
            process.wait(_FAREWELL_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
