"""The session for own loops, and the Trainer built on it."""
