"""What is particular to MPI: facts about the library, nodes, long messages."""

from __future__ import annotations

import os

import numpy as np
import pytest

from hpcpar.errors import MismatchError, PeerFailedError


@pytest.mark.mpi
def test_the_library_says_what_it_is(world):
    from hpcpar.transport.mpi_library import library_facts

    facts = library_facts()
    assert facts["thread_level"] in ("single", "funneled", "serialized", "multiple")
    assert facts["library"]
    assert float(facts["standard"]) >= 3.0


@pytest.mark.mpi
def test_ranks_of_one_machine_are_on_one_node(world):
    assert world.nodes == (0,) * world.size


@pytest.mark.mpi
@pytest.mark.parametrize("drives_messages", [True, False])
def test_waits_nap_sooner_for_a_peer_alone_or_with_more_ranks_than_cores(world, monkeypatch, drives_messages):
    from hpcpar.transport import mpi

    cores = set().union(*world.allgather_object(os.sched_getaffinity(0)))  # each may be bound to its own
    crowded = world.size > len(cores)
    assert world._transport.yield_at_once == crowded
    naps = []
    monkeypatch.setattr(mpi.time, "sleep", naps.append)
    for attempt in (mpi.EARLY_NAP_ATTEMPTS, mpi.EARLY_NAP_ATTEMPTS + 1, mpi.NAP_ATTEMPTS + 1):
        world._transport.pause(attempt, drives_messages=drives_messages)
    assert naps == [mpi.NAP_S] * (2 if crowded or not drives_messages else 1)


@pytest.mark.mpi
def test_the_largest_tag_is_what_mpi_says_on_every_communicator(world):
    from mpi4py import MPI

    part = world.split(0)
    tags = [comm._transport.max_tag for comm in (world, part)]
    part.free()
    assert tags == [min(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB), 2**31 - 1)] * 2


@pytest.mark.mpi
def test_before_version_4_mpi_has_a_limit(world):
    transport = type(world._transport).world()
    natives = transport.natives
    natives._has_large_counts = False
    told = [
        natives.obstacle("allreduce", "sum", "float32", 4 * (2**31 - 1)),
        natives.obstacle("allreduce", "sum", "float32", 4 * 2**31),
        natives.obstacle("broadcast", "sum", "float32", 4 * (2**31 - 1)),
        natives.obstacle("alltoall", "sum", "float32", None),
    ]
    natives._has_large_counts = True
    told_by_mpi_4 = [
        natives.obstacle("allreduce", "sum", "float32", 4 * 2**31),
        natives.obstacle("broadcast", "sum", "bfloat16", 2),
        natives.obstacle("reduce_scatter", "max", "float16", 2),
    ]
    transport.free()
    assert told[0] is None
    assert told[1:] == [
        "before version 4 MPI takes at most 2,147,483,647 elements",
        "before version 4 MPI takes at most 2,147,483,647 bytes",
        "before version 4 MPI has a limit to pieces, and no rank knows all of them",
    ]
    assert told_by_mpi_4 == [None, None, "MPI knows no max of float16"]


@pytest.mark.mpi
def test_only_a_truncated_message_is_told_as_longer_than_its_buffer(world):
    from mpi4py import MPI

    from hpcpar.transport.mpi_library import explained

    assert isinstance(explained(MPI.Exception(MPI.ERR_TRUNCATE), [1]), MismatchError)
    for code in (MPI.ERR_IN_STATUS, MPI.ERR_OTHER, MPI.ERR_INTERN):
        told = explained(MPI.Exception(code), [1])
        assert isinstance(told, PeerFailedError)
        assert MPI.Get_error_string(code) in str(told)


@pytest.mark.mpi(min_size=2)  # Open MPI 4.1 cuts what a rank sends itself, and does not say so
@pytest.mark.parametrize("pieces", [1, 3])
def test_an_exchange_of_several_messages_names_the_one_that_is_too_long(world, pieces):
    transport = type(world._transport).world()
    to = (world.rank + 1) % world.size
    received = [np.zeros(4, np.uint8) for _ in range(pieces)]
    exchange = transport.start(
        [(np.zeros(5, np.uint8), to)] * pieces, [(r, (world.rank - 1) % world.size) for r in received], 1
    )
    try:
        with pytest.raises(MismatchError, match="longer than the buffer"):
            any(iter(exchange.test, None))
        assert exchange.test()
    finally:
        world.barrier()
        transport.free()
