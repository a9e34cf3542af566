"""Where Shoal keeps what outlives a run."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.core.errors import ConfigError

NO_STORE = "none"


def shoal_home() -> Path:
    """$SHOAL_HOME, or .shoal in the user's home. Raises ConfigError if the user has none."""
    home = os.environ.get("SHOAL_HOME")
    if home:
        return Path(home)
    try:
        return Path.home() / ".shoal"
    except RuntimeError:
        raise ConfigError(
            f"There is no home folder to keep runs in: HOME is not set, and user {os.getuid()} is not known to the "
            "system. Set SHOAL_HOME to a folder that you may write"
        ) from None


def store_url() -> str:
    """$SHOAL_STORE ("none" keeps no record), or the SQLite file in Shoal's home."""
    return os.environ.get("SHOAL_STORE") or f"sqlite:///{shoal_home() / 'shoal.db'}"
