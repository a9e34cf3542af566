"""Spec strings: `name` or `name:key=value,key=value`, each of which parses to one small frozen object.

The object may also be passed itself. What is listed here exists; everything else is refused by name.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar

from shoal.core.errors import ConfigError


@dataclass(frozen=True)
class Single:
    """Layout: every worker holds the whole model."""

    name: ClassVar[str] = "single"


@dataclass(frozen=True)
class AllReduce:
    """Sync: gradients are summed over all workers in every step."""

    name: ClassVar[str] = "allreduce"


@dataclass(frozen=True)
class Server:
    """Sync: server processes hold the parameters and apply the optimizer; workers push gradients and pull weights.

    `mode`: bsp computes every step with the weights of the step before, as allreduce does; ssp lets workers be up to
    `staleness` steps ahead of what is applied; async sets no bound. `apply`: a step is applied when all its samples
    have arrived, or (arrival) each push on its own, with its share of the learning rate. `durability`: what a server's
    death may cost: none keeps no copy, peer one on another server, disk a journal. `damp`: gradients computed with
    weights that are k steps old count 1/(1+k), as far as the mode allows such.
    """

    name: ClassVar[str] = "server"
    modes: ClassVar[tuple[str, ...]] = ("bsp", "ssp", "async")
    mode: str = "bsp"
    staleness: int = 4
    servers: int = 2
    apply: str = "step"
    durability: str = "peer"
    damp: bool = False

    def __post_init__(self) -> None:
        for key, given, known in (
            ("mode", self.mode, self.modes),
            ("apply", self.apply, ("step", "arrival")),
            ("durability", self.durability, ("none", "peer", "disk")),
        ):
            if given not in known:
                raise ConfigError(
                    f"sync: server's {key}={given!r} is not known{_nearest(str(given), dict.fromkeys(known))}; use "
                    f"{', '.join(known)}"
                )
        if not 1 <= self.servers <= MOST_SERVERS:
            raise ConfigError(f"sync: servers={self.servers}; a run has 1 to {MOST_SERVERS} servers")
        if self.staleness < 0:
            raise ConfigError(
                f"sync: staleness={self.staleness} would mean weights of the future; use 0 (as bsp) or more"
            )
        if self.damp and self.mode == "bsp":
            raise ConfigError(
                "sync: damp=true scales stale gradients, and with mode=bsp there are none; use ssp or async"
            )

    @property
    def bound(self) -> int | None:
        """Steps that a worker may be ahead of what is applied; None without bound."""
        return {"bsp": 0, "ssp": self.staleness, "async": None}[self.mode]


MOST_SERVERS = 64

LOSSLESS = ("", "auto", "zstd", "lz4")
"""What may compress payloads further, without loss; `auto` takes what is installed. Used only where it pays."""


def _check_codec(codec: Any, **bounds: tuple[float, float]) -> None:
    """Each named field must be within its bounds, and `lossless` be known."""
    for field, (least, most) in bounds.items():
        value = getattr(codec, field)
        if not least <= value <= most:
            raise ConfigError(f"codec {codec.name}: {field}={value} must be from {least:g} to {most:g}")
    if codec.lossless not in LOSSLESS:
        raise ConfigError(f"codec {codec.name}: lossless={codec.lossless!r} is not known; use auto, zstd or lz4")


@dataclass(frozen=True)
class NoCodec:
    """Codec: tensors travel as they are."""

    name: ClassVar[str] = "none"
    lossless: str = ""

    def __post_init__(self) -> None:
        _check_codec(self)


@dataclass(frozen=True)
class Fp16:
    """Codec: half precision, scaled so that nothing overflows. `feedback` keeps what rounding loses for later steps."""

    name: ClassVar[str] = "fp16"
    feedback: bool = False
    lossless: str = ""

    def __post_init__(self) -> None:
        _check_codec(self)


@dataclass(frozen=True)
class Bf16:
    """Codec: bfloat16, the upper half of single precision."""

    name: ClassVar[str] = "bf16"
    feedback: bool = False
    lossless: str = ""

    def __post_init__(self) -> None:
        _check_codec(self)


@dataclass(frozen=True)
class Int8:
    """Codec: 8 bits for each number, and a scale for each block of them. `rounding` is nearest or stochastic."""

    name: ClassVar[str] = "int8"
    block: int = 256
    rounding: str = "nearest"
    feedback: bool = True
    lossless: str = ""

    def __post_init__(self) -> None:
        _check_codec(self, block=(8, 65536))
        if self.block % 8:
            raise ConfigError(f"codec int8: block={self.block} must be a multiple of 8")
        if self.rounding not in ("nearest", "stochastic"):
            raise ConfigError(f"codec int8: rounding={self.rounding!r} is not known; use nearest or stochastic")


@dataclass(frozen=True)
class TopK:
    """Codec: the largest numbers only, a share `density` of them; the others wait until they have grown.

    `threshold` is sampled or exact. `correction` lets momentum act before numbers are chosen, `mask` stops it for those
    that were sent; `warmup` is the number of steps in which the density falls from a quarter; `clip` bounds the norm of
    a worker's gradient (0 does not).
    """

    name: ClassVar[str] = "topk"
    density: float = 0.01
    threshold: str = "sampled"
    correction: bool = True
    mask: bool = True
    warmup: int = 0
    clip: float = 0.0
    lossless: str = ""

    def __post_init__(self) -> None:
        _check_codec(self, density=(1e-6, 1.0), warmup=(0, 1 << 40), clip=(0.0, 1e30))
        if self.threshold not in ("sampled", "exact"):
            raise ConfigError(f"codec topk: threshold={self.threshold!r} is not known; use sampled or exact")


@dataclass(frozen=True)
class PowerSGD:
    """Codec: matrices as products of two thin ones of this rank; small tensors travel as they are."""

    name: ClassVar[str] = "powersgd"
    rank: int = 32
    lossless: str = ""

    def __post_init__(self) -> None:
        _check_codec(self, rank=(1, 4096))


@dataclass(frozen=True)
class OneBit:
    """Codec: the sign of each number, and a scale for each block of them. With Adam its variance is held still."""

    name: ClassVar[str] = "onebit"
    block: int = 1024
    lossless: str = ""

    def __post_init__(self) -> None:
        _check_codec(self, block=(64, 1 << 20))
        if self.block % 64:
            raise ConfigError(f"codec onebit: block={self.block} must be a multiple of 64")


@dataclass(frozen=True)
class AutoCodec:
    """Codec: the first steps are measured, and what is fastest here is used, of those that leave the loss as it is."""

    name: ClassVar[str] = "auto"


@dataclass(frozen=True)
class Fp32:
    """Precision: operations run in the dtype of the parameters."""

    name: ClassVar[str] = "fp32"


@dataclass(frozen=True)
class Local:
    """Engine: workers on this machine.

    `start="fork"` forks them from this process, `start="script"` runs the script once per worker,
    `start="auto"` forks unless the machine has CUDA, which does not survive a fork.
    `lab` names a lab that is up: the workers are forked, and spread over its hosts in blocks.
    """

    name: ClassVar[str] = "local"
    start: str = "auto"
    lab: str = ""

    def __post_init__(self) -> None:
        if self.start not in ("auto", "fork", "script"):
            raise ConfigError(f"engine: start={self.start!r} is not known; use auto, fork or script")
        if self.lab and self.start == "script":
            raise ConfigError(f"engine: lab={self.lab!r} forks its workers; leave start=script out")
        if self.lab:
            object.__setattr__(self, "start", "fork")  # a frozen value, before anybody has seen it


AnyCodec = NoCodec | Fp16 | Bf16 | Int8 | TopK | PowerSGD | OneBit | AutoCodec

KINDS: dict[str, tuple[type[Any], ...]] = {
    "layout": (Single,),
    "sync": (AllReduce, Server),
    "codec": (NoCodec, Fp16, Bf16, Int8, TopK, PowerSGD, OneBit, AutoCodec),
    "precision": (Fp32,),
    "engine": (Local,),
}


COLLECTIVES = ("auto", "shm", "hierarchical", "gloo", "nccl")
"""How workers sum: by shared memory, by that inside hosts and a ring between them, by torch's backends."""


