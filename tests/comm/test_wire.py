"""What is lost by travelling as 16 bits is what wire.py says, and no more."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcpar.comm.wire import WIRES, decode, encode, wire_buffer
from hpcpar.errors import OperationError
from hpcpar.transport.buffers import HostBuffer, bind

UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


def host(values, dtype: str = "float32") -> HostBuffer:
    return bind(np.array(values, dtype=dtype), writable=True).host


def random(count: int, seed: int, dtype: str = "float32") -> HostBuffer:
    return host(np.random.default_rng(seed).standard_normal(count), dtype)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("count", [0, 1, 1001])
def test_a_number_arrives_within_one_rounding(wire, dtype, count):
    source = random(count, 1, dtype)
    encoded = encode(source, wire)
    arrived = source.scratch(count)
    decode(encoded, arrived)
    assert (encoded.dtype, encoded.octets.size) == (wire, 2 * count)
    normal = np.abs(source.elements) > 2.0**-14  # below, float16 has fewer digits
    errors = np.abs(arrived.elements - source.elements)
    assert (errors <= UNIT[wire] * np.abs(source.elements))[normal].all()


@pytest.mark.parametrize("wire", WIRES)
def test_what_has_few_digits_arrives_exactly(wire):
    source = host([0.0, -0.0, 1.0, -2.5, 96.0, np.inf, -np.inf])
    arrived = source.scratch(source.count)
    decode(encode(source, wire), arrived)
    np.testing.assert_array_equal(arrived.octets, source.octets)
    nothing = host([np.nan])
    decode(encode(nothing, wire), nothing)
    assert np.isnan(nothing.elements).all()


def test_the_range_of_float16_ends_at_65504_and_that_of_bfloat16_does_not():
    source = host([65504.0, 70000.0, 1e-9])
    for wire, expected in (("float16", [65504.0, np.inf, 0.0]), ("bfloat16", [65536.0, 70144.0, 1e-9])):
        arrived = source.scratch(3)
        decode(encode(source, wire), arrived)
        np.testing.assert_allclose(arrived.elements, expected, rtol=UNIT["bfloat16"])


@pytest.mark.parametrize("wire", WIRES)
def test_encoding_writes_to_the_memory_it_is_given(wire):
    memory = np.zeros(8, dtype=np.uint8)
    encoded = encode(host([1.0, 2.0, 3.0, 4.0]), wire, memory)
    assert encoded.octets is memory
    again = wire_buffer(wire, memory)
    assert [float(x) for x in again.elements] == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("wire", WIRES)
def test_a_read_only_source_is_encoded_and_a_torch_tensor_too(wire):
    array = np.ones(3, dtype=np.float32)
    array.flags.writeable = False
    from_torch = bind(torch.ones(3), writable=True).host
    first, second = encode(bind(array, writable=False).host, wire), encode(from_torch, wire)
    np.testing.assert_array_equal(first.octets, second.octets)


def test_other_types_counts_and_memory_sizes_are_refused():
    with pytest.raises(OperationError, match="unknown wire type 'float8'"):
        encode(host([1.0]), "float8")
    with pytest.raises(OperationError, match="int32 cannot travel as float16"):
        encode(host([1], "int32"), "float16")
    with pytest.raises(OperationError, match="2 elements as bfloat16 take 4 bytes, but 3 are given"):
        encode(host([1.0, 2.0]), "bfloat16", np.zeros(3, dtype=np.uint8))
    with pytest.raises(OperationError, match="1 encoded elements do not fit 2"):
        decode(encode(host([1.0]), "float16"), host([1.0, 2.0]))
