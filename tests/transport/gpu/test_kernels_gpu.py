"""The kernels as CuPy compiles and launches them on a real GPU, against the host's own sums bit for bit.

What can be tested without one is in test_kernels.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcpar.comm.reductions import fold
from hpcpar.errors import CudaError
from hpcpar.transport.gpu.cuda_driver import driver
from hpcpar.transport.gpu.kernels import CONVERTED, MOST_SOURCES, THREADS, kernels
from tests.transport.gpu.test_kernels import (
    CONVERSIONS,
    TILES,
    assert_same,
    bits_of,
    converted_by_torch,
    grid,
    host,
    rough,
)

# Each kernel is compiled first.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

MARGIN = 32
"""Bytes before and after what a kernel writes, which must stay as they are."""


@pytest.fixture(autouse=True)
def _cupy() -> None:
    pytest.importorskip("cupy", reason="needs CuPy: pip install hpcpar[cuda13] or hpcpar[cuda12]")


def test_scratch_memory_goes_back_to_its_stream_and_can_be_shown() -> None:
    cuda = driver()
    cuda.use(0)
    streams = [cuda.stream(), cuda.stream()]
    pieces = [kernels(0).memory(1 << 20, stream) for stream in streams]
    assert all(cuda.is_exportable(piece.ptr) for piece in pieces)
    addresses = [piece.ptr for piece in pieces]
    del pieces
    assert [kernels(0).memory(1 << 20, stream).ptr for stream in reversed(streams)] == addresses[::-1]
    with pytest.raises(CudaError, match="scratch memory"):
        kernels(0).memory(1 << 50, streams[0])


def placed(octets: np.ndarray, offset: int) -> torch.Tensor:
    """A copy of the bytes in the GPU's memory, `offset` bytes beyond a 16-byte boundary."""
    room = torch.full((octets.size + offset + 2 * MARGIN,), 0xA5, dtype=torch.uint8, device="cuda")
    start = MARGIN + offset
    room[start : start + octets.size] = torch.from_numpy(octets)
    return room


def address(room: torch.Tensor, offset: int) -> int:
    return room.data_ptr() + MARGIN + offset


def found_in(room: torch.Tensor, offset: int, nbytes: int) -> np.ndarray:
    torch.cuda.synchronize()
    octets = room.cpu().numpy()
    start = MARGIN + offset
    assert (octets[:start] == 0xA5).all()
    assert (octets[start + nbytes :] == 0xA5).all()
    return octets[start : start + nbytes]


def check(op, dtype, count, pieces, *, offsets=(0,), alias=None, **scale) -> None:
    """Fold on the GPU and on the host, and compare."""
    values = [rough(dtype, count, seed) for seed in range(pieces)]
    expected = values[0].copy()
    fold(op, host(expected, dtype), [host(value.copy(), dtype) for value in values], **scale)
    places = [offsets[i % len(offsets)] for i in range(pieces)]
    rooms = [placed(value, place) for value, place in zip(values, places, strict=True)]
    sources = [address(*each) for each in zip(rooms, places, strict=True)]
    room, place = (
        (placed(expected, offsets[-1]), offsets[-1]) if alias is None else (rooms[alias], places[alias])
    )
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    kernels(torch.cuda.current_device()).fold(
        op, dtype, address(room, place), sources, count, **scale, stream=stream.cuda_stream
    )
    assert_same(found_in(room, place, expected.size), expected, dtype, op)


@pytest.mark.parametrize(("op", "dtype"), grid)
def test_a_fold_has_the_bits_of_the_hosts(op: str, dtype: str) -> None:
    itemsize = bits_of(dtype).itemsize
    for count in (1, 15, 4 * TILES[dtype] + 17):
        for pieces in (1, 2, 7):
            check(op, dtype, count, pieces)
            check(op, dtype, count, pieces, offsets=(itemsize,), alias=0)
            check(op, dtype, count, pieces, offsets=(0, itemsize), alias=pieces - 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int8", "int64", "complex64"])
def test_a_factor_and_a_division_do_what_they_do_on_the_host(dtype: str) -> None:
    is_whole = dtype.startswith("int")
    for factor in (1 / 3, -2.7, 1e30, 1e-42):
        check("sum", dtype, TILES[dtype] + 3, 2, factor=factor)
        if not is_whole:
            check("average", dtype, TILES[dtype] + 3, 2, factor=factor, divisor=7)


@pytest.mark.parametrize("pieces", [MOST_SOURCES, MOST_SOURCES + 1, 200])
def test_many_sources_are_folded_in_order(pieces: int) -> None:
    check("sum", "float32", 3000, pieces, alias=0)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32"])
def test_a_block_does_as_many_tiles_as_there_are(dtype: str) -> None:
    check("sum", dtype, 5000 * TILES[dtype] + 5, 2, offsets=(bits_of(dtype).itemsize,))


def test_more_elements_than_a_32_bit_number_has() -> None:
    count = 2**31 + 4 * TILES["uint8"] + 1
    if torch.cuda.mem_get_info()[0] < 3 * count:
        pytest.skip("needs 7 GB of the GPU's memory")
    into = torch.ones(count, dtype=torch.uint8, device="cuda")
    other = torch.full_like(into, 3)
    both = [into.data_ptr(), other.data_ptr()]
    kernels(torch.cuda.current_device()).fold("sum", "uint8", both[0], both, count, stream=0)
    torch.cuda.synchronize()
    assert int(into.min()) == int(into.max()) == 4


@pytest.mark.parametrize(("source_dtype", "dtype"), CONVERSIONS)
def test_a_conversion_rounds_as_torch_does_on_the_host(source_dtype: str, dtype: str) -> None:
    for count in (1, 257, 5 * THREADS * CONVERTED + 3):
        octets = rough(source_dtype, count, seed=count)
        expected = converted_by_torch(octets, source_dtype, dtype)
        source, into = placed(octets, 8), placed(expected, 8)
        into[MARGIN + 8 : MARGIN + 8 + expected.size] = 0
        kernels(torch.cuda.current_device()).convert(
            dtype, address(into, 8), source_dtype, address(source, 8), count, stream=0
        )
        assert_same(found_in(into, 8, expected.size), expected, dtype, "sum")
