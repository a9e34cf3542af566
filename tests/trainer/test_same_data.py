"""Data that each worker makes itself: refused where it differs, before the first step, and not for what is drawn."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split

import shoal
from shoal.core.errors import ConfigError
from shoal.trainer.same_data import refuse_other_facts, refuse_other_items
from shoal.trainer.session import Session

pytestmark = pytest.mark.timeout(60)
ROWS = torch.arange(80.0)[:, None]


class Drawn:
    """Items whose draws cannot be keyed, beside some whose can."""

    def __init__(self, length: int = 80) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([random.SystemRandom().random() + random.random()]) + torch.rand(1)


def loop(session: Session, data: Any, batch_size: int = 16) -> int:
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.named_parameters(), lr=1e-9)
    session.track(net=net, optimizer=optimizer)
    for step in session.steps(data, batch_size=batch_size, steps=2):
        for batch in step:
            step.backward(net(batch[0] if isinstance(batch, list) else batch).mean())
        step.apply(optimizer)
    return session.step


def test_a_split_that_every_worker_draws_for_itself_is_refused() -> None:
    def split(session: Session) -> None:
        train, _ = random_split(TensorDataset(ROWS), [60, 20], torch.Generator().manual_seed(session.rank))
        loop(session, train)

    with pytest.raises(
        ConfigError, match=r"^data\[\d+\] is another item on worker 1 than on worker 0; .*manual_seed\(0"
    ):
        shoal.launch(split, workers=2)


def test_items_that_are_drawn_are_no_difference() -> None:
    assert shoal.launch(lambda session: loop(session, Drawn()), workers=2) == [2, 2]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            lambda session: loop(session, Drawn(80 + session.rank)),
            r"^len\(data\) is 80 on worker 0 and 81 on worker 1",
        ),
        (
            lambda session: loop(session, ROWS, 16 - session.rank),
            "^batch_size is 16 on worker 0 and 15 on worker 1",
        ),
    ],
)
def test_a_course_that_differs_is_refused(body: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        shoal.launch(body, workers=2)


def test_workers_that_differ_are_named() -> None:
    same = {"len(data)": 10, "seed": 0}
    refuse_other_facts([same, same])
    with pytest.raises(ConfigError, match=r"^seed is 0 on worker 0 and 7 on worker 2; it must be the same"):
        refuse_other_facts([same, same, {**same, "seed": 7}])


def test_items_that_are_others_each_time_say_nothing() -> None:
    told = [[b"a", b"b"], [b"a", b"c"], [b"x", b"b"]]
    refuse_other_items("data", [5, 9], [told[0], [b"a", b"b"]], [told[0], [b"a", b"b"]])
    refuse_other_items("data", [5, 9], told, [[b"1", b"2"], [b"3", b"4"], [b"5", b"6"]])
    with pytest.raises(ConfigError, match=r"^data\[9\] is another item on worker 1 than on worker 0; each worker has"):
        refuse_other_items("data", [5, 9], told, [[b"1", b"b"], [b"a", b"c"], [b"x", b"b"]])
