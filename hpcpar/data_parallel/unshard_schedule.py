"""Schedule of ZeRO-3: when units are unsharded and resharded in forward and backward.

    forward     root ┬ layer 0 ┬ layer 1 ┬ layer 2                        gather │ compute │ free
                     └ gather 1└ gather 2│                                the next unit is gathered meanwhile
    backward           layer 2 ┬ layer 1 ┬ layer 0 ┬ root
                     ┌ gather 1└ gather 0│         │
                     │  dW2 ─> reduce-scatter ─> own shard of the gradient

    hook                            on                        does
    forward pre-hook                every unit's module       unshard; prefetch the next
    forward hook                    every unit's module       reshard, unless backward needs it next
    gradient of a unit's output     tensors of its output     unshard for backward; prefetch the previous
    gradient of a unit's input      tensors of its input      reshard: nobody needs its values any more
    last gradient of a bucket       ShardedGradients          reshard, if no gradient of an input may come

The root's own parameters and those of the last layer stay unsharded from forward to backward, which needs
them next; not in a stage of a pipeline, which goes on with another microbatch. The order of units is learnt
in the first forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

from hpcpar.data_parallel.buckets import Bucket
from hpcpar.data_parallel.call_order import CallOrder
from hpcpar.data_parallel.fsdp_unit import FsdpUnit, innermost
from hpcpar.data_parallel.unit_plan import hides, tensors_in
from hpcpar.data_parallel.zero2 import ShardedGradients
from hpcpar.errors import OperationError
from hpcpar.uncompiled import uncompiled

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


class UnshardSchedule:
    """Unshards and reshards the units of a model, or of one stage, from hooks on their modules.

    units       in the order of registration, the root first
    gradients   of their trainable parameters
    unit_of     by bucket of `gradients`, in their order
    members     by unit, numbers of its parameters in `gradients`
    prefetch    units that are unsharded ahead
    is_stage    of a pipeline: a backward need not follow its forward
    until_step  units stay unsharded from a forward with gradients until `unpin_all`

    order       units as the first forward called them
    gathers     all-gathers of units so far
    """

    def __init__(
        self,
        units: Sequence[FsdpUnit],
        dp_comm: Communicator,
        gradients: ShardedGradients,
        unit_of: Mapping[Bucket, FsdpUnit],
        *,
        prefetch: int,
        is_node_shared: bool,
        is_stage: bool,
        until_step: bool,
    ) -> None:
        self.units = units
        self.order: list[FsdpUnit] = []
        self.gathers = 0
        self._gradients = gradients
        self.unit_of = unit_of
        self._members: dict[FsdpUnit, list[int]] = {unit: [] for unit in units}
        for bucket in unit_of:
            self._members[unit_of[bucket]] += bucket.members
        self._prefetch = prefetch
        self._is_node_shared = is_node_shared
        self._is_stage = is_stage
        self._until_step = until_step
        self._calls = CallOrder([unit.name for unit in units], dp_comm)
        self._number_of = {unit: number for number, unit in enumerate(units)}
        self._innermost = innermost(units)
        self._is_order_known = False
        self._in_backward = False
        self._makes_graph = False
        self._is_pinned = False
        # Of the backward under way: buckets whose gradients are still to come, by unit; units that have not
        # begun; those that have; and the unit after whose resharding the previous one is prefetched.
        self._left = dict.fromkeys(units, 0)
        self._ahead: list[FsdpUnit] = []
        self._begun: set[FsdpUnit] = set()
        self._prefetch_before: FsdpUnit | None = None
        units[0].keeps = units[-1].keeps = not is_stage
        for unit in units:
            unit.module.register_forward_pre_hook(_Hook(self._enter, unit), with_kwargs=True, prepend=True)
            unit.module.register_forward_hook(_Hook(self._leave, unit), with_kwargs=True)

    def __reduce__(self) -> Any:
        """Refuse to be pickled with the model, whose hooks hold this."""
        raise OperationError(
            "a fully sharded model was to be saved as a whole, as by torch.save(model); inside `with "
            "hpcpar.summon_full_parameters(model):` save its state_dict() or a copy.deepcopy of it"
        )

    def reshard_all(self) -> None:
        for unit in self.units:
            unit.reshard()

    # --- forward ----------------------------------------------------------------------------------

    def _enter(self, unit: FsdpUnit, args: Any, kwargs: Any) -> None:
        recomputing = torch._C._current_graph_task_id() != -1
        if unit is self.units[0] and not recomputing:
            self._begin_forward()
        self._unshard(unit, is_called=not recomputing)
        if recomputing:
            return
        if not self._is_order_known and unit not in self.order:
            self.order.append(unit)
        self._prefetch_from(unit, 1)
        inputs = _differentiable([args, kwargs])
        # Of what an object hides, nobody tells when its gradient is there: then at the end of backward.
        unit.inputs |= bool(inputs) or (torch.is_grad_enabled() and hides([args, kwargs]))
        if len(inputs) == 1:
            # register_multi_grad_hook would make a cycle of references, which keeps a whole step's graph
            # until the garbage collector comes by.
            inputs[0].register_hook(lambda _: self._on_inputs(unit))  # type: ignore[no-untyped-call]
        elif inputs:
            register_multi_grad_hook(inputs, lambda _: self._on_inputs(unit))

    def _leave(self, unit: FsdpUnit, args: Any, kwargs: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # recomputed for a backward, which goes on with it
        trains = torch.is_grad_enabled() and output is not None
        outputs = _differentiable(output)
        unit.heard |= bool(outputs)
        for tensor in outputs:
            tensor.register_hook(lambda _: self._before_backward(unit))  # type: ignore[no-untyped-call]
        is_passed = bool(unit.groups) and bool(_differentiable([args, kwargs]))
        if trains and not outputs and hides(output) and (unit.is_trained or is_passed):
            unit.reshard()
            raise OperationError(
                f"unit {unit.name!r} returned a {type(output).__name__} without a tensor that has a "
                "gradient, so its backward could not be seen coming; return tensors, or tuples, lists or "
                "dictionaries of them"
            )
        if not (trains and unit.keeps):
            unit.reshard()
        if unit is self.units[0]:
            self._end_forward(trains)

    def _begin_forward(self) -> None:
        self._calls.require_same()
        self._in_backward = False
        if torch.is_grad_enabled():
            for unit in self.units:
                unit.heard = False
            if self._until_step:
                self._pin()

    def _end_forward(self, trains: bool) -> None:
        if not self._is_order_known:
            self._is_order_known = True
            for unit in self.units:
                unit.keeps = not self._is_stage and unit in (self.units[0], self.order[-1])
        if not self._is_node_shared:
            self._calls.note(None)
        if not trains:
            self._calls.require_same()
        for unit in self.units:
            if not (trains and unit.keeps):
                unit.reshard()

    def _unshard(self, unit: FsdpUnit, *, is_called: bool = False) -> None:
        """Unshard a unit; `is_called` by a forward, where ranks must call units in the same order."""
        self._start(unit, is_called=is_called)
        if is_called:
            self._calls.require_same(self._number_of[unit])
        unit.unshard()

    def _start(self, unit: FsdpUnit, *, is_called: bool) -> None:
        if not unit.is_allocated:
            self.gathers += 1
            if is_called:
                self._calls.note(self._number_of[unit])
            unit.start_unshard()

    def _prefetch_from(self, unit: FsdpUnit, direction: int) -> None:
        """Start to unshard the units that come after this one in forward (1) or backward (-1)."""
        if not self._is_order_known or unit not in self.order:
            return
        position = self.order.index(unit)
        for distance in range(1, self._prefetch + 1):
            ahead = position + direction * distance
            if 0 <= ahead < len(self.order):
                self._start(self.order[ahead], is_called=direction > 0)

    # --- backward ---------------------------------------------------------------------------------

    def _before_backward(self, unit: FsdpUnit) -> None:
        if not self._in_backward:
            self._begin_backward()
        self._finish_units_before(unit)
        self._unshard(unit)
        # Free the previous unit before prefetching the next: if one is about to go, wait for it.
        self._prefetch_before = unit
        leaving = (each for each in self.units if each is not unit and each.inputs and each.is_allocated)
        if not any(self._left[each] <= 0 for each in leaving):
            self._prefetch_previous()

    def _begin_backward(self) -> None:
        self._calls.require_same()
        self._in_backward = True
        self._gradients.expect_backward(self.unit_of)
        for unit in self.units:
            self._left[unit] = sum(group.is_trained for group in unit.groups)
        self._ahead = [unit for unit in self._innermost if unit.heard and unit.is_trained]
        self._begun.clear()
        Variable._execution_engine.queue_callback(self._end_backward)
        self._makes_graph = torch.is_grad_enabled()
        if self._makes_graph:  # a backward of this backward needs any unit's values at any time
            for unit in self.units:
                self._unshard(unit)
            self._pin()

    def _finish_units_before(self, unit: FsdpUnit) -> None:
        """Declare gradients of units that this backward has passed, or leaves out, as complete.

        They bring no more gradients than those in the backward's graph. Other ranks may have used more of
        these units (an expert, a branch) and do not wait for the end of backward. This rank meets their
        all-gathers and reduce-scatters here, on the way.
        """
        self._begun.add(unit)
        left_out: set[FsdpUnit] = set()
        if unit in self._innermost and unit in self.order:  # a unit around others begins before they do
            left_out = set(self.order[self.order.index(unit) + 1 :]) - self._begun
        quiet: dict[FsdpUnit, list[int]] = {}
        for each in self._ahead:
            if each is not unit and (each in self._begun or each in left_out):
                parameters = self._gradients.parameters
                quiet[each] = [m for m in self._members[each] if not _is_in_backward(parameters[m])]
        left_out = {each for each in left_out & quiet.keys() if quiet[each] == self._members[each]}
        for each in reversed(self.order):
            if each in left_out and not each.is_allocated:
                self.gathers += 1
                each.start_unshard()
        # Only now: this may wait for ranks that wait for those gathers.
        for members in quiet.values():
            self._gradients.expect_no_more(members)
        self._ahead = [each for each in self._ahead if each not in left_out | (quiet.keys() & self._begun)]

    def _prefetch_previous(self) -> None:
        unit, self._prefetch_before = self._prefetch_before, None
        if unit is not None:
            self._prefetch_from(unit, -1)

    def on_bucket_done(self, bucket: Bucket) -> None:
        """Reshard a unit whose gradients have all been taken, unless a gradient of its inputs may come."""
        unit = self.unit_of[bucket]
        self._left[unit] -= 1
        if self._left[unit] <= 0 and not unit.inputs and self._in_backward:
            unit.reshard()

    def _on_inputs(self, unit: FsdpUnit) -> None:
        """Reshard a unit once the gradients of all its inputs are there.

        Its own gradients alone do not suffice: with frozen or detached parts they may be complete while the
        gradient of the input still needs its values.
        """
        if self._in_backward and self._left[unit] <= 0:
            unit.reshard()
            self._prefetch_previous()

    def _end_backward(self) -> None:
        self._gradients.end_backward()
        self._in_backward = False
        self._prefetch_before = None
        if not self._makes_graph and not self._until_step:
            self.unpin_all()
        self.reshard_all()

    def _pin(self) -> None:
        """Keep every unit that is unsharded from now on."""
        if not self._is_pinned:
            self._is_pinned = True
            for unit in self.units:
                unit.pins += 1

    def unpin_all(self) -> None:
        if self._is_pinned:
            self._is_pinned = False
            for unit in self.units:
                unit.pins -= 1


@dataclass(frozen=True, eq=False)
class _Hook:
    """Hook of a unit's module. It does nothing in a copy of the model, which is not sharded."""

    tell: Callable[..., None]
    unit: FsdpUnit

    @uncompiled
    def __call__(self, module: nn.Module, *told: Any) -> None:
        self.tell(self.unit, *told)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _nothing


def _nothing(*_: Any) -> None:
    pass


def _differentiable(value: Any) -> list[Tensor]:
    if not torch.is_grad_enabled():
        return []
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]


def _is_in_backward(parameter: Tensor) -> bool:
    if not parameter.requires_grad:
        return False
    with torch._C.DisableTorchFunctionSubclass():  # a ShardedParameter would refuse
        node = get_gradient_edge(parameter).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad, which does not say
        return True
