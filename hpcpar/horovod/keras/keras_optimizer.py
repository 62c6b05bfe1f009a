"""DistributedOptimizer for Keras: the wrapped optimizer itself, whose gradients are reduced over all ranks.

    backward ends        v.value.grad is the average, on all ranks the same
    LossScaleOptimizer   tests whether it is finite, and unscales it     (inside or outside, both work)
    Keras's apply        accumulates, clips, decays weights, steps, averages weights (EMA)

So whatever Keras does to gradients it does to averages, and decides alike on every rank.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import keras

from hpcpar.horovod import basics
from hpcpar.horovod.keras.checks import check_fit, warn_of_save
from hpcpar.horovod.keras.variable_gradients import ReductionSettings, VariableGradients
from hpcpar.horovod.process_sets import ProcessSet, global_process_set
from hpcpar.horovod.torch.compression import Compression
from hpcpar.horovod.torch.mpi_ops import Average, Sum
from hpcpar.horovod.torch.wrapped import require_passes


def DistributedOptimizer(  # noqa: N802  the name that scripts use
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    *,
    num_groups: int = 0,
    groups: Any = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Wrap a Keras optimizer so that gradients are reduced over all ranks before it sees them.

    optimizer        of Keras, also a LossScaleOptimizer, built or not; its state and settings stay
    name             prefix of the gradients' names in the timeline
    device_dense, device_sparse   accepted because Horovod has them; gradients are reduced where they are
    compression      how gradients travel: Compression.none, .fp16, .bf16, or a Compressor of your own
    sparse_as_dense  let sparse gradients travel as dense ones
    gradient_predivide_factor  with Average: divide by it before the sum, and by the rest after it
    op               Average or Sum
    groups           so many groups, or lists of variables whose gradients are to be reduced together
    num_groups       old name for a number of groups
    backward_passes_per_step   calls of `apply` whose gradients are summed on each rank and reduced in the
                     last of them; the others change no variables, but count as iterations (as in Horovod)
    average_aggregated_gradients  divide that sum by the number of passes
    process_set      the ranks that train together; others train by themselves
    scale_local_gradients  for PartialDistributedOptimizer
    returns          an instance of a class of the optimizer's own name that is a subclass of its class: a
                     model is saved with the plain optimizer, and `load_model` wraps it again
    errors           ValueError for impossible arguments

    `v.value.grad` is reduced when `loss.backward()` returns: a backward through the variables is collective.
    With several passes per step it stays this rank's own, and `apply` reduces. Gradients by
    torch.autograd.grad, without a backward, are reduced by `apply`. A loop of your own that looks at
    gradients between backward and `apply` calls optimizer.build(model.trainable_variables) first.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            f"DistributedOptimizer was given {type(optimizer).__name__}: it takes an optimizer of "
            f"keras.optimizers, such as keras.optimizers.get('adam')"
        )
    if any(
        isinstance(each, Distributed) for each in (optimizer, getattr(optimizer, "inner_optimizer", None))
    ):
        raise ValueError(f"{optimizer.name} is a DistributedOptimizer already; wrap an optimizer once")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor works with op=Average only")
    if not 0 < gradient_predivide_factor < math.inf:
        raise ValueError(
            f"gradient_predivide_factor={gradient_predivide_factor}: gradients are divided by it; give a "
            f"finite number above 0"
        )
    if op not in (Average, Sum):
        raise ValueError(f"op={op!r}: DistributedOptimizer of Keras reduces by Average or Sum")
    require_passes(backward_passes_per_step)
    accumulated = getattr(optimizer, "inner_optimizer", optimizer).gradient_accumulation_steps
    if backward_passes_per_step > 1 and accumulated:
        raise ValueError(
            f"backward_passes_per_step={backward_passes_per_step} and gradient_accumulation_steps="
            f"{accumulated} of {optimizer.name} both count calls of apply(); choose one of the two"
        )
    if num_groups:
        warnings.warn("num_groups is deprecated; use groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    basics.the_context()
    settings = ReductionSettings(
        prefix=f"{name}." if name else "",
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        predivide=gradient_predivide_factor,
        op=op,
        groups=groups,
        passes=backward_passes_per_step,
        average_passes=average_aggregated_gradients,
        process_set=process_set,
        scale_local=scale_local_gradients,
    )
    return _wrap(optimizer, settings)


def PartialDistributedOptimizer(  # noqa: N802  the name that scripts use
    optimizer: Any, *args: Any, local_layers: Any = None, **options: Any
) -> Any:
    """Wrap an optimizer as DistributedOptimizer does, but leave some layers' gradients on their rank.

    local_layers   a built layer, or several: each rank trains its own. Their gradients are divided by the
                   number of ranks, as an average's summands are, unless scale_local_gradients=False
    options        of DistributedOptimizer
    errors         ValueError for a layer that is not built, and as of DistributedOptimizer

    A non-finite gradient of a local layer on one rank becomes NaN on all, so that loss scaling decides alike.
    """
    layers = [] if local_layers is None else local_layers
    layers = list(layers) if isinstance(layers, list | tuple | set) else [layers]
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise ValueError(f"local_layers should be Keras layers; found {type(layer).__name__}")
        if not layer.built:
            raise ValueError(
                f"layer {layer.name!r} of local_layers has no variables yet: build the model first"
            )
    wrapped = DistributedOptimizer(optimizer, *args, **options)
    local = frozenset(id(variable) for layer in layers for variable in layer.trainable_variables)
    return _wrap(optimizer, replace(wrapped.distribution, local=local)) if local else wrapped


def _wrap(optimizer: Any, settings: ReductionSettings) -> Any:
    """Make an object with the optimizer's attributes, of a class with our methods before its own."""
    base = type(optimizer)
    members = {"__module__": base.__module__, "__doc__": base.__doc__, "distribution": settings}
    cls: Any = type(base.__name__, (Distributed, base), members)
    wrapped = cls.__new__(cls)
    vars(wrapped).update(vars(optimizer))
    if wrapped.built:
        wrapped._distribute()
    return wrapped


