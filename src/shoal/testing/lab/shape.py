"""What a lab host's link and CPU are like, as people write it and as the kernel's tools want it. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import msgspec

from shoal.core.errors import ConfigError

QUEUE = 0
"""The number of the netfilter queue in which packets wait; every host has queues of its own."""

_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LEAST_RATE, _MOST_RATE = 64e3, 100e9
_LONGEST_DELAY = 10.0
_LEAST_CPU, _MOST_CPU = 0.05, 1024.0
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z%]*)")
_BURST_SECONDS, _LEAST_BURST, _MOST_BURST = 0.001, 96 << 10, 1 << 20  # bytes
_QUEUE_SECONDS = 0.020


class Shape(msgspec.Struct, frozen=True):
    """Of one host. What is None is unlimited."""

    rate: float | None = None
    """Bits per second, in each direction."""
    delay: float = 0.0
    """Seconds that every packet waits before it reaches the host."""
    loss: float = 0.0
    """The probability that a packet which would reach the host is dropped."""
    cpu: float | None = None
    """Cores' worth of CPU time that the processes in the host get together."""


class Change(msgspec.Struct, frozen=True):
    """What to change of a shape. None leaves it; "none" as a rate or a CPU quota takes the limit away."""

    rate: str | float | None = None
    delay: str | float | None = None
    loss: str | float | None = None
    cpu: str | float | None = None

    def of(self, shape: Shape) -> Shape:
        """`shape` with the change made. Raises ConfigError."""
        return Shape(
            rate=shape.rate if self.rate is None else read_rate(self.rate),
            delay=shape.delay if self.delay is None else read_delay(self.delay),
            loss=shape.loss if self.loss is None else read_loss(self.loss),
            cpu=shape.cpu if self.cpu is None else read_cpu(self.cpu),
        )


def read_rate(given: str | float) -> float | None:
    """Bits per second; None for "none"."""
    if given == "none":
        return None
    value = _number("rate", given, _BITS, "100mbit, 1gbit or none")
    return _within("rate", given, value, _LEAST_RATE, _MOST_RATE, "64kbit to 100gbit")


def read_delay(given: str | float) -> float:
    """Seconds."""
    value = _number("delay", given, _SECONDS, "5ms or 0.005")
    return _within("delay", given, value, 0.0, _LONGEST_DELAY, "0 to 10s")


def read_loss(given: str | float) -> float:
    """A probability."""
    value = _number("loss", given, {"%": 0.01}, "1% or 0.01")
    return _within("loss", given, value, 0.0, 1.0, "0 to 1")


def read_cpu(given: str | float) -> float | None:
    """Cores; None for "none"."""
    if given == "none":
        return None
    value = _number("cpu", given, {"%": 0.01}, "0.5, 50% or none")
    return _within("cpu", given, value, _LEAST_CPU, _MOST_CPU, "0.05 to 1024 cores")


def _number(what: str, given: str | float, units: dict[str, float], such_as: str) -> float:
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return float(given)
    match = _QUANTITY.fullmatch(given.strip().lower()) if isinstance(given, str) else None
    if match is None or (match[2] and match[2] not in units):
        raise ConfigError(f"{what}={given!r} is not understood; write it like {such_as}")
    return float(match[1]) * (units[match[2]] if match[2] else 1.0)


def _within(what: str, given: object, value: float, least: float, most: float, range_: str) -> float:
    if not (math.isfinite(value) and least <= value <= most):
        raise ConfigError(f"{what}={given!r} is out of range; use {range_}")
    return value


def format_rate(rate: float) -> str:
    for unit, bits in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if rate >= bits:
            return f"{rate / bits:g} {unit}"
    return f"{rate:g} bit/s"


def rate_commands(device: str, rate: float | None) -> list[str]:
    """What `tc -batch` is to do for a rate on what leaves by `device`; None takes away the one that is there.

    The bucket holds at least a whole bundle of segments (64 KB and their headers), so that bundles need not be taken
    apart: the kernel counts the headers of a bundle once. A larger one lets more pass at once after a pause, a smaller
    one does not reach the rate.
    """
    if rate is None:
        return [f"qdisc del dev {device} root"]
    burst = int(min(max(rate / 8 * _BURST_SECONDS, _LEAST_BURST), _MOST_BURST))
    limit = burst + int(rate / 8 * _QUEUE_SECONDS)
    return [f"qdisc replace dev {device} root tbf rate {rate:.0f}bit burst {burst} limit {limit}"]


def firewall(shape: Shape, cut_from: Iterable[str]) -> str:
    """The whole filter table of a host, for `iptables-restore`: what comes in is cut, lost or delayed, in that order.

    What comes in and not what goes out: a packet that its sender drops itself is not lost on the way, the sender knows,
    and one that waits in the sender counts against the little that TCP may have waiting there.
    """
    rules = [f"-A INPUT -i eth0 -s {address} -j DROP" for address in sorted(cut_from)]
    if shape.loss:
        rules.append(f"-A INPUT -i eth0 -m statistic --mode random --probability {shape.loss:.9f} -j DROP")
    if shape.delay:
        rules.append(f"-A INPUT -i eth0 -j NFQUEUE --queue-num {QUEUE} --queue-bypass")
    return "\n".join(["*filter", ":INPUT ACCEPT [0:0]", *rules, "COMMIT", ""])
