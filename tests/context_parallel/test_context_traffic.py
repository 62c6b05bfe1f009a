"""Values that travel, counted from the plan, compared with the account of the communicators."""

from __future__ import annotations

import pytest
import torch

from hpcpar.comm import Communicator, run_loopback
from hpcpar.context_parallel import METHODS, ContextParallel, Mask, Method
from hpcpar.context_parallel.context_plan import balanced
from hpcpar.context_parallel.context_traffic import HeadSizes, traffic

MASKS = [Mask(97), Mask(97, causal=False, window=9), Mask(97, documents=(13, 30, 1, 53))]


@pytest.mark.parametrize("mask", MASKS, ids=["causal", "window", "documents"])
@pytest.mark.parametrize("key_heads", [8, 2, 1])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_all_ranks_send_what_the_plan_says(method: Method, keep: bool, key_heads: int, mask: Mask) -> None:
    size, heads = 4, HeadSizes(8, key_heads, 16)
    inner = 4 if method == "ulysses" else 2 if "+" in method else 1

    def sent(comm: Communicator) -> int:
        cp = ContextParallel(comm, method, inner=inner if "+" in method else None, keep=keep)
        with cp.using(mask):
            count = len(cp.places())
            shapes = [(1, number, count, heads.size) for number in (8, key_heads, key_heads)]
            inputs = [torch.ones(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
            before = sum(level.traffic.nbytes_sent() for level in (cp.inner, cp.outer))
            cp.attention(*inputs).sum().backward()
            return (sum(level.traffic.nbytes_sent() for level in (cp.inner, cp.outer)) - before) // 8

    counted = run_loopback(size, sent)
    told = traffic(balanced(mask, size // inner), method, heads, inner=inner, keep=keep).of_ranks
    assert sum(counted) == sum(told)
    if method != "allgather":  # other algorithms than the ring give each rank other parts of as many
        assert counted == list(told)


def test_two_ranks_drawn_by_hand() -> None:
    """Rank 0 has tokens 0 1 6 7 and rank 1 has 2 3 4 5, of which rank 0 needs all, and rank 1 half of 0's."""
    there, back = traffic(balanced(Mask(8), 2), "exchange", HeadSizes(1, 1, 1))
    assert there == ((0, 2 * 2), (2 * 4, 0))
    # Both send the same again, and the gradients of what they were sent.
    assert back == ((0, 2 * 2 + 2 * 4), (2 * 4 + 2 * 2, 0))
