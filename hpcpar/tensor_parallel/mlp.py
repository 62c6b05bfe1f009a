"""Feed-forward layer with its inner width divided among ranks. Shape letters: H hidden, F ffn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn
from torch.nn import functional

from hpcpar.errors import ConfigError
from hpcpar.tensor_parallel.axis import TensorParallel
from hpcpar.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

Activation = Literal["gelu", "swiglu"]


class ParallelMLP(nn.Module):
    """down(gelu(up(x))), or down(silu(gate(x)) · up(x)) with gate and up in one fused weight.

    hidden_size, ffn_size   of the whole layer
    draw         as in ColumnParallelLinear
    activation   "gelu" (exact), or "swiglu" (Shazeer 2020, arXiv 2002.05202)

    [..., H] -> [..., H]; with sequence parallelism dim -2 is this rank's shard
    errors   LayoutError for an ffn_size that does not divide among the ranks
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        tp: TensorParallel | Communicator,
        *,
        activation: Activation = "gelu",
        bias: bool = True,
        draw: bool = True,
    ) -> None:
        super().__init__()
        if activation not in ("gelu", "swiglu"):
            raise ConfigError(f"activation={activation!r}; there are 'gelu' and 'swiglu'")
        tp = TensorParallel.of(tp)
        self.activation = activation
        sections = (ffn_size,) if activation == "gelu" else (ffn_size, ffn_size)
        self.up_proj = ColumnParallelLinear(hidden_size, sections, tp, bias=bias, draw=draw)
        self.down_proj = RowParallelLinear(ffn_size, hidden_size, tp, bias=bias, draw=draw)

    def forward(self, hidden: Tensor) -> Tensor:
        wide = self.up_proj(hidden)
        if self.activation == "gelu":
            inner = functional.gelu(wide)
        else:
            gate, up = self.up_proj.sections_of(wide)
            inner = functional.silu(gate) * up
        output: Tensor = self.down_proj(inner)
        return output
