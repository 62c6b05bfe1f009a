"""Saving: every rank writes what it alone has, rank 0 the rest; it succeeds on all ranks or on none.

rank 0    makes a staging directory ─> writes ─┬─> describes all files, renames the directory
rank 1                                 writes ─┤
rank 2                                 writes ─┘

`save_async` has copies written by a thread of each rank, and leaves the renaming to `PendingSave.finish`.
"""

from __future__ import annotations

import json
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from hpcpar.checkpoint import random_state
from hpcpar.checkpoint.checkpoint_directory import checkpoint_path, fault_of, not_finite, prune
from hpcpar.checkpoint.common_files import as_json, write_common
from hpcpar.checkpoint.manifest import with_own_keys
from hpcpar.checkpoint.model_state import ModelState
from hpcpar.checkpoint.optimizer_state import distributed_of, group_names
from hpcpar.checkpoint.ownership import (
    PipelinePositions,
    RankContents,
    RankCoordinates,
    WritePlan,
    require_all_experts,
)
from hpcpar.checkpoint.rank_files import RankFiles, RankOutput, write_own
from hpcpar.data_parallel.parameter_allgather import wait_for_new
from hpcpar.data_parallel.running_statistics import agree_on_buffers, digest_of_buffers
from hpcpar.durable import whole_directory
from hpcpar.errors import CheckpointError, OperationError
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
    extra   any JSON values, and dictionaries with numbers as keys, to get back from `load`: config, a
            scheduler's state, data position. Of several ranks, rank 0's. With another global batch the same
            step is another place in the data
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

    Takes what `save` does. Each rank copies what it writes into host memory, which must have room for that,
    and returns; a thread writes the copies. The checkpoint has no name, and is none, before `finish` of what
    is returned, which is collective; without it the copies are removed, with a warning.

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
        state = ModelState(model)
        groups = None if optimizer is None else group_names(optimizer, state.parameter_names)
        own_random = random_state.capture(model)
        given = with_own_keys(json.loads(as_json("extra", dict(extra or {}))))
    wait_for_new(model.parameters())
    positions = PipelinePositions.agree(RankContents(state.names, groups, state.experts), comm, doing)
    # Rank 0 alone describes the whole checkpoint, so it needs what every rank knows.
    random_states = comm.gather_object(own_random)
    coordinates = _agree_on_coordinates(step, model, optimizer, positions, comm, doing)
    with ExitStack() as naming:
        staging = None
        with comm.together(doing):
            plan = _write_plan(state, positions, coordinates, comm)
            if comm.rank == 0:
                # Leaving this context gives the directory its final name; an error removes it.
                staging = naming.enter_context(whole_directory(final))
        staging = Path(comm.broadcast_object(str(staging)))
        final = staging.parent / final.name  # rank 0's, should a directory's name tell the time of each rank
        with comm.together(doing):
            own = write_own(staging, comm.rank, plan, model, state, optimizer, pool)
        tp = [(each.tp_rank, each.tp_size) for each in coordinates]
        described = {"step": step, "tp": tp, "extra": given}
        finish = partial(write_common, staging, described, positions, random_states or ())
        return PendingSave(final, comm, keep, own, finish, naming.pop_all())


class PendingSave:
    """A checkpoint whose files are being written.

    path   that it will have
    """

    def __init__(
        self,
        path: Path,
        comm: Communicator,
        keep: int | None,
        own: RankFiles,
        write_common: Callable[[Sequence[RankOutput]], str | None],
        naming: ExitStack,
    ) -> None:
        self.path = path
        self._comm, self._keep = comm, keep
        self._own, self._write_common = own, write_common
        self._naming = naming
        self._is_finished = False

    def is_written(self) -> bool:
        """True if this rank has written all that it writes: `finish` waits for others only."""
        return self._own.is_written()

    def finish(self) -> Path:
        """Give the checkpoint its name, once all ranks have written theirs; return its path. Collective.

        errors  as for `save`: no rank has the checkpoint then, and those of before are untouched.
                OperationError if it was called before
        """
        if self._is_finished:
            raise OperationError(f"{self.path} is finished already; each save_async has one finish()")
        self._is_finished = True
        comm, doing = self._comm, f"saving the checkpoint {self.path}"
        with self._naming as naming:
            with comm.together(doing):
                output = self._own.finish()
            outputs = comm.gather_object(output)
            with comm.together(doing):
                if outputs is not None:
                    broken = self._write_common(outputs)
                    _refuse_to_replace_a_sound_one(self.path, broken)
                    naming.close()
                    _after_naming(self.path, broken, self._keep)
        return self.path

    def __del__(self) -> None:
        if not self._is_finished and self._comm.rank == 0:
            logger.warning("%s is lost: what save_async returned for it has had no finish()", self.path)


# --- what ranks agree on --------------------------------------------------------------------------


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
    step: int,
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
    told, digests, steps = zip(*comm.allgather_object((own, digest, step)), strict=True)
    if len(set(steps)) > 1:
        of_ranks = ", ".join(f"rank {steps.index(each)} has step {each}" for each in dict.fromkeys(steps))
        raise CheckpointError(f"saving a checkpoint: {of_ranks}; let all ranks count the same steps")
    shards = [(each.position, each.tp_rank) for each in told]
    if len(set(zip(shards, digests, strict=True))) > len(set(shards)):
        replicas = comm.split(shards.index(shards[comm.rank]), name="replicas")
        assert replicas is not None, "every rank has a shard"
        agree_on_buffers(model, replicas)
        replicas.free()
    return list(told)


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


# --- naming --------------------------------------------------------------------------------------


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
