"""Bad input gets an error that says what was received and what to set, in under three seconds.

What the Trainer refuses leaves nothing behind; what fails on a worker leaves the record of a failed run, and no more.
"""

from __future__ import annotations

import faulthandler
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import shoal
from shoal.core.atoms import Course
from shoal.core.events import AnyEvent, EvalDone, RunStarted, StepDone
from shoal.core.ordering import order_key, positions_in_words
from shoal.core.permutation import Permutation
from shoal.testing import FaultPlan
from shoal.trainer.step import _strange_rows
from shoal.trainer.workers.start import import_for_training

SAMPLES, BATCH = 40, 8
SECONDS = 3.0


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    import_for_training()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home for runs and a folder for temporary things: records may be in the first, nothing in the other."""
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("SHOAL_HOME", str(home))
    monkeypatch.setenv("SHOAL_STORE", "none")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    yield home
    left = [path for path in home.rglob("*") if path.is_file()]
    strange = [
        path for path in left if not re.fullmatch(r"\.lock|run\.json|report\.html|worker-\d+\.(out|err)", path.name)
    ]
    assert not strange
    assert not [path for path in left if path.suffix == ".out"], "nobody printed anything"
    assert not list(temporary.iterdir())


def square(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)


def numbers() -> Tensor:
    """Samples that know their index."""
    return torch.arange(SAMPLES, dtype=torch.float32).unsqueeze(1)


def make(**changed: Any) -> shoal.Trainer:
    given: dict[str, Any] = {
        "model": lambda: nn.Linear(1, 2),
        "loss": square,
        "optimizer": sgd,
        "data": numbers() / SAMPLES,
        "batch_size": BATCH,
        "workers": 2,
        "data_workers": 0,
    }
    return shoal.Trainer(**(given | changed))


@contextmanager
def refused(kind: type[BaseException], *words: str) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """The block raises exactly `kind` with all these words in what is shown of it, and soon."""
    begun = time.monotonic()
    with pytest.raises(kind) as error:
        yield error
    assert time.monotonic() - begun < SECONDS
    assert type(error.value) is kind
    shown = "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])
    for word in words:
        assert word in shown, f"{word!r} is not in: {shown}"


def remote(error: BaseException) -> str:
    """The traceback of the worker, which is shown after the error."""
    assert isinstance(error, shoal.ShoalError) and error.worker_traceback is not None
    shown = "\n".join(error.__notes__)
    if 'File "' in error.worker_traceback:
        assert all(line.strip() in shown for line in error.worker_traceback.splitlines())
    return shown


def position_of(index: int) -> int:
    """Where the first epoch has this sample."""
    order: list[int] = Permutation(SAMPLES, order_key(0, 0)).span(0, SAMPLES).tolist()
    return order.index(index)


def sample_at(position: int) -> int:
    return int(Permutation(SAMPLES, order_key(0, 0)).span(position, position + 1)[0])


# -- refused by the Trainer itself -------------------------------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Unsized(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


def frozen() -> nn.Module:
    return nn.Linear(1, 1).requires_grad_(False)


ARGUMENTS: list[tuple[dict[str, Any], type[shoal.ShoalError], list[str]]] = [
    ({"data": []}, shoal.DataError, ["data is empty"]),
    ({"data": TensorDataset(torch.zeros(0, 1))}, shoal.DataError, ["data is empty"]),
    ({"data": None}, shoal.ConfigError, ["data", "NoneType", "__len__"]),
    ({"data": 5}, shoal.ConfigError, ["data", "int", "__getitem__"]),
    ({"data": {"a": 1}}, shoal.ConfigError, ["data", "dict"]),
    ({"data": Stream()}, shoal.ConfigError, ["IterableDataset", "map-style"]),
    ({"data": Unsized()}, shoal.ConfigError, ["Unsized", "__len__"]),
    ({"data": DataLoader([1, 2])}, shoal.ConfigError, ["DataLoader", ".dataset"]),
    ({"eval_data": []}, shoal.DataError, ["eval_data is empty"]),
    ({"batch_size": 0}, shoal.ConfigError, ["batch_size=0", "at least 1"]),
    ({"batch_size": -1}, shoal.ConfigError, ["batch_size=-1", "at least 1"]),
    ({"batch_size": 2.5}, shoal.ConfigError, ["batch_size=2.5", "float", "whole number"]),
    ({"batch_size": True}, shoal.ConfigError, ["batch_size=True", "bool", "whole number"]),
    ({"batch_size": "8"}, shoal.ConfigError, ["batch_size='8'", "str", "whole number"]),
    ({"workers": 0}, shoal.ConfigError, ["workers=0", "outside 1…", "cores"]),
    ({"workers": -1}, shoal.ConfigError, ["workers=-1"]),
    ({"workers": 10**6}, shoal.ConfigError, ["workers=1000000", "outside 1…", "cores"]),
    ({"workers": "2"}, shoal.ConfigError, ["workers='2'", "str"]),
    ({"workers": 1.5}, shoal.ConfigError, ["workers=1.5", "float"]),
    ({"min_workers": 3}, shoal.ConfigError, ["min_workers=3", "workers=2"]),
    ({"max_workers": 1}, shoal.ConfigError, ["max_workers=1", "workers=2"]),
    ({"min_workers": 2, "max_workers": 1}, shoal.ConfigError, ["min_workers=2", "max_workers=1"]),
    ({"epochs": 0}, shoal.ConfigError, ["epochs=0"]),
    ({"faults": "kill"}, shoal.ConfigError, ["faults='kill'", "FaultPlan().kill("]),
    ({"faults": FaultPlan, "min_workers": 1}, shoal.ConfigError, ["the class FaultPlan", "FaultPlan().kill("]),
    ({"steps": -3}, shoal.ConfigError, ["steps=-3"]),
    ({"keep": 0}, shoal.ConfigError, ["keep=0"]),
    ({"seed": "7"}, shoal.ConfigError, ["seed='7'"]),
    ({"micro_batch": 0}, shoal.ConfigError, ["micro_batch=0"]),
    ({"data_workers": -1}, shoal.ConfigError, ["data_workers=-1"]),
    ({"checkpoint_every": 0}, shoal.ConfigError, ["checkpoint_every=0"]),
    ({"eval_every": 1.0}, shoal.ConfigError, ["eval_every=1.0"]),
    ({"clip": float("nan")}, shoal.ConfigError, ["clip=nan"]),
    ({"clip": -1}, shoal.ConfigError, ["clip=-1"]),
    ({"ema": 1.5}, shoal.ConfigError, ["ema=1.5", "between 0 and 1"]),
    ({"run_dir": 5}, shoal.ConfigError, ["run_dir=5", "path"]),
    ({"run_dir": ""}, shoal.ConfigError, ["run_dir=''", "path"]),
    ({"resume": True}, shoal.ConfigError, ["resume=True", "path"]),
    ({"model": nn.ReLU()}, shoal.ConfigError, ["ReLU", "no parameters"]),
    ({"model": frozen()}, shoal.ConfigError, ["requires_grad=True"]),
    ({"model": frozen}, shoal.ConfigError, ["requires_grad=True"]),
    ({"model": 3}, shoal.ConfigError, ["model=3", "int", "nn.Module"]),
    ({"model": lambda: 3}, shoal.ConfigError, ["model=", "int", "nn.Module"]),
    ({"model": nn.Linear}, shoal.ConfigError, ["model=", "Linear", "without arguments"]),
    ({"loss": None}, shoal.ConfigError, ["loss=None", "function"]),
    ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, shoal.ConfigError, ["optimizer=", "SGD", "lambda params:"]),
    ({"optimizer": "adam"}, shoal.ConfigError, ["optimizer='adam'", "function"]),
    ({"schedule": "cosine"}, shoal.ConfigError, ["schedule='cosine'", "function"]),
    ({"collate": 1}, shoal.ConfigError, ["collate=1"]),
    ({"predict": 1}, shoal.ConfigError, ["predict=1"]),
    ({"callbacks": print}, shoal.ConfigError, ["callbacks=", "list"]),
    ({"callbacks": [print, 7]}, shoal.ConfigError, ["callback", "7", "function"]),
    ({"metrics": ["accuracy"]}, shoal.ConfigError, ["accuracy", "predict="]),
    ({"metrics": ["acuracy"], "predict": square}, shoal.ConfigError, ["acuracy", "did you mean", "'accuracy'"]),
    ({"metrics": "accuracy", "predict": square}, shoal.ConfigError, ["metrics", "list"]),
    ({"layout": "zero3"}, shoal.ConfigError, ["layout='zero3'", "'single'"]),
    ({"layout": "singel"}, shoal.ConfigError, ["did you mean 'single'?"]),
    ({"layout": 4}, shoal.ConfigError, ["layout=4", "'single'"]),
    ({"layout": "single:depth=2"}, shoal.ConfigError, ["'depth'", "single takes no keys"]),
    ({"sync": "all-reduce"}, shoal.ConfigError, ["did you mean 'allreduce'?"]),
    ({"codec": "topk:densty=0.1"}, shoal.ConfigError, ["'densty'", "did you mean 'density'?"]),
    ({"codec": "int4"}, shoal.ConfigError, ["codec='int4'", "'none'", "did you mean 'int8'?"]),
    ({"codec": "topk:density=0"}, shoal.ConfigError, ["density=0.0", "from 1e-06 to 1"]),
    ({"codec": "int8", "deterministic": True}, shoal.ConfigError, ["deterministic=True sums gradients as they are"]),
    ({"precision": "bf16"}, shoal.ConfigError, ["precision='bf16'", "'fp32'"]),
    ({"engine": "ray"}, shoal.ConfigError, ["engine='ray'", "'local'"]),
    ({"engine": "local:star=fork"}, shoal.ConfigError, ["'star'", "did you mean 'start'?"]),
    ({"engine": "local:start=spawn"}, shoal.ConfigError, ["'spawn'", "fork"]),
    ({"engine": "local:start"}, shoal.ConfigError, ["key=value"]),
]


def _name_of(case: Any) -> str | None:
    return ",".join(f"{key}={value!r}"[:30] for key, value in case.items()) if isinstance(case, dict) else ""


@pytest.mark.parametrize(("changed", "kind", "words"), ARGUMENTS, ids=_name_of)
def test_arguments(changed: dict[str, Any], kind: type[shoal.ShoalError], words: list[str], home: Path) -> None:
    with refused(kind, *words):
        make(**changed)
    assert not home.exists()


def test_an_exception_of_the_users_own_model_function_is_left_as_it_is() -> None:
    with refused(ZeroDivisionError):
        make(model=lambda: 1 / 0)


# -- refused while running: what the user's functions return -----------------------------------------------------------


def _weightless(model: nn.Module, batch: Any) -> Any:
    return square(model, batch), 0


RETURNED: list[tuple[dict[str, Any], list[str]]] = [
    ({"loss": lambda model, batch: model(batch)}, ["not a scalar", "(4, 2)", ".mean()"]),
    ({"loss": lambda model, batch: square(model, batch).detach()}, ["detached", "requires_grad"]),
    ({"loss": lambda model, batch: square(model, batch).item()}, ["returned float", "scalar mean"]),
    ({"loss": lambda model, batch: None}, ["returned NoneType", "scalar mean"]),
    ({"loss": lambda model, batch: 3}, ["returned int", "scalar mean"]),
    ({"loss": lambda model, batch: {"los": square(model, batch)}}, ["['los']", "no 'loss'"]),
    ({"loss": lambda model, batch: {"loss": square(model, batch), "note": "high"}}, ["'note'", "str", "one number"]),
    ({"loss": lambda model, batch: (1, 2, 3)}, ["3 values", "(sum, weight)"]),
    ({"loss": lambda model, batch: (square(model, batch), -1)}, ["weight -1", "negative"]),
    ({"loss": _weightless}, ["weight of step 1 is 0"]),
    ({"loss": lambda model, batch: model(batch).argmax()}, ["int64", "floating-point"]),
    ({"optimizer": lambda params: None}, ["optimizer= returned NoneType", "torch optimizer"]),
    (
        {"optimizer": lambda params: torch.optim.SGD([torch.zeros(1, requires_grad=True)])},
        ["optimizer=", "the model's"],
    ),
    ({"optimizer": lambda params: torch.optim.LBFGS([p for _, p in params])}, ["LBFGS"]),
    ({"schedule": lambda optimizer, total: None}, ["schedule= returned NoneType", "scheduler"]),
    ({"schedule": lambda optimizer, total: 0.1}, ["schedule= returned float", "scheduler"]),
]


@pytest.mark.parametrize(("changed", "words"), RETURNED, ids=[str(number) for number in range(len(RETURNED))])
def test_what_functions_return(changed: dict[str, Any], words: list[str]) -> None:
    trainer = make(**changed)
    with refused(shoal.ConfigError, *words) as error:
        trainer.fit()
    assert re.search(r"worker [01] of 2", remote(error.value))


def test_what_predict_returns() -> None:
    data = numbers()
    with refused(shoal.ConfigError, "predict returned Tensor", "(prediction, target)"):
        make(predict=lambda model, batch: model(batch), metrics=["mse"]).evaluate(data)
    with refused(shoal.DataError, "predict returned a scalar"):
        make(predict=lambda model, batch: (model(batch).sum(), batch)).predict(data)
    with refused(shoal.DataError, "predict returned int"):
        make(predict=lambda model, batch: 3).predict(data)


def test_evaluate_and_predict_without_what_they_need() -> None:
    trainer = make()
    with refused(shoal.ConfigError, "evaluate() needs data", "eval_data="):
        trainer.evaluate()
    with refused(shoal.ConfigError, "predict() needs a function", "predict="):
        trainer.predict(numbers())
    with refused(shoal.DataError, "data is empty"):
        trainer.evaluate([])
    with refused(shoal.ConfigError, "data is a int"):
        make(predict=square).predict(5)


# -- not finite --------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_names_step_worker_and_gradient() -> None:
    data = numbers() / SAMPLES
    data[23] = float("nan")
    step, place = divmod(position_of(23), BATCH)
    worker = place // (BATCH // 2)
    with refused(
        shoal.NotFiniteError,
        f"the loss is nan in step {step + 1} on worker {worker} (positions",
        "values that are not finite came with data[23])",
        "all parameters are finite; the first whose gradient is not is 'weight'",
        "clip=",
    ) as error:
        make(data=data, checkpoint_every=100).fit()
    assert isinstance(error.value, shoal.NotFiniteError)
    assert (error.value.step, error.value.worker) == (step, worker)
    assert error.value.positions is not None
    with refused(shoal.NotFiniteError, f"the loss is nan in step {step + 1}") as error:
        make(data=data, collate=lambda items: torch.stack(items[::-1])).fit()
    assert "came with" not in str(error.value), "rows are in the order of the user's collate"
    assert error.value.positions[0] <= position_of(23) <= error.value.positions[1]


def test_the_samples_of_a_loss_that_is_not_finite_are_named() -> None:
    course = Course(SAMPLES, SAMPLES)
    said = positions_in_words(course, 0, 0, 4, 7)
    assert said == f"positions 4–7 of epoch 1: {', '.join(f'data[{sample_at(place)}]' for place in range(4, 8))}"
    assert positions_in_words(course, 0, 0, 0, 39).endswith(f"data[{sample_at(7)}] and 32 more")
    batch = {"x": torch.ones(3, 2, 2), "mask": torch.full((3, 4), -float("inf")), "y": [torch.ones(3), "text"]}
    assert _strange_rows(batch, 3) == set()
    batch["x"][1, 0, 1] = float("nan")  # type: ignore[index]
    assert _strange_rows(batch, 3) == {1}
    assert _strange_rows([torch.tensor([float("inf")]), torch.tensor(float("nan"))], 1) == {0}


def test_weights_that_are_not_finite_are_named() -> None:
    def blow_up(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": params[1:], "lr": float("inf")}])

    with refused(shoal.NotFiniteError, "in step 2 on worker 0", "the first parameter that is not finite is 'bias'"):
        make(optimizer=blow_up).fit()
    with refused(shoal.NotFiniteError, "parameter 'bias' is not finite after the last step (1)"):
        make(optimizer=blow_up, steps=1).fit()


def test_a_gradient_that_is_not_finite_is_found_when_it_is_clipped() -> None:
    with refused(shoal.NotFiniteError, "in step 1", "the norm of its gradient is", "'weight'"):
        make(loss=lambda model, batch: (model(batch) * 0).abs().sqrt().mean(), clip=1.0).fit()


# -- data --------------------------------------------------------------------------------------------------------------


class Odd(Dataset[Any]):
    """One sample is not like the others."""

    def __init__(self, odd: int, item: Callable[[], Any]) -> None:
        self.odd, self.item = odd, item

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.item() if index == self.odd else torch.tensor([index / SAMPLES])


def _unreadable() -> Any:
    raise OSError("the disk hums")


@pytest.mark.parametrize("data_workers", [0, 1])
def test_an_item_that_cannot_be_fetched_is_named(data_workers: int) -> None:
    index = sample_at(5 * BATCH - 1)
    trainer = make(data=Odd(index, _unreadable), data_workers=data_workers)
    with refused(shoal.DataError, f"data[{index}] could not be fetched", "OSError: the disk hums") as error:
        trainer.fit()
    assert "in _unreadable" in remote(error.value)
    assert f"worker 1 of 2 · step 5 · data positions {5 * BATCH - 4}–{5 * BATCH - 1} of the epoch" in remote(
        error.value
    )
    assert re.search(r"at \S*test_bad_input\.py:\d+ in _unreadable\n  hint: .*data\[", remote(error.value))


def test_a_loader_process_that_goes_away_is_no_silence() -> None:
    index = sample_at(0)
    trainer = make(data=Odd(index, lambda: os._exit(4)), data_workers=1)
    with refused(shoal.DataError, "a loader process ended with exit code 4", f"items {index}", "data_workers=0"):
        trainer.fit()


def test_items_that_make_no_batch_are_named() -> None:
    with refused(shoal.DataError, "cannot be collated", "item 11 has shape (2,)", "collate="):
        make(data=Odd(11, lambda: torch.zeros(2))).fit()
    with refused(shoal.DataError, "cannot be collated", "item 11 is None"):
        make(data=Odd(11, lambda: None)).fit()
    with refused(shoal.DataError, "collate raised ZeroDivisionError"):
        make(collate=lambda items: 1 / 0).fit()


def test_an_item_of_eval_data_is_named() -> None:
    with refused(shoal.DataError, "eval_data[3] could not be fetched"):
        make(eval_data=Odd(3, _unreadable), steps=1).fit()


# -- exceptions --------------------------------------------------------------------------------------------------------


def test_an_exception_on_one_worker_names_it_and_shows_where() -> None:
    culprit = sample_at(BATCH - 1) / SAMPLES

    def picky(model: nn.Module, batch: Tensor) -> Tensor:
        if (batch == culprit).any():
            raise LookupError("not this one")
        return square(model, batch)

    words = ["worker 1 raised LookupError: not this one", "in step 1", f"positions {BATCH // 2}–{BATCH - 1}"]
    with refused(shoal.WorkerError, *words) as error:
        make(loss=picky).fit()
    assert isinstance(error.value, shoal.WorkerError)
    assert (error.value.worker, error.value.step, error.value.positions) == (1, 0, (BATCH // 2, BATCH - 1))
    assert "worker 1 of 2" in remote(error.value)
    assert "in picky" in remote(error.value) and 'raise LookupError("not this one")' in remote(error.value)


class DataError(Exception):
    """The user's own, which only happens to be called like one of ours."""


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def _raise(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        pytest.param(MemoryError(), ["raised MemoryError", "ran out of memory", "micro_batch="], id="memory"),
        pytest.param(SystemExit(3), ["called sys.exit(3)"], id="sys.exit"),
        pytest.param(SystemExit("bye"), ["called sys.exit(bye)"], id="sys.exit with words"),
        pytest.param(KeyboardInterrupt(), ["raised KeyboardInterrupt"], id="interrupt"),
        pytest.param(DataError("mine"), ["DataError: mine"], id="a class of the user"),
        pytest.param(Mute(), ["raised Mute"], id="no words"),
        pytest.param(ValueError("long " * 5_000_000), ["raised ValueError: long long"], id="too many words"),
        pytest.param(UnicodeError("\udcff"), ["raised UnicodeError"], id="no text"),
    ],
)
def test_what_the_loss_raises(error: BaseException, words: list[str]) -> None:
    trainer = make(loss=lambda model, batch: _raise(error))
    with refused(shoal.WorkerError, "worker ", "in step 1", *words):
        trainer.fit()


