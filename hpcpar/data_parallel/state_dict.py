"""Optimizer states of a DistributedOptimizer: whole, by this rank's pieces, and as one rank's shard.

state_dict          the inner optimizer's, of whole parameters; any stage and number of ranks loads it
own_states          this rank's pieces, flat; checkpoints write and read these
sharded_state_dict  this rank's pieces as a dictionary, for the same rank of as many
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpcpar.data_parallel.bucket_shards import Piece
from hpcpar.data_parallel.builder import Parts
from hpcpar.data_parallel.parameters import OwnPiece, layout_of, view_as
from hpcpar.data_parallel.precision import LossScaler
from hpcpar.data_parallel.sharded_step import MASTER, ShardedStep, State, flattened, is_elementwise, part_of
from hpcpar.errors import OperationError

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


@dataclass(frozen=True)
class OptimizerStates:
    """Reads and writes the states of one optimizer; parameters must be their masters' before.

    is_sharded   each rank steps on its shard only
    """

    inner: Optimizer
    parts: Parts
    scaler: LossScaler
    dp_comm: Communicator
    is_sharded: bool

    # --- whole ------------------------------------------------------------------------------------

    def state_dict(self, root: int | None) -> dict[str, Any]:
        if self.parts.update is None:
            return self.inner.state_dict()
        whole = self._whole_states(self.parts.update, root)
        if root is not None and self.dp_comm.rank != root:
            return {}
        with self._showing(whole):
            state = self.inner.state_dict()
        return {**state, "loss_scale": self.scaler.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if self.parts.update is None:
            self._load_plain(state_dict)
            return
        states: dict[int, State] = state_dict["state"]
        number_in_state = {id(parameter): number for number, parameter in enumerate(self._held())}

        def state_of(piece: OwnPiece) -> State:
            state = states.get(number_in_state[id(piece.parameter)], {})
            _require_shapes(state, piece)
            whole = flattened(state, piece.layout)
            return part_of(whole, piece.start, piece.stop, piece.parameter.numel())

        self.load_own_states(state_of, state_dict)

    # --- by pieces --------------------------------------------------------------------------------

    def own_states(self) -> Iterator[tuple[OwnPiece, State]]:
        """Yield each piece with its state, which is valid until the next is asked for. Sends nothing."""
        if self.parts.update is None:
            for whole in self._whole_pieces():
                yield whole, flattened(self.inner.state.get(whole.parameter, {}), whole.layout)
            return
        for block_states in self.parts.update.states_by_block():
            for piece, state in block_states:
                yield self._own_piece(piece), state

    def load_own_states(
        self, state_of: Callable[[OwnPiece], Mapping[str, Any]], state_dict: Mapping[str, Any]
    ) -> None:
        update, allgather = self.parts.update, self.parts.allgather
        if update is None:
            number_in_state = {id(parameter): number for number, parameter in enumerate(self._held())}
            with self.dp_comm.together("loading the optimizer's state"):
                states = {
                    number_in_state[id(piece.parameter)]: _in_shape(state_of(piece), piece)
                    for piece in self._whole_pieces()
                }
                self._load_plain({**state_dict, "state": {n: state for n, state in states.items() if state}})
            return
        allgather.before_step()
        with self.dp_comm.together("loading the optimizer's state"):
            with self._showing({}):
                self.inner.load_state_dict(_plain(state_dict, {}))
            self._load_scale(state_dict)
            update.load_states(lambda piece: state_of(self._own_piece(piece)))
        allgather.start_remaining()
        allgather.wait()

    def sharded_state_dict(self) -> dict[str, Any]:
        pieces = {
            piece.name: {
                "elements": (piece.start, piece.stop),
                "state": {
                    key: value.detach().clone() if isinstance(value, Tensor) else value
                    for key, value in state.items()
                },
            }
            for piece, state in self.own_states()
        }
        return {"pieces": pieces, "param_groups": self.param_groups(), "loss_scale": self.scaler.state_dict()}

    def load_sharded_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        saved = state_dict["pieces"]
        found = {name: tuple(piece["elements"]) for name, piece in saved.items()}
        with self.dp_comm.together("loading a sharded state"):
            mine = {piece.name: (piece.start, piece.stop) for piece in self._own_pieces()}
            if mine != found:
                name = min(name for name in mine.keys() | found.keys() if mine.get(name) != found.get(name))
                raise OperationError(
                    f"the state is of other pieces than this rank has: of {name} it has elements "
                    f"{found.get(name, 'none')}, where {mine.get(name, 'none')} are needed; load it with the "
                    "stage, number of ranks and bucket sizes that it was made with, or use hpcpar.checkpoint"
                )
        self.load_own_states(lambda piece: saved[piece.name]["state"], state_dict)

    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups as they are saved: options, and parameters by number."""
        with self._showing({}):
            groups: list[dict[str, Any]] = self.inner.state_dict()["param_groups"]
        return groups

    # ----------------------------------------------------------------------------------------------

    def _held(self) -> list[Tensor]:
        return [parameter for group in self.inner.param_groups for parameter in group["params"]]

    def _whole_states(self, update: ShardedStep, root: int | None) -> dict[Tensor, State]:
        """Assemble every parameter's state from all ranks' pieces, in its shape, on `root` or everywhere."""
        parameters = self.parts.reducer.parameters
        whole: dict[int, State] = defaultdict(dict)
        for block, block_states in zip(self.parts.blocks, update.states_by_block(), strict=True):
            comm = self.parts.comms.shard_comm(block.bucket.replicas)
            gathered: list[Any] | None
            if not self.is_sharded:
                gathered = [block_states]
            elif root is None or comm is not self.dp_comm:
                gathered = comm.allgather_object(block_states)
            else:
                gathered = comm.gather_object(block_states, root)
            for piece, state in (pair for of_rank in gathered or [] for pair in of_rank):
                numel = parameters[piece.member].numel()
                for key, value in state.items():
                    if not isinstance(value, Tensor) or value.dim() == 0:
                        # A copy: master weights without dimensions go to disk with their block.
                        whole[piece.member][key] = value.clone() if isinstance(value, Tensor) else value
                        continue
                    held = whole[piece.member].setdefault(key, torch.zeros(numel, dtype=value.dtype))
                    held[piece.start : piece.stop] = value
        return {
            parameters[member]: {
                key: view_as(value, 0, value.numel(), update.layouts[member])
                if isinstance(value, Tensor) and value.dim() > 0
                else value
                for key, value in state.items()
            }
            for member, state in whole.items()
        }

    @contextmanager
    def _showing(self, states: Mapping[Tensor, State]) -> Iterator[None]:
        """Let the inner optimizer's state be `states` meanwhile."""
        pieces = self.inner.state
        self.inner.state = defaultdict(dict, states)
        try:
            yield
        finally:
            self.inner.state = pieces

    def _own_pieces(self) -> Iterator[OwnPiece]:
        if self.parts.update is None:
            return self._whole_pieces()
        return (self._own_piece(piece) for block in self.parts.blocks for piece in block.shard.pieces)

    def _own_piece(self, piece: Piece) -> OwnPiece:
        assert self.parts.update is not None, "there are pieces"
        reducer, member = self.parts.reducer, piece.member
        layout = self.parts.update.layouts[member]
        return OwnPiece(reducer.names[member], reducer.parameters[member], layout, piece.start, piece.stop)

    def _whole_pieces(self) -> Iterator[OwnPiece]:
        reducer = self.parts.reducer
        for name, parameter in zip(reducer.names, reducer.parameters, strict=True):
            yield OwnPiece(name, parameter, layout_of(parameter), 0, parameter.numel())

    def _load_scale(self, state_dict: Mapping[str, Any]) -> None:
        scale = state_dict.get("loss_scale")
        if scale is not None:
            self.scaler.load_state_dict(scale)

    @torch.no_grad()
    def _load_plain(self, state_dict: Mapping[str, Any]) -> None:
        self._load_scale(state_dict)
        masters: dict[int, Tensor] = {}
        states = {number: dict(state) for number, state in state_dict["state"].items()}
        for number, state in states.items():
            if MASTER in state:
                masters[number] = state.pop(MASTER)
        self.inner.load_state_dict(_plain(state_dict, states))
        held = self._held()
        for number, master in masters.items():
            held[number].copy_(master)


def _plain(state_dict: Mapping[str, Any], states: Mapping[int, State]) -> dict[str, Any]:
    """Return what torch's own load_state_dict takes, with these states."""
    ours = ("pieces", "loss_scale")
    return {key: value for key, value in state_dict.items() if key not in ours} | {"state": states}


def _require_shapes(state: Mapping[str, Any], piece: OwnPiece) -> None:
    """OperationError for a state of another parameter; one rank alone might fail in a step on it."""
    numel = piece.parameter.numel()
    for key, value in state.items():
        if isinstance(value, Tensor) and value.numel() not in (1, numel):
            raise OperationError(
                f"{key} of {piece.name} has shape {list(value.shape)} in the state, and the parameter "
                f"{list(piece.layout[0])}; load the state of an optimizer of the same model"
            )


def _in_shape(state: Mapping[str, Any], piece: OwnPiece) -> State:
    """Return a whole parameter's flat state with elementwise values in the parameter's shape."""
    numel = piece.stop - piece.start
    return {
        key: view_as(value.clone(), 0, numel, piece.layout) if is_elementwise(value, numel) else value
        for key, value in state.items()
    }
