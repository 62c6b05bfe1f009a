"""Hugging Face: models of `transformers` whose experts several ranks share.

The library `transformers` is not needed to import this.

    share_experts(model, mesh.ep, replicas=mesh.edp)    # in place; then the optimizer
    model(tokens, labels=tokens).loss.backward()        # of this rank's tokens, and of all ranks' experts

    mlp                      [B, S, H]                       before          with ranks of `ep`
      gate                   experts and weights [T, k]      all experts     the same
      experts.gate_up_proj   [E, 2m, H]                      all             [own experts, 2m, H]
      experts.down_proj      [E, H, m]                       all             [own experts, H, m]

Only the module `experts` is another one then: routers, shared experts and losses of the router are those of
the model, be it Mixtral, Qwen3-MoE, OLMoE, GLM-4-MoE or DeepSeek-V3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpar.comm import Communicator
from hpcpar.errors import LayoutError
from hpcpar.expert_parallel import ExpertParallel
from hpcpar.parameter_info import note
from hpcpar.partition import bounds
from hpcpar.tensor_parallel.split import Divided, Split, place

if TYPE_CHECKING:
    from hpcpar.expert_parallel.expert_parallel import Stages

LAYOUT = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
}
"""Notes of transformers on experts that compute down(act(gate(x)) · up(x)), with [gate; up] as one matrix."""


def share_experts(
    model: nn.Module,
    ep: Communicator,
    *,
    replicas: Communicator | None = None,
    stages: Stages = "auto",
    halves: bool = False,
) -> nn.Module:
    """Divide the experts of a transformers model among the ranks of `ep`, in place. Collective.

    The model has all experts on every rank, equal ones; each keeps its own, E / ep of them or one more. From
    then on forward and backward are collective over `ep`, and ranks may have different tokens, or none of an
    expert. Loss and gradients are those of the whole model, where gradients of experts are summed over
    `replicas` and divided by the ranks of the optimizer, as DistributedOptimizer does.

    replicas        ranks that hold the same experts (mesh.edp); None: `ep` has all ranks of the optimizer
    stages, halves  as ExpertParallel
    errors          LayoutError for a model without experts, or with experts of another layout; MismatchError
                    where ranks ask for different things; on all ranks

    `whole_state_dict(model)` gathers the experts for `save_pretrained(…, state_dict=…)`.
    """
    found = {name: module for name, module in model.named_modules() if _is_experts(module)}
    if not found:
        raise LayoutError(
            f"a {type(model).__name__} has no module of experts with gate_up_proj [E, 2m, H] and down_proj "
            "[E, H, m]; share_experts needs a mixture of transformers 5 or later. Use ExpertParallel.mix in "
            "your own model"
        )
    shared: dict[int, ExpertParallel] = {}
    for name, module in found.items():
        count = len(module.get_parameter("gate_up_proj"))
        if count not in shared:
            shared[count] = ExpertParallel(ep, count, stages=stages, halves=halves)
        experts = SharedExperts(module, shared[count], replicas or Communicator.alone())
        model.set_submodule(name, experts)
    return model


def _is_experts(module: nn.Module) -> bool:
    """True for experts of transformers; LayoutError if they are computed in another way than here."""
    parameters = dict(module.named_parameters(recurse=False))
    if isinstance(module, SharedExperts):
        raise LayoutError("the experts of this model are shared already; call share_experts once")
    if not {"gate_up_proj", "down_proj"} <= parameters.keys() or parameters["gate_up_proj"].dim() != 3:
        return False
    layout = {name: getattr(module, name, None) for name in LAYOUT}
    if layout != LAYOUT or len(parameters) != 2:
        raise LayoutError(
            f"{type(module).__name__} with {', '.join(parameters)} and {layout}; share_experts is for "
            f"gate_up_proj and down_proj with {LAYOUT}, as Mixtral, Qwen3-MoE, OLMoE and DeepSeek-V3 have"
        )
    return True


class SharedExperts(Divided):
    """This rank's experts of a mixture: (hidden [T, H], experts [T, k], weights [T, k]) -> [T, H].

    gate_up_proj   [own experts, 2m, H], gate above up
    down_proj      [own experts, H, m]
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(self, whole: Any, parallel: ExpertParallel, replicas: Communicator) -> None:
        super().__init__()
        self.parallel = parallel
        self.act_fn, self._apply_gate = whole.act_fn, type(whole)._apply_gate
        parts = tuple((part,) for part in bounds(parallel.count, parallel.comm.size))
        split = Split(0, parallel.count, parts)
        for name, weight in whole.named_parameters(recurse=False):
            own = nn.Parameter(split.shard(weight.detach(), parallel.comm.rank), weight.requires_grad)
            place(own, split, parallel.comm)
            note(own, replicas=replicas)
            self.register_parameter(name, own)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        mixed = self.parallel.mix(hidden_states, top_k_index, top_k_weights, self._compute)
        return mixed.to(hidden_states.dtype)

    def _compute(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Apply each of this rank's experts to its rows: [R, H] -> [R, H]."""
        outputs = []
        for part, gate_up, down in zip(
            torch.split(rows, counts), self.gate_up_proj, self.down_proj, strict=True
        ):
            inner = self._apply_gate(self, functional.linear(part, gate_up))
            outputs.append(functional.linear(inner, down))
            self.parallel.progress(outputs[-1])
        return torch.cat(outputs)
