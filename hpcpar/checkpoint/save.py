"""Writing a checkpoint: every rank writes what it alone has, rank 0 the rest, and all know whether it worked.

rank 0    makes a directory ─> writes ─┬─> describes all files, gives the directory its name
rank 1                         writes ─┤
rank 2                         writes ─┘
"""

from __future__ import annotations

import json
import logging
import operator
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpcpar.checkpoint import random_state, random_streams
from hpcpar.checkpoint.catalogue import (
    NOT_FINITE,
    STATE,
    checkpoint_path,
    fault_of,
    not_finite,
    prune,
)
from hpcpar.checkpoint.holding import holding_of, is_the_same_everywhere
from hpcpar.checkpoint.manifest import MANIFEST, Entry, Manifest
from hpcpar.checkpoint.model_state import ModelState
from hpcpar.checkpoint.optimizer_state import (
    Scalars,
    distributed_of,
    group_names,
    group_options,
    write_states,
)
from hpcpar.checkpoint.piece_files import (
    PieceFiles,
    Written,
    first_not_finite,
    joined,
    on_cpu,
    write_tensors,
)
from hpcpar.checkpoint.positions import Member, Positions
from hpcpar.checkpoint.stored import as_record
from hpcpar.checkpoint.writers import Coordinates, Writer
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.data_parallel.parameter_allgather import wait_for_new
from hpcpar.data_parallel.parameters import in_memory_order
from hpcpar.data_parallel.running_statistics import agree_on_buffers, digest_of_buffers
from hpcpar.data_parallel.zero3 import sharding_of
from hpcpar.durable import whole_directory
from hpcpar.errors import CheckpointError

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

logger = logging.getLogger(__name__)

