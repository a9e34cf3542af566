"""Every way to train gives what plain PyTorch gives: sync × membership × way of starting × deterministic × codec.

What is exact ends at its weights, whoever dies, leaves or goes on from a checkpoint; what is lossy learns as much; and
what does not go together is refused with the reason.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import shoal
from shoal.testing import FaultPlan
from tests.net.processes import ended
from tests.net.recipe import (
    BATCH,
    DECAY,
    SAMPLES,
    STEPS,
    TOLERANCE,
    Plain,
    Run,
    difference,
    falling,
    killed,
    loss,
    net,
    own_loop,
    plain,
    points,
    same_bits,
    sgd,
    slowly,
    train,
)

pytestmark = pytest.mark.timeout(120)

HERE = Path(__file__).parent
ELASTIC = {"min_workers": 1, "max_workers": 4}
MIDDLE = "checkpoints/step-000000004"
"""In the middle of the second epoch."""


def assert_as_plain(run: Run, expected: Plain, first: int = 0) -> None:
    """Weights, average, evaluation, and the loss of every step from `first` on."""
    assert difference(run.weights, expected.weights) < TOLERANCE
    evaluated = expected.evaluated
    if run.average is not None:
        assert difference(run.average, expected.average) < TOLERANCE
        evaluated = expected.average_evaluated
    assert run.result.metrics == {"loss": pytest.approx(evaluated, rel=TOLERANCE)}
    assert run.seen.losses == pytest.approx(expected.losses[first:], rel=TOLERANCE)
    assert run.result.loss == pytest.approx(last_epoch(expected), rel=TOLERANCE)
    assert (run.result.steps, run.result.epochs, run.result.samples) == (STEPS, 3, 3 * SAMPLES)


def last_epoch(expected: Plain) -> float:
    """The mean over its samples, of which the last step has fewer."""
    sizes = [BATCH, BATCH, SAMPLES - 2 * BATCH]
    return sum(size * value for size, value in zip(sizes, expected.losses[-3:], strict=True)) / SAMPLES


def assert_replaced(run: Run) -> None:
    assert [1] in [event.lost for event in run.seen.of(shoal.Regrouped)]


# -- exact -------------------------------------------------------------------------------------------------------------


@dataclass
class Exact:
    """A run, and how it goes on from its fourth step."""

    options: dict[str, Any]
    resumed: dict[str, Any] = field(default_factory=dict)
    kill: bool = False


AVERAGED = {"ema": DECAY}
BSP, SSP = {"sync": "server"}, {"sync": "server:mode=ssp,staleness=0"}
EXACT = {
    "allreduce, one worker, goes on elastic": Exact(
        {"workers": 1} | AVERAGED, {"workers": 3, "min_workers": 1} | AVERAGED
    ),
    "allreduce, fixed": Exact({"workers": 3} | AVERAGED, {"workers": 2} | AVERAGED),
    "allreduce, elastic": Exact({"workers": 3} | ELASTIC | AVERAGED, {"workers": 2} | ELASTIC | AVERAGED, kill=True),
    "allreduce, goes on with servers": Exact({"workers": 2}, {"workers": 3} | BSP),
    "bsp, fixed, goes on with allreduce": Exact({"workers": 3} | BSP, {"workers": 2}),
    "bsp, elastic": Exact({"workers": 3} | ELASTIC | BSP, kill=True),
    "ssp, fixed": Exact({"workers": 2} | SSP),
    "ssp, elastic": Exact({"workers": 3} | ELASTIC | SSP, {"workers": 2} | SSP, kill=True),
    # no gradient is stale in the first ten steps of any mode
    "async, few steps": Exact({"workers": 2, "sync": "server:mode=async"}),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact_runs_end_where_plain_pytorch_does(name: str, tmp_path: Path) -> None:
    case = EXACT[name]
    options = {**case.options, "run_dir": tmp_path / "whole", "checkpoint_every": 4}
    if case.kill:
        run = killed(**options)
        assert_replaced(run)
    else:
        run = train(**options)
        assert run.result.workers == case.options["workers"]
    assert_as_plain(run, plain())
    if case.resumed:
        rest = train(**case.resumed, resume=tmp_path / "whole" / MIDDLE, run_dir=tmp_path / "rest")
        assert rest.result.workers == case.resumed["workers"]
        assert_as_plain(rest, plain(), first=4)


def test_deterministic_runs_have_the_same_bits(tmp_path: Path) -> None:
    """On one worker and on three, of whom one dies; and where they go on from a checkpoint on other numbers."""
    exact = {"deterministic": True, "checkpoint_every": 4} | AVERAGED
    alone = train(workers=1, run_dir=tmp_path / "alone", **exact)
    assert_as_plain(alone, plain())
    struck = killed(workers=3, run_dir=tmp_path / "struck", **exact, **ELASTIC)
    assert_replaced(struck)
    others = [
        struck,
        train(workers=3, resume=tmp_path / "alone" / MIDDLE, run_dir=tmp_path / "more", **exact),
        train(workers=2, resume=tmp_path / "struck" / MIDDLE, run_dir=tmp_path / "fewer", **exact, **ELASTIC),
    ]
    for other in others:
        assert same_bits(other.weights, alone.weights)
        assert other.average is not None and alone.average is not None
        assert same_bits(other.average, alone.average)


def test_members_that_leave_as_asked_change_nothing() -> None:
    def shrink(event: Any) -> shoal.Scale | None:
        return shoal.Scale(1) if isinstance(event, shoal.StepDone) and event.step == 1 else None

    run = train(workers=3, loss=slowly, callbacks=[shrink], **ELASTIC)
    assert [event.workers for event in run.seen.of(shoal.Regrouped)] == [[0]]
    assert_as_plain(run, plain())


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_own_loop_ends_where_plain_pytorch_does(deterministic: bool) -> None:
    workers = 2 if deterministic else 3
    loops = shoal.launch(own_loop, workers=workers, seed=7, deterministic=deterministic)
    assert len(loops) == workers
    for loop in loops:
        assert same_bits(loop["weights"], loops[0]["weights"])
    assert difference(loops[0]["weights"], plain().weights) < TOLERANCE
    assert loops[0]["losses"] == pytest.approx(plain().losses, rel=TOLERANCE)


# -- once per worker ---------------------------------------------------------------------------------------------------

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LAUNCHERS = {"torchrun": (TORCHRUN, "local"), "script": ([sys.executable], "local:start=script")}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_scripts_that_run_once_per_worker_do_what_forked_workers_do(launcher: str, tmp_path: Path) -> None:
    command, engine = LAUNCHERS[launcher]
    done = ended([*command, str(HERE / "once_per_worker.py"), str(tmp_path), engine], tmp_path)
    assert done.returncode == 0, done.stderr

    def found(name: str) -> dict[str, Tensor]:
        first, second = (load_file(tmp_path / f"{name}-{rank}.safetensors") for rank in (0, 1))
        assert same_bits(first, second), name
        return first

    for name in ("plain", "deterministic", "resumed", "loop"):
        assert difference(found(name), plain().weights) < TOLERANCE, name
    for name in ("plain-average", "resumed-average"):
        assert difference(found(name), plain().average) < TOLERANCE, name
    assert same_bits(found("deterministic"), train(workers=1, deterministic=True).weights)
    assert 1e-4 < difference(found("int8"), plain(sgd, falling).weights) < 1e-2


# -- lossy -------------------------------------------------------------------------------------------------------------


class Lossy(NamedTuple):
    """What a codec may cost: measured, with room. All that it sends wrong is in the first matrix."""

    codec: str
    loss: float
    """The evaluation's may be higher by so much. Without that matrix's gradient it is by 0.074, with noise by 0.069."""
    along: float
    """The least cosine of the matrix's change and the exact one. Without its gradient it is 0.2, with noise 0.08."""
    changes: float
    """The weights differ by more: the codec was there."""
    saves: float
    """The matrix travels in less than this part of its bytes."""


