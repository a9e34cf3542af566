"""Runs with servers: the weights of one process, and the same meaning of data, schedules, evaluation and resume."""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal import ConfigError, StepDone, Trainer
from shoal.proof.rehearse import playing
from shoal.testing.lab import Lab, why_no_lab
from shoal.testing.reference import relative_difference
from shoal.trainer.served import setup as served_setup
from tests.trainer.test_parity import CASES, STEPS, TOLERANCE, build, classes, entropy, mlp, norm_net, reference, sgd

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": sgd,
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
}


def trained(sync: str = "server", **options: Any) -> nn.Module:
    torch.manual_seed(3)
    net = mlp()
    given = {"optimizer": sgd, "batch_size": 48, "steps": STEPS, "workers": 2, **options}
    Trainer(net, entropy, data=classes(), sync=sync, **given).fit()
    return net


@cache
def by_allreduce(optimizer: str = "momentum", clip: float | None = None) -> nn.Module:
    return trained("allreduce", optimizer=OPTIMIZERS[optimizer], clip=clip)


@pytest.mark.parametrize("name", CASES)
def test_weights_equal_those_of_one_process(name: str) -> None:
    case = CASES[name]
    net = build(case)
    result = Trainer(
        model=net,
        loss=case.loss,
        optimizer=case.optimizer,
        data=case.data(),
        batch_size=case.batch_size,
        steps=STEPS,
        workers=3,
        sync="server",
        **case.options,
    ).fit()
    assert result.steps == STEPS
    assert relative_difference(net, reference(name)) < TOLERANCE


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bsp_gives_the_weights_of_allreduce(optimizer: str, clip: float | None, servers: int) -> None:
    ours = trained(f"server:servers={servers}", optimizer=OPTIMIZERS[optimizer], clip=clip)
    assert relative_difference(ours, by_allreduce(optimizer, clip)) < TOLERANCE


@pytest.mark.parametrize("rate", [1e-2, torch.tensor(1e-2)], ids=["number", "tensor"])
def test_a_schedule_that_changes_the_rate_when_it_is_made(rate: Any) -> None:
    """A rate that is a tensor is changed where it lies."""
    options = {
        "optimizer": lambda params: torch.optim.AdamW(
            params, lr=rate.clone() if isinstance(rate, torch.Tensor) else rate
        ),
        "schedule": lambda optimizer, total: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=total),
    }
    assert relative_difference(trained("server", **options), trained("allreduce", **options)) < TOLERANCE


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
def test_parameters_may_lie_in_memory_in_any_order() -> None:
    def net() -> nn.Module:
        torch.manual_seed(3)
        made = mlp()
        for param in made.parameters():
            param.data = param.data.t().contiguous().t()
        assert not all(param.is_contiguous() for param in made.parameters())
        return made

    nets = [net(), net()]
    for each, sync in zip(nets, ("server", "allreduce"), strict=True):
        Trainer(each, entropy, sgd, classes(), batch_size=48, steps=STEPS, workers=2, sync=sync).fit()
    assert relative_difference(*nets) < TOLERANCE


@pytest.mark.parametrize("durability", ["none", "peer", "disk"])
def test_durability_changes_nothing_while_nobody_dies(durability: str) -> None:
    assert relative_difference(trained(f"server:durability={durability}"), by_allreduce()) < TOLERANCE


@pytest.mark.parametrize(
    "mode", ["ssp,staleness=2", "async", "async,damp=true", "ssp,apply=arrival", "bsp,apply=arrival"]
)
def test_other_modes_train_as_well(mode: str) -> None:
    """Not the same weights: a loss like it."""
    losses: dict[str, list[float]] = {}

    def tell(event: Any) -> None:
        if isinstance(event, StepDone):
            losses[sync].append(event.loss)

    for sync in ("allreduce", f"server:mode={mode}"):
        losses[sync] = []
        trained(sync, steps=60, callbacks=[tell])
    assert all(len(told) == 60 for told in losses.values())
    ours, theirs = (sum(told[-10:]) / 10 for told in losses.values())
    assert ours < losses["allreduce"][0] - 0.5 * (losses["allreduce"][0] - theirs)


def first_to(file: Path) -> bool:
    """Whether this process is the one that came there first."""
    try:
        with open(file, "x") as made:
            made.write(str(os.getpid()))
    except FileExistsError:
        pass
    return file.read_text() == str(os.getpid())


