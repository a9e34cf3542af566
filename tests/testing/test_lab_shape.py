"""How a lab host is described, and what the kernel's tools are told. Needs neither root nor Linux."""

from __future__ import annotations

import pytest

from shoal.core.errors import ConfigError
from shoal.testing.lab.network import host_names
from shoal.testing.lab.shape import Change, Shape, firewall, format_rate, rate_commands


def test_what_people_write() -> None:
    shape = Change(rate="100mbit", delay="5ms", loss="1%", cpu="50%").of(Shape())
    assert (shape.rate, shape.delay, shape.loss, shape.cpu) == (100e6, 0.005, 0.01, 0.5)
    assert Change(rate=1e9, delay=0.5, loss=0.25, cpu=2).of(Shape()) == Shape(1e9, 0.5, 0.25, 2.0)
    assert Change(rate="1.5 Gbit").of(Shape()).rate == 1.5e9


def test_what_is_not_given_stays_and_none_takes_a_limit_away() -> None:
    before = Shape(1e9, 0.1, 0.2, 0.5)
    assert Change().of(before) == before
    assert Change(rate="none", cpu="none", delay=0, loss=0).of(before) == Shape()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (Change(rate="fast"), "rate='fast' is not understood"),
        (Change(rate="1gb"), "rate='1gb' is not understood"),
        (Change(rate="-1mbit"), "rate='-1mbit' is not understood"),
        (Change(rate=1), "rate=1 is out of range; use 64kbit to 100gbit"),
        (Change(delay="1h"), "delay='1h' is not understood; write it like 5ms"),
        (Change(delay=11), "delay=11 is out of range"),
        (Change(delay=float("nan")), "delay=nan is out of range"),
        (Change(loss="101%"), "loss='101%' is out of range"),
        (Change(cpu=0), "cpu=0 is out of range"),
        (Change(cpu=True), "cpu=True is not understood"),
    ],
)
def test_what_is_refused(change: Change, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        change.of(Shape())
    assert says in str(error.value)


def test_cuts_come_before_loss_and_loss_before_delay() -> None:
    lines = firewall(Shape(delay=0.005, loss=0.01), ["10.77.0.3", "10.77.0.2"]).splitlines()
    assert lines[0] == "*filter" and lines[-1] == "COMMIT"
    rules = [line for line in lines if line.startswith("-A")]
    assert ["-s 10.77.0.2" in rules[0], "-s 10.77.0.3" in rules[1], "statistic" in rules[2], "NFQUEUE" in rules[3]]
    assert "--probability 0.010000000" in rules[2] and len(rules) == 4
    assert "-A" not in firewall(Shape(rate=1e9, cpu=0.5), [])


@pytest.mark.parametrize(("rate", "burst"), [(10e6, 98304), (1e9, 125000), (100e9, 1 << 20)])
def test_a_bucket_holds_a_bundle_and_about_a_millisecond(rate: float, burst: int) -> None:
    (line,) = rate_commands("eth0", rate)
    assert f"dev eth0 root tbf rate {rate:.0f}bit burst {burst} limit {burst + int(rate / 8 * 0.02)}" in line


def test_rates_are_told_as_people_say_them() -> None:
    assert [format_rate(rate) for rate in (1e9, 2.5e9, 100e6, 64e3)] == [
        "1 Gbit/s",
        "2.5 Gbit/s",
        "100 Mbit/s",
        "64 kbit/s",
    ]


def test_hosts_are_called_by_letters() -> None:
    assert host_names(3) == ["a", "b", "c"]
    for count in (0, 27):
        with pytest.raises(ConfigError, match="1 to 26 hosts"):
            host_names(count)
