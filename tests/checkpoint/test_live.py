"""Tensors that are read by one thread while another waits to change them."""

from __future__ import annotations

import math
import threading
import time

import pytest
import torch

from shoal.checkpoint.live import LiveTensors
from shoal.checkpoint.tensorfile import CHUNK_BYTES

CHUNK_FLOATS = CHUNK_BYTES // 4


def three_tensors() -> list[torch.Tensor]:
    return [torch.full((3 * CHUNK_FLOATS,), 1.0), torch.full((4, CHUNK_FLOATS), 2.0).t(), torch.tensor(3.0)]


def expected_bytes() -> bytes:
    return b"".join(tensor.contiguous().numpy().tobytes() for tensor in three_tensors())


class Owner:
    """A thread that wants the tensors back and then overwrites them."""

    def __init__(self, live: LiveTensors, tensors: list[torch.Tensor]) -> None:
        self.waited = math.nan
        self.thread = threading.Thread(target=self._run, args=(live, tensors), daemon=True)
        self.thread.start()
        assert live._wanted.wait(10)

    def _run(self, live: LiveTensors, tensors: list[torch.Tensor]) -> None:
        self.waited = live.reclaim()
        for tensor in tensors:
            tensor.fill_(-1.0)


@pytest.mark.parametrize("chunks_before", [1, 2, 3, 4, 7])
def test_with_a_slow_file_the_rest_is_copied_for_a_waiting_owner(chunks_before: int) -> None:
    tensors = three_tensors()
    live = LiveTensors(tensors, patience=0.0, fast_enough=math.inf)
    chunks = live.chunks(len(tensors))
    data = b"".join(bytes(next(chunks)) for _ in range(chunks_before))
    owner = Owner(live, tensors)
    data += next(chunks)  # this copies what is left, itself included
    owner.thread.join(10)
    assert not owner.thread.is_alive()
    assert all((tensor == -1.0).all() for tensor in tensors)
    assert owner.waited > 0.0
    data += b"".join(map(bytes, chunks))
    assert data == expected_bytes()


def test_with_a_fast_file_the_owner_waits_for_the_end() -> None:
    tensors = three_tensors()
    live = LiveTensors(tensors, patience=0.0, fast_enough=0.0)
    chunks = live.chunks(len(tensors))
    data = bytes(next(chunks))
    owner = Owner(live, tensors)
    data += b"".join(map(bytes, chunks))
    assert owner.thread.is_alive()
    live.release()
    owner.thread.join(10)
    assert not owner.thread.is_alive()
    assert data == expected_bytes()


def test_an_owner_is_patient_first() -> None:
    tensors = three_tensors()
    live = LiveTensors(tensors, patience=60.0, fast_enough=math.inf)
    chunks = live.chunks(len(tensors))
    data = bytes(next(chunks))
    owner = Owner(live, tensors)
    data += b"".join(map(bytes, chunks))
    assert owner.thread.is_alive()
    live.release()
    owner.thread.join(10)
    assert data == expected_bytes()


def test_without_memory_for_copies_the_owner_waits_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = three_tensors()
    live = LiveTensors(tensors, patience=0.0, fast_enough=math.inf)
    chunks = live.chunks(len(tensors))
    data = bytes(next(chunks))
    owner = Owner(live, tensors)

    def no_memory(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", no_memory)
        data += next(chunks)
    data += b"".join(map(bytes, chunks))
    assert owner.thread.is_alive()
    live.release()
    owner.thread.join(10)
    assert data == expected_bytes()


def test_nobody_waits_after_the_release_and_no_tensor_is_kept() -> None:
    live = LiveTensors(three_tensors())
    for _ in live.chunks(3):
        pass
    live.release()
    begun = time.perf_counter()
    assert live.reclaim() == 0.0
    assert time.perf_counter() - begun < 1.0
    assert live._tensors == []
