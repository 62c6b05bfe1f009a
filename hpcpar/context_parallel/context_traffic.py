"""Values that each rank sends to each other for a layer's attention, by method. Integers only.

Rank r of c is number r % inner of those that exchange heads, and number r // inner of those that exchange
keys: the plan is of the latter. An all-gather and a reduce-scatter are counted as those around a ring, which
send as many values as any that send nothing twice.

    sent[0][1]    values that rank 0 sends to rank 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hpcpar.context_parallel.context_plan import ContextPlan, Move, moves_of
from hpcpar.context_parallel.head_exchange import heads_of_ranks, heads_used
from hpcpar.partition import counts

Sent = tuple[tuple[int, ...], ...]


class HeadSizes(NamedTuple):
    """Heads of queries, of keys and values, and the size of each."""

    queries: int
    keys: int
    size: int


class ContextTraffic(NamedTuple):
    """Values from each rank to each other, in forward and in backward, for one sequence."""

    forward: Sent
    backward: Sent

    @property
    def of_ranks(self) -> tuple[int, ...]:
        """Values that each rank sends in forward and backward."""
        return tuple(sum(there) + sum(back) for there, back in zip(*self, strict=True))


class Totals(NamedTuple):
    """Values that the ranks of one communicator send together in a layer's forward, for one sequence.

    there      queries, keys and values on the way to the ranks of their heads; home: outputs on the way back
    keys       keys and values; gradients: of these, on the way home in backward
    """

    there: int
    home: int
    keys: int
    gradients: int


class _Values:
    """Values of one message each, of one sequence in one layer."""

    def __init__(
        self, plan: ContextPlan, method: str, heads: HeadSizes, inner: int, multiple: int = 1
    ) -> None:
        of_queries, self._of_keys = heads_of_ranks(inner, heads.queries, heads.keys)
        self._of_queries, self._heads, self._inner = of_queries, heads, inner
        served = heads.queries // heads.keys
        self._used = [len(heads_used(*own, served)) for own in zip(of_queries, self._of_keys, strict=True)]
        self._tokens = [
            count * multiple for whole in plan.counts for count in counts(whole // multiple, inner)
        ]
        self.size = plan.size * inner
        self.moves, self.returns = moves_of(plan, method)

    def keys(self, messages: Sequence[Move], sender: int, receiver: int) -> int:
        """Keys and values, or their gradients."""
        inner = self._inner
        if sender % inner != receiver % inner:
            return 0
        pair = sender // inner, receiver // inner
        length = sum(move.length for move in messages if (move.sender, move.receiver) == pair)
        return 2 * length * self._used[sender % inner] * self._heads.size

    def exchanged(self, holder: int, owner: int, keys_and_values: int) -> int:
        """Values of the holder's tokens in the owner's heads: of queries, and so many of its keys'."""
        inner = self._inner
        if holder == owner or holder // inner != owner // inner:
            return 0
        own = owner % inner
        count = self._of_queries[own].length + keys_and_values * self._of_keys[own].length
        return count * self._tokens[holder] * self._heads.size


def traffic(
    plan: ContextPlan, method: str, heads: HeadSizes, *, inner: int = 1, keep: bool = False
) -> ContextTraffic:
    """Count the values that travel for a sequence's attention, forward and backward.

    inner   ranks that exchange heads: all of them for "ulysses"
    keep    other ranks' keys are kept for backward, and not fetched again
    errors  LayoutError for heads that do not divide among `inner` ranks
    """
    of = _Values(plan, method, heads, inner)

    # Queries, keys and values leave their holder, the output comes back to it; backward is the mirror image.
    def forward(sender: int, receiver: int) -> int:
        there, back = of.exchanged(sender, receiver, 2), of.exchanged(receiver, sender, 0)
        return there + back + of.keys(of.moves, sender, receiver)

    def backward(sender: int, receiver: int) -> int:
        there, back = of.exchanged(sender, receiver, 0), of.exchanged(receiver, sender, 2)
        again = 0 if keep else of.keys(of.moves, sender, receiver)
        return there + back + again + of.keys(of.returns, sender, receiver)

    return ContextTraffic(_matrix(of.size, forward), _matrix(of.size, backward))


def totals(
    plan: ContextPlan, method: str, heads: HeadSizes, rank: int, *, inner: int = 1, multiple: int = 1
) -> Totals:
    """Count what travels on the communicators of `rank`: of heads, and of keys.

    multiple   each rank's tokens are a multiple of this
    """
    of = _Values(plan, method, heads, inner, multiple)
    own = range(rank // inner * inner, (rank // inner + 1) * inner)
    across = range(rank % inner, of.size, inner)
    return Totals(
        sum(of.exchanged(one, other, 2) for one in own for other in own),
        sum(of.exchanged(one, other, 0) for one in own for other in own),
        sum(of.keys(of.moves, one, other) for one in across for other in across),
        sum(of.keys(of.returns, one, other) for one in across for other in across),
    )


def _matrix(size: int, sent: Callable[[int, int], int]) -> Sent:
    return tuple(tuple(sent(sender, receiver) for receiver in range(size)) for sender in range(size))
