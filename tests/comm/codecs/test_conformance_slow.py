"""Codecs and encoded sums over many steps, and with all sizes of groups."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from shoal.testing.codec_claims import CLAIMS, SUMS
from shoal.testing.codec_sums import check_summing, nothing_is_lost_over_steps
from shoal.testing.codecs import residuals_stay_bounded
from shoal.testing.ranks import run_ranks

STEPS = 10_000
LOSSY = [name for name in CLAIMS if not name.startswith("lossless")]
SUMMED_STEPS = 400

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", LOSSY)
def test_residuals_stay_bounded_over_ten_thousand_steps(name: str) -> None:
    residuals_stay_bounded(CLAIMS[name], STEPS)


@pytest.mark.parametrize("name", SUMS)
def test_nothing_is_lost_over_hundreds_of_sums(name: str) -> None:
    nothing_is_lost_over_steps(SUMS[name], 2, SUMMED_STEPS)


@pytest.mark.parametrize("name", SUMS)
def test_a_summing_keeps_its_contract_in_groups_of_any_size(name: str) -> None:
    check_summing(SUMS[name])


@pytest.mark.parametrize("collective", ["shm", "gloo"])
@pytest.mark.parametrize("name", ["none", "fp16:feedback=true", "int8", "topk", "powersgd", "int8, lz4"])
def test_a_summing_keeps_its_contract_in_processes(name: str, collective: str) -> None:
    check_summing(replace(SUMS[name], run=partial(run_ranks, collective=collective)), sizes=[3])
