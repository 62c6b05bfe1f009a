"""Hierarchical collectives executed by ranks that pretend to be on several nodes."""

from __future__ import annotations

import numpy as np
import pytest

from hpcpar import partition
from hpcpar.algorithms.registry import ALGORITHMS
from hpcpar.comm import compiling, run_loopback, select

PLACED = {
    collective: [name for name, algorithm in by_name.items() if algorithm.placed]
    for collective, by_name in ALGORITHMS.items()
}
PLACEMENTS = [(0, 0, 1, 1), (0, 1, 0, 1, 1), (0, 0, 0, 1), (0, 1, 2, 2, 1)]
COUNTS = (0, 1, 7, 1000, 100_003)


def piece(rank, count):
    return np.arange(count) * 5 + rank


def total(size, count):
    return sum(piece(rank, count) for rank in range(size))


def assert_equal_on(nodes, work, shared_memory):
    """Compare the pairs of found and expected arrays that all ranks return."""
    for pairs in run_loopback(len(nodes), work, nodes=nodes, shared_memory=shared_memory):
        for found, expected in pairs:
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shared_memory", [False, True], ids=["messages", "shared memory"])
@pytest.mark.parametrize("nodes", PLACEMENTS)
def test_reductions_on_nodes_equal_the_serial_computation(nodes, shared_memory):
    def work(comm):
        found = []
        for count in COUNTS:
            start, stop = partition.bounds(count, comm.size)[comm.rank]
            expected = total(comm.size, count)
            for name in PLACED["allreduce"]:
                found.append((comm.allreduce(piece(comm.rank, count), algorithm=name), expected))
            for name in PLACED["reduce_scatter"]:
                own = comm.reduce_scatter(piece(comm.rank, count), algorithm=name)
                found.append((own, expected[start:stop]))
        return found

    assert_equal_on(nodes, work, shared_memory)


@pytest.mark.parametrize("shared_memory", [False, True], ids=["messages", "shared memory"])
@pytest.mark.parametrize("nodes", PLACEMENTS)
def test_gathers_and_broadcasts_on_nodes_equal_the_serial_computation(nodes, shared_memory):
    def work(comm):
        found = []
        for count in COUNTS:
            counts = [(3 * rank) % 4 * count // 3 for rank in range(comm.size)]
            gathered = np.concatenate([piece(rank, n) for rank, n in enumerate(counts)])
            for name in PLACED["allgather"]:
                shard = piece(comm.rank, counts[comm.rank])
                found.append((comm.allgather(shard, counts=counts, algorithm=name), gathered))
            for root in range(comm.size):
                for name in PLACED["broadcast"]:
                    buffer = piece(comm.rank, count)
                    found.append((comm.broadcast(buffer, root, algorithm=name), piece(root, count)))
        return found

    assert_equal_on(nodes, work, shared_memory)


def test_floats_are_summed_to_the_same_bits_on_all_ranks_of_all_nodes():
    def work(comm):
        values = np.random.default_rng(comm.rank).standard_normal(999)
        return [comm.allreduce(values.copy(), algorithm=name).tobytes() for name in PLACED["allreduce"]]

    by_rank = run_loopback(5, work, nodes=(0, 0, 0, 1, 1))
    assert all(bits == by_rank[0] for bits in by_rank)


@pytest.mark.parametrize("shared_memory", [False, True], ids=["messages", "shared memory"])
@pytest.mark.parametrize("nodes", PLACEMENTS)
def test_pipelines_of_several_segments_equal_the_serial_computation(nodes, monkeypatch, shared_memory):
    monkeypatch.setattr(select, "NODES_SEGMENT_NBYTES", 64)

    def work(comm):
        name, found = "hierarchical_pipelined", []
        for count in COUNTS:
            expected = total(comm.size, count)
            counts = [(3 * rank) % 4 * count // 3 for rank in range(comm.size)]
            edges = partition.offsets(counts)
            own = slice(edges[comm.rank], edges[comm.rank + 1])
            found.append((comm.allreduce(piece(comm.rank, count), algorithm=name), expected))
            whole = total(comm.size, edges[-1])
            shard = comm.reduce_scatter(piece(comm.rank, edges[-1]), counts=counts, algorithm=name)
            found.append((shard, whole[own]))
            found.append((comm.allgather(whole[own].copy(), counts=counts, algorithm=name), whole))
        return found

    assert_equal_on(nodes, work, shared_memory)


@pytest.mark.parametrize("collective", ["allgather", "reduce_scatter"])
def test_what_lies_in_several_stretches_of_memory_is_read_there(collective):
    """The chunks of other nodes do not lie side by side."""
    count = 50_000

    def work(comm):
        whole = total(comm.size, 4 * count)
        own = slice(comm.rank * count, (comm.rank + 1) * count)
        for _ in range(3):
            if collective == "allgather":
                found = comm.allgather(whole[own].copy(), algorithm="hierarchical")
                np.testing.assert_array_equal(found, whole)
            else:
                found = comm.reduce_scatter(piece(comm.rank, 4 * count), algorithm="hierarchical")
                np.testing.assert_array_equal(found, whole[own])

    run_loopback(4, work, nodes=(0, 0, 1, 1), shared_memory=True)


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 0, 1), (0, 1, 0, 1, 1)])
def test_what_is_near_goes_through_memory_and_what_is_far_by_messages(
    nodes, truths, assert_true, monkeypatch
):
    monkeypatch.setattr(compiling, "IN_PART_FROM_NBYTES", 0)

    def work(comm):
        assert comm.share_memory(post_nbytes=1024)
        return list(truths(comm))

    for checks in run_loopback(len(nodes), work, nodes=nodes):
        assert_true(checks)


def test_ranks_on_nodes_that_exchange_very_different_amounts_go_the_same_way():
    def work(comm):
        assert comm.share_memory()
        # Rank 0 alone has as much to send as goes through memory.
        sent = [compiling.IN_PART_FROM_NBYTES // 8 if comm.rank == 0 else 1] * comm.size
        received = [compiling.IN_PART_FROM_NBYTES // 8 if rank == 0 else 1 for rank in range(comm.size)]
        found = comm.alltoall(np.full(sum(sent), comm.rank), send_counts=sent, receive_counts=received)
        return np.array_equal(found, np.repeat(np.arange(comm.size), received))

    assert run_loopback(4, work, nodes=(0, 0, 1, 1)) == [True] * 4
