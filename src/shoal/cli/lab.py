"""`shoal lab`: several hosts on this machine, with links that can be slowed and cut."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.output import write, write_json
from shoal.core.errors import ConfigError

if TYPE_CHECKING:
    from shoal.testing.lab import Lab
    from shoal.testing.lab.messages import HostStatus

ABOUT = """\
Several hosts on this machine: each has a network address, a host name, a
share of the CPU and shared memory of its own, and a link that can be slowed
and cut. Training on many hosts can be tried, timed and broken without them.
Needs root, and Linux with iproute2 and iptables.

[bold]Examples[/bold]
  [cyan]shoal lab up two --hosts 2 --rate 1gbit[/cyan]     hosts a and b
  [cyan]shoal lab run two b -- ping -U -c 3 a[/cyan]       a program in host b
  [cyan]shoal lab shape two b --rate 100mbit[/cyan]        slow one link down
  [cyan]shoal lab cut two a b[/cyan]                       let nothing through
  [cyan]shoal lab heal two[/cyan]                          and everything again
  [cyan]shoal lab status[/cyan]                            who reaches whom
  [cyan]shoal lab down two[/cyan]

To train in it, say [cyan]engine="local:lab=two"[/cyan] in the script: the
workers are spread over the hosts in blocks.
"""
UP_ABOUT = """\
Bring a lab up. It stays until `shoal lab down`. The hosts are called a, b, c
and so on, with the addresses 10.77.0.2, 10.77.0.3, 10.77.0.4; they reach one
another by name, and nothing else: neither this machine nor the world.

[bold]Examples[/bold]
  [cyan]shoal lab up two[/cyan]                                 2 hosts, fast links
  [cyan]shoal lab up slow --rate 100mbit --delay 5ms[/cyan]     10 ms there and back
  [cyan]shoal lab up poor --hosts 4 --cpu 0.5 --loss 1%[/cyan]
"""
CUT_ABOUT = """\
Let nothing through between two hosts, or pull out the cable of one. With
--one-way only what the first one sends is cut. Connections are not told, and
go on after `shoal lab heal` unless somebody gave up meanwhile.

[bold]Examples[/bold]
  [cyan]shoal lab cut two a b[/cyan]             a and b do not hear each other
  [cyan]shoal lab cut two a b --one-way[/cyan]   b does not hear a
  [cyan]shoal lab cut two a[/cyan]               a is alone
"""

lab = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")

Name = Annotated[str, typer.Argument(help="The name of the lab: 1 to 20 of a-z, 0-9 and -.")]
Rate = Annotated[
    str | None, typer.Option(help="Of each host's link, in each direction: 100mbit, 1gbit; none takes it away.")
]
Cpu = Annotated[str | None, typer.Option(help="Cores' worth of time of one host: 0.5, 50%; none takes it away.")]
Delay = Annotated[str | None, typer.Option(help="What a packet waits on its way to the host: 5ms, 0.005.")]
Loss = Annotated[str | None, typer.Option(help="The share of packets lost on their way to the host: 1%, 0.01.")]
OneWay = Annotated[bool, typer.Option("--one-way", help="Only what the first host sends.")]


def register(app: typer.Typer) -> None:
    """Add `shoal lab` and its commands."""
    app.add_typer(lab, name="lab", help=ABOUT, short_help="Several hosts on this machine, with links to slow and cut.")


@lab.command(help=UP_ABOUT, short_help="Bring a lab up.")
def up(
    name: Name,
    hosts: Annotated[int, typer.Option(help="How many, 1 to 26.")] = 2,
    rate: Rate = None,
    cpu: Cpu = None,
    delay: Delay = None,
    loss: Loss = None,
) -> None:
    """Bring a lab up."""
    from shoal.testing.lab.lab import bring_up
    from shoal.testing.lab.shape import Change, Shape

    made = bring_up(name, hosts, Change(rate, delay, loss, cpu).of(Shape()))
    _show(made, reach=False)
    write(f'Train in it with engine="local:lab={name}", and end it with `shoal lab down {name}`.\n')


@lab.command(short_help="What is up: hosts, links, cuts, bytes, and who reaches whom.")
def status(
    name: Annotated[str | None, typer.Argument(help="One lab; all that are up without.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each lab, for programs.")] = False,
) -> None:
    """Show labs as they are: hosts, addresses, links, cuts, the kernel's count of bytes, and who reaches whom."""
    from shoal.engines.places import labs_up
    from shoal.testing.lab.lab import Lab
    from shoal.testing.lab.needs import require_lab

    require_lab()
    names = labs_up() if name is None else [name]
    if not names and not as_json:
        write("No lab is up. `shoal lab up NAME` brings one up.\n")
    for each in names:
        (_show_json if as_json else _show)(Lab.attach(each))


