"""Where things lie in a control segment."""

from __future__ import annotations

import pytest

from shoal.comm.shm.semaphores import SLOT
from shoal.comm.shm.shared import CHANNELS, HUBS, Layout


@pytest.mark.parametrize("members", [1, 2, HUBS, HUBS + 1, 40])
def test_every_token_has_a_place_of_its_own(members: int) -> None:
    layout = Layout(members)
    pairs = [(giver, taker) for giver in range(members) for taker in range(members) if min(giver, taker) < layout.hubs]
    places = {layout.token(channel, *pair) for channel in range(CHANNELS) for pair in pairs}
    assert len(places) == CHANNELS * len(pairs)
    assert all(at % SLOT == 0 for at in places)
    assert max(places) + SLOT <= layout.notes


def test_tokens_grow_with_the_members_and_not_with_their_pairs() -> None:
    sizes = [Layout(members).notes for members in (128, 256, 384)]
    assert sizes[0] == 983_040, "bytes at 128 members, where all pairs would have 4 MB"
    assert sizes[1] - sizes[0] == sizes[2] - sizes[1] == 128 * 2 * HUBS * CHANNELS * SLOT
