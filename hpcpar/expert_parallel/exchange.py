"""Rows of tokens to their experts and home again, with gradients.

Shape letters: T tokens of this rank, k experts of a token, H hidden, S rows sent, R rows received.

    there    [T, H] -> [S, H] by (rank, expert, token)  -- all-to-all ->  [R, H]  -> by (expert, position)
    home     the same backwards, and the k outputs of a token added in the order of its slots

In backward gradients of outputs go there, multiplied by their weights, and gradients of rows come home.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

from hpcpar.autograd.own_functions import differentiated_once

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

MIXTURES = "a mixture of experts; do without it"
T = TypeVar("T")
Waiter = Callable[[], T]
"""Waits for what is under way, and returns it."""


class Route(Protocol):
    """The way of some tokens of this rank to their experts, and of others' tokens to the experts here.

    counts      rows for each expert of this rank
    """

    counts: list[int]

    def start_there(self, tokens: Tensor) -> Waiter[Tensor]:
        """Send tokens [T, H] to their experts; wait for rows [R, H] by (expert, position)."""
        ...

    def start_home(self, rows: Tensor, weights: Tensor | None) -> Waiter[Sums]:
        """Send rows [R, H] home; wait for the sums over slots [T, H], each times its weight [T, k]."""
        ...

    def start_gradients(
        self, gradient: Tensor, weights: Tensor, outputs: Tensor | None
    ) -> tuple[Waiter[Tensor], Tensor | None]:
        """Send the gradient [T, H] of sums there; wait for that of rows [R, H].

        outputs   of `start_home`; None: no gradient of weights is wanted
        result    the waiter, and the gradient of weights [T, k]
        """
        ...


class Sums(NamedTuple):
    """Sums over slots [T, H], and the outputs that were added, for the gradient of weights."""

    total: Tensor
    outputs: Tensor


@dataclass(frozen=True)
class Hop:
    """One all-to-all of rows.

    sent, received   rows to each rank and from each
    """

    comm: Communicator
    sent: Sequence[int]
    received: Sequence[int]

    def start(self, rows: Tensor) -> Waiter[Tensor]:
        """Send rows [S, ...], sorted by receiver; wait for [R, ...], sorted by sender."""
        return _start(self.comm, rows, self.sent, self.received)

    def start_back(self, rows: Tensor, *, padded: bool = False) -> Waiter[Tensor]:
        """Send rows [R, ...] back; wait for [S, ...].

        padded   one more row, of zeros, follows
        """
        return _start(self.comm, rows, self.received, self.sent, padded)


def _start(
    comm: Communicator, rows: Tensor, sent: Sequence[int], received: Sequence[int], padded: bool = False
) -> Waiter[Tensor]:
    if comm.size == 1:
        kept = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])]) if padded else rows
        return lambda: kept
    width, count = rows.shape[1:].numel(), sum(received)
    out = rows.new_empty(count + padded, *rows.shape[1:])
    out[count:].zero_()
    # All messages at once: rounds would each have to be driven, which nobody does while experts compute.
    handle = comm.start_alltoall(
        rows.contiguous(),
        out=out[:count],
        send_counts=[number * width for number in sent],
        receive_counts=[number * width for number in received],
        algorithm="direct",
    )

    def wait() -> Tensor:
        handle.wait()
        return out

    return wait


def inverse(permutation: Tensor) -> Tensor:
    """Return the permutation that undoes another."""
    undone = torch.empty_like(permutation)
    undone[permutation] = torch.arange(len(permutation), device=permutation.device)
    return undone


def add_slots(rows: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """Add rows [R, H] at places [N, k], times weights [N, k], one slot after the other: [N, H].

    Products and sums are in float32 or wider, and rounded once.
    """
    wide = torch.promote_types(rows.dtype, torch.float32 if weights is None else weights.dtype)
    total: Tensor | None = None
    for slot in range(places.shape[1]):
        part = rows.index_select(0, places[:, slot]).to(wide)
        if weights is not None:
            part *= weights[:, slot, None]
        total = part if total is None else total.add_(part)
    return rows.new_zeros(len(places), *rows.shape[1:]) if total is None else total.to(rows.dtype)


def times(rows: Tensor, weights: Tensor) -> Tensor:
    """Return rows [R, H] times weights [R], rounded once to the type of the rows; may write to `rows`."""
    wide = torch.promote_types(rows.dtype, weights.dtype)
    return rows.to(wide).mul_(weights.unsqueeze(1)).to(rows.dtype)


def weight_gradients(gradient: Tensor, outputs: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient [N, k] of the weights of outputs [S, H] at places [N, k]."""
    wide = torch.promote_types(outputs.dtype, dtype)
    gradient = gradient.to(wide)
    found = gradient.new_empty(places.shape)
    for slot in range(places.shape[1]):
        part = outputs.index_select(0, places[:, slot]).to(wide)
        found[:, slot] = part.mul_(gradient).sum(-1)
    return found.to(dtype)


