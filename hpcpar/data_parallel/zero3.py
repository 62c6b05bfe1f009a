"""ZeRO-3: every rank keeps a shard of each unit's parameters, and has the whole only while it is used.

    forward     root ┬ layer 0 ┬ layer 1 ┬ layer 2                        gather │ compute │ free
                     └ gather 1└ gather 2│                                the next unit is gathered meanwhile
    backward           layer 2 ┬ layer 1 ┬ layer 0 ┬ root
                     ┌ gather 1└ gather 0│         │
                     │  dW2 ─> reduce-scatter ─> own shard of the gradient

The root's own parameters and those of the last layer are kept from forward to backward, which needs them
next.

A parameter keeps its identity. While it is gathered its memory is a part of its unit's; otherwise it has
its shape and no values: to use it then is an error. What autograd saved of a unit lies in the unit's
storage, which is given back and taken anew, so backward finds the gathered values where forward left them.
source   Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, section 5.3;
         Zhao et al. 2023, PyTorch FSDP, arXiv 2304.11277, sections 3 and 4
"""

from __future__ import annotations

import ctypes
import functools
import math
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

from hpcpar.autograd.fused_layers import adding_in_place
from hpcpar.autograd.held_parameter import HeldParameter
from hpcpar.autograd.scripted import refuse_scripted
from hpcpar.data_parallel.bucket_shards import pieces_between, shard_of
from hpcpar.data_parallel.buckets import Bucket, Extent, bucket_of
from hpcpar.data_parallel.call_order import ADVICE, CallOrder
from hpcpar.data_parallel.flat_parameters import Block
from hpcpar.data_parallel.initial_values import InitialValues, Values
from hpcpar.data_parallel.parameters import (
    Layout,
    Named,
    OwnPiece,
    agree_on_parameters,
    layout_of,
    view_as,
)
from hpcpar.data_parallel.precision import Precision
from hpcpar.data_parallel.replicas import refuse_renormalized
from hpcpar.data_parallel.running_statistics import warn_of_local_batches
from hpcpar.data_parallel.sharded_parameter import ShardedParameter
from hpcpar.data_parallel.shared_parameters import NodeSharedParameters, PendingUpdate
from hpcpar.data_parallel.unit_plan import Place, Policy, UnitPlan, hides, plan_units, tensors_in
from hpcpar.data_parallel.zero2 import ShardedGradients
from hpcpar.errors import MismatchError, OperationError, ShardedParameterError, StallError
from hpcpar.parameter_info import info_of, note
from hpcpar.planner.traffic import allgather_nbytes, dtype_of
from hpcpar.uncompiled import uncompiled

if TYPE_CHECKING:
    from hpcpar.comm import Communicator
    from hpcpar.comm.progress import Handle


@dataclass(eq=False)
class UnitParamGroup:
    """A block of a unit: the parameters of one element type, trainable or frozen.

    flat      the memory of the whole, given back while the unit is not gathered
    views     of `flat`, one for each parameter
    """

    block: Block
    parameters: list[nn.Parameter]
    flat: Tensor
    views: list[Tensor]
    placeholders: list[Tensor]

    @property
    def is_trained(self) -> bool:
        """Whether any of it is now: some or all may have been frozen since it was sharded."""
        return any(parameter.requires_grad for parameter in self.parameters)


