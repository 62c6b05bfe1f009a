"""What the picture of `hpcpar draw allreduce` shows, step by step."""

from __future__ import annotations

import pytest

from hpcpar.algorithms.registry import ALGORITHMS, Algorithm, find
from hpcpar.cli.collective_picture import ChunkArrow, Moment, moments


def contributions(moment: Moment) -> list[list[int]]:
    """Bits of the ranks whose contributions are in each chunk of each rank."""
    return [[0 if value is None else value.ranks for value in memory["data"]] for memory in moment.memories]


def test_a_ring_of_three_by_hand() -> None:
    first, second, last = moments(find("reduce_scatter", "ring"), 3)
    assert contributions(first) == [[1, 1, 1], [2, 2, 2], [4, 4, 4]]
    assert contributions(second) == [[1, 5, 1], [2, 2, 3], [6, 4, 4]]
    assert [chunks[rank] for rank, chunks in enumerate(contributions(last))] == [7, 7, 7]
    assert first.arrows[0] == ChunkArrow((2, "data", 1), (0, "data", 1))
    assert [each.name for each in (first, second, last)] == ["before step 0", "before step 1", "at the end"]


@pytest.mark.parametrize(
    ("name", "size", "second", "halves"),
    [
        ("ring", 4, 3, ("reduce-scatter", "all-gather")),
        ("rabenseifner", 8, 3, ("reduce-scatter", "all-gather")),
        ("direct", 5, 1, ("reduce-scatter", "all-gather")),
        ("binomial", 8, 3, ("reduce", "broadcast")),
    ],
)
def test_an_allreduce_has_two_halves(name: str, size: int, second: int, halves: tuple[str, str]) -> None:
    found = moments(find("allreduce", name), size)
    assert [(at, each.half) for at, each in enumerate(found) if each.half] == [
        (0, halves[0]),
        (second, halves[1]),
    ]
    # Between them each sum is on one rank: a chunk's on each, or all on the root.
    everybody = (1 << size) - 1
    sums = [chunks.count(everybody) for chunks in contributions(found[second])]
    chunks = len(contributions(found[0])[0])
    assert sums == ([chunks // size] * size if halves[1] == "all-gather" else [chunks] + [0] * (size - 1))


@pytest.mark.parametrize("name", ["recursive_doubling", "one_shot"])
def test_where_every_rank_sums_to_the_end_there_are_no_halves(name: str) -> None:
    assert not any(each.half for each in moments(find("allreduce", name), 4))


EVERY = [algorithm for by_name in ALGORITHMS.values() for algorithm in by_name.values()]


@pytest.mark.parametrize("algorithm", EVERY, ids=lambda each: f"{each.collective}-{each.name}")
def test_every_message_is_an_arrow_that_starts_where_it_is_sent(algorithm: Algorithm) -> None:
    found = moments(algorithm, 4, nodes=(0, 0, 1, 1))
    arrows: list[ChunkArrow] = [arrow for moment in found for arrow in moment.arrows]
    steps = [algorithm.generate(rank, 4, nodes=(0, 0, 1, 1)) for rank in range(4)]
    sent = [
        (rank, send.space, chunk)
        for rank, of_rank in enumerate(steps)
        for step in of_rank
        for send in step.sends
        for chunk in send.chunks
    ]
    assert sorted(arrow.start for arrow in arrows) == sorted(sent)
    assert not found[-1].arrows
    assert found[-1].name == "at the end"
