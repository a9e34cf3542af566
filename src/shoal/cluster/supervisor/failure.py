"""From an exception on a worker to what a person reads: one line, then the worker's own traceback, then where and why.

Python prints an exception's notes last, so that is where the traceback goes: what the screen ends with is the cause.
"""

from __future__ import annotations

import signal
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from shoal.cluster.channel.messages import Failed
from shoal.cluster.logs import ERR, log_path
from shoal.core import errors
from shoal.core.errors import SAME_ORDER, DataError, GroupError, ShoalError, WorkerError
from shoal.core.seats import FIRST_SERVER, name_of
from shoal.core.traces import own_traceback, place_of
from shoal.engines.local import Ended

ROOT_CAUSE_SECONDS = 2.0
"""How long to wait for the worker whose end broke the others' group."""
_WIDTH = 76
_MOST_TEXT = 200_000
"""Characters of a message or a traceback."""

_HINTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("MemoryError", "OutOfMemoryError", "can't allocate memory"),
        "it ran out of memory: set micro_batch= to compute fewer samples at once, or use fewer workers",
    ),
    (
        ("Expected more than 1 value per channel",),
        "BatchNorm got a single sample: a worker has a slice of the batch, and the last batch of an epoch may be "
        "short. Use a larger batch_size=, fewer workers, or GroupNorm or LayerNorm",
    ),
    (("Too many open files",), "raise the limit on open files (ulimit -n 65536), or set data_workers=0"),
    (
        ("No space left on device",),
        "a disk or /dev/shm is full; `shoal doctor` shows both (in a container: docker run --shm-size=1g)",
    ),
    (
        ("Cannot re-initialize CUDA in forked subprocess",),
        "CUDA does not survive a fork: use engine='local:start=script', and leave CUDA alone before fit()",
    ),
    (
        (
            "must be Tensor, not",
            "'Linear' object has no attribute 'size'",
            "'Sequential' object has no attribute 'size'",
        ),
        "loss= and predict= are called as fn(model, batch): the model comes first, then what the data set gives",
    ),
    (
        ("Trying to backward through the graph a second time",),
        "leave .backward() out of the loss: Shoal calls it, once for each part of the batch",
    ),
    (
        ("modified by an inplace operation",),
        "in an own loop with several phases, buffers are merged and parameters applied between them: compute what a "
        "phase goes back through in that phase",
    ),
    (
        ("shapes cannot be multiplied", "size mismatch", "must match the size of tensor"),
        "a shape does not fit: print the shapes of the tensors in that line",
    ),
    (
        ("expected scalar type", "must have the same dtype", "Found dtype"),
        "a dtype does not fit: data often comes as float64 or int; convert it with .float() or .long()",
    ),
)


# -- on the worker -----------------------------------------------------------------------------------------------------


Whereabouts: TypeAlias = tuple[str, int | None, tuple[int, int] | None]
"""Where a worker is: in words, its step, and the positions that it computes of the global batch."""
NOWHERE: Whereabouts = "", None, None


def describe(error: BaseException, at: Whereabouts = NOWHERE) -> Failed:
    """What a process tells of the error that ended it."""
    where, step, positions = at
    if isinstance(error, WorkerError) and error.step is not None:
        step, positions = error.step, error.positions
    name = type(error).__name__
    if getattr(errors, name, type(error)) is not type(error):
        # a user's own class that is called like one of ours
        name = f"{type(error).__module__}.{type(error).__qualname__}"
    return Failed(
        kind=name,
        message=_text(lambda: str(error)),
        traceback=_text(lambda: own_traceback(error)),
        where=where,
        place=_text(lambda: place_of(error)),
        step=step,
        positions=positions,
        culprit=error.worker if isinstance(error, WorkerError) else None,
        # one that names what workers called differently is the cause itself
        secondary=isinstance(error, GroupError) and SAME_ORDER not in str(error),
    )


def whole_traceback(error: BaseException) -> str:
    """Every frame, for the log."""
    text = _text(lambda: "".join(traceback.format_exception(error)).rstrip())
    remote = error.worker_traceback if isinstance(error, ShoalError) else None
    return f"{remote.rstrip()}\n\n{text}" if remote else text


