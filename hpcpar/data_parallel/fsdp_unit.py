"""An FSDP unit: modules whose parameters are unsharded and resharded together.

    resharded    flat: no memory        parameters: a shape without values (ShardedParameter)
       │ start_unshard                  storage allocated, all-gather under way
       │ unshard                        wait; parameters become views of flat
    unsharded    flat: all elements     parameters: views, to compute with
       │ reshard                        storage given back
    resharded

What autograd saved of a parameter lies in the unit's storage. That is freed and allocated again in place, so
backward finds the unsharded values where forward left them.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hpcpar.autograd.held_parameter import HeldParameter
from hpcpar.data_parallel.call_order import ADVICE
from hpcpar.data_parallel.flat_parameters import Block
from hpcpar.data_parallel.replica_comms import ReplicaComms
from hpcpar.data_parallel.sharded_parameter import ShardedParameter
from hpcpar.data_parallel.shared_parameters import NodeSharedParameters, PendingUpdate
from hpcpar.data_parallel.unit_plan import UnitPlan
from hpcpar.errors import OperationError, StallError
from hpcpar.parameter_info import info_of

if TYPE_CHECKING:
    from hpcpar.comm.compiled import Handle


UNITS, GATHER, HOLD, ROOT = "units", "gather", "hold", "the root"
"""In a timeline: category of events of units, what begins their names, and the name of a model's own unit."""


@dataclass(eq=False)
class UnitParamGroup:
    """A unit's parameters of one element type, all trainable or all frozen.

    block         which elements this rank owns, and their memory
    flat          memory of all elements; empty while the unit is resharded
    views         of `flat`, one for each parameter
    placeholders  tensors of the parameters' shapes that take no memory
    """

    block: Block
    parameters: list[nn.Parameter]
    flat: Tensor
    views: list[Tensor]
    placeholders: list[Tensor]

    @property
    def is_trained(self) -> bool:
        """True if any of it is trainable now: some or all may have been frozen since it was sharded."""
        return any(parameter.requires_grad for parameter in self.parameters)


@dataclass
class UnshardStats:
    """Units that are unsharded, or about to be, at one time, and bytes of their parameters with padding."""

    units: int = 0
    nbytes: int = 0
    peak_units: int = 0
    peak_nbytes: int = 0

    def add(self, unit: FsdpUnit) -> None:
        self.units += 1
        self.nbytes += unit.nbytes
        self.peak_units = max(self.peak_units, self.units)
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)

    def remove(self, unit: FsdpUnit) -> None:
        self.units -= 1
        self.nbytes -= unit.nbytes


