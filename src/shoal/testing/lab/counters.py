"""The kernel's own count of what passed a lab host's link."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shoal.core.errors import ConfigError
from shoal.engines.places import Place


@dataclass(frozen=True)
class Counters:
    """Of eth0 of one host since the lab came up, seen from the host: `sent` is what left it.

    Bytes with headers; those of a bundle of segments, up to 64 KB, are counted once. What waits in the link's queue or
    was dropped there is not counted; what was cut or lost on its way in is.
    """

    sent: int
    received: int
    sent_packets: int
    received_packets: int

    def __sub__(self, before: Counters) -> Counters:
        return Counters(
            self.sent - before.sent,
            self.received - before.received,
            self.sent_packets - before.sent_packets,
            self.received_packets - before.received_packets,
        )


def read_counters(place: Place) -> Counters:
    """The counters of `place` now. Raises ConfigError if its lab is gone."""
    try:
        table = Path(f"/proc/{place.pid}/net/dev").read_text()
    except OSError as error:
        raise ConfigError(f"the lab host {place.name} is gone ({error.strerror}); is the lab still up?") from error
    for line in table.splitlines():
        device, _, figures = line.partition(":")
        if device.strip() == "eth0":
            fields = [int(field) for field in figures.split()]
            return Counters(received=fields[0], received_packets=fields[1], sent=fields[8], sent_packets=fields[9])
    raise ConfigError(f"the lab host {place.name} has no link eth0; take the lab down and up again")
