"""What the tests of this folder have in common."""

from __future__ import annotations

import pytest

from shoal.syncs import variance


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam's variance is looked at early: what follows from it does not depend on when."""
    monkeypatch.setattr(variance, "FIRST_CHECK", 10)
