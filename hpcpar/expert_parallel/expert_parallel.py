"""`ExpertParallel`: experts divided among ranks, and tokens that go to theirs and come home.

    ep = ExpertParallel(mesh.ep, count=8)
    out = ep.mix(hidden, experts, weights, compute)         # [T, H]; experts, weights [T, k]

Values sent by each rank for a layer's forward and backward, dropless and balanced: 4·T·k·H·(w - 1)/w.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hpcpar.algorithms.topology import map_nodes
from hpcpar.comm import Communicator
from hpcpar.comm.agree import require_same
from hpcpar.errors import LayoutError, OperationError
from hpcpar.expert_parallel.dispatch import owners
from hpcpar.expert_parallel.exchange import (
    EXPERTS,
    Arrive,
    Assignment,
    Channels,
    Depart,
    Home,
    Leave,
    OneStageDraft,
    Trip,
)
from hpcpar.expert_parallel.mix_call import MixCall
from hpcpar.expert_parallel.two_stages import TwoStageDraft
from hpcpar.partition import bounds, counts
from hpcpar.uncompiled import uncompiled

Compute = Callable[[Tensor, list[int]], Tensor]
Stages = Literal["auto", 1, 2]


class ExpertParallel:
    """Ranks that divide experts among themselves; making it is collective.

    comm          they; rank r has the experts `own`, which need not divide evenly. One rank sends nothing
    count         experts on all of them
    stages        1: a row goes straight to its expert. 2: a token goes to each node once, and there to its
                  experts. "auto": two where there are several nodes of several ranks, and tokens have several
                  experts
    halves        tokens go in two halves: the second's rows travel while the first's experts compute, if
                  that calls `progress`. For slow networks: products of half the rows take longer (a fifth
                  more processor time, measured on two ranks), and have not the same bits
    sum_on_node   in two stages, outputs for one token on one node come home as their sum, and gradients of
                  rows, too: fewer bytes between nodes, and sums in another order
    errors        LayoutError; MismatchError on every rank whose ranks ask for different things

    On CPUs, without halves and sum_on_node, outputs and gradients are those of one rank to the bit, for any
    number of ranks and stages: an expert's rows are in the order of global positions, and a token's outputs
    are added in the order of its slots.
    source   Shazeer et al. 2017, arXiv 1701.06538; Lepikhin et al. 2020, GShard, arXiv 2006.16668
    """

    def __init__(
        self,
        comm: Communicator,
        count: int,
        *,
        stages: Stages = "auto",
        halves: bool = False,
        sum_on_node: bool = False,
    ) -> None:
        asked = f"ExpertParallel(count={count}, {stages=}, {halves=}, {sum_on_node=})"
        require_same(comm, asked)
        if not 1 <= count < EXPERTS or stages not in ("auto", 1, 2):
            raise LayoutError(f'{asked}: count is from 1 to {EXPERTS - 1}, and stages are 1, 2 or "auto"')
        if sum_on_node and stages == 1:
            raise LayoutError(f'{asked}: outputs are summed on nodes in two stages; give stages=2, or "auto"')
        self.comm, self.count = comm, count
        self.stages, self.halves, self.sum_on_node = stages, halves, sum_on_node
        self.own = range(*bounds(count, comm.size)[comm.rank])
        self.counts = [0] * count
        """Rows of this rank's tokens for each expert, in the last call."""
        self.received = 0
        """Rows that came to this rank's experts in the last call."""
        self._owner_of = owners(count, comm.size)
        self._nodes = map_nodes(comm.size, comm.nodes)
        has_lanes = 1 < self._nodes.nodes < comm.size
        has_two = comm.size > 1 and (stages == 2 or (stages == "auto" and has_lanes))
        self.node = comm.split_by_node(f"{comm.name} within nodes") if has_two else None
        self._channels = Channels.of(comm)
        most = 1 + (2 if halves else 1) * (2 + counts(count, comm.size)[0])
        self._told, self._heard = (np.zeros((comm.size, most), np.int64) for _ in range(2))
        self._on_node = None if self.node is None else Channels.of(self.node)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out a communicator of one rank, so that a serial model can be copied and saved."""
        if self.comm.size > 1:
            return self.__dict__
        return {name: getattr(self, name) for name in ("count", "stages", "halves", "sum_on_node")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(Communicator.alone(), **state)  # type: ignore[misc]

    def progress(self, outputs: Tensor | None = None) -> None:
        """Advance rows that travel; to be called by `compute` between experts.

        outputs   of the expert that was just computed: rows are advanced when their gradient comes, too
        """
        self.comm.progress()
        if self.halves and outputs is not None and outputs.requires_grad:
            outputs.register_hook(lambda _: self.comm.progress())  # type: ignore[no-untyped-call]

    @uncompiled
    def mix(
        self,
        hidden: Tensor,
        experts: Tensor,
        weights: Tensor,
        compute: Compute,
        *,
        kept: Tensor | None = None,
        positions: Tensor | None = None,
        meanwhile: Callable[[], Tensor | None] | None = None,
    ) -> Tensor:
        """Return Σ weight · expert(token) for this rank's tokens [T, H]; collective, and so is its backward.

        hidden      [T, H] this rank's tokens; T may differ among ranks, and be 0
        experts     [T, k] int64, numbers below `count`
        weights     [T, k] by which a token's outputs are multiplied; in the wider of both types
        compute     (rows [R, H], rows of each own expert) -> [R, H]; rows are sorted by (expert, position).
                    Not called on a rank without experts
        kept        [T, k] bool: False for what does not travel, and counts as zero; None: all
        positions   [T] int64, global place of each token; None: the ranks' tokens follow each other
        meanwhile   computed while rows travel, as a shared expert is; what it returns [T, H] is added
        errors      OperationError on every rank for what does not fit; MismatchError for ranks that differ

        Saved for backward beside what `compute` saves: the outputs of the tokens, [T·k, H], if weights have
        a gradient. Gradients cannot be differentiated again.
        """
        halves = _halves(len(hidden)) if self.halves else [slice(None)]
        trips = self._meet(MixCall(hidden, experts, weights, kept, positions), halves)
        joints: list[Tensor] = [
            Depart.apply(hidden[half], trip)  # type: ignore[no-untyped-call]
            for half, trip in zip(halves, trips, strict=True)
        ]
        shared = None if meanwhile is None else meanwhile()
        for number, (half, trip) in enumerate(zip(halves, trips, strict=True)):
            rows, joint = Arrive.apply(joints[number], trip)  # type: ignore[no-untyped-call]
            outputs = compute(rows, trip.route.counts).to(rows.dtype) if self.own else rows
            if outputs.shape != rows.shape:
                raise OperationError(
                    f"compute was given rows {list(rows.shape)} and returned {list(outputs.shape)}; it must "
                    "return as many of the same size"
                )
            joint = self._joint(joint, outputs, weights)
            joints[number] = Leave.apply(  # type: ignore[no-untyped-call]
                outputs, joint, trip, weights[half].detach()
            )
        parts = [
            Home.apply(joint, weights[half], trip)  # type: ignore[no-untyped-call]
            for joint, half, trip in zip(joints, halves, trips, strict=True)
        ]
        mixed: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        return mixed if shared is None else mixed + shared

    def _joint(self, joint: Tensor, outputs: Tensor, weights: Tensor) -> Tensor:
        """Return what makes backward come through the exchange on all ranks if it does on any."""
        if joint.requires_grad or not torch.is_grad_enabled():
            return joint
        has_gradient = weights.requires_grad
        if not has_gradient:  # experts are trained alone, and this rank may have none
            flag = torch.tensor([int(outputs.requires_grad)])
            has_gradient = bool(self._channels.notes.allreduce(flag, "max"))
        return joint.requires_grad_(has_gradient)

    def _meet(self, call: MixCall, halves: Sequence[slice]) -> list[Trip]:
        """Agree on the call, tell each other the counts, and make the routes."""
        problem = call.problem(self.count)
        drafts = [] if problem else [self._draft(call.part(half)) for half in halves]
        described = problem or call.described()
        digest = int.from_bytes(hashlib.blake2b(described.encode(), digest_size=7).digest(), "big")
        told = []
        for rank, (start, stop) in enumerate(bounds(self.count, self.comm.size)):
            parts = [[*draft.to_gateways[rank], *draft.counts[start:stop]] for draft in drafts]
            own = [digest, *chain(*parts)]
            told.append(own + [0] * (self._told.shape[1] - len(own)))
        heard = self._exchanged(told)
        if any(numbers[0] != digest for numbers in heard):
            require_same(self.comm, f"ExpertParallel.mix({described})")
        if problem:
            raise OperationError(f"ExpertParallel.mix: {problem}")
        self.counts = [sum(of_expert) for of_expert in zip(*(draft.counts for draft in drafts), strict=True)]
        length = 2 + len(self.own)
        trips = [
            Trip(draft.route([numbers[first : first + length] for numbers in heard]))
            for draft, first in zip(drafts, range(1, 1 + length * len(halves), length), strict=True)
        ]
        self.received = sum(sum(trip.route.counts) for trip in trips)
        return trips

    def _draft(self, part: MixCall) -> OneStageDraft | TwoStageDraft:
        to = Assignment(part.experts, self._owner_of, self.comm.rank, part.kept, part.positions)
        if self._on_node is None or (self.stages == "auto" and to.shape[1] == 1):
            return OneStageDraft(self._channels, to)
        return TwoStageDraft(self._channels, self._on_node, self._nodes, to, sums=self.sum_on_node)

    def _exchanged(self, told: list[list[int]]) -> list[list[int]]:
        """Give each rank its numbers; return those from each."""
        if self.comm.size == 1:
            return told
        # The same memory for each call, whose collective is then compiled once.
        self._told[:] = told
        return self._channels.notes.alltoall(self._told, out=self._heard).tolist()  # type: ignore[no-any-return]


def _halves(tokens: int) -> list[slice]:
    middle = (tokens + 1) // 2
    return [slice(middle), slice(middle, None)]
