"""Prometheus's text format, version 0.0.4."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Self

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Family:
    """A metric's name, kind (gauge or counter), help, and its values by label."""

    def __init__(self, name: str, kind: str, about: str) -> None:
        self.name = name
        self.kind = kind
        self.about = about
        self.samples: list[tuple[dict[str, str], float]] = []

    def add(self, value: float, /, **labels: str) -> Self:
        self.samples.append((labels, value))
        return self


def render(families: Iterable[Family]) -> str:
    """The families that have values, as text. It ends with a line feed, as it must."""
    return "".join(_family(family) for family in families if family.samples)


def _family(family: Family) -> str:
    about = family.about.replace("\\", r"\\").replace("\n", r"\n")
    lines = [f"# HELP {family.name} {about}", f"# TYPE {family.name} {family.kind}"]
    lines += [f"{family.name}{_labels(labels)} {number(value)}" for labels, value in family.samples]
    return "\n".join(lines) + "\n"


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    # what is no text (a lone surrogate) could not be sent as UTF-8
    value = value.encode(errors="backslashreplace").decode()
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def number(value: float) -> str:
    if isinstance(value, int):
        return str(int(value))
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))
