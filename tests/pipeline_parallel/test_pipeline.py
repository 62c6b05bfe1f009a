"""A pipeline of several ranks follows one process, whatever the schedule, and its ranks fail together.

float64, and a tolerance of 1e-10: gradients of microbatches are added in the schedule's order, so the last
bits differ, and the steps carry them on.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpar.comm import Communicator, Trace
from hpcpar.comm import run_loopback as run
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.errors import MismatchError, OperationError, PeerFailedError, ScheduleError
from hpcpar.mesh import Mesh
from hpcpar.pipeline_parallel.executor import StageError
from hpcpar.pipeline_parallel.pipeline import Pipeline, late_from
from hpcpar.pipeline_schedules import schedule_registry
from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule
from hpcpar.pipeline_schedules.pipeline_simulation import Durations
from hpcpar.pipeline_schedules.proof import peak_chunks
from tests.grid import pairwise

TOLERANCE = 1e-10
WIDTH = 4
STEPS = 2


def by_rows(*rows: str) -> Schedule:
    return Schedule(tuple(tuple(map(Action.parse, row.split())) for row in rows), name="by hand")


GPIPE = by_rows("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2")
ONE_F_ONE_B = by_rows("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
SPLIT = by_rows("0F0 0F1 0B0 0W0 0F2 0B1 0W1 0B2 0W2", "1F0 1B0 1F1 1W0 1B1 1F2 1W1 1B2 1W2")
LOOP = by_rows("0F0 2F0 0F1 2F1 2B0 0B0 2B1 0B1", "1F0 3F0 3B0 1F1 3F1 1B0 3B1 1B1")
V = by_rows("0F0 0F1 3F0 3B0 3F1 0B0 3B1 0B1", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1")
OUT_OF_ORDER = by_rows("0F1 0F0 0F2 0B2 0B0 0B1", "1F0 1F2 1F1 1B1 1B2 1B0")
BY_HAND = {
    "gpipe": GPIPE,
    "1f1b": ONE_F_ONE_B,
    "split": SPLIT,
    "loop": LOOP,
    "v": V,
    "mixed order": OUT_OF_ORDER,
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x)))


def layers(count: int, make: Callable[[], nn.Module] = Layer) -> list[nn.Module]:
    """Build equal layers on every call."""
    generator = torch.Generator().manual_seed(count)
    made = [make().double() for _ in range(count)]
    with torch.no_grad():
        for module in made:
            for parameter in module.parameters():
                parameter.normal_(0.0, 0.5, generator=generator)
    return made


def batch(step: int, microbatches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, 2 * microbatches, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def summed(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target, reduction="sum") / 10


class Course(NamedTuple):
    """Losses of each step, where the last stage is; gradients of the first step; parameters at the end."""

    losses: list[Tensor | None]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def course(
    named: Mapping[str, nn.Parameter], microbatches: int, step: Callable[[Tensor, Tensor], Tensor | None]
) -> Course:
    optimizer = torch.optim.SGD(named.values(), lr=0.1, momentum=0.9)
    losses, gradients = [], {}
    for number in range(STEPS):
        optimizer.zero_grad()
        losses.append(step(*batch(number, microbatches)))
        if not number:
            gradients = {name: parameter.grad.clone() for name, parameter in named.items()}
        optimizer.step()
    return Course(losses, gradients, {name: parameter.detach().clone() for name, parameter in named.items()})


def named_parameters(stages: Mapping[int, nn.Module]) -> dict[str, nn.Parameter]:
    return {f"{s}.{name}": p for s, module in stages.items() for name, p in module.named_parameters()}


@cache
def serial(stages: int, microbatches: int) -> Course:
    whole = dict(enumerate(layers(stages)))

    def step(x: Tensor, y: Tensor) -> Tensor:
        losses = []
        for x_part, y_part in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
            losses.append(summed(nn.Sequential(*whole.values())(x_part), y_part))
        sum(losses).backward()
        return torch.stack([loss.detach() for loss in losses])

    return course(named_parameters(whole), microbatches, step)


def own_stages(schedule: Schedule, rank: int, make: Callable[[], nn.Module] = Layer) -> dict[int, nn.Module]:
    made = layers(schedule.stages, make)
    return {number: made[number] for number in schedule.stages_of(rank)}


def parallel(comm: Communicator, schedule: Schedule) -> tuple[Course, int]:
    stages = own_stages(schedule, comm.rank)
    pipeline = Pipeline(stages, schedule, comm, loss=summed)
    found = course(named_parameters(stages), schedule.microbatches, pipeline.step)
    return found, pipeline.peak_alive


def require_same(courses: Sequence[Course], truth: Course, schedule: Schedule) -> None:
    last = schedule.rank_of_stage[schedule.stages - 1]
    for rank, found in enumerate(courses):
        if rank == last:
            torch.testing.assert_close(found.losses, truth.losses, rtol=TOLERANCE, atol=TOLERANCE)
        else:
            assert found.losses == [None] * STEPS
    for mine, whole in (("gradients", truth.gradients), ("parameters", truth.parameters)):
        joined = {name: each for found in courses for name, each in getattr(found, mine).items()}
        assert joined.keys() == whole.keys()
        torch.testing.assert_close(joined, whole, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.smoke
@pytest.mark.usefixtures("weights_small_or_as_if_large")
@pytest.mark.parametrize("name", BY_HAND)
def test_rows_by_hand_follow_one_process(name):
    schedule = BY_HAND[name]
    found = run(schedule.ranks, lambda comm: parallel(comm, schedule))
    require_same([each for each, _ in found], serial(schedule.stages, schedule.microbatches), schedule)
    assert tuple(peak for _, peak in found) == peak_chunks(schedule)


MICROBATCHES = {2: range(1, 9), 3: (1, 3, 4, 6), 4: (1, 4, 7, 8)}
"""By number of ranks: fewer, as many, more; multiples and others."""


def made(name: str, ranks: int, microbatches: int, stages_per_rank: int | None) -> Schedule | None:
    """None where the method does not allow it."""
    with suppress(ScheduleError):
        return schedule_registry.make(
            name, ranks, microbatches, stages_per_rank=stages_per_rank, durations=Durations(1.0, 1.0, 1.0)
        )
    return None


@pytest.mark.usefixtures("weights_small_or_as_if_large")
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", schedule_registry.METHODS)
def test_every_schedule_of_the_catalogue_follows_one_process(name, ranks):
    """Stages per rank are the method's default, and two for 4 microbatches."""
    asked = [(count, None) for count in MICROBATCHES[ranks]] + [(4, 2)]
    schedules = [
        each for each in dict.fromkeys(made(name, ranks, *each) for each in asked) if each is not None
    ]
    assert schedules

    def on_rank(comm: Communicator) -> list[tuple[Course, int]]:
        return [parallel(comm, schedule) for schedule in schedules]

    results = run(ranks, on_rank)
    for number, schedule in enumerate(schedules):
        found = [of_rank[number] for of_rank in results]
        truth = serial(schedule.stages, schedule.microbatches)
        require_same([each for each, _ in found], truth, schedule)
        assert tuple(peak for _, peak in found) == peak_chunks(schedule)


