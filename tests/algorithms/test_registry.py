"""The registry, and every algorithm in it executed on real numbers and compared with the serial result."""

from __future__ import annotations

import inspect
import operator
import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import product

import pytest

from hpcpar.algorithms.registry import ALGORITHMS, Algorithm, find
from hpcpar.algorithms.step import Space, Step
from hpcpar.errors import OperationError
from tests.grid import checkered

EVERY = [algorithm for by_name in ALGORITHMS.values() for algorithm in by_name.values()]
SIZES = (1, 2, 3, 4, 5, 7, 8, 12, 13)

Chunk = list[float]
Memory = dict[str, list[Chunk]]


def name_of(algorithm: Algorithm) -> str:
    return f"{algorithm.collective}-{algorithm.name}"


def execute(
    schedules: Sequence[Sequence[Step]],
    memories: Sequence[Memory],
    op: Callable[[float, float], float] = operator.add,
) -> None:
    """Run all ranks on lists of numbers: all steps in turn, each as soon as its messages are there.

    A second, simpler reading of the rules in `step` than that of `prove`: sends are buffered.
    """
    at = [0] * len(schedules)
    sent = [-1] * len(schedules)
    wire: dict[tuple[int, int], deque[list[Chunk]]] = defaultdict(deque)
    while any(at[rank] < len(steps) for rank, steps in enumerate(schedules)):
        moved = False
        for rank, steps in enumerate(schedules):
            if at[rank] == len(steps):
                continue
            step, memory = steps[at[rank]], memories[rank]
            if sent[rank] < at[rank]:
                sent[rank] = at[rank]
                for copy in step.copies:
                    for chunk, into in zip(copy.chunks, copy.into, strict=True):
                        memory[copy.into_space][into] = list(memory[copy.space][chunk])
                for send in step.sends:
                    wire[rank, send.to].append([list(memory[send.space][chunk]) for chunk in send.chunks])
                moved = True
            needed: dict[int, int] = defaultdict(int)
            for receive in step.receives:
                needed[receive.source] += 1
            if any(len(wire[source, rank]) < messages for source, messages in needed.items()):
                continue
            summands: dict[tuple[Space, int], list[Chunk]] = defaultdict(list)
            for receive in step.receives:
                arrived = wire[receive.source, rank].popleft()
                for chunk, values in zip(receive.chunks, arrived, strict=True):
                    assert len(values) == len(memory[receive.space][chunk]) or receive.space == "work"
                    if receive.combine:
                        summands[receive.space, chunk].append(values)
                    else:
                        memory[receive.space][chunk] = values
            for (space, chunk), chunks in summands.items():
                chunks.insert(step.own_turn, memory[space][chunk])
                memory[space][chunk] = [reduce(op, numbers) for numbers in zip(*chunks, strict=True)]
            at[rank] += 1
            moved = True
        assert moved, "the ranks wait for each other"
    assert not any(wire.values()), "messages are left over"


def ragged(chunks: int, seed: int) -> list[int]:
    """Numbers of elements for every chunk, some of them zero."""
    return [random.Random(seed + chunk).choice((0, 1, 2, 5)) for chunk in range(chunks)]


Nodes = tuple[int, ...] | None


def schedules_of(
    algorithm: Algorithm, size: int, root: int = 0, segments: int = 1, nodes: Nodes = None
) -> list[tuple[Step, ...]]:
    return [algorithm.schedule(rank, size, root=root, segments=segments, nodes=nodes) for rank in range(size)]


def settings(algorithm: Algorithm) -> list[tuple[int, int, int, Nodes]]:
    """(size, root, segments, nodes) worth trying."""
    return [
        (size, root, segments, nodes)
        for size in SIZES
        for root in ({0, size // 2, size - 1} if algorithm.rooted else {0})
        for segments in ((1, 2, 3) if algorithm.segmented else (1,))
        for nodes in (placements(size) if algorithm.placed else (None,))
    ]


def placements(size: int) -> tuple[Nodes, ...]:
    """Every rank alone, nodes of neighbours (the last one not full), and ranks dealt out to nodes."""
    neighbours = tuple(rank // 3 for rank in range(size))
    return (None, neighbours, tuple(rank % 2 for rank in range(size)))


@pytest.mark.parametrize("algorithm", EVERY, ids=name_of)
def test_every_algorithm_does_on_numbers_what_one_process_would_do(algorithm: Algorithm) -> None:
    for size, root, segments, nodes in settings(algorithm):
        if algorithm.collective == "alltoall":
            check_alltoall(algorithm, size)
        elif algorithm.collective != "barrier":
            check_on_data(algorithm, size, root, segments, nodes)


def check_on_data(algorithm: Algorithm, size: int, root: int, segments: int, nodes: Nodes) -> None:
    counts = ragged(algorithm.chunks(size, segments, nodes), seed=size)
    # Small integers in floats, so that sums are exact in any order.
    inputs = [
        [[float(rank * 100 + chunk * 10 + i) for i in range(count)] for chunk, count in enumerate(counts)]
        for rank in range(size)
    ]
    totals = [
        [sum(values) for values in zip(*(one[c] for one in inputs), strict=True)] for c in range(len(counts))
    ]
    share = len(counts) // size  # chunks of each rank, where chunks belong to ranks
    shards = (
        [inputs[chunk // share][chunk] for chunk in range(len(counts))] if len(counts) == share * size else []
    )
    memories: list[Memory] = [{"data": [list(chunk) for chunk in one]} for one in inputs]
    execute(schedules_of(algorithm, size, root, segments, nodes), memories)
    results = [memory["data"] for memory in memories]
    match algorithm.collective:
        case "allreduce":
            assert results == [totals] * size
        case "reduce_scatter":
            assert [results[chunk // share][chunk] for chunk in range(len(counts))] == totals
        case "reduce":
            assert results[root] == totals
        case "allgather":
            assert results == [shards] * size
        case "gather":
            assert results[root] == shards
        case "broadcast":
            assert results == [inputs[root]] * size
        case "scatter":
            assert [results[rank][rank] for rank in range(size)] == inputs[root]
        case other:
            raise AssertionError(f"no check for {other}")


def check_alltoall(algorithm: Algorithm, size: int) -> None:
    def count(source: int, to: int) -> int:
        return (source * 3 + to) % 4 if algorithm.uneven else 2

    def values(source: int, to: int) -> Chunk:
        return [float(100 * source + 10 * to + i) for i in range(count(source, to))]

    memories: list[Memory] = [
        {
            "input": [values(rank, to) for to in range(size)],
            "output": [[0.0] * count(source, rank) for source in range(size)],
            "work": [[] for _ in range(algorithm.work_chunks(size))],
        }
        for rank in range(size)
    ]
    execute(schedules_of(algorithm, size), memories)
    for rank in range(size):
        assert memories[rank]["output"] == [values(source, rank) for source in range(size)]
        assert memories[rank]["input"] == [values(rank, to) for to in range(size)]


def test_one_rank_alone_sends_and_receives_nothing() -> None:
    for algorithm, segments in product(EVERY, (1, 4)):
        steps = algorithm.schedule(0, 1, segments=segments)
        assert not any(step.sends or step.receives for step in steps)
        assert bool(steps) == (algorithm.collective == "alltoall"), (
            "only an all-to-all copies input to output"
        )


def test_no_step_is_empty() -> None:
    for algorithm, size in checkered(EVERY, SIZES):
        for nodes in placements(size) if algorithm.placed else (None,):
            for steps in schedules_of(algorithm, size, size - 1, 3, nodes):
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
