"""Reduction of the gradients of Keras variables, complete when `backward` returns.

    loss.backward()    hooks fill buckets, which leave while it runs; at its end all of them are awaited
    v.value.grad       is reduced, on every rank the same: what looks at it, clips it or tests whether it is
                       finite decides alike on all ranks
    apply(gradients)   takes them as they are

Gradients that no backward has brought (torch.autograd.grad, a user's own) are reduced by `apply`. With
several passes per step it reduces the sums of the passes' gradients instead, in the last pass.
"""

from __future__ import annotations

import hashlib
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpcpar.data_parallel.buckets import BUCKET_BYTES
from hpcpar.errors import BufferTypeError, GradientOrderError
from hpcpar.horovod import basics
from hpcpar.horovod.keras.gradient_weight import gradient_weight
from hpcpar.horovod.process_sets import ProcessSet
from hpcpar.horovod.torch import mpi_ops
from hpcpar.horovod.torch.functions import allgather_object
from hpcpar.horovod.torch.gradients import Gradients, ReductionOptions
from hpcpar.horovod.torch.optimizer import Groups, grouped
from hpcpar.uncompiled import uncompiled


@dataclass(frozen=True)
class ReductionSettings:
    """Arguments of DistributedOptimizer; `local` are ids of variables whose gradients stay on their rank."""

    prefix: str
    compression: Any
    sparse_as_dense: bool
    predivide: float
    op: int
    groups: Any
    passes: int
    average_passes: bool
    process_set: ProcessSet
    local: frozenset[int] = frozenset()
    scale_local: bool = True


