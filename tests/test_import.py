"""What `import shoal` gives, and what it costs."""

from __future__ import annotations

import inspect
import os
import statistics
import subprocess
import sys

import pytest

import shoal
from shoal.core import errors

ROUNDS = 3

# CPU time: imports compute, and on a busy machine the clock on the wall measures the neighbours.
MEASURE = """
import sys, time
{before}
start = time.process_time()
{statement}
print(time.process_time() - start)
"""


def run(program: str) -> str:
    # With compiled files kept, as an installation has them: compiling the package anew is not what is measured.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def median_seconds(statement: str, before: str = "") -> float:
    program = MEASURE.format(before=before, statement=statement)
    run(program)
    return statistics.median(float(run(program)) for _ in range(ROUNDS))


def test_import_does_not_import_torch() -> None:
    assert run("import shoal, sys; print('torch' in sys.modules, 'numpy' in sys.modules)") == "False False\n"


def test_errors_can_be_imported_without_torch() -> None:
    assert run("import sys; from shoal import ConfigError; print('torch' in sys.modules)") == "False\n"


def test_import_costs_little() -> None:
    assert median_seconds("import shoal") < 0.03


def test_trainer_costs_little_beyond_torch() -> None:
    assert median_seconds("from shoal import Trainer", before="import torch") < 0.1


@pytest.mark.parametrize("name", shoal.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(shoal, name) is not None
    assert name in dir(shoal)


def test_every_error_is_public() -> None:
    roots = (errors.ShoalError, errors.Stopped)
    defined = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, roots)}
    assert len(defined) > 10
    assert defined <= set(shoal.__all__)
    assert all(getattr(shoal, name) is getattr(errors, name) for name in defined)


def test_all_is_sorted_and_without_doubles() -> None:
    assert sorted(set(shoal.__all__)) == list(shoal.__all__)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"'Trainr'; it has .*Trainer"):
        _ = shoal.Trainr


def test_star_import_brings_exactly_all() -> None:
    space: dict[str, object] = {}
    exec("from shoal import *", space)
    assert set(space) - {"__builtins__"} == set(shoal.__all__)
