"""What the store keeps and gives back: the same on every database."""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path

import msgspec
import pytest

from shoal.core.errors import ConfigError, RunNotFound, StoreError
from shoal.core.events import (
    AnyEvent,
    CheckpointSaved,
    EvalDone,
    Notice,
    RunEnded,
    RunFailed,
    RunStarted,
    ServerFacts,
    ServersSeen,
    StepDone,
    WorkerSeen,
)
from shoal.core.settings import Setting
from shoal.core.traffic import Flow, Traffic
from shoal.store import writing
from shoal.store.liveness import this_process
from shoal.store.store import Store
from shoal.store.values import NewRun, RunEnd
from shoal.store.writing import RunWriter

NAN, INF = math.nan, math.inf


def new_run(run_id: str = "r1", **changes: object) -> NewRun:
    here = this_process()
    values = {"name": "digits", "created": 1000.0, "workers": 2, "host": here.host, "pid": here.pid, "boot": here.boot}
    return NewRun(id=run_id, **{**values, "pid_started": here.started, **changes})


def started(step: int = 0, **changes: object) -> RunStarted:
    values = {"workers": 2, "total_steps": 100, "steps_per_epoch": 10, "samples_per_epoch": 80, "batch_size": 8}
    return RunStarted(**{"step": step, "run_id": "r1", "run_dir": None, **values, **changes})


