"""Where the values of a run come from: flags of `shoal run` beat the script's arguments, which beat the defaults."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from shoal.core import settings
from shoal.core.errors import ConfigError
from shoal.core.settings import DEFAULT, FLAG, SCRIPT, Setting

P = ParamSpec("P")
T = TypeVar("T")
Owner = TypeVar("Owner", bound="Configured")


class Configured:
    """What was made with arguments of which some may be overridden."""

    config: dict[str, Setting]
    """Every argument as plain data, and where it came from."""

    def settle(self, **values: Any) -> None:
        """What arguments that were left open have come to."""
        for name, value in values.items():
            self.config[name] = Setting(plain(value), self.config[name].origin)


def configured(init: Callable[Concatenate[Owner, P], None]) -> Callable[Concatenate[Owner, P], None]:
    """For `__init__`: apply the overrides that are current, and keep every value with its origin in `config`."""
    signature = inspect.signature(init)

    def resolved(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> None:
        _refuse_unknown(signature, init, kwargs)
        bound = _bound(signature, self, *args, **kwargs)
        if bound is None:
            return init(self, *args, **kwargs)  # Python's own words for what is missing
        settings.current().made += 1
        self.config = _apply(signature, bound.arguments, "the Trainer", skip=1)
        return init(*bound.args, **bound.kwargs)

    return functools.update_wrapper(resolved, init)


def configured_call(function: Callable[P, T]) -> Callable[P, T]:
    """For a function: apply the overrides that are current. Inside, `config_of_call()` has all values and origins."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def resolved(*args: P.args, **kwargs: P.kwargs) -> T:
        _refuse_unknown(signature, function, kwargs)
        bound = _bound(signature, *args, **kwargs)
        if bound is None:
            return function(*args, **kwargs)
        token = _config.set(_apply(signature, bound.arguments, f"shoal.{function.__name__}", skip=0))
        try:
            return function(*bound.args, **bound.kwargs)
        finally:
            _config.reset(token)

    return resolved


def spelt(function: Callable[P, T]) -> Callable[P, T]:
    """For a function that is called by users: a keyword that it does not have is told with the one that was meant."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        _refuse_unknown(signature, function, kwargs)
        return function(*args, **kwargs)

    return checked


_ELSEWHERE = {
    "num_workers": "data_workers",
    "n_workers": "workers",
    "world_size": "workers",
    "nproc": "workers",
    "checkpoint_dir": "run_dir",
    "output_dir": "run_dir",
    "max_epochs": "epochs",
    "num_epochs": "epochs",
    "max_steps": "steps",
    "gradient_clip": "clip",
    "max_norm": "clip",
    "collate_fn": "collate",
    "scheduler": "schedule",
}
"""Names that other libraries have for the same, where the nearest by letters would be something else."""


def _refuse_unknown(signature: inspect.Signature, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """In the words of newer Pythons, which know the nearest name."""
    for name in given:
        if name not in signature.parameters:
            known = _ELSEWHERE.get(name)
            near = [known] if known in signature.parameters else get_close_matches(name, signature.parameters, n=1)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{function.__qualname__}() got an unexpected keyword argument {name!r}{hint}")


def _bound(signature: inspect.Signature, /, *args: Any, **kwargs: Any) -> inspect.BoundArguments | None:
    """None if they do not fit. Outside of the handler the call that says so is not told as an error in another one."""
    try:
        return signature.bind(*args, **kwargs)
    except TypeError:
        return None


def config_of_call() -> dict[str, Setting]:
    return _config.get()


_config: ContextVar[dict[str, Setting]] = ContextVar("config")


def _apply(signature: inspect.Signature, arguments: dict[str, Any], who: str, *, skip: int) -> dict[str, Setting]:
    """Put the overrides into `arguments`, those of `signature` that were given."""
    parameters = list(signature.parameters.values())[skip:]
    overrides = settings.current().overrides
    names = {parameter.name for parameter in parameters}
    strange = [name for name, value in overrides.items() if name not in names and value is not None]
    if strange:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in strange)
        known = ", ".join(f"--{name.replace('_', '-')}" for name in overridable(names))
        raise ConfigError(f"{flags}: {who} of this script has no such argument; it takes {known}")
    config = {}
    for parameter in parameters:
        name = parameter.name
        if name in overrides:
            arguments[name] = overrides[name]
            origin = FLAG
        else:
            origin = SCRIPT if name in arguments else DEFAULT
        config[name] = Setting(plain(arguments.get(name, parameter.default)), origin)
    return config


def show_config(config: Mapping[str, Setting], who: str) -> None:
    """Where training would begin: with `--show-config`, print the configuration instead, and leave."""
    now = settings.current()
    now.entered += 1
    if not now.show_config:
        return
    if settings.progress_mode() == "json":
        lines = msgspec.json.encode({name: msgspec.to_builtins(setting) for name, setting in config.items()}).decode()
        print(lines, file=now.stream or sys.stdout)
        raise SystemExit(0)
    width = max(map(len, config))
    print(f"{who}: what `shoal run` and the script say. A flag beats the script, the script beats the default.\n")
    for name, setting in config.items():
        print(f"  {name:{width}}  {setting.origin:7}  {setting.value}")
    raise SystemExit(0)


def overridable(names: set[str]) -> list[str]:
    """Which of these arguments a flag can set: those that are plain values."""
    return [name for name in FLAGS if name in names]


FLAGS = (
    "workers",
    "min_workers",
    "max_workers",
    "replace",
    "restarts",
    "batch_size",
    "epochs",
    "steps",
    "layout",
    "sync",
    "codec",
    "precision",
    "collective",
    "engine",
    "micro_batch",
    "clip",
    "ema",
    "seed",
    "deterministic",
    "data_workers",
    "name",
    "run_dir",
    "resume",
    "checkpoint_every",
    "keep",
    "eval_every",
)
"""Arguments of the Trainer that `shoal run` has flags for."""


def plain(value: Any) -> Any:
    """A value of a configuration as data that can be shown and stored."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return str(Path(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and hasattr(value, "name"):
        return _spec(value)
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if type(value) is dict and all(isinstance(each, str) for pair in value.items() for each in pair):
        return ", ".join(f"{key}: {part}" for key, part in value.items())
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    if isinstance(value, functools.partial):
        name = f"partial of {plain(value.func)}"
    size = _length(value)
    return name if size is None else f"{name} of {size:,} items"


def _spec(value: Any) -> str:
    """As it would be written: `local:start=fork`."""
    fields = {
        field.name: getattr(value, field.name)
        for field in dataclasses.fields(value)
        if getattr(value, field.name) != field.default
    }
    said = ",".join(f"{key}={given}" for key, given in fields.items())
    return f"{value.name}:{said}" if said else str(value.name)


def _length(value: Any) -> int | None:
    if isinstance(value, type) or not hasattr(value, "__getitem__") or not hasattr(value, "__len__"):
        return None
    try:
        return len(value)
    except Exception:  # whatever a user's data set says: it is asked again where it matters
        return None
