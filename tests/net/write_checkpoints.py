"""Wrote the runs in `checkpoints/`, and what each of them comes to. For the record: tests read these, and never write.

    python tests/net/write_checkpoints.py [NAME ...]

Of each run the checkpoint in the middle of its second epoch was kept. `expected.safetensors` has the weights, and the
average if there is one, in the end: of that very run where it is exact; of one that went on from the checkpoint where a
codec is lossy, since what was still to be sent is shared out in equal parts then. The latter was written anew when
slices came to be of positions instead of atoms: what a lossy codec sends depends on who computes what.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal

HERE = Path(__file__).parent / "checkpoints"
MIDDLE, STEPS, BATCH = 5, 9, 20
"""There are three steps in each epoch, of 20, 20 and 10 samples."""
LOOP = "loop"
EXACT: dict[str, dict[str, Any]] = {
    "allreduce": {"ema": 0.8, "workers": 2},
    "server": {"sync": "server", "workers": 2},
}
LOSSY: dict[str, dict[str, Any]] = {"topk": {"codec": "topk:density=0.05,threshold=exact", "workers": 3}}


def points() -> TensorDataset:
    inputs = torch.randn(50, 32, generator=torch.Generator().manual_seed(4))
    return TensorDataset(inputs, inputs[:, :4].sin().sum(1, keepdim=True))


def net(width: int) -> nn.Module:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(32, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 1))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=2e-2, weight_decay=0.05)


def sgd(params: Any) -> torch.optim.Optimizer:
    """For codecs: with Adam topk is int8 in the first steps."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.8)


def falling(optimizer: torch.optim.Optimizer, total: int) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, total_iters=total)


def make(name: str, **options: Any) -> shoal.Trainer:
    """A run of this name as it was, but for `options`."""
    return shoal.Trainer(
        net(32 if name in LOSSY else 4),  # codecs leave matrices below 1,024 elements as they are
        loss,
        sgd if name in LOSSY else adamw,
        points(),
        **{
            "schedule": falling,
            "clip": 1.0,
            "batch_size": BATCH,
            "steps": STEPS,
            "seed": 8,
            "name": name,
            **{**EXACT, **LOSSY}[name],
            **options,
        },
    )


def loop(session: shoal.Session) -> dict[str, Tensor]:
    """A run of one's own."""
    model = net(4)
    optimizer = adamw(list(model.named_parameters()))
    scheduler = falling(optimizer, STEPS)
    session.track(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in session.steps(points(), BATCH, steps=STEPS):
        for batch in step:
            step.backward(loss(model, batch))
        step.apply(optimizer, clip=1.0)
        scheduler.step()
    return dict(model.state_dict())


def trained(name: str, **options: Any) -> dict[str, Tensor]:
    """Weights and average when the run of this name is done."""
    if name == LOOP:
        first, *_ = shoal.launch(loop, **{"workers": 2, "seed": 8, **options})
        return {f"weights.{key}": value for key, value in first.items()}
    trainer = make(name, **options)
    trainer.fit()
    kinds = {"weights": trainer.model.state_dict(), "average": trainer.average or {}}
    return {f"{kind}.{key}": value.clone() for kind, found in kinds.items() for key, value in found.items()}


def write(name: str, folder: Path) -> None:
    expected = trained(name, run_dir=folder, checkpoint_every=MIDDLE, keep=STEPS)
    middle = folder / "checkpoints" / f"step-{MIDDLE:09}"
    shutil.rmtree(HERE / name, ignore_errors=True)
    shutil.copytree(middle, HERE / name / "checkpoints" / middle.name)
    if name in LOSSY:
        expected = trained(name, run_dir=folder / "rest", resume=middle)
    save_file(expected, HERE / name / "expected.safetensors")


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or [*EXACT, *LOSSY, LOOP]:
        with tempfile.TemporaryDirectory() as folder:
            write(name, Path(folder))


if __name__ == "__main__":
    main()
