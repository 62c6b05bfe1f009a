"""Collectives of activations, which lie in new memory in each step."""

from __future__ import annotations

import pytest
import torch

from hpcpar.autograd.dim_collectives import LARGEST_STAGED_SUM_NBYTES, summed
from hpcpar.comm import Communicator, run_loopback


@pytest.mark.parametrize("op", ["sum", "max"])
def test_small_sums_of_new_tensors_are_compiled_once_and_leave_them_alone(op: str) -> None:
    def body(comm: Communicator) -> tuple[list[torch.Tensor], list[int]]:
        given = [torch.full((2, 3), float(comm.rank + step)) for step in range(5)]
        found, compiled = [], []
        for tensor in given:
            found.append(summed(tensor, comm, op=op))
            compiled.append(len(comm._calls.cache))
        assert [tensor[0, 0].item() for tensor in given] == [comm.rank + step for step in range(5)]
        return found, compiled

    for found, compiled in run_loopback(3, body):
        expected = [3.0 * step + 3 if op == "sum" else 2.0 + step for step in range(5)]
        assert [tensor.tolist() for tensor in found] == [[[each] * 3] * 2 for each in expected]
        assert compiled == [1] * 5


@pytest.mark.parametrize("consume", [False, True])
def test_a_large_sum_takes_no_scratch_memory(consume: bool) -> None:
    def body(comm: Communicator) -> bool:
        tensor = torch.full((LARGEST_STAGED_SUM_NBYTES // 4 + 1,), comm.rank + 1.0)
        total = summed(tensor, comm, consume=consume)
        assert total.unique().tolist() == [3.0]
        return total.data_ptr() == tensor.data_ptr()

    assert run_loopback(2, body) == [consume] * 2
