"""Who waits for whom: pure functions over the latest beats of a term's members, and the words for people."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.cluster.board import WAITING, Phase, Sight
from shoal.cluster.messages import Beat
from shoal.cluster.roster.terms import Process
from shoal.engines.activity import Call

_DOING = {
    Phase.STARTING: "starts",
    Phase.COMPUTE: "computes",
    Phase.EXCHANGE: "exchanges gradients",
    Phase.APPLY: "applies the update",
    Phase.RECOVER: "recovers",
    Phase.COPY: "copies the state",
    Phase.EVALUATE: "evaluates",
    Phase.CHECKPOINT: "saves a checkpoint",
    Phase.DONE: "is done",
}
_CALLS = {
    Phase.STARTING: "in what comes before the first step",
    Phase.COMPUTE: "in the forward and backward of step {next}",
    Phase.APPLY: "in what follows the exchange of step {next}",
    Phase.EVALUATE: "in the evaluation after step {step}",
    Phase.CHECKPOINT: "in the checkpoint after step {step}, or what follows it",
}
"""Phases in which code of the user's runs, or may run."""
_FETCHES = {Call.ITEM: "{source}[{item}]", Call.ITEMS: "{source}.__getitems__([{item}, …])", Call.COLLATE: "collate"}
_KNOWN = {int(phase) for phase in Phase}


def stalled(members: Sequence[Process], term: int, factor: float = 1.0) -> int | None:
    """The step at which all members wait for others, beyond `factor` times the least patience among them; else None."""
    beats = [member.beat for member in members]
    if not beats or any(beat is None or beat.term != term or beat.phase not in WAITING for beat in beats):
        return None
    heard = [beat for beat in beats if beat is not None]
    patience = factor * min(beat.patience for beat in heard)
    if len(heard) < 2 or any(beat.seconds <= patience for beat in heard):
        return None
    return max(beat.step for beat in heard)


def impatient(members: Sequence[Process], term: int) -> list[tuple[Process, list[Process]]]:
    """Members that wait beyond their patience, each with those that it waits for (which do not wait themselves)."""
    busy = [member for member in members if member.beat is None or member.beat.phase not in WAITING]
    waiting = [member for member in members if _waits_long(member.beat, term)]
    return [(member, busy) for member in waiting] if busy else []


def _waits_long(beat: Beat | None, term: int) -> bool:
    return beat is not None and beat.term == term and beat.phase in WAITING and beat.seconds > beat.patience


def place(process: Process, now: float) -> str:
    """Where a process is, in words: "worker-2 computes in step 8 (for 3.1 s)"."""
    beat = process.beat
    if beat is None:
        return f"{process.name} has not been heard of yet"
    phase = Phase(beat.phase) if beat.phase in _KNOWN else Phase.STARTING
    silent = max(0.0, now - process.suspicion.last) if process.suspicion.last is not None else 0.0
    text = f"{process.name} {doing(phase, beat.step)} (for {beat.seconds + silent:.1f} s)"
    return f"{text}, and has been silent for {silent:.1f} s" if silent > 1.0 else text


def doing(phase: Phase, step: int) -> str:
    """What a worker does, in words that follow its name: "computes in step 8"."""
    # an evaluation and a checkpoint belong to the steps that have been taken
    where = f"after step {step}" if phase in (Phase.EVALUATE, Phase.CHECKPOINT) else f"in step {step + 1}"
    return f"{_DOING[phase]} {where}"


def call_in_words(sight: Sight) -> str | None:
    """Which of the user's functions a worker is in, to follow its name and "is"; None if it is in none."""
    doing = sight.doing
    if doing.call is not Call.NONE:
        return "in " + _FETCHES[doing.call].format(source=doing.source, item=doing.item)
    words = _CALLS.get(sight.phase)
    return None if words is None else words.format(step=sight.step, next=sight.step + 1)


def waiting_text(waiter: Process, busy: Sequence[Process], now: float, *, replaces: bool = True) -> str:
    """Who waits for whom, since when, where, and what happens next."""
    beat = waiter.beat
    assert beat is not None
    whom = ", ".join(process.name for process in busy)
    places = "; ".join(place(process, now) for process in busy)
    lines = [
        f"{waiter.name} has waited {beat.seconds:.1f} s for {whom} in step {beat.step + 1} "
        f"(this run usually waits less than {beat.patience:.1f} s): {places}. "
        "Nobody is stopped for being slow: the step goes on once they are there"
        + (", and without them if their process ends or stands still." if replaces else ".")
    ]
    if beat.stack:
        lines.append(f"{waiter.name} waits here:\n{beat.stack.rstrip()}")
    return "\n".join(lines)


def stall_text(members: Sequence[Process], step: int) -> str:
    names = ", ".join(member.name for member in members)
    return (
        f"all workers ({names}) wait for each other in step {step + 1}: messages between some do not arrive, or "
        "this takes longer than anything before. They form a new group now, whoever cannot be reached is replaced, and "
        "the next time they wait twice as long."
    )