@pytest.mark.parametrize("where", ["optimizer", "schedule"])
def test_what_other_functions_raise(where: str) -> None:
    with refused(shoal.WorkerError, "raised LookupError: none such") as error:
        make(**{where: lambda *given: _raise(LookupError("none such"))}).fit()
    assert "in _raise" in remote(error.value)


def test_an_exception_in_an_evaluation_says_so() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return square(model, batch) if model.training else _raise(LookupError("not now"))

    with refused(shoal.WorkerError, "raised LookupError: not now", "in the evaluation after step 5") as error:
        make(loss=loss, eval_data=numbers()).fit()
    assert isinstance(error.value, shoal.WorkerError)
    assert error.value.positions is None


class Regret(Exception):
    pass


@pytest.mark.parametrize("event", [RunStarted, EvalDone])
def test_an_exception_in_a_callback_ends_the_run_and_surfaces(event: type[AnyEvent]) -> None:
    def regret(happened: AnyEvent) -> None:
        if isinstance(happened, event):
            raise Regret("never mind")

    with refused(Regret, "never mind"):
        make(callbacks=[regret], eval_data=numbers(), steps=1_000_000, checkpoint_every=10**9).fit()


# -- workers that go away ----------------------------------------------------------------------------------------------


def _leave(model: nn.Module, batch: Any) -> Any:
    os._exit(4)


