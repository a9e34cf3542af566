"""The run store: what was run, how, and what came of it."""
