"""Checks of what is installed and of where Shoal keeps things: versions, torch's build, extras, home, store, git."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from shoal.cli.doctor.checks import Finding, fail, ok, shorten, size_text, warn
from shoal.cli.doctor.child import Ran
from shoal.cli.doctor.machine import LEAST_HOME, write_error
from shoal.cli.doctor.trial import STAGE
from shoal.core.errors import ShoalError

PYTHON = (3, 11), (3, 14)
TORCH = (2, 10), (3, 0)
NUMPY = (1, 26), (3, 0)
"""The first version that is supported, and the first that is not."""

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "sqlalchemy": ("sqlalchemy",),
    "psycopg": ("psycopg",),
    "matplotlib": ("matplotlib",),
    "pyarrow": ("pyarrow",),
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "wandb": ("wandb",),
    "scikit-learn": ("scikit-learn",),
    "transformers": ("transformers",),
}
"""What Shoal uses if it is there, with the names of the distributions that bring it."""

_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class TorchFacts:
    """What a child process saw that imported torch."""

    facts: Mapping[str, Any]
    problem: str = ""
    """Why there are no facts."""
    last_lines: tuple[str, ...] = ()


def torch_facts(ran: Ran, gpus: Ran | None = None) -> TorchFacts:
    """What the trial `ran` has said of torch before anything else, and the trial `gpus` of GPUs."""
    seen = _line_with("torch", ran.output)
    if seen is None:
        last = tuple(line for line in ran.last_lines() if not line.startswith(STAGE))
        return TorchFacts({}, f"the process that imported it {ran.how()}" + (f": {last[-1]}" if last else ""), last)
    return TorchFacts({**seen, **((gpus and _line_with("gpus", gpus.output)) or {})})


def _line_with(key: str, output: str) -> dict[str, Any] | None:
    """The first line that is a JSON object with `key`."""
    for line in output.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and key in found:
            return found
    return None


def version_pair(text: str) -> tuple[int, int] | None:
    """(2, 13) of `2.13.0+cpu`."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def check_python(*, version: tuple[int, int, int], shoal_version: str, executable: str) -> Finding:
    shown = ".".join(map(str, version))
    details = {"version": shown, "executable": executable}
    if version[:2] < PYTHON[0]:
        return fail(f"{shown} is older than Shoal supports", "Install Python 3.11, 3.12 or 3.13.", **details)
    if version[:2] >= PYTHON[1]:
        return warn(f"{shown} is newer than Shoal is tested with", "Python 3.11, 3.12 or 3.13 is safe.", **details)
    return ok(f"{shown}, with shoal {shoal_version}", **details)


def check_torch(seen: TorchFacts) -> Finding:
    if seen.problem:
        return fail(
            shorten(f"cannot be imported: {seen.problem}"),
            f"Install it again for this Python: {sys.executable} -m pip install --force-reinstall 'torch>=2.10,<3'",
            last_lines=list(seen.last_lines),
        )
    version, cuda = str(seen.facts["torch"]), seen.facts.get("cuda")
    build = f"CUDA {cuda} build" if cuda else "CPU build"
    found = f"{version}, {build}, imported in {seen.facts.get('import_seconds', 0):.1f} s"
    details = {key: seen.facts.get(key) for key in ("torch", "cuda", "import_seconds")}
    pair = version_pair(version)
    if pair is None or pair < TORCH[0]:
        return fail(f"{found}: older than Shoal supports", "pip install 'torch>=2.10,<3'", **details)
    if pair >= TORCH[1]:
        return warn(f"{found}: newer than Shoal is tested with", "pip install 'torch>=2.10,<3'", **details)
    return ok(found, **details)


def check_numpy(seen: TorchFacts) -> Finding:
    if seen.problem:
        return _not_seen()
    version, fits = seen.facts.get("numpy"), seen.facts.get("numpy_fits", False)
    if version is None:
        return fail("not installed, or it cannot be imported", "pip install 'numpy>=1.26,<3'")
    pair = version_pair(str(version))
    if pair is None or not NUMPY[0] <= pair < NUMPY[1]:
        return warn(f"{version} is outside of what Shoal supports", "pip install 'numpy>=1.26,<3'", numpy=version)
    if not fits:
        return fail(
            f"{version}, but torch cannot use it: one was built for another major version of the other",
            "pip install --upgrade torch numpy",
            numpy=version,
        )
    return ok(f"{version}, and torch can use it", numpy=version)


def check_backends(seen: TorchFacts) -> Finding:
    if seen.problem:
        return _not_seen()
    backends: dict[str, bool] = seen.facts.get("backends", {})
    found = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in backends.items())
    if not backends.get("gloo"):
        return fail(
            found or "torch was built without torch.distributed",
            "Workers on CPUs talk by gloo, which this build of torch lacks: pip install torch  (the official wheel).",
            **backends,
        )
    return ok(found, **backends)


