"""What holds for every test: its own home for runs, one thread per process, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shoal.testing.leaks import LeakCheck, mark_descendants


@pytest.fixture(scope="session", autouse=True)
def _session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep runs out of the user's home, and the cores for the workers."""
    mark_descendants()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_HOME", str(tmp_path_factory.mktemp("shoal-home")))
        yield


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(_session: None) -> Iterator[None]:
    """Fail a test that leaves a process, a thread or shared memory. First to be set up, so last to look."""
    with LeakCheck():
        yield
