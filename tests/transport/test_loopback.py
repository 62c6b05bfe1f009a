"""All ranks in one process: rendezvous, results, and what happens when a rank fails."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import numpy as np
import pytest

from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import MismatchError, StallError
from hpcpar.transport import loopback, shared_memory


def octets(*values):
    return np.array(values, dtype=np.uint8)


def test_a_send_is_complete_only_when_its_receive_is_posted():
    sender, receiver = loopback.connect(2)
    send = sender.start([(octets(1, 2), 1)], [], tag=0)
    assert not send.test()
    assert send.waiting_for() == (1,)
    target = octets(0, 0)
    receive = receiver.start([], [(target, 0)], tag=0)
    assert send.test()
    assert receive.test()
    assert target.tolist() == [1, 2]
    assert receive.received_nbytes() == 2


def test_messages_of_one_tag_arrive_in_order_and_other_tags_do_not_interfere():
    sender, receiver = loopback.connect(2)
    sender.start([(octets(1), 1), (octets(2), 1)], [], tag=0)
    sender.start([(octets(9), 1)], [], tag=1)
    first, second, other = octets(0), octets(0), octets(0)
    receiver.start([], [(other, 0)], tag=1)
    receiver.start([], [(first, 0), (second, 0)], tag=0)
    assert [int(x[0]) for x in (first, second, other)] == [1, 2, 9]


def test_a_message_longer_than_its_buffer_is_named():
    sender, receiver = loopback.connect(2)
    sender.start([(octets(1, 2, 3), 1)], [], tag=0)
    with pytest.raises(MismatchError, match="rank 0 sent 3 bytes to rank 1, which expects 2"):
        receiver.start([], [(octets(0, 0), 0)], tag=0)


def test_control_messages_travel_beside_the_data():
    first, second = loopback.connect(2)
    first.control_send(1, {"kind": "ask"})
    assert second.control_receive() == [(0, {"kind": "ask"})]
    assert second.control_receive() == []


def test_results_come_by_rank():
    assert loopback.run(3, lambda transport: transport.rank * 10) == [0, 10, 20]


def test_the_first_failure_is_raised_and_frees_the_ranks_that_wait():
    def work(transport):
        if transport.rank == 1:
            raise KeyError("only here")
        receive = transport.start([], [(octets(0), 1)], tag=0)
        for attempt in range(10_000):
            if receive.test():
                break
            transport.pause(attempt)

    started = time.monotonic()
    with pytest.raises(KeyError, match="only here"):
        loopback.run(3, work)
    assert time.monotonic() - started < 20


def test_a_rank_that_never_ends_is_named():
    with pytest.raises(StallError, match="rank 1 did not end within"):
        loopback.run(2, lambda transport: time.sleep(3) if transport.rank else None, timeout_s=0.2)


def test_nodes_must_be_named_for_every_rank():
    with pytest.raises(ValueError, match="nodes names 1 ranks, but there are 2"):
        loopback.connect(2, nodes=[0])


def test_shared_memory_is_given_back_before_the_cyclic_collector_runs() -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count(f"/{shared_memory.PREFIX}")

    def body(comm: Communicator) -> None:
        array = comm.allocate_shared(1000, "float32")
        comm.allreduce(array)
        comm.allreduce(np.ones(100_000))

    before = mappings()
    gc.disable()
    try:
        run_loopback(3, body, shared_memory=True)
        assert mappings() == before
    finally:
        gc.enable()
