"""Who watches a run: the display, the run store, the report, listeners and the user's callbacks.

All of it lives in the process that called `fit()`, or in worker 0 where the script runs once per worker.
"""

from __future__ import annotations

import getpass
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from shoal.cluster.channel.channel import StopSignals
from shoal.cluster.supervisor.calling import Calling
from shoal.core import settings
from shoal.core.errors import ShoalError, WorkerError
from shoal.core.events import (
    AnyEvent,
    Callback,
    CheckpointSaved,
    Notice,
    Preparing,
    RunEnded,
    RunFailed,
    RunStarted,
    Scale,
    StepDone,
    Stop,
    WorkerSeen,
)
from shoal.core.settings import Setting
from shoal.core.traces import own_traceback
from shoal.engines.here import is_main_process
from shoal.engines.program import in_package, script
from shoal.monitor.display.display import Display
from shoal.monitor.resuming import in_python, resuming
from shoal.store.home import NO_STORE, shoal_home, store_url
from shoal.store.values import FAILED, INTERRUPTED, NewRun, RunEnd

if TYPE_CHECKING:
    from shoal.monitor.report.summary import Summary
    from shoal.store.recorder import Recorder

REPORT = "report.html"


class Watcher(Protocol):
    """What a run tells its surroundings. Called on the thread that runs it."""

    def __call__(self, event: AnyEvent) -> Stop | Scale | None:
        """An event; the answer may end the run, or ask for another number of workers."""

    def tick(self) -> None:
        """Some time has passed, about a tenth of a second."""

    def output(self, worker: int, stream: str, text: str) -> None:
        """A worker printed something: whole lines as a rule. `stream` is out or err."""

    def urge(self, text: str) -> None:
        """A person should know this now: something does not go on."""


