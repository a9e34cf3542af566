"""Code of the user's that does not return: it is said which worker is in what, since when and where."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.cluster.board import Board, Phase, Place
from shoal.cluster.channel import channel
from shoal.cluster.supervisor import calling, stuck
from shoal.cluster.supervisor.calling import Calling
from shoal.cluster.supervisor.stuck import Stuck
from shoal.core import settings
from shoal.core.events import AnyEvent, Notice, StepDone
from shoal.engines.activity import Activity, Call
from shoal.proof import rehearse


class Answering:
    def __init__(self) -> None:
        self.asked: list[int] = []

    def ask(self, pid: int) -> str:
        self.asked.append(pid)
        return f'  File "x.py", line {pid}, in __getitem__'


class Watched:
    """Workers whose board is written by hand, at times that are given."""

    def __init__(self, workers: int) -> None:
        self.board = Board(workers)
        self.places = [self.board.place(worker) for worker in range(workers)]
        for worker, place in enumerate(self.places):
            place.begin(2**22 + 1 + worker)  # no process has such a number
            place.enter(Phase.COMPUTE, 4)
        self.stacks = Answering()
        self.told: list[str] = []
        self.stuck = Stuck(self.board, self.stacks, lambda: range(workers), self.told.append)
        self.now = 100.0

    def during(self, seconds: float, each: Callable[[], object] = lambda: None) -> None:
        """Look while so many seconds pass, and do something before each look."""
        until = self.now + seconds
        while self.now < until:
            each()
            self.stuck.look(self.now)
            self.now += 0.6


def fetching(place: Place, item: int, source: str = "data") -> None:
    place.activity.enter(Call.ITEM, source)
    place.activity.at(item)


def test_an_item_that_does_not_come_is_told_once_with_the_stack() -> None:
    run = Watched(2)
    fetching(run.places[1], 37)
    run.places[0].enter(Phase.EXCHANGE, 4)
    run.during(19)
    assert run.told == []
    run.during(500)
    assert len(run.told) == 1 and run.told[0].startswith("worker 1 has been in data[37] for 2")
    assert "line 4194306, in __getitem__" in run.told[0] and run.stacks.asked == [4194306]


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda place: place.activity.enter(Call.ITEMS, "data", 5), "in data.__getitems__([5, …])"),
        (lambda place: fetching(place, 5, "eval_data"), "in eval_data[5]"),
        (lambda place: place.activity.enter(Call.COLLATE, "data", 5), "in collate"),
        (lambda place: place.activity.show(2**22 + 7, _other(12)), "in data[12] (process 4194311)"),
        (lambda place: place.enter(Phase.STARTING, 0), "in what comes before the first step"),
        (lambda place: place.enter(Phase.COMPUTE, 4), "in the forward and backward of step 5"),
        (lambda place: place.enter(Phase.APPLY, 4), "in what follows the exchange of step 5"),
        (lambda place: place.enter(Phase.EVALUATE, 4), "in the evaluation after step 4"),
        (lambda place: place.enter(Phase.EXCHANGE, 4), None),
        (lambda place: place.enter(Phase.RECOVER, 4), None),
        (lambda place: place.done(), None),
    ],
)
def test_what_a_worker_is_in(write: Callable[[Place], None], words: str | None) -> None:
    run = Watched(1)
    write(run.places[0])
    run.during(70)
    assert [text.split(" for ")[0] for text in run.told] == ([] if words is None else [f"worker 0 has been {words}"])


def _other(item: int) -> Activity:
    other = Activity()
    other.enter(Call.ITEM, "data", item)
    return other


def test_what_is_slow_and_goes_on_is_not_told() -> None:
    run = Watched(1)
    items = iter(range(1000))
    run.during(300, lambda: fetching(run.places[0], next(items)))
    run.during(300, lambda: run.places[0].activity.done())  # one forward after the other, of the same step
    assert run.told == []


def test_what_took_long_before_may_take_long_again() -> None:
    run = Watched(1)
    for item in range(5):
        fetching(run.places[0], item)
        run.during(15)
    fetching(run.places[0], 6)
    run.during(120)
    assert run.told == []
    run.during(60)
    assert len(run.told) == 1


def test_time_in_which_nobody_looked_does_not_count() -> None:
    run = Watched(1)
    fetching(run.places[0], 3)
    run.during(2)
    run.now += 1000  # in a callback
    run.during(15)
    assert run.told == []


def test_what_holds_all_workers_up_is_told_once() -> None:
    run = Watched(3)
    for worker, place in enumerate(run.places):
        fetching(place, 10 + worker)
        run.during(1)
    run.during(100)
    [text] = run.told
    assert "worker 0 has been in data[10] for 2" in text and ", worker 2 in data[12] for 1" in text
    assert run.stacks.asked == [2**22 + 1]


def test_who_wants_the_end_learns_what_it_waits_for() -> None:
    run = Watched(2)
    fetching(run.places[1], 37)
    run.places[0].enter(Phase.EXCHANGE, 4)
    run.during(12)
    assert run.stuck.stopping(run.now) == "it waits for worker 1, in data[37] for 13 s"
    assert run.stuck.where(run.now).startswith("worker 1 was in data[37] for 13 s:\n  File ")
    run.during(3)
    assert run.told == [], "it was said already"


def test_what_begins_only_then_is_told_later() -> None:
    run = Watched(1)
    assert run.stuck.stopping(run.now) == ""
    run.during(5)
    [text] = run.told
    assert text.startswith("it waits for worker 0, in the forward and backward of step 5 for 2 s")


# ---- callbacks


def test_a_callback_that_does_not_return_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling, "CALL_SECONDS", 0.05)
    monkeypatch.setattr(calling, "_LOOK_SECONDS", 0.02)
    told: list[str] = []
    released = threading.Event()

    def warn(text: str) -> None:
        told.append(text)
        released.set()

    def waits(event: AnyEvent) -> None:
        assert released.wait(10)

    with closing(Calling([waits], warn)) as calls:
        assert calls(Notice(step=3, text="")) == (None, None)
    [text] = told
    assert "callbacks[0], test_a_callback_that_does_not_return_is_told.<locals>.waits, has been at Notice" in text
    assert "of step 3 for 0 s" in text and "released.wait(10)" in text


def test_a_callback_that_is_interrupted_says_where_it_was() -> None:
    def stuck(event: AnyEvent) -> None:
        raise KeyboardInterrupt

    for hurried, notes in ((True, 1), (False, 0)):
        calls = Calling([stuck], print, lambda hurried=hurried: hurried)
        with pytest.raises(KeyboardInterrupt) as caught, closing(calls):
            calls(Notice(step=3, text=""))
        assert len(getattr(caught.value, "__notes__", ())) == notes


# ---- runs


class Slow:
    """Item 37 does not come until `gate` exists."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        while index == 37 and not self.gate.exists():
            time.sleep(0.01)  # never, if nothing is told
        return torch.ones(4), torch.ones(1)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stuck, "FETCH_SECONDS", 0.2)
    monkeypatch.setattr(stuck, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(stuck, "_FACTOR", 0.0)
    monkeypatch.setattr(stuck, "STOPPING_SECONDS", 0.1)
    monkeypatch.setattr(channel, "_HELD_SECONDS", 0.05)
    monkeypatch.setattr(rehearse, "_PATIENCE", 0.1)


@pytest.mark.parametrize(
    "how",
    [
        {"data_workers": 0},
        {"data_workers": 1},
        {"min_workers": 1},
        {"sync": "server"},
    ],
    ids=["inline", "in a loader process", "elastic", "servers"],
)
@pytest.mark.usefixtures("impatient")
def test_a_run_tells_of_an_item_that_does_not_come(tmp_path: Path, how: dict[str, Any]) -> None:
    gate = tmp_path / "gate"
    steps, told = [], []

    def release(event: AnyEvent) -> None:
        if isinstance(event, StepDone):
            steps.append(event.step)
        elif isinstance(event, Notice) and "data[37]" in event.text and "is here" in event.text:
            told.append((event.text, list(steps)))
            gate.touch()

    given = {"workers": 2, "epochs": 1, "seed": 3} | how
    trainer = shoal.Trainer(nn.Linear(4, 1), loss, sgd, Slow(gate), batch_size=8, callbacks=[release], **given)
    trainer.fit()
    assert steps == list(range(1, 11))
    text, before = told[0]
    assert "in data[37]" in text and "time.sleep(0.01)" in text and "in __getitem__" in text
    assert ("(process " in text) == (how.get("data_workers") == 1)
    if "sync" not in how:
        assert before == list(range(1, before[-1] + 1)) and before[-1] >= 1, "what was done before is shown"


class Interrupting:
    """A listener, which presses Ctrl-C whenever something is said that holds one of these words."""

    def __init__(self, *words: str) -> None:
        self.words = words
        self.texts: list[str] = []

    def __call__(self, event: AnyEvent) -> None:
        if isinstance(event, Notice):
            self.texts.append(event.text)
            if any(word in event.text for word in self.words):
                os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def interrupting(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Interrupting]:
    def made(*words: str) -> Interrupting:
        listener = Interrupting(*words)
        monkeypatch.setattr(settings.current(), "listeners", (lambda: listener,))
        return listener

    return made


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("own", [False, True], ids=["Trainer", "own loop"])
def test_ctrl_c_says_what_it_waits_for_and_the_second_one_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], interrupting: Callable[..., Interrupting], own: bool
) -> None:
    listener = interrupting("data[37]")
    data = Slow(tmp_path / "gate")

    def body(session: shoal.Session) -> None:
        net = nn.Linear(4, 1)
        optimizer = sgd(net.parameters())
        session.track(net=net, optimizer=optimizer)
        for step in session.steps(data, batch_size=8):
            for batch in step:
                step.backward(loss(net, batch))
            step.apply(optimizer)

    with pytest.raises(shoal.Interrupted, match="ended at once by a second Ctrl-C"):
        if own:
            shoal.launch(body, workers=2)
        else:
            shoal.Trainer(nn.Linear(4, 1), loss, sgd, data, batch_size=8, workers=2, seed=3).fit()
    [first] = [text for text in listener.texts if "Ctrl-C" in text]
    assert "it waits for worker" in first and "in data[37]" in first
    said = capsys.readouterr().err
    assert "was in data[37] for" in said and "time.sleep(0.01)" in said


@pytest.mark.usefixtures("impatient")
def test_a_lock_that_a_thread_held_at_the_fork_is_found(
    interrupting: Callable[..., Interrupting], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stuck, "CALL_SECONDS", 0.3)
    listener = interrupting("with lock:", "Ctrl-C")
    lock, held, over = threading.Lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            over.wait(60)

    def locking(model: nn.Module, batch: Any) -> Tensor:
        with lock:
            return loss(model, batch)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        with pytest.raises(shoal.Interrupted):
            data = torch.utils.data.TensorDataset(torch.ones(8, 4), torch.ones(8, 1))
            shoal.Trainer(nn.Linear(4, 1), locking, sgd, data, batch_size=8, workers=2).fit()
    finally:
        over.set()
        thread.join()
    text = next(text for text in listener.texts if "with lock:" in text)
    assert "in the forward and backward of step 1" in text
    assert "never released" in text
