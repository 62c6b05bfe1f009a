"""Reductions against the float64 truth, within the bounds that reductions.py states."""

from __future__ import annotations

import math
import threading
import warnings
from functools import reduce
from itertools import product

import numpy as np
import pytest
import torch

from hpcpar.comm import reductions, run_loopback
from hpcpar.comm.blocks import FLOAT_BLOCK_COUNT
from hpcpar.comm.reductions import (
    combine,
    combining,
    finish,
    fold,
    folding,
    require_scale,
    scale,
)
from hpcpar.errors import OperationError
from hpcpar.transport.buffers import HostBuffer, bind

UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
"""u: the largest relative error of rounding once."""
HALVES = ("float16", "bfloat16")
TRUTH = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}


def host(values, dtype: str) -> HostBuffer:
    """A copy of the values, rounded to dtype."""
    return bind(torch.as_tensor(values).to(getattr(torch, dtype), copy=True), writable=True).host


def exact(buffer: HostBuffer) -> np.ndarray:
    """What the elements stand for, as float64."""
    elements = buffer.elements
    return (elements.double().numpy() if isinstance(elements, torch.Tensor) else elements).astype(np.float64)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """float64 to the nearest number of a 16-bit type, ties to even, in one rounding."""
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float64)
    fraction, exponent = np.frexp(values)  # bfloat16 has 8 digits; no subnormals here
    return np.ldexp(np.rint(np.ldexp(fraction, 8)), exponent - 8)


def random(count: int, seed: int) -> np.ndarray:
    """Numbers whose magnitudes differ by up to 2^6, of both signs."""
    draw = np.random.default_rng(seed)
    return draw.standard_normal(count) * 2.0 ** draw.integers(-3, 4, size=count)


def small_integers(count: int, dtype: str, pieces: int) -> list[HostBuffer]:
    """Pieces whose sums and products are exact in every type."""
    draws = [np.random.default_rng(seed).integers(1, 3, size=count) for seed in range(pieces)]
    if dtype.startswith("uint") and dtype != "uint8":
        return [bind(draw.astype(dtype), writable=True).host for draw in draws]
    return [host(draw, dtype) for draw in draws]


# one incoming piece


@pytest.mark.parametrize("dtype", HALVES)
def test_combining_16_bit_numbers_rounds_the_exact_result_once(dtype):
    for op, count in product(TRUTH, (1, 64, 65, 50_000)):
        target, incoming = host(random(count, 1), dtype), host(random(count, 2), dtype)
        truth = TRUTH[op](exact(target), exact(incoming))
        combine(op, target, incoming)
        np.testing.assert_array_equal(exact(target), rounded(truth, dtype))


def test_every_pair_of_float16_exponents_sums_to_the_nearest_number_subnormals_too():
    bits = np.arange(0, 0x7C00, 37, dtype=np.uint16)  # the non-negative finite ones
    a, b = (grid.ravel().view(np.float16) for grid in np.meshgrid(bits, bits | 0x8000))
    target = bind(a.copy(), writable=True).host
    combine("sum", target, bind(b.copy(), writable=True).host)
    # float64 holds any sum of two float16 exactly, and NumPy rounds it to float16 in one go.
    np.testing.assert_array_equal(target.elements, (a.astype(np.float64) + b).astype(np.float16))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_combining_floats_is_ieee_addition(dtype):
    target, incoming = host(random(1000, 1), dtype), host(random(1000, 2), dtype)
    expected = target.elements + incoming.elements
    combine("sum", target, incoming)
    np.testing.assert_array_equal(target.elements, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("op", ["min", "max", "sum"])
def test_a_nan_on_either_side_is_a_nan_in_the_result(op, dtype):
    target = host([1.0, math.nan] * 100, dtype)
    combine(op, target, host([math.nan, 1.0] * 100, dtype))
    assert np.isnan(exact(target)).all()


def test_a_prepared_combine_works_on_the_memory_as_it_is_when_called():
    for dtype in ("float32", "bfloat16", "float16"):
        target, incoming = host([1.0] * 100, dtype), host([2.0] * 100, dtype)
        again = combining("sum", target, target, incoming)
        [action() for action in again]
        [action() for action in again]
        incoming.elements[...] = 10
        [action() for action in again]
        assert exact(target).tolist() == [15.0] * 100


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "complex64"])
@pytest.mark.parametrize("count", [1, 5])
def test_arrays_between_the_places_of_their_elements_are_combined(dtype, count):
    itemsize = np.dtype(dtype).itemsize
    total = np.zeros(count * itemsize + 1, np.uint8)[1:].view(dtype)
    incoming = np.ones(count, dtype)
    for _ in range(2):
        reductions.combine("sum", bind(total, writable=True).host, bind(incoming, writable=False).host)
    reductions.combine("sum", bind(incoming, writable=True).host, bind(total, writable=False).host)
    assert total.tolist() == [2] * count
    assert incoming.tolist() == [3] * count


