"""The display for machines: every event as a line of valid JSON."""

from __future__ import annotations

import io
import json
import math
import time
from pathlib import PurePosixPath
from typing import Any

import msgspec
import pytest

from shoal.core.events import (
    EvalDone,
    ExchangeSettled,
    Notice,
    RunEnded,
    RunStarted,
    ServerFacts,
    ServersSeen,
    StepDone,
)
from shoal.core.traffic import Flow, Traffic
from shoal.monitor.display.display import Display


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def step_done(step: int, loss: float = 0.5) -> StepDone:
    return StepDone(step=step, epoch=0, loss=loss, samples=8, rates=[0.1], time=1700000000.5)


def refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is no JSON")


def parsed(text: str) -> list[dict[str, Any]]:
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_every_event_with_all_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display("json")
    config = {"batch_size": 8, "where": PurePosixPath("a/b"), "scale": math.nan}
    display(
        RunStarted(
            step=0,
            run_id="r\udc80",
            config=config,
            run_dir=None,
            workers=1,
            total_steps=3,
            steps_per_epoch=3,
            samples_per_epoch=24,
        )
    )
    for step in range(1, 4):
        display(step_done(step))
    display(RunEnded(step=3, loss=0.5, metrics={"accuracy": 1.0}, reason="complete"))
    display.close()
    out, err = capsys.readouterr()
    lines = parsed(out)
    assert err == ""
    assert [line["event"] for line in lines] == ["run_started", *["step_done"] * 3, "run_ended"]
    assert abs(lines[0]["time"] - time.time()) < 60
    assert lines[0]["config"] == {"batch_size": 8, "where": "a/b", "scale": None}
    assert lines[0]["run_id"] == "r?"
    assert lines[1] == {
        "event": "step_done",
        "time": 1700000000.5,
        "step": 1,
        "epoch": 0,
        "loss": 0.5,
        "samples": 8,
        "rates": [0.1],
        "norm": None,
        "logs": {},
        "traffic": None,
    }


def test_traffic_and_how_it_is_exchanged() -> None:
    stream = io.StringIO()
    display = Display("json", stream=stream)
    sent = Traffic([Flow("gradient", "none", "memory", 10, 2)], operations=1, exchange=0.5, exposed=0.25)
    display(msgspec.structs.replace(step_done(1), traffic=sent))
    shape = {"hosts": [0, 0], "latency": math.inf, "bandwidth": 5e9, "buckets": [10, 4]}
    display(ExchangeSettled(step=1, time=3.0, collective="shm", reason="one host\udc80", **shape))
    display.close()
    step, settled = parsed(stream.getvalue())
    flow = {"kind": "gradient", "codec": "none", "link": "memory", "bytes": 10, "messages": 2}
    assert step["traffic"] == {"flows": [flow], "operations": 1, "exchange": 0.5, "exposed": 0.25}
    assert settled == {
        "event": "exchange_settled", "time": 3.0, "step": 1, "collective": "shm", "reason": "one host?",
        **shape, "latency": None, "codec": "none", "encoding": 0.0, "saved": 0.0, "note": "",
    }  # fmt: skip


def test_servers_with_all_their_fields() -> None:
    stream = io.StringIO()
    display = Display("json", stream=stream)
    display(ServersSeen(step=4, time=3.0, servers=[ServerFacts(number=1, shards=2, bytes=3)], staleness=[5, 6]))
    display.close()
    (told,) = parsed(stream.getvalue())
    server = {
        "number": 1, "shards": 2, "bytes": 3, "mirrored": 0, "pushes": 0, "repeated": 0, "received": 0, "sent": 0,
        "seconds": 0.0, "pid": 0, "host": "",
    }  # fmt: skip
    assert told == {
        "event": "servers_seen", "time": 3.0, "step": 4, "servers": [server], "staleness": [5, 6], "replaced": 0,
    }  # fmt: skip


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null(value: float) -> None:
    stream = io.StringIO()
    display = Display("json", stream=stream)
    display(step_done(1, loss=value))
    display(EvalDone(step=1, epoch=0, metrics={"loss": value}))
    display.close()
    first, second = parsed(stream.getvalue())
    assert (first["loss"], second["metrics"]) == (None, {"loss": None})


def test_steps_are_written_within_a_fifth_of_a_second() -> None:
    clock, stream = Clock(), io.StringIO()
    display = Display("json", stream=stream, clock=clock)
    display(step_done(1))
    display.tick()
    assert stream.getvalue() == ""
    clock.now += 0.2
    display.tick()
    assert len(parsed(stream.getvalue())) == 1
    display(step_done(2))
    clock.now += 0.2
    display(step_done(3))
    assert len(parsed(stream.getvalue())) == 3


def test_few_lines_are_held_however_fast_steps_are() -> None:
    stream = io.StringIO()
    display = Display("json", stream=stream, clock=Clock())
    for step in range(2500):
        display(step_done(step))
    assert len(parsed(stream.getvalue())) == 2000


def test_warnings_and_output_in_order_and_each_time() -> None:
    stream = io.StringIO()
    display = Display("json", stream=stream, clock=Clock())
    display(step_done(7))
    display.warn("shoal: slow")
    display.warn("slow")
    display(Notice(step=8, text="slow"))
    display.output(3, "err", "half \udc80\nsecond\n")
    display.close()
    step, *notices, output = parsed(stream.getvalue())
    assert step["step"] == 7
    assert [(line["event"], line["step"], line["text"]) for line in notices] == [
        ("notice", 7, "slow"),
        ("notice", 7, "slow"),
        ("notice", 8, "slow"),
    ]
    del output["time"]
    assert output == {"event": "output", "worker": 3, "stream": "err", "text": "half ?\nsecond\n"}