@dataclass
class UnshardStats:
    """Units that are whole, or about to be, at one time: now, and at most since it was last asked to forget.

    nbytes   of their parameters, with the padding
    """

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
    """Modules whose parameters are gathered and freed together.

    keeps   it stays gathered from forward to backward
    pins    how many want it to stay gathered whatever comes
    inputs  whether gradients of what went into it may come in backward: once they did, in any forward, they
            may again, for a graph outlives the forwards after it
    heard   its last forward will be heard of when its backward begins
    node_shared   its memory exists once on each node and is never freed; to unshard is to wait for all ranks
    """

    def __init__(
        self,
        plan: UnitPlan,
        held: list[UnitParamGroup],
        dp_comm: Communicator,
        *,
        node_shared: NodeSharedParameters | None,
    ) -> None:
        self.name = plan.name
        self.module = plan.module
        self.held = held
        self.keeps = False
        self.pins = 0
        self.inputs = False
        self.heard = False
        self._comm = dp_comm
        self._node_shared = node_shared
        self._handles: list[Handle | PendingUpdate] = []
        self.is_unsharded = node_shared is not None
        self.unshard_stats = UnshardStats()
        self.is_unsharding = False
        self._versions: list[int] = []

    @property
    def nbytes(self) -> int:
        """Of its parameters, gathered."""
        return sum(each.flat.numel() * each.flat.element_size() for each in self.held)

    @property
    def is_trained(self) -> bool:
        return any(each.is_trained for each in self.held)

    @property
    def is_allocated(self) -> bool:
        return self.is_unsharded or self.is_unsharding

    def start_unshard(self) -> None:
        """Begin to bring its parameters together. Collective."""
        if self.is_allocated:
            return
        self.is_unsharding = True
        self.unshard_stats.add(self)
        for each in self.held:
            storage = each.flat.untyped_storage()
            storage.resize_(each.flat.numel() * each.flat.element_size())
            own: Any = each.block.own
            flat: Any = each.flat
            if flat.device.type == "cpu":
                # Seen as NumPy arrays by torch itself, storage could never be given back.
                own, flat = own.view(torch.uint8), _octets(flat)
            self._handles.append(self._comm.start_allgather(own, out=flat))

    def unshard(self) -> None:
        """Return when its parameters are there. Collective."""
        self.start_unshard()
        try:
            for handle in self._handles:
                handle.wait()
        except StallError as error:
            raise StallError(f"gathering unit {self.name!r} of a sharded model: {error} {ADVICE}") from error
        self._handles.clear()
        if self.is_unsharding:
            for each in self.held:
                for parameter, view in zip(each.parameters, each.views, strict=True):
                    parameter.__class__ = HeldParameter
                    parameter.data = view
            self.is_unsharding, self.is_unsharded = False, True
            self.accept_writes()

    def accept_writes(self) -> None:
        """What has been written to its gathered parameters is to go with them, or was taken."""
        self._versions = [parameter._version for each in self.held for parameter in each.parameters]

    def _written(self) -> str | None:
        """The name of a parameter that was written to since, whose shards do not hear of it."""
        parameters = [parameter for each in self.held for parameter in each.parameters]
        pairs = zip(parameters, self._versions, strict=True)
        return next((info_of(p).name for p, seen in pairs if p._version != seen), None)

    def publish_shards(self) -> None:
        """This rank has new values in its shards of the node's memory: who uses them waits for all ranks."""
        if self._node_shared is not None:
            self._handles += [self._node_shared.start(each.flat, each.block.own) for each in self.held]

    def reshard(self) -> None:
        """Keep this rank's shards alone."""
        if self._node_shared is not None or self.pins or not self.is_allocated:
            return
        self.unshard()  # what others still write to may not be given back
        written = self._written()
        for each in self.held:
            for parameter, placeholder in zip(each.parameters, each.placeholders, strict=True):
                parameter.data = placeholder
                parameter.__class__ = ShardedParameter
            each.flat.untyped_storage().resize_(0)
        self.is_unsharded = False
        self.unshard_stats.remove(self)
        if written is not None:
            raise OperationError(
                f"{written} was written to while unit {self.name!r} was gathered, which would be lost: every "
                "rank keeps its shard. Write between steps, on every rank, inside hpcpar.summon_full_"
                "parameters(model, write_back=True); a layer whose forward writes to its weights (max_norm) "
                "cannot be sharded"
            )


def _differentiable(value: Any) -> list[Tensor]:
    """The tensors in a module's input or output that a backward goes through."""
    if not torch.is_grad_enabled():
        return []
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]


def _innermost(units: Sequence[FsdpUnit]) -> list[FsdpUnit]:
    """Those without other units inside, without the root."""
    modules = {unit.module for unit in units}
    return [unit for unit in units[1:] if len(modules & set(unit.module.modules())) == 1]


def _is_in_backward(parameter: Tensor) -> bool:
    """Whether the graph that backward goes through leads to a parameter."""
    if not parameter.requires_grad:
        return False
    with torch._C.DisableTorchFunctionSubclass():  # also where it is sharded
        node = get_gradient_edge(parameter).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad, which does not say
        return True


