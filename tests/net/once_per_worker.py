"""A script that runs once per worker: under torchrun, or started again by `fit()`. `test_matrix` reads what it writes.

once_per_worker.py FOLDER ENGINE
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import torch
from recipe import DECAY, Run, falling, own_loop, sgd, train
from safetensors.torch import save_file

import shoal


def main(folder: Path, engine: str) -> None:
    torch.set_num_threads(1)
    here = {"engine": engine, "workers": 2}
    runs = {
        "plain": train(**here, ema=DECAY, run_dir=folder / "run", checkpoint_every=4),
        "deterministic": train(**here, deterministic=True),
        "int8": train(**here, codec="int8", optimizer=sgd, schedule=falling),
        "resumed": train(**here, ema=DECAY, resume=folder / "run" / "checkpoints" / "step-000000004"),
    }
    for name, run in runs.items():
        keep(folder, name, run)
    loops = shoal.launch(own_loop, workers=2, engine=engine, seed=7)
    assert len(loops) == 2
    own = loops[rank() % 2]  # the first process of a script that starts itself is none of the workers
    keep_tensors(folder, "loop", own["weights"])
    gc.freeze()  # looking for garbage in all of torch at the very end takes a second


def keep(folder: Path, name: str, run: Run) -> None:
    """Every worker has the whole result."""
    result = run.result
    assert (result.steps, result.workers, result.samples) == (9, 2, 330)
    keep_tensors(folder, name, run.weights)
    if run.average is not None:
        keep_tensors(folder, f"{name}-average", run.average)


def keep_tensors(folder: Path, name: str, tensors: dict[str, torch.Tensor]) -> None:
    save_file({key: value.detach().clone() for key, value in tensors.items()}, folder / f"{name}-{rank()}.safetensors")


def rank() -> int:
    return int(os.environ.get("RANK", 0))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
