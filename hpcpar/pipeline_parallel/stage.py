"""One stage: forward (F), backward (B) and weight gradients (W) of a microbatch, and the state in between.

    F   inputs ─ module ─ outputs                keeps the graph, and the inputs that require a gradient
    B   gradients of outputs ─► of inputs        and of the weights, unless a W follows
    W   gradients of the weights                 keeps nothing

Each microbatch has a graph of its own, whose leaves are its inputs. A stage keeps the outputs' nodes in the
graph, and not the outputs: their memory is free once they are delivered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from hpcpar.autograd.weight_grad_mode import DeferredGradients
from hpcpar.errors import OperationError, ShardedParameterError
from hpcpar.pipeline_parallel.tensor_spec import OutputSpec, Tensors, as_tensors

LEAF_IN_PLACE = "leaf Variable that requires grad is being used in an in-place operation"
"""Text of torch's error for a stage that changes its input, or a view of it."""

SAVED_IN_PLACE = "has been modified by an inplace operation"
"""Text of torch's error for a saved tensor that was changed before its backward."""


@dataclass
class _MicrobatchState:
    """State of one microbatch between its forward and the end of its backward.

    inputs     inputs that require a gradient
    roots      a scalar for each differentiable output, whose backward passes on the gradient of that output
    gradients  gradients of the differentiable outputs, put here before the roots' backward
    """

    inputs: tuple[Tensor, ...]
    roots: tuple[Tensor, ...]
    gradients: list[Tensor | None]
    deferred: DeferredGradients | None


class Stage:
    """Numbered part of the model, and its microbatches that are between forward and backward."""

    def __init__(self, number: int, module: nn.Module) -> None:
        self.number = number
        self.module = module
        self._states: dict[int, _MicrobatchState] = {}

    @property
    def alive(self) -> int:
        """Number of microbatches between forward and backward."""
        return len(self._states)

    @property
    def device(self) -> torch.device:
        """Device of its inputs: that of its first parameter, or buffer."""
        for tensor in self.tensors():
            return tensor.device
        return torch.device("cpu")

    def tensors(self) -> Iterator[Tensor]:
        """Yield the module's parameters and buffers."""
        yield from self.module.parameters()
        yield from self.module.buffers()

    @property
    def autocast(self) -> torch.dtype | None:
        """Current dtype of torch.autocast on its device; None: autocast is off."""
        kind = self.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def forward(
        self,
        microbatch: int,
        inputs: Sequence[Any],
        spec: OutputSpec | None,
        *,
        split: bool = False,
        loss: Callable[[Any], Tensor] | None = None,
    ) -> Any:
        """Run the module, or the loss of its output; keep the graph if grad is enabled.

        spec    of the inputs, from another stage; None: the inputs are used as they are
        split   a W will compute the weights' gradients
        loss    loss of the module's output, on the last stage
        errors  OperationError for a loss that is not one number, or requires no gradient though grad is
                enabled, and for inputs that are changed in place; BufferTypeError as `as_tensors`
        """
        leaves = tuple(inputs) if spec is None else _leaves(inputs, spec)
        deferred = DeferredGradients() if split and torch.is_grad_enabled() else None
        with nullcontext() if deferred is None else deferred.recording():
            output = self._called_with(leaves, spec)
            if loss is not None:
                output = loss(output)
        if loss is not None:
            _require_scalar(output, microbatch)
        if torch.is_grad_enabled():
            outputs = as_tensors(output, f"stage {self.number}")
            gradients: list[Tensor | None] = [] if loss is None else [torch.ones_like(output)]
            self._states[microbatch] = _MicrobatchState(
                () if spec is None else _differentiable(leaves),
                _roots(gradients, _differentiable(outputs)),
                gradients,
                deferred,
            )
        return output

    def _called_with(self, leaves: Sequence[Any], spec: OutputSpec | None) -> Any:
        try:
            return self.module(*leaves)
        except RuntimeError as error:
            if spec is None or not spec.differentiable or LEAF_IN_PLACE not in str(error):
                raise
            # A copy of every input would cost all other stages memory.
            raise OperationError(
                f"stage {self.number} changes its input in place ({error}): set inplace=False in its first "
                "layer, or cut the model elsewhere"
            ) from error

    def apart(self, output: Any) -> Tensors:
        """Return an output as tensors for the next stage, with copies of what lies in the module's memory.

        The module may write to a buffer, or to a tensor in an attribute, in the next microbatch already,
        while in one process the next stage computes first.
        errors   BufferTypeError as `as_tensors`
        """
        tensors = as_tensors(output, f"stage {self.number}")
        # What an operation has made anew, and nobody has written to, is no buffer.
        if all(each is None or (each.grad_fn is not None and not each._version) for each in tensors):
            return tensors
        held = set(_memory_of(self.module))
        return tuple(each if each is None or _address(each) not in held else each.clone() for each in tensors)

    def backward(self, microbatch: int, gradients: Iterable[Tensor | None]) -> Tensors:
        """Compute the gradients of the differentiable inputs; None if no output that is used depends on one.

        gradients   of the differentiable outputs, None for those that are not used; none for a loss
        errors      OperationError if torch's checkpoint cannot recompute what a split forward has saved, and
                    if a later microbatch has changed in place what autograd has saved
        """
        state = self._states[microbatch]
        state.gradients.extend(gradients)
        # As in one process, autograd does not come by what no gradient comes to: zeros would be another thing
        # to an optimizer with momentum or weight decay.
        given = [root for root, each in zip(state.roots, state.gradients, strict=True) if each is not None]
        if given:
            try:
                torch.autograd.backward(given)
            except CheckpointError as error:
                if state.deferred is None:
                    raise
                raise OperationError(
                    f"stage {self.number} recomputes by torch.utils.checkpoint, use_reentrant=False, which "
                    "does not know that the schedule takes its backward in two parts: call "
                    "hpcpar.autograd.recompute(function, *tensors) in its place, pass use_reentrant=True, or "
                    "take a schedule without W, such as 1f1b or interleaved"
                ) from error
            except RuntimeError as error:
                if SAVED_IN_PLACE not in str(error):
                    raise
                raise OperationError(
                    f"stage {self.number} changes in place what the backward of an earlier microbatch needs "
                    f"({error}): let its forward compute with a clone() of it, or take the schedule naive, "
                    "which has one microbatch at a time"
                ) from error
        # A sparse embedding of an input gives it a sparse gradient.
        found = tuple(None if x.grad is None else x.grad.to_dense() for x in state.inputs)
        state.inputs, state.roots = (), ()
        state.gradients.clear()
        if state.deferred is None:
            del self._states[microbatch]
        return found

    def weights(self, microbatch: int) -> None:
        """Compute the weights' gradients that a split backward has deferred.

        errors   OperationError for fully sharded weights (ZeRO-3), which are unsharded in F and B alone
        """
        deferred = self._states.pop(microbatch).deferred
        assert deferred is not None, "its forward has seen the same schedule"
        try:
            deferred.compute()
        except ShardedParameterError as error:
            raise OperationError(
                f"stage {self.number} is fully sharded (ZeRO stage 3), and its weights are whole no more "
                "where the schedule comes to W: take one without W, such as 1f1b or interleaved, or "
                "zero_stage=1"
            ) from error

    def forget(self) -> None:
        """Drop the state of all microbatches."""
        self._states.clear()


