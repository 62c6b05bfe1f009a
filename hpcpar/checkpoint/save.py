"""Saving: every rank writes what it alone has, rank 0 the rest; it succeeds on all ranks or on none.

rank 0    makes a staging directory ─> writes ─┬─> describes all files, renames the directory
rank 1                                 writes ─┤
rank 2                                 writes ─┘

`save_async` has copies written by a thread of each rank, and leaves the renaming to `PendingSave.finish`.
"""

from __future__ import annotations

import copy
import json
import logging
import operator
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpcpar.checkpoint import random_state
from hpcpar.checkpoint.checkpoint_directory import checkpoint_path, fault_of, not_finite, prune
from hpcpar.checkpoint.files import ShardWriter, WrittenFiles, pieces_text, write_tensors
from hpcpar.checkpoint.local_tensor import LocalTensor, is_replicated
from hpcpar.checkpoint.manifest import MANIFEST, PIECES, RANDOM, STATE, FileDigest, Manifest
from hpcpar.checkpoint.model_state import ModelState
from hpcpar.checkpoint.optimizer_state import distributed_of, group_names, group_options, write_states
from hpcpar.checkpoint.ownership import (
    Groups,
    PipelinePositions,
    RankContents,
    RankCoordinates,
    WritePlan,
    require_all_experts,
)
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.data_parallel.parameter_allgather import wait_for_new
from hpcpar.data_parallel.parameters import in_memory_order
from hpcpar.data_parallel.running_statistics import agree_on_buffers, digest_of_buffers
from hpcpar.data_parallel.zero3 import sharding_of
from hpcpar.durable import whole_directory
from hpcpar.errors import CheckpointError
from hpcpar.launch import restart

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

logger = logging.getLogger(__name__)


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
    """Write the checkpoint of a step; return its path, step-00000200 under `directory`. Collective.

    step    optimizer steps taken so far
    extra   any JSON values to get back from `load`: config, scheduler, data position. With another global
            batch the same step is another place in the data
    model   with the names of the whole model, of which it may be a few layers; `tied_names` tells what is
            tied across ranks. Running statistics of BatchNorm and InstanceNorm that differ between replicas
            become their averages, in the model, too
    comm    all ranks that model and optimizer are split, sharded or spread over, and their replicas;
            `directory` is the same for all
    keep    number of checkpoints to keep, this one included; None keeps all. Damaged and non-finite ones go
            first; the newest sound one always stays

    Owners write their shards at the same time; the first of several replicas writes for all. The checkpoint
    appears whole or not at all, and replaces one of the same step. If a parameter, a buffer or an optimizer
    state is NaN, or infinite outside of buffers, the checkpoint and a warning say so: `load` passes over it.

    errors  OSError (a full disk, no permission) or CheckpointError (a state that is no tensor, a part that
            no rank of `comm` has, layers or groups of ranks that do not fit together); of several ranks,
            PeerFailedError on every one, with that text. CheckpointError for an invalid step, and for
            non-finite values in the place of a sound checkpoint of the same step
    """
    return _begin(directory, step, model, optimizer, extra, comm, keep, pool=None).finish()


