"""What the arms of benchmarks/run.py train: every work computes a mean over samples, and the tables agree. And that
benchmarks/before.py compares trees."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

FOLDER = Path(__file__).parents[1] / "benchmarks"
STEADY = ["gpt", "mlp"]
RANDOM = ["gpt-dropout", "cnn", "encoder", "bert", "vae", "denoiser", "lstm", "gru"]
DRY = [f"{name}:dry" for name in RANDOM]
FUSED = [f"{name}:fused" for name in RANDOM]
SAMPLES, FIRST = 6, 2  # of a batch, and of its first part


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The modules, as scripts in that folder import each other."""
    loaded = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        import before
        import roster
        import run
        import turns
        import works

        yield SimpleNamespace(before=before, roster=roster, run=run, turns=turns, works=works.WORKS)
    for name in set(sys.modules) - loaded:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == FOLDER:
            del sys.modules[name]


def timely(names: list[str]) -> list[Any]:
    """Importing transformers alone takes longer than all the rest."""
    return [pytest.param(name, marks=pytest.mark.slow) if name.startswith("bert") else name for name in names]


def batch_of(work: Any, items: list[Any]) -> Any:
    return (work.collate or default_collate)(items)


@pytest.mark.parametrize("name", timely([*STEADY, *DRY]))
def test_without_random_numbers_the_loss_is_a_mean_over_samples(bench: SimpleNamespace, name: str) -> None:
    work = bench.works[name]
    torch.manual_seed(0)
    model, items = work.model(), work.data().__getitems__(range(SAMPLES))
    before = torch.get_rng_state()
    with torch.no_grad():
        parts = (items, items[:FIRST], items[FIRST:])
        whole, first, rest = (work.loss(model, batch_of(work, part)) for part in parts)
    assert torch.equal(torch.get_rng_state(), before), "it drew random numbers"
    assert torch.isfinite(whole)
    torch.testing.assert_close(whole, (first * FIRST + rest * (SAMPLES - FIRST)) / SAMPLES)


@pytest.mark.parametrize("name", timely(RANDOM))
def test_a_work_that_draws_does_so_in_each_loss(bench: SimpleNamespace, name: str) -> None:
    work = bench.works[name]
    torch.manual_seed(0)
    model, batch = work.model(), batch_of(work, work.data().__getitems__(range(SAMPLES)))
    with torch.no_grad():
        one, other = work.loss(model, batch), work.loss(model, batch)
    assert torch.isfinite(one) and one != other


def test_the_harness_knows_every_work_and_its_batch(bench: SimpleNamespace) -> None:
    assert list(bench.roster.ROSTER) == [*STEADY, *RANDOM, *DRY, *FUSED]
    assert {name: bench.works[name].batch_size for name in bench.roster.ROSTER} == bench.roster.BATCH
    assert bench.run.work_list("cnn:dry,steady,gpt") == ["cnn:dry", *STEADY]


def test_what_is_too_slow_is_said(bench: SimpleNamespace) -> None:
    def found(hand: float, plain: float) -> dict[str, Any]:
        return bench.run.summary({"shoal": [1.0] * 6, "hand": [hand] * 6, "plain": [plain] * 6})

    assert bench.run.missed({"cnn": found(1.03, 1.0), "vae": found(0.97, 1.0), "cnn:dry": found(0.5, 0.5)}) == []
    hand, plain = bench.run.missed({"cnn": found(1.02, 1.0), "vae": found(1.0, 0.99)})
    assert "cnn" in hand and "1.020" in hand and "vae" in plain and "0.990" in plain


@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_arm_is_first_equally_often(bench: SimpleNamespace, count: int) -> None:
    arms = "abcd"[:count]
    rounds = [bench.run.order(arms, number) for number in range(2 * count)]
    assert all(sorted(one) == list(arms) for one in rounds)
    assert sorted(one[0] for one in rounds) == sorted(2 * arms)
    after = {(one[at - 1], one[at]) for one in rounds for at in range(1, count)}
    assert all((other, arm) in after for arm, other in after), "none comes after the same one always"


RANK = """
import os, torch, turn

weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
while True:
    if (child := os.fork()) == 0:
        turn.tick(5)
        os._exit(0)
    os.waitpid(child, 0)
    turn.tick(3)
    turn.tick(1)
    optimizer.step()
"""


