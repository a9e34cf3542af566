"""`shoal bench comm`: what it says, keeps and refuses."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner, Result

from shoal.cli import bench
from shoal.cli.bench import Part, Plan, Progress, parse_size, sizes_between, summarised
from shoal.cli.bench_table import model_in_words, profile_as_text, short_size, short_time
from shoal.cli.text import Screen
from shoal.core.errors import ConfigError
from shoal.core.linkfit import LinkModel, Point, Segment, fit
from shoal.core.profile import Machine, Measured, Profile, load

SCREEN = Screen(None, color=False)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SHOAL_STORE", raising=False)
    return tmp_path / "home"


def run(*arguments: str) -> Result:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    bench.register(app)
    return CliRunner().invoke(app, ["bench", *arguments])


# -- with workers ------------------------------------------------------------------------------------------------------


def test_a_table_and_a_profile_and_no_run(home: Path) -> None:
    result = run("comm", "--to", "16KB", "--seconds", "0.6", "--collective", "gloo", "--operations", "sum,barrier")
    assert result.exit_code == 0, result.output
    profile = load(home, "local-2")
    assert (profile.workers, profile.hosts, profile.collectives) == (2, [0, 0], ["gloo"])
    assert profile.machine.memory_bandwidth > 0
    assert [found.operation for found in profile.measured] == ["sum", "barrier"]
    assert profile.measured[0].points[0].bytes == 4
    said = result.stdout
    assert "2 workers on 1 host" in said
    assert "Sum in place" in said and "Barrier" in said
    assert model_in_words(profile.measured[0].model) in said
    assert f"Kept as profile local-2: {home / 'profiles' / 'local-2.json'}" in said
    assert "shoal bench: 2 workers, gloo" in result.stderr
    # neither a store nor the folder of a run
    assert [found.name for found in home.iterdir()] == ["profiles"]


def test_as_json_and_not_kept(home: Path) -> None:
    result = run("comm", "--to", "1KB", "--seconds", "0.3", "--json", "--no-save")
    assert result.exit_code == 0, result.output
    profile = msgspec.json.decode(result.stdout, type=Profile)
    assert profile.measured[0].model == fit(profile.measured[0].points)
    assert result.stderr == ""
    assert not home.exists()


def test_collectives_are_compared_in_rounds(home: Path) -> None:
    result = run("comm", "--to", "256B", "--seconds", "1.5", "--collective", "all", "--save", "both")
    assert result.exit_code == 0, result.output
    assert load(home, "both").collectives == ["gloo", "shm"]
    assert "shm is faster by" in result.stdout
    rounds = [line for line in result.stderr.splitlines() if "round" in line]
    assert [line.split(", ")[1] for line in rounds] == ["gloo", "shm", "shm", "gloo", "gloo", "shm"]


def test_ctrl_c_ends_it_and_nothing_is_kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def point(self: Progress, what: str) -> None:
        if what.startswith("sum over") and not seen:
            os.kill(os.getpid(), signal.SIGINT)
        seen.append(what)

    monkeypatch.setattr(Progress, "point", point)
    result = run("comm", "--to", "64MB", "--seconds", "60")
    assert result.exit_code == 130
    assert "Ctrl-C: stopping after the size in progress" in result.stderr
    assert "checkpoint" not in result.stderr
    assert "64 MB" not in "".join(seen)
    assert not home.exists()


# -- what was asked for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--from", "2MB", "--to", "1MB"], "--from 2,000,000 bytes is more than --to"),
        (["--to", "much"], "'much' is not a size"),
        (["--to", "1TB"], "'1TB' is not a size"),
        (["--to", "2B"], "between 4 bytes and"),
        (["--to", "17GB"], "between 4 bytes and"),
        (["--to", "16GB", "--workers", "1000"], "of memory; this machine has"),
        (["--operations", "sum,product"], "use one or more of sum"),
        (["--operations", ","], "use one or more of sum"),
        (["--save", "a", "--no-save"], "use one of them"),
        (["--save", "../a"], "cannot be the name of a profile"),
    ],
)
def test_what_is_refused_before_anything_is_measured(home: Path, arguments: list[str], complaint: str) -> None:
    result = run("comm", *arguments)
    assert isinstance(result.exception, ConfigError)
    assert complaint in str(result.exception)
    assert result.exception.exit_code == 2
    assert result.stderr == ""
    assert not home.exists()


def test_one_worker_has_nobody_to_talk_to() -> None:
    assert run("comm", "--workers", "1").exit_code == 2


def test_alone_it_shows_help() -> None:
    assert "comm" in run().output
    assert "Examples" in run("comm", "--help").output


@pytest.mark.parametrize(
    ("text", "size"),
    [("4", 4), ("4B", 4), ("64KB", 64_000), ("64 KiB", 65_536), ("1.5m", 1_500_000), ("1MiB", 1 << 20), ("1gb", 10**9)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size("--to", text) == size


def test_sizes_double_and_end_with_the_largest() -> None:
    assert sizes_between(4, 100, 2) == [4, 8, 16, 32, 64, 100]
    assert sizes_between(4, 64, 2) == [4, 8, 16, 32, 64]
    assert sizes_between(4, 4, 2) == [4]


def test_every_other_round_goes_the_other_way() -> None:
    plan = Plan(2, "local", ["gloo", "shm"], ["sum"], [4], 1.0)
    assert plan.starts == ["gloo", "shm", "shm", "gloo", "gloo", "shm"]
    assert Plan(2, "local", ["auto"], ["sum"], [4], 1.0).starts == ["auto"]


# -- in words ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (4, "4 B"),
        (512, "512 B"),
        (1000, "1 KB"),
        (1024, "1 KiB"),
        (65_536, "64 KiB"),
        (92_682, "90.5 KiB"),
        (100_000_000, "100 MB"),
        (1 << 20, "1 MiB"),
        (512 << 10, "512 KiB"),
        (25_200_000_000, "23.5 GiB"),
    ],
)
def test_sizes_in_words(size: int, text: str) -> None:
    assert short_size(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5e-7, "250 ns"), (1.234e-5, "12.3 µs"), (0.0456, "45.6 ms"), (1.5, "1.5 s"), (0, "0 ns")]
)
def test_times_in_words(seconds: float, text: str) -> None:
    assert short_time(seconds) == text


def test_a_model_in_words() -> None:
    model = LinkModel([Segment(0, 11e-6, 0.21e-9), Segment(65_536, -4e-4, 0.25e-9)])
    assert model_in_words(model) == "up to 64 KiB: 11 µs + 0.21 ns/B; above: 0.25 ns/B - 400 µs"
    assert model_in_words(LinkModel([Segment(0, 11e-6, 0.0)])) == "11 µs"


def test_what_the_workers_used_counts_not_what_was_asked_for() -> None:
    points = [Point(4, 1.0, 0.5, 2.0, 5), Point(8, 2.0, 1.0, 4.0, 5)]
    parts = [Part("gloo", "", [0, 0], {"sum": points}), Part("gloo", "fell back", [0, 0], {"sum": points[:1]})]
    (found,) = summarised(parts)
    assert (found.collective, [point.repetitions for point in found.points]) == ("gloo", [10, 5])


def measured(collective: str, seconds: list[float]) -> Measured:
    points = [Point(4 << n, time, 0.9 * time, 1.25 * time, 5) for n, time in enumerate(seconds)]
    return Measured(collective, "sum", points, fit(points))


def profile_of(*found: Measured) -> Profile:
    return Profile(0.0, "node7", 4, [0, 0, 1, 1], Machine(2, 1.2e10, "2.13.0"), list(found))


def test_a_table_of_one() -> None:
    text = profile_as_text(profile_of(measured("shm", [1e-5, 2e-5])), {"shm": "one host"}, 8, SCREEN)
    assert text.startswith("4 workers on 2 hosts, 2 cores here\nshm: one host\n")
    rows = [line.split() for line in text.splitlines()]
    assert rows[5] == ["4", "B", "10", "µs", "-10", "+25%", "0.000", "0.001"]
    assert "one core copies memory at 12 GB/s" in text
    assert "did not fit" not in text


def test_a_table_of_two_has_a_ratio_and_gaps() -> None:
    text = profile_as_text(profile_of(measured("shm", [1e-5, 1e-5]), measured("gloo", [1e-4])), {}, 8, SCREEN)
    header, first, second = text.split("has made\n")[1].splitlines()[:3]
    assert header.split("  ")[-1] == "shm is faster by"
    assert header.index("gloo time") < header.index("shm time")
    assert first.endswith("10×")
    assert "×" not in second
    assert "gloo: sizes above 4 B did not fit into the time; --seconds gives more" in text
