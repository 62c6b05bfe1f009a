"""`hpcpar draw`."""

from __future__ import annotations

import pytest

from hpcpar.algorithms import registry
from hpcpar.algorithms.draw import draw
from hpcpar.cli import main


def output(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["draw", *arguments])
    assert caught.value.code == status
    captured = capsys.readouterr()
    return captured.out if status == 0 else captured.err


def test_a_name_alone_draws_the_first_collective_that_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = output(capsys, "ring", "--size", "4")
    assert drawn.rstrip("\n") == draw(registry.find("allreduce", "ring"), 4).rstrip("\n")


def test_the_collective_and_the_root_can_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = output(capsys, "binomial", "--size", "5", "--collective", "broadcast", "--root", "3")
    assert drawn.rstrip("\n") == draw(registry.find("broadcast", "binomial"), 5, root=3).rstrip("\n")


def test_the_ranks_of_each_node_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = output(capsys, "hierarchical", "--size", "4", "--ranks-per-node", "2")
    expected = draw(registry.find("allreduce", "hierarchical"), 4, nodes=(0, 0, 1, 1))
    assert drawn.rstrip("\n") == expected.rstrip("\n")
    assert "node 1" in drawn


@pytest.mark.parametrize("collective", list(registry.ALGORITHMS))
def test_every_algorithm_can_be_drawn(collective: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in registry.ALGORITHMS[collective]:
        assert output(capsys, name, "--size", "3", "--collective", collective).strip()


def test_without_a_name_everything_there_is_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(capsys).splitlines()
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
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in output(capsys, *arguments, status=1)


def test_steps_may_be_named_and_an_option_that_comes_first_is_theirs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert output(capsys, "steps", "ring", "--size", "3") == output(capsys, "ring", "--size", "3")
    assert output(capsys, "--size", "3", "ring") == output(capsys, "ring", "--size", "3")


@pytest.mark.parametrize("arguments", [("--help",), ("-h",)])
def test_help_names_what_can_be_drawn(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    shown = output(capsys, *arguments)
    assert "  steps " in shown
    assert "  activations " in shown
    assert "hpcpar draw steps [OPTIONS] [ALGORITHM]" in output(capsys, "ring", *arguments)
