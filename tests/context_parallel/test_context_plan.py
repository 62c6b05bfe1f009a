"""Plans: who holds, computes and sends what, proved for many masks; and the proof finds what is wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from hpcpar.context_parallel.context_plan import (
    BlockTask,
    ContextPlan,
    balanced,
    by_area,
    dealt,
    exchange_moves,
    exchange_returns,
    prove,
    ring_moves,
    ring_returns,
)
from hpcpar.context_parallel.mask import Mask, Span
from hpcpar.errors import LayoutError


def documents(length: int, mean: int, seed: int = 0) -> tuple[int, ...]:
    generator, found = random.Random(seed), []
    while length:
        found.append(min(length, generator.randint(1, 2 * mean)))
        length -= found[-1]
    return tuple(found)


def masks(length: int) -> Iterator[Mask]:
    for causal in (True, False):
        for window in (None, 1, 5, 40):
            yield Mask(length, causal, window)
            yield Mask(length, causal, window, documents(length, 20))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("length", [0, 1, 3, 7, 64, 97])
def test_every_pair_is_computed_once_of_keys_that_come_and_gradients_get_home(size: int, length: int) -> None:
    for mask in masks(length):
        for shares in (dealt(mask, size, 1), dealt(mask, size, 2), by_area(mask, size)):
            plan = ContextPlan(mask, shares)
            prove(plan, exchange_moves(plan), exchange_returns(plan))
            prove(plan, ring_moves(plan), ring_returns(plan))


def test_a_causal_sequence_is_dealt_as_a_zigzag() -> None:
    plan = balanced(Mask(8), 2)
    assert plan.shares == ((Span(0, 2), Span(6, 8)), (Span(2, 6),))
    assert plan.tasks[0] == (
        (BlockTask(Span(0, 4), Span(0, 4), "causal"),),
        (BlockTask(Span(2, 4), Span(0, 4), "full"),),
    )
    assert plan.tasks[1] == (
        (BlockTask(Span(0, 4), Span(0, 2), "full"),),
        (BlockTask(Span(0, 4), Span(0, 4), "causal"),),
    )


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_exchange_sends_three_quarters_of_the_ring_and_as_much_there_and_back_on_each_rank(size: int) -> None:
    plan = balanced(Mask(64 * size), size)
    there = [sum(m.length for m in exchange_moves(plan) if m.sender == rank) for rank in range(size)]
    back = [sum(m.length for m in exchange_returns(plan) if m.sender == rank) for rank in range(size)]
    assert [one + other for one, other in zip(there, back, strict=True)] == [3 * (size - 1) * 32] * size
    assert sum(move.length for move in ring_moves(plan)) == size * (size - 1) * 64
    assert sum(there) == sum(move.length for move in ring_moves(plan)) * 3 // 4


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_work_is_balanced_by_pairs_and_tokens(size: int) -> None:
    causal, full, window = (
        balanced(mask, size) for mask in (Mask(960), Mask(960, False), Mask(960, window=50))
    )
    for plan in (causal, full, window):
        assert max(plan.areas) <= 1.05 * sum(plan.areas) / size
        assert max(plan.counts) <= 1.05 * 960 / size
    packed = balanced(Mask(8192, documents=documents(8192, 500)), size)
    contiguous = ContextPlan(packed.mask, dealt(packed.mask, size, 1))
    assert max(packed.areas) <= max(contiguous.areas)
    assert max(packed.areas) <= 1.15 * sum(packed.areas) / size


def test_a_window_sends_the_keys_of_neighbours_alone() -> None:
    plan = balanced(Mask(131072, window=4096), 8)
    assert {(move.sender, move.receiver) for move in exchange_moves(plan)} == {(r, r + 1) for r in range(7)}
    assert {move.length for move in exchange_moves(plan)} == {4095}


def test_each_rank_has_as_many_tokens_for_every_mask_where_that_is_asked_for() -> None:
    counts = {
        balanced(Mask(130, documents=documents(130, 9, seed)), 4, even=True).counts for seed in range(9)
    }
    assert counts == {balanced(Mask(130), 4, even=True).counts}


def test_tokens_are_multiples_where_that_is_asked_for_or_refused() -> None:
    for mask in (Mask(72), Mask(72, documents=documents(72, 9))):
        assert all(count % 6 == 0 for count in balanced(mask, 4, multiple=6).counts)
    with pytest.raises(LayoutError, match="make it 72 or 78"):
        balanced(Mask(74), 4, multiple=6)


def test_the_proof_finds_what_is_wrong() -> None:
    plan = balanced(Mask(16), 2)
    moves, returns = exchange_moves(plan), exchange_returns(plan)
    with pytest.raises(LayoutError, match="are not all of 16 tokens"):
        prove(ContextPlan(plan.mask, ((Span(0, 8),), ())), (), ())
    with pytest.raises(LayoutError, match="positions must ascend"):
        prove(ContextPlan(plan.mask, ((Span(12, 16), Span(0, 4)), (Span(4, 12),))), moves, returns)
    with pytest.raises(LayoutError, match="needs keys"):
        prove(plan, moves[1:], returns)
    with pytest.raises(LayoutError, match="has them already"):
        prove(plan, (*moves, moves[0]), returns)
    with pytest.raises(LayoutError, match="does not have these tokens' keys"):
        prove(plan, (replaced(moves[0], tokens=(Span(0, 99),)), *moves[1:]), returns)
    with pytest.raises(LayoutError, match="stop at rank"):
        prove(plan, moves, returns[:1])
    ours = ContextPlan(plan.mask, plan.shares)
    wrong = ((ours.tasks[0][0], ()), ours.tasks[1])
    object.__setattr__(ours, "__dict__", {**vars(ours), "tasks": wrong})
    with pytest.raises(LayoutError, match="the query at 12 sees keys"):
        prove(ours, moves, returns)


def replaced(move: object, **changes: object) -> object:
    return move._replace(**changes)  # type: ignore[attr-defined]
