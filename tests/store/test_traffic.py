"""What was sent: by step, by worker and over a run, the same on every database."""

from __future__ import annotations

from itertools import groupby

import pytest

from shoal.core.errors import StoreError
from shoal.core.events import AnyEvent, ExchangeSettled, RunStarted, StepDone, WorkerSeen
from shoal.core.traffic import Flow, Traffic
from shoal.store import steps as step_rows
from shoal.store.steps import Breakdowns
from shoal.store.store import Store
from shoal.store.values import FlowRow, NewRun, RunEnd
from shoal.store.writing import RunWriter


def started(step: int = 0) -> RunStarted:
    shape = {"total_steps": 100, "steps_per_epoch": 10, "samples_per_epoch": 80, "batch_size": 8}
    return RunStarted(step=step, run_id="r1", run_dir=None, workers=2, **shape)


def gradients(size: int = 100) -> Flow:
    return Flow("gradient", "fp16", "memory", size, 4)


STATE = Flow("state", "none", "loopback", 30, 2)


def step(number: int, *flows: Flow) -> StepDone:
    traffic = Traffic(list(flows), operations=3, exchange=0.5, exposed=0.25)
    return StepDone(step=number, epoch=0, loss=1.0, samples=8, rates=[0.1], traffic=traffic)


def seen(worker: int, *flows: Flow) -> WorkerSeen:
    traffic = Traffic(list(flows), operations=3, exchange=0.5, exposed=0.25)
    return WorkerSeen(step=1, worker=worker, samples=4, seconds={"compute": 1.5}, traffic=traffic)


def writer_of(store: Store) -> RunWriter:
    writer = RunWriter(store, NewRun(id="r1", name="r1", created=1000.0, workers=2))
    writer.begin()
    return writer


def write(store: Store, *events: AnyEvent, end: RunEnd | None = None) -> RunWriter:
    writer = writer_of(store)
    writer.write(events, end)
    return writer


def by_step(store: Store) -> dict[int, list[Flow]]:
    return {
        number: [Flow(row.kind, row.codec, row.link, row.bytes, row.messages) for row in rows]
        for number, rows in groupby(store.flows("r1"), key=lambda row: row.step)
    }


