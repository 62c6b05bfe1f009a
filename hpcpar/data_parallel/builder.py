"""Build what a DistributedOptimizer consists of, one function per ZeRO stage.

stage    reducer            blocks (flat parameters)         step                 parameters afterwards
0        Reducer            none; all, with precision        on whole parameters  -
1        Reducer            own shard of each bucket         ShardedStep          ParameterAllGather
2        ShardedGradients   own shard of each bucket         ShardedStep          ParameterAllGather
3        the model's own, made by `fully_shard`              ShardedStep          gathered by the units
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from hpcpar.data_parallel.bucket_shards import Piece
from hpcpar.data_parallel.flat_parameters import Block, gather_into_blocks
from hpcpar.data_parallel.gradient_reducer import GradientReducer
from hpcpar.data_parallel.guards import (
    refuse_tied_memory,
    refuse_unshareable,
    require_castable,
    require_names,
)
from hpcpar.data_parallel.matrix_step import spread_matrices
from hpcpar.data_parallel.norms import GradientNorm
from hpcpar.data_parallel.offload import make_offload
from hpcpar.data_parallel.parameter_allgather import ParameterAllGather
from hpcpar.data_parallel.parameters import Named, layout_of
from hpcpar.data_parallel.precision import Precision
from hpcpar.data_parallel.reducer import Reducer, bucketed
from hpcpar.data_parallel.reduction import Averaging, Reduction
from hpcpar.data_parallel.replica_comms import ReplicaComms
from hpcpar.data_parallel.sharded_step import ShardedStep
from hpcpar.data_parallel.shared_parameters import NodeSharedParameters
from hpcpar.data_parallel.zero2 import ShardedGradients
from hpcpar.data_parallel.zero3 import FullyShardedState

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


@dataclass(frozen=True)
class OptimizerOptions:
    """Options of a DistributedOptimizer, as its constructor documents them.

    matrices   ids of the parameters that Muon steps on
    splits_matrices   tensor-parallel ranks have parts of some of these
    """

    zero_stage: int
    precision: Precision | None
    offload: str | Path | None
    shared_parameters: bool
    model: nn.Module | None
    overlap_allgather: bool
    nonfinite: str
    skip_limit: int
    tied: Mapping[str, bool]
    elementwise: bool
    bucket_bytes: int
    first_bucket_bytes: int
    algorithm: str | None
    shard_ranks: int | None = None
    matrices: Collection[int] = ()
    splits_matrices: bool = False

    @property
    def steps_on_shards(self) -> bool:
        """True where the optimizer steps on flat pieces, not on the parameters themselves."""
        wanted = self.precision is not None or self.offload is not None or self.splits_matrices
        return bool(self.zero_stage) or wanted

    @property
    def reduction_dtype(self) -> torch.dtype | None:
        """Element type of sums of gradients; None: the gradients' own."""
        return None if self.precision is None else self.precision.reduction


@dataclass
class Parts:
    """Parts of one optimizer.

    held        ids of all parameters in the inner optimizer's groups
    averaging   how buckets become averages in stages 0 and 1
    allgather   brings new parameters to all ranks after a step
    update      steps on this rank's pieces; None: the inner optimizer steps on whole parameters
    comms       of the parameters' replicas
    loan        the communicators of gradients; None: the model's own, in stage 3
    """

    held: set[int]
    reducer: GradientReducer
    blocks: Sequence[Block]
    averaging: Averaging | None
    node_shared: NodeSharedParameters | None
    allgather: ParameterAllGather | FullyShardedState
    update: ShardedStep | None
    norm: GradientNorm
    comms: ReplicaComms
    loan: ReplicaComms | None

    def __post_init__(self) -> None:
        self.number_of = {id(p): number for number, p in enumerate(self.reducer.parameters)}
        self.piece_of: dict[int, tuple[int, Piece]] = {
            piece.member: (number, piece)
            for number, block in enumerate(self.blocks)
            for piece in block.shard.pieces
        }


