"""`python -m shoal.cli` is the same as `shoal`."""

from __future__ import annotations

from shoal.cli.main import main

if __name__ == "__main__":
    main()