def save_async(
    directory: str | Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    comm: Communicator,
    keep: int | None = 3,
) -> PendingSave:
    """Copy the state of a step, and write its checkpoint while training goes on. Collective.

    Takes what `save` does. Each rank copies what it writes into host memory, and returns; a thread writes the
    copies. The checkpoint has no name, and is none, before `finish` of what is returned, which is collective.

    errors  as for `save`; those of writing come with `finish`
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="hpcpar-checkpoint")
    try:
        return _begin(directory, step, model, optimizer, extra, comm, keep, pool)
    finally:
        pool.shutdown(wait=False)  # once all that it was given is written


def _begin(
    directory: str | Path,
    step: int,
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Mapping[str, Any] | None,
    comm: Communicator,
    keep: int | None,
    pool: Executor | None,
) -> PendingSave:
    """Write what this rank alone has, or begin to: all that needs the model."""
    step = _counted(step)
    final = checkpoint_path(Path(directory), step)
    doing = f"saving the checkpoint {final}"
    with comm.together(doing):
        _check_arguments(final, keep)
        distributed_of(model, optimizer)
        state, contents = _contents_of(model, optimizer)
        own_random = random_state.capture(model)
        given = json.loads(_as_json("extra", dict(extra or {})))
    wait_for_new(model.parameters())
    positions = PipelinePositions.agree(contents, comm, doing)
    # Rank 0 alone describes the whole checkpoint, so it needs what every rank knows.
    random_states = comm.gather_object(own_random)
    coordinates = _agree_on_coordinates(model, optimizer, positions, comm, doing)
    with ExitStack() as naming:
        staging = None
        with comm.together(doing):
            plan = _write_plan(state, positions, coordinates, comm)
            if comm.rank == 0:
                # Leaving this context gives the directory its final name; an error removes it.
                staging = naming.enter_context(whole_directory(final))
        staging = Path(comm.broadcast_object(str(staging)))
        with comm.together(doing):
            own = _write_own(staging, comm.rank, plan, model, state, optimizer, pool)
        tp = [(each.tp_rank, each.tp_size) for each in coordinates]
        described = {"step": step, "tp": tp, "extra": given}
        common = _Common(staging, described, positions, random_states)
        pending = PendingSave(final, comm, keep, own, common, naming.pop_all())
    return pending


class PendingSave:
    """A checkpoint whose files are being written.

    path   that it will have
    """

    def __init__(
        self,
        path: Path,
        comm: Communicator,
        keep: int | None,
        own: _OwnFiles,
        common: _Common,
        naming: ExitStack,
    ) -> None:
        self.path = path
        self._comm, self._keep = comm, keep
        self._own, self._common = own, common
        self._naming = naming

    def is_written(self) -> bool:
        """True if this rank has written all that it writes: `finish` waits for others only."""
        return self._own.is_written()

    def finish(self) -> Path:
        """Give the checkpoint its name, once all ranks have written theirs; return its path. Collective.

        errors  as for `save`: no rank has the checkpoint then, and those of before are untouched
        """
        comm, doing = self._comm, f"saving the checkpoint {self.path}"
        with self._naming as naming:
            with comm.together(doing):
                output = self._own.finish()
            outputs = comm.gather_object(output)
            with comm.together(doing):
                if outputs is not None:
                    self._common.write(outputs)
                    broken = _first_not_finite(outputs)
                    _refuse_to_replace_a_sound_one(self.path, broken)
                    naming.close()
                    _after_naming(self.path, broken, self._keep)
        return self.path


# --- what ranks agree on --------------------------------------------------------------------------


def _contents_of(model: nn.Module, optimizer: Optimizer | None) -> tuple[ModelState, RankContents]:
    state = ModelState(model)
    groups = None if optimizer is None else group_names(optimizer, state.parameter_names)
    return state, RankContents(state.names, groups, state.experts)


def _counted(step: int) -> int:
    """Return the step as a plain integer."""
    try:
        plain = operator.index(step)
    except TypeError:
        plain = -1
    if plain < 0:
        raise CheckpointError(f"step={step!r}: give the number of optimizer steps taken, 0 or more")
    return plain


def _check_arguments(final: Path, keep: int | None) -> None:
    if keep is not None and keep < 1:
        raise CheckpointError(f"keep={keep} would keep no checkpoint; give 1 or more, or None for all")
    try:
        str(final).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"{str(final)!r} is no UTF-8, as safetensors needs it: {error.reason}"
        ) from error


def _agree_on_coordinates(
    model: nn.Module,
    optimizer: Optimizer | None,
    positions: PipelinePositions,
    comm: Communicator,
    doing: str,
) -> list[RankCoordinates]:
    """Return the coordinates of all ranks; average buffers that differ between replicas. Collective."""
    with comm.together(doing):
        own = RankCoordinates.of(model, optimizer, positions.of_ranks[comm.rank])
        digest = digest_of_buffers(model)
    told = comm.allgather_object((own, digest))
    shards = [(each.position, each.tp_rank) for each, _ in told]
    if len(set(zip(shards, [digest for _, digest in told], strict=True))) > len(set(shards)):
        replicas = comm.split(shards.index(shards[comm.rank]), name="replicas")
        assert replicas is not None, "every rank has a shard"
        agree_on_buffers(model, replicas)
        replicas.free()
    return [each for each, _ in told]


def _write_plan(
    state: ModelState,
    positions: PipelinePositions,
    coordinates: Sequence[RankCoordinates],
    comm: Communicator,
) -> WritePlan:
    position = coordinates[comm.rank].position
    require_all_experts(state.tensors, comm)
    elsewhere = [each for each in state.tensors if not positions.writes(position, state.name_of(each))]
    return WritePlan(coordinates, comm, {id(each) for each in (*elsewhere, *state.copies)})


# --- what one rank writes -------------------------------------------------------------------------


@dataclass
class _RankOutput:
    """Description of what one rank wrote.

    scalars            optimizer states that are no tensors
    options, tensors   of the optimizer's groups, and those that are tensors
    loss_scale         of the optimizer
    """

    model: WrittenFiles = field(default_factory=WrittenFiles)
    optimizer: WrittenFiles = field(default_factory=WrittenFiles)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    options: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    loss_scale: dict[str, float] | None = None

    def every_option(self) -> dict[str, Any]:
        """Return what all positions must have alike, by the words that name it."""
        options = {
            f"{key} of group {number}": value
            for number, group in enumerate(self.options)
            for key, value in group.items()
        }
        tensors = {name: value.tolist() for name, value in self.tensors.items()}
        return {**options, **tensors, "the loss scale": self.loss_scale}


@dataclass
class _OwnFiles:
    """Files that one rank writes, or has written."""

    output: _RankOutput
    model: ShardWriter
    optimizer: ShardWriter | None = None

    def is_written(self) -> bool:
        return self.model.is_finished() and (self.optimizer is None or self.optimizer.is_finished())

    def finish(self) -> _RankOutput:
        self.output.model = self.model.finish()
        if self.optimizer is not None:
            self.output.optimizer = self.optimizer.finish()
        return self.output


def _write_own(
    directory: Path,
    rank: int,
    plan: WritePlan,
    model: nn.Module,
    state: ModelState,
    optimizer: Optimizer | None,
    pool: Executor | None,
) -> _OwnFiles:
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory}, which rank 0 made, is not there for this rank; save to a file system that "
            "all share"
        )
    common = plan.writes_common
    # A buffer may be a mask of infinities.
    masks = set(state.names.buffers)
    own = _OwnFiles(
        _RankOutput(), ShardWriter(directory, "model", rank, common=common, may_be_infinite=masks, pool=pool)
    )
    _write_model(own.model, plan, model, state)
    own.model.flush()
    if optimizer is not None:
        files = own.optimizer = ShardWriter(directory, "optimizer", rank, common=common, pool=pool)
        output = own.output
        # Copies: training goes on while they are written.
        output.tensors, output.options = copy.deepcopy(group_options(optimizer))
        if isinstance(optimizer, DistributedOptimizer) and optimizer.steps_on_pieces:
            output.loss_scale = optimizer.scaler.state_dict()
        if common:
            for name, value in output.tensors.items():
                files.add_whole(name, value)
        output.scalars = write_states(optimizer, state.parameter_names, files, plan)
        files.flush()
    return own


def _write_model(files: ShardWriter, plan: WritePlan, model: nn.Module, state: ModelState) -> None:
    sharding = sharding_of(list(model.parameters()))
    sharded: set[int] = set()
    if sharding is not None:
        # A replicated parameter without elements has no piece, and is written as a whole tensor.
        sharded = {id(p) for p in sharding.every_parameter() if p.numel() or not is_replicated(p)}
        for piece, values in sharding.own_pieces():
            if plan.writes(piece.parameter, sharded=True):
                local = LocalTensor.of(piece.parameter, piece.layout)
                files.add(state.name_of(piece.parameter), values, local, piece.start)
    for value in state.tensors:
        if id(value) in sharded or not plan.writes(value, sharded=False):
            continue
        name = state.name_of(value)
        if is_replicated(value):
            files.add_whole(name, value)
        else:
            local = LocalTensor.of(value)
            files.add(name, in_memory_order(value, local.layout), local, 0)


# --- what rank 0 writes for all -------------------------------------------------------------------


def _first_not_finite(outputs: Sequence[_RankOutput]) -> str | None:
    written = (files for each in outputs for files in (each.model, each.optimizer))
    return next((files.not_finite for files in written if files.not_finite is not None), None)


def _require_same_options(outputs: Sequence[_RankOutput], positions: PipelinePositions) -> None:
    """CheckpointError if positions of the pipeline step with different options."""
    first, *others = map(positions.first_rank, range(len(positions.contents)))
    expected = outputs[first].every_option()
    for rank in others:
        found = outputs[rank].every_option()
        for name in expected | found:
            if expected.get(name) != found.get(name):
                raise CheckpointError(
                    f"the optimizer has {name} = {expected.get(name)} on rank {first}, "
                    f"{found.get(name)} on rank {rank}; a checkpoint has it once, so make them equal"
                )


def _optimizer_state(outputs: Sequence[_RankOutput], groups: Groups | None) -> dict[str, Any] | None:
    """Describe the optimizer as `manifest.SavedOptimizer`."""
    if groups is None:
        return None
    described = [
        {"parameters": names, "options": options}
        for names, options in zip(groups, outputs[0].options, strict=True)
    ]
    scalars = {name: values for each in outputs for name, values in each.scalars.items()}
    return {"scalars": scalars, "groups": described, "loss_scale": outputs[0].loss_scale}


@dataclass(frozen=True)
class _Common:
    """What rank 0 writes beside the ranks' tensors.

    state           the part of state.json that is not of the ranks' outputs: step, extra, coordinates
    random_states   of all ranks; None on other ranks
    """

    staging: Path
    state: dict[str, Any]
    positions: PipelinePositions
    random_states: Sequence[random_state.Captured] | None

    def write(self, outputs: Sequence[_RankOutput]) -> None:
        """Write state.json, random numbers, pieces.json, and last the manifest, which vouches for all."""
        staging, positions, random_states = self.staging, self.positions, self.random_states or ()
        _require_same_options(outputs, positions)
        state = self.state | {
            "ranks": len(outputs),
            "aliases": positions.aliases,
            "optimizer": _optimizer_state(outputs, positions.groups),
            "random": [scalars for _, scalars in random_states],
            "names": positions.digests,
            "not_finite": _first_not_finite(outputs),
        }
        digests: dict[str, FileDigest] = {}
        for each in outputs:
            digests |= each.model.digests | each.optimizer.digests
        digests[STATE] = _write_text(_as_json("a value of the optimizer's state", state), staging / STATE)
        arrays = {
            f"{rank}/{name}": torch.tensor(array)
            for rank, (arrays, _) in enumerate(random_states)
            for name, array in arrays.items()
        }
        digests[RANDOM] = write_tensors(arrays, staging / RANDOM)
        pieces = pieces_text(
            (shard for each in outputs for shard in each.model.shards),
            (shard for each in outputs for shard in each.optimizer.shards),
        )
        if pieces is not None:
            digests[PIECES] = _write_text(pieces, staging / PIECES)
        manifest = Manifest(step=state["step"], files=digests)
        # A rank's file that is not on the shared file system shows here, before the checkpoint gets its name.
        manifest.check_sizes(staging)
        _write_text(manifest.text(), staging / MANIFEST)


def _after_naming(final: Path, broken: str | None, keep: int | None) -> None:
    """Tell of progress or of non-finite values, and prune, now that the checkpoint is safely on the disk."""
    if broken is None:
        restart.leave_word(restart.SAVED)
    else:
        logger.warning("%s; loading passes over it", not_finite(final))
    if keep is not None:
        prune(final.parent, newest=final, keep=keep)


def _refuse_to_replace_a_sound_one(final: Path, broken: str | None) -> None:
    if broken is not None and final.exists() and fault_of(final) is None:
        raise CheckpointError(
            f"{final} is sound and stays: what was to replace it has values that are no finite numbers, the "
            f"first in {broken}; save that under another step"
        )


def _write_text(text: str, path: Path) -> FileDigest:
    path.write_text(text)
    return FileDigest.of(path)


def _as_json(what: str, values: dict[str, Any]) -> str:
    try:
        return json.dumps(values, indent=1) + "\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{what} holds what JSON cannot: {error}; give numbers, strings, lists and dictionaries"
        ) from error
