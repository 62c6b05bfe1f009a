"""The step of an elementwise optimizer, and of Muon, on the pieces of parameters that this rank owns.

    for each block:   gradients of the own shard ─> in the masters' type, scaled ─> optimizer on its pieces
                      masters ─> rounded into the own part of the parameters ─> published to the other ranks

The optimizer that the user made is the one that steps: for the time of a step its groups hold pieces in the
parameters' stead, with all their options, so schedulers and whatever else changes options see no difference.
Its state is that of pieces, which `states_by_block` gives. Muon's matrices are stepped on by `matrix_step`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpcpar.data_parallel.bucket_shards import Piece
from hpcpar.data_parallel.flat_parameters import Block, following
from hpcpar.data_parallel.matrix_exchange import TRAVELS_AS, MatrixExchange, SpreadMatrix
from hpcpar.data_parallel.matrix_step import apply_update, is_divided, momentum_update, orthogonalized
from hpcpar.data_parallel.offload import Offload
from hpcpar.data_parallel.parameters import Layout, in_memory_order, layout_of, view_as
from hpcpar.data_parallel.precision import Precision, master_dtype, narrowed

MASTER = "master_weight"
"""The key under which states hold a parameter's master weights."""

State = dict[str, Any]


class _Part(NamedTuple):
    """A piece of a parameter as the optimizer sees it: a flat tensor of its own, or one of no dimensions."""

    piece: Piece
    tensor: Tensor


