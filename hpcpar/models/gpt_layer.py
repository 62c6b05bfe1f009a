"""A transformer layer that keeps the activations that the paper counts, each once.

    x ─┬─ norm ─ QKV ─ core ─ projection ─ dropout ─(+)─┬─ norm ─ h → 4h ─ GELU ─ 4h → h ─ dropout ─(+)─
       ╰────────────────────────────────────────────────╯╰────────────────────────────────────────────╯
    kept  2      2     2+2+2   2            1              2      2        8      8        1           sbh
    core, kept   scores ─ softmax ─ dropout ─ over values
                          2         1         2                                                        as²b

The scores' product includes their scale and the causal mask, so neither keeps anything. Softmax keeps its
output, dropout its mask, a product its inputs. In bfloat16 a value has two bytes, a mask has one.
Shape letters: B batch, S sequence, H hidden, A heads of this rank, D head size.
source   Korthikanti et al. 2022, arXiv 2205.05198, section 4.1
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hpcpar.autograd import recompute
from hpcpar.errors import LayoutError
from hpcpar.planner.shapes import Recompute, RecomputeMode
from hpcpar.seeds import parameter_seed
from hpcpar.tensor_parallel.axis import TensorParallel
from hpcpar.tensor_parallel.dropout import Dropout
from hpcpar.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from hpcpar.tensor_parallel.mlp import ParallelMLP
from hpcpar.tensor_parallel.norm import LayerNorm
from hpcpar.tensor_parallel.random_streams import RandomStreams, Stream
from hpcpar.tensor_parallel.split import Heads, require_divisible

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


class GptLayer(nn.Module):
    """Causal self-attention and a GELU feed-forward, each after a norm and added to the residual stream.

    hidden_size, heads   of the whole layer
    tp                   ranks that share it; the paper's sequence parallelism has gather_again
    streams              random numbers of the dropouts
    attention_dropout    after softmax
    hidden_dropout       of each block's output
    mode                 activations recomputed in backward, see `Recompute`
    seed                 of the initial values, the same on all ranks

    [B, S, H] -> [B, S, H]; with sequence parallelism this rank's part of S
    errors   LayoutError for heads that do not divide among the ranks, or H among heads; ConfigError for a
             mode that there is not
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        tp: TensorParallel | Communicator,
        streams: RandomStreams,
        *,
        attention_dropout: float = 0.1,
        hidden_dropout: float = 0.1,
        mode: RecomputeMode = "none",
        seed: int = 0,
    ) -> None:
        super().__init__()
        tp = TensorParallel.of(tp)
        require_divisible(heads, tp.size, "heads")
        if hidden_size % heads:
            raise LayoutError(f"hidden_size={hidden_size} does not divide among heads={heads}")
        self.mode = Recompute(mode).mode
        self.own_heads, self.head_size = heads // tp.size, hidden_size // heads
        of_hidden: Stream = "different" if tp.sequence_parallel else "same"
        self.attention_norm = LayerNorm(hidden_size, tp=tp)
        self.qkv = ColumnParallelLinear(hidden_size, (Heads(heads, self.head_size),) * 3, tp, draw=False)
        self.attention_dropout = Dropout(attention_dropout, streams, "different")
        self.projection = RowParallelLinear(hidden_size, hidden_size, tp, draw=False)
        self.projection_dropout = Dropout(hidden_dropout, streams, of_hidden)
        self.mlp_norm = LayerNorm(hidden_size, tp=tp)
        self.mlp = ParallelMLP(hidden_size, 4 * hidden_size, tp, draw=False)
        self.mlp_dropout = Dropout(hidden_dropout, streams, of_hidden)
        self.random_streams = streams
        self._draw(seed)

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "full":
            return recompute(self._layer, x, streams=self.random_streams)
        return self._layer(x)

    def _layer(self, x: Tensor) -> Tensor:
        x = x + self._attention(self.attention_norm(x))
        added: Tensor = self.mlp_dropout(self.mlp(self.mlp_norm(x)))
        return x + added

    def _attention(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        if self.mode == "selective":
            mixed = recompute(self._core, qkv, streams=self.random_streams)
        else:
            mixed = self._core(qkv)
        added: Tensor = self.projection_dropout(self.projection(mixed))
        return added

    def _core(self, qkv: Tensor) -> Tensor:
        """softmax(QKᵀ/√D + causal mask)·V of this rank's heads: [B, S, 3·A·D] -> [B, S, A·D]"""
        batch, length, _ = qkv.shape
        queries, keys, values = (
            part.view(batch, length, self.own_heads, self.head_size).transpose(1, 2).flatten(0, 1)
            for part in self.qkv.sections_of(qkv)
        )  # [B·A, S, D]
        later = queries.new_full((length, length), -math.inf).triu(1)
        scores = torch.baddbmm(later, queries, keys.transpose(1, 2), alpha=1 / math.sqrt(self.head_size))
        mixed = torch.bmm(self.attention_dropout(scores.softmax(-1)), values)
        return mixed.view(batch, self.own_heads, length, self.head_size).transpose(1, 2).flatten(2)

    def _draw(self, seed: int) -> None:
        """Draw initial values by name and seed, not from the process's random numbers."""
        for name, module in self.named_modules():
            if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                module.reset_parameters(torch.Generator().manual_seed(parameter_seed(name, seed)))
