"""The stack of another process is had whatever that is in, and asking does no harm."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from shoal.core.traces import dumped_stack
from shoal.engines.lifeline import die_with_parent
from shoal.engines.stacks import Stacks
from shoal.engines.zygote import fork


@contextmanager
def child(run: Callable[[], object]) -> Iterator[int]:
    born: list[int] = []
    fork(run, born)
    try:
        yield born[0]
    finally:
        os.kill(born[0], signal.SIGKILL)
        os.waitpid(born[0], 0)


def asked(stacks: Stacks, pid: int, word: str) -> str:
    """The stack, once the process has come to this word."""
    deadline = time.monotonic() + 10
    while word not in (stack := stacks.ask(pid)):
        assert time.monotonic() < deadline, stack
    return stack


c_sleep = ctypes.PyDLL(None).sleep  # keeps the interpreter's lock


def sleep() -> None:
    time.sleep(60)


def hold_the_lock() -> None:
    c_sleep(60)


@pytest.mark.parametrize("stuck", [sleep, hold_the_lock])
def test_the_stack_of_a_process_that_sleeps(stuck: Callable[[], None]) -> None:
    with closing(Stacks()) as stacks:

        def live() -> None:
            stacks.answer()
            stuck()

        with child(live) as pid:
            lines = asked(stacks, pid, "60").splitlines()
    assert f"in {stuck.__name__}" in lines[-2] and "test_stacks.py" in lines[-2]
    assert lines[-1].endswith("sleep(60)")
    assert "in live" in lines[0], "how the process was started is left out"


def test_children_answer_too() -> None:
    with closing(Stacks()) as stacks:
        heard, says = os.pipe()

        def live() -> None:
            stacks.answer()
            parent = os.getpid()
            with child(lambda: (die_with_parent(parent), sleep())) as pid:
                os.write(says, pid.to_bytes(4, "little"))
                sleep()

        with child(live):
            assert "in sleep" in asked(stacks, int.from_bytes(os.read(heard, 4), "little"), "in sleep")
        os.close(heard)
        os.close(says)


def test_a_process_that_does_not_know_the_signal_is_left_in_peace() -> None:
    with closing(Stacks()) as stacks, child(sleep) as pid:
        assert stacks.ask(pid) == ""
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        assert stacks.ask(2**22 + 1) == "", "there is no such process"


def test_a_dump_is_shown_as_people_know_it() -> None:
    frames = '  File "/no/sch\\xf6n.py", line 7 in inner\n  File "/no/b.py", line 2 in outer\n'
    text = f"Stack (most recent call first):\n{frames}"
    lines = dumped_stack(text).splitlines()
    assert lines == ['  File "/no/b.py", line 2, in outer', '  File "/no/schön.py", line 7, in inner']
    assert dumped_stack("nothing") == ""
