"""A plan of context parallelism: which tokens each rank holds, what it computes, what travels. Integers only.

A rank holds spans of the sequence, in ascending order; its tokens are numbered 0, 1, … in that order. For
each owner of keys, a rank has tasks: its queries from one number to another attend to that owner's keys from
one number to another.

    causal, 8 tokens on 2 ranks (zigzag)      rank 0: 0 1 6 7       rank 1: 2 3 4 5

    rank 0   own keys       queries 0:4 × keys 0:4   causal
             rank 1's keys  queries 2:4 × keys 0:4   full        <- all that rank 1 has
    rank 1   own keys       queries 0:4 × keys 0:4   causal
             rank 0's keys  queries 0:4 × keys 0:2   full        <- the half that it needs
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from hpcpar.context_parallel.mask import Mask, Span
from hpcpar.errors import LayoutError
from hpcpar.partition import bounds, offsets

Kind = Literal["full", "causal", "band"]

Spans = tuple[Span, ...]

NEAR_BALANCE = 1.05
"""A split whose busiest rank has up to this much more to do than in the best one is taken for fewer bytes."""

SMALLEST_BAND = 128
"""Fewest queries of a task that are cut off because others see other keys."""


class BlockTask(NamedTuple):
    """Attention of some queries to some keys of one owner, by the numbers of tokens on their ranks.

    kind   full: every pair; causal: query i sees the first i + 1 keys; band: what the mask says of positions
    """

    queries: Span
    keys: Span
    kind: Kind


class Move(NamedTuple):
    """A message: keys and values of an owner's tokens, or the gradients of them on their way to the owner.

    step     a rank sends what it has received in the step before
    tokens   numbers of the owner's tokens
    """

    step: int
    sender: int
    receiver: int
    owner: int
    tokens: Spans

    @property
    def length(self) -> int:
        return sum(span.length for span in self.tokens)


@dataclass(frozen=True)
class ContextPlan:
    """Tokens of each rank, and from them the tasks and messages.

    shares   each rank's positions: ascending spans, which together are the sequence
    """

    mask: Mask
    shares: tuple[Spans, ...]

    @property
    def size(self) -> int:
        return len(self.shares)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of tokens that each rank holds."""
        return tuple(sum(span.length for span in share) for share in self.shares)

    @cached_property
    def tasks(self) -> tuple[tuple[tuple[BlockTask, ...], ...], ...]:
        """tasks[rank][owner] of all ranks."""
        return tuple(tuple(tasks_of(self.mask, own, keys) for keys in self.shares) for own in self.shares)

    def needed(self, rank: int, owner: int) -> Spans:
        """Return the numbers of the owner's tokens whose keys a rank needs."""
        return _joined(task.keys for task in self.tasks[rank][owner])

    @cached_property
    def areas(self) -> tuple[int, ...]:
        """Pairs that each rank computes."""
        return tuple(self.mask.area(share) for share in self.shares)


def tasks_of(mask: Mask, queries: Spans, keys: Spans) -> tuple[BlockTask, ...]:
    """Return the tasks between queries at some positions and keys at others; at most one for each query.

    Queries that see the same keys share a task, and so do the queries and keys of a whole causal square.
    """
    of_keys = _by_document(mask, keys)
    tasks: list[BlockTask] = []
    for document, (first, own) in _by_document(mask, queries).items():
        if document not in of_keys:
            continue
        offset, theirs = of_keys[document]
        count = sum(part.length for part in own)
        if mask.causal and own == theirs and (mask.window is None or mask.window >= document.length):
            tasks.append(BlockTask(Span(first, first + count), Span(offset, offset + count), "causal"))
        else:
            tasks += _rectangles(mask, first, own, offset, theirs)
    return tuple(tasks)


