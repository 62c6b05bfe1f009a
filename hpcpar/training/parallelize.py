"""`parallelize_llama`: a Llama on the ranks of a mesh, for a training loop of one's own.

    parallel = hpcpar.parallelize_llama(sizes, mesh, {"optimizer": {"zero_stage": 1}})
    worker = parallel.worker(torch.optim.AdamW(parallel.model.parameters()))
    for tokens, targets in batches:                 # [B, S], of this dp rank; the same along pp, cp and tp
        train_step(worker, tokens, targets, clip_norm=1.0)

The trainer builds its models by this function, too. It needs the extra `train`: pip install 'hpcpar[train]'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpcpar.context_parallel import ContextParallel
from hpcpar.data_parallel import DistributedOptimizer, Precision, broadcast_parameters, fully_shard
from hpcpar.errors import ConfigError
from hpcpar.expert_parallel import ExpertParallel
from hpcpar.mesh import Mesh
from hpcpar.models import Llama, LlamaConfig, LlamaStages, parallel_layers
from hpcpar.models.balancing import Balancing
from hpcpar.models.hugging_face_files import read_parameters, stored_values
from hpcpar.models.initialise import initial_value
from hpcpar.models.parallel import ExpertRanks
from hpcpar.pipeline_parallel import TiedWeights
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule
from hpcpar.planner.experts import Experts
from hpcpar.tensor_parallel import RandomStreams, TensorParallel, own_shard
from hpcpar.training.batches import microbatches_of
from hpcpar.training.composition import require_composition, require_heads_to_exchange
from hpcpar.training.config import Config, ExpertsSection, MeshSection, ModelSection, config_of
from hpcpar.training.pipelined import PipelinedModel, copies_here, divided, require_known
from hpcpar.training.sequences import Sequences
from hpcpar.training.training_step import WholeModel
from hpcpar.units import MiB


@dataclass(frozen=True, eq=False)
class ParallelLlama:
    """This rank's part of a model, and how its ranks train it.

    config        settings by which it was made
    model         a Llama, or with mesh.pp > 1 the stages of this rank
    sequences     documents in a batch, and the ranks of cp that share each sequence
    experts       ranks that divide the experts; None: the model has none
    microbatches  of this dp rank's part of a batch
    schedule      of the pipeline; None: there is none
    """

    config: Config
    mesh: Mesh
    tp: TensorParallel
    model: Llama | LlamaStages
    sequences: Sequences
    experts: ExpertRanks | None
    microbatches: int
    schedule: Schedule | None

    def worker(self, optimizer: Optimizer, **options: Any) -> WholeModel | PipelinedModel:
        """Return what `train_step` and `held_out_loss` take. Collective, once for each model.

        optimizer   of torch, over the model's parameters; `worker.optimizer` is the DistributedOptimizer that
                    steps it on averaged gradients, as the settings' optimizer section says
        options     of DistributedOptimizer that the settings do not have: nonfinite, overlap_allgather
        """
        distributed = partial(self._distributed, optimizer, **options)
        if isinstance(self.model, Llama):
            return WholeModel(self.model, distributed(), self.microbatches, self.sequences)
        assert self.schedule is not None, "there are stages"
        tied = TiedWeights(self.mesh.pp, self.model.tied_parameters())
        averaged = distributed(tied=copies_here(self.model, tied), backward_passes_per_step=self.microbatches)
        return PipelinedModel(self.model, self.schedule, self.mesh, tied, averaged, self.sequences)

    def _distributed(self, optimizer: Optimizer, **options: Any) -> DistributedOptimizer:
        section, is_sharded = self.config.optimizer, self.config.optimizer.zero_stage == 3
        return DistributedOptimizer(
            optimizer,
            self.model.named_parameters(),
            self.mesh.replicas,
            zero_stage=section.zero_stage,
            precision=precision_of(self.config),
            offload=section.offload,
            shared_parameters=section.shared_parameters and not is_sharded,
            model=None if is_sharded else self.model,
            bucket_bytes=None if section.bucket_mib is None else int(section.bucket_mib * MiB),
            first_bucket_bytes=int(section.first_bucket_mib * MiB),
            algorithm=section.algorithm,
            shard_ranks=None if is_sharded else self.mesh.layout.shard_ranks,
            **options,
        )


def parallelize_llama(
    sizes: LlamaConfig,
    mesh: Mesh,
    settings: Config | Mapping[str, Any] | None = None,
    *,
    device: torch.device | str | None = None,
    end_of_document: int | None = None,
    counts_targets: bool = True,
) -> ParallelLlama:
    """Build this rank's part of a Llama, by the degrees of `mesh` and the settings. Collective over the mesh.

    tp   heads, feed-forward and vocabulary divided         cp   sequences divided, attention over all of them
    ep   experts divided, their tokens exchanged            pp   layers divided into the stages of a schedule
    dp   replicas; optimizer state, gradients, parameters sharded by optimizer.zero_stage and mesh.dp_shard

    The parameters are those of `Llama(sizes, seed=model.seed)`, cut; or those of the files in
    model.hugging_face. No rank holds the whole model with zero_stage = 3.

    settings          tables and keys of a run's file: {"train": {"global_batch": 16, "sequence": 128},
                      "pipeline": {"schedule": "zb-v"}}. Read are train (batch, seed, precision,
                      recomputation), optimizer (all but its name and rates), tensor_parallel,
                      context_parallel, expert_parallel, pipeline, and of model seed and hugging_face.
                      Sizes and degrees are those of `sizes` and `mesh`
    device            None: train.device
    end_of_document   the token behind each packed document, of which none sees another; None: a row is one
    counts_targets    the ranks count the targets of each batch, as some may be -100 (no target); False: your
                      word that each batch has train.global_batch x train.sequence of them
    errors            ConfigError, LayoutError or ScheduleError on all ranks for what cannot be together

    source   torchtitan's `parallelize_llama`, Liang et al. 2024, arXiv 2410.06511
    """
    config = _settings(settings, sizes, mesh)
    require_composition(config, mesh.layout)
    train = config.train
    device = torch.device(train.device if device is None else device)
    microbatches = microbatches_of(train.global_batch, mesh.dp.size, train.microbatch)

    tp = TensorParallel(mesh.tp, **config.tensor_parallel.model_dump())
    context = _context(config, mesh, tp, packs=end_of_document is not None)
    experts = None if sizes.experts is None else _expert_ranks(config, sizes.experts, mesh, tp)
    # Dropout masks differ between layers, and so between pipeline ranks.
    replica = mesh.pp.rank * mesh.dp.size + mesh.dp.rank
    streams = RandomStreams(train.seed, tp.rank, device, replica=replica)
    layers = parallel_layers(sizes, tp, context=context, streams=streams, experts=experts)

    schedule: Schedule | None = None
    build: Build = partial(Llama, sizes, layers, recompute=config.recompute)
    with mesh.world.together("looking at pipeline.schedule"):
        require_known(config.pipeline.schedule)
    if mesh.pp.size > 1:
        schedule, split = divided(config, sizes, layers, mesh, device, microbatches)
        own = schedule.stages_of(mesh.pp.rank)
        build = partial(LlamaStages, sizes, layers, split, own, recompute=config.recompute)

    make = _sharded if config.optimizer.zero_stage == 3 else _replicated
    return ParallelLlama(
        config=config,
        mesh=mesh,
        tp=tp,
        model=make(build, config, mesh, device),
        sequences=Sequences(
            None if counts_targets else train.global_batch * train.sequence, context, end_of_document
        ),
        experts=experts,
        microbatches=microbatches,
        schedule=schedule,
    )


UNREAD, OF_MODEL = ("mesh", "data", "schedule", "output"), ("seed", "hugging_face")
"""Tables of a run's file that say nothing about a model, and keys of its model that do not say its sizes."""

