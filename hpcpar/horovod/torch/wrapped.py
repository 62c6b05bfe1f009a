"""The wrapped optimizer and names for its parameters: what every kind of DistributedOptimizer has."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hpcpar.horovod import basics


class _Setting:
    """An argument of DistributedOptimizer, to be read as an attribute."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: Any, owner: type | None = None) -> Any:
        return self if optimizer is None else optimizer._settings[self._name]

    def __set__(self, optimizer: Any, value: Any) -> None:
        raise AttributeError(
            f"{self._name} of a DistributedOptimizer is fixed: {self._name}={value!r} is for "
            f"hvd.DistributedOptimizer(optimizer, {self._name}=…), around the optimizer itself"
        )


class Wrapped(Optimizer):
    """Base of every DistributedOptimizer: the wrapped optimizer, parameter names, the process set."""

    op = _Setting()
    gradient_predivide_factor = _Setting()
    sparse_as_dense = _Setting()
    process_set = _Setting()

    _wrapped: Optimizer
    _settings: dict[str, Any]
    _parameter_names: dict[Tensor, str]

    def _distribute(self, named_parameters: Iterable[Any] | None) -> None:
        require_passes(self._settings["backward_passes_per_step"])
        self._parameter_names = _named(self, named_parameters)
        basics.the_context()
        if self.process_set.process_set_id is None:
            raise ValueError(f"{self.process_set} is not registered; use hvd.add_process_set first")
        self._is_alone = not self.process_set.included() or self.process_set.size() == 1
        self._synchronized, self._should_synchronize = False, True

    def _distribute_again(self) -> None:
        """After a new start: use the engine that there is now."""
        self._distribute([(name, parameter) for parameter, name in self._parameter_names.items()])

    @property
    def backward_passes_per_step(self) -> int:
        """Backwards whose gradients are summed before they are reduced."""
        passes: int = self._settings["backward_passes_per_step"]
        return passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sum the gradients of so many backwards before they are reduced, from the next step on."""
        require_passes(passes)
        self._settings["backward_passes_per_step"] = passes

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the wrapped optimizer, too: a scheduler that was made with it has hold of that one."""
        super().load_state_dict(state_dict)
        self._wrapped.state, self._wrapped.param_groups = self.state, self.param_groups

    def _new_parameters(self) -> list[tuple[str, Tensor]]:
        """Name the parameters of groups added since the last call, and return them."""
        if sum(len(group["params"]) for group in self.param_groups) == len(self._parameter_names):
            return []
        found = [
            (f"group.{number}.{index}", parameter)
            for number, group in enumerate(self.param_groups)
            for index, parameter in enumerate(group["params"])
            if parameter not in self._parameter_names
        ]
        self._parameter_names.update((parameter, name) for name, parameter in found)
        return found

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` take the gradients as they are: `synchronize` has been called."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def _refuse_zeros(self, *, under_way: bool) -> None:
        if under_way:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() "
                "or optimizer.synchronize(): gradients are being reduced. Call one of the two first."
            )

    def _warn_if_synchronized(self) -> None:
        if self._synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(). Gradients that are reduced already are not once more; "
                "write `with optimizer.skip_synchronize(): optimizer.step()`.",
                stacklevel=4,
            )

    def _step_locally(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the wrapped optimizer's step on this rank's own gradients."""
        # Schedulers that were made with it ask whether it has stepped.
        self._wrapped._opt_called = True  # type: ignore[attr-defined]
        return super().step(closure) if closure is not None else super().step()


def _named(optimizer: Optimizer, named_parameters: Iterable[Any] | None) -> dict[Tensor, str]:
    """Return the name of every parameter; ValueError unless each has one of its own."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named_parameters is None:
        return {
            parameter: f"group.{number}.{index}"
            for number, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        }
    pairs = list(named_parameters)
    wrong = [pair for pair in pairs if not isinstance(pair, tuple) or len(pair) != 2]
    if wrong:
        raise ValueError(
            f"named_parameters should be a sequence of tuples (name, parameter), usually "
            f"model.named_parameters(); found {type(wrong[0]).__name__}"
        )
    repeated = [name for name, times in Counter(name for name, _ in pairs).items() if times > 1]
    if repeated:
        raise ValueError(f"parameter names must be unique; found more than once: {', '.join(repeated[:4])}")
    names = {id(parameter): name for name, parameter in pairs}
    unnamed = [list(parameter.shape) for parameter in held if id(parameter) not in names]
    if unnamed:
        raise ValueError(
            f"{len(unnamed)} of the optimizer's {len(held)} parameters are not in named_parameters (shapes "
            f"{unnamed[:4]}); name all of them, or none"
        )
    return {parameter: names[id(parameter)] for parameter in held}


def require_passes(passes: int) -> None:
    """ValueError for a number of backwards that there cannot be."""
    if not hasattr(passes, "__index__") or passes <= 0:
        raise ValueError(f"backward_passes_per_step={passes!r}: give a whole number, at least 1")
