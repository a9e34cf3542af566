"""`shoal doctor`: every check with faked inputs, the self-test made to fail and to hang, and the command itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from shoal.cli.doctor import checks, child, command, diagnosis, examination, machine, network, selftest, software
from shoal.cli.doctor.cgroups import Cgroups
from shoal.cli.doctor.checks import FIX_ORDER, Check, Finding, Outcome, Status, fail, fix_first, ok, run_checks, warn
from shoal.cli.doctor.child import Ran, run_child
from shoal.core.errors import StoreError
from shoal.engines.world import World

ROOT = Path(__file__).parent.parent.parent
GB = 1_000_000_000
GOOD = {
    "torch": "2.13.0+cpu",
    "cuda": None,
    "import_seconds": 1.0,
    "backends": {"gloo": True, "nccl": False, "mpi": False},
    "numpy": "2.4.0",
    "numpy_fits": True,
}
FIGURES = {
    "difference": 1e-7,
    "start_seconds": 0.02,
    "step_seconds": 0.001,
    "exchange_bytes_per_second": 1e9,
    "seconds": 2.0,
}


def status(finding: Finding) -> str:
    assert finding.found
    assert bool(finding.fix) == (finding.status is not Status.OK), "what is wrong says what to do, and only that"
    json.dumps(dict(finding.details), allow_nan=False)
    return str(finding.status)


# -- running checks ----------------------------------------------------------------------------------------------------


def test_a_check_that_raises_is_a_failed_check() -> None:
    def broken() -> Finding:
        raise PermissionError(13, "Permission denied", "/proc/meminfo")

    first, second = run_checks([Check("a", "g", broken), Check("b", "g", lambda: ok("fine"))])
    assert (status(first.finding), status(second.finding)) == ("fail", "ok")
    assert "PermissionError" in first.finding.found and "/proc/meminfo" in first.finding.found


def test_a_check_that_hangs_is_a_failed_check_and_the_rest_go_on() -> None:
    released = threading.Event()

    def hang() -> Finding:
        released.wait(30)
        return ok("late")

    begun = time.monotonic()
    slow, quick = run_checks([Check("a", "g", hang, seconds=0.2), Check("b", "g", lambda: ok("fine"))])
    took = time.monotonic() - begun
    released.set()
    assert took < 5
    assert (status(slow.finding), status(quick.finding)) == ("fail", "ok")
    assert slow.finding.found == "no answer within 0.2 s"


def test_checks_keep_their_order_and_run_side_by_side() -> None:
    together = threading.Barrier(3)

    def meet() -> Finding:
        together.wait(10)
        return ok("met")

    outcomes = run_checks([Check(name, "g", meet, seconds=15) for name in "abc"])
    assert [(outcome.name, status(outcome.finding)) for outcome in outcomes] == [(name, "ok") for name in "abc"]


def outcome(name: str, finding: Finding) -> Outcome:
    return Outcome(name, "Group", finding, 0.0)


def test_failures_come_before_warnings_and_then_what_breaks_most() -> None:
    bad_git, bad_home = outcome("git", fail("x", "y")), outcome("home", fail("x", "y"))
    odd_torch, unknown = outcome("torch", warn("x", "y")), outcome("new one", warn("x", "y"))
    fine = outcome("python", ok("x"))
    assert fix_first([fine, unknown, bad_git, odd_torch, bad_home]) is bad_home
    assert fix_first([fine, unknown, odd_torch]) is odd_torch
    assert fix_first([fine, unknown]) is unknown
    assert fix_first([fine]) is None


# -- the machine -------------------------------------------------------------------------------------------------------


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def cgroups(folder: Path, membership: str, files: dict[str, str]) -> Cgroups:
    write(folder, {"membership": membership, **{f"root/{name}": text for name, text in files.items()}})
    return Cgroups(folder / "root", folder / "membership")


def test_limits_of_version_2_are_the_smallest_on_the_way_up(tmp_path: Path) -> None:
    groups = cgroups(
        tmp_path,
        "0::/pod/app\n",
        {
            "cgroup.controllers": "cpu memory pids",
            "pod/cpu.max": "150000 100000\n",
            "pod/app/cpu.max": "max 100000\n",
            "pod/app/memory.max": "max\n",
            "pod/memory.max": "1000000000\n",
            "pod/memory.current": "700000000\n",
            "pod/memory.stat": "anon 5\ninactive_file 200000000\n",
            "pod/app/pids.max": "100\n",
            "pod/app/pids.current": "60\n",
        },
    )
    assert groups.cpus() == 1.5
    assert groups.memory() == (GB, GB // 2)
    assert groups.processes() == (100, 40)


def test_limits_of_version_1(tmp_path: Path) -> None:
    groups = cgroups(
        tmp_path,
        "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n2:pids:/docker/abc\n",
        {
            # the host's path is not there in the container: the top holds the limits
            "cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
            "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "memory/memory.limit_in_bytes": "2000000000\n",
            "memory/memory.usage_in_bytes": "500000000\n",
            "memory/memory.stat": "total_inactive_file 100000000\n",
            "pids/pids.max": "max\n",
        },
    )
    assert groups.cpus() == 0.5
    assert groups.memory() == (2 * GB, 1_600_000_000)
    assert groups.processes() is None


def test_no_limits(tmp_path: Path) -> None:
    nothing = cgroups(
        tmp_path,
        "4:memory:/\n3:cpu:/\n0::/\n",
        {"cpu/cpu.cfs_quota_us": "-1", "memory/memory.limit_in_bytes": "9223372036854771712"},
    )
    assert (nothing.cpus(), nothing.memory(), nothing.processes()) == (None, None, None)
    absent = Cgroups(tmp_path / "nowhere", tmp_path / "neither")
    assert (absent.cpus(), absent.memory(), absent.processes()) == (None, None, None)


@pytest.mark.parametrize(
    ("affinity", "count", "quota", "expected", "usable"),
    [(8, 8, None, "ok", 8), (2, 8, None, "ok", 2), (1, 1, None, "ok", 1), (8, 8, 1.5, "warn", 1), (2, 2, 2.0, "ok", 2)],
)
def test_cores(affinity: int, count: int, quota: float | None, expected: str, usable: int) -> None:
    finding = machine.check_cores(affinity=affinity, count=count, quota=quota)
    assert status(finding) == expected
    assert finding.details["usable"] == usable
    if expected == "warn":
        assert "1.5 CPUs" in finding.found and "workers=1" in finding.fix


def meminfo(total: int, available: int, swap: int = 0, swap_free: int = 0) -> str:
    figures = {"MemTotal": total, "MemAvailable": available, "SwapTotal": swap, "SwapFree": swap_free}
    return "".join(f"{name}:   {size // 1024} kB\n" for name, size in figures.items()) + "HugePages_Total:  0\n"


@pytest.mark.parametrize(
    ("available", "limit", "expected"),
    [
        (16 * GB, None, "ok"),
        (GB // 2, None, "warn"),
        (GB // 10, None, "fail"),
        (16 * GB, (4 * GB, 3 * GB), "ok"),
        (16 * GB, (2 * GB, GB // 10), "fail"),
        (16 * GB, (64 * GB, 60 * GB), "ok"),
    ],
)
def test_memory(available: int, limit: tuple[int, int] | None, expected: str) -> None:
    finding = machine.check_memory(meminfo=meminfo(32 * GB, available), limit=limit, workers=2)
    assert status(finding) == expected
    assert finding.details["limited"] == (limit is not None and limit[0] < 32 * GB)
    assert ("container" in finding.found) == finding.details["limited"]


@pytest.mark.parametrize(("swap", "free", "expected"), [(0, 0, "ok"), (GB, GB, "ok"), (GB, GB // 10, "warn")])
def test_swap(swap: int, free: int, expected: str) -> None:
    assert status(machine.check_swap(meminfo=meminfo(GB, GB, swap, free))) == expected


class Usage:
    def __init__(self, total: int, free: int) -> None:
        self.total, self.free = total, free


@pytest.mark.parametrize(
    ("total", "free", "expected"), [(GB, GB, "ok"), (64 << 20, 64 << 20, "warn"), (GB, 1 << 20, "warn")]
)
def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, free: int, expected: str) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: Usage(total, free))
    finding = machine.check_shared_memory(tmp_path)
    assert status(finding) == expected
    if total < GB:
        assert "--shm-size" in finding.fix
    assert status(machine.check_shared_memory(tmp_path / "gone")) == "warn"
    assert list(tmp_path.iterdir()) == []


def unwritable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere, so the refusal itself is faked."""

    def refuse(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(machine.tempfile, "NamedTemporaryFile", refuse)


def test_folders_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unwritable(monkeypatch)
    found = [
        machine.check_shared_memory(tmp_path),
        machine.check_temp_folder(lambda: str(tmp_path)),
        software.check_home(tmp_path / "home"),
    ]
    assert [status(finding) for finding in found] == ["warn", "fail", "fail"]
    assert all("Read-only file system" in finding.found for finding in found)
    assert "SHOAL_HOME" in found[2].fix and "TMPDIR" in found[1].fix


def test_temp_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    assert status(machine.check_temp_folder(lambda: str(tmp_path))) == "ok"
    assert status(machine.check_temp_folder(none)) == "fail"
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: Usage(GB, 1000))
    assert status(machine.check_temp_folder(lambda: str(tmp_path))) == "warn"