@pytest.mark.parametrize("bound", [0, 2])
def test_no_gradient_is_staler_than_the_bound_though_a_worker_is_slow(bound: int, tmp_path: Path) -> None:
    """The first process that comes to a batch takes ten times as long as the others from then on; the first of these
    that has computed for half of the run then stops once, for as long as the others can go on without it."""
    who, stopped = tmp_path / "slow", tmp_path / "stopped"
    batches = 0  # of this process

    def loss(model: nn.Module, batch: Any) -> Any:
        nonlocal batches
        if playing() is not None:
            return entropy(model, batch)
        batches += 1
        is_slow = first_to(who)
        if not is_slow and batches > 150 and not stopped.exists() and first_to(stopped):
            time.sleep(0.9)  # less than the second after which others compute a lease as well
        time.sleep(0.02 if is_slow else 0.002)
        return entropy(model, batch)

    events: list[Any] = []
    Trainer(
        mlp(),
        loss,
        sgd,
        classes(),
        batch_size=48,
        micro_batch=2,
        steps=40,
        workers=3,
        sync=f"server:mode=ssp,staleness={bound}",
        callbacks=[events.append],
    ).fit()
    assert [event.step for event in events if isinstance(event, StepDone)] == list(range(1, 41))
    last = [event for event in events if isinstance(event, shoal.ServersSeen)][-1]
    assert stopped.exists() and sum(last.staleness) >= 40
    assert len(last.staleness) == bound + 1, "the others did not go as far as they may, or went further"
    seen = {event.worker: event.samples for event in events if isinstance(event, shoal.core.events.WorkerSeen)}
    assert min(seen.values()) < sum(seen.values()) / 4, "the slow worker had as much to do as the others"


@pytest.mark.parametrize("batch", [8, 32])
def test_batchnorm_never_gets_a_single_sample(batch: int, tmp_path: Path) -> None:
    """Workers of different speeds have uneven leases, and a grain of a small step is one sample."""
    sizes, seen = tmp_path / "sizes", {}

    def note(event: Any) -> None:
        if isinstance(event, shoal.core.events.WorkerSeen):
            seen[event.worker] = event.samples

    def loss(model: nn.Module, given: Any) -> Any:
        if playing() is None:
            with open(sizes, "a") as file:
                file.write(f"{len(given[0])}\n")
            time.sleep(0.0 if first_to(tmp_path / "fast") else 0.002 * len(given[0]))
        return nn.functional.mse_loss(model(given[0]), given[1])

    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    inputs = torch.randn(5 * batch + 8, 6, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :1])
    sync = "server:mode=ssp"
    Trainer(net, loss, sgd, data, batch_size=batch, epochs=4, workers=2, sync=sync, callbacks=[note]).fit()
    computed = [int(size) for size in sizes.read_text().split()]
    assert min(computed) >= 2
    assert min(seen.values()) < sum(seen.values()) / 2.2, "leases were even: nobody might have had few samples"


@pytest.mark.parametrize(("mode", "proven"), [("bsp", True), ("bsp", False), ("ssp", False)])
def test_in_step_speed_has_a_say_only_where_nobody_sees_how_a_step_is_cut(
    mode: str, proven: bool, tmp_path: Path
) -> None:
    sizes = tmp_path / "sizes"

    def loss(model: nn.Module, given: Any) -> Any:
        if playing() is None:
            with open(sizes, "a") as file:
                file.write(f"{len(given[0])}\n")
            time.sleep(0.0 if first_to(tmp_path / "fast") else 0.002 * len(given[0]))
        # a sum is not what it is taken for, whatever the weights are
        return nn.functional.mse_loss(model(given[0]), given[1], reduction="mean" if proven else "sum")

    inputs = torch.randn(240, 6, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :1])
    slowly = lambda params: torch.optim.SGD(params, lr=1e-4)  # noqa: E731
    Trainer(nn.Linear(6, 1), loss, slowly, data, batch_size=24, steps=20, workers=2, sync=f"server:mode={mode}").fit()
    computed = {int(size) for size in sizes.read_text().split()}
    assert (computed == {12}) == (mode == "bsp" and not proven), computed


def test_staleness_beyond_all_memory_is_bounded_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    open_steps: list[int] = []

    class Noted(served_setup.Memory):
        def __init__(self, *args: Any, steps: int, **options: Any) -> None:
            open_steps.append(steps)
            super().__init__(*args, steps=steps, **options)

    monkeypatch.setattr(served_setup, "Memory", Noted)
    net = nn.Sequential(nn.Linear(12, 4000), nn.Linear(4000, 10))
    Trainer(net, entropy, sgd, classes(), batch_size=48, steps=2, sync="server:mode=ssp,staleness=10000000").fit()
    assert open_steps and max(open_steps) <= 40, "each open step costs the memory of a gradient"


def test_a_codec_that_has_nothing_to_encode_is_told() -> None:
    events: list[Any] = []
    trained("server", codec="fp16", callbacks=[events.append])
    told = [event.text for event in events if isinstance(event, shoal.Notice)]
    assert any("codec='fp16' is for what travels between hosts" in text for text in told)


def test_events_tell_every_step_once_and_what_servers_did() -> None:
    events: list[Any] = []
    trained("server", callbacks=[events.append], schedule=None, epochs=None, steps=22)
    steps = [event for event in events if isinstance(event, StepDone)]
    assert [event.step for event in steps] == list(range(1, 23))
    assert sum(event.samples for event in steps) == 500 * 2
    assert all(event.rates == [0.1] for event in steps)
    seen = [event for event in events if isinstance(event, shoal.core.events.ServersSeen)]
    assert seen, "servers are not told of"
    last = seen[-1]
    assert [server.number for server in last.servers] == [0, 1]
    assert sum(server.pushes for server in last.servers) >= 22 * 2
    assert last.staleness[0] == sum(last.staleness) > 0  # nothing is stale in bsp


