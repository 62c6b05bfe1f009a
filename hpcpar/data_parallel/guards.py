"""Refusals of DistributedOptimizer: what it was asked, what it found, and what to do instead."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpcpar.autograd.held_parameter import own_gradient
from hpcpar.autograd.split_norms import split_over_of
from hpcpar.data_parallel.combined_optimizer import is_muon, parts_of
from hpcpar.data_parallel.elementwise import require_elementwise
from hpcpar.data_parallel.parameters import Named
from hpcpar.data_parallel.precision import Precision
from hpcpar.errors import OperationError
from hpcpar.parameter_info import info_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from hpcpar.data_parallel.builder import OptimizerOptions
    from hpcpar.data_parallel.gradient_reducer import GradientReducer
    from hpcpar.data_parallel.replica_comms import ReplicaComms
    from hpcpar.data_parallel.sharded_step import ShardedStep
    from hpcpar.data_parallel.zero3 import FullyShardedState


def checked_stage(asked: int | None, sharding: FullyShardedState | None) -> int:
    """Return the ZeRO stage; OperationError where it contradicts what `fully_shard` has done."""
    if asked is None:
        return 0 if sharding is None else 3
    if asked not in (0, 1, 2, 3):
        raise OperationError(f"zero_stage={asked!r}; there are 0, 1, 2 and 3")
    if (asked == 3) != (sharding is not None):
        raise OperationError(
            "zero_stage=3 needs a model that is sharded: call hpcpar.fully_shard(model, comm) before the "
            "optimizer is made"
            if asked == 3
            else f"zero_stage={asked}, but the model is fully sharded; leave zero_stage out, or give 3"
        )
    return asked


def checked_passes(passes: int) -> int:
    """Return `backward_passes_per_step`; OperationError below 1."""
    if passes < 1:
        raise OperationError(f"backward_passes_per_step={passes}; there must be at least 1")
    return passes


def refuse_contradictions(
    options: OptimizerOptions, precision: Any, sharding: FullyShardedState | None, inner: Optimizer
) -> None:
    """OperationError for options that exclude each other; `precision` as the user gave it."""
    stage = options.zero_stage
    if sharding is not None and precision is not None and Precision.of(precision) != options.precision:
        raise OperationError(
            "precision was given to the optimizer of a fully sharded model; give it to fully_shard"
        )
    if options.shard_ranks is not None and stage in (0, 3):
        raise OperationError(
            f"shard_ranks={options.shard_ranks} with zero_stage={stage}: "
            + (
                "nothing is sharded; take zero_stage=1 or 2, or leave it out"
                if stage == 0
                else "the model is sharded already; give it to fully_shard"
            )
        )
    if options.shared_parameters and stage not in (1, 2):
        raise OperationError(
            f"shared_parameters=True with zero_stage={stage}: only stages 1 and 2 keep whole "
            "parameters of which each rank updates a part; for 3 give it to fully_shard"
        )
    if options.nonfinite not in ("error", "skip", "step"):
        raise OperationError(f'nonfinite={options.nonfinite!r}; give "error", "skip" or "step"')
    if options.skip_limit < 1:
        raise OperationError(
            f"skip_limit={options.skip_limit}; give the skipped steps in a row that end a run"
        )
    if options.overlap_allgather and (options.model is None or stage not in (1, 2)):
        raise OperationError(
            f"overlap_allgather=True with zero_stage={stage} and "
            f"{'no model' if options.model is None else 'a model'}: it lets the all-gather of stages 1 and "
            "2 go on under the next forward of model=; give both, or leave it out"
        )
    if options.steps_on_shards:
        for each in parts_of(inner):
            if not is_muon(each):
                require_elementwise(each, said=options.elementwise)
    is_spread = bool(options.matrices) and (stage == 3 or options.splits_matrices)
    if is_spread and options.offload not in (None, "cpu"):
        raise OperationError(
            f"offload={str(options.offload)!r} was asked for with Muon on matrices on several ranks, "
            "as with zero_stage=3 and tensor parallelism, where all would be in memory at once; take "
            'offload="cpu", or zero_stage 1 or 2 without tensor parallelism'
        )
    if options.matrices and options.shared_parameters:
        raise OperationError(
            "shared_parameters=True was asked for with Muon, whose ranks own matrices of different sizes; "
            "leave it out, or take an optimizer that treats every element by itself: AdamW, SGD, …"
        )


def refuse_unknown_splits(matrices: Iterable[Named]) -> None:
    """OperationError for matrices of Muon that are split over ranks in a way that nobody noted."""
    for name, parameter in matrices:
        info = info_of(parameter)
        # Experts are spread over ep, each whole where it notes no split.
        if split_over_of(parameter) and info.split is None and info.replicas is None:
            raise OperationError(
                f"{name} is split over {split_over_of(parameter)[0].name!r}, and Muon needs to know how, to "
                "make the whole matrix orthogonal; make the layer by hpcpar.tensor_parallel, note its Split "
                "by hpcpar.tensor_parallel.split.place, or give the parameter to AdamW"
            )


def require_names(groups: Iterable[dict[str, Any]], named: Iterable[Named]) -> None:
    """OperationError unless every parameter of the groups has a name, for errors and checkpoints."""
    known = {id(parameter) for _, parameter in named}
    held = [parameter for group in groups for parameter in group["params"]]
    unnamed = [str(list(parameter.shape)) for parameter in held if id(parameter) not in known]
    if unnamed:
        shown = ", ".join(unnamed[:4]) + (", …" if len(unnamed) > 4 else "")
        raise OperationError(
            f"{len(unnamed)} of the optimizer's {len(held)} parameters have no name (shapes {shown}); pass "
            "the named_parameters() of every model whose parameters it holds, or (name, parameter) pairs"
        )


def refuse_unshareable(comms: ReplicaComms, *, shared_parameters: bool) -> None:
    """OperationError for parameters of a node that its ranks do not all have, or have shards of twice."""
    if shared_parameters and comms.is_hybrid:
        raise OperationError(
            "shared_parameters=True with shard_ranks: a node that shares its parameters has them once as it "
            "is; leave shard_ranks out"
        )
    if shared_parameters and not comms.is_one:
        raise OperationError(
            "shared_parameters=True was asked for a model whose experts are spread over ranks, which then do "
            "not all have the same; leave it out, or give every rank all experts (ep = 1)"
        )


def require_castable(named: Iterable[Named], dtype: torch.dtype) -> None:
    """OperationError for a trainable parameter that `precision=` cannot turn into `dtype`."""
    for name, parameter in named:
        if parameter.requires_grad and not parameter.is_floating_point():
            raise OperationError(
                f"{name} is of {str(parameter.dtype).removeprefix('torch.')}, which precision= cannot "
                f"turn into {str(dtype).removeprefix('torch.')}; leave precision out"
            )


def refuse_tied_memory(named: Iterable[Named]) -> None:
    """OperationError for two parameters in one memory, which would each be moved to a place of its own."""
    first_at: dict[tuple[torch.device, int], Named] = {}
    for name, parameter in named:
        if parameter.is_meta or not parameter.numel():
            continue
        other, held = first_at.setdefault((parameter.device, parameter.data_ptr()), (name, parameter))
        if held is not parameter and (held.requires_grad or parameter.requires_grad):
            raise OperationError(
                f"{name} and {other} are two parameters in the same memory, as after a.data = b.data, and "
                "zero_stage from 1 on, precision and offload move each to a place of its own, so that they "
                "would be tied no more; make them one parameter (module.weight = other.weight)"
            )


def refuse_untold_copies(reducer: GradientReducer, tied: Container[str]) -> None:
    """OperationError for tied weights whose gradients may be averaged before they are summed."""
    for name, parameter in zip(reducer.names, reducer.parameters, strict=True):
        if name not in tied and info_of(parameter).is_copy:
            raise OperationError(
                f"{name} is among the TiedWeights of a pipeline, but tied= does not name it, so that its "
                "gradient may be averaged before it is summed over the copies; pass "
                f"tied={{{name!r}: tied.counts_here(parameter)}}"
            )


def refuse_thawed(frozen: Iterable[Named]) -> None:
    """OperationError for a parameter that was frozen, and has a gradient now."""
    for name, parameter in frozen:
        if parameter.grad is not None:
            raise OperationError(
                f"{name} was frozen when its optimizer was made distributed and now has a gradient, "
                "which no bucket holds; set requires_grad first, then build the DistributedOptimizer"
            )


def refuse_own_gradients(reducer: GradientReducer, zero_stage: int) -> None:
    """OperationError for a `.grad` that was set by hand beside the shards of averages."""
    for name, parameter in zip(reducer.names, reducer.parameters, strict=True):
        if own_gradient(parameter) is not None:
            raise OperationError(
                f"the gradient of {name} was set after gradients had been averaged, and zero_stage="
                f"{zero_stage} steps on shards of averages; change those of named_gradients()"
            )


def refuse_replaced(update: ShardedStep, names: Sequence[str]) -> None:
    """OperationError where a parameter is not in its block any more, which alone the step writes to."""
    for block in update.blocks:
        if block.flat is None:
            continue
        base, itemsize = block.flat.data_ptr(), block.flat.element_size()
        for member, (start, stop) in block.bucket.ranges.items():
            if stop > start and update.parameters[member].data_ptr() != base + start * itemsize:
                raise OperationError(
                    f"the memory of {names[member]} was replaced after its optimizer "
                    "was made distributed, as p.data = …, vector_to_parameters, model.to() and another "
                    "optimizer's making do, so steps would not reach it; write in place (p.copy_() under "
                    "torch.no_grad()), then call optimizer.take_parameters(), or replace it before the "
                    "optimizer is made"
                )


def shared_name(mine: GradientReducer, other: GradientReducer) -> str | None:
    """Return the name of a parameter whose gradients both average."""
    own = set(map(id, mine.parameters))
    pairs: Iterable[tuple[str, Tensor]] = zip(other.names, other.parameters, strict=True)
    return next((name for name, parameter in pairs if id(parameter) in own), None)
