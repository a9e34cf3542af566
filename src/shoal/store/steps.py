"""Writing steps, and what was sent in them: the part of the store that a run writes most."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import chain
from typing import Any

import msgspec
from sqlalchemy import Connection

from shoal.core.events import AnyEvent, StepDone
from shoal.core.traffic import Flow, Traffic
from shoal.store.schema import for_sqlite, to_json

MOST_BREAKDOWNS = 1_000
"""Of one start that are written whenever they change."""
STEPS_PER_BREAKDOWN = 100
"""Beyond those, one more is written for so many steps, so that flows stay few beside steps."""
MOST_FLOWS = 100
"""Of one breakdown."""

STEP_COLUMNS = ("run", "step", "time", "epoch", "loss", "samples", "rate", "norm", "logs")
TRAFFIC_COLUMNS = ("bytes_sent", "messages", "operations", "exchange", "exposed")
_ALL_COLUMNS = (*STEP_COLUMNS, *TRAFFIC_COLUMNS)
FLOW_COLUMNS = ("run", "step", "kind", "codec", "link", "bytes", "messages")
_ROWS_AT_ONCE = 100


class Breakdowns(msgspec.Struct):
    """Says for which steps the flows are written: for the first, and for those that differ from what was written."""

    written: int = 0
    steps: int = 0
    held: list[Flow] | None = None
    """What was written last."""
    _summed: list[Flow] | None = None
    _bytes: int = 0
    _messages: int = 0

    def begin(self) -> None:
        """The run starts, or goes on from an earlier step: what was written last may be gone."""
        self.held = None

    def sums(self, traffic: Traffic) -> tuple[int, int]:
        """Bytes and messages. Most steps send what the one before sent: those need no adding up."""
        if traffic.flows != self._summed:
            self._summed, self._bytes, self._messages = traffic.flows, traffic.bytes, traffic.messages
        return self._bytes, self._messages

    def news(self, flows: list[Flow]) -> list[Flow]:
        """What is to be written for the next step: nothing if it is what holds already, or if enough was written.

        Where nothing is sent any more, flows of 0 bytes say so.
        """
        self.steps += 1
        if flows == self.held or self.written >= MOST_BREAKDOWNS + self.steps // STEPS_PER_BREAKDOWN:
            return []
        gone = [Flow(flow.kind, flow.codec, flow.link, 0, 0) for flow in self.held or []]
        self.held = flows
        self.written += bool(flows or gone)
        return (flows or gone)[:MOST_FLOWS]


def add_steps(connection: Connection, key: int, part: Iterable[AnyEvent], breakdowns: Breakdowns) -> None:
    """Straight to the driver, many rows in a statement: each statement may hand the interpreter lock over twice."""
    is_sqlite = connection.dialect.name == "sqlite"
    # By key: one statement must not meet the same row twice.
    steps: dict[int, tuple[Any, ...]] = {}
    alone: dict[int, tuple[Any, ...]] = {}  # apart: a column that is left out costs less than NULL in it
    flows: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for event in part:
        if not isinstance(event, StepDone):
            continue
        row, traffic = _step_row(key, event, is_sqlite), event.traffic
        if traffic is None:
            alone[event.step] = row
            continue
        steps[event.step] = *row, *breakdowns.sums(traffic), traffic.operations, traffic.exchange, traffic.exposed
        for flow in breakdowns.news(traffic.flows):
            place = key, event.step, flow.kind, flow.codec, flow.link
            flows[place] = *place, flow.bytes, flow.messages
    mark = "?" if is_sqlite else "%s"
    _insert(connection, "shoal_steps", STEP_COLUMNS, 2, list(alone.values()), mark)
    _insert(connection, "shoal_steps", _ALL_COLUMNS, 2, list(steps.values()), mark)
    _insert(connection, "shoal_flows", FLOW_COLUMNS, 5, list(flows.values()), mark)


def _step_row(key: int, event: StepDone, is_sqlite: bool) -> tuple[Any, ...]:
    loss, norm = float(event.loss), None if event.norm is None else float(event.norm)
    rate = float(event.rates[0]) if event.rates else None
    if is_sqlite:
        loss, rate, norm = for_sqlite(loss), for_sqlite(rate), for_sqlite(norm)
    logs = to_json(event.logs) if event.logs else None
    return key, event.step, event.time, event.epoch, loss, event.samples, rate, norm, logs


def _insert(
    connection: Connection, table: str, columns: tuple[str, ...], keys: int, rows: list[tuple[Any, ...]], mark: str
) -> None:
    """Add rows, or replace those of which the first `keys` columns are the same."""
    for low in range(0, len(rows), _ROWS_AT_ONCE):
        some = rows[low : low + _ROWS_AT_ONCE]
        statement = _sql(table, columns, keys, mark, len(some))
        connection.exec_driver_sql(statement, tuple(chain.from_iterable(some)))


@cache
def _sql(table: str, columns: tuple[str, ...], keys: int, mark: str, rows: int) -> str:
    row = f"({', '.join([mark] * len(columns))})"
    again = ", ".join(f"{name} = excluded.{name}" for name in columns[keys:])
    return (
        f"INSERT INTO {table} ({', '.join(columns)}) VALUES {', '.join([row] * rows)} "
        f"ON CONFLICT ({', '.join(columns[:keys])}) DO UPDATE SET {again}"
    )