class Unwatched:
    """For what is not worth a record: evaluation and prediction outside of a run. What a person should know is said."""

    def __call__(self, event: AnyEvent) -> Stop | None:
        if isinstance(event, Notice) and not event.quiet:
            self.urge(event.text)
        return None

    def tick(self) -> None:
        return None

    def output(self, worker: int, stream: str, text: str) -> None:
        return None

    def urge(self, text: str) -> None:
        print(f"shoal: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Identity:
    """Which run it is."""

    run_id: str
    name: str
    workers: int
    run_dir: Path | None = None
    config: dict[str, Setting] = field(default_factory=dict)
    resumed: bool = False


class Watch:
    """All who watch one run, as one watcher."""

    def __init__(self, callbacks: Sequence[Callback] = (), signals: StopSignals | None = None) -> None:
        now = settings.current()
        self._main = is_main_process()
        self._mode = settings.progress_mode() if self._main else "quiet"
        self._display = Display(self._mode, verbose=now.verbose, stream=now.stream if self._main else None)
        # one process of a script that runs once per worker has them called, for all
        self._calling = Calling(
            callbacks if self._main else (), self.warn, lambda: signals is not None and signals.asked is not None
        )
        self._listeners: list[Callback] = []
        self._identity: Identity | None = None
        self._recorder: Recorder | None = None
        self._summary: Summary | None = None
        self._seen_lines: dict[str, int] = {}
        self._folded = 0
        self._step, self._loss = 0, float("nan")
        self._metrics: dict[str, float] = {}
        self._bytes_sent = 0
        self._checkpointed = 0
        self._ended: RunEnded | None = None
        self._failed: RunFailed | None = None
        self.began = False
        """Whether workers have begun to train: from then on the run leaves a record, however it ends."""
        self.started = False
        """Whether a loop has started: what it resumes has been found to fit."""
        self.stop: Stop | None = None
        """What a callback has decided."""

    # -- for the Trainer -----------------------------------------------------------------------------------------------

    def warn(self, text: str) -> None:
        if self._main:
            self._display.warn(text)

    def prepare(self, what: str, done: float = 0.0, total: float = 0.0, unit: str = "") -> None:
        """Something before the first step takes its time."""
        if self._main:
            self._display(Preparing(step=0, what=what, done=done, total=total, unit=unit))

    def read_checkpoint(self, done: float, total: float) -> None:
        self.prepare("reading the checkpoint", done, total, "B")

    def saw(self, seen: WorkerSeen) -> None:
        """A worker's last word of itself, which came with its result."""
        self._bytes_sent += seen.bytes_sent
        self(seen)

    def restarted(self, step: int, text: str) -> None:
        """All workers were lost, and the run goes on from this step."""
        self(Notice(step=step, text=text))

    def ended_early(self, reason: str | None) -> None:
        """For an own loop, which does not say how it ended: as `reason` says, or complete."""
        if self._ended is None:
            self(RunEnded(step=self._step, loss=self._loss, metrics={}, reason=reason or "complete"))

    @contextmanager
    def running(self, identity: Identity) -> Iterator[None]:
        """Within: the run. Leaving it ends the run for all who watch, well or not, and writes the report."""
        self._begin(identity)
        try:
            yield
        except BaseException as error:
            self._fail(error)
            self._close(error)
            raise
        self._close(None)

    def close(self) -> None:
        """Give the screen back."""
        self._calling.close()
        self._display.close()

    # -- for the run ---------------------------------------------------------------------------------------------------

    def __call__(self, event: AnyEvent) -> Stop | Scale | None:
        if isinstance(event, RunEnded):
            # The last word: it is passed on when all is done, or not at all if something fails until then.
            self._ended = event
            return None
        return self._pass_on(event)

    def _pass_on(self, event: AnyEvent) -> Stop | Scale | None:
        if isinstance(event, RunStarted) and self._identity is not None:
            config = {name: setting.value for name, setting in self._identity.config.items()}
            event = msgspec.structs.replace(event, name=self._identity.name, config=config)
        self._note(event)
        self._display(event)
        if not isinstance(event, Preparing):
            self.began = True
            for watcher in (self._summary, self._recorder):
                if watcher is not None:
                    watcher(event)
        for listener in self._listeners:
            listener(event)
        stop, scale = self._calling(event)
        self.stop = self.stop or stop
        return stop or scale

    def urge(self, text: str) -> None:
        self(Notice(step=self._step, text=text))

    def tick(self) -> None:
        self._display.tick()

    def output(self, worker: int, stream: str, text: str) -> None:
        if stream == "err" and self._mode != "json":
            text = "".join(line for line in text.splitlines(keepends=True) if not self._said_by_another(worker, line))
        if text:
            self._display.output(worker, stream, text)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _begin(self, identity: Identity) -> None:
        """Nothing here may start a thread: workers are forked after it."""
        self._identity = identity
        if not self._main:
            return
        from shoal.monitor.report.summary import Summary

        self._summary = Summary()
        if (settings.current().store or store_url()) != NO_STORE:
            from shoal.store.recorder import Recorder

            self._recorder = Recorder(new_run(identity), url=settings.current().store, warn=self._display.warn)
        self._listeners = [make() for make in settings.current().listeners]

    def _said_by_another(self, worker: int, line: str) -> bool:
        """Every worker gives the same warning: one is enough, the rest is in the logs."""
        if len(self._seen_lines) > 10_000:
            self._seen_lines.clear()
        first = self._seen_lines.setdefault(line, worker)
        self._folded += first != worker
        return first != worker

    def _note(self, event: AnyEvent) -> None:
        self._step = max(self._step, event.step)
        if isinstance(event, StepDone):
            self._loss = event.loss
        elif isinstance(event, CheckpointSaved):
            self._checkpointed = event.step
        elif isinstance(event, RunStarted):
            self.started = True
            self._checkpointed = max(self._checkpointed, event.step)

    def _fail(self, error: BaseException) -> None:
        worker = error.worker if isinstance(error, WorkerError) else None
        told = error.worker_traceback if isinstance(error, ShoalError) else None
        if worker is None and told is None and not self.began:
            return  # refused before a worker did anything: that leaves no record
        interrupted = isinstance(error, KeyboardInterrupt)
        text = "ended at once by Ctrl-C" if interrupted else f"{type(error).__name__}: {error}".splitlines()[0]
        facts = error.facts if isinstance(error, ShoalError) else ""
        notes = "\n".join(getattr(error, "__notes__", ()))
        trace = notes if interrupted else "\n\n".join(filter(None, [told or own_traceback(error), facts]))
        self._failed = RunFailed(step=self._step, error=text, traceback=trace, worker=worker)
        # what a listener or a callback may raise now is not what the run failed of
        with suppress(Exception):
            self(self._failed)

    def _close(self, error: BaseException | None) -> None:
        assert self._identity is not None
        if not (self._main and self.began):
            return
        if self._folded:
            logs = "" if self._identity.run_dir is None else f"; all of them are in {self._identity.run_dir / 'logs'}"
            self.warn(f"{self._folded} lines on stderr were the same on several workers and are shown once{logs}")
        if error is None and self._ended is not None:
            self._pass_on(self._ended)
        self._end_record(error)
        for listener in self._listeners:
            close = getattr(listener, "close", None)
            if close is not None:
                with suppress(Exception):
                    close()
        self._display.close()
        with suppress(ImportError):
            self._report(failed=error is not None)
        if isinstance(error, ShoalError):
            self._say_where_to_look(error)

    def _say_where_to_look(self, error: ShoalError) -> None:
        """The last lines on the screen: where the record is, and how to go on if there is a checkpoint."""
        assert self._identity is not None
        lines = (
            [f"  run:  shoal show {self._identity.run_id}"]
            if self._recorder is not None and self._recorder.recording
            else []
        )
        if self._checkpointed:
            lines.append(f"  resume from step {self._checkpointed}:  {resume_command(self._identity)}")
        if lines:
            error.add_note("\n".join(lines))

    def _end_record(self, error: BaseException | None) -> None:
        if self._recorder is None:
            return
        ended = self._ended
        if error is None and ended is not None:
            end = RunEnd(
                status=ended.reason,
                step=ended.step,
                loss=ended.loss,
                metrics=ended.metrics,
                bytes_sent=self._bytes_sent,
            )
        else:
            status = INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
            failed = self._failed
            end = RunEnd(
                status=status,
                step=self._step,
                loss=None if self._loss != self._loss else self._loss,
                bytes_sent=self._bytes_sent,
                error=failed.error if failed is not None else None,
                traceback=failed.traceback if failed is not None else None,
            )
        self._recorder.close(end)

    def _report(self, *, failed: bool) -> None:
        from shoal.monitor.report.page import render_html

        assert self._identity is not None and self._summary is not None
        summary = self._summary
        summary.config = dict(self._identity.config)
        summary.resume_command = resume_command(self._identity)
        if self._recorder is not None:
            summary = self._from_store(summary)
        summary.recorded = self._recorder is not None and self._recorder.recording
        folder = self._identity.run_dir
        if folder is not None and folder.is_dir():
            with suppress(OSError):
                temporary = folder / f".{REPORT}.new"
                temporary.write_text(render_html(summary), encoding="utf-8")
                temporary.rename(folder / REPORT)
        if not failed and settings.current().report and self._mode not in ("quiet", "json"):
            from rich.console import Console

            from shoal.monitor.report.terminal import print_report

            print_report(summary, Console(stderr=True))

    def _from_store(self, summary: Summary) -> Summary:
        """With what only the store knows: earlier parts of a resumed run, and a run on one worker to compare with."""
        from shoal.monitor.report.baseline import find_baseline
        from shoal.monitor.report.convergence import find_cost
        from shoal.monitor.report.summary import Summary
        from shoal.store.store import Store

        assert self._identity is not None
        with suppress(ShoalError), Store.open(settings.current().store, create=False) as store:
            run = store.find(self._identity.run_id)
            if self._identity.resumed:
                command = summary.resume_command
                summary = Summary.from_store(
                    run,
                    store.steps(run.id, most=2000),
                    store.events(run.id),
                    store.checkpoints(run.id),
                    store.workers(run.id),
                )
                summary.resume_command = command
            summary.environment, summary.git_commit = run.environment, run.git_commit
            summary.baseline = find_baseline(store, run)
            summary.cost = find_cost(store, run)
        return summary


def new_run(identity: Identity) -> NewRun:
    from shoal.store.liveness import this_process

    process = this_process()
    return NewRun(
        id=identity.run_id,
        name=identity.name,
        created=time.time(),
        workers=identity.workers,
        run_dir=None if identity.run_dir is None else str(identity.run_dir),
        script=str(script() or ""),
        command=masked(sys.orig_argv),
        host=process.host,
        pid=process.pid,
        pid_started=process.started,
        user=_user(),
        config=identity.config,
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


_SECRET = ("key", "token", "secret", "password", "passwd")


def masked(command: Sequence[str]) -> list[str]:
    """A command line as it may be kept: what looks like a secret by its option's name is left out."""
    shown: list[str] = []
    hide = False
    for word in command:
        option, equals, _ = word.partition("=")
        secret = word.startswith("-") and any(part in option.lower() for part in _SECRET)
        shown.append("***" if hide else f"{option}=***" if secret and equals else _without_password(word))
        hide = secret and not equals
    return shown


def _without_password(word: str) -> str:
    """A URL keeps its user and loses its password, and what looks like one in its query."""
    word = re.sub(r"(\w+://[^/\s:@]*):[^/\s@]*@", r"\1:***@", word)
    return re.sub(rf"([?&]\w*(?:{'|'.join(_SECRET)})\w*=)[^&\s]*", r"\1***", word, flags=re.IGNORECASE)


def resume_command(identity: Identity) -> str:
    """How to go on with a run, as one would type it: a command, or Python where the code is in no script."""
    resume = identity.run_id if identity.run_dir is None or _is_home_of(identity) else "last"
    typed = settings.current().command
    if typed:
        return shlex.join(["shoal", *masked(resuming(typed, resume))])
    started = script()
    if started is not None and started.suffix == ".py" and not in_package():
        rest = ["--", *masked(sys.argv[1:])] if len(sys.argv) > 1 else []
        return shlex.join(["shoal", "run", sys.argv[0], "--resume", resume, *rest])
    return in_python(identity.config, resume)


def _is_home_of(identity: Identity) -> bool:
    """Whether the run is found by its id: it lies where runs lie that were given no folder."""
    return identity.run_dir is not None and identity.run_dir == shoal_home() / "runs" / identity.run_id
