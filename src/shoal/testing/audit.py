"""The audit: what the ledgers of a run must show, whatever went wrong in it.

    plan = FaultPlan().kill("worker-1", step=7).ledger(folder)
    Trainer(..., faults=plan).fit()
    assert not audit(folder, Course(len(data), batch_size), steps).problems

A step may have been committed more than once: by a worker that died with it, and again by those who redid it. What
counts is its last computation, that of the highest term. A worker that is killed between a commit and its line leaves
no line; so every line says what all members computed, and one of them is enough.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from shoal.core.atoms import Course
from shoal.testing.ledger import Record, read_ledgers

Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Audit:
    """What was found. `problems` are sentences for people, and none if all is well."""

    problems: list[str] = field(default_factory=list)
    records: int = 0
    processes: int = 0
    redone: list[int] = field(default_factory=list)
    """Steps that were computed to the end in more than one term."""


def audit(folder: str | os.PathLike[str], course: Course, steps: int, *, deterministic: bool = False) -> Audit:
    """Read the ledgers in `folder`, of a run of so many steps through `course`, and check what must hold.

    The last computation of every step covers its positions, each once; whoever committed a step has the same
    parameters after it (with `deterministic`, over all terms); no process goes on from a commit that others have
    redone; steps of a process and terms only grow. Raises ConfigError if there are no ledgers, or damaged ones.
    """
    ledgers = read_ledgers(folder)
    by_step: dict[int, list[Record]] = defaultdict(list)
    for records in ledgers.values():
        for record in records:
            by_step[record.step].append(record)
    problems = [
        *(problem for step in range(steps) for problem in _of_step(step, by_step.get(step, []), course, deterministic)),
        *(f"step {step} was committed, and the run has {steps} steps" for step in sorted(by_step) if step >= steps),
        *_of_terms({step: term for step, found in sorted(by_step.items()) if (term := _last_term(found))}),
        *(problem for name, records in ledgers.items() for problem in _of_process(name, records, by_step)),
    ]
    redone = [step for step, found in sorted(by_step.items()) if len(_computed_terms(found)) > 1]
    return Audit(problems, sum(map(len, ledgers.values())), len(ledgers), redone)


def _computed_terms(records: Sequence[Record]) -> list[int]:
    return sorted({record.term for record in records if not record.copied})


def _last_term(records: Sequence[Record]) -> int:
    """That in which the step was last computed; 0 if it never was."""
    return max(_computed_terms(records), default=0)


def _of_step(step: int, records: Sequence[Record], course: Course, deterministic: bool) -> Iterator[str]:
    terms = _computed_terms(records)
    if not terms:
        copied = _names(records)
        yield f"step {step}: nobody has committed it" + (f"; {copied} copied it from somebody" if copied else "")
        return
    last = [record for record in records if record.term == terms[-1] and not record.copied]
    yield from _of_shares(step, last, course)
    yield from _of_digests(step, records, terms, deterministic)


def _of_shares(step: int, records: Sequence[Record], course: Course) -> Iterator[str]:
    """The members agree on who computed what, and that is a partition of the step's positions."""
    first = records[0]
    for other in records[1:]:
        if other.shares != first.shares:
            yield (
                f"step {step}, term {first.term}: {first.worker} says the shares were {_shown(first.shares)}, and "
                f"{other.worker} {_shown(other.shares)}"
            )
    for record in records:
        if record.spans != record.shares.get(record.worker, []):
            said = _ranges(record.shares.get(record.worker, []))
            yield f"step {step}, term {record.term}: {record.worker} computed {_ranges(record.spans)} instead of {said}"
    span = course.step(step)
    yield from (
        f"step {step}, term {first.term}: {problem}"
        for problem in _partition_problems(first.shares, span.start, span.stop)
    )


def _partition_problems(shares: Mapping[str, Spans], start: int, stop: int) -> Iterator[str]:
    """What keeps the shares from being a partition of start … stop−1."""
    owned = sorted((a, b, name) for name, spans in shares.items() for a, b in spans if b > a)
    reached, owner = start, "the beginning"
    for a, b, name in owned:
        if a > reached:
            yield f"positions {reached} to {a - 1}, between {owner} and {name}, were computed by nobody"
        if a < start or b > stop:
            yield f"{name} computed {a} to {b - 1}, and the step has {start} to {stop - 1}"
        if a < min(reached, b):
            yield f"positions {a} to {min(reached, b) - 1} were computed by {owner} and by {name}"
        if b > reached:
            reached, owner = b, name
    if reached < stop:
        yield f"positions {reached} to {stop - 1}, after {owner}, were computed by nobody"


def _of_digests(step: int, records: Sequence[Record], terms: Sequence[int], deterministic: bool) -> Iterator[str]:
    """Parameters are equal wherever they come from the same computation: one's own, or that which was copied."""
    groups: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        source = max((term for term in terms if term <= record.term), default=terms[0])
        groups[0 if deterministic else source].append(record)
    for source, group in sorted(groups.items()):
        by_digest: dict[str, list[Record]] = defaultdict(list)
        for record in group:
            by_digest[record.digest].append(record)
        if len(by_digest) > 1:
            parts = "; ".join(f"{_names(each)} {digest[:16]}" for digest, each in by_digest.items())
            where = "" if deterministic else f", term {source}"
            yield f"step {step}{where}: the workers' parameters differ: {parts}"


def _of_terms(terms: Mapping[int, int]) -> Iterator[str]:
    """`terms`: in which each step was last computed."""
    for (before, old), (after, new) in pairwise(terms.items()):
        if new < old:
            yield f"step {after} was committed in term {new}, after step {before} in term {old}: terms must only grow"


def _of_process(name: str, records: Sequence[Record], by_step: Mapping[int, Sequence[Record]]) -> Iterator[str]:
    for before, after in pairwise(records):
        if after.step <= before.step:
            yield (
                f"{name} committed step {after.step} (term {after.term}) after step {before.step} "
                f"(term {before.term}): steps must only grow"
            )
        if after.term < before.term:
            yield f"{name}, step {after.step}: was in term {after.term} after {before.term}: terms must only grow"
    for record in records[:-1]:
        last = _last_term(by_step[record.step])
        if not record.copied and record.term < last and records[-1].time > _moment(by_step[record.step], last):
            yield (
                f"{name} committed step {record.step} in term {record.term} and went on, though it was redone in "
                f"term {last}: its positions count twice there"
            )


def _moment(records: Sequence[Record], term: int) -> float:
    """When the step was first committed in this term."""
    return min(record.time for record in records if record.term == term and not record.copied)


def _names(records: Sequence[Record]) -> str:
    return ", ".join(sorted({record.worker for record in records}))


def _shown(shares: Mapping[str, Spans]) -> str:
    return ", ".join(f"{name}: {_ranges(spans)}" for name, spans in sorted(shares.items()))


def _ranges(spans: Spans) -> str:
    return " and ".join(f"{start} to {stop - 1}" for start, stop in spans) or "nothing"
