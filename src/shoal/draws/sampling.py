"""Draws other than dropout by position: what stands in for `torch.rand`, `torch.randn_like`, `Tensor.exponential_` …"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.draws import numbers
from shoal.draws.forward import Draw, Forward
from shoal.draws.here import forward_for, forward_now, forward_on

Make = Callable[[Draw, torch.dtype], Tensor]
"""The numbers of a draw, flat, in single or double precision."""


def _uniform(draw: Draw, dtype: torch.dtype) -> Tensor:
    return numbers.uniform(draw.grid, dtype)


def _normal(draw: Draw, dtype: torch.dtype) -> Tensor:
    return numbers.normal(draw.grid, dtype)


def _exponential(draw: Draw, dtype: torch.dtype) -> Tensor:
    return numbers.exponential(draw.grid, dtype)


def _own(forward: Forward | None, generator: Any, what: str) -> Forward | None:
    """None for a draw from a generator of the user's own, which is told of."""
    if forward is not None and generator is not None:
        forward.own.append(what)
        return None
    return forward


_USUAL = (None, False, torch.strided)


def _fits(rest: dict[str, Any]) -> bool:
    """Whether a tensor is to be made as almost all are: strided, without names, in memory of its own."""
    return not rest or all(any(value is usual for usual in _USUAL) for value in rest.values())


# -- tensors that are made ---------------------------------------------------------------------------------------------


def _size(given: Sequence[Any], size: Any) -> tuple[int, ...]:
    sizes = given if size is None else size
    if len(sizes) == 1 and isinstance(sizes[0], Sequence):
        sizes = sizes[0]
    return tuple(map(index, sizes))


def _continuous(dtype: torch.dtype) -> bool:
    """Torch refuses the others, with words of its own."""
    return dtype.is_floating_point or dtype.is_complex