def _rectangles(mask: Mask, first: int, own: Spans, offset: int, theirs: Spans) -> Iterator[BlockTask]:
    """Yield the tasks of one document's queries and keys, whose first ones have the numbers given."""
    last: BlockTask | None = None
    for part in own:
        cuts = {part.start, part.stop}
        if mask.window is not None or theirs == own:
            cuts |= set(range(part.start, part.stop, max(SMALLEST_BAND, mask.window or 0)))
        for start, stop in pairwise(sorted(cuts)):
            queries = Span(first, first + stop - start)
            first = queries.stop
            low, high = _numbers(theirs, mask.keys(start)), _numbers(theirs, mask.keys(stop - 1))
            keys = Span(offset + low.start, offset + high.stop)
            if not keys.length:
                continue
            task = BlockTask(queries, keys, "full" if low == high else "band")
            same = last and task.kind == last.kind == "full" and task.keys == last.keys
            if last and same and last.queries.stop == task.queries.start:
                last = BlockTask(Span(last.queries.start, task.queries.stop), keys, "full")
                continue
            if last:
                yield last
            last = task
    if last:
        yield last


def _by_document(mask: Mask, spans: Spans) -> dict[Span, tuple[int, Spans]]:
    """Return, for each document, the number of its first token among these spans, and its parts of them."""
    found: dict[Span, tuple[int, Spans]] = {}
    number = 0
    for document, part in mask.parts(spans):
        first, parts = found.get(document, (number, ()))
        found[document] = first, (*parts, part)
        number += part.length
    return found


def _numbers(spans: Spans, positions: Span) -> Span:
    """Return the numbers, among the tokens of these spans, of those at some positions."""
    before = sum(span.within(Span(0, positions.start)).length for span in spans)
    return Span(before, before + sum(span.within(positions).length for span in spans))


def _joined(spans: Iterable[Span]) -> Spans:
    """Return the union of spans, as few as can be."""
    union: list[Span] = []
    for span in sorted(spans):
        if union and span.start <= union[-1].stop:
            union[-1] = Span(union[-1].start, max(union[-1].stop, span.stop))
        else:
            union.append(span)
    return tuple(union)


# --- who holds what -------------------------------------------------------------------------------


