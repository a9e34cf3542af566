"""A run that is stopped and resumed, by whatever means and on whatever workers, ends as if it had not been."""

from __future__ import annotations

import json
import os
import random
import runpy
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import shoal
from shoal.core.events import AnyEvent, CheckpointSaved, EvalDone, Notice, RunStarted, StepDone
from shoal.proof.rehearse import playing

SAMPLES, BATCH = 116, 50
"""Three steps an epoch, of 50, 50 and 16 samples: atoms of unequal size, and none too small for a BatchNorm."""
TOTAL = 12

_draw = torch.Generator().manual_seed(7)
INPUTS = torch.randn(SAMPLES, 6, generator=_draw)
LABELS = torch.randint(0, 3, (SAMPLES,), generator=_draw)
TRAINING, HELD_OUT = TensorDataset(INPUTS, LABELS), TensorDataset(INPUTS[:20], LABELS[:20])


def net(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.LayerNorm(width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 3))


def batch_norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def one_cycle(optimizer: torch.optim.Optimizer, total: int) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=total)


def warm_up(optimizer: torch.optim.Optimizer, total: int) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))


def make(**changed: Any) -> shoal.Trainer:
    given: dict[str, Any] = {
        "model": net,
        "loss": cross_entropy,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.02, eps=1e-5),
        "data": TRAINING,
        "batch_size": BATCH,
        "steps": TOTAL,
        "workers": 2,
        "data_workers": 0,
    }
    return shoal.Trainer(**(given | changed))


def weights(trainer: shoal.Trainer) -> dict[str, Tensor]:
    found = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    return found | {f"average of {name}": value for name, value in (trainer.average or {}).items()}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], *, bitwise: bool = False) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if bitwise:
            assert torch.equal(found[name], value), name
        else:
            apart = torch.linalg.vector_norm((found[name] - value).double()) / torch.linalg.vector_norm(value.double())
            assert apart < 1e-5, f"{name} is {apart:.2g} apart"


def stop_after(step: int) -> Callable[[AnyEvent], shoal.Stop | None]:
    """Asks at an evaluation, where the workers wait for the answer."""
    return lambda event: shoal.Stop("enough") if isinstance(event, EvalDone) and event.step == step else None


def figures(result: shoal.Result) -> tuple[Any, ...]:
    return result.steps, result.epochs, result.samples, result.loss, result.metrics


# -- stopping in the process -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "deterministic", "counts"),
    [
        pytest.param(net, False, [1, 2, 3, 4], id="to rounding"),
        pytest.param(batch_norm_net, True, [1, 2, 3, 4], id="bitwise"),
        # what a BatchNorm sees depends on the number of workers
        pytest.param(batch_norm_net, False, [2, 2, 2, 2], id="batch norm"),
    ],
)
def test_stops_at_random_steps_and_other_worker_counts_change_nothing(
    tmp_path: Path, model: Any, deterministic: bool, counts: list[int]
) -> None:
    def trainer(**changed: Any) -> shoal.Trainer:
        every_step = {"eval_data": HELD_OUT, "eval_every": 1}
        return make(model=model, schedule=one_cycle, ema=0.8, deterministic=deterministic, **every_step, **changed)

    whole = trainer(run_dir=tmp_path / "whole")
    wanted = whole.fit()
    chance = random.Random(len(str(counts)) + deterministic)
    stops = [chance.randint(2, 4), chance.randint(6, 7), chance.randint(9, 10), TOTAL]
    for stop, workers in zip(stops, chance.sample(counts, 4), strict=True):
        part = trainer(run_dir=tmp_path / "parts", resume="last", workers=workers, callbacks=[stop_after(stop)])
        result = part.fit()
        assert (result.steps, result.workers, result.stopped) == (stop, workers, None if stop == TOTAL else "enough")

    assert_same(weights(part), weights(whole), bitwise=deterministic)
    assert (result.steps, result.epochs, result.samples) == (wanted.steps, wanted.epochs, wanted.samples)
    assert result.loss == pytest.approx(wanted.loss, rel=1e-5)
    assert result.metrics == pytest.approx(wanted.metrics, rel=1e-5)


