"""The doctor's round: every check with what it needs from this machine, and then the self-test."""

from __future__ import annotations

import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from shoal import __version__
from shoal.cli.doctor import machine, network, selftest, software
from shoal.cli.doctor.cgroups import Cgroups
from shoal.cli.doctor.checks import Check, Finding, Outcome, run_checks, warn
from shoal.cli.doctor.child import Ran
from shoal.cli.doctor.diagnosis import Diagnosis
from shoal.store.home import shoal_home, store_url

SOFTWARE, MACHINE, LIMITS, NETWORK, STORAGE, SELF_TEST = (
    "Software",
    "Machine",
    "Limits and environment",
    "Network",
    "Storage",
    "Self-test",
)

Tell = Callable[[str], None]


def examine(
    *, workers: int | None = None, self_test: bool = True, trial: Sequence[str] | None = None, tell: Tell | None = None
) -> Diagnosis:
    """Make every check on this machine. On the main thread.

    workers: how many are meant to train here; None is one per usable core. trial: another command for the self-test.
    tell: hears what is being done.
    """
    begun = time.monotonic()
    env = software.plain_environment(os.environ, leave_out=network.LAUNCHER_NAMES)
    trials: list[Ran] = []

    def try_out() -> None:
        command = trial or _child("train" if self_test else "look")
        # the workers of this trial are forked and compute on CPUs
        trials.append(selftest.run_trial(command, env={**env, "CUDA_VISIBLE_DEVICES": ""}, tell=tell))
        if software.nvidia_driver_loaded():
            trials.append(selftest.run_trial(_child("gpus"), env=env, tell=tell))

    light = run_checks([*_software(), *_machine(workers), *_network(), *_storage()], meanwhile=try_out)
    seen = software.torch_facts(*trials)
    torch = run_checks(_torch(seen))
    tested = [_self_test(trials[0], seen)] if self_test else []
    outcomes = [*light, *torch, *tested]
    order = (SOFTWARE, MACHINE, LIMITS, NETWORK, STORAGE, SELF_TEST)
    return Diagnosis(
        outcomes=tuple(outcome for group in order for outcome in _placed(outcomes, group)),
        versions={
            "shoal": __version__,
            "python": ".".join(map(str, sys.version_info[:3])),
            "torch": seen.facts.get("torch"),
            "numpy": seen.facts.get("numpy"),
        },
        seconds=time.monotonic() - begun,
    )


def _placed(outcomes: Sequence[Outcome], group: str) -> list[Outcome]:
    """Those of a group, in the order in which to read them."""
    first = ("python", "torch", "numpy", "backends", "cores", "gpus")
    chosen = [outcome for outcome in outcomes if outcome.group == group]
    return sorted(chosen, key=lambda outcome: first.index(outcome.name) if outcome.name in first else len(first))


def _child(what: str) -> list[str]:
    return [sys.executable, "-m", "shoal.cli.doctor.trial", what, str(os.getpid())]


def _software() -> list[Check]:
    version = sys.version_info[:3]
    python = partial(software.check_python, version=version, shoal_version=__version__, executable=sys.executable)
    extras = partial(software.check_extras, version_of=software.installed_version, store=store_url())
    return [
        Check("python", SOFTWARE, python),
        Check("extras", SOFTWARE, extras),
        Check("git", SOFTWARE, software.check_git, seconds=6.0),
    ]


def _torch(seen: software.TorchFacts) -> list[Check]:
    driver = software.nvidia_driver_loaded()
    return [
        Check("torch", SOFTWARE, partial(software.check_torch, seen)),
        Check("numpy", SOFTWARE, partial(software.check_numpy, seen)),
        Check("backends", SOFTWARE, partial(software.check_backends, seen)),
        Check("gpus", MACHINE, partial(software.check_gpus, seen, driver=driver, env=os.environ)),
    ]


def _machine(workers: int | None) -> list[Check]:
    # a limit that cannot be read is reported by the checks that need it, each for itself
    affinity, groups = len(os.sched_getaffinity(0)), Cgroups()
    cores = machine.usable_cores(affinity, groups.cpus())
    meant = workers or cores

    def memory() -> Finding:
        return machine.check_memory(meminfo=_meminfo(), limit=groups.memory(), workers=meant)

    def processes() -> Finding:
        return machine.check_processes(
            soft=resource.getrlimit(resource.RLIMIT_NPROC)[0],
            used=machine.threads_of_user(Path("/proc"), os.getuid()),
            group=groups.processes(),
            root=os.geteuid() == 0,
            workers=meant,
        )

    def open_files() -> Finding:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return machine.check_open_files(soft=soft, hard=hard, workers=meant)

    return [
        Check(
            "cores",
            MACHINE,
            lambda: machine.check_cores(affinity=affinity, count=os.cpu_count(), quota=groups.cpus()),
        ),
        Check("memory", MACHINE, memory),
        Check("swap", MACHINE, lambda: machine.check_swap(meminfo=_meminfo())),
        Check("clock", MACHINE, partial(machine.check_clock, _existing(shoal_home()))),
        Check("open files", LIMITS, open_files),
        Check("processes", LIMITS, processes),
        Check("threads", LIMITS, partial(machine.check_threads, env=os.environ, cores=cores)),
        Check("launcher", LIMITS, partial(network.check_launcher, env=os.environ)),
    ]


def _network() -> list[Check]:
    name = socket.gethostname()
    hostname = partial(network.check_hostname, name, resolve=network.resolve_name, owns=network.is_own_address)
    return [
        Check("hostname", NETWORK, hostname, seconds=network.LOOK_UP_SECONDS + 1),
        Check("loopback", NETWORK, network.check_loopback, seconds=4.0),
    ]


def _storage() -> list[Check]:
    store = partial(software.check_store, store_url(), open_store=software.open_run_store)
    return [
        Check("temp folder", STORAGE, machine.check_temp_folder),
        Check("/dev/shm", STORAGE, partial(machine.check_shared_memory, Path("/dev/shm"))),
        Check("home", STORAGE, partial(software.check_home, shoal_home())),
        Check("run store", STORAGE, store, seconds=5.0),
    ]


def _self_test(ran: Ran, seen: software.TorchFacts) -> Outcome:
    if seen.problem and ran.code is not None:
        finding = warn("not made, because torch cannot be imported", "Mend torch first.")
    else:
        finding = selftest.judge(ran)
    return Outcome("self-test", SELF_TEST, finding, ran.seconds)


def _meminfo() -> str:
    return Path("/proc/meminfo").read_text(encoding="ascii")


def _existing(folder: Path) -> Path:
    """`folder`, or the nearest one above it that exists."""
    return next((place for place in (folder, *folder.parents) if place.is_dir()), folder)
