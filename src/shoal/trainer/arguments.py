"""Checks of what a user passes, each of which names the argument. All raise `ConfigError`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError


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
        given = repr(optimizer) if isinstance(optimizer, (str, int, float)) else f"a {type(optimizer).__name__}"
        raise ConfigError(
            f"optimizer={given}; it must be a function that builds an optimizer, such as "
            "lambda params: torch.optim.SGD(params, lr=0.1)"
        )


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
