"""Builders of a run's parts from their sections of the configuration; each is collective over its ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from hpcpar.comm import Communicator
from hpcpar.data import Prepared, Tokenizer, prepare
from hpcpar.data_parallel import (
    CombinedOptimizer,
)
from hpcpar.data_parallel.combined_optimizer import MUON
from hpcpar.errors import ConfigError
from hpcpar.launch.binding import affinity, gpu_for, thread_count
from hpcpar.models.llama import EMBEDDING, HEAD
from hpcpar.training.config import Config, OptimizerSection
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


def end_of_document(config: Config, tokenizer: Tokenizer) -> int | None:
    """Return the token behind each packed document; None where a row is one text.

    errors   ConfigError for packed documents of text whose documents have no end
    """
    if not config.data.pack_documents:
        return None
    if tokenizer.end_of_document is None:
        raise ConfigError(
            "data.pack_documents = true, but data.eos_token = false: the documents of this text run "
            "together, and nobody knows where one ends; name the token, or leave pack_documents out"
        )
    return tokenizer.end_of_document


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
