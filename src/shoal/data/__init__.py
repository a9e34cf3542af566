"""Data sets to batches: fetching and collating items, in the worker or in loader processes beside it."""
