"""What draws past us is noticed; what traces a graph finds torch's own functions."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch import randn_like as captured
from torch.nn import functional as F

from shoal.draws import here
from shoal.draws.calls import Calls
from shoal.draws.forward import Forward, Keying, seed_by_forward
from shoal.draws.stand import standing

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning",
    "ignore:`torch.jit.trace`:DeprecationWarning",
    "ignore:The PyTorch API of nested tensors:UserWarning",
    "ignore:`torch.jit.script_method`:DeprecationWarning",
)
N = 13
X = torch.randn(N, 6, generator=torch.Generator().manual_seed(1))


def scripted() -> Callable[[Tensor], Tensor]:
    def drop(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)

    return torch.jit.script(drop)  # type: ignore[no-any-return]


class Marked(Tensor):
    """A tensor of the user's own kind."""


def deterministic(x: Tensor) -> Tensor:
    return x * 2


PAST: dict[str, Callable[[], Callable[[Tensor], Any]]] = {
    "a script": scripted,
    "an operator": lambda: lambda x: torch.ops.aten.bernoulli(x, 0.5),
    "an operator, in place": lambda: lambda x: torch.ops.aten.normal_(x.clone()),
    "a function that was captured before": lambda: captured,
    "vmap": lambda: torch.func.vmap(lambda x: F.dropout(x, 0.5), randomness="different"),
    "vmap, noise": lambda: torch.func.vmap(lambda x: x + torch.randn(6), randomness="different"),
    "a gradient": lambda: lambda x: torch.func.grad(lambda y: F.dropout(y, 0.5).sum())(x),
    "a kind of tensor": lambda: lambda x: F.dropout(x.as_subclass(Marked), 0.5),
    "a nested tensor": lambda: lambda x: F.dropout(torch.nested.nested_tensor([x[0], x[1, :3]]), 0.5),
    "a trace": lambda: torch.jit.trace(lambda x: F.dropout(x, 0.5), X, check_trace=False),
    "a trace that is made": lambda: lambda x: torch.jit.trace(lambda x: F.dropout(x, 0.5), x, check_trace=False),
    "complex numbers in place": lambda: lambda x: torch.complex(x, x).normal_(),
    "a seed in the forward": lambda: lambda x: (torch.manual_seed(0), F.dropout(x, 0.5))[1],
    "an unkeyed fill": lambda: lambda x: nn.init._no_grad_normal_(x.clone(), 0.0, 1.0) + torch.ops.aten.rand_like(x),
}


@pytest.mark.parametrize("case", PAST)
def test_it_is_noticed(check: Any, case: str) -> None:
    draw = PAST[case]()
    assert check.play(lambda start, stop: draw(X), N).part(0, N)[1].moved()


QUIET: dict[str, Callable[[Tensor], Any]] = {
    "nothing": deterministic,
    "dropout": lambda x: F.dropout(x, 0.5),
    "twenty of them": lambda x: [F.dropout(x, 0.5) for _ in range(20)],
    "all kinds": lambda x: (torch.randn(N), torch.randperm(N), torch.multinomial(x.softmax(1), 2), x.clone().normal_()),
    "vmap without draws": lambda x: torch.func.vmap(deterministic)(x),
}


@pytest.mark.parametrize("case", QUIET)
def test_what_draws_here_is_not_taken_for_it(check: Any, case: str) -> None:
    forward = check.play(lambda start, stop: QUIET[case](X), N).part(0, N)[1]
    assert forward.drew == (case not in ("nothing", "vmap without draws"))
    assert not forward.moved() and not forward.moved()


def test_seeds_by_forward_are_all_different() -> None:
    seeds = {
        seed_by_forward(3, step, phase, first) for step in range(20) for phase in range(2) for first in range(0, 64, 4)
    }
    assert len(seeds) == 20 * 2 * 16


def test_a_call_that_something_drew_past_is_by_its_first_position() -> None:
    script = scripted()

    def made(first: int, samples: int) -> Tensor:
        calls = Calls()
        found = calls.make(first, samples, 5, lambda start, stop: script(torch.ones(stop - start, 40)))
        assert calls.keying.by_forward
        return found

    assert torch.equal(made(0, 4), made(0, 4)) and not torch.equal(made(0, 4), made(4, 4))


def test_calls_inside_of_a_forward_leave_it_under_way() -> None:
    """As an evaluation, or a `collate`, within a training step."""
    outer = Forward(Keying(), range(N), 3)
    with standing():
        outer.begin()
        here.enter(outer)
        try:
            F.dropout(X, 0.5)
            Calls().make(0, 4, 5, lambda start, stop: torch.rand(stop - start, 3))
            assert here.forward_now() is outer and not outer.moved()
            F.dropout(X, 0.5)
            assert not outer.moved()
            states = random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[union-attr]
            Calls().make(0, 4, 5, lambda start, stop: random.random() + np.random.rand())
            assert states == (random.getstate(), np.random.get_state()[1].tobytes())  # type: ignore[union-attr]
        finally:
            here.enter(None)