def _octets(flat: Tensor) -> NDArray[np.uint8]:
    """The memory of a tensor, which lives as long as the array: others may still write to it."""
    memory: Any = (ctypes.c_uint8 * flat.nbytes).from_address(flat.data_ptr())
    memory.tensor = flat
    return np.frombuffer(memory, dtype=np.uint8)


@dataclass(frozen=True, eq=False)
class _Hook:
    """Of a unit's module. A copy of the model, made while it is summoned, is not sharded: there, nothing."""

    tell: Callable[..., None]
    unit: FsdpUnit

    @uncompiled
    def __call__(self, module: nn.Module, *told: Any) -> None:
        self.tell(self.unit, *told)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _nothing


def _nothing(*_: Any) -> None:
    pass


class FullyShardedState:
    """A model whose parameters are sharded over `dp_comm`; kept by the model itself.

    units       in the order of registration, the root's first
    blocks      of trainable parameters, in the order in which their gradients leave
    gradients   of them, each rank's shards
    node_shared   where the parameters exist once on each node
    gathered    how much of the model is whole on this rank, now and at most
    """

    def __init__(
        self,
        units: list[FsdpUnit],
        dp_comm: Communicator,
        *,
        precision: Precision | None,
        prefetch: int,
        node_shared: NodeSharedParameters | None,
    ) -> None:
        self.units = units
        self.dp_comm = dp_comm
        self.precision = precision
        self._prefetch_units = prefetch
        self.node_shared = node_shared
        self.unshard_stats = UnshardStats()
        for unit in units:
            unit.unshard_stats = self.unshard_stats
        self._order: list[FsdpUnit] = []
        self._is_order_known = False
        self._in_backward = False
        self._makes_graph = False
        self._is_kept = False
        self._ahead_of: FsdpUnit | None = None
        units[0].keeps = units[-1].keeps = True
        self.gathers = 0
        self._number_of = {unit: number for number, unit in enumerate(units)}
        self._calls = CallOrder([unit.name for unit in units], dp_comm)
        trainable = [
            (unit, held) for unit in reversed(units) for held in unit.held if held.parameters[0].requires_grad
        ]
        self.blocks = [held.block for _, held in trainable]
        self._unit_of = {block.bucket: unit for (unit, _), block in zip(trainable, self.blocks, strict=True)}
        self._members = {
            unit: [member for each, held in trainable if each is unit for member in held.block.bucket.members]
            for unit in units
        }
        self._left = dict.fromkeys(units, 0)
        self._innermost = _innermost(units)
        self._ahead: list[FsdpUnit] = []
        self._begun: set[FsdpUnit] = set()
        # Of their own, for ranks need not come to a gather and to a gradient in the same order.
        self._loan = dp_comm.lend("gradients")
        parameters = sorted(
            (number, parameter)
            for _, held in trainable
            for number, parameter in zip(held.block.bucket.members, held.parameters, strict=True)
        )
        self.parameters = [parameter for _, parameter in parameters]
        self.names = [info_of(parameter).name for parameter in self.parameters]
        layouts = {
            number: layout_of(view)
            for _, held in trainable
            for number, view in zip(held.block.bucket.members, held.views, strict=True)
        }
        self.layouts: list[Layout] = [layouts[number] for number in range(len(layouts))]
        self.gradients = ShardedGradients(
            self.names,
            self.parameters,
            [block.bucket for block in self.blocks],
            self._loan.comm,
            dtype=None if precision is None else precision.reduction,
            layouts=self.layouts,
            replicated=False,
        )
        self.gradients.on_bucket_done = self._on_bucket_done
        self.on_loaded: Callable[[], Callable[[], None] | None] = lambda: None
        """The optimizer's answer to parameters that were loaded, all of them. It may be gone."""
        self.writes = 0
        """How often they were written back: the optimizer looks before it uses its master weights."""
        self._in_place = ExitStack()
        self._in_place.enter_context(adding_in_place([units[0].module]))
        for unit in units:
            unit.module.register_forward_pre_hook(_Hook(self._enter, unit), with_kwargs=True, prepend=True)
            unit.module.register_forward_hook(_Hook(self._leave, unit), with_kwargs=True)
        for unit in units:
            for held in unit.held:
                for parameter in held.parameters:
                    note(parameter, sharding=weakref.ref(self))

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of the model is not sharded."""

    def __reduce__(self) -> Any:
        raise OperationError(
            "a fully sharded model was to be saved as a whole, as by torch.save(model); inside `with "
            "hpcpar.summon_full_parameters(model):` save its state_dict() or a copy.deepcopy of it"
        )

    # --- forward ----------------------------------------------------------------------------------

    def _enter(self, unit: FsdpUnit, args: Any, kwargs: Any) -> None:
        recomputing = torch._C._current_graph_task_id() != -1
        if unit is self.units[0] and not recomputing:
            self._begin_forward()
        self._unshard(unit, is_called=not recomputing)
        if recomputing:
            return
        if not self._is_order_known and unit not in self._order:
            self._order.append(unit)
        self._prefetch_next(unit, 1)
        inputs = _differentiable([args, kwargs])
        if inputs:
            unit.inputs = True
            if len(inputs) == 1:
                # The same as below, without the cycle of references that would keep the whole graph of a
                # step until the garbage collector comes by.
                inputs[0].register_hook(lambda _: self._on_inputs(unit))  # type: ignore[no-untyped-call]
            else:
                torch.autograd.graph.register_multi_grad_hook(inputs, lambda _: self._on_inputs(unit))

    def _leave(self, unit: FsdpUnit, args: Any, kwargs: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # recomputed for a backward, which goes on with it
        trains = torch.is_grad_enabled() and output is not None
        outputs = _differentiable(output)
        unit.heard |= bool(outputs)
        for tensor in outputs:
            tensor.register_hook(lambda _: self._before_backward(unit))  # type: ignore[no-untyped-call]
        is_passed = bool(unit.held) and bool(_differentiable([args, kwargs]))
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

    def _end_forward(self, trains: bool) -> None:
        if not self._is_order_known:
            self._is_order_known = True
            for unit in self.units:
                unit.keeps = unit in (self.units[0], self._order[-1])
        if self.node_shared is None:
            self._calls.note(None)
        if not trains:
            self._calls.require_same()
        for unit in self.units:
            if not (trains and unit.keeps):
                unit.reshard()

    def _unshard(self, unit: FsdpUnit, *, is_called: bool = False) -> None:
        """Gather a unit: `is_called` in a forward, where ranks are held to the same order."""
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

    def _prefetch_next(self, unit: FsdpUnit, direction: int) -> None:
        """Begin to gather the units that come after this one in forward (1) or backward (-1)."""
        if not self._is_order_known or unit not in self._order:
            return
        place = self._order.index(unit)
        for distance in range(1, self._prefetch_units + 1):
            ahead = place + direction * distance
            if 0 <= ahead < len(self._order):
                self._start(self._order[ahead], is_called=direction > 0)

    # --- backward ---------------------------------------------------------------------------------

    def _before_backward(self, unit: FsdpUnit) -> None:
        if not self._in_backward:
            self._calls.require_same()
            self._in_backward = True
            self.gradients.expect_backward()
            for each in self.units:
                self._left[each] = sum(held.is_trained for held in each.held)
            self._ahead = [each for each in self._innermost if each.heard and each.is_trained]
            self._begun.clear()
            Variable._execution_engine.queue_callback(self._end_backward)
            self._makes_graph = torch.is_grad_enabled()
            if self._makes_graph:
                self._pin_all()
        self._finish_units_before(unit)
        self._unshard(unit)
        # One that is about to go makes room for one that comes.
        self._ahead_of = unit
        leaving = (each for each in self.units if each is not unit and each.inputs and each.is_allocated)
        if not any(self._left[each] <= 0 for each in leaving):
            self._prefetch_previous()

    def _finish_units_before(self, unit: FsdpUnit) -> None:
        """Units that this backward has come by, or leaves out, bring no gradients but those in its graph.

        Other ranks may have used more of them (an expert, a branch), and do not wait for the end: so their
        gathers and gradients are met by this rank's on the way.
        """
        self._begun.add(unit)
        left_out: set[FsdpUnit] = set()
        if unit in self._innermost and unit in self._order:  # one around others begins before they do
            left_out = set(self._order[self._order.index(unit) + 1 :]) - self._begun
        quiet: dict[FsdpUnit, list[int]] = {}
        for each in self._ahead:
            if each is not unit and (each in self._begun or each in left_out):
                quiet[each] = [m for m in self._members[each] if not _is_in_backward(self.parameters[m])]
        left_out = {each for each in left_out & quiet.keys() if quiet[each] == self._members[each]}
        for each in reversed(self._order):
            if each in left_out and not each.is_allocated:
                self.gathers += 1
                each.start_unshard()
        # Only now: this may wait for ranks that wait for those gathers.
        for members in quiet.values():
            self.gradients.expect_no_more(members)
        self._ahead = [each for each in self._ahead if each not in left_out | (quiet.keys() & self._begun)]

    def _prefetch_previous(self) -> None:
        unit, self._ahead_of = self._ahead_of, None
        if unit is not None:
            self._prefetch_next(unit, -1)

    def _on_bucket_done(self, bucket: Bucket) -> None:
        """All gradients of a block have been taken."""
        unit = self._unit_of[bucket]
        self._left[unit] -= 1
        if self._left[unit] <= 0 and not unit.inputs and self._in_backward:
            unit.reshard()

    def _on_inputs(self, unit: FsdpUnit) -> None:
        """The gradients of all that went into a unit are there: nobody needs its values any more.

        Before that somebody may, although all its own gradients are there: who froze or detached some of it.
        """
        if self._in_backward and self._left[unit] <= 0:
            unit.reshard()
            self._prefetch_previous()

    def _end_backward(self) -> None:
        self.gradients.end_backward()
        self._in_backward = False
        self._ahead_of = None
        if not self._makes_graph:
            self._unpin_all()
        self.release()

    def _pin_all(self) -> None:
        """For a backward of this backward, which needs any unit's values at any time."""
        if not self._is_kept:
            self._is_kept = True
            for unit in self.units:
                self._unshard(unit)
                unit.pins += 1

    def _unpin_all(self) -> None:
        if self._is_kept:
            self._is_kept = False
            for unit in self.units:
                unit.pins -= 1

    # --- for the optimizer, and for looking at parameters -----------------------------------------

    def release(self) -> None:
        """Free all units."""
        for unit in self.units:
            unit.reshard()

    def before_step(self) -> None:
        """No rank reads the parameters as they are any more. Collective."""
        self._unpin_all()
        if any(unit.pins for unit in self.units):
            raise OperationError(
                "parameters were to change inside summon_full_parameters(), where what was summoned would be "
                "old; leave it first"
            )
        self.release()
        if self.node_shared is not None:
            for unit in self.units:
                unit.unshard()
            self.dp_comm.barrier()

    def start(self, number: int) -> None:
        """This rank's shard of a block is new: whoever gathers its unit next has it."""

    def start_remaining(self) -> None:
        """All shards are new. Collective."""
        for unit in dict.fromkeys([*self._order, *self.units]):
            unit.publish_shards()

    def wait(self) -> None:
        """Units wait for their own parameters."""

    def close(self) -> None:
        """The model stays sharded."""

    def require_all(self, named: Sequence[Named]) -> None:
        """OperationError unless these are all trainable parameters of the model."""
        held = {id(parameter) for _, parameter in named}
        missing = [name for name, p in zip(self.names, self.parameters, strict=True) if id(p) not in held]
        if missing:
            raise OperationError(
                "the optimizer of a fully sharded model must hold all of its trainable parameters, but "
                f"{missing[0]} and {len(missing) - 1} others are missing; freeze them "
                "(requires_grad_(False)) before fully_shard"
            )

    def every_parameter(self) -> Iterator[nn.Parameter]:
        """Trainable or frozen, each once."""
        return (parameter for unit in self.units for held in unit.held for parameter in held.parameters)

    def own_pieces(self) -> Iterator[tuple[OwnPiece, Tensor]]:
        """This rank's part of every parameter, trainable or frozen, and its values, flat."""
        for unit in self.units:
            for held in unit.held:
                block = held.block
                places = range(len(held.parameters))
                for piece in pieces_between(places, block.bucket.edges, block.shard.start, block.shard.stop):
                    parameter: Any = held.parameters[piece.member]
                    layout = layout_of(held.views[piece.member])
                    own = OwnPiece(info_of(parameter).name, parameter, layout, piece.start, piece.stop)
                    yield own, block.own[piece.offset : piece.end]

    @torch.no_grad()
    def load(self, values_of: Callable[[OwnPiece], Tensor | None]) -> None:
        """Take values, flat, of this rank's pieces; None: they stay. Master weights follow. Collective."""
        self.before_step()
        with self.dp_comm.together("loading parameters"):
            trained = False
            for piece, own in self.own_pieces():
                values = values_of(piece)
                if values is not None:
                    own.copy_(values)
                    trained |= piece.parameter.requires_grad
            tell = self.on_loaded()
            if trained and tell is not None:
                tell()
        self.start_remaining()

    @contextmanager
    def summoned(self, *, write_back: bool) -> Iterator[None]:
        for unit in self.units:
            unit.unshard()
            unit.pins += 1
        try:
            yield
        finally:
            for unit in self.units:
                unit.pins -= 1
                unit.accept_writes()
            try:
                if write_back:
                    self._write_back()
            finally:
                self.release()

    @torch.no_grad()
    def _write_back(self) -> None:
        """Keep what was written to summoned parameters. Collective; OperationError where ranks differ."""
        held = [held for unit in self.units for held in unit.held]
        prints = [zlib.crc32(_octets(each.flat.cpu()).data) for each in held]
        told = self.dp_comm.allgather_object(prints)
        for number, each in enumerate(held):
            if any(prints[number] != told[0][number] for prints in told):
                few: list[Any] = each.parameters[:3]
                names = ", ".join(info_of(parameter).name for parameter in few)
                raise OperationError(
                    "inside summon_full_parameters() ranks wrote different values to parameters of which "
                    f"each keeps a shard ({names}{', …' if len(each.parameters) > 3 else ''}); nothing was "
                    "kept. Write the same on every rank, or pass write_back=False to write for its own eyes"
                )
        for each in held:
            own, new = each.block.own, each.flat[each.block.shard.start : each.block.shard.stop]
            if not torch.equal(own, new):
                own.copy_(new)
                self.writes += 1

    def expected_traffic(self, forwards: int, backwards: int) -> dict[str, int]:
        """Bytes that all ranks together send to gather parameters in so many forwards and backwards.

        Every unit is gathered in forward, and again in backward unless it is kept.
        """
        if self.node_shared is not None:
            return {}
        total = 0
        for unit in self.units:
            times = forwards + (0 if unit.keeps else backwards)
            for held in unit.held:
                bucket = held.block.bucket
                total += times * allgather_nbytes(self.dp_comm, bucket.nbytes, dtype=dtype_of(bucket))
        return {"allgather": total}