Build = Callable[..., Llama | LlamaStages]
"""(seed=…) -> this rank's part of the model, on torch's default device."""


def _settings(settings: Config | Mapping[str, Any] | None, sizes: LlamaConfig, mesh: Mesh) -> Config:
    """Return the settings with these sizes and degrees."""
    config = settings
    if not isinstance(config, Config):
        _refuse_unread(config or {})
        config = config_of(dict(config or {}), source="parallelize_llama")
    told = {field.name: getattr(sizes, field.name) for field in fields(sizes)}
    experts = ExpertsSection() if sizes.experts is None else ExpertsSection(**asdict(sizes.experts))
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=told | {"experts": experts}),
            "mesh": MeshSection(**mesh.layout.degrees),
        }
    )


def _refuse_unread(tables: Mapping[str, Any]) -> None:
    """Raise ConfigError for keys that would have no effect."""
    unread = {*UNREAD, *(f"model.{key}" for key in ModelSection.model_fields if key not in OF_MODEL)}
    given = {*tables, *(f"model.{key}" for key in tables.get("model", ()))}
    if found := sorted(unread & given):
        raise ConfigError(
            f"parallelize_llama: {found[0]} is not read: degrees are those of the mesh, sizes those of the "
            "LlamaConfig, and data and optimizer your own; leave it out"
        )


