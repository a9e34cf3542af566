"""A mirror's side of copies."""

from __future__ import annotations

import pytest

from shoal.data.parcel import to_bytes
from shoal.syncs.server.holdings import Holdings
from shoal.syncs.server.messages import Begin, Copy, Holder, Mirrored, Placement, Said
from shoal.syncs.server.reflecting import Reflecting
from shoal.syncs.server.setup import Memory
from tests.syncs.server.setups import hold, make_setup


@pytest.mark.parametrize(("second", "has"), [(4, 5), (5, 5), (6, 6)])
def test_a_copy_that_comes_late_does_not_go_back(second: int, has: int) -> None:
    setup = make_setup()
    memory = Memory(setup.cut.size, len(setup.cut.shards), seats=1, steps=2)
    holdings = Holdings(setup, 1, memory, None)
    holdings.begin(Begin([], "copy", 5))
    holdings.place(Placement(1, [Holder(0, 1) for _ in setup.cut.shards], {0: "a", 1: "b"}, {0: "h", 1: "h"}))
    said: list[Said] = []
    reflecting = Reflecting(holdings, memory, lambda peer, body: said.append(body))
    for version in (5, second):
        state = {**hold(setup, 2).state(), "version": version}
        reflecting.copy(b"0", Copy(2, version), [memoryview(to_bytes(state))])
    assert holdings[2].version == has
    assert said == [Mirrored(2, 5, []), Mirrored(2, has, [])]
