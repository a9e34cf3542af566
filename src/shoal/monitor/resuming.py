"""How to go on with a run that the store has, as one would type it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.core.errors import ConfigError
from shoal.store.home import shoal_home

if TYPE_CHECKING:
    from shoal.store.values import RunInfo

_PYTHON = re.compile(r"python[\d.]*$")
_WITH_A_VALUE = ("-X", "-W", "--check-hash-based-pycs")
_UNKNOWN = "  # with the same arguments"
_KERNELS = ("ipykernel_launcher.py", "colab_kernel_launcher.py")
"""What older versions took for the script of a notebook."""


def stored_resume_command(run: RunInfo) -> str:
    """What was typed, with `--resume`. Scripts and folders are named so that it holds in any folder.

    Where the store does not know what was typed, the end says so; a run that no script made, or a module of a package,
    is resumed in Python.
    """
    resume = _where(run)
    program, arguments = _program(run.command)
    if Path(program).name in ("shoal", "shoal.cli"):
        if arguments[:1] in (["run"], ["demo"]):
            return shlex.join(["shoal", *resuming(_with_path_of(run.script, arguments), resume)])
    elif _can_be_run(run.script, program):
        known = program and (Path(program).name == Path(run.script).name or not program.endswith(".py"))
        rest = ["--", *arguments] if known and arguments else []
        return shlex.join(["shoal", "run", run.script, "--resume", resume, *rest]) + ("" if known else _UNKNOWN)
    return in_python(run.config, resume)


def _can_be_run(script: str, program: str) -> bool:
    """Whether it is a script, and not a notebook's kernel or a module of a package."""
    in_package = Path(script).name == "__main__.py" or ("." in program and not program.endswith(".py"))
    return Path(script).suffix == ".py" and Path(script).name not in _KERNELS and not in_package


def in_python(config: Mapping[str, Any], resume: str) -> str:
    """The same for code that no command runs. `config` is that of the run: `launch` and the Trainer have their own."""
    return f"{'shoal.launch' if 'fn' in config else 'Trainer'}(..., resume={resume!r})"


def resuming(typed: Sequence[str], resume: str) -> list[str]:
    """The words behind `shoal` as they were typed, but with another --resume."""
    at = typed.index("--") if "--" in typed else len(typed)
    words, kept = list(typed[:at]), []
    while words:
        word = words.pop(0)
        if word == "--resume":
            del words[:1]
        elif not word.startswith("--resume="):
            kept.append(word)
    return [*kept, "--resume", resume, *typed[at:]]


def _where(run: RunInfo) -> str:
    """Its id if it lies where runs lie that were given no folder, else its folder."""
    if run.run_dir is None:
        return run.id
    try:
        return run.id if Path(run.run_dir) == shoal_home() / "runs" / run.id else run.run_dir
    except ConfigError:  # there is no home
        return run.run_dir


def _program(command: Sequence[str]) -> tuple[str, list[str]]:
    """What Python was started with: the path of a script, or the name of a module; and all that follows it."""
    words = list(command)
    if words and _PYTHON.match(Path(words[0]).name):
        del words[0]
        while words and words[0].startswith("-") and words[0] != "-m":
            del words[: 2 if words[0] in _WITH_A_VALUE else 1]
        if words[:1] == ["-m"]:
            del words[0]
    return (words[0], words[1:]) if words else ("", [])


def _with_path_of(script: str, typed: Sequence[str]) -> list[str]:
    """The script by its whole path, however it was typed."""
    words = list(typed)
    at = words.index("--") if "--" in words else len(words)
    named = [place for place in range(1, at) if Path(words[place]).name == Path(script).name]
    if script and named:
        words[named[0]] = script
    return words