def step(number: int, loss: float = 1.0, **changes: object) -> StepDone:
    values = {"epoch": number // 10, "samples": 8, "rates": [0.1, 0.2], "time": 2000.0 + number}
    return StepDone(step=number, loss=loss, **{**values, **changes})


def seen(worker: int, sent: int) -> WorkerSeen:
    traffic = Traffic([Flow("gradient", "none", "memory", sent, 1)])
    return WorkerSeen(step=1, worker=worker, samples=4, seconds={"compute": 1.5}, traffic=traffic, memory=7, pid=3)


def happened(*events: AnyEvent, at: float = 5000.0) -> list[AnyEvent]:
    """One second apart, but for steps, which have a time."""
    return [
        event if isinstance(event, StepDone) else msgspec.structs.replace(event, time=at + place)
        for place, event in enumerate(events)
    ]


def write(store: Store, new: NewRun, *events: AnyEvent, end: RunEnd | None = None) -> RunWriter:
    writer = RunWriter(store, new)
    writer.begin()
    writer.write(happened(*events), end)
    return writer


def same(given: float | None, wanted: float | None) -> bool:
    return given == wanted or (given is not None and wanted is not None and math.isnan(given) and math.isnan(wanted))


class TestWhatARunTold:
    def test_all_of_it_comes_back(self, store: Store) -> None:
        config = {
            "batch_size": Setting(8, "flag"),
            "clip": Setting(INF, "script"),
            "betas": Setting([0.9, 1], "default"),
        }
        new = new_run(
            run_dir="/runs/1",
            script="train.py",
            command=["train.py", "--rate", "\udce9"],
            user="ada",
            config=config,
            environment={"python": "3.11"},
            git_commit="abc",
            git_dirty=True,
            version="0.1",
        )
        before = time.time()
        saved = CheckpointSaved(step=2, path="/runs/1/2", best=True)
        told = [started(), step(1), step(2, 0.5), EvalDone(step=2, epoch=0, metrics={"accuracy": 0.75}), saved]
        write(store, new, *told, seen(0, 10), seen(1, 20), seen(1, 30), Notice(step=2, text="a\0b"))
        run = store.find("r1")
        assert (run.id, run.name, run.status, run.created, run.ended) == ("r1", "digits", "running", 1000.0, None)
        assert before <= run.updated <= time.time()
        assert (run.workers, run.batch_size, run.total_steps) == (2, 8, 100)
        assert (run.steps_per_epoch, run.samples_per_epoch) == (10, 80)
        assert (run.step, run.loss, run.metrics, run.seconds, run.resumes) == (2, 0.5, {"accuracy": 0.75}, 8.0, 0)
        assert (run.run_dir, run.script, run.command) == ("/runs/1", "train.py", ["train.py", "--rate", "\udce9"])
        assert (run.user, run.config, run.environment) == ("ada", config, {"python": "3.11"})
        assert (run.git_commit, run.git_dirty, run.version) == ("abc", True, "0.1")
        assert (run.error, run.traceback, run.bytes_sent, run.tags) == (None, None, 40, [])
        assert [row.step for row in store.steps("r1")] == [1, 2]
        first = store.steps("r1")[0]
        assert (first.time, first.epoch, first.loss, first.samples) == (2001.0, 0, 1.0, 8)
        assert (first.rate, first.norm, first.logs) == (0.1, None, {})
        kinds = [(row.kind, row.step) for row in store.events("r1")]
        assert kinds == [("RunStarted", 0), ("EvalDone", 2), ("CheckpointSaved", 2), ("Notice", 2)]
        assert store.events("r1")[-1].data == {"text": "a\0b", "quiet": False}
        assert "config" not in store.events("r1")[0].data
        (checkpoint,) = store.checkpoints("r1")
        assert (checkpoint.step, checkpoint.path, checkpoint.best) == (2, "/runs/1/2", True)
        workers = [(row.worker, row.samples, row.seconds, row.bytes_sent) for row in store.workers("r1")]
        assert workers == [(0, 4, {"compute": 1.5}, 10), (1, 4, {"compute": 1.5}, 30)]

    def test_of_servers_only_the_newest_is_kept(self, store: Store) -> None:
        def told(pushes: int) -> ServersSeen:
            facts = ServerFacts(number=0, shards=6, bytes=10, pushes=pushes)
            return ServersSeen(step=pushes, servers=[facts], staleness=[pushes, 1], replaced=1)

        def rows() -> list[tuple[int, int]]:
            kept = [row for row in store.events("r1") if row.kind == "ServersSeen"]
            return [(row.step, row.data["servers"][0]["pushes"]) for row in kept]

        writer = write(store, new_run(), started(), told(1), told(2), step(3), told(3))
        assert rows() == [(3, 3)]
        assert store.events("r1")[-1].data["staleness"] == [3, 1] and store.events("r1")[-1].data["replaced"] == 1
        writer.write(happened(step(4), told(4), told(4)))
        assert rows() == [(4, 4)]
        write(store, new_run("r2"), started(run_id="r2"), told(9))
        writer.write(happened(Notice(step=4, text="kept"), started(4), at=6000.0))
        assert rows() == [], "a new start has not told of its servers yet"
        assert [row.kind for row in store.events("r2")] == ["RunStarted", "ServersSeen"]
        assert [row.kind for row in store.events("r1")] == ["RunStarted", "Notice", "RunStarted"]

    def test_numbers_that_are_not_finite_survive(self, store: Store) -> None:
        values = [NAN, INF, -INF, 1e308, 5e-324, 0.1]
        steps = [step(place, value, norm=value, logs={"x": value}) for place, value in enumerate(values, 1)]
        write(store, new_run(), started(), *steps, step(7, NAN, norm=None, rates=[]))
        rows = store.steps("r1")
        for row, value in zip(rows, values, strict=False):
            assert same(row.loss, value) and same(row.norm, value) and same(row.logs["x"], value)
        assert rows[-1].norm is None and rows[-1].rate is None
        assert same(store.find("r1").loss, NAN)

    def test_many_steps_and_the_same_step_again(self, store: Store) -> None:
        writer = write(store, new_run(), started(), *(step(n) for n in range(1, 1234)))
        writer.write(happened(step(7, 3.0), step(8, 4.0), step(8, 5.0)))
        rows = store.steps("r1")
        assert [row.step for row in rows] == list(range(1, 1234))
        assert [row.loss for row in rows[5:9]] == [1.0, 3.0, 5.0, 1.0]

    def test_an_end_and_an_error(self, store: Store) -> None:
        trace = "x" * 200_000 + "\0\udce9 the cause"
        failed = RunFailed(step=1, error="boom", traceback=trace, worker=1)
        end = RunEnd(status="failed", step=1, error="bo\0om", traceback=trace, bytes_sent=5)
        write(store, new_run(), started(), step(1), failed, end=end)
        run = store.find("r1")
        assert (run.status, run.error, run.step, run.loss, run.bytes_sent) == ("failed", "bo\ufffdom", 1, 1.0, 5)
        assert run.traceback is not None and run.traceback.endswith("\ufffd? the cause")
        assert len(run.traceback) <= writing.LONGEST_TEXT and run.ended is not None
        assert len(store.events("r1")[-1].data["traceback"]) <= writing.LONGEST_TEXT

    def test_what_failed_may_be_written_again(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        writer = write(store, new_run(), started())
        told = happened(step(1), EvalDone(step=1, epoch=0, metrics={}), seen(0, 5), at=6000.0)

        def fail(*_: object) -> None:
            raise OSError("torn")

        with monkeypatch.context() as patch:
            patch.setattr(writing, "_add_workers", fail)
            with pytest.raises(OSError, match="torn"):
                writer.write(told)
        assert store.steps("r1") == [] and store.find("r1").step == 0
        writer.write(told)
        assert [row.step for row in store.steps("r1")] == [1]
        assert len(store.events("r1")) == 2 and store.find("r1").bytes_sent == 5


class TestAResumedRun:
    def test_steps_that_were_never_written_are_told_once(self, store: Store) -> None:
        write(store, new_run(), started(), *(step(n) for n in range(1, 4)))
        text = "steps 4–7 are not in the store: the run was killed before they were written"
        for _ in range(2):  # killed again before its first step
            write(store, new_run(), started(7))
        write(store, new_run(), started(7), step(8))
        told = [(row.kind, row.step) for row in store.events("r1")]
        again = ("RunStarted", 7)
        assert told == [("RunStarted", 0), again, ("Notice", 7), again, again], "behind the start that found it out"
        assert [row.data for row in store.events("r1") if row.kind == "Notice"] == [{"text": text, "quiet": False}]

    def test_one_step_and_all_steps_may_be_missing(self, store: Store) -> None:
        write(store, new_run(), started(), step(1))
        write(store, new_run(), started(2))
        write(store, new_run("r2"), started(run_id="r2"))
        write(store, new_run("r2"), started(5, run_id="r2"))
        words = [row.data["text"] for run in ("r1", "r2") for row in store.events(run) if row.kind == "Notice"]
        assert [word.partition(":")[0] for word in words] == [
            "step 2 is not in the store",
            "steps 1–5 are not in the store",
        ]

    def test_no_step_is_missed_where_none_is_missing(self, store: Store) -> None:
        write(store, new_run(), started(), *(step(n) for n in range(1, 6)))
        write(store, new_run(), started(3), step(4), step(5))
        write(store, new_run(), started(5), step(6))
        write(store, new_run("r2"), started(5, run_id="r2"), step(6))  # of which this store knew nothing before
        assert not [row for run in ("r1", "r2") for row in store.events(run) if row.kind == "Notice"]

    def test_goes_on_where_it_was(self, store: Store) -> None:
        evals = [EvalDone(step=at, epoch=0, metrics={"a": float(at)}) for at in (3, 5)]
        first = RunEnd(status="failed", step=5, error="boom", traceback="tb")
        write(store, new_run(), started(), *(step(n) for n in range(1, 6)), *evals, seen(0, 9), seen(1, 9), end=first)
        store.tag("r1", ["keep"])
        before = store.find("r1")
        writer = RunWriter(store, new_run(created=9999.0, workers=1, config={"workers": Setting(1, "flag")}))
        writer.begin()
        resumed = store.find("r1")
        assert (resumed.status, resumed.error, resumed.traceback, resumed.ended) == ("running", None, None, None)
        assert (resumed.resumes, resumed.created, resumed.tags) == (1, 1000.0, ["keep"])
        assert resumed.config == {"workers": Setting(1, "flag")}
        assert len(store.steps("r1")) == 5, "nothing is taken back before it is known where the run goes on"
        writer.write(happened(started(3, workers=1), step(4, 7.0), seen(0, 2), at=8000.0))
        run = store.find("r1")
        assert [(row.step, row.loss) for row in store.steps("r1")] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 7.0)]
        assert [row.step for row in store.events("r1") if row.kind == "EvalDone"] == [3]
        assert (run.step, run.workers, run.loss) == (4, 1, 7.0)
        assert [(row.worker, row.bytes_sent) for row in store.workers("r1")] == [(0, 2)]
        assert run.seconds == before.seconds + 2.0 and run.bytes_sent == 18 + 2

    def test_a_start_between_steps_takes_back_only_those_before_it(self, store: Store) -> None:
        write(store, new_run(), started(), step(1), step(2, 2.0), started(1), step(2, 3.0))
        assert [(row.step, row.loss) for row in store.steps("r1")] == [(1, 1.0), (2, 3.0)]

    def test_ended_without_another_step(self, store: Store) -> None:
        write(store, new_run(), started(), step(1, 0.25), end=RunEnd(status="interrupted", step=1))
        end = RunEnded(step=1, loss=0.5, metrics={"a": 1.0}, reason="complete")
        write(store, new_run(), started(1), end, end=RunEnd(status="complete", step=1))
        run = store.find("r1")
        assert (run.status, run.step, run.loss, run.metrics) == ("complete", 1, 0.5, {"a": 1.0})


