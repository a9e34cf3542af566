"""Workers that have nothing to do in any step: known before the first one."""

from __future__ import annotations

from shoal.core.atoms import MOST_ATOMS, SMALL_ATOM, Course, cut, share_atoms


def busy_workers(samples: int, workers: int, least: int) -> int:
    """How many of them compute something of a step of so many samples, each at least `least`."""
    return sum(bool(part) for part in share_atoms(cut(samples), workers, least))


def idle_words(course: Course, workers: int, most: int, least: int = 1) -> str:
    """What to say of workers that will have nothing to do, and what to set; empty if there are none.

    `most` is how many workers there may ever be.
    """
    full = min(course.batch, course.size)
    wanted = workers if busy_workers(full, workers, least) < workers else most
    busy = busy_workers(full, wanted, least)
    if busy == wanted:
        return ""
    idle = wanted - busy
    lead = f"{idle} of {wanted} workers {'has' if idle == 1 else 'have'} nothing to do"
    if wanted != workers:
        lead = f"with max_workers={most} up to {idle} of them would have nothing to do"
    ways = [f"{'workers' if wanted == workers else 'max_workers'}={busy}"]
    enough = _enough(full, wanted, least)
    if enough is not None and enough <= course.size:
        ways.insert(0, f"batch_size={enough} or more")
    return f"{lead}: {_why(course, busy, least)}; set {', or '.join(ways)}"


def _why(course: Course, busy: int, least: int) -> str:
    if busy == MOST_ATOMS:
        return f"a step is shared out in {MOST_ATOMS} parts at most"
    full = min(course.batch, course.size)
    samples = f"a step has {full} sample{'' if full == 1 else 's'}"
    samples += f" (batch_size={course.batch})" if full == course.batch else ", all that data= has"
    return samples if least == 1 else f"{samples}, and BatchNorm needs {least} of them on a worker"


def _enough(samples: int, workers: int, least: int) -> int | None:
    """The smallest step that is larger than this one, and of which all workers have some."""
    larger = range(samples + 1, MOST_ATOMS * SMALL_ATOM * least + 1)
    return next((each for each in larger if busy_workers(each, workers, least) == workers), None)
