"""Where output goes: standard output, which may have lost its reader, and files, which are whole or not there."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from shoal.core.errors import ConfigError, ShoalError


def write(text: str) -> None:
    """Put `text` on standard output now. Ends the command quietly if nobody reads it any more (`| head`).

    Raises ShoalError if it cannot be written.
    """
    with _reader_may_leave():
        try:
            sys.stdout.write(text)
        except UnicodeEncodeError:
            encoding = sys.stdout.encoding
            sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()


def write_bytes(data: bytes) -> None:
    """As `write`, byte for byte."""
    with _reader_may_leave():
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


@contextmanager
def _reader_may_leave() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        _let_go_of_stdout()
        raise typer.Exit(0) from None
    except OSError as error:
        _let_go_of_stdout()
        raise _unwritable(error) from None


def stdout_fault() -> ShoalError | None:
    """What is wrong with standard output, if something is still waiting there that cannot be written."""
    try:
        sys.stdout.flush()
    except OSError as error:
        _let_go_of_stdout()
        return _unwritable(error)
    return None


def _unwritable(error: OSError) -> ShoalError:
    return ShoalError(f"cannot write to standard output: {error.strerror or error}")


def _let_go_of_stdout() -> None:
    # What is still buffered has to go somewhere when the process flushes at its end.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def write_json(value: Any) -> None:
    """One line. What is not a number becomes null."""
    import msgspec

    write(msgspec.json.encode(value).decode() + "\n")


def write_file(target: Path, fill: Callable[[Path], object], *, force: bool) -> None:
    """Have `fill` write a file beside `target` and give it its name when it is complete.

    A file that is there is kept unless `force`. Raises ConfigError if the file cannot be written.
    """
    refuse_to_overwrite(target, force)
    try:
        if target.exists() and not target.is_file():
            fill(target)  # a device or a pipe: there is nothing to put in its place
            return
        # The ending stays: it tells matplotlib the format.
        beside = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
        try:
            fill(beside)
            _rename(beside, target, force)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written ({error.strerror or error}); give a file in a folder that you may write to"
        ) from None


def _rename(beside: Path, target: Path, force: bool) -> None:
    if force:
        beside.replace(target)
        return
    try:
        os.link(beside, target)  # unlike a rename it never replaces what came there meanwhile
    except FileExistsError:
        refuse_to_overwrite(target, force)
    except OSError:  # a file system without links
        beside.replace(target)


def refuse_to_overwrite(target: Path, force: bool) -> None:
    if target.is_dir():
        raise ConfigError(f"{target} is a folder; give the name of a file")
    if target.is_file() and not force:
        raise ConfigError(f"{target} is there already; give another name, or --force to write over it")