def dealt(mask: Mask, size: int, chunks: int, multiple: int = 1) -> tuple[Spans, ...]:
    """Cut the sequence into chunks, so many for each rank, and deal them out by area, largest first.

    multiple   of which each chunk's tokens are a multiple, if those of the sequence are

    Each round goes through the ranks the other way: with two chunks of a causal mask a rank that has the
    largest one gets the smallest one (zigzag: Brandon et al. 2023, arXiv 2311.09431, balance it likewise).
    """
    units = bounds(mask.length // multiple, size * chunks)
    pieces = [Span(start * multiple, stop * multiple) for start, stop in units]
    if chunks > 1:
        pieces.sort(key=lambda piece: (-mask.area((piece,)), -piece.start))
    shares: list[list[Span]] = [[] for _ in range(size)]
    for number, piece in enumerate(pieces):
        turn, place = divmod(number, size)
        shares[place if turn % 2 == 0 else size - 1 - place].append(piece)
    return tuple(_joined(piece for piece in share if piece.length) for share in shares)


def by_area(mask: Mask, size: int, multiple: int = 1) -> tuple[Spans, ...]:
    """Cut the sequence into one piece for each rank, of equal areas: short documents stay together."""
    stops = range(0, mask.length, multiple)
    areas = [mask.area((Span(0, mask.length),)) * rank / size for rank in range(size)]
    edges = [bisect_left(stops, area, key=lambda stop: mask.area((Span(0, stop),))) for area in areas]
    edges = [edge * multiple for edge in edges]
    return tuple(
        _joined([Span(*pair)] if pair[0] < pair[1] else []) for pair in pairwise((*edges, mask.length))
    )


def balanced(mask: Mask, size: int, *, multiple: int = 1, even: bool = False) -> ContextPlan:
    """Choose the split in which the fewest keys travel, of those that are about as balanced as the best.

    Work is counted in pairs of the mask, since documents and windows of one length cost different amounts;
    tokens are balanced, too, since all else takes time and memory by them.

    multiple   of which each rank's tokens are a multiple
    even       each rank has as many tokens for every mask of this length
    errors     LayoutError for a sequence that is not
    """
    if mask.length % multiple:
        below = mask.length // multiple * multiple
        raise LayoutError(
            f"a sequence of {mask.length} tokens, of which each rank is to have a multiple of "
            f"{multiple}, for the tp ranks that share them by sequence parallelism; make it {below} or "
            f"{below + multiple}"
        )
    shares = [dealt(mask, size, chunks, multiple) for chunks in (1, 2, 4, 8)]
    plans = [ContextPlan(mask, share) for share in dict.fromkeys([*shares, by_area(mask, size, multiple)])]
    if even:
        plans = [plan for plan in plans if plan.counts == plans[0].counts]
    uneven = [max(_unevenness(plan.areas), _unevenness(plan.counts)) for plan in plans]
    near = [plan for plan, by in zip(plans, uneven, strict=True) if by <= NEAR_BALANCE * min(uneven)]
    return min(near, key=_traffic)


def _traffic(plan: ContextPlan) -> int:
    return sum(move.length for move in exchange_moves(plan))


def _unevenness(loads: Sequence[int]) -> float:
    return max(loads) * len(loads) / max(1, sum(loads))


def positions_of(spans: Spans) -> list[int]:
    """Return the positions of a rank's tokens, in their order."""
    return [position for span in spans for position in range(span.start, span.stop)]


def part_of(spans: Spans, numbers: Span) -> Spans:
    """Return the positions of the tokens with these numbers."""
    edges = offsets([span.length for span in spans])
    cut = (
        Span(span.start + max(0, numbers.start - first), span.start + min(span.length, numbers.stop - first))
        for span, first in zip(spans, edges, strict=False)
    )
    return tuple(span for span in cut if span.length > 0)


# --- what travels ---------------------------------------------------------------------------------


def moves_of(plan: ContextPlan, method: str) -> tuple[tuple[Move, ...], tuple[Move, ...]]:
    """Return the messages of keys, and of their gradients on the way home."""
    if method.endswith("exchange"):
        return exchange_moves(plan), exchange_returns(plan)
    return ring_moves(plan), ring_returns(plan)


def exchange_moves(plan: ContextPlan) -> tuple[Move, ...]:
    """Send each rank exactly the keys that it needs, from their owner. Gradients go back the same way."""
    return tuple(
        Move(0, owner, rank, owner, needed)
        for rank in range(plan.size)
        for owner in range(plan.size)
        if owner != rank and (needed := plan.needed(rank, owner))
    )


def exchange_returns(plan: ContextPlan) -> tuple[Move, ...]:
    """Send the gradients of keys home from each rank that had them."""
    return tuple(
        Move(0, move.receiver, move.sender, move.owner, move.tokens) for move in exchange_moves(plan)
    )


def ring_moves(plan: ContextPlan) -> tuple[Move, ...]:
    """Pass every rank's keys around the ring: in step s rank r sends those of rank r - s to rank r + 1.

    source   Liu et al. 2023, Ring Attention, arXiv 2310.01889
    """
    return _around(plan, first_owner=0)


def ring_returns(plan: ContextPlan) -> tuple[Move, ...]:
    """Pass the gradients on behind their keys, each rank adding its own, and home in the last step.

    The owner adds its own share at home, so the first sender is its neighbour: size - 1 messages, not size.
    """
    return _around(plan, first_owner=-1)


def _around(plan: ContextPlan, *, first_owner: int) -> tuple[Move, ...]:
    """Pass what each rank owns around the ring: in step 0 rank r sends that of rank r + first_owner."""
    size = plan.size
    return tuple(
        Move(step, rank, (rank + 1) % size, owner, _whole(plan, owner))
        for step in range(size - 1)
        for rank in range(size)
        for owner in [(rank + first_owner - step) % size]
    )


def _whole(plan: ContextPlan, owner: int) -> Spans:
    return _joined([Span(0, plan.counts[owner])])


# --- proof ----------------------------------------------------------------------------------------


def prove(plan: ContextPlan, moves: Sequence[Move], returns: Sequence[Move]) -> None:
    """Prove that every pair of the mask is computed once, of keys that are there, and gradients get home.

    errors   LayoutError that names the first rank and query, or message, that is wrong
    """
    _prove_shares(plan)
    for rank in range(plan.size):
        _prove_pairs(plan, rank)
    _prove_keys_come(plan, moves)
    _prove_gradients_go_home(plan, moves, returns)


def _prove_shares(plan: ContextPlan) -> None:
    held = sorted(span for share in plan.shares for span in share)
    if offsets([span.length for span in held])[:-1] != tuple(span.start for span in held):
        raise LayoutError(f"the ranks' spans {plan.shares} are not the sequence 0:{plan.mask.length}")
    if sum(plan.counts) != plan.mask.length:
        raise LayoutError(f"the ranks' spans {plan.shares} are not all of {plan.mask.length} tokens")
    for rank, share in enumerate(plan.shares):
        if list(share) != sorted(share):
            raise LayoutError(f"rank {rank} holds {share}: positions must ascend")


def _prove_pairs(plan: ContextPlan, rank: int) -> None:
    """Check query by query that the keys of all tasks are those of the mask, each once."""
    of_query: list[list[Span]] = [[] for _ in range(plan.counts[rank])]
    positions = positions_of(plan.shares[rank])
    for owner, tasks in enumerate(plan.tasks[rank]):
        for queries, keys, kind in tasks:
            for number in range(*queries):
                last = keys.start + number - queries.start + 1 if kind == "causal" else keys.stop
                seen = part_of(plan.shares[owner], Span(keys.start, last))
                if kind == "band":
                    allowed = plan.mask.keys(positions[number])
                    seen = tuple(part for span in seen if (part := span.within(allowed)).length)
                of_query[number] += seen
    for position, seen_spans in zip(positions, of_query, strict=True):
        wanted = plan.mask.keys(position)
        if sum(span.length for span in seen_spans) != wanted.length or _joined(seen_spans) != (wanted,):
            raise LayoutError(
                f"rank {rank}: the query at {position} sees keys {sorted(seen_spans)}, not {wanted} once"
            )


def _prove_keys_come(plan: ContextPlan, moves: Sequence[Move]) -> None:
    """Check that senders have what they send, and that every rank gets the keys of its tasks."""
    held = {(rank, rank): (-1, _whole(plan, rank)) for rank in range(plan.size)}
    for move in sorted(moves):
        step, tokens = held.get((move.sender, move.owner), (move.step, ()))
        if step >= move.step or not _covers(tokens, move.tokens):
            raise LayoutError(f"{move}: the sender does not have these tokens' keys by then")
        if (move.receiver, move.owner) in held:
            raise LayoutError(f"{move}: the receiver has them already")
        held[move.receiver, move.owner] = move.step, move.tokens
    for rank in range(plan.size):
        for owner in range(plan.size):
            needed, (_, tokens) = plan.needed(rank, owner), held.get((rank, owner), (0, ()))
            if not _covers(tokens, needed):
                raise LayoutError(f"rank {rank} needs keys {needed} of rank {owner}, and gets {tokens}")


def _prove_gradients_go_home(plan: ContextPlan, moves: Sequence[Move], returns: Sequence[Move]) -> None:
    """Follow each contribution: every rank that had an owner's keys must reach the owner, and only once."""
    onward = {(move.sender, move.owner): move for move in returns}
    if len(onward) != len(returns):
        raise LayoutError("a rank sends the gradients of one owner's keys twice")
    for move in moves:
        rank, step = move.receiver, -1
        while rank != move.owner:
            back = onward.get((rank, move.owner))
            if back is None or back.step <= step or not _covers(back.tokens, move.tokens):
                raise LayoutError(
                    f"the gradients of {move} stop at rank {rank}, on their way to {move.owner}"
                )
            rank, step = back.receiver, back.step


def _covers(tokens: Spans, needed: Spans) -> bool:
    return _joined((*tokens, *needed)) == _joined(tokens)
