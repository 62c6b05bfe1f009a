"""Reading a checkpoint: each rank verifies a part, and nothing is changed until all found theirs whole.

Each rank then reads what it needs: of what it owns in pieces those elements alone, whoever wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpcpar.checkpoint import random_state, random_streams
from hpcpar.checkpoint.catalogue import STATE
from hpcpar.checkpoint.choice import choose_together
from hpcpar.checkpoint.holding import holding_of
from hpcpar.checkpoint.manifest import Manifest
from hpcpar.checkpoint.model_state import ModelState, check_forms, check_names
from hpcpar.checkpoint.optimizer_state import SavedStates, distributed_of, group_names
from hpcpar.checkpoint.positions import Member, Positions
from hpcpar.checkpoint.save import MODEL, OPTIMIZER, PIECES, RANDOM
from hpcpar.checkpoint.stored import Files, Stored, from_record
from hpcpar.checkpoint.writers import Coordinates
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
    """What a checkpoint says beside the tensors.

    path              the checkpoint that was read
    step, extra       as they were saved
    ranks             ranks of the job that saved it
    random_restored   whether this rank's random-number states, and the streams of its model, are those that
                      were saved for it
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
    """Bring model, optimizer and random numbers to where a checkpoint left them. Collective.

    path            a checkpoint, or a directory of them. Of a directory the newest sound one is taken, the
                    same on all ranks: every file of it as it was written, every value a finite number. Newer
                    ones that are not are passed over with warnings. Every rank must see it
    accept          called on every rank with the checkpoint and its `extra`, before anything is compared;
                    what it raises, the same on all, ends the loading
    model           as for `save`; its ranks together have all that the checkpoint has
    restore_random  with another number of ranks than saved it, or other layers on them, only ranks that there
                    were then, with the same layers, find their states; the others keep theirs. What modules
                    have as `random_streams` is restored only on as many ranks, and of as many in tensor
                    parallelism, as saved it
    comm            of all ranks that load: all that model and optimizer are split, sharded or spread over

    What was saved by one pipeline, one stage of ZeRO, one tensor-parallel degree and one number of ranks is
    loaded into any others: a rank takes its layers, and of a split parameter its part of the whole, and zeros
    for padding. What is tied across ranks takes the value of its first name. Where it has master weights, or
    the optimizer (or the fully sharded model) has a precision, floating-point types may differ: parameters
    and master weights become the most exact values that there are, and those of a DistributedOptimizer that
    is not given become the parameters'. Nothing of model, optimizer or random numbers is touched unless every
    file was found whole, and by every rank to be of its model.

    errors  CheckpointError that names the file, what was expected, what was found and, where the checkpoint
            was named itself, the newest sound one beside it; of several ranks, PeerFailedError on every one,
            with that text
    """
    with comm.together(f"looking for a checkpoint in {path}"):
        distributed = distributed_of(model, optimizer)
    wait_for_new(model.parameters())
    chosen = choose_together(Path(path), comm)
    doing = f"loading the checkpoint {chosen}"
    with comm.together(doing):
        content = _Content.read(chosen, Manifest.read(chosen))
    if accept is not None:
        accept(chosen, content.state["extra"])
    with comm.together(doing):
        state = ModelState(model)
        groups = None if optimizer is None else group_names(optimizer, state.parameter_names)
    positions = Positions.agree(Member(state.names, groups), comm, doing)
    with comm.together(doing):
        filling = _Filling(content, model, state, optimizer, positions)
    with comm.together(doing):
        filling.fill_whole()
    with comm.together(doing):
        # What is collective in it, over some of the ranks, fails on all of those or none.
        filling.fill_pieces()
    with comm.together(doing):
        for each in distributed:
            # Its own states brought master weights along, and shards tell it of theirs.
            if each is not optimizer and each.sharding is None:
                each.take_parameters()
    restored = False
    if restore_random:
        with comm.together(doing):
            restored = _restore_random(content, model, positions, comm)
    return Loaded(chosen, content.state["step"], content.state["extra"], content.ranks, restored)


def _restore_random(content: _Content, model: nn.Module, positions: Positions, comm: Communicator) -> bool:
    """Whether all that was saved for this rank is restored."""
    # A rank in another place would draw what another one drew.
    if comm.rank >= content.ranks or not content.had_same_names(comm.rank, positions):
        return False
    saved = content.random_of(comm.rank)
    random_state.restore(saved, content.state["random"][comm.rank])
    if not random_streams.are_in(saved):
        return True
    own = Coordinates.of(model, None)
    at_home = content.ranks == comm.size and content.state["tp"][comm.rank] == [own.tp_rank, own.tp_size]
    if at_home:
        random_streams.restore(model, saved)
    return at_home