@pytest.mark.parametrize(("apply", "servers"), [("arrival", 1), ("arrival", 2), ("step", 2)])
def test_the_account_has_every_gradient_and_all_weights_once(apply: str, servers: int) -> None:
    """On one host: in shared memory. What servers were pushed is what workers gave them."""
    seen: dict[int, Any] = {}
    facts: list[Any] = []

    def note(event: Any) -> None:
        if isinstance(event, shoal.core.events.WorkerSeen):
            seen[event.worker] = event.traffic
        elif isinstance(event, shoal.core.events.ServersSeen):
            facts[:] = event.servers

    workers = servers
    sync = f"server:servers={servers},apply={apply},durability={'none' if servers == 1 else 'peer'}"
    trained(sync, workers=workers, callbacks=[note], epochs=None, steps=6)
    size = sum(server.bytes for server in facts)
    pushed = sum(server.bytes * server.pushes for server in facts)
    moved = {(flow.kind, flow.link): 0 for traffic in seen.values() for flow in traffic.flows}
    for traffic in seen.values():
        for flow in traffic.flows:
            moved[flow.kind, flow.link] += flow.bytes
    assert moved["gradient", "memory"] == pushed
    assert moved.keys() == {("gradient", "memory"), ("parameter", "memory"), ("control", "loopback")}
    if workers == 1:
        assert pushed == moved["parameter", "memory"] == 6 * size
    if apply == "arrival" and servers == 2:  # every push travels once more, to the copy
        assert pushed <= sum(server.sent for server in facts) < 2 * pushed


@pytest.mark.parametrize(
    ("first", "second"), [("server", "allreduce"), ("allreduce", "server"), ("server", "server:servers=3")]
)
def test_a_checkpoint_goes_on_with_another_sync(first: str, second: str, tmp_path: Path) -> None:
    def cosine(optimizer: torch.optim.Optimizer, total: int) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)

    options: dict[str, Any] = {"optimizer": OPTIMIZERS["adamw"], "schedule": cosine, "clip": 0.5}
    whole = trained("allreduce", **options)
    half = {"run_dir": tmp_path / "run", **options}
    trained(first, **{**half, "steps": 9})
    resumed = trained(second, resume="last", workers=3, **half)
    assert relative_difference(resumed, whole) < TOLERANCE


def test_evaluation_and_the_best_checkpoint(tmp_path: Path) -> None:
    events: list[Any] = []
    options: dict[str, Any] = {"eval_data": classes(100), "eval_every": 5, "callbacks": [events.append]}
    options |= {"predict": lambda model, batch: (model(batch[0]), batch[1]), "metrics": ["accuracy"]}
    trained("server", run_dir=tmp_path / "a", **options)
    ours = [event for event in events if isinstance(event, shoal.core.events.EvalDone)]
    events.clear()
    trained("allreduce", run_dir=tmp_path / "b", **options)
    theirs = [event for event in events if isinstance(event, shoal.core.events.EvalDone)]
    assert [event.step for event in ours] == [event.step for event in theirs] == [5, 10, 15, 20]
    for one, other in zip(ours, theirs, strict=True):
        assert one.metrics == pytest.approx(other.metrics, rel=1e-4)


def test_batch_norm_keeps_the_statistics_of_all_workers() -> None:
    """Samples that are computed together are normalised together, and leases go by speed: one worker is exact."""
    for workers, tolerance in ((1, 1e-5), (2, 0.1)):
        states = []
        for sync in ("allreduce", "server"):
            torch.manual_seed(3)
            net = norm_net()
            Trainer(net, entropy, sgd, classes(), batch_size=48, steps=6, workers=workers, sync=sync).fit()
            states.append(net.state_dict())
        theirs, ours = states
        for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
            assert torch.allclose(ours[name].double(), theirs[name].double(), rtol=tolerance, atol=tolerance), name


@pytest.mark.skipif(why_no_lab() is not None, reason=f"no lab: {why_no_lab()}")
@pytest.mark.parametrize("codec", ["none", "fp16", "int8"])
def test_hosts_apart(codec: str) -> None:
    with Lab(hosts=2) as lab:
        net = trained("server", engine=f"local:lab={lab.name}", codec=codec, workers=4)
    assert relative_difference(net, by_allreduce()) < (TOLERANCE if codec == "none" else 0.05)


@pytest.mark.parametrize(
    ("sync", "options", "words"),
    [
        ("server:servers=0", {}, "servers=0"),
        ("server:staleness=-1", {}, "staleness=-1"),
        ("server:mode=sps", {}, "did you mean 'ssp'"),
        ("server:durability=tape", {}, "none, peer, disk"),
        ("server:mode=bsp,damp=true", {}, "damp"),
        ("server", {"deterministic": True}, "deterministic"),
        ("server", {"ema": 0.9}, "ema"),
        ("server", {"optimizer": lambda params: torch.optim.LBFGS([param for _, param in params])}, "LBFGS"),
    ],
)
def test_what_does_not_go_is_refused_in_words(sync: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        trained(sync, **options)
