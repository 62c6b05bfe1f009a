"""Small helpers, by the names of `horovod.common.util`.

The queries answer for this package: PyTorch is its only framework, MPI carries everything, and
nothing has to be built.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hpcpar.launch.variables import env
from hpcpar.partition import bounds

T = TypeVar("T")

EXTENSIONS = ("torch",)

__all__ = [
    "EXTENSIONS",
    "ccl_built",
    "check_extension",
    "ddl_built",
    "env",
    "extension_available",
    "get_average_backwards_compatibility_fun",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether `horovod.<name>` can be used: "torch" where PyTorch is installed, nothing else."""
    return ext_base_name in EXTENSIONS and importlib.util.find_spec("torch") is not None


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ImportError unless the extension ("horovod.torch") is there."""
    if not extension_available(ext_name.removeprefix("horovod.")):
        raise ImportError(
            f"{ext_name} is not part of hpcpar, which speaks PyTorch alone: use horovod.torch "
            f"(hpcpar.horovod.torch), or install Horovod itself for other frameworks"
        )


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether that framework sees a GPU."""
    if not extension_available(ext_base_name):
        return False
    import torch

    return torch.cuda.is_available()


def mpi_built(verbose: bool = False) -> bool:
    return _answer("mpi_built")


def gloo_built(verbose: bool = False) -> bool:
    return _answer("gloo_built")


def nccl_built(verbose: bool = False) -> bool:
    return _answer("nccl_built")


def ddl_built(verbose: bool = False) -> bool:
    return _answer("ddl_built")


def ccl_built(verbose: bool = False) -> bool:
    return _answer("ccl_built")


def _answer(query: str) -> bool:
    from hpcpar.horovod.torch import mpi_ops

    return bool(getattr(mpi_ops, query)())


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[Any, Any], Any]:
    """A function (op, average) -> op, which resolves the older argument `average` into the newer `op`.

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
    """Whether a number of ranks is 1, 2, 4, 8, ..."""
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(items: Sequence[T], n: int) -> list[Sequence[T]]:
    """n consecutive pieces whose lengths differ by at most one, the longer first."""
    return [items[start:stop] for start, stop in bounds(len(items), n)]


def is_iterable(thing: object) -> bool:
    """Whether `for` can walk over it."""
    try:
        iter(thing)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True
