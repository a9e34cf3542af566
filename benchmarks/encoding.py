"""How fast codecs are: encoding a vector and decoding it again, on one core, without and with a residual.

examples
  python benchmarks/encoding.py                           all codecs, 20 MB and 4 MB
  python benchmarks/encoding.py --codecs int8 onebit      only these
  python benchmarks/encoding.py --sizes 64KB 100MB        other vectors
  python benchmarks/encoding.py --clock cpu --check       on a machine that is busy with other things

GB/s is bytes of the single-precision vector per second of encoding plus decoding. A round is a turn of every codec
without and with a residual, in an order drawn anew each time; figures are medians of rounds (5% .. 95% of them).
`ratio` is the length of the payload over that of the vector. Before anything is timed each codec has to prove that
what it decodes, and what it keeps in the residual, are together what was given.
--clock cpu counts only the time in which this process had a core; what others do to caches and memory still shows.
With --check the exit code is 1 if a figure is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from race import MB, SEED, Spread, named, size_of, spread
from torch import Tensor

from shoal.comm.codecs.cast import CastCodec, RawCodec
from shoal.comm.codecs.contract import Codec, State
from shoal.comm.codecs.int8 import Int8Codec
from shoal.comm.codecs.onebit import OneBitCodec
from shoal.comm.codecs.powersgd import PowerSGDCodec
from shoal.comm.codecs.topk import TopKCodec

CODECS: dict[str, Callable[[], Codec]] = {
    "none": RawCodec,
    "fp16": lambda: CastCodec("fp16"),
    "bf16": lambda: CastCodec("bf16"),
    "int8": Int8Codec,
    "int8 stochastic": lambda: Int8Codec(256, "stochastic"),
    "onebit": OneBitCodec,
    "topk 1%": lambda: TopKCodec(0.01, "sampled"),
    "topk 1% exact": lambda: TopKCodec(0.01, "exact"),
    "powersgd rank 4": lambda: PowerSGDCodec(4, 1024),
}
FIGURES = {  # GB/s without and with a residual
    "fp16": (1.5, 0.8),
    "bf16": (1.5, 0.8),
    "int8": (1.0, 0.5),
    "onebit": (0.5, 0.3),
    "topk 1%": (0.3, 0.3),
}
SIZES = [20 * MB, 4 * MB]
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
FEWEST_ROUNDS = 5
BURST_SECONDS = 0.02
CLOSE = 1e-5  # of the largest number: what may be missing from what is decoded and what is kept


@dataclass(frozen=True)
class Row:
    """One codec at one size; speeds in GB/s by the clock that was asked for."""

    codec: str
    size: int
    residual: bool
    ratio: float
    rounds: int
    clock: str
    speed: Spread
    encode: Spread
    """Milliseconds."""
    decode: Spread


class Arm:
    """A codec at work on a vector that all arms share."""

    def __init__(self, name: str, given: Tensor, out: Tensor, state: State) -> None:
        self.name, self.state = name, state
        self._codec, self._given, self._out = CODECS[name](), given, out
        self.payload = self._codec.encode(given, state)
        self._prove()
        self.encodes: list[float] = []
        self.decodes: list[float] = []

    def burst(self, clock: Callable[[], float], count: int) -> None:
        """Seconds of one encoding and one decoding, as found in `count` of them."""
        encoding = decoding = 0.0
        for _ in range(count):
            begun = clock()
            self.payload = self._codec.encode(self._given, self.state)
            between = clock()
            self._codec.decode(self.payload, self._out)
            encoding, decoding = encoding + between - begun, decoding + clock() - between
        self.encodes.append(encoding / count)
        self.decodes.append(decoding / count)

    def _prove(self) -> None:
        self._codec.decode(self.payload, self._out.fill_(math.nan))
        if not bool(torch.isfinite(self._out).all()):
            raise RuntimeError(f"{self.name} does not decode to finite numbers; nothing was measured")
        if self.state.residual is not None and self.state.shadow is not None:
            missing = self._given + self.state.residual - self._out - self.state.shadow
            if float(missing.abs().max()) > CLOSE * float(self._given.abs().max()):
                raise RuntimeError(f"{self.name} loses {float(missing.abs().max()):.3g}; nothing was measured")


def measure(names: Sequence[str], size: int, clock: str, seconds: float, fewest: int) -> list[Row]:
    arms = _arms(names, size // 4)
    counts, once = [], 0.0
    for arm in arms:
        began = time.perf_counter()
        arm.burst(CLOCKS[clock], 1)
        took = time.perf_counter() - began
        counts.append(max(1, math.ceil(BURST_SECONDS / took)))
        once += counts[-1] * took
    rounds = max(fewest, int(seconds / once))
    turns, shuffle = list(zip(arms, counts, strict=True)), random.Random(SEED)
    for _ in range(rounds):
        for arm, count in shuffle.sample(turns, len(turns)):
            arm.burst(CLOCKS[clock], count)
    return [_row(arm, size, clock) for arm in arms]


def _arms(names: Sequence[str], count: int) -> list[Arm]:
    random_numbers = torch.Generator().manual_seed(SEED)
    given, out = torch.randn(count, generator=random_numbers), torch.empty(count)
    residual, shadow = torch.randn(count, generator=random_numbers) * 0.1, torch.empty(count)
    states = [State(), State(residual, shadow)]
    return [Arm(name, given, out, state) for name in names for state in states]


def _row(arm: Arm, size: int, clock: str) -> Row:
    encodes, decodes = arm.encodes[1:], arm.decodes[1:]  # the first was a trial
    return Row(
        codec=arm.name,
        size=size,
        residual=arm.state.residual is not None,
        ratio=arm.payload.numel() / size,
        rounds=len(encodes),
        clock=clock,
        speed=spread([size / (one + other) / 1e9 for one, other in zip(encodes, decodes, strict=True)]),
        encode=spread([one * 1e3 for one in encodes]),
        decode=spread([one * 1e3 for one in decodes]),
    )


def figure(row: Row) -> float:
    return FIGURES.get(row.codec, (0.0, 0.0))[row.residual]


def show(rows: Sequence[Row]) -> None:
    load = os.getloadavg()[0]
    print(
        f"\n{named(rows[0].size)} on one core, {rows[0].rounds} rounds, {rows[0].clock} clock; "
        f"{load:.1f} processes wanted one of {os.cpu_count()} cores"
    )
    print(f"{'codec':<17}{'residual':<10}{'ratio':>8}{'encode ms':>11}{'decode ms':>11}{'GB/s':>24}{'wanted':>8}")
    for row in rows:
        first = f"{row.codec:<17}{'with' if row.residual else 'without':<10}{row.ratio:>8.4f}"
        wanted = f"{figure(row):g}" if figure(row) else ""
        print(f"{first}{row.encode.median:>11.2f}{row.decode.median:>11.2f}{row.speed!s:>24}{wanted:>8}")
    sys.stdout.flush()


def missed(rows: Sequence[Row]) -> list[str]:
    return [
        f"{row.codec} {'with' if row.residual else 'without'} a residual, {named(row.size)}: "
        f"{row.speed.median:.2f} GB/s instead of {figure(row):g}"
        for row in rows
        if row.speed.median < figure(row)
    ]


# ---- the command


def round_count(text: str) -> int:
    if (count := int(text)) < FEWEST_ROUNDS:
        raise argparse.ArgumentTypeError(f"got {count}; a median of less than {FEWEST_ROUNDS} rounds says little")
    return count


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--codecs",
        nargs="+",
        choices=CODECS,
        default=list(CODECS),
        metavar="CODEC",
        help=", ".join(CODECS).replace("%", "%%"),
    )
    add("--sizes", type=size_of, nargs="+", default=SIZES, metavar="SIZE", help="of the vector (default 20MB 4MB)")
    add("--clock", choices=CLOCKS, default="wall", help="what figures are taken by (default wall)")
    add("--seconds", type=float, default=10.0, help="about how long to measure one size (default 10)")
    add("--rounds", type=round_count, default=7, help="the fewest for a size, whatever they take (default 7)")
    add("--json", type=Path, metavar="FILE", help="also write all figures there")
    add("--check", action="store_true", help="exit with code 1 if a figure is missed")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for size in given.sizes:
        found = measure(given.codecs, size, given.clock, given.seconds, given.rounds)
        show(found)
        rows += found
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    said = missed(rows)
    for line in said:
        print(f"missed: {line}")
    return 1 if said and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
