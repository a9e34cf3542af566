"""Checkpoints: atomic, checksummed, written in the background, without pickle.

`Checkpoints` is for the one process that writes; `load`, `load_newest` and `read_manifest` are for any process.
"""

from __future__ import annotations

from shoal.checkpoint.loading import Loaded, load, load_newest
from shoal.checkpoint.manifest import Manifest, read_manifest
from shoal.checkpoint.writer import Checkpoints, Saved

__all__ = ["Checkpoints", "Loaded", "Manifest", "Saved", "load", "load_newest", "read_manifest"]
