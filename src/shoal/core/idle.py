"""Workers that have nothing to do in any step: known before the first one."""

from __future__ import annotations

from shoal.core.atoms import MOST_ATOMS, SMALL_ATOM, Course
from shoal.core.slices import deal


def busy_workers(samples: int, workers: int, least: int, *, by_atom: bool = False) -> int:
    """How many of them compute something of a step of so many samples, each at least `least`."""
    return sum(bool(own) for own in deal(samples, workers, least=least, by_atom=by_atom))


def idle_words(course: Course, workers: int, most: int, least: int = 1, *, by_atom: bool = False) -> str:
    """What to say of workers that will have nothing to do, and what to set; empty if there are none.

    `most` is how many workers there may ever be.
    """
    full = min(course.batch, course.size)
    wanted = workers if busy_workers(full, workers, least, by_atom=by_atom) < workers else most
    busy = busy_workers(full, wanted, least, by_atom=by_atom)
    if busy == wanted:
        return ""
    idle = wanted - busy
    lead = f"{idle} of {wanted} workers {'has' if idle == 1 else 'have'} nothing to do"
    if wanted != workers:
        lead = f"with max_workers={most} up to {idle} of them would have nothing to do"
    ways = [f"{'workers' if wanted == workers else 'max_workers'}={busy}"]
    enough = _enough(full, wanted, least, by_atom=by_atom)
    if enough is not None and enough <= course.size:
        ways.insert(0, f"batch_size={enough} or more")
    return f"{lead}: {_why(course, busy, least, by_atom=by_atom)}; set {', or '.join(ways)}"


def _why(course: Course, busy: int, least: int, *, by_atom: bool) -> str:
    full = min(course.batch, course.size)
    if by_atom and busy < full:
        return f"with deterministic=True a step is shared out in {MOST_ATOMS} parts at most"
    samples = f"a step has {full} sample{'' if full == 1 else 's'}"
    samples += f" (batch_size={course.batch})" if full == course.batch else ", all that data= has"
    return samples if least == 1 else f"{samples}, and BatchNorm needs {least} of them on a worker"


def _enough(samples: int, workers: int, least: int, *, by_atom: bool) -> int | None:
    """The smallest step that is larger than this one, and of which all workers have some."""
    if not by_atom:
        return workers * least
    larger = range(samples + 1, MOST_ATOMS * SMALL_ATOM + 1)
    return next((each for each in larger if busy_workers(each, workers, 1, by_atom=True) == workers), None)
