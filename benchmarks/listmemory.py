"""How much of a data set every worker copies by reading it.

Workers share the memory of the process that made the data, page by page, until one writes to it. Python writes a
reference count to every object that it reads, and its garbage collector to every container that it passes.

examples
  python benchmarks/listmemory.py                     2 million samples in six forms, an epoch on 2 workers
  python benchmarks/listmemory.py --unfrozen          the same without the gc.freeze() of each worker
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

import shoal

WORKERS, BATCH = 2, 10_000


class Columns:
    """Samples are rows of columns: arrays, or those of an Arrow table."""

    def __init__(self, *columns: Any) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return tuple(column[index] for column in self.columns)


class Arrow(Columns):
    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return tuple(column[index].as_py() for column in self.columns)


def arrays(count: int) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.arange(1000, 1000 + count)
    return numbers, numbers * 0.5


def arrow(count: int) -> Arrow:
    import pyarrow

    return Arrow(*map(pyarrow.array, arrays(count)))


FORMS: dict[str, Callable[[int], Any]] = {
    "list of tuples (int, float)": lambda count: [(1000 + number, 0.5 * number) for number in range(count)],
    "list of lists [int, float]": lambda count: [[1000 + number, 0.5 * number] for number in range(count)],
    "list of dicts": lambda count: [{"x": 1000 + number, "y": 0.5 * number} for number in range(count)],
    "numpy arrays": lambda count: Columns(*arrays(count)),
    "tensors": lambda count: TensorDataset(*map(torch.from_numpy, arrays(count))),
}
if find_spec("pyarrow") is not None:
    FORMS["Arrow arrays"] = arrow


def own_megabytes() -> float:
    """Memory that this process has to itself, because it has written to it."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(kb) for kb in re.findall(r"^Private_Dirty: +(\d+)", rollup, re.MULTILINE)) / 1024


def epoch(session: Any, data: Any, unfrozen: bool) -> tuple[float, float]:
    """How many MB this worker has to itself beyond those it began with: after an epoch, and after gc.collect()."""
    if unfrozen:
        gc.unfreeze()
    before = own_megabytes()
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.named_parameters(), lr=0.1)
    session.track(net=net, optimizer=optimizer)
    for step in session.steps(data, BATCH, data_workers=0):
        for batch in step:
            numbers = batch["y"] if isinstance(batch, dict) else batch[1]
            step.backward(net(numbers.float()[:, None] * 1e-6).mean())
        step.apply(optimizer)
    read = own_megabytes() - before
    gc.collect()
    return read, own_megabytes() - before


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2_000_000)
    parser.add_argument("--unfrozen", action="store_true", help="undo gc.freeze() in each worker")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    print(f"{given.samples:,} samples; MB that a worker has for itself after an epoch, and after gc.collect()")
    with tempfile.TemporaryDirectory(prefix="bench-") as home:
        os.environ |= {"SHOAL_HOME": home, "SHOAL_PROGRESS": "quiet", "SHOAL_STORE": "none"}
        for name, made in FORMS.items():
            told = shoal.launch(partial(epoch, data=made(given.samples), unfrozen=given.unfrozen), WORKERS)
            read, collected = (max(values) for values in zip(*told, strict=True))
            print(f"  {name:<28} {read:6.0f} {collected:6.0f}", flush=True)


if __name__ == "__main__":
    main()
