"""Which algorithm is used when none, or one, is named."""

from __future__ import annotations

import pytest

from hpcpar.algorithms.registry import ALGORITHMS
from hpcpar.comm.select import (
    ANY,
    BUILT_IN,
    IN_SHARED_MEMORY,
    NATIVES,
    UNEVEN,
    UP_TO,
    Table,
    built_in,
    choose,
    describe,
    names,
    parse_overrides,
    segments_for,
)
from hpcpar.errors import ConfigError, OperationError

MEASURED = Table(
    "measured",
    {
        "allreduce": {
            ANY: ((64.0, "native"), (float("inf"), "direct")),
            "bfloat16": ((float("inf"), "rabenseifner"),),
        },
        "reduce_scatter": {ANY: ((float("inf"), "recursive_halving"),)},
    },
)


def chosen(collective, nbytes, uneven=False, named=None, overrides=(), **others):
    return choose(collective, nbytes, uneven=uneven, named=named, overrides=dict(overrides), **others).name


def test_small_arrays_take_few_rounds_and_large_ones_few_bytes():
    assert chosen("allreduce", 8) == "recursive_doubling"
    assert chosen("allreduce", 2**20) == "ring"
    assert chosen("alltoall", 64) == "bruck"
    assert chosen("alltoall", 2**20) == "pairwise"


def test_the_callers_word_goes_before_the_environments_and_that_before_the_table():
    overrides = {"allreduce": "rabenseifner"}
    assert chosen("allreduce", 8, overrides=overrides) == "rabenseifner"
    assert chosen("allreduce", 8, named="direct", overrides=overrides) == "direct"
    assert chosen("broadcast", 8, overrides=overrides) == "binomial"


def test_an_override_that_cannot_do_uneven_pieces_is_passed_over_for_them():
    overrides = {"alltoall": "bruck"}
    assert chosen("alltoall", 8, overrides=overrides) == "bruck"
    assert chosen("alltoall", 8, uneven=True, overrides=overrides) == "pairwise"


def test_every_collective_of_the_catalogue_is_in_the_tables():
    assert UP_TO.keys() == ALGORITHMS.keys()
    for collective, table in (*UP_TO.items(), *IN_SHARED_MEMORY.items()):
        assert table[-1][0] == float("inf")
        assert all(name in ALGORITHMS[collective] for _, name in table)
    assert all(ALGORITHMS[collective][name].uneven for collective, name in UNEVEN.items())


def test_a_measured_table_goes_before_the_built_in_one():
    assert chosen("allreduce", 8, table=MEASURED, obstacle=None) == "native"
    assert chosen("allreduce", 65, table=MEASURED, obstacle=None) == "direct"
    assert chosen("allreduce", 8, table=MEASURED, dtype="bfloat16") == "rabenseifner"
    assert chosen("allreduce", 8, table=MEASURED, overrides={"allreduce": "ring"}) == "ring"
    assert chosen("broadcast", 8, table=MEASURED) == BUILT_IN.name("broadcast", 8)


def test_a_measured_table_says_nothing_of_uneven_pieces():
    assert chosen("reduce_scatter", 8, table=MEASURED) == "recursive_halving"
    assert chosen("reduce_scatter", 8, table=MEASURED, uneven=True) == UNEVEN["reduce_scatter"]


def test_a_table_or_override_that_says_native_is_passed_over_where_that_cannot_run():
    built_in = BUILT_IN.name("allreduce", 8)
    for asked in ({"table": MEASURED}, {"overrides": {"allreduce": "native"}}):
        assert chosen("allreduce", 8, **asked) == built_in
        assert chosen("allreduce", 8, **asked, obstacle=None) == "native"
    both = {"table": MEASURED, "overrides": {"allreduce": "native"}}
    assert chosen("allreduce", 65, **both) == "direct"


def test_a_caller_who_names_native_is_told_why_it_cannot_run_and_what_can():
    assert chosen("allreduce", 8, named="native", obstacle=None) == "native"
    with pytest.raises(OperationError, match=r"'native', MPI's own.*: no library\. Name none.*ring"):
        chosen("allreduce", 8, named="native", obstacle="no library")


