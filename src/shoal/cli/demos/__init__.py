"""What `shoal demo` can train: one module per task, each with a `prepare()` that returns a `Task`."""
