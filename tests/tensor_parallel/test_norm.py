"""Norms under sequence parallelism are the serial norms, trained."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hpcpar.tensor_parallel import LayerNorm, RMSNorm, TensorParallel
from tests.grid import pairwise
from tests.tensor_parallel.conftest import OPTIMIZERS, SIZES, WAYS


class Written(nn.Module):
    """An RMS norm written out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.pow(2).sum(-1, keepdim=True) / 6 + 1e-5).sqrt() * self.weight


NORMS: dict[str, tuple[Callable[[], nn.Module], Callable[[TensorParallel], nn.Module]]] = {
    "RMSNorm": (Written, lambda tp: RMSNorm(6, 1e-5, tp)),
    "LayerNorm": (lambda: nn.LayerNorm(6), lambda tp: LayerNorm(6, 1e-5, tp)),
}


@pytest.mark.parametrize(("size", "way", "norm", "optimizer"), pairwise(SIZES, WAYS, NORMS, OPTIMIZERS))
def test_it_is_the_serial_norm(
    compare: Callable[..., None], size: int, way: str, optimizer: str, norm: str
) -> None:
    serial, parallel = NORMS[norm]
    x = torch.randn(2, 12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    compare(size, serial(), parallel, x, way, optimizer)
