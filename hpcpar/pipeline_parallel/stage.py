"""One stage's forward, backward and weights' part of a microbatch, and what is kept in between.

    F   inputs ─ module ─ outputs                kept: the graph, and of the inputs those that want a gradient
    B   gradients of outputs ─► of inputs        the weights', too, unless a W follows
    W   the weights' gradients                   nothing is kept from here on

Microbatches know nothing of each other: the inputs of each are leaves of a graph of its own. The outputs
themselves are not kept, only their place in the graph: once delivered, their memory is free.
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
from hpcpar.pipeline_parallel.forms import Form, Tensors, as_tensors

LEAF_IN_PLACE = "leaf Variable that requires grad is being used in an in-place operation"
"""What torch says where a stage changes its input, or a view of it."""


@dataclass
class _Kept:
    """Of one microbatch between its forward and the end of its backward.

    inputs     those that want a gradient
    root       a scalar whose backward is that of all outputs; None where no output requires a gradient
    gradients  put here before that: of the outputs that require one
    """

    inputs: tuple[Tensor, ...]
    root: Tensor | None
    gradients: list[Tensor]
    deferred: DeferredGradients | None


class Stage:
    """A part of the model, by its number, and the microbatches that are between forward and backward."""

    def __init__(self, number: int, module: nn.Module) -> None:
        self.number = number
        self.module = module
        self._kept: dict[int, _Kept] = {}

    @property
    def alive(self) -> int:
        """How many microbatches are kept."""
        return len(self._kept)

    @property
    def device(self) -> torch.device:
        """Where its inputs are to be: with its first parameter, or buffer."""
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            return tensor.device
        return torch.device("cpu")

    @property
    def autocast(self) -> torch.dtype | None:
        """To which type torch.autocast turns what it computes now; None: it does not."""
        kind = self.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def forward(
        self,
        microbatch: int,
        inputs: Sequence[Any],
        form: Form | None,
        *,
        split: bool = False,
        loss: Callable[[Any], Tensor] | None = None,
    ) -> Any:
        """What the module makes of the inputs, or the loss of that; kept for backward where grad is enabled.

        form    says which inputs want a gradient; None: they are as the caller has them
        split   the weights' gradients will be asked for apart
        loss    of the module's output, on the last stage
        errors  OperationError where the loss is not one number, where it requires no gradient though grad is
                enabled, or where the inputs are changed in place; BufferTypeError as `as_tensors`
        """
        leaves = tuple(inputs) if form is None else _leaves(inputs, form)
        deferred = DeferredGradients() if split and torch.is_grad_enabled() else None
        with nullcontext() if deferred is None else deferred.recording():
            output = self._called_with(leaves, form)
            if loss is not None:
                output = loss(output)
        if loss is not None:
            if not isinstance(output, Tensor) or output.numel() != 1:
                found = list(output.shape) if isinstance(output, Tensor) else type(output).__qualname__
                raise OperationError(
                    f"the loss of microbatch {microbatch} must be a tensor of one number, not {found}"
                )
            if torch.is_grad_enabled() and not output.requires_grad:
                raise OperationError(
                    f"the loss of microbatch {microbatch} requires no gradient, so that nothing would be "
                    "learnt: make it of the last stage's output, without detach() or inference_mode()"
                )
        if torch.is_grad_enabled():
            wanting = (
                [] if form is None else [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
            )
            outputs = [each for each in as_tensors(output, f"stage {self.number}") if each is not None]
            gradients = [] if loss is None else [torch.ones_like(output)]
            root = _root(gradients, [each for each in outputs if each.requires_grad])
            self._kept[microbatch] = _Kept(tuple(wanting), root, gradients, deferred)
        return output

    def _called_with(self, leaves: Sequence[Any], form: Form | None) -> Any:
        try:
            return self.module(*leaves)
        except RuntimeError as error:
            if form is None or not form.differentiable or LEAF_IN_PLACE not in str(error):
                raise
            # A copy of every input would cost all other stages memory.
            raise OperationError(
                f"stage {self.number} changes its input in place ({error}): set inplace=False in its first "
                "layer, or cut the model elsewhere"
            ) from error

    def backward(self, microbatch: int, gradients: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Gradients of the inputs that want one, zeros where nothing depends on one.

        gradients   of the outputs that require one; none for a loss
        errors      OperationError where torch's checkpoint does not find again what a split forward has kept
        """
        kept = self._kept[microbatch]
        kept.gradients.extend(gradients)
        if kept.root is not None:
            try:
                kept.root.backward()  # type: ignore[no-untyped-call]
            except CheckpointError as error:
                if kept.deferred is None:
                    raise
                raise OperationError(
                    f"stage {self.number} recomputes by torch.utils.checkpoint, use_reentrant=False, which "
                    "does not know that the schedule takes its backward in two parts: call "
                    "hpcpar.autograd.recompute(function, *tensors, preserve_default_generator=True) in its "
                    "place, pass use_reentrant=True, or take a schedule without W, such as 1f1b or "
                    "interleaved"
                ) from error
        found = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in kept.inputs)
        kept.inputs, kept.root = (), None
        kept.gradients.clear()
        if kept.deferred is None:
            del self._kept[microbatch]
        return found

    def weights(self, microbatch: int) -> None:
        """The weights' gradients of a microbatch whose backward has left them.

        errors   OperationError where ranks have shards of the weights, which are whole in F and B alone
        """
        deferred = self._kept.pop(microbatch).deferred
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
        """Let go of what is kept of all microbatches."""
        self._kept.clear()


def _leaves(inputs: Sequence[Any], form: Form) -> Tensors:
    return tuple(
        None if each is None else tensor.detach().requires_grad_(each.requires_grad)
        for tensor, each in zip(inputs, form.tensors, strict=True)
    )


class _Root(torch.autograd.Function):
    """A scalar in place of several outputs: its backward hands each of them the gradient that has come."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.gradients)


def _root(gradients: list[Tensor], outputs: Sequence[Tensor]) -> Tensor | None:
    if not outputs:
        return None
    root: Tensor = _Root.apply(gradients, *outputs)  # type: ignore[no-untyped-call]
    return root


@contextmanager
def poking_between_layers(modules: Iterable[nn.Module], poke: Callable[[], None]) -> Iterator[None]:
    """Inside, `poke` is called after every layer that has parameters, forward and backward.

    Nothing moves in the background, so that a message would otherwise wait for the action to end.
    """

    def on_forward(_: nn.Module, __: Any, output: Any) -> None:
        poke()
        # Of a parameter itself the hook would stay.
        if isinstance(output, Tensor) and output.grad_fn is not None:
            output.register_hook(lambda _: poke())  # type: ignore[no-untyped-call]

    # Layers that are computed together poke less often, but stay together.
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
