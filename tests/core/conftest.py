"""Hypothesis without a deadline per example: on a busy machine it would measure the machine."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
