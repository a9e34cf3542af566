"""The coordinator's process: its letters, its journal, the keys of a term."""
