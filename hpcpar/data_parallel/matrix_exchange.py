"""Bring matrices that lie on several ranks to their owners, a round at a time, and their updates back.

    rank 0   a0 b0 ──┐ all-to-all ┌── a0 a1 ─ orthogonalize a ──┐ all-to-all ┌── a0 b0
    rank 1   a1 b1 ──┘            └── b0 b1 ─ orthogonalize b ──┘            └── a1 b1

A round has at most one matrix for each rank. While it is worked on, the next one is under way:

    all-to-all   gather 0 │ gather 1          │ back 0, gather 2 │ back 1            │ back 2
    compute               │ orthogonalize 0   │ orthogonalize 1  │ orthogonalize 2

Updates travel in bfloat16, in which Newton-Schulz iterates anyhow, so nothing is lost. For a matrix of n
elements of which its owner has k, the other ranks send 2(n - k) bytes, and get as many back.

A matrix of ZeRO-3 and tensor parallelism is gathered over dp first, and then, as parts of a matrix, over tp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpcpar.data_parallel.parameters import Layout, in_memory_order
from hpcpar.planner.matrix_owners import balanced_owners, matrix_cost, rounds_of
from hpcpar.planner.muon import matrix_exchange_nbytes

if TYPE_CHECKING:
    from hpcpar.comm import Communicator
    from hpcpar.comm.compiled import Handle

TRAVELS_AS = torch.bfloat16


@dataclass(frozen=True, eq=False)
class SpreadMatrix:
    """A matrix of which this rank has a part.

    member     number of the parameter
    layout     of this rank's part over tp, or of the whole without tp
    shape      of the whole matrix
    dp_comm    ranks that have pieces of the part, whose lengths are `pieces`; None: this rank has all of it
    tp_comm    ranks that have the parts, as `split` says; None: this is all of it
    device     where it is worked on
    """

    member: int
    layout: Layout
    shape: tuple[int, ...]
    dp_comm: Communicator | None
    pieces: tuple[int, ...]
    tp_comm: Communicator | None
    split: Any
    device: torch.device

    @property
    def parts(self) -> tuple[int, ...]:
        """Elements of each tp rank's part."""
        return tuple(
            rows * columns
            for rows, columns in (self.split.shard_shape(self.shape, rank) for rank in range(self.split.size))
        )

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole matrix from the parts of all tp ranks, flat."""
        if self.split is None:
            return self._seen(parts[0], self.shape)
        shapes = [self.split.shard_shape(self.shape, rank) for rank in range(self.split.size)]
        whole: Tensor = self.split.whole(list(map(self._seen, parts, shapes)))
        return whole

    def divided(self, whole: Tensor) -> list[Tensor]:
        """Return the parts of all tp ranks, flat."""
        if self.split is None:
            return [in_memory_order(whole, self.layout)]
        shards = (self.split.shard(whole, rank) for rank in range(self.split.size))
        return [(shard if self._is_row_major else shard.T).reshape(-1) for shard in shards]

    @property
    def _is_row_major(self) -> bool:
        (_, columns), (across, along) = self.layout
        return along == 1 and (across == columns or self.layout[0][0] <= 1)

    def _seen(self, flat: Tensor, shape: Sequence[int]) -> Tensor:
        return flat.view(*shape) if self._is_row_major else flat.view(shape[1], shape[0]).T


class MatrixHop:
    """One all-to-all that joins matrices over a communicator, and the one back.

    owners    ranks that get the matrices, by item
    lengths   elements of each rank's part, by item
    device    where the parts are
    """

    def __init__(
        self,
        comm: Communicator,
        owners: Sequence[int],
        lengths: Sequence[Sequence[int]],
        device: torch.device,
    ) -> None:
        self.comm = comm
        self._device = device
        self._lengths = lengths
        everything = range(len(owners))
        self._by_owner = sorted(everything, key=lambda item: owners[item])
        self.own = [item for item in everything if owners[item] == comm.rank]
        self._away = [
            sum(lengths[item][comm.rank] for item in everything if owners[item] == rank)
            for rank in range(comm.size)
        ]
        self._here = [sum(lengths[item][rank] for item in self.own) for rank in range(comm.size)]
        self.nbytes = sum(
            matrix_exchange_nbytes(sum(lengths[item]), lengths[item][owners[item]]) for item in everything
        )
        """Bytes that all ranks of the communicator send, there and back."""

    def start(self, parts: Sequence[Tensor]) -> Handle:
        """Send each item's own part to its owner."""
        return self._start([parts[item] for item in self._by_owner], self._away, self._here)

    def joined(self, handle: Handle) -> list[list[Tensor]]:
        """Wait; return all ranks' parts of each own item."""
        parts = self._cut(handle, [[self._lengths[item][rank] for item in self.own] for rank in self._ranks])
        return [[of_rank[place] for of_rank in parts] for place in range(len(self.own))]

    def start_back(self, parts: Sequence[Sequence[Tensor]]) -> Handle:
        """Send all ranks' parts of each own item to them."""
        return self._start([part[rank] for rank in self._ranks for part in parts], self._here, self._away)

    def returned(self, handle: Handle) -> list[Tensor]:
        """Wait; return the own part of each item."""
        [flats] = self._cut(handle, [[self._lengths[item][self.comm.rank] for item in self._by_owner]])
        return [flat for _, flat in sorted(zip(self._by_owner, flats, strict=True), key=lambda pair: pair[0])]

    @property
    def _ranks(self) -> range:
        return range(self.comm.size)

    def _start(self, parts: Sequence[Tensor], send: Sequence[int], receive: Sequence[int]) -> Handle:
        flats = [part.reshape(-1) for part in parts]
        buffer = torch.cat(flats or [torch.empty(0, dtype=TRAVELS_AS, device=self._device)])
        return self.comm.start_alltoall(buffer, send_counts=send, receive_counts=receive)

    @staticmethod
    def _cut(handle: Handle, lengths: Sequence[Sequence[int]]) -> list[list[Tensor]]:
        flat = handle.wait()
        pieces = iter(flat.split([length for each in lengths for length in each]))
        return [[next(pieces) for _ in each] for each in lengths]


