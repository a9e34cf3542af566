"""Membership and recovery: who takes part in a run, and what happens when that changes."""
