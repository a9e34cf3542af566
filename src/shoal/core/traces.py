"""Tracebacks for people: their own code's frames, and the line where it happened."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

from shoal.core.errors import ShoalError

_OURS = str(Path(__file__).parent.parent) + os.sep
_INSTALLED = tuple({sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")})
_ZYGOTE = f"{_OURS}engines{os.sep}zygote.py"
_MOST_FRAMES = 20
_DUMPED = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_ESCAPED = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")
_CALLS = ("_call_impl", "_wrapped_call_impl")
"""torch's frames between a module's call and its forward: two for every module, and never the cause."""


def own_traceback(error: BaseException) -> str:
    """The traceback without Shoal's frames. Where Shoal only wraps an error of the user's code, that one's."""
    if isinstance(error, ShoalError):
        if error.worker_traceback is not None:
            return error.worker_traceback.rstrip()
        if error.__cause__ is not None:
            error = error.__cause__
    told = traceback.TracebackException.from_exception(error)
    drop_own_frames(told)
    return "".join(told.format()).rstrip()


def stack_of(frame: FrameType) -> str:
    """Where a thread is, innermost last, without the frames of how its process was started."""
    frames = traceback.extract_stack(frame)
    began = [at for at, entry in enumerate(frames) if entry.filename == _ZYGOTE]
    return "".join(traceback.format_list(frames[began[-1] + 1 if began else 0 :][-_MOST_FRAMES:])).rstrip()


def dumped_stack(text: str) -> str:
    """What `faulthandler` wrote of one thread, as people know it: innermost last, with lines of the source.

    Without Shoal's frames, unless there are no others, and those of how the process was started. "" if it is no stack.
    """
    found = [(_unescaped(name), int(line), function) for name, line, function in _DUMPED.findall(text)]
    return _told([traceback.FrameSummary(*place) for place in reversed(found)])


def own_stack(frame: FrameType) -> str:
    """Where a thread of this process is, in the same form."""
    return _told(traceback.extract_stack(frame))


def _told(frames: list[traceback.FrameSummary]) -> str:
    began = [at for at, frame in enumerate(frames) if frame.filename == _ZYGOTE]
    frames = frames[began[-1] + 1 if began else 0 :]
    theirs = [frame for frame in frames if not _is_noise(frame)]
    return "".join(traceback.format_list((theirs or frames)[-_MOST_FRAMES:])).rstrip()


def _unescaped(name: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[0][2:], 16)), name)


def drop_own_frames(told: traceback.TracebackException) -> None:
    """Leave out the frames of Shoal, and those of torch between a module's call and its forward."""
    for part in _chain(told):
        frames = [frame for frame in part.stack if not _is_noise(frame)]
        part.stack = traceback.StackSummary.from_list(frames)


def trimmed(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without Shoal's frames, if it leads through them into the user's code; else as it is."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    names = [frame.tb_frame.f_code.co_filename for frame in frames]
    ours = [at for at, name in enumerate(names) if name.startswith(_OURS)]
    theirs = [at for at, name in enumerate(names) if not name.startswith((_OURS, "<frozen", *_INSTALLED))]
    if not ours or not theirs or theirs[-1] < ours[0]:
        return frames[0] if frames else None
    kept = None
    for at in reversed(range(len(frames))):
        if at not in ours:
            kept = TracebackType(kept, frames[at].tb_frame, frames[at].tb_lasti, frames[at].tb_lineno)
    return kept


def _chain(told: traceback.TracebackException | None) -> Iterator[traceback.TracebackException]:
    if told is not None:
        yield told
        yield from _chain(told.__cause__)
        yield from _chain(told.__context__)
        for part in told.exceptions or ():
            yield from _chain(part)


def _is_noise(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_OURS) or frame.name in _CALLS


def place_of(error: BaseException) -> str:
    """The line of the user's own code where it happened, such as `train.py:12 in __getitem__`; "" if there is none."""
    if isinstance(error, ShoalError):
        if error.place:
            return error.place
        error = error.__cause__ or error
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        name = frame.filename
        if not name.startswith((_OURS, "<frozen", *_INSTALLED)):
            path = Path(name)
            if path.is_relative_to(Path.cwd()):
                path = path.relative_to(Path.cwd())
            return f"{path}:{frame.lineno} in {frame.name}"
    return ""
