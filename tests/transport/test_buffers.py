"""Arrays as host memory, and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from hpcpar.comm import run_loopback
from hpcpar.errors import BufferTypeError
from hpcpar.transport.buffers import (
    DTYPES,
    bind,
    empty_like,
    flat,
    from_octets,
    itemsize_of_dtype,
)

NUMPY_DTYPES = [name for name in DTYPES if name != "bfloat16"]


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_a_numpy_array_is_bound_without_a_copy(dtype):
    array = np.zeros((2, 3), dtype=dtype)
    binding = bind(array, writable=True)
    binding.host.octets[:] = 1
    assert binding.write_back is None
    assert (binding.host.count, binding.host.dtype) == (6, dtype)
    assert array.view(np.uint8).min() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.uint16])
def test_a_torch_tensor_is_bound_without_a_copy(dtype):
    tensor = torch.zeros(2, 3, dtype=dtype)
    binding = bind(tensor, writable=True)
    binding.host.octets[:] = 1
    assert binding.write_back is None
    assert binding.host.count == 6
    assert tensor.view(torch.uint8).min() == 1


@pytest.mark.parametrize("make", [lambda: np.zeros((4, 4))[:, ::2], lambda: torch.zeros(4, 4)[:, ::2]])
def test_what_is_not_contiguous_is_copied_and_written_back(make):
    array = make()
    binding = bind(array, writable=True)
    binding.host.elements[...] = 5
    assert float(array.max()) == 0
    binding.write_back()
    assert float(array.min()) == 5


def test_a_conjugate_view_is_resolved_before_it_travels():
    tensor = torch.tensor([1 + 2j]).conj()
    assert bind(tensor, writable=False).host.elements[0] == 1 - 2j


@pytest.mark.parametrize("array", [np.empty(0), torch.empty(0, 3), torch.empty(0, dtype=torch.bfloat16)])
def test_an_empty_array_is_bound(array):
    host = bind(array, writable=True).host
    assert host.count == 0
    assert host.octets.size == 0


@pytest.mark.parametrize("array", [np.array(1.5), torch.tensor(1.5)])
def test_an_array_of_no_dimensions_has_one_element(array):
    assert bind(array, writable=False).host.count == 1


def test_parts_and_copies_know_their_memory():
    array = np.arange(10.0)
    host = bind(array, writable=True).host
    part = host.part(2, 5)
    copy = part.copy()
    part.elements[...] += 100
    assert array[2:5].tolist() == [102, 103, 104]
    assert copy.elements.tolist() == [2, 3, 4]
    assert host.scratch(7).count == 7


def test_a_bfloat16_part_shares_memory_under_both_faces():
    tensor = torch.arange(8, dtype=torch.bfloat16)
    part = bind(tensor, writable=True).host.part(2, 4)
    part.elements.add_(1)
    assert part.octets.size == 4
    assert tensor.tolist() == [0, 1, 3, 4, 4, 5, 6, 7]
    assert part.like(part.octets.copy()).elements.tolist() == [3, 4]


def test_fresh_arrays_are_of_the_same_library_and_type():
    assert empty_like(np.ones(3, np.float32), 5).dtype == np.float32
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    fresh = empty_like(parameter, 5)
    assert (fresh.shape, fresh.dtype, fresh.requires_grad) == ((5,), torch.bfloat16, False)
    assert flat(parameter).data_ptr() == parameter.data_ptr()


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (3.5, "builtins.float"),
        (np.array([object()]), "object"),
        (np.zeros(2, dtype=[("a", "f4")]), "elements of type"),
        (np.zeros(2, dtype="M8[s]"), "datetime64"),
        (np.zeros(2, dtype=">i4"), "native byte order"),
        (torch.zeros(2, dtype=torch.float8_e5m2), "float8_e5m2"),
    ],
)
def test_what_cannot_travel_is_named(array, words):
    with pytest.raises(BufferTypeError, match=words):
        bind(array, writable=False, what="the gradient")


def fake_tensor():
    with FakeTensorMode():
        return torch.ones(3)


@pytest.mark.filterwarnings("ignore")  # torch calls most of these a prototype
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.eye(4).to_sparse(), "sparse_coo tensor.*pass tensor.to_dense"),
        (lambda: torch.eye(4).to_sparse_csr(), "sparse_csr tensor.*pass tensor.to_dense"),
        (lambda: torch.eye(4).to_sparse_csc(), "sparse_csc tensor.*pass tensor.to_dense"),
        (lambda: torch.eye(4).to_mkldnn(), "_mkldnn tensor.*pass tensor.to_dense"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensor.*unbind"),
        (lambda: torch.ones(3, device="meta"), "meta device"),
        (fake_tensor, "FakeTensor, which stands for its elements"),
        (lambda: np.ma.masked_array([1.0, 2.0], [False, True]), "MaskedArray.*mask would be lost"),
    ],
)
@pytest.mark.parametrize("as_out", [False, True])
def test_an_array_without_plain_memory_is_refused_before_anything_moves(make, words, as_out):
    def body(comm):
        with pytest.raises(BufferTypeError, match=words):
            comm.allreduce(torch.ones(4) if as_out else make(), out=make() if as_out else None)

    run_loopback(2, body)


def test_a_masked_array_is_refused_after_a_call_on_its_data():
    masked = np.ma.masked_array([1.0, 2.0], [False, True])

    def body(comm):
        for _ in range(3):
            comm.allreduce(masked.data)
        with pytest.raises(BufferTypeError, match="MaskedArray"):
            comm.allreduce(masked)

    run_loopback(1, body)


def test_a_tensor_under_a_function_transform_is_refused():
    for transform in (torch.vmap, torch.func.grad):
        with pytest.raises(BufferTypeError, match="call the collective outside of the transformed function"):
            transform(lambda tensor: bind(tensor, writable=False) and tensor.sum())(torch.ones(3))


def gradient_of_a_sum():
    x = torch.ones(3, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(x.sum(), x)
    return gradient


@pytest.mark.parametrize(
    ("make", "copied"),
    [
        (gradient_of_a_sum, "tensor.contiguous"),
        (lambda: torch.ones(5).expand(2, 5), "tensor.contiguous"),
        (lambda: torch.arange(8.0).unfold(0, 3, 1), "tensor.contiguous"),
        (lambda: np.lib.stride_tricks.as_strided(np.ones(6), (4, 3), (8, 8)), "numpy.ascontiguousarray"),
    ],
)
def test_a_result_into_elements_that_share_memory_is_refused_with_the_call_that_works(make, copied):
    for _ in range(2):
        with pytest.raises(BufferTypeError, match=rf"one place in memory.*Pass {copied}"):
            bind(make(), writable=True)
    assert bind(make(), writable=False).host.count == np.prod(make().shape)


def test_views_whose_elements_are_distinct_take_a_result():
    array = np.zeros((4, 6))
    interleaved = torch.zeros(16).as_strided((2, 3), (3, 2))  # 0 2 4 and 3 5 7
    for view in (array.T, array[::-2, ::3], array[:, :1], torch.zeros(3, 4).t(), interleaved):
        binding = bind(view, writable=True)
        binding.host.elements[...] = np.arange(binding.host.count)
        binding.write_back()
        assert view.reshape(-1).tolist() == list(range(binding.host.count))
    assert bind(torch.ones(1).expand(0, 1), writable=True).host.count == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cuda_tensor_is_staged_and_written_back(dtype):
    tensor = torch.zeros(5, dtype=dtype, device="cuda")
    binding = bind(tensor, writable=True)
    binding.host.octets[:] = 1
    binding.write_back()
    assert tensor.cpu().view(torch.uint8).min() == 1


@pytest.mark.gpu
def test_a_cupy_array_is_staged_and_written_back():
    cupy = pytest.importorskip("cupy")
    array = cupy.zeros((2, 3))
    binding = bind(array, writable=True)
    binding.host.elements[...] = 7
    binding.write_back()
    assert float(array.min()) == 7


def test_no_bytes_are_no_elements_of_any_type():
    for array in (np.empty(0), torch.empty(0, dtype=torch.bfloat16)):
        host = bind(array, writable=False).host
        assert host.scratch(0).count == host.copy().count == 0


@pytest.mark.parametrize("dtype", ["float64", np.int16, np.dtype("complex64"), torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(6,), (2, 3), ()])
def test_bytes_are_seen_as_an_array_that_shares_their_memory(dtype, shape):
    itemsize, count = itemsize_of_dtype(dtype), int(np.prod(shape))
    octets = np.zeros(count * itemsize, dtype=np.uint8)
    array = from_octets(octets, shape, dtype)
    assert (tuple(array.shape), array.dtype) == (shape, dtype)
    octets[-itemsize:] = bind(
        torch.ones(1).to(dtype) if isinstance(dtype, torch.dtype) else np.ones(1, dtype), writable=False
    ).host.octets
    assert array.reshape(-1)[-1] == 1
    assert not array.reshape(-1)[:-1].any()


@pytest.mark.parametrize("dtype", ["float32", torch.float16])
def test_without_bytes_an_array_has_memory_of_its_own_which_is_zero(dtype):
    array = from_octets(None, (2, 3), dtype)
    assert (tuple(array.shape), array.dtype, array.any().item()) == ((2, 3), dtype, False)
    array[0, 0] = 1
    empty = from_octets(np.empty(0, dtype=np.uint8), (2, 0), dtype)
    assert (tuple(empty.shape), empty.dtype) == ((2, 0), dtype)


@pytest.mark.parametrize("dtype", ["O", "M8[s]", "S3", torch.float8_e5m2])
def test_bytes_of_a_type_that_cannot_travel_are_refused(dtype):
    with pytest.raises(BufferTypeError, match="elements of type"):
        itemsize_of_dtype(dtype)
