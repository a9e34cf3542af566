"""A rank's side of taking turns: the loss of every arm calls `tick` first, and waits there until it is its arm's turn.

The harness (turns.py) names its socket in the environment of the processes it starts. Outside of it `tick` does
nothing, so every arm can also be run by itself.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time

SOCKET, ARM, SHARE = "BENCH_TURN_SOCKET", "BENCH_TURN_ARM", "BENCH_TURN_SHARE"
GRANT = struct.Struct("<qq")  # to the rank: steps before the clock starts, steps on the clock
REPORT = struct.Struct("<dq")  # from the rank: seconds of the steps on the clock, samples of the whole turn
FOREVER = -1  # steps on the clock of the last grant: never wait again


def tick(samples: int) -> None:
    """Call at the start of each forward with the number of samples in it; returns when this rank may compute them.

    Connects on the first call in each process, so a process forked after the import gets a connection of its own.
    A step begins when the samples seen so far are a whole number of the rank's shares of a batch, so an arm that cuts a
    share into several forwards is still counted in steps.
    """
    global _rank
    if _rank is None or _rank.pid != os.getpid():
        _rank = _Rank(os.environ.get(SOCKET), os.environ.get(ARM, ""), int(os.environ.get(SHARE, "1")))
    _rank.tick(samples)


class _Rank:
    def __init__(self, address: str | None, arm: str, share: int) -> None:
        self.pid = os.getpid()
        self.share = share
        self.seen = self.seen_at_grant = 0
        self.left = self.on_clock = FOREVER if address is None else 0
        self.began = 0.0
        if address is not None:
            self.line = _connect(address, arm)

    def tick(self, samples: int) -> None:
        if self.left != FOREVER and self.seen % self.share == 0:
            self._begin_step()
        self.seen += samples

    def _begin_step(self) -> None:
        if self.left == 0:
            if self.on_clock:
                self.line.sendall(REPORT.pack(time.perf_counter() - self.began, self.seen - self.seen_at_grant))
            self._await_grant()
        if self.left == self.on_clock:
            self.began = time.perf_counter()
        if self.left != FOREVER:
            self.left -= 1

    def _await_grant(self) -> None:
        grant = self.line.recv(GRANT.size, socket.MSG_WAITALL)
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
    line.sendall(json.dumps(about).encode() + b"\n")
    return line


_rank: _Rank | None = None