def _be_killed(model: nn.Module, batch: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _crash(model: nn.Module, batch: Any) -> Any:
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), signal.SIGSEGV)


def _allocate(model: nn.Module, batch: Any) -> Any:
    room = 64 << 20
    with open("/proc/self/statm") as sizes:
        used = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
    return torch.ones(room).sum()


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        pytest.param(_leave, ["left with exit code 4", "os._exit"], id="os._exit"),
        pytest.param(_be_killed, ["was killed by SIGKILL", "out of memory", "micro_batch="], id="killed"),
        pytest.param(
            _crash, ["was killed by SIGSEGV", "the stack of that moment is in its log", "worker-"], id="crash"
        ),
        pytest.param(_allocate, ["raised RuntimeError", "ran out of memory", "micro_batch="], id="no memory"),
    ],
)
@pytest.mark.parametrize("workers", [1, 3])
def test_a_worker_that_goes_away(loss: Any, words: list[str], workers: int) -> None:
    culprit = sample_at(BATCH - 1) / SAMPLES
    with refused(shoal.WorkerError, f"worker {workers - 1} ", *words) as error:
        make(
            workers=workers,
            replace=False,
            loss=lambda model, batch: loss(model, batch) if (batch == culprit).any() else square(model, batch),
        ).fit()
    assert isinstance(error.value, shoal.WorkerError)
    assert error.value.worker == workers - 1


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        pytest.param(_leave, ["left with exit code 4", "os._exit"], id="os._exit"),
        pytest.param(_crash, ["was killed by SIGSEGV", "the stack of that moment is in its log"], id="crash"),
    ],
)
@pytest.mark.parametrize("workers", [1, 3])
def test_samples_that_end_whoever_computes_them_end_the_run(loss: Any, words: list[str], workers: int) -> None:
    culprit = sample_at(BATCH - 1) / SAMPLES
    last = "no worker is left" if workers == 1 else "two workers died in step 1 while they computed the same samples"
    with refused(shoal.WorkerError, last, *words):
        make(
            workers=workers,
            loss=lambda model, batch: loss(model, batch) if (batch == culprit).any() else square(model, batch),
        ).fit()


