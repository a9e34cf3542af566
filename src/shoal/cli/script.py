"""Running a user's script inside this process, with settings in force, and ending as it ends."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

from shoal.core.errors import EXIT_INTERRUPTED, EXIT_USAGE, ConfigError, ShoalError
from shoal.core.settings import Settings, using
from shoal.core.traces import drop_own_frames


def run_script(script: Path, args: Sequence[str], settings: Settings) -> int:
    """Run `script` as `python script args...` would. Returns the exit code; an error of the script is printed.

    Raises ConfigError if there is no such script.
    """
    _check(script)
    argv, path = sys.argv, sys.path
    sys.argv, sys.path = [str(script), *args], [str(script.resolve().parent), *sys.path[1:]]
    code = 0
    try:
        # what the script prints must not stand between lines that a program reads
        with using(settings), redirect_stdout(sys.stderr) if settings.stream is not None else nullcontext():
            code = _run(script)
    finally:
        sys.argv, sys.path = argv, path
    if code == 0 and not settings.entered:
        made = (
            "made a Trainer and never called fit()" if settings.made else "made no Trainer and called no shoal.launch"
        )
        print(
            f"shoal: {script} ended without training: it {made}. `shoal run` is for scripts that train with Shoal, "
            "as in\n\n    from shoal import Trainer\n    Trainer(model, loss, optimizer, data, workers=2).fit()\n",
            file=sys.stderr,
        )
        return EXIT_USAGE
    return code


def _check(script: Path) -> None:
    if script.is_dir():
        inside = sorted(path.name for path in script.glob("*.py"))
        named = f", such as {script / inside[0]}" if inside else ""
        raise ConfigError(f"{script} is a folder; name a Python file{named}")
    if not script.is_file():
        near = _nearest(script)
        raise ConfigError(f"there is no file {script}{near}")


def _nearest(script: Path) -> str:
    from difflib import get_close_matches

    folder = script.parent
    names = [path.name for path in folder.glob("*.py")] if folder.is_dir() else []
    close = get_close_matches(script.name, names, n=1)
    return f"; did you mean {folder / close[0]}?" if close else f" (looked in {folder.resolve()})"


def _run(script: Path) -> int:
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("shoal: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BaseException as error:
        _print(error, script)
        return error.exit_code if isinstance(error, ShoalError) else 1
    return 0


def _print(error: BaseException, script: Path) -> None:
    """The traceback as `python script` would show it: without what is above the script."""
    told = traceback.TracebackException.from_exception(error)
    names = {str(script), str(script.absolute()), str(script.resolve())}
    above = len(told.stack) if isinstance(error, SyntaxError) and error.filename in names else 0
    first = next((at for at, frame in enumerate(told.stack) if frame.filename in names), above)
    told.stack = traceback.StackSummary.from_list(told.stack[first:])
    if isinstance(error, ShoalError):
        drop_own_frames(told)
    sys.stdout.flush()
    print("".join(told.format()), end="", file=sys.stderr, flush=True)
