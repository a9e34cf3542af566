"""The audit finds every way in which ledgers can be wrong, and nothing in those that are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.core.atoms import Course
from shoal.core.errors import ConfigError
from shoal.testing import Audit, audit
from shoal.testing.ledger import Ledger, Record, read_ledgers

COURSE = Course(size=20, batch=8)  # steps of 8, 8 and 4 positions
HALVES = {0: {0: [(0, 4)], 1: [(4, 8)]}, 1: {0: [(8, 12)], 1: [(12, 16)]}, 2: {0: [(16, 18)], 1: [(18, 20)]}}
"""Shares of two workers, by step."""


class Book:
    """Ledgers written by hand. Time goes on by one second with every line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 100.0

    def line(self, worker: int, term: int, step: int, spans: Any = None, digest: str = "", pid: int = 0) -> Book:
        shares = {f"worker-{seat}": own for seat, own in (HALVES[step % 3] if spans is None else spans).items()}
        self.now += 1
        record = Record(
            time=self.now,
            worker=f"worker-{worker}",
            pid=pid or 1000 + worker,
            term=term,
            step=step,
            spans=shares.get(f"worker-{worker}", []),
            shares=shares,
            digest=digest or f"step {step}",
        )
        with open(self.folder / f"worker-{worker}-{record.pid}.jsonl", "ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")
        return self

    def both(self, term: int, step: int, **given: Any) -> Book:
        return self.line(0, term, step, **given).line(1, term, step, **given)

    def audit(self, steps: int = 3, **options: Any) -> Audit:
        return audit(self.folder, COURSE, steps, **options)

    def problem(self, steps: int = 3, **options: Any) -> str:
        (problem,) = self.audit(steps, **options).problems
        return problem


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path)


# -- what is right -----------------------------------------------------------------------------------------------------


def test_a_calm_run_has_no_problems(book: Book) -> None:
    found = book.both(1, 0).both(1, 1).both(1, 2).both(1, 3).audit(steps=4)
    assert (found.problems, found.records, found.processes, found.redone) == ([], 8, 2, [])


def test_one_line_of_a_step_is_enough(book: Book) -> None:
    """The other worker was killed between its commit and its line."""
    book.both(1, 0).line(1, 1, 1).line(1, 2, 2, spans={1: [(16, 20)]})
    assert book.audit().problems == []


def test_a_step_that_died_with_its_worker_may_be_redone(book: Book) -> None:
    book.both(1, 0).line(0, 1, 1, digest="of two")
    book.line(1, 2, 1, spans={1: [(8, 16)]}, digest="of one").line(1, 2, 2, spans={1: [(16, 20)]})
    found = book.audit()
    assert (found.problems, found.redone) == ([], [1])
    assert "differ: worker-0 of two; worker-1 of one" in book.problem(deterministic=True)


def test_those_behind_may_copy(book: Book) -> None:
    book.both(1, 0).line(0, 1, 1).line(1, 2, 1, spans={}).both(2, 2)
    assert book.audit().problems == []


def test_everything_may_be_done_again_from_a_checkpoint(book: Book) -> None:
    book.both(1, 0).both(1, 1, digest="first").both(1, 2)
    for step in (1, 2):
        book.line(0, 2, step, pid=2000).line(1, 2, step, pid=2001)
    assert book.audit().problems == []


# -- what is wrong -----------------------------------------------------------------------------------------------------


def test_a_step_without_a_line(book: Book) -> None:
    assert book.both(1, 0).both(1, 2).problem() == "step 1: nobody has committed it"


def test_a_step_that_was_only_copied(book: Book) -> None:
    book.both(1, 0).line(1, 2, 1, spans={}).both(2, 2)
    assert book.problem() == "step 1: nobody has committed it; worker-1 copied it from somebody"


def test_a_step_too_many(book: Book) -> None:
    assert book.both(1, 0).both(1, 1).problem(steps=1) == "step 1 was committed, and the run has 1 steps"


@pytest.mark.parametrize(
    ("spans", "problem"),
    [
        ({0: [(0, 3)], 1: [(4, 8)]}, "positions 3 to 3, between worker-0 and worker-1, were computed by nobody"),
        ({0: [(1, 4)], 1: [(4, 8)]}, "positions 0 to 0, between the beginning and worker-0, were computed by nobody"),
        ({0: [(0, 4)], 1: [(4, 6)]}, "positions 6 to 7, after worker-1, were computed by nobody"),
        ({0: [(0, 5)], 1: [(4, 8)]}, "positions 4 to 4 were computed by worker-0 and by worker-1"),
        ({0: [(0, 8)], 1: [(4, 6)]}, "positions 4 to 5 were computed by worker-0 and by worker-1"),
        ({0: [(0, 4)], 1: [(4, 9)]}, "worker-1 computed 4 to 8, and the step has 0 to 7"),
    ],
)
def test_shares_that_are_no_partition(book: Book, spans: Any, problem: str) -> None:
    assert book.both(1, 0, spans=spans).problem(steps=1) == f"step 0, term 1: {problem}"