# -- folders -----------------------------------------------------------------------------------------------------------


def test_a_run_that_does_not_exist() -> None:
    with refused(shoal.ConfigError, "resume='yesterday'", "neither 'last', nor a path, nor a run in"):
        make(resume="yesterday").fit()


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    with refused(shoal.CheckpointError, "no sound checkpoint", str(tmp_path)):
        make(resume=tmp_path).fit()


def test_a_folder_that_cannot_be_made(tmp_path: Path, home: Path) -> None:
    (tmp_path / "file").write_text("here first")
    with refused(shoal.RunDirError, f"run_dir={str(tmp_path / 'file')!r}", "cannot be written", "run_dir="):
        make(run_dir=tmp_path / "file").fit()
    with refused(shoal.RunDirError, "cannot be written", "Not a directory"):
        make(run_dir=tmp_path / "file" / "below").fit()
    assert (tmp_path / "file").read_text() == "here first"


def test_what_was_there_before_a_failed_run_is_still_there(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    for folder in (given, given / "new" / "newer"):
        with refused(shoal.WorkerError):
            make(run_dir=folder, loss=lambda model, batch: _raise(LookupError())).fit()
    for folder in (given, given / "new" / "newer"):
        assert not (folder / "checkpoints").exists() and "LookupError" in (folder / "report.html").read_text()


def test_a_folder_that_another_run_is_using(tmp_path: Path) -> None:
    said: list[str] = []

    def second(event: AnyEvent) -> shoal.Stop | None:
        if isinstance(event, RunStarted):
            with refused(shoal.RunDirError, "is in use by another run", f"process {os.getpid()}") as error:
                make(run_dir=tmp_path / "run").fit()
            said.append(str(error.value))
        return None

    assert make(run_dir=tmp_path / "run", steps=2, callbacks=[second]).fit().steps == 2
    assert said
    # and it is free again
    assert make(run_dir=tmp_path / "run", steps=3, resume="last").fit().steps == 3


@contextmanager
def mounted(place: Path, options: str) -> Iterator[Path]:
    if os.geteuid() != 0 or not sys.platform.startswith("linux"):
        pytest.skip("mounting a small disk needs root on Linux")
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_read_only(tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "disk", "ro,size=64k") as disk,
        refused(shoal.RunDirError, "cannot be written", "Read-only file system", "run_dir="),
    ):
        make(run_dir=disk / "run").fit()


