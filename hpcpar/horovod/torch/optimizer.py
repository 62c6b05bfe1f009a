"""Horovod's DistributedOptimizer: the wrapped optimizer itself, whose step averages the gradients first."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpcpar.data_parallel.buckets import BUCKET_BYTES
from hpcpar.data_parallel.precision import Precision
from hpcpar.errors import GradientOrderError, OperationError
from hpcpar.horovod import basics
from hpcpar.horovod.exceptions import HorovodInternalError
from hpcpar.horovod.process_sets import ProcessSet, global_process_set
from hpcpar.horovod.torch import mpi_ops
from hpcpar.horovod.torch.compression import Compression
from hpcpar.horovod.torch.gradients import Gradients, ReductionOptions
from hpcpar.horovod.torch.mpi_ops import Adasum, Average, Sum
from hpcpar.horovod.torch.submission import require_adasum
from hpcpar.horovod.torch.wrapped import Wrapped
from hpcpar.horovod.torch.zero import ShardedOptimizer, require_shardable
from hpcpar.uncompiled import uncompiled

Groups = int | Sequence[Sequence[Tensor]] | None


def DistributedOptimizer(  # noqa: N802  the name that scripts use
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    zero_stage: int | None = None,
    precision: Precision | str | torch.dtype | None = None,
    offload: str | Path | None = None,
    model: nn.Module | None = None,
    overlap_allgather: bool = False,
    nonfinite: str = "error",
    shared_parameters: bool = False,
    elementwise: bool = False,
) -> Optimizer:
    """Wrap an optimizer so that it averages gradients over all ranks before each step.

    optimizer        any torch optimizer. Its groups, state, defaults and hooks stay its own
    named_parameters names for all of its parameters; None: numbers
    compression      how gradients travel: Compression.none, .fp16, .bf16, or a Compressor of your own
    backward_passes_per_step   backwards whose gradients are summed before they are reduced
    op               Average, Sum, or Adasum (of what each rank's own step would change)
    gradient_predivide_factor  with Average: divide by it before the sum, and by the rest after it
    groups           so many groups, or lists of parameters whose gradients are to be reduced together
    num_groups       old name for a number of groups
    sparse_as_dense  let sparse gradients travel as dense ones; the optimizer sees sparse ones all the same
    process_set      the ranks that train together; others train by themselves
    zero_stage       1: each rank keeps its shard of the optimizer's state, 2: of gradients, too; None, 0: all
    precision, offload, model, overlap_allgather, nonfinite, shared_parameters, elementwise
                     of hpcpar.DistributedOptimizer, for zero_stage 1 and 2
    returns          an instance of a class of the optimizer's own name that is a subclass of its class, with
                     `synchronize`, `skip_synchronize` and `set_backward_passes_per_step`; the attributes
                     `op`, `gradient_predivide_factor`, `sparse_as_dense` and `process_set` tell what was
                     given, and `backward_passes_per_step` may be set, too
    errors           ValueError for impossible arguments and parameters without or with the same name

    zero_stage and what follows it are hpcpar's own: Horovod has none such. With zero_stage 1 or 2 the
    optimizer steps on shards. It must treat each element by itself (SGD, Adam, AdamW, …). `.grad` is
    what it is with hpcpar.DistributedOptimizer. `state_dict`, of whole parameters, is to be
    called by all ranks. All take as many steps: a rank that joins before the others is an error.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor works with op=Average only")
    if not 0 < gradient_predivide_factor < math.inf:
        raise ValueError(
            f"gradient_predivide_factor={gradient_predivide_factor}: gradients are divided by it; give a "
            f"finite number above 0"
        )
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"op {op!r} is not one of Average, Sum and Adasum, by which gradients are combined")
    if num_groups:
        warnings.warn("num_groups is deprecated; use groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    settings = {
        "compression": compression,
        "backward_passes_per_step": backward_passes_per_step,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "groups": groups,
        "sparse_as_dense": sparse_as_dense,
        "process_set": process_set,
    }
    options = {
        "precision": precision,
        "offload": offload,
        "model": model,
        "overlap_allgather": overlap_allgather,
        "nonfinite": nonfinite,
        "shared_parameters": shared_parameters,
        "elementwise": elementwise,
    }
    require_shardable(optimizer, zero_stage, settings, options)
    return _wrap(
        optimizer,
        named_parameters,
        {**settings, "zero": {"zero_stage": zero_stage, **options} if zero_stage else {}},
    )


def _wrap(
    optimizer: Optimizer,
    named_parameters: Iterable[Any] | None,
    settings: dict[str, Any],
    *,
    is_copy: bool = False,
) -> Optimizer:
    """Make an object with the optimizer's attributes, of a class with our methods before its own."""
    base = type(optimizer)
    mixin: type[Wrapped] = _AdasumOptimizer if settings["op"] == Adasum else _AveragingOptimizer
    if settings["zero"]:
        mixin = ShardedOptimizer
    cls: Any = type(base.__name__, (mixin, base), {"__module__": base.__module__, "__doc__": base.__doc__})
    wrapped: Any = cls.__new__(cls)
    # A scheduler that was made before has put a `step` of its own into the optimizer, which is not ours.
    wrapped.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    wrapped._wrapped, wrapped._settings, wrapped._is_copy = optimizer, settings, is_copy
    wrapped._distribute(named_parameters)
    result: Optimizer = wrapped
    return result