def _new(forward: Forward, kind: str, make: Make, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    if not dtype.is_complex:
        return make(forward.draw(kind, shape), dtype).to(dtype).view(shape)
    part = dtype.to_real()
    both = make(forward.draw(kind, (*shape, 2)), part).to(part).view(*shape, 2)
    return torch.view_as_complex(both.mul_(math.sqrt(0.5)) if kind == "randn" else both)


def make_maker(original: Any, kind: str, make: Make) -> Callable[..., Tensor]:
    """Of `torch.rand` and `torch.randn`."""

    def maker(
        *given: Any,
        size: Any = None,
        generator: Any = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
        requires_grad: bool = False,
        **rest: Any,
    ) -> Tensor:
        forward = _own(forward_on(device), generator, f"torch.{kind}")
        wanted = dtype or torch.get_default_dtype()
        if forward is None or not _fits(rest) or not _continuous(wanted):
            options = {"dtype": dtype, "device": device, "requires_grad": requires_grad, **rest}
            if generator is not None:
                options["generator"] = generator
            return original(*given, **options) if size is None else original(size=size, **options)  # type: ignore[no-any-return]
        return _new(forward, kind, make, _size(given, size), wanted).requires_grad_(requires_grad)

    return maker


def make_like(original: Any, kind: str, make: Make) -> Callable[..., Tensor]:
    """Of `torch.rand_like` and `torch.randn_like`."""

    def like(input: Tensor, *, dtype: torch.dtype | None = None, requires_grad: bool = False, **rest: Any) -> Tensor:
        memory = rest.pop("memory_format", None)
        forward = _own(forward_for(input), rest.get("generator"), f"torch.{kind}_like")
        device, wanted = rest.pop("device", None), dtype or input.dtype
        here = device is None or torch.device(device).type == "cpu"
        if forward is None or not here or not _fits(rest) or not _continuous(wanted):
            options = {"memory_format": memory, "device": device, **rest}
            given = {name: value for name, value in options.items() if value is not None}
            return original(input, dtype=dtype, requires_grad=requires_grad, **given)  # type: ignore[no-any-return]
        return _new(forward, kind, make, input.shape, wanted).requires_grad_(requires_grad)

    return like


def make_randint(original: Any) -> Callable[..., Tensor]:
    def randint(*given: Any, generator: Any = None, **options: Any) -> Tensor:
        forward = _own(forward_on(options.get("device")), generator, "torch.randint")
        rest = {name: value for name, value in options.items() if name not in _BOUNDS}
        low, high, size = _bounds(given, options) if forward is not None and _fits(rest) else (0, 0, ())
        if forward is None or low >= high:
            if generator is not None:
                options["generator"] = generator
            return original(*given, **options)  # type: ignore[no-any-return]
        wanted = options.get("dtype") or torch.int64
        original(low, high, (0,), dtype=wanted)  # refuses what it always does
        drawn = numbers.whole(forward.draw("randint", size).grid, low, high)
        return torch.from_numpy(drawn).to(wanted).view(size)

    return randint


_BOUNDS = ("low", "high", "size", "dtype", "device")


def _bounds(given: Sequence[Any], options: dict[str, Any]) -> tuple[int, int, tuple[int, ...]]:
    values = list(given)
    size = options.get("size")
    if size is None:
        size = values.pop()
    low = options.get("low", 0)
    high = options.get("high")
    if high is None:
        high = values.pop()
    if values:
        low = values.pop()
    return int(low), int(high), _size([size], None)


def make_randint_like(original: Any) -> Callable[..., Tensor]:
    def randint_like(input: Tensor, *given: Any, **options: Any) -> Tensor:
        forward = _own(forward_for(input), options.get("generator"), "torch.randint_like")
        rest = {name: value for name, value in options.items() if name not in _BOUNDS and name != "memory_format"}
        low, high, size = _bounds([*given, input.shape], options) if _fits(rest) else (0, 0, ())
        if forward is None or low >= high:
            return original(input, *given, **options)  # type: ignore[no-any-return]
        drawn = numbers.whole(forward.draw("randint", size).grid, low, high)
        return torch.from_numpy(drawn).to(options.get("dtype") or input.dtype).view(size)

    return randint_like


def make_normal(original: Any) -> Callable[..., Tensor]:
    def normal(mean: Any = 0.0, std: Any = 1.0, size: Any = None, *, generator: Any = None, **rest: Any) -> Tensor:
        tensor = next((each for each in (mean, std) if isinstance(each, Tensor)), None)
        forward = forward_on(rest.get("device")) if tensor is None else forward_for(tensor)
        forward = _own(forward, generator, "torch.normal")
        if forward is None or rest.get("out") is not None or (tensor is None and size is None):
            if generator is not None:
                rest["generator"] = generator
            return original(mean, std, **rest) if size is None else original(mean, std, size, **rest)  # type: ignore[no-any-return]
        if tensor is None:
            shape, wanted = _size([size], None), rest.get("dtype") or torch.get_default_dtype()
        else:
            both = [each.shape for each in (mean, std) if isinstance(each, Tensor)]
            shape, wanted = tuple(torch.broadcast_shapes(*both)), tensor.dtype
        drawn = _normal(forward.draw("normal", shape), wanted).to(wanted).view(shape)
        with torch.no_grad():  # as torch has it: what is drawn does not depend on these
            if bool((std < 0).any() if isinstance(std, Tensor) else std < 0):
                raise RuntimeError("normal expects all elements of std >= 0.0")
            return drawn.mul_(std).add_(mean)

    return normal


def make_bernoulli(original: Any) -> Callable[..., Tensor]:
    def bernoulli(input: Tensor, p: float | None = None, *, generator: Any = None, **rest: Any) -> Tensor:
        forward = _own(forward_for(input), generator, "torch.bernoulli")
        if forward is None or rest.get("out") is not None:
            if generator is not None:
                rest["generator"] = generator
            return original(input, **rest) if p is None else original(input, p, **rest)  # type: ignore[no-any-return]
        shape = tuple(input.shape)
        wide = torch.float64 if input.dtype == torch.float64 else torch.float32
        drawn = _uniform(forward.draw("bernoulli", shape), wide).view(shape)
        with torch.no_grad():
            if p is None and not bool(torch.logical_and(input >= 0, input <= 1).all()):
                return original(input)  # type: ignore[no-any-return]  # refuses it
            return (drawn < (input if p is None else p)).to(input.dtype)

    return bernoulli


def make_multinomial(original: Any) -> Callable[..., Tensor]:
    def multinomial(
        input: Tensor, num_samples: int, replacement: bool = False, *, generator: Any = None, **rest: Any
    ) -> Tensor:
        forward = _own(forward_for(input), generator, "torch.multinomial")
        usual = input.dim() == 2 or (input.dim() == 1 and replacement)
        if forward is None or rest.get("out") is not None:
            if generator is not None:
                rest["generator"] = generator
            return original(input, num_samples, replacement, **rest)  # type: ignore[no-any-return]
        with torch.no_grad():
            if not usual or num_samples < 1 or num_samples > (2**24 if replacement else input.shape[-1]):
                return original(input, num_samples, replacement, generator=_shared(forward, "multinomial"))  # type: ignore[no-any-return]
            _refuse_odd(input)
            if (replacement and num_samples > 1) or input.dim() == 1:
                return _chosen(forward, input, num_samples)
            rate = _exponential(forward.draw("multinomial", input.shape), input.dtype).view(input.shape)
            return (input / rate).topk(num_samples).indices

    return multinomial


def _refuse_odd(weights: Tensor) -> None:
    if not bool(torch.isfinite(weights).all()) or bool((weights < 0).any()):
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
    if bool((weights.sum(-1) <= 0).any()):
        raise RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")


def _chosen(forward: Forward, weights: Tensor, count: int) -> Tensor:
    shape = (*weights.shape[:-1], count)
    edges = weights.double().cumsum(-1)
    drawn = _uniform(forward.draw("multinomial", shape), torch.float64).view(shape)
    found = torch.searchsorted(edges, drawn * edges[..., -1:], right=True)
    return found.clamp_(max=weights.shape[-1] - 1)


def _shared(forward: Forward, kind: str) -> torch.Generator:
    """A generator that is the same in all forwards of the step."""
    generator = torch.Generator()
    generator.manual_seed(forward.salt(kind))
    return generator


def make_randperm(original: Any) -> Callable[..., Tensor]:
    def randperm(n: int, *, generator: Any = None, **rest: Any) -> Tensor:
        forward = _own(forward_on(rest.get("device")), generator, "torch.randperm")
        if forward is None:
            if generator is not None:
                rest["generator"] = generator
            return original(n, **rest)  # type: ignore[no-any-return]
        forward.permuted = forward.permuted or n == forward.samples
        return original(n, generator=_shared(forward, "randperm"), **rest)  # type: ignore[no-any-return]

    return randperm


def make_rrelu(original: Any, *, inplace: bool) -> Callable[..., Tensor]:
    def rrelu(
        input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, *given: Any, **rest: Any
    ) -> Tensor:
        forward = forward_for(input) if training else None
        if forward is None:
            return original(input, lower, upper, training, *given, **rest)  # type: ignore[no-any-return]
        slope = _uniform(forward.draw("rrelu", input.shape), input.dtype).to(input.dtype).view(input.shape)
        slope = slope.mul_(upper - lower).add_(lower).masked_fill_(input >= 0, 1.0)
        return input.mul_(slope) if inplace else input * slope

    return rrelu


def make_by_element(original: Any, kind: str, make: Callable[[Draw, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Of `torch.poisson` and others that have one tensor of settings."""

    def by_element(input: Tensor, generator: Any = None) -> Tensor:
        forward = _own(forward_for(input), generator, f"torch.{kind}")
        if forward is None:
            return original(input, generator)  # type: ignore[no-any-return]
        return make(forward.draw(kind, input.shape), input)

    return by_element


def make_by_row(original: Any, kind: str) -> Callable[..., Tensor]:
    """Of distributions that need an unknown number of draws per element: each row has a generator of its own."""

    def by_row(*given: Any, generator: Any = None, **rest: Any) -> Tensor:
        tensors = [each for each in given if isinstance(each, Tensor)]
        forward = _own(forward_for(tensors[0]) if tensors else forward_now(), generator, f"torch.{kind}")
        if forward is None or not tensors:
            if generator is not None:
                rest["generator"] = generator
            return original(*given, **rest)  # type: ignore[no-any-return]
        draw = forward.draw(kind, tensors[0].shape)
        if draw.rule.dimension < 0 or tensors[0].shape[draw.rule.dimension] != forward.samples:
            generator = torch.Generator()
            generator.manual_seed(draw.salt)
            return original(*given, generator=generator, **rest)  # type: ignore[no-any-return]
        at = draw.rule.dimension
        first, second = draw.keys()
        rows = []
        for row in range(forward.samples):
            generator = torch.Generator()
            generator.manual_seed(int(first[row]) << 31 ^ int(second[row]))
            mine = [each.select(at, row) if isinstance(each, Tensor) else each for each in given]
            rows.append(original(*mine, generator=generator, **rest))
        return torch.stack(rows, at)

    return by_row


# -- in place ----------------------------------------------------------------------------------------------------------


_WHOLE = ("random_", "bernoulli_", "geometric_")


def make_filler(
    original: Any, kind: str, make: Callable[..., Tensor], defaults: Sequence[tuple[str, Any]]
) -> Callable[..., Tensor]:
    """Of methods such as `Tensor.normal_(mean=0, std=1)`: `make(draw, dtype, *settings)` gives the numbers, flat."""

    def filler(self: Tensor, *given: Any, generator: Any = None, **options: Any) -> Tensor:
        forward = _own(forward_for(self), generator, f"Tensor.{kind}")
        settings = [options.get(name, default) for name, default in defaults]
        settings[: len(given)] = given
        strange = any(isinstance(each, Tensor) for each in settings if kind != "bernoulli_")
        if forward is None or strange or not (self.is_floating_point() or kind in _WHOLE):
            if generator is not None:
                options["generator"] = generator
            return original(self, *given, **options)  # type: ignore[no-any-return]
        shape = tuple(self.shape)
        original(self.new_empty(0), *given, **options)  # draws nothing, and refuses what it always does
        flat = [each.expand(shape).reshape(-1) if isinstance(each, Tensor) else each for each in settings]
        return self.copy_(make(forward.draw(kind, shape), self.dtype, *flat).view(shape))

    return filler


def uniform_(draw: Draw, dtype: torch.dtype, low: float, high: float) -> Tensor:
    return _uniform(draw, dtype).mul_(high - low).add_(low)


def normal_(draw: Draw, dtype: torch.dtype, mean: float, std: float) -> Tensor:
    return _normal(draw, dtype).mul_(std).add_(mean)


def log_normal_(draw: Draw, dtype: torch.dtype, mean: float, std: float) -> Tensor:
    return normal_(draw, dtype, mean, std).exp_()


def exponential_(draw: Draw, dtype: torch.dtype, rate: float) -> Tensor:
    return _exponential(draw, dtype).div_(rate)


def cauchy_(draw: Draw, dtype: torch.dtype, median: float, sigma: float) -> Tensor:
    return _uniform(draw, dtype).sub_(0.5).mul_(math.pi).tan_().mul_(sigma).add_(median)


def geometric_(draw: Draw, dtype: torch.dtype, p: float) -> Tensor:
    return _uniform(draw, torch.float64).log_().div_(math.log1p(-p)).ceil_().clamp_(min=1.0)


def bernoulli_(draw: Draw, dtype: torch.dtype, p: Any) -> Tensor:
    with torch.no_grad():
        return _uniform(draw, torch.float64 if dtype == torch.float64 else torch.float32).lt(p)


_EXACT = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8, torch.bool: 1}


def random_(draw: Draw, dtype: torch.dtype, low: Any, high: Any) -> Tensor:
    """All that the type has, from 0 on; or up to one number; or from one to another."""
    if high is None and low is not None:
        low, high = 0, low
    if high is None:
        bits = _EXACT.get(dtype) or 8 * dtype.itemsize - (0 if dtype == torch.uint8 else 1)
        low, high = 0, (1 << bits) + (dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16))
    return torch.from_numpy(np.asarray(numbers.whole(draw.grid, int(low or 0), int(high))))


UNIFORM, NORMAL = _uniform, _normal