@pytest.mark.parametrize(
    ("soft", "hard", "workers", "expected", "hint"),
    [
        (-1, -1, 64, "ok", ""),
        (1024, 4096, 2, "ok", ""),
        (256, 1 << 20, 2, "warn", "ulimit -n 4096"),
        (256, 512, 2, "warn", "limits.conf"),
        (50, 1 << 20, 2, "fail", "ulimit -n"),
        (1024, 1 << 20, 300, "fail", "ulimit -n"),
    ],
)
def test_open_files(soft: int, hard: int, workers: int, expected: str, hint: str) -> None:
    finding = machine.check_open_files(soft=soft, hard=hard, workers=workers)
    assert status(finding) == expected
    assert hint in finding.fix


@pytest.mark.parametrize(
    ("soft", "used", "group", "root", "expected"),
    [
        (-1, 500, None, False, "ok"),
        (4096, 100, None, False, "ok"),
        (125, 100, None, False, "warn"),
        (110, 100, None, False, "fail"),
        (110, 100, None, True, "ok"),
        (-1, 100, (100, 10), True, "fail"),
    ],
)
def test_processes(soft: int, used: int, group: tuple[int, int] | None, root: bool, expected: str) -> None:
    found = machine.check_processes(soft=soft, used=used, group=group, root=root, workers=2)
    assert status(found) == expected


