"""Sparse tables on servers: the weights of one process, whatever dies, and workers that never have a table."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal
from shoal import ConfigError, StepDone, Trainer
from shoal.checkpoint import load
from shoal.syncs.server.embeddings import Embeddings, find_tables
from shoal.syncs.server.tables import empty_cut, make_tables
from shoal.testing.lab import Lab, why_no_lab
from shoal.testing.reference import reference_fit, relative_difference
from shoal.trainer.served import served
from shoal.trainer.served.leased import LeasedSession

TOLERANCE = 1e-5
STEPS = 20
USERS, FILMS, WIDTH = 300, 500, 16
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, lr_decay=0.01),
    "sparseadam": lambda params: torch.optim.SparseAdam(params, lr=0.01),
}


def ratings(size: int = 500) -> TensorDataset:
    """The last users and films come late, so that some rows are not touched for long, and some never."""
    generator = torch.Generator().manual_seed(5)
    users = torch.randint(0, USERS, (size,), generator=generator)
    films = torch.randint(0, FILMS, (size, 2), generator=generator)
    return TensorDataset(users, films, torch.rand(size, generator=generator) * 4 + 1)


class Taste(nn.Module):
    """One table is used twice in a forward, and has a row for padding."""

    def __init__(self, *, dense: bool = True, sparse: bool = True, device: str | None = None) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH, sparse=sparse, device=device)
        self.films = nn.Embedding(FILMS, WIDTH, sparse=sparse, padding_idx=7, device=device)
        self.out = nn.Linear(WIDTH, 1) if dense else None

    def forward(self, users: Tensor, films: Tensor) -> Tensor:
        tastes = self.users(users) * (self.films(films[:, 0]) + self.films(films[:, 1]))
        return (tastes.sum(1, keepdim=True) / 8 if self.out is None else self.out(tastes)).squeeze(1)


def loss(net: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(net(batch[0], batch[1]), batch[2])


def build(**options: Any) -> Taste:
    torch.manual_seed(3)
    return Taste(**options)


def trained(sync: str = "server", optimizer: str = "sgd", net: Taste | None = None, **options: Any) -> Taste:
    net = build(dense=optimizer != "sparseadam") if net is None else net
    given = {"batch_size": 48, "steps": STEPS, "workers": 2, **options}
    result = Trainer(net, loss, OPTIMIZERS[optimizer], ratings(), sync=sync, **given).fit()
    assert result.steps == given["steps"] or "callbacks" in options
    return net


def alone(optimizer: str = "sgd", net: Taste | None = None, **options: Any) -> Taste:
    """Plain PyTorch in this process."""
    net = build(dense=optimizer != "sparseadam") if net is None else net
    with torch.sparse.check_sparse_tensor_invariants(False):  # else Adagrad warns
        reference_fit(net, loss, OPTIMIZERS[optimizer], ratings(), batch_size=48, **{"steps": STEPS, **options})
    return net


# -- the weights of one process ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bsp_gives_the_weights_of_one_process(optimizer: str, servers: int) -> None:
    assert relative_difference(trained(f"server:servers={servers}", optimizer), alone(optimizer)) < TOLERANCE


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_clipping_counts_the_rows_of_tables(optimizer: str) -> None:
    """A table that is not sparse has the same norm, and these optimizers leave rows without gradients alone."""
    theirs = alone(optimizer, build(sparse=False), clip=0.05)
    assert relative_difference(trained("server", optimizer, clip=0.05), theirs) < TOLERANCE
    assert relative_difference(theirs, alone(optimizer)) > 1e-3, "nothing was clipped"


def test_a_schedule_and_micro_batches_mean_what_they_mean_elsewhere() -> None:
    def falling(optimizer: torch.optim.Optimizer, total: int) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)

    ours = trained("server", "adagrad", schedule=falling, micro_batch=4)
    assert relative_difference(ours, alone("adagrad", schedule=falling)) < TOLERANCE


def test_evaluation_is_of_exact_versions() -> None:
    """The loss over all data of the final weights, told by a worker, is that of the model as it is returned."""
    net = build()
    given: dict[str, Any] = {"batch_size": 48, "steps": STEPS, "workers": 2}
    result = Trainer(
        net, loss, OPTIMIZERS["sgd"], ratings(), eval_data=ratings(), eval_every=5, sync="server:mode=ssp", **given
    ).fit()
    with torch.no_grad():
        assert result.metrics["loss"] == pytest.approx(float(loss(net, ratings().tensors)), rel=1e-5)


@pytest.mark.parametrize("mode", ["ssp,staleness=2", "async", "bsp,apply=arrival", "ssp,apply=arrival"])
def test_other_modes_train_as_well(mode: str) -> None:
    losses: list[float] = []

    def tell(event: Any) -> None:
        if isinstance(event, StepDone):
            losses.append(event.loss)

    trained(f"server:mode={mode}", "sgd", steps=80, callbacks=[tell], clip=10.0)
    assert len(losses) == 80
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])


@pytest.mark.skipif(why_no_lab() is not None, reason=f"no lab: {why_no_lab()}")
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_rows_travel_between_hosts_as_they_are(codec: str) -> None:
    """A codec is for what is dense: here that has little to say."""
    with Lab(hosts=2) as lab:
        ours = trained("server:servers=2", "adagrad", engine=f"local:lab={lab.name}", codec=codec, workers=4)
    theirs = alone("adagrad")
    assert relative_difference(ours, theirs) < (TOLERANCE if codec == "none" else 0.05)


# -- tables that no worker has -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_table_on_meta_is_made_on_servers_and_is_real_afterwards(optimizer: str) -> None:
    """Rows that no sample touches are as they were made: normal, the same for the same seed, and zeros for padding."""
    dense = optimizer != "sparseadam"
    ours = trained("server:servers=2", optimizer, build(dense=dense, device="meta") if not dense else _meta_tables())
    again = trained("server:servers=3", optimizer, build(dense=dense, device="meta") if not dense else _meta_tables())
    assert ours.users.weight.device.type == "cpu" and isinstance(ours.users.weight, nn.Parameter)
    assert relative_difference(ours, again) < TOLERANCE
    weights = ours.films.weight.detach()
    assert torch.equal(weights[7], torch.zeros(WIDTH))
    assert 0.9 < float(weights.std()) < 1.1 and abs(float(weights.mean())) < 0.1
    assert torch.unique(weights[:, 0]).numel() > 0.99 * FILMS


def _meta_tables() -> Taste:
    net = build()
    net.users = nn.Embedding(USERS, WIDTH, sparse=True, device="meta")
    net.films = nn.Embedding(FILMS, WIDTH, sparse=True, padding_idx=7, device="meta")
    return net


class HeldRows:
    """Stands in for the servers' rows, and writes down what is asked for ahead."""

    def __init__(self, net: Taste) -> None:
        self.tables = [net.users.weight.detach().clone(), net.films.weight.detach().clone()]
        self.asked: dict[int, list[int]] = {}
        self.leaves: list[tuple[int, Tensor, Tensor]] = []

    def ahead(self, table: int, ids: Tensor) -> None:
        self.asked[table] = ids.tolist()

    def rows(self, table: int, ids: Tensor) -> Tensor:
        return self.tables[table][ids]

    def touch(self, table: int, ids: Tensor, leaf: Tensor) -> None:
        self.leaves.append((table, ids, leaf))


