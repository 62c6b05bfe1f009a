from __future__ import annotations

import math
import warnings

import pytest
import torch

import hpcpar.horovod.torch as hvd
from hpcpar.horovod.torch import compression
from hpcpar.horovod.torch.compression import Compression, Compressor

NARROW = [(Compression.fp16, torch.float16), (Compression.bf16, torch.bfloat16)]
OTHERS = [torch.uint8, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.complex64]


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "_warned", set())


def there_and_back(compressor: type[Compressor], tensor: torch.Tensor) -> torch.Tensor:
    packed, context = compressor.compress(tensor)
    return compressor.decompress(packed, context)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("compressor", "narrow"), NARROW)
def test_floats_travel_in_two_bytes_and_come_back_in_their_own_type(
    compressor: type[Compressor], narrow: torch.dtype, dtype: torch.dtype
) -> None:
    tensor = torch.randn(3, 5, 2, dtype=dtype)
    packed, context = compressor.compress(tensor)
    back = compressor.decompress(packed, context)
    assert (packed.dtype, packed.shape, back.dtype) == (narrow, tensor.shape, dtype)
    assert torch.equal(back, tensor.to(narrow).to(dtype))


@pytest.mark.parametrize("dtype", OTHERS)
@pytest.mark.parametrize("compressor", [Compression.none, Compression.fp16, Compression.bf16])
def test_other_types_travel_as_they_are(compressor: type[Compressor], dtype: torch.dtype) -> None:
    tensor = torch.ones(4).to(dtype)
    packed, context = compressor.compress(tensor)
    assert packed is tensor
    assert compressor.decompress(packed, context) is tensor


def test_what_float16_cannot_hold_stays_finite_with_its_sign() -> None:
    tensor = torch.tensor([7e4, -1e30, 65504.0, 65519.0, 65520.0, 1.0])
    with pytest.warns(UserWarning, match="4 of 6 values are beyond ±65504"):
        back = there_and_back(Compression.fp16, tensor)
    assert back.tolist() == [65504.0, -65504.0, 65504.0, 65504.0, 65504.0, 1.0]


def test_what_bfloat16_cannot_hold_stays_finite() -> None:
    largest = torch.finfo(torch.bfloat16).max
    with pytest.warns(UserWarning, match="2 of 3 values"):
        back = there_and_back(Compression.bf16, torch.tensor([1e300, -1e300, 1.0], dtype=torch.float64))
    assert back.tolist() == [largest, -largest, 1.0]
    assert there_and_back(Compression.bf16, torch.tensor([3.4e38])).tolist() == [largest]


@pytest.mark.parametrize("compressor", [Compression.fp16, Compression.bf16])
def test_infinities_and_nan_stay_what_they_are(compressor: type[Compressor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back = there_and_back(compressor, torch.tensor([math.inf, -math.inf, math.nan, 2.0])).tolist()
    assert back[:2] == [math.inf, -math.inf]
    assert math.isnan(back[2])
    assert back[3] == 2.0


def test_a_spike_is_told_of_once() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for beyond in (1e6, 1e7, 1e8):
            Compression.fp16.compress(torch.tensor([beyond]))
    assert len(said) == 1
    assert "Compression.bf16" in str(said[0].message)


def test_the_tensor_is_not_written_to() -> None:
    tensor = torch.tensor([7e4, math.inf, -7e4])
    with pytest.warns(UserWarning, match="2 of 3"):
        Compression.fp16.compress(tensor)
    assert tensor.tolist() == [70000.0, math.inf, -70000.0]


def test_an_empty_tensor_is_compressed() -> None:
    assert there_and_back(Compression.fp16, torch.empty(0, 3)).shape == (0, 3)


def test_a_sparse_gradient_is_compressed_by_its_values() -> None:
    tensor = torch.sparse_coo_tensor([[0, 2, 0]], [1.0, 7e4, 0.5], (4,), check_invariants=False)
    with pytest.warns(UserWarning, match="1 of 3 values"):
        packed, context = Compression.fp16.compress(tensor)
    back = Compression.fp16.decompress(packed, context)
    assert packed.dtype == torch.float16
    assert packed.is_sparse
    assert back.to_dense().tolist() == [1.5, 0.0, 65504.0, 0.0]


def test_gradients_flow_through_compression() -> None:
    tensor = torch.tensor([1.0, 2.0], requires_grad=True)
    there_and_back(Compression.fp16, tensor).sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [1.0, 1.0]


def test_a_compressor_of_ones_own_need_not_do_anything() -> None:
    class Mine(Compressor):
        pass

    tensor = torch.ones(2)
    assert there_and_back(Mine, tensor) is tensor


@pytest.mark.mpi
@pytest.mark.parametrize(("compressor", "narrow"), NARROW)
def test_a_compressed_average_is_that_of_the_narrow_values(
    compressor: type[Compressor], narrow: torch.dtype
) -> None:
    hvd.init()
    values = [torch.arange(8.0) * (rank + 1) for rank in range(hvd.size())]  # exact in both types
    found = hvd.allreduce(values[hvd.rank()], compression=compressor)
    expected = torch.stack(values).mean(0)
    assert found.dtype == torch.float32
    assert torch.allclose(found, expected, rtol=2 * torch.finfo(narrow).eps)


@pytest.mark.mpi
def test_an_average_divided_before_its_sum_does_not_leave_float16() -> None:
    hvd.init()
    size = hvd.size()
    found = hvd.allreduce(
        torch.full((3,), 6e4), op=hvd.Sum, prescale_factor=1 / size, compression=Compression.fp16
    )
    assert torch.allclose(found, torch.full((3,), 6e4), rtol=size * torch.finfo(torch.float16).eps)


@pytest.mark.mpi
def test_averages_of_a_group_of_several_types_do_not_leave_float16() -> None:
    hvd.init()
    given = [torch.full((3,), 6e4), torch.full((2,), 6e4, dtype=torch.float64)]
    found = hvd.grouped_allreduce(given, compression=Compression.fp16)
    eps = torch.finfo(torch.float16).eps
    assert [tensor.dtype for tensor in found] == [torch.float32, torch.float64]
    assert all(torch.allclose(a, b, rtol=hvd.size() * eps) for a, b in zip(found, given, strict=True))
    rows = torch.full((hvd.size(),), 6e4, requires_grad=True)
    (scattered,) = hvd.grouped_reducescatter([rows], compression=Compression.fp16)
    scattered.sum().backward()
    assert torch.allclose(scattered, torch.full((1,), 6e4), rtol=hvd.size() * eps)
    assert torch.allclose(rows.grad, torch.ones(hvd.size()))  # an average's, by Horovod's convention
