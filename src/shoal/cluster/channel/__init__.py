"""How a worker tells its supervisor what happened, and learns that it should stop."""