def test_a_worker_learns_where_ids_are_and_asks_ahead() -> None:
    net, plain = build(), build()
    found = find_tables(net, OPTIMIZERS["sgd"](list(net.named_parameters())))
    _, tables = make_tables(empty_cut(), found)
    rows: Any = HeldRows(net)
    setup: Any = SimpleNamespace(tables=tables)
    embeddings = Embeddings(net, setup, rows)
    first, second = (ratings()[start : start + 10] for start in (0, 10))
    embeddings.ahead([first])
    assert not rows.asked, "nothing is known yet"
    embeddings.batch(first)
    loss(net, first).backward()
    loss(plain, first).backward()
    assert net.users.weight.grad is None
    for number, weight in enumerate((plain.users.weight, plain.films.weight)):
        mine = torch.zeros_like(weight)
        for table, ids, leaf in rows.leaves:
            if table == number:
                mine.index_add_(0, ids, leaf.grad)
        assert weight.grad is not None and torch.allclose(mine, weight.grad.to_dense(), atol=1e-6)
    embeddings.ahead([first, second])
    assert rows.asked == {
        0: torch.unique(torch.cat([first[0], second[0]])).tolist(),
        1: torch.unique(torch.cat([first[1], second[1]])).tolist(),
    }
    with torch.no_grad():
        assert torch.equal(net(*second[:2]), plain(*second[:2]))
    assert len(rows.leaves) == 3


# -- deaths and resuming -----------------------------------------------------------------------------------------------


