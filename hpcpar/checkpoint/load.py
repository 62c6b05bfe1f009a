"""Loading: verify every file, check that all fits, and only then change the model.

    each rank   verifies a share of the files ─┐
                reads the JSON files           ├─ agree ─> checks names, shapes, groups ─ agree ─> reads
                                               │           random-number states            its elements

A rank reads only what it needs: of parameters that it owns in pieces, those elements, whoever wrote them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpcpar.checkpoint import random_state
from hpcpar.checkpoint.checkpoint_directory import choose_together
from hpcpar.checkpoint.files import Pieces, ShardReader, StoredTensor
from hpcpar.checkpoint.local_tensor import LocalTensor
from hpcpar.checkpoint.manifest import MODEL, OPTIMIZER, RANDOM, STATE, Manifest, SavedState, reading
from hpcpar.checkpoint.model_state import ModelState, check_forms, check_names
from hpcpar.checkpoint.optimizer_state import StoredOptimizer, distributed_of, group_names
from hpcpar.checkpoint.ownership import PipelinePositions, RankContents, RankCoordinates
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.data_parallel.parameter_allgather import wait_for_new
from hpcpar.data_parallel.parameters import OwnPiece
from hpcpar.data_parallel.sharded_step import MASTER
from hpcpar.data_parallel.zero3 import sharding_of
from hpcpar.errors import CheckpointError

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


@dataclass(frozen=True)
class Loaded:
    """Non-tensor content of a checkpoint.

    path              the checkpoint that was read
    step, extra       as saved
    ranks             ranks of the job that saved it
    random_restored   True if this rank's random-number states, and its model's streams, are those that were
                      saved for it
    """

    path: Path
    step: int
    extra: dict[str, Any]
    ranks: int
    random_restored: bool


def load(
    path: str | Path,
    *,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    comm: Communicator,
    restore_random: bool = True,
    accept: Callable[[Path, dict[str, Any]], None] | None = None,
) -> Loaded:
    """Restore model, optimizer and random numbers from a checkpoint. Collective.

    path            a checkpoint, or a directory of them; every rank must see it. Of a directory, all ranks
                    take the newest sound one: every file as written, every value finite. Newer ones that are
                    not sound are passed over with warnings
    model           as for `save`; its ranks together have all that the checkpoint has
    comm            all ranks that load: all that model and optimizer are split, sharded or spread over
    restore_random  on other numbers of ranks, or with other layers on them, only ranks that existed when
                    saving, with the same layers, find their states; the others keep theirs. `random_streams`
                    of modules are restored only on the same number of ranks and tensor-parallel ranks
    accept          called on every rank with the checkpoint and its `extra`, before anything is compared;
                    an exception from it, the same on all ranks, ends the loading

    A checkpoint of any pipeline, ZeRO stage, tensor-parallel degree and number of ranks loads into any other:
    a rank takes its layers, its shard of split parameters, and zeros for padding. Ranks that share a tied
    tensor take the value of its first name. Floating-point types may differ if there are master weights, or
    if the optimizer (or the fully sharded model) has a precision: parameters and master weights then get the
    most exact saved values, and a DistributedOptimizer that is not given takes the parameters'. Nothing of
    model, optimizer or random numbers changes before every file was found whole, and fitting, by every rank.

    errors  CheckpointError that names the file, what was expected, what was found and, if the checkpoint was
            named itself, the newest sound one beside it; of several ranks, PeerFailedError on every one,
            with that text
    """
    with comm.together(f"looking for a checkpoint in {path}"):
        distributed = distributed_of(model, optimizer)
    wait_for_new(model.parameters())
    chosen = choose_together(Path(path), comm)
    doing = f"loading the checkpoint {chosen}"
    with comm.together(doing):
        contents = Contents.read(chosen)
    if accept is not None:
        accept(chosen, contents.state.extra)
    with comm.together(doing):
        state = ModelState(model)
        groups = None if optimizer is None else group_names(optimizer, state.parameter_names)
    positions = PipelinePositions.agree(RankContents(state.names, groups, state.experts), comm, doing)
    with comm.together(doing):
        restore = _Restore(contents, model, state, optimizer, positions)
        saved_random = contents.random_for(comm.rank, positions) if restore_random else None
    # Every rank has found all in order; from here on models change.
    with comm.together(doing):
        restore.whole_tensors()
    with comm.together(doing):
        # The collectives inside fail on all ranks that take part, or on none.
        restore.pieces()
    with comm.together(doing):
        _renew_masters(distributed, optimizer)
        restored = saved_random is not None and _restore_random(contents, model, saved_random, comm)
    return Loaded(chosen, contents.state.step, contents.state.extra, contents.ranks, restored)


def _renew_masters(distributed: list[DistributedOptimizer], optimizer: Optimizer | None) -> None:
    """Let optimizers that were not loaded take their master weights from the parameters."""
    for each in distributed:
        # The given optimizer got its master weights from the checkpoint, and ZeRO-3 shards tell theirs.
        if each is not optimizer and each.sharding is None:
            each.take_parameters()


def _restore_random(
    contents: Contents, model: nn.Module, saved: random_state.Saved, comm: Communicator
) -> bool:
    """Restore this rank's states; return False if its model's streams had to be left alone."""
    random_state.restore(saved)
    if not random_state.has_streams(saved):
        return True
    own, tp = RankCoordinates.of(model, None), contents.state.tp
    is_same_place = (
        contents.ranks == comm.size and tp is not None and tp[comm.rank] == (own.tp_rank, own.tp_size)
    )
    if is_same_place:
        random_state.restore_streams(model, saved)
    return is_same_place


@dataclass(frozen=True)
class Contents:
    """A verified checkpoint: its state.json, and the location of its tensors."""

    path: Path
    state: SavedState
    files: ShardReader
    model: dict[str, StoredTensor]
    optimizer: StoredOptimizer | None

    @classmethod
    def read(cls, path: Path) -> Contents:
        manifest = Manifest.of(path)
        manifest.require(STATE, MODEL, RANDOM, directory=path)
        state, pieces, files = SavedState.read(path / STATE), Pieces(path, manifest), ShardReader(path)
        model = files.all_in(MODEL) | pieces.model
        optimizer = None
        with reading(path / STATE):
            if unknown := [name for name in state.aliases.values() if name not in model]:
                raise CheckpointError(f"{path / STATE} has an alias of {unknown[0]}, which was not saved")
            if OPTIMIZER in manifest.files:
                if state.optimizer is None:
                    raise CheckpointError(f"{path} has {OPTIMIZER}, which {STATE} does not describe")
                tensors = files.all_in(OPTIMIZER) | pieces.optimizer
                where = str(path / OPTIMIZER)
                optimizer = StoredOptimizer(tensors, state.optimizer, state.aliases, files, where)
        return cls(path, state, files, model, optimizer)

    @property
    def ranks(self) -> int:
        return len(self.state.random)

    @property
    def has_masters(self) -> bool:
        return self.optimizer is not None and self.optimizer.has_masters

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """The model's tensors, tied ones under each of their names."""
        return self.model | {name: self.model[first] for name, first in self.state.aliases.items()}

    def nearest(self, name: str, dtype: torch.dtype) -> StoredTensor:
        """Return the most exact saved values of a tensor: master weights, unless the types are equal."""
        stored = self.tensors[name]
        master = None if self.optimizer is None else self.optimizer.master(name)
        return stored if master is None or stored.dtype == dtype else master

    def random_for(self, rank: int, positions: PipelinePositions) -> random_state.Saved | None:
        """Read and check the states of a rank; None if it did not save, or had other layers.

        A rank in another place would draw another one's numbers.
        """
        names = self.state.names
        if names is None:  # a version for which every rank had all layers
            is_same = len(positions.contents) == 1
        else:
            is_same = rank < self.ranks and names[rank] == positions.digests[rank]
        if rank >= self.ranks or not is_same:
            return None
        with reading(self.path / RANDOM):
            tensors = {
                name.removeprefix(f"{rank}/"): stored.whole(self.files)
                for name, stored in self.files.all_in(RANDOM, prefix=f"{rank}/").items()
            }
            saved = tensors, self.state.random[rank]
            random_state.check(saved)
        return saved