@pytest.mark.parametrize("stop", [3, 5], ids=["after a short step", "before a short step"])
def test_fewer_steps_first_and_more_later(tmp_path: Path, stop: int) -> None:
    whole = make(schedule=warm_up, workers=1)
    whole.fit()
    make(schedule=warm_up, steps=stop, run_dir=tmp_path, workers=2).fit()
    rest = make(schedule=warm_up, resume=tmp_path, workers=3)
    assert rest.fit().steps == TOTAL
    assert_same(weights(rest), weights(whole))


def test_a_finished_run_returns_at_once_with_the_same_figures() -> None:
    first = make(
        name="finished", eval_data=HELD_OUT, checkpoint_every=5, ema=0.8, metrics=["accuracy"], predict=_scores
    )
    wanted = first.fit()
    seen: list[AnyEvent] = []
    again = make(
        name="finished",
        eval_data=HELD_OUT,
        ema=0.8,
        metrics=["accuracy"],
        predict=_scores,
        resume="last",
        workers=1,
        callbacks=[seen.append],
    )
    result = again.fit()
    assert figures(result) == figures(wanted)
    assert (result.run_id, result.run_dir, result.stopped) == (wanted.run_id, wanted.run_dir, None)
    assert not [event for event in seen if isinstance(event, (StepDone, EvalDone, CheckpointSaved))]
    assert_same(weights(again), weights(first), bitwise=True)