def test_threads_of_a_user_are_counted(tmp_path: Path) -> None:
    fields = " ".join(["S", *["0"] * 16, "7", "0"])
    write(tmp_path, {"12/stat": f"12 (a (b) c) {fields}", "13/stat": "torn", "self/stat": fields, "uptime": "1"})
    (tmp_path / "14").mkdir()
    assert machine.threads_of_user(tmp_path, os.getuid()) == 7
    assert machine.threads_of_user(tmp_path, os.getuid() + 1) == 0


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, "ok"),
        ({"OMP_NUM_THREADS": " "}, "ok"),
        ({"OMP_NUM_THREADS": "1"}, "ok"),
        ({"OMP_NUM_THREADS": "2,1"}, "ok"),
        ({"OMP_NUM_THREADS": "64"}, "warn"),
        ({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "0"}, "warn"),
        ({"OMP_NUM_THREADS": "all"}, "warn"),
    ],
)
def test_threads(env: dict[str, str], expected: str) -> None:
    finding = machine.check_threads(env=env, cores=4)
    assert status(finding) == expected
    assert "1 thread per CPU worker" in finding.found + finding.fix


def test_clock(tmp_path: Path) -> None:
    def look(walls: list[float], steady: list[float]) -> Finding:
        at, ticks = iter(walls), iter(steady)
        return machine.check_clock(
            tmp_path, wall=lambda: next(at), monotonic=lambda: next(ticks), pause=lambda seconds: None
        )

    now = time.time()
    assert status(look([now, now + 0.05, now, now + 9], [5, 5.05])) == "ok"
    jumped = look([now, now + 30, now, now + 9], [5, 5.05])
    assert status(jumped) == "warn" and "jumped by +" in jumped.found
    skewed = look([now, now + 0.05, now - 100, now - 99], [5, 5.05])
    assert status(skewed) == "warn" and "ahead of" in skewed.found
    behind = look([now, now + 0.05, now + 100, now + 101], [5, 5.05])
    assert status(behind) == "warn" and "behind" in behind.found
    assert status(look([0, 0.05, 0, 0], [5, 5.05])) == "fail"
    assert status(machine.check_clock(tmp_path / "gone")) == "ok", "no file to look at"
    assert list(tmp_path.iterdir()) == []