def check_gpus(seen: TorchFacts, *, driver: bool, env: Mapping[str, str]) -> Finding:
    """`driver`: whether a driver for GPUs of NVIDIA is loaded."""
    if seen.problem:
        return _not_seen()
    names, cuda = list(seen.facts.get("gpus", [])), seen.facts.get("cuda")
    details = {"gpus": names, "cuda": cuda, "nccl": seen.facts.get("nccl_version")}
    if names:
        nccl = f"NCCL {details['nccl']}" if details["nccl"] else "no NCCL"
        kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        if not details["nccl"]:
            return warn(
                f"{kinds}, {nccl}", "GPUs talk by NCCL: pip install torch  (the official CUDA wheel).", **details
            )
        return ok(f"{kinds}, {nccl}", **details)
    if driver and not cuda:
        return warn(
            "a driver for NVIDIA GPUs is loaded, but this torch is a CPU build",
            "To train on the GPUs, install the CUDA build that pytorch.org/get-started names for your driver.",
            **details,
        )
    if driver and "CUDA_VISIBLE_DEVICES" not in env:
        return warn(
            "a driver for NVIDIA GPUs is loaded, but torch sees no GPU",
            "Compare the CUDA version that nvidia-smi shows with torch's; the driver must not be older. In a "
            "container: docker run --gpus all.",
            **details,
        )
    hidden = " (CUDA_VISIBLE_DEVICES is set)" if driver else ""
    return ok(f"none{hidden}: training uses the CPU", **details)


def _not_seen() -> Finding:
    return warn("not known, because torch cannot be imported", "Mend torch first.")


def nvidia_driver_loaded(driver: Path = _DRIVER) -> bool:
    return driver.exists()


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_extras(*, version_of: Callable[[str], str | None], store: str) -> Finding:
    """`store`: the URL of the run store, which may need a driver."""
    versions = {
        extra: next((found for name in names if (found := version_of(name))), None) for extra, names in EXTRAS.items()
    }
    there = ", ".join(f"{extra} {version}" for extra, version in versions.items() if version) or "none"
    missing = [extra for extra, version in versions.items() if not version]
    found = there + (f"; not installed: {', '.join(missing)}" if missing else "")
    if store.startswith("postgresql") and versions["psycopg"] is None:
        return warn(found, "The run store is on PostgreSQL, which needs: pip install 'psycopg[binary]'", **versions)
    return ok(found, **versions)


def check_home(home: Path) -> Finding:
    """`home`: where runs are kept. It is not made here: it is enough that it could be."""
    folder = next((place for place in (home, *home.parents) if place.exists()), home)
    elsewhere = "name a folder that you can write: export SHOAL_HOME=/path/to/folder"
    if not folder.is_dir():
        return fail(f"{folder} is a file, so runs cannot be kept in {home}", f"Move it away, or {elsewhere}")
    refused = write_error(folder)
    if refused:
        return fail(
            f"{home} cannot be written ({refused})", f"Make it yours (chown, chmod u+rwx {folder}), or {elsewhere}"
        )
    free = shutil.disk_usage(folder).free
    found = f"{home}, {size_text(free)} free" + ("" if folder == home else " (made by the first run)")
    if free < LEAST_HOME:
        return warn(
            found, f"Checkpoints are kept there: remove old runs (du -sh {home}/runs/*), or {elsewhere}", free=free
        )
    return ok(found, free=free)


def check_store(url: str, *, open_store: Callable[[str], None]) -> Finding:
    """`open_store` opens the store at a URL, without making one, reads from it and closes it."""
    shown = without_password(url)
    if url == "none":
        return ok("SHOAL_STORE=none: no record of runs is kept")
    fix = "Give another one, or none, until it is mended: export SHOAL_STORE=none"
    try:
        open_store(url)
    except ImportError as error:
        return fail(
            f"{shown} cannot be opened: {error.name or error} is not installed",
            f"pip install {error.name or 'sqlalchemy'}",
        )
    except ShoalError as error:
        return fail(shorten(without_password(f"{shown} cannot be used: {error}")), fix)
    return ok(f"{shown} can be read")


def open_run_store(url: str) -> None:
    """Open the run store, read its newest run and close it. Raises StoreError, or ImportError without SQLAlchemy."""
    from shoal.store.store import Store

    with Store.open(url, create=False) as store:
        store.runs(limit=1)


def without_password(text: str) -> str:
    """`text` with the user and password of every URL, and what follows a `?`, left out."""
    hidden = re.sub(r"://[^/\s]*@", "://...@", text)
    return re.sub(r"(\w+://[^\s?]*)\?\S*", r"\1", hidden)


def check_git(which: Callable[[str], str | None] = shutil.which) -> Finding:
    path = which("git")
    install = "Install git (apt install git) if you want the commit of your code recorded with each run."
    if path is None:
        return warn("not found: runs are recorded without the commit of your code", install)
    try:
        finished = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=5, stdin=subprocess.DEVNULL, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return warn(f"{path} does not work ({shorten(str(error), 120)})", install)
    return ok(shorten(finished.stdout.removeprefix("git version"), 60))


def plain_environment(env: Mapping[str, str], *, leave_out: tuple[str, ...]) -> dict[str, str]:
    """`env` for a child that runs this same installation, without the variables named."""
    kept = {name: value for name, value in env.items() if name not in leave_out}
    # the child must find what this process imports from, wherever it is started
    folders = [os.path.abspath(folder) for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    source = Path(__file__).resolve().parents[2]
    if source.name not in ("site-packages", "dist-packages"):
        folders.insert(0, str(source))
    kept["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(folders))
    return kept
