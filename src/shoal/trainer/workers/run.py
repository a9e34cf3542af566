"""Running a function on every worker, here or where a launcher has put this process, and getting its values back."""

from __future__ import annotations

from typing import Any

from shoal.cluster.channel.channel import StopSignals
from shoal.cluster.elasticity import Elasticity
from shoal.cluster.supervisor.watch import Watcher
from shoal.core.errors import ConfigError
from shoal.core.spec import Local
from shoal.engines.places import read_lab
from shoal.trainer.workers.start import Body, Start, is_launched, is_spmd


def run(
    body: Body,
    start: Start,
    *,
    workers: int,
    engine: Local,
    watch: Watcher,
    signals: StopSignals | None = None,
    elasticity: Elasticity | None = None,
) -> list[Any]:
    """`body(session)` on every worker; what each returned, in order of its number.

    `elasticity` says how members may change where this process starts them; by default one that is lost is replaced.

    What `signals` ask for reaches the loop of the session; without them a signal does what it does anywhere.
    """
    if is_launched():
        if engine.lab:
            raise ConfigError(
                f"engine: lab={engine.lab!r} places workers that it forks, and a launcher has started this one; "
                "leave out the lab or the launcher"
            )
        # here, as elsewhere in this package: `from shoal import Trainer` must not take long
        from shoal.trainer.workers.spmd import run_here

        return run_here(body, start, workers, watch, signals)
    elasticity = elasticity or Elasticity(workers, 1, workers)
    if is_spmd(engine):
        from shoal.trainer.workers.scripted import run_scripted

        return run_scripted(body, start, elasticity, watch, signals)
    hosts = read_lab(engine.lab) if engine.lab else ()
    from shoal.trainer.workers.elastic import run_elastic

    return run_elastic(body, start, elasticity, watch, signals, hosts)