@dataclass(frozen=True)
class _Content:
    """What a verified checkpoint holds; of tensors, where they are."""

    path: Path
    state: dict[str, Any]
    files: Files
    model: dict[str, Stored]
    optimizer: SavedStates | None

    @classmethod
    def read(cls, path: Path, manifest: Manifest) -> _Content:
        for name in (STATE, MODEL, RANDOM):
            if name not in manifest.files:
                raise CheckpointError(f"{path} is not a checkpoint of this program: it has no {name}")
        state = json.loads((path / STATE).read_text())
        pieces = json.loads((path / PIECES).read_text()) if PIECES in manifest.files else {}
        files = Files(path)

        def tensors(file: str, kind: str) -> dict[str, Stored]:
            records = pieces.get(kind, {})
            return files.all_in(file) | {name: from_record(name, record) for name, record in records.items()}

        optimizer = None
        if OPTIMIZER in manifest.files:
            where = str(path / OPTIMIZER)
            optimizer = SavedStates(
                tensors(OPTIMIZER, "optimizer"), state["optimizer"], state["aliases"], files, where
            )
        return cls(path, state, files, tensors(MODEL, "model"), optimizer)

    @property
    def aliases(self) -> dict[str, str]:
        aliases: dict[str, str] = self.state["aliases"]
        return aliases

    @property
    def ranks(self) -> int:
        return len(self.state["random"])

    @property
    def has_masters(self) -> bool:
        return self.optimizer is not None and self.optimizer.has_masters

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        """The model's, tied ones under each of their names."""
        return self.model | {name: self.model[first] for name, first in self.aliases.items()}

    def value(self, name: str, dtype: torch.dtype) -> Stored:
        """Of a parameter or buffer, what comes nearest to its value in a type: master weights, if need be."""
        stored = self.tensors[name]
        master = None if self.optimizer is None else self.optimizer.master(name)
        return stored if master is None or stored.dtype == dtype else master

    def had_same_names(self, rank: int, positions: Positions) -> bool:
        """Whether a rank that saved it had the same part of the model as the rank has now."""
        saved: list[str] | None = self.state.get("names")
        if saved is None:  # by a version for which each had all
            return len(positions.members) == 1
        return saved[rank] == positions.digests[rank]

    def random_of(self, rank: int) -> dict[str, Tensor]:
        return {
            name.removeprefix(f"{rank}/"): stored.whole(self.files)
            for name, stored in self.files.all_in(RANDOM).items()
            if name.startswith(f"{rank}/")
        }


class _Filling:
    """A checkpoint on its way into a model and an optimizer, which it is found to fit when this is made."""

    def __init__(
        self,
        content: _Content,
        model: nn.Module,
        state: ModelState,
        optimizer: Optimizer | None,
        positions: Positions,
    ) -> None:
        self._content = content
        self._state = state
        self._sharding = sharding_of(list(model.parameters()))
        has_pieces = isinstance(optimizer, DistributedOptimizer) and optimizer.steps_on_pieces
        self._on_pieces = optimizer if isinstance(optimizer, DistributedOptimizer) and has_pieces else None
        self._on_wholes = None if has_pieces else optimizer
        precisions = [getattr(owner, "precision", None) for owner in (self._sharding, optimizer)]
        may_differ = content.has_masters or any(precisions)
        where = str(content.path / MODEL)
        check_names(positions.names, positions.aliases, content.tensors, where)
        check_forms(state, content.tensors, where, precision_may_differ=may_differ)
        if optimizer is not None:
            saved = self._saved_states
            self._state_dict = saved.state_dict(optimizer, positions.groups or [])
            if self._on_wholes is not None:
                self._state_dict["state"] = saved.whole_states(optimizer, state.parameter_names)
        # What the optimizer has pieces of is brought by these.
        stepped = () if self._on_pieces is None else self._on_pieces.reducer.parameters
        self._brought = {id(parameter) for parameter in stepped}

    @torch.no_grad()
    def fill_whole(self) -> None:
        """All that is not in pieces. Memory stays, so that views of it (buckets, ties) stay what they are."""
        sharded = () if self._sharding is None else self._sharding.every_parameter()
        elsewhere = self._brought | {id(parameter) for parameter in sharded}
        for value in self._state.tensors:
            if id(value) not in elsewhere and value.numel():
                stored = self._content.value(self._state.name_of(value), value.dtype)
                value.copy_(stored.held(self._content.files, holding_of(value)))
        if self._on_wholes is not None:
            self._on_wholes.load_state_dict(self._state_dict)

    def fill_pieces(self) -> None:
        """Of all that is in pieces this rank's. Collective over the ranks that they are spread over."""
        if self._sharding is not None:
            self._sharding.load(self._values_of)
        if self._on_pieces is not None:
            self._on_pieces.load_own_states(self._state_of, self._state_dict)

    @property
    def _saved_states(self) -> SavedStates:
        if self._content.optimizer is None:
            raise CheckpointError(
                f"{self._content.path} was saved without an optimizer, but there is one to restore; "
                f"load with optimizer=None to begin with a fresh one"
            )
        return self._content.optimizer

    def _values_of(self, piece: OwnPiece) -> Tensor | None:
        if id(piece.parameter) in self._brought:
            return None
        name = self._state.name_of(piece.parameter)
        return self._read(piece, self._content.value(name, piece.parameter.dtype))

    def _state_of(self, piece: OwnPiece) -> dict[str, Any]:
        """The optimizer's state of a piece, and in any case its values as master weights."""
        name = self._state.name_of(piece.parameter)
        saved = self._saved_states
        values = saved.master(name) or self._content.tensors[name]
        holding = holding_of(piece.parameter, piece.layout)
        return {MASTER: self._read(piece, values), **saved.state_of(name, holding, piece)}

    def _read(self, piece: OwnPiece, stored: Stored) -> Tensor:
        holding = holding_of(piece.parameter, piece.layout)
        return stored.elements(self._content.files, holding, piece.start, piece.stop)