def test_one_rank_with_all_stages_follows_one_process():
    schedule = by_rows("0F0 1F0 2F0 0F1 2B0 1B0 0B0 1F1 2F1 2B1 1B1 0B1 1W1")
    found, _ = parallel(Communicator.alone(), schedule)
    require_same([found], serial(3, 2), schedule)


# --- what goes from stage to stage ---------------------------------------------------------------------


class Branching(nn.Module):
    """(x, None, mask, side) -> the same; the next stage ignores side, whose gradient is the loss's alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.aside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, none: None, mask: Tensor, side: Tensor | None) -> tuple[Tensor | None, ...]:
        assert none is None
        x = torch.tanh(self.linear(x)) * mask
        return x, None, mask, self.aside(x)


def branching_loss(output: tuple[Tensor, ...], target: tuple[Tensor, bool]) -> Tensor:
    wanted, is_aside_used = target
    return summed(output[0], wanted) + (output[3].sum() if is_aside_used else 0.0)


def branching_gradients(
    comm: Communicator, schedule: Schedule, aside: int | None
) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """Those of this rank's stages, and those of one process: the second of two steps."""
    count = schedule.microbatches
    inputs, targets = batch(0, count)
    mask = (torch.arange(2 * count * WIDTH).view(2 * count, WIDTH) % 3 > 0).to(torch.int64)
    given = [(x, None, m, None) for x, m in zip(inputs.chunk(count), mask.chunk(count), strict=True)]
    wanted = [(target, number == aside) for number, target in enumerate(targets.chunk(count))]
    whole = layers(schedule.stages, Branching)
    for arguments, target in zip(given, wanted, strict=True):
        output: Any = arguments
        for layer in whole:
            output = layer(*output)
        branching_loss(output, target).backward()
    stages = own_stages(schedule, comm.rank, Branching)
    pipeline = Pipeline(stages, schedule, comm, loss=branching_loss)
    for _ in range(2):  # announced, then known
        for module in stages.values():
            module.zero_grad()
        pipeline.step(given, wanted)
    truth = named_parameters({number: whole[number] for number in stages})
    return (
        {name: parameter.grad for name, parameter in named_parameters(stages).items()},
        {name: parameter.grad for name, parameter in truth.items()},
    )


@pytest.mark.parametrize("aside", [None, 1], ids=["ignored", "used by a microbatch"])
@pytest.mark.parametrize("schedule", [ONE_F_ONE_B, V, SPLIT], ids=["1f1b", "v", "split"])
def test_tuples_none_and_masks_go_through_and_what_is_not_used_has_no_gradient(schedule, aside):
    """Zeros in its place would let an optimizer with weight decay or momentum change the weights."""
    results = run(schedule.ranks, lambda comm: branching_gradients(comm, schedule, aside))
    for found, truth in results:
        torch.testing.assert_close(found, truth, rtol=TOLERANCE, atol=TOLERANCE)
    without = [name for found, _ in results for name, gradient in found.items() if gradient is None]
    last = schedule.stages - 1
    assert sorted(without) == sorted(
        f"{stage}.aside.{name}"
        for stage in range(schedule.stages)
        for name in ("weight", "bias")
        if stage < last or aside is None
    )


