"""Auxiliary losses equal their definitions and Hugging Face's, and join backward where they are attached."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hpcpar.expert_parallel.losses import attach, balance_loss, counts_of, z_loss
from hpcpar.expert_parallel.routing import route
from hpcpar.planner.experts import Experts


def logits_of(tokens: int, experts: int) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, experts, generator=generator, dtype=torch.float64)


def switch_loss(logits: Tensor, sizes: Experts) -> Tensor:
    """E/(k·T²) Σ_e count_e Σ_t p_te, token by token."""
    tokens = len(logits)
    counts, shares = [0] * sizes.count, [torch.zeros((), dtype=torch.float64)] * sizes.count
    for row in logits:
        scores = row.softmax(0) if sizes.score == "softmax" else row.sigmoid()
        for expert in scores.topk(sizes.per_token).indices.tolist():
            counts[expert] += 1
        for expert in range(sizes.count):
            shares[expert] = shares[expert] + scores[expert] / scores.sum()
    total = sum((count * share for count, share in zip(counts, shares, strict=True)), torch.zeros(()))
    return sizes.count / (sizes.per_token * tokens**2) * total


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_balance_loss_equals_its_definition(score: Any) -> None:
    sizes = Experts(6, 2, 1, score=score)
    logits, reference = (logits_of(30, 6).requires_grad_() for _ in range(2))
    routing = route(logits, sizes)
    ours = balance_loss(routing, sizes, counts_of(routing.experts, 6), 30)
    expected = switch_loss(reference, sizes)
    torch.testing.assert_close(ours, expected, rtol=1e-13, atol=0)
    ours.backward()
    expected.backward()
    torch.testing.assert_close(logits.grad, reference.grad, rtol=1e-11, atol=1e-15)


def test_the_loss_of_sequences_is_the_mean_of_theirs() -> None:
    sizes = Experts(6, 2, 1)
    logits = logits_of(30, 6)
    routing = route(logits, sizes)
    lengths = [10, 4, 16]
    sequence_of = torch.arange(3).repeat_interleave(torch.tensor(lengths))
    counts = counts_of(routing.experts, 6, sequence_of, 3)
    ours = balance_loss(routing, sizes, counts, 30, sequence_of)
    expected = sum(len(part) / 30 * switch_loss(part, sizes) for part in logits.split(lengths))
    torch.testing.assert_close(ours, expected, rtol=1e-13, atol=0)


def test_shares_of_ranks_add_up_to_the_loss_of_all_tokens() -> None:
    sizes = Experts(6, 2, 1)
    logits = logits_of(30, 6)
    counts = counts_of(route(logits, sizes).experts, 6)
    shares = [balance_loss(route(part, sizes), sizes, counts, 30) for part in logits.split([7, 0, 23])]
    torch.testing.assert_close(sum(shares), switch_loss(logits, sizes), rtol=1e-13, atol=0)
    parts = [z_loss(part, 30) for part in logits.split([7, 0, 23])]
    torch.testing.assert_close(sum(parts), z_loss(logits, 30), rtol=1e-13, atol=0)


def test_hugging_faces_loss_is_k_times_ours() -> None:
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    sizes = Experts(6, 3, 1)
    logits = logits_of(50, 6)
    routing = route(logits, sizes)
    ours = balance_loss(routing, sizes, counts_of(routing.experts, 6), 50)
    theirs = mixtral.load_balancing_loss_func((logits,), 6, 3)
    torch.testing.assert_close(3 * ours.float(), theirs, rtol=1e-6, atol=0)


def test_perfect_balance_has_a_loss_of_one() -> None:
    sizes = Experts(4, 2, 1)
    logits = torch.zeros(2, 4, dtype=torch.float64)
    logits[0, :2] = logits[1, 2:] = 1e-9
    routing = route(logits, sizes)
    counts = counts_of(routing.experts, 4)
    assert counts.tolist() == [[1, 1, 1, 1]]
    assert float(balance_loss(routing, sizes, counts, 2)) == pytest.approx(1, abs=1e-8)


def test_the_z_loss_equals_its_definition() -> None:
    logits = logits_of(9, 5)
    expected = sum(float(row.exp().sum().log()) ** 2 for row in logits) / 9
    assert float(z_loss(logits, 9)) == pytest.approx(expected, rel=1e-13)


def test_no_tokens_have_no_loss() -> None:
    sizes = Experts(4, 2, 1)
    routing = route(torch.zeros(0, 4, requires_grad=True), sizes)
    counts = counts_of(routing.experts, 4)
    assert float(balance_loss(routing, sizes, counts, 5)) == float(z_loss(routing.scores, 5)) == 0.0


@pytest.mark.parametrize("scale", [1.0, 12.0, torch.tensor(12.0)])
def test_an_attached_loss_gets_its_scale_whatever_gradient_comes_back(scale: float | Tensor) -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    for weight in (1.0, 100.0, 0.0):
        x.grad = None
        attached = attach(2 * x, (x**3).sum(), scale)
        assert torch.equal(attached, 2 * x)
        (weight * attached.sum()).backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, 2 * weight + 3 * x.detach() ** 2 * float(scale))
