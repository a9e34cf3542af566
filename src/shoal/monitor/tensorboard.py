"""TensorBoard: event files, written without TensorFlow or torch.

Trainer(..., callbacks=[TensorBoard("logs")])        then: tensorboard --logdir logs
"""

from __future__ import annotations

import io
import json
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.core.events import RunStarted
from shoal.monitor.figures import Point, facts
from shoal.monitor.tracking import Ending, Record, Text, Tracker, require

_EXTRA = "tensorboard"


class TensorBoard(Tracker):
    """Logs every run to a folder of its own, named by the run's id, in `folder`; without one, in the run's folder."""

    label = "TensorBoard"

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self._folder = None if folder is None else Path(folder).absolute()
        require("tensorboard.compat.proto.event_pb2", _EXTRA)
        require("tensorboard.summary.writer.record_writer", _EXTRA)

    def begin(self, started: RunStarted) -> Record:
        place = self._place(started)
        return _EventFile(place, started, look_at=place if self._folder is None else self._folder)

    def _place(self, started: RunStarted) -> Path:
        if self._folder is None and started.run_dir is not None:
            return Path(started.run_dir) / "tensorboard"
        name = started.run_id or time.strftime("run-%Y%m%d-%H%M%S")
        return (self._folder or Path("tensorboard").absolute()) / name


def _from_here(folder: Path) -> str:
    """As one would type it."""
    here = Path.cwd()
    return str(folder.relative_to(here)) if folder.is_relative_to(here) else str(folder)


class _EventFile:
    """One file of TensorBoard's records; a resumed run gets another one beside it."""

    def __init__(self, folder: Path, started: RunStarted, look_at: Path) -> None:
        shown = shlex.quote(_from_here(look_at))
        self.where = f"TensorBoard files in {shown}; look at them with: tensorboard --logdir {shown}"
        self._event = require("tensorboard.compat.proto.event_pb2", _EXTRA).Event
        self._summary = require("tensorboard.compat.proto.summary_pb2", _EXTRA).Summary
        folder.mkdir(parents=True, exist_ok=True)
        # the name that TensorBoard looks for; the process and the nanoseconds make it this file's alone
        name = f"events.out.tfevents.{int(time.time())}.{os.uname().nodename}.{os.getpid()}.{time.time_ns()}"
        writer = require("tensorboard.summary.writer.record_writer", _EXTRA).RecordWriter
        self._file = writer(io.BufferedWriter(io.FileIO(folder / name, "xb")))
        self._add(self._event(wall_time=started.time, file_version="brain.Event:2"))
        self._begin(started)
        self._file.flush()

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            values = [self._summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            self._add_values(point.step, point.time, values)
        self._file.flush()

    def write(self, text: Text) -> None:
        self._add_values(text.step, text.time, [self._text_value(text.name, text.text)])

    def finish(self, ending: Ending) -> None:
        try:
            status = "failed" if ending.failed else "finished"
            values = [self._text_value("status", f"{status}: {ending.reason}"), self._hparams_end(ending)]
            self._add_values(ending.step, ending.time, values)
        finally:
            self._file.close()

    def _begin(self, started: RunStarted) -> None:
        values = facts(started)
        listing = json.dumps(values, indent=2, default=str, ensure_ascii=False)
        # four spaces: TensorBoard renders Markdown
        text = "\n".join(f"    {line}" for line in listing.splitlines())
        start = self._hparams_start(values, started.time)
        self._add_values(started.step, started.time, [self._text_value("config", text), start])

    def _add_values(self, step: int, when: float, values: list[Any]) -> None:
        self._add(self._event(wall_time=when, step=step, summary=self._summary(value=values)))

    def _add(self, event: Any) -> None:
        self._file.write(event.SerializeToString())

    def _text_value(self, tag: str, text: str) -> Any:
        tensors = require("tensorboard.compat.proto.tensor_pb2", _EXTRA)
        types = require("tensorboard.compat.proto.types_pb2", _EXTRA)
        summaries = require("tensorboard.compat.proto.summary_pb2", _EXTRA)
        plugin = summaries.SummaryMetadata.PluginData(plugin_name="text")
        tensor = tensors.TensorProto(dtype=types.DT_STRING, string_val=[text.encode(errors="backslashreplace")])
        tensor.tensor_shape.dim.add(size=1)
        metadata = summaries.SummaryMetadata(plugin_data=plugin)
        return self._summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)

    def _hparams_start(self, values: dict[str, Any], when: float) -> Any:
        """What TensorBoard's table of runs shows of this one."""
        plugin_data = require("tensorboard.plugins.hparams.plugin_data_pb2", _EXTRA)
        start = plugin_data.SessionStartInfo(start_time_secs=when)
        for name, value in values.items():
            if isinstance(value, bool):
                start.hparams[name].bool_value = value
            elif isinstance(value, int | float):
                start.hparams[name].number_value = value
            elif value is not None:
                start.hparams[name].string_value = str(value)
        data = plugin_data.HParamsPluginData(session_start_info=start)
        return self._hparams_value("SESSION_START_INFO_TAG", data)

    def _hparams_end(self, ending: Ending) -> Any:
        plugin_data = require("tensorboard.plugins.hparams.plugin_data_pb2", _EXTRA)
        status = require("tensorboard.plugins.hparams.api_pb2", _EXTRA).Status
        value = status.Value("STATUS_FAILURE" if ending.failed else "STATUS_SUCCESS")
        end = plugin_data.SessionEndInfo(status=value, end_time_secs=ending.time)
        return self._hparams_value("SESSION_END_INFO_TAG", plugin_data.HParamsPluginData(session_end_info=end))

    def _hparams_value(self, tag: str, data: Any) -> Any:
        metadata = require("tensorboard.plugins.hparams.metadata", _EXTRA)
        return self._summary.Value(tag=getattr(metadata, tag), metadata=metadata.create_summary_metadata(data))
