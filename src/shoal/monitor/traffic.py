"""The traffic account of a run as a person reads it: the same on a display, in a report and from the command line.

Totals are over all workers and all starts of a run. Whatever is per step or per second is of the last start, as the
speed of a run is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from shoal.core.events import ExchangeSettled
from shoal.core.traffic import MEASUREMENT, Flow, Traffic, together
from shoal.monitor.wording import counted, figure, one_line, percent, size, span

if TYPE_CHECKING:
    from shoal.store.values import EventRow, RunInfo, WorkerRow

STEP_PARTS = ("compute", "exchange", "data")
"""What a worker's time in steps goes into."""
MOST_ROWS = 24
"""Of the table; the rest is added up in one more."""
_MOST_SIZES = 8
_COLLECTIVES = {"shm": "shared memory", "nccl": "NCCL"}


class Account(msgspec.Struct, frozen=True):
    """What a run sent, and what that took. False where nothing was sent between workers, or nothing is known of it."""

    total: Traffic = Traffic()
    """Of all workers and all starts."""
    since: Traffic = Traffic()
    """Of all workers since the last start."""
    workers: int = 0
    steps: int = 0
    """Since the last start."""
    seconds: float = 0.0
    """That all workers have spent in steps since the last start."""
    waited: float = 0.0
    """Of these, in exchange, as where their time went says."""
    settled: ExchangeSettled | None = None

    def __bool__(self) -> bool:
        return bool(self.total.flows)

    @property
    def exchange_per_step(self) -> float | None:
        """Seconds, the mean over workers. None where no group sums: what overlaps with computing is not known then."""
        return self.since.exchange / self._turns if self._turns and self.since.operations else None

    @property
    def exposed_per_step(self) -> float | None:
        """Seconds of a step, the mean over workers; what is exposed outside of steps is not in it."""
        return self.waited / self._turns if self._turns else None

    @property
    def operations_per_step(self) -> float | None:
        """Of one worker; all take part in each. None where there are none, as with servers."""
        return self.since.operations / self._turns if self._turns and self.since.operations else None

    @property
    def exposed_share(self) -> float | None:
        """Of the time in steps."""
        return self.waited / self.seconds if self.seconds > 0 else None

    @property
    def bytes_per_step(self) -> float | None:
        """Of all workers, without what was sent once to measure."""
        return (self.since.bytes - measured(self.since)) / self.steps if self.steps > 0 else None

    @property
    def frequency(self) -> float | None:
        """Operations in a second of steps."""
        return self.since.operations / self.seconds if self.seconds > 0 else None

    @property
    def bandwidth(self) -> float | None:
        """Bytes that a worker sent in a second of exchange."""
        return self.since.bandwidth or None

    @property
    def _turns(self) -> int:
        return self.workers * max(0, self.steps)

    def figures(self) -> dict[str, object]:
        """For programs: totals over all workers and starts, and what follows from the last start."""
        return {
            "flows": self.total.flows,
            "bytes": self.total.bytes,
            "messages": self.total.messages,
            "operations": self.total.operations,
            "exchange": self.total.exchange,
            "exposed": self.total.exposed,
            "bytes_per_step": self.bytes_per_step,
            "exchange_per_step": self.exchange_per_step,
            "exposed_per_step": self.exposed_per_step,
            "exposed_share": self.exposed_share,
            "operations_per_step": self.operations_per_step,
            "operations_per_second": self.frequency,
            "bandwidth": self.bandwidth,
            "settled": _known(self.settled) if self.settled is not None else None,
        }


def stored_account(run: RunInfo, workers: Sequence[WorkerRow], events: Sequence[EventRow]) -> Account:
    """Of a run in the store."""
    starts = [place for place, event in enumerate(events) if event.kind == "RunStarted"]
    begun = events[starts[-1]].step if starts else 0
    settled = [event for event in events[starts[-1] if starts else 0 :] if event.kind == "ExchangeSettled"]
    return Account(
        total=run.traffic,
        since=together([worker.traffic for worker in workers]),
        workers=len(workers),
        steps=run.step - begun,
        seconds=sum(step_seconds(worker.seconds) for worker in workers),
        waited=sum(worker.seconds.get("exchange", 0.0) for worker in workers),
        settled=_settled(settled[-1]) if settled else None,
    )


