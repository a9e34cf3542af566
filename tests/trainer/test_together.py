"""What BatchNorm needs, and who has nothing to do: known and said before the first step."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal import Notice, Trainer
from shoal.core.atoms import Course
from shoal.core.errors import ConfigError
from shoal.core.idle import idle_words
from shoal.trainer.together import has_lone, likely_together, refusal, sizes_of


def flat() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def image() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 1)
    )


def pooled() -> nn.Module:
    """Of an image of one pixel there is one value per channel."""
    return nn.Sequential(nn.Unflatten(1, (4, 1, 1)), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 1))


def loss(model: nn.Module, batch: Any) -> Any:
    return model(batch).pow(2).mean()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)


def trainer(model: nn.Module, samples: int, **options: Any) -> Trainer:
    data = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
    return Trainer(model, loss, sgd, data, **{"batch_size": 16, "workers": 2, **options})


# -- BatchNorm ---------------------------------------------------------------------------------------------------------


def test_no_worker_computes_a_single_sample_of_a_short_last_step() -> None:
    assert trainer(flat(), 35, workers=3).fit().steps == 3  # one each


@pytest.mark.parametrize("sync", ["allreduce", "server:servers=1,durability=none"])
def test_a_last_step_of_one_sample_is_refused_at_the_start(sync: str) -> None:
    said: list[Any] = []
    with pytest.raises(ConfigError, match=r"one sample \(data has 33 samples, batch_size=16\).*set batch_size=15"):
        trainer(pooled(), 33, sync=sync, callbacks=[said.append]).fit()
    assert not [event for event in said if isinstance(event, shoal.StepDone)]


def test_where_a_sample_has_several_values_per_channel_one_is_enough() -> None:
    said: list[Any] = []
    assert trainer(image(), 17, callbacks=[said.append]).fit().steps == 2
    assert not [event.text for event in said if isinstance(event, Notice) and "single" in event.text]


@pytest.mark.parametrize(
    ("course", "samples", "limit", "apart", "words"),
    [
        (Course(40, 16), 16, 1, False, "micro_batch=1: .* set micro_batch=2 or more"),
        (Course(40, 1), 1, None, False, "batch_size=1: .* set batch_size=2 or more"),
        (Course(40, 16), 8, None, True, "a step of 8 samples .*16 or more in every step"),
        (Course(33, 16), 1, None, False, "set batch_size=15"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    course: Course, samples: int, limit: int | None, apart: bool, words: str
) -> None:
    assert re.search(words, refusal(course, samples, limit, apart=apart))


def test_an_own_loop_computes_two_at_a_time() -> None:
    def train(session: shoal.Session) -> list[int]:
        net = flat()
        optimizer = sgd(net.parameters())
        session.track(net=net, optimizer=optimizer)
        sizes = []
        for step in session.steps(torch.randn(18, 4), batch_size=16):
            for batch in step:
                sizes.append(len(batch))
                step.backward(loss(net, batch))
            step.apply(optimizer)
        return sizes

    first, second = shoal.launch(train, workers=2)
    assert (first[-1], second[-1]) == (2, 8)


def test_which_steps_there_are() -> None:
    course = Course(33, 16)
    assert sizes_of(course, 0, 2) == [16]
    assert sizes_of(course, 0, 3) == sizes_of(course, 2, 4) == [1, 16]
    assert sizes_of(course, 2, 3) == [1]
    assert sizes_of(Course(8, 16), 0, 5) == [8]


def test_which_steps_have_a_forward_of_one_sample() -> None:
    def lone(samples: int, members: int, limit: int | None = None, apart: bool = False, least: int = 1) -> bool:
        return has_lone(samples, [members], limit, apart=apart, least=least)

    assert lone(1, 1) and lone(3, 2) and lone(3, 1, limit=2) and lone(15, 1, apart=True)
    assert not lone(2, 1) and not lone(4, 2) and not lone(16, 4, apart=True)
    assert lone(1, 4, least=2) and lone(8, 1, limit=1, least=2)
    assert not lone(3, 2, least=2) and not lone(3, 1, limit=2, least=2)


def test_what_an_own_loop_is_taken_for() -> None:
    assert [likely_together([model]) for model in (flat(), image(), flat().eval())] == [2, 1, 1]


# -- nothing to do -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((Course(100, 32), 4, 4), ""),
        ((Course(100, 3), 3, 3), ""),
        (
            (Course(100, 1), 3, 3),
            "2 of 3 workers have nothing to do: a step has 1 sample (batch_size=1); set batch_size=3 or more, or "
            "workers=1",
        ),
        (
            (Course(2, 64), 3, 3),
            "1 of 3 workers has nothing to do: a step has 2 samples, all that data= has; set workers=2",
        ),
        (
            (Course(100, 4), 4, 4, 2),
            "2 of 4 workers have nothing to do: a step has 4 samples (batch_size=4), and BatchNorm needs 2 of them on "
            "a worker; set batch_size=8 or more, or workers=2",
        ),
        (
            (Course(100, 2), 2, 6),
            "with max_workers=6 up to 4 of them would have nothing to do: a step has 2 samples (batch_size=2); set "
            "batch_size=6 or more, or max_workers=2",
        ),
        ((Course(1000, 500), 30, 30), ""),
    ],
)
def test_words_for_workers_without_work(given: tuple[Any, ...], words: str) -> None:
    assert idle_words(*given) == words


def test_a_deterministic_step_is_shared_out_in_a_few_parts_only() -> None:
    words = "6 of 30 workers have nothing to do: with deterministic=True a step is shared out in 24 parts at most"
    assert idle_words(Course(1000, 500), 30, 30, by_atom=True) == f"{words}; set workers=24"
    assert idle_words(Course(1000, 500), 24, 24, by_atom=True) == ""
    assert "set batch_size=65 or more" in idle_words(Course(1000, 64), 17, 17, by_atom=True)


@pytest.mark.parametrize("options", [{}, {"max_workers": 3}, {"sync": "server:servers=1,durability=none"}], ids=str)
def test_it_is_said_once_at_the_start(options: dict[str, Any]) -> None:
    events: list[Any] = []
    trainer(nn.Linear(4, 1), 6, batch_size=1, steps=3, callbacks=[events.append], **options).fit()
    said = [event for event in events if isinstance(event, Notice) and "nothing to do" in event.text]
    assert [event.text[:34] for event in said] == ["1 of 2 workers has nothing to do: "]
    assert events.index(said[0]) < events.index(next(event for event in events if isinstance(event, shoal.StepDone)))


def test_an_own_loop_says_it_too() -> None:
    texts: list[str] = []

    def train(session: shoal.Session) -> None:
        net = nn.Linear(4, 1)
        optimizer = sgd(net.parameters())
        session.track(net=net, optimizer=optimizer)
        for _ in range(2):
            for step in session.steps(torch.ones(2, 4), batch_size=1):
                for batch in step:
                    step.backward(loss(net, batch))
                step.apply(optimizer)

    shoal.launch(
        train, workers=2, callbacks=[lambda event: texts.append(event.text) if isinstance(event, Notice) else None]
    )
    assert [text[:14] for text in texts if "nothing to do" in text] == ["1 of 2 workers"]
