"""The traffic account, as values: what was sent, of what kind, over which link, and how long it took."""

from __future__ import annotations

import msgspec

GRADIENT = "gradient"
"""Gradients, and the few numbers of a step that ride with them."""
PARAMETER = "parameter"
"""Weights and buffers that are copied from one worker to others."""
STATE = "state"
"""Optimizer state, results of an evaluation, what workers tell each other about their data."""
CONTROL = "control"
"""What workers say to agree: digests, orders of buckets, measurements."""
MEASUREMENT = "measurement"
"""What the first steps send to find out what sums cost: once, not in every step."""
KINDS = (GRADIENT, PARAMETER, STATE, CONTROL, MEASUREMENT)

MEMORY = "memory"
"""Shared memory of one host."""
LOOPBACK = "loopback"
"""Sockets inside one host."""
NETWORK = "network"
"""Between hosts."""
LINKS = (MEMORY, LOOPBACK, NETWORK)


class Flow(msgspec.Struct, frozen=True):
    """What went one way: bytes of payload, as encoded by `codec`, and the messages that carried them."""

    kind: str
    codec: str
    link: str
    bytes: int
    messages: int


class Traffic(msgspec.Struct, frozen=True):
    """What one worker has sent, over a step or a run.

    `exchange` is the time from an operation's start to its end, each moment counted once; `exposed` is the part of it
    in which this worker could do nothing else. In shared memory what is read from another's memory and what is written
    to it counts as sent.
    """

    flows: list[Flow] = []
    operations: int = 0
    """Sums, gathers, broadcasts and barriers."""
    exchange: float = 0.0
    exposed: float = 0.0

    @property
    def bytes(self) -> int:
        return sum(flow.bytes for flow in self.flows)

    @property
    def messages(self) -> int:
        return sum(flow.messages for flow in self.flows)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of exchange; 0 where nothing was exchanged."""
        return self.bytes / self.exchange if self.exchange > 0 else 0.0

    def since(self, before: Traffic) -> Traffic:
        """What has been added since `before`, an earlier account of the same worker."""
        had = {(flow.kind, flow.codec, flow.link): flow for flow in before.flows}
        flows = []
        for flow in self.flows:
            old = had.get((flow.kind, flow.codec, flow.link))
            new = flow if old is None else _less(flow, old)
            if new.messages or new.bytes:
                flows.append(new)
        return Traffic(
            flows,
            self.operations - before.operations,
            self.exchange - before.exchange,
            self.exposed - before.exposed,
        )


def together(accounts: list[Traffic]) -> Traffic:
    """The sum of several workers' accounts."""
    sums: dict[tuple[str, str, str], tuple[int, int]] = {}
    for account in accounts:
        for flow in account.flows:
            key = flow.kind, flow.codec, flow.link
            size, messages = sums.get(key, (0, 0))
            sums[key] = size + flow.bytes, messages + flow.messages
    return Traffic(
        [Flow(*key, *value) for key, value in sums.items()],
        sum(account.operations for account in accounts),
        sum(account.exchange for account in accounts),
        sum(account.exposed for account in accounts),
    )


def _less(flow: Flow, old: Flow) -> Flow:
    return Flow(flow.kind, flow.codec, flow.link, flow.bytes - old.bytes, flow.messages - old.messages)
