"""The supervisor: processes as the coordinator orders them, and people who watch."""
