"""Every work by its name, for the arms."""

from __future__ import annotations

import draws
import work

WORKS = {**work.WORKS, **draws.WORKS}
