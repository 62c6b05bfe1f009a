"""Attention whose heads are divided is the serial one, trained; also with heads that ranks share."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import LayoutError
from hpcpar.tensor_parallel import (
    Dropout,
    ParallelSelfAttention,
    RandomStreams,
    TensorParallel,
    causal_attention,
)
from tests.grid import pairwise
from tests.tensor_parallel.conftest import SIZES, WAYS


class Written(nn.Module):
    """Grouped-query attention written out, a head at a time."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_size: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(hidden, heads * head_size)
        self.kv_proj = nn.Linear(hidden, 2 * kv_heads * head_size)
        self.o_proj = nn.Linear(heads * head_size, hidden)
        self.heads, self.kv_heads, self.head_size = heads, kv_heads, head_size

    def forward(self, x: Tensor) -> Tensor:
        queries = self.q_proj(x).split(self.head_size, -1)
        both = self.kv_proj(x).split(self.head_size, -1)
        later = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        mixed = []
        for head in range(self.heads):
            shared = head // (self.heads // self.kv_heads)
            scores = queries[head] @ both[shared].mT / math.sqrt(self.head_size)
            mixed.append(scores.masked_fill(later, -math.inf).softmax(-1) @ both[self.kv_heads + shared])
        output: Tensor = self.o_proj(torch.cat(mixed, -1))
        return output


def hidden_states() -> Tensor:
    return torch.randn(2, 12, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("size", "way", "kv_heads", "selective"), pairwise(SIZES, WAYS, [12, 2, 1], [False, True])
)
def test_it_is_the_serial_attention(
    compare: Callable[..., None], size: int, way: str, kv_heads: int, selective: bool
) -> None:
    if kv_heads % size and size % kv_heads:
        kv_heads = 1  # two heads cannot be shared by three ranks
    compare(
        size,
        Written(10, 12, kv_heads, 3),
        lambda tp: ParallelSelfAttention(10, 12, tp, kv_heads=kv_heads, head_size=3, selective=selective),
        hidden_states(),
        way,
        "sgd",
    )


def test_dropped_shares_differ_between_ranks_and_average_out() -> None:
    """The mean of many draws comes near the result without dropout; ranks drop different shares."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 4, dtype=torch.float64, generator=generator) for _ in range(3))
    truth = causal_attention(q, k, v)

    def drawn(comm: Communicator) -> Tensor:
        dropout = Dropout(0.5, RandomStreams(1, comm.rank), "different")
        return torch.stack([causal_attention(q, k, v, dropout) for _ in range(2000)])

    one, other = run_loopback(2, drawn)
    assert not torch.equal(one[0], other[0])
    for draws in (one, other):
        error = draws.std(0) / math.sqrt(len(draws))
        assert bool(((draws.mean(0) - truth).abs() <= 5 * error + 1e-12).all())
    assert torch.equal(one, run_loopback(2, drawn)[0])


def test_what_does_not_fit_is_named() -> None:
    def check(comm: Communicator) -> None:
        tp = TensorParallel(comm)
        with pytest.raises(
            LayoutError, match=r"heads=6 does not divide among tp=4 ranks; tp=2 or tp=3 or tp=6"
        ):
            ParallelSelfAttention(12, 6, tp)
        with pytest.raises(LayoutError, match=r"kv_heads=3 neither divides"):
            ParallelSelfAttention(12, 12, tp, kv_heads=3)
        with pytest.raises(LayoutError, match=r"hidden_size=10 does not divide among heads=4"):
            ParallelSelfAttention(10, 4, tp)

    run_loopback(4, check)
