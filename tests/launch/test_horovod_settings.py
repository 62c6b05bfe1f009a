"""HOROVOD_* variables."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

from hpcpar.errors import ConfigError
from hpcpar.launch.horovod_settings import HorovodSettings, start_limit_s
from tests.command import variables


def test_an_empty_environment_gives_the_defaults() -> None:
    knobs = HorovodSettings.from_environ({})
    assert knobs == HorovodSettings()
    assert knobs.fusion_threshold_nbytes == 134_217_728
    assert knobs.cycle_time_s == 0.001
    assert (knobs.stall_check, knobs.stall_check_s, knobs.stall_shutdown_s) == (True, 60.0, 0.0)
    assert knobs.log_level == "warning"


def test_a_variable_set_to_nothing_asks_for_nothing() -> None:
    names = ("FUSION_THRESHOLD", "CYCLE_TIME", "TIMELINE", "LOG_LEVEL", "ELASTIC", "AUTOTUNE")
    assert HorovodSettings.from_environ({f"HOROVOD_{name}": "" for name in names}) == HorovodSettings()


def test_every_variable_is_read() -> None:
    environ = variables(
        "HOROVOD_FUSION_THRESHOLD=33554432 HOROVOD_CYCLE_TIME=2.5 HOROVOD_DISABLE_GROUP_FUSION=1 "
        "HOROVOD_HIERARCHICAL_ALLREDUCE=1 HOROVOD_HIERARCHICAL_ALLGATHER=1 HOROVOD_STALL_CHECK_DISABLE=1 "
        "HOROVOD_STALL_CHECK_TIME_SECONDS=5 HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=7.5 "
        "HOROVOD_TIMELINE=/scratch/timeline.json HOROVOD_TIMELINE_MARK_CYCLES=1 "
        "HOROVOD_DYNAMIC_PROCESS_SETS=1 HOROVOD_ELASTIC=1 HOROVOD_LOG_LEVEL=DEBUG"
    )
    assert HorovodSettings.from_environ(environ) == HorovodSettings(
        fusion_threshold_nbytes=33_554_432,
        cycle_time_s=0.0025,
        disable_group_fusion=True,
        hierarchical_allreduce=True,
        hierarchical_allgather=True,
        stall_check=False,
        stall_check_s=5.0,
        stall_shutdown_s=7.5,
        timeline="/scratch/timeline.json",
        timeline_mark_cycles=True,
        dynamic_process_sets=True,
        elastic=True,
        log_level="debug",
        ignored=(),
    )


def test_no_fusion_and_no_waiting_may_be_asked_for() -> None:
    knobs = HorovodSettings.from_environ({"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_CYCLE_TIME": "0"})
    assert (knobs.fusion_threshold_nbytes, knobs.cycle_time_s) == (0, 0.0)


def test_the_timeline_may_be_left_to_the_script() -> None:
    assert HorovodSettings.from_environ({"HOROVOD_TIMELINE": "DYNAMIC"}).timeline == "DYNAMIC"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "64MB"),
        ("HOROVOD_FUSION_THRESHOLD", "-1"),
        ("HOROVOD_FUSION_THRESHOLD", "1.5"),
        ("HOROVOD_FUSION_THRESHOLD", "inf"),
        ("HOROVOD_CYCLE_TIME", "fast"),
        ("HOROVOD_CYCLE_TIME", "-1"),
        ("HOROVOD_CYCLE_TIME", "nan"),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "0"),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "-5"),
        ("HOROVOD_HIERARCHICAL_ALLREDUCE", "perhaps"),
        ("HOROVOD_LOG_LEVEL", "loud"),
    ],
)
def test_a_value_that_is_not_understood_is_an_error_that_names_the_variable(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        HorovodSettings.from_environ({name: value})


def test_variables_without_a_meaning_here_are_named_in_order() -> None:
    environ = {"HOROVOD_NUM_NCCL_STREAMS": "2", "HOROVOD_AUTOTUNE": "1", "HOROVOD_CONTROLLER": "gloo"}
    assert HorovodSettings.from_environ(environ).ignored == (
        "HOROVOD_AUTOTUNE",
        "HOROVOD_CONTROLLER",
        "HOROVOD_NUM_NCCL_STREAMS",
    )


def test_what_launchers_set_what_builds_read_and_what_is_done_anyway_is_not_reported() -> None:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")
    environ = {f"HOROVOD_{name}": "1" for name in (*names, "WITH_PYTORCH", "WITHOUT_MPI", "GPU_OPERATIONS")}
    environ |= {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "MPI", "HPCPAR_CHECK": "1"}
    assert HorovodSettings.from_environ(environ).ignored == ()


@pytest.mark.parametrize(
    ("name", "as_here", "other"),
    [
        ("HOROVOD_AUTOTUNE", "0", "1"),
        ("HOROVOD_TORUS_ALLREDUCE", "false", "1"),
        ("HOROVOD_MPI_THREADS_DISABLE", "0", "1"),
        ("HOROVOD_ENABLE_ASYNC_COMPLETION", "0", "1"),
        ("HOROVOD_LOG_HIDE_TIME", "1", "0"),
        ("HOROVOD_DISABLE_NVTX_RANGES", "1", "0"),
    ],
)
def test_a_variable_that_asks_for_what_is_so_anyway_is_not_reported(
    name: str, as_here: str, other: str
) -> None:
    assert HorovodSettings.from_environ({name: as_here}).ignored == ()
    assert HorovodSettings.from_environ({name: other}).ignored == (name,)


def test_what_starts_a_job_and_what_launchers_tell_each_other_is_not_reported() -> None:
    names = ("START_TIMEOUT", "SECRET_KEY", "GLOO_GET_RANK_AND_SIZE", "SPARK_PYTHONPATH", "SPARK_WORK_DIR")
    assert HorovodSettings.from_environ({f"HOROVOD_{name}": "30" for name in names}).ignored == ()


def test_the_time_for_starting_is_seconds_or_not_said() -> None:
    name = "HOROVOD_START_TIMEOUT"
    assert start_limit_s({}) is start_limit_s({name: ""}) is start_limit_s({name: "inf"}) is None
    assert start_limit_s({name: "90"}) == 90.0
    for wrong in ("soon", "0", "-1"):
        with pytest.raises(ConfigError, match=name):
            start_limit_s({name: wrong})


def test_every_field_is_documented() -> None:
    documented = inspect.getdoc(HorovodSettings) or ""
    assert all(f"\n{field.name} " in documented for field in fields(HorovodSettings))


@pytest.mark.parametrize("never", ["0", "inf"])
def test_a_stall_may_last_for_ever(never: str) -> None:
    environ = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": never, "HOROVOD_STALL_CHECK_TIME_SECONDS": "inf"}
    knobs = HorovodSettings.from_environ(environ)
    assert (knobs.stall_shutdown_s, knobs.stall_check_s) == (0.0, float("inf"))