# -- the network -------------------------------------------------------------------------------------------------------


def refuse(name: str) -> list[str]:
    raise OSError(-2, "Name or service not known")


def test_hostname_that_resolves() -> None:
    own = network.check_hostname("box", resolve=lambda name: ["10.0.0.7"], owns=lambda address: True)
    assert status(own) == "ok"
    here = network.check_hostname("box", resolve=lambda name: ["127.0.1.1", "::1"], owns=lambda address: True)
    assert status(here) == "ok" and "one machine" in here.found


def test_hostname_that_does_not_resolve_names_the_line() -> None:
    finding = network.check_hostname("box", resolve=refuse, owns=lambda address: True)
    assert status(finding) == "warn"
    assert finding.details["hosts_line"] == "127.0.0.1 box"
    assert "/etc/hosts" in finding.fix and finding.fix.endswith("127.0.0.1 box")


def test_hostname_of_another_machine() -> None:
    finding = network.check_hostname("box", resolve=lambda name: ["10.9.9.9"], owns=lambda address: False)
    assert status(finding) == "warn"
    assert "10.9.9.9" in finding.found and "127.0.0.1 box" in finding.fix


def test_a_look_up_that_hangs_has_a_bound() -> None:
    released = threading.Event()

    def hang(name: str) -> list[str]:
        released.wait(30)
        return []

    begun = time.monotonic()
    finding = network.check_hostname("box", resolve=hang, owns=lambda address: True, seconds=0.1)
    took = time.monotonic() - begun
    released.set()
    assert took < 5
    assert status(finding) == "warn" and "more than 0.1 s" in finding.found and "127.0.0.1 box" in finding.fix
    assert network.LOOK_UP_SECONDS == 2.0


def test_own_addresses() -> None:
    assert network.is_own_address("127.0.0.1")
    assert not network.is_own_address("203.0.113.77"), "reserved for documentation, so nobody's"
    assert "127.0.0.1" in network.resolve_name("localhost") or "::1" in network.resolve_name("localhost")


def test_loopback() -> None:
    assert status(network.check_loopback()) == "ok"
    finding = network.check_loopback("203.0.113.77")
    assert status(finding) == "fail" and "203.0.113.77" in finding.found


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"PATH": "/bin"}, "ok"),
        ({"MASTER_PORT": "29500"}, "ok"),
        ({"SLURM_JOB_ID": "7"}, "ok"),
        ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "29500"}, "warn"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, "fail"),
        ({"RANK": "x", "WORLD_SIZE": "4", "MASTER_PORT": "1"}, "fail"),
    ],
)
def test_launcher_variables(env: dict[str, str], expected: str) -> None:
    finding = network.check_launcher(env=env)
    assert status(finding) == expected
    if expected != "ok":
        given = [name for name in network.LAUNCHER_NAMES if name in env]
        assert f"unset {' '.join(given)}" in finding.fix
        assert finding.details["variables"] == given


def test_launcher_names_cover_what_shoal_reads() -> None:
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}
    for env in (slurm, torchrun):
        assert World.detect(env) is not None
        kept = software.plain_environment(env, leave_out=network.LAUNCHER_NAMES)
        assert World.detect(kept) is None


# -- the software ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "expected"), [((3, 10, 9), "fail"), ((3, 11, 0), "ok"), ((3, 13, 2), "ok"), ((3, 14, 0), "warn")]
)
def test_python(version: tuple[int, int, int], expected: str) -> None:
    assert status(software.check_python(version=version, shoal_version="1", executable="python")) == expected


def seen(**changes: object) -> software.TorchFacts:
    return software.TorchFacts({**GOOD, **changes})


BROKEN = software.TorchFacts({}, "the process that imported it was killed by SIGSEGV", ("last line",))


@pytest.mark.parametrize(
    ("version", "expected"),
    [("2.13.0+cpu", "ok"), ("2.10.0", "ok"), ("2.9.1", "fail"), ("3.0.0", "warn"), ("?", "fail")],
)
def test_torch(version: str, expected: str) -> None:
    assert status(software.check_torch(seen(torch=version))) == expected


