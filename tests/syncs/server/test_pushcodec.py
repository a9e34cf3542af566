"""Gradients that are encoded on their way to servers: what is lost is kept, and damage is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.core.errors import PayloadError
from shoal.core.spec import AnyCodec, AutoCodec, Bf16, Fp16, Int8, NoCodec, OneBit, PowerSGD, TopK
from shoal.syncs.server import pushcodec
from shoal.syncs.server.cutting import LARGEST, Cut, cut
from shoal.syncs.server.messages import Lease
from shoal.syncs.server.pushcodec import PushCodec, decode_part, has_codec, note, stretches

LOSSY: list[AnyCodec] = [
    Fp16(feedback=True),
    Bf16(feedback=True),
    Int8(),
    Int8(rounding="stochastic"),
    OneBit(),
    TopK(density=0.1),
    TopK(density=0.1, warmup=4),
    PowerSGD(rank=2),
]
NAMES = [f"{spec.name}-{number}" for number, spec in enumerate(LOSSY)]


@pytest.fixture(params=[LARGEST, 64], ids=["large", "small"])
def model(request: pytest.FixtureRequest) -> Cut:
    """A matrix that is cut by a shard's edge, odd lengths with gaps behind them, one of double precision, one empty.

    Into pieces for optimizers as large as they are, and many small ones.
    """
    torch.manual_seed(3)
    params = [
        ("matrix", torch.zeros(40, 33)),
        ("odd", torch.zeros(7)),
        ("double", torch.zeros(9, dtype=torch.float64)),
        ("empty", torch.zeros(0)),
        ("cube", torch.zeros(12, 5, 3)),
        ("last", torch.zeros(3)),
    ]
    return cut(params, shards=3, largest=request.param)


def fill(cut: Cut, *, unused: tuple[int, ...] = ()) -> Tensor:
    area = torch.zeros(cut.size, dtype=torch.uint8)
    for number in range(len(cut.offsets)):
        if number not in unused:
            view = cut.view(area, number)
            view.copy_(torch.randn(view.shape, dtype=view.dtype))
    return area


def sent(codec: PushCodec, cut: Cut, lease: Lease, area: Tensor, used: list[bool] | None = None) -> Tensor:
    """What servers have of it."""
    out = torch.zeros(cut.size, dtype=torch.uint8)
    for stretch in stretches(cut, codec.spec):
        here = out[stretch.start : stretch.stop]
        if stretch.encoded:
            payload = codec.encode(lease, stretch, area, used or [True] * len(cut.offsets))
            decode_part(codec.spec, payload.numpy().data, here)
        else:
            here.copy_(area[stretch.start : stretch.stop])
    return out


def commit(codec: PushCodec, cut: Cut) -> None:
    for shard in cut.shards:
        codec.commit(shard.number)


@pytest.mark.parametrize("spec", [NoCodec(), *LOSSY], ids=["none", *NAMES])
def test_stretches_have_every_byte_of_every_parameter_once(
    model: Cut, spec: AnyCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushcodec, "PART_BYTES", 256)
    monkeypatch.setattr(pushcodec, "ENCODED_BYTES", 512)
    times = torch.zeros(model.size, dtype=torch.int)
    for stretch in stretches(model, spec):
        shard = model.shards[stretch.shard]
        assert shard.start <= stretch.start < stretch.stop <= shard.stop
        assert stretch.params
        times[stretch.start : stretch.stop] += 1
        for param in stretch.params:
            assert not stretch.encoded or model.dtypes[param] == torch.float32
    assert int(times.max()) == 1
    for number, shape in enumerate(model.shapes):
        size = torch.Size(shape).numel() * model.dtypes[number].itemsize
        assert bool((times[model.offsets[number] : model.offsets[number] + size] == 1).all())
    if not isinstance(spec, PowerSGD):
        assert max(stretch.stop - stretch.start for stretch in stretches(model, spec)) <= 512


@pytest.mark.parametrize("spec", LOSSY, ids=NAMES)
def test_all_that_was_pushed_is_sent_or_kept(model: Cut, spec: AnyCodec) -> None:
    codec = PushCodec(spec, model, seat=1, seed=5)
    total, arrived = (torch.zeros(40, 33) for _ in range(2))
    for step in range(6):
        codec.open()
        area = fill(model)
        out = sent(codec, model, Lease(step, 0, 4), area)
        commit(codec, model)
        total += model.view(area, 0)
        arrived += model.view(out, 0)
        assert torch.equal(model.view(out, 2), model.view(area, 2)), "double precision travels as it is"
    kept = torch.zeros(model.size, dtype=torch.uint8)
    for shard in model.shards:
        residual = codec.residual(shard.number)
        if residual is not None:
            kept[shard.start : shard.stop].view(torch.float32).copy_(residual)
    assert not torch.equal(arrived, total), "a codec that loses nothing shows nothing here"
    assert torch.allclose(arrived + model.view(kept, 0), total, atol=1e-4)


@pytest.mark.parametrize("spec", LOSSY, ids=NAMES)
def test_what_was_not_acknowledged_is_encoded_to_the_same_bytes_again(model: Cut, spec: AnyCodec) -> None:
    codec = PushCodec(spec, model, seat=1, seed=5)
    sent(codec, model, Lease(0, 0, 4), fill(model))
    commit(codec, model)
    area = fill(model)
    codec.open()
    first = sent(codec, model, Lease(1, 0, 4), area)
    codec.open()
    assert torch.equal(sent(codec, model, Lease(1, 0, 4), area), first)
    commit(codec, model)
    codec.open()
    assert not torch.equal(sent(codec, model, Lease(1, 0, 4), area), first)


@pytest.mark.parametrize("spec", [NoCodec(), *LOSSY], ids=["none", *NAMES])
def test_pieces_for_optimizers_do_not_change_what_is_encoded_together(spec: AnyCodec) -> None:
    params = [("matrix", torch.zeros(40, 33)), ("odd", torch.zeros(7))]
    assert stretches(cut(params, largest=64), spec) == stretches(cut(params), spec)


@pytest.mark.parametrize("together", [128, 512])
@pytest.mark.parametrize("largest", [LARGEST, 64])
def test_what_is_kept_of_an_unused_parameter_stays(
    largest: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushcodec, "ENCODED_BYTES", together)
    layout = cut([("one", torch.zeros(64)), ("two", torch.zeros(64))], shards=1, largest=largest)
    codec = PushCodec(Int8(block=8), layout, seat=0, seed=0)
    sent(codec, layout, Lease(0, 0, 1), fill(layout))
    commit(codec, layout)
    residual = codec.residual(0)
    assert residual is not None
    before = residual[64:].clone()
    assert bool(before.any())
    codec.open()
    out = sent(codec, layout, Lease(1, 0, 1), fill(layout, unused=(1,)), [True, False])
    commit(codec, layout)
    assert not bool(layout.view(out, 1).any())
    after = codec.residual(0)
    assert after is not None
    assert torch.equal(after[64:], before)


@pytest.mark.parametrize("spec", LOSSY, ids=NAMES)
def test_damaged_payloads_change_nothing(model: Cut, spec: AnyCodec) -> None:
    codec = PushCodec(spec, model, seat=1, seed=5)
    stretch = next(stretch for stretch in stretches(model, spec) if stretch.encoded)
    payload = bytes(codec.encode(Lease(0, 0, 1), stretch, fill(model), [True] * 6).numpy())
    out = torch.full((stretch.stop - stretch.start,), 7, dtype=torch.uint8)
    flipped = bytearray(payload)
    flipped[len(payload) * 2 // 3] ^= 4
    wrong: list[Any] = [b"", payload[:20], payload[:-8], payload * 30, flipped, b"\xff" * len(payload), bytes(200)]
    for damaged in wrong:
        with pytest.raises(PayloadError):
            decode_part(spec, memoryview(damaged), out)
        assert bool((out == 7).all())
    with pytest.raises(PayloadError):
        decode_part(spec, memoryview(payload), out[4:])
    with pytest.raises(PayloadError, match="single precision"):
        decode_part(spec, memoryview(payload), out[:-1])
    assert bool((out == 7).all())
    decode_part(spec, memoryview(b"x" + payload)[1:], out)  # wherever it lies in memory
    assert not bool((out == 7).all())


def test_rows_of_a_matrix_are_checked_before_they_are_used(model: Cut) -> None:
    spec = PowerSGD(rank=2)
    codec = PushCodec(spec, model, seat=1, seed=5)
    stretch = next(stretch for stretch in stretches(model, spec) if stretch.rows > 1)
    assert (stretch.stop - stretch.start) // 4 % 33 == 0, "whole rows"
    payload = bytearray(codec.encode(Lease(0, 0, 1), stretch, fill(model), [True] * 6).numpy())
    assert len(payload) < stretch.stop - stretch.start
    out = torch.zeros(stretch.stop - stretch.start, dtype=torch.uint8)
    for rows in (0, 1, stretch.rows + 1, (1 << 32) - 1):
        payload[:4] = rows.to_bytes(4, "little")
        with pytest.raises(PayloadError, match="rows"):
            decode_part(spec, memoryview(payload), out)
        if rows == stretch.rows + 1:
            continue  # a matrix of another form may happen to have as many bytes
        payload[4:8] = (rows ^ (1 << 32) - 1).to_bytes(4, "little")
        with pytest.raises(PayloadError):
            decode_part(spec, memoryview(payload), out)


def test_without_a_codec_nothing_is_decoded() -> None:
    for spec in (NoCodec(), AutoCodec()):
        assert not has_codec(spec)
        with pytest.raises(PayloadError, match="encodes nothing"):
            decode_part(spec, memoryview(bytes(64)), torch.zeros(16))


def test_notes_tell_what_is_not_done() -> None:
    assert note(NoCodec()) == note(Int8()) == note(TopK(correction=False)) == ""
    assert "auto" in note(AutoCodec())
    assert "lossless=zstd" in note(Int8(lossless="zstd"))
    assert "correction" in note(TopK())