@pytest.fixture
def kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Kills the process with this name: server-1, worker-0."""

    def named(kind: str, be: Callable[..., None]) -> Callable[..., None]:
        def main(who: int | LeasedSession, *given: Any, **options: Any) -> None:
            (tmp_path / f"{kind}-{who if isinstance(who, int) else who.seat}").write_text(str(os.getpid()))
            be(who, *given, **options)

        return main

    monkeypatch.setattr(served, "be_server", named("server", served.be_server))
    monkeypatch.setattr(served, "serve_leases", named("worker", served.serve_leases))
    return lambda name: os.kill(int((tmp_path / name).read_text()), signal.SIGKILL)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.parametrize("apply", ["step", "arrival"])
def test_nothing_is_lost_when_a_server_and_a_worker_are_killed(
    optimizer: str, apply: str, kill: Callable[[str], None]
) -> None:
    """With one gradient a step (one worker), the order of arrivals is that of steps."""
    steps: list[int] = []

    def tell(event: Any) -> None:
        if isinstance(event, StepDone):
            steps.append(event.step)
            if event.step in (6, 14):
                kill("server-1" if event.step == 6 else "worker-0")

    workers = {"workers": 2, "min_workers": 1} if apply == "step" else {"workers": 1, "min_workers": 1}
    ours = trained(f"server:servers=3,durability=peer,apply={apply}", optimizer, callbacks=[tell], steps=40, **workers)
    assert steps == list(range(1, 41))
    assert relative_difference(ours, alone(optimizer, steps=40)) < TOLERANCE


def test_a_journal_has_rows_too(kill: Callable[[str], None], tmp_path: Path) -> None:
    def tell(event: Any) -> None:
        if isinstance(event, StepDone) and event.step == 6:
            kill("server-0")

    ours = trained("server:durability=disk", "adagrad", callbacks=[tell], steps=30, run_dir=tmp_path / "run")
    assert relative_difference(ours, alone("adagrad", steps=30)) < TOLERANCE


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_checkpoint_goes_on_with_other_servers_and_in_one_process(optimizer: str, tmp_path: Path) -> None:
    dense = optimizer != "sparseadam"

    def stop(event: Any) -> Any:
        return shoal.Stop() if isinstance(event, StepDone) and event.step == 9 else None

    whole = alone(optimizer)
    trained("server:servers=1", optimizer, callbacks=[stop], run_dir=tmp_path / "run")
    path = max((tmp_path / "run").rglob("step-*"))
    state = load(path).trees
    net = build(dense=dense)
    net.load_state_dict(state["model"])
    made = OPTIMIZERS[optimizer](list(net.named_parameters()))
    made.load_state_dict(state["optimizer"])
    made.step()  # has what it needs
    resumed = trained("server:servers=3", optimizer, run_dir=tmp_path / "run", resume="last")
    assert relative_difference(resumed, whole) < TOLERANCE
    meta = trained(
        "server:servers=2",
        optimizer,
        build(dense=dense, device="meta") if not dense else _meta_tables(),
        run_dir=tmp_path / "run",
        resume=path,
    )
    assert relative_difference(meta, whole) < TOLERANCE


# -- what cannot be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda params: torch.optim.AdamW(params, lr=0.1), "AdamW cannot step 'users.weight'"),
        (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), r"SGD\(momentum=0.9\) cannot step"),
        (lambda params: torch.optim.Adagrad(params, weight_decay=0.1), r"Adagrad\(weight_decay=0.1\) cannot step"),
        (lambda params: torch.optim.SparseAdam(params), "SparseAdam steps tables"),
    ],
)
def test_optimizers_that_cannot_step_rows_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Trainer(build(), loss, make, ratings(), batch_size=48, steps=2, workers=1, sync="server").fit()


def test_a_codec_for_nothing_but_tables_is_refused() -> None:
    with pytest.raises(ConfigError, match="only sparse tables"):
        trained("server", "sparseadam", codec="int8")


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_options_that_servers_cannot_do_are_refused(option: dict[str, Any]) -> None:
    net = build()
    net.users = nn.Embedding(USERS, WIDTH, sparse=True, **option)
    with pytest.raises(ConfigError, match=next(iter(option))):
        trained(net=net)


def test_a_row_that_is_not_there_is_told() -> None:
    net = build()
    net.users = nn.Embedding(10, WIDTH, sparse=True)
    with pytest.raises(shoal.WorkerError, match=r"'users.weight' has the rows 0 to 9"):
        trained(net=net)


def test_a_table_that_is_used_as_a_whole_is_told() -> None:
    def tied(net: Any, batch: Any) -> Tensor:
        return loss(net, batch) + net.users.weight.square().mean()

    with pytest.raises(ConfigError, match="otherwise than by calling"):
        Trainer(build(), tied, OPTIMIZERS["sgd"], ratings(), batch_size=48, steps=2, workers=1, sync="server").fit()
