"""Pipelines beside what `price` says of them, with stages that sleep, or a Llama's.

    simulate(schedule, durations) ─► seconds and bubble rate ┐
    Pipeline.step()            ─► seconds and bubble rate ┴─► beside each other

Of stages that sleep the durations are known: what the ranks do besides is the executor's. A Llama's are
measured, of one microbatch without a pipeline, in turn with the steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function

from hpcpar.autograd.fused_layers import adding_in_place
from hpcpar.autograd.weight_grad_mode import DeferredGradients, stand_in, under_way
from hpcpar.comm import Communicator
from hpcpar.pipeline_parallel.pipeline import Pipeline
from hpcpar.pipeline_parallel.stage import Stage
from hpcpar.pipeline_parallel.tensor_spec import OutputSpec, spec_of
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule
from hpcpar.pipeline_schedules.pipeline_simulation import Durations, replayed, simulate
from hpcpar.pipeline_schedules.timetable import Timetable


@dataclass(frozen=True)
class Work:
    """A rank's stages by number, and a batch for the first and the last stage."""

    stages: Mapping[int, nn.Module]
    loss: Callable[[Any, Any], Tensor]
    inputs: Tensor
    targets: Tensor


class Clock(Protocol):
    """Durations of actions, asked before every step, so that a noisy machine touches both."""

    def look(self) -> None: ...

    def durations(self) -> Durations: ...


@dataclass(frozen=True)
class Comparison:
    """One schedule as priced, and as run.

    step_s        of each step, from a barrier on, of the slowest rank
    bubble_rates  of each step's timetable
    own_rates     what the schedule says where each action takes as long as in that very step, and a message
                  as long as alone: what is idle beyond it is the executor's
    measured      the timetable of the step with the median bubble rate
    """

    schedule: Schedule
    durations: Durations
    predicted: Timetable
    measured: Timetable
    step_s: list[float]
    bubble_rates: list[float]
    own_rates: list[float]

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)

    @property
    def bubble_rate(self) -> float:
        return statistics.median(self.bubble_rates)

    @property
    def own_rate(self) -> float:
        return statistics.median(self.own_rates)


