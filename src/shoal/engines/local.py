"""The `local` engine: workers are processes of this machine, forked, without pickling.

    supervisor ──fork──▶ zygote ──fork──▶ worker 0, worker 1, ...
        ▲                                    │
        └───────── one link for each ────────┘

`LocalEngine.start` forks a zygote from the calling process (see `zygote`), which forks the workers, at once or later.
Each worker has a link to the supervisor. Whoever dies takes everything below with it, also by SIGKILL; a supervisor
whose crew has a grace leaves its workers that time to end by themselves.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.core.errors import ConfigError
from shoal.engines.crew import Crew, Ended, Message
from shoal.engines.zygote import EXIT_RAISED, Body

__all__ = ["EXIT_RAISED", "Body", "Crew", "Ended", "LocalEngine", "Message"]


class LocalEngine:
    """Starts workers on this machine."""

    def start(self, workers: int, body: Body, *, warm: Callable[[], None] | None = None, grace: float = 0.0) -> Crew:
        """Start `workers` processes that each run `body(rank, link, scratch)`; returns when all have been forked.

        `warm` runs once, before, in the process that the workers are forked from: the place for heavy imports. It
        must leave no threads behind. Neither it nor `body` is pickled. Both see memory as it was at this call.

        With `grace`, workers outlive a supervisor that is killed, for so many seconds at most: see `zygote`. Without,
        they end with it.

        May be called from any thread, and while other threads run: the children have only the thread that called.
        Raises ConfigError for a bad count and WorkerError if `warm` raises (with its traceback) or a process cannot be
        started; nothing is left behind then.
        """
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise ConfigError(f"workers={workers!r}: must be an integer of at least 1")
        return _started(workers, body, warm, grace)

    def open(
        self, body: Body, *, warm: Callable[[], None] | None = None, grace: float = 0.0, lasting: bool = False
    ) -> Crew:
        """Like `start`, for a crew without workers yet: `Crew.add` starts them one by one.

        `lasting`: it may outlive the call that makes it, so it keeps nothing open that is open now; what its processes
        need, they open themselves.
        """
        return _started(0, body, warm, grace, lasting)


def _started(workers: int, body: Body, warm: Callable[[], None] | None, grace: float, lasting: bool = False) -> Crew:
    crew = Crew(workers)
    try:
        crew._fork_zygote(body, warm, grace, lasting)
        crew._fill_seats()
    except BaseException:
        crew.close()
        raise
    return crew
