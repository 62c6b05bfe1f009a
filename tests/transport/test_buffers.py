"""Arrays as host memory, and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcpar.errors import BufferTypeError
from hpcpar.transport.buffers import DTYPES, bind, empty_like, flat

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
