"""Pipeline of a training run: its schedule, the layers of its stages, and its `Worker`.

Shape letters: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hpcpar.comm import Trace
from hpcpar.context_parallel import Mask
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.errors import ConfigError, ScheduleError
from hpcpar.mesh import Mesh
from hpcpar.models import LlamaConfig, LlamaStages
from hpcpar.models.balancing import Balancing
from hpcpar.models.layers import Layers
from hpcpar.models.llama_stages import measured_costs
from hpcpar.partition import bounds
from hpcpar.pipeline_parallel import Pipeline, TiedWeights
from hpcpar.pipeline_parallel.balance import StageSplit, balanced, by_hand, stage_costs
from hpcpar.pipeline_schedules import schedule_registry, text
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule
from hpcpar.pipeline_schedules.pipeline_simulation import Durations
from hpcpar.pipeline_schedules.proof import prove
from hpcpar.training.composition import split_backward
from hpcpar.training.config import Config
from hpcpar.training.sequences import Sequences
from hpcpar.training.step_timeline import span

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


def divided(
    config: Config,
    sizes: LlamaConfig,
    layers: Layers,
    mesh: Mesh,
    device: torch.device,
    microbatches: int,
) -> tuple[Schedule, StageSplit]:
    """Return the schedule of `mesh.pp` for so many microbatches, and the items of its stages. Collective.

    errors   ScheduleError, LayoutError or ConfigError on all ranks
    """
    costs = item_costs(config, sizes, layers, device, mesh.world)
    with mesh.world.together("dividing the model into stages"):
        schedule = make_schedule(config, mesh.pp.size, microbatches, costs)
        require_zero_stage(config, schedule)
        return schedule, split_of_layers(config, sizes.layers, costs, schedule)


def make_schedule(config: Config, ranks: int, microbatches: int, costs: list[float]) -> Schedule:
    """Return the configured schedule, by name or from its file.

    costs    of embedding, each layer and head, for a method that uses durations
    errors   ScheduleError where the method does not allow such numbers; ConfigError for a file of another
             pipeline, or of one that cannot work
    """
    section = config.pipeline
    if section.schedule in schedule_registry.METHODS:
        return schedule_registry.make(
            section.schedule,
            ranks,
            microbatches,
            stages_per_rank=section.stages_per_rank,
            memory_limit=section.memory_limit,
            durations=expected_durations(costs, balanced(costs, ranks)),
        )
    require_known(section.schedule)
    schedule = text.read(Path(section.schedule))
    if (schedule.ranks, schedule.microbatches) != (ranks, microbatches):
        raise ConfigError(
            f"the schedule in {section.schedule} is for {schedule.ranks} ranks and {schedule.microbatches} "
            f"microbatches, but the run has mesh.pp = {ranks} and {microbatches} microbatches on each dp "
            "rank; change train.global_batch, train.microbatch or the file"
        )
    try:
        peaks = prove(schedule).peaks
    except ScheduleError as error:
        raise ConfigError(f"the schedule in {section.schedule} cannot work: {error}") from error
    stages = [len(schedule.stages_of(rank)) for rank in range(ranks)]
    if 0 in stages:
        raise ConfigError(
            f"the schedule in {section.schedule} has no stage on rank {stages.index(0)}, which would have "
            "nothing to train; give it one, or leave its line out and lower mesh.pp"
        )
    if section.stages_per_rank is not None and set(stages) != {section.stages_per_rank}:
        raise ConfigError(
            f"pipeline.stages_per_rank = {section.stages_per_rank}, but the schedule in {section.schedule} "
            f"has {', '.join(map(str, stages))} stages on its ranks; leave it out, or change the file"
        )
    if section.memory_limit is not None and max(peaks) > section.memory_limit:
        raise ConfigError(
            f"pipeline.memory_limit = {section.memory_limit}, but the schedule in {section.schedule} keeps "
            f"{max(peaks)} chunks on rank {peaks.index(max(peaks))}; raise it, or change the file"
        )
    return schedule


def require_known(name: str) -> None:
    """Raise ConfigError for a name that is neither a method nor a file."""
    if name not in schedule_registry.METHODS and not Path(name).is_file():
        raise ConfigError(
            f"pipeline.schedule = {name!r} is neither a file nor a name; there are "
            f"{', '.join(schedule_registry.METHODS)}"
        )


def expected_durations(costs: list[float], split: StageSplit) -> Durations:
    """Return the durations of the stages' actions F, B and W, taken as equal."""
    thirds = [cost / 3 for cost in stage_costs(costs, split)]
    return Durations(thirds, thirds, thirds)


def item_costs(
    config: Config, sizes: LlamaConfig, layers: Layers, device: torch.device, world: Communicator
) -> list[float]:
    """Return the costs of embedding, each layer and head, equal on all ranks. Collective."""
    if config.pipeline.balance != "measured":
        return [
            float(cost) for cost in sizes.flops_per_item(config.train.sequence, recompute=config.recompute)
        ]
    dtype = torch.float64 if config.train.precision == "float64" else torch.float32
    measured = measured_costs(
        sizes,
        layers,
        microbatch=config.train.microbatch,
        sequence=config.train.sequence,
        device=device,
        dtype=dtype,
        recompute=config.recompute,
    )
    costs: list[float] = world.allreduce(torch.tensor(measured, dtype=torch.float64), "average").tolist()
    return costs


