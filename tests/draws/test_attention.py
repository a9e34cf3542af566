"""Attention whose weights are dropped by position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

N, HEADS, TIME, WIDTH = 13, 4, 6, 8


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


Q, K, V = (random(N, HEADS, TIME, WIDTH, seed=seed) for seed in range(3))
FLAGS = random(N, 1, TIME, TIME, seed=3) > -0.5
FLAGS[0, 0, 0] = False  # a query that may look nowhere
BIAS = random(N, HEADS, TIME, TIME, seed=4)
Settings = Callable[[slice], dict[str, Any]]

SETTINGS: dict[str, Settings] = {
    "plain": lambda at: {},
    "causal": lambda at: {"is_causal": True},
    "Boolean": lambda at: {"attn_mask": FLAGS[at]},
    "additive": lambda at: {"attn_mask": BIAS[at]},
    "one mask for all": lambda at: {"attn_mask": BIAS[0, 0]},
    "scaled": lambda at: {"scale": 0.3},
    "negative scale": lambda at: {"scale": -0.3},
    "grouped": lambda at: {"enable_gqa": True},
}


def attend(settings: Settings, p: float, at: slice, dtype: torch.dtype = torch.float32) -> Tensor:
    given = settings(at)
    heads = 2 if given.get("enable_gqa") else HEADS
    q, k, v = Q[at].to(dtype), K[at, :heads].to(dtype), V[at, :heads].to(dtype)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=p, **given)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_sample_gets_its_mask_whatever_lies_beside_it(check: Any, name: str) -> None:
    whole = check.values(lambda start, stop: attend(SETTINGS[name], 0.3, slice(start, stop)), N)
    assert torch.isfinite(whole).all()


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_computes_what_torch_does(check: Any, name: str, dtype: torch.dtype) -> None:
    """Hardly anything is dropped, so both must come to the same."""
    given = SETTINGS[name]
    play = check.play(lambda start, stop: attend(given, 1e-11, slice(start, stop), dtype), N)
    ours, theirs = play.part(0, N)[0], attend(given, 0.0, slice(0, N), dtype)
    assert check.difference(ours, theirs) < (2e-6 if dtype == torch.float32 else 1e-2)


def test_what_torch_refuses_is_refused(check: Any) -> None:
    both: Settings = lambda at: {"is_causal": True, "attn_mask": BIAS[at]}  # noqa: E731
    with pytest.raises(RuntimeError):
        check.play(lambda start, stop: attend(both, 0.3, slice(start, stop)), N).part(0, N)


def test_autocast_gives_the_type_that_torch_gives(check: Any) -> None:
    def compute(start: int, stop: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return attend(SETTINGS["causal"], 0.3, slice(start, stop))

    assert check.values(compute, N, bound=1e-2).dtype == torch.bfloat16


MODELS: dict[str, tuple[Callable[[], nn.Module], int, dict[str, Any]]] = {
    "attention": (lambda: nn.MultiheadAttention(WIDTH, 2, dropout=0.3), 1, {"need_weights": False}),
    "attention, batch first": (
        lambda: nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True),
        0,
        {"need_weights": False},
    ),
    "attention with weights": (lambda: nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True), 0, {}),
    "encoder": (lambda: encoder(batch_first=False), 1, {}),
    "encoder, batch first": (lambda: encoder(batch_first=True), 0, {}),
    "decoder": (lambda: nn.TransformerDecoderLayer(WIDTH, 2, 16, batch_first=True), 0, {}),
}


def encoder(*, batch_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize("name", MODELS)
# also where as many samples as time steps lie side by side
@pytest.mark.parametrize("time", [TIME, N, 5])
def test_gradients_add_up(check: Any, name: str, time: int) -> None:
    make, along, options = MODELS[name]
    torch.manual_seed(1)
    model = make()
    shape = (N, time, WIDTH) if along == 0 else (time, N, WIDTH)
    x, y = random(*shape), random(*shape, seed=2)

    def loss(start: int, stop: int) -> Tensor:
        part = x.narrow(along, start, stop - start)
        inputs = [part] * (3 if "attention" in name else 2 if name == "decoder" else 1)
        out = model(*inputs, **options)
        out = out[0] if isinstance(out, tuple) else out
        return (out * y.narrow(along, start, stop - start)).sum()

    check.gradients(model, loss, N)
