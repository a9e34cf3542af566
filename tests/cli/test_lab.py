"""`shoal lab`: what it says, and that the lab is up between its calls and gone after the last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from shoal.cli import lab
from shoal.core.errors import ConfigError, LabUnavailable
from shoal.engines.places import labs_up
from shoal.testing.lab import why_no_lab
from shoal.testing.lab.lab import take_down

needs_lab = pytest.mark.skipif(why_no_lab() is not None, reason=str(why_no_lab()))


def call(*args: str) -> Result:
    app = typer.Typer()
    app.callback()(lambda: None)
    lab.register(app)
    return CliRunner().invoke(app, ["lab", *args])


def said(*args: str) -> str:
    result = call(*args)
    assert result.exit_code == 0, result.output + str(result.exception)
    return result.output


def refused(*args: str) -> str:
    result = call(*args)
    assert isinstance(result.exception, ConfigError | LabUnavailable), result.output
    return str(result.exception)


@pytest.fixture
def name() -> Iterator[str]:
    chosen = f"cli-{os.getpid()}"
    yield chosen
    with suppress(ConfigError):
        take_down(chosen)


@needs_lab
def test_a_lab_from_up_to_down(name: str) -> None:
    up = said("up", name, "--hosts", "3", "--rate", "1gbit", "--cpu", "0.5", "--delay", "1ms", "--loss", "0.1%")
    assert f'engine="local:lab={name}"' in up and f"shoal lab down {name}" in up
    assert "a     10.77.0.2  1 Gbit/s  0.5  1 ms   0.1%" in up
    assert "every host reaches every other one" in said("status", name)
    assert "100 Mbit/s  0.5  0 ms   0%" in said("shape", name, "b", "--rate", "100mbit", "--delay", "0", "--loss", "0")
    assert "cut: b does not hear a" in said("cut", name, "a", "b", "--one-way")
    assert "c     10.77.0.4  unplugged" in said("cut", name, "c")
    status = said("status", name)
    assert "10.77.0.3 (host b) cannot be reached from host a" in status
    assert "10.77.0.2 (host a) cannot be reached from host c" in status
    healed = said("heal", name)
    assert "cut" not in healed and "unplugged" not in healed
    (state,) = [json.loads(line) for line in said("status", "--json").splitlines() if f'"{name}"' in line]
    assert state["unreachable"] == [] and state["hosts"][1]["host"]["shape"]["rate"] == 100e6
    assert f"The lab {name} is down." in said("down", name)
    assert name not in labs_up() and "is not up" in refused("down", name)


@needs_lab
def test_a_program_runs_in_a_host_with_its_exit_code(name: str, tmp_path: Path) -> None:
    said("up", name, "--hosts", "1")
    command = [sys.executable, "-m", "shoal.cli", "lab", "run", name, "a", "--"]
    script = ["sh", "-c", "hostname; pwd; exit 7"]
    done = subprocess.run([*command, *script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split()) == (7, ["a", str(tmp_path)]), done.stderr


@needs_lab
def test_what_is_wrong_is_said(name: str) -> None:
    assert "out of range; use 64kbit to 100gbit" in refused("up", name, "--rate", "1bit")
    assert "a lab has 1 to 26 hosts" in refused("up", name, "--hosts", "27")
    assert "1 to 20 of a-z" in refused("up", "Two")
    assert f"lab='{name}' is not up" in refused("cut", name, "a")
    said("up", name, "--hosts", "1")
    assert "is up already" in refused("up", name)
    assert "has no host 'z'; it has a" in refused("cut", name, "z")
    assert "say --rate, --cpu, --delay or --loss" in refused("shape", name)


def test_help_teaches() -> None:
    text = said("--help")
    assert "shoal lab cut two a b" in text and "local:lab=two" in text
    assert "10 ms there and back" in said("up", "--help")
    for command in ("status", "shape", "cut", "heal", "run", "down"):
        assert "Usage" in said(command, "--help")


@pytest.mark.parametrize("words", [["status"], ["up", "two"], ["down", "two"], ["cut", "two", "a"]])
def test_without_root_every_command_says_so(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "needs root, and this process runs as user 1000; run it with sudo" in refused(*words)
