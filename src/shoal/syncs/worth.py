"""Whether a codec is worth its while: what encoding takes, and what sending fewer bytes saves."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from shoal.comm.group import Group
from shoal.comm.measure import finished
from shoal.comm.plan import Settled
from shoal.core.traffic import CONTROL, MEASUREMENT
from shoal.syncs.encoding import Encoding

_STEPS = 4
"""Steps that are timed before they are judged; the first does not count."""
_SAMPLE = 1 << 20
"""Bytes that are summed as they are, to see what that takes."""
_LEAST = 4096


class Worth:
    """Judges the exchanges of one group. All members do the same at the same steps."""

    def __init__(self, group: Group, encoding: Encoding, *, judged: bool = True) -> None:
        self._group = group
        self._encoding = encoding
        self._times: list[tuple[float, float]] = []
        self._judged = not judged or encoding.settled is not None

    def begin(self, scratch: Tensor) -> None:
        """A step begins: judge, if there have been enough. What `scratch` holds is lost."""
        if not self._judged and len(self._times) >= _STEPS and self._group.size > 1 and scratch.numel():
            self._judged = True
            self._encoding.settled = self._judge(scratch)

    def end(self, encoding: float, waited: float) -> None:
        """A step has been exchanged: seconds of encoding and decoding, and of waiting for other members."""
        if not self._judged:
            self._times.append((encoding, waited))

    def _judge(self, scratch: Tensor) -> Settled:
        small, large = (self._seconds(scratch, size) for size in (_LEAST, _SAMPLE))
        seconds = [sorted(column)[len(column) // 2] for column in zip(*self._times[1:], strict=True)]
        mine = torch.tensor([*seconds, small, large], dtype=torch.float64)
        told = self._group.gather(mine, CONTROL)
        # who came last waited for nobody: its time is that of the exchange itself
        encoding, waited = float(told[:, 0].median()), float(told[:, 1].min())
        small, large = float(told[:, 2].min()), float(told[:, 3].min())
        return judged(self._encoding.codec.name, scratch.nbytes, encoding, waited, (small, large), self._members())

    def _members(self) -> int:
        hosts = len(set(self._group.hosts))
        return hosts if hosts > 1 else self._group.size

    def _seconds(self, scratch: Tensor, size: int) -> float:
        part = scratch[: max(1, min(size, scratch.nbytes) // scratch.element_size())]
        least = float("inf")
        for _ in range(2):
            part.fill_(1.0)
            finished(part.device)
            begun = time.perf_counter()
            self._group.sum(part, MEASUREMENT).wait()
            finished(part.device)
            least = min(least, time.perf_counter() - begun)
        return least


def judged(codec: str, size: int, encoding: float, waited: float, sums: tuple[float, float], members: int) -> Settled:
    """What a codec is worth for so many bytes of gradients, where sums of 4 KB and 1 MB take these seconds."""
    latency, sample = sums[0], min(size, _SAMPLE)
    each = max(0.0, sums[1] - sums[0]) / max(1, sample - min(size, _LEAST))
    plain = latency + each * size
    saved = plain - waited
    note = f"encode {encoding * 1e3:.3g} ms, saves {max(0.0, saved) * 1e3:.3g} ms"
    if each > 0 and size >= _SAMPLE:
        note += f" at {2 * (members - 1) / members * 8 / each / 1e9:.2g} Gbit/s"
    note += ": use none" if encoding > saved else ""
    return Settled(latency, size / plain if plain > 0 else 0.0, [size], codec, encoding, saved, note)
