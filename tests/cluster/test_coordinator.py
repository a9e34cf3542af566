"""The coordinator's process: killed, restarted, lied to, orphaned."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.cluster.access import Access, port_of
from shoal.cluster.coordinator.coordinator import serve
from shoal.cluster.coordinator.post import WINDOW, Post, Window
from shoal.cluster.coordinator.shelf import MOST_KEYS, MOST_TOTAL, Shelf
from shoal.cluster.member.control import Control
from shoal.cluster.messages import (
    MOST_BYTES,
    MOST_VALUE,
    OPERATOR,
    Add,
    Changed,
    Closing,
    Ended,
    Gather,
    Gathered,
    Get,
    Held,
    Letter,
    Put,
    Refused,
    Say,
    Scale,
    Serving,
    Term,
    Welcome,
    decode_down,
    encode,
)
from shoal.comm.term_store import store_of
from shoal.core.errors import ConfigError, RunDirError
from shoal.wire.curve import Client, Keys
from shoal.wire.link import Link

Stages = Callable[..., Any]


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.002)


# -- death and return --------------------------------------------------------------------------------------------------


def test_workers_go_on_when_the_coordinator_returns(stage: Stages) -> None:
    run = stage(3)
    controls = run.entered(0, 1, 2)
    term = run.formed(controls)
    endpoint = run.access.endpoint()
    reasons: list[str] = []
    for control in controls:
        control.watch(term.number, reasons.append)
    run.kill()
    began = time.monotonic()
    run.start(present=[0, 1, 2])
    assert run.expect(Serving).endpoint == endpoint, "the same port"
    assert run.expect(Changed).term == term.number, "the term stands as before"
    controls[2].close()
    run.report(Ended(2, "was killed"))
    until(lambda: len(reasons) == 2)
    print(f"the new coordinator is obeyed {time.monotonic() - began:.3f} s after the start of its process")
    again = run.formed(controls[:2], 4, True)
    assert again.number > term.number
    assert again.members == ["worker-0", "worker-1"]


def test_a_coordinator_that_dies_during_a_meeting(stage: Stages) -> None:
    run = stage(2)
    first, _ = controls = run.entered(0, 1)
    (term, _) = run.all_terms(controls)
    store = store_of(first, term.number)
    store.set("place/0", b"here")
    troubles: list[str] = []

    def wait() -> None:
        try:
            store.get("place/1")
        except RuntimeError as error:
            troubles.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    run.kill()
    run.start(present=[0, 1])
    thread.join(5)
    assert troubles, "the meeting is given up"
    again = run.formed(controls)
    assert again.number > term.number
    assert sorted(again.members) == ["worker-0", "worker-1"]


def test_keys_outlive_the_coordinator(stage: Stages) -> None:
    """A term stands, and a member that is slow still reads what the others have set."""
    run = stage(2)
    first, second = controls = run.entered(0, 1)
    term = run.formed(controls)
    store = store_of(first, term.number)
    store.set("late", b"word")
    assert store.add("count", 2) == 2
    run.kill()
    run.start(present=[0, 1])
    other = store_of(second, term.number)
    assert other.get("late") == b"word"
    assert other.add("count", 0) in (0, 2)
    until(lambda: other.add("count", 0) == 2)


def test_a_port_that_was_taken_meanwhile(stage: Stages) -> None:
    run = stage(1)
    (control,) = run.entered(0)
    run.formed([control])
    before = run.access.endpoint()
    run.kill()
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        squatter.bind(("127.0.0.1", port_of(before)))
        squatter.listen()
        run.start(present=[0])
        assert run.expect(Serving).endpoint != before
        control.watch(1, None)
        run.report(Ended(0, "a lie, to see whether the worker hears"))
        began = time.monotonic()
        until(lambda: control._dispatch.endpoint != before)
        print(f"found after {time.monotonic() - began:.2f} s")


def test_one_coordinator_at_a_time(stage: Stages) -> None:
    run = stage(1)
    run.expect(Serving)
    endpoint = run.access.endpoint()
    ours, theirs = Link.pair()
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(RunDirError, match="another coordinator"):
            serve(run.access, run.plan, theirs, "127.0.0.1")
    finally:
        signal.signal(signal.SIGINT, handler)
        ours.close()
        theirs.close()
    assert run.access.endpoint() == endpoint, "those who look for the run must not be misled"
    run.entered(0)


def test_ctrl_c_is_not_for_the_coordinator(stage: Stages) -> None:
    run = stage(1)
    run.expect(Serving)
    os.kill(run.pid, signal.SIGINT)
    run.entered(0)


# -- the end -----------------------------------------------------------------------------------------------------------


def test_it_ends_when_the_engine_says_so(stage: Stages) -> None:
    run = stage(1)
    run.expect(Serving)
    run.report(Closing())
    assert run.ended() == 0


def test_without_engine_it_stays_for_its_workers(stage: Stages) -> None:
    run = stage(2)
    first, second = controls = run.entered(0, 1)
    term = run.formed(controls)
    run.hang_up()
    store = store_of(first, term.number)
    store.set("key", b"value")
    assert store_of(second, term.number).get("key") == b"value", "it still serves"
    first.done()
    second.done()
    assert run.ended() == 0


def test_without_engine_it_ends_with_its_workers(stage: Stages) -> None:
    run = stage(2)

    def leave(control: Control, term: Term) -> int:
        control.formed(term.number)
        return term.number

    run.on_workers([0, 1], leave)
    run.hang_up()
    assert run.ended() == 0


# -- letters -----------------------------------------------------------------------------------------------------------


class Hand:
    """Writes letters by hand."""

    def __init__(self, access: Access) -> None:
        self.client = Client(str(access.endpoint()), access.keys, limit=2 * MOST_BYTES)

    def write(self, body: Any, *, name: str = OPERATOR, run: str = "a-run", life: int = 5, number: int = 1) -> None:
        self.client.send(encode(Letter(run, name, life, number, body)))

    def answer(self, seconds: float = 2.0) -> Any:
        payload = self.client.receive(seconds)
        return None if payload is None else decode_down(payload)


@pytest.fixture
def hand(stage: Stages) -> Any:
    run = stage(2)
    run.expect(Serving)
    one = Hand(run.access)
    one.stage = run  # type: ignore[attr-defined]
    yield one
    one.client.close()


def test_a_letter_counts_once(hand: Any) -> None:
    hand.write(Scale(3), number=7)
    assert isinstance(hand.answer(), Welcome)
    hand.write(Scale(2), number=7)
    assert hand.answer(0.2) is None
    hand.write(Scale(2), number=6)  # late, but never seen
    assert isinstance(hand.answer(), Welcome)
    hand.write(Scale(3), number=8, run="another-run")
    hand.write(Scale(3), number=8)
    assert isinstance(hand.answer(), Welcome)
    assert hand.answer(0.1) is None
    hand.write(Scale(2), life=6, number=7)
    assert isinstance(hand.answer(), Welcome), "another life has its own numbers"
    hand.stage.report(Closing())
    assert hand.stage.ended() == 0
    said = [message.text for message in hand.stage.rest() if isinstance(message, Say) and "dropped" in message.text]
    assert len(said) == 1, "people are told once"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        b"\xff" * 5000,
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        encode(["a-run", OPERATOR, 1, 1, ["Scale", 0]]),
        encode(["a-run", OPERATOR, -1, 1, ["Scale", 2]]),
        encode(["a-run", "../etc", 1, 1, ["Scale", 2]]),
        encode(["a-run", OPERATOR, 1, 1, ["Scale", 2, 3, 4]]),
        encode(["a-run", OPERATOR, 1, 1, ["Unheard", 2]]),
        encode({"run": "a-run"}),
        b"x" * (MOST_BYTES - 100),
    ],
    ids=lambda payload: payload[:12].hex() or "empty",
)
def test_what_is_not_a_letter_is_dropped(hand: Any, payload: bytes) -> None:
    hand.client.send(payload)
    hand.write(Scale(2))
    assert isinstance(hand.answer(), Welcome)


def test_junk_from_the_engine_is_dropped(hand: Any) -> None:
    hand.stage.link.send(b"\xff\xff")
    hand.stage.link.send(encode(["Ended", -1]))
    hand.write(Scale(99))
    assert isinstance(hand.answer(), Refused)
    assert "engine" in hand.stage.expect(Say).text


def test_an_engine_that_does_not_read_holds_up_nobody(hand: Any) -> None:
    for number in range(3000):
        hand.write(Scale(2 + number % 2), number=number)
        if number % 500 == 499:
            for _ in range(500):
                assert isinstance(hand.answer(), Welcome)


def test_a_newer_process_takes_the_name_over() -> None:
    post = Post()
    assert not post.knows("worker-0", 1)
    assert post.fresh("worker-0", 1, 1)
    post.came("worker-0", 1, b"old", True)
    assert post.fresh("worker-0", 2, 1)
    post.came("worker-0", 2, b"new", True)
    post.came("worker-0", 1, b"old", False)  # it was on its way for long
    assert post.route("worker-0") == b"new"
    post.came("worker-0", 2, b"reconnected", False)
    assert post.route("worker-0") == b"reconnected"
    assert post.route("worker-1") is None


def test_numbers_are_known_for_a_while() -> None:
    window = Window()
    assert [window.fresh(number) for number in (5, 3, 5, 3, 4, 6)] == [True, True, False, False, True, True]
    assert window.fresh(6 + WINDOW)
    assert not window.fresh(6), "too long ago to know"
    assert window.fresh(7)
    assert not window.fresh(7)
    assert window.fresh(1 << 47)
    assert not window.fresh(6 + WINDOW)


# -- keys --------------------------------------------------------------------------------------------------------------


def test_keys_are_of_one_term() -> None:
    shelf = Shelf()
    assert shelf.ask(b"a", 1, Put(1, 0, "k", b"v")) == [(b"a", Held(1, gone=True))]
    shelf.begin(4)
    assert shelf.ask(b"a", 1, Get(1, 4, "k")) == []
    assert shelf.ask(b"a", 1, Get(1, 4, "k")) == []  # asked again: one question
    assert shelf.ask(b"a", 1, Get(2, 4, "k", wait=False)) == [(b"a", Held(2))]
    assert shelf.ask(b"b", 2, Put(1, 4, "k", b"")) == [(b"b", Held(1)), (b"a", Held(1, b""))]
    assert shelf.ask(b"a", 1, Get(3, 3, "k")) == [(b"a", Held(3, gone=True))]
    assert shelf.ask(b"a", 1, Get(3, 5, "k")) == [(b"a", Held(3, gone=True))]
    shelf.ask(b"a", 1, Get(4, 4, "never"))
    assert shelf.end(3) == []
    assert shelf.end(4) == [(b"a", Held(4, gone=True))]
    assert shelf.ask(b"a", 1, Get(5, 4, "k")) == [(b"a", Held(5, gone=True))]
    assert shelf.begin(4) == []
    assert shelf.ask(b"a", 1, Get(5, 4, "k")) == [(b"a", Held(5, gone=True))], "a broken term does not begin again"
    shelf.begin(5)
    shelf.ask(b"a", 1, Get(6, 5, "k"))
    assert shelf.begin(6) == [(b"a", Held(6, gone=True))]


def test_who_waits_for_a_key_is_told_that_the_term_broke(stage: Stages) -> None:
    run = stage(2)
    term = run.formed(run.entered(0, 1))
    hand = Hand(run.access)
    try:
        hand.write(Get(1, term.number, "never"), name="worker-0")
        hand.write(Get(2, term.number, "never", wait=False), name="worker-0", number=2)
        assert hand.answer() == Held(2)
        run.report(Ended(1, "was killed"))
        assert hand.answer() == Held(1, gone=True)
    finally:
        hand.client.close()


def test_words_are_gathered() -> None:
    shelf = Shelf()
    shelf.begin(1)
    assert shelf.ask(b"b", 2, Gather(7, 1, "k", 1, 3, b"two")) == []
    assert shelf.ask(b"b", 2, Gather(7, 1, "k", 1, 3, b"two")) == []  # asked again: one question, one word
    assert shelf.ask(b"a", 1, Gather(3, 1, "k", 0, 3, b"", wait=False)) == [(b"a", Held(3))]
    for wrong in (Gather(4, 1, "k", 2, 4, b""), Gather(4, 1, "k", 3, 3, b""), Gather(4, 2, "k", 2, 3, b"")):
        assert shelf.ask(b"a", 1, wrong) == [(b"a", Held(4, gone=True))]
    words = [b"", b"two", b"three"]
    answers = shelf.ask(b"c", 3, Gather(5, 1, "k", 2, 3, b"three"))
    assert sorted(answers) == [(b"b", Gathered(7, words)), (b"c", Gathered(5, words))]
    assert shelf.ask(b"a", 1, Gather(9, 1, "k", 0, 3, b"else")) == [(b"a", Gathered(9, words))], "the first word stays"
    shelf.ask(b"a", 1, Gather(10, 1, "other", 0, 2, b""))
    assert shelf.end(1) == [(b"a", Held(10, gone=True))]


def test_a_gathering_has_only_so_much_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.cluster.coordinator.shelf.MOST_GATHERED", 10)
    monkeypatch.setattr("shoal.cluster.coordinator.shelf.MOST_KEYS", 2)
    monkeypatch.setattr("shoal.cluster.coordinator.shelf.MOST_WAITING", 2)
    shelf = Shelf()
    shelf.begin(1)
    assert shelf.ask(b"a", 1, Gather(1, 1, "k", 0, 9, b"123456")) == []
    assert shelf.ask(b"b", 2, Gather(1, 1, "k", 1, 9, b"12345")) == [(b"b", Held(1, gone=True))]
    assert shelf.ask(b"b", 2, Gather(2, 1, "k", 1, 9, b"1234")) == []
    assert shelf.ask(b"c", 3, Gather(1, 1, "k", 2, 9, b"")) == [(b"c", Held(1, gone=True))], "too many wait"
    assert shelf.ask(b"a", 1, Put(2, 1, "key", b"")) == [(b"a", Held(2))]
    assert shelf.ask(b"a", 1, Put(3, 1, "another", b"")) == [(b"a", Held(3, gone=True))]
    assert shelf.ask(b"a", 1, Gather(4, 1, "another", 0, 1, b"")) == [(b"a", Held(4, gone=True))]


def test_a_gathering_outlives_the_coordinator(stage: Stages) -> None:
    """One member has the answer and goes on. The other one has not, and asks a coordinator that was not there."""
    run = stage(2)
    controls = run.entered(0, 1)
    term = run.formed(controls)
    stores = [store_of(control, term.number) for control in controls]

    def gathered(rank: int, said: dict[int, list[bytes]]) -> threading.Thread:
        thread = threading.Thread(
            target=lambda: said.update({rank: stores[rank].gather("k", rank, 2, b"%d" % rank)}), daemon=True
        )
        thread.start()
        return thread

    said: dict[int, list[bytes]] = {}
    for thread in [gathered(0, said), gathered(1, said)]:
        thread.join(5)
    assert said == {0: [b"0", b"1"], 1: [b"0", b"1"]}
    run.kill()
    run.start(present=[0, 1])
    again: dict[int, list[bytes]] = {}
    gathered(1, again).join(5)
    assert again == {1: [b"0", b"1"]}


def test_an_answer_is_larger_than_a_letter_may_be(stage: Stages) -> None:
    run = stage(2)
    controls = run.entered(0, 1)
    term = run.formed(controls)
    word, members = b"x" * MOST_VALUE, 20
    assert len(word) * members > MOST_BYTES
    store = store_of(controls[0], term.number)
    hand = Hand(run.access)
    try:
        for at in range(1, members):
            hand.write(Gather(at, term.number, "k", at, members, word, wait=False), name="worker-1", number=at)
            assert hand.answer() == Held(at)
        assert store.gather("k", 0, members, word) == [word] * members
    finally:
        hand.client.close()


def test_additions_count_once() -> None:
    shelf = Shelf()
    shelf.begin(1)
    assert shelf.ask(b"a", 1, Add(1, 1, "n", 5)) == [(b"a", Held(1, b"5"))]
    assert shelf.ask(b"x", 1, Add(1, 1, "n", 5)) == [(b"x", Held(1, b"5"))]
    assert shelf.ask(b"b", 2, Add(1, 1, "n", -7)) == [(b"b", Held(1, b"-2"))]
    shelf.ask(b"a", 1, Put(2, 1, "text", b"no number"))
    assert shelf.ask(b"a", 1, Add(3, 1, "text", 1)) == [(b"a", Held(3, gone=True))]


def test_a_term_has_only_so_much_room(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf()
    shelf.begin(1)
    value = b"x" * (1 << 16)
    number, room = 0, MOST_TOTAL // (1 << 16)
    for number in range(room + 10):
        ((_, held),) = shelf.ask(b"a", 1, Put(number, 1, f"{number}", value))
        if held.gone:
            break
    assert room - 2 <= number <= room
    assert shelf.ask(b"a", 1, Put(number, 1, "0", b"shorter")) == [(b"a", Held(number))]
    shelf.begin(2)
    monkeypatch.setattr("shoal.cluster.coordinator.shelf.MOST_KEYS", 3)
    answers = [shelf.ask(b"a", 1, Put(at, 2, f"{at}", b""))[0][1].gone for at in range(4)]
    assert answers == [False, False, False, True]
    assert MOST_KEYS == 100_000


# -- the endpoint file -------------------------------------------------------------------------------------------------


def test_the_endpoint_is_found(tmp_path: Path) -> None:
    access = Access("a-run", tmp_path, Keys.make())
    assert access.endpoint() is None
    for endpoint in ("tcp://127.0.0.1:4000", "tcp://[::1]:65535", "tcp://host-1.example:1"):
        access.publish(endpoint)
        assert access.endpoint() == endpoint
    assert (tmp_path / "endpoint").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["endpoint"]


@pytest.mark.parametrize(
    "text", ["", "ipc:///tmp/x", "tcp://a b:1", "tcp://h:0", "tcp://h:65536", "tcp://h", "x" * 10_000, "tcp://h:1\ny"]
)
def test_other_endpoints_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "endpoint").write_text(text)
    access = Access("a-run", tmp_path, Keys.make())
    with pytest.raises(ConfigError, match="tcp://host:port"):
        access.endpoint()
    with pytest.raises(ConfigError, match="tcp://host:port"):
        access.publish(text)
