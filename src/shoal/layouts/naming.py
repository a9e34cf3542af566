"""What is said of buffers that cannot be merged as they are."""

from __future__ import annotations

from shoal.layouts.counting import NEITHER, POINTER, SINGLE, Way


def name_counted(name: str, way: Way) -> str:
    """Of whole numbers; empty if there is nothing to say."""
    if way.kind == POINTER:
        return (
            f"the buffer {name!r} says where rows of another one are written: each forward of a step moves it from the "
            f"same place, and it moves by the mean of that. {_say(name, f'sum:modulo={way.rate}')} if it is to be "
            "where one process would have it, 'sum' if it is a count of samples that is as large by chance"
        )
    if way.kind == NEITHER:
        return (
            f"the buffer {name!r} moves neither alike in all forwards nor in proportion to their samples, so the mean "
            f"of their movements, which it moves by, may mean nothing. {_say(name, 'sum')} if movements belong "
            "together, 'concat' if rows are written, 'first' if any will do, 'mean' if that is meant"
        )
    if way.kind == SINGLE:
        return (
            f"the buffer {name!r} moves alike in forwards of one sample, so it may count samples or calls; it moves "
            f"once a step. {_say(name, 'sum')} if it counts samples, 'mean' if that is meant"
        )
    return ""


def name_looked(name: str, word: str) -> str:
    """Of floating-point numbers, for which this word would be right."""
    if word == "concat":
        return (
            f"forwards change some elements of the buffer {name!r} and leave others alone, and not always the same, so "
            f"the mean of what they make of it, which it becomes, may mean nothing. {_say(name, 'concat')} if they "
            "write rows one after the other (a queue), 'sum' if changes belong together, 'first' if any will do, "
            "'mean' if that is meant"
        )
    return (
        f"the buffer {name!r} holds sums over the samples of a forward, and becomes their mean over the forwards of a "
        f"step, which is smaller by their number. {_say(name, word)} if it is to be what one process would have, "
        "'mean' if that is meant"
    )


def _say(name: str, word: str) -> str:
    return f'Say buffers={{"{name}": "{word}"}} (docs/buffers.md)'