@dataclass
class OneStage:
    """Each row goes to its expert's rank, once for each expert of a token.

    hop      between all ranks
    slots    [S] place in the flat [T, k] of each row sent, by (rank, expert, token)
    tokens   [S] token of each row sent
    home     [T, k] row of each slot among those sent; S for one that is dropped
    order    [R] rows received, by (expert, position), and how to undo it; None: they come so
    """

    hop: Hop
    slots: Tensor
    tokens: Tensor
    home: Tensor
    order: tuple[Tensor, Tensor] | None
    counts: list[int]

    def start_there(self, tokens: Tensor) -> Waiter[Tensor]:
        return self._sorted(self.hop.start(tokens.index_select(0, self.tokens)))

    def start_home(self, rows: Tensor, weights: Tensor | None) -> Waiter[Sums]:
        if self.order is not None:
            rows = rows.index_select(0, self.order[1])
        come = self.hop.start_back(rows, padded=self._drops)

        def wait() -> Sums:
            outputs = come()
            return Sums(add_slots(outputs, self.home, weights), outputs)

        return wait

    def start_gradients(
        self, gradient: Tensor, weights: Tensor, outputs: Tensor | None
    ) -> tuple[Waiter[Tensor], Tensor | None]:
        rows = times(gradient.index_select(0, self.tokens), weights.reshape(-1).index_select(0, self.slots))
        come = self._sorted(self.hop.start(rows))
        of_weights = None
        if outputs is not None:
            of_weights = weight_gradients(gradient, outputs, self.home, weights.dtype)
        return come, of_weights

    @property
    def _drops(self) -> bool:
        return len(self.slots) < self.home.numel()

    def _sorted(self, come: Waiter[Tensor]) -> Waiter[Tensor]:
        order = self.order
        return come if order is None else lambda: come().index_select(0, order[0])


class Channels(NamedTuple):
    """Two faces of one communicator, without agreement on each call: what they send is agreed on before.

    rows    counts as all-to-all
    notes   counts as dispatch: counts, positions, weights on their way to gateways
    """

    rows: Communicator
    notes: Communicator

    @classmethod
    def of(cls, comm: Communicator) -> Channels:
        return cls(comm.unchecked("alltoall"), comm.unchecked("dispatch"))


