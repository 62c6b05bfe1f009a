"""Writing a checkpoint: every rank writes what it alone has, rank 0 the rest, and all know whether it worked.

rank 0    makes a directory ─> writes ─┬─> describes all files, gives the directory its name
rank 1                         writes ─┤
rank 2                         writes ─┘
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpcpar.checkpoint import random_state
from hpcpar.checkpoint.catalogue import checkpoint_path, prune
from hpcpar.checkpoint.manifest import MANIFEST, Entry, Manifest
from hpcpar.checkpoint.model_state import model_tensors
from hpcpar.checkpoint.optimizer_state import (
    Scalars,
    described_groups,
    whole_states,
    write_pieces,
)
from hpcpar.checkpoint.piece_files import PieceFiles, Written, joined, on_cpu, write_tensors
from hpcpar.checkpoint.stored import as_record
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.data_parallel.fully_sharded import sharding_of
from hpcpar.durable import whole_directory
from hpcpar.errors import CheckpointError

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

MODEL, OPTIMIZER, RANDOM, STATE, PIECES = (
    "model.safetensors",
    "optimizer.safetensors",
    "random.safetensors",
    "state.json",
    "pieces.json",
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
    comm    of the ranks that model and optimizer are sharded over; `directory` is the same for all
    keep    checkpoints to keep, this one included; None keeps all

    What is sharded is written by its owners, at the same time; of what is a replica rank 0's is
    written, and random-number states for every rank. The checkpoint appears whole or not at all, and
    one of the same step is replaced.

    errors  OSError (a full disk, no permission) or CheckpointError (a state that is no tensor); of
            several ranks, PeerFailedError on every one, with that text
    """
    if isinstance(optimizer, DistributedOptimizer):
        optimizer.wait_for_parameters()
    random_states = comm.gather_object(random_state.capture())
    final = checkpoint_path(Path(directory), step)
    doing = f"saving the checkpoint {final}"
    with ExitStack() as to_be_named:
        staging = None
        with comm.together(doing):
            _refuse_contradictions(model, optimizer, comm, keep)
            if comm.rank == 0:
                staging = to_be_named.enter_context(whole_directory(final))
        staging = Path(comm.broadcast_object(str(staging)))
        with comm.together(doing):
            mine = _write_own(staging, model, optimizer, comm.rank)
        of_ranks = comm.gather_object(mine)
        with comm.together(doing):
            if of_ranks is not None and random_states is not None:
                _write_common(staging, step, dict(extra or {}), random_states, of_ranks)
                to_be_named.close()
                if keep is not None:
                    prune(final.parent, newest=final, keep=keep)
    return final


@dataclass
class _Own:
    """What one rank wrote.

    entries            its files, by name
    model, optimizer   the pieces in them
    scalars            of states, what is no tensor
    aliases, groups, loss_scale   of the model and the optimizer, the same on all ranks
    """

    aliases: dict[str, str]
    entries: dict[str, Entry] = field(default_factory=dict)
    model: list[Written] = field(default_factory=list)
    optimizer: list[Written] = field(default_factory=list)
    scalars: Scalars = field(default_factory=dict)
    groups: list[dict[str, Any]] | None = None
    loss_scale: dict[str, float] | None = None

    def take(self, files: PieceFiles) -> list[Written]:
        """The pieces in files that are complete now."""
        files.finish()
        self.entries |= files.entries
        return files.written


def _refuse_contradictions(
    model: nn.Module, optimizer: Optimizer | None, comm: Communicator, keep: int | None
) -> None:
    if keep is not None and keep < 1:
        raise CheckpointError(f"keep={keep} would keep no checkpoint; give 1 or more, or None for all")
    sharding = sharding_of(list(model.parameters()))
    owners = [] if sharding is None else [sharding.dp_comm]
    if isinstance(optimizer, DistributedOptimizer) and optimizer.zero_stage:
        owners.append(optimizer.dp_comm)
    for owner in owners:
        if owner.size != comm.size:
            raise CheckpointError(
                f"what is sharded over the {owner.size} ranks of {owner.name!r} was to be saved by the "
                f"{comm.size} of {comm.name!r}; pass the communicator that it is sharded over"
            )


