"""A mixture of experts in place of a layer's feed-forward.

Shape letters: B batch, S sequence on this rank, H hidden, T = B·S tokens, E experts, k experts of a token,
R rows: tokens of this rank's experts.

    hidden [B, S, H] ─┬─ gate ── experts [T, k], weights [T, k] ──────┐
                      ├─ dispatch ── rows [R, H] ── experts ── combine ┴─ + ── [B, S, H]
                      └─ shared_experts ───────────────────────────────────┘

Modules are named as in Hugging Face's Qwen3-MoE and DeepSeek-V3, with one module for each expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpar.expert_parallel.routing import Routing, route
from hpcpar.expert_parallel.rows import mix_here
from hpcpar.models.layers import Layers, LinearFactory
from hpcpar.planner.experts import Experts


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)) (Shazeer 2020, arXiv 2002.05202).

    ffn_size       of the whole layer
    column, row    make its projections
    """

    def __init__(
        self, hidden_size: int, ffn_size: int, layers: Layers, *, column: LinearFactory, row: LinearFactory
    ) -> None:
        super().__init__()
        self.gate_proj = column(hidden_size, ffn_size)
        self.up_proj = column(hidden_size, ffn_size)
        self.down_proj = row(ffn_size, hidden_size)
        self._project = layers.project

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., H]"""
        gate, up = self._project((self.gate_proj, self.up_proj), hidden)
        output: Tensor = self.down_proj(functional.silu(gate) * up)
        return output


class Router(nn.Module):
    """Scores and chooses experts in float32, or float64 where the model has that, whatever else it has.

    e_score_correction_bias   [E] float32 with a bias_rate: added to scores where experts are chosen
    """

    e_score_correction_bias: Tensor | None

    def __init__(self, hidden_size: int, sizes: Experts) -> None:
        super().__init__()
        self.sizes = sizes
        self.weight = nn.Parameter(torch.empty(sizes.count, hidden_size))
        bias = torch.zeros(sizes.count, dtype=torch.float32) if sizes.bias_rate else None
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, hidden: Tensor) -> Routing:
        """[T, H] -> routing of T tokens"""
        wide = hidden.dtype if hidden.dtype == torch.float64 else torch.float32
        logits = functional.linear(hidden.to(wide), self.weight.to(wide))
        return route(logits, self.sizes, self.e_score_correction_bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the bias with the module, but leave it in float32: half the digits would undo its steps."""
        before = self.e_score_correction_bias
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if before is not None and self.e_score_correction_bias is not None:
            moved = self.e_score_correction_bias
            self.e_score_correction_bias = (moved if before.is_meta else before).to(
                moved.device, torch.float32
            )
        return result


class MixtureOfExperts(nn.Module):
    """The router, this rank's experts, and perhaps a shared expert, in place of `FeedForward`."""

    def __init__(self, hidden_size: int, sizes: Experts, layers: Layers) -> None:
        super().__init__()
        self.sizes = sizes
        self.gate = Router(hidden_size, sizes)
        own = range(sizes.count) if layers.experts is None else layers.experts.own
        column, row = layers.expert_column_linear, layers.expert_row_linear
        self.experts = nn.ModuleList()
        for number in own:
            expert = FeedForward(hidden_size, sizes.ffn_size, layers, column=column, row=row)
            self.experts.add_module(str(number), expert)  # append would count from 0
        self.shared_experts: FeedForward | None = None
        if sizes.shared_ffn_size:
            self.shared_experts = FeedForward(
                hidden_size,
                sizes.shared_ffn_size,
                layers,
                column=layers.column_linear,
                row=layers.row_linear,
            )
        self._parallel = layers.experts

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]"""
        tokens = hidden.flatten(0, -2)
        routing = self.gate(tokens)
        if self._parallel is None:
            mixed = mix_here(tokens, routing.experts, routing.weights, self._compute, self.sizes.count)
        else:
            mixed = self._parallel.mix(tokens, routing.experts, routing.weights, self._compute)
        output = mixed.view_as(hidden)
        return output if self.shared_experts is None else output + self.shared_experts(hidden)

    def _compute(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Apply each of this rank's experts to its rows: [R, H] -> [R, H]."""
        parts = torch.split(rows, counts)
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