class Assignment:
    """Experts of some tokens of this rank, without slots that are dropped.

    experts     [S] of each slot that is kept, by (token, slot)
    slots       [S] its place in the flat [T, k]
    owner_of    rank of each expert
    positions   [T] global place of each token; None: the ranks' tokens follow each other
    """

    def __init__(
        self,
        experts: Tensor,
        owner_of: Sequence[int],
        rank: int,
        kept: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> None:
        self.shape = (experts.shape[0], experts.shape[1])
        self.owner_of, self.positions, self._rank = owner_of, positions, rank
        flat = experts.detach().reshape(-1)
        self.slots = torch.arange(len(flat), device=flat.device)
        if kept is not None:
            self.slots = kept.reshape(-1).nonzero().flatten()
        self.experts = flat if kept is None else flat.index_select(0, self.slots)
        self.counts: list[int] = torch.bincount(self.experts, minlength=len(owner_of)).tolist()

    @property
    def owners(self) -> Tensor:
        """Rank of each slot's expert [S]."""
        return torch.tensor(self.owner_of, device=self.experts.device)[self.experts]

    def positions_of(self, slots: Tensor) -> Tensor:
        """Return the positions of the tokens of some slots."""
        tokens = slots // self.shape[1]
        if self.positions is None:
            return tokens + self._rank * RANK_STRIDE
        return self.positions.index_select(0, tokens)


EXPERTS, POSITIONS, RANK_STRIDE = 2**15, 2**48, 2**32
"""Numbers of experts and positions are below the first two, so that both fit into one int64. Where no
positions are given, those of a rank begin at a multiple of the third."""


def keys(experts: Tensor, positions: Tensor) -> Tensor:
    """Return numbers by which rows are sorted by (expert, position)."""
    return experts * POSITIONS + positions


def places_of_slots(slots: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return the row of each slot [T, k], given the slot of each row [S]; S for a slot without one."""
    home = slots.new_full((shape[0] * shape[1],), len(slots))
    home[slots] = torch.arange(len(slots), device=slots.device)
    return home.view(shape)


class OneStageDraft:
    """A route in one stage before ranks have told each other their counts.

    counts        [E] rows of this rank for each expert
    to_gateways   (tokens, rows) to each rank: none
    """

    def __init__(self, channels: Channels, to: Assignment) -> None:
        self._channels, self._to = channels, to
        self.counts, self.to_gateways = to.counts, [(0, 0)] * channels.rows.size
        self._by_expert = torch.argsort(to.experts, stable=True)

    def route(self, of_ranks: list[list[int]]) -> OneStage:
        """Make the route, given (0, 0, rows for each expert here) from each rank; collective."""
        to, size = self._to, self._channels.rows.size
        by_expert = [numbers[2:] for numbers in of_ranks]
        sent = [0] * size
        for rank, count in zip(to.owner_of, to.counts, strict=True):
            sent[rank] += count
        received, slots = [sum(counts) for counts in by_expert], to.slots[self._by_expert]
        order = None
        if to.positions is not None:
            own = keys(to.experts[self._by_expert], to.positions_of(slots))
            come = Hop(self._channels.notes, sent, received).start(own)()
            order = torch.argsort(come, stable=True)
        elif size > 1 and len(by_expert[0]) > 1:
            numbers = torch.tensor(by_expert)
            experts = torch.arange(numbers.shape[1]).expand_as(numbers).flatten()
            order = torch.argsort(torch.repeat_interleave(experts, numbers.flatten()), stable=True)
            order = order.to(slots.device)
        return OneStage(
            Hop(self._channels.rows, sent, received),
            slots,
            slots // to.shape[1],
            places_of_slots(slots, to.shape),
            None if order is None else (order, inverse(order)),
            [sum(counts) for counts in zip(*by_expert, strict=True)],
        )


@dataclass
class Trip:
    """A route in use, in forward and in backward."""

    route: Route
    under_way: Waiter[Any] | None = field(default=None, repr=False)

    def wait(self) -> Any:
        """Wait for what was started last."""
        assert self.under_way is not None, "something was started"
        come, self.under_way = self.under_way, None
        return come()


# Start and end of an exchange are operations of their own, so that what is computed between them overlaps
# with it, in backward, too. They are joined by tensors without elements, so that every rank's backward comes
# through all of them: also that of a rank without experts, whose outputs do not depend on its rows.


class Depart(Function):
    """Start to send tokens [T, H]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        trip.under_way = trip.route.start_there(hidden)
        return hidden.new_empty(0)

    @staticmethod
    @differentiated_once(MIXTURES)
    def backward(ctx: Any, _: Tensor) -> Any:
        return ctx.trip.wait().total, None


class Arrive(Function):
    """Wait for the rows [R, H] of this rank's experts."""

    @staticmethod
    def forward(ctx: Any, joint: Tensor, trip: Trip) -> Any:
        ctx.trip = trip
        return trip.wait(), joint.new_empty(0)

    @staticmethod
    @differentiated_once(MIXTURES)
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Any:
        ctx.trip.under_way = ctx.trip.route.start_home(gradient, None)
        return gradient.new_zeros(0), None


class Leave(Function):
    """Start to send the experts' outputs [R, H] home."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, joint: Tensor, trip: Trip, weights: Tensor) -> Tensor:
        ctx.trip = trip
        trip.under_way = trip.route.start_home(outputs, weights)
        return outputs.new_empty(0)

    @staticmethod
    @differentiated_once(MIXTURES)
    def backward(ctx: Any, joint: Tensor) -> Any:
        return ctx.trip.wait(), joint.new_zeros(0), None, None


class Home(Function):
    """Wait for the outputs of this rank's tokens, and add them by their weights [T, k]: [T, H]."""

    @staticmethod
    def forward(ctx: Any, joint: Tensor, weights: Tensor, trip: Trip) -> Tensor:
        ctx.trip, ctx.has_outputs = trip, ctx.needs_input_grad[1]
        total, outputs = trip.wait()
        # The weights are saved in any case: a recomputation that stops when it has what was saved stops here.
        ctx.save_for_backward(weights, *([outputs] if ctx.has_outputs else []))
        return total  # type: ignore[no-any-return]

    @staticmethod
    @differentiated_once(MIXTURES)
    def backward(ctx: Any, gradient: Tensor) -> Any:
        weights, *outputs = ctx.saved_tensors
        ctx.trip.under_way, of_weights = ctx.trip.route.start_gradients(
            gradient, weights, outputs[0] if outputs else None
        )
        return gradient.new_zeros(0), of_weights, None