@lab.command(short_help="Change the links and the CPU share of hosts.")
def shape(
    name: Name,
    host: Annotated[str | None, typer.Argument(help="One host; all of them without.")] = None,
    rate: Rate = None,
    cpu: Cpu = None,
    delay: Delay = None,
    loss: Loss = None,
) -> None:
    """Change what a host is like; what is not given stays. Connections go on."""
    if rate is cpu is delay is loss is None:
        raise ConfigError("nothing to change was given; say --rate, --cpu, --delay or --loss")
    there = _attach(name)
    there.shape(host, rate=rate, cpu=cpu, delay=delay, loss=loss)
    _show(there, reach=False)


@lab.command(help=CUT_ABOUT, short_help="Cut links.")
def cut(
    name: Name,
    a: Annotated[str, typer.Argument(help="A host.")],
    b: Annotated[str | None, typer.Argument(help="Another; all others without.")] = None,
    one_way: OneWay = False,
) -> None:
    """Cut links."""
    there = _attach(name)
    there.cut(a, b, one_way=one_way)
    _show(there, reach=False)


@lab.command(short_help="Undo cuts.")
def heal(
    name: Name,
    a: Annotated[str | None, typer.Argument(help="A host; every cut is undone without.")] = None,
    b: Annotated[str | None, typer.Argument(help="Another; all others without.")] = None,
    one_way: OneWay = False,
) -> None:
    """Undo what `shoal lab cut` with the same words does, or every cut."""
    there = _attach(name)
    there.heal(a, b, one_way=one_way)
    _show(there, reach=False)


@lab.command(
    short_help="Run a program in a host.",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)
def run(
    name: Name,
    host: Annotated[str, typer.Argument(help="The host.")],
    command: Annotated[list[str], typer.Argument(help="The program and its arguments.")],
) -> None:
    """Run a program in a host, with the files and the folder of this machine. Its exit code is the command's."""
    from shoal.testing.lab.lab import command_in

    words = command_in(_attach(name).place(host), command[1:] if command[0] == "--" else command)
    os.execv(words[0], words)


@lab.command(short_help="Take a lab down, and end what runs in it.")
def down(name: Name) -> None:
    """Take a lab down. What runs in its hosts is killed."""
    from shoal.testing.lab.lab import take_down
    from shoal.testing.lab.needs import require_lab

    require_lab()
    take_down(name)
    write(f"The lab {name} is down.\n")


def _attach(name: str) -> Lab:
    from shoal.testing.lab import Lab
    from shoal.testing.lab.needs import require_lab

    require_lab()
    return Lab.attach(name)


def _show(there: Lab, *, reach: bool = True) -> None:
    now = there.status()
    rows: list[tuple[str, ...]] = [("host", "address", "link", "cpu", "delay", "loss", "sent", "received")]
    rows += [_row(there, host) for host in now.hosts]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [f"{there.name}: {len(now.hosts)} hosts"]
    lines += ["  " + "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)) for row in rows]
    lines += [f"  cut: {b} does not hear {a}" for a, b in now.cuts]
    if reach:
        lines += [f"  {sentence}" for sentence in there.check()] or ["  every host reaches every other one"]
    write("".join(f"{line.rstrip()}\n" for line in lines))


def _row(there: Lab, host: HostStatus) -> tuple[str, ...]:
    from shoal.monitor.wording import size
    from shoal.testing.lab.shape import format_rate

    counted = there.counters(host.place)
    return (
        host.place.name,
        host.place.address,
        "unplugged" if host.unplugged else "no limit" if host.shape.rate is None else format_rate(host.shape.rate),
        "all" if host.shape.cpu is None else f"{host.shape.cpu:g}",
        f"{host.shape.delay * 1e3:g} ms",
        f"{host.shape.loss * 100:g}%",
        size(counted.sent),
        size(counted.received),
    )


def _show_json(there: Lab) -> None:
    from dataclasses import asdict

    now = there.status()
    hosts = [{"host": host, "counters": asdict(there.counters(host.place))} for host in now.hosts]
    write_json({"name": there.name, "hosts": hosts, "cuts": now.cuts, "unreachable": there.check()})
