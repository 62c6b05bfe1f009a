"""Gradient synchronisation: averages over the data-parallel ranks, under way while backward runs.

    backward   ... dW2 ──── dW1 ──── dW0 ...
                    │ hook   │ hook   │ hook
    bucket 0   [dW2 │ dW1]  full ─> start_allreduce ─ ─ poke ─ ─ ─ ─ ┐
    bucket 1                     [dW0]  full ─> start_allreduce ─ ─ ─┤
                                                      synchronize ── wait

A parameter's `.grad` is a view into its bucket, so what autograd adds to it is already where it will
be sent from, and what arrives is already where the optimizer reads it.
source   Li et al. 2020, PyTorch Distributed, arXiv 2006.15704 (buckets, order, usage map, no_sync)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpcpar.autograd.held_parameter import hold, own_gradient, release, set_own_gradient
from hpcpar.data_parallel.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, Bucket, assign
from hpcpar.data_parallel.flat_parameters import allocate_flat
from hpcpar.data_parallel.gradient_reducer import GradientReducer
from hpcpar.data_parallel.gradient_views import BucketState, GradientViews
from hpcpar.data_parallel.guards import refuse_thawed
from hpcpar.data_parallel.parameters import Named, distinct, extent
from hpcpar.data_parallel.reduction import Averaging, Pending, Reduction
from hpcpar.data_parallel.replica_comms import ReplicaComms
from hpcpar.errors import GradientOrderError, OperationError
from hpcpar.planner.traffic import expected_nbytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hpcpar.comm import Communicator


ADVICE = (
    "Run the backwards of all microbatches but the last inside no_sync(), or say by "
    "backward_passes_per_step= how many there are, as for a pipeline's, and step() or zero_grad() before the "
    "next; a weight that two stages of a pipeline share is to be named by tied="
)


class Reducer(GradientReducer):
    """Average the gradients of named parameters over their replicas, in buckets, during backward.

        reducer = Reducer(model.named_parameters(), comm)
        loss.backward()              # hooks fill buckets; a full bucket leaves when all before it have left
        reducer.synchronize()        # sends what is left, and waits: every `.grad` is the average
        optimizer.step()
        reducer.next_step()
        reducer.zero()

    A backward outside `no_sync` is the averaging one. A parameter that got no gradient counts as zero on that
    rank; one that got none on any rank keeps `.grad` None, as in one process. Frozen parameters take no part.

    passes            backwards outside `no_sync` whose sum is averaged: the last of them sends
    groups            parameters that are to share a bucket
    sparse_as_dense   make sparse gradients dense; else they are an error
    reduction         how a bucket is reduced; None: averaged by `algorithm`
    sharded           each bucket is to be cut into equal shards, one for each rank with a copy
    matrices          ids of parameters that one rank is to own whole, where it is sharded
    advice            ends the error message about a gradient too many
    late              names of parameters whose gradients are complete only when `synchronize` is called
    held              reading `.grad` asks the optimizer from a gradient's departure until it is an average,
                      and from `hide` until `zero`

    Making one is collective: every rank must hold the same parameters (MismatchError).

    """

    def __init__(
        self,
        named_parameters: Iterable[Named],
        comms: Communicator | ReplicaComms,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        algorithm: str | None = None,
        passes: int = 1,
        groups: Iterable[Iterable[Tensor]] = (),
        sparse_as_dense: bool = False,
        reduction: Reduction | None = None,
        sharded: bool = False,
        advice: str = ADVICE,
        late: Collection[str] = (),
        held: bool = False,
        matrices: Collection[int] = (),
    ) -> None:
        everything = distinct(named_parameters)
        comms = ReplicaComms.given(comms, [tensor for _, tensor in everything])
        comms.agree_on_parameters(everything)
        trainable = [(name, tensor) for name, tensor in everything if tensor.requires_grad]
        super().__init__(
            [name for name, _ in trainable],
            [tensor for _, tensor in trainable],
            comms,
            everything,
            compared=held,
        )
        self.algorithm = algorithm
        self.passes = passes
        self._late = frozenset(late)
        self._held = held
        self._reduction = Averaging(comms, algorithm) if reduction is None else reduction
        self._sparse_as_dense = sparse_as_dense
        self._advice = advice
        self._frozen = [(name, tensor) for name, tensor in everything if not tensor.requires_grad]
        positions = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self.buckets = bucketed(
            self.parameters,
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=first_bucket_bytes,
            groups=[[positions[id(p)] for p in group if id(p) in positions] for group in groups],
            shards=comms.shards if sharded else None,
            matrices=matrices,
        )
        comm_of = comms.shard_comm if sharded else comms.of
        first_of = {bucket: self.parameters[bucket.members[0]] for bucket in self.buckets}
        self._states = [
            BucketState(
                bucket, allocate_flat(bucket.numel, like.dtype, like.device, comm_of(bucket.replicas))
            )
            for bucket, like in first_of.items()
        ]
        self._views = GradientViews(self.names, self.parameters, self._states)
        self._hidden = False
        self._begin_round()
        self._watch()

    def expected_nbytes(self, synchronizations: int = 1) -> int:
        """Return the bytes that all ranks together send for so many synchronizations, in theory."""
        return expected_nbytes(
            self.dp_comm, self.buckets, synchronizations=synchronizations, algorithm=self.algorithm
        )

    @property
    def flats(self) -> list[Tensor]:
        """The buckets' memory, one-dimensional each: all gradients, zero where a parameter has none.

        Averages once `synchronized`; before that they may be under way and must not be touched.
        """
        return [state.flat for state in self._states]

    def synchronize(self) -> None:
        """Wait until every gradient is the average over all ranks; collective, once after each backward.

        Raises OperationError inside `no_sync`, when called twice without a backward between, and on a rank
        where gradients on their way were written to, or set to None; they are averages of nobody knows what
        then. On every rank where ranks have written different values to parameters since the last step.
        """
        self._require_new_gradients()
        refuse_thawed(self._frozen)
        written, dropped = self._written_under_way(), self._dropped_under_way()
        self._complete_round()
        if written:
            raise OperationError(
                f"rank {self.dp_comm.rank}: gradients were written to while their averages were under way "
                f"({', '.join(written[:4])}{', …' if len(written) > 4 else ''}), as by torch's "
                "clip_grad_norm_; use optimizer.clip_grad_norm_, or call synchronize() first"
            )
        if dropped:
            raise OperationError(
                f"rank {self.dp_comm.rank}: the gradient of {dropped[0]} was set to None while its average "
                "was under way; call synchronize() first, or the optimizer's zero_grad() to forget all"
            )

    def zero(self, *, set_to_none: bool = True) -> None:
        """Forget all gradients: `.grad` None, or views of zeros where there was a gradient.

        Averages still under way are awaited first, with all other ranks: they, too, come here. What was
        hidden counts as a gradient.
        """
        if self.round_open:
            self._complete_round()
        self.recount()
        for parameter in self.parameters:
            release(parameter)
        if set_to_none:
            for parameter in self.parameters:
                parameter.grad = None
            for _, parameter in self._frozen:
                parameter.grad = None
        else:
            for state in self._states:
                state.flat.zero_()
            for index, parameter in enumerate(self.parameters):
                if parameter.grad is not None or (self._hidden and self.used[index]):
                    parameter.grad = self._views.of(index)
        self._hidden = False
        self._sent.clear()
        self.synchronized = self.used_up = False

    def hide(self) -> None:
        """Take the averages out of `.grad`, where nobody is to change them; they stay in the buckets."""
        for parameter, is_used in zip(self.parameters, self.used, strict=True):
            set_own_gradient(parameter, None)
            if is_used and self._held:
                hold(parameter)
        self._hidden = True

    def adopt(self) -> None:
        """Bring averages that have been set to other tensors into the buckets, and zeros for None."""
        for index in range(len(self.parameters)):
            self._adopt(index)

    def has_taken(self, index: int) -> bool:
        return self._arrived[index]

    def forget(self, index: int) -> None:
        self.used[index] = 0
        release(self.parameters[index])
        self.parameters[index].grad = None

    @property
    def round_open(self) -> bool:
        return self._round_open

    def recount(self) -> None:
        """Count the backwards from zero again, where no averaging is under way."""
        if not self.round_open:
            self._passed = [0] * len(self.parameters)

    def abandon(self) -> None:
        """Give a round up of which nothing has left; gradients stay where they are."""
        for state in self._states:
            state.handle = None
        self._begin_round()

    def _begin_round(self) -> None:
        self._arrived = [False] * len(self.parameters)
        self._gave = [False] * len(self.parameters)
        self._passed = [0] * len(self.parameters)
        self._round_open = False
        self._departed = 0
        self._map_handles: list[Pending] = []
        self._maps: list[NDArray[np.uint8]] = []
        for state in self._states:
            state.missing = len(state.bucket.members)

    def _on_gradient(self, index: int) -> None:
        if self._arrived[index]:
            state = self._views.state_of[index]
            state.version = state.flat._version  # told here already
            raise GradientOrderError(
                f"rank {self.dp_comm.rank}: gradient number {self._passed[index] + 1} of {self.names[index]} "
                f"came when its bucket was due to leave or gone. {self._advice}"
            )
        self.synchronized = False
        self._adopt(index)
        if self._accumulating:
            return
        self._passed[index] += 1
        if self._passed[index] < self.passes:
            return
        self._round_open = True
        if self.names[index] not in self._late:
            self._mark_arrived(index)
        self._start_full_buckets()
        self.dp_comm.poke()

    def _grad_buffer(self, index: int) -> Tensor | None:
        """Return memory for a parameter's first gradient, which `_adopt` then need not copy."""
        return None if self._arrived[index] else self._views.of(index)

    def _adopt(self, index: int) -> None:
        """Bring a gradient that autograd or the user put elsewhere into the bucket, and zeros for none.

        There is none where a hook before ours took it away, or a Function's backward gave None.
        """
        parameter = self.parameters[index]
        gradient, view = own_gradient(parameter), self._views.of(index)
        if gradient is view:
            return
        if gradient is None:
            view.zero_()
            return
        if gradient.layout is not torch.strided and self._sparse_as_dense:
            gradient = gradient.to_dense()
        self._require_dense(index, gradient)
        with torch.no_grad():
            view.copy_(gradient)
        set_own_gradient(parameter, view)

    def _mark_arrived(self, index: int) -> None:
        parameter = self.parameters[index]
        self._arrived[index] = True
        self._gave[index] = own_gradient(parameter) is not None
        if self._held and self._gave[index]:
            hold(parameter)
        self._views.state_of[index].missing -= 1

    def _start_full_buckets(self) -> None:
        # Buckets leave in index order on every rank, whatever order the hooks fire in; otherwise
        # rank 0 could be reducing bucket 3 against rank 1's bucket 2.
        while self._departed < len(self._states) and not self._states[self._departed].missing:
            state = self._states[self._departed]
            self._note_sent(state.bucket, state.flat)
            state.handle = self._reduction.start(state.flat, state.bucket)
            state.version = state.flat._version  # with the write of the reduction itself
            self._departed += 1
            if self._departed == len(self._states):
                self._maps = self._maps_of(self._gave)
                self._map_handles = [self._reduction.start_map(self._maps[0])]
                for each, bits in zip(self._sets[1:], self._maps[1:], strict=True):
                    self._map_handles.append(each.comm.start_allreduce(bits, "or"))

    def _written_under_way(self) -> list[str]:
        """The parameters of buckets that somebody wrote to after they had left.

        A reduction counts as one write when it starts. What comes back to a GPU by way of the host counts
        again, and so do sums of short types, which torch works out.
        """
        return [
            self.names[member]
            for state in self._states
            if state.handle is not None
            and state.flat.device.type == "cpu"
            and state.flat.dtype in (torch.float32, torch.float64)
            and state.flat._version != state.version
            for member in state.bucket.members
        ]

    def _dropped_under_way(self) -> list[str]:
        """Return the parameters whose gradient somebody has set to None since it came."""
        given = zip(self._gave, self.names, self.parameters, strict=True)
        return [name for gave, name, parameter in given if gave and own_gradient(parameter) is None]

    def _complete_round(self) -> None:
        """Send what has not left yet, wait for all of it, and give every parameter its average."""
        for index in range(len(self.parameters)):
            if not self._arrived[index]:
                # The averaging backward brought nothing: send what earlier microbatches left, or zeros.
                self._adopt(index)
                self._mark_arrived(index)
        self._start_full_buckets()
        for state in self._states:
            if state.handle is not None:
                state.handle.wait()
                state.handle = None
        maps = self._maps
        for handle in self._map_handles:
            handle.wait()
        if maps:
            self._read_maps(maps)
            for index, parameter in enumerate(self.parameters):
                release(parameter)
                if parameter.grad is None and self.used[index]:
                    parameter.grad = self._views.of(index)
                elif parameter.grad is not None and parameter.grad.data_ptr() != self._views.addresses[index]:
                    raise OperationError(
                        f"rank {self.dp_comm.rank}: the gradient of {self.names[index]} was set to another "
                        f"tensor while its average was under way; call synchronize() first, then change it"
                    )
        self._begin_round()
        self.synchronized = True
        self._require_same_writes(maps)


def bucketed(
    parameters: Iterable[Tensor],
    dtype: torch.dtype | None = None,
    *,
    matrices: Collection[int] = (),
    **limits: Any,
) -> tuple[Bucket, ...]:
    """The buckets of these parameters, or of what they will be in another type; `limits` as of `assign`.

    matrices   ids of those that one rank is to own whole
    """
    parameters = list(parameters)
    extents = [extent(parameter, is_matrix=id(parameter) in matrices) for parameter in parameters]
    if dtype is not None:
        extents = [
            replace(each, itemsize=dtype.itemsize, kind=(dtype, parameter.device))
            for each, parameter in zip(extents, parameters, strict=True)
        ]
    return assign(extents, **limits)
