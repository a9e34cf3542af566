"""Where Shoal keeps what outlives a run."""

from __future__ import annotations

import os
from pathlib import Path

NO_STORE = "none"


def shoal_home() -> Path:
    """$SHOAL_HOME, or .shoal in the user's home."""
    home = os.environ.get("SHOAL_HOME")
    return Path(home) if home else Path.home() / ".shoal"


def store_url() -> str:
    """$SHOAL_STORE ("none" keeps no record), or the SQLite file in Shoal's home."""
    return os.environ.get("SHOAL_STORE") or f"sqlite:///{shoal_home() / 'shoal.db'}"