class Distributed(keras.optimizers.Optimizer):  # type: ignore[misc]
    """Methods that come before the wrapped optimizer's own.

    distribution   of the class, so that from_config makes an optimizer that is distributed alike
    """

    distribution: ReductionSettings
    _variable_gradients: VariableGradients | None = None

    def build(self, variables: Sequence[Any]) -> None:
        """Build the wrapped optimizer, and reduce the gradients of these variables from now on."""
        super().build(variables)
        self._distribute()

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Update variables by gradients, reduced first unless a backward has done so. Collective."""
        if len(grads) == 0:
            return
        if not self.built and trainable_variables is not None:
            with keras.name_scope(self.name, caller=self):
                self.build(list(trainable_variables))
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        if not self.built or len(grads) != len(variables):
            super().apply(grads, trainable_variables)  # raises an error
            return
        self._check_variables_are_known(variables)
        assert self._variable_gradients is not None, "build has made them"
        check_fit(self, self.distribution.process_set)
        taken = self._variable_gradients.take(grads, variables)
        if self._variable_gradients.is_sum_complete:
            super().apply(taken, variables)
            self._variable_gradients.next_step()
        else:
            innermost: Any = getattr(self, "inner_optimizer", self)
            innermost._iterations.assign_add(1)

    def save_own_variables(self, store: Any) -> None:
        """Save as the wrapped optimizer does; on ranks above 0 with a warning."""
        warn_of_save()
        super().save_own_variables(store)

    def _distribute(self) -> None:
        overwritten = [
            v.path for v in self._trainable_variables if getattr(v, "overwrite_with_gradient", False)
        ]
        if overwritten:
            raise ValueError(
                f"{overwritten[0]} is overwritten by its gradient (float8 quantization), and an average over "
                f"ranks is not what it should be: train in float32, bfloat16 or mixed_float16"
            )
        if self._variable_gradients is not None:
            self._variable_gradients.close()
        variables = list(self._trainable_variables)
        # Not by __setattr__, where Keras looks for variables to track and to save.
        self.__dict__["_variable_gradients"] = VariableGradients(variables, self.distribution)
