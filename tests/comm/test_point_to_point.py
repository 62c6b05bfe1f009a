"""Send and receive, of arrays and of objects."""

from __future__ import annotations

import time
from itertools import product

import numpy as np
import pytest
import torch

from hpcpar.comm import Communicator, calls, run_loopback
from hpcpar.comm.executors.peer_message import SHORT_NBYTES
from hpcpar.errors import MismatchError, OperationError


def ring_of_messages(comm):
    """Everybody sends to the right, in the order left to deadlock if sends were posted alone."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    arrived = comm.sendrecv(np.full(3, comm.rank), right, np.empty(3, dtype=int), left)
    return arrived.tolist(), [left] * 3


@pytest.mark.smoke
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_ring_of_sendrecv_does_not_deadlock(size, exchange):
    for arrived, expected in run_loopback(size, ring_of_messages, **exchange):
        assert arrived == expected


@pytest.mark.mpi
def test_a_ring_of_sendrecv_over_mpi_does_not_deadlock(any_world):
    arrived, expected = ring_of_messages(any_world)
    assert arrived == expected


@pytest.mark.mpi(min_size=2)
def test_a_message_of_the_wrong_length_over_mpi_is_named_by_the_receiver(world):
    told, comm = {}, world.split(0, world.rank)  # the sender hears of it in its next calls there
    for tag, sent in ((1, 4), (2, 12)):
        send = comm.start_send(np.ones(sent), to=1, tag=tag) if comm.rank == 0 else None
        if comm.rank == 1:
            with pytest.raises(MismatchError) as caught:
                comm.recv(np.empty(8), source=0, tag=tag)
            told[tag] = str(caught.value)
        if send is not None:
            send.wait()
    everywhere = world.allgather_object(told)
    assert "rank 1 expected float64[8] in recv from rank 0" in everywhere[1][1]
    assert "rank 0 sent float64[4]" in everywhere[1][1]
    assert "rank 0 sent float64[12]" in everywhere[1][2]


def messages_again_and_again(comm, *, times=6, buffers=1):
    """The same arrays to the right and from the left, with other values each time, blocking and not."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    out = [torch.zeros(5) for _ in range(buffers)]
    into = [np.zeros(5, dtype=np.float32) for _ in range(buffers)]
    sent_before = comm.traffic.row("send").messages
    for call in range(times):
        for number in range(buffers):
            out[number].fill_(100 * comm.rank + 10 * call + number)
            if comm.rank % 2 or comm.size == 1:
                receive = comm.start_recv(into[number], left, tag=3)
                comm.start_send(out[number], right, tag=3).wait()
                arrived = receive.wait()
            else:
                send = comm.start_send(out[number], right, tag=3)
                arrived = comm.recv(into[number], left, tag=3)
                send.wait()
            assert arrived is into[number]
            assert arrived.tolist() == [100 * left + 10 * call + number] * 5
    assert comm.traffic.row("send").messages - sent_before == times * buffers


