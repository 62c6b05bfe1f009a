"""Which algorithm is used when none, or one, is named."""

from __future__ import annotations

import pytest

from hpcpar.algorithms.catalogue import ALGORITHMS
from hpcpar.comm.select import UNEVEN, UP_TO, choose, parse_overrides, segments_for
from hpcpar.errors import OperationError


def chosen(collective, nbytes, uneven=False, named=None, overrides=()):
    return choose(collective, nbytes, uneven=uneven, named=named, overrides=dict(overrides)).name


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
    for collective, table in UP_TO.items():
        assert table[-1][0] == float("inf")
        assert all(name in ALGORITHMS[collective] for _, name in table)
    assert all(ALGORITHMS[collective][name].uneven for collective, name in UNEVEN.items())


def test_only_pipelined_algorithms_are_cut_into_segments():
    assert segments_for(ALGORITHMS["allreduce"]["ring"], 2**30) == 1
    assert segments_for(ALGORITHMS["broadcast"]["ring"], 8) == 1
    assert segments_for(ALGORITHMS["broadcast"]["ring"], 2**20) == 8
    assert segments_for(ALGORITHMS["broadcast"]["ring"], 2**30) == 64


def test_overrides_are_read_from_text():
    assert parse_overrides(None) == parse_overrides("") == {}
    assert parse_overrides("allreduce=ring, broadcast=direct") == {"allreduce": "ring", "broadcast": "direct"}


@pytest.mark.parametrize(
    ("text", "words"),
    [("ring", "collective=algorithm"), ("allreduce=rong", "recursive_doubling"), ("sum=ring", "alltoall")],
)
def test_an_override_that_is_not_understood_is_named(text, words):
    with pytest.raises(OperationError, match=words):
        parse_overrides(text)