@pytest.mark.parametrize("ends", [(0,), (0, 1, 2)], ids=["one microbatch", "every microbatch"])
def test_a_stage_may_do_without_its_only_input_but_not_in_every_microbatch(ends):
    """Zeros for some microbatches add nothing; with nothing else, one process would have no gradient."""

    def loss(output: Tensor, target: tuple[Tensor, bool]) -> Tensor:
        wanted, is_end = target
        return output.new_zeros((), requires_grad=True) if is_end else summed(output, wanted)

    def on_rank(comm: Communicator) -> Any:
        stages = own_stages(ONE_F_ONE_B, comm.rank)
        pipeline = Pipeline(stages, ONE_F_ONE_B, comm, loss=loss)
        x, y = batch(0, 3)
        targets = [(part, number in ends) for number, part in enumerate(y.chunk(3))]
        if len(ends) == 3:
            return caught(lambda: pipeline.step(x, targets), PeerFailedError)
        pipeline.step(x, targets)
        return {name: parameter.grad for name, parameter in named_parameters(stages).items()}

    results = run(2, on_rank)
    if len(ends) == 3:
        told = "rank 1: OperationError: no loss depends on what stage 0 returns"
        assert all(told in each and "freeze all stages up to 0" in each for each in results)
        return
    whole = dict(enumerate(layers(2)))
    x, y = batch(0, 3)
    summed(nn.Sequential(*whole.values())(x[2:]), y[2:]).backward()
    truth = {name: parameter.grad for name, parameter in named_parameters(whole).items()}
    torch.testing.assert_close(results[0] | results[1], truth, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_stage_that_changes_an_output_which_lies_elsewhere_is_told_to_return_a_copy():
    stages = dict(enumerate(layers(2, Counting)))
    for module in stages.values():
        module.returned = "hidden"
    schedule = by_rows("0F0 0F1 1F0 1F1 1B0 0B0 1B1 0B1")
    pipeline = Pipeline(stages, schedule, Communicator.alone(), loss=counted_loss)
    with pytest.raises(
        OperationError, match=r"stage 0 returned a tensor that it changed .*: let it return a"
    ):
        pipeline.step(*batch(0, 2))


class Counting(nn.Module):
    """(x, count) -> (linear(x) times the count of the stage before, own count), changed in place by 1."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("buffer", torch.zeros(1 << 16))
        self.attributes = [self.buffer.clone()]
        self.hidden = SimpleNamespace(tensor=self.buffer.clone())
        self.returned = "buffer"

    def forward(self, x: Tensor, count: Tensor | None = None) -> tuple[Tensor, Tensor]:
        kept = {"buffer": self.buffer, "list": self.attributes[0], "hidden": self.hidden.tensor}
        own = kept[self.returned]
        with torch.no_grad():
            own += 1
        return self.linear(x if count is None else x * count[0].item()), own[1:]


def counted_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return summed(output[0] * output[1][0].item(), target)


@pytest.mark.parametrize("returned", ["buffer", "list"])
@pytest.mark.parametrize("schedule", [ONE_F_ONE_B, LOOP, V], ids=["1f1b", "loop", "v"])
def test_a_tensor_that_a_stage_changes_in_the_next_microbatch_goes_on_as_it_was(schedule, returned):
    def made() -> nn.Module:
        module = Counting()
        module.returned = returned
        return module

    def on_rank(comm: Communicator) -> Any:
        stages = own_stages(schedule, comm.rank, made)
        pipeline = Pipeline(stages, schedule, comm, loss=counted_loss)
        pipeline.step(*batch(0, schedule.microbatches))
        x, y = batch(1, 4)
        losses = pipeline.evaluate(list(x.chunk(4)), list(y.chunk(4)))
        return {name: each.grad for name, each in named_parameters(stages).items()}, losses

    results = run(2, on_rank)
    whole = dict(enumerate(layers(schedule.stages, made)))
    losses = []
    for number, count in ((0, schedule.microbatches), (1, 4)):
        for x, y in zip(*(part.chunk(count) for part in batch(number, count)), strict=True):
            output: Any = (x,)
            for layer in whole.values():
                output = layer(*output)
            losses.append(counted_loss(output, y))
            if not number:
                losses.pop().backward()
    truth = {name: each.grad for name, each in named_parameters(whole).items()}
    found = {name: each for gradients, _ in results for name, each in gradients.items()}
    torch.testing.assert_close(found, truth, rtol=TOLERANCE, atol=TOLERANCE)
    evaluated = results[schedule.rank_of_stage[schedule.stages - 1]][1]
    torch.testing.assert_close(evaluated, torch.stack(losses).detach(), rtol=TOLERANCE, atol=TOLERANCE)


def test_no_gradients_are_sent_towards_frozen_stages():
    def on_rank(comm: Communicator) -> tuple[int, int, bool]:
        stages = own_stages(ONE_F_ONE_B, comm.rank)
        pipeline = Pipeline(stages, ONE_F_ONE_B, comm, loss=summed)
        counts = []
        for frozen in (False, True):
            for parameter in stages.get(0, nn.Module()).parameters():
                parameter.requires_grad_(not frozen)
            pipeline.step(*batch(0, 3))
            comm.traffic.reset()
            pipeline.step(*batch(0, 3))
            counts.append(comm.traffic.nbytes_sent("send"))
        return counts[0], counts[1], comm.rank == 0

    activations = 3 * 2 * WIDTH * 8
    assert run(2, on_rank) == [(activations, activations, True), (activations, 0, False)]


class Opened(nn.Sequential):
    """A layer of what is in the microbatch."""

    def __init__(self, opened: Callable[[Any], Tensor], layer: nn.Module) -> None:
        super().__init__(layer)
        self.opened = opened

    def forward(self, given: Any) -> Tensor:
        return super().forward(self.opened(given))


@pytest.mark.parametrize(
    ("formed", "opened", "again"),
    [
        (lambda x: x, lambda given: given, 0),
        (lambda x: {"x": x}, lambda given: given["x"], 0),
        (lambda x: [3, x], lambda given: given[1], 0),
        (lambda x: SimpleNamespace(x=x), lambda given: given.x, 4096),  # where nobody looks for shapes
    ],
)
def test_shapes_are_announced_once_and_may_differ_between_microbatches_and_steps(formed, opened, again):
    lengths = [[2, 2, 2], [2, 2, 1], [5, 3, 1], [2, 2, 2], [5, 3, 1]]

    def on_rank(comm: Communicator) -> tuple[list[float], list[int]]:
        stages = own_stages(ONE_F_ONE_B, comm.rank)
        if 0 in stages:
            stages[0] = Opened(opened, stages[0])
        pipeline = Pipeline(stages, ONE_F_ONE_B, comm, loss=summed)
        losses, extra = [], []
        for wanted in lengths:
            x, y = batch(0, 8)
            comm.traffic.reset()
            inputs = list(map(formed, x[: sum(wanted)].split(wanted)))
            result = pipeline.step(inputs, list(y[: sum(wanted)].split(wanted)))
            extra.append(comm.traffic.nbytes_sent("send") - sum(wanted) * WIDTH * 8)
            losses += [] if result is None else [result.sum().item()]
        return losses, extra

    (_, extra), (losses, _) = run(2, on_rank)
    assert [each // 3 for each in extra] == [4096, 4096, 4096, again, again]
    whole = nn.Sequential(*layers(2))
    x, y = batch(0, 8)
    expected = [summed(whole(x[: sum(w)]), y[: sum(w)]).item() for w in lengths]
    assert losses == pytest.approx(expected, rel=TOLERANCE)


def test_inputs_of_the_same_shapes_may_go_on_as_other_types():
    class Cast(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(self.weight.dtype))

    def on_rank(comm: Communicator) -> list[torch.dtype]:
        stage = Cast(WIDTH, WIDTH)
        pipeline = Pipeline({comm.rank: stage}, ONE_F_ONE_B, comm)
        x = batch(0, 3)[0]
        outputs = [pipeline.evaluate(x)]
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(pipeline.evaluate(x))
        stage.double()
        outputs.append(pipeline.evaluate(x))
        return [each[0].dtype for each in outputs if each is not None]

    assert run(2, on_rank)[1] == [torch.float32, torch.bfloat16, torch.float64]


def test_layers_may_change_their_modes_and_buffers_their_types_one_by_one():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.0)
            self.register_buffer("scale", torch.ones(WIDTH))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
            x = x.to(self.scale.dtype) * self.scale
            return x, self.dropout(x) if self.dropout.training else None

    class Pass(nn.Module):
        def forward(self, *outputs: Tensor | None) -> list[Any]:
            return [each if each is None else each.dtype for each in outputs]

    def on_rank(comm: Communicator) -> list[Any]:
        stage = Pass() if comm.rank else Mixed()
        pipeline = Pipeline({comm.rank: stage}, ONE_F_ONE_B, comm)
        outputs = [pipeline.evaluate(batch(0, 3)[0])]
        for change in (lambda: stage.dropout.eval(), stage.double):
            if not comm.rank:
                change()
            outputs.append(pipeline.evaluate(batch(0, 3)[0]))
        return [each[0] for each in outputs if each is not None]

    single, double = torch.float32, torch.float64
    assert run(2, on_rank)[1] == [[single, single], [single, None], [double, None]]


@pytest.mark.parametrize("schedule", [ONE_F_ONE_B, LOOP, V], ids=["1f1b", "loop", "v"])
def test_evaluation_takes_any_number_of_microbatches_and_keeps_no_graph(schedule):
    def on_rank(comm: Communicator) -> list[Any]:
        pipeline = Pipeline(own_stages(schedule, comm.rank), schedule, comm, loss=summed)
        found = []
        for count in (1, 7, 7):
            x, y = batch(0, count)
            found.append(pipeline.evaluate(list(x.chunk(count)), list(y.chunk(count))))
        found.append(pipeline.evaluate(list(batch(0, 2)[0].chunk(2))))
        assert pipeline.peak_alive == 0
        pipeline.step(*batch(0, schedule.microbatches))
        return found

    (*_,) = results = run(schedule.ranks, on_rank)
    last = schedule.rank_of_stage[schedule.stages - 1]
    whole = nn.Sequential(*layers(schedule.stages))
    for rank, found in enumerate(results):
        if rank != last:
            assert found == [None] * 4
            continue
        for count, losses in zip((1, 7, 7), found[:3], strict=True):
            assert losses.shape == (count,)
            assert not losses.requires_grad
            x, y = batch(0, count)
            assert losses.sum().item() == pytest.approx(summed(whole(x), y).item(), rel=TOLERANCE)
        torch.testing.assert_close(
            torch.cat(found[3]), whole(batch(0, 2)[0]).detach(), rtol=TOLERANCE, atol=0
        )
        assert not found[3][0].requires_grad


def test_a_batch_may_be_a_tuple_and_none_where_it_is_not_used():
    class Sum(nn.Linear):
        def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
            return super().forward(x if z is None else x + z)

    def on_rank(comm: Communicator) -> Tensor | None:
        stages = own_stages(ONE_F_ONE_B, comm.rank, lambda: Sum(WIDTH, WIDTH))
        pipeline = Pipeline(stages, ONE_F_ONE_B, comm, loss=summed)
        x, y = batch(0, 3)
        return pipeline.step((x, x), None) if comm.rank == pipeline.first_rank else pipeline.step(None, y)

    x, y = batch(0, 3)
    whole = nn.Sequential(*layers(2, lambda: Sum(WIDTH, WIDTH)))
    _, losses = run(2, on_rank)
    assert losses.sum().item() == pytest.approx(summed(whole(2 * x), y).item(), rel=TOLERANCE)


def test_without_a_loss_the_last_stage_gives_it():
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.square().sum()

    def on_rank(comm: Communicator) -> Tensor | None:
        stages = {comm.rank: layers(1)[0] if comm.rank == 0 else Norm()}
        return Pipeline(stages, ONE_F_ONE_B, comm).step(batch(0, 3)[0])

    x, _ = batch(0, 3)
    assert run(2, on_rank)[1].sum().item() == pytest.approx(layers(1)[0](x).square().sum().item())


@pytest.mark.parametrize("schedule", [SPLIT, V], ids=["split", "v"])
def test_a_loss_with_weights_of_its_own_counts_in_the_norm_of_all_stages(schedule):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return summed(output * self.scale, target)

    def clipped(named: dict[str, nn.Parameter]) -> tuple[Tensor, dict[str, Tensor | None]]:
        norm = nn.utils.clip_grad_norm_(named.values(), 0.1)
        return norm, {name: parameter.grad for name, parameter in named.items()}

    count = schedule.microbatches

    def on_rank(comm: Communicator) -> tuple[Tensor, dict[str, Tensor | None]]:
        stages, loss = own_stages(schedule, comm.rank), Scaled()
        pipeline = Pipeline(stages, schedule, comm, loss=loss)
        pipeline.step(*batch(0, count))
        with_loss = {-1: loss} if comm.rank == pipeline.last_rank else {}
        return clipped(named_parameters(stages | with_loss))

    whole, loss = layers(schedule.stages), Scaled()
    x, y = batch(0, count)
    loss(nn.Sequential(*whole)(x), y).backward()
    norm, truth = clipped(named_parameters(dict(enumerate(whole)) | {-1: loss}))
    results = run(2, on_rank)
    for found, _ in results:
        torch.testing.assert_close(found.double(), norm.double(), rtol=TOLERANCE, atol=0)
    joined = results[0][1] | results[1][1]
    torch.testing.assert_close(joined, truth, rtol=TOLERANCE, atol=TOLERANCE)


# --- memory --------------------------------------------------------------------------------------------


def test_bytes_alive_fall_with_the_number_of_microbatches_that_the_schedule_keeps():
    """The first rank of GPipe keeps 8 microbatches, that of 1F1B 2: each keeps the input of a square."""
    side = 64

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale).square()

    def row(rank: int, ahead: int) -> str:
        forwards, backwards = [f"{rank}F{m}" for m in range(8)], [f"{rank}B{m}" for m in range(8)]
        steady = [each for pair in zip(forwards[ahead:], backwards, strict=False) for each in pair]
        return " ".join(forwards[:ahead] + steady + backwards[8 - ahead :])

    def peak(schedule: Schedule) -> int:
        held = {"now": 0, "most": 0}

        class Saved:
            def __init__(self, tensor: Tensor) -> None:
                self.tensor = tensor
                held["now"] += tensor.nbytes
                held["most"] = max(held["most"], held["now"])

            def __del__(self) -> None:
                held["now"] -= self.tensor.nbytes

        def on_rank(comm: Communicator) -> None:
            pipeline = Pipeline({comm.rank: Square()}, schedule, comm, loss=lambda out, _: out.sum())
            x = [torch.ones(side, side, dtype=torch.float64) for _ in range(8)]
            if comm.rank == 0:
                with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
                    pipeline.step(x, x)
            else:
                pipeline.step(x, x)
            assert not any(stage.alive for stage in pipeline.stages.values())

        gc.collect()
        run(2, on_rank)
        assert held["now"] == 0
        return held["most"] // (side * side * 8)

    gpipe, one_f_one_b = (by_rows(row(0, a), row(1, b)) for a, b in ((8, 8), (1, 0)))
    assert (peak_chunks(gpipe)[0], peak_chunks(one_f_one_b)[0]) == (8, 2)
    assert peak(gpipe) == 4 * peak(one_f_one_b)


def test_outputs_are_let_go_once_they_are_delivered():
    """The storage of an output that autograd does not need is gone before its backward."""
    alive: list[int] = []

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.zeros((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            import weakref

            output = x + self.by
            seen.append(weakref.ref(output.untyped_storage()))
            return output

    seen: list[Any] = []

    def on_rank(comm: Communicator) -> None:
        pipeline = Pipeline(
            {comm.rank: Shift() if comm.rank == 0 else layers(1)[0]}, GPIPE, comm, loss=summed
        )
        if comm.rank == 0:
            pipeline.stages[0].backward = lambda m, g, inner=pipeline.stages[0].backward: (  # type: ignore[method-assign]
                alive.append(sum(ref() is not None for ref in seen)),
                inner(m, g),
            )[1]
        pipeline.step(*batch(0, 3))

    run(2, on_rank)
    assert alive == [0, 0, 0]


# --- errors: on all ranks, and nobody hangs ------------------------------------------------------------


class Fault(nn.Module):
    """Does as it is told at a call: raises, or returns something else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layers(1)[0]
        self.at: Mapping[int, Callable[[Tensor], Any]] = {}
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.at.get(self.calls, self.layer)(x)


def failing(_: Tensor) -> Tensor:
    raise KeyError("the planted fault")


def caught(call: Callable[[], Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


class BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise KeyError("the planted fault")


@pytest.mark.parametrize(
    ("name", "stage", "where", "shapes"),
    pairwise(["loop", "v"], range(4), ["forward", "backward"], ["announced", "known"]),
)
def test_what_a_stage_raises_is_told_on_all_ranks_and_the_next_step_is_right(name, stage, where, shapes):
    schedule = BY_HAND[name]

    def fault(module: Fault, x: Tensor) -> Tensor:
        return failing(x) if where == "forward" else BadGradient.apply(module.layer(x))

    def on_rank(comm: Communicator) -> tuple[str, Tensor | None]:
        stages = {number: Fault() for number in schedule.stages_of(comm.rank)}
        pipeline = Pipeline(stages, schedule, comm, loss=summed)
        if shapes == "known":
            pipeline.step(*batch(0, 2))
        if stage in stages:
            stages[stage].at = {stages[stage].calls + 2: partial(fault, stages[stage])}
        told = caught(lambda: pipeline.step(*batch(0, 2)), PeerFailedError)
        assert not any(kept.alive for kept in pipeline.stages.values())
        return told, pipeline.step(*batch(0, 2))

    results = run(2, on_rank)
    home, last = schedule.rank_of_stage[stage], schedule.rank_of_stage[3]
    for told, losses in results:
        assert f"rank {home}: StageError: {stage}{where[0].upper()}1: KeyError: 'the planted fault'" in told
        assert "failed on 1 of 2 ranks" in told
        assert (losses is None) == (losses is not results[last][1])
    x, y = batch(0, 2)
    whole = nn.Sequential(*(layers(1)[0] for _ in range(4)))
    assert results[last][1].sum().item() == pytest.approx(summed(whole(x), y).item(), rel=TOLERANCE)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            lambda x: x[:, :1],
            "float64[2, 1] with gradient) for microbatch 0, but (float64[2, 4] with gradient) in",
        ),
        (
            lambda x: x.detach(),
            "(float64[2, 4]) for microbatch 0, but (float64[2, 4] with gradient) in an earlier",
        ),
        (
            lambda x: (x, x),
            "(float64[2, 4] with gradient, float64[2, 4] with gradient) for microbatch 0, but",
        ),
        (lambda x: (x, 3), "stage 0 returned a int at place 1 of 2"),
        (lambda x: x.to_sparse(), "stage 0 returned a tensor of float64, torch.sparse_coo"),
    ],
    ids=["shape", "gradient", "number", "int", "sparse"],
)
def test_another_shape_than_promised_is_named_on_all_ranks(returned, message):
    def on_rank(comm: Communicator) -> str:
        stage = Fault()
        pipeline = Pipeline({comm.rank: stage}, ONE_F_ONE_B, comm, loss=summed)
        pipeline.step(*batch(0, 3))
        if comm.rank == 0:
            stage.at = {4: lambda x: returned(stage.layer(x))}
        return caught(lambda: pipeline.step(*batch(0, 3)), PeerFailedError)

    for told in run(2, on_rank):
        assert "rank 0: StageError: 0F0: " in told
        assert message in told


