"""Writing a checkpoint: rank 0 writes, all ranks know whether it worked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from hpcpar.checkpoint import random_state
from hpcpar.checkpoint.catalogue import checkpoint_path, prune
from hpcpar.checkpoint.manifest import MANIFEST, Manifest
from hpcpar.checkpoint.model_state import model_tensors
from hpcpar.checkpoint.optimizer_state import optimizer_state
from hpcpar.durable import whole_directory
from hpcpar.errors import CheckpointError

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

MODEL, OPTIMIZER, RANDOM, STATE = (
    "model.safetensors",
    "optimizer.safetensors",
    "random.safetensors",
    "state.json",
)


def save(
    directory: str | Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    comm: Communicator,
    keep: int | None = 3,
) -> Path:
    """Write the checkpoint of a step; returns its path, step-00000200 under `directory`. Collective.

    step    optimizer steps taken so far, which is also the position in the data: samplers are
            functions of it
    extra   whatever JSON can hold and the caller wants back: config, scheduler, data position
    keep    checkpoints to keep, this one included; None keeps all

    Model and optimizer must be replicas, of which rank 0's is written; random-number states are
    written for every rank. The checkpoint appears whole or not at all, and one of the same step is
    replaced.

    errors  OSError (a full disk, no permission) or CheckpointError (a state that is no tensor); of
            several ranks, PeerFailedError on every one, with that text
    """
    random_states = comm.gather_object(random_state.capture())
    final = checkpoint_path(Path(directory), step)
    with comm.together(f"saving the checkpoint {final}"):
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep={keep} would keep no checkpoint; give 1 or more, or None for all")
        if random_states is not None:
            _write(final, step, model, optimizer, dict(extra or {}), random_states)
            if keep is not None:
                prune(final.parent, newest=final, keep=keep)
    return final


def _write(
    final: Path,
    step: int,
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: dict[str, Any],
    random_states: list[random_state.Captured],
) -> None:
    tensors, aliases = model_tensors(model)
    optimizer_tensors, description = ({}, None) if optimizer is None else optimizer_state(optimizer, model)
    state = {
        "step": step,
        "ranks": len(random_states),
        "aliases": aliases,
        "optimizer": description,
        "random": [scalars for _, scalars in random_states],
        "extra": extra,
    }
    with whole_directory(final) as staging:
        (staging / STATE).write_text(_as_json(state, extra))
        save_file(tensors, staging / MODEL)
        if optimizer is not None:
            save_file(optimizer_tensors, staging / OPTIMIZER)
        save_file(_by_rank(random_states), staging / RANDOM)
        (staging / MANIFEST).write_text(Manifest.of(staging, step).text())


def _by_rank(random_states: list[random_state.Captured]) -> dict[str, Tensor]:
    return {
        f"{rank}/{name}": torch.tensor(array)
        for rank, (arrays, _) in enumerate(random_states)
        for name, array in arrays.items()
    }


def _as_json(state: dict[str, Any], extra: dict[str, Any]) -> str:
    try:
        return json.dumps(state, indent=1) + "\n"
    except (TypeError, ValueError) as error:
        culprit = "extra" if _is_no_json(extra) else "a value of the optimizer's state"
        raise CheckpointError(
            f"{culprit} holds what JSON cannot: {error}; give numbers, strings, lists and dictionaries"
        ) from error


def _is_no_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return True
    return False
