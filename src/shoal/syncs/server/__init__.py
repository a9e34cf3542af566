"""Sync `server`: server processes hold the parameters and apply the optimizer; workers push gradients, pull weights."""
