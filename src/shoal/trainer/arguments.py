"""Checks of what a user passes, each of which names the argument. All raise `ConfigError`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError

_LONGEST_NAME = 120


def as_path(name: str, given: Any) -> Path:
    if not isinstance(given, (str, os.PathLike)) or not str(given).strip():
        raise ConfigError(f"{name}={given!r} is of type {type(given).__name__}; it must be a path as text or a Path")
    return Path(given).expanduser()


def check_callbacks(callbacks: Any) -> None:
    if not isinstance(callbacks, (list, tuple)):
        raise ConfigError(
            f"callbacks={callbacks!r} is of type {type(callbacks).__name__}; it must be a list of functions"
        )
    for callback in callbacks:
        check_functions(callback=callback)


def check_model(model: Any) -> None:
    """A module (which is callable too), or a function that can be called without arguments."""
    if not callable(model):
        raise ConfigError(
            f"model={model!r} is of type {type(model).__name__}; it must be a torch.nn.Module, or a function without "
            "arguments that builds one"
        )


def check_builder(build: Callable[..., Any]) -> None:
    name = getattr(build, "__name__", type(build).__name__)
    try:
        inspect.signature(build).bind()
    except TypeError as error:
        raise ConfigError(
            f"model={name} cannot be called without arguments ({error}); pass the module itself, or lambda: {name}(...)"
        ) from None
    except ValueError:
        return  # it does not tell its arguments


def check_optimizer(optimizer: Any) -> None:
    if not callable(optimizer):
        raise ConfigError(
            f"optimizer={_shown(optimizer)}; it must be a function that builds an optimizer, such as "
            "lambda params: torch.optim.SGD(params, lr=0.1)"
        )


def check_loss(loss: Any) -> None:
    """A function of model and batch; the losses of torch are functions of output and target."""
    check_functions(loss=loss)
    if type(loss).__module__ == "torch.nn.modules.loss":
        raise ConfigError(
            f"loss={type(loss).__name__}() is a function of an output and a target; loss= is called with the model and "
            f"a batch: loss=lambda model, batch: {type(loss).__name__}()(model(batch[0]), batch[1])"
        )


def _shown(given: Any) -> str:
    """As it was written, where that says something: the default text of an object is an address."""
    return repr(given) if isinstance(given, (str, int, float)) else f"an object of type {type(given).__name__}"


def check_schedule(schedule: Any) -> None:
    if schedule is not None and not callable(schedule):
        raise ConfigError(
            f"schedule={_shown(schedule)}; it must be a function that builds a scheduler, such as "
            "lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)"
        )


def check_name(name: str) -> str:
    """A run's name: part of its folder's name, and shown in lists."""
    if len(name) > _LONGEST_NAME or not name.isprintable():
        shown = name if len(name) <= 60 else f"{name[:60]}…"
        raise ConfigError(
            f"name={shown!r} cannot be the name of a run; use at most {_LONGEST_NAME} characters that can be printed"
        )
    return name


def check_functions(*, optional: bool = False, **given: Any) -> None:
    for name, value in given.items():
        if value is None and optional:
            continue
        if not callable(value):
            raise ConfigError(f"{name}={value!r} is of type {type(value).__name__}; it must be a function")


def check_whole(least: int | None, *, optional: bool = False, **given: Any) -> None:
    for name, value in given.items():
        if value is None and optional:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name}={value!r} is of type {type(value).__name__}; it must be a whole number")
        if least is not None and value < least:
            raise ConfigError(f"{name}={value}; it must be at least {least}")


def check_number(name: str, value: Any, what: str, holds: Callable[[float], bool]) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not holds(float(value)):
        raise ConfigError(f"{name}={value!r}; it must be {what}, or None")


def check_flag(name: str, given: object) -> bool:
    if not isinstance(given, bool):
        raise ConfigError(f"{name}={given!r} is of type {type(given).__name__}; it must be True or False")
    return given


def check_faults(faults: Any) -> None:
    """Anything that can be told what a plan of faults is told (`Faults` in `elasticity`)."""
    told = ("at", "heard", "for_servers", "finish")
    given = f"the class {faults.__name__}" if isinstance(faults, type) else _shown(faults)
    if isinstance(faults, type) or not all(callable(getattr(faults, name, None)) for name in told):
        raise ConfigError(
            f"faults={given}; it must be a plan of faults, such as shoal.testing.FaultPlan().kill('worker-1', step=7)"
        )