def _scores(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return model(batch[0]), batch[1]


def test_a_run_is_found_by_its_id_its_folder_and_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make(name="found", checkpoint_every=5, steps=TOTAL)
    wanted = first.fit()
    checkpoints = wanted.run_dir / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000000005", "step-000000010", "step-000000012"]
    started: list[RunStarted] = []

    def resumed(resume: Any, **changed: Any) -> shoal.Result:
        watch = lambda event: started.append(event) if isinstance(event, RunStarted) else None  # noqa: E731
        again = make(resume=resume, callbacks=[watch], workers=1, **changed)
        result = again.fit()
        assert_same(weights(again), weights(first))
        return result

    assert resumed(wanted.run_id).run_id == wanted.run_id
    assert resumed(str(wanted.run_dir)).run_id == wanted.run_id
    assert resumed(checkpoints).run_id == wanted.run_id
    monkeypatch.chdir(wanted.run_dir.parent)
    assert resumed(Path(wanted.run_id)).run_dir == wanted.run_dir
    assert [event.step for event in started] == [TOTAL] * 4

    # from one checkpoint into a folder of its own: another run, and the first one is left as it is
    other = resumed(checkpoints / "step-000000005", run_dir=tmp_path / "other")
    assert started[-1].step == 5 and other.run_dir == tmp_path / "other" and other.run_id != wanted.run_id
    assert len(list(checkpoints.iterdir())) == 3

    # going back in the same run: what is saved later is newer, also where its steps were there before
    assert resumed(checkpoints / "step-000000005").run_id == wanted.run_id
    assert started[-1].step == 5
    assert resumed(wanted.run_id).steps == TOTAL and started[-1].step == TOTAL


def test_nothing_to_resume_yet_is_said_and_the_run_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make(run_dir=tmp_path / "new", resume="last", steps=2, workers=1).fit().steps == 2
    assert f"resume='last': no checkpoint in {tmp_path / 'new'}; starting from the beginning" in capsys.readouterr().err
    assert make(name="never seen before", resume="last", steps=2, workers=1).fit().steps == 2
    assert "no checkpoint in runs named 'never seen before'" in capsys.readouterr().err


def test_a_new_run_in_the_folder_of_an_earlier_one_keeps_its_checkpoints_aside(tmp_path: Path) -> None:
    first = make(run_dir=tmp_path, steps=2, workers=1).fit()
    second = make(run_dir=tmp_path, steps=1, workers=1).fit()
    assert second.run_id != first.run_id
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000001"]
    assert [path.name for path in (tmp_path / "earlier" / first.run_id).iterdir()] == ["step-000000002"]
    assert (
        make(resume=tmp_path / "earlier" / first.run_id, run_dir=tmp_path / "third", steps=3, workers=1).fit().steps
        == 3
    )


def test_a_new_run_that_fails_early_leaves_the_earlier_one_to_be_resumed(tmp_path: Path) -> None:
    first = make(run_dir=tmp_path, steps=2, workers=1).fit()
    with pytest.raises(shoal.WorkerError, match="no luck"):
        make(run_dir=tmp_path, loss=_no_luck).fit()
    again = make(run_dir=tmp_path, steps=2, workers=1, resume="last").fit()
    assert (again.run_id, again.steps) == (first.run_id, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock",
        "checkpoints",
        "logs",
        "report.html",
        "run.json",
    ]


def _no_luck(model: nn.Module, batch: Any) -> Tensor:
    raise RuntimeError("no luck")


@pytest.mark.parametrize("stop", [7, TOTAL], ids=["on the way", "at the last step"])
def test_an_evaluation_that_a_signal_left_out_is_made_up_for(tmp_path: Path, stop: int) -> None:
    evaluated: list[int] = []

    def plateau(optimizer: torch.optim.Optimizer, total: int) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)

    def trainer(*callbacks: Callable[[AnyEvent], Any], **changed: Any) -> shoal.Trainer:
        watch = lambda event: evaluated.append(event.step) if isinstance(event, EvalDone) else None  # noqa: E731
        often = {"eval_data": HELD_OUT, "eval_every": 1}
        return make(schedule=plateau, callbacks=[watch, *callbacks], **often, **changed)

    supervisor, now, told = os.getpid(), tmp_path / "now", []

    def due(event: AnyEvent) -> None:
        if isinstance(event, EvalDone) and event.step == stop - 1:
            now.touch()

    def terminate(model: nn.Module, batch: Any) -> Any:
        """In the step that follows, and early enough for its exchange to carry the news."""
        if now.exists() and not told:
            told.append(True)
            os.kill(supervisor, signal.SIGTERM)
            time.sleep(0.5)
        return cross_entropy(model, batch)

    whole = trainer()
    wanted = whole.fit()
    evaluated.clear()
    with pytest.raises(shoal.Preempted, match=f"step {stop}, .*resume='last'") as stopped:
        trainer(due, run_dir=tmp_path / "run", loss=terminate).fit()
    assert stopped.value.code == 75
    now.unlink()
    rest = trainer(run_dir=tmp_path / "run", resume="last", workers=3)
    result = rest.fit()
    assert evaluated == list(range(1, TOTAL + 1))
    assert_same(weights(rest), weights(whole))
    assert result.metrics == pytest.approx(wanted.metrics, rel=1e-5)


def test_a_longer_course_is_said_because_the_schedule_was_made_for_the_former(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def plan(optimizer: torch.optim.Optimizer, total: int) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total)

    make(run_dir=tmp_path, steps=4, schedule=plan, workers=1).fit()
    capsys.readouterr()
    make(run_dir=tmp_path, steps=5, schedule=plan, resume="last", workers=1).fit()
    said = capsys.readouterr().err
    assert "made for 4 steps" in said and "now has 5" in said
    make(run_dir=tmp_path, steps=5, schedule=plan, resume="last", workers=1).fit()
    assert "made for" not in capsys.readouterr().err


def test_a_longer_one_cycle_is_refused_before_a_step_is_done(tmp_path: Path) -> None:
    make(run_dir=tmp_path, steps=2, schedule=one_cycle, workers=1).fit()
    about = (tmp_path / "run.json").read_bytes()
    for sync in ("allreduce", "server"):
        longer = make(run_dir=tmp_path, steps=4, schedule=one_cycle, workers=1, resume="last", sync=sync)
        with pytest.raises(shoal.CheckpointMismatch, match="OneCycleLR of 2 steps, and this run gives it 4"):
            longer.fit()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000002"]
    assert (tmp_path / "run.json").read_bytes() == about, "what was refused is not what this run is"


