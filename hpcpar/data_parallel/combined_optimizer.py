"""Several torch optimizers as one, each with its own parameters: Muon for matrices, AdamW for the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from hpcpar.data_parallel.elementwise import steps_as_torch_does
from hpcpar.errors import OperationError

MUON: Any = getattr(torch.optim, "Muon", None)
"""torch's Muon; None in torch before 2.9."""

OPTIMIZER = "optimizer"
"""The key under which each group names the optimizer that steps on it."""


class CombinedOptimizer(Optimizer):
    """Step several optimizers together, as one with the groups of all.

        matrices = Muon([w for w in layers if w.dim() == 2], lr=0.02)
        rest = AdamW([p for p in model.parameters() if …], lr=3e-4)
        optimizer = DistributedOptimizer(CombinedOptimizer(matrices, rest), model.named_parameters(), dp_comm)

    Groups are those of the first optimizer, then those of the second, and so on; each has its own learning
    rate, which a scheduler multiplies, and names its optimizer under "optimizer". States and the state dict
    are those of all parameters, numbered through the groups. The optimizers given are not to be stepped by
    themselves any more.
    errors   OperationError for fewer than one optimizer, two of the same class (give one of them groups), a
             DistributedOptimizer, or one with hooks; ValueError of torch for a parameter in two optimizers
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        _require_distinct(optimizers)
        self.optimizers = list(optimizers)
        groups = []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group[OPTIMIZER] = type(optimizer).__name__
                groups.append(_renamed(group))
        super().__init__(groups, {})
        for optimizer in optimizers:
            self.state.update(optimizer.state)
        self._hand_out()

    def optimizer_of(self, group: dict[str, Any]) -> Optimizer:
        """Return the optimizer that steps on a group."""
        return next(each for each in self.optimizers if type(each).__name__ == group[OPTIMIZER])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all optimizers, in their order, on the gradients that one call of `closure` has left."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._hand_out()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the optimizer that the group names under "optimizer"."""
        names = [type(optimizer).__name__ for optimizer in self.optimizers]
        if param_group.get(OPTIMIZER) not in names:
            raise OperationError(
                f"a group was added whose {OPTIMIZER!r} is {param_group.get(OPTIMIZER)!r}, and there are "
                f"{', '.join(names)}; name one: add_param_group({{'params': …, {OPTIMIZER!r}: {names[0]!r}}})"
            )
        optimizer = self.optimizer_of(param_group)
        if not any(param_group is group for group in optimizer.param_groups):
            param_group = {**optimizer.defaults, **param_group}
        super().add_param_group(param_group)
        shapes = [list(p.shape) for p in param_group["params"] if p.dim() != 2]
        if is_muon(optimizer) and shapes:
            self.param_groups.pop()
            raise OperationError(
                f"Muon works on matrices, and the group has a parameter of shape {shapes[0]}; add that to "
                "a group of another optimizer"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave; OperationError where its groups are of other optimizers."""
        saved = [group.get(OPTIMIZER) for group in state_dict["param_groups"]]
        own = [group[OPTIMIZER] for group in self.param_groups]
        if saved != own:
            raise OperationError(
                f"the state's groups are of {', '.join(map(str, saved))}, and those here of "
                f"{', '.join(own)}; make the optimizer as it was when the state was saved"
            )
        super().load_state_dict(state_dict)
        self._hand_out()

    def _hand_out(self) -> None:
        """Give each optimizer its groups and all states: loading a state dict makes new ones."""
        for optimizer in self.optimizers:
            optimizer.param_groups = [
                group for group in self.param_groups if self.optimizer_of(group) is optimizer
            ]
            optimizer.state = self.state


def _renamed(group: dict[str, Any]) -> dict[str, Any]:
    """Give torch the names of a group's parameters as it takes them, beside each one."""
    if "param_names" in group:
        group["params"] = list(zip(group.pop("param_names"), group["params"], strict=True))
    return group


def _require_distinct(optimizers: Sequence[Optimizer]) -> None:
    names = [type(optimizer).__name__ for optimizer in optimizers]
    if not optimizers or len(set(names)) < len(names):
        raise OperationError(
            f"CombinedOptimizer was given {', '.join(names) or 'nothing'}; give one optimizer of each class: "
            "parameters with other options of the same are groups of one optimizer"
        )
    for name, optimizer in zip(names, optimizers, strict=True):
        if not isinstance(optimizer, Optimizer) or hasattr(optimizer, "inner"):
            raise OperationError(
                f"CombinedOptimizer was given a {name}; give plain torch optimizers, and the combined one to "
                "DistributedOptimizer"
            )
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            raise OperationError(
                f"the {name} given to CombinedOptimizer has step hooks, which would run once for each "
                "bucket; register them on the combined optimizer"
            )


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers of a combined one, or the one itself."""
    return optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else [optimizer]


def is_muon(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is torch's Muon, and steps as that does."""
    return MUON is not None and isinstance(optimizer, MUON) and steps_as_torch_does(optimizer)


def has_muon(optimizer: Optimizer) -> bool:
    """Return whether torch's Muon is an optimizer, or one of a combined one, even if it has no parameters."""
    return any(map(is_muon, parts_of(optimizer)))


def steps_on_matrices(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return whether torch's Muon steps on a group of this optimizer."""
    if isinstance(optimizer, CombinedOptimizer):
        return is_muon(optimizer.optimizer_of(group))
    return is_muon(optimizer)
