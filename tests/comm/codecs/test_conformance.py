"""Every codec and every encoded sum there is, through the suites of `shoal.testing`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal.comm.codecs.contract import State
from shoal.comm.codecs.int8 import Int8Codec
from shoal.comm.codecs.memory import Memory
from shoal.comm.codecs.payload import HEADER_BYTES, seal
from shoal.comm.codecs.twophase import TwoPhaseSum
from shoal.comm.group import Group
from shoal.core.errors import PayloadError
from shoal.testing.codec_claims import CLAIMS, SUMS, ZEROED, of_scale
from shoal.testing.codec_sums import SUM_CASES, SumClaim, check_summing, few_numbers
from shoal.testing.codecs import CASES, CaseFailed, Claim, check_codec


@pytest.mark.parametrize("name", CLAIMS)
def test_a_codec_keeps_its_contract(name: str) -> None:
    check_codec(CLAIMS[name])


@pytest.mark.parametrize("name", SUMS)
def test_a_summing_keeps_its_contract(name: str) -> None:
    """All cases with all sizes are in the slow tests."""
    check_summing(SUMS[name], sizes=[3])
    few_numbers(SUMS[name], 1)
    few_numbers(SUMS[name], 5)


# -- the suite finds what is wrong -------------------------------------------------------------------------------------


class Broken(Int8Codec):
    """int8 with one fault."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def encode(self, tensor: Tensor, state: State) -> Tensor:
        if self.fault == "biased":
            tensor = tensor * 1.01
        if self.fault == "input":
            tensor.mul_(0.5)
        if self.fault == "residual" and state.residual is not None:
            state = State(torch.zeros_like(state.residual), state.shadow, state.gauge, state.key)
        if self.fault == "gauge":
            state = State(state.residual, state.shadow, None, state.key)
        if self.fault == "random":
            tensor = tensor + 1e-3 * torch.rand(tensor.shape)
        if self.fault == "view":
            tensor = torch.as_strided(tensor, tensor.shape, tensor.stride(), 0)
        if self.fault == "denormal":
            tensor = tensor + 1e-30
        payload = super().encode(tensor, state)
        if self.fault == "shadow" and state.shadow is not None:
            state.shadow[-1:] = torch.nan
        if self.fault == "grows" and state.shadow is not None and state.residual is not None:
            state.shadow.add_(state.residual)
        return payload[:-8] if self.fault == "short" else payload

    def decode(self, payload: Tensor, out: Tensor, *, gauge: Tensor | None = None, add: bool = False) -> None:
        if self.fault == "rows" and payload.numel() != self.most_bytes(out.numel()):
            raise PayloadError("a row that is longer than its payload")
        if self.fault == "beside":
            torch.as_strided(out, (1,), (1,), out.storage_offset() - 1).zero_()
        if self.fault == "early":
            out.zero_()
        if self.fault == "trusting":
            payload = seal(payload.clone(), self.name, out.numel()) if payload.numel() > HEADER_BYTES else payload
        super().decode(payload, out, gauge=None if self.fault == "gauge" else gauge, add=add and self.fault != "add")
        if self.fault == "finite":
            out.nan_to_num_()


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        ("biased", "errors_are_as_claimed"),
        ("input", "errors_are_as_claimed"),
        ("short", "payloads_have_the_right_length"),
        ("random", "a_key_determines_a_payload"),
        ("residual", "nothing_is_lost_with_feedback"),
        ("shadow", "nothing_is_lost_with_feedback"),
        ("grows", "residuals_stay_bounded"),
        ("gauge", "errors_are_as_claimed_under_a_gauge"),
        ("finite", "huge_numbers"),
        ("finite", "numbers_that_are_not_finite"),
        ("view", "dtypes_and_views"),
        ("denormal", "tiny_numbers"),
        ("rows", "payloads_in_longer_rows"),
        ("beside", "forged_payloads_do_no_harm"),
        ("add", "decoding_adds"),
        ("early", "damaged_payloads_are_refused"),
        ("trusting", "damaged_payloads_are_refused"),
    ],
)
def test_the_suite_finds_a_fault(fault: str, case: str) -> None:
    claim = Claim(lambda: Broken(fault), CLAIMS["int8"].kept, CLAIMS["int8"].error, tiny=ZEROED)
    with pytest.raises(CaseFailed, match=f"^{case}: codec int8"):
        check_codec(claim, leave_out=set(CASES) - {case})


def test_a_biased_codec_is_found() -> None:
    nearest = Claim(Int8Codec, kept=1 - 256 / 127**2, error=of_scale(256, 1 / 126.9), unbiased=True, tiny=ZEROED)
    with pytest.raises(CaseFailed, match="unbiased_if_claimed"):
        check_codec(nearest, leave_out=set(CASES) - {"unbiased_if_claimed"})


class BrokenSum:
    """A sum with one fault."""

    name = "int8"

    def __init__(self, group: Group, fault: str) -> None:
        self.group, self.fault = group, fault
        self.right = TwoPhaseSum(group, Int8Codec(), True)

    def sum(self, flat: Tensor, memory: Memory, *, key: int = 0, gauge: Tensor | None = None) -> None:
        if self.fault == "drops" and key == 3:
            flat[5] = 0.0
        self.right.sum(flat, memory, key=key, gauge=gauge)
        if self.fault == "differs" and self.group.rank == 1:
            flat[0] += 1e-6
        if self.fault == "at once":
            memory.commit()
        if self.fault == "hides" and self.group.rank == 0:
            flat.nan_to_num_()
        if self.fault == "label":
            self.group.account.codec = self.name


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        ("differs", "sums_are_close_and_equal"),
        ("drops", "nothing_is_lost_over_steps"),
        ("at once", "a_step_done_again_is_the_same"),
        ("hides", "what_is_not_finite_reaches_all"),
        ("label", "the_account_has_its_name"),
    ],
)
def test_the_suite_finds_a_fault_of_a_sum(fault: str, case: str) -> None:
    with pytest.raises(CaseFailed, match=f"^{case}: 2 members"):
        claim = SumClaim(lambda group, shapes: BrokenSum(group, fault), close=0.03)
        check_summing(claim, sizes=[2], leave_out=set(SUM_CASES) - {case})


def test_cases_that_are_not_there_cannot_be_left_out() -> None:
    with pytest.raises(ValueError, match="no case 'x'"):
        check_codec(CLAIMS["int8"], leave_out={"x"})
    with pytest.raises(ValueError, match="no case 'x'"):
        check_summing(SUMS["int8"], leave_out={"x"})
