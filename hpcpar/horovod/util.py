"""Helpers by the names of `horovod.common.util`, and `in_thread` of `horovod.runner.util.threads`.

The queries answer for this package: PyTorch is its only framework, MPI carries everything, and
nothing has to be built.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from functools import cache as _cache
from typing import Any, TypeVar

from hpcpar.horovod.exceptions import HorovodVersionMismatchError, get_version_mismatch_message
from hpcpar.launch.settings import env
from hpcpar.partition import bounds

T = TypeVar("T")

EXTENSIONS = ("torch",)

__all__ = ["EXTENSIONS", "HorovodVersionMismatchError", "_cache", "env", "get_version_mismatch_message"]
__all__ += ["check_extension", "check_installed_version", "extension_available", "gpu_available"]
__all__ += ["get_average_backwards_compatibility_fun", "get_ext_suffix", "get_extension_full_path"]
__all__ += ["ccl_built", "ddl_built", "gloo_built", "mpi_built", "nccl_built"]
__all__ += ["in_thread", "is_iterable", "is_version_greater_equal_than", "num_rank_is_power_2", "split_list"]


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return True for "torch" where PyTorch is installed: the only extension there is."""
    return ext_base_name in EXTENSIONS and importlib.util.find_spec("torch") is not None


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ImportError unless the extension ("horovod.torch") is there."""
    if not extension_available(ext_name.removeprefix("horovod.")):
        raise ImportError(
            f"{ext_name} is not part of hpcpar, which speaks PyTorch alone: use horovod.torch "
            f"(hpcpar.horovod.torch), or install Horovod itself for other frameworks"
        )


def check_installed_version(name: str, version: str, exception: BaseException | None = None) -> None:
    """Return: nothing was built for one version of a framework, so that any fits."""


def get_ext_suffix() -> str:
    """Return the ending of this Python's extension modules."""
    return sysconfig.get_config_var("EXT_SUFFIX") or ".so"


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Return where an extension of the package at `pkg_path` would be: directories, then its name."""
    return os.path.join(os.path.dirname(pkg_path), *args) + get_ext_suffix()


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Compare two versions; ValueError unless both are text and the target has three parts, as "2.5.0"."""
    if not isinstance(ver, str) or not isinstance(target, str) or len(target.split(".")) != 3:
        raise ValueError(f"versions {ver!r} and {target!r}: give text, and a target such as '2.5.0'")
    from packaging import version

    return version.parse(ver) >= version.parse(target)


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return True if that framework sees a GPU."""
    if not extension_available(ext_base_name):
        return False
    import torch

    return torch.cuda.is_available()


def _query(name: str) -> Callable[..., bool]:
    def built(verbose: bool = False) -> bool:
        from hpcpar.horovod import basics

        return bool(getattr(basics, name)())

    return built


mpi_built, gloo_built, nccl_built, ddl_built, ccl_built = map(
    _query, ("mpi_built", "gloo_built", "nccl_built", "ddl_built", "ccl_built")
)


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[Any, Any], Any]:
    """Make a function (op, average) -> op that resolves the older argument `average`.

    reduce_ops   has `Average` and `Sum`
    errors       ValueError when both are given
    """

    def choose(op: Any, average: Any) -> Any:
        if average is None:
            return reduce_ops.Average if op is None else op
        if op is not None:
            raise ValueError(f"both op={op!r} and average={average!r} were given: give op alone")
        warnings.warn("`average` is the older spelling: give `op`", DeprecationWarning, stacklevel=2)
        return reduce_ops.Average if average else reduce_ops.Sum

    return choose


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return True for 1, 2, 4, 8, … ranks."""
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(items: Sequence[T], n: int) -> list[Sequence[T]]:
    """Split into n consecutive pieces whose lengths differ by at most one, the longer first."""
    return [items[start:stop] for start, stop in bounds(len(items), n)]


def is_iterable(thing: object) -> bool:
    """Return True if `for` can iterate over it."""
    try:
        iter(thing)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def in_thread(
    target: Callable[..., Any],
    args: Iterable[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start a thread that calls `target(*args)`, and return it.

    daemon   the program's end does not wait for it
    silent   an exception in it ends it without a word
    """
    arguments = tuple(args)

    def call() -> None:
        with suppress(Exception) if silent else nullcontext():
            target(*arguments)

    thread = threading.Thread(target=call, name=name, daemon=daemon)
    thread.start()
    return thread