def test_shares_of_an_older_term_do_not_count(book: Book) -> None:
    book.line(0, 1, 0, spans={0: [(0, 3)]}).line(1, 2, 0, spans={1: [(0, 8)]})
    assert book.audit(steps=1).problems == []


def test_members_that_saw_different_shares(book: Book) -> None:
    problem = book.line(0, 1, 0).line(1, 1, 0, spans={0: [(0, 5)], 1: [(5, 8)]}).problem(steps=1)
    assert problem == (
        "step 0, term 1: worker-0 says the shares were worker-0: 0 to 3, worker-1: 4 to 7, "
        "and worker-1 worker-0: 0 to 4, worker-1: 5 to 7"
    )


def test_replicas_that_part(book: Book) -> None:
    assert book.line(0, 1, 0, digest="aaaa").line(1, 1, 0, digest="bbbb").problem(steps=1) == (
        "step 0, term 1: the workers' parameters differ: worker-0 aaaa; worker-1 bbbb"
    )


def test_a_copy_that_differs_from_its_source(book: Book) -> None:
    problem = book.line(0, 1, 0, digest="aaaa").line(1, 2, 0, spans={}, digest="bbbb").problem(steps=1)
    assert problem == "step 0, term 1: the workers' parameters differ: worker-0 aaaa; worker-1 bbbb"


def test_a_process_that_goes_back(book: Book) -> None:
    book.both(1, 0).both(1, 1).line(0, 2, 1, spans={}).both(2, 2)
    assert "worker-0-1000 committed step 1 (term 2) after step 1 (term 1): steps must only grow" in book.problem()


def test_terms_that_shrink(book: Book) -> None:
    problems = book.both(2, 0).both(1, 1).audit(steps=2).problems
    assert problems == [
        "step 1 was committed in term 1, after step 0 in term 2: terms must only grow",
        "worker-0-1000, step 1: was in term 1 after 2: terms must only grow",
        "worker-1-1001, step 1: was in term 1 after 2: terms must only grow",
    ]


def test_two_memberships_at_once(book: Book) -> None:
    """A split brain: worker 0 goes on alone from a commit that worker 1 has redone."""
    book.both(1, 0).line(0, 1, 1).line(1, 2, 1, spans={1: [(8, 16)]}).line(0, 2, 2, spans={0: [(16, 20)]})
    assert book.problem() == (
        "worker-0-1000 committed step 1 in term 1 and went on, though it was redone in term 2: its positions count "
        "twice there"
    )


def test_a_folder_without_ledgers_and_a_damaged_line_are_refused(book: Book) -> None:
    with pytest.raises(ConfigError, match="holds no ledgers"):
        book.audit()
    book.both(1, 0)
    with open(book.folder / "worker-0-1000.jsonl", "ab") as file:
        file.write(b'{"time": 1')
    with pytest.raises(ConfigError, match=r"worker-0-1000\.jsonl, line 2, is no line of a ledger"):
        book.audit()


def test_a_ledger_says_what_it_was_told(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "deep" / "er")
    ledger.write(worker=1, term=3, step=5, spans={0: [(0, 2)], 1: [(2, 3), (3, 8)]}, digest=lambda: b"\x01\xff")
    ledger.write(worker=1, term=4, step=6, spans={}, digest=lambda: "abc")
    ledger.close()
    ((name, (first, second)),) = read_ledgers(tmp_path / "deep" / "er").items()
    assert name == f"worker-1-{first.pid}"
    assert (first.worker, first.term, first.step, first.spans, first.digest) == (
        "worker-1",
        3,
        5,
        [(2, 3), (3, 8)],
        "01ff",
    )
    assert first.shares == {"worker-0": [(0, 2)], "worker-1": [(2, 3), (3, 8)]}
    assert (second.copied, second.spans, second.digest) == (True, [], "abc")
    assert first.time <= second.time


def test_a_ledger_may_do_without_digests(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, digests=False)
    ledger.write(worker=0, term=1, step=0, spans={0: [(0, 8)]}, digest=lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    ledger.close()
    assert audit(tmp_path, COURSE, 1).problems == []
