"""What can go wrong, as types.

    ShoalError
    ├── ConfigError (also ValueError)   an argument is wrong
    ├── DataError                       the data set is empty, an item cannot be fetched or collated
    ├── RunDirError                     the run folder cannot be written or is in use
    ├── CheckpointError
    │   ├── CorruptCheckpoint           a checksum or a file is wrong; the one before it is used
    │   ├── CheckpointMismatch          a checkpoint of another model, batch size or data set
    │   └── CheckpointWriteError        the disk is full or the folder went away
    ├── StoreError                      the run store cannot be used: corrupt, of a newer version, not reached
    ├── RunNotFound                     no run of that id or name, or more than one
    ├── LabUnavailable                  this machine cannot hold lab hosts: not root, a tool or a kernel part is missing
    ├── GroupError                      a peer went away in the middle of a collective operation
    ├── PayloadError                    encoded gradients came damaged, or of another kind than expected
    ├── AuditError                      a server's books do not add up: gradients are missing, or counted twice
    └── WorkerError                     a worker failed: its own traceback is printed last
        └── NotFiniteError              the loss is NaN or infinite
    Stopped (SystemExit)                not an error: the run was asked to stop, and a checkpoint is on disk
    ├── Preempted                       SIGTERM, exit code 75
    └── Interrupted                     SIGINT, exit code 130

A message says what was received, what must hold, and what to set.
"""

from __future__ import annotations

SAME_ORDER = "all workers must call the same operations in the same order"
"""In every `GroupError` of workers that called different ones: doing it again would not help."""
EXIT_PREEMPTED = 75
"""Exit code of a process whose run was checkpointed and stopped by SIGTERM (EX_TEMPFAIL: try again)."""
EXIT_INTERRUPTED = 130
"""Exit code of a process whose run was stopped by SIGINT (Ctrl-C)."""


EXIT_USAGE = 2
"""Exit code of the command line for a wrong argument or option."""
EXIT_NO_RUN = 3
"""Exit code of the command line for a run that is not there, or a name that means several."""
EXIT_STORE = 4
"""Exit code of the command line for a run store that cannot be used."""


class ShoalError(Exception):
    """The root of every error that Shoal raises on purpose."""

    exit_code = 1
    """What the command line leaves with."""
    worker_traceback: str | None = None
    """Where the error came from another process: its traceback there, as text."""
    place: str = ""
    """And the line of the user's code where it happened, if that is known."""
    facts: str = ""
    """Worker, step, positions, line and a hint, as they are printed after the traceback."""


class ConfigError(ShoalError, ValueError):
    """An argument is wrong; the message names it."""

    exit_code = EXIT_USAGE


class DataError(ShoalError):
    """The data set is empty, or an item cannot be fetched or collated."""


class RunDirError(ShoalError):
    """The run folder cannot be written, or another run is using it."""


class CheckpointError(ShoalError):
    """Something about a checkpoint."""


class CorruptCheckpoint(CheckpointError):
    """A checkpoint is torn or its bytes do not match their checksum."""


class CheckpointMismatch(CheckpointError):
    """A sound checkpoint, but not of this model, batch size or data."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint could not be written."""


class StoreError(ShoalError):
    """The run store cannot be used: it is corrupt, of a newer version, or out of reach."""

    exit_code = EXIT_STORE


class RunNotFound(ShoalError):
    """There is no run of that id or name, or there is more than one."""

    exit_code = EXIT_NO_RUN


class LabUnavailable(ShoalError):
    """This machine cannot hold the hosts of a lab; the message says what is missing and what to do."""


class GroupError(ShoalError):
    """A collective operation broke, most often because a peer went away."""


class PayloadError(ShoalError):
    """Encoded numbers came damaged, or were not what was expected. Nothing was made of them."""


class AuditError(ShoalError):
    """A server's books do not add up: a step would have been applied without some of its samples, or with some twice.
    Never the user's fault; the run ends rather than train on something else than was asked for."""


class WorkerError(ShoalError):
    """A worker failed. Its own traceback is in `worker_traceback`, and printed last."""

    def __init__(
        self,
        message: str,
        *,
        worker: int | None = None,
        step: int | None = None,
        positions: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.worker = worker
        """`step` counts the steps that were done: 0 is an error in the first one. `positions` are inclusive."""
        self.step = step
        self.positions = positions


class NotFiniteError(WorkerError):
    """The loss became NaN or infinite."""


class Stopped(SystemExit):
    """The run was asked to stop, wrote a checkpoint and ended. Leaves the script without a traceback."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(code)
        self.message = message

    def __str__(self) -> str:
        return self.message


class Preempted(Stopped):
    """SIGTERM came: the run is checkpointed."""

    def __init__(self, message: str) -> None:
        super().__init__(EXIT_PREEMPTED, message)


class Interrupted(Stopped):
    """SIGINT came: the run is checkpointed."""

    def __init__(self, message: str) -> None:
        super().__init__(EXIT_INTERRUPTED, message)