class TestSteps:
    def test_a_step_has_what_worker_0_sent(self, store: Store) -> None:
        alone = StepDone(step=2, epoch=0, loss=1.0, samples=8, rates=[0.1])
        write(store, started(), step(1, gradients(), STATE), alone)
        first, second = store.steps("r1")
        assert (first.bytes_sent, first.messages, first.operations) == (130, 6, 3)
        assert (first.exchange, first.exposed) == (0.5, 0.25)
        assert (second.bytes_sent, second.messages, second.operations) == (None, None, None)
        assert (second.exchange, second.exposed, second.loss) == (None, None, 1.0)

    def test_a_breakdown_is_written_when_it_changes(self, store: Store) -> None:
        sent = [[gradients()], [gradients()], [gradients(), STATE], [gradients()], [gradients()]]
        write(store, started(), *(step(number, *flows) for number, flows in enumerate(sent, 1)))
        assert by_step(store) == {1: [gradients()], 3: [gradients(), STATE], 4: [gradients()]}
        assert store.flows("r1")[0] == FlowRow(1, "gradient", "fp16", "memory", 100, 4)

    def test_it_holds_over_writes(self, store: Store) -> None:
        writer = write(store, started(), step(1, gradients()))
        writer.write([step(2, gradients()), step(3, gradients(7))])
        assert by_step(store) == {1: [gradients()], 3: [gradients(7)]}
        assert [row.bytes_sent for row in store.steps("r1")] == [100, 100, 7]

    def test_a_start_in_between_takes_back_what_held(self, store: Store) -> None:
        writer = write(store, started(), step(1, gradients()), step(2, STATE))
        writer.write([started(1), step(2, STATE), step(3, STATE)])
        assert by_step(store) == {1: [gradients()], 2: [STATE]}

    def test_that_nothing_is_sent_any_more_is_said(self, store: Store) -> None:
        write(store, started(), step(1), step(2, gradients()), step(3), step(4))
        assert by_step(store) == {2: [gradients()], 3: [Flow("gradient", "fp16", "memory", 0, 0)]}

    def test_a_write_that_fails_leaves_no_trace(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        writer = write(store, started(), step(1, gradients()))
        with store.writing() as connection:
            connection.exec_driver_sql("ALTER TABLE shoal_events RENAME TO shoal_away")
        changed = [step(2, STATE), ExchangeSettled(step=2, **SETTLED)]
        with pytest.raises(StoreError):
            writer.write(changed)
        with store.writing() as connection:
            connection.exec_driver_sql("ALTER TABLE shoal_away RENAME TO shoal_events")
        writer.write(changed)
        assert by_step(store) == {1: [gradients()], 2: [STATE]}

    def test_a_run_that_changes_each_step_cannot_fill_the_store(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(step_rows, "MOST_BREAKDOWNS", 10)
        monkeypatch.setattr(step_rows, "STEPS_PER_BREAKDOWN", 20)
        write(store, started(), *(step(number, gradients(number)) for number in range(1, 101)))
        assert list(by_step(store)) == [*range(1, 11), 20, 40, 60, 80, 100]
        assert by_step(store)[40] == [gradients(40)]
        assert [row.bytes_sent for row in store.steps("r1")] == list(range(1, 101)), "the sums are there for every step"

    def test_a_breakdown_of_many_sorts_is_cut(self) -> None:
        many = [Flow("gradient", f"c{number}", "memory", 1, 1) for number in range(step_rows.MOST_FLOWS + 5)]
        assert len(Breakdowns().news(many)) == step_rows.MOST_FLOWS


class TestRuns:
    def test_workers_add_up(self, store: Store) -> None:
        write(store, started(), seen(0, gradients()), seen(1, gradients(), STATE), seen(1, gradients(200), STATE))
        total = store.traffic("r1")
        assert {(flow.kind, flow.bytes, flow.messages) for flow in total.flows} == {
            ("gradient", 300, 8),
            ("state", 30, 2),
        }
        assert (total.operations, total.exchange, total.exposed, total.bytes) == (6, 1.0, 0.5, 330)
        run = store.find("r1")
        assert run.traffic == total and run.bytes_sent == 330
        workers = store.workers("r1")
        assert workers[1].traffic == Traffic([gradients(200), STATE], 3, 0.5, 0.25) and workers[1].bytes_sent == 230

    def test_one_worker_has_none(self, store: Store) -> None:
        write(store, started(), StepDone(step=1, epoch=0, loss=1.0, samples=8, rates=[]), seen(0))
        assert store.traffic("r1") == Traffic() and store.flows("r1") == []
        assert store.workers("r1")[0].traffic == Traffic()
        with store.writing() as connection:
            assert connection.exec_driver_sql("SELECT traffic FROM shoal_runs").scalar() is None

    def test_a_resume_adds_up_and_takes_back_steps(self, store: Store) -> None:
        first = [step(number, gradients(number)) for number in range(1, 5)]
        end = RunEnd(status="failed", step=4, bytes_sent=110)
        write(
            store, started(), *first, seen(0, gradients()), seen(1, Flow("state", "none", "loopback", 10, 1)), end=end
        )
        resumed = [started(2), step(3, gradients(2)), seen(0, gradients(7))]
        writer = write(store, *resumed)
        assert by_step(store) == {1: [gradients(1)], 2: [gradients(2)], 3: [gradients(2)]}
        assert store.traffic("r1") == Traffic(
            [Flow("gradient", "fp16", "memory", 107, 8), Flow("state", "none", "loopback", 10, 1)], 9, 1.5, 0.75
        )
        assert store.find("r1").bytes_sent == store.traffic("r1").bytes == 117
        assert [worker.worker for worker in store.workers("r1")] == [0]
        writer.write([seen(0, gradients(8))])
        assert store.traffic("r1").bytes == 118, "what a worker tells replaces what it told"

    def test_a_removed_run_takes_its_flows_along(self, store: Store) -> None:
        write(store, started(), step(1, gradients()))
        store.remove("r1")
        with store.writing() as connection:
            assert connection.exec_driver_sql("SELECT count(*) FROM shoal_flows").scalar() == 0


SETTLED = {
    "collective": "shm",
    "reason": "all workers are on one host",
    "hosts": [0, 0],
    "latency": 1.1e-5,
    "bandwidth": 5.8e9,
    "buckets": [4_000_000, 100],
    "codec": "int8",
    "encoding": 0.009,
    "saved": 0.003,
    "note": "encode 9 ms, saves 3 ms at 8.6 Gbit/s: use none",
}


def test_how_workers_exchange_is_an_event(store: Store) -> None:
    write(store, started(), ExchangeSettled(step=3, time=50.0, **SETTLED))
    row = store.events("r1")[-1]
    assert (row.kind, row.step, row.time, row.data) == ("ExchangeSettled", 3, 50.0, SETTLED)