@pytest.mark.slow
def test_a_forward_in_a_fork_takes_no_turn(bench: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    arms = [bench.turns.Arm("alone", (sys.executable, str(tmp_path / "rank.py")), per_rank=True, alone=True)]
    with bench.turns.Table(arms, share=2, workers=2, folder=tmp_path, deadline=60) as table:
        assert [table.turn("alone", lead=1, steps=2) > 0 for _ in range(3)] == [True] * 3


# ---- before.py


def worktrees() -> str:
    listing = ["git", "-C", str(FOLDER.parent), "worktree", "list", "--porcelain"]
    return subprocess.run(listing, capture_output=True, text=True).stdout


needs_git = pytest.mark.skipif(not worktrees(), reason="this is no git repository")


@pytest.mark.parametrize(
    ("took", "said", "worse"),
    [
        ([0.9] * 9, "beats 1.0", False),
        ([0.99, 1.0, 1.01] * 3, "includes 1.0", False),
        ([0.9, 1.0, 1.1] * 3, "includes 1.0, ±10%", False),
        ([1.01] * 9, "within 2%", False),
        ([1.03] * 9, "WORSE", True),
        ([0.9] * 5, "fewer than 6 rounds say little", False),
    ],
)
def test_a_tree_that_is_slower_than_before_is_told(
    bench: SimpleNamespace, took: list[float], said: str, worse: bool
) -> None:
    row = bench.before.Row("a step", "ms", {"old": [1.0] * len(took), "new": took})
    assert (row.verdict(), row.worse()) == (said, worse)
    assert said in str(row)


@pytest.mark.parametrize(("later", "said"), [(0.05, "at most 0.1 s later"), (0.15, "WORSE")])
def test_a_start_may_be_a_little_later(bench: SimpleNamespace, later: float, said: str) -> None:
    row = bench.before.Row("start", "s", {"old": [1.0] * 9, "new": [1.0 + later] * 9}, allowed=bench.before.LATER)
    assert (row.verdict(), row.worse()) == (said, said == "WORSE")


@needs_git
def test_the_earlier_tree_is_gone_after_an_interrupt(bench: SimpleNamespace) -> None:
    before = worktrees()
    with pytest.raises(KeyboardInterrupt), bench.before.checked_out("HEAD") as tree:
        assert (tree / "src" / "shoal" / "__init__.py").exists() and str(tree) in worktrees()
        raise KeyboardInterrupt
    assert worktrees() == before and not tree.exists()


@needs_git
def test_a_commit_that_is_not_there_is_told(bench: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(bench.before.NoCommit, match=r"--commit nowhere: .* has no such commit"):
        bench.before.compare(bench.before.arguments(["--commit", "nowhere"]))
    with pytest.raises(SystemExit):
        bench.before.arguments(["--commit", "HEAD", "--what", "stop"])
    assert "got stop; give some of step,overhead,recovery,server,start" in capsys.readouterr().err


@needs_git
def test_both_trees_take_turns(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sources: list[Path] = []

    def lap(racer: Any) -> Any:
        assert (bench.turns.HERE / "arms" / racer.script).exists()
        sources.append(Path(racer.environment["PYTHONPATH"].split(os.pathsep)[1]))
        return bench.before.Lap([len(sources) / 100], [0.0], 0.0, 0.0)

    monkeypatch.setattr(bench.before, "lap", lap)
    [row] = bench.before.compare(bench.before.arguments(["--commit", "HEAD", "--what", "start", "--rounds", "3"]))
    here = FOLDER.parent / "src"
    assert [source == here for source in sources] == [False, True, True, False, True, False, False, True]
    assert row.took == {"old": [0.04, 0.06, 0.07], "new": [0.03, 0.05, 0.08]}
    assert str(row) in capsys.readouterr().out


@needs_git
@pytest.mark.slow
def test_both_trees_start(bench: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    [row] = bench.before.compare(bench.before.arguments(["--commit", "HEAD", "--what", "start", "--rounds", "1"]))
    assert all(0.0 < seconds < 100.0 for took in row.took.values() for seconds in took)
    assert str(row) in capsys.readouterr().out
