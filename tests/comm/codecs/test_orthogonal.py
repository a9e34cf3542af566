"""Orthonormal directions, for low-rank approximation."""

from __future__ import annotations

import pytest
import torch

from shoal.comm.codecs.orthogonal import orthonormal


def test_orthonormal_directions_span_what_was_given() -> None:
    given = torch.randn(5, 4, 30, generator=torch.Generator().manual_seed(0))
    made = orthonormal(given)
    torch.testing.assert_close(made @ made.mT, torch.eye(4).expand(5, 4, 4), atol=1e-5, rtol=0)
    torch.testing.assert_close(given @ made.mT @ made, given, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("spoil", ["zero", "equal", "tiny", "all zero"])
def test_directions_that_depend_on_each_other_are_replaced(spoil: str) -> None:
    given = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    if spoil == "zero":
        given[1] = 0
    elif spoil == "equal":
        given[2] = given[0]
    elif spoil == "tiny":
        given *= 1e-38
    else:
        given.zero_()
    made = orthonormal(given)
    torch.testing.assert_close(made @ made.mT, torch.eye(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(given @ made.mT @ made, given, atol=1e-4, rtol=1e-4)
