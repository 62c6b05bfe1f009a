"""Counted messages and bytes equal the theory, for every algorithm."""

from __future__ import annotations

from math import ceil, log2

import numpy as np
import pytest

from hpcpar.comm import Trace, run_loopback
from hpcpar.comm.accounting import TrafficRow

SIZES = [1, 2, 3, 4, 7]


def bill(size, call):
    """(messages, bytes sent, bytes received) of each rank."""

    def work(comm):
        call(comm)
        rows = [row for row in comm.traffic.rows() if row.collective != "agreement"]
        assert len(rows) == 1
        assert rows[0].calls == 1
        return rows[0].messages, rows[0].nbytes_sent, rows[0].nbytes_received

    return run_loopback(size, work)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", ["ring", "direct"])
def test_an_allreduce_sends_twice_p_minus_1_over_p_of_the_vector(size, algorithm):
    nbytes = 840 * 8  # divides by every size
    sent = 2 * (size - 1) * nbytes // size
    messages = 2 * (size - 1)
    assert (
        bill(size, lambda c: c.allreduce(np.ones(840), algorithm=algorithm))
        == [(messages, sent, sent)] * size
    )


@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter_and_allgather_by_ring_send_p_minus_1_over_p(size):
    sent = (size - 1) * 840 * 8 // size
    expected = [(size - 1, sent, sent)] * size
    assert bill(size, lambda c: c.reduce_scatter(np.ones(840), algorithm="ring")) == expected
    assert bill(size, lambda c: c.allgather(np.ones(840 // size), algorithm="ring")) == expected


@pytest.mark.parametrize("size", [2, 4, 8])
def test_recursive_doubling_sends_the_vector_log_p_times(size):
    rounds = int(log2(size))
    expected = [(rounds, rounds * 800, rounds * 800)] * size
    assert bill(size, lambda c: c.allreduce(np.ones(100), algorithm="recursive_doubling")) == expected


@pytest.mark.parametrize("size", SIZES)
def test_a_broadcast_moves_the_vector_p_minus_1_times_in_all(size):
    rows = bill(size, lambda c: c.broadcast(np.ones(100), algorithm="binomial"))
    assert sum(sent for _, sent, _ in rows) == (size - 1) * 800
    assert max(messages for messages, _, _ in rows) == ceil(log2(size))


@pytest.mark.parametrize("size", SIZES)
def test_a_pairwise_alltoall_sends_all_but_the_own_piece(size):
    sent = (size - 1) * 24
    expected = [(size - 1, sent, sent)] * size
    assert bill(size, lambda c: c.alltoall(np.ones(3 * size), algorithm="pairwise")) == expected


@pytest.mark.parametrize("size", SIZES)
def test_a_barrier_is_log_p_empty_messages(size):
    assert bill(size, lambda c: c.barrier()) == [(ceil(log2(size)), 0, 0)] * size


def test_messages_of_no_bytes_are_not_sent():
    assert bill(4, lambda c: c.allreduce(np.ones(0), algorithm="ring")) == [(0, 0, 0)] * 4
    assert (
        sum(messages for messages, _, _ in bill(4, lambda c: c.allreduce(np.ones(1), algorithm="ring"))) == 6
    )


def test_point_to_point_is_counted_by_direction():
    def work(comm):
        if comm.rank == 0:
            comm.send(np.ones(10), to=1)
        else:
            comm.recv(np.empty(10), source=0)
        return [
            (row.collective, row.messages, row.nbytes_sent, row.nbytes_received)
            for row in comm.traffic.rows()
        ]

    assert run_loopback(2, work) == [[("send", 1, 80, 0)], [("recv", 0, 0, 80)]]


def counted(row):
    return row.calls, row.messages, row.nbytes_sent, row.nbytes_received


def test_a_tally_counts_its_messages_and_bytes_once_for_each_call_beside_what_is_counted_otherwise():
    row = TrafficRow("allreduce")
    row.count(1, 10, 20)
    first, second = row.open(2, 100, 200), row.open(0, 1000, 0)
    assert counted(row) == (1, 1, 10, 20)
    first.calls += 3
    second.calls += 1
    assert counted(row) == (5, 7, 1310, 620)


def test_a_tally_that_is_closed_leaves_what_it_has_counted():
    row = TrafficRow("allreduce")
    first, second = row.open(2, 100, 200), row.open(2, 100, 200)
    first.calls += 3
    second.calls += 1
    row.close(first)
    assert counted(row) == (4, 8, 400, 800)
    first.calls += 100  # it is no longer looked at
    second.calls += 1
    assert counted(row) == (5, 10, 500, 1000)


def test_a_row_that_is_reset_counts_on_from_nothing_in_its_open_tallies_too():
    row = TrafficRow("allreduce")
    tally = row.open(2, 100, 200)
    tally.calls, row.seconds_waited, row.calls_by_mpi = 3, 1.5, 2
    row.count(1, 10, 20)
    row.reset()
    assert (*counted(row), row.seconds_waited, row.calls_by_mpi) == (0, 0, 0, 0, 0.0, 0)
    tally.calls += 1
    assert counted(row) == (1, 2, 100, 200)
    row.close(tally)
    assert counted(row) == (1, 2, 100, 200)


def test_a_trace_notes_what_moved_when_on_all_communicators_of_a_family():
    def work(comm):
        half = comm.split(0, name="half")
        comm.trace = Trace()
        comm.allreduce(np.ones(10), algorithm="ring")
        half.barrier()
        events = comm.trace.events
        assert all(event.start_s <= event.stop_s for event in events)
        comm.trace = None
        comm.barrier()
        found = [
            (event.name, event.arguments)
            for event in events
            if "agreement" not in event.name and event.category == "communication"
        ]
        return found, [arguments.pop("comm") for _, arguments in found]

    (found, comms), (_, same) = run_loopback(2, work)
    assert found == [
        ("allreduce world", {"nbytes_sent": 80, "algorithm": "ring", "blocking": True, "call": 1}),
        ("barrier half", {"nbytes_sent": 0, "algorithm": "dissemination", "blocking": True, "call": 0}),
    ]
    assert comms == same
    assert len(set(comms)) == 2