class TestLists:
    @pytest.fixture
    def store(self, store: Store) -> Store:
        for number, (name, status) in enumerate([("a", "complete"), ("b", "failed"), ("a", "complete")], 1):
            write(store, new_run(f"run{number}", name=name, created=float(number)), end=RunEnd(status=status))
        write(store, new_run("gone", name="c", created=4.0, pid=2**22 + 1))
        write(store, new_run("alive", name="c", created=5.0))
        far = write(store, new_run("far", name="d", created=0.5, host="elsewhere.example"))
        with store.writing() as connection:
            connection.exec_driver_sql(f"UPDATE shoal_runs SET updated = 100 WHERE key = {far.key}")
        store.tag("run1", ["good", "best"])
        store.tag("run2", ["good"])
        return store

    def test_newest_first_and_chosen(self, store: Store) -> None:
        def ids(**chosen: object) -> list[str]:
            return [run.id for run in store.runs(**chosen)]

        assert ids() == ["alive", "gone", "run3", "run2", "run1", "far"]
        assert ids(limit=2) == ["alive", "gone"] and ids(limit=0) == []
        assert ids(name="a") == ["run3", "run1"] and ids(name="A") == []
        assert ids(tag="good") == ["run2", "run1"] and ids(tag="none") == []
        assert ids(tag="good", status="failed") == ["run2"]
        assert ids(status="running") == ["alive"] and ids(status="killed") == ["gone"] and ids(status="lost") == ["far"]
        assert ids(status="complete", limit=1) == ["run3"] and ids(status="lost", limit=1) == ["far"]
        assert [run.tags for run in store.runs(tag="good")] == [["good"], ["best", "good"]]

    def test_found(self, store: Store) -> None:
        by = {"run1": "run1", "last": "alive", "al": "alive", "g": "gone", "b": "run2", "best": "run1"}
        assert {ref: store.find(ref).id for ref in by} == by

    def test_an_id_is_preferred_and_last_may_be_one(self, store: Store) -> None:
        write(store, new_run("run", name="x", created=0.1))
        write(store, new_run("last", name="x", created=0.1))
        assert store.find("run").id == "run" and store.find("last").id == "last"

    def test_all_that_it_can_mean_is_one_run(self, store: Store) -> None:
        write(store, new_run("solo-1", name="solo", created=0.1))
        store.tag("solo-1", ["so", "solo"])
        assert store.find("solo").id == store.find("so").id == "solo-1"

    @pytest.mark.parametrize("named", [True, False])
    def test_a_name_or_tag_and_the_beginning_of_another_id_compete(self, store: Store, named: bool) -> None:
        write(store, new_run("best-model-1", name="best-model", created=6.0))
        if named:
            write(store, new_run("x-1", name="best", created=7.0))
        with pytest.raises(RunNotFound) as raised:
            store.find("best")
        lines = str(raised.value).splitlines()
        assert f"means {3 if named else 2} runs" in lines[0]
        why = {line.split()[0]: line.rpartition("  ")[2] for line in lines[1:]}
        assert why.pop("x-1", None) == ("by name" if named else None)
        assert why == {"best-model-1": "by the beginning of its id", "run1": "by tag"}

    def test_every_reason_is_told(self, store: Store) -> None:
        for number in (1, 2):
            write(store, new_run(f"twin-{number}", name="twin", created=float(number)))
        store.tag("twin-1", ["twin"])
        with pytest.raises(RunNotFound) as raised:
            store.find("twin")
        assert "by name, by tag, by the beginning of its id" in str(raised.value)
        assert "  by name, by the beginning of its id" in str(raised.value)

    def test_several(self, store: Store) -> None:
        with pytest.raises(RunNotFound) as raised:
            store.find("run")
        told = str(raised.value)
        assert "3 runs" in told and all(run in told for run in ("run1", "run2", "run3")) and "failed" in told
        assert told.index("run3") < told.index("run1")
        for ref in ("c", "good"):
            with pytest.raises(RunNotFound, match="2 runs"):
                store.find(ref)

    def test_none(self, store: Store) -> None:
        with pytest.raises(RunNotFound, match=r"Near it: .*alive"):
            store.find("alife")
        for strange in ("%", "_un1", "", "'; --", "RUN1", "zzz"):
            with pytest.raises(RunNotFound, match="no run with the id"):
                store.find(strange)


