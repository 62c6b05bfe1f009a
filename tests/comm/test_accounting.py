"""Counted messages and bytes are those of the algorithms' steps."""

from __future__ import annotations

from math import ceil, log2

import numpy as np
import pytest

from hpcpar.algorithms.registry import ALGORITHMS
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


COUNT = 840
"""Elements, which every algorithm cuts into equal chunks on any of SIZES."""

CALLS = {
    "allreduce": lambda c, name: c.allreduce(np.ones(COUNT), algorithm=name),
    "reduce_scatter": lambda c, name: c.reduce_scatter(np.ones(COUNT), algorithm=name),
    "allgather": lambda c, name: c.allgather(np.ones(COUNT // c.size), algorithm=name),
    "broadcast": lambda c, name: c.broadcast(np.ones(COUNT), algorithm=name),
    "reduce": lambda c, name: c.reduce(np.ones(COUNT), algorithm=name),
    "gather": lambda c, name: c.gather(np.ones(COUNT // c.size), algorithm=name),
    "scatter": lambda c, name: c.scatter(np.ones(COUNT), out=np.ones(COUNT // c.size), algorithm=name),
    "alltoall": lambda c, name: c.alltoall(np.ones(COUNT), algorithm=name),
}


def of_steps(algorithm, size):
    """The same by the algorithm's own steps, which tests/algorithms holds to the theory."""
    nbytes = 8 * COUNT // algorithm.chunks(size)
    return [
        (
            sum(len(step.sends) for step in steps),
            sum(nbytes * len(send.chunks) for step in steps for send in step.sends),
            sum(nbytes * len(receive.chunks) for step in steps for receive in step.receives),
        )
        for steps in algorithm.schedules(size)
    ]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("collective", CALLS)
def test_every_algorithm_is_counted_as_its_steps_say(collective, size):
    for name, algorithm in ALGORITHMS[collective].items():
        if not algorithm.placed:
            found = bill(size, lambda comm, name=name: CALLS[collective](comm, name))
            assert found == of_steps(algorithm, size), name


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