def _settled(row: EventRow) -> ExchangeSettled | None:
    try:
        return msgspec.convert({**row.data, "step": row.step, "time": row.time, "type": row.kind}, ExchangeSettled)
    except msgspec.ValidationError:  # of another version
        return None


def _known(settled: ExchangeSettled) -> dict[str, object]:
    """Its fields, None for what was not measured."""
    told: dict[str, object] = msgspec.to_builtins(settled)
    return told | {
        name: told[name] or None for name in ("latency", "bandwidth", "buckets", "encoding", "saved", "note")
    }


def measured(traffic: Traffic) -> int:
    """Bytes that were sent once, to find out what sums cost."""
    return sum(flow.bytes for flow in traffic.flows if flow.kind == MEASUREMENT)


def step_seconds(seconds: Mapping[str, float]) -> float:
    """Of a worker's time, what it spent in steps."""
    return sum(seconds.get(part, 0.0) for part in STEP_PARTS)


TITLES = ("kind", "codec", "link", "bytes", "messages", "per step")


def flow_rows(account: Account) -> list[tuple[str, ...]]:
    """A table under `TITLES`: what was sent, the most first. Bytes per step are of the last start, all workers;
    what was sent once to measure has none."""
    recent = {_sort(flow): flow.bytes for flow in account.since.flows if flow.kind != MEASUREMENT}
    flows = sorted(account.total.flows, key=lambda flow: -flow.bytes)
    table = [_row(flow, recent.get(_sort(flow), 0), account.steps) for flow in flows[:MOST_ROWS]]
    rest = flows[MOST_ROWS:]
    if rest:
        sizes, messages = sum(flow.bytes for flow in rest), sum(flow.messages for flow in rest)
        later = sum(recent.get(_sort(flow), 0) for flow in rest)
        table.append(_row(Flow("others", "", "", sizes, messages), later, account.steps))
    return table


def _sort(flow: Flow) -> tuple[str, str, str]:
    return flow.kind, flow.codec, flow.link


def _row(flow: Flow, recent: int, steps: int) -> tuple[str, ...]:
    each = size(recent / steps) if steps > 0 and recent else ""
    return one_line(flow.kind), one_line(flow.codec), one_line(flow.link), size(flow.bytes), f"{flow.messages:,}", each


def exchange_facts(account: Account) -> list[tuple[str, str]]:
    """Names and values; what is not known is left out."""
    told = [
        ("operations", _operations(account)),
        ("exchange", _times(account.exchange_per_step, account.total.exchange)),
        ("exposed", _times(account.exposed_per_step, account.total.exposed, account.exposed_share)),
        ("bandwidth", _bandwidth(account)),
    ]
    settled = account.settled
    if settled is not None:
        told += [
            ("latency", f"{span(settled.latency)} for the smallest sum" if settled.latency > 0 else ""),
            ("collective", "; ".join(filter(None, [collective(settled), one_line(settled.reason)]))),
            ("hosts", hosts(settled.hosts)),
            ("buckets", buckets(settled.buckets)),
            ("codec", codec_words(settled)),
        ]
    return [(name, value) for name, value in told if value]


def _operations(account: Account) -> str:
    if account.operations_per_step is None or account.frequency is None:
        return figure(account.total.operations) if account.total.operations else ""
    return f"{figure(account.operations_per_step)} per step, {figure(account.frequency)} per second"


def _times(each: float | None, total: float, share: float | None = None) -> str:
    words = [] if each is None else [f"{span(each)} per step"]
    if each is not None and share is not None:
        words[0] += f" ({percent(share)} of step time)"
    return ", ".join([*words, *([f"{span(total)} over all workers"] if total else [])])


def _bandwidth(account: Account) -> str:
    words = [f"{size(account.bandwidth)}/s while a worker exchanged"] if account.bandwidth else []
    if account.settled is not None and account.settled.bandwidth > 0:
        words.append(f"{size(account.settled.bandwidth)}/s summed in the first steps")
    return ", ".join(words)


def collective(settled: ExchangeSettled) -> str:
    """Its name in words."""
    return _COLLECTIVES.get(settled.collective, one_line(settled.collective))


