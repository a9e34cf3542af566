from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import ConfigError
from shoal.engines.world import World, first_host

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "8",
    "SLURM_TASK_PID": "99",
    "SLURM_STEP_NODELIST": "n[003-010,12],m1",
    "SLURM_JOB_NODELIST": "a1",
}
BATCH_SCRIPT = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[1-4]"}


def without(env: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


def test_an_ordinary_shell_is_no_world() -> None:
    assert World.detect({}) is None
    assert World.detect({"PATH": "/bin", "RANK": "1", "MASTER_PORT": "1"}) is None
    assert World.detect({"WORLD_SIZE": "2", "RANK": ""}) is None


def test_torchrun() -> None:
    assert World.detect(TORCHRUN) == World(1, 4, 0, "127.0.0.1", 29500, "torchrun")
    told = {**TORCHRUN, "LOCAL_RANK": "1", "MASTER_ADDR": "n1"}
    assert World.detect(told) == World(1, 4, 1, "n1", 29500, "torchrun")
    assert World.detect({**SRUN, **told}) == World(1, 4, 1, "n1", 29500, "torchrun")


def test_torchrun_without_a_port_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match="set MASTER_PORT"):
        World.detect(without(TORCHRUN, "MASTER_PORT"))


def test_srun() -> None:
    world = World.detect(SRUN)
    assert world is not None
    assert (world.rank, world.size, world.local_rank, world.address, world.launcher) == (3, 4, 1, "n003", "slurm")
    assert 20000 <= world.port < 40000
    given_place = World.detect({**SRUN, "MASTER_ADDR": "here", "MASTER_PORT": "1234"})
    assert given_place == World(3, 4, 1, "here", 1234, "slurm")


def test_srun_falls_back_where_variables_are_missing() -> None:
    world = World.detect(without(SRUN, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_LOCALID"))
    assert world is not None
    assert (world.size, world.address, world.local_rank) == (8, "a1", 0)
    bare = World.detect({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"})
    assert bare is not None
    assert (bare.rank, bare.size, bare.address) == (0, 2, "127.0.0.1")


def test_a_step_of_one_task_is_a_world_of_one() -> None:
    world = World.detect({**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"})
    assert world is not None
    assert world.size == 1


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_TASK_PID": "99"},  # what sbatch gives to the script
        {"SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"},
        {"SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},  # a shell made by salloc
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
    ],
)
def test_a_batch_script_without_srun_is_no_world(more: dict[str, str]) -> None:
    assert World.detect({**BATCH_SCRIPT, **more}) is None


@pytest.mark.parametrize("bad", ["x", "-1", "1.5", "0x10", "1_0", "٣", "9" * 5000])
@pytest.mark.parametrize(
    ("env", "name"),
    [(TORCHRUN, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK")]
    + [
        (SRUN, name)
        for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_ID")
    ]
    + [({"SLURM_PROCID": "0"}, "SLURM_NTASKS"), (SRUN, "MASTER_PORT")],
)
def test_malformed_numbers_name_their_variable(env: dict[str, str], name: str, bad: str) -> None:
    with pytest.raises(ConfigError, match=name):
        World.detect({**env, name: bad})


@pytest.mark.parametrize(
    ("env", "change", "said"),
    [
        (TORCHRUN, {"RANK": "4"}, "RANK"),
        (TORCHRUN, {"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE"),
        (TORCHRUN, {"MASTER_PORT": "0"}, "MASTER_PORT"),
        (TORCHRUN, {"MASTER_PORT": "65536"}, "MASTER_PORT"),
        (SRUN, {"SLURM_PROCID": "4"}, "SLURM_PROCID"),
        (SRUN, {"SLURM_STEP_NODELIST": "n[3-"}, "SLURM_STEP_NODELIST"),
        (without(SRUN, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), {}, "SLURM_NTASKS"),
    ],
)
def test_numbers_out_of_range_name_their_variable(env: dict[str, str], change: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        World.detect({**env, **change})


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("n[003-010,12],m1", "n003"),
        ("m1,n[003-010]", "m1"),
        ("login-1.site.org", "login-1.site.org"),
        ("n[7]", "n7"),
        ("rack[2-3]n[01-04]", "rack2n01"),
        ("gpu[1,3-4]-ib,x", "gpu1-ib"),
    ],
)
def test_first_host(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.parametrize("nodelist", ["", ",n1", "n[", "n]", "n[]", "n[1-]", "n[1,,2]", "n[1[2]]", "n 1"])
def test_no_host(nodelist: str) -> None:
    with pytest.raises(ValueError):
        first_host(nodelist)


names = st.from_regex(r"[a-z][a-z0-9.-]{0,8}[a-z]", fullmatch=True)
spans = st.tuples(st.integers(0, 999), st.integers(0, 50), st.integers(1, 5))


@given(st.lists(st.tuples(names, st.lists(spans, max_size=4)), min_size=1, max_size=4))
def test_first_host_of_what_slurm_would_write(groups: list[tuple[str, list[tuple[int, int, int]]]]) -> None:
    hosts: list[str] = []
    parts: list[str] = []
    for name, ranges in groups:
        hosts += [f"{name}{low + more:0{width}}" for low, count, width in ranges for more in range(count + 1)] or [name]
        inside = ",".join(
            f"{low:0{width}}-{low + count:0{width}}" if count else f"{low:0{width}}" for low, count, width in ranges
        )
        parts.append(f"{name}[{inside}]" if ranges else name)
    assert first_host(",".join(parts)) == hosts[0]


@given(st.integers(0, 10**9), st.integers(0, 1000))
def test_the_derived_port_is_the_same_for_all_tasks_of_a_step_and_not_for_its_neighbours(job: int, step: int) -> None:
    def port(job: int, step: int, rank: int) -> int:
        env = {**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step), "SLURM_PROCID": str(rank)}
        world = World.detect(env)
        assert world is not None
        return world.port

    assert 20000 <= port(job, step, 0) <= 39999
    assert port(job, step, 0) == port(job, step, 3)
    assert len({port(job, step, 0), port(job + 1, step, 0), port(job, step + 1, 0)}) == 3


@given(st.dictionaries(st.sampled_from(sorted({*TORCHRUN, *SRUN, "LOCAL_RANK", "MASTER_ADDR"})), st.text(max_size=12)))
def test_any_environment_gives_a_world_or_none_or_a_config_error(env: dict[str, str]) -> None:
    try:
        world = World.detect(env)
    except ConfigError:
        return
    assert world is None or (0 <= world.rank < world.size and 1 <= world.port <= 65535)