def test_mpis_own_takes_uneven_pieces_but_only_where_it_is_asked_for():
    assert chosen("allgather", 8, uneven=True, named="native", obstacle=None) == "native"
    overrides = {"allgather": "native"}
    assert chosen("allgather", 8, uneven=True, overrides=overrides, obstacle=None) == "native"
    assert chosen("allgather", 8, uneven=True, overrides=overrides) == "ring"
    table = Table("measured", {"allgather": {ANY: ((float("inf"), "native"),)}})
    assert chosen("allgather", 8, uneven=True, table=table, obstacle=None) == "ring"


def test_mpis_own_has_no_steps_of_ours():
    assert "native" in names("allreduce")
    assert "native" not in names("barrier")
    with pytest.raises(OperationError, match="no steps"):
        NATIVES["allreduce"].generate(0, 2)


def test_choices_are_told_by_spans():
    assert (
        describe([(4, "a"), (8, "a"), (2048, "b"), (4096, "c")])
        == "a up to 8 B, then b up to 2.0 KiB, then c"
    )
    assert describe([(4, "a")]) == "a"
    assert describe([]) == ""


def test_only_pipelined_algorithms_are_cut_into_segments():
    assert segments_for(ALGORITHMS["allreduce"]["ring"], 2**30) == 1
    assert segments_for(ALGORITHMS["broadcast"]["ring"], 8) == 1
    assert segments_for(ALGORITHMS["broadcast"]["ring"], 2**20) == 8
    assert segments_for(ALGORITHMS["broadcast"]["ring"], 2**30) == 64


def test_a_hierarchical_pipeline_has_few_and_long_segments():
    pipeline = ALGORITHMS["allreduce"]["hierarchical_pipelined"]
    assert [segments_for(pipeline, mib * 2**20) for mib in (0, 1, 4, 16, 1024)] == [1, 1, 2, 8, 8]


def test_ranks_on_several_nodes_go_through_their_nodes():
    assert built_in((0, 0, 1, 1)).name("allreduce", 2**24) == "hierarchical_pipelined"
    assert built_in((0, 1, 1)).name("allgather", 2**24) == "hierarchical_pipelined"
    assert built_in((0, 0, 1, 1)).name("broadcast", 8) == BUILT_IN.name("broadcast", 8)


@pytest.mark.parametrize("nodes", [(0,), (0, 0, 0), (0, 1, 2)])
def test_ranks_all_on_one_node_or_each_on_its_own_have_the_flat_rules(nodes):
    assert built_in(nodes) is BUILT_IN


def test_ranks_that_share_memory_speak_to_each_other_directly():
    table = built_in((0,) * 17, shared_memory=True)
    assert table.name("allreduce", 8) == "recursive_doubling"
    assert table.name("allreduce", 2**20) == table.name("alltoall", 8) == "direct"
    assert (table.name("reduce", 64), table.name("reduce", 2**20)) == ("direct", "binomial")
    assert table.name("barrier", 0) == BUILT_IN.name("barrier", 0)
    assert chosen("allgather", 8, table=table, overrides={"allgather": "ring"}) == "ring"


@pytest.mark.parametrize(("size", "then"), [(3, "direct"), (4, "rabenseifner"), (16, "rabenseifner")])
def test_a_few_ranks_that_share_memory_sum_short_arrays_in_one_step(size, then):
    table = built_in((0,) * size, shared_memory=True)
    assert table.name("allreduce", 8) == table.name("allreduce", 32 * 1024) == "one_shot"
    assert table.name("allreduce", 2**20) == then
    assert table.name("allreduce", 2**24) == table.name("reduce_scatter", 2**20) == "direct"


def test_overrides_are_read_from_text():
    assert parse_overrides(None) == parse_overrides("") == {}
    assert parse_overrides("alltoall=native") == {"alltoall": "native"}
    assert parse_overrides("allreduce=ring, broadcast=direct") == {"allreduce": "ring", "broadcast": "direct"}


@pytest.mark.parametrize(
    ("text", "words"),
    [("ring", "collective=algorithm"), ("allreduce=rong", "recursive_doubling"), ("sum=ring", "alltoall")],
)
def test_an_override_that_is_not_understood_is_named(text, words):
    with pytest.raises(ConfigError, match=rf"HPCPAR_ALGORITHM has .*{words}"):
        parse_overrides(text)
