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

Ranks of tp bring the same tokens. With `tp` each of them has a part of the rows mixed:

    hidden [T, H]  ─ scatter ─  [T / tp, H]  ─ mix over ep ─  [T / tp, H]  ─ gather ─  [T, H]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpar.autograd import gather_from, scatter_to
from hpcpar.autograd.split_norms import split_over_of
from hpcpar.comm import Communicator
from hpcpar.errors import LayoutError
from hpcpar.expert_parallel import ExpertParallel
from hpcpar.parameter_info import note
from hpcpar.partition import bounds
from hpcpar.tensor_parallel.axis import TensorParallel
from hpcpar.tensor_parallel.products import SEQUENCE
from hpcpar.tensor_parallel.sameness import Sameness
from hpcpar.tensor_parallel.split import Divided, Split, comm_of, place
from hpcpar.tensor_parallel.styles import Style

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
    tp: Communicator | None = None,
    stages: Stages = "auto",
    halves: bool = False,
) -> nn.Module:
    """Divide the experts of a transformers model among the ranks of `ep`, in place. Collective.

    The model has all experts on every rank, equal ones; each keeps its own, E / ep of them or one more. From
    then on forward and backward are collective over `ep`, and ranks may have different tokens, or none of an
    expert. Loss and gradients are those of the whole model, where gradients of experts are summed over
    `replicas` and divided by the ranks of the optimizer, as DistributedOptimizer does.

    replicas        ranks that hold the same experts (mesh.edp); None: `ep` has all ranks of the job, or one
    tp              ranks with the same tokens, as those that share layers are (mesh.tp): each has its part of
                    them mixed. None: all ranks of `ep` and `replicas` have different tokens
    stages, halves  as ExpertParallel
    errors          LayoutError for a model without experts, or with experts of another layout, without
                    `replicas` where there are some, and without `tp` where ranks of `ep` or `replicas` share
                    layers; MismatchError where ranks ask for different things; on all ranks

    `whole_state_dict(model)` gathers the experts for `save_pretrained(…, state_dict=…)`.
    """
    found = {name: module for name, module in model.named_modules() if _is_experts(module)}
    if not found:
        raise LayoutError(
            f"a {type(model).__name__} has no module of experts with gate_up_proj [E, 2m, H] and down_proj "
            "[E, H, m]; share_experts needs a mixture of transformers 5 or later. Use ExpertParallel.mix in "
            "your own model"
        )
    _require_replicas(ep, replicas, 1 if tp is None else tp.size)
    if tp is None:
        _require_different_tokens(model, ep, replicas)
    copies = Communicator.alone() if replicas is None and ep.size > 1 else replicas
    shared: dict[int, ExpertParallel] = {}
    for name, module in found.items():
        count = len(module.get_parameter("gate_up_proj"))
        if count not in shared:
            shared[count] = ExpertParallel(ep, count, stages=stages, halves=halves)
        model.set_submodule(name, SharedExperts(module, shared[count], copies, tp))
    return model


def _require_replicas(ep: Communicator, replicas: Communicator | None, tp: int) -> None:
    """LayoutError where other ranks than those of `ep` have copies, and are not given."""
    ranks = ep._runtime.transport.size
    if replicas is None and ep.size < ranks and (ep.size > 1 or tp > 1):
        raise LayoutError(
            f"share_experts over {ep.size} of the job's {ranks} ranks, without replicas: the other ranks "
            "have copies of the experts, whose gradients would not be summed; give replicas=mesh.edp"
        )


def _require_different_tokens(model: nn.Module, ep: Communicator, replicas: Communicator | None) -> None:
    """LayoutError on all ranks of `ep` where some of its ranks or of `replicas` share a layer. Collective."""
    here = ep.world_ranks[ep.rank]
    others = {*ep.world_ranks, *(replicas.world_ranks if replicas is not None else ())} - {here}
    found = ""
    for name, parameter in model.named_parameters():
        comm = comm_of(parameter)
        for over in (*split_over_of(parameter), *([] if comm is None else [comm])):
            if not found and others.intersection(over.world_ranks):
                found = f"{name} is split over {over.name!r}, whose ranks are also among the experts'"
    if ep.allreduce(torch.tensor([int(bool(found))]), "max").item():
        found = found or "on another rank a layer is split over ranks that are also among the experts'"
        raise LayoutError(
            f"{found}: ranks that share layers bring the same tokens, and experts would see each of them "
            "several times; give share_experts tp=mesh.tp"
        )


@dataclass(frozen=True)
class SharedMixture(Style):
    """Mixture block of a transformers model in a plan: `share_experts` of one block.

    ep, replicas   as share_experts. None: each rank has all experts, until share_experts(…, tp=mesh.tp)

    Router and shared experts stay whole, and see the same tokens on all ranks of tp. With sequence
    parallelism the block's input is gathered, and its output scattered.
    """

    ep: Communicator | None = field(default=None, repr=False)
    replicas: Communicator | None = field(default=None, repr=False)

    covers: ClassVar[bool] = True

    def splits(self, name: str, module: nn.Module, size: int) -> dict[str, Split]:
        if not any(_is_experts(each) for each in module.modules()):
            raise LayoutError(
                f"{name} is a {type(module).__name__} without experts as Mixtral has; SharedMixture is for a "
                "mixture block of transformers 5 or later"
            )
        if self.ep is not None:
            _require_replicas(self.ep, self.replicas, size)
        return {}

    def applied(self, module: nn.Module, tp: TensorParallel) -> nn.Module:
        if self.ep is not None:
            share_experts(module, self.ep, replicas=self.replicas, tp=tp.comm)
        if tp.sequence_parallel and tp.size > 1:
            module.register_forward_pre_hook(
                lambda _, args: (gather_from(args[0], tp.comm, SEQUENCE), *args[1:])
            )
            module.register_forward_hook(lambda _, args, output: scatter_to(output, tp.comm, SEQUENCE))
        return module


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
    tp             ranks with the same tokens, each of which has its part mixed; None: there are none
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(
        self,
        whole: Any,
        parallel: ExpertParallel,
        replicas: Communicator | None,
        tp: Communicator | None = None,
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self._tp = None if tp is None or tp.size == 1 else tp
        self._sameness = None if self._tp is None else Sameness(self._tp, "the input of a mixture's experts")
        # A gate of the model's own may need more than act_fn: limits, factors.
        for name, value in vars(whole).items():
            if not name.startswith("_") and not hasattr(self, name):
                setattr(self, name, value)
        self.act_fn, self._apply_gate = getattr(whole, "act_fn", None), type(whole)._apply_gate
        parts = tuple((part,) for part in bounds(parallel.count, parallel.comm.size))
        split = Split(0, parallel.count, parts)
        for name, weight in whole.named_parameters(recurse=False):
            own = nn.Parameter(split.shard(weight.detach(), parallel.comm.rank), weight.requires_grad)
            place(own, split, parallel.comm)
            note(own, replicas=replicas)
            self.register_parameter(name, own)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if self._tp is None or self._sameness is None:
            return self._mixed(hidden_states, top_k_index, top_k_weights)
        self._sameness.require(hidden_states)
        tokens = len(hidden_states)
        start, stop = bounds(tokens, self._tp.size)[self._tp.rank]
        mixed = self._mixed(
            scatter_to(hidden_states, self._tp, 0),
            top_k_index[start:stop],
            scatter_to(top_k_weights, self._tp, 0),
        )
        return gather_from(mixed, self._tp, 0, length=tokens)

    def _mixed(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        return self.parallel.mix(hidden, experts, weights, self._compute).to(hidden.dtype)

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
