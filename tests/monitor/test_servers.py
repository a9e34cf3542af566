"""What is said of the servers of a run: the same words wherever they are said."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest

from shoal.core.events import AnyEvent, RunStarted, ServerFacts, ServersSeen, StepDone
from shoal.core.settings import Setting
from shoal.monitor.display.display import Display
from shoal.monitor.display.live import run_lines
from shoal.monitor.display.notebook import page
from shoal.monitor.display.tally import Tally
from shoal.monitor.figures import Figures
from shoal.monitor.prometheus import Page
from shoal.monitor.servers import (
    MEMORY,
    SERVER_TITLES,
    mean_staleness,
    on_one_host,
    server_facts,
    server_rows,
    servers_words,
    staleness_shares,
    staleness_words,
    stored_servers,
    sync_words,
)
from shoal.store.values import EventRow

NEAR = ServerFacts(number=0, shards=6, bytes=3 << 20, mirrored=5, pushes=1200, repeated=2, seconds=0.25)
FAR = ServerFacts(number=1, shards=5, bytes=2 << 20, pushes=1100, received=7 << 20, sent=1 << 30, seconds=2.0)
SEEN = ServersSeen(step=100, time=50.0, servers=[FAR, NEAR], staleness=[96, 3, 1, 0, 0], replaced=1)
WORDS = "servers: 2 servers, gradients lacked 0.05 steps on average, 1 replaced"


def told(*staleness: int) -> ServersSeen:
    return ServersSeen(step=1, servers=[], staleness=list(staleness))


def start() -> RunStarted:
    shape: dict[str, Any] = {"total_steps": 9, "steps_per_epoch": 9, "samples_per_epoch": 72}
    return RunStarted(step=0, run_id="r1", run_dir=None, workers=2, **shape)


def test_a_row_for_each_server_in_order() -> None:
    rows = [dict(zip(SERVER_TITLES, row, strict=True)) for row in server_rows(SEEN, near=False)]
    assert rows[0] == {
        "server": "0", "shards": "6", "weights": "3.0 MiB", "copies": "5", "pushes": "1,200", "repeated": "2",
        "received": MEMORY, "sent": MEMORY, "applying": "0.25 s",
    }  # fmt: skip
    assert (rows[1]["received"], rows[1]["sent"]) == ("7.0 MiB", "1.0 GiB")


def test_a_server_without_pushes_has_not_used_shared_memory() -> None:
    (row,) = server_rows(ServersSeen(step=1, servers=[ServerFacts(number=0, shards=1, bytes=1)]), near=True)
    assert MEMORY not in row


@pytest.mark.parametrize(
    ("engine", "near"), [("local", True), ("local:lab=tank", False), ("odd", False), (None, False)]
)
def test_on_one_host_letters_are_not_what_is_meant(engine: str | None, near: bool) -> None:
    config = {} if engine is None else {"engine": Setting(engine, "default")}
    assert on_one_host(config) == near
    letters = msgspec.structs.replace(NEAR, received=500 * NEAR.pushes, sent=500 * NEAR.pushes)
    (row,) = server_rows(ServersSeen(step=1, servers=[letters]), near=near)
    assert (row[6] == row[7] == MEMORY) == near
    (row,) = server_rows(ServersSeen(step=1, servers=[FAR]), near=True)
    assert row[6] == "7.0 MiB", "what is more than letters is told in any case"
    gives = msgspec.structs.replace(NEAR, received=500 * NEAR.pushes, sent=1 << 30)
    (row,) = server_rows(ServersSeen(step=1, servers=[gives]), near=True)
    assert (row[6], row[7]) == (MEMORY, "1.0 GiB"), "as where gradients go to a copy when they arrive"


def test_staleness_in_words() -> None:
    assert staleness_words(SEEN) == "gradients computed with weights that lacked 0 steps: 96%, 1: 3%, 2: 1%"
    assert mean_staleness(SEEN) == pytest.approx(0.05)
    assert dict(server_facts(SEEN))["mean staleness"] == "0.05 steps"
    assert dict(server_facts(SEEN))["replaced"] == "1 server that had died"


def test_the_last_place_counts_all_beyond() -> None:
    assert [lacked for lacked, _ in staleness_shares(told(1, 1))] == ["0", "1"]
    assert [lacked for lacked, _ in staleness_shares(told(7))] == ["0"]
    assert [lacked for lacked, _ in staleness_shares(told(*[1] * 10))][-1] == "9"
    assert [lacked for lacked, _ in staleness_shares(told(*[1] * 11))][-1] == "9 or more"
    shares = staleness_shares(told(*[1] * 40))
    assert len(shares) == 10 and shares[-1] == ("9 or more", 31 / 40)
    assert sum(share for _, share in shares) == pytest.approx(1.0)
    assert staleness_shares(told(0, 0, 5, 0)) == [("0", 0.0), ("1", 0.0), ("2", 1.0)]


@pytest.mark.parametrize("counts", [(), (0, 0)])
def test_before_the_first_push_nothing_is_said(counts: tuple[int, ...]) -> None:
    seen = told(*counts)
    assert staleness_shares(seen) == [] and staleness_words(seen) == "" and mean_staleness(seen) is None
    assert server_facts(seen) == [] and servers_words(seen) == "0 servers"


def test_a_process_that_holds_no_weights_is_no_second_server() -> None:
    keeper, idle = ServerFacts(number=1, shards=0, bytes=0, mirrored=12, received=336), ServerFacts(2, 0, 0)
    assert servers_words(ServersSeen(step=1, servers=[NEAR, keeper], staleness=[])) == "1 server, 1 for copies"
    alone = ServersSeen(step=1, servers=[NEAR, keeper, idle, idle], staleness=[])
    assert servers_words(alone) == "1 server, 1 for copies, 2 with nothing to hold"
    assert servers_words(ServersSeen(step=1, servers=[NEAR, FAR], staleness=[])) == "2 servers"
    assert server_rows(alone, near=True)[1][-3:-1] == ("shared memory", "shared memory")


@pytest.mark.parametrize(
    ("sync", "words"),
    [
        ("allreduce", "allreduce"),
        ("server", "bsp on 2 servers"),
        ("server:mode=ssp,staleness=3,servers=1", "ssp (staleness 3) on 1 server"),
        ("server:mode=async,apply=arrival,damp=True", "async on 2 servers, applied on arrival, damped"),
        ("from\x1b[2J the future", "from the future"),
        (["odd"], "['odd']"),
    ],
)
def test_sync_in_words(sync: Any, words: str) -> None:
    assert sync_words({"sync": Setting(sync, "flag")}) == words
    assert sync_words({}) == ""


def test_the_newest_since_the_last_start_counts() -> None:
    def row(kind: str, **data: Any) -> EventRow:
        return EventRow(1.0, 1, kind, data)

    def seen(replaced: int) -> EventRow:
        return row("ServersSeen", servers=[msgspec.to_builtins(NEAR)], staleness=[1], replaced=replaced)

    found = stored_servers([row("RunStarted"), seen(1), seen(2), row("Notice", text="x")])
    assert found is not None and found.replaced == 2 and found.servers == [NEAR]
    assert stored_servers([seen(1), row("RunStarted")]) is None
    assert stored_servers([row("ServersSeen", servers="what?")]) is None


@pytest.mark.parametrize("verbose", [False, True])
def test_a_display_says_it_when_asked_for_more(verbose: bool) -> None:
    now, stream = [100.0], io.StringIO()
    tally, display = Tally(lambda: now[0]), Display("plain", stream=stream, verbose=verbose, clock=lambda: now[0])
    happened: list[AnyEvent] = [start(), SEEN]
    for event in happened:
        tally.see(event)
        display(event)
    now[0] += 6
    display(StepDone(step=1, epoch=0, loss=1.0, samples=8, rates=[0.1]))
    assert (f"shoal: {WORDS}" in stream.getvalue().splitlines()) == verbose
    assert (WORDS in [line.plain for line in run_lines(tally, 120, verbose=verbose, ascii_only=False)]) == verbose
    assert (WORDS in page(tally, [], verbose=verbose)) == verbose
    tally.see(start())
    assert tally.servers is None


def test_prometheus_gets_it() -> None:
    shown = Page()
    shown.take(start())
    assert "shoal_server" not in shown.render() and "staleness" not in shown.render()
    shown.take(SEEN)
    lines = shown.render().splitlines()
    assert 'shoal_server_pushes_total{server="0"} 1200' in lines
    assert 'shoal_server_received_bytes_total{server="1"} 7340032' in lines
    assert "shoal_staleness_steps 0.05" in lines and "shoal_servers_replaced_total 1" in lines


def test_tracking_services_get_it_at_a_bounded_rate() -> None:
    taken = Figures()
    (point,) = taken.take(SEEN)
    assert (point.step, point.time) == (100, 50.0)
    assert point.values["servers/mean_staleness"] == pytest.approx(0.05)
    assert (point.values["servers/replaced"], point.values["server-0/pushes"]) == (1.0, 1200.0)
    assert taken.take(msgspec.structs.replace(SEEN, time=51.0, replaced=2)) == []
    (late,) = taken.rest()
    assert late.values["servers/replaced"] == 2.0 and taken.rest() == []