# -- which run is meant ------------------------------------------------------------------------------------------------


def test_last_is_no_run_of_another_script_of_this_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fit(project: str, steps: int, **changed: Any) -> shoal.Result:
        file = tmp_path / project / "train.py"
        file.parent.mkdir(exist_ok=True)
        file.touch()
        monkeypatch.setattr("shoal.trainer.trainer.origin", lambda: file)
        return make(name="twin", steps=steps, workers=1, resume="last", **changed).fit()

    first = fit("a", 2)
    capsys.readouterr()
    second = fit("b", 3)
    said = capsys.readouterr().err
    assert second.run_id != first.run_id
    assert f"no checkpoint in runs of {tmp_path / 'b' / 'train.py'} on this data; starting from the beginning" in said
    assert f"there is {first.run_id} of {tmp_path / 'a' / 'train.py'}; resume='{first.run_id}' goes on with it" in said
    with pytest.raises(shoal.CheckpointMismatch, match="batch: 50 there, 40 here"):
        fit("a", 3, batch_size=40)
    assert (fit("a", 3).run_id, fit("b", 4).run_id) == (first.run_id, second.run_id)
    assert "resume=" not in capsys.readouterr().err, "nothing is to be said of that"


# -- other data --------------------------------------------------------------------------------------------------------


class Noisy(Dataset[Any]):
    """Its items draw, one of their parts is another one each time, and it runs code."""

    def __init__(self, labels: Tensor, shift: float = 0.0) -> None:
        self.labels, self.shift = labels, shift

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> list[Tensor]:
        return [INPUTS[index] + 0.1 * torch.randn(6) + random.random() + self.shift, self.labels[index]]


class Ticking(Noisy):
    def __getitem__(self, index: int) -> list[Tensor]:
        inputs, label = super().__getitem__(index)
        return [inputs + time.perf_counter_ns() % 1000 / 1e6, label]


def listening(heard: list[str]) -> Callable[[AnyEvent], None]:
    return lambda event: heard.append(event.text) if isinstance(event, Notice) else None


OTHERS = {
    "tensors": (TRAINING, TensorDataset(INPUTS * 50, LABELS)),
    "labels": (TRAINING, TensorDataset(INPUTS, 2 - LABELS)),
    "items that draw": (Noisy(LABELS), Noisy(LABELS, 1.0)),
}


