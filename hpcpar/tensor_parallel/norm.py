"""Norms over the hidden dim; with sequence parallelism each rank normalises its own tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpar.tensor_parallel.axis import TensorParallel
from hpcpar.tensor_parallel.linear import on_own_tokens
from hpcpar.tensor_parallel.sameness import Sameness

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + ε) · weight over the last dim, computed in float32 at least.

    tp       with sequence parallelism, its ranks sum the gradients of the weight; None: one rank
    source   Zhang and Sennrich 2019, arXiv 1910.07467
    """

    def __init__(
        self, hidden_size: int, epsilon: float, tp: TensorParallel | Communicator | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.epsilon = epsilon
        self.tp = None if tp is None else TensorParallel.of(tp)
        self.sameness = None if self.tp is None else Sameness(self.tp.comm, "the weight of an RMSNorm")

    def forward(self, hidden: Tensor) -> Tensor:
        if self.sameness is not None:
            self.sameness.require(self.weight)
        weight = self.weight if self.tp is None else on_own_tokens(self.weight, self.tp)
        wide = hidden if hidden.dtype == torch.float64 else hidden.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (wide * scale).to(hidden.dtype) * weight

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, epsilon={self.epsilon}"


class LayerNorm(nn.LayerNorm):
    """torch.nn.LayerNorm over the last dim; `tp` as in RMSNorm."""

    def __init__(
        self, hidden_size: int, epsilon: float = 1e-5, tp: TensorParallel | Communicator | None = None
    ) -> None:
        super().__init__(hidden_size, eps=epsilon)
        self.tp = None if tp is None else TensorParallel.of(tp)
        self.sameness = None if self.tp is None else Sameness(self.tp.comm, "the weight of a LayerNorm")

    def forward(self, input: Tensor) -> Tensor:
        if self.tp is None or self.sameness is None:
            return super().forward(input)
        self.sameness.require(self.weight)
        weight, bias = (on_own_tokens(parameter, self.tp) for parameter in (self.weight, self.bias))
        return functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps)