def fully_shard(
    model: nn.Module,
    dp_comm: Communicator,
    *,
    policy: Policy | None = None,
    precision: Precision | str | torch.dtype | None = None,
    prefetch: int = 1,
    shared_parameters: bool = False,
    values: Values | None = None,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Shard a model's parameters over `dp_comm`, in place; returns it. Collective.

        model = Llama(config, seed=None)                     # under torch.device("meta") if it is large
        hpcpar.fully_shard(model, comm, values=lambda name, p: initial_value(config, name, seed=0))
        optimizer = hpcpar.DistributedOptimizer(AdamW(model.parameters()), model.named_parameters(), comm)

    policy             (name, module) -> is it a unit; None: every layer, a member of an outermost ModuleList
    precision          as of DistributedOptimizer: type of parameters and gradients
    prefetch           units that are gathered ahead
    shared_parameters  on CPUs: the parameters exist once on each node, for all of its ranks; only between
                       nodes are they gathered, once after a step
    values             (name, tensor) -> whole initial value, the same on all ranks, asked for one parameter
                       at a time, and for buffers of the meta device, of which it may know none (KeyError);
                       None: rank 0's parameters and buffers, or, on the meta device, what the modules'
                       reset_parameters draws
    device             where parameters are to be; None: where they are; the CPU for those of the meta device

    Calls of the model, backwards, and what follows from them are collective from now on; every rank must call
    the units in the same order, in the same number of forwards and backwards: MismatchError on every rank
    where a forward does not, as with experts that only some ranks call. A `policy` that makes the layer
    around them the unit is the way then. Which parameters of a unit get
    a gradient may differ, as experts do, and so may whose outputs a loss is made of.

    A forward may not write to its parameters, as torch.nn.Embedding's max_norm makes it: that would go with
    the gathered values, and the shards would not hear of it.

    A backward with create_graph=True, as for a gradient penalty, gathers the whole model and keeps it until
    the end of the next one without, or the step: differentiate the sum of all penalties, once.
    errors   OperationError for a model that is sharded already, a layer with max_norm, or a policy that makes
             no sense; MismatchError on every rank when models differ
    """
    if prefetch < 0:
        raise OperationError(f"prefetch={prefetch}; give 0 or more units")
    if any(info_of(parameter).sharding is not None for parameter in model.parameters()):
        raise OperationError("the model is fully sharded already")
    refuse_scripted(model, "take zero_stage=2 without model=")
    refuse_renormalized(model)
    warn_of_local_batches(model, dp_comm)
    precision = Precision.of(precision)
    plans = plan_units(model, policy)
    agree_on_parameters([(name, p) for plan in plans for name, p, _ in plan.parameters], dp_comm)
    _agree_on_units(plans, prefetch, precision, dp_comm)
    source = InitialValues(model, dp_comm, values)
    numbers = {
        id(parameter): number
        for number, parameter in enumerate(
            p for plan in plans for _, p, _ in plan.parameters if p.requires_grad
        )
    }
    node_shared = NodeSharedParameters(dp_comm) if shared_parameters else None
    units = []
    for plan in plans:
        held = _shard_unit(plan, numbers, dp_comm, source, precision, device, node_shared)
        unit = FsdpUnit(plan, held, dp_comm, node_shared=node_shared)
        for each in held:
            for parameter in each.parameters:
                note(parameter, unit_name=unit.name)
        units.append(unit)
    source.fill_buffers(device)
    for unit in units:
        unit.publish_shards()
    sharding = FullyShardedState(
        units, dp_comm, precision=precision, prefetch=prefetch, node_shared=node_shared
    )
    model.__dict__["_hpcpar_sharding"] = sharding
    model.register_state_dict_pre_hook(_refuse_state_dict)  # type: ignore[no-untyped-call]
    return model


@contextmanager
def summon_full_parameters(model: nn.Module, *, write_back: bool = True) -> Iterator[None]:
    """Inside, a fully sharded model's parameters are all there, for evaluation or export. Collective.

    write_back   keep what has been written to them, on all ranks alike (OperationError on every rank where
                 not); in master weights, too, from the next step on. False: forget it, so that averages may
                 stand in for an evaluation; and do without a look at all values when leaving

    A copy.deepcopy of the model, made here, is an ordinary one that stays whole. A model that is not sharded
    is left as it is.
    """
    sharding = sharding_in(model)
    if sharding is None:
        yield
        return
    with sharding.summoned(write_back=write_back):
        yield


def _agree_on_units(
    plans: Sequence[UnitPlan], prefetch: int, precision: Precision | None, dp_comm: Communicator
) -> None:
    units = ", ".join(plan.name or "the model" for plan in plans)
    asked = dp_comm.allgather_object(f"units {units}; prefetch={prefetch}; precision={precision}")
    other = next((rank for rank, told in enumerate(asked) if told != asked[0]), None)
    if other is not None:
        raise MismatchError(
            f"rank {other} shards another way than rank 0: {asked[other]}, where rank 0 has {asked[0]}. Give "
            "the same policy, prefetch and precision on every rank"
        )


def sharding_in(model: nn.Module) -> FullyShardedState | None:
    return model.__dict__.get("_hpcpar_sharding")


def sharding_of(parameters: Sequence[Tensor]) -> FullyShardedState | None:
    """The sharding that parameters belong to; None: they are ordinary ones."""
    found = {reference() for p in parameters if (reference := info_of(p).sharding) is not None}
    if len(found) > 1:
        raise OperationError(
            "the parameters belong to several fully sharded models; give each its own optimizer"
        )
    return next(iter(found), None)


def _refuse_state_dict(model: nn.Module, prefix: str, keep_vars: bool) -> None:
    sharding = sharding_in(model)
    if keep_vars:
        return  # the parameters themselves, which refuse by themselves to be used
    if sharding is not None and not all(unit.is_unsharded for unit in sharding.units):
        raise ShardedParameterError(
            "the state_dict() of a fully sharded model was asked for, of which this rank has shards only; do "
            "it inside `with hpcpar.summon_full_parameters(model):`, or save it by hpcpar.checkpoint.save"
        )


def _shard_unit(
    plan: UnitPlan,
    numbers: dict[int, int],
    dp_comm: Communicator,
    source: InitialValues,
    precision: Precision | None,
    device: torch.device | str | None,
    node_shared: NodeSharedParameters | None,
) -> list[UnitParamGroup]:
    """A unit's blocks: its parameters by element type and whether they are trained."""
    kinds: dict[Any, list[tuple[str, nn.Parameter, list[Place]]]] = {}
    for entry in plan.parameters:
        parameter = entry[1]
        floats = precision is not None and parameter.is_floating_point()
        dtype = precision.parameters if precision is not None and floats else parameter.dtype
        place = torch.device(device or "cpu") if parameter.is_meta else parameter.device
        kinds.setdefault((dtype, place, parameter.requires_grad), []).append(entry)
    return [
        _shard_group(
            entries,
            [numbers.get(id(p), -1) for _, p, _ in entries],
            dtype,
            place,
            dp_comm,
            source,
            node_shared,
        )
        for (dtype, place, _), entries in kinds.items()
    ]


@torch.no_grad()
def _shard_group(
    entries: list[tuple[str, nn.Parameter, list[Place]]],
    members: list[int],
    dtype: torch.dtype,
    device: torch.device,
    dp_comm: Communicator,
    source: InitialValues,
    node_shared: NodeSharedParameters | None,
) -> UnitParamGroup:
    layouts = [layout_of(parameter) for _, parameter, _ in entries]
    extents = [Extent(math.prod(shape), dtype.itemsize, (dtype, device)) for shape, _ in layouts]
    cut = bucket_of(range(len(entries)), extents, dp_comm.size)
    bucket = replace(cut, members=tuple(members))
    shard = shard_of(bucket, dp_comm.rank, dp_comm.size)
    if node_shared is not None:
        flat = node_shared.allocate(bucket.numel, dtype)
        own = flat[shard.start : shard.stop]
    else:
        flat = torch.empty(bucket.numel, dtype=dtype, device=device)
        length = shard.stop - shard.start
        # The other ranks of this node read it where it lies.
        own = dp_comm.allocate_shared(length, dtype) if device.type == "cpu" else flat.new_zeros(length)
    places = list(zip(bucket.edges[:-1], bucket.edges[1:], strict=True))
    longest = functools.reduce(torch.promote_types, [parameter.dtype for _, parameter, _ in entries])
    values = source.shard(entries, bucket, layouts, places, shard, longest, device)
    own.copy_(values)
    wide = values[: shard.end].clone() if dtype.itemsize < longest.itemsize else None
    placeholders = [
        torch.full((), math.nan, dtype=dtype, device=device).expand(shape) for shape, _ in layouts
    ]
    views = [
        view_as(flat, start, stop, layout) for (start, stop), layout in zip(places, layouts, strict=True)
    ]
    if node_shared is None:
        flat.untyped_storage().resize_(0)
    parameters = [
        _sharded(name, parameter, owners, value, is_sharded=node_shared is None)
        for (name, parameter, owners), value in zip(
            entries, placeholders if node_shared is None else views, strict=True
        )
    ]
    return UnitParamGroup(Block(bucket, shard, own, wide=wide), parameters, flat, views, placeholders)


def _sharded(
    name: str, parameter: nn.Parameter, owners: list[Place], value: Tensor, *, is_sharded: bool
) -> nn.Parameter:
    """The parameter itself with another value; a new one in the place of one of the meta device."""
    if parameter.is_meta:
        noted = parameter.__dict__  # such as the split of a parallel layer's
        parameter = nn.Parameter(value, requires_grad=parameter.requires_grad)
        parameter.__dict__.update(noted)
        for module, own_name in owners:
            module._parameters[own_name] = parameter
    parameter.data = value
    note(parameter, name=name)
    if is_sharded:
        parameter.__class__ = ShardedParameter
    return parameter
