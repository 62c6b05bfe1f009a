"""Types and scales, and training in 16 bits beside plain mixed precision in one process.

The reference: float32 master weights, of which the model is a rounded copy; every rank's gradient in 16 bits;
their average, rounded to 16 bits once; the optimizer in float32 on the masters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import Precision, summon_full_parameters
from hpcpar.data_parallel.precision import (
    GROWTH_INTERVAL,
    INITIAL_SCALE,
    LARGEST_SCALE,
    LossScaler,
    master_dtype,
    narrowed,
)
from hpcpar.errors import OperationError
from tests.data_parallel.staged import fill, masters_of, ranks, staged, whole
from tests.grid import pairwise

STAGES = [0, 1, 2, 3]


# --- names --------------------------------------------------------------------------------------------


def test_float16_alone_is_scaled_by_itself() -> None:
    scales = {name: Precision(name).loss_scale for name in ("float64", "float32", "bfloat16", "float16")}
    assert scales == {"float64": None, "float32": None, "bfloat16": None, "float16": "dynamic"}
    assert Precision("float16", loss_scale=None).loss_scale is None
    assert Precision("bfloat16", loss_scale=128).loss_scale == 128


def test_a_precision_is_known_by_its_types() -> None:
    assert Precision.of("bfloat16") == Precision(torch.bfloat16) == Precision.of(torch.bfloat16)
    assert Precision.of(None) is None
    asked = Precision("bfloat16", moments="bfloat16", reduction="float32")
    assert Precision.of(asked) is asked
    assert (asked.moments, asked.reduction) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "int32", "complex64", "bf16", "nn", 7])
def test_what_is_no_type_to_train_in_is_refused(name: Any) -> None:
    for options in ({"parameters": name}, {"parameters": "bfloat16", "moments": name}):
        with pytest.raises(OperationError, match=rf"={name!r} is no type to train in"):
            Precision(**options)


@pytest.mark.parametrize("name", ["float16", torch.float16])
def test_moments_in_float16_are_refused(name: Any) -> None:
    with pytest.raises(OperationError, match="cannot hold the squares of small gradients"):
        Precision("bfloat16", moments=name)


@pytest.mark.parametrize("scale", [0, -2.0, math.inf, math.nan, "static", 2.0**127])
def test_what_is_no_scale_is_refused(scale: Any) -> None:
    with pytest.raises(OperationError, match="loss_scale="):
        Precision("float16", loss_scale=scale)


def test_only_16_bits_have_masters() -> None:
    half = Precision("float16")
    assert master_dtype(torch.float16, half) == master_dtype(torch.bfloat16, half) == torch.float32
    assert master_dtype(torch.float64, half) == torch.float64
    assert master_dtype(torch.bfloat16, None) == torch.bfloat16


# --- the scale of the loss ----------------------------------------------------------------------------


def test_the_scale_halves_with_every_overflow_and_never_falls_below_one() -> None:
    scaler = LossScaler("dynamic")
    scales = []
    for _ in range(20):
        scaler.update(overflow=True)
        scales.append(scaler.scale)
    assert scales == [max(1.0, INITIAL_SCALE / 2**count) for count in range(1, 21)]
    assert scaler.skipped == 20


def test_the_scale_doubles_after_an_interval_without_overflow_up_to_the_largest() -> None:
    scaler = LossScaler("dynamic")
    for _ in range(GROWTH_INTERVAL - 1):
        scaler.update(overflow=False)
    assert scaler.scale == INITIAL_SCALE
    scaler.update(overflow=True)
    for _ in range(GROWTH_INTERVAL - 1):
        scaler.update(overflow=False)
    assert scaler.scale == INITIAL_SCALE / 2, "an overflow begins the interval anew"
    scaler.update(overflow=False)
    assert scaler.scale == INITIAL_SCALE
    for _ in range(20 * GROWTH_INTERVAL):
        scaler.update(overflow=False)
    assert scaler.scale == LARGEST_SCALE


def test_a_scale_that_was_given_stays() -> None:
    for scaler, scale in ((LossScaler(512), 512.0), (LossScaler(None), 1.0)):
        scaler.update(overflow=True)
        for _ in range(GROWTH_INTERVAL):
            scaler.update(overflow=False)
        assert (scaler.scale, scaler.skipped) == (scale, 1)


def test_a_scaler_goes_on_from_its_state() -> None:
    scaler, other = LossScaler("dynamic"), LossScaler("dynamic")
    scaler.update(overflow=True)
    for _ in range(GROWTH_INTERVAL - 1):
        scaler.update(overflow=False)
    other.load_state_dict(scaler.state_dict())
    other.update(overflow=False)
    assert (other.scale, other.skipped) == (INITIAL_SCALE, 1)


# --- moments in 16 bits -------------------------------------------------------------------------------


def test_what_falls_slowly_falls_in_bfloat16_too() -> None:
    # Adam's second moment without gradients; the nearest bfloat16 of 0.999 is 1 for ever.
    nearest = kept = torch.linspace(1.0, 2.0, 4096)
    for step in range(2000):
        nearest = (nearest * 0.999).bfloat16().float()
        kept = narrowed(kept * 0.999, torch.bfloat16, step).float()
    expected = torch.linspace(1.0, 2.0, 4096) * 0.999**2000
    assert nearest.mean() > 1.0
    # Numbers that meet go on together, so that few of them are left to have a mean.
    assert kept.mean().item() == pytest.approx(expected.mean().item(), rel=0.05)
    assert ((kept - expected).abs() < 0.5 * expected).all()


def test_rounding_is_right_on_average_and_to_a_neighbour() -> None:
    value = torch.tensor([1.0 + 2**-9, -3.1, 1e-20, -7e30])
    found = torch.stack([narrowed(value, torch.bfloat16, step).double() for step in range(4000)])
    assert torch.allclose(found.mean(0), value.double(), rtol=3e-4)
    assert ((found / value.double() - 1).abs() < 2**-7).all()
    assert all(len(column.unique()) == 2 for column in found.T)


def test_what_bfloat16_can_hold_and_what_is_no_number_stays() -> None:
    held = torch.randn(100, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    broken = torch.tensor([math.inf, -math.inf, 0.0, -0.0])
    nans = torch.tensor([math.nan, -math.nan]) + broken[:2]
    for step in range(50):
        assert torch.equal(narrowed(held, torch.bfloat16, step).float(), held)
        assert torch.equal(narrowed(broken, torch.bfloat16, step).float(), broken)
        assert narrowed(nans, torch.bfloat16, step).isnan().all()
    assert narrowed(held, torch.float64, 1).dtype == torch.float64
    assert narrowed(held.double(), torch.bfloat16, 1).dtype == torch.bfloat16


# --- training in 16 bits ------------------------------------------------------------------------------

STEPS = 6
SAMPLES = 12


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 3)
        fill(self, 5, 1 / 3, dtype=torch.float32)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(SAMPLES, 5, generator=generator), torch.randn(SAMPLES, 3, generator=generator)


def part(step: int, rank: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    length = SAMPLES // size
    return [tensor[rank * length : (rank + 1) * length].to(dtype) for tensor in batch(step)]


def make(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def plain(
    size: int, dtype: torch.dtype, *, scale: float = 1.0, reduction: torch.dtype | None = None
) -> list[Tensor]:
    """Mixed precision in one process, which plays `size` ranks one after another; the masters at the end."""
    model = Network()
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    model.to(dtype)
    optimizer = make(masters)
    for step in range(STEPS):
        of_ranks = []
        for rank in range(size):
            inputs, targets = part(step, rank, size, dtype)
            model.zero_grad()
            (functional.mse_loss(model(inputs), targets) * scale).backward()
            of_ranks.append([parameter.grad.float() for parameter in model.parameters()])
        for master, *gradients in zip(masters, *of_ranks, strict=True):
            master.grad = (sum(gradients) / size).to(reduction or dtype).float() / scale
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
    return masters


def trained(comm: Communicator, stage: int, precision: Precision, **options: Any) -> list[Tensor]:
    """The masters at the end, whole."""
    model = Network()
    optimizer = staged(
        model,
        make(list(model.parameters())),
        comm,
        stage,
        precision=precision,
        bucket_bytes=400,
        first_bucket_bytes=100,
        **options,
    )
    for step in range(STEPS):
        inputs, targets = part(step, comm.rank, comm.size, precision.parameters)
        optimizer.scale_loss(functional.mse_loss(model(inputs), targets)).backward()
        optimizer.step()
        optimizer.zero_grad()
    masters = masters_of(optimizer)
    with summon_full_parameters(model):
        for parameter, master in zip(model.parameters(), masters, strict=True):
            assert torch.equal(parameter, master.to(precision.parameters)), "parameters are rounded masters"
    return masters


def distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference of a weight, of which every step moves each by about 0.01."""
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("name", "stage", "size"), pairwise(["bfloat16", "float16"], STAGES, [1, 2, 3]))
def test_training_in_16_bits_follows_plain_mixed_precision(name: str, stage: int, size: int) -> None:
    precision = Precision(name, loss_scale=256.0 if name == "float16" else None)
    expected = plain(size, precision.parameters, scale=256.0 if name == "float16" else 1.0)
    found = run_loopback(size, lambda comm: trained(comm, stage, precision))
    # On one rank all is the same to the last bit of float32. On two, sums of two in 16 bits are rounded as
    # the reference's are. On more, partial sums are rounded, too: a gradient of 8 bits is off by 2⁻⁸ of
    # itself, and where it is nearly zero, AdamW's step, at most 0.01, may be another.
    limit = 1e-6 if size <= 2 else 0.003
    assert max(distance(masters, expected) for masters in found) < limit
    assert all(torch.equal(a, b) for masters in found for a, b in zip(masters, found[0], strict=True))


