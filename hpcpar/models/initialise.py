"""A model's first values: from the seed and each parameter's name, and from nothing else.

So a parameter begins the same whatever the number of layers built before it, whichever ranks hold
it and whatever the process drew before.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hpcpar.data_parallel.initial_values import parameter_seed
from hpcpar.errors import MismatchError
from hpcpar.models.llama_config import LlamaConfig

Shard = Callable[[str, Tensor], Tensor]
"""(name, whole initial tensor) -> the part of it that this rank holds."""


def initial_value(config: LlamaConfig, name: str, seed: int) -> Tensor:
    """The whole initial tensor of one parameter, float32 on the CPU.

    Norms are ones. All else is normal with `initial_std`, divided by sqrt(2 layers) where a layer
    writes to the residual stream, so that the stream's variance does not grow with depth
    (Radford et al. 2019, section 2.3).
    """
    shape = config.shapes()[name]
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.float32, device="cpu")
    std = config.initial_std
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        std /= (2 * config.layers) ** 0.5
    generator = torch.Generator("cpu").manual_seed(parameter_seed(name, seed))
    # Drawn in float32 whatever the model's dtype: a float64 model begins where the float32 one does.
    value = torch.empty(shape, dtype=torch.float32, device="cpu")
    return value.normal_(0.0, std, generator=generator)


@torch.no_grad()
def initialise(model: nn.Module, config: LlamaConfig, *, seed: int, shard: Shard | None = None) -> None:
    """Fill every parameter of the model; `shard` picks a rank's part when the model is parallel.

    Parameters on the meta device have no memory and are passed over.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            continue
        value = initial_value(config, name, seed)
        if shard is not None:
            value = shard(name, value)
        if value.shape != parameter.shape:
            raise MismatchError(
                f"{name} has shape {tuple(parameter.shape)}, but its initial value {tuple(value.shape)}; "
                f"a parallel layer needs shard= to pick this rank's part"
            )
        parameter.copy_(value)