class VariableGradients:
    """Gradients of an optimizer's variables, reduced over the ranks of its process set.

    variables   of Keras, in the order that the optimizer was built with
    """

    def __init__(self, variables: Sequence[Any], settings: ReductionSettings) -> None:
        self._settings = settings
        self._places = {id(variable): place for place, variable in enumerate(variables)}
        self._variables = list(variables)
        self._parameters: list[Tensor] = [variable.value for variable in variables]
        self._is_local = [id(variable) in settings.local for variable in variables]
        # With several passes sums are reduced: of parameters that share the variables' memory, without hooks.
        self._summed: list[Tensor] = (
            [nn.Parameter(p.detach(), p.requires_grad) for p in self._parameters]
            if settings.passes > 1
            else self._parameters
        )
        self._passes_done = 0
        self._is_reduced = False
        self._had_gradients = any(p.grad is not None for p in self._parameters)
        self._is_compared = False
        self._warned: set[int] = set()
        self._task = self._next_task = -1
        self._context: weakref.ref[Any] | None = None
        self._gradients: Gradients | None = None
        self._connect()
        self._watch()

    @property
    def is_sum_complete(self) -> bool:
        """True unless passes of this step are still to come."""
        return self._passes_done == 0

    @uncompiled
    def take(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Tensor | None]:
        """Return the gradients that the optimizer is to apply to these variables. Collective.

        With several passes per step: adds them to the sums, and returns [] unless the step is complete.
        """
        self._connect()
        places = [self._places[id(variable)] for variable in variables]
        given = [
            _tensor(gradient, self._parameters[place])
            for gradient, place in zip(gradients, places, strict=True)
        ]
        is_reduced, self._is_reduced = self._is_reduced, False
        if self._settings.passes > 1:
            return self._add(given, places)
        if self._gradients is None:
            return given
        if is_reduced:
            self._require_same(given, places)
        else:
            self._refuse_transformed(given, places)
            given = self._reduce(given, places)
        return self._scaled(given, places)

    def next_step(self) -> None:
        """Note that the optimizer has written to the variables, the same on all ranks.

        The next backward then compares one small variable over ranks, not all: enough to find an optimizer
        that writes otherwise on one rank, as with another learning rate.
        """
        if self._gradients is not None:
            self._gradients.next_step()
            smallest = min((p for _, p in self._gradients.named), key=torch.numel, default=None)
            if smallest is not None:
                torch.autograd.graph.increment_version(smallest)

    def close(self) -> None:
        """Take the hooks off the variables."""
        for hook in self._hooks:
            hook.remove()
        if self._gradients is not None:
            self._gradients.close()

    def _connect(self) -> None:
        """Use the engine that there is now: after shutdown() and init() it is another one."""
        if not basics.is_initialized() and self._context is not None:
            return
        context = basics.the_context()
        if self._context is not None and self._context() is context:
            return
        self._context = weakref.ref(context)
        if self._gradients is not None:
            self._gradients.close()
        self._gradients = None
        settings, process_set = self._settings, self._settings.process_set
        if process_set.process_set_id is None:
            raise ValueError(f"{process_set} is not registered; use hvd.add_process_set first")
        self._is_first = True
        if not process_set.included() or process_set.size() == 1:
            return
        options = ReductionOptions(
            op="average" if settings.op == mpi_ops.Average else "sum",
            compression=settings.compression,
            predivide=settings.predivide,
            bucket_bytes=min(context.knobs.fusion_threshold_nbytes, BUCKET_BYTES),
            groups=self._groups(),
            sparse_as_dense=settings.sparse_as_dense,
        )
        # By place, not by path: Keras numbers layers as they are made, and a rank may have made more.
        named = [
            (f"{settings.prefix}{place}.{variable.name}", parameter)
            for place, (variable, parameter) in enumerate(zip(self._variables, self._summed, strict=True))
            if not self._is_local[place]
        ]
        # is_copy: a rank may build more optimizers than others, say of a model that it loads to look at.
        self._gradients = Gradients(named, process_set, options, 1, is_copy=True)

    def _groups(self) -> list[list[Tensor]]:
        groups: Groups = self._settings.groups
        if isinstance(groups, list | tuple):
            groups = [[self._summed[self._places[id(variable)]] for variable in group] for group in groups]
        shared = [p for p, is_local in zip(self._summed, self._is_local, strict=True) if not is_local]
        return grouped(groups, shared)

    # --- hooks ---------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Be told of each backward that brings gradients to the variables."""
        reference = weakref.ref(self)

        @uncompiled
        def on_gradient(_: Tensor) -> None:
            alive = reference()
            if alive is not None:
                alive._call_at_end()

        @uncompiled
        def before_gradient(_: Tensor) -> None:
            alive = reference()
            if alive is not None:
                alive._refuse_sums_of_sums()

        trainable: list[Any] = [p for p in self._parameters if p.requires_grad]
        self._hooks = [p.register_post_accumulate_grad_hook(on_gradient) for p in trainable]
        self._hooks += [p.register_hook(gradient_weight.apply) for p in trainable]
        if self._settings.op == mpi_ops.Sum and self._settings.passes == 1:
            self._hooks += [p.register_hook(before_gradient) for p in trainable]
        weakref.finalize(self, _remove, self._hooks)

    def _call_at_end(self) -> None:
        """Complete the reduction when the backward under way ends."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._complete)

    @uncompiled
    def _complete(self) -> None:
        self._connect()
        if self._gradients is None:
            return
        if self._settings.passes > 1:
            self._agree_on_finite(self._parameters)
        else:
            self._synchronize()
            local = [p for p, is_local in zip(self._parameters, self._is_local, strict=True) if is_local]
            if local:
                self._agree_on_finite(local)
            self._is_reduced = True

    def _refuse_sums_of_sums(self) -> None:
        """Raise where a backward is to add to sums over ranks, which would then be summed once more."""
        task = torch._C._current_graph_task_id()
        if task == self._next_task:
            return
        self._next_task = task
        if self._gradients is not None and any(
            p.grad is not None and bool(p.grad.any()) for p in self._parameters
        ):
            raise GradientOrderError(
                "a second backward adds to gradients that are sums over the ranks already (op=Sum): call "
                "model.zero_grad() between the two, add the losses before one backward, or use op=Average"
            )

    # --- reductions ----------------------------------------------------------------------------

    def _synchronize(self) -> None:
        """Reduce the gradients of all shared parameters, in place. Collective."""
        assert self._gradients is not None, "this rank is not alone"
        lacking = [place for place, p in enumerate(self._summed) if p.grad is None]
        self._gradients.synchronize()
        self._gradients.next_step()
        self._warn_of(place for place in lacking if self._summed[place].grad is not None)
        if self._is_first:
            self._is_first = False
            self._adopt_variables_of_first_rank()

    def _reduce(self, gradients: Sequence[Tensor | None], places: Sequence[int]) -> list[Tensor | None]:
        """Reduce gradients that are in no `.grad`; what is in `.grad` of these parameters is forgotten."""
        given = dict(zip(places, gradients, strict=True))
        for place, parameter in enumerate(self._summed):
            parameter.grad = given.get(place)
        self._synchronize()
        reduced = [self._summed[place].grad for place in places]
        for parameter in self._summed:
            parameter.grad = None
        return reduced

    def _add(self, gradients: Sequence[Tensor | None], places: Sequence[int]) -> list[Tensor | None]:
        """Add a pass; return the reduced sums after the last one, else []."""
        settings = self._settings
        for gradient, place in zip(gradients, places, strict=True):
            if gradient is not None:
                self._add_one(gradient, self._summed[place])
        self._passes_done = (self._passes_done + 1) % settings.passes
        if self._passes_done:
            return []
        reduced = [self._summed[place].grad for place in places]
        if self._gradients is not None:
            reduced = self._scaled(self._reduce(reduced, places), places)
        for parameter in self._summed:
            parameter.grad = None
        if settings.average_passes:
            reduced = [None if gradient is None else gradient / settings.passes for gradient in reduced]
        return reduced

    def _add_one(self, gradient: Tensor, total: Tensor) -> None:
        if gradient.is_sparse and not self._settings.sparse_as_dense:
            raise BufferTypeError(
                f"backward_passes_per_step={self._settings.passes} adds up gradients, and one of shape "
                f"{list(gradient.shape)} is sparse: pass sparse_as_dense=True, or make the layer with "
                f"sparse=False"
            )
        gradient = gradient.to_dense()
        total.grad = gradient.clone() if total.grad is None else total.grad.add_(gradient)

    def _scaled(self, gradients: Sequence[Tensor | None], places: Sequence[int]) -> list[Tensor | None]:
        """Divide gradients of local variables by the number of ranks, as an average does to the others."""
        size = (self._settings.process_set.size() or 1) if self._settings.scale_local else 1
        return [
            gradient / size if gradient is not None and self._is_local[place] and size > 1 else gradient
            for gradient, place in zip(gradients, places, strict=True)
        ]

    # --- agreement -----------------------------------------------------------------------------

    def _agree_on_finite(self, parameters: Sequence[Tensor]) -> None:
        """Make gradients that stay on their rank NaN on every rank where one rank has an inf or NaN.

        A loss scaler around the optimizer then skips the step on all ranks or on none. Collective.
        """
        gradients = [p.grad for p in parameters if p.grad is not None]
        is_bad = torch.stack([~torch.isfinite(_values(g)).all() for g in gradients]).any() if gradients else 0
        told = torch.tensor(float(is_bad), device="cpu")
        if mpi_ops.allreduce(told, op=mpi_ops.Max, process_set=self._settings.process_set):
            for gradient in gradients:
                _values(gradient).fill_(torch.nan)

    def _adopt_variables_of_first_rank(self) -> None:
        """Give every rank the first one's variables, with a warning, where they are not the same already."""
        process_set = self._settings.process_set
        shared = [p for p, is_local in zip(self._parameters, self._is_local, strict=True) if not is_local]
        digests = allgather_object(_digest(shared), process_set=process_set)
        different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if not different:
            return
        root = (process_set.ranks or [0])[0]
        for parameter in shared:
            mpi_ops.broadcast_(parameter.detach(), root, process_set=process_set)
        warnings.warn(
            f"the variables of ranks {different[:4]} were not those of rank {root} in the first step; they "
            f"are now, but this step's gradients were computed with others. Before it, give fit() "
            f"hvd.callbacks.BroadcastGlobalVariablesCallback({root}), or call "
            f"hvd.broadcast_global_variables({root}, model=model)",
            stacklevel=2,
        )

    def _warn_of(self, places: Any) -> None:
        """Name variables that got a gradient on other ranks and none here, each once."""
        fresh = [place for place in places if place not in self._warned]
        if fresh:
            self._warned.update(fresh)
            names = ", ".join(self._variables[place].path for place in fresh[:4])
            warnings.warn(
                f"rank {basics.rank()}: no gradient for {names}{' …' if len(fresh) > 4 else ''}, which other "
                f"ranks have one for; it counts as zero, as these samples do in one process with all of them",
                stacklevel=2,
            )

    def _refuse_transformed(self, gradients: Sequence[Tensor | None], places: Sequence[int]) -> None:
        """Raise where the first gradients are made from ones that were computed before there were hooks."""
        had, self._had_gradients = self._had_gradients, False
        pairs = zip(gradients, places, strict=True)
        if had and any(g is not None and g is not self._parameters[place].grad for g, place in pairs):
            raise GradientOrderError(
                "the optimizer was built after the first backward, so gradients that were clipped, scaled or "
                "tested since are this rank's own. Before the first backward, call "
                "optimizer.build(model.trainable_variables)"
            )

    def _require_same(self, gradients: Sequence[Tensor | None], places: Sequence[int]) -> None:
        """Compare gradients over ranks, the first time that they are others than backward has left."""
        pairs = list(zip(gradients, places, strict=True))
        own = [
            g for g, place in pairs
            if g is not None and g is not self._parameters[place].grad and not self._is_local[place]
        ]  # fmt: skip
        if not own or self._is_compared:
            return
        self._is_compared = True
        digests = allgather_object(_digest(own), process_set=self._settings.process_set)
        if len(set(digests)) > 1:
            raise GradientOrderError(
                "apply() was given gradients that differ between ranks, after a backward has reduced "
                "others: make them from `variable.value.grad` by the same rule on all ranks, or compute them "
                "all by torch.autograd.grad, without a backward, and apply() reduces them"
            )


def _tensor(gradient: Any, parameter: Tensor) -> Tensor | None:
    """Return a gradient, or one made from a variable, an array or of another type, as `.grad` may hold it."""
    if gradient is None or gradient is parameter.grad:
        return parameter.grad if gradient is not None else None
    given: Tensor = torch.as_tensor(getattr(gradient, "value", gradient))
    return given.detach().to(parameter.device, parameter.dtype)


def _values(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.is_sparse else gradient


def _digest(tensors: Sequence[Tensor]) -> bytes:
    digest = hashlib.sha256()
    for tensor in tensors:
        dense = tensor.detach().to_dense().cpu().contiguous()
        digest.update(dense.flatten().view(torch.uint8).numpy().tobytes())
    return digest.digest()


def _remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()