def _require_scalar(loss: Any, microbatch: int) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__qualname__
        raise OperationError(
            f"the loss of microbatch {microbatch} must be a tensor of one number, not {found}: return such a "
            "one from the function that is passed to the Pipeline as loss=, or without it from the last stage"
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise OperationError(
            f"the loss of microbatch {microbatch} requires no gradient, so that nothing would be "
            "learnt: make it of the last stage's output, without detach() or inference_mode()"
        )


def _memory_of(module: nn.Module) -> Iterator[int]:
    """Yield where the tensors are that a module keeps: buffers, attributes, and lists and dicts of them."""
    for layer in module.modules():
        for name, attribute in vars(layer).items():
            if name in _OF_TORCH:
                continue
            values = attribute.values() if isinstance(attribute, dict) else attribute
            for each in values if isinstance(attribute, (dict, list, tuple)) else [attribute]:
                if type(each) is Tensor and each.layout is torch.strided:
                    yield _address(each)


_OF_TORCH = vars(nn.Module()).keys() - {"_buffers"}
"""Attributes of every module: its parameters, layers and hooks."""


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _differentiable(tensors: Tensors) -> tuple[Tensor, ...]:
    return tuple(each for each in tensors if each is not None and each.requires_grad)


def _leaves(inputs: Sequence[Any], spec: OutputSpec) -> Tensors:
    return tuple(
        None if each is None else tensor.detach().requires_grad_(each.requires_grad)
        for tensor, each in zip(inputs, spec.tensors, strict=True)
    )


class _Root(torch.autograd.Function):
    """Scalar in place of an output: its backward passes on the gradient that has been received."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor | None], place: int, output: Tensor) -> Tensor:
        ctx.gradients, ctx.place = gradients, place
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, ctx.gradients[ctx.place]


def _roots(gradients: list[Tensor | None], outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(_Root.apply(gradients, place, output) for place, output in enumerate(outputs))  # type: ignore[no-untyped-call]


@contextmanager
def poking_between_layers(modules: Iterable[nn.Module], poke: Callable[[], None]) -> Iterator[None]:
    """Call `poke` after every layer with parameters, forward and backward, while the context lasts.

    There is no progress thread, so a message would otherwise wait for the action to end.
    """

    def on_forward(_: nn.Module, __: Any, output: Any) -> None:
        poke()
        # A hook on a parameter itself would stay.
        if isinstance(output, Tensor) and output.grad_fn is not None:
            output.register_hook(lambda _: poke())  # type: ignore[no-untyped-call]

    # Fused layers may skip this hook rather than be computed one by one.
    on_forward.may_be_left_out = True  # type: ignore[attr-defined]
    layers = [
        layer
        for module in modules
        for layer in module.modules()
        if any(True for _ in layer.parameters(False))
    ]
    hooks = [layer.register_forward_hook(on_forward) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
