"""What the process of a server does, from its first moment to its last."""

from __future__ import annotations

import sys
from contextlib import suppress

import torch

from shoal.cluster.channel.channel import leave_sigterm_to_the_supervisor
from shoal.cluster.channel.messages import Failed, encode
from shoal.cluster.logs import EXIT_FAILED, begin_log, log_failure
from shoal.cluster.supervisor.failure import describe, whole_traceback
from shoal.core.seats import FIRST_SERVER
from shoal.engines.heap import keep_freed_memory
from shoal.engines.places import Place, enter
from shoal.syncs.server.serving import serve
from shoal.syncs.server.setup import Setup
from shoal.trainer.workers.start import Start
from shoal.wire.link import Link, LinkClosed


def be_server(number: int, link: Link, host: str, setup: Setup, start: Start, place: Place | None) -> None:
    leave_sigterm_to_the_supervisor()
    seat = FIRST_SERVER + number
    begin_log(start.logs, seat)
    torch.set_num_threads(1)
    keep_freed_memory()
    failed: Failed | None = None
    try:
        if place is not None:
            enter(place)
        serve(setup, number, link, host)
    except LinkClosed:
        return
    except BaseException as error:
        failed = describe(error)
        if start.logs is not None:
            log_failure(seat, whole_traceback(error))
    if failed is not None:
        with suppress(LinkClosed):
            link.send(encode(failed))
            while True:  # the supervisor ends this process, once it has heard
                link.recv()
        sys.exit(EXIT_FAILED)