def test_after_a_broken_promise_shapes_are_announced_again():
    def on_rank(comm: Communicator) -> str:
        stage = Fault()
        pipeline = Pipeline({comm.rank: stage}, ONE_F_ONE_B, comm, loss=summed)
        pipeline.step(*batch(0, 3))
        if comm.rank == 0:
            stage.at = dict.fromkeys(range(4, 99), lambda x: stage.layer(x).detach())
        told = caught(lambda: pipeline.step(*batch(0, 3)), PeerFailedError)
        stage.calls = 3
        for _ in range(2):
            pipeline.step(*batch(0, 3))
        return told

    assert all("MismatchError" in told for told in run(2, on_rank))


def test_more_tensors_than_an_announcement_has_room_for_are_named():
    def on_rank(comm: Communicator) -> str:
        stage = Fault()
        stage.at = {1: lambda x: [x] * 500}
        pipeline = Pipeline({comm.rank: stage}, ONE_F_ONE_B, comm, loss=lambda out, _: sum(out).sum())
        return caught(lambda: pipeline.step(*batch(0, 3)), PeerFailedError)

    assert all("stage 0 returned 500 tensors" in told for told in run(2, on_rank))


def test_one_rank_alone_raises_the_error_of_its_stage():
    stage = Fault()
    stage.at = {1: failing}
    pipeline = Pipeline({0: stage}, by_rows("0F0 0B0"), Communicator.alone(), loss=summed)
    with pytest.raises(StageError, match="0F0: KeyError: 'the planted fault'") as error:
        pipeline.step(*batch(0, 1))
    assert isinstance(error.value.__cause__, KeyError)


