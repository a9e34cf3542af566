from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest

import shoal
from shoal.core import errors


def drawn_tree() -> dict[str, str]:
    """Class to parent, as the drawing at the top of the module has it."""
    parents, line_of = {}, {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ([ │├└─]*)([A-Z]\w+)", line)
        if match is None:
            continue
        depth = len(match[1]) // 4
        line_of[depth] = match[2]
        parents[match[2]] = line_of.get(depth - 1, "")
    return parents


def defined() -> dict[str, type[BaseException]]:
    members = inspect.getmembers(errors, inspect.isclass)
    return {name: kind for name, kind in members if kind.__module__ == errors.__name__}


def test_the_drawing_is_the_tree() -> None:
    drawn = drawn_tree()
    kinds = defined()
    # the text of another process's traceback is a cause, never an error of its own
    assert set(drawn) == set(kinds)
    roots = {"ShoalError": Exception, "Stopped": SystemExit}
    for name, parent in drawn.items():
        expected = kinds[parent] if parent else roots[name]
        assert kinds[name].__bases__[0] is expected, name


def test_an_argument_error_is_a_value_error() -> None:
    assert issubclass(errors.ConfigError, ValueError)


@pytest.mark.parametrize("name", list(drawn_tree()))
def test_every_error_is_public(name: str) -> None:
    assert getattr(shoal, name) is getattr(errors, name)
    assert name in shoal.__all__


def test_stopping_is_not_an_error_and_carries_its_message() -> None:
    stopped = errors.Preempted("at step 3")
    assert not isinstance(stopped, Exception)
    assert (str(stopped), stopped.code) == ("at step 3", errors.EXIT_PREEMPTED)
    assert errors.Interrupted("").code == errors.EXIT_INTERRUPTED


@pytest.mark.parametrize("name, code", [("Preempted", 75), ("Interrupted", 130)])
def test_exit_codes_of_a_script_that_was_stopped(name: str, code: int) -> None:
    script = f"from shoal.core.errors import {name}; raise {name}('stopped')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (code, "")


def test_a_worker_error_says_where() -> None:
    error = errors.NotFiniteError("nan", worker=2, step=7, positions=(3, 9))
    assert (error.worker, error.step, error.positions) == (2, 7, (3, 9))
    bare = errors.WorkerError("gone")
    assert (bare.worker, bare.step, bare.positions) == (None, None, None)
