"""Dispatch as integers: drawn by hand, proved for random routings; and the proof finds what is wrong."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from hpcpar.algorithms.topology import MessageCost
from hpcpar.errors import LayoutError
from hpcpar.expert_parallel.dispatch import (
    DROPPED,
    Dispatch,
    RowMessage,
    TokenRow,
    between_nodes,
    owners,
    prove,
    rows_sent,
    seconds,
)

TWO_NODES = (0, 0, 1, 1)
PLACES = [(0,), (0, 0), (0, 1), (0, 0, 0), TWO_NODES, (0, 1, 0, 1, 1), (0, 0, 0, 1, 2, 2)]


def random_dispatch(seed: int, nodes: tuple[int, ...], stages: int) -> Dispatch:
    """Tokens of every kind: none on a rank, dropped slots, one expert for all, an expert twice."""
    draw = random.Random(seed)
    count, slots = draw.randint(1, 9), draw.randint(1, 4)
    experts = [DROPPED, *range(count)] if seed % 3 else [draw.randrange(count)]
    routing = tuple(
        tuple(tuple(draw.choice(experts) for _ in range(slots)) for _ in range(draw.choice((0, 1, 7))))
        for _ in nodes
    )
    return Dispatch(routing, count, nodes, stages)


def one_token(stages: int) -> Dispatch:
    """Expert e is on rank e; a token of rank 0 goes to 1, 2 and 3."""
    return Dispatch((((1, 2, 3),), (), (), ()), 4, TWO_NODES, stages)


def test_a_token_drawn_by_hand() -> None:
    row = TokenRow(0, 0, (0,))
    apart = [row._replace(slots=(slot,)) for slot in range(3)]
    assert one_token(1).messages == tuple(RowMessage(0, 0, slot + 1, (apart[slot],)) for slot in range(3))
    two = one_token(2)
    assert two.messages == (
        RowMessage(0, 0, 0, (apart[0],)),
        RowMessage(0, 0, 2, (TokenRow(0, 0, (1, 2)),)),
        RowMessage(1, 0, 1, (apart[0],)),
        RowMessage(1, 2, 2, (apart[1],)),
        RowMessage(1, 2, 3, (apart[2],)),
    )
    assert [(m.step, m.sender, m.receiver, len(m.rows)) for m in two.returns()] == [
        (0, 1, 0, 1),
        (0, 2, 2, 1),
        (0, 3, 2, 1),
        (1, 0, 0, 1),
        (1, 2, 0, 2),
    ]
    assert two.returns(sum_on_node=True)[-1] == RowMessage(1, 2, 0, (TokenRow(0, 0, (1, 2)),))
    assert between_nodes(one_token(1).messages, TWO_NODES) == 2
    assert between_nodes(two.messages, TWO_NODES) == 1
    assert rows_sent(two.messages, 4) == ((0, 1, 1, 0), (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 0))


@pytest.mark.smoke
@pytest.mark.parametrize("nodes", PLACES)
@pytest.mark.parametrize("stages", [1, 2])
def test_each_row_comes_to_its_expert_once_and_its_output_home(nodes: tuple[int, ...], stages: int) -> None:
    for seed in range(60):
        dispatch = random_dispatch(seed, nodes, stages)
        for sums in (False, True):
            prove(dispatch, dispatch.messages, dispatch.returns(sum_on_node=sums))


@pytest.mark.parametrize("nodes", PLACES)
def test_two_stages_send_no_more_between_nodes_and_sums_no_more_home(nodes: tuple[int, ...]) -> None:
    for seed in range(60):
        one, two = (random_dispatch(seed, nodes, stages) for stages in (1, 2))
        rows = between_nodes(one.messages, nodes)
        assert between_nodes(two.messages, nodes) <= rows
        assert between_nodes(two.returns(), nodes) == rows
        assert between_nodes(two.returns(sum_on_node=True), nodes) == between_nodes(two.messages, nodes)


def test_rows_of_one_stage_are_those_of_the_counts() -> None:
    for seed in range(60):
        dispatch = random_dispatch(seed, (0, 0, 0), 1)
        sent = rows_sent(dispatch.messages, 3)
        for rank in range(3):
            for to in range(3):
                there = sum(n for e, n in enumerate(dispatch.counts[rank]) if dispatch.owners[e] == to)
                assert sent[rank][to] == (there if to != rank else 0)
        assert sum(dispatch.loads) == sum(map(sum, dispatch.counts))


def test_experts_that_do_not_divide_go_to_the_first_ranks() -> None:
    assert owners(5, 2) == (0, 0, 0, 1, 1)
    assert owners(2, 4) == (0, 1)


def test_messages_are_priced_by_the_busiest_rank_of_each_step() -> None:
    within, between = MessageCost(1.0, 0.5), MessageCost(10.0, 2.0)
    assert seconds(one_token(1).messages, TWO_NODES, 4, within, between) == (1 + 2) + 2 * (10 + 8)
    assert seconds(one_token(2).messages, TWO_NODES, 4, within, between) == (10 + 8) + (1 + 2)


FAULTS: list[tuple[Callable[[list[RowMessage]], object], str]] = [
    (lambda there: there.pop(2), "comes to its expert on rank 1 0 times"),
    (lambda there: there.append(there[2]), "comes to its expert on rank 1 2 times"),
    (lambda there: there.pop(1), "rank 2 sends .* without it"),
    (lambda there: there.append(there[1]._replace(receiver=3)), "comes to node 1 a second time"),
    (lambda there: there.append(there[-1]._replace(receiver=2)), "whose experts it is not for"),
]


@pytest.mark.parametrize(("fault", "words"), FAULTS)
def test_a_wrong_way_there_is_found(fault: Callable[[list[RowMessage]], object], words: str) -> None:
    dispatch = one_token(2)
    there = list(dispatch.messages)
    fault(there)
    with pytest.raises(LayoutError, match=words):
        prove(dispatch, there, dispatch.returns())


@pytest.mark.parametrize("sums", [False, True])
def test_a_wrong_way_home_is_found(sums: bool) -> None:
    dispatch = one_token(2)
    home = dispatch.returns(sum_on_node=sums)
    for number, message in enumerate(home):
        lost = [*home[:number], *home[number + 1 :]]
        if message.sender != message.receiver:
            with pytest.raises(LayoutError, match=r"stops at rank|which it does not have"):
                prove(dispatch, dispatch.messages, lost)
    with pytest.raises(LayoutError, match="which it does not have"):
        prove(dispatch, dispatch.messages, [*home, home[-1]])


def test_an_expert_that_there_is_not_is_refused() -> None:
    with pytest.raises(LayoutError, match="expert 4, but they are 0 to 3"):
        Dispatch((((4,),),), 4, (0,))
    with pytest.raises(LayoutError, match="tokens of 1 ranks on 2 places, in 1 stages"):
        Dispatch((((1,),),), 4, (0, 0))