def test_an_overflow_is_infinity_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype, largest in (("float16", 65504.0), ("float32", 3.4e38), ("bfloat16", 3.3e38)):
            target = host([largest] * 100, dtype)
            combine("sum", target, target.copy())
            assert np.isposinf(exact(target)).all()


# many pieces


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("pieces", [3, 8, 64])
def test_a_sum_of_many_16_bit_pieces_is_rounded_once(dtype, pieces):
    sources = [host(random(2000, seed), dtype) for seed in range(pieces)]
    values = np.array([exact(source) for source in sources])
    truth = values.sum(axis=0)
    bound = UNIT[dtype] * np.abs(truth) + (pieces - 1) * 2.0**-24 * np.abs(values).sum(axis=0)
    fold("sum", sources[0], sources)
    assert (np.abs(exact(sources[0]) - truth) <= bound * (1 + 1e-6)).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_hop_by_hop_rounding_stays_within_its_bound_and_is_worse_than_folding(dtype):
    pieces = 64
    sources = [host(random(2000, seed), dtype) for seed in range(pieces)]
    values = np.array([exact(source) for source in sources])
    truth, magnitudes = values.sum(axis=0), np.abs(values).sum(axis=0)
    folded, hopped = sources[0].copy(), sources[0].copy()
    fold("sum", folded, sources)
    for source in sources[1:]:
        combine("sum", hopped, source)
    hop_errors, fold_errors = (np.abs(exact(found) - truth) for found in (hopped, folded))
    assert (hop_errors <= (pieces - 1) * UNIT[dtype] * magnitudes * (1 + 2.0**-6)).all()
    assert np.sqrt((hop_errors**2).mean()) > 3 * np.sqrt((fold_errors**2).mean())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_sum_of_many_floats_stays_within_the_bound_of_ordered_summation(dtype):
    sources = [host(random(2000, seed), dtype) for seed in range(16)]
    values = np.array([source.elements.astype(np.longdouble) for source in sources])
    fold("sum", sources[0], sources)
    errors = np.abs(sources[0].elements - values.sum(axis=0))
    assert (errors <= 15 * UNIT[dtype] * np.abs(values).sum(axis=0) * (1 + 1e-6)).all()


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64", "float16", "bfloat16", "float32", "complex64"])
def test_folding_equals_combining_one_after_the_other_where_nothing_rounds(dtype):
    # Complex numbers have no order; the total of an average is a sum.
    ops = ("sum", "product", "average") if dtype == "complex64" else ("sum", "product", "min", "max")
    for op, pieces in product(ops, (1, 2, 3, 5)):
        sources = small_integers(100, dtype, pieces)
        expected = sources[0].copy()
        for source in sources[1:]:
            combine(op, expected, source)
        into = sources[0].scratch(100)
        fold(op, into, sources)
        np.testing.assert_array_equal(into.octets, expected.octets)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32"])
