"""Each measures in a process of its own, as what is set cannot be taken back."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from shoal.engines import heap

STEPS = """
import ctypes, resource, sys
from shoal.engines.heap import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def step():
    blocks = [libc.malloc(12 << 20) for _ in range(8)]
    for block in blocks:
        ctypes.memset(block, 1, 12 << 20)
    for block in blocks:
        libc.free(block)
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

pytestmark = pytest.mark.skipif(heap._MALLOPT is None, reason="not glibc")


def page_faults(*arguments: str, **environment: str) -> int:
    kept = {"PATH": "/usr/bin:/bin", **environment}
    done = subprocess.run(
        [sys.executable, "-c", STEPS, *arguments], capture_output=True, text=True, timeout=60, env=kept, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_memory_that_was_freed_is_there_for_the_next_step() -> None:
    pages = 3 * 8 * (12 << 20) // 4096
    assert page_faults("leave") > pages / 4
    assert page_faults("keep") < pages / 100


@pytest.mark.parametrize(
    "environment",
    [{"MALLOC_TRIM_THRESHOLD_": "100000"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=100000"}],
)
def test_settings_of_the_user_stay(environment: dict[str, str], monkeypatch: Any) -> None:
    called: list[Any] = []
    monkeypatch.setattr(heap, "_MALLOPT", lambda *given: called.append(given))
    heap.keep_freed_memory(environment)
    assert not called
    heap.keep_freed_memory({"MALLOC_ARENA_MAX": "2"})
    assert called
