"""Running statistics, which each rank has of its own part of the batches, and other buffers."""

from __future__ import annotations

import hashlib
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hpcpar.data_parallel.batch_norm import CommonBatchNorm, is_local_batch_norm
from hpcpar.data_parallel.parameters import Named, distinct
from hpcpar.data_parallel.replicas import sum_of_bits

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


def warn_of_local_batches(model: nn.Module, dp_comm: Communicator) -> None:
    """Warn, on the first of several ranks, of BatchNorm that normalizes by each rank's own batch."""
    found = [
        f"{name or 'the model'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if is_local_batch_norm(module) and not isinstance(module, nn.SyncBatchNorm)
    ]
    if found and dp_comm.size > 1 and dp_comm.rank == 0:
        warnings.warn(
            f"{', '.join(found[:2])}{', …' if len(found) > 2 else ''}: in training it normalizes by each "
            "rank's own part of a batch, so that results depend on the number of ranks. For those of one "
            "process: model = hpcpar.SyncBatchNorm.convert_sync_batchnorm(model, comm) before the optimizer "
            "is made. Else its running statistics differ between ranks until "
            "hpcpar.average_running_statistics(model, comm), which checkpoint.save calls",
            stacklevel=3,
        )


@torch.no_grad()
def average_running_statistics(model: nn.Module, dp_comm: Communicator) -> None:
    """Make the running means and variances of BatchNorm and InstanceNorm those of all ranks. Collective.

    Each rank's count by its batches tracked, so a rank that has seen none counts for nothing. Statistics of
    SyncBatchNorm, which are the same already, stay what they are. To be called before an evaluation.
    """
    layers: list[Any] = [module for module in model.modules() if _tracks(module)]
    if not layers or dp_comm.size == 1:
        return
    counts = [_count(layer) for layer in layers]
    of_ranks = dp_comm.allgather(torch.tensor(counts, dtype=torch.float64)).reshape(dp_comm.size, -1)
    most = of_ranks.max(0).values.tolist()
    of_ranks[:, of_ranks.sum(0) == 0] = 1.0  # InstanceNorm counts none
    shares = (of_ranks[dp_comm.rank] / of_ranks.sum(0)).tolist()
    statistics = [[layer.running_mean, layer.running_var] for layer in layers]
    own = [
        tensor.double().cpu() * share
        for pair, share in zip(statistics, shares, strict=True)
        for tensor in pair
    ]
    total = dp_comm.allreduce(torch.cat(own))
    lengths = [len(part) for part in own]
    averages = iter(torch.split(total, lengths))
    for layer, pair, count in zip(layers, statistics, most, strict=True):
        for tensor in pair:
            tensor.copy_(next(averages))
        if count:
            layer.num_batches_tracked.fill_(int(count))


def digest_of_buffers(model: nn.Module) -> bytes:
    """Return a digest that is equal on two ranks if all their buffers are."""
    text = "\n".join(f"{name} {sum_of_bits(buffer).item()}" for name, buffer in _buffers(model))
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def agree_on_buffers(model: nn.Module, comm: Communicator) -> None:
    """Average running statistics; warn, on the first rank, of other buffers that differ. Collective."""
    average_running_statistics(model, comm)
    told = comm.allgather_object({name: sum_of_bits(buffer).item() for name, buffer in _buffers(model)})
    odd = [name for name in told[0] if any(other.get(name) != told[0][name] for other in told)]
    if odd and comm.rank == 0:
        warnings.warn(
            f"the buffers {', '.join(odd[:4])}{', …' if len(odd) > 4 else ''} differ between ranks, and a "
            "checkpoint holds the first rank's; make them the same before it is saved, by "
            "hpcpar.broadcast_parameters or an all-reduce",
            stacklevel=2,
        )


def _buffers(model: nn.Module) -> list[Named]:
    named = distinct(model.named_buffers())
    return [(name, buffer) for name, buffer in named if buffer.layout is torch.strided and not buffer.is_meta]


def _tracks(module: nn.Module) -> bool:
    is_local = isinstance(module, _NormBase) and not isinstance(module, CommonBatchNorm)
    return is_local and isinstance(module.running_mean, Tensor)


def _count(layer: Any) -> float:
    tracked = layer.num_batches_tracked
    return float(tracked) if isinstance(tracked, Tensor) else 0.0
