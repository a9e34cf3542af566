"""A lab: several hosts on one machine, each with an address, a share of the CPU and a link that can be slowed and cut.

with Lab(hosts=2, rate="1gbit") as lab:
    trainer = Trainer(..., workers=4, engine=f"local:lab={lab.name}")
"""

from __future__ import annotations

from shoal.core.errors import LabUnavailable
from shoal.testing.lab.counters import Counters
from shoal.testing.lab.lab import Lab
from shoal.testing.lab.needs import why_no_lab
from shoal.testing.lab.shape import Shape

__all__ = ["Counters", "Lab", "LabUnavailable", "Shape", "why_no_lab"]