@pytest.mark.parametrize("which", OTHERS)
def test_last_is_no_run_on_other_data_of_the_same_length(which: str, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = OTHERS[which]
    name = f"other {which}"
    first = make(name=name, data=one, steps=4, workers=1).fit()
    capsys.readouterr()
    second = make(name=name, data=other, steps=2, workers=1, resume="last").fit()
    said = capsys.readouterr().err
    assert second.run_id != first.run_id and second.steps == 2
    assert f"{first.run_id} was trained on other data of the same length; resume='{first.run_id}' goes on" in said
    # each goes on with its own
    assert make(name=name, data=one, steps=5, workers=1, resume="last").fit().run_id == first.run_id
    assert make(name=name, data=other, steps=3, workers=1, resume="last").fit().run_id == second.run_id


def test_a_run_that_is_named_goes_on_with_other_data_and_says_it() -> None:
    first = make(steps=4, workers=1).fit()
    other = TensorDataset(INPUTS * 50, LABELS)
    with pytest.raises(shoal.ConfigError, match=r"is of a run on other data \(data\[\d+\] was another item there\)"):
        make(data=other, steps=3, workers=1, resume=first.run_id).fit()
    with pytest.raises(shoal.CheckpointMismatch, match="size: 116 there, 40 here"):
        make(data=TensorDataset(INPUTS[:40], LABELS[:40]), steps=3, workers=1, resume=first.run_id).fit()
    for steps, said in ((6, 1), (8, 0)):  # from then on it is the data of this run
        heard: list[str] = []
        assert make(
            data=other, steps=steps, workers=1, resume=first.run_id, callbacks=[listening(heard)]
        ).fit().run_id == (first.run_id)
        assert sum("was trained on other data" in text for text in heard) == said


def test_items_that_are_others_each_time_tell_nothing() -> None:
    first = make(name="ticking", data=Ticking(LABELS), steps=2, workers=1).fit()
    assert make(name="ticking", data=Ticking(LABELS), steps=4, workers=1, resume="last").fit().run_id == first.run_id


def test_a_checkpoint_of_an_earlier_version_says_nothing_of_its_data() -> None:
    first = make(name="older", steps=2, workers=1).fit()
    about = Path(first.run_dir) / "run.json"
    known = json.loads(about.read_text())
    assert len(known.pop("data")) == 8
    about.write_text(json.dumps(known))
    other = TensorDataset(INPUTS * 50, LABELS)
    assert make(name="older", data=other, steps=4, workers=1, resume="last").fit().run_id == first.run_id


# -- evaluated before it is fitted -------------------------------------------------------------------------------------


def test_an_unfitted_trainer_evaluates_and_predicts_with_the_weights_that_resume_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def trainer(steps: int, **changed: Any) -> shoal.Trainer:
        options: dict[str, Any] = {"model": batch_norm_net, "ema": 0.8, "eval_data": HELD_OUT, "predict": _scores}
        return make(**options, steps=steps, workers=1, run_dir=tmp_path, **changed)

    first = trainer(4)
    run = first.fit()
    wanted, scores = first.evaluate(), first.predict(HELD_OUT)
    capsys.readouterr()
    for resume in ("last", tmp_path / "checkpoints" / "step-000000004"):
        # a shorter run, another batch size and seed: only the weights are wanted
        again = trainer(2, resume=resume, batch_size=20, seed=3)
        assert again.evaluate() == wanted
        assert torch.equal(again.predict(HELD_OUT), scores)
        assert_same(weights(again), weights(first), bitwise=True)
        said = capsys.readouterr().err
        assert said.count(f"using the average of the weights of {run.run_id} at step 4") == 1
    longer = trainer(6, resume="last")
    assert longer.evaluate() == wanted
    capsys.readouterr()
    assert longer.fit().metrics == longer.evaluate() != wanted
    assert "using the" not in capsys.readouterr().err


def test_what_fit_would_refuse_of_a_checkpoint_evaluate_refuses_too(
    tmp_path: Path, finished: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for changed, words in (({"model": _wider}, "another model"), ({"ema": 0.9}, "'average'")):
        with pytest.raises(shoal.CheckpointMismatch, match=words):
            make(resume=finished[0], **changed).evaluate(HELD_OUT)
    with pytest.raises(shoal.ConfigError, match="resume='yesterday'"):
        make(resume="yesterday").evaluate(HELD_OUT)
    fresh = make(workers=1)
    none_yet = make(run_dir=tmp_path, resume="last", workers=1)
    capsys.readouterr()
    assert none_yet.evaluate(HELD_OUT) == fresh.evaluate(HELD_OUT)
    assert f"no checkpoint in {tmp_path}; the model is evaluated as it was given" in capsys.readouterr().err


# -- which checkpoints there are ---------------------------------------------------------------------------------------


class Climber(nn.Module):
    """One weight, which grows by one in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))


def climb(model: nn.Module, batch: Any) -> Tensor:
    weight = model.weight
    assert isinstance(weight, Tensor)
    return -weight if model.training else (weight - 2.0) ** 2


def test_the_last_ones_and_the_best_one_are_kept(tmp_path: Path) -> None:
    saved: list[CheckpointSaved] = []

    def trainer(**changed: Any) -> shoal.Trainer:
        return make(
            model=Climber,
            loss=climb,
            optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
            eval_data=HELD_OUT,
            eval_every=1,
            run_dir=tmp_path,
            callbacks=[lambda event: saved.append(event) if isinstance(event, CheckpointSaved) else None],
            **changed,
        )

    def kept() -> list[int]:
        return sorted(int(path.name[5:]) for path in (tmp_path / "checkpoints").glob("step-*"))

    trainer(steps=6, checkpoint_every=1, keep=2).fit()
    assert kept() == [2, 5, 6]
    assert {event.step: event.best for event in saved} == {1: True, 2: True, 3: False, 4: False, 5: False, 6: False}
    # the best one stays the best when the run goes on
    trainer(steps=9, checkpoint_every=2, keep=1, resume="last", workers=1).fit()
    assert kept() == [2, 9]
    assert '"step-000000002"' in (tmp_path / "checkpoints" / "best.json").read_text()


# -- broken and foreign checkpoints ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """The folder of a run with checkpoints at 4, 8 and 12, and its weights."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    trainer = make(run_dir=folder, checkpoint_every=4, schedule=one_cycle)
    trainer.fit()
    return folder, weights(trainer)


def _flip(checkpoint: Path) -> None:
    with (checkpoint / "model.safetensors").open("r+b") as file:
        file.seek(-20, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def _tear(checkpoint: Path) -> None:
    file = checkpoint / "optimizer.safetensors"
    os.truncate(file, file.stat().st_size // 2)


def _lose(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


@pytest.mark.parametrize("harm", [_flip, _tear, _lose], ids=["flipped bit", "torn file", "no manifest"])
def test_a_broken_checkpoint_is_left_aside_loudly(
    tmp_path: Path,
    finished: tuple[Path, dict[str, Tensor]],
    harm: Callable[[Path], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(finished[0], tmp_path / "run")
    harm(tmp_path / "run" / "checkpoints" / "step-000000012")
    started: list[int] = []
    trainer = make(
        run_dir=tmp_path / "run",
        resume="last",
        schedule=one_cycle,
        callbacks=[lambda event: started.append(event.step) if isinstance(event, RunStarted) else None],
    )
    assert trainer.fit().steps == TOTAL
    assert started == [8]
    said = capsys.readouterr().err
    assert "corrupt" in said and "step-000000012" in said and "the one before it is used" in said
    assert_same(weights(trainer), finished[1])
    # and it is replaced by a sound one
    again = make(run_dir=tmp_path / "run", resume="last", schedule=one_cycle, workers=1)
    assert again.fit().steps == TOTAL
    assert "corrupt" not in capsys.readouterr().err


def test_without_any_sound_checkpoint_the_run_does_not_start_over(tmp_path: Path, finished: tuple[Path, Any]) -> None:
    shutil.copytree(finished[0], tmp_path / "run")
    for checkpoint in (tmp_path / "run" / "checkpoints").glob("step-*"):
        _tear(checkpoint)
    for resume in ("last", tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-000000008"):
        with pytest.raises(shoal.CorruptCheckpoint, match="step-000000008"):
            make(run_dir=tmp_path / "run", resume=resume, schedule=one_cycle).fit()
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 3


def _wider() -> nn.Module:
    return net(9)


def _deeper() -> nn.Module:
    return nn.Sequential(*net().children(), nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        pytest.param({"model": _wider}, ["another model", "0.weight", "(8, 6)", "(9, 6)"], id="shapes"),
        pytest.param({"model": _deeper}, ["another model", "not in it", "5.weight"], id="parameters"),
        pytest.param({"batch_size": 40}, ["batch: 50 there, 40 here", "batch_size"], id="batch size"),
        pytest.param({"data": HELD_OUT}, ["size: 116 there, 20 here", "data"], id="data"),
        pytest.param({"seed": 3}, ["seed: 0 there, 3 here"], id="seed"),
        pytest.param(
            {"optimizer": lambda p: torch.optim.SGD(p[:2], lr=0.1)}, ["another optimizer", "SGD needs"], id="optimizer"
        ),
        pytest.param({"ema": 0.9}, ["'average'", "model, optimizer"], id="average"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(
    tmp_path: Path, finished: tuple[Path, dict[str, Tensor]], changed: dict[str, Any], named: list[str]
) -> None:
    before = sorted(path.name for path in (finished[0] / "checkpoints").iterdir())
    trainer = make(**({"resume": finished[0], "schedule": one_cycle} | changed))
    begun = time.monotonic()
    with pytest.raises(shoal.CheckpointMismatch) as refused:
        trainer.fit()
    assert time.monotonic() - begun < 3
    for words in named:
        assert words in str(refused.value)
    assert sorted(path.name for path in (finished[0] / "checkpoints").iterdir()) == before


def test_state_in_the_checkpoint_that_is_not_used_any_more_is_said(
    finished: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    make(resume=finished[0], workers=1).fit()
    assert "holds the state of schedule=, which this run is not given" in capsys.readouterr().err


# -- stopped from outside ----------------------------------------------------------------------------------------------

SCRIPT = textwrap.dedent(
    """
    import sys
    import time
    from pathlib import Path

    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    import shoal
    from shoal.core.events import CheckpointSaved, StepDone

    draw = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(116, 6, generator=draw), torch.randint(0, 3, (116,), generator=draw))


    def net():
        return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


    def make(folder, workers, pause=0.0, callbacks=(), resume="last"):
        def loss(model, batch):
            time.sleep(pause)
            return nn.functional.cross_entropy(model(batch[0]), batch[1])

        return shoal.Trainer(
            net,
            loss,
            lambda params: torch.optim.AdamW(params, lr=0.02, eps=1e-5),
            data,
            schedule=lambda optimizer, total: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=total),
            batch_size=50,
            steps=20,
            workers=workers,
            data_workers=0,
            ema=0.8,
            run_dir=folder,
            resume=resume,
            checkpoint_every=5,
            callbacks=callbacks,
        )


    if __name__ == "__main__":
        wanted = {"step": StepDone, "checkpoint": CheckpointSaved}[sys.argv[2]]

        def tell(event):
            if isinstance(event, wanted) and event.step >= 5:
                print(event.step, flush=True)

        result = make(sys.argv[1], workers=2, pause=0.01, callbacks=[tell]).fit()
        print("not stopped", result.steps, flush=True)
    """
)


class Script:
    """The script, run in a process of its own until it has told of step 5."""

    def __init__(self, folder: Path, until: str) -> None:
        file = folder / "train.py"
        file.write_text(SCRIPT)
        self.make: Callable[..., shoal.Trainer] = runpy.run_path(str(file))["make"]
        self.process = subprocess.Popen(
            [sys.executable, str(file), str(folder / "run"), until],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip().isdigit()

    def end(self, number: signal.Signals) -> tuple[int, str]:
        """Send a signal and wait; the exit code and what was said."""
        self.process.send_signal(number)
        try:
            out, said = self.process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise
        assert "not stopped" not in out
        return self.process.returncode, said


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The weights of the script's run without a signal."""
    folder = tmp_path_factory.mktemp("never-stopped")
    (folder / "train.py").write_text(SCRIPT)
    whole = runpy.run_path(str(folder / "train.py"))["make"](folder / "run", workers=2, resume=None)
    whole.fit()
    return weights(whole)


def _finish_here(script: Script, folder: Path, workers: int, wanted: dict[str, Tensor]) -> list[int]:
    """Resume in this process to the end; the steps where that began."""
    started: list[int] = []
    watch = lambda event: started.append(event.step) if isinstance(event, RunStarted) else None  # noqa: E731
    rest = script.make(folder / "run", workers=workers, callbacks=[watch])
    assert rest.fit().steps == 20
    assert_same(weights(rest), wanted)
    return started


def test_sigterm_leaves_a_checkpoint_from_which_the_run_goes_on(
    tmp_path: Path, never_stopped: dict[str, Tensor]
) -> None:
    script = Script(tmp_path, until="step")
    code, said = script.end(signal.SIGTERM)
    assert code == 75, said
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert f"stopped by SIGTERM at step {int(newest.name[5:])}" in said and "resume='last'" in said
    assert "Traceback" not in said
    assert _finish_here(script, tmp_path, 3, never_stopped) == [int(newest.name[5:])]


def test_after_sigkill_the_run_goes_on_from_the_last_checkpoint(
    tmp_path: Path, never_stopped: dict[str, Tensor]
) -> None:
    """A periodic one, or that which workers write when they find the process gone that started them."""
    script = Script(tmp_path, until="checkpoint")
    assert script.end(signal.SIGKILL)[0] == -signal.SIGKILL
    (started,) = _finish_here(script, tmp_path, 1, never_stopped)
    assert started >= 5


# -- positions ---------------------------------------------------------------------------------------------------------


class Recorded(Dataset[Tensor]):
    """Notes when each item was fetched, in a file for each process."""

    record = struct.Struct("<qq")

    def __init__(self, size: int, folder: Path) -> None:
        self.size = size
        self.folder = folder

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        if playing() is None:  # what a rehearsal fetches is not trained on
            file = os.open(self.folder / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.write(file, self.record.pack(time.monotonic_ns(), index))
            os.close(file)
        return torch.tensor([float(index)])

    def fetched(self) -> list[int]:
        """All indices, in the order of time. No worker begins a step before all have exchanged the one before."""
        records = [entry for file in self.folder.iterdir() for entry in self.record.iter_unpack(file.read_bytes())]
        return [index for _, index in sorted(records)]


@pytest.mark.parametrize("stops", [[(4, 3), (7, 1), (11, 4), (15, 2)], [(15, 4)]], ids=["stopped", "whole"])
def test_every_sample_is_in_one_step_of_each_epoch(
    tmp_path: Path, stops: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # what is fetched to be compared is not trained on
    monkeypatch.setattr("shoal.checkpoint.marks.digests_of", lambda data, indices, **given: [b""] * len(indices))
    notes = tmp_path / "notes"
    notes.mkdir()
    data = Recorded(37, notes)
    for steps, workers in stops:
        trainer = make(
            model=lambda: nn.Linear(1, 1),
            loss=lambda model, batch: (model(batch / 37) ** 2).mean(),
            data=data,
            batch_size=8,
            steps=steps,
            workers=workers,
            run_dir=tmp_path / "run",
            resume="last",
        )
        result = trainer.fit()
        assert result.samples == len(data.fetched())
    order = data.fetched()
    assert len(order) == 3 * 37
    epochs = [order[start : start + 37] for start in (0, 37, 74)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(37))] * 3
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_checkpoint_of_an_earlier_version_goes_on_and_says_that_draws_are_others(tmp_path: Path) -> None:
    """It was written at step 10 of this run, on two workers, when atoms had forwards of their own."""
    shutil.copytree(Path(__file__).parent / "earlier" / "run", tmp_path / "run")
    inputs = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))
    events: list[AnyEvent] = []
    result = shoal.Trainer(
        net,
        lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        lambda params: torch.optim.AdamW(params, lr=0.01),
        TensorDataset(inputs, inputs.sum(1, keepdim=True)),
        batch_size=32,
        steps=20,
        workers=2,
        run_dir=tmp_path / "run",
        resume="last",
        callbacks=[events.append],
    ).fit()
    steps = [event for event in events if isinstance(event, StepDone)]
    assert [event.step for event in steps] == list(range(11, 21)) and result.loss < 2.0, "it was 3.05 after step 10"
    assert int(net[1].num_batches_tracked) == 20
    said = [event.text for event in events if isinstance(event, Notice)]
    assert sum("written by an earlier version" in text for text in said) == 1
