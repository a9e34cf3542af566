"""What the user has started: a script, or something that is in no file."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def script() -> Path | None:
    """The file whose code runs; None for a notebook, `python -c`, standard input, or a prompt.

    A notebook has a program in `sys.argv` too, its kernel's; but what it runs is not in a file.
    """
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None or not sys.argv or sys.argv[0] in ("", "-", "-c", "-m"):
        return None
    # the same file, whatever folder the script has gone to since; a profiler is another one, and argv has the script
    return Path(file if Path(file).name == Path(sys.argv[0]).name else sys.argv[0]).absolute()


def origin() -> Path:
    """What tells this program from others: its script, its notebook where that is known, or the folder it runs in."""
    known = getattr(sys.modules.get("__main__"), "__vsc_ipynb_file__", None) or os.environ.get("JPY_SESSION_NAME")
    return script() or Path(known or os.curdir).absolute()


def in_package() -> bool:
    """Whether it was started as a module of a package: as a script its file may not find what it imports."""
    return bool(getattr(sys.modules.get("__main__"), "__package__", None))