def test_different_schedules_on_two_ranks_are_refused_on_both():
    def on_rank(comm: Communicator) -> str:
        schedule = (GPIPE, ONE_F_ONE_B)[comm.rank]
        return caught(lambda: Pipeline(own_stages(schedule, comm.rank), schedule, comm), MismatchError)

    for told in run(2, on_rank):
        assert "rank 0 asked for a pipeline by by hand: 0F0 0F1 0F2" in told
        assert "rank 1 asked for a pipeline by by hand: 0F0 0F1 0B0" in told


def test_a_schedule_with_an_action_missing_is_refused_on_all_ranks():
    schedule = by_rows("0F0 0B0 0F1", "1F0 1B0 1F1 1B1")

    def on_rank(comm: Communicator) -> str:
        return caught(lambda: Pipeline(own_stages(schedule, comm.rank), schedule, comm), ScheduleError)

    assert all("0B1 is missing" in told for told in run(2, on_rank))


def test_stages_and_ranks_that_do_not_fit_the_schedule_are_refused_on_all_ranks():
    def on_rank(comm: Communicator) -> tuple[str, str, str]:
        return (
            caught(lambda: Pipeline({0: Layer()}, ONE_F_ONE_B, comm), PeerFailedError),
            caught(lambda: Pipeline({str(comm.rank): Layer()}, ONE_F_ONE_B, comm), PeerFailedError),
            caught(lambda: Pipeline({}, by_rows("0F0 0B0"), comm), ScheduleError),
        )

    for stages, keys, ranks in run(2, on_rank):
        assert "rank 1 was given stages 0, but the schedule's row for it has stages 1" in stages
        assert "rank 1 was given stages '1', but the schedule's row for it has stages 1" in keys
        assert "has 1 ranks, but communicator 'world' 2" in ranks