def check_collective(given: object) -> str:
    """Raises `ConfigError` with the valid names."""
    if isinstance(given, str) and given in COLLECTIVES:
        return given
    near = _nearest(given, dict.fromkeys(COLLECTIVES)) if isinstance(given, str) else ""
    raise ConfigError(f"collective={given!r} is not known{near}; use {_listing(dict.fromkeys(COLLECTIVES))}")


def parse(kind: str, given: object) -> Any:
    """The object that `given` means for the argument `kind`. Raises `ConfigError` with the valid names and keys."""
    classes = {cls.name: cls for cls in KINDS[kind]}
    if isinstance(given, tuple(classes.values())):
        return given
    if not isinstance(given, str):
        raise ConfigError(f"{kind}={given!r} is of type {type(given).__name__}; use {_listing(classes)}")
    name, _, rest = given.strip().partition(":")
    if name not in classes:
        near = _nearest(name, classes)
        for cls in classes.values():
            if name in getattr(cls, "modes", ()):
                near = f" (did you mean '{cls.name}:mode={name}{',' if rest else ''}{rest}'?)"
        raise ConfigError(f"{kind}={given!r} is not available{near}; this version has {_listing(classes)}")
    return classes[name](**_arguments(kind, given, rest, classes[name]))


def _arguments(kind: str, given: str, text: str, cls: type[Any]) -> dict[str, Any]:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    arguments: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals:
            near = f" (did you mean mode={part}?)" if part in getattr(cls, "modes", ()) else ""
            raise ConfigError(f"{kind}={given!r}: {part!r} is not of the form key=value{near}")
        if not value:
            raise ConfigError(f"{kind}={given!r}: {key}= is empty; give it a value, or leave it out")
        if key not in fields:
            known = f"valid keys: {', '.join(fields)}" if fields else f"{cls.name} takes no keys"
            raise ConfigError(f"{kind}={given!r}: unknown key {key!r}{_nearest(key, fields)}; {known}")
        if key in arguments:
            raise ConfigError(f"{kind}={given!r}: {key} is given twice")
        arguments[key] = _value(kind, given, key, value, fields[key].default)
    return arguments


def _value(kind: str, given: str, key: str, text: str, default: object) -> Any:
    wanted: type[Any] = type(default)
    try:
        if wanted is bool:
            return {"true": True, "false": False}[text.lower()]
        return wanted(text)
    except (KeyError, ValueError):
        raise ConfigError(f"{kind}={given!r}: {key}={text!r} is not of type {wanted.__name__}") from None


def _listing(names: dict[str, Any]) -> str:
    return ", ".join(repr(name) for name in names)


def _nearest(name: str, names: dict[str, Any]) -> str:
    close = get_close_matches(name, names, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
