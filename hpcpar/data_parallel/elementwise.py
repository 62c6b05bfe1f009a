"""Which optimizers may work on pieces of parameters: those that treat every element by itself.

The ones of torch that do not are known by name, with the reason. Any other is tried, with the options of each
of its groups: once on a small matrix as a whole, once on the same numbers in two flat pieces, each with a
`step` of its own, as blocks have. What it makes of them must be the same, and must not be what it was given.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpcpar.errors import OperationError

WHOLE = {
    "LBFGS": "its search direction is a product of the gradients of all parameters",
    "SparseAdam": "it takes sparse gradients, and shards hold dense ones",
    "Adafactor": "it keeps the means of a matrix's rows and columns",
    "Muon": "it makes the whole matrix of a layer's momentum orthogonal",
}
"""Optimizers of torch that need whole tensors, and what for."""

TRIAL_STEPS = 3

TRIAL_RATE = 0.01
"""The learning rate of a trial where it is 0 as yet: a step of nothing would tell nothing."""


def require_elementwise(optimizer: Optimizer) -> None:
    """OperationError unless the optimizer does the same to pieces of parameters as to the whole."""
    for kind in type(optimizer).__mro__:
        if kind.__module__.startswith("torch.") and kind.__name__ in WHOLE:
            raise _refusal(optimizer, WHOLE[kind.__name__])
    if type(optimizer).__module__.startswith("torch.optim"):
        return
    for group in optimizer.param_groups:
        try:
            start = _tried(optimizer, group, whole=True, steps=0)
            whole, pieces = (
                _tried(optimizer, group, whole=whole, steps=TRIAL_STEPS) for whole in (True, False)
            )
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


def _refusal(optimizer: Optimizer, reason: str) -> OperationError:
    return OperationError(
        f"{type(optimizer).__name__} cannot work on shards: {reason}. Take zero_stage=0, without precision "
        f"and offload, or an optimizer that treats every element by itself: SGD, Adam, AdamW, Adagrad, …"
    )


def _tried(optimizer: Optimizer, group: dict[str, Any], *, whole: bool, steps: int) -> Tensor:
    """What some steps of an optimizer of this kind, with a group's options, make of 4 × 6 numbers."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    parts = [value.clone()] if whole else list(torch.split(value.reshape(-1).clone(), 17))
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
        gradient = torch.randn(4, 6, generator=generator, dtype=torch.float64)
        gradients = [gradient] if whole else torch.split(gradient.reshape(-1), 17)
        for parameter, part in zip(parameters, gradients, strict=True):
            parameter.grad = part
            trial.param_groups[0]["params"] = [parameter]
            trial.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