class _Restore:
    """Transfer of a checkpoint into a model and an optimizer; the constructor checks that they fit."""

    def __init__(
        self,
        contents: Contents,
        model: nn.Module,
        state: ModelState,
        optimizer: Optimizer | None,
        positions: PipelinePositions,
    ) -> None:
        self._contents = contents
        self._state = state
        self._sharding = sharding_of(list(model.parameters()))
        on_pieces = isinstance(optimizer, DistributedOptimizer) and optimizer.steps_on_pieces
        self._on_pieces = optimizer if isinstance(optimizer, DistributedOptimizer) and on_pieces else None
        self._on_wholes = None if on_pieces else optimizer
        precisions = [getattr(owner, "precision", None) for owner in (self._sharding, optimizer)]
        may_differ = contents.has_masters or any(precisions)
        where = str(contents.path / MODEL)
        check_names(positions.names, positions.aliases, contents.tensors, where)
        check_forms(state, contents.tensors, where, precision_may_differ=may_differ)
        if optimizer is not None:
            self._state_dict = self._saved.state_dict(optimizer, positions.groups or [])
            if self._on_wholes is not None:
                self._state_dict["state"] = self._saved.whole_states(optimizer, state.parameter_names)
        # An optimizer on pieces brings its parameters along with their states.
        stepped = () if self._on_pieces is None else self._on_pieces.reducer.parameters
        self._with_optimizer = {id(parameter) for parameter in stepped}

    @torch.no_grad()
    def whole_tensors(self) -> None:
        """Fill what is not in pieces, in place: buckets and ties are views of the same memory."""
        if self._on_wholes is not None:
            # First the optimizer, which may still refuse what it is given.
            with reading(self._contents.path / STATE):
                self._on_wholes.load_state_dict(self._state_dict)
        sharded = () if self._sharding is None else self._sharding.every_parameter()
        elsewhere = self._with_optimizer | {id(parameter) for parameter in sharded}
        for value in self._state.tensors:
            if id(value) not in elsewhere and value.numel():
                stored = self._contents.nearest(self._state.name_of(value), value.dtype)
                value.copy_(stored.local(self._contents.files, LocalTensor.of(value)))

    def pieces(self) -> None:
        """Fill this rank's pieces. Collective over the ranks that share them."""
        if self._sharding is not None:
            self._sharding.load(self._values_of)
        if self._on_pieces is not None:
            self._on_pieces.load_own_states(self._state_of, self._state_dict)

    @property
    def _saved(self) -> StoredOptimizer:
        if self._contents.optimizer is None:
            raise CheckpointError(
                f"{self._contents.path} was saved without an optimizer, but there is one to restore; "
                f"load with optimizer=None to begin with a fresh one"
            )
        return self._contents.optimizer

    def _values_of(self, piece: OwnPiece) -> Tensor | None:
        if id(piece.parameter) in self._with_optimizer:
            return None
        name = self._state.name_of(piece.parameter)
        return self._elements(piece, self._contents.nearest(name, piece.parameter.dtype))

    def _state_of(self, piece: OwnPiece) -> dict[str, Any]:
        """Read the optimizer's state of a piece, and in any case its values as master weights."""
        name = self._state.name_of(piece.parameter)
        values = self._saved.master(name) or self._contents.tensors[name]
        return {MASTER: self._elements(piece, values), **self._saved.state_of(name, piece)}

    def _elements(self, piece: OwnPiece, stored: StoredTensor) -> Tensor:
        local = LocalTensor.of(piece.parameter, piece.layout)
        return stored.elements(self._contents.files, local, piece.start, piece.stop)
