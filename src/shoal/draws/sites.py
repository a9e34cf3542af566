"""Which dimension of what is drawn holds the samples, learnt for each place in the code that draws.

Forwards of different sizes show it: a dimension that is n long where there are n samples, or a multiple of n in each
of them (batch × heads, time × batch). A draw that has no such dimension belongs to no sample: one mixing factor for the
batch, a layer that is left out. It is then the same in all forwards of a step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import nn
from xxhash import xxh3_64_intdigest

Shape = tuple[int, ...]

_MOST_FRAMES = 24
_MASK = (1 << 63) - 1
_HERE = str(Path(__file__).parent) + os.sep
_CALLS = _HERE + "calls.py"
_OURS = str(Path(__file__).parent.parent) + os.sep
_CALL: CodeType = nn.Module._call_impl.__code__


class Rule(NamedTuple):
    """`dimension` holds the samples; −1: none does. `inner`: where it is a multiple, samples vary faster in it."""

    dimension: int
    inner: bool = False


SHARED = Rule(-1)


class Seen(NamedTuple):
    """A draw of this shape at this site, in a forward of so many samples."""

    site: int
    samples: int
    shape: Shape


def _word(text: str) -> int:
    return int(xxh3_64_intdigest(text.encode()))


class Names:
    """Names of modules, equal on all workers."""

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self._names: dict[int, int] = {}
        self._kept: list[nn.Module] = []
        for number, root in enumerate(modules):
            for name, module in root.named_modules():
                self._names.setdefault(id(module), _word(f"{number}.{name}"))
                self._kept.append(module)

    def of(self, module: Any) -> int:
        return self._names.get(id(module), 0)


_lines: dict[tuple[int, int], tuple[int, CodeType]] = {}
_kinds: dict[tuple[str, int], int] = {}


def _line(frame: FrameType) -> tuple[int, CodeType]:
    """A word for it; 0 where the code of those who call the user's begins. The code is kept, and so is its id."""
    code = frame.f_code
    name = code.co_filename
    if name.startswith(_OURS) and (name == _CALLS or not name.startswith(_HERE)):
        return 0, code
    return _word(f"{code.co_name}:{code.co_firstlineno}:{frame.f_lineno}"), code


def _kind(kind: str, dimensions: int) -> int:
    return _kinds.setdefault((kind, dimensions), _word(f"{kind}:{dimensions}"))


class Site(NamedTuple):
    """A place in the code that draws. `draw` tells it from others in the same forward, also without those around it."""

    number: int
    draw: int


def site(names: Names, kind: str, dimensions: int) -> Site:
    """The place in the code from which something of this kind, with so many dimensions, is drawn.

    It is known by the module that draws and the lines that lead there from the module around it; not by how many draws
    came before: a layer that is left out at random, or a loop over the steps of padded samples, would shift these.
    The draw is known by the module and the lines inside it alone: whoever calls a model gets the same numbers.
    """
    frame: FrameType | None = sys._getframe(2)
    start = _kinds.get((kind, dimensions)) or _kind(kind, dimensions)
    found, draw = start, 0
    lines, calls = _lines, _CALL
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        code = frame.f_code
        if code is calls:
            if draw:
                break
            found = draw = (found * 31 + names.of(frame.f_locals.get("self"))) & _MASK
        line = id(code), frame.f_lasti
        known = lines.get(line)
        if known is None:
            known = lines[line] = _line(frame)
        if not known[0]:
            break
        found = (found * 31 + known[0]) & _MASK
        frame = frame.f_back
    return Site(found, draw or start)


def guess(samples: int, shape: Shape) -> Rule:
    """By one forward alone: the first dimension of that length, or else the first one if it is a multiple."""
    if samples in shape:
        return Rule(shape.index(samples))
    if samples and shape and shape[0] and shape[0] % samples == 0:
        return Rule(0)
    return SHARED


def fits(rule: Rule, samples: int, shape: Shape) -> bool:
    """Whether a draw of this shape can be what the rule says."""
    if rule.dimension < 0:
        return True
    return rule.dimension < len(shape) and shape[rule.dimension] % samples == 0


def learn(seen: Sequence[Seen]) -> tuple[dict[int, Rule], list[int]]:
    """Rules by what forwards of different sizes have drawn, and the sites where samples may vary faster: multiples.

    Sites that were seen in forwards of one size only get a guess.
    """
    rules: dict[int, Rule] = {}
    multiples = []
    by_site: dict[int, list[Seen]] = {}
    for one in seen:
        by_site.setdefault(one.site, []).append(one)
    for number, all_of_it in by_site.items():
        rule = rules[number] = _rule(all_of_it)
        if rule.dimension >= 0 and any(one.shape[rule.dimension] != one.samples for one in all_of_it):
            multiples.append(number)
    return rules, multiples


def _rule(seen: Sequence[Seen]) -> Rule:
    if len({one.samples for one in seen}) == 1:
        return guess(seen[0].samples, seen[0].shape)
    candidates = [dimension for dimension in range(len(seen[0].shape)) if _holds(dimension, seen)]
    exact = [each for each in candidates if all(one.shape[each] == one.samples for one in seen)]
    return Rule((exact or candidates)[0]) if candidates else SHARED


def _holds(dimension: int, seen: Sequence[Seen]) -> bool:
    if any(dimension >= len(one.shape) for one in seen):
        return False
    sizes = {one.shape[dimension] for one in seen}
    return len(sizes) > 1 and all(one.shape[dimension] % one.samples == 0 != one.shape[dimension] for one in seen)


def as_tree(rules: Mapping[int, Rule]) -> list[list[int]]:
    """For messages and checkpoints."""
    return [[number, rule.dimension, int(rule.inner)] for number, rule in sorted(rules.items())]


def from_tree(tree: Iterable[Sequence[int]]) -> dict[int, Rule]:
    return {int(number): Rule(int(dimension), bool(inner)) for number, dimension, inner in tree}
