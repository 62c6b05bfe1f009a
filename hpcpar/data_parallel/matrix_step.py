"""torch's Muon on this rank's parts of matrices: the same numbers as Muon.step() on whole ones.

    momentum    buf = lerp(buf, gradient, 1 - momentum)                 each element by itself, on every rank
    update      O = orthogonalized(gradient or Nesterov's, in bfloat16) of the whole matrix, on its owner
    weight      w = w (1 - lr · weight_decay) - adjusted lr · O         each element by itself, on every rank

So momentum lies where AdamW's moments would, and is saved, loaded and offloaded as these are.

    where a matrix lies                                 how it is orthogonalized
    stage 0; stages 1 and 2, on the rank that owns it   here
    stage 3: in pieces over dp                          MatrixExchange over dp
    tensor parallelism: in parts over tp                MatrixExchange over tp

source   Jordan 2024, Muon; Liu et al. 2025, Muon is Scalable for LLM Training, arXiv 2502.16982, section 2.3
         (each rank keeps its part of the momentum, and whole updates are gathered)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpcpar.data_parallel.bucket_shards import shard_of
from hpcpar.data_parallel.combined_optimizer import steps_on_matrices
from hpcpar.data_parallel.flat_parameters import Block
from hpcpar.data_parallel.matrix_exchange import TRAVELS_AS, SpreadMatrix
from hpcpar.data_parallel.parameters import Layout
from hpcpar.data_parallel.replica_comms import ReplicaComms
from hpcpar.parameter_info import info_of

MOMENTUM = "momentum_buffer"


def matrices_of(optimizer: Optimizer) -> set[int]:
    """Return the ids of the parameters that torch's Muon steps on."""
    return {
        id(parameter)
        for group in optimizer.param_groups
        if steps_on_matrices(optimizer, group)
        for parameter in group["params"]
    }


def is_divided(parameter: Tensor) -> bool:
    """Return whether a parameter is a part of a matrix over tensor-parallel ranks."""
    split = info_of(parameter).split
    return split is not None and bool(split.is_divided)


def whole_shape(parameter: Tensor, layout: Layout) -> tuple[int, ...]:
    """Return the shape of the matrix of which a parameter may be a part."""
    split = info_of(parameter).split
    shape: tuple[int, ...] = layout[0] if split is None else split.whole_shape(layout[0])
    return shape


def spread_matrices(
    matrices: Collection[int],
    parameters: Sequence[Tensor],
    layouts: Sequence[Layout],
    blocks: Sequence[Block],
    comms: ReplicaComms,
    *,
    sharded: bool,
) -> list[SpreadMatrix]:
    """Return the matrices of which this rank has no more than a part, in the order of a forward.

    matrices   ids of parameters
    sharded    each rank steps on its shards of the blocks, not on all of them
    """
    found = []
    for block in reversed(blocks):
        bucket = block.bucket
        comm = comms.shard_comm(bucket.replicas)
        is_cut = sharded and comm.size > 1 and bucket.counts is None
        here = {piece.member for piece in block.shard.pieces}
        lengths: dict[int, list[int]] = {member: [0] * comm.size for member in bucket.members}
        if is_cut:
            for rank in range(comm.size):
                for piece in shard_of(bucket, rank, comm.size).pieces:
                    lengths[piece.member][rank] = piece.numel
        for member in reversed(bucket.members):
            parameter, split = parameters[member], info_of(parameters[member]).split
            divided = is_divided(parameter)
            if id(parameter) not in matrices or not (is_cut or (divided and member in here)):
                continue
            found.append(
                SpreadMatrix(
                    member=member,
                    layout=layouts[member],
                    shape=whole_shape(parameter, layouts[member]),
                    dp_comm=comm if is_cut else None,
                    pieces=tuple(lengths[member]),
                    tp_comm=info_of(parameter).comm if divided else None,
                    split=split if divided else None,
                    device=block.own.device,
                )
            )
    return found


def momentum_update(gradient: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> Tensor:
    """Add a gradient to its momentum; return what is to be orthogonalized, in bfloat16. Elementwise."""
    if MOMENTUM not in state:
        state[MOMENTUM] = torch.zeros_like(gradient)
    buffer, momentum = state[MOMENTUM], group["momentum"]
    buffer.lerp_(gradient, 1 - momentum)
    update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
    return update.to(TRAVELS_AS, copy=True)  # the iterations write to it


def orthogonalized(update: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return a whole matrix's update, orthogonalized as torch's Muon does; its memory is used up."""
    from torch.optim._muon import _zeropower_via_newtonschulz  # torch before 2.9 has none

    result: Tensor = _zeropower_via_newtonschulz(
        update, group["ns_coefficients"], group["ns_steps"], group["eps"]
    )
    return result


def apply_update(weight: Tensor, update: Tensor, group: Mapping[str, Any], shape: Sequence[int]) -> None:
    """Decay a weight and subtract its update, by the rate of a matrix of this shape. Elementwise."""
    from torch.optim._muon import _adjust_lr

    rate = float(group["lr"])
    weight.mul_(1 - rate * group["weight_decay"])
    weight.add_(update, alpha=-_adjust_lr(rate, group["adjust_lr_fn"], torch.Size(shape)))
