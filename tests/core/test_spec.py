from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core import spec
from shoal.core.errors import ConfigError

WHAT_EXISTS = {
    "layout": ("single", spec.Single()),
    "sync": ("allreduce", spec.AllReduce()),
    "codec": ("none", spec.NoCodec()),
    "precision": ("fp32", spec.Fp32()),
    "engine": ("local", spec.Local()),
}


@dataclass(frozen=True)
class Fancy:
    name: ClassVar[str] = "fancy"
    count: int = 4
    ratio: float = 0.5
    loud: bool = False
    word: str = "a"


@pytest.fixture
def fancy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind whose object has keys of every type that a spec string can carry."""
    monkeypatch.setitem(spec.KINDS, "fancy", (Fancy,))


@pytest.mark.parametrize("kind", spec.KINDS)
def test_a_name_and_its_object_mean_the_same(kind: str) -> None:
    name, value = WHAT_EXISTS[kind]
    assert spec.parse(kind, name) == value
    assert spec.parse(kind, f"  {name}: ") == value
    assert spec.parse(kind, value) is value


@pytest.mark.parametrize("kind", spec.KINDS)
def test_spec_objects_are_frozen(kind: str) -> None:
    _, value = WHAT_EXISTS[kind]
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.anything = 1
    assert hash(value) == hash(spec.parse(kind, value))


def test_keys_and_values_of_every_type(fancy: None) -> None:
    assert spec.parse("fancy", "fancy: count = 7, ratio=1e-3,loud=True ,word=b") == Fancy(7, 1e-3, True, "b")
    assert spec.parse("fancy", "fancy:loud=false") == Fancy()


@pytest.mark.parametrize(
    "text, message",
    [
        ("fancy:count=many", "count='many' is not of type int"),
        ("fancy:loud=maybe", "loud='maybe' is not of type bool"),
        ("fancy:count", "'count' is not of the form key=value"),
        ("fancy:count=1,count=2", "count is given twice"),
        ("fancy:cuont=1", r"unknown key 'cuont' \(did you mean 'count'\?\); valid keys: count, ratio, loud, word"),
        ("fancy:zzz=1", "unknown key 'zzz'; valid keys"),
    ],
)
def test_what_is_wrong_with_keys_is_said(fancy: None, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        spec.parse("fancy", text)
    assert str(error.value).startswith(f"fancy={text!r}")


@pytest.mark.parametrize(
    "kind, given, parts",
    [
        ("layout", "zero3", ["layout='zero3' is not available", "'single'"]),
        ("sync", "all-reduce", ["did you mean 'allreduce'?", "'allreduce'"]),
        ("codec", "int4", ["did you mean 'int8'?", "this version has 'none', 'fp16'"]),
        ("codec", "int8:block=12", ["block=12 must be a multiple of 8"]),
        ("codec", "int8:rounding=up", ["rounding='up' is not known; use nearest or stochastic"]),
        ("codec", "int8:lossless=gzip", ["lossless='gzip' is not known; use auto, zstd or lz4"]),
        ("codec", "topk:density=2", ["density=2.0 must be from 1e-06 to 1"]),
        ("codec", "topk:threshold=sorted", ["threshold='sorted' is not known; use sampled or exact"]),
        ("codec", "powersgd:rank=0", ["rank=0 must be from 1 to 4096"]),
        ("codec", "onebit:block=100", ["block=100 must be a multiple of 64"]),
        ("precision", "bf16", ["this version has 'fp32'"]),
        ("engine", "ray", ["this version has 'local'"]),
        ("engine", "loacl", ["did you mean 'local'?"]),
        ("layout", "", ["layout='' is not available"]),
        ("layout", "single:shards=2", ["unknown key 'shards'", "single takes no keys"]),
        ("engine", "local:start=spoon", ["start='spoon' is not known", "auto, fork or script"]),
        ("codec", None, ["codec=None is of type NoneType", "'none'"]),
        ("codec", spec.Single(), ["is of type Single", "'none'"]),
        ("engine", 3, ["engine=3 is of type int"]),
    ],
)
def test_what_is_not_there_is_refused_by_name(kind: str, given: Any, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        spec.parse(kind, given)
    for part in parts:
        assert part in str(error.value)


def test_the_engine_says_how_workers_start() -> None:
    assert spec.parse("engine", "local:start=script") == spec.Local(start="script")
    with pytest.raises(ConfigError, match="start='thread'"):
        spec.Local(start="thread")


@given(kind=st.sampled_from(sorted(spec.KINDS)), text=st.text(max_size=30))
def test_any_text_is_parsed_or_refused(kind: str, text: str) -> None:
    try:
        assert spec.parse(kind, text).name
    except ConfigError as error:
        assert kind in str(error)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("async", "did you mean 'server:mode=async'?"),
        ("ssp:staleness=4", "did you mean 'server:mode=ssp,staleness=4'?"),
        ("server:async", "did you mean mode=async?"),
    ],
)
def test_a_mode_without_its_sync_is_understood(text: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spec.parse("sync", text)
    assert hint in str(caught.value)
