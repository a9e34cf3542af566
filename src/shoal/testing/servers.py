"""What servers of a run (`sync="server"`) say they have applied, and the audit of it: each position once per shard.

    plan = FaultPlan().kill("server-1", step=7).ledger(folder)
    Trainer(..., sync="server", faults=plan).fit()
    assert not audit_servers(folder, Course(len(data), batch_size), steps).problems

Every server writes a line for each shard and step that it applies, as holder or as mirror, before it says so to
anybody. A process that begins from a copy or a journal writes nothing of the steps that are in it: these are applied
already. If a run has lost everything and begins again at a checkpoint, that is another *attempt*, and of a step that
several have applied the last one counts.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import msgspec

from shoal.core.atoms import Course
from shoal.core.errors import ConfigError

_SERVER = "server-"


def server_of(name: str) -> int | None:
    """The number of a server; None for a name that is none of theirs."""
    digits = name.removeprefix(_SERVER)
    if not (name.startswith(_SERVER) and digits.isascii() and digits.isdecimal() and digits == str(int(digits))):
        return None
    return int(digits)


class ShardRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One step that one process has applied to one shard."""

    time: float
    """By `time.monotonic`."""
    server: int
    pid: int
    attempt: int
    term: int
    step: int
    """Counted from 0."""
    shard: int
    held: bool
    """Whether as holder; else as mirror."""
    ranges: list[tuple[int, int]]
    """The positions that are in it."""
    digest: str
    """Of the shard's weights afterwards."""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ShardRecord).decode


class ServerLedger:
    """Writes the lines of whichever server uses it. Made before they are forked; each opens a file of its own."""

    def __init__(self, folder: Path, attempt: int) -> None:
        self._folder, self._attempt = folder, attempt
        self._file = -1

    def write(
        self, *, server: int, term: int, step: int, shards: Mapping[int, tuple[bool, str, Sequence[tuple[int, int]]]]
    ) -> None:
        """A line for each shard: whether it is held, a digest, and the positions. In one call: whole lines, or none."""
        now, pid = time.monotonic(), os.getpid()
        lines = [
            _encode(
                ShardRecord(
                    time=now,
                    server=server,
                    pid=pid,
                    attempt=self._attempt,
                    term=term,
                    step=step,
                    shard=shard,
                    held=held,
                    ranges=[(start, stop) for start, stop in ranges],
                    digest=digest,
                )
            )
            for shard, (held, digest, ranges) in sorted(shards.items())
        ]
        if self._file < 0:
            path = self._folder / f"server-{server}-{pid}.servers"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.write(self._file, b"".join(line + b"\n" for line in lines))


@dataclass
class ServerFaults:
    """What a plan of faults is to servers: called at points of their loops, and has perhaps a ledger."""

    at: Callable[..., None]
    ledger: ServerLedger | None = None

    def __call__(self, point: str, *, server: int, step: int) -> None:
        self.at(point, server=server, step=step)


@dataclass(frozen=True)
class ServerAudit:
    """What was found. `problems` are sentences for people, and none if all is well."""

    problems: list[str] = field(default_factory=list)
    records: int = 0
    processes: int = 0
    attempts: int = 0
    shards: int = 0
    last: dict[int, float] = field(default_factory=dict)
    """By step: when it was last applied by anybody."""
    digests: dict[int, str] = field(default_factory=dict)
    """By shard: of its weights after the last step."""


def audit_servers(folder: str | os.PathLike[str], course: Course, steps: int, *, digests: bool = True) -> ServerAudit:
    """Read what servers wrote in `folder`, of a run of so many steps through `course`, and check what must hold.

    On every shard each step is applied, with each of its positions once; whoever has applied it, as holder or mirror,
    has the same weights, bit for bit; no process goes back. Without `digests` weights are not compared: with
    `apply=arrival` a holder is ahead of its mirror by gradients of later steps. Raises ConfigError if there is nothing
    to read.
    """
    ledgers = read_server_ledgers(folder)
    if not ledgers:
        raise ConfigError(f"{folder} holds no ledgers of servers; train with faults=FaultPlan().ledger(folder) first")
    by_shard: dict[int, dict[int, list[ShardRecord]]] = defaultdict(lambda: defaultdict(list))
    last: dict[int, float] = {}
    for records in ledgers.values():
        for record in records:
            by_shard[record.shard][record.step].append(record)
            last[record.step] = max(last.get(record.step, 0.0), record.time)
    everything = [record for records in ledgers.values() for record in records]
    problems = [
        *(
            problem
            for shard in sorted(by_shard)
            for problem in _of_shard(shard, by_shard[shard], course, steps, digests)
        ),
        *(problem for name, records in ledgers.items() for problem in _of_process(name, records)),
    ]
    attempts = max((record.attempt for record in everything), default=0)
    final = {shard: found[steps - 1][-1].digest for shard, found in by_shard.items() if found.get(steps - 1)}
    return ServerAudit(problems, len(everything), len(ledgers), attempts, len(by_shard), last, final)


def read_server_ledgers(folder: str | os.PathLike[str]) -> dict[str, list[ShardRecord]]:
    """The lines of every process, in order, by the name of its file without the ending."""
    files = sorted(Path(folder).glob("*.servers"))
    return {file.stem: [_decode(line) for line in file.read_bytes().splitlines()] for file in files}


def _of_shard(
    shard: int, by_step: Mapping[int, Sequence[ShardRecord]], course: Course, steps: int, compare: bool
) -> Iterator[str]:
    for step in sorted(by_step.keys() | set(range(steps))):
        records = by_step.get(step, ())
        where = f"shard {shard}, step {step}"
        if not records:
            yield f"{where}: no server has applied it"
        if step >= steps:
            yield f"{where}: it was applied, and the run has {steps} steps"
            continue
        samples = course.step(step).samples
        for record in records:
            yield from (f"{where}, server {record.server}: {what}" for what in _partition(record.ranges, samples))
        by_attempt: dict[int, set[str]] = defaultdict(set)
        for record in records:
            by_attempt[record.attempt].add(record.digest)
        for attempt, digests in by_attempt.items():
            if compare and len(digests) > 1:
                names = ", ".join(
                    f"server {record.server} ({'holder' if record.held else 'mirror'}) {record.digest[:12]}"
                    for record in records
                    if record.attempt == attempt
                )
                yield f"{where}: the weights differ: {names}"


def _partition(ranges: Sequence[tuple[int, int]], samples: int) -> Iterator[str]:
    reached = 0
    for start, stop in sorted(ranges):
        if start > reached:
            yield f"positions {reached} to {start - 1} are missing"
        if start < reached:
            yield f"positions {start} to {min(reached, stop) - 1} count twice"
        reached = max(reached, stop)
    if reached < samples:
        yield f"positions {reached} to {samples - 1} are missing"
    if reached > samples:
        yield f"positions up to {reached - 1} count, and the step has {samples}"


def _of_process(name: str, records: Sequence[ShardRecord]) -> Iterator[str]:
    by_shard: dict[int, list[ShardRecord]] = defaultdict(list)
    for record in records:
        by_shard[record.shard].append(record)
    for shard, own in by_shard.items():
        for before, after in pairwise(own):
            # one that gave a shard away, and gets a copy of it later, has steps between that it did not apply
            if after.step <= before.step:
                yield f"{name}: shard {shard}: applied step {after.step} after step {before.step}: versions only grow"
            if after.term < before.term:
                yield f"{name}: shard {shard}: was in term {after.term} after {before.term}: terms only grow"