MODEL, OPTIMIZER, RANDOM, PIECES = (
    "model.safetensors",
    "optimizer.safetensors",
    "random.safetensors",
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

    step    optimizer steps taken so far
    extra   whatever JSON can hold and the caller wants back: config, scheduler, data position, for with
            another global batch the same step is another place in the data
    model   parameters and buffers have the names of the whole model, of which this may be a few layers; of
            what is tied across ranks, `tied_names` tells. Running statistics of BatchNorm and InstanceNorm
            that differ between replicas become their averages, here, too
    comm    of all ranks that model and optimizer are split, sharded or spread over, and their replicas;
            `directory` is the same for all
    keep    checkpoints to keep, this one included; None keeps all. What is damaged or not finite goes first,
            and the newest sound one stays whatever the number is

    What is split, sharded or spread is written by its owners, at the same time; of what is a replica the
    first rank's is written, and random-number states for every rank. The checkpoint appears whole or not at
    all, and one of the same step is replaced. Where a parameter, a buffer or an optimizer's state has values
    that are no numbers, or infinite ones outside of buffers, the checkpoint says so, and a warning: `load`
    passes over it.

    errors  OSError (a full disk, no permission) or CheckpointError (a state that is no tensor, a part that
            no rank of `comm` has, layers or groups of ranks that do not fit together); of several ranks,
            PeerFailedError on every one, with that text. CheckpointError for a step that is none, and for
            values that are no finite numbers in the place of a sound checkpoint of the same step
    """
    step = _counted(step)
    final = checkpoint_path(Path(directory), step)
    doing = f"saving the checkpoint {final}"
    with comm.together(doing):
        state = ModelState(model)
        distributed_of(model, optimizer)
        groups = None if optimizer is None else group_names(optimizer, state.parameter_names)
        own_random = _random_states(model)
    wait_for_new(model.parameters())
    positions = Positions.agree(Member(state.names, groups), comm, doing)
    position = positions.of_ranks[comm.rank]
    with comm.together(doing):
        own_coordinates = Coordinates.of(model, optimizer, position)
        digest = digest_of_buffers(model)
    random_states = comm.gather_object(own_random)
    told = comm.allgather_object((own_coordinates, digest))
    coordinates = [each for each, _ in told]
    _agree_on_buffers(model, told, comm)
    with ExitStack() as to_be_named:
        staging = None
        with comm.together(doing):
            _refuse_to_keep_none(keep)
            elsewhere = [
                each for each in state.tensors if not positions.writes(position, state.name_of(each))
            ]
            writer = Writer(coordinates, comm, {id(each) for each in (*elsewhere, *state.copies)})
            if comm.rank == 0:
                staging = to_be_named.enter_context(whole_directory(final))
        staging = Path(comm.broadcast_object(str(staging)))
        with comm.together(doing):
            mine = _write_own(staging, model, state, optimizer, writer, comm.rank)
        of_ranks = comm.gather_object(mine)
        with comm.together(doing):
            if of_ranks is not None and random_states is not None:
                ranks = _Ranks(positions, coordinates, random_states, of_ranks)
                _write_common(staging, step, dict(extra or {}), ranks)
                _refuse_to_replace_a_sound_one(final, ranks.not_finite)
                to_be_named.close()
                if ranks.not_finite is not None:
                    logger.warning("%s; loading passes over it", not_finite(final))
                if keep is not None:
                    prune(final.parent, newest=final, keep=keep)
    return final


@dataclass
class _Own:
    """What one rank wrote.

    entries            its files, by name
    model, optimizer   the pieces in them
    scalars            of states, what is no tensor
    options, tensors   of the optimizer's groups, and those that are tensors
    loss_scale         of the optimizer
    not_finite         the first tensor of its with values that are no finite numbers
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    model: list[Written] = field(default_factory=list)
    optimizer: list[Written] = field(default_factory=list)
    scalars: Scalars = field(default_factory=dict)
    options: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    loss_scale: dict[str, float] | None = None
    not_finite: str | None = None

    def take(self, files: PieceFiles) -> list[Written]:
        """The pieces in files that are complete now."""
        files.finish()
        self.entries |= files.entries
        self.not_finite = self.not_finite or files.not_finite
        return files.written

    def every_option(self) -> dict[str, Any]:
        """What all positions are to have alike, by what to call it."""
        options = {
            f"{key} of group {number}": value
            for number, group in enumerate(self.options)
            for key, value in group.items()
        }
        tensors = {name: value.tolist() for name, value in self.tensors.items()}
        return {**options, **tensors, "the loss scale": self.loss_scale}


@dataclass(frozen=True)
class _Ranks:
    """What rank 0 knows of all, by rank."""

    positions: Positions
    coordinates: Sequence[Coordinates]
    random_states: Sequence[random_state.Captured]
    wrote: Sequence[_Own]

    @property
    def not_finite(self) -> str | None:
        """The first tensor of the first rank that has values which are no finite numbers."""
        return next((own.not_finite for own in self.wrote if own.not_finite is not None), None)

    def require_same_options(self) -> None:
        """CheckpointError where positions would step by other numbers."""
        first, *others = self.positions.first_ranks
        expected = self.wrote[first].every_option()
        for rank in others:
            found = self.wrote[rank].every_option()
            for name in expected | found:
                if expected.get(name) != found.get(name):
                    raise CheckpointError(
                        f"the optimizer has {name} = {expected.get(name)} on rank {first}, "
                        f"{found.get(name)} on rank {rank}; a checkpoint has it once, so make them equal"
                    )

    def state(self, step: int, extra: dict[str, Any]) -> dict[str, Any]:
        """What state.json tells."""
        first, groups = self.wrote[0], self.positions.groups
        scalars = {name: values for own in self.wrote for name, values in own.scalars.items()}
        optimizer = None
        if groups is not None:
            described = [
                {"parameters": names, "options": options}
                for names, options in zip(groups, first.options, strict=True)
            ]
            optimizer = {"scalars": scalars, "groups": described, "loss_scale": first.loss_scale}
        return {
            "step": step,
            "ranks": len(self.wrote),
            "aliases": self.positions.aliases,
            "optimizer": optimizer,
            "random": [scalars for _, scalars in self.random_states],
            "tp": [(each.tp_rank, each.tp_size) for each in self.coordinates],
            "names": self.positions.digests,
            NOT_FINITE: self.not_finite,
            "extra": extra,
        }


def _agree_on_buffers(
    model: nn.Module, told: Sequence[tuple[Coordinates, bytes]], comm: Communicator
) -> None:
    """Of ranks with the same layers, or the same part of them, the buffers, if any differ. Collective."""
    places = [(each.position, each.tp_rank) for each, _ in told]
    if len(set(zip(places, [digest for _, digest in told], strict=True))) == len(set(places)):
        return
    replicas = comm.split(places.index(places[comm.rank]), name="replicas")
    assert replicas is not None, "every rank has a place"
    agree_on_buffers(model, replicas)
    replicas.free()


def _counted(step: int) -> int:
    """A plain integer of it."""
    try:
        plain = operator.index(step)
    except TypeError:
        plain = -1
    if plain < 0:
        raise CheckpointError(f"step={step!r}: give the number of optimizer steps taken, 0 or more")
    return plain


def _refuse_to_keep_none(keep: int | None) -> None:
    if keep is not None and keep < 1:
        raise CheckpointError(f"keep={keep} would keep no checkpoint; give 1 or more, or None for all")


def _refuse_to_replace_a_sound_one(final: Path, broken: str | None) -> None:
    if broken is not None and final.exists() and fault_of(final) is None:
        raise CheckpointError(
            f"{final} is sound and stays: what was to replace it has values that are no finite numbers, the "
            f"first in {broken}; save that under another step"
        )


def _write_own(
    staging: Path,
    model: nn.Module,
    state: ModelState,
    optimizer: Optimizer | None,
    writer: Writer,
    rank: int,
) -> _Own:
    if not staging.is_dir():
        raise CheckpointError(
            f"{staging}, which rank 0 made, is not there for this rank; save to a file system that all share"
        )
    own = _Own()
    _write_model(own, staging, model, state, writer, rank)
    if optimizer is not None:
        _write_optimizer(own, staging, optimizer, state, writer, rank)
    return own


def _write_model(
    own: _Own, staging: Path, model: nn.Module, state: ModelState, writer: Writer, rank: int
) -> None:
    # A mask may be of infinite numbers.
    masks = set(state.names.buffers)
    files = PieceFiles(staging, "model", rank, may_be_infinite=masks)
    sharding = sharding_of(list(model.parameters()))
    # Without elements there is no piece either.
    sharded: set[int] = set()
    if sharding is not None:
        sharded = {id(p) for p in sharding.every_parameter() if p.numel() or not is_the_same_everywhere(p)}
        for piece, values in sharding.own_pieces():
            if writer.writes(piece.parameter, sharded=True):
                holding = holding_of(piece.parameter, piece.layout)
                files.add(state.name_of(piece.parameter), values, holding, piece.start)
    common = {}
    for value in state.tensors:
        if id(value) in sharded or not writer.writes(value, sharded=False):
            continue
        name = state.name_of(value)
        if not is_the_same_everywhere(value):
            holding = holding_of(value)
            files.add(name, in_memory_order(value, holding.layout), holding, 0)
        elif writer.writes_common:
            common[name] = on_cpu(value)
        else:
            files.add_whole(name, value)
    own.model = own.take(files)
    if writer.writes_common:
        own.entries[MODEL] = write_tensors(common, staging / MODEL)
        own.not_finite = own.not_finite or first_not_finite(common, masks)


def _write_optimizer(
    own: _Own, staging: Path, optimizer: Optimizer, state: ModelState, writer: Writer, rank: int
) -> None:
    own.tensors, own.options = group_options(optimizer)
    if isinstance(optimizer, DistributedOptimizer) and optimizer.steps_on_pieces:
        own.loss_scale = optimizer.scaler.state_dict()
    files = PieceFiles(staging, "optimizer", rank)
    common, own.scalars = write_states(optimizer, state.parameter_names, files, writer)
    own.optimizer = own.take(files)
    if writer.writes_common:
        own.entries[OPTIMIZER] = write_tensors(own.tensors | common, staging / OPTIMIZER)
        own.not_finite = own.not_finite or first_not_finite(common)


def _random_states(model: nn.Module) -> random_state.Captured:
    arrays, scalars = random_state.capture()
    return arrays | random_streams.capture(model), scalars


def _write_common(staging: Path, step: int, extra: dict[str, Any], ranks: _Ranks) -> None:
    """Whatever is about all ranks: state.json, pieces.json, random numbers, and at last the manifest."""
    ranks.require_same_options()
    entries = {name: entry for own in ranks.wrote for name, entry in own.entries.items()}
    entries[STATE] = _write_text(_as_json(ranks.state(step, extra), extra), staging / STATE)
    entries[RANDOM] = write_tensors(_by_rank(ranks.random_states), staging / RANDOM)
    pieces = {
        kind: {name: as_record(stored) for name, stored in joined(written).items()}
        for kind, written in (
            ("model", [piece for own in ranks.wrote for piece in own.model]),
            ("optimizer", [piece for own in ranks.wrote for piece in own.optimizer]),
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
