"""A worker's end of the coordinator."""