class TestChoosingSteps:
    def test_evenly(self, store: Store) -> None:
        for count in (0, 3, 10, 11, 1000):
            run = f"{count} steps"
            write(store, new_run(run), started(), *(step(n) for n in range(1, count + 1)))
            for most in (1, 7, 10):
                chosen = [row.step for row in store.steps(run, most=most)]
                assert len(chosen) == min(count, most) and chosen == sorted(set(chosen))
                assert chosen[-1:] == ([count] if count else [])
                if 1 < most < count:
                    assert chosen[0] == 1
                    gaps = [high - low for low, high in itertools.pairwise(chosen)]
                    assert max(gaps) - min(gaps) <= 1

    def test_where_most_are_missing(self, store: Store) -> None:
        write(store, new_run(), started(), *(step(n * n * 1000) for n in range(1, 101)))
        chosen = [row.step for row in store.steps("r1", most=10)]
        assert len(chosen) == 10 and chosen[0] == 1000 and chosen[-1] == 10_000_000

    def test_none_is_no_number(self, store: Store) -> None:
        write(store, new_run())
        with pytest.raises(ConfigError, match="most=0"):
            store.steps("r1", most=0)


class TestChanges:
    def test_tags(self, store: Store) -> None:
        write(store, new_run())
        assert store.tag("r1", ["b", " a "]) == ["a", "b"]
        assert store.tag("r1", ["b", "é x"], remove=["a", "absent"]) == ["b", "é x"]
        assert store.find("r1").tags == store.tag("r1") == ["b", "é x"]

    def test_what_cannot_be_a_tag(self, store: Store) -> None:
        write(store, new_run())
        for tag in ("", " ", "a,b", "x" * 65, "a\nb", "a\0", "last", " last "):
            with pytest.raises(ConfigError, match="cannot be a tag"):
                store.tag("r1", ["fine", tag])
        assert store.find("r1").tags == []

    def test_removed(self, store: Store) -> None:
        told = [started(), step(1), seen(0, 1), CheckpointSaved(step=1, path="/x", best=False)]
        gone = write(store, new_run(), *told)
        write(store, new_run("r2"), *told)
        store.tag("r1", ["x"])
        store.remove("r1")
        assert [run.id for run in store.runs()] == ["r2"] and len(store.steps("r2")) == 1
        with store.writing() as connection:
            for table in ("steps", "events", "checkpoints", "workers", "tags"):
                query = f"SELECT count(*) FROM shoal_{table} WHERE run = {gone.key}"
                assert connection.exec_driver_sql(query).scalar() == 0, table
        store.remove("r2")
        assert write(store, new_run("r3")).key > gone.key, "a key is never used again"
        with pytest.raises(StoreError, match="r1 was removed"):
            gone.write(happened(step(2)))

    def test_a_removal_holds_only_if_what_is_done_meanwhile_succeeds(self, store: Store) -> None:
        write(store, new_run(), started(), step(1))
        with pytest.raises(OSError), store.removing("r1"):
            raise OSError
        assert len(store.steps("r1")) == 1
        with store.removing("r1"):
            pass
        assert store.runs() == []
        with pytest.raises(RunNotFound, match="'r1'"), store.removing("r1"):
            raise AssertionError("there is nothing to remove")

    def test_of_a_run_that_is_not_there(self, store: Store) -> None:
        for action in (store.remove, store.tag, store.steps, store.events, store.checkpoints, store.workers):
            with pytest.raises(RunNotFound, match="'no'"):
                action("no")


def test_without_create_nothing_is_made(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'shoal.db'}", create=False) as store:
        assert store.runs() == []
        with pytest.raises(RunNotFound, match="no runs yet"):
            store.find("last")
    assert list(tmp_path.iterdir()) == []


def test_without_create_an_empty_database_stays_empty(url: str, database: str | None) -> None:
    with Store.open(url, create=False) as store:
        assert store.runs() == []
    if database is not None:
        import psycopg

        with psycopg.connect(url.replace("postgresql+psycopg", "postgresql")) as connection:
            assert connection.execute("SELECT to_regclass('shoal_meta')").fetchone() == (None,)
