"""Average gradients as the user and the step see them: read, replaced, clipped, tested for NaN and infinity.

    stage 0    `.grad` is the average itself
    else       `.grad` is a HeldGradient; this rank's shard of the average is in `flats`

Scaling is lazy where the step is on shards: `factor` (loss scale, clipping) multiplies the gradients in the
step's own pass over them, not in one of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpcpar.autograd.held_parameter import own_gradient, set_own_gradient
from hpcpar.autograd.split_norms import wide
from hpcpar.data_parallel.held_gradient import HeldGradient
from hpcpar.data_parallel.parameters import OwnPiece
from hpcpar.data_parallel.precision import LossScaler
from hpcpar.data_parallel.reducer import Reducer
from hpcpar.errors import OperationError

if TYPE_CHECKING:
    from hpcpar.data_parallel.builder import Parts


class AverageGradients:
    """Gradients of one optimizer, once its reducer has averaged them.

    factor   by which the step multiplies what lies in `flats`
    total    norm that clipping found last; None: none since the last backward
    """

    def __init__(self, parts: Parts, scaler: LossScaler, zero_stage: int) -> None:
        self.zero_stage = zero_stage
        self.factor = 1.0
        self.total: Tensor | None = None
        self._parts = parts
        self._reducer = parts.reducer
        self._scaler = scaler
        self._overflow: bool | None = None
        self._broken: list[str] | None = None
        self._zeroed: set[int] = set()
        self._is_sum = False

    # --- where they are ---------------------------------------------------------------------------

    @property
    def flats(self) -> list[Tensor]:
        """This rank's part of every bucket's average, flat; OperationError where it means nothing."""
        if self._is_sum:
            raise OperationError(
                "gradients were averaged that add to averages of before, and shards keep no sums from step "
                "to step; call zero_grad() after each step(), and clip or change gradients after the last "
                "backward before it"
            )
        averaging = self._parts.averaging
        if averaging is None:
            return self._reducer.flats
        assert isinstance(self._reducer, Reducer), "stages 0 and 1 have one"
        if self._parts.update is None:
            self._reducer.adopt()  # the user may have set .grad to another tensor, or to None
        return [averaging.average(bucket) for bucket in self._reducer.buckets]

    @property
    def allocated(self) -> list[Tensor]:
        """Memory of averages; in stages 0 and 1 perhaps copies, of another type."""
        averaging = self._parts.averaging
        return self._reducer.flats if averaging is None else averaging.averages

    def arrived(self) -> None:
        """Note that the reducer has just averaged them."""
        self.factor = 1.0 / self._scaler.scale
        self._overflow, self._broken, self.total = None, None, None
        self._zeroed.clear()
        self._is_sum |= self._reducer.used_up
        if self._parts.update is not None and isinstance(self._reducer, Reducer):
            self._reducer.hide()
            self._reducer.used_up = any(self._reducer.used)

    def zero(self, *, set_to_none: bool) -> None:
        """Forget them, or fill them with zeros."""
        self._reducer.zero(set_to_none=set_to_none)
        self._broken, self.total = None, None
        self._zeroed.clear()
        self._is_sum = False

    # --- `.grad` ----------------------------------------------------------------------------------

    def is_in_backward(self, number: int) -> bool:
        """True while a backward is still to bring this gradient; OperationError where one has sent it."""
        if torch._C._current_graph_task_id() == -1:
            return False
        if self._reducer.has_taken(number):
            raise OperationError(
                f"the gradient of {self._reducer.names[number]} was used in the backward that had sent "
                "it to be averaged, as in a hook; use it after the backward, or in one that sees it first: "
                "p.register_hook, or one that is registered before the optimizer is made"
            )
        return True

    def shown(self, parameter: Tensor, number: int) -> Tensor | None:
        """Return what `.grad` shows after a backward."""
        if self._parts.update is None or not self._reducer.used[number]:
            return own_gradient(parameter)
        return HeldGradient.of(parameter, self)

    def replace(self, parameter: Tensor, number: int, gradient: Tensor | None) -> None:
        """Take what the user sets `.grad` to after a backward; None forgets the gradient."""
        reducer = self._reducer
        if self._parts.update is None or not (reducer.used[number] or reducer.synchronized):
            set_own_gradient(parameter, gradient)
        elif gradient is not None:
            raise OperationError(
                f"the gradient of {reducer.names[number]} was to be replaced, of which this rank "
                f"has only a shard, as with zero_stage={self.zero_stage}, precision or offload; change it in "
                "place (p.grad.mul_(), p.grad.copy_()), or change those of optimizer.named_gradients()"
            )
        else:
            self._zero_shard(parameter)  # the next backward adds to it
            reducer.forget(number)
            if not any(reducer.used):
                self.zero(set_to_none=True)

    # --- HeldGradient's side ----------------------------------------------------------------------

    def own_gradient_of(self, parameter: Tensor) -> tuple[OwnPiece, Tensor] | None:
        """Return this rank's piece of a parameter and its average gradient, flat; None: it has none.

        The gradient is what the step is taken on: neither a scale nor a clip waits to be applied.
        """
        self._multiply_by(1.0)
        number = self._parts.number_of[id(parameter)]
        found = self._parts.piece_of.get(number)
        if found is None:
            return None
        block, piece = found
        assert self._parts.update is not None, "otherwise .grad is the average itself"
        layout = self._parts.update.layouts[number]
        own = OwnPiece(self._reducer.names[number], parameter, layout, piece.start, piece.stop)
        return own, self.flats[block][piece.offset : piece.end]

    def zero_gradient_of(self, parameter: Tensor) -> None:
        """Leave zeros of a parameter's gradient; once all are zeroed, as zero_grad(set_to_none=False)."""
        self._zero_shard(parameter)
        self._zeroed.add(self._parts.number_of[id(parameter)])
        if all(number in self._zeroed for number, is_used in enumerate(self._reducer.used) if is_used):
            self.zero(set_to_none=False)

    def _zero_shard(self, parameter: Tensor) -> None:
        own = None if self._is_sum else self.own_gradient_of(parameter)
        if own is not None:
            own[1].zero_()

    def norm_of(self, parameters: Iterable[Tensor], norm_type: float) -> Tensor:
        """Return the norm of the average gradients of these parameters together. Collective."""
        given = {self._parts.number_of[id(parameter)] for parameter in parameters}
        return self._parts.norm.of(self.flats, norm_type, given) * abs(self.factor)

    # --- all of them ------------------------------------------------------------------------------

    def named(self) -> Iterator[tuple[str, slice, Tensor]]:
        """Yield (name, elements, average gradient) of what this rank will step on; scaled and clipped."""
        names = self._reducer.names
        if self._parts.update is None:
            for name, parameter in zip(names, self._reducer.parameters, strict=True):
                if parameter.grad is not None:
                    yield name, slice(0, parameter.numel()), flat_view(parameter.grad)
            return
        self._multiply_by(1.0 / self._scaler.scale)
        for block, gradient in zip(self._parts.update.blocks, self.flats, strict=True):
            for piece in block.shard.pieces:
                if self._reducer.used[piece.member]:
                    elements = slice(piece.start, piece.stop)
                    yield names[piece.member], elements, gradient[piece.offset : piece.end]

    def clip_norm(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Scale all so that their common norm is at most `max_norm`; return the norm before. Collective."""
        flats = self.flats
        self.total = total = self._parts.norm.of(flats, norm_type) * abs(self.factor)
        if error_if_nonfinite and not total.isfinite():
            raise OperationError(
                f"the norm of the gradients is {total.item()}, on every rank; look for the first layer whose "
                "output is not finite, or lower the learning rate"
            )
        if not total.isfinite():
            self.nonfinite_names()  # afterwards all may be NaN
        coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        # On a GPU, asking for the value would make the host wait; multiplying by 1 is cheaper there.
        if coefficient.device.type != "cpu" or not coefficient.item() >= 1:
            if self._parts.update is not None:
                self.factor *= coefficient.item()
                self._reducer.unapplied *= coefficient.item()
            else:
                for flat in flats:
                    flat.mul_(coefficient.to(device=flat.device, dtype=wide(flat)))
        return total

    def clip_value(self, clip_value: float) -> None:
        """Bring every element to between -clip_value and clip_value."""
        self.has_overflow()  # afterwards, what is clipped looks finite
        limit = clip_value / abs(self.factor) if self.factor else clip_value
        for flat in self.flats:
            flat.clamp_(-limit, limit)

    def are_finite(self) -> bool:
        """True where no rank has a NaN or an infinity; all ranks agree. Collective."""
        return self._parts.norm.is_finite(self.flats)

    def nonfinite_names(self) -> list[str]:
        """Return the parameters of whose averages this rank has a NaN or an infinity, before any clipping."""
        if self._broken is None:
            self._broken = [name for name, _, average in self.named() if not average.isfinite().all()]
        return self._broken

    def has_overflow(self) -> bool:
        """True where a scaled loss's gradients, as they arrived, are too large for their type. Collective."""
        if self._overflow is None:
            self._overflow = self._scaler.is_scaling and not self.are_finite()
        return self._overflow

    def _multiply_by(self, rest: float) -> None:
        """Apply the scale and clip that wait for the step, up to a factor of `rest`."""
        if self._parts.update is None or self.factor == rest:
            return
        self.has_overflow()  # afterwards, what is clipped looks finite
        applied = self.factor / rest
        for flat in self.flats:
            flat.mul_(applied)
        self.factor = rest
        self._reducer.unapplied /= applied or 1.0


def flat_view(tensor: Tensor) -> Tensor:
    """Return a dense tensor's elements in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