BAD_ARGUMENTS = {
    "module": (
        {"stages": nn.Sequential(Layer())},
        "was given a Sequential for stages",
        "Pipeline({1: nn.Seq",
    ),
    "list": ({"stages": [Layer()]}, "was given a list for stages", "give {number: module}"),
    "number": ({"loss": 3}, "loss=3 is not called", "give such a function"),
    "class": ({"loss": nn.MSELoss}, "a class, of which it takes an instance", "give such a function"),
    "one argument": ({"loss": lambda output: output.sum()}, "too many positional", "give such a function"),
    "mean": ({"loss": nn.MSELoss()}, "MSELoss is the mean over one of 3", "MSELoss(outputs, targets) / 3"),
    "mean of a function": ({"loss": functional.mse_loss}, "mse_loss is the mean", "(outputs, targets) / 3"),
    "mean of a partial": ({"loss": partial(functional.mse_loss)}, "mse_loss is the mean", "targets) / 3"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_what_makes_no_pipeline_is_refused_on_all_ranks_with_what_does(name):
    asked, found, advice = BAD_ARGUMENTS[name]

    def on_rank(comm: Communicator) -> str:
        stages = asked.get("stages", {comm.rank: Layer()})
        loss = asked.get("loss", summed)
        return caught(lambda: Pipeline(stages, ONE_F_ONE_B, comm, loss=loss), PeerFailedError)

    for told in run(2, on_rank):
        assert found in told
        assert advice in told


def test_a_stage_that_is_no_module_a_schedules_name_and_no_communicator_are_refused():
    alone = Communicator.alone()
    with pytest.raises(ScheduleError, match=r"stage 0 is a function: give an nn.Module"):
        Pipeline({0: summed}, by_rows("0F0 0B0"), alone)  # type: ignore[dict-item]
    with pytest.raises(ScheduleError, match=r"a pipeline by 'zb-v', .*schedule_registry.make\('1f1b'"):
        Pipeline({0: Layer()}, "zb-v", alone)  # type: ignore[arg-type]
    with pytest.raises(OperationError, match=r"a pipeline over None, .* such as mesh.pp"):
        Pipeline({0: Layer()}, by_rows("0F0 0B0"), None)  # type: ignore[arg-type]


def test_keywords_that_there_are_not_are_refused_on_all_ranks_though_one_alone_has_them():
    def on_rank(comm: Communicator) -> list[str]:
        stages = own_stages(ONE_F_ONE_B, comm.rank)
        device = {"device": "cpu"} if comm.rank else {}
        made = caught(lambda: Pipeline(stages, ONE_F_ONE_B, comm, loss=summed, **device), PeerFailedError)
        pipeline = Pipeline(stages, ONE_F_ONE_B, comm, loss=summed)
        x, y = batch(0, 3)
        given = {"target": y} if comm.rank else {"inputs": x}
        calls = (pipeline.step, pipeline.evaluate)
        return [made, *(caught(lambda call=call: call(**given), PeerFailedError) for call in calls)]

    for made, *passes in run(2, on_rank):
        assert "rank 1: OperationError: a pipeline has no device: make it by Pipeline(stages," in made
        assert all("has no target: call" in each and "(inputs, targets), where" in each for each in passes)


@pytest.mark.parametrize("loss", [nn.MSELoss(), functional.mse_loss])
def test_a_mean_may_be_the_loss_of_a_schedule_of_one_microbatch(loss):
    x, y = batch(0, 1)
    layer = layers(1)[0]
    losses = Pipeline({0: layer}, by_rows("0F0 0B0"), Communicator.alone(), loss=loss).step(x, y)
    torch.testing.assert_close(losses, loss(layer(x), y).detach()[None])


def test_targets_without_a_loss_are_refused_on_all_ranks():
    def on_rank(comm: Communicator) -> list[str]:
        pipeline = Pipeline(own_stages(ONE_F_ONE_B, comm.rank), ONE_F_ONE_B, comm)
        calls = (pipeline.step, pipeline.evaluate)
        return [caught(lambda call=call: call(*batch(0, 3)), PeerFailedError) for call in calls]

    for told in run(2, on_rank):
        assert all("targets were given, but the pipeline has no loss" in each for each in told)


class Unreadable(dict[str, Tensor]):
    def items(self) -> Any:
        raise KeyError("the planted fault")


BAD_BATCHES = {
    "unreadable": (lambda: ([Unreadable()] * 3, batch(0, 3)[1]), "KeyError: 'the planted fault'"),
    "dict": (lambda: ({"x": batch(0, 3)[0]}, batch(0, 3)[1]), "of the stage's arguments; found dict"),
    "does not divide": (lambda: (batch(0, 3)[0][:5], batch(0, 3)[1]), "a batch of 5 does not divide into 3"),
    "nothing": (lambda: (None, batch(0, 3)[1]), "found nothing; every rank may be given both"),
    "tuple": (lambda: ((batch(0, 3)[0], None), batch(0, 3)[1]), "found (Tensor, NoneType)"),
    "targets": (lambda: (batch(0, 3)[0], "abc"), "targets: expected a tensor or a tuple"),
    "list": (lambda: ([batch(0, 3)[0]], batch(0, 3)[1]), "inputs: a list of 1 microbatches was given"),
    "uneven tuple": (
        lambda: ((batch(0, 3)[0], batch(0, 3)[0][:3]), batch(0, 3)[1]),
        "inputs: tensors of 6 and 3 along dim 0",
    ),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_a_batch_that_does_not_divide_is_refused_on_all_ranks(name):
    make, message = BAD_BATCHES[name]

    def on_rank(comm: Communicator) -> tuple[str, bool]:
        pipeline = Pipeline(own_stages(ONE_F_ONE_B, comm.rank), ONE_F_ONE_B, comm, loss=summed)
        told = caught(lambda: pipeline.step(*make()), PeerFailedError)
        return told, pipeline.step(*batch(0, 3)) is not None

    (first, _), (last, has_losses) = run(2, on_rank)
    assert message in first
    assert message in last
    assert has_losses


def test_inputs_and_targets_of_different_lengths_are_refused_on_all_ranks_unless_they_are_lists():
    """Microbatches of 2 rows beside those of 1 would broadcast in many a loss."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return summed(output, target.expand_as(output))

    def on_rank(comm: Communicator) -> tuple[list[str], bool]:
        pipeline = Pipeline(own_stages(ONE_F_ONE_B, comm.rank), ONE_F_ONE_B, comm, loss=loss)
        x, y = batch(0, 3)
        calls = (pipeline.step, pipeline.evaluate)
        told = [caught(lambda call=call: call(x, y[:3]), MismatchError) for call in calls]
        return told, pipeline.step(x, list(y[:3].chunk(3))) is not None

    results = run(2, on_rank)
    assert [has_losses for _, has_losses in results] == [False, True]
    for told, _ in results:
        assert all("rank 0 was given a batch of 6; rank 1 was given a batch of 3" in each for each in told)


@pytest.mark.parametrize("divided", [lambda y: y, lambda y: (y, y), lambda y: list(y.split(2))])
def test_targets_of_other_samples_than_those_of_the_inputs_are_refused_on_all_ranks(divided):
    """As if ranks of one pipeline chose samples by their world rank; a rank may do without targets."""

    def on_rank(comm: Communicator) -> None:
        def loss(output: Tensor, y: Any) -> Tensor:
            return summed(output, y if isinstance(y, Tensor) else y[0])

        pipeline = Pipeline(own_stages(ONE_F_ONE_B, comm.rank), ONE_F_ONE_B, comm, loss=loss)
        x, y = batch(0, 3)
        pipeline.step(x, divided(y) if comm.rank else None)
        with pytest.raises(MismatchError, match=r"rank 0 was given targets of checksum .*by mesh.dp.rank"):
            pipeline.step(x, divided(y + comm.rank))
        pipeline.step(x, divided(y))

    run(2, on_rank)


def test_a_rank_with_both_ends_names_both_lengths():
    def on_rank(comm: Communicator) -> str:
        pipeline = Pipeline(own_stages(V, comm.rank), V, comm, loss=summed)
        x, y = batch(0, 2)
        return caught(lambda: pipeline.step(x, y[:2]), PeerFailedError)

    assert all("inputs are a batch of 4, but targets one of 2" in told for told in run(2, on_rank))


def test_a_step_here_and_an_evaluation_there_are_refused_on_both():
    def on_rank(comm: Communicator) -> tuple[str, str]:
        pipeline = Pipeline(own_stages(ONE_F_ONE_B, comm.rank), ONE_F_ONE_B, comm, loss=summed)
        call = (pipeline.step, pipeline.evaluate)[comm.rank]
        count = 2 + comm.rank
        return (
            caught(lambda: call(*batch(0, 3)), MismatchError),
            caught(lambda: pipeline.evaluate(*([x] * count for x in batch(0, 1))), MismatchError),
        )

    for kinds, counts in run(2, on_rank):
        assert "rank 0 was asked for step; rank 1 was asked for evaluate" in kinds
        assert "rank 0 was given microbatches: 2; rank 1 was given microbatches: 3" in counts


def test_a_loss_that_is_not_one_number_is_named():
    def on_rank(comm: Communicator) -> str:
        stages = own_stages(ONE_F_ONE_B, comm.rank)
        pipeline = Pipeline(stages, ONE_F_ONE_B, comm, loss=lambda output, target: output - target)
        return caught(lambda: pipeline.step(*batch(0, 3)), PeerFailedError)

    assert all(
        "1F0: OperationError: the loss of microbatch 0 must be a tensor of one number, not [2, 4]: return"
        in t
        for t in run(2, on_rank)
    )


# --- data parallelism ----------------------------------------------------------------------------------


def test_the_last_gradients_of_a_row_are_those_that_come_once():
    assert [late_from(ONE_F_ONE_B, rank) for rank in (0, 1)] == [5, 4]
    assert [late_from(SPLIT, rank) for rank in (0, 1)] == [7, 7]
    assert [late_from(LOOP, rank) for rank in (0, 1)] == [6, 6]
    assert late_from(by_rows("0F0 0B0"), 0) == 0
    # The whole backward of 1 gives what the W of 0 gives, so that this one comes early.
    assert late_from(by_rows("0F0 0F1 0B0 0W0 0B1"), 0) == 4


@pytest.mark.parametrize("schedule", [SPLIT, V], ids=["split", "v"])
def test_unequal_microbatches_of_two_pipelines_make_the_mean_by_the_loss_factor(schedule: Schedule) -> None:
    count = schedule.microbatches
    ignored = -100

    def labelled(rank: int) -> tuple[Tensor, Tensor]:
        """The first microbatches have no label that counts, the others more and more."""
        x, _ = batch(rank, count)
        labels = torch.arange(2 * count) % WIDTH
        labels[: count + rank] = ignored
        return x, labels

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(output, labels, ignore_index=ignored, reduction="sum")

    def on_rank(world: Communicator) -> dict[str, Tensor]:
        mesh = Mesh(world, pp=2, dp=2)
        stages = own_stages(schedule, mesh.pp.rank)
        named = named_parameters(stages)
        inner = torch.optim.SGD(named.values(), lr=0.1)
        optimizer = DistributedOptimizer(inner, named.items(), mesh.dp, backward_passes_per_step=count)
        x, labels = labelled(mesh.dp.rank)
        factor = optimizer.loss_factor((labels != ignored).sum()) if schedule.stages - 1 in stages else 0.0
        pipeline = Pipeline(stages, schedule, mesh.pp, loss=lambda out, y: loss(out, y) * factor)
        pipeline.step(x, labels)
        optimizer.synchronize()
        return {name: parameter.grad for name, parameter in named.items()}

    whole = dict(enumerate(layers(schedule.stages)))
    x, labels = (torch.cat(parts) for parts in zip(labelled(0), labelled(1), strict=True))
    output = nn.Sequential(*whole.values())(x)
    functional.cross_entropy(output, labels, ignore_index=ignored).backward()
    expected = {name: parameter.grad for name, parameter in named_parameters(whole).items()}
    for found in run(4, on_rank):
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("by", ["passes", "no_sync"])
@pytest.mark.parametrize("schedule", [SPLIT, V], ids=["split", "v"])
def test_two_pipelines_side_by_side_average_their_gradients(schedule, by):
    count = schedule.microbatches
    truth = serial(schedule.stages, 2 * count)

    def on_rank(world: Communicator) -> Course:
        mesh = Mesh(world, pp=2, dp=2)
        stages = own_stages(schedule, mesh.pp.rank)
        named = named_parameters(stages)
        inner = torch.optim.SGD(named.values(), lr=0.1, momentum=0.9)
        passes = count if by == "passes" else 1
        optimizer = DistributedOptimizer(
            inner,
            named.items(),
            mesh.dp,
            backward_passes_per_step=passes,
            bucket_bytes=200,
            first_bucket_bytes=100,
        )
        options = {"no_sync": optimizer.no_sync} if by == "no_sync" else {}
        pipeline = Pipeline(stages, schedule, mesh.pp, loss=lambda out, y: 2 * summed(out, y), **options)
        losses, gradients = [], {}
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = (part.chunk(2)[mesh.dp.rank] for part in batch(step, 2 * count))
            losses.append(pipeline.step(x, y))
            left = sum(each.handle is not None for each in optimizer.reducer._states)
            assert left > 0, "some averages leave while the pipeline is at work"
            optimizer.synchronize()
            if not step:
                gradients = {name: parameter.grad.clone() for name, parameter in named.items()}
            optimizer.step()
        return Course(losses, gradients, {name: p.detach().clone() for name, p in named.items()})

    courses = run(4, on_rank)
    for replica in (0, 1):
        found = [courses[rank] for rank in (replica, 2 + replica)]
        joined = {name: each for course in found for name, each in course.gradients.items()}
        torch.testing.assert_close(joined, truth.gradients, rtol=TOLERANCE, atol=TOLERANCE)
        joined = {name: each for course in found for name, each in course.parameters.items()}
        torch.testing.assert_close(joined, truth.parameters, rtol=TOLERANCE, atol=TOLERANCE)


# --- when things ran -----------------------------------------------------------------------------------


def test_the_timetable_and_the_trace_have_every_action_in_the_order_of_its_needs():
    def on_rank(comm: Communicator) -> tuple[Any, list[str]]:
        stages = {number: nn.Sequential(module) for number, module in own_stages(SPLIT, comm.rank).items()}
        pipeline = Pipeline(stages, SPLIT, comm, loss=summed)
        comm.trace = Trace()
        pipeline.step(*batch(0, 3))
        events = [event.name for event in comm.trace.events if event.category == "compute"]
        comm.trace = None
        return pipeline.timetable(), events

    (timetable, first), (other, second) = run(2, on_rank)
    assert timetable == other
    assert [[str(timed.action) for timed in row] for row in timetable.rows] == [first, second]
    assert [tuple(timed.action for timed in row) for row in timetable.rows] == list(SPLIT.rows)
    when = {timed.action: timed for row in timetable.rows for timed in row}
    for timed in when.values():
        assert timed.start_s <= timed.end_s
        assert all(when[needed].end_s <= timed.start_s for needed in SPLIT.needs(timed.action))
    assert min(timed.start_s for timed in when.values()) == 0.0


def test_nodes_with_different_clocks_are_set_to_one_time(monkeypatch):
    """Rank 1's clock is 1000 s ahead; a barrier of ranks that are threads takes less than a second."""
    clock = time.perf_counter

    def on_rank(comm: Communicator) -> Any:
        pipeline = Pipeline(own_stages(SPLIT, comm.rank), SPLIT, comm, loss=summed)
        pipeline.step(*batch(0, 3))
        return pipeline.timetable()

    ahead_s = {"rank 1": 1000.0}
    monkeypatch.setattr(
        time, "perf_counter", lambda: clock() + ahead_s.get(threading.current_thread().name, 0.0)
    )
    for timetable in run(2, on_rank, nodes=[0, 1]):
        assert timetable.seconds < 30.0
        assert min(row[0].start_s for row in timetable.rows) == 0.0


def test_messages_are_moved_on_between_layers():
    """Twice an action, and after each of a stage's two layers, forward and backward."""

    def on_rank(comm: Communicator) -> int:
        pipeline = Pipeline(own_stages(ONE_F_ONE_B, comm.rank), ONE_F_ONE_B, comm, loss=summed)
        poke, pokes = comm.poke, []
        comm.poke = lambda: (pokes.append(1), poke())[1]  # type: ignore[method-assign]
        pipeline.step(*batch(0, 3))
        return len(pokes)

    assert run(2, on_rank) == [2 * 6 + 2 * 6] * 2


# --- over MPI ------------------------------------------------------------------------------------------


def in_line(size: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards split, on any number of ranks."""
    numbers = range(microbatches)
    rows = [
        [f"{r}F{m}" for m in numbers] + [f"{r}{kind}{m}" for m in numbers for kind in "BW"]
        for r in range(size)
    ]
    return by_rows(*(" ".join(row) for row in rows))


@pytest.mark.mpi
def test_over_mpi_a_pipeline_follows_one_process(any_world):
    schedule = in_line(any_world.size, 4)
    found, peak = parallel(any_world, schedule)
    courses = any_world.allgather_object(found)
    require_same(courses, serial(any_world.size, 4), schedule)
    assert peak == peak_chunks(schedule)[any_world.rank]


@pytest.mark.mpi
def test_over_mpi_what_is_not_used_has_no_gradient(any_world):
    schedule = in_line(any_world.size, 2)
    found, truth = branching_gradients(any_world, schedule, 1)
    torch.testing.assert_close(found, truth, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.mpi(min_size=2)
def test_over_mpi_large_messages_both_ways_between_two_stages_do_not_deadlock(world):
    """Beyond what MPI buffers, with stages of both ranks adjacent in both directions."""
    schedule = V if world.rank < 2 else None
    pair = world.split(0 if world.rank < 2 else None)
    total = None
    if pair is not None:
        stages = {number: nn.Linear(1, 1).double() for number in schedule.stages_of(pair.rank)}
        pipeline = Pipeline(stages, schedule, pair, loss=lambda out, _: out.sum())
        x = torch.ones(2 << 18, 1, dtype=torch.float64)
        for _ in range(2):
            total = pipeline.step(x, x)
    everyone = world.allgather_object(None if total is None else total.isfinite().all().item())
    assert everyone[:2] == [True, None]


@pytest.mark.mpi(min_size=2)
def test_over_mpi_a_failing_stage_is_named_on_all_ranks(world):
    schedule = in_line(world.size, 3)
    stage = Fault()
    pipeline = Pipeline({world.rank: stage}, schedule, world, loss=summed)
    told = []
    for call in (2, 5):
        stage.at, stage.calls = ({call: failing} if world.rank == world.size - 1 else {}), 0
        try:
            pipeline.step(*batch(0, 3))
            pipeline.step(*batch(0, 3))
        except PeerFailedError as error:
            told.append(str(error))
    everyone = world.allgather_object(told)
    last = world.size - 1
    assert everyone == [everyone[0]] * world.size
    assert [f"rank {last}: StageError: {last}F1: KeyError" in each for each in everyone[0]] == [True, True]
