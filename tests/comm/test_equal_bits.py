"""Every all-reduce leaves the same bits on all ranks, also where the order of operands matters."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
import torch

from hpcpar.algorithms.registry import ALGORITHMS
from hpcpar.comm import Communicator, run_loopback
from hpcpar.comm.reductions import OPS, require_op
from hpcpar.errors import OperationError
from hpcpar.transport.buffers import DTYPES

COUNTS = (1, 21, 70)
"""One number, a vector with a remainder, and more float16 elements than NumPy is given."""
SPECIAL = (0.0, -0.0, np.inf, -np.inf, 1.1, -1.3, 7.7)


def is_defined(op: str, dtype: str) -> bool:
    try:
        require_op(op, dtype)
    except OperationError:
        return False
    return True


def values(count: int, dtype: str, rank: int) -> torch.Tensor | np.ndarray:
    """Zeros, infinities and NaNs of both signs, each NaN with its rank's payload, in all combinations."""
    if dtype == "bool":
        return np.arange(count) % (rank + 2) == 0
    if dtype not in ("bfloat16", "float16", "float32", "float64", "complex64", "complex128"):
        return (np.arange(count) * (rank + 3) % 100).astype(dtype)
    wide = np.float32 if dtype in ("bfloat16", "complex64", "float16") else np.float64
    bits, quiet, payload = (
        (np.uint32, 0x7FC00000, 1 << 16) if wide is np.float32 else (np.uint64, 0x7FF8 << 48, 1 << 45)
    )
    nans = np.array([quiet + (rank + 1) * payload], bits).view(wide)
    pool = np.concatenate([np.array(SPECIAL, wide), nans, -nans])
    picked = [pool[(index * (rank + 2) + 5 * rank) % len(pool)] for index in range(2 * count)]
    if dtype.startswith("complex"):
        return np.array(picked, wide).view(dtype)
    floats = np.array(picked[:count], wide)
    return torch.from_numpy(floats).bfloat16() if dtype == "bfloat16" else floats.astype(dtype)


def bits_of(result: torch.Tensor | np.ndarray) -> bytes:
    return (result.view(torch.uint8).numpy() if isinstance(result, torch.Tensor) else result).tobytes()


CASES = [(op, dtype) for op in OPS for dtype in DTYPES if is_defined(op, dtype)]


NODES = {2: None, 3: [0, 0, 1], 4: None, 5: [0, 0, 1, 1, 2], 8: None, 6: [0, 0, 1, 1, 2, 2]}
"""Numbers of ranks, and the node of each."""


@pytest.mark.parametrize("shared_memory", [False, True])
def test_all_ranks_hold_the_same_bits_after_every_allreduce(shared_memory: bool) -> None:
    algorithms = (None, *ALGORITHMS["allreduce"])

    def body(comm: Communicator, third: int) -> list[tuple[tuple[object, ...], bytes]]:
        found = []
        # Each algorithm meets each case twice, once on nodes; counts and a result elsewhere take turns.
        turns = itertools.cycle(itertools.product(COUNTS, (False, True)))
        cases = [
            (algorithm, *case)
            for number, algorithm in enumerate(algorithms)
            for case in CASES[(third + number) % 3 :: 3]
        ]
        for algorithm, op, dtype in cases:
            count, out = next(turns)
            mine = values(count, dtype, comm.rank)
            target = torch.zeros_like(mine) if isinstance(mine, torch.Tensor) else np.zeros_like(mine)
            result = comm.allreduce(mine, op, algorithm=algorithm, out=target if out else None)
            found.append(((algorithm, op, dtype, count, out), bits_of(result)))
        return found

    for number, (size, nodes) in enumerate(NODES.items()):
        third = partial(body, third=number % 3)
        by_rank = run_loopback(size, third, nodes=nodes, shared_memory=shared_memory)
        for cases in zip(*by_rank, strict=True):
            assert len({bits for _, bits in cases}) == 1, f"{size} ranks: {cases[0][0]}"


@pytest.mark.parametrize("algorithm", ["recursive_doubling", "one_shot"])
def test_the_lower_rank_is_the_left_operand(algorithm: str) -> None:
    def numbers(rank: int) -> tuple[np.ndarray, np.ndarray]:
        return np.exp(1j * (rank + 1) * np.arange(1.0, 9.0)) * 1.1, np.array([0.0, -0.0]) * (-1.0) ** rank

    def body(comm: Communicator) -> bytes:
        factors, zeros = numbers(comm.rank)
        product = comm.allreduce(factors, "product", algorithm=algorithm)
        return bytes(product.tobytes() + comm.allreduce(zeros, "max", algorithm=algorithm).tobytes())

    (factors, zeros), (others, other_zeros) = numbers(0), numbers(1)
    expected = (factors * others).tobytes() + np.maximum(zeros, other_zeros).tobytes()
    assert run_loopback(2, body) == [expected] * 2
