"""Processes: who decides about them, starts them, watches them, and what they say to each other."""
