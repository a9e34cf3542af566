"""What a machine must have to hold a lab."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache

from shoal.core.errors import LabUnavailable

_TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "iptables-restore": "iptables",
    "nsenter": "util-linux",
    "unshare": "util-linux",
}
_SECONDS = 10


def why_no_lab() -> str | None:
    """Why this process cannot have a lab, as one sentence with what to do about it; None if it can."""
    if sys.platform != "linux":
        return f"a lab needs the namespaces of Linux, and this is {sys.platform}; use a Linux machine"
    if os.geteuid() != 0:
        return f"a lab needs root, and this process runs as user {os.geteuid()}; run it with sudo"
    missing = [tool for tool in _TOOLS if find(tool) is None]
    if missing:
        packages = " ".join(dict.fromkeys(_TOOLS[tool] for tool in missing))
        return f"a lab needs {', '.join(missing)}; on Debian and Ubuntu: apt-get install {packages}"
    return _why_no_namespaces()


def require_lab() -> None:
    """Raise LabUnavailable if this process cannot have a lab."""
    if (why := why_no_lab()) is not None:
        raise LabUnavailable(why)


def find(tool: str) -> str | None:
    """The path of a tool; root's tools are often not on the path of others."""
    return shutil.which(tool) or shutil.which(tool, path="/usr/sbin:/sbin:/usr/bin:/bin")


@cache
def _why_no_namespaces() -> str | None:
    command = ["unshare", "--net", "--uts", "--mount", "ip", "link", "add", "probe", "type", "bridge"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode == 0:
        return None
    said = " ".join(done.stderr.split())
    return (
        f"a lab needs network, host name and mount namespaces with a bridge, and this machine refuses ({said}); "
        "in a container, start that with --privileged or the capabilities SYS_ADMIN and NET_ADMIN"
    )
