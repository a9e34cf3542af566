"""Workers that run the script once each, without a launcher: where memory cannot be shared by fork (CUDA).

The process that the user started becomes worker 0. It starts the same command again for every other worker, with the
variables that torchrun would set, so that they find their place by `World.detect` like under any launcher.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial

from shoal.core.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, ConfigError
from shoal.engines.lifeline import die_with_parent
from shoal.engines.program import script
from shoal.engines.world import World

_FAREWELL_SECONDS = 60.0
_world: World | None = None
_others: list[subprocess.Popen[bytes]] = []
_listener: socket.socket | None = None


def run_script_on(workers: int) -> World:
    """Start this script `workers`−1 more times; this process is worker 0. Later calls return the same world.

    The others die with this process; when it ends by itself it waits for them. Raises ConfigError where there is no
    script to run again.
    """
    global _world, _listener
    if _world is not None:
        if _world.size != workers:
            raise ConfigError(
                f"workers={workers}, but this script already runs on {_world.size}; use one number throughout"
            )
        return _world
    command = _command()
    # kept open until somebody serves on it: a port that was only looked up could be another's by then
    _listener = socket.create_server(("127.0.0.1", 0))
    address, port = _listener.getsockname()
    atexit.register(_wait_for_others)
    for rank in range(1, workers):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "MASTER_ADDR": address, "MASTER_PORT": port}
        environment = {**os.environ, **{key: str(value) for key, value in place.items()}}
        _others.append(subprocess.Popen(command, env=environment, preexec_fn=_tie()))
    _world = World(rank=0, size=workers, local_rank=0, address=address, port=port, launcher="script")
    return _world


def take_listener() -> int | None:
    """The descriptor of a socket that listens at the address where the workers meet; the caller owns it. Once."""
    global _listener
    listener, _listener = _listener, None
    return None if listener is None else listener.detach()


def ended(patience: float = 0.0, *, well: bool = False) -> list[str]:
    """How other workers have ended, in words: those that failed, and with `well` the rest too.

    Waits up to `patience` seconds for the first one.
    """
    deadline = time.monotonic() + patience
    while True:
        codes = [(rank, process.poll()) for rank, process in enumerate(_others, 1)]
        ends = [f"worker {rank} {_how(code)}" for rank, code in codes if code or (well and code is not None)]
        if ends or not _others or time.monotonic() >= deadline:
            return ends
        time.sleep(0.01)


def _command() -> list[str]:
    if script() is None or not os.path.exists(sys.argv[0]):
        raise ConfigError(
            "engine: start=script runs the script once per worker, but this process was not started from a file "
            "(a notebook, python -c, or a prompt); put the code into a file, or use engine='local:start=fork'"
        )
    return [sys.executable, *sys.orig_argv[1:]]


def _tie() -> partial[None] | None:
    """To the kernel a parent is a thread; only the main one is sure to live as long as the process."""
    if threading.current_thread() is threading.main_thread():
        return partial(die_with_parent, os.getpid())
    return None


def _how(code: int) -> str:
    return f"left with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def _wait_for_others() -> None:
    """At exit: the others may be busy with what the script does after training, and they die with this process."""
    deadline = time.monotonic() + _FAREWELL_SECONDS
    for rank, process in enumerate(_others, 1):
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            print(f"shoal: worker {rank} goes on {_FAREWELL_SECONDS:g} s after worker 0; ending it", file=sys.stderr)
            process.kill()
            process.wait()
    for rank, process in enumerate(_others, 1):
        if process.returncode not in (0, EXIT_PREEMPTED, EXIT_INTERRUPTED):
            print(f"shoal: worker {rank} {_how(process.returncode)}", file=sys.stderr)