def _text(make: Callable[[], str]) -> str:
    """Text that can be sent, whatever a user's exception says of itself."""
    try:
        text = make()
    except Exception as error:
        text = f"(what it says cannot be shown: {type(error).__name__})"
    if len(text) > _MOST_TEXT:
        half, left_out = _MOST_TEXT // 2, len(text) - _MOST_TEXT
        text = f"{text[:half]}\n... {left_out} characters left out ...\n{text[-half:]}"
    return text.encode(errors="backslashreplace").decode()


# -- in the supervisor -------------------------------------------------------------------------------------------------


def as_error(worker: int, workers: int, failed: Failed, logs: Path | None) -> ShoalError:
    """The error to raise where the run was started, with the worker's traceback as its last note."""
    kind = getattr(errors, failed.kind, None)
    error: ShoalError
    if isinstance(kind, type) and issubclass(kind, WorkerError):
        worker = worker if failed.culprit is None else failed.culprit
        error = kind(failed.message, worker=worker, step=failed.step, positions=failed.positions)
    elif isinstance(kind, type) and issubclass(kind, ShoalError):
        error = kind(failed.message)
    else:
        if failed.kind == "SystemExit":
            what = f"called sys.exit({failed.message})"
        else:
            what = f"raised {failed.kind}: {failed.message}" if failed.message else f"raised {failed.kind}"
        error = WorkerError(
            f"{failed.where}{name_of(worker)} {what}",
            worker=worker,
            step=failed.step,
            positions=failed.positions,
        )
    error.worker_traceback = failed.traceback
    tell(error, worker, workers, failed, logs)
    return error


def tell(error: Exception, worker: int, workers: int, failed: Failed, logs: Path | None) -> None:
    """Add to the error what is printed last: the traceback, and the facts."""
    facts = _facts(worker, workers, failed, logs)
    lines = [""]
    if 'File "' in failed.traceback:  # else there is nothing but Shoal's frames, and the message says it all
        lines += [f"{name_of(worker).capitalize()}'s own traceback:\n", _indented(failed.traceback), ""]
    error.add_note("\n".join([*lines, _indented(facts)]))
    if isinstance(error, ShoalError):
        error.facts = facts


def _facts(worker: int, workers: int, failed: Failed, logs: Path | None) -> str:
    facts = [f"worker {worker} of {workers}" if worker < FIRST_SERVER else name_of(worker)]
    if failed.where:
        facts.append(failed.where.partition(" (")[0].removeprefix("in ").rstrip(", "))
    elif failed.step is not None:
        facts.append(f"step {failed.step + 1}")
    if failed.positions is not None:
        facts.append(f"data positions {failed.positions[0]}–{failed.positions[1]} of the epoch")
    lines = [" · ".join(facts)]
    if failed.place:
        lines.append(f"at {failed.place}")
    hint = hint_for(failed)
    if hint:
        lines += textwrap.wrap(hint, _WIDTH, initial_indent="hint: ", subsequent_indent="      ")
    if logs is not None:
        lines.append(f"log:  {log_path(logs, worker, ERR)}")
    return "\n".join(lines)


def hint_for(failed: Failed) -> str:
    said = f"{failed.kind}: {failed.message}"
    for words, hint in _HINTS:
        if any(word in said for word in words):
            return hint
    if failed.kind == DataError.__name__ and "could not be fetched" in failed.message:
        item = failed.message.partition(" could not be fetched")[0]
        return f"get that item by itself to see the cause: {item}"
    return ""


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" if line else "" for line in text.splitlines())


def why_ended(end: Ended, logs: Path | None) -> str:
    """What is most often the reason, and what to do; empty if nothing is known of it."""
    if end.signal is None:
        return "look for os._exit in the code it runs"
    if end.signal == signal.SIGKILL:
        return "most often the machine ran out of memory: set micro_batch=, or use fewer workers"
    if end.signal in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT):
        where = "the stack of that moment is in its log" if logs else "run with PYTHONFAULTHANDLER=1 to see where"
        return f"a native library crashed in it: {where}"
    return ""


def ended_error(end: Ended, logs: Path | None) -> WorkerError:
    """A worker that ended without a word."""
    if end.signal is None:
        how = f"left with exit code {end.code} in the middle of the run"
    else:
        how = f"was killed by {signal.Signals(end.signal).name}"
    why = why_ended(end, logs)
    error = WorkerError(f"{name_of(end.worker)} {how}{'; ' if why else ''}{why}", worker=end.worker)
    if logs is not None and log_path(logs, end.worker, ERR).exists():
        error.add_note(f"\n  log:  {log_path(logs, end.worker, ERR)}")
    return error
