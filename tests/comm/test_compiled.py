"""Schedules that are compiled: the same results whatever happens to the buffers between calls."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from hpcpar.comm import calls, run_loopback
from hpcpar.comm.executors.message import TURNS
from hpcpar.comm.tuning import Tuning


def repeatedly(comm, make, times=12):
    """All-reduces on buffers from `make(call)`; each result's first element, and what it should be."""
    found, expected = [], []
    for call in range(times):
        buffer = make(call)
        buffer[:] = comm.rank + call
        comm.allreduce(buffer)
        found.append(float(buffer[0]))
        expected.append(float(sum(rank + call for rank in range(comm.size))))
    return found, expected


def assert_all_right(results):
    for found, expected in results:
        assert found == expected


def one_buffer(comm):
    buffer = np.empty(10)
    return repeatedly(comm, lambda _: buffer)


def fresh_buffers(comm):
    return repeatedly(comm, lambda _: torch.empty(10))


def each_rank_in_its_own_way(comm):
    """Rank 0 keeps one buffer, rank 1 has a new one each time, rank 2 goes through three of them."""
    kept = [np.empty(10) for _ in range(3)]
    ways = (lambda _: kept[0], lambda _: np.empty(10), lambda call: kept[call % 3])
    return repeatedly(comm, ways[comm.rank % 3], times=30)


def sizes_in_turn(comm):
    buffers = [np.empty(count) for count in (1, 3, 100, 5000)]
    return repeatedly(comm, lambda call: buffers[call % 4], times=40)


WAYS = [one_buffer, fresh_buffers, each_rank_in_its_own_way, sizes_in_turn]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("way", WAYS)
def test_every_call_is_right_however_buffers_are_used(way, size):
    assert_all_right(run_loopback(size, way))


@pytest.mark.mpi
@pytest.mark.parametrize("way", WAYS)
def test_every_call_over_mpi_is_right_however_buffers_are_used(way, world_of_messages):
    comm = world_of_messages.unchecked("compiled")
    assert_all_right([way(comm)])
    assert comm.size == 1 or comm._calls.cache


@pytest.mark.parametrize(("limit", "value"), [("CACHED", 2), ("CACHED_NBYTES", 1000)])
def test_calls_that_left_the_cache_come_back_right(limit, value, monkeypatch):
    monkeypatch.setattr(calls, limit, value)
    assert_all_right(run_loopback(3, sizes_in_turn))


@pytest.mark.mpi
def test_calls_that_left_the_cache_over_mpi_free_their_requests(world_of_messages, monkeypatch):
    monkeypatch.setattr(calls, "CACHED", 2)
    assert_all_right([sizes_in_turn(world_of_messages.unchecked("compiled"))])


def test_a_buffer_that_was_resized_or_replaced_under_its_name_is_seen():
    def work(comm):
        array, tensor = np.zeros(4), torch.zeros(4)
        for _ in range(10):
            comm.allreduce(array)
            comm.allreduce(tensor)
        array.resize(6, refcheck=False)
        array[:] = comm.rank
        tensor.set_(torch.full((6,), float(comm.rank)))
        return comm.allreduce(array).tolist(), comm.allreduce(tensor).tolist()

    assert run_loopback(2, work) == [([1.0] * 6, [1.0] * 6)] * 2


def test_a_buffer_and_a_handle_that_the_caller_drops_live_until_the_call_is_done():
    def work(comm):
        kept = np.ones(1000)
        for _ in range(3 * TURNS):
            comm.start_allreduce(np.ones(1000), algorithm="ring")
        comm.allreduce(kept)
        comm.barrier()
        return float(kept.sum())

    assert run_loopback(3, work) == [3000.0] * 3


def test_a_transposed_view_at_the_same_address_is_another_buffer():
    def work(comm):
        matrix = torch.arange(4.0).reshape(2, 2)
        for _ in range(10):
            comm.broadcast(matrix)
        view = matrix.t()
        comm.allreduce(view)
        return matrix.tolist()

    assert run_loopback(2, work) == [[[0.0, 2.0], [4.0, 6.0]]] * 2


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("collective", ["reduce", "reduce_scatter"])
def test_what_is_forgotten_while_a_call_is_under_way_keeps_its_memory_until_that_is_done(
    collective, shared_memory
):
    def work(comm):
        size, count = comm.size, 1200
        data, out = np.zeros(count), np.zeros(count if collective == "reduce" else count // size)
        start = getattr(comm, f"start_{collective}")
        found = []
        for call in range(12):
            data[:] = comm.rank + call
            out[:] = -1
            comm.barrier()
            if comm.rank == size - 1:
                time.sleep(0.005)  # so that the others' calls are under way for a while
            handle = start(data, out=out, algorithm="ring")
            comm.choose_by(Tuning())
            junk = [np.full(count, 7e7) for _ in range(50)]
            handle.wait()
            del junk
            found.append(set(out.tolist()))
            for _ in range(3):
                start(data, out=out, algorithm="ring").wait()
        expected = [{float(sum(rank + call for rank in range(size)))} for call in range(12)]
        return found if comm.rank == 0 or collective == "reduce_scatter" else expected, expected

    assert_all_right(run_loopback(3, work, shared_memory=shared_memory))


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_rank_that_only_gives_may_be_in_several_reductions_of_an_array_at_once(shared_memory):
    def work(comm):
        data, outs = np.zeros(5), [np.zeros(5) for _ in range(8)]
        found, expected = [], []
        for call in range(5):
            data[:] = comm.rank + call
            comm.barrier()
            if comm.rank == comm.size - 1:
                time.sleep(0.005)
            handles = [comm.start_reduce(data, algorithm="ring", out=out) for out in outs]
            for handle in handles:
                handle.wait()
            found += [set(out.tolist()) for out in outs]
            expected += [{float(sum(rank + call for rank in range(comm.size)))}] * len(outs)
        row = comm.traffic.row("reduce")
        assert row.calls == 40
        return (found, expected) if comm.rank == 0 else ([], [])

    assert_all_right(run_loopback(3, work, shared_memory=shared_memory))
