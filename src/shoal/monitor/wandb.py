"""Weights & Biases: a run for every run, sent or kept in a folder.

Trainer(..., callbacks=[WandB("my-project")])
Trainer(..., callbacks=[WandB(mode="offline", folder="logs")])      later: wandb sync logs/wandb/offline-run-*
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError
from shoal.core.events import RunStarted
from shoal.monitor.figures import Point, facts
from shoal.monitor.tracking import Ending, Record, Text, Tracker, require

_EXTRA = "wandb"
_MODES = ("online", "offline", "disabled", "shared")


class WandB(Tracker):
    """Logs every run to `project`. `mode`: "online", "offline", or None for what W&B's own settings say.

    `folder` is where W&B keeps its files (in `folder`/wandb); None is its own choice. Its error reports to its makers
    are off unless the environment has WANDB_ERROR_REPORTING=true. It never asks for a key: run `wandb login` before.
    """

    label = "W&B"

    def __init__(
        self, project: str = "shoal", mode: str | None = None, folder: str | os.PathLike[str] | None = None
    ) -> None:
        super().__init__()
        if mode is not None and mode not in _MODES:
            raise ConfigError(f"mode={mode!r}: W&B has {', '.join(_MODES)}; leave it out for what its settings say")
        self._project = project
        self._mode = mode
        self._folder = None if folder is None else Path(folder).absolute()
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its service reads it, and no setting has it
        require("wandb", _EXTRA)

    def begin(self, started: RunStarted) -> Record:
        return _Run(self._project, self._mode, self._folder, started)


class _Run:
    def __init__(self, project: str, mode: str | None, folder: Path | None, started: RunStarted) -> None:
        self._wandb = require("wandb", _EXTRA)
        # No console capture, code or git: other listeners and the run folder have these, and they cost time.
        settings: dict[str, Any] = {"silent": True, "console": "off", "disable_git": True, "save_code": False}
        if mode is not None:
            settings["mode"] = mode
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            settings["root_dir"] = str(folder)
        try:
            self._run = self._init(project, settings, started)
        except BaseException:
            self._leave()
            raise
        # with a step of our own: W&B's may only grow, and what workers tell comes later than what they tell about
        self._run.define_metric("*", step_metric="step")
        self.where = _where(self._run)

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log({**point.values, "step": point.step, "_timestamp": point.time})

    def write(self, text: Text) -> None:
        self._run.log({text.name: text.text, "step": text.step, "_timestamp": text.time})

    def finish(self, ending: Ending) -> None:
        try:
            self._run.summary["status"] = "failed" if ending.failed else "finished"
            self._run.summary["reason"] = ending.reason
            self._run.finish(exit_code=1 if ending.failed else 0)
        finally:
            self._leave()

    def _init(self, project: str, settings: dict[str, Any], started: RunStarted) -> Any:
        if self._wandb.run is None:
            # for all of W&B, before it is needed: where it may print, it asks for a key and waits
            self._wandb.setup(settings=self._wandb.Settings(silent=True))
        return self._wandb.init(
            project=project,
            name=started.run_id or started.name or None,
            id=_id(started.run_id),
            resume="allow" if started.step > 0 else None,
            config=facts(started),
            settings=self._wandb.Settings(**settings),
            reinit="create_new",
        )

    def _leave(self) -> None:
        """End W&B's service, a process that would stay, unless another run of this process needs it."""
        if getattr(self._wandb.setup(), "most_recent_active_run", self._wandb.run) is None:
            self._wandb.teardown()


def _where(run: Any) -> str:
    """Nothing for a run that W&B neither sends nor keeps."""
    if run.disabled:
        return ""
    if run.offline:
        folder = shlex.quote(str(Path(run.dir).parent))
        return f"W&B files in {folder}; send them with: wandb sync {folder}"
    return f"W&B run at {run.url}" if run.url else ""


def _id(run_id: str) -> str | None:
    """The run's id in the letters that W&B lets pass, or None to have one made."""
    return re.sub(r"[^\w\-]", "-", run_id, flags=re.ASCII)[:128] or None