class FsdpUnit:
    """Modules whose parameters are unsharded and resharded together.

    keeps         stays unsharded from forward to backward
    pins          how many want it to stay unsharded whatever comes
    inputs        a forward saw inputs that may want gradients; never reset, as graphs outlive later forwards
    heard         a hook on its last forward's outputs will tell when its backward begins
    node_shared   its memory exists once on each node and is never freed; to unshard is to wait for all ranks
    """

    def __init__(
        self,
        plan: UnitPlan,
        groups: list[UnitParamGroup],
        comms: ReplicaComms,
        stats: UnshardStats,
        *,
        node_shared: NodeSharedParameters | None,
    ) -> None:
        self.name = plan.name
        self.module = plan.module
        self.groups = groups
        self.keeps = False
        self.pins = 0
        self.inputs = False
        self.heard = False
        self.is_unsharded = node_shared is not None
        self.is_unsharding = False
        self._comms = comms
        self._stats = stats
        self._node_shared = node_shared
        self._handles: list[Handle | PendingUpdate] = []
        self._versions: list[int] = []
        # For the timeline: when its last unsharding began, was under way, and was there.
        self._began_s = self._started_s = self._ready_s = 0.0

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.groups for parameter in group.parameters]

    @property
    def nbytes(self) -> int:
        """Bytes of its parameters when unsharded."""
        return sum(group.flat.numel() * group.flat.element_size() for group in self.groups)

    @property
    def is_trained(self) -> bool:
        return any(group.is_trained for group in self.groups)

    @property
    def is_allocated(self) -> bool:
        return self.is_unsharded or self.is_unsharding

    def start_unshard(self) -> None:
        """Start the all-gather of its parameters. Collective."""
        if self.is_allocated:
            return
        began_s = time.perf_counter()
        self.is_unsharding = True
        self._stats.add(self)
        for group in self.groups:
            storage = group.flat.untyped_storage()
            storage.resize_(group.flat.numel() * group.flat.element_size())
            own: Any = group.block.own
            flat: Any = group.flat
            if flat.device.type == "cpu":
                # torch's own NumPy view would pin the storage, which could then never be given back.
                own, flat = own.view(torch.uint8), octets(flat)
            comm = self._comms.shard_comm(group.block.bucket.replicas)
            self._handles.append(comm.start_allgather(own, out=flat))
        self._began_s, self._started_s = began_s, time.perf_counter()

    def unshard(self) -> None:
        """Return when its parameters have their values. Collective."""
        self.start_unshard()
        waits_s = time.perf_counter()
        try:
            for handle in self._handles:
                handle.wait()
        except StallError as error:
            raise StallError(f"gathering unit {self.name!r} of a sharded model: {error} {ADVICE}") from error
        self._handles.clear()
        if self.is_unsharding:
            for group in self.groups:
                for parameter, view in zip(group.parameters, group.views, strict=True):
                    parameter.__class__ = HeldParameter
                    parameter.data = view
            self.is_unsharding, self.is_unsharded = False, True
            self.forget_writes()
            self._ready_s = time.perf_counter()
            starting_s, waited_s = self._started_s - self._began_s, self._ready_s - waits_s
            self._note(GATHER, self._began_s, self._ready_s, starting_s=starting_s, waited_s=waited_s)

    def reshard(self) -> None:
        """Free all but this rank's shards; OperationError if somebody wrote to the unsharded parameters."""
        if self._node_shared is not None or self.pins or not self.is_allocated:
            return
        self.unshard()  # memory that other ranks still write to may not be given back
        written = self._written()
        for group in self.groups:
            for parameter, placeholder in zip(group.parameters, group.placeholders, strict=True):
                parameter.data = placeholder
                parameter.__class__ = ShardedParameter
            group.flat.untyped_storage().resize_(0)
        self._note(HOLD, self._ready_s, time.perf_counter())
        self.is_unsharded = False
        self._stats.remove(self)
        if written is not None:
            raise OperationError(
                f"{written} was written to while unit {self.name!r} was gathered, which would be lost: every "
                "rank keeps its shard. Write between steps, on every rank, inside hpcpar.summon_full_"
                "parameters(model, write_back=True); a layer whose forward writes to its weights (max_norm) "
                "cannot be sharded"
            )

    def _note(self, what: str, start_s: float, stop_s: float, **times_s: float) -> None:
        trace = self._comms.dp_comm.trace
        if trace is not None:
            trace.add(f"{what} {self.name or ROOT}", UNITS, start_s, stop_s, nbytes=self.nbytes, **times_s)

    def publish_shards(self) -> None:
        """Start to tell the node's other ranks of new values in this rank's shards of shared memory."""
        if self._node_shared is not None:
            self._handles += [self._node_shared.start(group.flat, group.block.own) for group in self.groups]

    def forget_writes(self) -> None:
        """Accept what has been written to the unsharded parameters so far."""
        self._versions = [parameter._version for parameter in self.parameters]

    def _written(self) -> str | None:
        """Return the name of a parameter that was written to since; that would not reach the shards."""
        pairs = zip(self.parameters, self._versions, strict=True)
        return next((info_of(p).name for p, seen in pairs if p._version != seen), None)


def innermost(units: Sequence[FsdpUnit]) -> list[FsdpUnit]:
    """Return the units without other units inside; never the root, which comes first."""
    modules = {unit.module for unit in units}
    return [unit for unit in units[1:] if len(modules & set(unit.module.modules())) == 1]


def octets(flat: Tensor) -> NDArray[np.uint8]:
    """Return the memory of a tensor as bytes; it lives as long as the array, for ranks may write to it."""
    memory: Any = (ctypes.c_uint8 * flat.nbytes).from_address(flat.data_ptr())
    memory.tensor = flat
    return np.frombuffer(memory, dtype=np.uint8)
