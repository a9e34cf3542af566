"""Dropout by position, in all forms in which torch has it."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import dropout as captured

from shoal.draws.dropout import noise

N = 13
Form = Callable[[Tensor], Tensor]


def images(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(N, *shape, generator=torch.Generator().manual_seed(1)).to(dtype)


FORMS: dict[str, tuple[Form, tuple[int, ...]]] = {
    "nn.Dropout": (nn.Dropout(0.3), (7,)),
    "nn.Dropout, large": (nn.Dropout(0.3), (60, 70)),
    "nn.Dropout, rows longer than a block": (nn.Dropout(0.3), (41, 1021)),
    "nn.Dropout in place": (nn.Dropout(0.3, inplace=True), (7, 2)),
    "nn.Dropout1d": (nn.Dropout1d(0.4), (9, 3)),
    "nn.Dropout2d": (nn.Dropout2d(0.4), (9, 3, 3)),
    "nn.Dropout3d": (nn.Dropout3d(0.4, inplace=True), (9, 2, 2, 2)),
    "nn.AlphaDropout": (nn.AlphaDropout(0.3), (11,)),
    "nn.FeatureAlphaDropout": (nn.FeatureAlphaDropout(0.3), (11, 2, 2)),
    "F.dropout": (lambda x: F.dropout(x, 0.5), (8,)),
    "F.dropout in place": (lambda x: F.dropout(x, 0.5, inplace=True), (8,)),
    "F.dropout, captured": (lambda x: captured(x, 0.5), (8,)),
    "F.dropout2d in place": (lambda x: F.dropout2d(x, 0.5, inplace=True), (8, 2, 2)),
    "F.alpha_dropout in place": (lambda x: F.alpha_dropout(x, 0.5, training=True, inplace=True), (8,)),
    "F.feature_alpha_dropout": (lambda x: F.feature_alpha_dropout(x, 0.5, training=True, inplace=True), (8, 3)),
    "torch.dropout by name": (lambda x: torch.dropout(x, p=0.5, train=True), (8,)),
    "torch.dropout_": (lambda x: torch.dropout_(x, 0.5, True), (8,)),
    "torch.native_dropout": (lambda x: torch.native_dropout(x, 0.5, True)[0], (8,)),
    "of complex numbers": (lambda x: torch.view_as_real(F.dropout(torch.complex(x, x), 0.5)), (8,)),
    "not contiguous": (lambda x: F.dropout(x.transpose(1, 2), 0.5).transpose(1, 2), (5, 6)),
    "not contiguous, large": (lambda x: F.dropout(x.transpose(1, 2), 0.5).transpose(1, 2), (60, 70)),
    "samples last": (lambda x: F.dropout(x.permute(1, 2, 0), 0.5).permute(2, 0, 1), (5, 6)),
    "samples in the middle, large": (lambda x: F.dropout(x.transpose(0, 1), 0.5).transpose(0, 1), (60, 70)),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_sample_gets_its_mask_whatever_lies_beside_it(check: Any, form: str) -> None:
    apply, shape = FORMS[form]
    x = images(*shape) + 3.0
    whole = check.values(lambda start, stop: apply(x[start:stop].clone()), N)
    rows = whole.flatten(1)
    assert (rows[:-1] != rows[1:]).any(1).all(), "all samples got the same mask"
    assert not torch.equal(whole, x.to(whole.dtype).view_as(whole) if whole.shape == x.shape else whole + 1)


@pytest.mark.parametrize("form", [form for form in FORMS if "place" not in form and "_" not in form])
def test_gradients_are_those_of_the_mask(check: Any, form: str) -> None:
    apply, shape = FORMS[form]
    x = (images(*shape) + 3.0).requires_grad_()
    y = check.play(lambda start, stop: apply(x[start:stop] * 1.0), N).part(0, N)[0]
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    slope = torch.ones_like(x) if "Alpha" in form else y.sum(-1) / x if "complex" in form else y / x
    if "Alpha" not in form:
        assert torch.allclose(grad, slope.detach(), rtol=1e-5)
    assert y.requires_grad and grad.shape == x.shape and float(grad.std()) > 0


def test_the_second_derivative_is_there(check: Any) -> None:
    x = images(60, 70).requires_grad_()
    y = check.play(lambda start, stop: F.dropout(x[start:stop] ** 3, 0.5), N).part(0, N)[0]
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    kept = (y != 0).float() * 2
    assert torch.allclose(second, 6 * x.detach() * kept, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(8,), (50, 60)])
def test_other_types_get_the_same_mask(check: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    def masked(dtype: torch.dtype) -> Tensor:
        x = torch.ones(N, *shape, dtype=dtype)
        whole: Tensor = check.values(lambda start, stop: F.dropout(x[start:stop], 0.5), N)
        assert whole.dtype == dtype
        return whole.float()

    assert torch.equal(masked(dtype), masked(torch.float32))


def test_autocast_in_sixteen_bits(check: Any) -> None:
    net, x = nn.Linear(6, 6), images(6)

    def compute(start: int, stop: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.dropout(net(x[start:stop]), 0.5)

    assert check.values(compute, N, bound=1e-2).dtype == torch.bfloat16


@pytest.mark.parametrize("p", [0.0, 1e-10, 0.5, 1 - 1e-10, 1.0])
@pytest.mark.parametrize("shape", [(8,), (60, 70)])
@pytest.mark.parametrize("inplace", [False, True])
def test_extreme_probabilities(check: Any, p: float, shape: tuple[int, ...], inplace: bool) -> None:
    x = torch.ones(N, *shape)
    play = check.play(lambda start, stop: F.dropout(x[start:stop].clone(), p, inplace=inplace), N)
    y, forward = play.part(0, N)
    assert torch.isfinite(y).all() and forward.drew == (0.0 < p < 1.0) and not forward.moved()
    if p != 0.5:
        assert torch.equal(y, x if p < 0.5 else torch.zeros_like(x))


def test_nothing_is_drawn_for_no_elements_or_without_training(check: Any) -> None:
    x = torch.ones(N, 3)
    for compute in (
        lambda start, stop: F.dropout(x[:, :0], 0.5),
        lambda start, stop: F.dropout(x, 0.5, training=False),
        lambda start, stop: nn.Dropout(0.5).eval()(x),
    ):
        forward = check.play(compute, N).part(0, N)[1]
        assert not forward.drew and not forward.moved()


def test_what_torch_refuses_is_refused(check: Any) -> None:
    with pytest.raises(RuntimeError):
        check.play(lambda start, stop: F.dropout(torch.ones(N, 3, dtype=torch.int64), 0.5), N).part(0, N)
    with pytest.raises(ValueError, match="probability"):
        check.play(lambda start, stop: F.dropout(torch.ones(N, 3), 1.5), N).part(0, N)


@pytest.mark.parametrize("shape", [(5, 6), (60, 70)])
def test_the_result_lies_in_memory_as_the_input_does(check: Any, shape: tuple[int, ...]) -> None:
    """What is laid out otherwise cannot be viewed by who relies on it."""
    x = images(*shape)
    compute = lambda start, stop: F.dropout(x.transpose(1, 2), 0.5)  # noqa: E731
    y = check.play(compute, N).part(0, N)[0]
    assert y.stride() == x.transpose(1, 2).stride()
    y.transpose(1, 2).view(N, -1)


def test_a_transposed_input_is_drawn_for_in_logical_order(check: Any) -> None:
    one = torch.ones(N, 60, 70)
    other = torch.ones(N, 70, 60).transpose(1, 2)
    masks = [check.play(lambda start, stop, x=x: F.dropout(x, 0.5), N).part(0, N)[0] for x in (one, other)]
    assert torch.equal(*masks)


def test_shares_and_scale(check: Any) -> None:
    x = torch.ones(N, 20_000)
    for p in (0.1, 0.5, 0.9):
        y = check.play(lambda start, stop, p=p: F.dropout(x, p), N).part(0, N)[0]
        assert abs(float(y.mean()) - 1.0) < 4 * math.sqrt(p / (1 - p) / x.numel())
        assert torch.allclose(y.max(), torch.tensor(1 / (1 - p)))


def test_alpha_dropout_keeps_mean_and_variance(check: Any) -> None:
    x = torch.randn(N, 20_000, generator=torch.Generator().manual_seed(0))
    y = check.play(lambda start, stop: F.alpha_dropout(x, 0.2, training=True), N).part(0, N)[0]
    assert abs(float(y.mean())) < 0.01 and abs(float(y.std()) - 1.0) < 0.01


def test_what_is_kept_for_backward_can_be_taken_away(check: Any) -> None:
    """Activation checkpointing and offloading do so."""
    seen: list[Tensor] = []
    x = images(60, 70).requires_grad_()

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        check.play(lambda start, stop: F.dropout(x, 0.5), N).part(0, N)
    assert [(tensor.dtype, tensor.shape) for tensor in seen] == [(torch.bool, x.shape)]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_directional_derivative(check: Any) -> None:
    x = images(60, 70)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        y = check.play(lambda start, stop: F.dropout(dual, 0.5), N).part(0, N)[0]
        value, tangent = torch.autograd.forward_ad.unpack_dual(y)
    assert torch.equal(tangent, (value != 0).float() * 2)


def peak_of(compute: Callable[[], None]) -> int:
    """How much more memory this process had at most meanwhile, in KiB."""

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name))

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    compute()
    return status("VmHWM") - before


@pytest.mark.parametrize("rows", [1, 40])
def test_it_needs_no_more_memory_than_torchs_own(check: Any, rows: int) -> None:
    def step(size: int) -> None:
        x = torch.ones(rows, size // rows, requires_grad=True)
        (F.dropout(x, 0.5) * 2.0).sum().backward()

    peaks = []
    # more than 32 MiB each, which no allocator keeps
    for compute in (check.play(lambda start, stop: step(10_000_000), rows).part, lambda start, stop: step(10_000_000)):
        step(50_000)
        peaks.append(peak_of(lambda compute=compute: compute(0, rows)))
    assert 4 * 10_000_000 // 1024 < peaks[0] <= peaks[1], peaks


def test_noise_of_a_rare_kind(check: Any) -> None:
    """It is 0 or 1 / (1 − p), also where numbers of 32 bits have no room for p."""
    forward = check.play(lambda start, stop: None, N).part(0, N)[1]
    for p in (1e-12, 2.0**-33, 1 - 2.0**-34):
        values = noise(forward.draw("dropout", (N, 50)), p, torch.float32)
        assert values.unique().numel() == 1 and torch.isfinite(values).all()
