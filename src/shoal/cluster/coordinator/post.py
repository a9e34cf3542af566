"""Who writes to the coordinator, from where, and whether a letter was there before."""

from __future__ import annotations

from collections import OrderedDict

WINDOW = 4096
"""Numbers of a life, back from the highest one, that are known one by one. Those before count as repeated."""
MOST_LIVES = 8192
_MASK = (1 << WINDOW) - 1


class Window:
    """The numbers of one life that have been seen. They may come a little out of order: a worker has two sockets."""

    __slots__ = ("_highest", "_seen")

    def __init__(self) -> None:
        self._highest = -1
        self._seen = 0  # bit i: the number that is i below the highest

    def fresh(self, number: int) -> bool:
        """Whether this number is new; it is not from now on."""
        ahead = number - self._highest
        if ahead > 0:
            self._seen = (self._seen << ahead if ahead < WINDOW else 0) & _MASK | 1
            self._highest = number
            return True
        if -ahead >= WINDOW or self._seen >> -ahead & 1:
            return False
        self._seen |= 1 << -ahead
        return True


class Post:
    """Where each name is answered, and which letters are repetitions. Pure."""

    def __init__(self) -> None:
        self._windows: OrderedDict[tuple[str, int], Window] = OrderedDict()
        self._routes: dict[str, tuple[int, bytes]] = {}
        """The newest life of each name, and the socket of its last control letter."""

    def fresh(self, name: str, life: int, number: int) -> bool:
        """Whether the letter with this number is the first of its kind."""
        window = self._windows.get((name, life))
        if window is None:
            window = self._windows[name, life] = Window()
            if len(self._windows) > MOST_LIVES:
                self._windows.popitem(last=False)
        self._windows.move_to_end((name, life))
        return window.fresh(number)

    def knows(self, name: str, life: int) -> bool:
        return (name, life) in self._windows

    def came(self, name: str, life: int, peer: bytes, newcomer: bool) -> None:
        """A control letter has come. A life that was not known before takes the name over; older ones do not."""
        route = self._routes.get(name)
        if newcomer or route is None or route[0] == life:
            self._routes[name] = (life, peer)

    def route(self, name: str) -> bytes | None:
        """The socket of the newest process of that name."""
        route = self._routes.get(name)
        return None if route is None else route[1]
