"""The traffic account in words and figures."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.core.events import ExchangeSettled
from shoal.core.traffic import Flow, Traffic
from shoal.monitor.traffic import (
    MOST_ROWS,
    Account,
    buckets,
    exchange_facts,
    exchange_words,
    flow_rows,
    hosts,
    sent_words,
    settled_words,
    stored_account,
)
from shoal.store.values import EventRow, RunInfo, WorkerRow

MIB = 1 << 20


def settled(**changes: Any) -> ExchangeSettled:
    event = ExchangeSettled(
        step=3,
        collective="shm",
        reason="all workers are on one host",
        hosts=[0, 0],
        latency=11e-6,
        bandwidth=6.0 * 2**30,
        buckets=[4 * MIB] * 11 + [MIB],
    )
    return msgspec.structs.replace(event, **changes)


def account(**changes: Any) -> Account:
    """Two workers; 10 steps since the last start, and 10 before it."""
    since = Traffic(
        [Flow("control", "none", "loopback", 20_480, 20), Flow("gradient", "fp16", "memory", 40 * MIB, 80)],
        operations=60,
        exchange=0.4,
        exposed=0.1,
    )
    total = Traffic(
        [Flow("control", "none", "loopback", 40_960, 40), Flow("gradient", "fp16", "memory", 80 * MIB, 160)],
        operations=120,
        exchange=0.8,
        exposed=0.2,
    )
    values: dict[str, Any] = {"total": total, "since": since, "workers": 2, "steps": 10, "seconds": 2.0, "waited": 0.1}
    values["settled"] = settled()
    return Account(**(values | changes))


def test_figures_of_the_last_start_are_per_worker() -> None:
    told = account()
    assert told.exchange_per_step == pytest.approx(0.02) and told.exposed_per_step == pytest.approx(0.005)
    assert told.exposed_share == pytest.approx(0.05) and told.operations_per_step == 3.0 and told.frequency == 30.0
    assert told.bandwidth == pytest.approx((40 * MIB + 20_480) / 0.4)
    later = account(since=msgspec.structs.replace(told.since, exposed=5.0))
    assert (later.exposed_share, later.exposed_per_step) == (told.exposed_share, told.exposed_per_step), "not in steps"
    figures = told.figures()
    assert (figures["bytes"], figures["messages"], figures["operations"]) == (80 * MIB + 40_960, 200, 120)
    assert figures["bytes_per_step"] == (40 * MIB + 20_480) / 10


def test_the_table_begins_with_what_was_sent_most() -> None:
    assert flow_rows(account()) == [
        ("gradient", "fp16", "memory", "80.0 MiB", "160", "4.0 MiB"),
        ("control", "none", "loopback", "40.0 KiB", "40", "2.0 KiB"),
    ]


def test_what_was_sent_before_the_last_start_only_has_nothing_per_step() -> None:
    only = account(since=Traffic([Flow("gradient", "fp16", "memory", 40 * MIB, 80)], 60, 0.4, 0.1))
    assert [row[-1] for row in flow_rows(only)] == ["4.0 MiB", ""]
    assert [row[-1] for row in flow_rows(account(steps=0))] == ["", ""]


def test_what_was_sent_once_to_measure_is_not_per_step() -> None:
    flows = [Flow("gradient", "none", "memory", 100, 10), Flow("measurement", "none", "memory", 4000, 30)]
    told = account(total=Traffic(flows), since=Traffic(flows))
    assert told.figures()["bytes_per_step"] == 10 and told.figures()["bytes"] == 4100
    assert flow_rows(told) == [
        ("measurement", "none", "memory", "3.9 KiB", "30", ""),
        ("gradient", "none", "memory", "100 bytes", "10", "10 bytes"),
    ]


def test_a_long_table_is_cut_and_the_rest_added_up() -> None:
    flows = [Flow("gradient", f"c{number:03}", "memory", 1000 - number, 1) for number in range(MOST_ROWS + 3)]
    table = flow_rows(account(total=Traffic(flows), since=Traffic(flows)))
    assert len(table) == MOST_ROWS + 1
    assert table[-1] == ("others", "", "", "2.9 KiB", "3", "292 bytes")


def test_facts() -> None:
    assert exchange_facts(account()) == [
        ("operations", "3 per step, 30 per second"),
        ("exchange", "20 ms per step, 0.80 s over all workers"),
        ("exposed", "5.0 ms per step (5% of step time), 0.20 s over all workers"),
        ("bandwidth", "100 MiB/s while a worker exchanged, 6.0 GiB/s summed in the first steps"),
        ("latency", "11 µs for the smallest sum"),
        ("collective", "shared memory; all workers are on one host"),
        ("hosts", "1, with 2 workers"),
        ("buckets", "12 of 1.0 MiB to 4.0 MiB, 45.0 MiB in all"),
    ]


def test_what_is_not_known_is_left_out() -> None:
    assert exchange_facts(account(steps=0, workers=0, seconds=0.0, since=Traffic(), settled=None)) == [
        ("operations", "120"),
        ("exchange", "0.80 s over all workers"),
        ("exposed", "0.20 s over all workers"),
    ]
    names = [name for name, _ in exchange_facts(account(settled=settled(latency=0.0, buckets=[], hosts=[])))]
    assert names == ["operations", "exchange", "exposed", "bandwidth", "collective"]
    assert not Account() and account()


def test_where_no_group_sums_only_what_is_known_is_told() -> None:
    """With servers."""
    served = account(total=Traffic(), since=Traffic(), settled=None)
    assert exchange_facts(served) == [("exposed", "5.0 ms per step (5% of step time)")]
    assert exchange_words(served) == "5.0 ms per step exposed (5% of step time)"


def test_one_line() -> None:
    words = "shared memory, 12 buckets of up to 4.0 MiB, latency 11 µs, 6.0 GiB/s; all workers are on one host"
    assert settled_words(settled()) == words
    spread = settled(collective="hierarchical", hosts=[0, 0, 1, 1], buckets=[MIB], reason="", bandwidth=0.0)
    assert settled_words(spread) == "hierarchical on 2 hosts, 1 bucket of 1.0 MiB, latency 11 µs"
    odd = settled(collective="n\x1b[2Jew", reason="a\nb", latency=-1.0, bandwidth=float("nan"), buckets=[])
    assert settled_words(odd) == "new; a b"
    assert exchange_words(account()) == (
        "20 ms per step, 5.0 ms of it exposed (5% of step time) · 100 MiB/s · "
        "shared memory, 12 buckets of up to 4.0 MiB"
    )
    assert sent_words(account()) == "gradient 80.0 MiB (memory), control 40.0 KiB (loopback)"


def test_of_what_was_not_measured_only_the_choice_is_said() -> None:
    unmeasured = settled(latency=0.0, bandwidth=0.0, buckets=[], hosts=[0, 0, 1])
    told = account(settled=unmeasured)
    assert settled_words(unmeasured) == "shared memory on 2 hosts; all workers are on one host"
    assert exchange_words(told).endswith("100 MiB/s · shared memory on 2 hosts; all workers are on one host")
    assert exchange_facts(told)[3:] == [
        ("bandwidth", "100 MiB/s while a worker exchanged"),
        ("collective", "shared memory; all workers are on one host"),
        ("hosts", "2, with 1 to 2 workers each"),
    ]
    figures = told.figures()["settled"]
    assert isinstance(figures, dict)
    assert [figures[name] for name in ("latency", "bandwidth", "buckets")] == [None, None, None]
    assert (figures["collective"], figures["hosts"]) == ("shm", [0, 0, 1])


def test_a_codec_is_told_with_what_it_costs_and_saves() -> None:
    encoded = settled(codec="int8", encoding=0.0123, saved=0.04)
    assert settled_words(encoded).endswith("; codec int8, 12 ms per step to encode, saves 40 ms")
    assert exchange_words(account(settled=encoded)).endswith(
        "shared memory, 12 buckets of up to 4.0 MiB; codec int8, 12 ms per step to encode, saves 40 ms"
    )
    assert exchange_facts(account(settled=encoded))[-1] == ("codec", "int8, 12 ms per step to encode, saves 40 ms")
    figures = account(settled=encoded).figures()["settled"]
    assert isinstance(figures, dict)
    assert (figures["codec"], figures["encoding"], figures["saved"], figures["note"]) == ("int8", 0.0123, 0.04, None)


def test_a_codec_that_does_not_pay_is_told_plainly() -> None:
    note = "encode 9 ms, saves 3 ms at 8.6 Gbit/s: use none"
    encoded = settled(codec="int8", encoding=0.009, saved=0.003, note=note)
    for words in (settled_words(encoded), exchange_words(account(settled=encoded))):
        assert words.endswith(f"; codec int8: {note}")
    assert exchange_facts(account(settled=encoded))[-1] == ("codec", f"int8: {note}")


def test_why_nothing_is_encoded_is_told_where_it_was_tried() -> None:
    tried = settled(note="auto tried fp16\n\x1b[2Jand int8")
    assert settled_words(tried).endswith("all workers are on one host; codec none: auto tried fp16 and int8")
    assert exchange_facts(account(settled=tried))[-1] == ("codec", "none: auto tried fp16 and int8")
    assert "codec" not in settled_words(settled()) and "codec" not in dict(exchange_facts(account()))


def test_an_exchange_stored_before_there_were_codecs_is_read() -> None:
    data = msgspec.to_builtins(settled())
    new = ("type", "step", "time", "codec", "encoding", "saved", "note")
    row = EventRow(1.0, 3, "ExchangeSettled", {name: value for name, value in data.items() if name not in new})
    told = stored_account(info(), [], [row]).settled
    assert told is not None and (told.codec, told.encoding, told.saved, told.note) == ("none", 0.0, 0.0, "")


def test_what_is_not_listed_is_counted() -> None:
    flows = [Flow(f"k{number}", "none", "memory", 9 - number, 1) for number in range(5)]
    told = account(total=Traffic(flows))
    assert sent_words(told) == "k0 9 bytes (memory), k1 8 bytes (memory), k2 7 bytes (memory) and 2 more"
    assert sent_words(told, most=5).endswith("k4 5 bytes (memory)")


def test_hosts_and_buckets() -> None:
    assert [hosts(numbers) for numbers in ([], [0], [0, 0, 1, 1], [3, 3, 5])] == [
        "",
        "1, with 1 worker",
        "2, with 2 workers each",
        "2, with 1 to 2 workers each",
    ]
    assert [buckets(sizes) for sizes in ([], [MIB], [2 * MIB, 100])] == ["", "1.0 MiB", "2: 2.0 MiB, 100 bytes"]


def info(**changes: Any) -> RunInfo:
    texts = dict.fromkeys(("name", "script", "host", "user", "version"), "")
    numbers = dict.fromkeys(("batch_size", "total_steps", "steps_per_epoch", "samples_per_epoch", "resumes", "pid"), 0)
    nothing = dict.fromkeys(("ended", "loss", "run_dir", "git_commit", "git_dirty", "error", "traceback"))
    values: dict[str, Any] = {
        "id": "a", "status": "complete", "created": 1.0, "updated": 2.0, "workers": 2, "step": 14, "metrics": {},
        "seconds": 1.0, "command": [], "pid_started": 0.0, "config": {}, "environment": {}, "bytes_sent": 0, "tags": [],
    }  # fmt: skip
    return RunInfo(**(texts | numbers | nothing | values | changes))


def test_an_account_from_the_store_is_of_the_last_start() -> None:
    data = msgspec.to_builtins(settled())
    data = {name: value for name, value in data.items() if name not in ("type", "step", "time")}
    older = {**data, "collective": "gloo"}
    rows = [
        EventRow(1.0, 0, "RunStarted", {}),
        EventRow(2.0, 3, "ExchangeSettled", older),
        EventRow(3.0, 4, "RunStarted", {}),
        EventRow(4.0, 7, "ExchangeSettled", data),
    ]
    seconds = {"compute": 0.5, "exchange": 0.25, "data": 0.25, "idle": 99.0}
    sent = Traffic([Flow("gradient", "none", "memory", 50, 1)], 30, 0.2, 0.1)
    workers = [WorkerRow(number, 4, seconds, 50, 7, 3, "h", sent) for number in range(2)]
    told = stored_account(info(traffic=account().total), workers, rows)
    assert (told.steps, told.workers, told.seconds, told.waited, told.since.bytes) == (10, 2, 2.0, 0.5, 100)
    assert told.settled == msgspec.structs.replace(settled(), step=7, time=4.0)
    assert told.total == account().total
    assert stored_account(info(), workers, rows[:3]).settled is None, "the last start has not settled yet"
    assert stored_account(info(), [], [EventRow(1.0, 0, "ExchangeSettled", {"words": 1})]).settled is None
    assert not stored_account(info(), [], [])
