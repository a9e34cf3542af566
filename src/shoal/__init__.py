"""Shoal trains any PyTorch model on many workers.

The names below are all there is to import from `shoal` itself. They are loaded when first used, so `import shoal` costs
next to nothing and does not import torch.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shoal.core.version import __version__

if TYPE_CHECKING:
    from shoal.core.errors import (
        AuditError,
        CheckpointError,
        CheckpointMismatch,
        CheckpointWriteError,
        ConfigError,
        CorruptCheckpoint,
        DataError,
        GroupError,
        Interrupted,
        LabUnavailable,
        NotFiniteError,
        PayloadError,
        Preempted,
        RunDirError,
        RunNotFound,
        ShoalError,
        Stopped,
        StoreError,
        WorkerError,
    )
    from shoal.core.events import (
        CheckpointSaved,
        EpochDone,
        EvalDone,
        ExchangeSettled,
        Notice,
        Preparing,
        Regrouped,
        RunEnded,
        RunFailed,
        RunStarted,
        Scale,
        ServersSeen,
        StepDone,
        Stop,
        WorkerSeen,
    )
    from shoal.metrics.metrics import Metric
    from shoal.trainer.crossval import cross_validate
    from shoal.trainer.launch import launch
    from shoal.trainer.result import Result
    from shoal.trainer.session import Session
    from shoal.trainer.trainer import Trainer

__all__ = [
    "AuditError",
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointSaved",
    "CheckpointWriteError",
    "ConfigError",
    "CorruptCheckpoint",
    "DataError",
    "EpochDone",
    "EvalDone",
    "ExchangeSettled",
    "GroupError",
    "Interrupted",
    "LabUnavailable",
    "Metric",
    "NotFiniteError",
    "Notice",
    "PayloadError",
    "Preempted",
    "Preparing",
    "Regrouped",
    "Result",
    "RunDirError",
    "RunEnded",
    "RunFailed",
    "RunNotFound",
    "RunStarted",
    "Scale",
    "ServersSeen",
    "Session",
    "ShoalError",
    "StepDone",
    "Stop",
    "Stopped",
    "StoreError",
    "Trainer",
    "WorkerError",
    "WorkerSeen",
    "__version__",
    "cross_validate",
    "launch",
]

_HOME_OF = {
    "CheckpointSaved": "shoal.core.events",
    "EpochDone": "shoal.core.events",
    "EvalDone": "shoal.core.events",
    "Metric": "shoal.metrics.metrics",
    "Notice": "shoal.core.events",
    "Preparing": "shoal.core.events",
    "Regrouped": "shoal.core.events",
    "Result": "shoal.trainer.result",
    "RunEnded": "shoal.core.events",
    "RunFailed": "shoal.core.events",
    "RunStarted": "shoal.core.events",
    "Scale": "shoal.core.events",
    "ServersSeen": "shoal.core.events",
    "Session": "shoal.trainer.session",
    "StepDone": "shoal.core.events",
    "Stop": "shoal.core.events",
    "Trainer": "shoal.trainer.trainer",
    "WorkerSeen": "shoal.core.events",
    "ExchangeSettled": "shoal.core.events",
    "cross_validate": "shoal.trainer.crossval",
    "launch": "shoal.trainer.launch",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use (PEP 562)."""
    if name.startswith("_") or name not in __all__:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}; it has {', '.join(__all__)}")
    with _without_collecting():
        value = getattr(importlib.import_module(_HOME_OF.get(name, "shoal.core.errors")), name)
    globals()[name] = value
    return value


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Modules are there to stay: looking for garbage among them, and all of torch, takes longer than importing them."""
    wanted = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if wanted:
            gc.enable()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
