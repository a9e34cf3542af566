from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from shoal.core.errors import DataError
from shoal.data.fetch import Fetcher
from shoal.data.loader import Loader, Positions, Request, Stream, _Probe, choose


class Noisy(Dataset):
    """Every kind of value, with randomness of every kind."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, object]:
        return {
            "index": index,
            "torch": torch.randn(3),
            "numpy": np.random.randn(2).astype(np.float32),
            "random": random.random(),
            "text": f"sample {index}",
            "pair": (torch.tensor(index % 2 == 0), np.int16(index)),
            "bf16": torch.randn(2, 2).bfloat16().t(),
            "complex": torch.randn(2, dtype=torch.complex64),
            "empty": torch.empty(0, 3),
        }


class Steps:
    """Requests of two batches each, for a number of steps, that remembers what it was asked for."""

    def __init__(self, steps: int, samples: int = 3) -> None:
        self.steps, self.samples = steps, samples
        self.asked: list[int] = []

    def __call__(self, step: int) -> Request | None:
        self.asked.append(step)
        if step >= self.steps:
            return None
        start, twice = 10 * step, 2 * self.samples
        first = Positions(range(start, start + twice), step, 0)
        return first, Positions(range(start + 2, start + 2 + self.samples), step, twice)


@pytest.fixture
def open_stream() -> Iterator[Callable[..., Stream]]:
    loaders: list[Loader] = []

    def opened(
        data: object,
        make: Callable[[int], Request | None],
        processes: int | None,
        start: int = 0,
        collate: object = None,
    ) -> Stream:
        loaders.append(Loader({"train": Fetcher(data, collate)}, processes=processes, spare_cores=0.0))
        return loaders[-1].open("train", make, start)

    yield opened
    for loader in loaders:
        loader.close()


def taken(stream: Stream) -> list[list[object]]:
    return list(iter(stream.take, None))


def same(left: object, right: object) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def children() -> list[psutil.Process]:
    return psutil.Process().children()


# ---- what is loaded


@pytest.mark.parametrize("processes", [1, 3])
def test_processes_load_what_is_loaded_inline(open_stream: Callable[..., Stream], processes: int) -> None:
    expected = taken(open_stream(Noisy(), Steps(8), 0))
    stream = open_stream(Noisy(), Steps(8), processes)
    found = taken(stream)
    assert len(expected) == 8 and same(found, expected)
    assert [batches[1]["index"][0].item() for batches in found] == [10 * step + 2 for step in range(8)]
    assert stream.take() is None
    assert len(children()) == processes
    assert stream.choice.startswith("1 process: data_workers=1" if processes == 1 else "3 processes: data_workers=3")


def test_received_tensors_can_be_written(open_stream: Callable[..., Stream]) -> None:
    batches = open_stream(Noisy(), Steps(1), 1).take()
    assert batches is not None
    batches[0]["torch"].zero_()


def test_starts_anywhere_and_nothing_is_forked_before_the_first_take(open_stream: Callable[..., Stream]) -> None:
    make = Steps(6)
    stream = open_stream(Noisy(), make, 2, start=4)
    assert children() == [] and make.asked == []
    first = stream.take()
    assert first is not None and first[0]["index"][0].item() == 40
    assert len(taken(stream)) == 1 and make.asked == [4, 5, 6]


def test_two_requests_are_asked_ahead_for_each_process(open_stream: Callable[..., Stream]) -> None:
    make = Steps(100)
    stream = open_stream(Noisy(), make, 2)
    stream.take()
    assert make.asked == [0, 1, 2, 3]
    stream.take()
    assert make.asked == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("processes", [0, 1, 3])
def test_reset_forgets_what_was_asked_ahead(open_stream: Callable[..., Stream], processes: int) -> None:
    stream = open_stream(Noisy(), Steps(20), processes)
    for start in (0, 11, 3, 3, 17):
        stream.reset(start)
        for step in range(start, start + 2):
            batches = stream.take()
            assert batches is not None and batches[1]["index"][0].item() == 10 * step + 2
    assert len(taken(stream)) == 1
    stream.reset(19)
    assert len(taken(stream)) == 1
    stream.close()
    assert stream.take() is None


def test_many_resets_do_not_pile_up_answers(open_stream: Callable[..., Stream]) -> None:
    stream = open_stream(Noisy(), Steps(1000), 2)
    for start in range(50):
        stream.reset(start)
        stream.take()
    assert all(len(process._pending) <= 8 for process in stream._loader._pool)


def test_streams_share_the_processes() -> None:
    sources = {"train": Fetcher(Noisy(), None), "eval": Fetcher(TensorDataset(torch.arange(1000)), None)}
    loader = Loader(sources, processes=2, spare_cores=0.0)
    train, evaluation = loader.open("train", Steps(9)), loader.open("eval", Steps(4))
    firsts = []
    for step in range(9):
        batches = train.take()
        assert batches is not None and batches[1]["index"][0].item() == 10 * step + 2
        batches = evaluation.take()
        firsts.append(None if batches is None else batches[1][0][0].item())
    assert firsts == [2, 12, 22, 32, None, None, None, None, None] and len(children()) == 2
    loader.close()
    with pytest.raises(DataError, match="closed"):
        loader.open("train", Steps(9)).take()


def test_requests_and_answers_larger_than_a_socket(open_stream: Callable[..., Stream]) -> None:
    data = TensorDataset(torch.arange(200_000).reshape(-1, 1).expand(-1, 10))

    def make(step: int) -> Request | None:
        return None if step == 5 else (Positions(range(200_000), 0, 0),)

    # 1.6 MB to ask and 16 MB to answer: neither end may wait for the other to read
    found = taken(open_stream(data, make, 1))
    assert len(found) == 5 and all(torch.equal(batch[0], data.tensors[0]) for [batch] in found)


@pytest.mark.parametrize("processes", [0, 1])
def test_a_worker_without_work_in_a_step(open_stream: Callable[..., Stream], processes: int) -> None:
    stream = open_stream([1], lambda step: () if step < 3 else None, processes)
    assert taken(stream) == [[], [], []]


values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False),
        st.text(max_size=5),
        st.binary(max_size=5),
        st.sampled_from([torch.float64, torch.bool, torch.uint8, torch.bfloat16, torch.complex64]).flatmap(
            lambda dtype: st.lists(st.integers(0, 3), max_size=3).map(lambda shape: torch.ones(shape, dtype=dtype))
        ),
        st.lists(st.integers(0, 3), max_size=3).map(lambda shape: np.ones(shape, dtype=np.int16)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(0, 5)), inner, max_size=3),
    ),
    max_leaves=8,
)


@given(st.lists(values, min_size=1, max_size=20))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_nesting_of_plain_values_arrives(items: list[object]) -> None:
    loader = Loader({"data": Fetcher(items, list)}, processes=1, spare_cores=0.0)
    try:
        stream = loader.open("data", lambda step: (Positions(range(len(items)), 0, 0),) if step == 0 else None)
        assert same(taken(stream), [[items]])
    finally:
        loader.close()


# ---- what goes wrong


class Failing(Dataset):
    def __getitem__(self, index: int) -> int:
        if index == 30:
            raise ValueError("torn file")
        if index == 50:
            sys.exit(3)
        return index


@pytest.mark.parametrize("processes", [0, 1, 3])
def test_errors_come_at_their_place(open_stream: Callable[..., Stream], processes: int) -> None:
    stream = open_stream(Failing(), Steps(5), processes)
    for _ in range(3):
        assert stream.take() is not None
    with pytest.raises(DataError, match=r"data\[30\].*ValueError: torn file") as caught:
        stream.take()
    if processes:
        assert 'raise ValueError("torn file")' in str(caught.value.worker_traceback)
        assert caught.value.place.startswith("tests/data/test_loader.py:")
    batches = stream.take()
    assert batches is not None and batches[1].tolist() == [42, 43, 44]
    assert stream.take() is None


def test_sys_exit_in_a_loader_process_is_an_error(open_stream: Callable[..., Stream]) -> None:
    with pytest.raises(DataError, match="SystemExit: 3"):
        open_stream(Failing(), Steps(6), 1, start=5).take()


@pytest.mark.parametrize("when", ["idle", "loading"])
def test_a_killed_loader_process_is_an_error_and_not_a_hang(open_stream: Callable[..., Stream], when: str) -> None:
    class Deadly(Dataset):
        def __getitem__(self, index: int) -> int:
            if when == "loading" and index == 30:
                os.kill(os.getpid(), signal.SIGKILL)
            return index

    stream = open_stream(Deadly(), Steps(8), 1)
    assert stream.take() is not None
    if when == "idle":
        [process] = children()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(DataError, match=r"killed by SIGKILL \(often out of memory.*'train'") as caught:
        taken(stream)
    if when == "loading":
        assert "30 ... 34" in str(caught.value)
    assert children() == []
    stream.reset(4)
    assert stream.take() is not None  # a new process takes the place of the dead one


def test_death_is_noticed_when_a_grandchild_keeps_the_socket(
    open_stream: Callable[..., Stream], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shoal.data.background._LOOK_SECONDS", 0.05)
    note = tmp_path / "pid"

    class Forking(Dataset):
        def __getitem__(self, index: int) -> int:
            pid = os.fork()
            if pid == 0:
                time.sleep(60)
                os._exit(0)
            note.write_text(str(pid))
            os.kill(os.getpid(), signal.SIGKILL)
            return index

    try:
        with pytest.raises(DataError, match="SIGKILL"):
            open_stream(Forking(), Steps(1), 1).take()
    finally:
        os.kill(int(note.read_text()), signal.SIGKILL)


class Opaque:
    pass


def opaque_once(items: list[int]) -> object:
    return Opaque() if items[0] // 10 == 13 else torch.tensor(items)


def test_a_batch_that_cannot_leave_the_process_names_its_type(open_stream: Callable[..., Stream]) -> None:
    stream = open_stream(range(200), Steps(15), 2, start=12, collate=opaque_once)
    assert stream.take() is not None
    with pytest.raises(DataError, match=r"Opaque.*data_workers=0"):
        stream.take()


class Encoding(UserDict[str, Any]):
    """As `transformers.BatchEncoding` gives its items."""

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


@dataclass
class Pair:
    numbers: Tensor
    words: list[str]


def encoded(items: list[int]) -> list[Any]:
    numbers = torch.tensor(items)
    return [Encoding({"ids": numbers}), Pair(numbers, [str(item) for item in items])]


@pytest.mark.parametrize("processes", [0, 2])
def test_mappings_and_dataclasses_arrive_as_what_they_are(open_stream: Callable[..., Stream], processes: int) -> None:
    (encoding, pair), _ = open_stream(range(200), Steps(3), processes, collate=encoded).take() or []
    assert type(encoding) is Encoding and encoding.ids.tolist() == encoding["ids"].tolist() == [0, 1, 2, 3, 4, 5]
    assert type(pair) is Pair and pair.numbers.tolist() == [0, 1, 2, 3, 4, 5] and pair.words[-1] == "5"


def test_a_class_made_inside_a_function_is_refused_with_what_to_do(open_stream: Callable[..., Stream]) -> None:
    @dataclass
    class Local:
        items: list[int]

    with pytest.raises(DataError, match=r"<locals>\.Local, which is not found under this name; define the class at"):
        open_stream(range(200), Steps(3), 1, collate=Local).take()


def test_measured_processes_give_way_to_inline_for_such_a_batch(
    open_stream: Callable[..., Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = "shoal.data.loader.choose"
    monkeypatch.setattr(slow, lambda **_: choose(wait=1.0, ran=0.0, busy=1.0, spare_cores=0.0))
    make = Steps(16)
    stream = open_stream(range(200), make, None, collate=opaque_once)
    found = taken(stream)
    assert type(found.pop(13)[1]) is Opaque
    assert [batches[1][0].item() for batches in found] == [10 * step + 2 for step in range(16) if step != 13]
    assert make.asked == list(range(17))
    assert stream.choice.startswith("inline: ") and "Opaque" in stream.choice


# ---- nothing is left behind


def test_twenty_loaders_leave_nothing_behind() -> None:
    def once() -> None:
        loader = Loader({"train": Fetcher(Noisy(), None)}, processes=2, spare_cores=0.0)
        stream = loader.open("train", Steps(50))
        stream.take()
        stream.close()
        loader.close()
        loader.close()

    once()
    me = psutil.Process()
    before = me.num_fds(), threading.active_count(), me.num_threads()
    for _ in range(20):
        once()
    assert (me.num_fds(), threading.active_count(), me.num_threads()) == before
    assert children() == []


def test_a_loader_that_is_busy_is_killed_after_a_grace(
    open_stream: Callable[..., Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.data.background._GRACE_SECONDS", 0.05)

    class Stuck(Dataset):
        def __getitem__(self, index: int) -> int:
            if index >= 10:
                time.sleep(60)
            return index

    stream = open_stream(Stuck(), Steps(5), 1)
    assert stream.take() is not None
    begin = time.monotonic()
    stream._loader.close()
    assert time.monotonic() - begin < 5 and children() == []


def test_closing_does_not_wait_for_a_process_that_a_later_loader_forked(open_stream: Callable[..., Stream]) -> None:
    first = open_stream(Noisy(), Steps(9), 1)
    first.take()
    second = open_stream(Noisy(), Steps(9), 1)  # its process inherits the first one's socket
    second.take()
    begin = time.monotonic()
    first._loader.close()
    assert time.monotonic() - begin < 0.9
    assert second.take() is not None


def test_a_loader_process_sheds_what_is_the_workers(open_stream: Callable[..., Stream]) -> None:
    class Inside(Dataset):
        def __getitem__(self, index: int) -> tuple[bool, int, bool]:
            ignored = {signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} == {signal.SIG_IGN}
            return ignored, torch.get_num_threads(), os.path.exists(f"/proc/self/fd/{reader}")

    reader, writer = os.pipe()
    torch.set_num_threads(2)
    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    loader = Loader({"data": Fetcher(Inside(), list)}, processes=1, spare_cores=0.0, close_fds=lambda: [reader, writer])
    try:
        batches = loader.open("data", lambda _: (Positions([0], 0, 0),)).take()
        assert batches == [[(True, 1, False)]]
    finally:
        signal.signal(signal.SIGTERM, handler)
        torch.set_num_threads(1)
        loader.close()
        os.close(reader), os.close(writer)


WORKER = """
import time, psutil
from shoal.data.fetch import Fetcher
from shoal.data.loader import Loader, Positions