LOSSY = {
    "half": Lossy("fp16", 1e-4, 0.9999, 1e-5, 0.51),
    "quantised": Lossy("int8", 1e-3, 0.999, 1e-4, 0.27),
    "sparse": Lossy("topk:density=0.1", 0.05, 0.95, 1e-2, 0.12),
    "low rank": Lossy("powersgd:rank=2", 0.01, 0.95, 1e-2, 0.2),
    "one bit": Lossy("onebit", 0.05, 0.8, 1e-2, 0.1),
}
BY_CODEC = {"optimizer": sgd, "schedule": falling}


@pytest.mark.parametrize("membership", ["fixed", "elastic"])
@pytest.mark.parametrize("kind", LOSSY)
def test_lossy_runs_learn_as_much(kind: str, membership: str) -> None:
    lossy, expected = LOSSY[kind], plain(sgd, falling)
    options, workers = {"codec": lossy.codec} | BY_CODEC, 3 if membership == "elastic" else 2
    if membership == "elastic":
        run = killed(workers=workers, **options, **ELASTIC)
        assert_replaced(run)
    else:
        run = train(workers=workers, **options)
    assert run.result.metrics["loss"] < expected.evaluated + lossy.loss
    assert along(run.weights, expected.weights) > lossy.along
    assert difference(run.weights, expected.weights) > lossy.changes
    assert run.seen.losses == pytest.approx(expected.losses, abs=lossy.loss)
    assert 0 < min(encoded_bytes(run)) <= max(encoded_bytes(run)) < lossy.saves * full_bytes(workers)


