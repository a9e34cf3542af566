"""A short, seeded part of `make fuzz`, and that it would find something."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fuzz.py"
FRAMES = 30_000


@pytest.fixture
def fuzz() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("shoal_fuzz", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["shoal_fuzz"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["shoal_fuzz"]


def test_wrong_frames_lead_to_the_promised_errors_and_nothing_else(fuzz: ModuleType) -> None:
    said: list[str] = []
    assert fuzz.fuzz(FRAMES, 5, said.append) == 0, "\n".join(said)
    assert len(said) == 8 and sum("sound" in line for line in said) == 7


def test_another_error_is_a_finding(fuzz: ModuleType) -> None:
    def feed(frame: bytes) -> None:
        if b"\xdd" in frame:
            raise KeyError("unforeseen")

    target = fuzz.Target("something", feed, fuzz.letters(), 1.0)
    with pytest.raises(fuzz.Finding, match=r"something: KeyError.* from [0-9a-f]+"):
        fuzz.try_target(target, 10_000, 1)


def test_a_coordinator_that_falls_is_a_finding(fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def falls(*_: object) -> None:
        raise IndexError("unforeseen")

    monkeypatch.setattr(fuzz.Coordinator, "_take", falls)
    with pytest.raises(fuzz.Finding, match="coordinator: IndexError"):
        fuzz.try_coordinator(1000, 1)


def test_the_same_seed_gives_the_same_frames(fuzz: ModuleType) -> None:
    def first(seed: int) -> list[bytes]:
        frames = fuzz.Frames(fuzz.letters(), seed)
        return [frames.next() for _ in range(200)]

    assert first(3) == first(3) != first(4)
    assert len(set(first(3))) > 150
