"""What a data set draws is the same on any number of workers, in whatever processes it is loaded."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import shoal
from shoal.core.events import AnyEvent, Notice
from shoal.draws.others import watch_others
from shoal.trainer.session import Session


class Crops:
    """Draws from generators of its own and from those that all share."""

    def __init__(self, size: int = 60) -> None:
        self.size = size
        self.numpy, self.python = np.random.default_rng(0), random.Random(0)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        shared = random.random() + np.random.rand() + float(torch.rand(()))
        return torch.tensor([index, self.numpy.random(), self.python.random(), shared], dtype=torch.float64)


Told = list[list[float]]


def seen(data: Any, workers: int, *, loaders: int = 0, steps: int = 3, **options: Any) -> list[Told]:
    """For each step, the items that all workers got, in the order of their indices."""

    def loop(session: Session) -> list[Told]:
        net = nn.Linear(4, 1).double()
        optimizer = torch.optim.SGD(net.named_parameters(), lr=1e-6)
        session.track(net=net, optimizer=optimizer)
        got = []
        for step in session.steps(data, 20, steps=steps, data_workers=loaders):
            got.append([])
            for batch in step:
                got[-1] += batch.tolist()
                step.backward(net(batch).mean())
            step.apply(optimizer)
        return got

    told = shoal.launch(loop, workers=workers, **options)
    return [sorted(row for got in told for row in got[number]) for number in range(len(told[0]))]


def test_all_workers_and_loaders_draw_the_same() -> None:
    # what this process has drawn is not taken for what a forward draws, which would then be computed again
    watch_others(1)
    random.random(), np.random.rand()
    one = seen(Crops(), 1)
    rows = [row for step in one for row in step]
    assert len(rows) == 60 and all(len({row[place] for row in rows}) == 60 for place in range(4))
    assert seen(Crops(), 2) == one and seen(Crops(), 3, loaders=1) == one


def test_a_resumed_run_draws_the_same(tmp_path: Path) -> None:
    whole = seen(Crops(), 1, steps=6)
    assert seen(Crops(), 1, run_dir=tmp_path) == whole[:3]
    assert seen(Crops(), 2, steps=6, run_dir=tmp_path, resume="last") == whole[3:]


def predicted(workers: int, batch_size: int) -> Tensor:
    trainer = shoal.Trainer(
        nn.Linear(4, 1).double(),
        lambda model, batch: model(batch).mean(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        Crops(),
        workers=workers,
        batch_size=batch_size,
        predict=lambda model, batch: batch,
    )
    found: Tensor = trainer.predict(Crops(37))
    return found


def test_predictions_are_keyed_by_the_sample() -> None:
    one = predicted(1, 16)
    assert one[:, 0].tolist() == list(range(37)) and len(set(one[:, 1].tolist())) == 37
    assert torch.equal(predicted(2, 10), one)


def test_a_generator_that_cannot_be_keyed_is_told() -> None:
    class Secret(Crops):
        def __init__(self) -> None:
            super().__init__()
            self.secret = random.SystemRandom()

    told: list[str] = []

    def listen(event: AnyEvent) -> None:
        if isinstance(event, Notice):
            told.append(event.text)

    seen(Secret(), 2, callbacks=[listen])
    assert sum(text.startswith("data.secret is a random.SystemRandom") for text in told) == 1