def test_the_result_may_go_where_any_of_the_sources_is(dtype):
    for op, place in product(("sum", "max"), range(5)):
        sources = small_integers(1000, dtype, 5)
        expected = reduce(TRUTH[op], [exact(source) for source in sources])
        into = sources[place].part(0, 1000)  # another buffer over the same memory
        fold(op, into, sources)
        np.testing.assert_array_equal(exact(into), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrays_longer_than_a_block_and_not_a_multiple_of_it_are_folded_whole(dtype, monkeypatch):
    monkeypatch.setattr(reductions, "BLOCK_NBYTES", 1000)
    count = 2 * FLOAT_BLOCK_COUNT + 17
    sources = [host(torch.arange(count) % 5 + number, dtype) for number in range(3)]
    fold("sum", sources[1], sources, factor=2.0)
    np.testing.assert_array_equal(exact(sources[1]), 2.0 * (3 * (np.arange(count) % 5) + 3))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_nothing_folds_to_nothing(dtype):
    empty = host([], dtype)
    op = "or" if dtype == "bool" else "sum"
    combine(op, empty, empty)
    fold(op, empty, [empty, empty, empty])
    assert empty.count == 0


def test_bits_and_truth_are_folded_too():
    flags = [host([rank == 0, False, True], "bool") for rank in range(3)]
    either, every = flags[0].copy(), flags[0].copy()
    fold("or", either, flags)
    fold("and", every, flags)
    assert (either.elements.tolist(), every.elements.tolist()) == ([True, False, True], [False, False, True])
    bits = [host([1 << rank], "int32") for rank in range(4)]
    fold("or", bits[3], bits)
    assert bits[3].elements.tolist() == [15]
    odd = flags[0].copy()
    fold("xor", odd, flags)
    assert odd.elements.tolist() == [True, False, True]
    bits = [host([number], "int32") for number in (0b1100, 0b1010, 0b0001)]
    fold("xor", bits[0], bits)
    assert bits[0].elements.tolist() == [0b0111]


def test_a_fold_is_the_same_in_every_thread_at_once():
    sources = [host(random(100_000, seed), "bfloat16") for seed in range(4)]
    results = [sources[0].scratch(sources[0].count) for _ in range(4)]
    threads = [threading.Thread(target=fold, args=("sum", result, sources)) for result in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fold("sum", sources[0], sources)
    assert all((result.octets == sources[0].octets).all() for result in results)


def test_a_prepared_fold_works_on_the_memory_as_it_is_when_called():
    for dtype in ("float32", "bfloat16"):
        sources = [host([float(number)] * 10, dtype) for number in range(3)]
        into = sources[0].scratch(10)
        again = folding("average", into, sources, divisor=3)
        [action() for action in again]
        sources[2].elements[...] = 8
        [action() for action in again]
        assert exact(into).tolist() == [3.0] * 10


def test_folding_no_sources_is_refused():
    with pytest.raises(OperationError, match="at least one"):
        fold("sum", host([1.0], "float32"), [])


# factors and averages


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("factor", "divisor"), [(0.3, 1), (1.0, 7), (0.3, 7)])
def test_a_scaled_16_bit_sum_is_rounded_once(dtype, factor, divisor):
    sources = [host(random(2000, seed), dtype) for seed in range(5)]
    values = np.array([exact(source) for source in sources]) * factor / divisor
    truth = values.sum(axis=0)
    # 4 additions, the factor's own rounding, a product and a quotient, all in float32
    bound = UNIT[dtype] * np.abs(truth) + 7 * 2.0**-24 * np.abs(values).sum(axis=0)
    fold("sum", sources[0], sources, factor=factor, divisor=divisor)
    assert (np.abs(exact(sources[0]) - truth) <= bound * (1 + 1e-6)).all()


def test_an_average_of_float16_may_pass_through_sums_beyond_its_range():
    sources = [host([60000.0] * 100, "float16") for _ in range(4)]
    fold("average", sources[0], sources, divisor=4)
    assert exact(sources[0]).tolist() == [60000.0] * 100
    pair = [host([60000.0] * 100, "float16") for _ in range(2)]
    fold("sum", pair[0], pair, factor=0.5)
    assert exact(pair[0]).tolist() == [60000.0] * 100


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_scaled_sum_of_two_is_a_sum_and_a_product_in_the_elements_type(dtype):
    target, incoming = host(random(500, 1), dtype), host(random(500, 2), dtype)
    expected = (target.elements + incoming.elements) * np.dtype(dtype).type(0.1)
    fold("sum", target, (target, incoming), factor=0.1)
    np.testing.assert_array_equal(target.elements, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("count", [5, 3000])
def test_scaling_is_within_one_rounding_of_the_factor_and_one_of_the_product(dtype, count):
    target = host(random(count, 3), dtype)
    truth = exact(target) * 0.3
    scale(target, 0.3)
    inner = max(UNIT["float64"], min(UNIT[dtype], UNIT["float32"]))
    subnormal = 2.0**-25 if dtype == "float16" else 0.0  # half the spacing of float16 near zero
    bound = (UNIT[dtype] + inner) * (1 + 1e-3) * np.abs(truth) + subnormal
    assert (np.abs(exact(target) - truth) <= bound).all()


def test_complex_numbers_are_scaled():
    target = bind(np.array([1 + 2j, -4j], dtype=np.complex64), writable=True).host
    scale(target, 0.5)
    assert target.elements.tolist() == [0.5 + 1j, -2j]


def test_integers_are_scaled_in_float64_and_truncated_towards_zero():
    target = host([7, -7, 3, 0, 2**31 - 1], "int32")
    scale(target, 0.5)
    assert target.elements.tolist() == [3, -3, 1, 0, 2**30 - 1]
    total = host([5, -5], "int64")
    fold("sum", total, (total, host([6, -6], "int64")), factor=0.5)
    assert total.elements.tolist() == [5, -5]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "uint64"])
