"""The store of a term: torch's gloo and Shoal's own groups meet through it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as distributed

from shoal.cluster.member.control import Control
from shoal.cluster.messages import MOST_VALUE, Ended, Term
from shoal.comm.choose import make_group
from shoal.comm.term_store import TermStore, store_of

SECONDS = timedelta(seconds=10)


def rank_of(control: Control, term: Term) -> int:
    return term.members.index(control.name)


def test_gloo_meets_through_it(stage: Callable[..., Any]) -> None:
    run = stage(3)

    def meet(control: Control, term: Term) -> list[float]:
        rank = rank_of(control, term)
        began = time.monotonic()
        options = distributed.ProcessGroupGloo._Options()
        options._timeout = SECONDS
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        kept = store_of(control, term.number)  # torch keeps too little of it
        store = distributed.PrefixStore("gloo", kept)
        group = distributed.ProcessGroupGloo(store, rank, 3, options)
        took = time.monotonic() - began
        numbers = torch.tensor([float(rank + 1)])
        group.allreduce([numbers]).wait()
        return [float(numbers), took]

    values = run.on_workers([0, 1, 2], meet)
    print(f"gloo, 3 members: {max(took for _, took in values) * 1e3:.1f} ms")
    assert [total for total, _ in values] == [6.0] * 3


@pytest.mark.parametrize("size", [2, 6])
def test_groups_meet_through_it(stage: Callable[..., Any], size: int) -> None:
    run = stage(size)

    def meet(control: Control, term: Term) -> list[float]:
        rank = rank_of(control, term)
        began = time.monotonic()
        store = store_of(control, term.number)
        before = control._writing.question()
        group = make_group(store, rank, size, torch.device("cpu"), timeout=SECONDS, run="a-run")
        took = time.monotonic() - began
        asked = control._writing.question() - before - 1
        numbers = group.buffer(1, torch.float32)
        numbers += rank + 1
        group.sum(numbers).wait()
        total = float(numbers)
        group.barrier()
        group.close()
        return [total, took, asked]

    values = run.on_workers(list(range(size)), meet)
    print(f"make_group, {size} members: {max(took for _, took, _ in values) * 1e3:.1f} ms")
    assert [total for total, _, _ in values] == [size * (size + 1) / 2] * size
    assert [asked for _, _, asked in values] == [4] * size, "questions of each, however many there are"


# -- one worker --------------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(stage: Callable[..., Any]) -> Any:
    """A stage with two members of a term, and the stores of both."""
    run = stage(2)
    run.members = run.entered(0, 1)
    run.term = run.formed(run.members).number
    run.stores = [store_of(control, run.term) for control in run.members]
    return run


def raised(call: Callable[[], Any]) -> tuple[threading.Thread, list[BaseException]]:
    """Call it on a thread; what it raises is in the list."""
    found: list[BaseException] = []

    def body() -> None:
        try:
            call()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    return thread, found


def test_what_one_sets_the_other_gets(alone: Any) -> None:
    first, second = alone.stores
    first.set("a", b"\0binary\xff")
    first.set("b", "text")
    assert second.get("a") == b"\0binary\xff"
    second.wait(["a", "b"])
    assert second.multi_get(["b", "a"]) == [b"text", b"\0binary\xff"]
    assert second.check(["a", "b"])
    assert not second.check(["a", "c"])
    first.set("empty", b"")
    assert second.get("empty") == b""
    assert [first.add("n", 2), second.add("n", 3), first.add("n", -10)] == [2, 5, -5]
    assert first.get("n") == b"-5"


def test_through_a_prefix_and_from_cpp(alone: Any) -> None:
    first, second = (distributed.PrefixStore("p", distributed.PrefixStore("q", store)) for store in alone.stores)
    first.set("k", "v")
    assert second.get("k") == b"v"
    second.wait(["k"], SECONDS)
    assert second.check(["k"])
    assert not second.check(["other"])
    assert second.add("n", 4) == 4
    assert alone.stores[0].check(["q/p/k"])
    assert not first.has_extended_api()


def test_a_key_that_comes_later(alone: Any) -> None:
    first, second = alone.stores
    thread, troubles = raised(lambda: second.wait(["later"]))
    first.get("later") if first.check(["later"]) else first.set("later", b"")
    thread.join(5)
    assert not thread.is_alive()
    assert not troubles


def test_waiting_ends(alone: Any) -> None:
    store = alone.stores[0]
    with pytest.raises(RuntimeError, match=r"did not all come.*never"):
        store.wait(["never"], timedelta(milliseconds=50))
    store.set_timeout(timedelta(milliseconds=60))
    with pytest.raises(RuntimeError, match="did not all come"):
        store.get("never")
    with pytest.raises(RuntimeError, match="did not all come"):
        distributed.PrefixStore("p", store).get("never")


def test_waiting_ends_with_the_term(alone: Any) -> None:
    thread, troubles = raised(lambda: alone.stores[0].get("never"))
    alone.members[1].close()
    began = time.monotonic()
    alone.report(Ended(1, "was killed"))
    thread.join(5)
    took = time.monotonic() - began
    print(f"the waiting store raised after {took * 1e3:.1f} ms")
    assert isinstance(troubles[0], RuntimeError)
    assert "regroup" in str(troubles[0]) or "over" in str(troubles[0])
    assert took < 1.0
    with pytest.raises(RuntimeError, match="term"):
        alone.stores[0].set("k", b"")
    with pytest.raises(RuntimeError, match="term"):
        alone.stores[0].check(["k"])


def test_the_control_thread_knows_first(alone: Any) -> None:
    known = threading.Event()
    store = TermStore(
        alone.members[0]._questions, alone.term, lambda term: "broken" if known.is_set() else None, lambda body: None
    )
    thread, troubles = raised(lambda: store.get("never"))
    assert not known.wait(0.05)
    known.set()
    thread.join(2)
    assert [str(trouble) for trouble in troubles] == ["broken"]


def test_the_coordinator_knows_first(alone: Any) -> None:
    """The store is told by the coordinator that the term is over, where the control thread does not know yet."""
    questions = alone.members[0]._questions
    asking, telling = (TermStore(questions, alone.term - 1, lambda term: None, lambda body: None) for _ in range(2))
    with pytest.raises(RuntimeError, match="is over"):
        asking.get("k")
    with pytest.raises(RuntimeError, match="is over"):
        asking.set("k", b"")
    telling.set("k", b"")  # nobody waits for the answer
    with pytest.raises(RuntimeError, match="over"):
        telling.check(["k"])
    sound = store_of(alone.members[0], alone.term)
    sound.set("k", b"value")
    assert sound.get("k") == b"value"


def test_too_large_a_value(alone: Any) -> None:
    store = alone.stores[0]
    store.set("k", b"x" * MOST_VALUE)
    assert len(store.get("k")) == MOST_VALUE
    with pytest.raises(ValueError, match="at most"):
        store.set("k", b"x" * (MOST_VALUE + 1))


def test_what_a_term_does_not_offer(alone: Any) -> None:
    store = alone.stores[0]
    for call in (store.num_keys, lambda: store.delete_key("k"), lambda: store.compare_set("k", "a", "b")):
        with pytest.raises(NotImplementedError, match="store of a term"):
            call()
