"""The places that processes of a run have, and what people call them."""

from __future__ import annotations

FIRST_SERVER = 1 << 20
"""The seat of server n is this + n; workers have the seats below."""


def name_of(seat: int) -> str:
    """What people call the process in this seat: "worker 3", "server 0"."""
    return f"worker {seat}" if seat < FIRST_SERVER else f"server {seat - FIRST_SERVER}"
