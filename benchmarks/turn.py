"""A rank's side of taking turns: the loss of every arm calls `tick` first, and waits there until it is its arm's turn.

The harness (turns.py) names its socket in the environment of the processes it starts. Outside of it `tick` does
nothing, so every arm can also be run by itself.

A step begins with the first forward after an optimizer's step, so an arm that cuts its share of a batch into several
forwards is still counted in steps. A process that steps no optimizer is no rank: what is tried in a fork neither waits
nor counts. A rank therefore takes turns from its second step on.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from typing import Any

SOCKET, ARM = "BENCH_TURN_SOCKET", "BENCH_TURN_ARM"
GRANT = struct.Struct("<qq")  # to the rank: steps before the clock starts, steps on the clock
REPORT = struct.Struct("<dq")  # from the rank: seconds of the steps on the clock, samples of the whole turn
FOREVER = -1  # steps on the clock of the last grant: never wait again


def tick(samples: int) -> None:
    """Call at the start of each forward with the number of samples in it; returns when this rank may compute them."""
    global _rank
    address = os.environ.get(SOCKET)
    if address is None:
        return
    if _rank is None:
        _watch_optimizers()
    if _rank is None or _rank.pid != os.getpid():
        _rank = _Rank(address, os.environ[ARM])
    _rank.tick(samples)


def _watch_optimizers() -> None:
    """Once in a process: those forked from it later have it already."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(_stepped)


def _stepped(*_: Any) -> None:
    if _rank is not None:
        _rank.stepped = True


class _Rank:
    def __init__(self, address: str, arm: str) -> None:
        self.pid = os.getpid()
        self.address, self.arm = address, arm
        self.line: socket.socket | None = None
        self.stepped = False
        self.seen = self.seen_at_grant = 0
        self.left = self.on_clock = 0
        self.began = 0.0

    def tick(self, samples: int) -> None:
        if self.left != FOREVER and self.stepped:
            self._begin_step()
        self.stepped = False
        self.seen += samples

    def _begin_step(self) -> None:
        if self.line is None:
            self.line = _connect(self.address, self.arm)
        if self.left == 0:
            if self.on_clock:
                self.line.sendall(REPORT.pack(time.perf_counter() - self.began, self.seen - self.seen_at_grant))
            self._await_grant(self.line)
        if self.left == self.on_clock:
            self.began = time.perf_counter()
        if self.left != FOREVER:
            self.left -= 1

    def _await_grant(self, line: socket.socket) -> None:
        grant = line.recv(GRANT.size, socket.MSG_WAITALL)
        if len(grant) < GRANT.size:
            os._exit(1)  # the harness is gone: nobody will ever give this rank a turn
        lead, self.on_clock = GRANT.unpack(grant)
        self.left = FOREVER if self.on_clock == FOREVER else lead + self.on_clock
        self.seen_at_grant = self.seen


def _connect(address: str, arm: str) -> socket.socket:
    import torch

    line = socket.socket(socket.AF_UNIX)
    line.connect(address)
    about = {"arm": arm, "pid": os.getpid(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    about["shoal"] = getattr(sys.modules.get("shoal"), "__file__", None)
    line.sendall(json.dumps(about).encode() + b"\n")
    return line


_rank: _Rank | None = None