def _context(config: Config, mesh: Mesh, tp: TensorParallel, *, packs: bool) -> ContextParallel | None:
    """Return the ranks that share each sequence; None where each rank has whole ones."""
    # With dropout, too: so what is dropped of a token does not depend on the number of ranks.
    if mesh.cp.size == 1 and not packs and not config.model.dropout:
        return None
    context = ContextParallel(
        mesh.cp,
        **config.context_parallel.model_dump(),
        multiple=tp.size if tp.sequence_parallel else 1,
        even=mesh.pp.size > 1,
    )
    require_heads_to_exchange(config, tp.size, mesh.cp.size, context.inner.size)
    return context


def _expert_ranks(config: Config, sizes: Experts, mesh: Mesh, tp: TensorParallel) -> ExpertRanks:
    """Return which ranks divide the experts and balance their loads. Collective."""
    split = mesh.layout.etp == tp.size
    # Where experts are whole or sequences divided, ranks of tp route other tokens.
    over = ("tp",) if tp.size > 1 and (tp.sequence_parallel or not split) else ()
    comms = [mesh.comm(*axes, *over) for axes in (("dp", "cp"), ("cp",))]
    # Communicators of their own, so that bytes of gradients equal the theory.
    others, of_sequence = (comm.split(0, comm.rank, "balance") for comm in comms)
    is_everywhere = mesh.ep.size == 1 and (tp.size == 1 or split)
    tokens = config.train.global_batch * config.train.sequence
    return ExpertRanks(
        ExpertParallel(mesh.ep, sizes.count, **config.expert_parallel.model_dump()),
        split=split,
        replicas=None if is_everywhere else mesh.edp,
        replica=mesh.dp.rank,
        balancing=Balancing(sizes, others, of_sequence, tokens_per_step=tokens),
    )


def _replicated(build: Build, config: Config, mesh: Mesh, device: torch.device) -> Llama | LlamaStages:
    """Build the model, the same on every rank of dp and cp."""
    directory = config.model.hugging_face
    model = build(seed=None if directory else config.model.seed)
    model.to(device=device, dtype=_plain_dtype(config))
    broadcast_parameters(model, mesh.replicas)
    if directory is not None:
        read_parameters(model, directory, mesh.world)
    return model


def _sharded(build: Build, config: Config, mesh: Mesh, device: torch.device) -> Llama | LlamaStages:
    """Build the model of which this rank holds its shard alone, one layer's values after another's."""
    with torch.device("meta"):
        model = build(seed=None).to(_plain_dtype(config))
    value_of: Callable[[str], Tensor] = partial(initial_value, model.config, seed=config.model.seed)
    if config.model.hugging_face is not None:
        value_of = stored_values(model.config, config.model.hugging_face, mesh.replicas)
    tied, stages = {}, None
    if isinstance(model, LlamaStages):
        tied, stages = model.tied_names, list(model.stages.values())
    fully_shard(
        model,
        mesh.replicas,
        precision=precision_of(config),
        prefetch=config.optimizer.prefetch,
        shared_parameters=config.optimizer.shared_parameters,
        shard_ranks=mesh.layout.shard_ranks,
        stages=stages,
        reshard=config.optimizer.reshard,
        values=lambda name, tensor: own_shard(tensor, value_of(tied.get(name, name))),
        device=device,
    )
    return model


def precision_of(config: Config) -> Precision | None:
    """Return mixed precision for 16-bit types, or where another option needs it; else None."""
    name, section = config.train.precision, config.optimizer
    if name in ("float32", "float64") and section.reduction is None and section.moments is None:
        return None
    return Precision(name, reduction=section.reduction, moments=section.moments)


def _plain_dtype(config: Config) -> torch.dtype:
    """Return the type in which a model is built, before mixed precision applies."""
    return torch.float64 if config.train.precision == "float64" else torch.float32
