"""The registry; its algorithms are proved in test_prove.py, and run on numbers in tests/comm."""

from __future__ import annotations

import inspect
from itertools import product

import pytest

from hpcpar.algorithms.registry import ALGORITHMS, find
from hpcpar.errors import OperationError
from tests.algorithms.every import EVERY, name_of
from tests.grid import checkered


def test_one_rank_alone_sends_and_receives_nothing() -> None:
    for algorithm, segments in product(EVERY, (1, 4)):
        steps = algorithm.schedule(0, 1, segments=segments)
        assert not any(step.sends or step.receives for step in steps)
        assert bool(steps) == (algorithm.collective == "alltoall"), (
            "only an all-to-all copies input to output"
        )


def test_no_step_is_empty() -> None:
    for algorithm, size in checkered(EVERY, (1, 2, 3, 4, 5, 7, 8, 12, 13)):
        placements = (None, tuple(rank // 3 for rank in range(size)), tuple(rank % 2 for rank in range(size)))
        for nodes in placements if algorithm.placed else (None,):
            for steps in algorithm.schedules(size, root=size - 1, segments=3, nodes=nodes):
                assert all(step.sends or step.receives or step.copies for step in steps)


def test_every_collective_has_an_algorithm_and_knows_itself() -> None:
    assert set(ALGORITHMS) == {
        "allreduce",
        "reduce_scatter",
        "allgather",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
        "alltoall",
        "barrier",
    }
    for collective, by_name in ALGORITHMS.items():
        for name, algorithm in by_name.items():
            assert find(collective, name) is algorithm
            assert (algorithm.collective, algorithm.name) == (collective, name)


def test_every_generator_states_what_it_starts_from_ends_with_costs_and_comes_from() -> None:
    for algorithm in EVERY:
        text = inspect.getdoc(algorithm.steps) or ""
        for word in ("before", "after", "cost", "source"):
            assert f"\n{word} " in text, f"{name_of(algorithm)} does not state its {word}"


def test_a_schedule_is_made_once() -> None:
    ring, hierarchical = find("allreduce", "ring"), find("allreduce", "hierarchical")
    assert ring.schedule(1, 4) is ring.schedule(1, 4)
    assert ring.schedule(1, 4) == ring.generate(1, 4)
    assert ring.schedule(1, 4, nodes=(0, 0, 1, 1)) is ring.schedule(1, 4)
    assert hierarchical.schedule(1, 4, nodes=(0, 0, 1, 1)) is hierarchical.schedule(1, 4, nodes=(0, 0, 1, 1))
    assert hierarchical.schedule(1, 4, nodes=(0, 0, 1, 1)) != hierarchical.schedule(1, 4)


def test_only_hierarchical_algorithms_ask_where_the_ranks_are() -> None:
    placed = {algorithm.name for algorithm in EVERY if algorithm.placed}
    assert placed == {name for name in placed if name.startswith("hierarchical") or name == "leaders"}
    assert find("allreduce", "hierarchical").chunks(5, nodes=(0, 0, 0, 1, 1)) == 6
    assert find("allreduce", "ring").chunks(5, nodes=(0, 0, 0, 1, 1)) == 5


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        OperationError,
        match=r"no algorithm 'rnig' for broadcast; did you mean 'ring'\? there are binomial, ring, direct",
    ):
        find("broadcast", "rnig")
    with pytest.raises(
        OperationError, match=r"no collective 'all_reduce'; there are allreduce, reduce_scatter"
    ):
        find("all_reduce", "ring")


@pytest.mark.parametrize(
    ("rank", "size", "root", "segments"),
    [(4, 4, 0, 1), (-1, 4, 0, 1), (0, 0, 0, 1), (0, 4, 4, 1), (0, 4, -1, 1), (0, 4, 0, 0)],
)
def test_a_rank_root_or_segmentation_that_cannot_be_is_refused(
    rank: int, size: int, root: int, segments: int
) -> None:
    with pytest.raises(OperationError, match="need 0 <= rank < size"):
        find("broadcast", "ring").schedule(rank, size, root=root, segments=segments)
