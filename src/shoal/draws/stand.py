"""Where we stand: before torch's own draws, as long as a run lasts. Outside of a forward nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from shoal.draws import attention, dropout, recurrent, rejection, sampling
from shoal.draws.replacing import Place, Replacing


def _places() -> list[Place]:
    vf: Any = torch._VF
    places: list[Place] = [(functional, "scaled_dot_product_attention", attention.make_attention)]
    for owner in (vf, torch):
        places += [
            (owner, "dropout", dropout.make_dropout),
            (owner, "dropout_", dropout.make_dropout_),
            (owner, "native_dropout", dropout.make_native_dropout),
        ]
        for inplace in (False, True):
            tail = "_" if inplace else ""
            feature = partial(dropout.make_feature_dropout, inplace=inplace)
            places += [
                (owner, f"alpha_dropout{tail}", partial(dropout.make_alpha_dropout, inplace=inplace)),
                (owner, f"feature_dropout{tail}", partial(feature, alpha=False)),
                (owner, f"feature_alpha_dropout{tail}", partial(feature, alpha=True)),
            ]
        networks = ("lstm", "gru", "rnn_tanh", "rnn_relu")
        places += [(owner, name, recurrent.make_recurrent) for name in networks]
    places += [
        (torch, "rand", partial(sampling.make_maker, kind="rand", make=sampling.UNIFORM)),
        (torch, "randn", partial(sampling.make_maker, kind="randn", make=sampling.NORMAL)),
        (torch, "rand_like", partial(sampling.make_like, kind="rand", make=sampling.UNIFORM)),
        (torch, "randn_like", partial(sampling.make_like, kind="randn", make=sampling.NORMAL)),
        (torch, "randint", sampling.make_randint),
        (torch, "randint_like", sampling.make_randint_like),
        (torch, "normal", sampling.make_normal),
        (torch, "bernoulli", sampling.make_bernoulli),
        (torch, "multinomial", sampling.make_multinomial),
        (torch, "randperm", sampling.make_randperm),
        (torch, "rrelu", partial(sampling.make_rrelu, inplace=False)),
        (torch, "rrelu_", partial(sampling.make_rrelu, inplace=True)),
        (torch.Tensor, "bernoulli", sampling.make_bernoulli),
        (torch.Tensor, "multinomial", sampling.make_multinomial),
    ]
    by_element = {
        "poisson": rejection.sample_poisson,
        "_standard_gamma": rejection.standard_gamma,
        "_sample_dirichlet": rejection.sample_dirichlet,
    }
    places += [
        (torch, name, partial(sampling.make_by_element, kind=name, make=by_element[name])) for name in by_element
    ]
    places += [(torch, "binomial", partial(sampling.make_by_row, kind="binomial"))]
    places += [(torch.Tensor, name, _filler(name, *settings)) for name, *settings in _FILLERS]
    return places


_FILLERS: tuple[tuple[str, Any, list[tuple[str, Any]]], ...] = (
    ("uniform_", sampling.uniform_, [("from", 0.0), ("to", 1.0)]),
    ("normal_", sampling.normal_, [("mean", 0.0), ("std", 1.0)]),
    ("log_normal_", sampling.log_normal_, [("mean", 1.0), ("std", 2.0)]),
    ("exponential_", sampling.exponential_, [("lambd", 1.0)]),
    ("cauchy_", sampling.cauchy_, [("median", 0.0), ("sigma", 1.0)]),
    ("geometric_", sampling.geometric_, [("p", None)]),
    ("bernoulli_", sampling.bernoulli_, [("p", 0.5)]),
    ("random_", sampling.random_, [("from", None), ("to", None)]),
)


def _filler(name: str, make: Any, defaults: list[tuple[str, Any]]) -> Callable[[Any], Any]:
    return partial(sampling.make_filler, kind=name, make=make, defaults=defaults)


_replacing = Replacing(_places)


def standing() -> AbstractContextManager[None]:
    """Within: draws in a forward that `shoal.draws.here.enter` has begun are made by position. May be nested."""
    return _replacing.within()
