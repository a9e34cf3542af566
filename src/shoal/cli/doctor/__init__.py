"""`shoal doctor`: the command, its checks, and what it tries out in a child process."""