def test_torch_says_its_build() -> None:
    assert "CPU build" in software.check_torch(seen()).found
    assert "CUDA 12.8 build" in software.check_torch(seen(cuda="12.8")).found


def test_torch_that_cannot_be_imported() -> None:
    finding = software.check_torch(BROKEN)
    assert status(finding) == "fail"
    assert "SIGSEGV" in finding.found and finding.details["last_lines"] == ["last line"]
    rest = [software.check_numpy(BROKEN), software.check_backends(BROKEN)]
    assert [status(finding) for finding in rest] == ["warn", "warn"]
    assert status(software.check_gpus(BROKEN, driver=False, env={})) == "warn"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, "ok"), ({"numpy": None}, "fail"), ({"numpy": "1.20.0"}, "warn"), ({"numpy_fits": False}, "fail")],
)
def test_numpy(changes: dict[str, object], expected: str) -> None:
    assert status(software.check_numpy(seen(**changes))) == expected


def test_backends() -> None:
    finding = software.check_backends(seen())
    assert status(finding) == "ok" and finding.found == "gloo yes, nccl no, mpi no"
    assert status(software.check_backends(seen(backends={"gloo": False}))) == "fail"


def test_gpus() -> None:
    def look(driver: bool, env: dict[str, str] | None = None, **changes: object) -> Finding:
        return software.check_gpus(seen(**changes), driver=driver, env=env or {})

    assert status(look(False)) == "ok"
    two = look(True, cuda="12.8", gpus=["H100", "H100"], nccl_version="2.27.5")
    assert status(two) == "ok" and "2 x H100, NCCL 2.27.5" in two.found
    assert status(look(True, cuda="12.8", gpus=["H100"], nccl_version=None)) == "warn"
    assert "CPU build" in look(True).found and status(look(True)) == "warn"
    assert status(look(True, cuda="12.8", gpus=[])) == "warn"
    assert status(look(True, {"CUDA_VISIBLE_DEVICES": ""}, cuda="12.8", gpus=[])) == "ok"


def test_supported_versions_are_those_that_are_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, (first, beyond) in (("torch", software.TORCH), ("numpy", software.NUMPY)):
        assert f"{name}>={first[0]}.{first[1]},<{beyond[0]}" in project["dependencies"]
    assert project["requires-python"] == ">={}.{}".format(*software.PYTHON[0])


def test_extras() -> None:
    there = {"sqlalchemy": "2.1.0", "mlflow-skinny": "3.1"}
    finding = software.check_extras(version_of=there.get, store="sqlite:///x")
    assert status(finding) == "ok"
    assert "sqlalchemy 2.1.0, mlflow 3.1; not installed: psycopg" in finding.found
    needs = software.check_extras(version_of=there.get, store="postgresql+psycopg://host/db")
    assert status(needs) == "warn" and "psycopg" in needs.fix
    assert software.installed_version("no-such-distribution") is None
    assert software.installed_version("typer")


def test_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later = software.check_home(tmp_path / "not" / "yet")
    assert status(later) == "ok" and "first run" in later.found
    assert list(tmp_path.iterdir()) == [], "looking makes nothing"
    (tmp_path / "file").write_text("")
    assert status(software.check_home(tmp_path / "file")) == "fail"
    monkeypatch.setattr(software.shutil, "disk_usage", lambda folder: Usage(GB, 1000))
    assert status(software.check_home(tmp_path)) == "warn"


def test_store() -> None:
    def corrupt(url: str) -> None:
        raise StoreError(f"{url} is corrupt")

    def missing(url: str) -> None:
        raise ModuleNotFoundError("No module named 'sqlalchemy'", name="sqlalchemy")

    assert status(software.check_store("sqlite:///x.db", open_store=lambda url: None)) == "ok"
    assert status(software.check_store("none", open_store=corrupt)) == "ok"
    finding = software.check_store("postgresql://me:hush@host/db?password=hush", open_store=corrupt)
    assert status(finding) == "fail" and "host/db" in finding.found
    assert "hush" not in json.dumps(outcome("run store", finding).as_json())
    absent = software.check_store("sqlite:///x.db", open_store=missing)
    assert status(absent) == "fail" and "pip install sqlalchemy" in absent.fix


