"""Files of a checkpoint that one rank writes: its shards, and tensors that it has as the first of several."""

from __future__ import annotations

import copy
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hpcpar.checkpoint.files import ShardWriter, WrittenFiles
from hpcpar.checkpoint.local_tensor import LocalTensor, is_replicated
from hpcpar.checkpoint.model_state import ModelState
from hpcpar.checkpoint.optimizer_state import group_options, write_states
from hpcpar.checkpoint.ownership import WritePlan
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.data_parallel.parameters import in_memory_order
from hpcpar.data_parallel.zero3 import sharding_of
from hpcpar.errors import CheckpointError


@dataclass
class RankOutput:
    """Description of what one rank wrote.

    scalars            optimizer states that are no tensors
    options, tensors   of the optimizer's groups, and those that are tensors
    loss_scale         of the optimizer
    """

    model: WrittenFiles = field(default_factory=WrittenFiles)
    optimizer: WrittenFiles = field(default_factory=WrittenFiles)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    options: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    loss_scale: dict[str, float] | None = None

    def every_option(self) -> dict[str, Any]:
        """Return what all positions must have alike, by the words that name it."""
        options = {
            f"{key} of group {number}": value
            for number, group in enumerate(self.options)
            for key, value in group.items()
        }
        tensors = {name: value.tolist() for name, value in self.tensors.items()}
        return {**options, **tensors, "the loss scale": self.loss_scale}


@dataclass
class RankFiles:
    """Files that one rank writes, or has written."""

    output: RankOutput
    model: ShardWriter
    optimizer: ShardWriter

    def is_written(self) -> bool:
        """True if `finish` would not wait."""
        return self.model.is_finished() and self.optimizer.is_finished()

    def finish(self) -> RankOutput:
        """Return what is in the files, once they are written.

        errors   OSError, CheckpointError
        """
        self.output.model, self.output.optimizer = self.model.finish(), self.optimizer.finish()
        return self.output


def write_own(
    directory: Path,
    rank: int,
    plan: WritePlan,
    model: nn.Module,
    state: ModelState,
    optimizer: Optimizer | None,
    pool: Executor | None,
) -> RankFiles:
    """Write what the plan leaves to this rank; with a pool, copy it, and have the pool write the copies.

    errors   OSError, CheckpointError
    """
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory}, which rank 0 made, is not there for this rank; save to a file system that "
            "all share, and each run to a directory of its own: another one removes what is not its own"
        )
    common = plan.writes_common
    # A buffer may be a mask of infinities.
    masks = set(state.names.buffers)
    writer = partial(ShardWriter, directory, rank=rank, pool=pool)
    own = RankFiles(
        RankOutput(),
        writer("model", common=common, may_be_infinite=masks),
        writer("optimizer", common=common and optimizer is not None),
    )
    _write_model(own.model, plan, model, state)
    own.model.flush()
    if optimizer is not None:
        files, output = own.optimizer, own.output
        # Copies: training goes on while they are written.
        output.tensors, output.options = copy.deepcopy(group_options(optimizer))
        if isinstance(optimizer, DistributedOptimizer) and optimizer.steps_on_pieces:
            output.loss_scale = optimizer.scaler.state_dict()
        if common:
            for name, value in output.tensors.items():
                files.add_whole(name, value)
        output.scalars = write_states(optimizer, state.parameter_names, files, plan)
        files.flush()
    return own


def _write_model(files: ShardWriter, plan: WritePlan, model: nn.Module, state: ModelState) -> None:
    sharding = sharding_of(list(model.parameters()))
    sharded: set[int] = set()
    if sharding is not None:
        # A replicated parameter without elements has no piece, and is written as a whole tensor.
        sharded = {id(p) for p in sharding.every_parameter() if p.numel() or not is_replicated(p)}
        for piece, values in sharding.own_pieces():
            if plan.writes(piece.parameter, sharded=True):
                local = LocalTensor.of(piece.parameter, piece.layout)
                files.add(state.name_of(piece.parameter), values, local, piece.start)
    for value in state.tensors:
        if id(value) in sharded or not plan.writes(value, sharded=False):
            continue
        name = state.name_of(value)
        if is_replicated(value):
            files.add_whole(name, value)
        else:
            local = LocalTensor.of(value)
            files.add(name, in_memory_order(value, local.layout), local, 0)
