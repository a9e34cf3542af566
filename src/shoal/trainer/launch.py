"""Own loops on many workers."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shoal.checkpoint.rundir import RunDir, default_name, find_checkpoint, new_run_id, newest_checkpoint
from shoal.cluster.channel.channel import INTERRUPTED, PREEMPTED, StopSignals
from shoal.cluster.elasticity import Elasticity
from shoal.cluster.supervisor.watch import Identity, Watch, resume_command
from shoal.core import settings, spec
from shoal.core.errors import ConfigError, Interrupted, Preempted, ShoalError
from shoal.core.events import Callback, WorkerSeen
from shoal.core.settings import Setting
from shoal.engines.here import is_main_process
from shoal.trainer.arguments import as_path, check_callbacks, check_flag, check_functions, check_whole
from shoal.trainer.configure import config_of_call, configured_call, show_config
from shoal.trainer.saying import say
from shoal.trainer.session import Session
from shoal.trainer.stale import stale_in_loop
from shoal.trainer.workers.run import run
from shoal.trainer.workers.start import Start, check_workers, default_workers, import_for_training, is_launched


@configured_call
def launch(
    fn: Callable[[Session], Any],
    workers: int | None = None,
    *,
    seed: int = 0,
    deterministic: bool = False,
    strict: bool = False,
    collective: str = "auto",
    codec: str | spec.AnyCodec = "none",
    run_dir: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    keep: int = 3,
    replace: bool = True,
    engine: str | spec.Local = "local",
    callbacks: Sequence[Callback] = (),
) -> list[Any]:
    """Call `fn(session)` on every worker and return what each returned, in order of rank.

    What `fn` returns must be made of tensors, arrays, numbers, strings, lists and dicts. With `run_dir`, what the
    session tracks is checkpointed there, and `resume="last"` goes on from it; without, there are no checkpoints.
    A worker that dies inside a `session.steps` loop with one optimizer, tracked before, and one phase is replaced while
    the others go on (docs/elastic.md); elsewhere, and with replace=False, its death ends the run.
    SIGTERM and Ctrl-C end the session's loop after the step in progress; `fn` then goes on after its loop, and this
    call raises `shoal.Preempted` or `shoal.Interrupted` once it has returned.
    """
    engine_spec: spec.Local = spec.parse("engine", engine)
    count = default_workers(engine_spec) if workers is None else check_workers(workers)
    spec.check_collective(collective)
    codec_spec: spec.AnyCodec = spec.parse("codec", codec)
    if deterministic and codec_spec != spec.NoCodec():
        raise ConfigError(f"codec={codec!r}: deterministic=True sums gradients as they are; use codec='none'")
    check_functions(fn=fn)
    check_whole(None, seed=seed)
    check_whole(1, keep=keep)
    check_whole(1, optional=True, checkpoint_every=checkpoint_every)
    check_callbacks(callbacks)
    config = config_of_call()
    show_config(config, "shoal.launch")
    folder = None if run_dir is None else as_path("run_dir", run_dir).absolute()
    if folder is None and (resume is not None or checkpoint_every is not None):
        raise ConfigError("launch: resume= and checkpoint_every= need run_dir=")
    signals = StopSignals()
    watch = Watch(callbacks, signals)
    try:
        with signals, _Place(folder, resume, watch) as place:
            start = Start(
                seed=seed,
                deterministic=deterministic,
                strict=check_flag("strict", strict),
                collective=collective,
                codec=codec_spec,
                run_id=place.run_id,
                run_dir=folder,
                checkpoint_every=checkpoint_every,
                keep=keep,
                meta={"run_id": place.run_id},
                loaded=place.loaded,
                kept="without a checkpoint (launch has no run_dir=)"
                if folder is None
                else "with a checkpoint of what is tracked",
            )
            with watch.running(place.identity(count, config)):
                doubts = [] if is_launched() else stale_in_loop(callbacks, fn)
                replaces = check_flag("replace", replace)
                elasticity = Elasticity(count, 1 if replaces else count, count, replaces=replaces)
                values = _run(fn, start, elasticity, engine_spec, watch, signals, doubts)
    except ShoalError as error:
        raise error.with_traceback(None) from None
    except KeyboardInterrupt as error:
        for text in getattr(error, "__notes__", ()):
            print(f"shoal: {text}", file=sys.stderr)
        raise _stopped(Interrupted, "ended at once by a second Ctrl-C", folder, watch) from None
    finally:
        watch.close()
    for reason, kind in ((PREEMPTED, Preempted), (INTERRUPTED, Interrupted)):
        if reason == (signals.asked or values[0]["stopping"]):
            raise _stopped(kind, f"{reason} by a signal", folder, watch)
    return [value["value"] for value in values]


def _run(
    fn: Callable[[Session], Any],
    start: Start,
    elasticity: Elasticity,
    engine: spec.Local,
    watch: Watch,
    signals: StopSignals,
    doubts: Sequence[str],
) -> list[dict[str, Any]]:
    def body(session: Session) -> dict[str, Any]:
        for text in doubts:
            say(session, text)
        return {"value": fn(session), "stopping": session.stopping, "seen": msgspec.to_builtins(session.seen())}

    workers = elasticity.workers
    watch.prepare(f"starting {workers} workers" if workers > 1 else "starting 1 worker")
    import_for_training()
    values = run(body, start, workers=workers, engine=engine, watch=watch, signals=signals, elasticity=elasticity)
    if watch.began:
        for value in values:
            watch.saw(msgspec.convert(value["seen"], WorkerSeen))
        watch.ended_early(signals.asked or values[0]["stopping"])
    return values


def _stopped(
    kind: type[Preempted] | type[Interrupted], what: str, folder: Path | None, watch: Watch
) -> Preempted | Interrupted:
    left = f"; {_what_is_left(folder)}" if watch.started else ""
    stopped = kind(f"shoal: {what}{left}")
    if is_main_process():
        print(stopped.message, file=sys.stderr, flush=True)
    return stopped


def _what_is_left(folder: Path | None) -> str:
    newest = newest_checkpoint(folder)
    if newest is not None:
        typed = settings.current().command
        how = f": {resume_command(Identity('', '', 0, folder))}" if typed else " resume='last'"
        return f"its newest checkpoint is {newest}; go on with{how}"
    if folder is None:
        return "there is no checkpoint, for launch was given no run_dir="
    return f"there is no checkpoint in {folder}: nothing was tracked, or no step was done"


@dataclass
class _Place:
    """The folder of a run, if it has one, and what is resumed from it."""

    folder: Path | None
    resume: str | os.PathLike[str] | None
    watch: Watch

    def __enter__(self) -> _Place:
        self.loaded, origin = None, None
        if self.resume is not None:
            resume = self.resume if self.resume == "last" else as_path("resume", self.resume)
            self.loaded, origin = find_checkpoint(
                resume, run_dir=self.folder, name="", warn=self.watch.warn, progress=self.watch.read_checkpoint
            )
        self.continued = origin is not None and self.folder is not None and origin.resolve() == self.folder.resolve()
        known = str(self.loaded.meta.get("run_id") or "") if self.loaded is not None and self.continued else ""
        self.name = self.folder.name if self.folder is not None else default_name()
        self.run_id = known or new_run_id(self.name)
        self._held: RunDir | None = None
        if self.folder is not None and is_main_process():
            self._held = RunDir(self.folder, self.run_id, keep_checkpoints=self.continued)
            self._held.write_about({"run_id": self.run_id, "name": self.name, "started": time.time()})
        return self

    def identity(self, workers: int, config: dict[str, Setting]) -> Identity:
        return Identity(
            run_id=self.run_id,
            name=self.name,
            workers=workers,
            run_dir=self.folder,
            config=config,
            resumed=self.continued,
        )

    def __exit__(self, *error: object) -> None:
        if self._held is not None:
            self._held.close(keep=self.watch.began)
