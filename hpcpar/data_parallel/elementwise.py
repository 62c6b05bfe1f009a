"""Optimizers that may work on pieces of parameters: those that treat every element by itself.

    torch's own, and heirs that leave its step alone      taken by their names
    those of KNOWN                                        taken, once their options have passed a trial
    those of WHOLE, whoever wrote them                    refused, with the reason; but see matrix_step
    all others                                            taken at their user's word, after a trial

A trial runs the optimizer, with the options of each of its groups, once on a matrix as a whole, once on the
same numbers in two flat pieces, each with a `step` of its own, as blocks have. Results must be the same, and
must not be what went in. No trial can prove an optimizer right: one may clip at a norm, or factor its state
from some size on, or estimate a rate only after hundreds of steps.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpcpar.autograd.optimizers_on_parts import OF_ALL, OF_MATRICES, reason_of
from hpcpar.errors import OperationError

WHOLE = {
    **OF_MATRICES,
    **OF_ALL,
    "SparseAdam": "it takes sparse gradients, and shards hold dense ones",
    "8bit|4bit": "its state is quantized by blocks of a parameter, which pieces would cut",
    "ScheduleFree": "it counts steps in a group for all parameters together, and its eval() changes them",
    "Sophia|Ada[Hh]essian": "it takes curvature from gradients outside of step(), and shards show none",
    "SAM$": "it looks at the norm of all gradients, twice in a step",
}
"""Patterns of names of optimizers that need whole tensors, and what for."""

KNOWN = {("lion_pytorch", "Lion")}
"""(package, name) of optimizers outside of torch that treat every element by itself, if their options do."""

TRIAL_SHAPE, TRIAL_CUT = (32, 24), 500
"""Large enough for state that is factored from 16 × 16 on, and for gradients of a norm of 28."""

TRIAL_STEPS = 3

TRIAL_RATE = 0.01
"""The learning rate of a trial where it is 0 as yet: a step of nothing would tell nothing."""

_STEPS_NOT = {"zero_grad", "state_dict", "load_state_dict", "add_param_group", "defaults", "hooked"}
"""Public names of torch's optimizers that a step does not use."""


def require_elementwise(optimizer: Optimizer, *, said: bool = False) -> None:
    """OperationError unless the optimizer does the same to pieces of parameters as to the whole.

    said   by its user, of a class that is not known
    """
    reason = reason_of(optimizer, WHOLE)
    if reason is not None:
        raise _refusal(optimizer, reason)
    if steps_as_torch_does(optimizer):
        return
    for group in optimizer.param_groups:
        _try(optimizer, group)
    kind = type(optimizer)
    if not said and (kind.__module__.partition(".")[0], kind.__name__) not in KNOWN:
        raise OperationError(
            f"{kind.__name__} of {kind.__module__} is not known to treat every element by itself, as steps "
            "on shards need, and no trial can tell. If its step uses no norm, mean or shape of a tensor, "
            "clips nothing by a norm and counts nothing for all parameters together, say so: "
            "DistributedOptimizer(…, elementwise=True). Else take zero_stage=0, without precision and "
            "offload, or an optimizer of torch: SGD, Adam, AdamW, Adagrad, …"
        )


def steps_as_torch_does(optimizer: Optimizer) -> bool:
    """True for an optimizer of torch, and for heirs that change nothing that its step uses."""
    kinds = type(optimizer).__mro__
    place = next((n for n, kind in enumerate(kinds) if kind.__module__.startswith("torch.optim")), None)
    if place is None or kinds[place] is Optimizer:
        return False
    base, heirs = kinds[place], kinds[:place]
    changed = [
        value
        for heir in heirs
        for name, value in vars(heir).items()
        if not name.startswith("__") and name not in _STEPS_NOT and hasattr(base, name)
    ]
    own_step = vars(optimizer).get("step")  # a scheduler binds one, or whoever replaces it
    return all(_is_torchs(value) for value in [*changed, *([] if own_step is None else [own_step])])


def _is_torchs(function: Any) -> bool:
    """True for a function of torch's own, perhaps inside wrappers of torch's own: hooks, schedulers."""
    while function is not None:
        function = getattr(function, "__func__", function)
        if not getattr(function, "__globals__", {}).get("__name__", "").startswith("torch."):
            return False
        function = vars(function).get("__wrapped__")
    return True


def _refusal(optimizer: Optimizer, reason: str) -> OperationError:
    return OperationError(
        f"{type(optimizer).__name__} cannot work on shards: {reason}. Take zero_stage=0, without precision "
        f"and offload, or an optimizer that treats every element by itself: SGD, Adam, AdamW, Adagrad, …"
    )


def _try(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """OperationError where a trial tells that an optimizer with a group's options is not elementwise."""
    try:
        start = _tried(optimizer, group, whole=True, steps=0)
        whole, pieces = (_tried(optimizer, group, whole=whole, steps=TRIAL_STEPS) for whole in (True, False))
    except Exception as error:
        raise _refusal(optimizer, f"tried on flat pieces of a matrix it says: {error}") from error
    if not torch.allclose(whole, pieces, rtol=1e-9, atol=1e-12):
        raise _refusal(
            optimizer,
            "tried on a matrix and on its pieces it gives different values, as if it looked at more than "
            "an element, or counted calls of step() for all parameters together",
        )
    if torch.equal(whole, start):
        raise _refusal(optimizer, "tried on a matrix it changes nothing, so nobody can tell")


def _tried(optimizer: Optimizer, group: dict[str, Any], *, whole: bool, steps: int) -> Tensor:
    """Run some steps of an optimizer of this kind, with a group's options, on a matrix; return it, flat."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(TRIAL_SHAPE, generator=generator, dtype=torch.float64)
    parts = [value.clone()] if whole else list(torch.split(value.reshape(-1).clone(), TRIAL_CUT))
    parameters = [nn.Parameter(part) for part in parts]
    trial = object.__new__(type(optimizer))
    # Without `step`, which a scheduler may have bound to the optimizer itself.
    trial.__dict__ = {key: value for key, value in vars(optimizer).items() if key != "step"}
    trial.state = defaultdict(dict)
    trial._optimizer_step_pre_hooks, trial._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    trial.param_groups = [{**group, "params": parameters}]
    if "lr" in group and not group["lr"]:
        trial.param_groups[0]["lr"] = TRIAL_RATE
    for _ in range(steps):
        gradient = torch.randn(TRIAL_SHAPE, generator=generator, dtype=torch.float64)
        gradients = [gradient] if whole else torch.split(gradient.reshape(-1), TRIAL_CUT)
        for parameter, part in zip(parameters, gradients, strict=True):
            parameter.grad = part
            trial.param_groups[0]["params"] = [parameter]
            trial.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