def test_calls_depend_on_positions_alone() -> None:
    def made(*edges: int) -> Tensor:
        calls = Calls()
        parts = []
        for start, stop in zip([0, *edges], [*edges, 24], strict=True):
            parts.append(
                calls.make(start, stop - start, 5, lambda a, b: torch.bernoulli(torch.full((b - a, 30), 0.15)))
            )
        return torch.cat(parts)

    whole = made()
    for edges in ((1, 2, 3), (10,), (23,)):
        assert torch.equal(made(*edges), whole)


@pytest.mark.parametrize("outside", [True, False])
def test_calls_find_out_how_copies_of_samples_lie(outside: bool) -> None:
    """Copies of the whole batch, as for Monte Carlo dropout; or copies of each sample."""

    def compute(start: int, stop: int) -> dict[str, Tensor]:
        count = stop - start
        if outside:
            return {"a": F.dropout(torch.ones(4 * count, 9), 0.5).view(count, 4, 9)}
        return {"a": F.dropout(torch.ones(4 * count, 9), 0.5).view(4, count, 9).transpose(0, 1)}

    def made(*edges: int) -> Tensor:
        calls, parts = Calls(), []
        for first, last in zip([0, *edges], [*edges, 24], strict=True):
            parts.append(
                calls.make(first, last - first, 5, lambda a, b, first=first: compute(first + a, first + b))["a"]
            )
        return torch.cat(parts)

    calls = Calls()
    calls.make(0, 24, 5, compute)
    assert len(calls.keying.rules) == 1, "one place in the code was taken for several"
    whole = made()
    assert len({str(row) for row in whole.view(-1, 9)}) > 80
    for edges in ((10,), (5, 7, 20)):
        assert torch.equal(made(*edges), whole)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(len(x), 6) + torch.rand_like(x)
        return F.dropout(self.inner(x), 0.5) + noise.bernoulli(0.5)


@pytest.fixture
def dynamo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A compiler that knows of nothing, and starts no thread to watch its progress."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def stepped(compiled: Callable[[Tensor], Tensor], steps: int) -> list[Tensor]:
    """What it gives in forwards of several steps. Each is noticed to draw past us."""
    found = []
    for step in range(steps):
        with standing():
            forward = Forward(Keying(), range(N), step)
            forward.begin()
            here.enter(forward)
            found.append(compiled(X))
            here.enter(None)
            assert forward.moved()
    return found


@pytest.mark.usefixtures("dynamo")
def test_a_graph_draws_when_it_runs() -> None:
    """Nothing that stands in is part of it; and it is made once, however often forwards come and go."""
    compiled = torch.compile(Dropping(), backend="aot_eager", fullgraph=True)
    found = [out.detach() for out in stepped(compiled, 4)]
    assert not any(torch.equal(one, other) for at, one in enumerate(found) for other in found[:at])
    assert graphs() == 1


@pytest.mark.usefixtures("dynamo")
def test_a_graph_with_attention_is_made_once() -> None:
    """Its stand-in is read by the compiler, and must not bring the forward under way into it."""

    def attend(x: Tensor) -> Tensor:
        heads = x.view(13, 1, 2, 3)
        return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)

    found = stepped(torch.compile(attend, backend="aot_eager", fullgraph=True), 4)
    assert not torch.equal(found[0], found[1]) and graphs() == 1


@pytest.mark.usefixtures("dynamo")
def test_numbers_are_not_part_of_a_graph() -> None:
    """As constants they would be the same in all steps."""
    compiled = torch.compile(lambda x: x + torch.randn(13, 6), backend="aot_eager", fullgraph=True)
    one, other = stepped(compiled, 2)
    assert not torch.equal(one, other)


@pytest.mark.usefixtures("dynamo")
def test_a_graph_with_shapes_that_change_is_not_made_ever_anew() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.MultiheadAttention(6, 2, dropout=0.1)).train()
    attention = model[2]
    compiled = torch.compile(lambda x: attention(x, x, x)[0] + model[1](model[0](x)), backend="eager")
    calls = Calls()
    for size in (2, 5, 9, 4, 11, 7, 12, 13):
        calls.make(0, size, 5, lambda start, stop: compiled(X[start:stop]))
    assert 1 <= graphs() <= 4


INDUCTOR = """
    import torch
    from torch.nn import functional as F
    from shoal.draws import here
    from shoal.draws.forward import Forward, Keying
    from shoal.draws.stand import standing

    inner, x = torch.nn.Linear(6, 6), torch.ones(13, 6)
    compiled = torch.compile(lambda x: F.dropout(inner(x), 0.5) + torch.randn(13, 6) + torch.rand_like(x))
    found = []
    for step in range(3):
        with standing():
            forward = Forward(Keying(), range(13), step)
            forward.begin()
            here.enter(forward)
            out = compiled(x)
            out.sum().backward()
            here.enter(None)
            assert forward.moved()
            found.append(out.detach())
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a compiler")
def test_a_compiled_graph_is_noticed() -> None:
    """In a process of its own: the compiler leaves threads behind."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(INDUCTOR)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
