"""Runs `shoal` commands, each in a fork of this process, so that what they import is imported once. See `test_public`.

On stdin a JSON object with a list of lists of arguments: those of `training` find torch imported; those of `light` may
not import it, and are answered with the help of every command that there is, too.
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
    print(json.dumps(of_training(wanted["training"]) if "training" in wanted else of_light(wanted["light"])))


def of_light(wanted: list[list[str]]) -> dict[str, Any]:
    answer = {"help": help_texts([]), "light": [outcome(args) for args in wanted]}
    assert "torch" not in sys.modules
    return answer


def of_training(wanted: list[list[str]]) -> dict[str, Any]:
    import_for_training()
    return {"training": [outcome(args, torch=True) for args in wanted]}


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
