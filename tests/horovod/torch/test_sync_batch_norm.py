from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import hpcpar.horovod.torch as hvd

ROWS = ([3, 1, 5, 2], [0, 4, 1, 0], [2, 2, 2, 2], [4, 0, 0, 1])


@pytest.fixture(autouse=True)
def _initialized() -> None:
    hvd.init()


@dataclass
class Outcome:
    """Results of a layer for this rank's rows."""

    outputs: torch.Tensor
    input_gradients: torch.Tensor
    parameter_gradients: list[torch.Tensor]
    buffers: list[torch.Tensor]


def data(rows: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of all ranks, with means that are large beside their spread, and weights of the outputs."""
    generator = torch.Generator().manual_seed(3)
    full = (sum(rows), *shape)
    x = torch.randn(full, generator=generator, dtype=torch.float64) * 2 + 30
    return x.to(dtype), torch.randn(full, generator=generator, dtype=torch.float64).to(dtype)


def outcome(layer: nn.Module, xs: list[torch.Tensor], weights: list[torch.Tensor]) -> Outcome:
    """Two training passes."""
    outputs, gradients = [], []
    for x, weight in zip(xs, weights, strict=True):
        x = x.clone().requires_grad_()
        y = layer(x)
        (y * weight).sum().backward()
        outputs.append(y.detach())
        gradients.append(x.grad)
    return Outcome(
        torch.stack(outputs),
        torch.stack(gradients),
        [parameter.grad for parameter in layer.parameters()],
        list(layer.buffers()),
    )


def layers(kind: type[nn.Module], **options: Any) -> tuple[nn.Module, nn.Module]:
    """SyncBatchNorm and the layer that it has to equal, with the same parameters."""
    ours, plain = hvd.SyncBatchNorm(3, **options), kind(3, **options)
    with torch.no_grad():
        for parameter, other in zip(ours.parameters(), plain.parameters(), strict=True):
            parameter.copy_(torch.linspace(0.5, 2.0, 3))
            other.copy_(parameter)
    return ours, plain


def compare(
    ours: nn.Module, plain: nn.Module, rows: Sequence[int], shape: Sequence[int], **tolerance: Any
) -> None:
    dtype = next((p.dtype for p in plain.parameters()), torch.float32)
    x, weight = data(rows, shape, dtype)
    start = sum(rows[: hvd.rank()])
    part = slice(start, start + rows[hvd.rank()])
    found = outcome(ours, [x[part], x[part] * 0.5], [weight[part]] * 2)
    expected = outcome(plain, [x, x * 0.5], [weight] * 2)
    totals = [hvd.allreduce(gradient, op=hvd.Sum) for gradient in found.parameter_gradients]
    torch.testing.assert_close(found.outputs, expected.outputs[:, part], **tolerance)
    torch.testing.assert_close(found.input_gradients, expected.input_gradients[:, part], **tolerance)
    torch.testing.assert_close(totals, expected.parameter_gradients, **tolerance)
    torch.testing.assert_close(found.buffers, expected.buffers, **tolerance)


def of_this_size(rows: Sequence[int]) -> list[int]:
    """Return rows for each rank there is, more than one value in all."""
    mine = list(rows[: hvd.size()])
    mine[-1] += 2 if sum(mine) < 2 else 0
    return mine


@pytest.mark.mpi
@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.BatchNorm1d, (3,)),
        (nn.BatchNorm1d, (3, 5)),
        (nn.BatchNorm2d, (3, 4, 2)),
        (nn.BatchNorm3d, (3, 2, 2, 2)),
    ],
)
def test_all_ranks_batches_are_one_batch(
    rows: list[int], kind: type[nn.Module], shape: tuple[int, ...]
) -> None:
    ours, plain = layers(kind, dtype=torch.float64)
    compare(ours, plain, of_this_size(rows), shape, rtol=1e-11, atol=1e-11)  # 64-bit: sums of 40 values


@pytest.mark.mpi
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": None},
        {"momentum": 0.3},
        {"affine": False},
        {"track_running_stats": False},
        {"eps": 0.1},
    ],
    ids=str,
)
def test_every_option_does_what_it_does_in_batch_norm(options: dict[str, Any]) -> None:
    ours, plain = layers(nn.BatchNorm2d, **options)
    # 32-bit, and means 15 times the spread: the plain layer itself is off by 30 times 6e-8, times the weight
    compare(ours, plain, of_this_size(ROWS[0]), (3, 4, 2), rtol=2e-5, atol=2e-5)


@pytest.mark.mpi
def test_means_that_are_large_beside_the_spread_cost_no_digits_of_the_variance() -> None:
    x = (torch.arange(8.0) % 2).view(8, 1) + 4000.0 + 100.0 * hvd.rank()  # exact in 32 bits
    layer = hvd.SyncBatchNorm(1, momentum=1.0)
    layer(x)
    everything = torch.cat([x.double() + 100.0 * (rank - hvd.rank()) for rank in range(hvd.size())])
    expected = everything.var(0)
    torch.testing.assert_close(layer.running_var.double(), expected, rtol=1e-7, atol=0.0)


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("narrow_parameters", [False, True])
def test_narrow_inputs_are_computed_wide(dtype: torch.dtype, narrow_parameters: bool) -> None:
    x = torch.randn(6, 3, 4).to(dtype)
    ours, plain = layers(nn.BatchNorm1d)
    if narrow_parameters:
        ours.to(dtype)
    given = x.clone().requires_grad_()
    found = ours(given)
    (found.float() * torch.arange(4.0)).sum().backward()
    everything = torch.cat(hvd.allgather_object(x)).float().requires_grad_()
    expected = plain(everything)
    (expected * torch.arange(4.0)).sum().backward()
    part = slice(6 * hvd.rank(), 6 * hvd.rank() + 6)
    eps = torch.finfo(dtype).eps
    assert found.dtype == given.grad.dtype == dtype
    torch.testing.assert_close(found.float(), expected[part], rtol=2 * eps, atol=4 * eps)
    torch.testing.assert_close(given.grad.float(), everything.grad[part], rtol=4 * eps, atol=8 * eps)


@pytest.mark.mpi
def test_channels_last_images_stay_so() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    y = hvd.SyncBatchNorm(3)(x)
    y.square().sum().backward()
    assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.mpi
def test_gradients_of_the_input_alone_and_of_the_parameters_alone() -> None:
    x = torch.randn(4, 3)
    first = hvd.SyncBatchNorm(3)
    first(x).sum().backward()
    frozen = hvd.SyncBatchNorm(3).requires_grad_(False)
    given = x.clone().requires_grad_()
    frozen(given).square().sum().backward()
    assert first.weight.grad is not None
    assert frozen.weight.grad is None
    assert given.grad is not None


@pytest.mark.mpi
def test_two_layers_in_a_row_equal_two_of_one_process() -> None:
    ours, plain = (
        nn.Sequential(kind(3), nn.ReLU(), nn.Linear(3, 3), kind(3))
        for kind in (hvd.SyncBatchNorm, nn.BatchNorm1d)
    )
    torch.manual_seed(1)
    plain.load_state_dict(
        {name: torch.rand_like(t.float()).to(t.dtype) for name, t in plain.state_dict().items()}
    )
    ours.load_state_dict(plain.state_dict())
    compare(ours.double(), plain.double(), of_this_size(ROWS[0]), (3,), rtol=1e-10, atol=1e-10)


@pytest.mark.mpi
def test_evaluation_exchanges_nothing() -> None:
    ours, plain = layers(nn.BatchNorm1d)
    x = torch.randn(4, 3) * (hvd.rank() + 1)
    found = expected = None
    if hvd.rank() == 0:  # the others would be missed
        found, expected = ours.eval()(x), plain.eval()(x)
    hvd.barrier()
    if hvd.rank() == 0:
        torch.testing.assert_close(found, expected)


@pytest.mark.mpi
def test_evaluation_without_running_statistics_goes_by_all_ranks_batches() -> None:
    ours, plain = layers(nn.BatchNorm1d, track_running_stats=False, dtype=torch.float64)
    compare(ours.eval(), plain.eval(), of_this_size(ROWS[0]), (3,), rtol=1e-11, atol=1e-11)


@pytest.mark.mpi
def test_statistics_that_are_tracked_no_more_stay() -> None:
    ours, plain = layers(nn.BatchNorm1d, dtype=torch.float64)
    ours.track_running_stats = plain.track_running_stats = False
    compare(ours, plain, of_this_size(ROWS[0]), (3,), rtol=1e-11, atol=1e-11)


@pytest.mark.mpi
def test_a_model_is_converted_with_its_parameters_and_statistics() -> None:
    plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=None)).double()
    ours = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    ours.load_state_dict(plain.state_dict())
    assert type(ours[1]) is hvd.SyncBatchNorm
    compare(ours, plain, of_this_size(ROWS[0]), (3,), rtol=1e-10, atol=1e-10)


@pytest.mark.mpi
def test_a_process_set_is_a_batch_of_its_own() -> None:
    if hvd.size() == 1:
        pytest.skip("one rank has no subsets")
    evens = hvd.ProcessSet(range(0, hvd.size(), 2))
    hvd.shutdown()
    hvd.init(process_sets=[evens])
    ours, plain = layers(nn.BatchNorm1d, dtype=torch.float64)
    layer = hvd.SyncBatchNorm(3, process_set=evens, dtype=torch.float64)
    layer.load_state_dict(ours.state_dict())
    x = torch.randn(4, 3, dtype=torch.float64)
    found = layer(x)
    everything = hvd.allgather_object(x)
    whole = torch.cat([everything[rank] for rank in evens.ranks]) if evens.included() else x
    expected = plain(whole)
    start = 4 * evens.rank() if evens.included() else 0
    hvd.shutdown()
    torch.testing.assert_close(found, expected[start : start + 4])


@pytest.mark.mpi
def test_one_value_per_channel_in_all_is_an_error_on_every_rank() -> None:
    layer = hvd.SyncBatchNorm(3)
    x = torch.ones(1 if hvd.rank() == 0 else 0, 3)
    message = ""
    try:
        layer(x)
    except ValueError as error:
        message = str(error)
    assert "more than 1 value per channel" in message


@pytest.mark.parametrize("shape", [(3,), (2, 4), (2, 4, 3)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"needs an input of shape \[B, 3, \.\.\.\], not"):
        hvd.SyncBatchNorm(3)(torch.ones(shape))


def test_training_before_init_is_refused_and_evaluation_is_not() -> None:
    hvd.shutdown()
    layer = hvd.SyncBatchNorm(3)
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"before hvd\.init\(\)"):
        layer(x)
    assert layer.eval()(x).shape == (2, 3)


def test_a_layer_can_be_copied_and_saved() -> None:
    layer = hvd.SyncBatchNorm(3)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    copies = [copy.deepcopy(layer), torch.load(file, weights_only=False)]
    assert [twin.process_set is hvd.global_process_set for twin in copies] == [True, True]
    assert list(layer.state_dict()) == list(nn.BatchNorm1d(3).state_dict())