class ShardedStep:
    """Steps an optimizer on this rank's pieces.

    inner        the optimizer, whose groups hold `parameters`
    parameters   numbered as the pieces' members are
    blocks       their memory, in the order of the buckets
    precision    None: the parameters are their own masters
    offload      where masters and states are between steps; None: where they were made
    layouts      of the parameters; None: as they lie now
    matrices     ids of the parameters that Muon steps on
    spread       those of them that lie on several ranks
    """

    def __init__(
        self,
        inner: Optimizer,
        parameters: Sequence[Tensor],
        blocks: Sequence[Block],
        *,
        precision: Precision | None,
        offload: Offload | None = None,
        layouts: Sequence[Layout] | None = None,
        matrices: Collection[int] = (),
        spread: Sequence[SpreadMatrix] = (),
    ) -> None:
        self.inner = inner
        self.blocks = list(blocks)
        self.parameters = list(parameters)
        self.layouts = [layout_of(p) for p in parameters] if layouts is None else list(layouts)
        self._precision = precision
        self.offload = offload or Offload()
        self._note_groups()
        self._matrices = matrices
        self.exchange = MatrixExchange(spread)
        whole = self._taken_states()
        self.masters: list[Tensor] = []
        self._is_apart: list[bool] = []
        self._parts: list[list[_Part]] = []
        for number, block in enumerate(self.blocks):
            master = self._make_master(block)
            self.masters.append(master)
            self._is_apart.append(master.data_ptr() != block.own.data_ptr())
            self._parts.append([_Part(piece, self._seen(master, piece)) for piece in block.shard.pieces])
            content = [(part.tensor, inner.state[part.tensor]) for part in self._parts[number]]
            self.offload.adopt(number, content, master)
        if whole:
            numels = [parameter.numel() for parameter in parameters]
            self.load_states(lambda p: part_of(whole.get(p.member, {}), p.start, p.stop, numels[p.member]))

    def _note_groups(self) -> None:
        self._group_of = {
            id(parameter): number
            for number, group in enumerate(self.inner.param_groups)
            for parameter in group["params"]
        }

    # --- stepping ---------------------------------------------------------------------------------

    @torch.no_grad()
    def run(
        self,
        gradients: Sequence[Tensor],
        used: Sequence[int],
        factor: float,
        publish: Callable[[int], None],
    ) -> None:
        """One step of every piece that got a gradient.

        gradients   of each block, those of this rank's shard
        used        of each parameter, whether it got one at all
        factor      that they are multiplied by first
        publish     is told the number of each block whose own part of the parameters is new; blocks come
                    in the order in which a forward needs them
        The optimizer's hooks for before a step are called here, those for after it by `call_post_hooks`.
        """
        order = list(reversed(range(len(self.blocks))))
        for hook in list(self.inner._optimizer_step_pre_hooks.values()):
            hook(self.inner, (), {})
        self._note_groups()  # the user may have moved parameters to other groups, or taken them out
        used = [
            is_used if id(p) in self._group_of else 0
            for is_used, p in zip(used, self.parameters, strict=True)
        ]
        with self._without_hooks():
            for turn, number in enumerate(order):
                self.offload.fetch(number, following=order[turn + 1 :])
                self._step_block(number, gradients[number], used, factor)
                if not self._has_spread(number):
                    self._finish_block(number, publish)
        self._step_spread(gradients, used, factor)
        for number in filter(self._has_spread, order):
            self._finish_block(number, publish)
        # Of whoever watches the order of step and scheduler: this rank may have had no piece to step on.
        self.inner._opt_called = True  # type: ignore[attr-defined]
        self.offload.wait()

    def _has_spread(self, number: int) -> bool:
        """Return whether matrices of a block lie on several ranks, also where this rank has none of them.

        The ranks that publish a block must do so in the same order.
        """
        members = self.blocks[number].bucket.members
        return not self.exchange.members.isdisjoint(members) or any(
            id(self.parameters[member]) in self._matrices and is_divided(self.parameters[member])
            for member in members
        )

    def _finish_block(self, number: int, publish: Callable[[int], None]) -> None:
        """Round the masters into the parameters, and put the block away."""
        if self._is_apart[number]:
            self.blocks[number].held.copy_(self.masters[number])
        self.offload.offload(number)
        publish(number)

    def _step_block(self, number: int, gradient: Tensor, used: Sequence[int], factor: float) -> None:
        """Step on all pieces of a block but those of matrices that lie on several ranks."""
        parts = [
            part
            for part in self._parts[number]
            if used[part.piece.member] and part.piece.member not in self.exchange.members
        ]
        if not parts:
            return
        own = self._scaled(gradient, self.masters[number], factor)
        stepping = [part for part in parts if not self._is_matrix(part)]
        self._cast_moments(parts, self.masters[number].dtype)
        for part in stepping:
            part.tensor.grad = self._seen(own, part.piece)
        if stepping:
            with self._on(stepping):
                self.inner.step()
        for part in stepping:
            part.tensor.grad = None
        for part in filter(self._is_matrix, parts):
            self._step_matrix(part, own[part.piece.offset : part.piece.end], self.blocks[number].own.device)
        self._cast_moments(parts)

    @staticmethod
    def _scaled(gradient: Tensor, master: Tensor, factor: float) -> Tensor:
        own = gradient.to(device=master.device, dtype=master.dtype)
        if factor != 1.0:
            own = own.mul_(factor) if own is not gradient else own * factor
        return own

    # --- matrices ---------------------------------------------------------------------------------

    def _is_matrix(self, part: _Part) -> bool:
        return id(self.parameters[part.piece.member]) in self._matrices

    def _step_matrix(self, part: _Part, gradient: Tensor, device: torch.device) -> None:
        """Step on a matrix of which this rank has all."""
        group, layout = self._group(part.piece.member), self.layouts[part.piece.member]
        update = momentum_update(gradient, self.inner.state[part.tensor], group).to(device)
        found = orthogonalized(view_as(update, 0, update.numel(), layout), group)
        apply_update(part.tensor, in_memory_order(found, layout).to(part.tensor.device), group, layout[0])

    def _step_spread(self, gradients: Sequence[Tensor], used: Sequence[int], factor: float) -> None:
        """Step on the matrices that lie on several ranks, all of which come here."""
        place = {
            part.piece.member: (number, part) for number, parts in enumerate(self._parts) for part in parts
        }

        def update_of(matrix: SpreadMatrix) -> Tensor:
            if matrix.member not in place or not used[matrix.member]:
                length = place[matrix.member][1].piece.numel if matrix.member in place else 0
                return torch.zeros(length, dtype=TRAVELS_AS, device=matrix.device)
            number, part = place[matrix.member]
            own = gradients[number][part.piece.offset : part.piece.end]
            own = self._scaled(own, self.masters[number], factor)
            self._cast_moments([part], self.masters[number].dtype)
            update = momentum_update(own, self.inner.state[part.tensor], self._group(matrix.member))
            self._cast_moments([part])
            return update.to(matrix.device)

        def work(matrix: SpreadMatrix, whole: Tensor) -> Tensor:
            return orthogonalized(whole, self._group(matrix.member)) if used[matrix.member] else whole

        def apply(matrix: SpreadMatrix, update: Tensor) -> None:
            if matrix.member in place and used[matrix.member]:
                part = place[matrix.member][1]
                update = update.to(part.tensor.device)
                apply_update(part.tensor, update, self._group(matrix.member), matrix.shape)

        self.exchange.run(update_of, work, apply)

    def _group(self, member: int) -> dict[str, Any]:
        return self.inner.param_groups[self._group_of[id(self.parameters[member])]]

    def _seen(self, flat: Tensor, piece: Piece) -> Tensor:
        """A piece of this rank's elements: flat, but without dimensions where its parameter has none.

        Only so can its moments, which have none either, be told from those of flat pieces.
        """
        return flat[piece.offset] if self._is_scalar(piece) else flat[piece.offset : piece.end]

    def _is_scalar(self, piece: Piece) -> bool:
        return not self.layouts[piece.member][0]

    @contextmanager
    def _on(self, parts: Sequence[_Part]) -> Iterator[None]:
        """Let the optimizer's groups hold these pieces in the parameters' stead."""
        groups = self.inner.param_groups
        members = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = []
            for part in parts:
                self._group(part.piece.member)["params"].append(part.tensor)
            yield
        finally:
            for group, held in zip(groups, members, strict=True):
                group["params"] = held

    @contextmanager
    def _without_hooks(self) -> Iterator[None]:
        """Take the optimizer's hooks away: they are for the whole step, not for each block's."""
        before, after = self.inner._optimizer_step_pre_hooks, self.inner._optimizer_step_post_hooks
        self.inner._optimizer_step_pre_hooks = type(before)()
        self.inner._optimizer_step_post_hooks = type(after)()
        try:
            yield
        finally:
            self.inner._optimizer_step_pre_hooks, self.inner._optimizer_step_post_hooks = before, after

    def call_post_hooks(self, arrival: Callable[[], None]) -> None:
        """Call the optimizer's hooks for after a step, if any, once the parameters are there as a whole.

        arrival   returns then
        """
        hooks = list(self.inner._optimizer_step_post_hooks.values())
        if hooks:
            arrival()
        for hook in hooks:
            hook(self.inner, (), {})

    # --- masters and moments ----------------------------------------------------------------------

    def _make_master(self, block: Block) -> Tensor:
        held, wide = block.held, block.take_wide()
        dtype = master_dtype(held.dtype, self._precision)
        if dtype == held.dtype and self.offload.is_resident:
            return held
        return wide.to(device=self.offload.device, dtype=dtype, copy=True)

    @torch.no_grad()
    def refresh_masters(self, *, everything: bool = True) -> None:
        """Take the masters from the parameters, which somebody has written to.

        everything   no: only where a parameter is not its master, rounded, any more
        """
        for number, block in enumerate(self.blocks):
            self.offload.fetch(number)
            master = self.masters[number]
            if self._is_apart[number] and everything:
                master.copy_(block.held)
            elif self._is_apart[number]:
                master.copy_(following(master, block.held))
            self.offload.offload(number)
        self.offload.wait()

    def _cast_moments(self, parts: Iterable[_Part], dtype: torch.dtype | None = None) -> None:
        """Cast moments, where `precision` has a type for them, to another one to step in; None: back."""
        if self._precision is None or self._precision.moments is None:
            return
        dtype = dtype or self._precision.moments
        for part in parts:
            state = self.inner.state.get(part.tensor, {})
            step = int(state.get("step", 0))
            for key, value in state.items():
                if is_elementwise(value, part.piece.numel):
                    state[key] = narrowed(value, dtype, step)

    # --- states -----------------------------------------------------------------------------------

    def states_by_block(self) -> Iterator[list[tuple[Piece, State]]]:
        """Yield each block's pieces with their states, master weights among them.

        What is given may be used until the next is asked for.
        """
        for number, parts in enumerate(self._parts):
            self.offload.fetch(number)
            found = []
            for part in parts:
                state = dict(self.inner.state[part.tensor])
                if self.masters[number].dtype != self.blocks[number].own.dtype:
                    state[MASTER] = part.tensor
                found.append((part.piece, state))
            yield found
            self.offload.offload(number, changed=False)
        self.offload.wait()

    @torch.no_grad()
    def load_states(self, state_of: Callable[[Piece], Mapping[str, Any]]) -> None:
        """Take every piece's state, flat, or without dimensions where the parameter has none.

        Master weights among them become the parameters.
        """
        for number in range(len(self.blocks)):
            self.offload.fetch(number)
            for part in self._parts[number]:
                state = dict(state_of(part.piece))
                master = state.pop(MASTER, None)
                if master is not None:
                    part.tensor.copy_(master.reshape(part.tensor.shape))
                    self._seen(self.blocks[number].own, part.piece).copy_(part.tensor)
                self._set_state(number, part, state)
            self._cast_moments(self._parts[number])
            self.offload.offload(number)
        self.offload.wait()

    def _set_state(self, number: int, part: _Part, values: State) -> None:
        master = self.masters[number]
        group = self._group(part.piece.member)
        # Steps that a kernel on the device counts are there; torch's own load_state_dict asks the same.
        counts_on_device = group.get("fused") or group.get("capturable")
        is_scalar = self._is_scalar(part.piece)
        state = self.inner.state[part.tensor]  # the same dictionary as ever: a storage knows it
        state.clear()
        for key, value in values.items():
            if is_elementwise(value, part.piece.numel) or (is_scalar and _may_be_moment(key, value)):
                dtype = master.dtype if value.is_floating_point() else value.dtype
                moved = value.to(device=master.device, dtype=dtype, copy=True)
                state[key] = moved.reshape(part.tensor.shape)
            elif isinstance(value, Tensor):
                state[key] = value.to(device=master.device if counts_on_device else value.device, copy=True)
            else:
                state[key] = value

    def _taken_states(self) -> dict[int, State]:
        """Take the states that the optimizer has of whole parameters out of it."""
        numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        held = [parameter for parameter in self.inner.state if id(parameter) in numbers]
        taken = {numbers[id(parameter)]: dict(self.inner.state.pop(parameter)) for parameter in held}
        return {number: flattened(state, self.layouts[number]) for number, state in taken.items()}

    # --- figures ----------------------------------------------------------------------------------

    def masters_apart(self) -> list[tuple[Block, Tensor]]:
        """Master weights that are not the parameters themselves; empty ones while they are on disk."""
        triples = zip(self.blocks, self.masters, self._is_apart, strict=True)
        return [(block, master) for block, master, apart in triples if apart]

    def pieces_with_states(self) -> Iterator[tuple[Piece, State]]:
        """Every piece of this rank with its state as it lies now; tensors that are on disk are empty."""
        for parts in self._parts:
            for part in parts:
                yield part.piece, self.inner.state[part.tensor]


def is_elementwise(value: Any, numel: int) -> bool:
    """Return whether a value of a state has an element for each of the parameter's, and is no counter.

    Those of a parameter without dimensions, whose one piece has none either, are taken as they are.
    """
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() == numel


def _may_be_moment(key: str, value: Any) -> bool:
    """Return whether a value may be the moment of a parameter without dimensions; torch asks the same."""
    return key != "step" and isinstance(value, Tensor) and value.numel() == 1


def part_of(state: Mapping[str, Any], start: int, stop: int, numel: int) -> State:
    """Cut elements start … stop - 1 out of the `flattened` state of a parameter of `numel` elements."""
    return {key: value[start:stop] if is_elementwise(value, numel) else value for key, value in state.items()}


def flattened(state: Mapping[str, Any], layout: Layout) -> State:
    """A whole parameter's state with what has an element for each of the parameter's in memory order."""
    numel = math.prod(layout[0])
    return {
        key: in_memory_order(value.reshape(layout[0]), layout) if is_elementwise(value, numel) else value
        for key, value in state.items()
    }