def test_a_disk_that_is_full_at_a_checkpoint(tmp_path: Path) -> None:
    """First without a checkpoint before it, then with one, which stays and can be resumed."""
    large = {"model": lambda: nn.Linear(1, 30_000), "batch_size": SAMPLES}
    with mounted(tmp_path / "disk", "size=400k") as disk:
        with refused(shoal.CheckpointWriteError, "No space left", "bytes are free", "run_dir", "keep"):
            make(**large, run_dir=disk / "a" / "run", optimizer=torch.optim.Adam).fit()
        assert not list((disk / "a").rglob("*.safetensors"))

        with refused(shoal.CheckpointWriteError, "step 2", "No space left", "Earlier checkpoints are intact"):
            make(**large, run_dir=disk / "run", checkpoint_every=1, steps=5).fit()
        assert [path.name for path in (disk / "run" / "checkpoints").iterdir()] == ["step-000000001"]
        subprocess.run(["mount", "-o", "remount,size=2m", str(disk)], check=True)
        assert make(**large, run_dir=disk / "run", resume="last", steps=2).fit().steps == 2


def test_messages_name_no_internals() -> None:
    """What a user reads first is about their code, not about ours."""
    with refused(shoal.ConfigError) as error:
        make(loss=lambda model, batch: None).fit()
    assert not re.search(r"_worker|_Supervisor|session\.|Traceback", str(error.value))