def test_a_product_beyond_the_range_of_an_integer_becomes_the_nearest_in_it(dtype):
    limits = np.iinfo(dtype)
    target = bind(np.array([limits.max, limits.min, 1], dtype=dtype), writable=True).host
    scale(target, 3.0)
    assert target.elements.tolist() == [limits.max, limits.min, 3]
    scale(target, -1e30)
    assert target.elements.tolist() == [limits.min, limits.max if limits.min else 0, limits.min]


def test_integers_scaled_by_one_keep_their_last_digits():
    target = bind(np.array([2**63 - 1], dtype=np.int64), writable=True).host
    scale(target, 1.0)
    fold("sum", target, [target], factor=1.0)
    assert target.elements.tolist() == [2**63 - 1]


def test_bool_and_factors_that_are_not_finite_on_integers_are_refused():
    with pytest.raises(OperationError, match=r"scaling bool by 0\.5"):
        scale(host([True], "bool"), 0.5)
    with pytest.raises(OperationError, match="finite"):
        require_scale(math.inf, "int32")
    with pytest.raises(OperationError, match="finite"):
        fold("sum", host([1], "int32"), [host([1], "int32")], factor=math.nan)
    require_scale(1.0, "bool")
    require_scale(math.inf, "float32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [3, 4, 7])
def test_finishing_an_average_of_16_bits_rounds_the_quotient_once(dtype, size):
    total = host(random(3000, 5), dtype)
    truth = exact(total) / size
    finish("average", total, size)
    np.testing.assert_array_equal(exact(total), rounded(truth, dtype))


def test_finishing_divides_floats_and_leaves_sums_alone():
    total = host(random(100, 5), "float32")
    expected = total.elements / np.float32(3)
    finish("sum", total, 3)
    finish("average", total, 1)
    finish("average", host([], "float32"), 3)
    finish("average", total, 3)
    np.testing.assert_array_equal(total.elements, expected)


def test_a_read_only_incoming_piece_is_combined_without_a_warning():
    incoming = np.full(100, 2, dtype=np.float16)
    incoming.flags.writeable = False
    target = host([1.0] * 100, "float16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        combine("sum", target, bind(incoming, writable=False).host)
    assert exact(target).tolist() == [3.0] * 100


@pytest.mark.parametrize(("algorithm", "hops"), [("ring", 3), ("recursive_doubling", 2)])
def test_an_allreduce_of_bfloat16_stays_within_a_rounding_for_every_hop(algorithm, hops):
    inputs = [torch.from_numpy(random(1000, rank)).to(torch.bfloat16) for rank in range(4)]
    found = run_loopback(4, lambda comm: comm.allreduce(inputs[comm.rank].clone(), algorithm=algorithm))
    values = torch.stack(inputs).double()
    bound = hops * UNIT["bfloat16"] * values.abs().sum(dim=0) * (1 + hops * UNIT["bfloat16"])
    assert all(((total.double() - values.sum(dim=0)).abs() <= bound).all() for total in found)
