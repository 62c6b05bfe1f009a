"""Routing equals the definition written out for one token at a time, and Hugging Face's routers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcpar.errors import MismatchError
from hpcpar.expert_parallel.routing import route, within_capacity
from hpcpar.planner.experts import Experts

FORMS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "one of them": {"per_token": 1, "renormalise": False},
    "not renormalised": {"renormalise": False},
    "scaled": {"scale": 2.5},
    "sigmoid": {"score": "sigmoid"},
    "groups": {"groups": 4, "groups_per_token": 2},
    "deepseek": {"score": "sigmoid", "groups": 4, "groups_per_token": 2, "scale": 2.5, "bias_rate": 0.001},
    "all of them": {"per_token": 12},
}


def logits_of(tokens: int, experts: int = 12) -> Tensor:
    return 2 * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def written_out(logits: Tensor, sizes: Experts, bias: Tensor) -> tuple[list[int], Tensor]:
    """Route one token."""
    powers = logits.exp()
    scores = powers / powers.sum() if sizes.score == "softmax" else powers / (1 + powers)
    ranked = [float(score.detach() + b) for score, b in zip(scores, bias, strict=True)]
    size = sizes.count // sizes.groups
    groups = [range(g * size, (g + 1) * size) for g in range(sizes.groups)]
    best_two = [sum(sorted((ranked[e] for e in group), reverse=True)[:2]) for group in groups]
    allowed = sorted(range(sizes.groups), key=lambda g: -best_two[g])[: sizes.groups_per_token]
    candidates = [e for g in allowed for e in groups[g]]
    experts = sorted(candidates, key=lambda e: (-ranked[e], e))[: sizes.per_token]
    weights = torch.stack([scores[e] for e in experts])
    return experts, sizes.scale * (weights / weights.sum() if sizes.renormalise else weights)


@pytest.mark.parametrize("form", FORMS)
def test_routing_and_its_gradient_equal_the_definition(form: str) -> None:
    sizes = Experts(**{"count": 12, "per_token": 3, "ffn_size": 1} | FORMS[form])
    logits, reference = (logits_of(40).requires_grad_() for _ in range(2))
    bias = torch.linspace(-0.3, 0.3, 12, dtype=torch.float64) * bool(sizes.bias_rate)
    routing = route(logits, sizes, bias if sizes.bias_rate else None)
    expected = [written_out(row, sizes, bias) for row in reference]
    assert routing.experts.tolist() == [experts for experts, _ in expected]
    weights = torch.stack([weights for _, weights in expected])
    torch.testing.assert_close(routing.weights, weights, rtol=1e-13, atol=1e-15)
    slopes = torch.arange(weights.numel(), dtype=torch.float64).view_as(weights).sin()
    (routing.weights * slopes).sum().backward()
    (weights * slopes).sum().backward()
    torch.testing.assert_close(logits.grad, reference.grad, rtol=1e-11, atol=1e-14)


def test_of_equal_scores_the_lower_number_is_chosen() -> None:
    logits = torch.zeros(3, 64)
    logits[1, 40:43] = 1.0
    logits[2, 63] = 1.0
    experts = route(logits, Experts(64, 4, 1)).experts
    assert experts.tolist() == [[0, 1, 2, 3], [40, 41, 42, 0], [63, 0, 1, 2]]
    grouped = route(logits, Experts(64, 4, 1, groups=8, groups_per_token=2)).experts
    assert grouped.tolist() == [[0, 1, 2, 3], [40, 41, 42, 0], [63, 0, 1, 2]]


def test_a_bias_selects_and_does_not_weigh() -> None:
    sizes = Experts(4, 2, 1, score="sigmoid", renormalise=False)
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    routing = route(logits, sizes, torch.tensor([0.0, 0.0, 0.0, 5.0]))
    assert routing.experts.tolist() == [[3, 0]]
    torch.testing.assert_close(routing.weights, torch.tensor([[-1.0, 2.0]]).sigmoid())


def test_sigmoids_that_are_all_zero_give_no_nan() -> None:
    weights = route(torch.full((2, 4), -200.0), Experts(4, 2, 1, score="sigmoid")).weights
    assert weights.isfinite().all()


def test_no_tokens_are_routed_to_no_experts() -> None:
    routing = route(torch.zeros(0, 4), Experts(4, 2, 1))
    assert routing.experts.shape == routing.weights.shape == (0, 2)


def test_logits_of_other_experts_are_refused() -> None:
    with pytest.raises(
        MismatchError, match=r"logits \[3, 5\] of a router; the last dim must be the 4 experts"
    ):
        route(torch.zeros(3, 5), Experts(4, 2, 1))


# --- Hugging Face ---------------------------------------------------------------------------------


def hugging_face_router(kind: str, *, renormalise: bool) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=16,
        num_experts=12,
        num_local_experts=12,
        n_routed_experts=12,
        num_experts_per_tok=4,
        norm_topk_prob=renormalise,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    )
    module = __import__(f"transformers.models.{MODULES[kind]}", fromlist=[""])
    routers = [name for name in vars(module) if name.lower().endswith("topkrouter")]
    router: nn.Module = getattr(module, routers[0])(config)
    return router


MODULES = {
    "Mixtral": "mixtral.modeling_mixtral",
    "Qwen3Moe": "qwen3_moe.modeling_qwen3_moe",
    "Olmoe": "olmoe.modeling_olmoe",
    "DeepseekV3": "deepseek_v3.modeling_deepseek_v3",
}
DEEPSEEK: dict[str, Any] = {"score": "sigmoid", "groups": 4, "groups_per_token": 2, "scale": 2.5}


@pytest.mark.parametrize(
    ("kind", "renormalise"),
    [
        *[("Mixtral", True), ("Qwen3Moe", False), ("Qwen3Moe", True), ("Olmoe", False)],
        *[("DeepseekV3", True), ("DeepseekV3", False)],
    ],
)
def test_routing_is_that_of_hugging_face(kind: str, renormalise: bool) -> None:
    router = hugging_face_router(kind, renormalise=renormalise)
    form = DEEPSEEK if kind == "DeepseekV3" else {}
    sizes = Experts(12, 4, 1, renormalise=renormalise, **form)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        router.weight.normal_(generator=generator)
    bias = None
    if kind == "DeepseekV3":
        bias = 0.2 * torch.randn(12, generator=generator)
        router.e_score_correction_bias.copy_(bias)
    hidden = torch.randn(50, 16, generator=generator)
    logits, weights, experts = router(hidden)
    ours = route(logits.float(), sizes, bias)
    # DeepSeek's are in no order.
    by_expert, places = experts.sort(dim=-1)
    our_experts, our_places = ours.experts.sort(dim=-1)
    assert torch.equal(our_experts, by_expert)
    torch.testing.assert_close(
        ours.weights.gather(-1, our_places), weights.gather(-1, places), rtol=1e-6, atol=1e-7
    )


# --- capacity -------------------------------------------------------------------------------------


def room_by_hand(
    experts: Tensor, weights: Tensor, sequence_of: Tensor, capacities: list[int], drop: str
) -> list[list[bool]]:
    """Let the tokens of each queue in one by one."""
    kept = [[False] * experts.shape[1] for _ in experts]
    queues: dict[tuple[int, int], list[tuple[float, int, int]]] = {}
    for token, row in enumerate(experts.tolist()):
        for slot, expert in enumerate(row):
            rank = -float(weights[token, slot]) if drop == "score" else 0.0
            queues.setdefault((int(sequence_of[token]), expert), []).append((rank, token, slot))
    for (sequence, _), queue in queues.items():
        for _, token, slot in sorted(queue)[: capacities[sequence]]:
            kept[token][slot] = True
    return kept


@pytest.mark.parametrize("drop", ["score", "position"])
def test_an_expert_keeps_what_it_prefers_of_each_sequence(drop: Any) -> None:
    sizes = Experts(6, 2, 1, capacity_factor=0.7, drop=drop)
    lengths = [9, 1, 20, 0, 14]
    routing = route(logits_of(sum(lengths), 6).round(), sizes)  # rounded: many weights are equal
    capacities = [sizes.capacity(length) or 0 for length in lengths]
    sequence_of = torch.arange(5).repeat_interleave(torch.tensor(lengths))
    kept = within_capacity(routing.experts, routing.weights, sequence_of, torch.tensor(capacities), sizes)
    expected = room_by_hand(routing.experts, routing.weights, sequence_of, capacities, drop)
    assert kept.tolist() == expected
    assert 0 < int(kept.sum()) < kept.numel()


def test_room_for_all_drops_none() -> None:
    sizes = Experts(6, 2, 1, capacity_factor=6.0)
    routing = route(torch.zeros(8, 6), sizes)  # all to experts 0 and 1
    sequence_of = torch.zeros(8, dtype=torch.int64)
    capacity = sizes.capacity(8)
    assert within_capacity(
        routing.experts, routing.weights, sequence_of, torch.tensor([capacity]), sizes
    ).all()
