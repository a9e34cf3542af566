from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.core.keys import derive
from shoal.core.ordering import order_key
from shoal.draws.forward import seed_by_forward, seed_of

GOLDEN = [4246866556266386882, 6099876426492485686, 5579758990388876193]

parts = st.lists(st.integers() | st.text(st.characters(codec="utf-8", exclude_characters="\x1f")), min_size=1)


@given(parts)
def test_a_key_has_63_bits_and_is_always_the_same(parts: list[int | str]) -> None:
    key = derive(*parts)
    assert 0 <= key < 2**63
    assert key == derive(*parts)


def test_keys_never_change() -> None:
    """A resumed run must draw what the version it was started with would have drawn."""
    assert derive(0) == GOLDEN[0]
    assert derive(7, "order", 3) == GOLDEN[1]
    assert derive(-1, "Grüße", 2**80) == GOLDEN[2]


def test_every_part_and_its_place_count() -> None:
    variants = [(1, 2, 3), (1, 3, 2), (1, 2), (12, 3), (1, 23), (123,), ("1", 2, 4), (1, 2, 3, 0), (0, 1, 2, 3)]
    assert len({derive(*variant) for variant in variants}) == len(variants)


def test_seeds_steps_phases_forwards_and_epochs_have_keys_of_their_own() -> None:
    keys = [seed_of(seed, step, phase) for seed in range(4) for step in range(50) for phase in range(3)]
    keys += [seed_by_forward(seed, step, 0, first) for seed in range(4) for step in range(25) for first in range(24)]
    keys += [order_key(seed, epoch) for seed in range(4) for epoch in range(100)]
    assert len(set(keys)) == len(keys)
