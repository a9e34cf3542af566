"""Draws other than dropout: a sample gets its numbers, whatever lies beside it, and they are distributed as torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch import distributions as D
from torch.nn import functional as F

N = 13
X = torch.randn(N, 6, generator=torch.Generator().manual_seed(1))
P = X.softmax(1)
Form = Callable[[Tensor], Tensor]

FORMS: dict[str, Form] = {
    "randn_like": lambda x: torch.randn_like(x),
    "randn_like, double": lambda x: torch.randn_like(x, dtype=torch.float64, memory_format=torch.preserve_format),
    "rand_like": lambda x: torch.rand_like(x, device="cpu", layout=torch.strided),
    "randn": lambda x: torch.randn(len(x), 4),
    "randn of a size": lambda x: torch.randn(size=(len(x), 4), dtype=torch.float64, device="cpu"),
    "randn of numpy's sizes": lambda x: torch.randn(np.int64(len(x)), 4),
    "rand": lambda x: torch.rand(x.shape),
    "rand of one number each": lambda x: torch.rand(len(x)),
    "rand, shared by time": lambda x: torch.rand((len(x), 1, 3), layout=torch.strided, pin_memory=False),
    "randn of complex numbers": lambda x: torch.view_as_real(torch.randn(len(x), 4, dtype=torch.complex64)),
    "rand_like of complex numbers": lambda x: torch.view_as_real(torch.rand_like(x, dtype=torch.complex128)),
    "randint": lambda x: torch.randint(1000, (len(x), 5)),
    "randint, from … to": lambda x: torch.randint(low=-9, high=10**6, size=(len(x),), dtype=torch.int32),
    "randint of 64 bits": lambda x: torch.randint(-(2**62), 2**62, (len(x), 5)),
    "randint_like": lambda x: torch.randint_like(x, 5, 1000),
    "normal": lambda x: torch.normal(x, x.abs()),
    "normal of numbers": lambda x: torch.normal(1.0, 2.0, (len(x), 3)),
    "normal around": lambda x: torch.normal(x, 0.5),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli of p": lambda x: torch.bernoulli(x, 0.3),
    "x.bernoulli": lambda x: x.sigmoid().bernoulli(),
    "multinomial": lambda x: torch.multinomial(x.softmax(1), 3),
    "multinomial, again and again": lambda x: x.softmax(1).multinomial(9, replacement=True),
    "multinomial, one": lambda x: torch.multinomial(x.softmax(1), 1, True),
    "multinomial of one vector": lambda x: torch.multinomial(P[0], len(x), replacement=True),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "normal_": lambda x: torch.empty_like(x).normal_(mean=2.0, std=3.0),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.01),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.4),
    "bernoulli_ of a tensor": lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()),
    "bernoulli_ of a column": lambda x: torch.empty_like(x).bernoulli_(x[:, :1].sigmoid()),
    "random_": lambda x: torch.empty_like(x).random_(),
    "random_ up to": lambda x: torch.empty(len(x), 5, dtype=torch.int16).random_(3000),
    "random_ from … to": lambda x: torch.empty(len(x), 5, dtype=torch.int64).random_(-5, 10**12),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, tau=0.7),
    "gumbel_softmax, hard": lambda x: F.gumbel_softmax(x, hard=True).cumsum(1),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu in place": lambda x: nn.RReLU(inplace=True)(x.clone()),
    "fractional pooling": lambda x: F.fractional_max_pool2d(x[:, None].expand(-1, 6, -1)[:, None], 2, output_size=4),
    "poisson": lambda x: torch.poisson(x.exp() * 20),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 50.0), x.sigmoid()),
    "Normal": lambda x: D.Normal(x, 1.0).sample(),
    "Normal, several": lambda x: D.Normal(x, 1.0).rsample((3,)).transpose(0, 1),
    "Gumbel": lambda x: D.Gumbel(x, 1.0).rsample(),
    "Categorical": lambda x: D.Categorical(logits=x[:, None].expand(-1, 7, -1)).sample(),
    "Categorical, several": lambda x: D.Categorical(logits=x).sample((9,)).T,
    "OneHotCategorical": lambda x: D.OneHotCategorical(logits=x).sample().cumsum(1),
    "Bernoulli": lambda x: D.Bernoulli(logits=x).sample(),
    "RelaxedBernoulli": lambda x: D.RelaxedBernoulli(torch.tensor(0.5), logits=x).rsample(),
    "Gamma": lambda x: D.Gamma(x.exp(), 1.0).rsample(),
    "Dirichlet": lambda x: D.Dirichlet(x.exp()).rsample(),
    "Poisson": lambda x: D.Poisson(x.exp() * 20).sample(),
    "Beta": lambda x: D.Beta(x.exp(), x.exp() + 1).rsample(),
    "StudentT": lambda x: D.StudentT(x.exp() + 2).rsample(),
    "LogNormal": lambda x: D.LogNormal(x, 1.0).rsample(),
    "Uniform": lambda x: D.Uniform(x - 1, x + 1).rsample(),
    "Exponential": lambda x: D.Exponential(x.exp()).rsample(),
    "Laplace": lambda x: D.Laplace(x, 1.0).rsample(),
    "Cauchy": lambda x: D.Cauchy(x, 1.0).rsample(),
    "Geometric": lambda x: D.Geometric(x.sigmoid() * 0.1).sample(),
    "Multinomial": lambda x: D.Multinomial(20, logits=x).sample(),
    "MultivariateNormal": lambda x: D.MultivariateNormal(x, torch.eye(6)).rsample(),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_sample_gets_its_numbers_whatever_lies_beside_it(check: Any, form: str) -> None:
    whole = check.values(lambda start, stop: FORMS[form](X[start:stop]), N)
    assert whole.shape[0] == N and len({tuple(row) for row in whole.reshape(N, -1).tolist()}) > 1


@pytest.mark.parametrize("form", FORMS)
def test_shape_and_type_are_torchs(check: Any, form: str) -> None:
    ours, theirs = check.play(lambda start, stop: FORMS[form](X), N).part(0, N)[0], FORMS[form](X)
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype and ours.requires_grad == theirs.requires_grad


MANY = 40_000
LONG = torch.linspace(-1, 1, 4).repeat(MANY // 4, 1)
BY_COLUMN = [
    form
    for form in FORMS
    # heavy tails have no moments; the rest is not one number per element of x, each with a distribution of its column
    if form.lower().rstrip("_") not in ("cauchy", "log_normal", "lognormal", "studentt", "multivariatenormal")
    and not any(word in form for word in ("pooling", "of one", "shared by", "Categorical, s", "rrelu", "64 bits"))
]


@pytest.mark.parametrize("form", BY_COLUMN)
def test_means_and_deviations_are_torchs(check: Any, form: str) -> None:
    if form in ("multinomial", "normal, several"):
        return
    samples = 100
    torch.manual_seed(5)
    ours = check.play(lambda start, stop: FORMS[form](LONG), samples).part(0, samples)[0].double()
    theirs = FORMS[form](LONG).double()
    ours, theirs = ours.reshape(len(LONG), -1), theirs.reshape(len(LONG), -1)
    for moment in (1, 2):
        one, other = ours**moment, theirs**moment
        sigma = (one.var(0) + other.var(0)).div(len(LONG)).sqrt() + 1e-9
        assert float(((one.mean(0) - other.mean(0)).abs() / sigma).max()) < 5.0


def test_multinomial_without_replacement_takes_none_twice(check: Any) -> None:
    chosen = check.play(lambda start, stop: torch.multinomial(P[:1].expand(3000, -1), 4), 3000).part(0, 3000)[0]
    assert all(len(set(row)) == 4 for row in chosen.tolist())
    firsts = torch.bincount(chosen[:, 0], minlength=6) / 3000
    assert float((firsts - P[0]).abs().max()) < 0.04
    weights = torch.tensor([[0.0, 1.0, 0.0, 2.0]]).expand(500, -1)
    for count, again in ((2, False), (5, True)):
        found = check.play(lambda start, stop, c=count, a=again: torch.multinomial(weights, c, a), 500).part(0, 500)[0]
        assert set(found.unique().tolist()) == {1, 3}


REFUSED: dict[str, Callable[[], Any]] = {
    "no whole number": lambda: torch.randint(5, 5, (N,)),
    "whole numbers that do not fit": lambda: torch.randint(0, 300, (N,), dtype=torch.uint8),
    "whole numbers from a continuum": lambda: torch.rand(N, dtype=torch.int64),
    "whole normal numbers": lambda: torch.empty(N, dtype=torch.int64).normal_(),
    "a negative weight": lambda: torch.multinomial(-torch.ones(N, 3), 1),
    "no weight": lambda: torch.multinomial(torch.zeros(N, 3), 1),
    "too many": lambda: torch.multinomial(torch.ones(N, 3), 4),
    "random_ of none": lambda: torch.empty(N).random_(5, 5),
    "a negative rate": lambda: torch.empty(N).exponential_(-1.0),
    "a negative deviation": lambda: torch.empty(N).normal_(0.0, -1.0),
    "a probability above 1": lambda: torch.empty(N).bernoulli_(1.5),
    "a probability below 0": lambda: torch.bernoulli(X),
    "negative deviations": lambda: torch.normal(X, X),
    "a negative number of events": lambda: torch.poisson(-torch.ones(N, 3)),
    "a leaf that has a gradient": lambda: torch.zeros(N, requires_grad=True).normal_(),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_torch_refuses_is_refused(check: Any, case: str) -> None:
    with pytest.raises(RuntimeError):
        REFUSED[case]()
    with pytest.raises(RuntimeError):
        check.play(lambda start, stop: REFUSED[case](), N).part(0, N)


def test_what_is_overwritten_has_no_gradient(check: Any) -> None:
    x = torch.ones(N, 3, requires_grad=True)
    y = check.play(lambda start, stop: (x * 2).normal_() + x, N).part(0, N)[0]
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, torch.ones_like(x))


@pytest.mark.parametrize("form", ["Gamma", "Dirichlet", "Beta", "gumbel_softmax", "LogNormal"])
def test_gradients_flow_through_a_draw(check: Any, form: str) -> None:
    net = nn.Linear(6, 6)
    check.gradients(net, lambda start, stop: (FORMS[form](net(X[start:stop])) * X[start:stop]).sum(), N)


REJECTION: dict[str, Callable[[Tensor], Tensor]] = {
    "gamma": lambda x: torch._standard_gamma(x),
    "dirichlet": lambda x: torch._sample_dirichlet(x),
    "poisson": lambda x: torch.poisson(x),
}


@pytest.mark.parametrize("form", REJECTION)
def test_elements_that_take_several_tries_have_their_own(check: Any, form: str) -> None:
    """In a part that is padded to another length, and in multiples of the samples."""
    draw, x = REJECTION[form], X.exp() * 9
    wide = F.pad(x, (0, 3), value=2.0)
    if form != "dirichlet":  # whose elements belong together
        one, other = (check.play(lambda start, stop, y=y: draw(y), N).part(0, N)[0] for y in (x, wide))
        assert torch.equal(one, other[:, :6])
    check.values(lambda start, stop: draw(x[start:stop].repeat_interleave(3, 0)), N)
    assert check.play(lambda start, stop: draw(x.bfloat16()), N).part(0, N)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("form", ["gamma", "poisson"])
@pytest.mark.parametrize("setting", [1e-3, 0.3, 1.0, 3.0, 9.9, 10.1, 30.0, 1e4])
def test_their_moments(check: Any, form: str, setting: float) -> None:
    size, x = 60_000, torch.full((100, 600), setting, dtype=torch.float64)
    found = check.play(lambda start, stop: REJECTION[form](x), 100).part(0, 100)[0] - setting
    fourth = 3 * setting**2 + (6 * setting if form == "gamma" else setting)
    assert abs(float(found.mean())) < 4.5 * (setting / size) ** 0.5
    assert abs(float(found.square().mean()) - setting) < 4.5 * ((fourth - setting**2) / size) ** 0.5
    if form == "gamma":
        third, spread = 2 * setting, 15 * setting**3 + 130 * setting**2 + 120 * setting
        assert abs(float((found**3).mean()) - third) < 4.5 * (spread / size) ** 0.5


def test_a_draw_without_samples_is_equal_in_all_forwards(check: Any) -> None:
    def compute(start: int, stop: int) -> Tensor:
        return torch.cat([torch.rand(()).view(1), torch.randn(3, 5).flatten(), torch.randperm(40) * 1.0, torch.rand(1)])

    play = check.play(compute, N).learn()
    whole, *parts = play.parts() + play.parts(2, 9)
    assert all(torch.equal(part, whole) for part in parts)
    play.seed = 8
    assert not torch.equal(play.parts()[0], whole)


def test_a_permutation_of_the_samples_is_told_of(check: Any) -> None:
    assert check.play(lambda start, stop: torch.randperm(N), N).part(0, N)[1].permuted
    assert not check.play(lambda start, stop: torch.randperm(N + 1), N).part(0, N)[1].permuted


def test_python_and_numpy_are_seeded_alike(check: Any) -> None:
    import random

    play = check.play(lambda start, stop: (random.random(), float(np.random.rand()), random.gauss(0, 1)), N)
    found = [play.part(start, stop)[0] for start, stop in ((0, N), (0, 3), (3, N))]
    assert len(set(found)) == 1
    play.seed = 8
    assert not set(play.part(0, N)[0]) & set(found[0])


def test_a_generator_of_the_users_own_is_left_alone_and_told_of(check: Any) -> None:
    def drawn() -> list[Tensor]:
        g = torch.Generator().manual_seed(3)
        return [
            torch.rand(4, generator=g),
            torch.randn(4, generator=g),
            torch.randint(9, (4,), generator=g),
            torch.randperm(5, generator=g),
            torch.empty(4).normal_(generator=g),
            torch.bernoulli(P, generator=g),
            torch.multinomial(P, 2, generator=g),
            torch.normal(X, 1.0, generator=g),
            torch.poisson(P, generator=g),
        ]

    ours, forward = check.play(lambda start, stop: drawn(), N).part(0, N)
    assert all(map(torch.equal, ours, drawn())) and len(forward.own) == 9
    assert not forward.drew and not forward.moved()


def test_outside_of_a_forward_torch_draws(check: Any) -> None:
    from shoal.draws.stand import standing

    def drawn() -> list[Tensor]:
        torch.manual_seed(4)
        return [form(X) for form in FORMS.values()]

    expected, before = drawn(), {name: getattr(torch, name) for name in ("rand", "dropout", "normal")}
    with standing(), standing():
        assert all(map(torch.equal, drawn(), expected))
        assert torch.rand is not before["rand"]
    assert {name: getattr(torch, name) for name in before} == before
    assert "normal_" not in vars(torch.Tensor) and "dropout" not in vars(torch._VF)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_types_stay_within_bounds(check: Any, dtype: torch.dtype) -> None:
    def compute(start: int, stop: int) -> list[Tensor]:
        x = torch.empty(N, 20_000, dtype=dtype)
        return [torch.rand_like(x), torch.rand(N, 20_000, dtype=dtype), x.uniform_()]

    for drawn in check.play(compute, N).part(0, N)[0]:
        assert drawn.dtype == dtype and float(drawn.min()) > 0 and float(drawn.max()) < 1
        assert abs(float(drawn.double().mean()) - 0.5) < 0.003


def test_no_elements(check: Any) -> None:
    def compute(start: int, stop: int) -> None:
        x = torch.empty(N, 0)
        for form in ("randn_like", "rand_like", "uniform_", "exponential_", "bernoulli", "normal around", "rrelu"):
            assert FORMS[form](x).shape == (N, 0)
        assert torch.randint(5, (0, N)).shape == (0, N)

    check.play(compute, N).part(0, N)


def test_bernoulli_is_certain_where_it_is(check: Any) -> None:
    for p in (0.0, 1.0):
        drawn = check.play(lambda start, stop, p=p: torch.bernoulli(torch.full((N, 9000), p)), N).part(0, N)[0]
        assert float(drawn.mean()) == p
