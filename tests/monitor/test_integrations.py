"""TensorBoard, MLflow and W&B: what a training leaves there, and that their trouble is not the run's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal import Result, Trainer
from shoal.core.errors import ConfigError
from shoal.core.events import EvalDone, Notice, RunEnded, RunFailed, RunStarted, StepDone, WorkerSeen
from shoal.core.traffic import Flow, Traffic
from shoal.monitor import figures, mlflow, tracking
from shoal.monitor.figures import Figures, Point, facts
from shoal.monitor.mlflow import MLflow
from shoal.monitor.tensorboard import TensorBoard
from shoal.monitor.tracking import Ending, Text, Tracker
from shoal.monitor.wandb import WandB

STEPS = 16
NAMES = ("TensorBoard", "MLflow", "W&B")


def train(*callbacks: Any) -> Result:
    torch.manual_seed(0)
    inputs = torch.randn(64, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))

    def loss(model: nn.Module, batch: Any) -> Any:
        error = nn.functional.mse_loss(model(batch[0]), batch[1])
        return {"loss": error, "twice": 2 * error.detach()}

    return Trainer(
        nn.Linear(4, 1),
        loss,
        lambda params: torch.optim.SGD(params, lr=0.1),
        data,
        eval_data=data,
        batch_size=8,
        steps=STEPS,
        workers=2,
        clip=1.0,
        callbacks=callbacks,
    ).fit()


def started(run: str = "digits-1", *, step: int = 0, run_dir: str | None = None, **config: Any) -> RunStarted:
    return RunStarted(
        step=step,
        run_id=run,
        name="digits",
        config=config,
        run_dir=run_dir,
        workers=2,
        total_steps=500,
        steps_per_epoch=10,
        samples_per_epoch=320,
        batch_size=32,
    )


def done(step: int, when: float = 0.0, loss: float = 0.5, **logs: float) -> StepDone:
    when = when or 1000.0 + step
    return StepDone(step=step, epoch=0, loss=loss, samples=32, rates=[0.01, 0.1], norm=2.0, logs=logs, time=when)


def seen(worker: int, step: int = 1, compute: float = 3.0) -> WorkerSeen:
    seconds = {"compute": compute, "idle": 1.0}
    sent = Traffic([Flow("gradient", "none", "memory", 9, 1)])
    return WorkerSeen(step=step, worker=worker, samples=32, seconds=seconds, traffic=sent, memory=77)


def a_short_run(listener: Callable[[Any], None], ending: Any = None, run: str = "digits-1", step: int = 0) -> None:
    """The events of a run of three steps, with everything that is logged."""
    listener(started(run, step=step, seed=3, sync={"kind": "allreduce"}, note="naïve"))
    for number in range(step + 1, step + 4):
        listener(done(number, loss=1 / number, kl=0.25))
    listener(seen(1, step=step + 2))
    listener(EvalDone(step=step + 3, epoch=0, metrics={"accuracy": 0.75}))
    listener(Notice(step=step + 3, text="something to know"))
    listener(ending or RunEnded(step=step + 3, loss=0.5, metrics={}, reason="complete"))


# -- figures -----------------------------------------------------------------------------------------------------------


def test_the_first_steps_are_logged_one_by_one_and_later_ones_as_means() -> None:
    taken = Figures()
    first = [point for step in range(1, 101) for point in taken.take(done(step, when=50 + step / 1e6))]
    assert [point.step for point in first] == list(range(1, 101))
    later = [taken.take(done(step, when=51 + 0.03 * (step - 101), loss=step)) for step in range(101, 110)]
    assert [[point.step for point in points] for points in later] == [[101], [], [], [], [105], [], [], [], [109]]
    assert later[4][0].values["train/loss"] == (102 + 103 + 104 + 105) / 4
    assert later[4][0].time == pytest.approx(51.12)


def test_what_is_held_back_comes_at_the_end() -> None:
    taken = Figures()
    for step in range(1, 101):
        taken.take(done(step, when=50.0))
    assert taken.take(done(101, when=50.0, loss=3.0)) == taken.take(done(102, when=50.01, loss=5.0)) == []
    assert len(taken.take(seen(0))) == 1
    assert taken.take(seen(0, step=9, compute=9.0)) == []
    speed, step, worker = taken.rest()
    assert speed.values["train/samples_per_second"] == pytest.approx(101 * 32 / 0.01)
    assert (step.step, step.values["train/loss"]) == (102, 4.0)
    assert (worker.step, worker.values["worker-0/compute"]) == (9, 0.9)
    assert taken.rest() == []


def test_speed_is_averaged_over_a_second() -> None:
    taken = Figures()
    points = [point for step in range(1, 22) for point in taken.take(done(step, when=10 + 0.1 * step))]
    speeds = [
        point.values["train/samples_per_second"] for point in points if "train/samples_per_second" in point.values
    ]
    assert speeds == pytest.approx([320.0, 320.0], rel=0.15)


def test_a_clock_set_back_does_not_silence_a_run() -> None:
    taken = Figures()
    for step in range(1, 102):
        taken.take(done(step, when=1000.0 + step))
    assert [point.step for point in taken.take(done(102, when=500.0))] == [102]


def test_points_have_the_time_at_which_their_event_happened() -> None:
    taken = Figures()
    (point,) = taken.take(done(1, when=42.0))
    assert point.time == 42.0 and point.values["train/loss"] == 0.5
    (point,) = taken.take(EvalDone(step=1, time=43.0, epoch=0, metrics={"accuracy": 0.5}))
    assert point.time == 43.0
    (point,) = taken.take(WorkerSeen(step=1, time=44.0, worker=0, samples=1, seconds={"compute": 1.0}))
    assert point.time == 44.0


def test_what_exchange_took_is_averaged_as_the_loss_is() -> None:
    taken = Figures()
    for step in range(1, 101):
        taken.take(done(step, when=50.0))
    for step, exposed in ((101, 0.1), (102, 0.3)):
        sent = Traffic(operations=1, exchange=2 * exposed, exposed=exposed)
        taken.take(msgspec.structs.replace(done(step, when=50.0), traffic=sent))
    (point,) = [point for point in taken.rest() if "train/loss" in point.values]
    assert point.values["train/exposed_seconds"] == pytest.approx(0.2)
    assert point.values["train/exchange_seconds"] == pytest.approx(0.4)
    (alone,) = Figures().take(done(1))
    assert "train/exposed_seconds" not in alone.values


def test_a_step_costs_microseconds() -> None:
    taken = Figures()
    steps = [done(step, when=step / 1000) for step in range(1, 20_001)]
    begun = time.perf_counter()
    points = sum(len(taken.take(step)) for step in steps)
    each = (time.perf_counter() - begun) / len(steps)
    assert points <= 100 + 20 / figures.STEP_SECONDS + 1
    assert each < 100e-6, f"{each * 1e6:.1f} µs for a step"


def test_config_is_flat_and_has_what_every_run_has() -> None:
    found = facts(started(sync={"kind": "allreduce", "deep": {"a": 1}}, empty={}))
    assert found["sync.kind"] == "allreduce" and found["sync.deep.a"] == 1 and found["empty"] == {}
    assert found["workers"] == 2 and found["run_id"] == "digits-1"


# -- trackers, with a service made up here -----------------------------------------------------------------------------


class Fake(Tracker):
    """Keeps what it is given; fails where it is told to."""

    label = "Fake"

    def __init__(self, fails: str = "", stuck: threading.Event | None = None) -> None:
        super().__init__()
        self.fails = fails
        self.stuck = stuck
        self.runs: list[str] = []
        self.points: list[Point] = []
        self.texts: list[Text] = []
        self.endings: list[Ending] = []
        self.said: list[str] = []
        self.warn = self.said.append

    def begin(self, started: RunStarted) -> Fake:
        self._do("open")
        self.runs.append(started.run_id)
        return self

    def log(self, points: Sequence[Point]) -> None:
        self._do("log")
        self.points += points

    def write(self, text: Text) -> None:
        self._do("write")
        self.texts.append(text)

    def finish(self, ending: Ending) -> None:
        self.endings.append(ending)
        self._do("finish")

    def _do(self, what: str) -> None:
        assert threading.current_thread() is not threading.main_thread()
        if what == self.fails:
            raise OSError(f"no {what}\nat http://me:secret@example.org/x")
        if self.stuck is not None:
            assert self.stuck.wait(20)


def test_a_run_reaches_the_record() -> None:
    fake = Fake()
    a_short_run(fake)
    assert fake.runs == ["digits-1"] and fake.said == []
    assert [point.step for point in fake.points if "train/loss" in point.values] == [1, 2, 3]
    assert fake.points[2].values["train/loss"] == 1 / 3 and fake.points[2].values["train/kl"] == 0.25
    assert [point.values for point in fake.points if point.step == 3][1:] == [{"eval/accuracy": 0.75}]
    assert [text.text for text in fake.texts] == ["something to know"]
    assert [(end.step, end.failed, end.reason) for end in fake.endings] == [(3, False, "complete")]


def test_several_runs_and_ends() -> None:
    fake = Fake()
    fake(Notice(step=0, text="before any run"))
    a_short_run(fake, RunFailed(step=3, error="worker 1 raised"))
    a_short_run(fake, run="second")
    fake(started("third"))
    fake(started("fourth"))
    fake.close()
    fake.close()
    assert fake.runs == ["digits-1", "second", "third", "fourth"]
    assert [(end.failed, end.reason) for end in fake.endings] == [
        (True, "worker 1 raised"),
        (False, "complete"),
        (True, "the end of the run was not told"),
        (True, "the end of the run was not told"),
    ]


@pytest.mark.parametrize("fails", ["open", "log", "write", "finish"])
def test_an_error_of_the_service_is_told_once_and_ends_nothing(fails: str) -> None:
    fake = Fake(fails)
    a_short_run(fake)
    fake.close()
    assert fake.said == [f"Fake: no {fails} at http://…@example.org/x; the run goes on without it"]
    assert len(fake.endings) == (0 if fails == "open" else 2 if fails == "finish" else 1), "what it holds is given back"
    a_short_run(fake, run="next")
    assert len(fake.said) == 2, "told again for the next run"


def test_an_error_in_the_middle_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "SEND_SECONDS", 0.01)
    fake, told = Fake("log"), threading.Event()
    fake.warn = lambda text: told.set()
    fake(started())
    fake(done(1))
    assert told.wait(10)
    for step in range(2, 1000):
        fake(done(step))
    fake.close()
    assert fake.points == []


def test_a_slow_service_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "MOST_WAITING", 50)
    fake = Fake(stuck=threading.Event())
    assert fake.stuck is not None
    fake.patience = 0.05
    begun = time.monotonic()
    a_short_run(fake)
    assert time.monotonic() - begun < 2
    assert fake.said == ["Fake: not everything was delivered within 0.05 s; the run goes on without it"]
    fake.stuck.set()
    fake.patience = 10.0
    fake.stuck = threading.Event()
    fake(started("second"))
    for step in range(1, 61):
        fake(done(step))
    fake.stuck.set()
    fake.close()
    assert fake.said[1:] == ["Fake: it was too slow; 10 points were left out"]


def test_what_is_said_goes_to_stderr_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    fake = Fake("open")
    fake.warn = tracking.print_line
    a_short_run(fake)
    assert capsys.readouterr().err.startswith("shoal: Fake: no open at ")


def test_where_a_run_is_to_be_seen_is_said_once_and_not_as_a_warning() -> None:
    fake, told = Fake(), []
    fake.say = told.append
    fake.where = "Fake run at http://example.org/1"
    a_short_run(fake)
    assert told == [fake.where] and fake.said == []
    a_short_run(fake, run="second")
    assert told == [fake.where] * 2
    a_short_run(Fake("open"))
    failing = Fake("open")
    failing.say = told.append
    a_short_run(failing)
    assert len(told) == 2, "a record that could not be opened is nowhere"


def test_tensorboard_says_its_folder_as_one_would_type_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told: list[str] = []
    for listener, run_dir in ((TensorBoard("tb"), None), (TensorBoard(), str(tmp_path / "my run"))):
        listener.say = told.append
        listener(started(run_dir=run_dir))
        listener.close()
    assert told == [
        "TensorBoard files in tb; look at them with: tensorboard --logdir tb",
        "TensorBoard files in 'my run/tensorboard'; look at them with: tensorboard --logdir 'my run/tensorboard'",
    ]


def test_where_an_mlflow_run_is_to_be_seen() -> None:
    assert mlflow._where("http://me:secret@127.0.0.1:5000/", "3", "ab") == (
        "MLflow run at http://…@127.0.0.1:5000/#/experiments/3/runs/ab"
    )


def test_no_thread_before_a_run() -> None:
    before = threading.active_count()
    fake = Fake()
    fake(Notice(step=0, text="x"))
    assert threading.active_count() == before
    with fake:
        fake(started())
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("make", "package", "extra"),
    [(TensorBoard, "tensorboard", "tensorboard"), (MLflow, "mlflow", "mlflow"), (WandB, "wandb", "wandb")],
)
def test_a_missing_package_is_named(
    make: Callable[[], Any], package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Hidden(package), *sys.meta_path])
    with pytest.raises(ConfigError, match=rf"{extra} needs the package {package}.*pip install 'shoal\[{extra}\]'"):
        make()


class _Hidden:
    """Finds no module of one package."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.split(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=self.package)