class _Distributed(Wrapped):
    """Base of the optimizers that step on whole gradients, which can be copied."""

    _is_copy: bool

    def __reduce__(self) -> Any:
        base = type(self).__bases__[1]
        state = {key: value for key, value in vars(self).items() if _is_copied(key, value)}
        names = [
            self._parameter_names.get(parameter, "")
            for group in self.param_groups
            for parameter in group["params"]
        ]
        settings = dict(self._settings)
        if settings.pop("process_set") is not global_process_set:
            raise ValueError("an optimizer of a process set cannot be copied or pickled; wrap it anew")
        if not isinstance(settings["groups"], int):
            settings["groups"] = None  # its tensors are not those of the copy
        return _rebuild, (base, state, names, settings)


def _is_copied(key: str, value: Any) -> bool:
    """Follow torch's rule: hooks and profiling belong to the object, not to its value."""
    return key in ("defaults", "state", "param_groups") or not (key.startswith("_") or callable(value))


def _rebuild(
    base: type[Optimizer], state: dict[str, Any], names: Sequence[str], settings: dict[str, Any]
) -> Optimizer:
    """Unpickle: wrap the optimizer again where Horovod is initialized."""
    optimizer: Optimizer = base.__new__(base)
    optimizer.__setstate__(state)
    if not basics.is_initialized():
        return optimizer
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    settings["process_set"] = global_process_set
    return _wrap(optimizer, list(zip(names, parameters, strict=True)), settings, is_copy=True)


class _AveragingOptimizer(_Distributed):
    """Reduces gradients, from the second step on while backward runs."""

    _gradients: Gradients | None

    def _distribute(self, named_parameters: Iterable[Any] | None) -> None:
        super()._distribute(named_parameters)
        settings = self._settings
        self._synchronized = False
        self._gradients = None
        groups = grouped(settings["groups"], list(self._parameter_names))
        if self._is_alone:
            return
        options = ReductionOptions(
            op="average" if settings["op"] == Average else "sum",
            compression=settings["compression"],
            predivide=settings["gradient_predivide_factor"],
            bucket_bytes=min(basics.the_context().knobs.fusion_threshold_nbytes, BUCKET_BYTES),
            groups=groups,
            sparse_as_dense=settings["sparse_as_dense"],
        )
        named = [(name, parameter) for parameter, name in self._parameter_names.items()]
        passes = settings["backward_passes_per_step"]
        self._gradients = Gradients(named, self.process_set, options, passes, is_copy=self._is_copy)

    def _distribute_again(self) -> None:
        if self._gradients is not None:
            self._gradients.close()
        super()._distribute_again()

    def set_backward_passes_per_step(self, passes: int) -> None:
        super().set_backward_passes_per_step(passes)
        if self._gradients is not None:
            self._gradients.set_passes(passes)

    @uncompiled
    def synchronize(self) -> None:
        """Reduce every gradient over all ranks, to look at gradients, unscale or clip them before `step`.

        Then step inside `skip_synchronize`.
        """
        self._connect()
        self._take_in_new_parameters()
        if self._gradients is not None:
            self._gradients.synchronize()
        self._synchronized = True

    def _connect(self) -> None:
        """After shutdown() and init() use the engine that there is now."""
        if self._gradients is not None and self._gradients.is_closed and basics.is_initialized():
            self._distribute_again()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler.step asks before it unscales gradients, which must not be under way by then."""
        if self._gradients is not None and self._should_synchronize and not self._synchronized:
            raise GradientOrderError(
                "scaler.step(optimizer) before optimizer.synchronize(): the scaler would unscale this rank's "
                "own gradients, and look for overflows in them alone, where other ranks have others. Call "
                "optimizer.synchronize() first, also before a scaler.unscale_(optimizer) of your own, "
                "then scaler.step(optimizer) inside `with optimizer.skip_synchronize():`"
            )
        name = "_step_supports_amp_scaling"
        return bool(vars(self).get(name, getattr(super(), name, False)))

    @uncompiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step on reduced gradients; collective.

        closure   computes the loss with its backward; the average of all ranks' losses is what the wrapped
                  optimizer sees, so that all take the same path. One that returns None does so on all
        """
        self._connect()
        if self._gradients is None:
            return self._step_locally(closure)
        if closure is not None:
            outcome = self._step_locally(lambda: self._averaged(closure))
        else:
            if self._should_synchronize:
                self._warn_if_synchronized()
                # A step may have been skipped since, and gradients have come that are not reduced.
                self.synchronize()
            elif self._gradients.is_under_way:
                raise GradientOrderError(
                    "optimizer.step() inside optimizer.skip_synchronize() while gradients are being reduced: "
                    "call optimizer.synchronize() after backward(), or step without skip_synchronize()"
                )
            outcome = self._step_locally()
        self._synchronized = False
        self._gradients.next_step()
        return outcome

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; AssertionError while they are being reduced: step, or synchronize, first."""
        self._connect()
        if self._gradients is not None:
            self._refuse_zeros(under_way=self._gradients.is_under_way)
            self._gradients.zero(set_to_none=set_to_none)
        self._synchronized = False
        # That of an optimizer of one's own may know no arguments.
        super().zero_grad(**({} if set_to_none else {"set_to_none": False}))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the wrapped optimizer; backwards are counted from zero again."""
        super().load_state_dict(state_dict)
        self._synchronized = False
        if self._gradients is not None:
            self._gradients.recount()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, whose gradients are reduced from now on, too."""
        super().add_param_group(param_group)
        if hasattr(self, "_parameter_names"):
            self._take_in_new_parameters()

    def _take_in_new_parameters(self) -> None:
        found = self._new_parameters()
        if self._gradients is not None:
            self._gradients.named += found

    def _averaged(self, closure: Callable[[], Any]) -> Any:
        """Call the closure, reduce its gradients, and return the average of all ranks' losses."""
        with torch.enable_grad():
            loss = closure()
        self.synchronize()
        if self._gradients is not None:
            self._gradients.next_step()
        if loss is None:
            return None
        mean = torch.as_tensor(loss, dtype=torch.float64).detach().clone()
        mean = mpi_ops.allreduce_(mean, op=Average, process_set=self.process_set)
        return mean.to(loss.dtype) if isinstance(loss, Tensor) else mean.item()