class Builder:
    """Makes the parts of one optimizer. Collective.

    named      all parameters that have a name; those that `inner` does not hold are left alone
    reduction  (averaging) -> how buckets are reduced; Horovod's waits for all ranks first
    """

    def __init__(
        self,
        inner: Optimizer,
        named: Sequence[Named],
        dp_comm: Communicator,
        options: OptimizerOptions,
        sharding: FullyShardedState | None,
        reduction: Callable[[Averaging], Reduction],
    ) -> None:
        require_names(inner.param_groups, named)
        self.inner = inner
        self.everything = named
        self.dp_comm = dp_comm
        parameters = [parameter for _, parameter in named]
        self.comms = (
            ReplicaComms(dp_comm, parameters, options.shard_ranks) if sharding is None else sharding.comms
        )
        refuse_unshareable(self.comms, shared_parameters=options.shared_parameters)
        self.options = options
        self.sharding = sharding
        self.reduction = reduction
        self.held = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
        # Buckets leave in order, last registered first: what is averaged last keeps none waiting there.
        self.named = sorted(
            ((name, parameter) for name, parameter in named if id(parameter) in self.held),
            key=lambda pair: pair[0] not in options.tied,
        )
        # In a bucket of their own, so that the sums over replicas of all copies run in the same order, and
        # copies stay the same to the last bit.
        self.tied = [parameter for name, parameter in self.named if name in options.tied]

    def build(self, *, passes: int, advice: str, on_loaded: Callable[[], None]) -> Parts:
        """Return the parts.

        passes, advice   as of Reducer
        on_loaded        bound method that is called when a sharded model's parameters were loaded
        """
        node_shared = NodeSharedParameters(self.dp_comm) if self.options.shared_parameters else None
        averaging: Averaging | None = None
        loan: ReplicaComms | None = None
        reducer: GradientReducer
        if self.sharding is not None:
            reducer, blocks = self._adopt_sharded_model(self.sharding, on_loaded)
        else:
            blocks = self._make_blocks(node_shared) if self.options.steps_on_shards else []
            # Gradients leave in the order of backward, which ranks need not share with other calls.
            loan = self.comms.lend("gradients")
            if self.options.zero_stage == 2:
                reducer = self._sharded_gradients(blocks, loan)
            else:
                averaging = Averaging(
                    loan,
                    self.options.algorithm,
                    scattered=self.options.zero_stage == 1,
                    dtype=self.options.reduction_dtype,
                )
                reducer = self._reducer(averaging, loan, passes, advice)
        allgather = self.sharding or ParameterAllGather(
            blocks if self.options.zero_stage else [],
            reducer.parameters,
            self.comms,
            node_shared=node_shared,
            model=self.options.model if self.options.overlap_allgather else None,
        )
        update = self._sharded_step(reducer, blocks) if self.options.steps_on_shards else None
        norm = self._norm(reducer)
        return Parts(
            self.held, reducer, blocks, averaging, node_shared, allgather, update, norm, self.comms, loan
        )

    # --- one function per stage -------------------------------------------------------------------

    def _reducer(self, averaging: Averaging, comms: ReplicaComms, passes: int, advice: str) -> Reducer:
        """Stages 0 and 1: whole gradients in buckets, all-reduced or reduce-scattered once a step."""
        return Reducer(
            self.named,
            comms,
            bucket_bytes=self.options.bucket_bytes,
            first_bucket_bytes=self.options.first_bucket_bytes,
            algorithm=self.options.algorithm,
            passes=passes,
            groups=[self.tied],
            reduction=self.reduction(averaging),
            sharded=self.options.zero_stage > 0,
            advice=advice,
            late=self.options.tied,
            held=True,
            matrices=self.options.matrices,
        )

    def _sharded_gradients(self, blocks: Sequence[Block], comms: ReplicaComms) -> ShardedGradients:
        """Stage 2: gradients are reduce-scattered in every backward."""
        trainable = [(name, parameter) for name, parameter in self.named if parameter.requires_grad]
        return ShardedGradients(
            [name for name, _ in trainable],
            [parameter for _, parameter in trainable],
            [block.bucket for block in blocks],
            comms,
            dtype=self.options.reduction_dtype,
            algorithm=self.options.algorithm,
        )

    def _adopt_sharded_model(
        self, sharding: FullyShardedState, on_loaded: Callable[[], None]
    ) -> tuple[ShardedGradients, Sequence[Block]]:
        """Stage 3: the model has its reducer and its blocks already."""
        self.comms.agree_on_parameters(self.named)
        sharding.require_all(self.named)
        sharding.on_loaded = weakref.WeakMethod(on_loaded)
        if sharding.gradients.used_up:
            sharding.gradients.zero()  # an optimizer before this one has stepped on them
        # Under the names that this optimizer was given, not those in the module that was sharded.
        name_of = {id(parameter): name for name, parameter in self.named}
        sharding.gradients.names = [name_of[id(p)] for p in sharding.gradients.parameters]
        return sharding.gradients, sharding.blocks

    # --- what several stages have in common -------------------------------------------------------

    def _make_blocks(self, node_shared: NodeSharedParameters | None) -> list[Block]:
        """Move the parameters into flat memory, a block for each bucket; cast them to `precision`."""
        self.comms.agree_on_parameters(self.named)
        refuse_tied_memory(self.everything)
        dtype = None if self.options.precision is None else self.options.precision.parameters
        if dtype is not None:
            for _, parameter in self.everything:
                if not parameter.requires_grad and parameter.is_floating_point():
                    parameter.data = parameter.data.to(dtype)
            require_castable(self.named, dtype)
        trainable = [parameter for _, parameter in self.named if parameter.requires_grad]
        tied = set(map(id, self.tied))
        return gather_into_blocks(
            trainable,
            bucketed(
                trainable,
                dtype=dtype,
                bucket_bytes=self.options.bucket_bytes,
                first_bucket_bytes=self.options.first_bucket_bytes,
                shards=self.comms.shards if self.options.zero_stage else None,
                groups=[[number for number, parameter in enumerate(trainable) if id(parameter) in tied]],
                matrices=self.options.matrices,
            ),
            self.comms,
            dtype=dtype,
            sharded=self.options.zero_stage > 0,
            node_shared=node_shared,
        )

    def _sharded_step(self, reducer: GradientReducer, blocks: Sequence[Block]) -> ShardedStep:
        device = blocks[0].own.device if blocks else torch.device("cpu")
        layouts = None if self.sharding is None else self.sharding.layouts
        spread = spread_matrices(
            self.options.matrices,
            reducer.parameters,
            layouts or [layout_of(parameter) for parameter in reducer.parameters],
            blocks,
            self.comms,
            sharded=self.options.zero_stage > 0,
        )
        with self.dp_comm.together("making room for the optimizer's state"):
            return ShardedStep(
                self.inner,
                reducer.parameters,
                blocks,
                precision=self.options.precision,
                offload=make_offload(self.options.offload, device),
                layouts=layouts,
                matrices=self.options.matrices,
                spread=spread,
            )

    def _norm(self, reducer: GradientReducer) -> GradientNorm:
        averaged = set(map(id, reducer.parameters))
        return GradientNorm(
            reducer.parameters,
            reducer.buckets,
            self.comms,
            sharded=self.options.zero_stage > 0,
            elsewhere=[p for name, p in self.named if not self.options.tied.get(name, True)],
            others=[parameter for _, parameter in self.everything if id(parameter) not in averaged],
        )
