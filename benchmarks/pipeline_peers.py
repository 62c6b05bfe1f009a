"""What the peers of benchmarks/pipeline.py train, and everybody's way to do so in a pipeline.

    class    peers                            stages are            by
    Hpcpar   hpcpar gpipe, 1f1b, …            balanced              Pipeline, over MPI
             hpcpar even gpipe, 1f1b, …       even                  the same
    Torch    torch gpipe, 1f1b, …             even                  torch.distributed.pipelining, over gloo
    Serial   one process                      one: rank 0 has all   a loop over the microbatches

All begin with the same values, see the same tokens in the same microbatches, and give the gradient of the
mean of their losses to the same optimizer. The stages are the same modules for torch and for hpcpar.

"Even" stages have as many layers each, the first the embedding, too, and the last the head, as one would
split by hand; "balanced" ones take as much time, by measured costs.
"""

from __future__ import annotations

import importlib
import math
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from training_peers import Peer, Recipe, Share, Solo, Task

from hpcpar.models import Layers, next_token_loss
from hpcpar.models.llama_stages import LlamaStages
from hpcpar.partition import counts
from hpcpar.pipeline_parallel.balance import StageSplit, balanced, by_hand
from hpcpar.pipeline_parallel.pipeline import Pipeline
from hpcpar.pipeline_schedules import schedule_registry
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule
from hpcpar.pipeline_schedules.pipeline_simulation import Durations
from hpcpar.pipeline_schedules.stage_placement import loop, v_shape

PHASES = ("microbatches", "optimizer")


@dataclass(frozen=True)
class PipelineTask(Task):
    """What is trained: the same for all peers.

    batch             sequences of a microbatch
    microbatches      of a step
    stages_per_rank   of the interleaved schedules
    costs             of embedding, each layer, and head: what stages are balanced by
    """

    microbatches: int = 8
    stages_per_rank: int = 2
    costs: tuple[float, ...] = ()

    @property
    def global_batch(self) -> int:
        return self.batch * self.microbatches

    def own_share(self) -> Share:
        """Return all of it on every rank, though only the first stage and the last look at it."""
        return self.share(0, self.global_batch)

    def even(self, stages: int) -> StageSplit:
        return by_hand(counts(self.config.layers, stages), self.config.layers)

    def balanced(self, schedule: Schedule) -> StageSplit:
        return balanced(self.costs, schedule.stages, schedule.rank_of_stage)

    def stages(self, split: StageSplit, own_stages: Collection[int]) -> LlamaStages:
        return LlamaStages(self.config, Layers(), split, own_stages, seed=0).to(self.dtype)


class InMicrobatches(Peer):
    """A peer whose step is the microbatches, then the optimizer."""

    @abstractmethod
    def run(self) -> float:
        """Forward and backward of all microbatches; their mean loss where the last stage is, else nan."""

    def step(self, read: Callable[[], float] = time.perf_counter) -> tuple[float, list[float]]:
        marks = [read()]
        loss = self.run()
        marks.append(read())
        self.update()
        marks.append(read())
        return loss, marks


class PipelinePeer(InMicrobatches):
    """A Llama in stages; a subclass says how it is split and which stages this rank has, and runs them.

    model   this rank's stages
    split   (start, stop) of each stage's items: embedding, layers, head
    """

    autocast = False
    model: LlamaStages  # type: ignore[assignment]
    split: StageSplit

    def __init__(self, name: str, task: PipelineTask, recipe: Recipe) -> None:
        self.name, self.world = name, task.world
        self.share: Share = task.own_share()
        self.model = self.make_stages(task)
        self.split = self.model.split
        self.optimizer = recipe.make(self.model.parameters())

    @abstractmethod
    def make_stages(self, task: PipelineTask) -> LlamaStages:
        pass

    def parameters(self) -> dict[str, Tensor]:
        """Return those of the whole model; collective."""
        own = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        return {name: value for part in self.world.allgather_object(own) for name, value in part.items()}


class Hpcpar(PipelinePeer):
    """Pipeline over MPI."""

    def __init__(self, name: str, task: PipelineTask, recipe: Recipe) -> None:
        self.schedule = schedule_of(
            name.split()[-1], task.world.size, task.microbatches, task.stages_per_rank
        )
        super().__init__(name, task, recipe)
        model = self.model
        # Gradients are those of the sum of the microbatches' losses.
        self.pipeline = Pipeline(
            self.model.stages,
            self.schedule,
            task.world,
            loss=lambda logits, targets: model.loss(logits, targets) / task.microbatches,
        )

    def make_stages(self, task: PipelineTask) -> LlamaStages:
        even = self.name.split()[1] == "even"
        split = task.even(self.schedule.stages) if even else task.balanced(self.schedule)
        return task.stages(split, self.schedule.stages_of(task.world.rank))

    def run(self) -> float:
        losses = self.pipeline.step(*self.share)
        return math.nan if losses is None else losses.sum().item()