def split_of_layers(config: Config, layers: int, costs: list[float], schedule: Schedule) -> StageSplit:
    """Return the items of each stage; LayoutError where they cannot be divided so."""
    by = config.pipeline.balance
    if isinstance(by, str):
        return balanced(costs, schedule.stages, schedule.rank_of_stage)
    if len(by) != schedule.stages:
        raise ConfigError(
            f"pipeline.balance has layers for {len(by)} stages, but the schedule {schedule.name!r} has "
            f"{schedule.stages}; give one number for each"
        )
    return by_hand(by, layers)


def copies_here(model: LlamaStages, tied: TiedWeights) -> dict[str, bool]:
    """Return this rank's copies of tied parameters, by name; True for a copy that counts in norms."""
    copies = [id(parameter) for parameter in model.tied_parameters().values() if parameter is not None]
    return {
        name: tied.counts_here(parameter)
        for name, parameter in model.named_parameters()
        if id(parameter) in copies
    }


def require_zero_stage(config: Config, schedule: Schedule) -> None:
    """Raise ConfigError where the stage of ZeRO does not fit a schedule, which may be a file's."""
    reason = split_backward(config)
    if reason is not None and any(action.kind == "W" for action in schedule.actions()):
        raise ConfigError(reason)


class PipelinedModel:
    """A `Worker` with the stages of all ranks of `mesh.pp`. Making one is collective over them.

    model           this rank's stages
    schedule        for the microbatches of a step
    tied            weights that other ranks hold too
    sequences       the documents in a batch, and its targets
    """

    def __init__(
        self,
        model: LlamaStages,
        schedule: Schedule,
        mesh: Mesh,
        tied: TiedWeights,
        optimizer: DistributedOptimizer,
        sequences: Sequences,
    ) -> None:
        self.model = model
        self.sequences = sequences
        self.tied = tied
        self.optimizer = optimizer
        self._share, self._microbatches = 1.0, schedule.microbatches
        self._masks: Sequence[Mask] = ()
        self.pipeline = Pipeline(
            model.stages,
            schedule,
            mesh.pp,
            loss=self._loss,
            around=lambda microbatch: sequences.with_mask(self._masks[microbatch]),
        )

    @property
    def balancing(self) -> Balancing | None:
        return self.model.balancing

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss scaled for backward; in evaluation the sum."""
        total = self.model.loss(logits, targets, reduction="sum")
        return self.optimizer.scale_loss(total * self._share) if torch.is_grad_enabled() else total

    def accumulate(self, tokens: Tensor, targets: Tensor, trace: Trace | None) -> Tensor:
        """Run all microbatches by the schedule; average gradients while other stages still compute."""
        replicas = self.optimizer.dp_comm
        # The optimizer averages over ranks where the global mean asks for a sum.
        self._share = replicas.size / self.sequences.global_targets(targets, replicas)
        self._masks = [
            self.sequences.mask(tokens[start:stop]) for start, stop in bounds(len(tokens), self._microbatches)
        ]
        losses = self.pipeline.step(tokens, targets)
        with span(trace, "tied weights"):
            self.tied.sum_gradients()
        if losses is None:
            return torch.zeros((), dtype=torch.float64, device=tokens.device)
        ranks, scale = self.optimizer.dp_comm.size, self.optimizer.scaler.scale
        return losses.double().sum() / (ranks * scale)

    def summed_losses(self, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, int]:
        """Evaluate all batches at once; the last stage's rank has the sums."""
        inputs, targets = map(list, zip(*batches, strict=True))
        was_training = self.model.training
        self.model.eval()
        try:
            masks = [self.sequences.mask(batch) for batch in inputs]
            losses, own_targets = self.evaluated(inputs, masks, targets), 0
            for mask, of_batch in zip(masks, targets, strict=True):
                with self.sequences.with_mask(mask):
                    own_targets += self.sequences.own_targets(of_batch)
        finally:
            self.model.train(was_training)
        if losses is None:
            return 0.0, 0
        assert isinstance(losses, Tensor), "with targets"
        return losses.double().sum().item(), own_targets

    def evaluated(
        self, batches: Sequence[Tensor], masks: Sequence[Mask], targets: Sequence[Tensor] | None = None
    ) -> Any:
        """Return the last stage's logits of each batch [B, S], or with targets the losses; None elsewhere."""
        self._masks = masks
        return self.pipeline.evaluate(batches, targets)


class PipelinedLogits(nn.Module):
    """The stages of all ranks as one model for `generate`; the last stage broadcasts. Collective."""

    def __init__(self, worker: PipelinedModel) -> None:
        super().__init__()
        self._worker, self.stages = worker, worker.model
        self.config = worker.model.config
        self.sequence_multiple = worker.model.sequence_multiple
        self._pipeline = worker.pipeline

    def logits_at(self, tokens: Tensor, place: int) -> Tensor:
        """Return the logits [B, V] of what follows tokens [B, S] at a place, on every rank."""
        comm, context, mask = self._pipeline.comm, self.stages.context, Mask(tokens.shape[1])
        dtype = next(self.stages.parameters()).dtype
        whole = torch.empty((len(tokens), self.config.vocab_size), dtype=dtype, device=tokens.device)
        with nullcontext() if context is None else context.using(mask):
            outputs: Any = self._worker.evaluated([tokens], [mask])
            if outputs is not None:
                logits = outputs[0] if context is None else context.unshard(outputs[0])
                whole = self.stages.whole_logits(logits[:, place]).contiguous()
        comm.broadcast(whole, root=self._pipeline.last_rank)
        return whole
