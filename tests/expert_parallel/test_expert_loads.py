from __future__ import annotations

import math

import pytest
import torch

from hpcpar.expert_parallel.expert_loads import Balance, updated_bias
from hpcpar.expert_parallel.losses import counts_of
from hpcpar.expert_parallel.routing import route
from hpcpar.planner.experts import Experts


def test_balance_of_a_case_by_hand() -> None:
    balance = Balance.of([6, 2, 0, 0], dropped=2)
    assert balance.max_over_mean == 3.0
    assert balance.variation == pytest.approx(math.sqrt((16 + 0 + 4 + 4) / 4) / 2)
    assert balance.entropy == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4))
    assert (balance.idle, balance.dropped) == (2, 0.25)


def test_equal_loads_are_perfect_balance() -> None:
    assert Balance.of([5, 5, 5]) == Balance(1.0, 0.0, pytest.approx(1.0), 0, 0.0)


def test_all_tokens_on_one_expert() -> None:
    assert Balance.of([0, 9, 0]) == Balance(3.0, pytest.approx(math.sqrt(2)), 0.0, 2, 0.0)


@pytest.mark.parametrize("counts", [[7], [0, 0]])
def test_a_single_expert_or_no_tokens_divide_by_no_zero(counts: list[int]) -> None:
    balance = Balance.of(counts)
    assert (balance.max_over_mean, balance.entropy) == (1.0, 1.0)


def test_biases_rise_below_the_mean_and_fall_above_it() -> None:
    bias = updated_bias(torch.tensor([0.5, 0.0, 0.0]), torch.tensor([4, 2, 3]), 0.25)
    assert bias.tolist() == [0.25, 0.25, 0.0]


def test_biases_even_out_a_router_that_prefers_some_experts() -> None:
    sizes = Experts(8, 2, 1, score="sigmoid")
    generator = torch.Generator().manual_seed(0)
    liking = torch.linspace(-1, 1, 8)
    bias = torch.zeros(8)
    factors = []
    for _ in range(300):
        logits = torch.randn(256, 8, generator=generator) + liking
        counts = counts_of(route(logits, sizes, bias).experts, 8)[0]
        factors.append(Balance.of(counts.tolist()).max_over_mean)
        bias = updated_bias(bias, counts, 0.005)
    assert factors[0] > 1.7
    assert max(factors[-50:]) < 1.35
