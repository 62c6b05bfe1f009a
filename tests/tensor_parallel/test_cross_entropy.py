"""The vocabulary-parallel loss is torch's on all logits, and moves 3 values a token."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import ConfigError, MismatchError, OperationError
from hpcpar.tensor_parallel import vocabulary_parallel_cross_entropy, whole_logits
from hpcpar.tensor_parallel.split import padded_length, split_evenly
from tests.grid import pairwise

SHAPE = (3, 8)


def logits(vocabulary: int, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*SHAPE, vocabulary, dtype=torch.float64, generator=generator) * scale


def targets(vocabulary: int) -> Tensor:
    drawn = torch.randint(vocabulary, SHAPE, generator=torch.Generator().manual_seed(2))
    drawn[0, 2] = drawn[1, 1] = -100
    return drawn


def own(whole: Tensor, comm: Communicator) -> Tensor:
    """This rank's part of whole logits; padding is not zero, and must not count."""
    vocabulary = whole.shape[-1]
    split = split_evenly(vocabulary, comm.size, dim=2, padded=padded_length(vocabulary, comm.size))
    part = split.shard(whole, comm.rank)
    part[..., split.held(comm.rank) :] = 1e3
    return part.requires_grad_()


@pytest.mark.parametrize(
    ("size", "vocabulary", "reduction", "smoothing", "z_loss"),
    pairwise([1, 2, 3, 4], [24, 23, 2], ["mean", "sum", "none"], [0.0, 0.2], [0.0, 0.01]),
)
def test_loss_and_gradient_are_those_of_all_logits(
    size: int, vocabulary: int, reduction: str, smoothing: float, z_loss: float
) -> None:
    truth = logits(vocabulary).requires_grad_()
    goals = targets(vocabulary)
    expected = functional.cross_entropy(
        truth.flatten(0, 1), goals.flatten(), label_smoothing=smoothing, reduction="none", ignore_index=-100
    ).view(SHAPE)
    expected = expected + z_loss * (truth.logsumexp(-1).square() * (goals != -100))
    if reduction != "none":
        expected = expected.sum() / (1 if reduction == "sum" else (goals != -100).sum())
    weights = torch.linspace(0.5, 2.0, expected.numel(), dtype=torch.float64).view(expected.shape)
    (expected * weights).sum().backward()  # type: ignore[no-untyped-call]

    def found(comm: Communicator) -> tuple[Tensor, Tensor]:
        part = own(logits(vocabulary), comm)
        loss = vocabulary_parallel_cross_entropy(
            part,
            goals,
            vocabulary,
            comm,
            reduction=reduction,  # type: ignore[arg-type]
            label_smoothing=smoothing,
            z_loss=z_loss,
        )
        (loss * weights).sum().backward()  # type: ignore[no-untyped-call]
        assert part.grad is not None
        return loss.detach(), whole_logits(part.grad, vocabulary, comm)

    assert truth.grad is not None
    for loss, gradient in run_loopback(size, found):
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, truth.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [1e4, 1e-8])
def test_large_and_tiny_logits_lose_nothing(size: int, scale: float) -> None:
    expected = functional.cross_entropy(
        logits(24, scale).flatten(0, 1), targets(24).flatten(), ignore_index=-100
    )

    def found(comm: Communicator) -> Tensor:
        return vocabulary_parallel_cross_entropy(own(logits(24, scale), comm), targets(24), 24, comm)

    for loss in run_loopback(size, found):
        torch.testing.assert_close(loss.detach(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_logit_that_is_no_number_shows_on_every_rank(size: int, bad: float) -> None:
    whole = logits(24)
    whole[1, 3, 5] = bad

    def found(comm: Communicator) -> Tensor:
        return vocabulary_parallel_cross_entropy(own(whole, comm), targets(24), 24, comm)

    assert all(not loss.isfinite() for loss in run_loopback(size, found))


def test_half_precision_is_widened() -> None:
    def found(comm: Communicator) -> torch.dtype:
        part = own(logits(24), comm).detach().bfloat16()
        return vocabulary_parallel_cross_entropy(part, targets(24), 24, comm).dtype

    assert run_loopback(2, found) == [torch.float32] * 2


@pytest.mark.parametrize(("smoothing", "values"), [(0.0, 3), (0.1, 4)])
def test_three_values_a_token_travel_not_the_vocabulary(smoothing: float, values: int) -> None:
    """Between 2 ranks an all-reduce of n values sends n from each."""

    def sent(comm: Communicator) -> int:
        part = own(logits(24), comm)
        comm.traffic.reset()
        loss = vocabulary_parallel_cross_entropy(part, targets(24), 24, comm, label_smoothing=smoothing)
        loss.backward()  # type: ignore[no-untyped-call]
        return comm.traffic.nbytes_sent()

    tokens = math.prod(SHAPE)
    assert run_loopback(2, sent) == [values * tokens * 8] * 2


def test_what_does_not_fit_is_named() -> None:
    def check(comm: Communicator) -> None:
        part = own(logits(23), comm)
        with pytest.raises(
            MismatchError, match=r"of a vocabulary of 30 on 2 ranks, logits must be \[B, S, 15\]"
        ):
            vocabulary_parallel_cross_entropy(part, targets(23), 30, comm)
        with pytest.raises(MismatchError, match="target 23 is outside a vocabulary of 23"):
            vocabulary_parallel_cross_entropy(part, torch.full(SHAPE, 23), 23, comm)
        with pytest.raises(ConfigError, match=r"label_smoothing=1.5"):
            vocabulary_parallel_cross_entropy(part, targets(23), 23, comm, label_smoothing=1.5)
        with pytest.raises(ConfigError, match=r"reduction='average'; there are 'mean', 'sum' and 'none'"):
            vocabulary_parallel_cross_entropy(part, targets(23), 23, comm, reduction="average")  # type: ignore[arg-type]
        loss = vocabulary_parallel_cross_entropy(part, targets(23), 23, comm)
        with pytest.raises(OperationError, match=r"cannot be differentiated again .*through a vocabulary-"):
            torch.autograd.grad(loss, part, create_graph=True)

    run_loopback(2, check)
