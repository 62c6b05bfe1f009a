"""Initial values of a model, from the seed and each parameter's name alone.

So a parameter starts with the same values whatever layers were built before it, whichever ranks hold it and
whatever random numbers the process drew before.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn

from hpcpar.errors import MismatchError
from hpcpar.planner.shapes import LlamaConfig
from hpcpar.seeds import parameter_seed
from hpcpar.tensor_parallel import own_shard

# Once for a model, not once for a parameter: experts make the table long.
_shapes = lru_cache(maxsize=4)(LlamaConfig.shapes)


def initial_value(config: LlamaConfig, name: str, seed: int) -> Tensor:
    """Return the whole initial tensor of one parameter, float32 on the CPU.

    Norms are ones. All others are normal with `initial_std`, divided by sqrt(2 layers) where a layer
    writes to the residual stream, so that the stream's variance does not grow with depth
    (Radford et al. 2019, section 2.3).
    """
    shape = _shapes(config)[name]
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.float32, device="cpu")
    std = config.initial_std
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        std /= (2 * config.layers) ** 0.5
    generator = torch.Generator("cpu").manual_seed(parameter_seed(name, seed))
    # Drawn in float32 whatever the model's dtype: a float64 model starts with the values of a float32 one.
    value = torch.empty(shape, dtype=torch.float32, device="cpu")
    return value.normal_(0.0, std, generator=generator)


@torch.no_grad()
def initialise(model: nn.Module, config: LlamaConfig, *, seed: int) -> None:
    """Fill every parameter of the model, or this rank's part of it in parallel layers.

    Parameters on the meta device are skipped.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            continue
        value = own_shard(parameter, initial_value(config, name, seed))
        if value.shape != parameter.shape:
            raise MismatchError(
                f"{name} has shape {tuple(parameter.shape)}, but its initial value {tuple(value.shape)}; "
                f"a layer that holds a part of it must say so, as those of hpcpar.tensor_parallel do"
            )
        parameter.copy_(value)