# torch wraps a step that does not say so, to call hooks; the wrapped optimizer's own step calls them already.
_AveragingOptimizer.step.hooked = True  # type: ignore[attr-defined]


class _AdasumOptimizer(_Distributed):
    """Steps on each rank's own gradients, and combines what the steps changed by Adasum.

    source   Maleki et al. 2020, arXiv 2006.02924, section 4
    """

    def _distribute(self, named_parameters: Iterable[Any] | None) -> None:
        super()._distribute(named_parameters)
        grouped(self._settings["groups"], list(self._parameter_names))
        if not self._is_alone:
            require_adasum(self.process_set)

    def synchronize(self) -> None:
        """Do nothing: `step` makes what is combined."""

    def skip_synchronize(self) -> Any:
        """Raise AssertionError, but for a rank alone: there is no step without the combination."""
        if self._is_alone:
            return nullcontext()
        raise AssertionError("skip_synchronize does not work with op=Adasum: step() combines what it changed")

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Refuse GradScaler, which leaves out the step on the ranks alone whose own gradients overflow."""
        if not self._is_alone:
            raise OperationError(
                "a torch.amp.GradScaler was to step an optimizer with op=Adasum: ranks whose own gradients "
                "overflow would leave out a step that the others wait in; use bfloat16, which needs no "
                "scaler, or op=Average"
            )
        return False

    @uncompiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the wrapped optimizer's step, then combine all ranks' changes by Adasum; collective."""
        if self._is_alone:
            return self._step_locally(closure)
        self._new_parameters()
        parameters = [p for p in self._parameter_names if p.requires_grad]
        before = [parameter.detach().clone() for parameter in parameters]
        outcome = self._step_locally(closure)
        try:
            self._combine(parameters, before)
        except HorovodInternalError:
            with torch.no_grad():
                for parameter, old in zip(parameters, before, strict=True):
                    parameter.copy_(old)
            raise
        return outcome

    @torch.no_grad()
    def _combine(self, parameters: Sequence[Tensor], before: Sequence[Tensor]) -> None:
        """Replace what this rank's step has changed by Adasum of all ranks' changes."""
        compression = self._settings["compression"]
        packed = [
            compression.compress(parameter - old) for parameter, old in zip(parameters, before, strict=True)
        ]
        tensors = [tensor for tensor, _ in packed]
        combined = mpi_ops.grouped_allreduce(tensors, op=Adasum, process_set=self.process_set)
        for parameter, old, change, (_, context) in zip(parameters, before, combined, packed, strict=True):
            parameter.copy_(old + compression.decompress(change, context))


_AdasumOptimizer.step.hooked = True  # type: ignore[attr-defined]


def grouped(groups: Groups, held: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the groups of these parameters that are asked for; ValueError for anything else."""
    if groups is None:
        return []
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 1:
            raise ValueError(f"groups={groups}: give a number of groups above 0, or lists of parameters")
        size = max(1, -(-len(held) // groups))
        return [list(held[start : start + size]) for start in range(0, len(held), size)]
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise ValueError("groups should be a whole number, or a list of lists of parameters")
    seen: set[int] = set()
    for parameter in (parameter for group in groups for parameter in group):
        if not isinstance(parameter, Tensor):
            raise ValueError(f"groups should hold parameters; found {type(parameter).__name__}")
        if id(parameter) in seen:
            raise ValueError(
                f"a parameter of shape {list(parameter.shape)} is in two groups; put it into one"
            )
        seen.add(id(parameter))
    return [list(group) for group in groups]