class Slow:
    def __getitem__(self, index):
        if index > 1:
            time.sleep(60)
        return index

loader = Loader({"data": Fetcher(Slow(), None)}, processes=2, spare_cores=0.0)
loader.open("data", lambda step: (Positions([step], 0, 0),)).take()
print(*(child.pid for child in psutil.Process().children()), flush=True)
time.sleep(60)
"""


def test_loader_processes_vanish_with_a_killed_worker() -> None:
    worker = subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True)
    with worker:
        assert worker.stdout is not None
        loaders = [psutil.Process(int(pid)) for pid in worker.stdout.readline().split()]
        assert len(loaders) == 2
        worker.kill()
    _, left = psutil.wait_procs(loaders, timeout=10)
    assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []


# ---- the choice


@pytest.mark.parametrize(
    ("wait", "ran", "busy", "spare", "processes", "words"),
    [
        (0.0004, 0.0004, 0.0996, 4, 0, "inline: loading takes 0.4% of the step"),
        (0.0, 0.0, 0.0, 4, 0, "inline: loading takes 0.0%"),
        (0.0002, 0.0001, 0.0001, 4, 0, "0.2 ms is no more than handing it over"),
        (0.010, 0.001, 0.010, 0, 2, "2 processes: loading takes 50.0% of the step and mostly waits"),
        (0.025, 0.001, 0.010, 0, 4, "4 processes"),
        (0.001, 0.0, 0.010, 0, 2, "2 processes: loading takes 9.1%"),
        (1.0, 0.0, 0.0, 0, 8, "8 processes"),
        (
            0.010,
            0.009,
            0.010,
            0.99,
            0,
            "inline: loading takes 50.0% of the step and computes, but no core is spare (0.99)",
        ),
        (0.010, 0.009, 0.010, 1, 1, "1 process: loading takes 50.0% of the step and computes; 1 cores"),
        (0.035, 0.035, 0.010, 2.5, 2, "2 processes"),
        (0.035, 0.035, 0.010, 64, 4, "4 processes"),
        (1.0, 1.0, 0.0, 64, 8, "8 processes"),
    ],
)
def test_the_rule(wait: float, ran: float, busy: float, spare: float, processes: int, words: str) -> None:
    choice = choose(wait=wait, ran=ran, busy=busy, spare_cores=spare)
    assert choice.processes == processes and words in choice.why


def test_a_pause_is_not_a_step() -> None:
    probe = _Probe(waits=[9.0, 9.0] + [0.01] * 8, rans=[0.0] * 10, busies=[9.0, 9.0] + [0.01] * 7 + [100.0])
    assert probe.enough() and probe.choose(0.0).why.startswith("2 processes: loading takes 50.0%")


def test_a_data_set_that_waits_gets_processes_and_is_faster(open_stream: Callable[..., Stream]) -> None:
    class Sleepy(Dataset):
        def __getitem__(self, index: int) -> int:
            time.sleep(0.002)
            return index

    def seconds(stream: Stream, steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            assert stream.take() is not None
            time.sleep(0.004)  # the step
        return time.perf_counter() - begin

    make = Steps(1000, samples=1)
    inline, measured = open_stream(Sleepy(), make, 0), open_stream(Sleepy(), make, None)
    assert measured.choice == "inline: measuring how long loading takes"
    seconds(measured, 12)
    assert "mostly waits" in measured.choice and len(children()) >= 2
    assert seconds(inline, 20) >= 1.5 * seconds(measured, 20)
    assert 0 < measured.wait_seconds < inline.wait_seconds * 12


def test_quick_data_stays_inline_and_streams_of_a_source_are_measured_together(
    open_stream: Callable[..., Stream],
) -> None:
    first = open_stream(TensorDataset(torch.arange(10_000)), Steps(1000), None)
    for step in range(6):
        first.take()
        first.reset(step + 1)  # what lies between a reset and the next take is not a part of a step
        first.take()
        time.sleep(0.005)
    assert first.choice == "inline: measuring how long loading takes"
    second = first._loader.open("train", Steps(1000))
    for _ in range(8):
        second.take()
        time.sleep(0.005)
    assert second.choice.startswith("inline: loading takes ") and children() == []
    assert first.choice == second.choice


def test_data_that_computes_stays_inline_without_a_spare_core(open_stream: Callable[..., Stream]) -> None:
    class Computing(Dataset):
        def __getitem__(self, index: int) -> int:
            end = time.thread_time() + 0.001
            while time.thread_time() < end:
                pass
            return index

    stream = open_stream(Computing(), Steps(1000, samples=1), None)
    for _ in range(12):
        stream.take()
    assert "computes, but no core is spare" in stream.choice and children() == []


def test_taking_inline_costs_little(open_stream: Callable[..., Stream]) -> None:
    request: Request = ()
    stream = open_stream([1], lambda step: request, 0)

    def seconds() -> float:
        begin = time.perf_counter()
        for _ in range(200):
            stream.take()
        return (time.perf_counter() - begin) / 200

    assert min(seconds() for _ in range(20)) < 10e-6
