"""Who this process is, when a launcher has already started one process per worker.

`World` is the knowledge; `World.detect` reads it from the variables of torchrun or Slurm and is the only place that
knows their names. It is pure: the environment is an argument.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.core.errors import ConfigError

LOOPBACK = "127.0.0.1"
_PORTS = range(1, 65536)
_DERIVED_PORTS = range(20000, 40000)
_NUMBER = re.compile(r"\s*(\d{1,18})\s*", re.ASCII)
_SLURMS_OWN_STEPS = 0xFFFF_FFF0  # step ids from here on: batch script, interactive shell, extern, pending

_BRACKET = re.compile(r"\[(\w+)(?:-\w+)?(?:,\w+(?:-\w+)?)*\]", re.ASCII)
_FIRST_HOST = re.compile(rf"((?:[\w.-]|{_BRACKET.pattern})+)(?:,.*)?", re.ASCII)


@dataclass(frozen=True)
class World:
    """This process's place among the workers, and where they meet."""

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    launcher: str
    """Who started this process: `torchrun`, `slurm`, or `script` if it was its own first worker."""

    @classmethod
    def detect(cls, env: Mapping[str, str]) -> World | None:
        """The world that `env` speaks of; None if this process was not started as one worker of several.

        torchrun beats Slurm, so that torchrun inside a Slurm job works. A variable that is empty counts as not set.
        Raises ConfigError naming the variable that is malformed or missing.
        """
        env = {name: value for name, value in env.items() if value.strip()}
        if "RANK" in env and "WORLD_SIZE" in env:
            return _from_torchrun(env)
        if _is_slurm_task(env):
            return _from_slurm(env)
        return None


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: `n003` of `n[003-010,12],m1`. Raises ValueError if it is none."""
    match = _FIRST_HOST.fullmatch(nodelist.strip())
    if match is None:
        raise ValueError(nodelist)
    return _BRACKET.sub(lambda bracket: bracket[1], match[1])


def _from_torchrun(env: Mapping[str, str]) -> World:
    rank, size = _rank_and_size(env, "RANK", "WORLD_SIZE")
    if "MASTER_PORT" not in env:
        raise ConfigError(
            f"RANK={rank} and WORLD_SIZE={size} are set but MASTER_PORT is not: start the script with torchrun, or set "
            "MASTER_PORT to a port that is free on MASTER_ADDR; to train without a launcher, unset RANK and WORLD_SIZE"
        )
    address = env.get("MASTER_ADDR", LOOPBACK).strip()
    return World(rank, size, _number(env, "LOCAL_RANK", 0), address, _port(env), "torchrun")


def _is_slurm_task(env: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of its tasks.

    srun sets SLURM_STEP_ID for each task. The batch script of a job has SLURM_NTASKS too, and SLURM_PROCID=0, but it is
    one process: to wait for the others would be to wait forever. It shows by SLURM_TASK_PID without a step.
    """
    if "SLURM_PROCID" not in env:
        return False
    if "SLURM_STEP_ID" in env:
        return _number(env, "SLURM_STEP_ID") < _SLURMS_OWN_STEPS
    return "SLURM_TASK_PID" not in env and _number(env, _slurm_size_name(env), 1) > 1


def _from_slurm(env: Mapping[str, str]) -> World:
    rank, size = _rank_and_size(env, "SLURM_PROCID", _slurm_size_name(env))
    port = _port(env) if "MASTER_PORT" in env else _derived_port(env)
    return World(rank, size, _number(env, "SLURM_LOCALID", 0), _slurm_address(env), port, "slurm")


def _slurm_size_name(env: Mapping[str, str]) -> str:
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"


def _slurm_address(env: Mapping[str, str]) -> str:
    if "MASTER_ADDR" in env:
        return env["MASTER_ADDR"].strip()
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if name in env:
            try:
                return first_host(env[name])
            except ValueError:
                raise ConfigError(
                    f"{name}={env[name]!r}: must be a list of hosts like n[003-010,12],m1; "
                    "set MASTER_ADDR to the host of rank 0 instead"
                ) from None
    return LOOPBACK


def _derived_port(env: Mapping[str, str]) -> int:
    """The same port on every task of a step, and different ones for steps that run at the same time."""
    key = 101 * _number(env, "SLURM_JOB_ID", 0) + _number(env, "SLURM_STEP_ID", 0)
    return _DERIVED_PORTS[key % len(_DERIVED_PORTS)]


def _rank_and_size(env: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    rank, size = _number(env, rank_name), _number(env, size_name)
    if rank >= size:
        raise ConfigError(f"{rank_name}={rank}, {size_name}={size}: the rank must be from 0 to {size_name} - 1")
    return rank, size


def _port(env: Mapping[str, str]) -> int:
    port = _number(env, "MASTER_PORT")
    if port not in _PORTS:
        raise ConfigError(f"MASTER_PORT={port}: must be from {_PORTS[0]} to {_PORTS[-1]}")
    return port


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    if name not in env:
        if default is None:
            raise ConfigError(f"{name} is not set: must be a whole number; start the script with torchrun or srun")
        return default
    match = _NUMBER.fullmatch(env[name])
    if match is None:
        raise ConfigError(f"{name}={env[name]!r}: must be a whole number, not negative")
    return int(match[1])
