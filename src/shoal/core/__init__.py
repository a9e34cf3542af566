"""Values and pure functions: no torch, no processes, no sockets."""
