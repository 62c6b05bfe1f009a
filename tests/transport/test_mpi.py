"""What is particular to MPI: facts about the library, nodes, long messages."""

from __future__ import annotations

import os

import pytest


@pytest.mark.mpi
def test_the_library_says_what_it_is(world):
    from hpcpar.transport.mpi import library_facts

    facts = library_facts()
    assert facts["thread_level"] in ("single", "funneled", "serialized", "multiple")
    assert facts["library"]
    assert float(facts["standard"]) >= 3.0


@pytest.mark.mpi
def test_ranks_of_one_machine_are_on_one_node(world):
    assert world.nodes == (0,) * world.size


@pytest.mark.mpi
def test_waits_yield_when_there_are_more_ranks_than_cores(world):
    crowded = world.size > len(os.sched_getaffinity(0))
    assert world._transport.yield_at_once == crowded
