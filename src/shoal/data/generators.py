"""Generators that a data set may draw from: how each kind is seeded, and whether somebody has drawn from it.

A generator is *watched* until it is seen to move while items are fetched or collated, and *seeded* from then on. Data
that draws nothing is therefore never seeded, and what is drawn depends on the seed alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
import torch

from shoal.draws.others import NUMPY, PYTHON, numpy_word

_UINT32 = 0xFFFF_FFFF
_UINT64 = 0xFFFF_FFFF_FFFF_FFFF


class Source(Protocol):
    """One generator. Two with different salts draw different numbers after the same seed."""

    certain: bool
    """If it has moved, then since `begin`; otherwise somebody else may have moved it before that."""

    def seed(self, seed: int) -> None:
        """All that is drawn from now on depends on `seed` alone, a number of 64 bits."""

    def begin(self, seed: int) -> None:
        """Watch from now on. May seed the generator to make that cheap."""

    def moved(self) -> bool:
        """Whether it was drawn from since `begin`."""


class Draws:
    """What one kind of code (`__getitem__`, or `collate`) draws from, as far as it was seen."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._watched = list(sources)
        self._seeded: list[Source] = []

    def __bool__(self) -> bool:
        """Whether it was seen to draw."""
        return bool(self._seeded)

    def add(self, sources: Sequence[Source]) -> None:
        self._watched += sources

    def seed(self, seed: int, *, but_torch: bool = False) -> None:
        """Seed what it draws from; `but_torch`: not torch's default generator."""
        for source in self._seeded:
            if not (but_torch and isinstance(source, _Torch) and source.default):
                source.seed(seed)

    def begin(self, seed: int) -> None:
        """Watch everything else."""
        for source in self._watched:
            source.begin(seed)

    def surprised(self) -> bool:
        """Whether anything that is not seeded was, or may have been, drawn from since `begin`: then do it again.

        Ends after some times: each time, one more generator is seeded, or one is certain the next time.
        """
        moved = [source for source in self._watched if source.moved()]
        found = [source for source in moved if source.certain]
        self._seeded += found
        self._watched = [source for source in self._watched if source not in found]
        return bool(moved)


# ---- the three that everybody shares


def global_sources() -> list[Source]:
    """The generators of `random`, numpy and torch that need no object."""
    return [PYTHON, NUMPY, _Torch(torch.default_generator, 0)]


# ---- those that a data set has of its own


def own_source(generator: Any, salt: int) -> Source | None:
    """How to seed this object; None if it is no generator, or one that cannot be seeded."""
    try:
        source = _own_source(generator, salt)
        if source is not None:
            source.begin(0)
        return source
    except Exception:
        # a kind of its own: its state cannot be read, or none can be made from a seed
        return None


def _own_source(generator: Any, salt: int) -> Source | None:
    if isinstance(generator, random.Random):
        return _Python(generator, salt)
    if isinstance(generator, np.random.RandomState):
        return _NumpyState(generator, salt)
    if isinstance(generator, np.random.Generator):
        generator = generator.bit_generator
    if isinstance(generator, np.random.BitGenerator):
        return _numpy_bits(generator, salt)
    if isinstance(generator, torch.Generator) and generator.device.type == "cpu":
        return _Torch(generator, salt)
    return None


def is_generator(thing: Any) -> bool:
    """Whether random numbers are drawn from this object, as far as its type tells."""
    kind = type(thing)
    known = random.Random, np.random.RandomState, np.random.Generator, np.random.BitGenerator, torch.Generator
    if issubclass(kind, known):
        return True
    return kind.__name__ in ("Generator", "RandomState", "BitGenerator") and "random" in kind.__module__


def identity(generator: Any) -> int:
    """Equal for two objects that draw from one state."""
    return id(generator.bit_generator if isinstance(generator, np.random.Generator) else generator)


def shared_by_all() -> set[int]:
    """The identities of those that `global_sources` stands for."""
    state = np.random.mtrand._rand
    return {id(random._inst), id(state), id(state._bit_generator), id(torch.default_generator)}


class _Own:
    """Watched by its state, so that it is where its owner left it as long as items are not drawn from it."""

    certain = True
    _before: Any = None

    def begin(self, seed: int) -> None:
        self._before = self._state()

    def moved(self) -> bool:
        return not _same(self._state(), self._before)

    def _state(self) -> Any:
        raise NotImplementedError


class _Python(_Own):
    def __init__(self, generator: random.Random, salt: int) -> None:
        self._generator, self._salt = generator, salt

    def seed(self, seed: int) -> None:
        self._generator.seed((seed ^ self._salt) & _UINT64)

    def _state(self) -> Any:
        return self._generator.getstate()


class _Torch(_Own):
    def __init__(self, generator: torch.Generator, salt: int) -> None:
        self._generator, self._salt = generator, salt
        self.default = generator is torch.default_generator

    def seed(self, seed: int) -> None:
        self._generator.manual_seed((seed ^ self._salt) & _UINT64)

    def _state(self) -> bytes:
        return self._generator.get_state().numpy().tobytes()


class _NumpyState(_Own):
    """A `RandomState`, which keeps a spare normal number beside the state of its bits."""

    def __init__(self, generator: np.random.RandomState, salt: int) -> None:
        self._generator, self._salt = generator, salt
        self._bits: Any = type(generator._bit_generator)

    def seed(self, seed: int) -> None:
        seed ^= self._salt
        if self._bits is np.random.MT19937:
            self._generator.seed(numpy_word(seed))
        else:
            made = np.random.RandomState(self._bits(seed & _UINT64))
            self._generator.set_state(made.get_state(legacy=False))

    def _state(self) -> Any:
        return self._generator.get_state(legacy=False)


def _numpy_bits(bits: np.random.BitGenerator, salt: int) -> Source:
    if type(bits) is np.random.MT19937:
        # what wraps it seeds it, twenty times faster than another one is made
        return _NumpyState(np.random.RandomState(bits), salt)
    if type(bits) in (np.random.PCG64, np.random.PCG64DXSM):
        return _Congruential(bits, salt)
    source = _Bits(bits, salt)
    source.made(0)
    return source


class _Bits(_Own):
    """What a numpy `Generator` draws from."""

    def __init__(self, bits: np.random.BitGenerator, salt: int) -> None:
        self._bits, self._salt = bits, salt

    def seed(self, seed: int) -> None:
        self._bits.state = self.made((seed ^ self._salt) & _UINT64)

    def made(self, seed: int) -> Any:
        """The state that this seed stands for."""
        return type(self._bits)(seed).state

    def _state(self) -> Any:
        return self._bits.state


class _Congruential(_Bits):
    """PCG64, numpy's default, from a state that is written down: five times faster than making another one."""

    def made(self, seed: int) -> Any:
        words = blake2b(seed.to_bytes(8, "little"), digest_size=32).digest()
        # the increment of such a generator is odd
        state, step = int.from_bytes(words[:16], "little"), int.from_bytes(words[16:], "little") | 1
        inner = {"state": state, "inc": step}
        return {"bit_generator": type(self._bits).__name__, "state": inner, "has_uint32": 0, "uinteger": 0}


def _same(left: Any, right: Any) -> bool:
    """Whether two states are equal: numpy's are dicts with numbers and arrays."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return np.array_equal(left, right) if isinstance(left, np.ndarray) else bool(left == right)
