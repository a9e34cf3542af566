"""The servers of a run with `sync="server"` as a person reads of them: the same on a display, in a report and from the
command line. Whatever they have done is since the last start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from shoal.core.errors import ConfigError
from shoal.core.events import ServersSeen
from shoal.core.settings import Setting
from shoal.core.spec import AllReduce, Server, parse
from shoal.monitor.wording import NOTHING, counted, figure, one_line, percent, size, span

if TYPE_CHECKING:
    from shoal.store.values import EventRow

SERVER_TITLES = ("server", "shards", "weights", "copies", "pushes", "repeated", "received", "sent", "applying")
MEMORY = "shared memory"
"""Stands where no gradient or weight went over sockets although there were pushes."""
MOST_PLACES = 10
"""Of the histogram of staleness; the rest is added up in the last."""
_LETTERS = 4096
"""Bytes for each push that servers and workers on one host may say to each other: more are gradients or rows."""


def stored_servers(events: Sequence[EventRow]) -> ServersSeen | None:
    """What the servers told last, since the last start; None for a run without servers."""
    starts = [place for place, event in enumerate(events) if event.kind == "RunStarted"]
    told = [event for event in events[starts[-1] if starts else 0 :] if event.kind == "ServersSeen"]
    if not told:
        return None
    try:
        return msgspec.convert({**told[-1].data, "type": "ServersSeen", "step": told[-1].step}, ServersSeen)
    except msgspec.ValidationError:
        return None


def on_one_host(config: Mapping[str, Setting]) -> bool:
    """Whether all processes of a run were there; False where that is not known."""
    setting = config.get("engine")
    try:
        return setting is not None and not parse("engine", setting.value).lab
    except ConfigError:
        return False


def server_rows(seen: ServersSeen, *, near: bool) -> list[tuple[str, ...]]:
    """Cells under `SERVER_TITLES`, in order of servers. `near`: all is on one host, where only letters leave memory."""
    rows: list[tuple[str, ...]] = []
    pushes = max((facts.pushes for facts in seen.servers), default=0) + 1
    for facts in sorted(seen.servers, key=lambda facts: facts.number):
        moved = facts.received, facts.sent
        far = [each > _LETTERS * pushes if near else any(moved) for each in moved]
        inside = MEMORY if facts.pushes or facts.mirrored else NOTHING
        rows.append(
            (
                str(facts.number),
                f"{facts.shards:,}",
                size(facts.bytes),
                f"{facts.mirrored:,}",
                f"{facts.pushes:,}",
                f"{facts.repeated:,}",
                *(size(each) if told else inside for each, told in zip(moved, far, strict=True)),
                span(facts.seconds),
            )
        )
    return rows


def server_facts(seen: ServersSeen) -> list[tuple[str, str]]:
    """What is said of all servers together; what is not known is left out."""
    mean = mean_staleness(seen)
    facts = [
        ("staleness", staleness_words(seen)),
        ("mean staleness", "" if mean is None else f"{figure(mean)} steps"),
        ("replaced", f"{counted(seen.replaced, 'server')} that had died" if seen.replaced else ""),
    ]
    return [(name, words) for name, words in facts if words]


def mean_staleness(seen: ServersSeen) -> float | None:
    """Steps that the weights lacked with which a gradient was computed; None before the first push."""
    total = sum(seen.staleness)
    return sum(lacked * count for lacked, count in enumerate(seen.staleness)) / total if total > 0 else None


def staleness_shares(seen: ServersSeen) -> list[tuple[str, float]]:
    """How many steps were lacking, and for what share of the gradients: up to the largest that there was."""
    counts, total = seen.staleness, sum(seen.staleness)
    if total <= 0:
        return []
    kept = [*counts[: MOST_PLACES - 1], sum(counts[MOST_PLACES - 1 :])] if len(counts) > MOST_PLACES else counts
    last = max(lacked for lacked, count in enumerate(kept) if count)
    beyond = " or more" if last == len(kept) - 1 and len(counts) > MOST_PLACES else ""
    return [(f"{lacked}{beyond if lacked == last else ''}", kept[lacked] / total) for lacked in range(last + 1)]


def staleness_words(seen: ServersSeen) -> str:
    """In one line: "gradients computed with weights that lacked 0 steps: 96%, 1: 3%, 2: 1%"."""
    (first, *rest) = staleness_shares(seen) or [("", 0.0)]
    if not first[0]:
        return ""
    more = "".join(f", {lacked}: {percent(share)}" for lacked, share in rest)
    return f"gradients computed with weights that lacked {first[0]} steps: {percent(first[1])}{more}"


def servers_words(seen: ServersSeen) -> str:
    """In one line: "2 servers, gradients lacked 0.05 steps on average, 1 replaced".

    Where one server has all weights, another process has the copies; and of a small model there may be none for some.
    """
    mean = mean_staleness(seen)
    keepers = sum(not facts.shards and facts.mirrored > 0 for facts in seen.servers)
    idle = sum(not facts.shards and not facts.mirrored for facts in seen.servers)
    words = [
        counted(len(seen.servers) - keepers - idle, "server"),
        f"{keepers:,} for copies" if keepers else "",
        f"{idle:,} with nothing to hold" if idle else "",
        "" if mean is None else f"gradients lacked {figure(mean)} steps on average",
        f"{seen.replaced:,} replaced" if seen.replaced else "",
    ]
    return ", ".join(filter(None, words))


def sync_of(config: Mapping[str, Setting]) -> AllReduce | Server | None:
    """How the workers of a run agreed; None where that is not known."""
    setting = config.get("sync")
    try:
        found: AllReduce | Server | None = None if setting is None else parse("sync", setting.value)
    except ConfigError:
        return None
    return found


def sync_words(config: Mapping[str, Setting]) -> str:
    """In a few words: "ssp (staleness 4) on 2 servers", "allreduce"; as it was written where it cannot be read."""
    sync = sync_of(config)
    if sync is None:
        return one_line(str(config["sync"].value)) if "sync" in config else ""
    if isinstance(sync, AllReduce):
        return sync.name
    mode = f"ssp (staleness {sync.staleness})" if sync.mode == "ssp" else sync.mode
    arrival = ", applied on arrival" if sync.apply == "arrival" else ""
    return f"{mode} on {counted(sync.servers, 'server')}{arrival}{', damped' if sync.damp else ''}"
