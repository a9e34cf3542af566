"""What data draws depends on the key and the position: not on who fetches, nor on what is fetched beside it."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from shoal.data.fetch import Fetcher, Positions
from shoal.data.generators import Draws, _Torch, global_sources
from shoal.data.loader import Loader
from shoal.draws.others import NUMPY, PYTHON, seed_others

SIZE = 12
Draw = Callable[[], float]


class Drawing:
    """Items are the index and a number that somebody has drawn."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(self.draw())


class Together(Drawing):
    def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
        return [self[index] for index in indices]


class Reluctant(Drawing):
    def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
        self.draw()
        raise NotImplementedError


def fetched(fetcher: Fetcher, *edges: int, key: int = 5) -> list[float]:
    """What is drawn at positions 0 … SIZE−1, fetched in ranges between these edges; sample 90 − n is at position n."""
    bounds = [0, *edges, SIZE]
    request = [Positions([90 - n for n in range(start, stop)], key, start) for start, stop in pairwise(bounds)]
    batches = fetcher.fetch(tuple(request))
    assert [index for batch in batches for index in batch[0].tolist()] == [90 - n for n in range(SIZE)]
    return [number for batch in batches for number in batch[1].tolist()]


GLOBALS: dict[str, Draw] = {
    "python": random.random,
    "python's spare": lambda: random.gauss(0, 1),
    "numpy": np.random.random_sample,
    "numpy's spare": np.random.standard_normal,
    "torch": lambda: float(torch.rand(())),
    "all three": lambda: random.random() + np.random.rand() + float(torch.rand(())),
}
OWN: dict[str, Callable[[], tuple[Any, str]]] = {
    "Random": lambda: (random.Random(1), "random"),
    "PCG64": lambda: (np.random.default_rng(1), "random"),
    "PCG64DXSM": lambda: (np.random.Generator(np.random.PCG64DXSM(1)), "standard_normal"),
    "MT19937": lambda: (np.random.Generator(np.random.MT19937(1)), "random"),
    "Philox": lambda: (np.random.Generator(np.random.Philox(1)), "random"),
    "SFC64": lambda: (np.random.Generator(np.random.SFC64(1)), "random"),
    "RandomState": lambda: (np.random.RandomState(1), "standard_normal"),
    "RandomState of Philox": lambda: (np.random.RandomState(np.random.Philox(1)), "standard_normal"),
}


class Owning(Drawing):
    """Has the generator that it draws from."""

    def __init__(self, generator: Any, method: str) -> None:
        self.generator, self.method = generator, method

    def draw(self) -> float:  # type: ignore[override]
        return float(getattr(self.generator, self.method)())


class Torch(Owning):
    def __init__(self) -> None:
        self.generator = torch.Generator()

    def draw(self) -> float:  # type: ignore[override]
        return float(torch.rand((), generator=self.generator, dtype=torch.float64))


CASES: dict[str, Callable[[], Drawing]] = {
    **{name: partial(Drawing, draw) for name, draw in GLOBALS.items()},
    **{f"own {name}": (lambda make=make: Owning(*make())) for name, make in OWN.items()},
    "own torch": Torch,
}


@pytest.mark.parametrize("case", CASES)
def test_the_position_decides(case: str) -> None:
    expected = fetched(Fetcher(CASES[case](), None))
    assert len(set(expected)) == SIZE
    warm = Fetcher(CASES[case](), None)
    for edges in ((1,), (4, 5, 9), tuple(range(1, SIZE)), ()):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        # these keep a spare number that a new seed must forget
        np.random.standard_normal(), random.gauss(0, 1)
        assert fetched(Fetcher(CASES[case](), None), *edges) == expected
        assert fetched(warm, *edges) == expected
    assert not set(fetched(warm, key=6)) & set(expected)


@pytest.mark.parametrize("case", ["all three", "own PCG64", "own Random"])
def test_a_process_loads_the_same(case: str) -> None:
    fetcher = Fetcher(CASES[case](), None)
    loader = Loader({"data": fetcher}, processes=1, spare_cores=0.0)
    try:
        stream = loader.open("data", lambda n: (Positions(range(90, 90 - SIZE, -1), 5, 0),) if n == 0 else None)
        batches = stream.take()
    finally:
        loader.close()
    assert batches is not None and batches[0][1].tolist() == fetched(Fetcher(CASES[case](), None), 5)


@pytest.mark.parametrize("kind", [Together, Reluctant])
def test_data_that_is_asked_for_many_at_once_is_asked_for_one_if_it_draws(kind: type[Drawing]) -> None:
    expected = fetched(Fetcher(Drawing(random.random), None))
    fetcher = Fetcher(kind(random.random), None)
    assert fetched(fetcher, 7) == expected and fetched(fetcher, 2) == expected


