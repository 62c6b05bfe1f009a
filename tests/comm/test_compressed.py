"""All-reduces that travel as 16 bits: half the bytes, the same bits everywhere, and the stated error."""

from __future__ import annotations

from itertools import product
from math import ceil, log2

import numpy as np
import pytest
import torch

from hpcpar.algorithms.registry import ALGORITHMS
from hpcpar.comm import Communicator, run_loopback
from hpcpar.comm.wire import WIRES
from hpcpar.errors import MismatchError, OperationError

UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
SIZES = [2, 3, 4]


def values(rank, count, dtype="float32"):
    return np.random.default_rng(rank).standard_normal(count).astype(dtype)


def hops(algorithm, size):
    """How often a partial sum is rounded, at most."""
    if algorithm == "direct":
        return 1
    if algorithm in (None, "recursive_doubling", "binomial", "rabenseifner"):  # None: small arrays
        return ceil(log2(size))
    return size - 1


def compressed(comm):
    """(what, largest error in units of what is allowed, digest of the bits) for every algorithm."""
    cases = product(WIRES, ("float32", "float64"), ("sum", "average"), (0, 1, 1001), (1.0, 0.3))
    for wire, dtype, op, count, factor in cases:
        inputs = [values(rank, count, dtype).astype(np.float64) for rank in range(comm.size)]
        divisor = comm.size if op == "average" else 1
        truth = np.sum(inputs, axis=0) * factor / divisor
        magnitude = np.sum(np.abs(inputs), axis=0) * abs(factor) / divisor
        for algorithm in (None, *ALGORITHMS["allreduce"]):
            roundings = hops(algorithm, comm.size) + 1
            spacing = (comm.size + roundings) * 2.0**-25 if wire == "float16" else 0.0
            # 2^-22: factor and division are of float32, and rounded as such
            bound = ((1 + UNIT[wire]) ** roundings - 1 + 2.0**-22) * magnitude + spacing + 1e-300
            mine = values(comm.rank, count, dtype)
            out = np.empty_like(mine)
            options = {"algorithm": algorithm, "compression": wire, "prescale_factor": factor}
            comm.allreduce(mine, op, out=out, **options)
            same = np.array_equal(mine, values(comm.rank, count, dtype))
            comm.allreduce(mine, op, **options)
            error = float(np.max(np.abs(out - truth) / bound, initial=0.0))
            what = f"{op} of {count} {dtype} × {factor} as {wire} by {algorithm}"
            yield what, error, same and mine.tobytes() == out.tobytes(), out.tobytes()


def assert_all(by_rank):
    for of_ranks in zip(*by_rank, strict=True):
        for what, error, same, bits in of_ranks:
            assert error <= 1.0, what
            assert same, what
            assert bits == of_ranks[0][3], what


@pytest.mark.parametrize("size", SIZES)
def test_the_error_is_within_the_stated_bound_and_the_bits_are_the_same_everywhere(size):
    assert_all(run_loopback(size, lambda comm: list(compressed(comm))))


@pytest.mark.mpi
def test_over_mpi_the_error_is_within_the_stated_bound_and_the_bits_are_the_same(world):
    if world.size > 1:
        comm = world.unchecked("compression")
        assert_all(comm.allgather_object(list(compressed(comm))))


def test_a_rank_alone_loses_nothing():
    mine = values(0, 100)
    found = Communicator.alone().allreduce(mine.copy(), "average", compression="bfloat16")
    np.testing.assert_array_equal(found, mine)


@pytest.mark.parametrize(("size", "wire"), list(product([2, 3, 4, 7], WIRES)))
@pytest.mark.parametrize(("dtype", "share"), [("float32", 2), ("float64", 4)])
def test_the_account_shows_half_of_the_bytes_of_float32_and_a_quarter_of_float64(size, wire, dtype, share):
    count = 840  # divides by every size

    def work(comm):
        values = np.ones(count, dtype)
        comm.allreduce(values, algorithm="ring", compression=wire)
        return comm.traffic.nbytes_sent()

    whole = 2 * (size - 1) * values(0, count, dtype).nbytes // size
    assert run_loopback(size, work) == [whole // share] * size


def test_a_sum_beyond_65504_is_infinite_as_float16_unless_it_is_prescaled():
    def work(comm):
        mine = np.full(3, 40000.0, dtype=np.float32)
        return [
            comm.allreduce(mine.copy(), compression="float16").tolist(),
            comm.allreduce(mine.copy(), "average", compression="float16", prescale_factor=0.5).tolist(),
            comm.allreduce(mine, compression="float16", prescale_factor=0.25, postscale_factor=4.0).tolist(),
            comm.allreduce(np.full(3, 1e30, np.float32), compression="bfloat16")[0] > 1.9e30,
        ]

    assert run_loopback(2, work) == [[[np.inf] * 3, [20000.0] * 3, [80000.0] * 3, True]] * 2


def test_tensors_of_any_layout_get_the_result_and_many_may_be_under_way():
    def work(comm):
        tensors = [torch.full((3, 4), float(n + comm.rank)) for n in range(6)]
        handles = [comm.start_allreduce(t.t(), compression="bfloat16") for t in tensors]
        for handle in reversed(handles):
            handle.wait()
        return [t.unique().tolist() for t in tensors]

    assert run_loopback(2, work) == [[[2.0 * n + 1.0] for n in range(6)]] * 2


def test_extremes_are_the_rounded_extremes():
    def work(comm):
        return comm.allreduce(
            np.array([comm.rank + 1.0 + 2.0**-20], np.float32), "max", compression="float16"
        )

    assert [found.tolist() for found in run_loopback(3, work)] == [[3.0]] * 3


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.allreduce(np.ones(2, np.float16), compression="float16"), "Leave it as it is"),
        (lambda c: c.allreduce(np.ones(2, int), compression="bfloat16"), "int64 cannot travel as bfloat16"),
        (lambda c: c.allreduce(np.ones(2), compression="fp8"), "known are float16, bfloat16"),
    ],
)
def test_what_cannot_be_compressed_is_refused(call, words):
    with pytest.raises(OperationError, match=words):
        call(Communicator.alone())


def test_ranks_with_different_compression_are_told_in_checked_mode():
    def work(comm):
        with pytest.raises(MismatchError, match="compression=float16"):
            comm.allreduce(np.ones(4), compression="float16" if comm.rank else None)
        return True

    assert run_loopback(2, work, check=True) == [True, True]


@pytest.mark.mpi
def test_mpi_sums_no_16_bit_numbers_of_ours(world):
    if world.size > 1:
        with pytest.raises(OperationError, match="MPI knows no sum of bfloat16"):
            world.allreduce(np.ones(2), algorithm="native", compression="bfloat16")