class MatrixRound:
    """Matrices that are gathered, worked on and sent back together; each rank owns at most one.

    owners   by matrix, numbers of ranks of dp × tp, tp innermost
    """

    def __init__(self, matrices: Sequence[SpreadMatrix], owners: Sequence[int]) -> None:
        self.matrices = matrices
        first = matrices[0]
        tp_size = 1 if first.tp_comm is None else first.tp_comm.size
        self.hops: list[MatrixHop] = []
        here, there = list(matrices), list(owners)
        if first.dp_comm is not None:
            lengths: Sequence[Sequence[int]] = [each.pieces for each in matrices]
            hop = MatrixHop(first.dp_comm, [owner // tp_size for owner in owners], lengths, first.device)
            here, there = [matrices[item] for item in hop.own], [owners[item] for item in hop.own]
            self.hops.append(hop)
        if first.tp_comm is not None:
            lengths = [each.parts for each in here]
            hop = MatrixHop(first.tp_comm, [owner % tp_size for owner in there], lengths, first.device)
            here = [here[item] for item in hop.own]
            self.hops.append(hop)
        self.own = here
        self._handle: Handle | None = None

    def start(self, updates: Callable[[SpreadMatrix], Tensor]) -> None:
        """Send this rank's part of each matrix towards its owner."""
        self._handle = self.hops[0].start([updates(matrix) for matrix in self.matrices])

    def wait(self) -> list[Tensor]:
        """Return the whole matrices that this rank owns."""
        assert self._handle is not None, "it was started"
        parts = self.hops[0].joined(self._handle)
        if len(self.hops) > 1:
            handle = self.hops[1].start([torch.cat(pieces) for pieces in parts])
            parts = self.hops[1].joined(handle)
        if self.hops[-1].comm is not self.matrices[0].tp_comm:
            parts = [[torch.cat(pieces)] for pieces in parts]
        return [matrix.joined(each) for matrix, each in zip(self.own, parts, strict=True)]

    def start_back(self, wholes: Sequence[Tensor]) -> None:
        """Send the updates of own matrices towards the ranks that have parts of them."""
        parts = [matrix.divided(whole) for matrix, whole in zip(self.own, wholes, strict=True)]
        if len(self.hops) > 1:
            flats = self.hops[1].returned(self.hops[1].start_back(parts))
            parts = [[flat] for flat in flats]
        if self.matrices[0].dp_comm is not None:
            pieces = [self.matrices[item].pieces for item in self.hops[0].own]
            parts = [list(torch.split(part, list(each))) for [part], each in zip(parts, pieces, strict=True)]
        self._handle = self.hops[0].start_back(parts)

    def finish(self, apply: Callable[[SpreadMatrix, Tensor], None]) -> None:
        """Wait for the updates of this rank's parts, flat, and hand them over."""
        assert self._handle is not None, "it was started"
        handle, self._handle = self._handle, None
        for matrix, flat in zip(self.matrices, self.hops[0].returned(handle), strict=True):
            apply(matrix, flat)


class MatrixExchange:
    """All rounds of an optimizer's matrices that lie on several ranks, the same on all of these ranks."""

    def __init__(self, matrices: Sequence[SpreadMatrix]) -> None:
        self.members = {matrix.member for matrix in matrices}
        families: dict[Any, list[SpreadMatrix]] = {}
        for matrix in matrices:
            families.setdefault((matrix.dp_comm, matrix.tp_comm), []).append(matrix)
        self.rounds = [each for family in families.values() for each in _rounds(family)]

    def run(
        self,
        updates: Callable[[SpreadMatrix], Tensor],
        work: Callable[[SpreadMatrix, Tensor], Tensor],
        apply: Callable[[SpreadMatrix, Tensor], None],
    ) -> None:
        """Gather, work on and send back all matrices. Collective over their ranks.

        updates   -> this rank's part, flat, in bfloat16
        work      of a whole matrix -> its update, of the same shape
        apply     is given this rank's part of that, flat
        """
        returning: MatrixRound | None = None
        for number, current in enumerate(self.rounds):
            if number == 0:
                current.start(updates)
            wholes = current.wait()
            if number + 1 < len(self.rounds):
                self.rounds[number + 1].start(updates)
            done = [work(matrix, whole) for matrix, whole in zip(current.own, wholes, strict=True)]
            if returning is not None:
                returning.finish(apply)
            current.start_back(done)
            returning = current
        if returning is not None:
            returning.finish(apply)

    def nbytes_by_comm(self) -> dict[Communicator, int]:
        """Return the bytes that all ranks of a communicator send in a step, in theory."""
        total: Counter[Communicator] = Counter()
        for each in self.rounds:
            for hop in each.hops:
                total[hop.comm] += hop.nbytes
        return dict(total)


def _rounds(family: Sequence[SpreadMatrix]) -> list[MatrixRound]:
    """Divide matrices of the same ranks among these, balanced by cost, into rounds."""
    size = 1
    for comm in (family[0].dp_comm, family[0].tp_comm):
        size *= 1 if comm is None else comm.size
    costs = [matrix_cost(matrix.shape) for matrix in family]
    owners = balanced_owners(costs, size)
    return [
        MatrixRound([family[item] for item in items], [owners[item] for item in items])
        for items in rounds_of(costs, owners, size)
    ]
