"""`hpcpar draw`."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcpar.algorithms import registry
from hpcpar.algorithms.draw import draw
from hpcpar.cli.draw_commands import ChunkArrow, Moment, moments
from tests.command import Output

COMMAND = ("draw",)


def test_a_misspelt_name_is_shown_the_one_that_was_meant(output: Output) -> None:
    assert "has an algorithm 'rings'; did you mean 'ring'? there are:" in output("rings", status=1)
    assert "did you mean 'pipeline'?" in output("pipelin", status=1)


def test_a_name_alone_draws_the_first_collective_that_has_it(output: Output) -> None:
    drawn = output("ring", "--size", "4")
    assert drawn.startswith(draw(registry.find("allreduce", "ring"), 4))


def test_a_collective_alone_draws_its_first_algorithm_with_signs_time_and_the_others(output: Output) -> None:
    drawn = output("broadcast", "--size", "3")
    assert drawn == output("binomial", "--collective", "broadcast", "--size", "3")
    assert "2→3     chunk 2 goes to rank 3\n2←3     chunk 2 comes from rank 3\n" in drawn
    assert "+2←3" not in drawn
    assert "time: 2α + 2 Sβ, each rank on a node of its own" in drawn
    assert "other algorithms of broadcast: ring, " in drawn


def test_the_collective_and_the_root_can_be_named(output: Output) -> None:
    drawn = output("binomial", "--size", "5", "--collective", "broadcast", "--root", "3")
    assert drawn.startswith(draw(registry.find("broadcast", "binomial"), 5, root=3))


def test_the_ranks_of_each_node_can_be_given(output: Output) -> None:
    drawn = output("hierarchical", "--size", "4", "--ranks-per-node", "2")
    expected = draw(registry.find("allreduce", "hierarchical"), 4, nodes=(0, 0, 1, 1))
    assert drawn.startswith(expected)
    assert "node 1" in drawn


@pytest.mark.parametrize("collective", list(registry.ALGORITHMS))
def test_every_algorithm_can_be_drawn(collective: str, output: Output) -> None:
    for name in registry.ALGORITHMS[collective]:
        assert output(name, "--size", "3", "--collective", collective).strip()


def test_without_a_name_everything_there_is_is_listed(output: Output) -> None:
    lines = output().splitlines()
    assert [line.split() for line in lines] == [
        [collective, *algorithms] for collective, algorithms in registry.ALGORITHMS.items()
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("rign",), "'rign'"),
        (("ring", "--collective", "alltoall"), "alltoall"),
        (("binomial", "--size", "4", "--root", "4"), "root 4 of 4 ranks"),
        (("--collective", "sum"), "'sum'"),
    ],
)
def test_a_mistake_is_answered_with_what_there_is(
    arguments: tuple[str, ...], words: str, output: Output
) -> None:
    assert words in output(*arguments, status=1)


def test_steps_may_be_named_and_an_option_that_comes_first_is_theirs(
    output: Output,
) -> None:
    assert output("steps", "ring", "--size", "3") == output("ring", "--size", "3")
    assert output("--size", "3", "ring") == output("ring", "--size", "3")


@pytest.mark.parametrize("arguments", [("--help",), ("-h",)])
def test_help_names_what_can_be_drawn(arguments: tuple[str, ...], output: Output) -> None:
    shown = output(*arguments)
    assert "  steps " in shown
    assert "  activations " in shown
    assert "hpcpar draw steps [OPTIONS] [ALGORITHM]" in output("ring", *arguments)


@pytest.mark.parametrize("name", ["ring.png", "ring.svg", "ring.gif"])
def test_pictures_and_an_animation(name: str, output: Output, tmp_path: Path) -> None:
    assert f"written: {tmp_path / name}" in output("ring", "--output", str(tmp_path / name))
    assert (tmp_path / name).stat().st_size > 5_000


def test_a_picture_of_too_many_ranks_and_of_no_format_is_refused(output: Output, tmp_path: Path) -> None:
    assert "10 ranks at most" in output("ring", "--size", "11", "--output", f"{tmp_path}/a.png", status=1)
    assert "'foo'" in output("ring", "--output", f"{tmp_path}/a.foo", status=1)


def contributions(moment: Moment) -> list[list[int]]:
    """Bits of the ranks whose contributions are in each chunk of each rank."""
    return [[0 if value is None else value.ranks for value in memory["data"]] for memory in moment.memories]


def test_a_ring_of_three_by_hand() -> None:
    first, second, last = moments(registry.find("reduce_scatter", "ring"), 3)
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
    found = moments(registry.find("allreduce", name), size)
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
    assert not any(each.half for each in moments(registry.find("allreduce", name), 4))


EVERY = [algorithm for by_name in registry.ALGORITHMS.values() for algorithm in by_name.values()]


@pytest.mark.parametrize("algorithm", EVERY, ids=lambda each: f"{each.collective}-{each.name}")
def test_every_message_is_an_arrow_that_starts_where_it_is_sent(algorithm: registry.Algorithm) -> None:
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
