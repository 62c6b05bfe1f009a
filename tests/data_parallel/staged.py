"""Models and optimizers in any stage of ZeRO, as tests of all stages make them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer, fully_shard, summon_full_parameters
from hpcpar.errors import HpcparError


def staged(
    model: nn.Module,
    inner: torch.optim.Optimizer,
    comm: Communicator,
    stage: int,
    /,
    *,
    precision: Any = None,
    shared_parameters: bool = False,
    shard_ranks: int | None = None,
    policy: Any = None,
    **options: Any,
) -> DistributedOptimizer:
    """Make an optimizer of this stage; in stage 3 shard the model, which keeps its parameters' identity."""
    of_parameters: dict[str, Any] = {
        "precision": precision,
        "shared_parameters": shared_parameters,
        "shard_ranks": shard_ranks,
    }
    if stage == 3:
        fully_shard(model, comm, policy=policy, **of_parameters)
    else:
        options |= of_parameters
    return DistributedOptimizer(inner, model.named_parameters(), comm, zero_stage=stage, **options)


def ranks(size: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test, whose first argument is the communicator, on each of so many ranks."""

    def on_each(test: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            run_loopback(size, lambda comm: test(comm, **given))

        others = list(inspect.signature(test).parameters.values())[1:]
        run.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return run

    return on_each


def error_of(function: Callable[[], Any]) -> HpcparError | None:
    try:
        function()
    except HpcparError as error:
        return error
    return None


def whole(model: nn.Module) -> list[Tensor]:
    with summon_full_parameters(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


def masters_of(optimizer: DistributedOptimizer) -> list[Tensor]:
    state = optimizer.state_dict()["state"]
    return [state[number]["master_weight"] for number in range(len(state))]


def fill(model: nn.Module, seed: int, scale: float = 0.5, dtype: torch.dtype = torch.float64) -> None:
    """Draw parameters, as numbers of `dtype`, whatever theirs is."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * scale)


class ResidualLayer(nn.Module):
    def __init__(self, width: int = 4, inner: int = 5) -> None:
        super().__init__()
        self.inner = nn.Linear(width, inner)
        self.outer = nn.Linear(inner, width, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.outer(torch.tanh(self.inner(inputs)))