def test_what_draws_now_and_then_is_keyed_when_it_does() -> None:
    class Rarely(Drawing):
        def __getitem__(self, index: int) -> tuple[int, float]:
            number = random.random() if index % 2 else 0.0
            return index, number + (np.random.rand() if index == 80 else 0.0)

    expected = fetched(Fetcher(Rarely(random.random), None))
    for edges in ((1, 2, 3), (10,), (11,)):
        assert fetched(Fetcher(Rarely(random.random), None), *edges) == expected


# ---- where generators are found

shared = np.random.default_rng(3)


def from_module() -> float:
    return next(float(shared.random()) for _ in range(1))


class Slotted:
    __slots__ = ("generator",)

    def __init__(self) -> None:
        self.generator = random.Random(4)

    def __call__(self) -> float:
        return self.generator.random()


class Lazy(Drawing):
    """Makes its generator with the first item, as people do who want one in each process."""

    def __init__(self) -> None:
        self.generator: Any = None

    def draw(self) -> float:  # type: ignore[override]
        if self.generator is None:
            self.generator = np.random.default_rng()
        return float(self.generator.random())


def from_closure() -> Draw:
    generator = np.random.default_rng(5)
    return lambda: float(generator.random())


def from_default(generator: np.random.Generator = np.random.default_rng(6)) -> float:  # noqa: B008
    return float(generator.random())


def from_argument(generator: np.random.Generator) -> float:
    return float(generator.random())


class OfTheClass(Drawing):
    generator = random.Random(7)

    def __init__(self) -> None:
        pass

    def draw(self) -> float:  # type: ignore[override]
        return self.generator.random()


class Composed:
    def __init__(self, *draws: Draw) -> None:
        self.steps = {"all": list(draws), "self": self}

    def __call__(self) -> float:
        return sum(draw() for draw in self.steps["all"])  # type: ignore[union-attr,operator]


PLACES: dict[str, Callable[[], Any]] = {
    "a module": lambda: Drawing(from_module),
    "a slot": lambda: Drawing(Slotted()),
    "a closure": lambda: Drawing(from_closure()),
    "a default": lambda: Drawing(from_default),
    "a partial": lambda: Drawing(partial(from_argument, np.random.default_rng(8))),
    "a method": lambda: Drawing(random.Random(9).random),
    "numpy's method": lambda: Drawing(np.random.default_rng(9).random),
    "a transform among others": lambda: Drawing(Composed(Slotted(), from_module, from_closure())),
    "the class": OfTheClass,
    "the first item": Lazy,
    "a subset": lambda: Subset(Owning(np.random.default_rng(), "random"), range(100)),
    "many data sets": lambda: ConcatDataset([Owning(random.Random(n), "random") for n in range(3)]),
}


@pytest.mark.parametrize("place", PLACES)
def test_generators_are_found_in(place: str) -> None:
    expected = fetched(Fetcher(PLACES[place](), None))
    assert len(set(expected)) == SIZE
    warm = Fetcher(PLACES[place](), None)
    for edges in ((), (1,), (4, 5, 9)):
        assert fetched(warm, *edges) == expected


def test_two_generators_draw_different_numbers() -> None:
    kinds: list[Callable[[], Any]] = [lambda: random.Random(0), lambda: np.random.default_rng(0), torch.Generator]

    class Both:
        def __init__(self, make: Callable[[], Any]) -> None:
            self.left, self.right = make(), make()

        def __getitem__(self, index: int) -> tuple[float, float]:
            return drawn(self.left), drawn(self.right)

    def drawn(generator: Any) -> float:
        return float(
            torch.rand((), generator=generator) if isinstance(generator, torch.Generator) else generator.random()
        )

    for make in kinds:
        left, right = Fetcher(Both(make), None).fetch((Positions(range(SIZE), 0, 0),))[0]
        assert not set(left.tolist()) & set(right.tolist())


def test_a_generator_that_is_not_drawn_from_is_left_alone() -> None:
    data = Owning(np.random.default_rng(1), "random")
    data.draw = random.random  # type: ignore[method-assign]
    before = data.generator.bit_generator.state
    fetched(Fetcher(data, None), 3)
    assert data.generator.bit_generator.state == before


def test_a_generator_that_cannot_be_keyed_is_named() -> None:
    class Generator:
        __module__ = "cupy.random"

    class Sealed(np.random.PCG64):
        def __init__(self) -> None:
            super().__init__(0)

    transforms = [random.SystemRandom(), Generator(), np.random.Generator(Sealed())]
    data = Drawing(random.random)
    data.transforms = transforms  # type: ignore[attr-defined]
    first, second, third = Fetcher(data, None, name="train").notices
    assert first.startswith("train.transforms[0] is a random.SystemRandom, which cannot be keyed")
    assert "train.transforms[1] is a cupy.random" in second and "train.transforms[2]" in third
    assert Fetcher(Drawing(random.random), None).notices == []


