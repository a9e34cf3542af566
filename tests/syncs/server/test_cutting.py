"""The area and its shards: every byte of every parameter is in exactly one piece."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.syncs.server.cutting import ALIGNMENT, LARGEST, SMALLEST, Cut, cut

Params = list[tuple[str, Tensor]]

shapes = st.lists(st.integers(0, 20), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.complex128])
models = st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=12)


def drawn(*kinds: tuple[tuple[int, ...], torch.dtype]) -> Params:
    torch.manual_seed(0)
    return [(f"p{number}", torch.randn(shape).to(dtype)) for number, (shape, dtype) in enumerate(kinds)]


def filled(made: Cut, params: Params) -> Tensor:
    area = torch.zeros(made.size, dtype=torch.uint8)
    for number, (_, param) in enumerate(params):
        made.view(area, number).copy_(param)
    return area


@settings(deadline=None, max_examples=60)
@given(models, st.booleans(), st.integers(1, 20), st.sampled_from([16, 80, 1000, LARGEST]))
def test_pieces_are_the_parameters(
    kinds: list[tuple[tuple[int, ...], torch.dtype]], whole: bool, shards: int, largest: int
) -> None:
    params = drawn(*kinds)
    if not any(param.numel() for _, param in params):
        with pytest.raises(ConfigError, match="no parameter"):
            cut(params, whole=whole, shards=shards)
        return
    made = cut(params, whole=whole, shards=shards, largest=largest)
    assert 1 <= len(made.shards) <= shards
    assert [shard.number for shard in made.shards] == list(range(len(made.shards)))
    assert made.shards[0].start == 0 and made.shards[-1].stop == made.size
    for one, following in zip(made.shards, made.shards[1:], strict=False):
        assert one.stop == following.start
    area = filled(made, params)
    found: dict[int, list[Tensor]] = {}
    elements = Counter[int]()  # found so far, by parameter
    for shard in made.shards:
        assert shard.start % ALIGNMENT == 0 and shard.size > 0
        assert sum(piece.stop - piece.start for piece in shard.pieces) > 0
        views = made.pieces(area[shard.start : shard.stop].clone(), shard.number)
        for piece, view in zip(shard.pieces, views, strict=True):
            assert view.shape == (piece.stop - piece.start,)
            assert whole or view.nbytes <= largest
            assert elements[piece.param] == piece.start
            elements[piece.param] += view.numel()
            found.setdefault(piece.param, []).append(view)
        portions = shard.portions
        assert len({portion.param for portion in portions}) == len(portions)
        for portion in portions:
            inside = [piece for piece in shard.pieces if piece.param == portion.param]
            assert (portion.start, portion.stop) == (inside[0].start, inside[-1].stop)
    for number, (_, param) in enumerate(params):
        assert torch.equal(torch.cat(found[number]), param.reshape(-1))
        assert torch.equal(made.view(area, number), param)
        assert not whole or len(found[number]) == 1


def test_shards_are_about_equal() -> None:
    made = cut(drawn(((300, 100), torch.float32), ((7,), torch.float32), ((200, 64), torch.bfloat16)))
    sizes = [shard.size for shard in made.shards]
    assert len(sizes) == 12
    assert max(sizes) - min(sizes) <= ALIGNMENT


def test_whole_shards_are_as_equal_as_parameters_allow() -> None:
    made = cut(drawn(*[((1024,), torch.float32)] * 24), whole=True, shards=12)
    assert [len(shard.pieces) for shard in made.shards] == [2] * 12


def test_a_parameter_larger_than_a_shard_stays_whole() -> None:
    made = cut(drawn(((8,), torch.float32), ((1000, 50), torch.float32), ((8,), torch.float32)), whole=True)
    assert [[piece.param for piece in shard.pieces] for shard in made.shards] in ([[0, 1], [2]], [[0], [1], [2]])


def test_small_models_have_fewer_shards() -> None:
    assert len(cut(drawn(((3,), torch.float32))).shards) == 1
    assert len(cut(drawn(((SMALLEST,), torch.float32))).shards) == 4


def test_views_are_of_the_same_memory() -> None:
    params = drawn(((40, 40), torch.float32), ((5,), torch.float64))
    made = cut(params, shards=3)
    area = filled(made, params)
    for shard in made.shards:
        for view in made.pieces(area[shard.start : shard.stop], shard.number):
            view.add_(1)
    for number, (_, param) in enumerate(params):
        assert torch.equal(made.view(area, number), param + 1)


def test_bytes_of_another_shard_are_refused() -> None:
    made = cut(drawn(((1000,), torch.float32)), shards=2)
    with pytest.raises(ValueError, match="shard 1 has"):
        made.pieces(torch.zeros(8, dtype=torch.uint8), 1)


def test_the_digest_is_of_the_layout() -> None:
    params = drawn(((40, 40), torch.float32), ((5,), torch.float32))
    digest = cut(params).digest()
    assert digest == cut([(name, param + 1) for name, param in params]).digest()
    others = [
        cut(params, shards=2),
        cut(params, whole=True),
        cut([("other", params[0][1]), params[1]]),
        cut([(name, param.to(torch.int32)) for name, param in params]),
        cut([(params[0][0], params[0][1].view(1600)), params[1]]),
    ]
    assert len({digest, *(other.digest() for other in others)}) == 1 + len(others)