# -- mistakes of a first conversion ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"loss": nn.CrossEntropyLoss()}, ["loss=CrossEntropyLoss()", "lambda model, batch"]),
        ({"data": (torch.zeros(9, 2), torch.zeros(9))}, ["tuple of 2 tensors with 9 rows", "TensorDataset"]),
        ({"data": (np.zeros((9, 2)), np.zeros(9))}, ["data is a tuple of 2 arrays with 9 rows", "TensorDataset"]),
        ({"eval_data": {"x": np.zeros((9, 2)), "y": np.zeros(9)}}, ["eval_data is a dict of 2 arrays", "values()"]),
        ({"schedule": 3}, ["schedule=3", "CosineAnnealingLR"]),
        ({"metrics": None}, ["metrics is None"]),
        ({"name": "x" * 400}, ["name='xxx", "at most 120"]),
        ({"name": "a\nb"}, ["name='a\\nb'", "printed"]),
    ],
)
def test_first_mistakes_are_refused_with_what_to_write(changed: dict[str, Any], words: list[str], home: Path) -> None:
    with refused(shoal.ConfigError, *words):
        make(**changed)
    assert not home.exists()


def test_first_mistakes_in_the_loss_get_a_hint() -> None:
    with refused(shoal.WorkerError, "hint: loss= and predict= are called as fn(model, batch)"):
        make(loss=lambda output, target: nn.functional.mse_loss(output, target)).fit()

    def twice(model: nn.Module, batch: Tensor) -> Tensor:
        loss = square(model, batch)
        loss.backward()
        return loss

    with refused(shoal.WorkerError, "leave .backward() out of the loss"):
        make(loss=twice).fit()


