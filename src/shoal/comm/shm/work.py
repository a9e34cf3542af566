"""What an operation in shared memory is made of: a sum under way, and the guard of those that cannot be half done."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

from shoal.comm.shm.plan import Plan
from shoal.comm.shm.shared import Shared
from shoal.core.errors import ConfigError, GroupError


class _Finishes(Protocol):
    def _finish(self, work: Sum) -> None: ...


class _Member(Protocol):
    _shared: Shared


class Sum:
    """A sum under way: its work. It goes through the group's stages, one after the other."""

    def __init__(self, group: _Finishes, number: int, plan: Plan, kind: str) -> None:
        self._group = group
        self.number = number
        self.plan = plan
        self.kind = kind
        self.heard = 0
        """Members that have been heard in the stage that it is in."""
        self.complete = False

    def wait(self) -> None:
        self._group._finish(self)


Stage = Callable[[Sum, bool], bool]
"""Takes a sum a stage further: whether that is done. With True it waits until it is."""

_Method = TypeVar("_Method", bound=Callable[..., Any])


def whole_or_broken(method: _Method) -> _Method:
    """An operation that something interrupts (a signal handler that raises) is half done, and cannot be done again."""

    @wraps(method)
    def guarded(self: _Member, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except (GroupError, ConfigError):
            raise
        except BaseException as error:
            shared = self._shared
            shared.give_up(f"{type(error).__name__} interrupted an operation of {shared.name(shared.rank)}")
            raise

    return cast(_Method, guarded)