def compare(world: Communicator, schedule: Schedule, work: Work, clock: Clock, steps: int) -> Comparison:
    """Run the schedule, an untimed step, then timed ones, and price it. Collective."""
    pipeline = Pipeline(work.stages, schedule, world, loss=work.loss)
    pipeline.step(work.inputs, work.targets)
    own_s, timetables = [], []
    for _ in range(steps):
        clock.look()
        world.barrier()
        start_s = time.perf_counter()
        pipeline.step(work.inputs, work.targets)
        own_s.append(time.perf_counter() - start_s)
        timetables.append(pipeline.timetable())
    durations = clock.durations()
    return Comparison(
        schedule,
        durations,
        predicted=simulate(schedule, durations),
        measured=sorted(timetables, key=lambda each: each.bubble_rate)[steps // 2],
        step_s=[max(of_ranks) for of_ranks in zip(*world.allgather_object(own_s), strict=True)],
        bubble_rates=[each.bubble_rate for each in timetables],
        own_rates=[replayed(each, durations.hop_s).bubble_rate for each in timetables],
    )


# --- stages that sleep ----------------------------------------------------------------------------


class Seconds(NamedTuple):
    """Time of a stage's forward, of its backward to the input, of its weights' part."""

    forward: float
    backward: float
    weight: float


class Sleeper(nn.Module):
    """A stage that leaves its core to others for as long as it would work: x -> x, of any shape."""

    def __init__(self, seconds: Seconds) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        slept: Tensor = _Sleep.apply(x, stand_in(self.weight), self.seconds, under_way())  # type: ignore[no-untyped-call]
        return slept


class _Sleep(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, seconds: Seconds, deferred: DeferredGradients | None
    ) -> Tensor:
        ctx.weight, ctx.seconds, ctx.deferred = weight, seconds, deferred
        time.sleep(seconds.forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        def of_weight() -> Tensor:
            time.sleep(ctx.seconds.weight)
            return torch.zeros_like(ctx.weight)

        time.sleep(ctx.seconds.backward)
        if ctx.deferred is None:
            return gradient, of_weight(), None, None
        ctx.deferred.add(ctx.weight, of_weight)
        return gradient, None, None, None


class Asleep(NamedTuple):
    """Durations of stages that sleep; messages cost nothing."""

    seconds: Seconds

    def look(self) -> None:
        pass

    def durations(self) -> Durations:
        return Durations(*self.seconds)


def sleeping(world: Communicator, schedule: Schedule, seconds: Seconds) -> Work:
    stages = {stage: Sleeper(seconds) for stage in schedule.stages_of(world.rank)}
    batch = torch.zeros(schedule.microbatches, 1)
    return Work(stages, lambda output, _: output.sum(), batch, batch)


# --- stages that compute --------------------------------------------------------------------------


class Stopwatch:
    """What each stage takes for a microbatch without a pipeline, in the median, and a message.

    hidden    what goes from stage to stage, for a microbatch
    repeats   of each look

    All ranks measure at once, for the memory of a node is theirs together in a pipeline, too. Where the
    schedule splits no backward, the whole one counts, which need not take as long as its two parts.
    """

    def __init__(
        self, world: Communicator, schedule: Schedule, work: Work, hidden: Tensor, repeats: int
    ) -> None:
        self.world, self.hidden, self.repeats = world, hidden, repeats
        self.split = any(action.kind == "W" for action in schedule.actions())
        self.count = schedule.stages
        inputs, targets = (each.chunk(schedule.microbatches)[0] for each in (work.inputs, work.targets))
        self.alone = [
            Alone(
                Stage(number, module),
                inputs if number == 0 else hidden,
                None if number == 0 else spec_of((hidden,)),
                (lambda output: work.loss(output, targets)) if number == self.count - 1 else None,
            )
            for number, module in work.stages.items()
        ]
        self.seconds: dict[int, list[Seconds]] = {number: [] for number in work.stages}
        self.hops_s: list[float] = []

    def look(self) -> None:
        """Measure, after a repeat that does not count. Collective."""
        self.world.barrier()
        for alone in self.alone:
            with adding_in_place([alone.stage.module]):
                seconds = [alone.run(split=self.split) for _ in range(1 + self.repeats)]
            self.seconds[alone.stage.number] += seconds[1:]
        self.hops_s += hops_s(self.world, self.hidden, 1 + self.repeats)[1:]

    def durations(self) -> Durations:
        """Return the medians of all looks. Collective."""
        own = {
            number: [statistics.median(each) for each in zip(*seconds, strict=True)]
            for number, seconds in self.seconds.items()
        }
        everyone = self.world.allgather_object((own, self.hops_s))
        of_stage = {number: medians for part, _ in everyone for number, medians in part.items()}
        columns = zip(*(of_stage[number] for number in range(self.count)), strict=True)
        return Durations(*map(list, columns), hop_s=statistics.median(everyone[0][1]))


@dataclass(frozen=True)
class Alone:
    """A stage with one microbatch; `spec` of the inputs, as from another stage."""

    stage: Stage
    inputs: Tensor
    spec: OutputSpec | None
    loss: Callable[[Any], Tensor] | None

    def run(self, *, split: bool) -> Seconds:
        """Run forward and backward; a backward that is not split is all in `backward`."""
        start_s = time.perf_counter()
        output = self.stage.forward(0, (self.inputs,), self.spec, split=split, loss=self.loss)
        forward_s = time.perf_counter() - start_s
        gradients = () if self.loss else (torch.ones_like(output),)
        start_s = time.perf_counter()
        self.stage.backward(0, gradients)
        backward_s = time.perf_counter() - start_s
        if not split:
            return Seconds(forward_s, backward_s, 0.0)
        start_s = time.perf_counter()
        self.stage.weights(0)
        return Seconds(forward_s, backward_s, time.perf_counter() - start_s)


def hops_s(world: Communicator, message: Tensor, repeats: int) -> list[float]:
    """Return half of each round trip between ranks 0 and 1, on these ranks."""
    message = message.detach().clone()
    found = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        if world.rank == 0 and world.size > 1:
            world.send(message, 1)
            world.recv(message, 1)
        elif world.rank == 1:
            world.recv(message, 0)
            world.send(message, 0)
        found.append((time.perf_counter() - start_s) / 2)
    return found