def test_git(tmp_path: Path) -> None:
    assert status(software.check_git(lambda name: None)) == "warn"
    broken = tmp_path / "git"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o700)
    assert status(software.check_git(lambda name: str(broken))) == "warn"
    broken.write_text("#!/bin/sh\necho git version 2.99\n")
    assert software.check_git(lambda name: str(broken)).found == "2.99"


# -- the self-test -----------------------------------------------------------------------------------------------------


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def trial(code: str, *, seconds: float = 30.0, tell: Callable[[str], None] | None = None) -> Ran:
    return selftest.run_trial(python(code), env=os.environ, seconds=seconds, tell=tell)


def test_figures_are_judged() -> None:
    def judged(seconds: float = 3.0, trained: float = 1.0, **changes: object) -> Finding:
        changes["seconds"] = trained
        return selftest.judge(Ran(0, f"{json.dumps(GOOD)}\n{json.dumps({**FIGURES, **changes})}\n", "", seconds))

    assert status(judged()) == "ok"
    told = ("trained in 1.3 s (3.0 s with importing torch)", "20 ms", "1.0 ms", "1 GB/s")
    assert all(part in judged(seconds=3.0, trained=1.3).found for part in told)
    assert status(judged(seconds=9.0, trained=4.9)) == "ok", "a cold start is no fault"
    assert status(judged(seconds=6.0, trained=5.1)) == "warn"
    assert status(judged(difference=1e-5)) == "fail"
    assert status(selftest.judge(Ran(0, '{"difference": NaN}', "", 1.0))) == "fail"
    assert status(selftest.judge(Ran(0, f"{json.dumps(GOOD)}\n", "", 1.0))) == "fail", "no figures"
    assert status(selftest.judge(Ran(0, "", "", 1.0))) == "fail"


def test_weights_that_are_not_finite_are_not_equal() -> None:
    ran = Ran(0, json.dumps({**FIGURES, "difference": float("nan")}), "", 1.0)
    assert selftest.judge(ran).status is Status.FAIL


def test_a_trial_that_fails_shows_its_last_lines() -> None:
    ran = trial("import sys; print('stage: meeting', file=sys.stderr); raise RuntimeError('no luck')")
    finding = selftest.judge(ran)
    assert status(finding) == "fail"
    assert "while meeting" in finding.found and "RuntimeError: no luck" in finding.found
    assert finding.details["last_lines"][-1] == "RuntimeError: no luck"
    facts = software.torch_facts(ran)
    assert "exit code 1" in facts.problem and "RuntimeError: no luck" in facts.problem


HANGS = """
import os, subprocess, sys, time
print("stage: training", file=sys.stderr, flush=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(f"started {child.pid}", file=sys.stderr, flush=True)
time.sleep(600)
"""


def test_a_trial_that_hangs_is_ended_with_all_that_it_started() -> None:
    told: list[str] = []
    begun = time.monotonic()
    ran = trial(HANGS, seconds=2.0, tell=told.append)
    assert time.monotonic() - begun < 15
    assert ran.code is None
    finding = selftest.judge(ran)
    assert status(finding) == "fail"
    assert "did not end within 2 s" in finding.found and "while training" in finding.found
    assert told and set(told) == {"training"}
    grandchild = int(ran.errors.rpartition("started ")[2])
    deadline = time.monotonic() + 10
    while runs(grandchild) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not runs(grandchild)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_trial_has_a_home_of_its_own_and_leaves_nothing() -> None:
    ran = trial(
        "import json, os, pathlib; pathlib.Path('left').write_text('x');"
        "print(json.dumps({n: os.environ[n] for n in ('SHOAL_HOME', 'SHOAL_STORE', 'SHOAL_PROGRESS', 'TMPDIR')}))"
    )
    given = json.loads(ran.output)
    assert (given["SHOAL_STORE"], given["SHOAL_PROGRESS"]) == ("none", "quiet")
    assert given["SHOAL_HOME"].startswith(given["TMPDIR"])
    assert not Path(given["TMPDIR"]).exists()


def test_a_trial_that_cannot_be_started_has_failed() -> None:
    finding = selftest.judge(selftest.run_trial(["/no/such/program"], env={}))
    assert status(finding) == "fail" and "could not be started" in finding.found


