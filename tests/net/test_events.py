"""What a run tells its callbacks, line by line: which events, in which order, with which facts.

The streams are in `events/`, one line for each event. What is on its way while training goes on (a checkpoint that is
being written, what was measured, with servers an evaluation) may be told early or late: it stands behind the last event
of its step. What has no step of its own (a change of members, a notice) stands at the end. Times, bytes, losses and
what workers tell of themselves meanwhile are left out.

After a change that is meant, `SHOAL_NET_WRITE=1 pytest tests/net/test_events.py` writes them anew: read the diff.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import shoal
from shoal.testing.reference import sample_order
from tests.net.recipe import Seen, killed, loss, own_loop, points, train

pytestmark = pytest.mark.timeout(60)
GOLDEN = Path(__file__).parent / "events"

IN_ORDER = (shoal.RunStarted, shoal.StepDone, shoal.EpochDone, shoal.EvalDone, shoal.RunEnded, shoal.RunFailed)
MEANWHILE: tuple[type[Any], ...] = (shoal.CheckpointSaved, shoal.ExchangeSettled)
EVALUATED_MEANWHILE = (*MEANWHILE, shoal.EvalDone)
"""With servers, which keep the weights of a step for it."""
WITHOUT_STEP = (shoal.Regrouped, shoal.Notice)

FACTS: dict[type[Any], Callable[[Any], dict[str, Any]]] = {
    shoal.RunStarted: lambda event: {
        name: getattr(event, name)
        for name in (
            "name",
            "workers",
            "total_steps",
            "steps_per_epoch",
            "samples_per_epoch",
            "batch_size",
            "parameters",
            "optimizers",
        )
    },
    shoal.StepDone: lambda event: {
        "epoch": event.epoch,
        "samples": event.samples,
        "rates": [float(f"{rate:.6g}") for rate in event.rates],
        "norm": "yes" if event.norm is not None else "no",
        "logs": list(event.logs),
    },
    shoal.EpochDone: lambda event: {"epoch": event.epoch},
    shoal.EvalDone: lambda event: {"epoch": event.epoch, "metrics": list(event.metrics)},
    shoal.CheckpointSaved: lambda event: {"folder": Path(event.path).name, "best": event.best},
    shoal.ExchangeSettled: lambda event: {
        "collective": event.collective,
        "reason": event.reason,
        "hosts": event.hosts,
        "codec": event.codec,
    },
    shoal.Regrouped: lambda event: {
        "term": event.term,
        "workers": event.workers,
        "joined": event.joined,
        "lost": event.lost,
    },
    shoal.Notice: lambda event: {"quiet": event.quiet, "text": event.text},
    shoal.RunEnded: lambda event: {"reason": event.reason, "metrics": list(event.metrics)},
    shoal.RunFailed: lambda event: {"worker": event.worker, "error": event.error},
}


def line(event: Any) -> str:
    facts = {} if isinstance(event, WITHOUT_STEP) else {"step": event.step}
    facts |= FACTS[type(event)](event)
    return " ".join([type(event).__name__, *(f"{name}={value}" for name, value in facts.items())])


def lines(events: list[Any], meanwhile: tuple[type[Any], ...] = MEANWHILE) -> list[str]:
    """The stream as it stands in its file."""
    stream = [event for event in events if isinstance(event, IN_ORDER) and not isinstance(event, meanwhile)]
    for event in (event for event in events if isinstance(event, meanwhile)):
        last = max(place for place, other in enumerate(stream) if other.step <= event.step and not _ends(other))
        stream.insert(last + 1, event)
    return [line(event) for event in [*stream, *(event for event in events if isinstance(event, WITHOUT_STEP))]]


def _ends(event: Any) -> bool:
    return isinstance(event, shoal.RunEnded | shoal.RunFailed)


def assert_told_in_time(events: list[Any]) -> None:
    """What belongs to a step is not told before it, and nothing comes before the start or after the end."""
    done = {0: 0} | {event.step: place for place, event in enumerate(events) if isinstance(event, shoal.StepDone)}
    assert all(
        done[event.step] <= place for place, event in enumerate(events) if isinstance(event, EVALUATED_MEANWHILE)
    )
    told = [event for event in events if not isinstance(event, shoal.Preparing)]
    assert isinstance(told[0], shoal.RunStarted) and _ends(told[-1]) and not any(map(_ends, told[:-1]))


def assert_golden(name: str, found: Iterable[str]) -> None:
    file, text = GOLDEN / f"{name}.txt", "".join(f"{each}\n" for each in found)
    if os.environ.get("SHOAL_NET_WRITE"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text.splitlines() == file.read_text(encoding="utf-8").splitlines()


def logged(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"loss": loss(model, batch), "first": batch[0][:, 0].mean()}


def stop_after_evaluation(event: Any) -> shoal.Stop | None:
    return shoal.Stop("enough") if isinstance(event, shoal.EvalDone) and event.step == 3 else None


RUNS: dict[str, dict[str, Any]] = {
    "allreduce": {"workers": 2, "checkpoint_every": 4, "loss": logged},
    "server": {"workers": 2, "checkpoint_every": 4, "loss": logged, "sync": "server"},
    "stopped": {"workers": 2, "callbacks": [stop_after_evaluation]},
}


@pytest.mark.parametrize("name", RUNS)
def test_calm_runs(name: str, tmp_path: Path) -> None:
    run = train(**RUNS[name], name="net", run_dir=tmp_path)
    assert_told_in_time(run.seen.events)
    assert_golden(name, lines(run.seen.events, EVALUATED_MEANWHILE if name == "server" else MEANWHILE))
    assert_all_samples(run.seen, run.result.samples)


def assert_all_samples(seen: Seen, samples: int) -> None:
    """In the end every worker tells how many it has computed: together they have all, and none twice."""
    last = {event.worker: event.samples for event in seen.of(shoal.WorkerSeen)}
    assert sorted(last) == [0, 1] and sum(last.values()) == samples


def test_an_own_loop(tmp_path: Path) -> None:
    seen = Seen()
    shoal.launch(own_loop, workers=2, seed=7, run_dir=tmp_path / "loop", checkpoint_every=4, callbacks=[seen])
    assert_told_in_time(seen.events)
    assert_golden("loop", lines(seen.events))
    assert_all_samples(seen, 330)


@pytest.mark.parametrize("sync", ["allreduce", "server"])
def test_a_worker_is_killed(sync: str, tmp_path: Path) -> None:
    """With as many workers as the run needs at least, it waits until another one is there."""
    run = killed(sync, workers=2, min_workers=2, checkpoint_every=4, name="net", run_dir=tmp_path)
    assert_told_in_time(run.seen.events)
    assert_golden(f"killed-{sync}", lines(run.seen.events, EVALUATED_MEANWHILE if sync == "server" else MEANWHILE))


def test_a_loss_fails(tmp_path: Path) -> None:
    """On the worker that has a certain sample of the second step, and so on no other."""
    fatal = points()[sample_order(110, seed=7)[60]][0]

    def failing(model: nn.Module, batch: Any) -> Tensor:
        if (batch[0] == fatal).all(1).any():
            raise LookupError("nothing there")
        return loss(model, batch)

    seen = Seen()
    with pytest.raises(shoal.WorkerError, match="LookupError: nothing there"):
        train(workers=2, loss=failing, name="net", run_dir=tmp_path, callbacks=[seen])
    assert_told_in_time(seen.events)
    assert_golden("failed", lines(seen.events))
    assert "in failing" in seen.events[-1].traceback
