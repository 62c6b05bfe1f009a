"""Measured tables: written, read, merged, refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpcpar.comm import run_loopback
from hpcpar.comm.select import ANY, BUILT_IN
from hpcpar.comm.tuning import (
    Entry,
    add_to_file,
    format_entries,
    merge,
    parse,
    ranks_per_node,
    read_together,
    rules_from,
    tuning_for,
)
from hpcpar.errors import ConfigError, PeerFailedError

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

INFINITE = float("inf")
TWO = Entry(
    "MPICH 5.0.2",
    2,
    2,
    {
        "allreduce": {
            ANY: ((4096.0, "native"), (INFINITE, "ring")),
            "bfloat16": ((INFINITE, "direct"),),
        },
        "broadcast": {ANY: ((INFINITE, "binomial"),)},
    },
)
FOUR = Entry("MPICH 5.0.2", 4, 2, {"allreduce": {ANY: ((INFINITE, "rabenseifner"),)}})
OTHER = Entry("Open MPI 5.0.11", 2, 2, {"allreduce": {ANY: ((INFINITE, "direct"),)}})


def test_what_is_written_is_what_is_read() -> None:
    assert parse(format_entries([TWO, FOUR, OTHER]), "file") == [TWO, FOUR, OTHER]


def test_the_file_looks_as_its_description_says() -> None:
    assert format_entries([FOUR]) == (
        "# Algorithms by measurement (hpcpar bench tune). Bytes are of the whole array.\n"
        "\n"
        "[[tuned]]\n"
        'mpi = "MPICH 5.0.2"\n'
        "ranks = 4\n"
        "ranks_per_node = 2\n"
        "\n"
        "[tuned.allreduce]\n"
        "any = [\n"
        '    { use = "rabenseifner" },\n'
        "]\n"
    )


def test_a_communicator_gets_the_table_of_its_mpi_ranks_and_ranks_per_node() -> None:
    tuning = tuning_for("MPICH 5.0.2", format_entries([OTHER, TWO, FOUR]), "my.toml")
    assert tuning.table((0, 0)).name("allreduce", 8) == "native"
    assert tuning.table((0, 0, 1, 1)).name("allreduce", 8) == "rabenseifner"
    assert tuning.table((0, 0)).source == "my.toml"


@pytest.mark.parametrize("nodes", [(0,), (0, 1), (0, 0, 0), (0, 0, 0, 0)])
def test_a_communicator_that_was_not_measured_gets_the_built_in_table(nodes: tuple[int, ...]) -> None:
    assert tuning_for("MPICH 5.0.2", format_entries([TWO, FOUR]), "my.toml").table(nodes) is BUILT_IN
    assert tuning_for("MPICH 4.0", format_entries([TWO]), "my.toml").table((0, 0)) is BUILT_IN


def test_an_element_type_without_rules_of_its_own_has_those_of_any() -> None:
    table = tuning_for("MPICH 5.0.2", format_entries([TWO]), "").table((0, 0))
    assert table.name("allreduce", 8, "bfloat16") == "direct"
    assert table.name("allreduce", 8, "float64") == "native"
    assert table.name("allreduce", 4096, "float64") == "native"
    assert table.name("allreduce", 4097, "float64") == "ring"


def test_a_collective_that_was_not_measured_goes_by_the_built_in_rules_of_this_kind_of_job() -> None:
    tuning = tuning_for("MPICH 5.0.2", format_entries([TWO]), "my.toml")
    assert tuning.table((0, 0)).name("alltoall", 8) == "bruck"
    assert tuning.table((0, 0), shared_memory=True).name("alltoall", 8) == "direct"
    assert tuning.table((0, 0), shared_memory=True).name("broadcast", 8) == "binomial"


def test_an_element_type_that_was_not_measured_does_too() -> None:
    text = HEAD + '[tuned.allgather]\nfloat32 = [{use = "ring"}]\n'
    table = tuning_for("M", text, "my.toml").table((0, 0), shared_memory=True)
    assert table.name("allgather", 8, "float32") == "ring"
    assert table.name("allgather", 8, "float64") == "direct"


GPUS = replace(TWO, rules={"allreduce": {ANY: ((INFINITE, "rabenseifner"),)}}, device="cuda")


def test_arrays_on_gpus_have_an_entry_of_their_own() -> None:
    text = format_entries([TWO, GPUS])
    assert 'device = "cuda"' in text
    assert parse(text, "file") == [TWO, GPUS]
    tuning = tuning_for("MPICH 5.0.2", text, "my.toml")
    assert tuning.table((0, 0)).name("allreduce", 8) == "native"
    for all_pull, alltoall in ((True, "direct"), (False, "bruck")):
        table = tuning.table_on_device((0, 0), all_pull=all_pull)
        assert table.name("allreduce", 8) == "rabenseifner"
        assert table.name("alltoall", 8) == alltoall
    only_hosts = tuning_for("MPICH 5.0.2", format_entries([TWO]), "my.toml")
    assert only_hosts.table_on_device((0, 0), all_pull=True).name("allreduce", 2**20) == "direct"
    assert merge([TWO], GPUS) == [TWO, GPUS]


def test_ranks_per_node_are_those_of_the_fullest_node() -> None:
    assert [ranks_per_node(nodes) for nodes in ((0,), (0, 1), (0, 1, 1), (0, 0, 1, 1))] == [1, 1, 2, 2]


def test_a_new_measurement_replaces_its_own_collectives_and_keeps_everything_else() -> None:
    anew = replace(TWO, rules={"broadcast": {ANY: ((INFINITE, "ring"),)}})
    merged = merge([OTHER, TWO], anew)
    assert merged[0] == OTHER
    assert merged[1].rules == {"allreduce": TWO.rules["allreduce"], "broadcast": anew.rules["broadcast"]}


def test_a_file_grows_by_measuring(tmp_path: Path) -> None:
    path = tmp_path / "new" / "tuning.toml"
    add_to_file(path, TWO)
    add_to_file(path, FOUR)
    assert parse(path.read_text(), str(path)) == [TWO, FOUR]
    assert [file.name for file in path.parent.iterdir()] == ["tuning.toml"]


def test_a_file_that_is_not_understood_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "tuning.toml"
    path.write_text("not TOML")
    with pytest.raises(ConfigError, match=r"tuning\.toml is no TOML"):
        add_to_file(path, TWO)
    assert path.read_text() == "not TOML"


def test_a_file_of_something_else_is_refused_and_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text("[train]\nsteps = 5\n")
    with pytest.raises(ConfigError, match=r"tiny\.toml is no table of algorithms: it has train beside"):
        add_to_file(path, TWO)
    assert path.read_text() == "[train]\nsteps = 5\n"


def test_a_table_may_be_read_by_whoever_may_read_other_files(tmp_path: Path) -> None:
    add_to_file(tmp_path / "tuning.toml", TWO)
    (tmp_path / "other").touch()
    assert (tmp_path / "tuning.toml").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_limits_lie_between_the_sizes_at_which_winners_change() -> None:
    winners = [(4, "bruck"), (64, "bruck"), (1024, "ring"), (16384, "ring")]
    assert rules_from(winners) == ((256.0, "bruck"), (INFINITE, "ring"))
    assert rules_from([(4, "ring")]) == ((INFINITE, "ring"),)


HEAD = '[[tuned]]\nmpi = "M"\nranks = 2\nranks_per_node = 2\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tuned]\n", r"write \[\[tuned\]\]"),
        ('[[tuned]]\nmpi = "M"\n', "number 1 needs ranks = a int, but has None"),
        (HEAD + 'device = "tpu"\n', "device = 'tpu'; there are 'cpu' and 'cuda'"),
        (HEAD + "[tuned.sum]\nany = []\n", "rules for 'sum'; the collectives are allreduce"),
        (HEAD + "[tuned.allreduce]\nany = []\n", r"allreduce\.any must be a list"),
        (HEAD + '[tuned.allreduce]\nany = [{use = "rong"}]\n', "no algorithm 'rong' for allreduce"),
        (HEAD + '[tuned.allreduce]\nany = [{up_to = 8, use = "ring"}]\n', "the last line have none"),
        (
            HEAD + '[tuned.allreduce]\nany = [{up_to=9,use="ring"},{up_to=8,use="ring"},{use="ring"}]\n',
            "must rise",
        ),
        (HEAD + '[tuned.allreduce]\nany = [{up_to=nan,use="ring"},{use="ring"}]\n', "must rise"),
        (
            HEAD + '[tuned.allreduce]\nfloat31 = [{use = "ring"}]\n',
            "rules for allreduce of float31; the element",
        ),
        ("tuned = [1]\n", r"write \[\[tuned\]\]"),
        ("tuned\n", "remove it and measure anew"),
        (HEAD + '[tuned.barrier]\nany = [{use = "native"}]\n', "no algorithm 'native' for barrier"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_place(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(text, "my.toml")


def test_all_ranks_have_the_table_that_rank_0_finds(tmp_path: Path) -> None:
    mine = tmp_path / "tuning.toml"
    mine.write_text(format_entries([TWO]))

    def read(comm: Communicator) -> str | None:
        own = mine if comm.rank == 0 else tmp_path / "missing.toml"
        return read_together(comm, None, own, "MPICH 5.0.2").table(comm.nodes).name("allreduce", 8)

    assert run_loopback(2, read) == ["native", "native"]


def test_a_file_that_rank_0_cannot_read_fails_everywhere(tmp_path: Path) -> None:
    def read(comm: Communicator) -> str:
        with pytest.raises(PeerFailedError) as caught:
            read_together(comm, str(tmp_path / "missing.toml"), tmp_path, "MPICH 5.0.2")
        return str(caught.value)

    assert all("missing.toml cannot be read" in words for words in run_loopback(2, read))