def test_a_child_does_not_outlive_an_interrupt() -> None:
    def interrupt(errors: str) -> None:
        if "started" in errors:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_child(python(HANGS), env=os.environ, seconds=30, watch=interrupt)
    # that nothing lives on is looked at after every test


def test_when_a_child_is_back_its_own_children_are_gone_too() -> None:
    """They are killed with it, which takes the longer the more memory they have."""
    code = """
import os, time
large = b"x" * (64 << 20)
for _ in range(4):
    if os.fork() == 0:
        large = bytearray(large)
        os.write(1, b".")
        time.sleep(60)
while os.fstat(1).st_size < 4:
    time.sleep(0.01)
print(os.getpid())
"""
    ran = run_child(python(code), env=os.environ, seconds=30)
    assert ran.code == 0
    assert child.living_in_group(int(ran.output.split()[-1].lstrip("."))) == []


def test_a_child_killed_by_a_signal_is_named() -> None:
    ran = run_child(python("import os; os.kill(os.getpid(), 11)"), env=os.environ, seconds=30)
    assert ran.code == -signal.SIGSEGV and "SIGSEGV" in ran.how()


def test_much_output_is_cut_not_kept() -> None:
    ran = run_child(python("print('x' * 5_000_000); print('end')"), env=os.environ, seconds=30)
    assert len(ran.output) < 100_000 and ran.output.endswith("end\n")


# -- what is shown -----------------------------------------------------------------------------------------------------


def diagnosis_of(*outcomes: Outcome) -> diagnosis.Diagnosis:
    return diagnosis.Diagnosis(outcomes, {"shoal": "1"}, 1.25)


LONG = "it is so that " * 20
MIXED = diagnosis_of(
    Outcome("python", "Software", ok("3.11"), 0.0),
    Outcome("git", "Software", warn(LONG, "Install git."), 0.0),
    Outcome("home", "Storage", fail("/höme cannot be written", "Make it yours: chmod u+rwx /höme"), 0.0),
)


def test_the_table_is_aligned_and_fits() -> None:
    text = diagnosis.render(MIXED, width=80, encoding="utf-8")
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[:2] == ["Software", "  ✓ python       3.11"]
    assert lines[2].startswith("  ! git          it is so")
    assert all(len(line) - len(line.lstrip()) == 17 for line in lines[3:6]), "what follows is below what was found"
    assert "  ✗ home         /höme cannot be written" in lines
    assert lines[-2:] == ["1 failure, 1 warning (1.2 s)", "Fix first: home (marked ✗ above)"]
    assert text.count("cannot be written") == text.count("Make it yours") == 1, "nothing is said twice"


def test_ascii_terminals_get_ascii() -> None:
    text = diagnosis.render(MIXED, width=80, encoding="ascii")
    assert text.isascii()
    assert "  + python" in text and "  ! git" in text and "  x home" in text


def test_colour_only_on_request() -> None:
    assert "\x1b[" not in diagnosis.render(MIXED, width=80, encoding="utf-8")
    assert "\x1b[" in diagnosis.render(MIXED, width=80, encoding="utf-8", colour=True)


def test_all_is_well_says_what_to_try_next() -> None:
    well = diagnosis_of(outcome("python", ok("3.11")))
    text = diagnosis.render(well, width=80, encoding="utf-8")
    assert "All is well." in text and "shoal demo" in text and "Fix first" not in text
    assert (well.ok, well.as_json()["fix_first"]) == (True, None)
    assert all(len(line) <= 80 for line in text.splitlines())


def test_warnings_are_fine() -> None:
    warned = diagnosis_of(outcome("git", warn("not found", "Install it.")))
    assert warned.ok and "Fix first: git" in diagnosis.render(warned, width=80, encoding="utf-8")
    assert not MIXED.ok


def test_progress_lines() -> None:
    plain: list[str] = []
    progress = command.Progress(shown=True, write=plain.append, live=False)
    for what in ("one", "one", "two"):
        progress(what)
    progress.clear()
    assert plain == ["shoal doctor: one\n", "shoal doctor: two\n"]
    live: list[str] = []
    progress = command.Progress(shown=True, write=live.append, live=True)
    progress("one")
    progress.clear()
    assert live == ["one ...", "\r" + " " * 7 + "\r"]
    silent: list[str] = []
    command.Progress(shown=False, write=silent.append)("one")
    assert silent == []


