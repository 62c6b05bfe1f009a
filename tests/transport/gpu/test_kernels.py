"""The kernels, compiled for the host, against the host's own sums bit for bit; and by CUDA's compiler."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest

from hpcpar.comm.reductions import OPS, fold, require_op, require_scale
from hpcpar.errors import CudaError, OperationError
from hpcpar.transport.buffers import DTYPES, bind
from hpcpar.transport.gpu import kernels as gpu_kernels
from hpcpar.transport.gpu.kernels import MOST_SOURCES, NARROW, THREADS, head_of
from tests.transport.gpu import kernel_stand_in
from tests.transport.gpu.kernel_stand_in import HostKernels, StandInKernels

HALVES = ("float16", "bfloat16")
FLOATS = (*HALVES, "float32", "float64")
COMPLEX = ("complex64", "complex128")
PART = {"complex64": "float32", "complex128": "float64"}
UNIT = {"complex64": 2.0**-24, "complex128": 2.0**-53}

needs_compiler = pytest.mark.skipif(
    kernel_stand_in.obstacle() is not None, reason=str(kernel_stand_in.obstacle())
)


def is_meant(require, *arguments) -> bool:
    try:
        require(*arguments)
    except OperationError:
        return False
    return True


KERNELS = [(op, dtype) for op in OPS for dtype in DTYPES if is_meant(require_op, op, dtype)]
TILES = {dtype: THREADS * 16 // (2 if dtype == "bfloat16" else np.dtype(dtype).itemsize) for dtype in DTYPES}
"""Elements that a block works on at a time."""


# Arrays of all types as bits: NumPy knows no bfloat16.


def bits_of(dtype: str) -> np.dtype:
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


def host(octets: np.ndarray, dtype: str):
    """Bytes as a buffer of the type, sharing memory."""
    if dtype != "bfloat16":
        return bind(octets.view(dtype), writable=True).host
    import torch

    return bind(torch.from_numpy(octets.view(np.int16)).view(torch.bfloat16), writable=True).host


def rough(dtype: str, count: int, seed: int) -> np.ndarray:
    """Numbers of the type as bytes; of floats some of any bits, and some zeros, infinities and NaNs."""
    draw = np.random.default_rng(seed)
    if dtype == "bool":
        return draw.integers(0, 2, count).astype(np.uint8)
    if dtype not in FLOATS and dtype not in COMPLEX:
        return draw.integers(0, 256, count * bits_of(dtype).itemsize, dtype=np.uint8)
    if dtype in COMPLEX:
        return draw.standard_normal(2 * count).astype(PART[dtype]).view(np.uint8)
    bits = np.dtype(f"u{bits_of(dtype).itemsize}")
    everyday = as_bits(draw.standard_normal(count) * 2.0 ** draw.integers(-8, 8, count), dtype)
    any_bits = draw.integers(0, np.iinfo(bits).max, count, dtype=bits, endpoint=True)
    special = as_bits(draw.choice([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0], count), dtype)
    chance = draw.random(count)
    return np.select([chance < 0.7, chance < 0.9], [everyday, any_bits], special).astype(bits).view(np.uint8)


def as_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype).view(f"u{np.dtype(dtype).itemsize}")


def exact(octets: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (octets.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return octets.view(np.uint8 if dtype == "bool" else dtype)


def assert_same(found: np.ndarray, expected: np.ndarray, dtype: str, op: str) -> None:
    """The same bits, except for what kernels.py leaves open: which NaN, and min's and max's zero."""
    a, b = exact(found, dtype), exact(expected, dtype)
    if dtype not in FLOATS and dtype not in COMPLEX:
        np.testing.assert_array_equal(a, b)
        return
    np.testing.assert_array_equal(a, b)  # NaNs in the same places; both zeros are equal
    if op not in ("min", "max") and dtype not in COMPLEX:
        is_number = ~np.isnan(b)
        np.testing.assert_array_equal(np.signbit(a[is_number]), np.signbit(b[is_number]))


def placed(octets: np.ndarray, offset: int) -> np.ndarray:
    """A copy of the bytes, `offset` bytes beyond a 16-byte boundary."""
    room = np.empty(octets.size + 48, dtype=np.uint8)
    start = -room.ctypes.data % 16 + offset
    room[start : start + octets.size] = octets
    return room[start : start + octets.size]


def run(op, dtype, into, sources, *, most_blocks=3, **scale) -> None:
    count = into.size // bits_of(dtype).itemsize
    addresses = [source.ctypes.data for source in sources]
    HostKernels(most_blocks).fold(op, dtype, into.ctypes.data, addresses, count, **scale)


def check(op, dtype, count, pieces, *, offsets=(0,), alias=None, most_blocks=3, seed=0, **scale) -> None:
    """Fold on the host by both, and compare; what lies around the result must stay as it is."""
    values = [rough(dtype, count, seed + i) for i in range(pieces)]
    expected = values[0].copy()
    fold(op, host(expected, dtype), [host(value.copy(), dtype) for value in values], **scale)
    sources = [placed(value, offsets[i % len(offsets)]) for i, value in enumerate(values)]
    guarded = np.full(expected.size + 96, 0xA5, dtype=np.uint8)
    start = -guarded.ctypes.data % 16 + 16 + offsets[-1]
    into = guarded[start : start + expected.size] if alias is None else sources[alias]
    run(op, dtype, into, sources, most_blocks=most_blocks, **scale)
    assert_same(into, expected, dtype, op)
    if alias is None:
        assert (guarded[:start] == 0xA5).all()
        assert (guarded[start + expected.size :] == 0xA5).all()


# The same as on the host

grid = [kernel for kernel in KERNELS if not (kernel[0] == "product" and kernel[1] in COMPLEX)]


def settings(dtype):
    """(pieces, count, offsets, alias): lengths around a tile, memory that begins anywhere."""
    itemsize, tile = bits_of(dtype).itemsize, TILES[dtype]
    part = itemsize // 2 if dtype in COMPLEX else itemsize
    last = (16 - part,)  # the same for all: wide loads after a head
    apart, scattered = (0, part), (part, 0, 3 * part % 16)
    return [
        (1, 1, (0,), None),
        (2, 15, last, 0),
        (3, 16, scattered, None),
        (8, tile - 1, (part,), 4),
        (5, tile, (0,), 1),
        (1, 4 * tile + 17, apart, None),
        (2, 4 * tile + 17, (0,), None),
        (3, 2 * tile + 9, last, None),
        (3, 2 * tile + 9, scattered, 2),
        (5, 3 * tile + 1, apart, 4),
        (5, 3 * tile + 1, (itemsize,), 0),
        (3, 5, (2 * part % 16,), None),
    ]


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fold_has_the_bits_of_the_hosts(dtype):
    ops = [op for op, of_dtype in grid if of_dtype == dtype]
    for op, (pieces, count, offsets, alias) in product(ops, settings(dtype)):
        check(op, dtype, count, pieces, offsets=offsets, alias=alias, seed=100 * pieces)


@needs_compiler
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "bool"])
def test_a_factor_does_what_it_does_on_the_host(dtype):
    for factor, op in product((0.5, 1 / 3, -2.7, 1e30, 1e-30, 1e-42), ("sum", "min")):
        if is_meant(require_op, op, dtype) and is_meant(require_scale, factor, dtype):
            for pieces in (1, 2, 5):
                check(op, dtype, TILES[dtype] + 3, pieces, factor=factor, seed=pieces)


@needs_compiler
@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX])
def test_an_average_is_divided_as_on_the_host(dtype):
    for divisor, factor, pieces in product((2, 3, 7, 1000), (1.0, 0.3), (1, 2, 5)):
        check("average", dtype, TILES[dtype] + 3, pieces, factor=factor, divisor=divisor)


@needs_compiler
@pytest.mark.parametrize("dtype", COMPLEX)
def test_a_complex_product_is_that_of_the_host_up_to_rounding(dtype):
    # A part is a sum of two products, of which the host may fuse one: 3 roundings of up to u·|a|·|b| each.
    a, b = (rough(dtype, 1000, seed) for seed in (1, 2))
    expected = a.copy()
    fold("product", host(expected, dtype), [host(a.copy(), dtype), host(b.copy(), dtype)])
    into = np.empty_like(a)
    run("product", dtype, into, [a, b])
    error = np.abs(exact(into, dtype) - exact(expected, dtype))
    assert (error <= 6 * UNIT[dtype] * np.abs(exact(a, dtype)) * np.abs(exact(b, dtype))).all()


@needs_compiler
@pytest.mark.parametrize("dtype", COMPLEX)
def test_a_complex_product_of_small_integers_is_exact(dtype):
    draw = np.random.default_rng(0)
    values = [(draw.integers(-4, 5, 700) + 1j * draw.integers(-4, 5, 700)).astype(dtype) for _ in range(4)]
    into = np.empty(700, dtype)
    run("product", dtype, into.view(np.uint8), [value.view(np.uint8) for value in values])
    np.testing.assert_array_equal(into, functools.reduce(np.multiply, values))


@needs_compiler
@pytest.mark.parametrize("dtype", HALVES)
def test_every_16_bit_number_is_read_and_written_as_itself(dtype):
    every = np.arange(2**16, dtype=np.uint16).view(np.uint8)
    into = np.empty_like(every)
    run("sum", dtype, into, [every])
    is_nan = np.isnan(exact(every, dtype))
    np.testing.assert_array_equal(np.isnan(exact(into, dtype)), is_nan)
    np.testing.assert_array_equal(into.view(np.uint16)[~is_nan], every.view(np.uint16)[~is_nan])


@needs_compiler
@pytest.mark.parametrize("dtype", HALVES)
def test_every_pair_of_16_bit_magnitudes_is_rounded_as_torch_rounds(dtype):
    largest = 0x7C00 if dtype == "float16" else 0x7F80
    bits = np.arange(0, largest, 37, dtype=np.uint16)
    a, b = (side.ravel().copy().view(np.uint8) for side in np.meshgrid(bits, bits | 0x8000))
    for op in ("sum", "product"):
        expected = a.copy()
        fold(op, host(expected, dtype), [host(a.copy(), dtype), host(b.copy(), dtype)])
        into = np.empty_like(a)
        run(op, dtype, into, [a, b])
        np.testing.assert_array_equal(into.view(np.uint16), expected.view(np.uint16))


@needs_compiler
@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64", "uint64"])
def test_an_integer_out_of_range_becomes_the_nearest_of_its_type(dtype):
    limits = np.iinfo(dtype)
    values = np.array([limits.max, limits.min, 1, limits.max // 2 + 1], dtype=dtype)
    for factor in (1.0000001, 2.0, -2.0, 1e300, -1e300):
        expected, into = values.copy(), np.empty_like(values)
        fold("sum", bind(expected, writable=True).host, [bind(values, writable=True).host], factor=factor)
        run("sum", dtype, into.view(np.uint8), [values.view(np.uint8)], factor=factor)
        np.testing.assert_array_equal(into, expected)


# Many sources, many blocks


@needs_compiler
@pytest.mark.parametrize("dtype", [*HALVES, "float32", "int32", "complex64"])
def test_up_to_64_sources_are_one_launch(dtype):
    for pieces in (5, 63, 64):
        check("sum", dtype, 300, pieces, factor=0.7)
        assert len(list(gpu_kernels.launches(dtype, 16, [32] * pieces, 300))) == 1


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "int32", "complex64"])
def test_more_sources_are_folded_in_order_over_several_launches(dtype):
    for pieces, alias in ((65, 0), (127, 63), (128, 0), (200, 63)):
        check("sum", dtype, 300, pieces, factor=0.7, alias=alias)


@needs_compiler
def test_any_number_of_blocks_gives_the_same():
    for most_blocks, dtype in product((1, 2, 5, 100), ("uint8", "float32", "complex128")):
        check("sum", dtype, 7 * TILES[dtype] + 5, 2, offsets=(8,), most_blocks=most_blocks)


def test_a_source_beyond_the_first_64_cannot_be_overwritten():
    sources = [16 * (i + 1) for i in range(MOST_SOURCES + 3)]
    with pytest.raises(OperationError, match="takes the place of source 65"):
        list(gpu_kernels.launches("float32", sources[65], sources, 4))


def test_no_elements_are_no_launch():
    assert list(gpu_kernels.launches("float32", 0, [0, 0], 0)) == []


@needs_compiler
def test_python_and_the_kernels_agree_on_the_layout_of_the_argument():
    assert kernel_stand_in.load().size_of_fold() == gpu_kernels.ARGUMENTS.size
    assert kernel_stand_in.load().size_of_convert() == gpu_kernels.CONVERT_ARGUMENTS.size
    source = gpu_kernels.SOURCE.read_text(encoding="utf-8")
    constants = dict(re.findall(r"constexpr int (\w+) = (-?\d+);", source))
    assert constants == {
        "THREADS": str(THREADS),
        "SOURCES": str(MOST_SOURCES),
        "NARROW": str(NARROW),
        "CONVERTED": str(gpu_kernels.CONVERTED),
    }


def test_wide_loads_begin_where_all_pointers_meet_a_boundary():
    #        element  into  sources     head
    drawn = [
        (4, 0, (16, 32), 0),
        (4, 4, (20, 36), 3),
        (2, 14, (30,), 1),
        (1, 1, (17,), 15),
        (4, 4, (16,), NARROW),
        (4, 0, (16, 24), NARROW),
        (16, 8, (24,), NARROW),  # complex128 between two boundaries never meets one
        (8, 8, (24,), 1),
    ]
    for itemsize, into, sources, head in drawn:
        assert head_of(itemsize, into, sources) == head, (itemsize, into, sources)


# Conversions


CONVERSIONS = [
    (a, b) for wire in HALVES for wide in ("float32", "float64") for a, b in ((wide, wire), (wire, wide))
]


def converted(octets, source_dtype, dtype, *, offset=0, most_blocks=3, **scale) -> np.ndarray:
    """By the kernel, between guards that must stay as they are."""
    count = octets.size // bits_of(source_dtype).itemsize
    source, nbytes = placed(octets, offset * bits_of(source_dtype).itemsize), count * bits_of(dtype).itemsize
    guarded = np.full(nbytes + 32, 0xA5, dtype=np.uint8)
    into = guarded[16 : 16 + nbytes]
    kernels = HostKernels(most_blocks)
    kernels.convert(dtype, into.ctypes.data, source_dtype, source.ctypes.data, count, **scale)
    assert (guarded[:16] == 0xA5).all()
    assert (guarded[16 + nbytes :] == 0xA5).all()
    return into


def converted_by_torch(octets, source_dtype, dtype) -> np.ndarray:
    import torch

    source = torch.from_numpy(octets).view(getattr(torch, source_dtype))
    return source.to(getattr(torch, dtype)).view(torch.uint8).numpy()


@needs_compiler
@pytest.mark.parametrize(("source_dtype", "dtype"), CONVERSIONS)
def test_a_conversion_rounds_as_torch_does_on_the_host(source_dtype, dtype):
    counts = (1, 255, 257, 5 * THREADS * gpu_kernels.CONVERTED + 3)
    for count, (offset, most_blocks) in product(counts, ((0, 1), (1, 3))):
        octets = rough(source_dtype, count, seed=count)
        found = converted(octets, source_dtype, dtype, offset=offset, most_blocks=most_blocks)
        assert_same(found, converted_by_torch(octets, source_dtype, dtype), dtype, "sum")


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("wire", HALVES)
def test_every_16_bit_number_and_its_neighbours_arrive(wire, dtype):
    every = np.arange(2**16, dtype=np.uint16).view(np.uint8)
    assert_same(converted(every, wire, dtype), converted_by_torch(every, wire, dtype), dtype, "sum")
    numbers = exact(converted(every, wire, dtype), dtype)
    numbers = numbers[~np.isnan(numbers)]
    for neighbours in (np.nextafter(numbers, np.inf), np.nextafter(numbers, -np.inf)):
        octets = neighbours.astype(dtype).view(np.uint8)
        assert_same(converted(octets, dtype, wire), converted_by_torch(octets, dtype, wire), wire, "sum")


@needs_compiler
@pytest.mark.parametrize(("source_dtype", "dtype"), CONVERSIONS)
def test_factor_and_division_are_those_of_the_wider_type(source_dtype, dtype):
    octets = rough(source_dtype, 3000, seed=5)
    wide = source_dtype if dtype in HALVES else dtype
    widened = octets if wide == source_dtype else converted_by_torch(octets, source_dtype, wide)
    for factor, divisor in ((0.3, 1), (1.0, 7), (-1e-30, 3)):
        scaled = widened.copy()
        fold("sum", host(scaled, wide), [host(widened.copy(), wide)], factor=factor, divisor=divisor)
        expected = scaled if wide == dtype else converted_by_torch(scaled, wide, dtype)
        found = converted(octets, source_dtype, dtype, factor=factor, divisor=divisor)
        assert_same(found, expected, dtype, "sum")


# In the order of a stream


@needs_compiler
def test_on_the_stand_in_a_fold_waits_for_its_stream(stand_in):
    from hpcpar.transport.gpu.cuda_driver import driver

    cuda = driver()
    stream, other = cuda.stream(), cuda.stream()
    a, b, seen = (stand_in.DeviceArray.from_host(np.full(3000, x, np.float32)) for x in (1, 2, 0))
    with stand_in.Gate(stream):
        StandInKernels().fold("sum", "float32", a.address, [a.address, b.address], 3000, stream=stream)
        cuda.copy(seen.address, a.address, seen.nbytes, other)
        cuda.synchronize(other)
    cuda.synchronize(stream)
    np.testing.assert_array_equal(seen.to_host(), np.full(3000, 1, np.float32))
    np.testing.assert_array_equal(a.to_host(), np.full(3000, 3, np.float32))
    cuda.destroy_stream(other)
    cuda.destroy_stream(stream)


@needs_compiler
def test_on_the_stand_in_a_fold_beyond_its_memory_is_refused(stand_in):
    a = stand_in.DeviceArray.from_host(np.zeros(10, np.float32))
    with pytest.raises(IndexError):
        StandInKernels().fold("sum", "float32", a.address, [a.address], 11, stream=0)


# CUDA's own compiler, and CuPy


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_kernels_compile_for_the_gpu_without_a_stack_frame(tmp_path):
    # Every type and every operation; the host's compiler has had all pairs. One unit is quicker than many.
    lines = [f'#include "{gpu_kernels.SOURCE}"']
    for op, dtype in KERNELS:
        if op == "sum" or (op != "average" and dtype in ("bool", "int32", "bfloat16")):
            body = f"fold_tiles<op_{op}, element_{dtype}>(f);"
            lines.append(f'extern "C" __global__ void {op}_{dtype}(const Fold f) {{ {body} }}')
    for source, target in CONVERSIONS:
        body = f"convert_tiles<element_{source}, element_{target}>(c);"
        lines.append(f'extern "C" __global__ void {source}_{target}(const Convert c) {{ {body} }}')
    unit = tmp_path / "all.cu"
    unit.write_text("\n".join(lines), encoding="utf-8")
    options = (*gpu_kernels.OPTIONS, "-arch=sm_90", "-Xptxas", "-v", "-Werror", "all-warnings")
    done = subprocess.run(
        ["nvcc", *options, "-cubin", "-o", str(tmp_path / "all.cubin"), str(unit)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill", done.stderr)
    assert len(frames) == len(lines) - 1
    assert set(frames) == {("0", "0")}


PTX = [
    gpu_kernels.defines("sum", "bfloat16"),
    gpu_kernels.defines("product", "complex64"),
    gpu_kernels.convert_defines("float64", "float16"),
    gpu_kernels.convert_defines("bfloat16", "float32"),
]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("defined", PTX, ids=" ".join)
def test_no_option_of_the_compiler_flushes_or_fuses(defined, tmp_path):
    # CuPy adds -ftz=true to whatever it is given; fused would be a product and the sum that takes it.
    options = ("-std=c++17", "-ftz=true", "--fmad=true", *defined, "-arch=sm_80", "-ptx")
    target = tmp_path / "kernel.ptx"
    subprocess.run(["nvcc", *options, "-o", target, gpu_kernels.SOURCE], check=True, timeout=60)
    ptx = target.read_text()
    assert "ftz" not in ptx
    assert "fma" not in ptx
    if "-DOPERATION" in defined[0]:
        assert "st.global.v4" in ptx
        assert "ld.global.v4" in ptx


def test_without_cupy_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(CudaError, match=r"pip install 'hpcpar\[cuda13\]'"):
        gpu_kernels.kernels(97)


def test_what_is_used_instead_is_what_everybody_gets():
    instead = HostKernels()
    gpu_kernels.use_instead(instead)
    try:
        assert gpu_kernels.kernels(0) is instead
    finally:
        gpu_kernels.use_instead(None)


class FakeCupy(types.ModuleType):
    """As much of CuPy as is used here; remembers what was compiled, and each launch with its surroundings."""

    def __init__(self):
        super().__init__("cupy")
        self.entered, self.compiled, self.launched = [], [], []
        from_external = lambda foreign: self.surrounding("stream", foreign.__cuda_stream__()[1])  # noqa: E731
        self.cuda = types.SimpleNamespace(
            Device=lambda ordinal: self.surrounding("device", ordinal),
            Stream=types.SimpleNamespace(from_external=from_external),
            MemoryPool=lambda: types.SimpleNamespace(malloc=self.malloc),
            memory=types.SimpleNamespace(OutOfMemoryError=MemoryError),
        )

    def malloc(self, nbytes):
        if nbytes > 2**20:
            raise MemoryError("out of memory")
        return types.SimpleNamespace(ptr=4096, nbytes=nbytes, taken_in=tuple(self.entered))

    def surrounding(self, kind, which):
        owner = self

        class Surrounding:
            def __init__(self):
                self.id, self.attributes = which, {"MultiProcessorCount": 2}

            def __enter__(self):
                owner.entered.append((kind, which))

            def __exit__(self, *_):
                owner.entered.remove((kind, which))

        return Surrounding()

    def RawModule(self, *, code, options):  # noqa: N802
        self.compiled.append(options)
        assert 'extern "C" __global__' in code

        def launch(grid, block, arguments):
            (by_value,) = arguments
            assert by_value.size == 1  # CuPy passes no other array by value
            self.launched.append((grid, block, by_value.tobytes(), tuple(self.entered)))

        is_convert = any(option.startswith("-DSOURCE_ELEMENT") for option in options)
        return types.SimpleNamespace(
            get_function=lambda name: {("fold", "convert")[is_convert]: launch}[name]
        )


def test_scratch_memory_is_taken_for_the_stream_and_a_full_device_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy())
    kernels = gpu_kernels.Kernels(5)
    memory = kernels.memory(0, 77)
    assert (memory.nbytes, memory.taken_in) == (1, (("device", 5), ("stream", 77)))
    with pytest.raises(CudaError, match=r"2\.0 MiB of scratch memory .*out of memory"):
        kernels.memory(2**21, 77)


def test_cupy_compiles_a_kernel_once_and_launches_it_on_the_stream(monkeypatch):
    cupy = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    kernels = gpu_kernels.Kernels(5)
    for stream in (77, 78, 77):
        kernels.fold("average", "float32", 4096, [4096, 8192], 10**6, divisor=2, stream=stream)
    assert cupy.compiled == [(*gpu_kernels.OPTIONS, "-DOPERATION=op_sum", "-DELEMENT=element_float32")]
    argument = gpu_kernels.ARGUMENTS.pack(4096, 10**6, 1.0, 2, 2, 0, 4096, 8192, *[0] * 62)
    launch = (16,), (THREADS,), argument  # eight blocks for each of the two multiprocessors
    assert cupy.launched == [(*launch, (("device", 5), ("stream", s))) for s in (77, 78, 77)]
    kernels.fold("sum", "float32", 4096, [4096, 8192], 5, stream=77)
    assert cupy.launched[-1][0] == (1,)  # no more blocks than there are tiles
    kernels.fold("sum", "float32", 4096, [4096], 0, stream=77)
    assert len(cupy.launched) == 4
    for _ in range(2):
        kernels.convert("float16", 4096, "float32", 8192, 5000, factor=0.5, stream=77)
    assert cupy.compiled[1:] == [
        (*gpu_kernels.OPTIONS, "-DSOURCE_ELEMENT=element_float32", "-DELEMENT=element_float16")
    ]
    argument = gpu_kernels.CONVERT_ARGUMENTS.pack(4096, 8192, 5000, 0.5, 1)
    assert cupy.launched[4:] == [((3,), (THREADS,), argument, (("device", 5), ("stream", 77)))] * 2
    kernels.convert("float16", 4096, "float32", 8192, 0, stream=77)
    assert len(cupy.launched) == 6
    assert not cupy.entered


def test_a_device_has_one_set_of_kernels_for_all_threads(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy())
    monkeypatch.setattr(gpu_kernels, "_known", {})
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(gpu_kernels.kernels, [0, 1, 0, 1, 0]))
    assert len({id(kernels) for kernels in found}) == 2
