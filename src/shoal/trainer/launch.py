"""Own loops on many workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from shoal.core import spec
from shoal.core.errors import ConfigError, Interrupted, Preempted
from shoal.core.events import AnyEvent, Callback, Stop
from shoal.trainer.arguments import as_path, check_callbacks, check_functions, check_whole
from shoal.trainer.channel import INTERRUPTED, PREEMPTED, StopSignals
from shoal.trainer.progress import Progress
from shoal.trainer.run import Start, check_workers, default_workers, import_for_training, is_main_process, run
from shoal.trainer.rundir import RunDir, find_checkpoint, new_run_id
from shoal.trainer.session import Session


def launch(
    fn: Callable[[Session], Any],
    workers: int | None = None,
    *,
    seed: int = 0,
    deterministic: bool = False,
    run_dir: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    keep: int = 3,
    engine: str | spec.Local = "local",
    callbacks: Sequence[Callback] = (),
) -> list[Any]:
    """Call `fn(session)` on every worker and return what each returned, in order of rank.

    What `fn` returns must be made of tensors, arrays, numbers, strings, lists and dicts. With `run_dir`, what the
    session tracks is checkpointed there, and `resume="last"` goes on from it. SIGTERM and Ctrl-C end the session's loop
    after the step in progress, checkpointed; `fn` then goes on after its loop, and this call raises `shoal.Preempted`
    or `shoal.Interrupted` once it has returned.
    """
    engine_spec: spec.Local = spec.parse("engine", engine)
    count = default_workers(engine_spec) if workers is None else check_workers(workers)
    check_functions(fn=fn)
    check_whole(None, seed=seed)
    check_whole(1, keep=keep)
    check_whole(1, optional=True, checkpoint_every=checkpoint_every)
    check_callbacks(callbacks)
    progress = Progress()
    folder = None if run_dir is None else as_path("run_dir", run_dir).absolute()
    if folder is None and (resume is not None or checkpoint_every is not None):
        raise ConfigError("launch: resume= and checkpoint_every= need run_dir=")
    loaded, origin = None, None
    if resume is not None:
        resume = resume if resume == "last" else as_path("resume", resume)
        loaded, origin = find_checkpoint(resume, run_dir=folder, name="", warn=progress.warn)
    run_id = new_run_id(folder.name if folder is not None else "launch")
    held = None
    if folder is not None and is_main_process():
        held = RunDir(folder, run_id, keep_checkpoints=origin is not None and origin.resolve() == folder.resolve())
    start = Start(
        seed=seed,
        deterministic=deterministic,
        run_id=run_id,
        run_dir=folder,
        checkpoint_every=checkpoint_every,
        keep=keep,
        meta={"run_id": run_id},
        loaded=loaded,
    )

    def listen(event: AnyEvent) -> Stop | None:
        progress(event)
        answers = [callback(event) for callback in callbacks]
        return next((answer for answer in answers if isinstance(answer, Stop)), None)

    def body(session: Session) -> list[Any]:
        return [fn(session), session.stopping]

    try:
        with StopSignals() as signals:
            import_for_training()
            values = run(body, start, workers=count, engine=engine_spec, listen=listen, signals=signals)
    finally:
        if held is not None:
            held.close()
    for reason, error in ((PREEMPTED, Preempted), (INTERRUPTED, Interrupted)):
        if reason == (signals.asked or values[0][1]):
            stopped = error(
                f"shoal: {reason} by a signal; checkpointed in {folder}" if folder else f"shoal: {reason} by a signal"
            )
            progress.warn(stopped.message)
            raise stopped
    return [value for value, _ in values]
