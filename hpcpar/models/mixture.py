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
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpar.autograd.recompute import first_time
from hpcpar.autograd.torch_clipping import note_split_over
from hpcpar.comm import Communicator
from hpcpar.errors import LayoutError
from hpcpar.expert_parallel import ExpertParallel
from hpcpar.expert_parallel.routing import Routing, route, within_capacity
from hpcpar.models.balancing import Balancing
from hpcpar.models.layers import Layers, Linear, LinearFactory, Projection, project_each
from hpcpar.parameter_info import note
from hpcpar.planner.experts import Experts
from hpcpar.tensor_parallel.split import ModulesOfRanks
from hpcpar.uncompiled import uncompiled


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)) (Shazeer 2020, arXiv 2002.05202).

    ffn_size       of the whole layer
    column, row    make its projections
    project        applies gate and up to their input
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        *,
        column: LinearFactory = Linear,
        row: LinearFactory = Linear,
        project: Projection = project_each,
    ) -> None:
        super().__init__()
        self.gate_proj = column(hidden_size, ffn_size)
        self.up_proj = column(hidden_size, ffn_size)
        self.down_proj = row(ffn_size, hidden_size)
        self._project = project

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

    def __init__(self, hidden_size: int, layers: Layers, sizes: Experts) -> None:
        super().__init__()
        self.sizes = sizes
        self.weight = nn.Parameter(torch.empty(sizes.count, hidden_size))
        bias = torch.zeros(sizes.count, dtype=torch.float32) if sizes.bias_rate else None
        self.register_buffer("e_score_correction_bias", bias)
        self._summed = layers.expert_tokens.summed

    def forward(self, hidden: Tensor) -> tuple[Routing, Tensor]:
        """[T, H] -> routing of T tokens, and logits [T, E]"""
        wide = hidden.dtype if hidden.dtype == torch.float64 else torch.float32
        with torch.autocast(hidden.device.type, enabled=False):
            logits = functional.linear(hidden.to(wide), self._summed(self.weight).to(wide))
        return route(logits, self.sizes, self.e_score_correction_bias), logits

    def reset_parameters(self) -> None:
        """Give memory of the meta device its biases of zero; `initialise` makes the weight."""
        if self.e_score_correction_bias is not None:
            self.e_score_correction_bias.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the bias with the module, but leave it in float32: fewer digits would lose its steps."""
        before = self.e_score_correction_bias
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if before is not None and self.e_score_correction_bias is not None:
            moved = self.e_score_correction_bias
            self.e_score_correction_bias = (moved if before.is_meta else before).to(
                moved.device, torch.float32
            )
        return result


class MixtureOfExperts(nn.Module):
    """The router, this rank's experts, and perhaps a shared expert, in place of `FeedForward`.

    number   of the layer in the whole model, from 0

    In evaluation no token is dropped, whatever the capacity: a text's logits do not depend on what is read
    beside it. With several ranks of `layers.experts` forward and backward are collective over them.
    """

    def __init__(self, hidden_size: int, sizes: Experts, layers: Layers, number: int) -> None:
        super().__init__()
        self.sizes, self.number = sizes, number
        self.gate = Router(hidden_size, layers, sizes)
        self._parallel = layers.experts or ExpertParallel(Communicator.alone(), sizes.count)
        if self._parallel.count != sizes.count:
            raise LayoutError(
                f"ExpertParallel divides count={self._parallel.count} experts, and the model has "
                f"experts.count={sizes.count}; make it as ExpertParallel(mesh.ep, {sizes.count})"
            )
        self.experts = ModulesOfRanks(self._parallel.comm)
        column, row = layers.expert_column_linear, layers.expert_row_linear
        for expert in self._parallel.own:
            module = FeedForward(hidden_size, sizes.ffn_size, column=column, row=row)
            self.experts.add_module(str(expert), module)  # append would count from 0
        for parameter in self.experts.parameters():
            note_split_over(parameter, self._parallel.comm)
            if layers.expert_replicas is not None:
                note(parameter, replicas=layers.expert_replicas)
        self.shared_experts: FeedForward | None = None
        if sizes.shared_ffn_size:
            column, row = layers.column_linear, layers.row_linear
            self.shared_experts = FeedForward(
                hidden_size, sizes.shared_ffn_size, column=column, row=row, project=layers.project
            )
        self._tokens = layers.expert_tokens
        self._balancing = layers.balancing or Balancing(sizes)
        self._balancing.add_layer(number, self.gate)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]"""
        tokens = self._tokens
        routed = tokens.routed(hidden)
        routing, logits = self.gate(routed.flatten(0, 1))
        kept: Tensor | None = None
        counts = self.training and torch.is_grad_enabled()
        if self.training:
            kept = first_time(partial(self._within_capacity, routing, routed, hidden))
            if counts:
                routing = self._balanced(routing, logits, hidden, kept)

        def dispatched(values: Tensor) -> Tensor:
            """[B·S', k] -> [B·S", k]"""
            return tokens.dispatched(values.view(*routed.shape[:2], self.sizes.per_token)).flatten(0, 1)

        shared: list[Tensor] = []
        rows, chosen = tokens.dispatched(routed), dispatched(routing.experts)
        mixed = self._parallel.mix(
            rows.flatten(0, 1),
            chosen,
            dispatched(routing.weights),
            self._compute,
            kept=None if kept is None else dispatched(kept),
            positions=tokens.positions(rows, hidden),
            meanwhile=partial(self._share, hidden, shared),
        )
        if counts:
            self._note_rows(chosen.numel())
        output = tokens.combined(mixed.view(rows.shape), hidden)
        return output + shared[0] if shared else output

    @uncompiled
    def _note_rows(self, own: int) -> None:
        """Note how many rows came here while `own` were of this rank's tokens."""
        first_time(partial(self._balancing.note_rows, self.number, self._parallel.received, own))

    def _share(self, hidden: Tensor, shared: list[Tensor]) -> None:
        """Compute the shared expert, which has exits of its own to other ranks."""
        if self.shared_experts is not None:
            shared.append(self.shared_experts(hidden))

    def _compute(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Apply each of this rank's experts to its rows: [R, H] -> [R, H]."""
        outputs = []
        for expert, part in zip(self.experts, torch.split(rows, counts), strict=True):
            outputs.append(expert(part))
            self._parallel.progress(outputs[-1])
        return torch.cat(outputs)

    def _balanced(self, routing: Routing, logits: Tensor, hidden: Tensor, kept: Tensor | None) -> Routing:
        sequence_of, sequences = None, 1
        if self.sizes.balance_loss and self.sizes.balance_over == "sequence":
            sequence_of = self._tokens.sequence_of(hidden)
            sequences = len(hidden) * len(self._tokens.lengths(hidden))
        return self._balancing.applied(self.number, routing, logits, sequence_of, sequences, kept)

    @torch.no_grad()
    def _within_capacity(self, routing: Routing, routed: Tensor, hidden: Tensor) -> Tensor | None:
        """Return [T, k]: True where an expert has room for the token; None: it always has."""
        sizes, tokens = self.sizes, self._tokens
        if sizes.capacity_factor is None:
            return None
        capacities = [sizes.capacity(length) for length in tokens.lengths(hidden)] * len(hidden)
        shape = (*routed.shape[:2], sizes.per_token)
        experts = tokens.over_whole_sequences(routing.experts.view(shape), hidden)
        weights = tokens.over_whole_sequences(routing.weights.view(shape), hidden)
        kept = within_capacity(
            experts.flatten(0, 1),
            weights.flatten(0, 1),
            tokens.sequence_of(hidden, whole=True),
            torch.tensor(capacities, device=hidden.device, dtype=torch.int64),
            sizes,
        )
        return tokens.own(kept.view(experts.shape), hidden).flatten(0, 1)