def along(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    before = net().state_dict()["0.weight"]
    one, other = ((state["0.weight"] - before).flatten() for state in (weights, expected))
    return float(torch.cosine_similarity(one, other, dim=0))


def encoded_bytes(run: Run) -> list[int]:
    """What worker 0 sent encoded in steps before anything happens; the first has measurements in it, too."""
    sent = [event.traffic.flows for event in run.seen.of(shoal.StepDone)[1:4]]
    return [sum(flow.bytes for flow in flows if flow.kind == "gradient" and flow.codec != "none") for flows in sent]


def full_bytes(workers: int) -> int:
    """What it sends of the matrix without a codec: to each of the others, its numbers and their sum."""
    return net().state_dict()["0.weight"].numel() * 4 * 2 * (workers - 1)


@pytest.mark.parametrize(("kind", "membership"), [("quantised", {}), ("sparse", ELASTIC)], ids=["fixed", "elastic"])
def test_servers_on_one_host_need_no_codec(kind: str, membership: dict[str, Any]) -> None:
    """Gradients go to them in shared memory, as they are, so these runs are exact."""
    run = train(workers=2, sync="server", codec=LOSSY[kind].codec, **BY_CODEC, **membership)
    assert_as_plain(run, plain(sgd, falling))


def test_a_lossy_run_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    lossy, expected = LOSSY["sparse"], plain(sgd, falling)
    options = {"codec": lossy.codec, "checkpoint_every": 4} | BY_CODEC
    train(workers=3, run_dir=tmp_path / "whole", **options)
    rest = train(workers=2, resume=tmp_path / "whole" / MIDDLE, run_dir=tmp_path / "rest", **options)
    assert rest.result.metrics["loss"] < expected.evaluated + lossy.loss
    assert along(rest.weights, expected.weights) > lossy.along
    assert rest.seen.losses == pytest.approx(expected.losses[4:], abs=lossy.loss)


# -- refused -----------------------------------------------------------------------------------------------------------

SYNCS = ["allreduce", "server:mode=bsp", "server:mode=ssp,staleness=0"]
STARTS = ["fork", "script", "torchrun"]
CODECS = ["none", *(lossy.codec for lossy in LOSSY.values())]

REASONS = {
    "a codec's result depends on the number of workers": "deterministic=True sums gradients as they are",
    "a launcher's workers are the launcher's to restart": "are for workers that fit() starts itself",
    "servers sum in the order of arrival": "servers sum gradients as they arrive",
    "servers start their own workers": "sync='server' starts its own workers and servers",
}


def reasons(sync: str, elastic: bool, start: str, deterministic: bool, codec: str) -> list[str]:
    """Why this combination is refused; empty where it is not."""
    server, launched = sync != "allreduce", start != "fork"
    held = elastic and start == "torchrun"
    refused = [deterministic and codec != "none", held, server and deterministic, server and launched]
    return [reason for reason, holds in zip(REASONS, refused, strict=True) if holds]


def test_what_does_not_go_together_is_refused_and_the_rest_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"refused": 0, "taken": 0}
    for cell in itertools.product(SYNCS, [False, True], STARTS, [False, True], CODECS):
        said, expected = refusal(monkeypatch, *cell), reasons(*cell)
        assert (said is not None) == bool(expected), (cell, said)
        if said is not None:
            assert any(REASONS[reason] in said for reason in expected), (cell, said)
        counts["taken" if said is None else "refused"] += 1
    assert counts == {"refused": 157, "taken": 59}


def refusal(
    monkeypatch: pytest.MonkeyPatch, sync: str, elastic: bool, start: str, deterministic: bool, codec: str
) -> str | None:
    with monkeypatch.context() as patch:
        if start == "torchrun":
            for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1"}.items():
                patch.setenv(name, value)
            patch.setenv("MASTER_ADDR", "127.0.0.1")
        engine = "local:start=script" if start == "script" else "local"
        options: dict[str, Any] = {"sync": sync, "codec": codec, "engine": engine, "deterministic": deterministic}
        return _said(workers=2, **options, **(ELASTIC if elastic else {}))


def _said(**options: Any) -> str | None:
    try:
        shoal.Trainer(net(), loss, sgd, points(), batch_size=BATCH, **options)
    except shoal.ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sync": "server", "ema": 0.9}, "ema= is not available with it"),
        ({"sync": "server", "after_step": lambda model: None}, "after_step= changes the whole model"),
        ({"min_workers": 3, "max_workers": 2}, "min_workers=3 is more than max_workers=2"),
        ({"min_workers": 3}, "min_workers=3 is more than workers=2"),
        ({"max_workers": 1}, "max_workers=1 is less than workers=2"),
        ({"faults": FaultPlan(), "engine": "local:start=script"}, "faults are for workers that fit() forks"),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, dict) else "",
)
def test_single_arguments_are_refused_with_their_reason(options: dict[str, Any], words: str) -> None:
    said = _said(workers=2, **options)
    assert said is not None and words in said


def test_own_loops_are_refused_a_codec_where_they_are_deterministic() -> None:
    with pytest.raises(shoal.ConfigError, match="deterministic=True sums gradients as they are"):
        shoal.launch(own_loop, workers=2, deterministic=True, codec="int8")
