"""Ledgers: what each worker says it has committed, a line for every step, in a file of its process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from shoal.core.errors import ConfigError


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One step that one process has applied."""

    time: float
    """By `time.monotonic`: processes of one machine can be compared."""
    worker: str
    pid: int
    term: int
    step: int
    """Counted from 0."""
    spans: list[tuple[int, int]]
    """Positions of the epoch (start … stop−1) that this worker computed; none where it copied the step's result."""
    shares: dict[str, list[tuple[int, int]]]
    """The same of every member of the term, as this one saw it."""
    digest: str
    """Of all parameters, after the step; empty where it was not asked for."""

    @property
    def copied(self) -> bool:
        """Whether the worker took over the result of others who had computed the step."""
        return not self.shares


_encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Record).decode
"""One line of a ledger, as a record."""


class Ledger:
    """Writes the lines of whichever process uses it. Made before workers are forked; each opens a file of its own."""

    def __init__(self, folder: str | os.PathLike[str], *, digests: bool = True) -> None:
        self.folder = Path(folder).absolute()
        self._digests = digests
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = -1
        self._opened_by = 0

    def write(
        self,
        *,
        worker: int,
        term: int,
        step: int,
        spans: Mapping[int, Sequence[tuple[int, int]]],
        digest: Callable[[], bytes | str],
    ) -> None:
        """One line, in one call: a process that is killed leaves whole lines. `spans` are those of every member."""
        now = time.monotonic()
        shares = {f"worker-{seat}": [(start, stop) for start, stop in own] for seat, own in spans.items()}
        name, found = f"worker-{worker}", digest() if self._digests else ""
        record = Record(
            time=now,
            worker=name,
            pid=os.getpid(),
            term=term,
            step=step,
            spans=shares.get(name, []),
            shares=shares,
            digest=found if isinstance(found, str) else found.hex(),
        )
        os.write(self._opened(name), _encode(record) + b"\n")

    def _opened(self, name: str) -> int:
        if self._opened_by != os.getpid():
            path = self.folder / f"{name}-{os.getpid()}.jsonl"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._opened_by = os.getpid()
        return self._file

    def close(self) -> None:
        """Close what this process has opened; a worker need not, as it ends."""
        if self._opened_by == os.getpid():
            os.close(self._file)
            self._opened_by = 0


def read_ledgers(folder: str | os.PathLike[str]) -> dict[str, list[Record]]:
    """The lines of every process, in order, by the name of its file without the ending.

    Raises ConfigError where there are none, or where a line is not one of a ledger.
    """
    files = sorted(Path(folder).glob("*.jsonl"))
    if not files:
        raise ConfigError(f"{folder} holds no ledgers (*.jsonl); train with faults=FaultPlan().ledger(folder) first")
    return {file.stem: _read(file) for file in files}


def _read(file: Path) -> list[Record]:
    records = []
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            records.append(decode(line))
        except msgspec.DecodeError as error:
            raise ConfigError(f"{file}, line {number}, is no line of a ledger: {error}") from error
    return records
