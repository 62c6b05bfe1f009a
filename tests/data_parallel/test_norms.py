"""Norms from shards are those of whole gradients, whatever they are split over."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcpar.autograd.torch_clipping import note_split_over
from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer, fully_shard
from hpcpar.data_parallel.buckets import Bucket
from hpcpar.data_parallel.norms import GradientNorm
from hpcpar.errors import OperationError
from tests.data_parallel.staged import ranks, staged
from tests.grid import checkered, pairwise

STAGES = [0, 1, 2, 3]
TYPES = [1.0, 2.0, 3.0, math.inf]
NUMELS = (5, 1, 9, 6)


class Pieces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Piece(numel) for numel in NUMELS)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return sum(layer(gradient) for layer, gradient in zip(self.layers, gradients, strict=True))


class Piece(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(numel, dtype=torch.float64))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.value * gradient).sum()


def gradients(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(numel, generator=generator, dtype=torch.float64) for numel in NUMELS]


def averaged(comm: Communicator, stage: int, found: list[Tensor], **options: Any) -> DistributedOptimizer:
    """An optimizer whose average gradients are those of `found` over all ranks."""
    model = Pieces()
    optimizer = staged(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        comm,
        stage,
        bucket_bytes=64,
        first_bucket_bytes=8,
        **options,
    )
    model(found).backward()
    return optimizer


def average(size: int) -> list[Tensor]:
    return [sum(each) / size for each in zip(*(gradients(rank) for rank in range(size)), strict=True)]


@pytest.mark.parametrize(("stage", "size"), checkered(STAGES, [1, 2, 3, 4]))
def test_the_norm_of_shards_is_that_of_the_whole(stage: int, size: int) -> None:
    def body(comm: Communicator) -> tuple[list[float], list[float]]:
        optimizer = averaged(comm, stage, gradients(comm.rank))
        norms = [optimizer.clip_grad_norm_(math.inf, kind).item() for kind in TYPES]
        # One parameter after another: the others' gradients are made zero.
        alone = []
        for name in optimizer.reducer.names:
            kept = {n: g.clone() for n, _, g in optimizer.named_gradients()}
            for other, _, gradient in optimizer.named_gradients():
                gradient.mul_(other == name)
            alone.append(optimizer.clip_grad_norm_(math.inf).item())
            for other, _, gradient in optimizer.named_gradients():
                gradient.copy_(kept[other])
        return norms, alone

    whole = average(size)
    expected = [float(torch.cat(whole).norm(kind)) for kind in TYPES]
    results = run_loopback(size, body)
    for norms, alone in results:
        assert norms == pytest.approx(expected, rel=1e-12)
        assert alone == pytest.approx([float(each.norm()) for each in whole], rel=1e-12)
        assert (norms, alone) == results[0], "the same bits on every rank"


@pytest.mark.parametrize(
    ("stage", "broken", "kind"), pairwise(STAGES, [math.nan, -math.inf], [2.0, math.inf])
)
@ranks(3)
def test_a_gradient_that_is_no_number_on_one_rank_is_seen_by_all(
    comm: Communicator, stage: int, broken: float, kind: float
) -> None:
    found = gradients(comm.rank)
    if comm.rank == 1:
        found[2][-1] = broken
    optimizer = averaged(comm, stage, found)
    finite = optimizer.gradients_are_finite()
    norm = optimizer.clip_grad_norm_(math.inf, kind).item()
    with pytest.raises(OperationError, match="the norm of the gradients is"):
        optimizer.clip_grad_norm_(1.0, kind, error_if_nonfinite=True)
    assert not finite
    assert math.isnan(norm) if math.isnan(broken) else norm == math.inf
    assert all(gradient.isnan().all() for _, _, gradient in optimizer.named_gradients()), "as torch clips"


def test_infinities_that_cancel_are_seen() -> None:
    bucket = Bucket((0,), (0, 4), 4, "float32")
    norm = GradientNorm([torch.ones(1)], [bucket], Communicator.alone(), sharded=False)
    assert not norm.is_finite([torch.tensor([math.inf, -math.inf, 0.0, 0.0])])
    assert norm.is_finite([torch.tensor([3e38, 3e38, 3e38, 0.0])]), "large, but finite"


def test_a_norm_of_16_bits_is_worked_out_in_32() -> None:
    bucket = Bucket((0,), (0, 512), 2, "float16")
    norm = GradientNorm([torch.ones(1)], [bucket], Communicator.alone(), sharded=False)
    found = norm.of([torch.full((512,), 6e4, dtype=torch.float16)])
    assert (found.dtype, found.item()) == (torch.float32, pytest.approx(6e4 * math.sqrt(512), rel=1e-3))


@pytest.mark.parametrize("kind", TYPES)
def test_a_bucket_of_nothing_has_norm_zero(kind: float) -> None:
    buckets = [Bucket((0,), (0, 0), 8, "float64"), Bucket((1,), (0, 1), 8, "float64")]
    norm = GradientNorm([torch.ones(0), torch.ones(1)], buckets, Communicator.alone(), sharded=False)
    flats = [torch.zeros(0, dtype=torch.float64), torch.full((1,), -2.0, dtype=torch.float64)]
    assert norm.of(flats, kind).item() == pytest.approx(2.0)
    assert norm.is_finite(flats)


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_by_value_is_that_of_torch(stage: int) -> None:
    def body(comm: Communicator) -> dict[str, list[float]]:
        optimizer = averaged(comm, stage, gradients(comm.rank))
        optimizer.clip_grad_value_(0.25)
        found: dict[str, list[float]] = {}
        for name, elements, gradient in optimizer.named_gradients():
            found[f"{name} {elements.start}"] = gradient.tolist()
        return found

    results = run_loopback(2, body)
    for number, whole in enumerate(average(2)):
        name = f"layers.{number}.value"
        parts = {key: value for found in results for key, value in found.items() if key.startswith(name)}
        together = [x for key in sorted(parts, key=lambda key: int(key.split()[1])) for x in parts[key]]
        assert together == pytest.approx(whole.clamp(-0.25, 0.25).tolist(), rel=1e-12)


@pytest.mark.parametrize(("stage", "kind"), checkered(STAGES, TYPES))
def test_what_is_split_over_a_second_axis_counts_once_and_so_does_what_is_not(
    stage: int, kind: float
) -> None:
    # dp × tp = 2 × 2. Parameters 0 and 2 are halves of larger ones, 1 and 3 are the same on both tp ranks.
    split = ("layers.0.value", "layers.2.value")

    def body(world: Communicator) -> tuple[float, bool, float]:
        dp_comm, tp_comm = world.split(world.rank % 2, name="dp"), world.split(world.rank // 2, name="tp")
        assert dp_comm is not None
        found = gradients(dp_comm.rank)
        for number in (0, 2):
            found[number] = found[number] * (1 + 2 * tp_comm.rank)
        optimizer = averaged(dp_comm, stage, found, split_over={name: [tp_comm] for name in split})
        norm = optimizer.clip_grad_norm_(math.inf, kind).item()
        finite = optimizer.gradients_are_finite()
        optimizer.zero_grad()
        if world.rank == 3:
            found[0][0] = math.inf
        # All others hear of it: over dp, and over tp.
        broken = averaged(dp_comm, stage, found, split_over={name: [tp_comm] for name in split})
        return norm, finite, broken.clip_grad_norm_(math.inf, kind).item()

    whole = average(2)
    parts = [whole[1], whole[3], *(whole[n] * factor for n in (0, 2) for factor in (1, 3))]
    expected = float(torch.cat(parts).norm(kind))
    results = run_loopback(4, body)
    for norm, finite, broken in results:
        assert norm == pytest.approx(expected, rel=1e-12)
        assert norm == results[0][0], "the same bits on every rank"
        assert finite
        assert broken == math.inf


@pytest.mark.parametrize("kinds", [(("pp",), ("tp", "pp")), (("tp", "pp"), ("pp",)), (("tp", "pp"),)])
def test_ranks_may_hold_other_parameters_split_in_other_ways(kinds: tuple[tuple[str, ...], ...]) -> None:
    # pp × tp = 2 × 2. Stage 0 holds parameters of all of these kinds, stage 1 of the last alone.
    def body(world: Communicator) -> float:
        tp_comm, pp_comm = world.split(world.rank // 2, name="tp"), world.split(world.rank % 2, name="pp")
        by_name = {"tp": tp_comm, "pp": pp_comm}
        mine = kinds if world.rank < 2 else kinds[-1:]
        parameters = [torch.ones(1) for _ in mine]
        for parameter, kind in zip(parameters, mine, strict=True):
            note_split_over(parameter, *(by_name[axis] for axis in kind))
        buckets = [Bucket((number,), (0, 1), 8, "float64") for number in range(len(mine))]
        norm = GradientNorm(parameters, buckets, Communicator.alone(), sharded=False)
        values = [2.0 if kind == ("pp",) else 3.0 + world.rank for kind in mine]
        return norm.of([torch.tensor([value], dtype=torch.float64) for value in values]).item()

    squares = 0.0
    for rank in range(4):
        for kind in kinds if rank < 2 else kinds[-1:]:
            if kind == ("pp",):
                squares += 4.0 if rank % 2 == 0 else 0.0  # the same on both tp ranks: once
            else:
                squares += (3.0 + rank) ** 2
    assert run_loopback(4, body) == [pytest.approx(math.sqrt(squares))] * 4


@ranks(2)
def test_parameters_split_in_contradictory_orders_are_refused(world: Communicator) -> None:
    a, b = world.split(0, name="a"), world.split(0, name="b")
    parameters = [torch.ones(1), torch.ones(1)]
    note_split_over(parameters[0], a, b)
    note_split_over(parameters[1], b, a)
    norm = GradientNorm(parameters, [Bucket((0, 1), (0, 1, 2), 8, "float64")], a, sharded=False)
    with pytest.raises(OperationError, match="noted in other orders for other parameters; note them"):
        norm.of([torch.ones(2)])


def test_a_split_parameter_must_be_one_of_the_optimizers() -> None:
    alone = Communicator.alone()
    with pytest.raises(OperationError, match="split_over names 'q', which is none of the optimizer's 4"):
        averaged(alone, 0, gradients(0), split_over={"q": [alone]})


@pytest.mark.parametrize("stage", [0, 1, 2])
@ranks(2)
def test_who_has_all_parameters_frozen_takes_part_in_the_norm_of_the_others(
    comm: Communicator, stage: int
) -> None:
    model = Piece(2).requires_grad_(comm.rank == 1)
    optimizer = staged(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        Communicator.alone(),
        stage,
        split_over={"value": [comm]},
    )
    if comm.rank == 1:
        model(torch.tensor([3.0, 4.0])).backward()
    assert (optimizer.clip_grad_norm_(1.0).item(), optimizer.gradients_are_finite()) == (
        pytest.approx(5.0),
        True,
    )


def test_a_fully_sharded_stage_goes_by_the_names_that_its_optimizer_was_given() -> None:
    # Two stages of a pipeline, each sharded by itself: both have a layers.0.value of their own.
    def body(pp_comm: Communicator) -> float:
        stage = fully_shard(Pieces(), Communicator.alone())
        named = {f"{pp_comm.rank}.{name}": parameter for name, parameter in stage.named_parameters()}
        optimizer = DistributedOptimizer(
            torch.optim.SGD(named.values(), lr=1.0),
            named.items(),
            Communicator.alone(),
            split_over={name: [pp_comm] for name in named},
        )
        stage(gradients(pp_comm.rank)).backward()
        norm = optimizer.clip_grad_norm_(math.inf).item()
        assert {name for name, _, _ in optimizer.named_gradients()} == named.keys()
        return norm

    expected = float(torch.cat([*gradients(0), *gradients(1)]).norm())
    assert run_loopback(2, body) == [pytest.approx(expected, rel=1e-12)] * 2


@pytest.mark.parametrize("kind", [0, -1.0, -math.inf])
def test_a_norm_of_no_positive_power_is_refused(kind: float) -> None:
    with pytest.raises(OperationError, match="norm_type="):
        GradientNorm([torch.ones(1)], [], Communicator.alone(), sharded=False).of([], kind)


@pytest.mark.parametrize(("stage", "kind"), checkered([0, 1, 2], TYPES))
def test_what_two_stages_have_copies_of_counts_once(stage: int, kind: float) -> None:
    # pp × dp = 2 × 2. Parameter 0 is tied: both stages have it.
    def body(world: Communicator) -> float:
        dp_comm, pp_comm = world.split(world.rank // 2, name="dp"), world.split(world.rank % 2, name="pp")
        found = gradients(dp_comm.rank)
        for number in (1, 2, 3):
            found[number] = found[number] * (1 + 2 * pp_comm.rank)
        names = [f"layers.{number}.value" for number in range(len(found))]
        optimizer = averaged(
            dp_comm,
            stage,
            found,
            split_over={name: [pp_comm] for name in names},
            tied={names[0]: pp_comm.rank == 0},
        )
        return optimizer.clip_grad_norm_(math.inf, kind).item()

    whole = average(2)
    parts = [whole[0], *(gradient * factor for gradient in whole[1:] for factor in (1, 3))]
    expected = float(torch.cat(parts).norm(kind))
    assert run_loopback(4, body) == [pytest.approx(expected, rel=1e-12)] * 4
