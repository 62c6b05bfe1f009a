"""Builders of a run's parts from their sections of the configuration; each is collective over its ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from hpcpar.comm import Communicator
from hpcpar.context_parallel import ContextParallel
from hpcpar.data import Prepared, Tokenizer, prepare
from hpcpar.data_parallel import (
    CombinedOptimizer,
    DistributedOptimizer,
    Precision,
    broadcast_parameters,
    fully_shard,
)
from hpcpar.data_parallel.combined_optimizer import MUON
from hpcpar.errors import ConfigError
from hpcpar.expert_parallel import ExpertParallel
from hpcpar.launch.binding import affinity, gpu_for, thread_count
from hpcpar.mesh import Mesh
from hpcpar.models import Llama, LlamaStages, parallel_layers
from hpcpar.models.balancing import Balancing
from hpcpar.models.expert_ranks import ExpertRanks
from hpcpar.models.hugging_face_files import stored_values
from hpcpar.models.initialise import initial_value
from hpcpar.models.llama import EMBEDDING, HEAD
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule
from hpcpar.tensor_parallel import RandomStreams, TensorParallel, own_shard
from hpcpar.training.composition import require_heads_to_exchange
from hpcpar.training.config import Config, OptimizerSection
from hpcpar.training.pipelined import item_costs, make_schedule, require_zero_stage, split_of_layers
from hpcpar.training.sequences import Sequences
from hpcpar.units import MiB


def place_on_hardware(config: Config, comm: Communicator) -> torch.device:
    """Set this process's threads and seed, and choose its device, with regard to its node's other ranks.

    errors   PeerFailedError on all ranks when one of them lacks the device
    """
    with comm.split_by_node() as node:
        masks = node.allgather_object(affinity())
        local_rank, local_size = node.rank, node.size
    torch.set_num_threads(config.train.threads or thread_count(local_size, masks))
    torch.manual_seed(config.train.seed)
    if config.train.device == "cpu":
        return torch.device("cpu")
    with comm.together("choosing a GPU"):
        if config.optimizer.shared_parameters:
            raise ConfigError(
                "optimizer.shared_parameters is of host memory, but train.device = 'cuda'; use one of them"
            )
        index = gpu_for(local_rank, torch.cuda.device_count(), local_size)
        if index is None:
            raise ConfigError("train.device = 'cuda', but torch sees no GPU here; use train.device=cpu")
        device = torch.device("cuda", index)
        # Allocations without a device go to this rank's GPU; by default every rank would use the first.
        torch.cuda.set_device(device)
        return device


def prepare_data(config: Config, comm: Communicator, *, say: Callable[[str], None]) -> Prepared:
    """Return the tokens, from the cache or tokenized now; report progress to `say` on rank 0."""
    data = config.data
    return prepare(
        comm,
        data.paths or None,
        cache_directory=data.cache,
        tokenizer=data.tokenizer,
        end_of_document=data.eos_token,
        text_key=data.text_key,
        held_out_fraction=data.held_out,
        limit_nbytes=int(data.max_mib * MiB),
        on_progress=lambda tokens: say(f"tokenizing: {tokens:,} tokens so far"),
    )


def tensor_parallel_of(config: Config, tp_comm: Communicator) -> TensorParallel:
    """Return the tp axis with the configured options."""
    return TensorParallel(tp_comm, **config.tensor_parallel.model_dump())


def sequences_of(config: Config, mesh: Mesh, tp: TensorParallel, tokenizer: Tokenizer) -> Sequences:
    """Return how rows are read, and by which ranks together; collective over `mesh`.

    errors   ConfigError for packed documents of text whose documents have no end, and for heads that do not
             divide among the ranks that exchange them
    """
    context = None
    if config.data.pack_documents and tokenizer.end_of_document is None:
        raise ConfigError(
            "data.pack_documents = true, but data.eos_token = false: the documents of this text run "
            "together, and nobody knows where one ends; name the token, or leave pack_documents out"
        )
    # With dropout, too: so what is dropped of a token does not depend on the number of ranks.
    if mesh.cp.size > 1 or config.data.pack_documents or config.model.dropout:
        context = ContextParallel(
            mesh.cp,
            **config.context_parallel.model_dump(),
            multiple=tp.size if tp.sequence_parallel else 1,
            even=mesh.pp.size > 1,
        )
        require_heads_to_exchange(config, tp.size, mesh.cp.size, context.inner.size)
    return Sequences(
        config.train.global_batch * config.train.sequence,
        context,
        tokenizer.end_of_document if config.data.pack_documents else None,
    )


def expert_ranks_of(
    config: Config, vocabulary: int, mesh: Mesh, tp: TensorParallel, sequences: Sequences
) -> ExpertRanks | None:
    """Return which ranks divide the experts and balance their loads; None without experts. Collective."""
    sizes = config.model_config_for(vocabulary).experts
    if sizes is None:
        return None
    split = mesh.layout.etp == tp.size
    # Where experts are whole or sequences divided, ranks of tp route other tokens.
    over = ("tp",) if tp.size > 1 and (tp.sequence_parallel or not split) else ()
    comms = [mesh.comm(*axes, *over) for axes in (("dp", "cp"), ("cp",))]
    # Communicators of their own, so that bytes of gradients equal the theory.
    others, of_sequence = (comm.split(0, comm.rank, "balance") for comm in comms)
    is_everywhere = mesh.ep.size == 1 and (tp.size == 1 or split)
    return ExpertRanks(
        ExpertParallel(mesh.ep, sizes.count, **config.expert_parallel.model_dump()),
        split=split,
        replicas=None if is_everywhere else mesh.edp,
        replica=mesh.dp.rank,
        balancing=Balancing(sizes, others, of_sequence, tokens_per_step=sequences.global_tokens),
    )


def build_model(
    config: Config,
    vocabulary: int,
    device: torch.device,
    dp_comm: Communicator,
    tp: TensorParallel,
    context: ContextParallel | None = None,
    experts: ExpertRanks | None = None,
    shard_ranks: int | None = None,
) -> Llama:
    """Build the same model on every rank of `dp_comm`; each rank of `tp` has its part of every layer.

    context   ranks that share each sequence
    experts   ranks that divide the experts
    shard_ranks   as of `fully_shard`

    With zero_stage = 3 a rank holds only its shard of that part, of a Hugging Face model read from its files;
    in other stages `read_start` reads them.
    """
    sizes, section, seed = config.model_config_for(vocabulary), config.optimizer, config.model.seed
    replica = dp_comm.rank // (context.comm.size if context else 1)
    streams = RandomStreams(config.train.seed, tp.rank, device, replica=replica)
    layers = parallel_layers(sizes, tp, context=context, streams=streams, experts=experts)
    directory = config.model.hugging_face
    if section.zero_stage == 3:
        with torch.device("meta"):
            model = Llama(sizes, layers, seed=None, recompute=config.recompute).to(_plain_dtype(config))
        _shard(config, model, dp_comm, device, shard_ranks)
        return model
    model = Llama(sizes, layers, seed=None if directory else seed, recompute=config.recompute)
    model.to(device=device, dtype=_plain_dtype(config))
    broadcast_parameters(model, dp_comm)
    return model


def build_stages(
    config: Config,
    vocabulary: int,
    device: torch.device,
    mesh: Mesh,
    tp: TensorParallel,
    microbatches: int,
    context: ContextParallel | None = None,
    experts: ExpertRanks | None = None,
) -> tuple[LlamaStages, Schedule]:
    """Build this rank's stages, and the schedule of `mesh.pp` for so many microbatches. Collective.

    The stages are the same on every rank of dp and cp; each rank of `tp` has its part of every layer.
    errors   ScheduleError, LayoutError or ConfigError on all ranks
    """
    sizes = config.model_config_for(vocabulary)
    # Dropout masks differ between layers, and so between pipeline ranks.
    replica = mesh.pp.rank * mesh.dp.size + mesh.dp.rank
    streams = RandomStreams(config.train.seed, tp.rank, device, replica=replica)
    layers = parallel_layers(sizes, tp, context=context, streams=streams, experts=experts)
    costs = item_costs(config, sizes, layers, device, mesh.world)
    with mesh.world.together("dividing the model into stages"):
        schedule = make_schedule(config, mesh.pp.size, microbatches, costs)
        require_zero_stage(config, schedule)
        split = split_of_layers(config, sizes.layers, costs, schedule)
    own, section = schedule.stages_of(mesh.pp.rank), config.optimizer
    if section.zero_stage == 3:
        with torch.device("meta"):
            model = LlamaStages(sizes, layers, split, own, seed=None, recompute=config.recompute)
        model.to(_plain_dtype(config))
        _shard(config, model, mesh.replicas, device, mesh.layout.shard_ranks, model.stages.values())
        return model, schedule
    seed = None if config.model.hugging_face else config.model.seed
    model = LlamaStages(sizes, layers, split, own, seed=seed, recompute=config.recompute)
    model.to(device=device, dtype=_plain_dtype(config))
    broadcast_parameters(model, mesh.replicas)
    return model, schedule


def _shard(
    config: Config,
    model: Llama | LlamaStages,
    dp_comm: Communicator,
    device: torch.device,
    shard_ranks: int | None,
    stages: Iterable[nn.Module] | None = None,
) -> None:
    """Shard a model of the meta device by ZeRO-3; each rank makes or reads the values of its parts."""
    section, sizes, directory = config.optimizer, model.config, config.model.hugging_face
    value_of: Callable[[str], torch.Tensor] = partial(initial_value, sizes, seed=config.model.seed)
    if directory is not None:
        value_of = stored_values(sizes, directory, dp_comm)
    tied = model.tied_names if isinstance(model, LlamaStages) else {}
    fully_shard(
        model,
        dp_comm,
        precision=precision_of(config),
        prefetch=section.prefetch,
        shared_parameters=section.shared_parameters,
        shard_ranks=shard_ranks,
        stages=None if stages is None else list(stages),
        reshard=section.reshard,
        values=lambda name, tensor: own_shard(tensor, value_of(tied.get(name, name))),
        device=device,
    )


def build_optimizer(
    config: Config,
    model: nn.Module,
    dp_comm: Communicator,
    *,
    tied: Mapping[str, bool] | None = None,
    backwards: int = 1,
    shard_ranks: int | None = None,
) -> DistributedOptimizer:
    """Build the configured optimizer, on gradients averaged over `dp_comm`.

    tied        parameters of which other stages have copies: see DistributedOptimizer
    backwards   in a step, without `no_sync`
    shard_ranks   as of DistributedOptimizer
    """
    section = config.optimizer
    return DistributedOptimizer(
        plain_optimizer(section, model),
        model.named_parameters(),
        dp_comm,
        zero_stage=section.zero_stage,
        precision=precision_of(config),
        offload=section.offload,
        shared_parameters=section.shared_parameters and section.zero_stage < 3,
        model=None if section.zero_stage == 3 else model,
        overlap_allgather=section.zero_stage in (1, 2),
        nonfinite="step",  # the run checks the norms of many steps at once, and ends before it saves
        backward_passes_per_step=backwards,
        tied=tied,
        bucket_bytes=None if section.bucket_mib is None else int(section.bucket_mib * MiB),
        first_bucket_bytes=int(section.first_bucket_mib * MiB),
        algorithm=section.algorithm,
        shard_ranks=None if section.zero_stage == 3 else shard_ranks,
    )


def precision_of(config: Config) -> Precision | None:
    """Return mixed precision for 16-bit types, or where another option needs it; else None."""
    name, section = config.train.precision, config.optimizer
    if name in ("float32", "float64") and section.reduction is None and section.moments is None:
        return None
    return Precision(name, reduction=section.reduction, moments=section.moments)


def _plain_dtype(config: Config) -> torch.dtype:
    """Return the type in which a model is built, before mixed precision applies."""
    return torch.float64 if config.train.precision == "float64" else torch.float32


def plain_optimizer(section: OptimizerSection, model: nn.Module) -> Optimizer:
    """Build the torch optimizer, which decays matrices and not vectors.

    muon   is for the matrices of layers, AdamW for embeddings, the output projection and vectors
    """
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.dim() >= 2]
    vectors = {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0}
    if section.name == "muon":
        layers = [p for name, p in named if p.dim() == 2 and not name.endswith((EMBEDDING, HEAD))]
        own = set(map(id, layers))
        rest = {"params": [p for p in matrices if id(p) not in own], "weight_decay": section.weight_decay}
        return _muon_with_adamw(section, layers, [rest, vectors])
    groups = [{"params": matrices, "weight_decay": section.weight_decay}, vectors]
    if section.name == "sgd":
        return SGD(groups, lr=section.learning_rate, momentum=section.momentum)
    return AdamW(groups, lr=section.learning_rate, betas=section.betas, eps=section.epsilon, fused=True)


def _muon_with_adamw(
    section: OptimizerSection, layers: list[nn.Parameter], others: list[dict[str, Any]]
) -> CombinedOptimizer:
    if MUON is None:
        raise ConfigError(
            f"optimizer.name = 'muon', but torch {torch.__version__} has none; install torch 2.9 or newer, "
            "or set optimizer.name=adamw"
        )
    muon = MUON(
        [{"params": layers}],
        lr=section.learning_rate,
        weight_decay=section.weight_decay,
        momentum=section.muon_momentum,
        adjust_lr_fn=section.muon_scale,
    )
    rate = section.rate_of("AdamW")
    adamw = AdamW(others, lr=rate, betas=section.betas, eps=section.epsilon, fused=True)
    return CombinedOptimizer(muon, adamw)