def test_notices_of_what_will_surprise(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def normalised() -> nn.Module:
        return nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)).eval().train()

    predict = {"predict": lambda model, batch: (model(batch), batch), "metrics": ["mse"]}
    make(model=normalised, **predict, steps=1, run_dir=tmp_path / "one").fit()
    said = capfd.readouterr().err
    assert "BatchNorm is in train mode" in said and "there is no eval_data=" in said
    make(model=lambda: nn.Linear(1, 2).eval(), steps=1, run_dir=tmp_path / "two").fit()
    assert "the model is in eval mode" in capfd.readouterr().err


def test_a_callback_that_fails_is_named_without_shoals_frames() -> None:
    def broken(event: AnyEvent) -> None:
        if isinstance(event, RunStarted):
            raise LookupError("not in the plan")

    with pytest.raises(LookupError) as caught:
        # long enough not to be at its last checkpoint by then
        make(callbacks=[lambda event: None, broken], epochs=10**6).fit()
    assert "callbacks[1]" in caught.value.__notes__[-1] and "RunStarted of step 0" in caught.value.__notes__[-1]
    files = [frame.path.name for frame in caught.traceback]
    assert files[-1] == "test_bad_input.py" and "supervise.py" not in files and "watch.py" not in files


def test_every_step_before_a_failure_is_told(tmp_path: Path) -> None:
    """Worker 0 tells of steps in batches; what it holds must come when any worker fails."""
    for number in range(3):
        steps: list[int] = []

        def note(event: AnyEvent, steps: list[int] = steps) -> None:
            if isinstance(event, StepDone):
                steps.append(event.step)

        calls = iter(range(10**6))

        def late(model: nn.Module, batch: Tensor, calls: Iterator[int] = calls) -> Tensor:
            if next(calls) == 17:
                raise LookupError("late")
            return square(model, batch)

        with pytest.raises(shoal.WorkerError) as caught:
            make(loss=late, epochs=50, callbacks=[note], run_dir=tmp_path / str(number)).fit()
        assert isinstance(caught.value, shoal.WorkerError) and caught.value.step == 17
        assert steps == list(range(1, 18))


@pytest.mark.parametrize("strict", ["no", "yes", 1, None])
def test_strict_is_true_or_false(strict: Any) -> None:
    with pytest.raises(shoal.ConfigError, match=r"strict=.*must be True or False"):
        shoal.Trainer(nn.Linear(2, 1), lambda m, b: m(b).mean(), lambda p: torch.optim.SGD(p), [0], strict=strict)
    with pytest.raises(shoal.ConfigError, match=r"strict=.*must be True or False"):
        shoal.launch(lambda session: None, workers=1, strict=strict)
