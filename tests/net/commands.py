"""Runs `shoal` commands, each in a fork of this process, so that what they import is imported once. See `test_public`.

On stdin a JSON object of lists of arguments: those in `light` may not import torch, those in `training` find it
imported. On stdout what came of them, and the help of every command that there is.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import runpy
import sys
import tempfile
import traceback
from contextlib import redirect_stdout
from typing import IO, Any, NoReturn

_COMMAND = re.compile(r"^│ ([a-z]+) ", re.MULTILINE)


def main() -> None:
    wanted = json.load(sys.stdin)
    gc.disable()  # what is imported here stays
    import_for_commands()
    answer: dict[str, Any] = {"help": help_texts([]), "light": [outcome(args) for args in wanted["light"]]}
    assert "torch" not in sys.modules
    import_for_training()
    answer["training"] = [outcome(args, torch=True) for args in wanted["training"]]
    print(json.dumps(answer))


def import_for_commands() -> None:
    """What most of their time would go into."""
    for name in ("typer.rich_utils", "rich.markdown", "rich.progress", "sqlalchemy.orm", "shoal.cli.main"):
        importlib.import_module(name)


def import_for_training() -> None:
    from shoal import Trainer, launch

    with redirect_stdout(sys.stderr):
        assert Trainer and launch(lambda session: session.rank, workers=1) == [0]


def help_texts(path: list[str]) -> dict[str, str]:
    """Of this command, and of those below it."""
    code, said, complained = outcome([*path, "--help"])
    assert code == 0, complained
    texts = {" ".join(["shoal", *path]): said}
    for name in _COMMAND.findall(said.partition("─ Commands ─")[2]):
        texts |= help_texts([*path, name])
    return texts


def outcome(args: list[str], *, torch: bool = False) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `shoal ARGS`."""
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as complained:
        child = os.fork()
        if child == 0:
            os.dup2(said.fileno(), 1)
            os.dup2(complained.fileno(), 2)
            if not torch:
                sys.modules["torch"] = None  # type: ignore[assignment] - importing it is an error from here on
            be_shoal(args)
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status), text_of(said), text_of(complained)


def be_shoal(args: list[str]) -> NoReturn:
    """Without taking the interpreter down in the end: that takes longer than all the rest."""
    sys.argv = ["shoal", *args]
    try:
        runpy.run_module("shoal.cli", run_name="__main__")
    except SystemExit as leaving:
        assert isinstance(leaving.code, int)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(leaving.code)
    except BaseException:
        traceback.print_exc()
    os._exit(99)


def text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


if __name__ == "__main__":
    main()
