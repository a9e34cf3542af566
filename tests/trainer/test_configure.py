"""Flags beat the script, the script beats the defaults, and each value knows where it came from."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.checkpoint.rundir import read_about
from shoal.cluster.supervisor.watch import Identity, masked, new_run, resume_command
from shoal.core import settings, spec
from shoal.core.settings import DEFAULT, FLAG, SCRIPT, Setting, Settings
from shoal.trainer.configure import FLAGS, plain
from shoal.trainer.session import Session
from shoal.trainer.step import Step


def make(**given: Any) -> shoal.Trainer:
    return shoal.Trainer(
        nn.Linear(1, 1),
        lambda model, batch: model(batch).square().mean(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        torch.zeros(12, 1),
        **given,
    )


def origins(trainer: shoal.Trainer, *names: str) -> list[tuple[Any, str]]:
    return [(trainer.config[name].value, trainer.config[name].origin) for name in names]


def test_each_value_comes_from_the_first_that_says_something() -> None:
    with settings.using(Settings(overrides={"workers": 2, "seed": 7})):
        trainer = make(workers=4, batch_size=6)
    assert (trainer.workers, trainer.seed, trainer.recipe.batch_size) == (2, 7, 6)
    expected = [(2, FLAG), (7, FLAG), (6, SCRIPT), (3, DEFAULT)]
    assert origins(trainer, "workers", "seed", "batch_size", "keep") == expected


def test_without_flags_the_script_is_all_there_is() -> None:
    trainer = make(workers=2, name="tide")
    assert origins(trainer, "workers", "name", "codec") == [(2, SCRIPT), ("tide", SCRIPT), ("none", DEFAULT)]


def test_values_that_were_left_open_are_shown_as_what_they_came_to() -> None:
    trainer = make()
    assert origins(trainer, "workers", "epochs") == [(trainer.workers, DEFAULT), (1, DEFAULT)]
    assert trainer.config["name"].value == trainer.name


def test_a_flag_that_the_trainer_refuses_is_refused_like_an_argument() -> None:
    with (
        settings.using(Settings(overrides={"batch_size": 0})),
        pytest.raises(shoal.ConfigError, match="batch_size=0; it must be at least 1"),
    ):
        make(batch_size=4)


def test_every_flag_is_an_argument_of_the_trainer() -> None:
    assert set(FLAGS) <= set(make().config)


def test_arguments_that_are_missing_are_told_in_pythons_words() -> None:
    with pytest.raises(TypeError, match=r"missing 3 required positional arguments: 'loss', 'optimizer', and 'data'"):
        shoal.Trainer(nn.Linear(1, 1))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="takes 5 positional arguments but 6 were given"):
        make().__init__(1, 2, 3, 4, 5)  # type: ignore[misc]


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "Trainer.__init__": (lambda: make(wrokers=2), "workers"),
    "launch": (lambda: shoal.launch(print, wrokers=2), "workers"),  # type: ignore[call-arg]
    "cross_validate": (lambda: shoal.cross_validate(make(), fold=2), "folds"),  # type: ignore[call-arg]
    "Session.steps": (lambda: Session.steps(None, [1], bathc_size=2), "batch_size"),  # type: ignore
    "Step.apply": (lambda: Step.apply(None, None, clipp=1.0), "clip"),  # type: ignore
}


def test_names_of_other_libraries_are_known() -> None:
    for name, meant in (("num_workers", "data_workers"), ("max_epochs", "epochs"), ("checkpoint_dir", "run_dir")):
        with pytest.raises(TypeError, match=f"Did you mean '{meant}'"):
            make(**{name: 2})


@pytest.mark.parametrize("called", CALLS)
def test_a_misspelt_argument_is_told_with_the_one_that_was_meant(called: str) -> None:
    call, meant = CALLS[called]
    with pytest.raises(TypeError) as caught:
        call()
    said = str(caught.value)
    assert said.startswith(f"{called}() got an unexpected keyword argument ")
    assert said.endswith(f". Did you mean {meant!r}?")
    assert caught.value.__context__ is None, "one traceback, not two"


def test_an_argument_like_no_other_gets_no_hint() -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'zebra'$"):
        make(zebra=2)


def test_what_is_missing_is_told_in_one_traceback() -> None:
    with pytest.raises(TypeError) as caught:
        shoal.launch()  # type: ignore[call-arg]
    assert "missing 1 required positional argument: 'fn'" in str(caught.value)
    assert caught.value.__context__ is None


def test_a_type_error_from_inside_is_left_alone() -> None:
    def build() -> nn.Module:
        return nn.Linear(1, 1, wrokers=2)  # type: ignore[call-arg]

    with pytest.raises(TypeError, match=r"Linear\.__init__\(\) got an unexpected keyword argument 'wrokers'$"):
        shoal.Trainer(build, print, print, [1])  # type: ignore[arg-type]


def test_signatures_stay_for_help() -> None:
    assert str(inspect.signature(Session.steps)).startswith("(self, data: 'Any', batch_size: 'int', *, epochs")
    assert "batch_size" in inspect.signature(shoal.Trainer).parameters
    assert (Session.steps.__doc__ or "").startswith("Go through `data`")


def test_own_loops_take_flags_too(tmp_path: Path) -> None:
    with settings.using(Settings(overrides={"workers": 2, "seed": 5})):
        assert shoal.launch(lambda session: [session.workers, session.seed], 1) == [[2, 5], [2, 5]]


def test_a_flag_that_an_own_loop_has_no_use_for_is_refused() -> None:
    with (
        settings.using(Settings(overrides={"batch_size": 8})),
        pytest.raises(shoal.ConfigError, match=r"--batch-size: shoal\.launch of this script has no such .*--workers"),
    ):
        shoal.launch(lambda session: None, 1)


def test_show_config_shows_it_and_does_not_train(capsys: pytest.CaptureFixture[str]) -> None:
    with settings.using(Settings(overrides={"workers": 2}, show_config=True)) as now:
        with pytest.raises(SystemExit) as leaving:
            make(batch_size=4).fit()
        assert leaving.value.code == 0 and now.entered == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["workers", "flag", "2"] in lines and ["batch_size", "script", "4"] in lines
    assert ["keep", "default", "3"] in lines


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, None),
        (3, 3),
        (Path("a") / "b", "a/b"),
        (spec.Local(), "local"),
        (spec.Local(start="fork"), "local:start=fork"),
        (["accuracy", len], ["accuracy", "len"]),
        (nn.Linear(1, 1), "Linear"),
        (torch.utils.data.TensorDataset(torch.zeros(1200, 1)), "TensorDataset of 1,200 items"),
    ],
)
def test_values_as_data(value: Any, shown: Any) -> None:
    assert plain(value) == shown


@pytest.mark.parametrize(
    ("word", "kept"),
    [
        ("postgresql://me:s3cret@db:5432/runs", "postgresql://me:***@db:5432/runs"),
        ("https://x/?a=1&password=s3cret&b=2", "https://x/?a=1&password=***&b=2"),
        ("--api-key=s3cret", "--api-key=***"),
        ("train.py", "train.py"),
        ("C:/data:x@y", "C:/data:x@y"),
    ],
)
def test_secrets_are_left_out_of_what_is_kept(word: str, kept: str) -> None:
    assert masked(["python", word]) == ["python", kept]
    assert masked(["--token", "s3cret", word]) == ["--token", "***", kept]


@pytest.mark.parametrize(
    ("typed", "resuming"),
    [
        (["run", "t.py"], "shoal run t.py --resume tide-1"),
        (["run", "t.py", "-w", "4", "--", "--lr", "1"], "shoal run t.py -w 4 --resume tide-1 -- --lr 1"),
        (["run", "t.py", "--resume", "last", "--name", "a b"], "shoal run t.py --name 'a b' --resume tide-1"),
        (["run", "t.py", "--resume=x", "--", "--resume", "y"], "shoal run t.py --resume tide-1 -- --resume y"),
    ],
)
def test_the_command_that_goes_on_is_the_one_that_was_typed(typed: list[str], resuming: str) -> None:
    with settings.using(Settings(command=tuple(typed))):
        assert resume_command(Identity(run_id="tide-1", name="tide", workers=2)) == resuming


def test_where_no_command_runs_the_code_it_goes_on_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ipykernel_launcher.py").touch()
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "ipykernel_launcher.py"), "-f", "kernel.json"])
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    run = Identity(run_id="tide-1", name="tide", workers=2)
    assert resume_command(run) == "Trainer(..., resume='tide-1')"
    loop = replace(run, run_dir=tmp_path / "run", config={"fn": Setting("train", "script")})
    assert resume_command(loop) == "shoal.launch(..., resume='last')"
    assert new_run(run).script == ""


def test_a_resumed_run_keeps_its_name_and_its_goal(tmp_path: Path) -> None:
    first = make(steps=3, workers=1, name="tide", run_dir=tmp_path / "run").fit()
    again = make(steps=4, workers=1, run_dir=tmp_path / "run", resume="last")
    assert again.fit().run_id == first.run_id
    assert read_about(tmp_path / "run")["name"] == "tide"
    with pytest.raises(shoal.ConfigError, match=r"is at step 4, and this run has only 2 steps"):
        make(steps=2, workers=1, run_dir=tmp_path / "run", resume="last").fit()
    assert read_about(tmp_path / "run")["total_steps"] == 4
