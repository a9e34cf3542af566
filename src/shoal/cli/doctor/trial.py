"""What `shoal doctor` runs in a child process: `python -m shoal.cli.doctor.trial WHAT PARENT`.

WHAT is `look` (facts about torch), `train` (the same facts, then a training) or `gpus`. Each result is a JSON object on
a line of stdout. Lines on stderr that begin with `STAGE` say what is being done. PARENT is the process id of the
doctor; the child does not outlive it.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.engines.lifeline import die_with_parent

if TYPE_CHECKING:
    from shoal.trainer.session import Session

STAGE = "stage: "
STEPS = 12
EXCHANGED_BYTES = 8_000_000
_TIMES = 4


def main(arguments: list[str]) -> None:
    """Do what is asked and print what came of it."""
    what, parent = arguments
    die_with_parent(int(parent))
    parts = {"look": [torch_facts], "train": [torch_facts, train], "gpus": [gpu_facts]}
    for part in parts[what]:
        print(json.dumps(part()), flush=True)


def torch_facts() -> dict[str, Any]:
    """Versions and backends of the torch that is installed. CUDA is not touched: workers are forked later."""
    _say("importing torch")
    begun = time.perf_counter()
    import torch
    import torch.distributed as dist

    seconds = time.perf_counter() - begun
    there = dist.is_available()
    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "import_seconds": round(seconds, 3),
        "backends": {
            "gloo": there and dist.is_gloo_available(),
            "nccl": there and dist.is_nccl_available(),
            "mpi": there and dist.is_mpi_available(),
        },
        **_numpy_facts(),
    }


def gpu_facts() -> dict[str, Any]:
    """The GPUs that torch sees, and the version of NCCL."""
    _say("looking for GPUs")
    import torch

    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    nccl: Any = torch.cuda.nccl.version() if gpus and torch.distributed.is_nccl_available() else None
    return {"gpus": gpus, "nccl_version": ".".join(map(str, nccl)) if nccl else None}


def _numpy_facts() -> dict[str, Any]:
    import torch

    try:
        import numpy
    except ImportError:
        return {"numpy": None, "numpy_fits": False}
    try:
        fits = torch.from_numpy(numpy.arange(3)).numpy().tolist() == [0, 1, 2]
    except RuntimeError:
        fits = False
    return {"numpy": numpy.__version__, "numpy_fits": fits}


def train() -> dict[str, Any]:
    """Train a small network on 1 and on 2 workers, and compare."""
    begun = time.perf_counter()
    _say("preparing to train")
    import torch

    from shoal.trainer.launch import launch

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="shoal-doctor-") as folder:
        results = {}
        for workers in (1, 2):
            _say(f"training on {workers} worker{'s'[: workers - 1]}")
            results[workers] = launch(
                partial(_train_one, asked=time.monotonic()),
                workers=workers,
                run_dir=Path(folder, f"workers-{workers}"),
                engine="local:start=fork",
            )
    _say("comparing")
    one, two = results[1][0], results[2]
    pairs = [(one, two[0]), (one, two[1])]
    difference = max(float((a - b).abs().max()) for x, y in pairs for a, b in zip(x["net"], y["net"], strict=True))
    return {
        "difference": difference,
        "loss": one["losses"],
        "start_seconds": max(found["start"] for found in two),
        "step_seconds": max(found["step"] for found in two),
        "exchange_bytes_per_second": EXCHANGED_BYTES / max(found["exchange"] for found in two),
        "seconds": time.perf_counter() - begun,
    }


def _train_one(session: Session, asked: float) -> dict[str, Any]:
    """One worker's part. `asked`: when the workers were asked for, on the clock that all processes share."""
    start = time.monotonic() - asked
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS * 24, 8, generator=generator)
    data = TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.named_parameters(), lr=0.01)
    session.track(net=net, optimizer=optimizer)
    taken, losses = [], []
    begun = time.perf_counter()
    for step in session.steps(data, batch_size=24, epochs=1, data_workers=0):
        for x, y in step:
            step.backward(nn.functional.mse_loss(net(x), y))
        losses.append(float(step.apply(optimizer).loss))
        taken.append(time.perf_counter() - begun)
        begun = time.perf_counter()
    return {
        "net": [param.detach() for param in net.parameters()],
        "start": start,
        "step": statistics.median(taken),
        "losses": [losses[0], losses[-1]],
        "exchange": _exchange_seconds(session) if session.workers > 1 else 0.0,
    }


def _exchange_seconds(session: Session) -> float:
    """The shortest time that a sum over all workers took."""
    import torch

    buffer = torch.ones(EXCHANGED_BYTES // 4)
    taken = []
    for _ in range(_TIMES):
        begun = time.perf_counter()
        total = session.sum(buffer)
        taken.append(time.perf_counter() - begun)
    if not bool((total == session.workers).all()):
        raise RuntimeError(f"a sum of ones over {session.workers} workers gave {total.unique()[:4].tolist()}")
    return min(taken)


def _say(what: str) -> None:
    print(f"{STAGE}{what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
