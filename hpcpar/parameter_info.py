"""Facts about a parameter that its tensor does not tell, in one record that the parameter carries.

    tensor_parallel      split, comm                   noted by `place`; read by checkpoints and whole weights
    autograd             split_over                    norms add powers over these communicators
    pipeline_parallel    is_copy, counts_elsewhere     tied weights
    data_parallel        name, unit_name, sharding     fully sharded models, and their error messages
    expert_parallel      replicas                      gradients are summed over these ranks alone

A record is never changed: `note` puts another one in its place, so parameters never share changes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from hpcpar.comm import Communicator

_ATTRIBUTE = "hpcpar_info"


@dataclass(frozen=True)
class ParameterInfo:
    """Record of one parameter; every default means "an ordinary parameter, whole on this rank".

    name              full name in the model that `fully_shard` was given
    unit_name         name of the FSDP unit that unshards it; "" is the root
    sharding          weak reference to the model's FullyShardedState
    split             tensor-parallel Split: which part of the whole tensor each rank of `comm` holds
    comm              communicator over which `split` divides it
    split_over        communicators over whose ranks norms are summed, in a common order
    replicas          ranks that have a copy, where these are not all over which gradients are averaged
    is_copy           another rank of the pipeline holds a tied copy
    counts_elsewhere  that other rank's copy is the one that counts in norms
    """

    name: str = ""
    unit_name: str = ""
    sharding: Callable[[], Any] | None = None
    split: Any = None
    comm: Communicator | None = None
    split_over: tuple[Communicator, ...] = ()
    replicas: Communicator | None = None
    is_copy: bool = False
    counts_elsewhere: bool = False


_ORDINARY = ParameterInfo()


def info_of(parameter: Tensor) -> ParameterInfo:
    """Return the parameter's record, or the default one."""
    found: ParameterInfo = getattr(parameter, _ATTRIBUTE, _ORDINARY)
    return found


def note(parameter: Tensor, **facts: Any) -> None:
    """Set fields of the parameter's record."""
    setattr(parameter, _ATTRIBUTE, replace(info_of(parameter), **facts))
