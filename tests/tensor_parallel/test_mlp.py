"""The parallel feed-forward is the serial one, trained."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpar.comm import Communicator
from hpcpar.errors import ConfigError
from hpcpar.tensor_parallel import ParallelMLP
from tests.grid import pairwise
from tests.tensor_parallel.conftest import OPTIMIZERS, SIZES, WAYS


class Written(nn.Module):
    def __init__(self, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.up_proj = nn.Linear(6, 24 if activation == "swiglu" else 12)
        self.down_proj = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up_proj(x)
        if self.activation == "swiglu":
            inner = functional.silu(wide[..., :12]) * wide[..., 12:]
        else:
            inner = functional.gelu(wide)
        output: Tensor = self.down_proj(inner)
        return output


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("size", "way", "activation", "optimizer"), pairwise(SIZES, WAYS, ["gelu", "swiglu"], OPTIMIZERS)
)
def test_it_is_the_serial_mlp(
    compare: Callable[..., None], size: int, way: str, optimizer: str, activation: str
) -> None:
    x = torch.randn(2, 12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    compare(
        size,
        Written(activation),
        lambda tp: ParallelMLP(6, 12, tp, activation=activation),  # type: ignore[arg-type]
        x,
        way,
        optimizer,
    )


def test_an_activation_that_there_is_not_is_named() -> None:
    with pytest.raises(ConfigError, match="activation='relu'; there are 'gelu' and 'swiglu'"):
        ParallelMLP(6, 12, Communicator.alone(), activation="relu")  # type: ignore[arg-type]
