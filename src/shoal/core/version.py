"""Which Shoal this is. Workers of a run must all have the same."""

__version__ = "0.1.0"
