"""What is told of how a run was made: its command as one would type it, its user, its optimizer."""

from __future__ import annotations

import os
import pwd

import pytest

from shoal.cli.circumstances import Trained, script_arguments, trained, typed, user_name
from shoal.store.values import EventRow, StepRow


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["/v/bin/python", "/v/bin/shoal", "run", "train.py", "--", "--lr", "1"], "shoal run train.py -- --lr 1"),
        (["/usr/bin/python3.11", "train.py", "two words"], "python3.11 train.py 'two words'"),
        (["python", "/home/ada/train.py"], "python /home/ada/train.py"),
        (["/v/bin/python", "-m", "digits.train"], "python -m digits.train"),
        (["/opt/launcher", "train.py"], "/opt/launcher train.py"),
        ([], ""),
    ],
)
def test_a_command_is_told_as_one_would_type_it(command: list[str], told: str) -> None:
    assert typed(command) == told


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (["/v/bin/python", "/v/bin/shoal", "run", "train.py", "-w", "4", "--", "--lr", "1"], ["--lr", "1"]),
        (["/v/bin/python", "/v/bin/shoal", "run", "train.py", "-w", "4"], []),
        (["python", "-m", "shoal.cli", "run", "train.py", "--", "x"], ["x"]),
        (["python", "-u", "some/train.py", "--lr", "1"], ["--lr", "1"]),
        (["python", "-m", "digits.train", "--lr", "1"], ["--lr", "1"]),
        (["python", "-c", "import train"], []),
        ([], []),
    ],
)
def test_the_arguments_of_a_script(command: list[str], arguments: list[str]) -> None:
    assert script_arguments(command, "/home/ada/some/train.py") == arguments


def test_a_user_known_by_number_gets_a_name() -> None:
    assert user_name(str(os.getuid())) == pwd.getpwuid(os.getuid()).pw_name
    assert [user_name(user) for user in ("ada", "", "4294967290", "9" * 40)] == ["ada", "", "4294967290", "9" * 40]


def test_what_is_trained_is_what_the_newest_start_told() -> None:
    starts = [
        EventRow(1.0, 0, "RunStarted", {"parameters": 10, "optimizers": ["SGD"]}),
        EventRow(2.0, 0, "Notice", {"text": "x"}),
        EventRow(3.0, 4, "RunStarted", {"parameters": 12_345, "optimizers": ["AdamW", "SGD"]}),
    ]
    steps = [StepRow(number, 1.0, 0, 1.0, 8, rate, None, {}) for number, rate in ((1, 0.003), (2, 0.1))]
    assert trained(starts, steps) == Trained("AdamW, SGD", "12,345", "0.003")
    assert trained([EventRow(1.0, 0, "RunStarted", {})], []) == Trained()
