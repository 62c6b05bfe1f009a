"""Division of a batch into the microbatches of a pipeline.

[B, …]                       m tensors [B/m, …]
([B, …], [B, …])             m tuples of two
[x, y, …]                    a list holds m microbatches already, of any kind
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from hpcpar.autograd.checksum import checksum
from hpcpar.errors import OperationError


def microbatches_of(batch: Any, count: int, what: str) -> list[Any]:
    """Divide a tensor or a tuple of tensors along dim 0 into `count` microbatches; a list passes through.

    what     "inputs", for errors
    errors   OperationError if it does not divide, if lengths differ, and for other objects
    """
    if isinstance(batch, list):
        if len(batch) != count:
            raise OperationError(
                f"{what}: a list of {len(batch)} microbatches was given, where the schedule has {count}; "
                f"give {count}, or a schedule for {len(batch)}"
            )
        return batch
    if isinstance(batch, tuple) and batch and all(isinstance(each, Tensor) for each in batch):
        lengths = [_length(each) for each in batch]
        if len(set(lengths)) > 1:
            raise OperationError(
                f"{what}: tensors of {' and '.join(map(str, lengths))} along dim 0 were given as one batch; "
                f"give all of them the same length, or a list of {count} microbatches"
            )
        return list(zip(*(_divided(each, count, what) for each in batch), strict=True))
    if isinstance(batch, Tensor):
        return list(_divided(batch, count, what))
    found = "nothing; every rank may be given both" if batch is None else type(batch).__qualname__
    if isinstance(batch, tuple):
        found = f"({', '.join(type(each).__qualname__ for each in batch)})"
    raise OperationError(
        f"{what}: expected a tensor or a tuple of tensors [B, …], or a list of {count} microbatches, each an "
        f"argument of the first stage or of the loss, or a tuple of the stage's arguments; found {found}"
    )


def _divided(batch: Tensor, count: int, what: str) -> tuple[Tensor, ...]:
    length = _length(batch)
    if not length or length % count:
        below, above = length // count * count, (length // count + 1) * count
        near = f"{below} or {above}" if below else f"{above}"
        raise OperationError(
            f"{what}: a batch of {length} does not divide into {count} microbatches; {near} would, and "
            "a list may have microbatches of different lengths"
        )
    return torch.split(batch, length // count)


def batch_length(batch: Any) -> int | None:
    """Length of a batch that `microbatches_of` has divided; None for a list."""
    return None if isinstance(batch, list) else _length(as_arguments(batch)[0])


def _length(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 0


def as_arguments(microbatch: Any) -> tuple[Any, ...]:
    """Arguments of the first stage."""
    return microbatch if isinstance(microbatch, tuple) else (microbatch,)


def checksum_of(batch: Any) -> int | None:
    """Checksum of the tensors in a batch, however it is divided into microbatches; None without any."""
    found = None
    for microbatch in batch if isinstance(batch, list) else [batch]:
        for each in as_arguments(microbatch):
            if isinstance(each, Tensor) and each.layout is torch.strided and not each.is_meta:
                found = checksum(each, found or 0)
    return found


def signature(microbatches: Sequence[Any]) -> str:
    """Describe shapes and dtypes: equal for microbatches whose outputs have equal shapes."""
    return repr([_signature(as_arguments(microbatch)) for microbatch in microbatches])


def _signature(argument: Any) -> str:
    if isinstance(argument, Tensor):
        return f"{argument.dtype}{list(argument.shape)}{argument.requires_grad}"
    if isinstance(argument, Mapping):
        return repr({name: _signature(each) for name, each in argument.items()})
    if isinstance(argument, (tuple, list)):
        return repr(list(map(_signature, argument)))
    if isinstance(argument, (bool, int, float, str, type(None))):
        return repr(argument)
    return f"{type(argument).__qualname__} {next(_UNKNOWN)}"


_UNKNOWN = count()
"""Objects in which shapes are not looked for: each is another one."""