# -- TensorBoard -------------------------------------------------------------------------------------------------------


def read_back(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def text_of(accumulator: Any, tag: str) -> list[str]:
    return [event.tensor_proto.string_val[0].decode() for event in accumulator.Tensors(f"{tag}/text_summary")]


def check_tensorboard(folder: Path, result: Result) -> None:
    assert [path.name for path in folder.iterdir()] == [result.run_id]
    found = read_back(folder / result.run_id)
    losses = found.Scalars("train/loss")
    assert [event.step for event in losses] == list(range(1, STEPS + 1))
    assert losses[-1].value < losses[0].value / 2
    assert [event.value for event in found.Scalars("train/twice")] == pytest.approx([2 * e.value for e in losses])
    assert [event.value for event in found.Scalars("train/learning_rate")] == pytest.approx([0.1] * STEPS)
    assert all(event.value > 0 for event in found.Scalars("train/norm"))
    assert found.Scalars("train/samples_per_second")[-1].value > 0
    assert [event.step for event in found.Scalars("eval/loss")] == [8, 16]
    assert abs(losses[-1].wall_time - time.time()) < 60
    assert text_of(found, "status") == ["finished: complete"]
    assert '"workers": 2' in text_of(found, "config")[0]


def test_tensorboard_shows_workers_notices_config_and_failure(tmp_path: Path) -> None:
    with TensorBoard(tmp_path) as listener:
        a_short_run(listener, RunFailed(step=3, error="worker 1 raised ValueError"))
        a_short_run(listener, run="digits-2")
    found = read_back(tmp_path / "digits-1")
    assert found.Scalars("worker-1/compute")[0].value == 0.75
    assert text_of(found, "notice") == ["something to know"]
    assert text_of(found, "status") == ["failed: worker 1 raised ValueError"]
    assert '"sync.kind": "allreduce"' in text_of(found, "config")[0] and "naïve" in text_of(found, "config")[0]
    plugin = found.summary_metadata["_hparams_/session_start_info"].plugin_data
    assert plugin.plugin_name == "hparams" and b"seed" in plugin.content
    assert [event.value for event in read_back(tmp_path / "digits-2").Scalars("eval/accuracy")] == [0.75]


def test_tensorboard_writes_beside_the_run_by_default(tmp_path: Path) -> None:
    listener = TensorBoard()
    listener(started(run_dir=str(tmp_path / "run")))
    listener(done(1))
    listener.close()
    assert len(read_back(tmp_path / "run" / "tensorboard").Scalars("train/loss")) == 1
    assert text_of(read_back(tmp_path / "run" / "tensorboard"), "status")[0].startswith("failed: ")


def test_tensorboard_where_nothing_can_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with TensorBoard(tmp_path / "file") as listener:
        a_short_run(listener)
    assert "shoal: TensorBoard: " in capsys.readouterr().err


# -- MLflow ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def file_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store of files, which MLflow wants to be asked for twice."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return (tmp_path / "mlruns").as_uri()


def mlflow_runs(uri: str, experiment: str = "shoal") -> tuple[Any, list[Any]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    return client, list(client.search_runs([found.experiment_id], order_by=["attributes.start_time ASC"]))


def check_mlflow(uri: str, result: Result) -> None:
    client, (run,) = mlflow_runs(uri)
    assert run.info.run_name == result.run_id and run.info.status == "FINISHED"
    assert run.data.params["workers"] == "2" and run.data.params["total_steps"] == str(STEPS)
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted(metric.step for metric in history) == list(range(1, STEPS + 1))
    assert run.data.metrics["train/learning_rate"] == pytest.approx(0.1)
    assert run.data.metrics["train/samples_per_second"] > 0
    assert run.data.metrics["eval/loss"] == pytest.approx(result.metrics["loss"])
    assert run.data.tags["shoal.reason"] == "complete"


def test_mlflow_of_failed_and_resumed_runs(file_store: str) -> None:
    with MLflow(file_store) as listener:
        a_short_run(listener, RunFailed(step=3, error="worker 1 raised"))
        client, (run,) = mlflow_runs(file_store)
        assert run.info.status == "FAILED" and run.data.tags["shoal.reason"] == "worker 1 raised"
        assert run.data.params["sync.kind"] == "allreduce" and run.data.params["note"] == "naïve"
        assert run.data.metrics["worker-1/compute"] == 0.75
        assert run.data.tags["shoal.notices"] == "step 3: something to know\n"
        a_short_run(listener, step=3)
        _, runs = mlflow_runs(file_store)
        assert [found.info.run_id for found in runs] == [run.info.run_id], "resumed, so the same run there"
        assert runs[0].info.status == "FINISHED"
        assert len(client.get_metric_history(run.info.run_id, "train/loss")) == 6


def test_mlflow_takes_odd_names_values_and_many_points(file_store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    sizes, log_batch = [], MlflowClient.log_batch

    def counted(client: Any, run: str, metrics: Sequence[Any] = (), params: Sequence[Any] = ()) -> None:
        sizes.append((len(metrics), len(params)))
        log_batch(client, run, metrics=metrics, params=params)

    monkeypatch.setattr(MlflowClient, "log_batch", counted)
    with MLflow(file_store) as listener:
        listener(started(long="x" * 10_000, **{f"p{number}": number for number in range(250)}, **{"ä=?": None}))
        for step in range(1, 91):
            listener(done(step, loss=float("nan"), **{f"log {number}?": 1.0 for number in range(20)}))
        listener(RunEnded(step=90, loss=0.5, metrics={}, reason="complete"))
    client, (run,) = mlflow_runs(file_store)
    assert run.info.status == "FINISHED"
    assert run.data.params["p249"] == "249" and run.data.params["___"] == "None" and len(run.data.params["long"]) == 500
    assert len(client.get_metric_history(run.info.run_id, "train/log 19_")) == 90
    assert max(metrics for metrics, _ in sizes) <= 1000 and max(params for _, params in sizes) == 100


# MLflow 3.17 uses an option of SQLAlchemy that version 2.1 gives up.
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")
def test_mlflow_with_a_database(tmp_path: Path) -> None:
    pytest.importorskip("alembic", reason="MLflow needs alembic for its databases")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    with MLflow(uri) as listener:
        a_short_run(listener)
    client, (run,) = mlflow_runs(uri)
    assert run.info.status == "FINISHED" and run.data.metrics["eval/accuracy"] == 0.75
    assert len(client.get_metric_history(run.info.run_id, "train/loss")) == 3
    from mlflow.tracking._tracking_service.utils import _get_store

    _get_store(uri).engine.dispose()


def test_mlflow_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with MLflow("http://127.0.0.1:9") as listener:
        a_short_run(listener)
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("shoal: MLflow: ") and said[0].endswith("; the run goes on without it")


def test_made_in_a_fresh_process_they_start_nothing_and_report_nothing() -> None:
    program = """if True:
        import sys, threading
        from shoal.monitor.mlflow import MLflow
        from shoal.monitor.tensorboard import TensorBoard
        from shoal.monitor.wandb import WandB
        assert not {"mlflow", "tensorboard", "wandb"} & set(sys.modules)
        TensorBoard(), MLflow(), WandB(mode="offline")
        from mlflow.telemetry import get_telemetry_client
        from wandb.env import error_reporting_enabled
        assert get_telemetry_client() is None and not error_reporting_enabled()
        assert threading.active_count() == 1
        assert not {"torch", "tensorflow"} & set(sys.modules)
    """
    ours = ("MLFLOW_", "WANDB_", "DO_NOT_TRACK", "PYTEST_", "CI", "GITHUB_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    assert subprocess.run([sys.executable, "-c", program], env=environment, timeout=60).returncode == 0


# -- W&B ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """W&B reads the user's settings, and MLflow's and W&B's switches are set once by the listeners."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-own"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: blocks of 32 KiB with parts of records, as LevelDB's log has them."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or last part
            yield Record.FromString(whole)
            whole = b""


def wandb_run(folder: Path, run: str) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any], int]:
    """Config, history, summary and exit code of an offline run."""
    (path,) = folder.glob(f"wandb/offline-run-*-{run}/run-{run}.wandb")
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    history, code = [], -1
    for record in wandb_records(path):
        for item in record.run.config.update:
            config[item.key] = json.loads(item.value_json)
        for item in record.summary.update:
            summary[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
        if record.HasField("history"):
            keys = [(item.key or ".".join(item.nested_key), item.value_json) for item in record.history.item]
            history.append({key: json.loads(value) for key, value in keys})
        if record.HasField("exit"):
            code = record.exit.exit_code
    return config, history, summary, code


def check_wandb(folder: Path, result: Result) -> None:
    config, history, summary, code = wandb_run(folder, result.run_id)
    assert config["workers"] == 2 and config["total_steps"] == STEPS
    losses = [row for row in history if "train/loss" in row]
    assert [row["step"] for row in losses] == list(range(1, STEPS + 1))
    assert losses[-1]["train/loss"] < losses[0]["train/loss"] / 2
    assert losses[0]["train/learning_rate"] == pytest.approx(0.1)
    assert [row["step"] for row in history if "eval/loss" in row] == [8, 16]
    assert summary["status"] == "finished" and code == 0


def test_wandb_of_two_runs_one_failed(tmp_path: Path) -> None:
    with WandB(mode="offline", folder=tmp_path) as listener:
        a_short_run(listener, RunFailed(step=3, error="worker 1 raised"))
        a_short_run(listener, run="digits-2")
    config, history, summary, code = wandb_run(tmp_path, "digits-1")
    assert config["sync.kind"] == "allreduce" and config["note"] == "naïve"
    assert [row["notice"] for row in history if "notice" in row] == ["something to know"]
    assert [row["worker-1/compute"] for row in history if "worker-1/compute" in row] == [0.75]
    assert [row["_timestamp"] for row in history if "train/loss" in row] == [1001.0, 1002.0, 1003.0]
    assert (summary["status"], summary["reason"], code) == ("failed", "worker 1 raised", 1)
    assert wandb_run(tmp_path, "digits-2")[2]["status"] == "finished"


def test_wandb_without_a_key_says_so_and_asks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with WandB(mode="online", folder=tmp_path) as listener:
        a_short_run(listener)
    assert "WANDB_SERVICE" not in os.environ
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("shoal: W&B: ") and "wandb login" in said[0]


def test_wandb_has_modes() -> None:
    with pytest.raises(ConfigError, match="mode='away': W&B has online, offline"):
        WandB(mode="away")


# -- all of them -------------------------------------------------------------------------------------------------------


def test_a_training_on_two_workers_in_all_three(
    tmp_path: Path, file_store: str, capfd: pytest.CaptureFixture[str]
) -> None:
    board = TensorBoard(tmp_path / "board")
    flow = MLflow(file_store)
    bias = WandB("tests", mode="offline", folder=tmp_path / "bias")
    result = train(board, flow, bias)
    # nothing is closed: the end of the run is enough
    check_tensorboard(tmp_path / "board", result)
    check_mlflow(file_store, result)
    check_wandb(tmp_path / "bias", result)
    said = [line for line in capfd.readouterr().err.splitlines() if any(name in line for name in NAMES)]
    (run,) = mlflow_runs(file_store)[1]
    (kept,) = (tmp_path / "bias" / "wandb").glob("offline-run-*")
    assert sorted(said) == [
        f"shoal: MLflow run {run.info.run_id} in {file_store}; look at it with: "
        f"mlflow ui --backend-store-uri {file_store}",
        f"shoal: TensorBoard files in {tmp_path}/board; look at them with: tensorboard --logdir {tmp_path}/board",
        f"shoal: W&B files in {kept}; send them with: wandb sync {kept}",
    ]