def loose_messages(comm, monkeypatch, work):
    """How many exchanges are made anew, rather than started again, while `work` is done."""
    made = []
    start = comm._transport.start

    def counted(*arguments):
        made.append(arguments)
        return start(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(comm._transport, "start", counted, raising=False)
        work()
    return len(made)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_messages_that_come_again_are_right(size):
    run_loopback(size, messages_again_and_again)


@pytest.mark.mpi
def test_messages_that_come_again_over_mpi_are_right_and_not_made_anew(any_world, monkeypatch):
    comm = any_world.split(0)
    anew = loose_messages(comm, monkeypatch, lambda: messages_again_and_again(comm, times=10))
    assert anew <= 2  # the first of each
    comm.free()


@pytest.mark.mpi
def test_more_messages_than_are_remembered_are_right(any_world, monkeypatch):
    monkeypatch.setattr(calls, "CACHED", 4)
    messages_again_and_again(any_world, times=4, buffers=6)


def test_a_message_that_is_under_way_can_be_sent_once_more():
    def work(comm):
        x, results = np.arange(4.0), []
        for _ in range(4):
            if comm.rank == 0:
                for handle in [comm.start_send(x, 1) for _ in range(3)]:
                    handle.wait()
            else:
                results += [comm.recv(np.zeros(4), 0).tolist() == x.tolist() for _ in range(3)]
        return results

    assert all(run_loopback(2, work)[1])


@pytest.mark.mpi(min_size=2)
def test_a_message_that_is_known_and_comes_with_another_length_is_named(any_world):
    told, into = [], np.zeros(8)
    comm = any_world.split(0, any_world.rank)
    for sent in (8, 8, 8, 4, 12, 8, 8):
        if any_world.rank == 0:
            comm.start_send(np.full(sent, 7.0), to=1)  # waiting would tell of the refused ones
        elif any_world.rank == 1:
            into[:] = 0
            try:
                comm.recv(into, source=0)
                told.append(into.tolist() == [7.0] * 8)
            except MismatchError as error:
                told.append(str(error))
        any_world.barrier()
    everywhere = any_world.allgather_object(told)[1]
    assert everywhere[:3] + everywhere[5:] == [True] * 5
    assert "rank 0 sent float64[4]" in everywhere[3]
    assert "rank 0 sent float64[12]" in everywhere[4]


@pytest.mark.mpi(min_size=2)
def test_who_asks_whom_a_known_message_waits_for_still_gets_it(any_world):
    """MPICH forgets how long a persistent message was, once it has been asked whether it is there."""
    told, into = [], np.zeros(8)
    for call in range(4):
        if any_world.rank == 1:
            handle = any_world.start_recv(into, source=0)
            told.append(handle.waiting_for())
        any_world.barrier()
        if any_world.rank == 0:
            any_world.send(np.full(8, float(call)), to=1)
        elif any_world.rank == 1:
            while handle.waiting_for():
                time.sleep(0.001)
            told.append(handle.wait().tolist() == [call] * 8)
    assert any_world.allgather_object(told)[1] == [(any_world._transport.world_ranks[0],), True] * 4


def test_messages_meet_by_tag_and_then_in_order():
    def work(comm):
        if comm.rank == 0:
            handles = [comm.start_send(np.array([value]), 1, tag=value % 2) for value in range(6)]
            for handle in handles:
                handle.wait()
            return None
        odd = [int(comm.recv(np.empty(1, int), 0, tag=1)[0]) for _ in range(3)]
        return odd + [int(comm.recv(np.empty(1, int), 0, tag=0)[0]) for _ in range(3)]

    assert run_loopback(2, work)[1] == [1, 3, 5, 0, 2, 4]


def test_a_tensor_arrives_in_shape_and_in_memory_that_is_not_contiguous():
    def work(comm):
        if comm.rank == 0:
            comm.send(torch.arange(6.0).reshape(2, 3).t(), to=1)
            return None
        target = torch.zeros(6, 2)
        return comm.recv(target[::2], source=0) is not None, target.tolist()

    _, rows = run_loopback(2, work)[1]
    assert rows == [[0.0, 3.0], [0.0, 0.0], [1.0, 4.0], [0.0, 0.0], [2.0, 5.0], [0.0, 0.0]]


def test_a_message_of_no_elements_arrives():
    def work(comm):
        if comm.rank == 0:
            return comm.send(np.empty(0), to=1)
        return comm.recv(np.empty(0), source=0).size

    assert run_loopback(2, work) == [None, 0]


def test_a_message_of_the_wrong_length_is_named():
    def work(comm):
        if comm.rank == 0:
            return comm.start_send(np.ones(4), to=1)
        return comm.recv(np.empty(8), source=0)

    with pytest.raises(MismatchError, match=r"expected float64\[8\] .* rank 0 sent float64\[4\]"):
        run_loopback(2, work)


SHORT, LONG = 6, SHORT_NBYTES  # elements of float32
FORMS = [
    ("float32", SHORT),
    ("int32", SHORT),
    ("float32", SHORT + 1),
    ("float64", SHORT // 2),
    ("float32", 0),
]
FORMS += [("float32", LONG), ("int32", LONG), ("float32", LONG + 1), ("float64", LONG // 2)]
PAIRS = [pair for pair in product(FORMS, FORMS) if pair[0] != pair[1]]


def refused(comm, sent, received, blocking):
    """Send from the first rank to the last, three times the same, then as it should be."""
    told, last = [], comm.size - 1
    for _ in range(3):
        try:
            if comm.rank == 0:
                array = np.ones(sent[1], sent[0])
                comm.send(array, last) if blocking else comm.start_send(array, last).wait()
            elif comm.rank == last:
                into = np.zeros(received[1], received[0])
                comm.recv(into, 0) if blocking else comm.start_recv(into, 0).wait()
            told.append("nothing")
        except MismatchError as error:
            told.append(str(error))
    if comm.rank == 0:
        comm.send(np.arange(5), last)
    elif comm.rank == last:
        told.append(comm.recv(np.zeros(5, int), 0).tolist() == [0, 1, 2, 3, 4])
    return told


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("size", [2, 3])
def test_a_message_of_another_form_is_refused_and_the_next_one_is_right(size, blocking):
    for sent, received in PAIRS:
        told = run_loopback(size, lambda comm, pair=(sent, received): refused(comm, *pair, blocking))[-1]
        assert_refused(told, sent, received)


def assert_refused(told, sent, received):
    *errors, is_right = told
    assert is_right, (sent, received, told)
    for text in errors:
        assert f"expected {received[0]}[{received[1]}]" in text, (sent, received, told)
        assert f"rank 0 sent {sent[0]}[{sent[1]}]" in text


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("blocking", [True, False])
def test_a_message_of_another_form_over_mpi_is_refused_and_the_next_one_is_right(any_world, blocking):
    everywhere = []
    for sent, received in PAIRS:
        with any_world.split(0, any_world.rank) as comm:  # the sender hears of it in a later call there
            everywhere.append(any_world.allgather_object(refused(comm, sent, received, blocking))[-1])
    for (sent, received), told in zip(PAIRS, everywhere, strict=True):
        assert_refused(told, sent, received)


def heard(comm):
    """Words of the error that each rank gets as rank 1 refuses a message of rank 0: others in a barrier."""
    try:
        if comm.rank == 0:
            comm.start_send(np.ones(3, np.float32), 1).wait()
        elif comm.rank == 1:
            comm.recv(np.zeros(3, np.int32), 0)
        comm.barrier()
    except MismatchError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_hear_of_a_message_that_is_refused(size):
    told = run_loopback(size, heard)
    assert len(set(told)) == 1
    assert "rank 0 sent float32[3]" in told[0]


@pytest.mark.mpi(min_size=2)
def test_all_ranks_hear_of_a_message_that_is_refused_over_mpi(any_world):
    comm = any_world.split(0, any_world.rank)
    told = any_world.allgather_object(heard(comm))
    comm.abandon()
    assert len(set(told)) == 1
    assert "rank 1 expected int32[3]" in told[0]


def test_objects_of_any_size_travel():
    def work(comm):
        if comm.rank == 0:
            for value in (None, {"a": [1, 2]}, "x" * 100_000):
                comm.send_object(value, to=1)
            return None
        return [comm.recv_object(source=0) for _ in range(3)]

    assert run_loopback(2, work)[1] == [None, {"a": [1, 2]}, "x" * 100_000]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_objects_are_broadcast_gathered_and_scattered(size, exchange):
    def work(comm):
        last = comm.size - 1
        return (
            comm.broadcast_object("from the last" if comm.rank == last else None, root=last),
            comm.allgather_object({"rank": comm.rank, "long": "x" * comm.rank}),
            comm.gather_object(comm.rank, root=last),
            comm.scatter_object([10 * r for r in range(comm.size)] if comm.rank == last else None, root=last),
        )

    for rank, (told, everyone, gathered, mine) in enumerate(run_loopback(size, work, **exchange)):
        assert told == "from the last"
        assert everyone == [{"rank": r, "long": "x" * r} for r in range(size)]
        assert gathered == (list(range(size)) if rank == size - 1 else None)
        assert mine == 10 * rank


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.send(np.ones(1), to=3), "ranks 0 to 0"),
        (lambda c: c.recv(np.ones(1), source=-1), "ranks 0 to 0"),
        (lambda c: c.send(np.ones(1), to=0), "would wait for itself"),
        (lambda c: c.start_send(np.ones(1), to=0, tag=-1), "tag -1"),
        (lambda c: c.start_send(np.ones(1), to=0, tag="a"), "tag 'a'"),
        (lambda c: c.probe(-1), "tag -1"),
        (lambda c: c.probe(2**31), "tag 2147483648"),
        (lambda c: c.start_send(np.ones(1), to=0.0), r"rank 0\.0, but"),
        (lambda c: c.scatter_object([1, 2]), "one object for each of the 1 ranks"),
    ],
)
def test_bad_arguments_are_named(call, words):
    with pytest.raises(OperationError, match=words):
        call(Communicator.alone())


def test_a_sendrecv_that_is_refused_has_sent_nothing():
    def work(comm):
        peer, out = 1 - comm.rank, np.zeros(1)
        for source, tag in ((99, 0), (peer, -1)):
            with pytest.raises(OperationError):
                comm.sendrecv(np.full(1, -1.0), peer, out, source, tag)
        return comm.sendrecv(np.full(1, 1.0 + comm.rank), peer, out, peer).item()

    assert run_loopback(2, work, timeout_s=20) == [2.0, 1.0]


@pytest.mark.mpi
def test_sendrecv_between_arrays_that_share_memory_brings_what_was_there(any_world):
    """Shifted and transposed views, and an array towards itself."""
    after, before = (any_world.rank + 1) % any_world.size, (any_world.rank - 1) % any_world.size
    views = {
        "itself": lambda x: (x, x),
        "shifted": lambda x: (x[:-1], x[1:]),
        "shifted back": lambda x: (x[1:], x[:-1]),
        "into the transposed": lambda x: (x, x.T),
        "of the transposed": lambda x: (x.T, x),
        "both transposed": lambda x: (x.T, x.T),
        "of every second": lambda x: (x.reshape(-1)[::2], x.reshape(-1)[: len(x) ** 2 // 2]),
        "into every second": lambda x: (x.reshape(-1)[: len(x) ** 2 // 2], x.reshape(-1)[::2]),
    }
    wrong = []
    for name, view in views.items():
        for side in (4, 300):
            for start in (np.arange(side * side, dtype=np.float32), torch.arange(float(side * side))):
                sent, into = view((start + 7 * any_world.rank).reshape(side, side))
                expected, _ = view((start + 7 * before).reshape(side, side))
                found = any_world.sendrecv(sent, after, into, before)
                if not np.array_equal(np.asarray(found), np.asarray(expected)):
                    wrong.append((name, side, type(start).__name__))
    assert not wrong


def probed(comm):
    """The last rank hears from rank 0 and from itself, under two tags, and asks who has sent."""
    found, last = {}, comm.size - 1
    if comm.rank == last:
        found["nothing has come"] = comm.probe(5)
    comm.barrier()
    handles = []
    if comm.rank == 0:
        handles = [comm.start_send(np.array([10.0 + call]), last, tag=5) for call in range(2)]
    comm.barrier()  # so the message from rank 0 is the first
    if comm.rank == last:
        found["another tag"] = comm.probe(4)
        found["the first"] = [until_found(comm, 5) for _ in range(2)]  # looking takes nothing away
        handles.append(comm.start_send(np.array([20.0]), last, tag=4))
        found["to oneself"] = until_found(comm, 4)
        found["received"] = [
            comm.recv(np.empty(1), found["to oneself"], tag=4).tolist(),
            *(comm.recv(np.empty(1), until_found(comm, 5), tag=5).tolist() for _ in range(2)),
        ]
        found["nothing is left"] = comm.probe(4), comm.probe(5)
    for handle in handles:
        handle.wait()
    expected = {
        "nothing has come": None,
        "another tag": None,
        "the first": [0, 0],
        "to oneself": last,
        "received": [[20.0], [10.0], [11.0]],
        "nothing is left": (None, None),
    }
    return found, expected if comm.rank == last else {}


def until_found(comm, tag):
    """Probe until a message with the tag is there; the rank that sent it."""
    for _ in range(100_000):
        if (source := comm.probe(tag)) is not None:
            return source
        time.sleep(0.0001)
    raise AssertionError(f"rank {comm.rank} found no message with tag {tag}")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_probe_finds_messages_that_have_come_and_leaves_them(size):
    for found, expected in run_loopback(size, probed):
        assert found == expected


@pytest.mark.mpi
def test_a_probe_over_mpi_finds_messages_that_have_come_and_leaves_them(any_world):
    told = any_world.allgather_object(probed(any_world))
    assert [found for found, _ in told] == [expected for _, expected in told]


def from_any(comm):
    """Rank 0 receives one message from each other rank, in the order in which they come."""
    if comm.rank:
        comm.send(np.full(50_000, float(comm.rank)), 0, tag=7)
        return None
    received = {}
    for _ in range(comm.size - 1):
        source = until_found(comm, 7)
        received[source] = set(comm.start_recv(np.empty(50_000), source, tag=7).wait().tolist())
    return received, comm.probe(7)


def test_messages_of_any_source_are_received_by_a_probe():
    assert run_loopback(4, from_any)[0] == ({rank: {float(rank)} for rank in range(1, 4)}, None)


@pytest.mark.mpi
def test_messages_of_any_source_are_received_by_a_probe_over_mpi(any_world):
    told = any_world.broadcast_object(from_any(any_world))
    assert told == ({rank: {float(rank)} for rank in range(1, any_world.size)}, None)


def test_a_message_that_a_posted_receive_takes_is_not_found():
    def work(comm):
        if comm.rank == 0:
            comm.barrier()
            comm.start_send(np.ones(2), 1).wait()
            comm.barrier()
            return None
        handle = comm.start_recv(np.empty(2), 0)
        comm.barrier()
        comm.barrier()
        return comm.probe(), handle.wait().tolist(), comm.probe()

    assert run_loopback(2, work)[1] == (None, [1.0, 1.0], None)
