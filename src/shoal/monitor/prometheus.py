"""A page for Prometheus to read: http://127.0.0.1:PORT/metrics.

Trainer(..., callbacks=[Prometheus(9100)])
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from importlib import metadata
from typing import Self

from shoal.core.errors import ConfigError
from shoal.core.events import (
    AnyEvent,
    CheckpointSaved,
    EvalDone,
    RunEnded,
    RunFailed,
    RunStarted,
    ServersSeen,
    StepDone,
    WorkerSeen,
)
from shoal.core.traffic import together
from shoal.monitor.exposition import CONTENT_TYPE, Family, render
from shoal.monitor.figures import Speed
from shoal.monitor.scrape import Reply, ScrapeServer
from shoal.monitor.servers import mean_staleness
from shoal.monitor.tracking import print_line

_MOST_KEY = 1024
_NAMELESS = "shoal: metrics are at /metrics\n"


class Prometheus:
    """Serves the newest figures of a run over HTTP, from the start of the first run until `close()`.

    port: 0 takes a free one; `.port` is the one bound, once a run has started. host: others than this machine can read
    only with a `key`, which they send as `Authorization: Bearer KEY`. The key crosses the network as it is: put TLS
    before it where the network is not trusted.

    Raises ConfigError when made if an argument is wrong or the port is taken. A call never raises: if the port is lost
    by the time the run starts, `warn` is told and the run goes on without. Called from one thread.
    """

    def __init__(self, port: int, *, host: str = "127.0.0.1", key: str | None = None) -> None:
        _check(port, host, key)
        self.port = port
        self.host = host
        self.warn: Callable[[str], None] = print_line
        self.say: Callable[[str], None] = print_line
        """Told in one line where the metrics are, when the first run starts."""
        self._key = None if key is None else key.encode()
        self._page = Page()
        self._server: ScrapeServer | None = None
        self._probe()

    def __call__(self, event: AnyEvent) -> None:
        self._page.take(event)
        if isinstance(event, RunStarted) and self._server is None:
            self._start()

    def close(self) -> None:
        """Free the port. Waits for answers in progress, seconds at most."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _probe(self) -> None:
        """Find out early that the port cannot be had. It is given back: workers are forked before it is used."""
        family = _family(self.host)
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((self.host, self.port))
        except OSError as error:
            raise ConfigError(
                f"port={self.port} on host={self.host!r} cannot be used for metrics ({error.strerror or error}); "
                "use another port, or 0 for a free one"
            ) from error

    def _start(self) -> None:
        try:
            self._server = ScrapeServer(self.host, self.port, self._answer, family=_family(self.host))
        except OSError as error:
            self.warn(f"Prometheus: port {self.port}: {error.strerror or error}; the run goes on without it")
            return
        self.port = self._server.port
        host = f"[{self.host}]" if ":" in self.host else self.host
        self.say(f"metrics at http://{host}:{self.port}/metrics{' with a key' if self._key is not None else ''}")

    def _answer(self, path: str, authorization: str) -> Reply:
        """Called in the threads of the server."""
        if self._key is not None and not self._knows_key(authorization):
            return Reply(HTTPStatus.UNAUTHORIZED, "the key is missing or wrong\n", challenge="Bearer")
        if path == "/metrics":
            return Reply(HTTPStatus.OK, self._page.render(), content_type=CONTENT_TYPE)
        if path == "/":
            return Reply(HTTPStatus.OK, _NAMELESS)
        return Reply(HTTPStatus.NOT_FOUND, "metrics are at /metrics\n")

    def _knows_key(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        # header bytes come decoded as latin-1
        same = hmac.compare_digest(given.strip().encode("latin-1", "replace"), self._key or b"")
        return scheme.lower() == "bearer" and same


def _check(port: object, host: str, key: str | None) -> None:
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise ConfigError(f"port={port!r}: use a whole number from 0 (a free port) to 65535")
    if key is not None and not (0 < len(key) <= _MOST_KEY and key.isascii() and key.isprintable() and " " not in key):
        # not shown: it may be a real key with a slip in it
        raise ConfigError(f"key= must be 1 to {_MOST_KEY} printable ASCII characters without spaces")
    if key is None and not _is_loopback(host):
        raise ConfigError(
            f"host={host!r} lets other machines read the metrics; give key=, or leave host out for this machine alone"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class Page:
    """The figures of the newest run. `take` is called in one thread, `render` in any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._started: RunStarted | None = None
        self._running = False
        self._step = 0
        self._steps = 0
        self._samples = 0
        self._last: StepDone | None = None
        self._speed = Speed()
        self._eval: dict[str, float] = {}
        self._workers: dict[int, WorkerSeen] = {}
        self._servers: ServersSeen | None = None
        self._checkpoint: int | None = None

    def take(self, event: AnyEvent) -> None:
        with self._lock:
            self._take(event)

    def _take(self, event: AnyEvent) -> None:
        if isinstance(event, StepDone):
            self._step, self._last = event.step, event
            self._steps += 1
            self._samples += event.samples
            self._speed.add(event)
        elif isinstance(event, RunStarted):
            self._reset()
            self._started, self._running, self._step = event, True, event.step
        elif isinstance(event, EvalDone):
            self._eval = dict(event.metrics)
        elif isinstance(event, WorkerSeen):
            self._workers[event.worker] = event
        elif isinstance(event, ServersSeen):
            self._servers = event
        elif isinstance(event, CheckpointSaved):
            self._checkpoint = event.step
        elif isinstance(event, RunEnded | RunFailed):
            self._running = False

    def render(self) -> str:
        with self._lock:
            told = [self._run(), self._training(), self._of_workers(), self._traffic(), self._of_servers()]
            families = [family for part in told for family in part]
        return render(families)

    def _run(self) -> list[Family]:
        up = Family("shoal_up", "gauge", "1 while a run is in progress, else 0.").add(self._running)
        if self._started is None:
            return [up]
        info = Family("shoal_run_info", "gauge", "The run that the figures are of; always 1.")
        info.add(1, run=self._started.run_id, name=self._started.name, version=_version())
        planned = Family("shoal_planned_steps", "gauge", "Steps of the whole run.").add(self._started.total_steps)
        return [up, info, planned]

    def _training(self) -> list[Family]:
        step = Family("shoal_step", "gauge", "Committed steps of the run, those before it was resumed included.")
        steps = Family("shoal_steps_total", "counter", "Steps done since the run started or resumed.")
        samples = Family("shoal_samples_total", "counter", "Samples trained on since the run started or resumed.")
        loss = Family("shoal_loss", "gauge", "Loss of the last step, the mean over its batch.")
        rate = Family("shoal_learning_rate", "gauge", "Learning rate of the last step, of the first parameter group.")
        speed = Family("shoal_samples_per_second", "gauge", "Samples per second over the last seconds.")
        evaluation = Family("shoal_eval", "gauge", "What the last evaluation found.")
        checkpoint = Family("shoal_checkpoint_step", "gauge", "Step of the newest checkpoint.")
        if self._started is not None:
            step.add(self._step)
            steps.add(self._steps)
            samples.add(self._samples)
        if self._last is not None:
            loss.add(self._last.loss)
            for value in self._last.rates[:1]:
                rate.add(value)
        if self._speed.value is not None:
            speed.add(self._speed.value)
        if self._checkpoint is not None:
            checkpoint.add(self._checkpoint)
        for name, value in self._eval.items():
            evaluation.add(value, metric=name)
        return [step, steps, samples, loss, rate, speed, evaluation, checkpoint]

    def _of_workers(self) -> list[Family]:
        seconds = Family("shoal_worker_seconds_total", "counter", "Where a worker's time went.")
        memory = Family("shoal_worker_memory_bytes", "gauge", "Resident memory of a worker.")
        sent = Family("shoal_worker_bytes_sent_total", "counter", "Bytes that a worker has sent to others.")
        for worker, seen in sorted(self._workers.items()):
            for part, value in seen.seconds.items():
                seconds.add(value, worker=str(worker), part=part)
            memory.add(seen.memory, worker=str(worker))
            sent.add(seen.bytes_sent, worker=str(worker))
        return [seconds, memory, sent]

    def _traffic(self) -> list[Family]:
        sent = Family("shoal_sent_bytes_total", "counter", "Bytes that all workers have sent, by what and over what.")
        messages = Family("shoal_sent_messages_total", "counter", "Messages that carried them.")
        operations = Family("shoal_worker_operations_total", "counter", "Sums, gathers, broadcasts and barriers.")
        exchange = Family("shoal_worker_exchange_seconds_total", "counter", "Seconds in which an operation went on.")
        exposed = Family("shoal_worker_exposed_seconds_total", "counter", "Of these, not hidden behind compute.")
        accounts = {worker: seen.traffic for worker, seen in sorted(self._workers.items()) if seen.traffic.operations}
        for flow in together(list(accounts.values())).flows:
            labels = {"kind": flow.kind, "codec": flow.codec, "link": flow.link}
            sent.add(flow.bytes, **labels)
            messages.add(flow.messages, **labels)
        for worker, account in accounts.items():
            operations.add(account.operations, worker=str(worker))
            exchange.add(account.exchange, worker=str(worker))
            exposed.add(account.exposed, worker=str(worker))
        return [sent, messages, operations, exchange, exposed]

    def _of_servers(self) -> list[Family]:
        shards = Family("shoal_server_shards", "gauge", "Shards that a server holds.")
        pushes = Family("shoal_server_pushes_total", "counter", "Gradients that a server was given.")
        repeated = Family("shoal_server_repeated_pushes_total", "counter", "Of these, those that had come before.")
        received = Family("shoal_server_received_bytes_total", "counter", "Over the network, without shared memory.")
        sent = Family("shoal_server_sent_bytes_total", "counter", "Over the network, without shared memory.")
        seconds = Family("shoal_server_apply_seconds_total", "counter", "Seconds spent applying steps.")
        replaced = Family("shoal_servers_replaced_total", "counter", "Servers that took the place of a dead one.")
        staleness = Family("shoal_staleness_steps", "gauge", "Steps that weights lacked for a gradient, the mean.")
        for facts in self._servers.servers if self._servers is not None else []:
            server = str(facts.number)
            shards.add(facts.shards, server=server)
            pushes.add(facts.pushes, server=server)
            repeated.add(facts.repeated, server=server)
            received.add(facts.received, server=server)
            sent.add(facts.sent, server=server)
            seconds.add(facts.seconds, server=server)
        if self._servers is not None:
            replaced.add(self._servers.replaced)
            mean = mean_staleness(self._servers)
            if mean is not None:
                staleness.add(mean)
        return [shards, pushes, repeated, received, sent, seconds, replaced, staleness]


def _version() -> str:
    try:
        return metadata.version("shoal")
    except metadata.PackageNotFoundError:
        return "unknown"
