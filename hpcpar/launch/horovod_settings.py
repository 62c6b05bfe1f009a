"""The settings that `HOROVOD_*` variables ask for, read once; below this they are values."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from hpcpar.errors import ConfigError
from hpcpar.launch.settings import NO, YES, as_number, flag, seconds
from hpcpar.units import MiB

LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")


def _names(*lines: str) -> frozenset[str]:
    return frozenset(f"HOROVOD_{name}" for line in lines for name in line.split())


_HONOURED = _names(
    "FUSION_THRESHOLD CYCLE_TIME DISABLE_GROUP_FUSION HIERARCHICAL_ALLREDUCE HIERARCHICAL_ALLGATHER",
    "STALL_CHECK_DISABLE STALL_CHECK_TIME_SECONDS STALL_SHUTDOWN_TIME_SECONDS TIMELINE TIMELINE_MARK_CYCLES",
    "DYNAMIC_PROCESS_SETS ELASTIC LOG_LEVEL",
)

# Read by whoever starts the job: see start_limit_s.
_READ_BY_LAUNCHERS = _names("START_TIMEOUT")

# Set by a launcher for its ranks: nobody asked for anything by it.
_SET_BY_LAUNCHERS = _names(
    "RANK SIZE LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE HOSTNAME SECRET_KEY SPARK_PYTHONPATH",
    "SPARK_WORK_DIR GLOO_RENDEZVOUS_ADDR GLOO_RENDEZVOUS_PORT GLOO_IFACE GLOO_GET_RANK_AND_SIZE",
)

# Prefixes that building Horovod reads: of no meaning to a program that runs, under Horovod as here.
_READ_BY_BUILDS = tuple(
    _names("WITH_ WITHOUT_ BUILD_ GPU ALLOW_MIXED_GPU_IMPL CUDA_ ROCM_ NCCL_ DEBUG MPICXX_SHOW SKIP_COMPILE")
    | _names("VERSION")
)

# Requests for what is done here anyway, by these values.
_AS_IT_IS = {
    "HOROVOD_CONTROLLER": ("mpi",),
    "HOROVOD_CPU_OPERATIONS": ("mpi",),
    "HOROVOD_AUTOTUNE": NO,
    "HOROVOD_TORUS_ALLREDUCE": NO,
    "HOROVOD_MPI_THREADS_DISABLE": NO,
    "HOROVOD_ENABLE_ASYNC_COMPLETION": NO,
    "HOROVOD_ENABLE_XLA_OPS": NO,
    "HOROVOD_DISABLE_NVTX_RANGES": YES,
    "HOROVOD_LOG_HIDE_TIME": YES,
}


@dataclass(frozen=True, slots=True)
class HorovodSettings:
    """Settings of `HOROVOD_*` variables that have a meaning here.

    fusion_threshold_nbytes  HOROVOD_FUSION_THRESHOLD             most bytes of tensors that travel as one
                                                                  (128 MiB); 0: each travels alone
    cycle_time_s             HOROVOD_CYCLE_TIME, in milliseconds  how long the engine gathers requests (1 ms)
    disable_group_fusion     HOROVOD_DISABLE_GROUP_FUSION         no tensor outside of a group joins it
    hierarchical_allreduce   HOROVOD_HIERARCHICAL_ALLREDUCE       sum within nodes first, then between them
    hierarchical_allgather   HOROVOD_HIERARCHICAL_ALLGATHER       gather within nodes first
    stall_check              not HOROVOD_STALL_CHECK_DISABLE      name ranks that others wait for
    stall_check_s            HOROVOD_STALL_CHECK_TIME_SECONDS     after this time (60 s)
    stall_shutdown_s         HOROVOD_STALL_SHUTDOWN_TIME_SECONDS  end the job after this time; 0: never
    timeline                 HOROVOD_TIMELINE                     file of a Chrome trace; "DYNAMIC": started
                                                                  and stopped by the script; None: none
    timeline_mark_cycles     HOROVOD_TIMELINE_MARK_CYCLES         the trace shows the engine's cycles
    dynamic_process_sets     HOROVOD_DYNAMIC_PROCESS_SETS         process sets may come and go after init
    elastic                  HOROVOD_ELASTIC                      the job may be started anew with other ranks
    log_level                HOROVOD_LOG_LEVEL                    trace, debug, info, warning, error or fatal
    ignored                  names of variables that are set and have no meaning here, sorted; variables
                             that launchers set for their ranks or that only builds read are not among them
    """

    fusion_threshold_nbytes: int = 128 * MiB
    cycle_time_s: float = 1e-3
    disable_group_fusion: bool = False
    hierarchical_allreduce: bool = False
    hierarchical_allgather: bool = False
    stall_check: bool = True
    stall_check_s: float = 60.0
    stall_shutdown_s: float = 0.0
    timeline: str | None = None
    timeline_mark_cycles: bool = False
    dynamic_process_sets: bool = False
    elastic: bool = False
    log_level: str = "warning"
    ignored: tuple[str, ...] = ()

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> HorovodSettings:
        """Read the variables; ConfigError names the one that is not understood."""
        return cls(
            fusion_threshold_nbytes=_nbytes(environ, "HOROVOD_FUSION_THRESHOLD", 128 * MiB),
            cycle_time_s=_not_negative(environ, "HOROVOD_CYCLE_TIME", 1.0, "milliseconds") / 1e3,
            disable_group_fusion=flag(environ, "HOROVOD_DISABLE_GROUP_FUSION", False),
            hierarchical_allreduce=flag(environ, "HOROVOD_HIERARCHICAL_ALLREDUCE", False),
            hierarchical_allgather=flag(environ, "HOROVOD_HIERARCHICAL_ALLGATHER", False),
            stall_check=not flag(environ, "HOROVOD_STALL_CHECK_DISABLE", False),
            stall_check_s=seconds(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0),
            stall_shutdown_s=_shutdown_s(environ),
            timeline=environ.get("HOROVOD_TIMELINE") or None,
            timeline_mark_cycles=flag(environ, "HOROVOD_TIMELINE_MARK_CYCLES", False),
            dynamic_process_sets=flag(environ, "HOROVOD_DYNAMIC_PROCESS_SETS", False),
            elastic=flag(environ, "HOROVOD_ELASTIC", False),
            log_level=_log_level(environ),
            ignored=tuple(sorted(name for name in environ if _is_ignored(name, environ[name]))),
        )


def start_limit_s(environ: Mapping[str, str] = os.environ) -> float | None:
    """Return the seconds that HOROVOD_START_TIMEOUT gives a launcher to start a job; None: not set."""
    limit_s = seconds(environ, "HOROVOD_START_TIMEOUT", math.inf)
    return None if limit_s == math.inf else limit_s


def _nbytes(environ: Mapping[str, str], name: str, default: int) -> int:
    found = _not_negative(environ, name, float(default), "bytes")
    if found != int(found):
        raise ConfigError(f"{name}={environ[name]!r} is no whole number of bytes: set it to one, or to 0")
    return int(found)


def _not_negative(environ: Mapping[str, str], name: str, default: float, unit: str) -> float:
    text = environ.get(name)
    if not text:
        return default
    found = as_number(text)
    if not 0 <= found < float("inf"):
        raise ConfigError(f"{name}={text!r} is not understood: set it to a number of {unit}, 0 or more")
    return found


def _shutdown_s(environ: Mapping[str, str]) -> float:
    name = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
    unlimited = as_number(environ.get(name) or "0") == float("inf")
    return 0.0 if unlimited else _not_negative(environ, name, 0.0, "seconds")


def _log_level(environ: Mapping[str, str]) -> str:
    text = environ.get("HOROVOD_LOG_LEVEL") or "warning"
    level = text.strip().lower()
    if level not in LOG_LEVELS:
        raise ConfigError(f"HOROVOD_LOG_LEVEL={text!r} is no level: set it to one of {', '.join(LOG_LEVELS)}")
    return level


def _is_ignored(name: str, value: str) -> bool:
    if not value or not name.startswith("HOROVOD_") or name.startswith(_READ_BY_BUILDS):
        return False
    if name in _HONOURED or name in _SET_BY_LAUNCHERS or name in _READ_BY_LAUNCHERS:
        return False
    return value.strip().lower() not in _AS_IT_IS.get(name, ())