# -- the command -------------------------------------------------------------------------------------------------------

PROGRAM = """
import typer
from shoal.cli.doctor.command import register
app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)
app.callback()(lambda: None)
register(app)
app(prog_name="shoal")
"""


def run_doctor(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, "doctor", *args],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1", **(env or {})},
    )


def test_the_whole_round(tmp_path: Path) -> None:
    home = tmp_path / "home"
    secret = {"AWS_SECRET_ACCESS_KEY": "hush-hush", "SHOAL_HOME": str(home)}
    # left over from a launcher: the doctor says so, and its own trial does not wait for anybody
    left_over = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    finished = run_doctor("--json", env={**secret, **left_over})
    assert finished.stderr == ""
    said = json.loads(finished.stdout)
    found = {check["name"]: check for check in said["checks"]}
    assert found["self-test"]["status"] in ("ok", "warn"), found["self-test"]
    assert found["self-test"]["details"]["difference"] <= selftest.CLOSE
    assert set(found) == set(FIX_ORDER), "every check has its place in the order of fixing"
    failed = [check["name"] for check in said["checks"] if check["status"] == "fail"]
    assert not {"python", "torch", "numpy", "backends", "loopback", "home", "run store", "self-test"} & set(failed)
    assert (said["ok"], finished.returncode) == (not failed, 1 if failed else 0)
    assert found["launcher"]["status"] == "warn"
    assert failed or said["fix_first"]["name"] == "launcher"
    assert said["versions"]["torch"].startswith("2.") and said["versions"]["numpy"]
    assert "hush-hush" not in finished.stdout
    assert not home.exists(), "neither a run nor a store comes of it"


def answer(monkeypatch: pytest.MonkeyPatch, found: diagnosis.Diagnosis) -> list[dict[str, object]]:
    asked: list[dict[str, object]] = []

    def examine(**arguments: object) -> diagnosis.Diagnosis:
        asked.append(arguments)
        return found

    monkeypatch.setattr(examination, "examine", examine)
    return asked


def app() -> typer.Typer:
    made = typer.Typer(rich_markup_mode="rich")
    made.callback()(lambda: None)
    command.register(made)
    return made


def test_a_failed_check_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer(monkeypatch, MIXED)
    result = CliRunner().invoke(app(), ["doctor", "--no-self-test", "--workers", "7"])
    assert result.exit_code == 1
    assert "Fix first: home" in result.stdout
    assert asked[0]["self_test"] is False and asked[0]["workers"] == 7
    result = CliRunner().invoke(app(), ["doctor", "--json"])
    assert result.exit_code == 1 and json.loads(result.stdout)["fix_first"]["name"] == "home"


def test_wrong_numbers_of_workers_are_refused() -> None:
    assert CliRunner().invoke(app(), ["doctor", "--workers", "0"]).exit_code == 2


def test_help_teaches_and_imports_no_torch() -> None:
    finished = run_doctor("--help")
    assert finished.returncode == 0
    for part in ("How to read it", "--no-self-test", "--workers 16", "--json", "Exit code 0"):
        assert part in finished.stdout
    modules = "shoal.cli.doctor.command, shoal.cli.doctor.examination"
    code = f"import sys, {modules}; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert subprocess.run(python(code), capture_output=True, text=True, timeout=60).stdout == "False False\n"


def test_a_trial_that_crashes_at_once_is_a_diagnosis() -> None:
    found = examination.examine(trial=python("import os; os.kill(os.getpid(), 11)"))
    by_name = {outcome.name: outcome.finding for outcome in found.outcomes}
    assert "SIGSEGV" in by_name["torch"].found and not found.ok
    assert by_name["self-test"].status is Status.WARN
    assert found.first is not None and found.first.name == "torch"


def test_sizes_and_short_texts() -> None:
    assert [checks.size_text(size) for size in (12, 1500, 64 << 20, 25.3e9, 2e12)] == [
        "12 bytes",
        "1.5 kB",
        "67.1 MB",
        "25.3 GB",
        "2 TB",
    ]
    assert checks.shorten("a\n b") == "a b"
    assert len(checks.shorten("x" * 1000)) <= 300