def schedule_of(
    name: str, ranks: int, microbatches: int, stages_per_rank: int, durations: Durations | None = None
) -> Schedule:
    """Make a schedule of the registry; stages_per_rank and durations count where it is made for some."""
    several = stages_per_rank if name == "interleaved" else None
    return schedule_registry.make(
        name, ranks, microbatches, stages_per_rank=several, durations=durations or Durations()
    )


class Theirs(NamedTuple):
    """A schedule of torch.

    stages_per_rank   None: as the task says
    v_shaped          the last stage is beside the first
    """

    schedule: str
    stages_per_rank: int | None = 1
    v_shaped: bool = False


TORCH = {
    "torch gpipe": Theirs("ScheduleGPipe"),
    "torch 1f1b": Theirs("Schedule1F1B"),
    "torch interleaved": Theirs("ScheduleInterleaved1F1B", None),
    "torch zb-h1": Theirs("ScheduleInterleavedZeroBubble"),
    "torch zb-interleaved": Theirs("ScheduleInterleavedZeroBubble", None),
    "torch zb-v": Theirs("ScheduleZBVZeroBubble", 2, v_shaped=True),
}
"""By the names that the catalogue has for the same. The interleaved zero bubble of one stage per rank is what
the paper calls ZB-1p, which keeps as many activations as ZB-H1; several per rank have no counterpart."""


class Torch(PipelinePeer):
    """torch.distributed.pipelining over gloo, on modules split by hand."""

    needs_gloo = True

    @classmethod
    def require(cls, task: Task) -> None:
        pipelining()

    def __init__(self, name: str, task: PipelineTask, recipe: Recipe) -> None:
        super().__init__(name, task, recipe)
        schedules: Any = pipelining()
        make = getattr(schedules, TORCH[name].schedule)
        last = len(self.split) - 1
        stages = [
            schedules.PipelineStage(module, stage, len(self.split), torch.device("cpu"))
            for stage, module in self.model.stages.items()
        ]
        several = issubclass(make, schedules.schedules.PipelineScheduleMulti)
        # The sum of the microbatches' gradients is divided by their number: the default of scale_grads.
        self.schedule = make(stages if several else stages[0], task.microbatches, loss_fn=next_token_loss)
        self.has_first, self.has_last = 0 in self.model.stages, last in self.model.stages

    def make_stages(self, task: PipelineTask) -> LlamaStages:
        theirs = TORCH[self.name]
        size = task.world.size
        placement = (
            v_shape(size) if theirs.v_shaped else loop(size, theirs.stages_per_rank or task.stages_per_rank)
        )
        split = task.even(placement.ranks * placement.per_rank)
        return task.stages(split, placement.stages[task.world.rank])

    def run(self) -> float:
        inputs, targets = self.share
        losses: list[Tensor] = []
        # Outputs are not asked for: it would put the logits of all microbatches together.
        self.schedule.step(
            *([inputs] if self.has_first else []),
            target=targets if self.has_last else None,
            losses=losses if self.has_last else None,
            return_outputs=False,
        )
        return torch.stack(losses).mean().item() if losses else math.nan


def pipelining() -> ModuleType:
    return importlib.import_module("torch.distributed.pipelining")


class Serial(InMicrobatches, Solo):
    """Rank 0 alone with the whole model, one microbatch after another; the others wait."""

    def __init__(self, name: str, task: PipelineTask, recipe: Recipe) -> None:
        super().__init__(name, task, recipe)
        self.microbatches = task.microbatches

    def run(self) -> float:
        assert self.share is not None
        mean = 0.0
        for inputs, targets in zip(*(tokens.chunk(self.microbatches) for tokens in self.share), strict=True):
            loss = self.model.loss(self.module(inputs), targets) / self.microbatches
            self.backward(loss)
            mean += loss.item()
        return mean


def live_nbytes(peer: InMicrobatches) -> int:
    """Return this rank's peak memory of tensors made during the microbatches of a step. Collective.

    torch's profiler reads it from the allocator: activations, values kept for W, messages, outputs, and
    temporaries; not parameters, gradients and optimizer states, which exist before. Hooks for saved tensors
    would miss what a B leaves for its W.
    """
    if peer.share is None:
        return 0
    peer.run()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would say when it starts and when it stops
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        peer.run()
    assert seen.profiler is not None
    events = [each for each in seen.profiler.kineto_results.events() if each.name() == "[memory]"]
    events.sort(key=lambda each: each.start_ns())
    levels = list(accumulate((each.nbytes() for each in events), initial=0))
    return max(levels)


SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
"""Of hpcpar's registry, those that torch has too."""

PIPELINE: dict[str, type[Peer]] = {
    **{f"hpcpar {schedule}": Hpcpar for schedule in SCHEDULES},
    **{f"hpcpar even {schedule}": Hpcpar for schedule in SCHEDULES},
    **dict.fromkeys(TORCH, Torch),
    "one process": Serial,
}
"""All peers, in the order in which they are reported."""