@pytest.mark.parametrize("stage", STAGES)
def test_sums_in_float32_are_nearer_to_the_true_average(stage: int) -> None:
    # Accumulated in float32 and never rounded: the average of the ranks' bfloat16 gradients.
    truth = plain(3, torch.bfloat16, reduction=torch.float32)
    wide = Precision("bfloat16", reduction="float32")
    narrow = Precision("bfloat16")
    (with_wide, *_), (with_narrow, *_) = (
        run_loopback(3, lambda comm, p=precision: trained(comm, stage, p)) for precision in (wide, narrow)
    )
    assert distance(with_wide, truth) < 1e-5
    assert distance(with_narrow, truth) > 1e-4


@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_on_one_rank_is_skipped_by_all_and_training_goes_on(stage: int) -> None:
    size, bad_step = 3, 2

    def body(comm: Communicator) -> tuple[list[Tensor], list[float], list[bool]]:
        model = Network()
        precision = Precision("float16")
        optimizer = staged(
            model,
            make(list(model.parameters())),
            comm,
            stage,
            precision=precision,
            bucket_bytes=400,
            first_bucket_bytes=100,
        )
        optimizer.scaler.scale = 1024.0
        scales, unchanged = [], []
        for step in (0, 1, bad_step, *range(2, STEPS)):
            inputs, targets = part(step, comm.rank, size, torch.float16)
            loss = functional.mse_loss(model(inputs), targets)
            bad = step == bad_step and len(scales) == bad_step
            before = whole(model)
            optimizer.scale_loss(loss * (math.inf if bad and comm.rank == 1 else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            unchanged.append(all(torch.equal(a, b) for a, b in zip(before, whole(model), strict=True)))
            scales.append(optimizer.scaler.scale)
        assert optimizer.scaler.skipped == 1
        return masters_of(optimizer), scales, unchanged

    expected = plain(size, torch.float16, scale=1024.0)
    for masters, scales, unchanged in run_loopback(size, body):
        assert scales == [1024.0, 1024.0] + [512.0] * 5
        assert unchanged == [False, False, True, False, False, False, False]
        assert distance(masters, expected) < 0.003


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_done_to_gradients_does_not_hide_an_overflow(stage: int) -> None:
    class Bias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.ones(5))

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs + self.bias

    def body(comm: Communicator) -> tuple[int, float, float]:
        model = Bias()
        optimizer = staged(model, make(list(model.parameters())), comm, stage, precision="float16")
        # Infinite, and not NaN, which no clipping hides.
        (model(torch.ones(5, dtype=torch.float16)).sum() * (math.inf if comm.rank else 1.0)).backward()
        optimizer.clip_grad_value_(0.1)
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        with summon_full_parameters(model):
            return optimizer.scaler.skipped, optimizer.scaler.scale, model.bias.sum().item()

    assert run_loopback(2, body) == [(1, INITIAL_SCALE / 2, 5.0)] * 2


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_knows_of_the_scale(stage: int) -> None:
    def norm_and_masters(comm: Communicator, scale: float | None) -> tuple[float, list[Tensor]]:
        model = Network()
        precision = Precision("bfloat16", loss_scale=scale)
        optimizer = staged(
            model, torch.optim.SGD(model.parameters(), lr=1.0), comm, stage, precision=precision
        )
        inputs, targets = part(0, comm.rank, comm.size, torch.bfloat16)
        optimizer.scale_loss(functional.mse_loss(model(inputs), targets)).backward()
        norms = [float(optimizer.clip_grad_norm_(0.5)), float(optimizer.clip_grad_norm_(0.25))]
        optimizer.clip_grad_value_(0.01)
        optimizer.step()
        return norms, masters_of(optimizer)

    # A power of two changes exponents alone, so all is the same to the last bit.
    scaled = run_loopback(2, lambda comm: norm_and_masters(comm, 64.0))
    unscaled = run_loopback(2, lambda comm: norm_and_masters(comm, None))
    for (norms, masters), (other_norms, others) in zip(scaled, unscaled, strict=True):
        assert norms == other_norms
        assert norms[1] == pytest.approx(0.5, rel=1e-5)
        assert all(torch.equal(a, b) for a, b in zip(masters, others, strict=True))
        assert 0 < distance(masters, [p.detach() for p in Network().parameters()]) <= 0.0101


@pytest.mark.parametrize("stage", [0, 1, 2])
@ranks(2)
def test_master_weights_follow_parameters_that_were_written_to(comm: Communicator, stage: int) -> None:
    """As by load_state_dict; the others' keep what bfloat16 cannot hold."""
    model = Network()
    starts = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = staged(model, torch.optim.SGD(model.parameters(), lr=0.0), comm, stage, precision="bfloat16")
    name, written = next(iter(model.named_parameters()))
    model.load_state_dict({name: torch.full_like(written, 3.0)}, strict=False)
    starts[0] = torch.full_like(starts[0], 3.0)
    before = masters_of(optimizer)
    inputs, targets = part(0, comm.rank, comm.size, torch.bfloat16)
    functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    assert torch.equal(written, torch.full_like(written, 3.0))
    masters = [*before, *masters_of(optimizer)]
    assert all(torch.equal(a, b) for a, b in zip(masters, starts * 2, strict=True))
