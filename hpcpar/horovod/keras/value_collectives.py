"""Horovod's collectives for what Keras users hold: tensors and variables, arrays, numbers.

Tensors and Keras variables come back as torch tensors; arrays, lists and numbers as numpy arrays. The
gradients of tensors pass through (Horovod's rules, see `hpcpar.horovod.torch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import torch
from torch import Tensor

from hpcpar.horovod.process_sets import ProcessSet, global_process_set
from hpcpar.horovod.torch import mpi_ops
from hpcpar.horovod.torch.compression import Compression
from hpcpar.horovod.torch.functions import broadcast_parameters
from hpcpar.uncompiled import uncompiled

__all__ = ["allgather", "allreduce", "broadcast", "broadcast_global_variables", "reducescatter"]


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a value of the same shape over all ranks: its average unless `op` or `average` say otherwise.

    average   old way to say op=Average or op=Sum
    errors    as of `hpcpar.horovod.torch.allreduce`
    """
    return _like(
        value,
        lambda tensor: mpi_ops.allreduce(
            tensor,
            average,
            name,
            compression,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        ),
    )


def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate the ranks' values along the first dimension, whose lengths may differ. Collective."""
    return _like(value, lambda tensor: mpi_ops.allgather(tensor, name, process_set))


def broadcast(
    value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's value on every rank; the others' must have its shape and type. Collective."""
    return _like(value, lambda tensor: mpi_ops.broadcast(tensor, root_rank, name, process_set))


def reducescatter(
    value: Any,
    name: str | None = None,
    op: int = mpi_ops.Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a value over all ranks, and return this rank's rows of it. Collective.

    op   Average or Sum
    """
    return _like(
        value,
        lambda tensor: mpi_ops.reducescatter(
            tensor,
            op=op,
            name=name,
            process_set=process_set,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
        ),
    )


@uncompiled
def broadcast_global_variables(root_rank: int, model: Any = None) -> None:
    """Give every rank the root's variables of a model and of its optimizer. Collective over all ranks.

    root_rank   of the whole job
    model       a built Keras model, or several in a list. An optimizer that has been compiled into one is
                built if it was not. State of random generators (dropout, augmentation) stays each rank's own
    errors      ValueError without a model, or for one that is not built; HorovodInternalError on every rank
                where ranks have other variables

    Horovod's function of this name has no `model`: it is for TensorFlow graphs, which know all variables,
    and raises an error in eager execution.
    """
    models = [] if model is None else list(model) if isinstance(model, list | tuple) else [model]
    if not models:
        raise ValueError(
            "broadcast_global_variables needs the model whose variables are meant, since no graph knows them "
            "all: broadcast_global_variables(root_rank, model=model), or give fit() "
            "callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank)]"
        )
    distinct = {id(variable): variable for each in models for variable in _variables_of(each)}
    # Not by their paths: Keras numbers layers and optimizers as they are made, and a rank may have made more.
    broadcast_parameters([variable.value for variable in distinct.values()], root_rank)


def _variables_of(model: Any) -> Iterable[Any]:
    if not model.built:
        raise ValueError(
            f"model {model.name!r} has no variables yet; call model.build(input_shape), or the model on a "
            f"batch, before its variables are broadcast"
        )
    seeds = {id(variable) for variable in _seed_states(model)}
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    held = [*model.variables, *(() if optimizer is None else optimizer.variables)]
    return [variable for variable in held if id(variable) not in seeds]


def _seed_states(model: Any) -> list[Any]:
    """Return the states of the model's random generators."""
    return [
        generator.state
        for layer in model._flatten_layers()
        for generator in getattr(layer, "_seed_generators", ())
    ]


def _like(value: Any, collective: Callable[[Tensor], Tensor]) -> Any:
    """Call a collective on a value's tensor; return an array unless the value is a tensor or variable."""
    if isinstance(value, keras.Variable):
        value = value.value
    if isinstance(value, Tensor):
        return collective(value)
    array = np.asarray(value)
    if array.dtype == object:
        raise ValueError(
            f"found {type(value).__name__} where a tensor, an array, a number or a list of numbers is needed"
        )
    return collective(torch.from_numpy(np.array(array))).numpy()
