"""What a display says of a run: the same in a terminal, a notebook and plain lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from shoal.core.events import EvalDone, ExchangeSettled, Preparing, RunEnded, RunStarted, ServersSeen
from shoal.monitor.display.tally import Shares, Tally, WorkerTally
from shoal.monitor.servers import servers_words
from shoal.monitor.traffic import settled_words
from shoal.monitor.wording import counted, one_line, percent, size

_MOST_FIGURES = 8
_MOST_NAME = 24


class Item(NamedTuple):
    """One figure with the words around it; `value` is what the eye should find."""

    before: str
    value: str
    after: str = ""

    @property
    def text(self) -> str:
        return f"{self.before}{self.value}{self.after}"


def started(event: RunStarted) -> str:
    workers = counted(event.workers, "worker")
    begins = f", from step {event.step}" if event.step else ""
    where = f" in {event.run_dir}" if event.run_dir else ""
    return f"{event.run_id or 'run'}: {event.total_steps} steps on {workers}{begins}{where}"


def evaluated(event: EvalDone, total: int) -> str:
    figures = "  ".join(f"{name} {value:.4g}" for name, value in event.metrics.items())
    return f"step {of(event.step, total)}  epoch {event.epoch + 1}  evaluation: {figures}"


def settled(event: ExchangeSettled) -> str:
    return f"exchange: {settled_words(event)}"


def served(event: ServersSeen) -> str:
    return f"servers: {servers_words(event)}"


def ended(event: RunEnded, total: int) -> str:
    return f"{event.reason} at step {of(event.step, total)}  loss {event.loss:.4g}"


def of(step: int, total: int) -> str:
    return f"{step}/{total}" if total > 0 else str(step)


def prepared(event: Preparing) -> str:
    """How far it is, as `120/720 MB`; empty if nothing is known."""
    unit = f" {event.unit}" if event.unit else ""
    if event.total > 0:
        return f"{min(event.done, event.total):.6g}/{event.total:.6g}{unit}"
    return f"{event.done:.6g}{unit}" if event.done else ""


def clock(seconds: float) -> str:
    """As `0:07`, `1:02:03` or `3 d 4 h`: a time that is redrawn as it passes keeps its shape."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours_of_day = divmod(hours, 24)
    if days:
        return f"{days} d {hours_of_day} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def rate(samples_per_second: float) -> str:
    """Whole samples, unless they are so few that this would say nothing."""
    return f"{samples_per_second:.0f}" if samples_per_second >= 10 else f"{samples_per_second:.2g}"


def shortened(text: str, most: int) -> str:
    text = one_line(text)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def title(tally: Tally) -> list[Item]:
    """What runs, and where it is."""
    run = tally.run
    if run is None:
        return []
    items = [Item("", shortened(run.run_id or "run", 40))]
    if run.name and run.name not in run.run_id:
        items.append(Item("", shortened(run.name, 40)))
    items.append(Item("", str(run.workers), " worker" if run.workers == 1 else " workers"))
    return items


def position(tally: Tally) -> list[Item]:
    items = [Item("step ", of(tally.step, tally.total))]
    if tally.last is not None:
        items.append(Item("epoch ", of(tally.last.epoch + 1, tally.epochs)))
    return items


def quality(tally: Tally) -> list[Item]:
    """Loss now and on the last step, and what the step logged."""
    if tally.last is None:
        return []
    items = [] if tally.loss is None else [Item("loss ", f"{tally.loss:.4g}")]
    return [*items, Item("last ", f"{tally.last.loss:.4g}"), *_figures(tally.last.logs)]


def evaluation(tally: Tally) -> list[Item]:
    done = tally.evaluation
    if done is None:
        return []
    return [Item("evaluation at step ", str(done.step), ":"), *_figures(done.metrics)]


def pace(tally: Tally) -> list[Item]:
    items = [] if tally.rate is None else [Item("", rate(tally.rate), " samples/s")]
    if tally.run is not None:
        items.append(Item("", clock(tally.elapsed), " elapsed"))
    if tally.stalled is not None:
        items.append(Item("no step for ", clock(tally.stalled)))
    elif tally.seconds_left is not None:
        items.append(Item("", clock(tally.seconds_left), " left"))
    return items


def shares(parts: Shares | None) -> list[Item]:
    if parts is None:
        return []
    names = ("compute ", "exchange ", "data wait ", "rest ")
    return [Item(name, percent(part)) for name, part in zip(names, parts, strict=True)]


def worker_items(worker: int, tally: WorkerTally) -> list[Item]:
    items = [Item("worker ", str(worker))]
    if tally.rate is not None:
        items.append(Item("", rate(tally.rate), " samples/s"))
    return [*items, *shares(tally.shares), Item("", size(tally.memory))]


def worker_rows(tally: Tally) -> Iterator[list[str]]:
    """Worker, samples/s, the four shares, memory; in order of workers."""
    for number, worker in sorted(tally.workers.items()):
        parts = worker.shares
        told = ["-"] * 4 if parts is None else [percent(part) for part in parts]
        yield [str(number), "-" if worker.rate is None else rate(worker.rate), *told, size(worker.memory)]


def joined(items: list[Item]) -> str:
    return "  ".join(item.text for item in items)


def _figures(values: Mapping[str, float]) -> list[Item]:
    items = [
        Item(f"{shortened(str(name), _MOST_NAME)} ", f"{value:.4g}")
        for name, value in list(values.items())[:_MOST_FIGURES]
    ]
    more = len(values) - _MOST_FIGURES
    return [*items, Item("and ", str(more), " more")] if more > 0 else items
