"""Running the kernel's tools (ip, tc, iptables), here or in the network of a lab host."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable

from shoal.core.errors import LabUnavailable
from shoal.testing.lab.needs import find

_SECONDS = 20
_BATCH = {"ip": ["-batch", "-"], "tc": ["-batch", "-"]}


def run_tool(tool: str, lines: Iterable[str], *, inside: int | None = None) -> None:
    """Hand `lines` to a tool that reads commands from its input, in the network namespace of process `inside`.

    Raises LabUnavailable with what the tool said.
    """
    text = "\n".join([*lines, ""])
    command = [find(tool) or tool, *_BATCH.get(tool, [])]
    if inside is not None:
        command = [find("nsenter") or "nsenter", f"--net=/proc/{inside}/ns/net", "--", *command]
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabUnavailable(f"{tool} could not be run ({error}); is its package installed?") from error
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())
        raise LabUnavailable(f"{tool} refused {text.strip()!r}: {said}")
