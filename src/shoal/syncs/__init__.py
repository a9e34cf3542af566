"""How workers agree on one update."""