def hosts(numbers: Sequence[int]) -> str:
    """How many, and how many workers each has: "2, with 2 workers each"."""
    if not numbers:
        return ""
    sizes = sorted(Counter(numbers).values())
    if len(sizes) == 1:
        return f"1, with {counted(sizes[0], 'worker')}"
    if sizes[0] == sizes[-1]:
        return f"{len(sizes)}, with {counted(sizes[0], 'worker')} each"
    return f"{len(sizes)}, with {sizes[0]} to {sizes[-1]} workers each"


def buckets(sizes: Sequence[int]) -> str:
    """How many, and how large: each size where there are few of them, else the least and the largest."""
    if not sizes:
        return ""
    if len(sizes) <= _MOST_SIZES:
        each = ", ".join(map(size, sizes))
        return each if len(sizes) == 1 else f"{len(sizes)}: {each}"
    return f"{len(sizes)} of {size(min(sizes))} to {size(max(sizes))}, {size(sum(sizes))} in all"


def codec_words(settled: ExchangeSettled) -> str:
    """What a codec costs and saves: "int8: encode 9 ms, saves 3 ms at 8.6 Gbit/s: use none", or "int8, 9.0 ms per step
    to encode" where there is no note. Empty where nothing is encoded, unless there is a note on that."""
    name, note = one_line(settled.codec), one_line(settled.note)
    if note:
        return f"{name}: {note}"
    if settled.codec == "none":
        return ""
    cost = f"{span(settled.encoding)} per step to encode" if settled.encoding > 0 else ""
    gain = f"saves {span(settled.saved)}" if settled.saved > 0 else ""
    return ", ".join(filter(None, [name, cost, gain]))


def settled_words(event: ExchangeSettled) -> str:
    """In one line: "shared memory, 12 buckets of up to 4.0 MiB, latency 11 µs, 5.4 GiB/s; all workers on one host"."""
    number = len(set(event.hosts))
    words = [
        collective(event) + (f" on {number} hosts" if number > 1 else ""),
        _up_to(event.buckets),
        f"latency {span(event.latency)}" if event.latency > 0 else "",
        f"{size(event.bandwidth)}/s" if event.bandwidth > 0 else "",
    ]
    return "; ".join(filter(None, [", ".join(filter(None, words)), one_line(event.reason), _codec_phrase(event)]))


def _codec_phrase(settled: ExchangeSettled) -> str:
    told = codec_words(settled)
    return f"codec {told}" if told else ""


def _up_to(sizes: Sequence[int]) -> str:
    if not sizes:
        return ""
    many = f"{counted(len(sizes), 'bucket')} of"
    return f"{many} {size(max(sizes))}" if min(sizes) == max(sizes) else f"{many} up to {size(max(sizes))}"


def exchange_words(account: Account) -> str:
    """What exchange cost a step, and how it was done, in one line."""
    each, exposed, share = account.exchange_per_step, account.exposed_per_step, account.exposed_share
    words = []
    if exposed is not None and (each is not None or exposed):
        of_step = f" ({percent(share)} of step time)" if share is not None else ""
        told = f"{span(exposed)} per step exposed"
        if each is not None:
            told = f"{span(each)} per step, {span(exposed)} of it exposed"
        words.append(f"{told}{of_step}")
    if account.bandwidth:
        words.append(f"{size(account.bandwidth)}/s")
    if account.settled is not None:
        words.append(_settled_briefly(account.settled))
    return " · ".join(words)


def _settled_briefly(settled: ExchangeSettled) -> str:
    """The collective and its buckets; where nothing was measured, all that is known."""
    if not settled.buckets:
        return settled_words(settled)
    return "; ".join(filter(None, [f"{collective(settled)}, {_up_to(settled.buckets)}", _codec_phrase(settled)]))


def sent_words(account: Account, most: int = 3) -> str:
    """By kind and link, the most first: "gradient 12.6 GiB (memory), state 1.0 MiB (network)"; the rest is counted."""
    sums: dict[tuple[str, str], int] = {}
    for flow in account.total.flows:
        place = one_line(flow.kind), one_line(flow.link)
        sums[place] = sums.get(place, 0) + flow.bytes
    largest = sorted(sums.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{kind} {size(amount)} ({link})" for (kind, link), amount in largest[:most])
    return f"{shown} and {len(largest) - most} more" if len(largest) > most else shown
