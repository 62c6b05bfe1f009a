"""Rows that go to each node once, and there to their experts.

Shape letters: T tokens of this rank, k experts of a token, H hidden; A tokens that this rank sends to nodes,
B rows that they become there; A' and B' those of other ranks that it passes on.

    home rank     [T, H] -> [A, H], a token once for each node          -- between nodes ->
    gateway       tokens -> rows, one for each expert on this node      -- within the node ->
    expert        rows by (expert, position)

`dispatch.py` has the same as integers for all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hpcpar.expert_parallel.dispatch import gateways
from hpcpar.expert_parallel.exchange import (
    POSITIONS,
    Assignment,
    Channels,
    Hop,
    Sums,
    Waiter,
    add_slots,
    inverse,
    keys,
    places_of_slots,
    times,
    weight_gradients,
)

if TYPE_CHECKING:
    from hpcpar.algorithms.topology import NodeMap


class TokensOfRows(NamedTuple):
    """Tokens on their way to one node, and the rows that they become there.

    of_row   [B] token of each row, ascending
    first    [A] first row of each token
    """

    of_row: Tensor
    first: Tensor

    @classmethod
    def where(cls, begins: Tensor) -> TokensOfRows:
        """Make a token begin at each row where `begins` [B] is true."""
        return cls(torch.cumsum(begins, 0) - 1, begins.nonzero().flatten())

    def table(self, width: int) -> Tensor:
        """Return the rows of each token [A, width], then B in place of those that it has not."""
        return table(self.of_row, len(self.first), width)


def table(groups: Tensor, count: int, width: int) -> Tensor:
    """Return the numbers of the elements of each group [count, width], in order; then their number.

    groups   [N] group of each element, ascending
    """
    places = torch.arange(len(groups), device=groups.device)
    sizes = torch.bincount(groups, minlength=count)
    within = places - (sizes.cumsum(0) - sizes).index_select(0, groups)
    found = groups.new_full((count, width), len(groups))
    found[groups, within] = places
    return found


@dataclass
class TwoStages:
    """Each token goes to the gateway of each node once, and from there to its experts.

    between         tokens among all ranks, A from here, A' to here
    rows_between    rows among all ranks, B from here, B' to here: outputs on their way home
    notes_between   a number or two for each of these rows
    within          rows among the ranks of this node, B' from here
    slots           [B] place in the flat [T, k] of each row of this rank, by (gateway, token, slot)
    shape           T, k
    own             tokens that these rows are of
    here            tokens that rows passed on are of, by (home rank, token, slot)
    onward          [B'] rows passed on, by rank of this node
    order           rows received from this node, by (expert, position)
    sums            outputs on one node come home as their sum; else each by itself
    """

    between: Hop
    rows_between: Hop
    notes_between: Hop
    within: Hop
    slots: Tensor
    shape: tuple[int, int]
    own: TokensOfRows
    here: TokensOfRows
    onward: Tensor
    order: Tensor
    counts: list[int]
    sums: bool

    def start_there(self, tokens: Tensor) -> Waiter[Tensor]:
        come = self._start_between(tokens)
        return lambda: self._to_experts(come(), None)

    def start_home(self, rows: Tensor, weights: Tensor | None) -> Waiter[Sums]:
        come = self.within.start_back(rows.index_select(0, inverse(self.order)))
        if self.sums:
            return lambda: self._home_in_sums(come(), weights)

        def wait() -> Sums:
            outputs = self.rows_between.start_back(self._regrouped(come()), padded=True)()
            return Sums(add_slots(outputs, self._home(), weights), outputs)

        return wait

    def start_gradients(
        self, gradient: Tensor, weights: Tensor, outputs: Tensor | None
    ) -> tuple[Waiter[Tensor], Tensor | None]:
        # Products with weights are made at the gateway, of the same two factors as they would be at home.
        come = self._start_between(gradient)
        weights_come = self._start_weights(weights)
        of_weights = None
        if outputs is not None and self.sums:  # outputs have stayed at the gateway
            tokens, here = come(), self._table_here()
            parts = weight_gradients(tokens, outputs, here, weights.dtype)
            flat = parts[here < len(self.here.of_row)].unsqueeze(1)
            own = self.notes_between.start_back(flat, padded=True)()
            of_weights = own.index_select(0, self._home().flatten()).view(self.shape)
            return lambda: self._to_experts(tokens, weights_come()), of_weights
        if outputs is not None:
            of_weights = weight_gradients(gradient, outputs, self._home(), weights.dtype)
        return lambda: self._to_experts(come(), weights_come()), of_weights

    def _start_between(self, tokens: Tensor) -> Waiter[Tensor]:
        of_rows = self.slots.index_select(0, self.own.first) // self.shape[1]
        return self.between.start(tokens.index_select(0, of_rows))

    def _start_weights(self, weights: Tensor) -> Waiter[Tensor]:
        """Send weights [T, k] to the gateways; wait for those of rows passed on [B', 1]."""
        return self.notes_between.start(weights.reshape(-1, 1).index_select(0, self.slots))

    def _to_experts(self, tokens: Tensor, weights: Tensor | None) -> Tensor:
        rows = tokens.index_select(0, self.here.of_row.index_select(0, self.onward))
        if weights is not None:
            rows = times(rows, weights.flatten().index_select(0, self.onward))
        return self.within.start(rows)().index_select(0, self.order)

    def _home_in_sums(self, outputs: Tensor, weights: Tensor | None) -> Sums:
        """Add the outputs of each token that this rank passes on, send the sums home, and add them there."""
        outputs = self._regrouped(outputs)
        outputs = torch.cat([outputs, outputs.new_zeros(1, outputs.shape[1])])
        here, of_rows = self._table_here(), None
        if weights is not None:
            flat = self._start_weights(weights)().flatten()
            of_rows = torch.cat([flat, flat.new_zeros(1)])[here]
        come = self.between.start_back(add_slots(outputs, here, of_rows), padded=True)()
        tokens = self.slots.index_select(0, self.own.first) // self.shape[1]
        by_token = torch.argsort(tokens, stable=True)
        most = int(torch.bincount(tokens).max()) if len(tokens) else 1
        places = table(tokens[by_token], self.shape[0], most)
        sums = torch.cat([by_token, by_token.new_full((1,), len(tokens))])[places]
        return Sums(add_slots(come, sums), outputs)

    def _regrouped(self, rows: Tensor) -> Tensor:
        """Return rows by (home rank, token, slot) that are by rank of the node."""
        return rows.index_select(0, inverse(self.onward))

    def _home(self) -> Tensor:
        return places_of_slots(self.slots, self.shape)

    def _table_here(self) -> Tensor:
        return self.here.table(self.shape[1])


class TwoStageDraft:
    """A route in two stages before ranks have told each other their counts.

    counts        [E] rows of this rank for each expert
    to_gateways   (tokens, rows) to each rank
    """

    def __init__(
        self, channels: Channels, node: Channels, nodes: NodeMap, to: Assignment, *, sums: bool
    ) -> None:
        self._channels, self._node, self._nodes, self._to, self._sums = channels, node, nodes, to, sums
        comm = channels.rows
        of_node = torch.tensor(gateways(nodes, comm.rank), device=to.experts.device)
        node_of = torch.tensor(nodes.node_of, device=to.experts.device)
        gateway = of_node[node_of[to.owners]]
        by_gateway = torch.argsort(gateway, stable=True)
        self._slots, gateway = to.slots[by_gateway], gateway[by_gateway]
        self._experts = to.experts[by_gateway]
        self._own = TokensOfRows.where(_changes(gateway, self._slots // to.shape[1]))
        tokens = torch.bincount(gateway[self._own.first], minlength=comm.size)
        rows = torch.bincount(gateway, minlength=comm.size)
        self.counts = to.counts
        self.to_gateways = list(zip(tokens.tolist(), rows.tolist(), strict=True))

    def route(self, of_ranks: list[list[int]]) -> TwoStages:
        """Make the route, given (tokens, rows, rows for each expert here) from each rank; collective."""
        (comm, notes), (node, node_notes), to = self._channels, self._node, self._to
        tokens, rows = ([pair[at] for pair in self.to_gateways] for at in (0, 1))
        between = Hop(comm, tokens, [numbers[0] for numbers in of_ranks])
        notes_between = Hop(notes, rows, [numbers[1] for numbers in of_ranks])
        of_rows = torch.stack([self._slots // to.shape[1], keys(self._experts, to.positions_of(self._slots))])
        token, key = notes_between.start(of_rows.T.contiguous())().unbind(1)
        source = torch.repeat_interleave(torch.tensor(notes_between.received)).to(token.device)
        here = TokensOfRows.where(_changes(source, token))
        local = torch.tensor([self._nodes.local_rank(owner) for owner in to.owner_of], device=token.device)
        receiver = local[key // POSITIONS]
        onward = torch.argsort(receiver, stable=True)
        sent = torch.bincount(receiver, minlength=node.size)
        received = node_notes.alltoall(sent.cpu(), out=torch.empty(node.size, dtype=torch.int64)).tolist()
        within = Hop(node, sent.tolist(), received)
        come = Hop(node_notes, within.sent, received).start(key[onward])()
        return TwoStages(
            between,
            replace(notes_between, comm=comm),
            notes_between,
            within,
            self._slots,
            to.shape,
            self._own,
            here,
            onward,
            torch.argsort(come, stable=True),
            [sum(counts) for counts in zip(*(numbers[2:] for numbers in of_ranks), strict=True)],
            self._sums,
        )


def _changes(*columns: Tensor) -> Tensor:
    """Return where an element of any column [N] differs from the one before; the first does."""
    found = torch.ones(len(columns[0]), dtype=torch.bool, device=columns[0].device)
    found[1:] = torch.stack([column[1:] != column[:-1] for column in columns]).any(0)
    return found
