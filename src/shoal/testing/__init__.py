"""What tests of distributed code need. Only tests import it: Shoal's own and those of its users."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# At once, and not on first use: later, importing the module would put that here under the name of its function.
from shoal.testing.audit import Audit, audit

if TYPE_CHECKING:
    from shoal.testing.faults import FaultPlan

__all__ = ["Audit", "FaultPlan", "audit"]


def __getattr__(name: str) -> Any:
    """Load `FaultPlan` on first use (PEP 562): most that import this package do without."""
    if name != "FaultPlan":
        raise AttributeError(f"module 'shoal.testing' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = importlib.import_module("shoal.testing.faults").FaultPlan
    return value
