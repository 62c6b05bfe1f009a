"""Factors and 16-bit travel: the results, their rounding, and half the bytes with equal bits everywhere."""

from __future__ import annotations

from itertools import product
from math import ceil, log2

import numpy as np
import pytest
import torch

from hpcpar import partition
from hpcpar.algorithms.registry import ALGORITHMS
from hpcpar.comm import Communicator, run_loopback
from hpcpar.comm.half_precision import WIRES, Factors, Rescaling, decoding, encoding, wire_buffer
from hpcpar.errors import MismatchError, OperationError
from hpcpar.transport.buffers import HostBuffer, bind

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


# travelling as 16 bits

COMPRESSED_SIZES = [2, 3, 4]


def normal_values(rank, count, dtype="float32"):
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
        inputs = [normal_values(rank, count, dtype).astype(np.float64) for rank in range(comm.size)]
        divisor = comm.size if op == "average" else 1
        truth = np.sum(inputs, axis=0) * factor / divisor
        magnitude = np.sum(np.abs(inputs), axis=0) * abs(factor) / divisor
        for algorithm in (None, *ALGORITHMS["allreduce"]):
            roundings = hops(algorithm, comm.size) + 1
            spacing = (comm.size + roundings) * 2.0**-25 if wire == "float16" else 0.0
            # 2^-22: factor and division are of float32, and rounded as such
            bound = ((1 + UNIT[wire]) ** roundings - 1 + 2.0**-22) * magnitude + spacing + 1e-300
            mine = normal_values(comm.rank, count, dtype)
            out = np.empty_like(mine)
            options = {"algorithm": algorithm, "compression": wire, "prescale_factor": factor}
            comm.allreduce(mine, op, out=out, **options)
            same = np.array_equal(mine, normal_values(comm.rank, count, dtype))
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


@pytest.mark.parametrize("size", COMPRESSED_SIZES)
def test_the_error_is_within_the_stated_bound_and_the_bits_are_the_same_everywhere(size):
    assert_all(run_loopback(size, lambda comm: list(compressed(comm))))


@pytest.mark.mpi
def test_over_mpi_the_error_is_within_the_stated_bound_and_the_bits_are_the_same(world):
    if world.size > 1:
        comm = world.unchecked("compression")
        assert_all(comm.allgather_object(list(compressed(comm))))


def test_a_rank_alone_loses_nothing():
    mine = normal_values(0, 100)
    found = Communicator.alone().allreduce(mine.copy(), "average", compression="bfloat16")
    np.testing.assert_array_equal(found, mine)


@pytest.mark.parametrize(
    ("size", "wire", "dtype", "share"),
    [
        (2, "float16", "float32", 2),
        (3, "bfloat16", "float64", 4),
        (4, "float16", "float64", 4),
        (7, "bfloat16", "float32", 2),
    ],
)
def test_the_account_shows_half_of_the_bytes_of_float32_and_a_quarter_of_float64(size, wire, dtype, share):
    count = 840  # divides by every size

    def work(comm):
        values = np.ones(count, dtype)
        comm.allreduce(values, algorithm="ring", compression=wire)
        return comm.traffic.nbytes_sent()

    whole = 2 * (size - 1) * normal_values(0, count, dtype).nbytes // size
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


# encoding and decoding


def host(values, dtype: str = "float32") -> HostBuffer:
    return bind(np.array(values, dtype=dtype), writable=True).host


def travelled(source: HostBuffer, wire: str) -> HostBuffer:
    """The elements as they are after they have been encoded and decoded."""
    arrived = source.scratch(source.count)
    encoded = wire_buffer(wire, np.empty(2 * source.count, np.uint8))
    for action in encoding(source, arrived, encoded) + decoding(encoded, arrived, "sum", 1):
        action()
    return arrived


def random(count: int, seed: int, dtype: str = "float32") -> HostBuffer:
    return host(np.random.default_rng(seed).standard_normal(count), dtype)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("count", [0, 1, 1001])
def test_a_number_arrives_within_one_rounding(wire, dtype, count):
    source = random(count, 1, dtype)
    arrived = travelled(source, wire)
    normal = np.abs(source.elements) > 2.0**-14  # below, float16 has fewer digits
    errors = np.abs(arrived.elements - source.elements)
    assert (errors <= UNIT[wire] * np.abs(source.elements))[normal].all()


@pytest.mark.parametrize("wire", WIRES)
def test_what_has_few_digits_arrives_exactly(wire):
    source = host([0.0, -0.0, 1.0, -2.5, 96.0, np.inf, -np.inf])
    np.testing.assert_array_equal(travelled(source, wire).octets, source.octets)
    assert np.isnan(travelled(host([np.nan]), wire).elements).all()


def test_the_range_of_float16_ends_at_65504_and_that_of_bfloat16_does_not():
    source = host([65504.0, 70000.0, 1e-9])
    for wire, expected in (("float16", [65504.0, np.inf, 0.0]), ("bfloat16", [65536.0, 70144.0, 1e-9])):
        np.testing.assert_allclose(travelled(source, wire).elements, expected, rtol=UNIT["bfloat16"])


@pytest.mark.parametrize("wire", WIRES)
def test_a_read_only_source_is_encoded_and_a_torch_tensor_too(wire):
    array = np.ones(3, dtype=np.float32)
    array.flags.writeable = False
    from_torch = bind(torch.ones(3), writable=True).host
    for source in (bind(array, writable=False).host, from_torch):
        assert travelled(source, wire).elements.tolist() == [1.0] * 3