def test_looking_runs_no_code_of_the_data() -> None:
    class Touchy(Drawing):
        @property
        def heavy(self) -> None:
            pytest.fail("was asked")

        def __getattr__(self, name: str) -> None:
            pytest.fail(f"was asked for {name}")

    data = Touchy(random.random)
    data.items = [data] * 5_000  # type: ignore[attr-defined]
    assert Fetcher(data, None).notices == []


# ---- what it costs


class Counted:
    """A generator that is never drawn from, and counts how often it is seeded."""

    certain = True

    def __init__(self) -> None:
        self.seeded = 0

    def seed(self, seed: int) -> None:
        self.seeded += 1

    def begin(self, seed: int) -> None:
        pass

    def moved(self) -> bool:
        return False


def test_data_that_draws_nothing_is_not_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[Any] = []
    asked: list[int] = []

    class Plain(Together):
        def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
            asked.append(len(indices))
            return super().__getitems__(indices)

    def count(owner: Any, name: str) -> None:
        seed = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: (seeds.append(given), seed(*given)))

    seed_others(0)  # what tests before this one did does not count
    for source in (PYTHON, NUMPY):
        monkeypatch.setattr(source, "_shared", False)
        monkeypatch.setattr(source, "_doubted", False)
    count(PYTHON, "_seed")
    count(NUMPY, "_seed")
    count(_Torch, "seed")
    fetcher = Fetcher(Plain(lambda: 1.0), list)
    for _ in range(10):
        fetcher.fetch((Positions(range(SIZE), 0, 0),))
    assert asked == [SIZE] * 10
    # once each, for their twins to be in step
    assert len(seeds) == 2


def test_only_what_is_drawn_from_is_seeded() -> None:
    counted = [Counted(), Counted()]
    draws = Draws([*global_sources(), *counted])
    draws.begin(0)
    random.random()
    assert draws.surprised()
    draws.seed(1)
    assert draws and [source.seeded for source in counted] == [0, 0]


def test_draws_of_others_between_fetches_are_not_the_datas() -> None:
    fetcher = Fetcher(Drawing(lambda: 1.0), None)
    for _ in range(4):
        fetched(fetcher)
        random.random(), np.random.rand(), torch.rand(())
    assert not fetcher._draws


# ---- collate


class Mixing:
    """A `collate` with a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng()

    def __call__(self, items: list[Any]) -> Tensor:
        return torch.tensor([self.generator.random()])

    def mix(self, items: list[Any]) -> Tensor:
        return self(items)


COLLATES: dict[str, Callable[[], Callable[[list[Any]], Tensor]]] = {
    "python": lambda: lambda items: torch.tensor([random.random()]),
    "all three": lambda: lambda items: torch.rand(1) + random.random() + np.random.rand(),
    "an object": Mixing,
    "a bound method": lambda: Mixing().mix,
    "a partial": lambda: partial(lambda mixing, items: mixing(items), Mixing()),
}


@pytest.mark.parametrize("case", COLLATES)
@pytest.mark.parametrize("draw", [random.random, lambda: 1.0])
def test_a_collate_is_keyed_by_its_first_position(case: str, draw: Draw) -> None:
    def collated(*firsts: int) -> list[float]:
        fetcher = Fetcher(Drawing(draw), COLLATES[case]())
        return [fetcher.fetch((Positions(range(size, 9), 5, first),))[0].item() for size, first in enumerate(firsts)]

    first, second, third = collated(0, 4, 8)
    assert collated(8, 0, 4) == [third, first, second] and len({first, second, third}) == 3


def test_a_collate_does_not_draw_what_the_first_item_drew() -> None:
    (batch,) = Fetcher(Drawing(random.random), lambda items: [items, random.random()]).fetch((Positions([1], 5, 0),))
    assert batch[0][0][1] != batch[1]


def test_a_collate_that_changes_its_items_gets_new_ones() -> None:
    def scaling(items: list[Any]) -> Tensor:
        for _, row in items:
            row.mul_(1 + random.random())
        return torch.stack([row for _, row in items])

    class Rows(Drawing):
        def __getitem__(self, index: int) -> Any:
            return index, torch.ones(1)

    fetcher = Fetcher(Rows(random.random), scaling)
    first, again = (fetcher.fetch((Positions(range(4), 5, 0),))[0] for _ in range(2))
    assert torch.equal(first, again)