def _write_own(staging: Path, model: nn.Module, optimizer: Optimizer | None, rank: int) -> _Own:
    if not staging.is_dir():
        raise CheckpointError(
            f"{staging}, which rank 0 made, is not there for this rank; save to a file system that all share"
        )
    tensors, aliases = model_tensors(model)
    own = _Own(aliases)
    _write_model(own, staging, model, tensors, rank)
    if optimizer is not None:
        _write_optimizer(own, staging, optimizer, model, rank)
    return own


def _write_model(own: _Own, staging: Path, model: nn.Module, tensors: dict[str, Tensor], rank: int) -> None:
    sharding = sharding_of(list(model.parameters()))
    sharded: set[int] = set()
    if sharding is not None:
        name_of = {id(value): name for name, value in tensors.items()}
        files = PieceFiles(staging, "model", rank)
        for piece, values in sharding.own_pieces():
            files.add(name_of[id(piece.parameter)], values, piece.layout, piece.start)
        own.model = own.take(files)
        # Without elements there is no piece either.
        sharded = {id(parameter) for parameter in sharding.every_parameter() if parameter.numel()}
    if rank == 0:
        whole = {name: on_cpu(value) for name, value in tensors.items() if id(value) not in sharded}
        own.entries[MODEL] = write_tensors(whole, staging / MODEL)


def _write_optimizer(own: _Own, staging: Path, optimizer: Optimizer, model: nn.Module, rank: int) -> None:
    tensors, own.groups = described_groups(optimizer, model)
    if isinstance(optimizer, DistributedOptimizer) and optimizer.steps_on_pieces:
        own.loss_scale = optimizer.scaler.state_dict()
        if rank == 0 or optimizer.zero_stage:
            files = PieceFiles(staging, "optimizer", rank)
            own.scalars = write_pieces(optimizer, model, files)
            own.optimizer = own.take(files)
    elif rank == 0:
        states, own.scalars = whole_states(optimizer, model)
        tensors |= states
    if rank == 0:
        own.entries[OPTIMIZER] = write_tensors(tensors, staging / OPTIMIZER)


def _write_common(
    staging: Path,
    step: int,
    extra: dict[str, Any],
    random_states: Sequence[random_state.Captured],
    of_ranks: Sequence[_Own],
) -> None:
    """Whatever is about all ranks: state.json, pieces.json, random numbers, and at last the manifest."""
    first = of_ranks[0]
    scalars = {name: values for own in of_ranks for name, values in own.scalars.items()}
    state = {
        "step": step,
        "ranks": len(random_states),
        "aliases": first.aliases,
        "optimizer": None
        if first.groups is None
        else {"scalars": scalars, "groups": first.groups, "loss_scale": first.loss_scale},
        "random": [scalars for _, scalars in random_states],
        "extra": extra,
    }
    entries = {name: entry for own in of_ranks for name, entry in own.entries.items()}
    entries[STATE] = _write_text(_as_json(state, extra), staging / STATE)
    entries[RANDOM] = write_tensors(_by_rank(random_states), staging / RANDOM)
    pieces = {
        kind: {name: as_record(stored) for name, stored in joined(written).items()}
        for kind, written in (
            ("model", [piece for own in of_ranks for piece in own.model]),
            ("optimizer", [piece for own in of_ranks for piece in own.optimizer]),
        )
    }
    if any(pieces.values()):
        entries[PIECES] = _write_text(json.dumps(pieces) + "\n", staging / PIECES)
    manifest = Manifest(step, entries)
    manifest.check_sizes(staging)
    _write_text(manifest.text(), staging / MANIFEST)


def _write_text(text: str, path: Path) -> Entry:
    path.write_text(text)
    return Entry.of(path)


def _by_rank(random_states: Sequence[random_state.Captured]) -> dict[str, Tensor]:
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
