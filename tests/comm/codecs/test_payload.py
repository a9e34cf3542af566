"""Payloads: what is damaged is refused, whatever the damage."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.comm.codecs.payload import CODECS, HEADER_BYTES, opened, room, seal
from shoal.core.errors import PayloadError

CPU = torch.device("cpu")
LENGTH_AT = 16
bodies = st.integers(0, 12).flatmap(lambda words: st.binary(min_size=8 * words, max_size=8 * words))


def payload_of(body: bytes, codec: str = "int8", count: int = 5, flags: int = 0) -> Tensor:
    payload = room(len(body), CPU)
    if body:
        payload[HEADER_BYTES:].copy_(torch.frombuffer(bytearray(body), dtype=torch.uint8))
    return seal(payload, codec, count, flags)


@settings(max_examples=60, deadline=None)
@given(body=bodies, codec=st.sampled_from(sorted(CODECS)), count=st.integers(0, 1 << 40), flags=st.integers(0, 255))
def test_what_is_sealed_is_opened(body: bytes, codec: str, count: int, flags: int) -> None:
    found, known = opened(payload_of(body, codec, count, flags), codec, count)
    assert found.numpy().tobytes() == body and known == flags


@settings(max_examples=150, deadline=None)
@given(body=bodies, data=st.data())
def test_a_byte_that_is_changed_shows(body: bytes, data: st.DataObject) -> None:
    payload = payload_of(body, flags=1)
    at = data.draw(st.integers(0, payload.numel() - 1))
    payload[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(PayloadError):
        opened(payload, "int8", 5)


@settings(max_examples=100, deadline=None)
@given(noise=st.binary(max_size=120))
def test_what_is_no_payload_is_refused(noise: bytes) -> None:
    raw = torch.frombuffer(bytearray(noise), dtype=torch.uint8) if noise else torch.empty(0, dtype=torch.uint8)
    with pytest.raises(PayloadError):
        opened(raw, "int8", 5)


@pytest.mark.parametrize("cut", range(HEADER_BYTES + 24))
def test_a_payload_that_is_cut_short_is_refused(cut: int) -> None:
    with pytest.raises(PayloadError):
        opened(payload_of(bytes(range(24)))[:cut], "int8", 5)


def noise_of(words: int) -> bytes:
    drawn = torch.randint(0, 256, (8 * words,), generator=torch.Generator().manual_seed(words), dtype=torch.uint8)
    return drawn.numpy().tobytes()


@settings(max_examples=150, deadline=None)
@given(data=st.data(), size=st.sampled_from([8, 64, 512, 1024, 4096]))
def test_stretches_that_have_changed_places_show(data: st.DataObject, size: int) -> None:
    """Words of 8 bytes, and rows of 512: sums that are the same in any order would not tell."""
    payload = payload_of(noise_of(3000))
    body = payload[HEADER_BYTES:]
    places = st.integers(0, body.numel() // size - 1)
    one, other = (
        size * place for place in data.draw(st.tuples(places, places).filter(lambda pair: pair[0] != pair[1]))
    )
    kept = body[one : one + size].clone()
    body[one : one + size] = body[other : other + size]
    body[other : other + size] = kept
    with pytest.raises(PayloadError, match="damaged"):
        opened(payload, "int8", 5)


@pytest.mark.parametrize("apart", [1, 63, 64, 65, 128, 640])
def test_what_one_word_has_more_and_another_less_shows(apart: int) -> None:
    payload = payload_of(noise_of(1000))
    words = payload[HEADER_BYTES:].view(torch.int64)
    words[5] += 1
    words[5 + apart] -= 1
    with pytest.raises(PayloadError, match="damaged"):
        opened(payload, "int8", 5)


@pytest.mark.parametrize("shift", [8, 512, 520])
def test_a_body_that_is_turned_shows(shift: int) -> None:
    payload = payload_of(noise_of(1000))
    payload[HEADER_BYTES:] = payload[HEADER_BYTES:].roll(shift)
    with pytest.raises(PayloadError, match="damaged"):
        opened(payload, "int8", 5)


def test_what_follows_the_body_is_ignored() -> None:
    row = torch.cat([payload_of(b"12345678"), torch.full((16,), 255, dtype=torch.uint8)])
    body, _ = opened(row, "int8", 5)
    assert body.numpy().tobytes() == b"12345678"


@pytest.mark.parametrize(
    ("codec", "count", "words"),
    [("fp16", 5, "of int8 came where one of fp16"), ("int8", 6, "5 numbers came where 6"), ("int8", 0, "5 numbers")],
)
def test_a_payload_of_something_else_says_so(codec: str, count: int, words: str) -> None:
    with pytest.raises(PayloadError, match=words):
        opened(payload_of(bytes(8)), codec, count)


def test_an_unknown_codec_is_named_by_its_number() -> None:
    payload = payload_of(bytes(8))
    payload[4] = 200
    with pytest.raises(PayloadError, match="codec 200"):
        opened(payload, "int8", 5)


@pytest.mark.parametrize("length", [9, 16, 1 << 40, (1 << 64) - 8])
def test_a_length_that_did_not_come_is_refused(length: int) -> None:
    payload = payload_of(bytes(8))
    payload[LENGTH_AT : LENGTH_AT + 8] = torch.frombuffer(bytearray(struct.pack("<Q", length)), dtype=torch.uint8)
    with pytest.raises(PayloadError, match=f"{length} bytes"):
        opened(payload, "int8", 5)


def test_a_shorter_length_shows_even_if_only_zeros_are_left_out() -> None:
    payload = payload_of(bytes(16))
    payload[LENGTH_AT] = 8
    with pytest.raises(PayloadError):
        opened(payload, "int8", 5)


def test_numbers_of_another_kind_are_no_payload() -> None:
    payload = payload_of(bytes(8))
    for other in (payload.to(torch.float32), payload.view(1, -1), payload.view(torch.int64)):
        with pytest.raises(PayloadError, match="payload"):
            opened(other, "int8", 5)
