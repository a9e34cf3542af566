"""Servers that are added and drained while a run with real processes goes on: still the weights of `allreduce`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import shoal
from shoal import Notice, Scale, StepDone, Trainer
from shoal.cli.main import app
from shoal.core.events import ServersSeen
from shoal.testing.lab import Lab, why_no_lab
from shoal.testing.reference import relative_difference
from tests.trainer.test_parity import TOLERANCE, classes, entropy, mlp

STEPS = 30


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


GO = multiprocessing.get_context("fork").Event()
"""Workers go on only while it is set, so that no run is over before its servers have changed."""


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    GO.wait(30.0)
    return entropy(model, batch)


def trained(sync: str, *callbacks: Any, **options: Any) -> nn.Module:
    GO.set()
    torch.manual_seed(3)
    net = mlp()
    given: dict[str, Any] = {"batch_size": 48, "steps": STEPS, "workers": 2, "clip": 0.5, **options}
    Trainer(net, loss, adam, classes(), sync=sync, callbacks=list(callbacks), **given).fit()
    return net


@cache
def expected() -> nn.Module:
    return trained("allreduce")


class Plan:
    """Asks for numbers of servers at steps, and notes what it is told."""

    def __init__(self, wishes: dict[int, int]) -> None:
        self.wishes = wishes
        self.events: list[Any] = []

    def __call__(self, event: Any) -> Scale | None:
        self.events.append(event)
        if isinstance(event, Notice) and event.text.startswith("the run goes on with"):
            GO.set()
        if isinstance(event, StepDone) and event.step in self.wishes:
            GO.clear()
            return Scale(servers=self.wishes[event.step])
        return None

    def told(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def wants_no_more(self) -> bool:
        texts = [notice.text for notice in self.told(Notice)]
        return "the run goes on with 1 server" in texts

    def assert_whole(self) -> None:
        assert [event.step for event in self.told(StepDone)] == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
    "sync",
    ["server:servers=1", "server:durability=none", "server:durability=disk"],
)
def test_more_and_fewer_servers(sync: str, tmp_path: Path) -> None:
    plan = Plan({3: 3, 15: 1})
    net = trained(sync, plan, run_dir=tmp_path / "run")
    plan.assert_whole()
    assert relative_difference(net, expected()) < TOLERANCE
    texts = [notice.text for notice in plan.told(Notice)]
    assert texts == ["the run goes on with 3 servers", "the run goes on with 1 server"]
    sizes = {len(seen.servers) for seen in plan.told(ServersSeen)}
    assert 3 in sizes
    last = plan.told(ServersSeen)[-1]
    assert sum(server.shards > 0 for server in last.servers) == 1
    assert not (tmp_path / "run" / "journals").exists()


def test_many_servers_come_back_at_once() -> None:
    """That as many were there before does not mean that they died."""
    plan = Plan({3: 13, 9: 1, 15: 13})
    trained("server:durability=none", plan)
    plan.assert_whole()
    counts = ("13 servers", "1 server", "13 servers")
    assert [notice.text for notice in plan.told(Notice)] == [f"the run goes on with {count}" for count in counts]


@pytest.mark.parametrize(
    "sync", ["server:mode=ssp", "server:mode=ssp,apply=arrival", "server:mode=async,durability=none"]
)
def test_other_modes_go_on(sync: str) -> None:
    plan = Plan({3: 4, 15: 2})
    trained(sync, plan)
    plan.assert_whole()
    steps = plan.told(StepDone)
    assert steps[-1].loss < steps[0].loss
    assert [notice.text for notice in plan.told(Notice)][-1] == "the run goes on with 2 servers"


class Killer(Plan):
    """Kills a server as soon as it is known that others come or go."""

    def __init__(self, wishes: dict[int, int], victim: int) -> None:
        super().__init__(wishes)
        self.victim, self.killed = victim, False

    def __call__(self, event: Any) -> Scale | None:
        answer = super().__call__(event)
        seen = self.told(ServersSeen)
        if answer is not None and not self.killed and seen:
            pids = {server.number: server.pid for server in seen[-1].servers}
            os.kill(pids[self.victim], signal.SIGKILL)
            self.killed = True
        return answer


@pytest.mark.parametrize("sync", ["server:servers=3", "server:servers=3,durability=disk"])
@pytest.mark.parametrize(("servers", "victim"), [(4, 0), (2, 1), (2, 2)])
def test_a_server_dies_while_others_come_or_go(sync: str, servers: int, victim: int, tmp_path: Path) -> None:
    plan = Killer({10: servers}, victim)
    net = trained(sync, plan, run_dir=tmp_path / "run")
    assert plan.killed
    plan.assert_whole()
    assert relative_difference(net, expected()) < TOLERANCE
    assert plan.told(ServersSeen)[-1].replaced == 1
    assert len(plan.told(ServersSeen)[-1].servers) == servers


def test_shoal_scale_reaches_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    answers: list[Any] = []
    asked = threading.Event()

    def ask() -> None:
        for words in (["--servers", "4"], ["2"], ["9"], ["3", "--servers", "1"], []):
            answers.append(CliRunner().invoke(app, ["scale", str(folder), *words]))
        asked.set()

    thread = threading.Thread(target=ask)
    plan = Plan({})

    def wait(event: Any) -> Any:
        plan(event)
        if isinstance(event, StepDone) and event.step == 1:
            thread.start()
        return shoal.Stop() if asked.is_set() and plan.wants_no_more() else None

    trained("server", wait, run_dir=folder, steps=100_000, min_workers=1, max_workers=3)
    thread.join()
    outputs = [" ".join(answer.output.split()) for answer in answers]
    assert [answer.exit_code == 0 for answer in answers] == [True, True, False, True, False], outputs
    assert "goes on with 4 servers" in outputs[0] and "goes on with 3 workers and 1 server" in outputs[3]
    assert "1 (min_workers) to 3 (max_workers)" in str(answers[2].exception or outputs[2])
    assert not (folder / "control").exists()


def test_workers_of_a_fixed_run_stay(tmp_path: Path) -> None:
    def both(event: Any) -> Any:
        return Scale(3, servers=3) if isinstance(event, StepDone) and event.step == 3 else None

    plan = Plan({})
    trained("server", plan, both)
    assert "min_workers" in plan.told(Notice)[0].text
    assert len(plan.told(ServersSeen)[-1].servers) == 2


@pytest.mark.skipif(why_no_lab() is not None, reason=f"no lab: {why_no_lab()}")
def test_hosts_apart() -> None:
    plan = Plan({3: 4, 15: 1})
    with Lab(hosts=2) as lab:
        net = trained("server", plan, engine=f"local:lab={lab.name}")
    plan.assert_whole()
    assert relative_difference(net, expected()) < TOLERANCE
    assert len({server.host for seen in plan.told(ServersSeen) for server in seen.servers}) == 2
