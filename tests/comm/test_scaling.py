"""Factors before and after a reduction: what they give, how it rounds, and when one stands for both."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from hpcpar import partition
from hpcpar.algorithms.registry import ALGORITHMS
from hpcpar.comm import Communicator, run_loopback
from hpcpar.comm.scaling import Factors, Rescaling
from hpcpar.errors import MismatchError, OperationError

SIZES = [1, 2, 3, 4]
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
FACTORS = [(1.0, 1.0), (0.25, 1.0), (1.0, 3.0), (0.3, 7.0), (-2.0, 0.1), (0.0, 1.0), (1e-30, 1e25)]


def values(rank, count, dtype):
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return drawn.to(getattr(torch, dtype))


def scaled_sums(comm):
    """(what, largest error in units of what is allowed) of every type, op, factor and collective."""
    cases = product(UNIT, ("sum", "average"), FACTORS, (0, 1, 100))
    for dtype, op, (prescale, postscale), count in cases:
        if dtype == "float16" and prescale == 1e-30:
            continue  # nothing of it is left there
        inputs = [values(rank, count, dtype) for rank in range(comm.size)]
        divisor = comm.size if op == "average" else 1
        total = torch.stack([x.double() for x in inputs]).sum(0) * prescale * postscale / divisor
        magnitude = (
            torch.stack([x.double().abs() for x in inputs]).sum(0) * abs(prescale * postscale) / divisor
        )
        # One rounding for prescale, one for each sum, up to two for what follows, and float16's near zero.
        spacing = 2.0**-24 * abs(postscale) * comm.size if dtype == "float16" else 0.0
        allowed = (comm.size + 4) * UNIT[dtype] * magnitude + spacing + 1e-300
        start, stop = partition.bounds(count, comm.size)[comm.rank]
        factors = {"prescale_factor": prescale, "postscale_factor": postscale}
        found = {
            "in place": (comm.allreduce(inputs[comm.rank].clone(), op, **factors), slice(None)),
            "out": (
                comm.allreduce(inputs[comm.rank], op, out=inputs[comm.rank].clone(), **factors),
                slice(None),
            ),
            "scatter": (comm.reduce_scatter(inputs[comm.rank].clone(), op, **factors), slice(start, stop)),
            "scatter out": (
                comm.reduce_scatter(
                    inputs[comm.rank], op, out=inputs[comm.rank][start:stop].clone(), **factors
                ),
                slice(start, stop),
            ),
        }
        untouched = torch.equal(inputs[comm.rank], values(comm.rank, count, dtype))
        for what, (result, part) in found.items():
            ratios = (result.double() - total[part]).abs() / allowed[part]
            worst = ratios.max().item() if len(ratios) else 0.0
            yield f"{what} {op} of {count} {dtype} by {prescale}, {postscale}", worst, untouched


def assert_allowed(checks):
    for what, error, untouched in checks:
        assert error <= 1.0, what
        assert untouched, what


@pytest.mark.parametrize("size", SIZES)
def test_scaled_sums_are_within_a_few_roundings_of_the_truth(size):
    for checks in run_loopback(size, lambda comm: list(scaled_sums(comm))):
        assert_allowed(checks)


@pytest.mark.mpi
def test_scaled_sums_over_mpi_are_within_a_few_roundings_of_the_truth(world):
    assert_allowed(list(scaled_sums(world.unchecked("scaling"))))


@pytest.mark.mpi
def test_what_is_left_to_mpi_is_scaled_as_well(world):
    mine = np.full(5, float(world.rank + 1))
    found = world.allreduce(
        mine, "average", out=np.empty(5), algorithm="native", prescale_factor=0.5, postscale_factor=4.0
    )
    shard = world.reduce_scatter(np.ones(world.size, int), algorithm="native", prescale_factor=3.0)
    np.testing.assert_array_equal(found, (world.size + 1.0))
    np.testing.assert_array_equal(shard, 3 * world.size)


@pytest.mark.parametrize("dtype", UNIT)
def test_all_ranks_hold_identical_bits_by_every_algorithm(dtype):
    def work(comm):
        return [
            comm.allreduce(
                values(comm.rank, 501, dtype),
                "average",
                algorithm=name,
                prescale_factor=0.3,
                postscale_factor=1.7,
            )
            .view(torch.uint8)
            .tolist()
            for name in ALGORITHMS["allreduce"]
        ]

    by_rank = run_loopback(3, work)
    assert all(bits == by_rank[0] for bits in by_rank)


def test_repeated_scaled_calls_on_one_buffer_are_not_taken_for_plain_ones():
    def work(comm):
        buffer, seen = np.empty(8), []
        for factor in (1.0, 1.0, 1.0, 2.0, 1.0, 2.0, 3.0, 1.0):
            buffer[:] = comm.rank + 1.0
            comm.allreduce(buffer, postscale_factor=factor)
            seen.append(buffer[0])
            buffer[:] = comm.rank + 1.0
            seen.append(comm.reduce_scatter(buffer, prescale_factor=factor)[0])
        return seen

    for seen in run_loopback(2, work):
        assert seen == [3.0 * factor for factor in (1, 1, 1, 2, 1, 2, 3, 1) for _ in range(2)]


def test_prescale_keeps_a_sum_of_float16_inside_its_range():
    def work(comm):
        mine = np.full(3, 60000.0, dtype=np.float16)
        beyond = comm.allreduce(mine.copy(), "average", algorithm="ring")
        inside = comm.allreduce(mine, "average", algorithm="ring", prescale_factor=0.25, postscale_factor=4.0)
        return beyond.tolist(), inside.tolist()

    assert run_loopback(2, work) == [([np.inf] * 3, [60000.0] * 3)] * 2


def test_integers_are_truncated_before_and_after_as_by_horovod():
    def work(comm):
        mine = np.array([3, -3, 7], dtype=np.int32)
        return comm.allreduce(mine, prescale_factor=0.5, postscale_factor=1.5).tolist()

    # 1, -1, 3 on each of three ranks; 3, -3, 9 in sum; 4.5, -4.5, 13.5
    assert run_loopback(3, work) == [[4, -4, 13]] * 3


def test_extremes_are_of_the_scaled_numbers():
    def work(comm):
        mine = np.array([1.0, -2.0]) * (comm.rank + 1)
        return comm.allreduce(mine, "max", prescale_factor=-1.0, postscale_factor=10.0).tolist()

    assert run_loopback(3, work) == [[-10.0, 60.0]] * 3


@pytest.mark.parametrize(
    ("op", "dtype", "rescaling", "factors"),
    [
        ("sum", "float32", Rescaling(0.5, 4.0), Factors(1.0, 2.0)),
        ("average", "bfloat16", Rescaling(0.5, 4.0), Factors(1.0, 2.0)),
        ("sum", "float16", Rescaling(0.5, 4.0), Factors(0.5, 4.0)),
        ("sum", "int64", Rescaling(0.5, 4.0), Factors(0.5, 4.0)),
        ("max", "float32", Rescaling(0.5, 4.0), Factors(0.5, 4.0)),
        ("sum", "float32", Rescaling(0.5, 4.0, "bfloat16"), Factors(1.0, 2.0)),
        ("sum", "float32", Rescaling(0.5, 4.0, "float16"), Factors(0.5, 4.0)),
        ("sum", "float32", Rescaling(1e-30, 1e-30), Factors(1e-30, 1e-30)),
        ("sum", "float64", Rescaling(1e200, 1e200), Factors(1e200, 1e200)),
        ("sum", "float32", Rescaling(0.0, 5.0), Factors(0.0, 5.0)),
    ],
)
def test_one_factor_stands_for_both_where_that_comes_to_the_same(op, dtype, rescaling, factors):
    assert rescaling.factors(op, dtype) == factors


def test_only_what_is_asked_for_is_compared():
    assert str(Rescaling()) == ""
    assert str(Rescaling(0.5, 1.0, "float16")) == ", prescale_factor=0.5, compression=float16"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.allreduce(np.ones(2, bool), "or", prescale_factor=2.0), "scaling bool by 2.0"),
        (lambda c: c.allreduce(np.ones(2, int), postscale_factor=np.inf), "integers take a finite factor"),
        (lambda c: c.allreduce(np.ones(2), prescale_factor="half"), "prescale_factor is 'half'"),
        (lambda c: c.reduce_scatter(np.ones(2), postscale_factor=None), "postscale_factor is None"),
    ],
)
def test_factors_without_meaning_are_refused(call, words):
    with pytest.raises(OperationError, match=words):
        call(Communicator.alone())


@pytest.mark.parametrize("collective", ["allreduce", "reduce_scatter"])
def test_ranks_with_different_factors_are_told_in_checked_mode(collective):
    def work(comm):
        with pytest.raises(MismatchError, match=r"rank 1 asked for .*prescale_factor=2\.0"):
            getattr(comm, collective)(np.ones(4), prescale_factor=float(comm.rank + 1))
        return True

    assert run_loopback(2, work, check=True) == [True, True]


def test_one_ranks_bad_factor_is_everybodys_error_in_checked_mode():
    def work(comm):
        with pytest.raises(MismatchError, match="integers take a finite factor"):
            comm.allreduce(np.ones(4, int), prescale_factor=np.nan if comm.rank else 2.0)
        return True

    assert run_loopback(2, work, check=True) == [True, True]
