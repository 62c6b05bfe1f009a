"""Messages between device memories by way of pinned memory: right bytes, in order, and no deadlock."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time

import numpy as np
import pytest

from hpcpar.errors import MismatchError
from hpcpar.transport import loopback
from hpcpar.transport.gpu.cuda_driver import driver
from hpcpar.transport.gpu.queue import DeviceOctets, Queue
from hpcpar.transport.gpu.staged_messages import PIECE_NBYTES, SMALL_NBYTES, PinnedPool, StagedExchange, cut
from hpcpar.transport.interface import COLLECTIVE_TAGS

pytestmark = [pytest.mark.timeout(100), pytest.mark.usefixtures("stand_in")]

ENDS_AFTER_S = 40
LENGTHS = (0, 1, PIECE_NBYTES - 1, PIECE_NBYTES, PIECE_NBYTES + 1, 5 * PIECE_NBYTES + 3)
COLLECTIVE, USERS = 5, COLLECTIVE_TAGS + 5


def sample(nbytes, *seed):
    return np.frombuffer(np.random.default_rng((nbytes, *seed)).bytes(nbytes), dtype=np.uint8)


class Rank:
    """One thread's transport, queue and pool, and device memory for tests."""

    def __init__(self, transport, *, most_nbytes=64 * 2**20):
        self.cuda = driver()
        self.transport = transport
        self.queue = Queue(self.cuda, 0, lambda ordinal: None)
        self.pool = PinnedPool(self.cuda, most_nbytes=most_nbytes)
        self.arrays = []

    @property
    def number(self):
        return self.transport.rank

    def close(self):
        self.queue.synchronize()
        self.pool.close()

    def filled(self, values):
        from tests.transport.gpu.cuda_stand_in import DeviceArray

        array = DeviceArray.from_host(values)
        self.arrays.append(array)
        return DeviceOctets(array.address, array.nbytes, self.queue, array)

    def room(self, nbytes):
        """Memory for a message, with as much again behind it."""
        return self.filled(np.full(2 * nbytes + 8, 7, dtype=np.uint8))[:nbytes]

    def held(self, octets):
        """What the memory holds once the queue has come so far; nothing behind it may have changed."""
        self.queue.synchronize()
        whole = octets.owner.to_host()
        assert (whole[octets.size :] == 7).all(), "bytes beyond the message were written"
        return whole[: octets.size]

    def start(self, sends=(), receives=(), tag=COLLECTIVE, transport=None):
        return StagedExchange(transport or self.transport, self.queue, self.pool, sends, receives, tag)

    def finish(self, *exchanges):
        ends_s = time.monotonic() + ENDS_AFTER_S
        attempt = 0
        while exchanges := [exchange for exchange in exchanges if not exchange.test()]:
            assert time.monotonic() < ends_s, [exchange.waiting_for() for exchange in exchanges]
            self.transport.pause(attempt)
            attempt += 1


def run(size, function, **options):
    """`function(Rank)` on threads; results by rank."""

    def work(transport):
        rank = Rank(transport, **options)
        found = function(rank)
        rank.close()
        return found

    return loopback.run(size, work)


@pytest.fixture
def pair():
    """Two ranks in one thread: whoever tests them decides who gets on."""
    ranks = [Rank(transport) for transport in loopback.connect(2)]
    yield ranks
    for rank in ranks:
        rank.close()


@contextlib.contextmanager
def held_up(stand_in, queue):
    """The queue gets no further until the end of this, and no memory is freed; gives what ends it."""
    go = threading.Event()
    wait = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: go.wait(ENDS_AFTER_S) and None)
    assert stand_in.load().stand_in_enqueue(queue.stream, wait, None) == 0
    try:
        yield go.set
    finally:
        go.set()
        queue.synchronize()


def poked(*exchanges):
    """Test all of them for a while; the last results."""
    found = [False]
    ends_s = time.monotonic() + 0.1
    while time.monotonic() < ends_s:
        found = [exchange.test() for exchange in exchanges]
        time.sleep(0.001)
    return found


# Cutting


@pytest.mark.parametrize(
    ("nbytes", "lengths"),
    [
        (0, [0]),
        (1, [1]),
        (PIECE_NBYTES - 1, [PIECE_NBYTES - 1]),
        (PIECE_NBYTES, [PIECE_NBYTES, 0]),
        (PIECE_NBYTES + 1, [PIECE_NBYTES, 1]),
        (3 * PIECE_NBYTES, [PIECE_NBYTES] * 3 + [0]),
    ],
)
def test_a_message_is_cut_into_full_pieces_and_a_shorter_one(nbytes, lengths):
    assert [piece.stop - piece.start for piece in cut(nbytes)] == lengths
    assert [piece.start for piece in cut(nbytes)] == [k * PIECE_NBYTES for k in range(len(lengths))]


# Memory


def test_a_slot_given_back_is_lent_again(pair):
    rank, _ = pair
    slot = rank.pool.take(PIECE_NBYTES, rank.queue, needed=True)
    slot.octets[...] = 3
    rank.pool.give_back(slot)
    assert rank.pool.take(SMALL_NBYTES + 1, rank.queue, needed=True) is slot
    assert rank.pool.nbytes == PIECE_NBYTES


def test_small_slots_share_one_allocation_and_do_not_overlap(pair):
    rank, _ = pair
    count = PIECE_NBYTES // SMALL_NBYTES
    slots = [rank.pool.take(1 + index, rank.queue, needed=False) for index in range(count)]
    assert rank.pool.nbytes == PIECE_NBYTES
    starts = sorted(slot.address for slot in slots)
    assert starts == [starts[0] + k * SMALL_NBYTES for k in range(count)]
    assert all(slot.octets.size == SMALL_NBYTES for slot in slots)
    assert all(slot.octets.ctypes.data == slot.address for slot in slots)


def test_a_pool_at_its_bound_grows_only_for_who_has_nothing():
    rank = Rank(loopback.connect(1)[0], most_nbytes=2 * PIECE_NBYTES)
    held = [rank.pool.take(PIECE_NBYTES, rank.queue, needed=False) for _ in range(3)]
    assert held[2] is None
    assert rank.pool.take(PIECE_NBYTES, rank.queue, needed=True) is not None
    assert rank.pool.nbytes == 3 * PIECE_NBYTES
    rank.close()


def test_a_slot_that_is_copied_from_is_lent_again_only_after_the_copy(stand_in):
    rank = Rank(loopback.connect(1)[0], most_nbytes=PIECE_NBYTES)
    slot = rank.pool.take(PIECE_NBYTES, rank.queue, needed=True)
    with held_up(stand_in, rank.queue) as release:
        rank.pool.give_back(slot, rank.queue.mark())
        assert rank.pool.take(PIECE_NBYTES, rank.queue, needed=True) is None
        release()
        rank.queue.synchronize()
        assert rank.pool.take(PIECE_NBYTES, rank.queue, needed=True) is slot
    rank.close()


def test_closing_waits_for_copies_and_unpins_everything(stand_in):
    rank = Rank(loopback.connect(1)[0])
    slots = [rank.pool.take(nbytes, rank.queue, needed=True) for nbytes in (1, PIECE_NBYTES)]

    def close():
        rank.cuda.use(0)
        rank.pool.close()

    with held_up(stand_in, rank.queue) as release:
        rank.pool.give_back(slots[1], rank.queue.mark())
        freed = stand_in.calls("cuMemFreeHost")
        closing = threading.Thread(target=close)
        closing.start()
        closing.join(0.1)
        assert closing.is_alive()
        assert stand_in.calls("cuMemFreeHost") == freed
        release()
        closing.join(ENDS_AFTER_S)
    assert not closing.is_alive()
    assert rank.pool.nbytes == 0


# Bytes


def both_directions(nbytes, tag):
    def work(rank):
        other = 1 - rank.number
        target = rank.room(nbytes)
        exchange = rank.start([(rank.filled(sample(nbytes, rank.number)), other)], [(target, other)], tag)
        rank.finish(exchange)
        return rank.held(target), exchange.received_nbytes(), exchange.waiting_for(), exchange.test()

    for number, (found, received, missing, is_complete) in enumerate(run(2, work)):
        assert np.array_equal(found, sample(nbytes, 1 - number))
        assert received == nbytes
        assert missing == ()
        assert is_complete


def ring(size, nbytes, tag):
    """Everybody sends to the next one at once, twice around."""

    def work(rank):
        passing = rank.filled(sample(nbytes, rank.number))
        for _ in range(2):
            target = rank.room(nbytes)
            sends = [(passing, (rank.number + 1) % size)]
            rank.finish(rank.start(sends, [(target, (rank.number - 1) % size)], tag))
            passing = target
        return rank.held(passing)

    for number, found in enumerate(run(size, work)):
        assert np.array_equal(found, sample(nbytes, (number - 2) % size))


@pytest.mark.parametrize("tag", [COLLECTIVE, USERS])
@pytest.mark.parametrize("nbytes", [*LENGTHS, 3 * PIECE_NBYTES, SMALL_NBYTES, SMALL_NBYTES + 1])
def test_both_directions_at_once(nbytes, tag):
    both_directions(nbytes, tag)


@pytest.mark.parametrize("tag", [COLLECTIVE, USERS])
@pytest.mark.parametrize("size", [3, 4])
def test_a_ring_in_which_everybody_sends_at_once(size, tag):
    ring(size, 3 * PIECE_NBYTES + 5, tag)


@pytest.mark.parametrize("tag", [COLLECTIVE, USERS])
def test_copies_that_come_late_are_waited_for(tag, monkeypatch):
    monkeypatch.setenv("STAND_IN_JITTER_US", "3000")
    ring(3, 4 * PIECE_NBYTES + 5, tag)
    both_directions(2 * PIECE_NBYTES, tag)


def test_a_rank_sends_to_itself():
    def work(rank):
        target = rank.room(2 * PIECE_NBYTES)
        rank.finish(rank.start([(rank.filled(sample(2 * PIECE_NBYTES)), 0)], [(target, 0)]))
        return rank.held(target)

    assert np.array_equal(run(1, work)[0], sample(2 * PIECE_NBYTES))


@pytest.mark.parametrize("tag", [COLLECTIVE, USERS])
def test_several_messages_to_one_peer_keep_their_order(tag):
    lengths = [*LENGTHS, 0, 3, 2 * PIECE_NBYTES]

    def work(rank):
        other = 1 - rank.number
        sends = [(rank.filled(sample(n, rank.number, k)), other) for k, n in enumerate(lengths)]
        targets = [rank.room(n) for n in lengths]
        exchange = rank.start(sends, [(target, other) for target in targets], tag)
        rank.finish(exchange)
        return [rank.held(target) for target in targets], exchange.received_nbytes()

    for number, (found, received) in enumerate(run(2, work)):
        assert received == sum(lengths)
        for k, n in enumerate(lengths):
            assert np.array_equal(found[k], sample(n, 1 - number, k))


@pytest.mark.parametrize("tag", [COLLECTIVE, USERS])
def test_exchanges_beside_each_other_under_one_tag_meet_in_the_order_of_their_start(tag):
    lengths = [5 * PIECE_NBYTES + 3, 1, 3 * PIECE_NBYTES, 5 * PIECE_NBYTES + 3]

    def work(rank):
        if rank.number == 0:
            sources = [rank.filled(sample(n, k)) for k, n in enumerate(lengths)]
            exchanges = [rank.start([(source, 1)], [], tag) for source in sources]
            rank.finish(*reversed(exchanges))
            return None
        targets = [rank.room(n) for n in lengths]
        exchanges = [rank.start([], [(target, 0)], tag) for target in targets]
        rank.finish(*reversed(exchanges))
        return [rank.held(target) for target in targets]

    _, found = run(2, work)
    for k, n in enumerate(lengths):
        assert np.array_equal(found[k], sample(n, k))


def test_exchanges_under_other_tags_do_not_wait_for_each_other(pair):
    sender, receiver = pair
    large = sender.start([(sender.filled(sample(3 * PIECE_NBYTES)), 1)], [], COLLECTIVE)
    small = sender.start([(sender.filled(sample(9)), 1)], [], COLLECTIVE + 1)
    target = receiver.room(9)
    receive = receiver.start([], [(target, 0)], COLLECTIVE + 1)
    sender.finish(small)
    receiver.finish(receive)
    assert not large.test()
    assert np.array_equal(receiver.held(target), sample(9))
    receiver.start([], [(receiver.room(3 * PIECE_NBYTES), 0)], COLLECTIVE)
    assert not poked(large)[0]


@pytest.mark.parametrize("size", [3, 4])
def test_everybody_sends_to_everybody_through_a_pool_that_is_always_too_small(size):
    """Each rank begins with another peer, and listens to yet another: with one slot for all, a deadlock."""
    nbytes = 2 * PIECE_NBYTES + 5

    def work(rank):
        others = [(rank.number + step) % size for step in range(1, size)]
        targets = {other: rank.room(nbytes) for other in others}
        sends = [(rank.filled(sample(nbytes, rank.number, other)), other) for other in others]
        rank.finish(rank.start(sends, [(targets[other], other) for other in others]))
        pinned_nbytes = rank.pool.nbytes
        return {other: rank.held(target) for other, target in targets.items()}, pinned_nbytes

    for number, (found, pinned_nbytes) in enumerate(run(size, work, most_nbytes=0)):
        assert all(np.array_equal(got, sample(nbytes, other, number)) for other, got in found.items())
        # For each of the messages one large slot, and small ones for the ends of all.
        assert pinned_nbytes <= (2 * (size - 1) + 1) * PIECE_NBYTES


def test_lengths_that_the_transport_does_not_tell_of_collectives_are_not_asked_for():
    class Silent:
        """As MPI's exchanges are when they belong to a collective."""

        def __init__(self, exchange):
            self.test, self.waiting_for = exchange.test, exchange.waiting_for

        def received_nbytes(self):
            return 0

    class SilentTransport:
        def __init__(self, transport):
            self._transport = transport

        def start(self, *messages):
            return Silent(self._transport.start(*messages))

    nbytes = 3 * PIECE_NBYTES + 1

    def work(rank):
        transport = SilentTransport(rank.transport)
        if rank.number == 0:
            rank.finish(rank.start([(rank.filled(sample(nbytes)), 1)], transport=transport))
            return None
        target = rank.room(nbytes)
        rank.finish(rank.start([], [(target, 0)], transport=transport))
        return rank.held(target)

    assert np.array_equal(run(2, work)[1], sample(nbytes))


# Lengths that do not fit


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (0, 1),
        (3, 10),
        (0, 3 * PIECE_NBYTES),
        (PIECE_NBYTES, PIECE_NBYTES + 1),
        (PIECE_NBYTES - 1, PIECE_NBYTES),
        (PIECE_NBYTES, 5 * PIECE_NBYTES),
        (2 * PIECE_NBYTES + 3, 5 * PIECE_NBYTES),
    ],
)
def test_a_message_that_is_too_short_is_reported_and_takes_nothing_of_the_next(sent, expected):
    def work(rank):
        if rank.number == 0:
            messages = [rank.filled(sample(sent)), rank.filled(sample(3 * PIECE_NBYTES, 1))]
            rank.finish(*(rank.start([(octets, 1)], [], USERS) for octets in messages))
            return None
        target, following = rank.room(expected), rank.room(3 * PIECE_NBYTES)
        short = rank.start([], [(target, 0)], USERS)
        whole = rank.start([], [(following, 0)], USERS)
        rank.finish(short, whole)
        return short.received_nbytes(), whole.received_nbytes(), rank.held(target), rank.held(following)

    short_nbytes, whole_nbytes, found, following = run(2, work)[1]
    assert short_nbytes == sent
    assert whole_nbytes == 3 * PIECE_NBYTES
    assert np.array_equal(found[:sent], sample(sent))
    assert (found[sent:] == 7).all()
    assert np.array_equal(following, sample(3 * PIECE_NBYTES, 1))


@pytest.mark.parametrize(
    ("sent", "expected"),
    [(1, 0), (11, 10), (PIECE_NBYTES + 1, PIECE_NBYTES), (PIECE_NBYTES, 5), (2 * PIECE_NBYTES, 3)],
)
def test_a_message_that_is_too_long_is_an_error(sent, expected):
    def work(rank):
        if rank.number == 0:
            rank.finish(rank.start([(rank.filled(sample(sent)), 1)], [], USERS))
        else:
            rank.finish(rank.start([], [(rank.room(expected), 0)], USERS))

    with pytest.raises(MismatchError, match="rank 0 sent"):
        run(2, work)


def test_an_exchange_that_failed_holds_nobody_up(pair):
    sender, receiver = pair
    long = sender.start([(sender.filled(sample(11)), 1), (sender.filled(sample(12)), 1)], [], USERS)
    assert poked(long) == [False]
    with pytest.raises(MismatchError, match="rank 0 sent 11 bytes to rank 1, which expects 10"):
        receiver.start([], [(receiver.room(10), 0), (receiver.room(10), 0)], USERS)
    second = receiver.room(12)
    receive = receiver.start([], [(second, 0)], USERS)
    receiver.finish(receive)
    assert np.array_equal(receiver.held(second), sample(12))


def test_an_exchange_is_over_after_its_error(pair):
    sender, receiver = pair
    target = receiver.room(PIECE_NBYTES)
    receive = receiver.start([], [(target, 0), (receiver.room(10), 0)], USERS)
    send = sender.start([(sender.filled(sample(PIECE_NBYTES)), 1), (sender.filled(sample(10)), 1)], [], USERS)

    def fail(*_):
        raise MismatchError("no")

    poked(send)
    receiver.transport.start = fail
    with pytest.raises(MismatchError, match="no"):
        poked(receive)
    del receiver.transport.start
    assert receive.test()
    assert receive.waiting_for() == ()


# What waits for what


def test_a_sender_copies_two_pieces_ahead_and_waits_for_its_peer(pair, stand_in):
    sender, receiver = pair
    source = sender.filled(sample(5 * PIECE_NBYTES))
    before = stand_in.calls("cuMemcpyAsync")
    send = sender.start([(source, 1)], [], COLLECTIVE)
    assert stand_in.calls("cuMemcpyAsync") - before == 2  # given at once, before anybody tests
    assert poked(send) == [False]
    assert stand_in.calls("cuMemcpyAsync") - before == 2
    assert send.waiting_for() == (1,)
    receiver.transport.start([], [(np.empty(PIECE_NBYTES, np.uint8), 0)], COLLECTIVE)
    assert poked(send) == [False]
    assert stand_in.calls("cuMemcpyAsync") - before == 3


@pytest.mark.parametrize(("tag", "ahead"), [(COLLECTIVE, 2), (USERS, 1)])
def test_a_receiver_listens_for_two_pieces_at_once_where_lengths_are_agreed(pair, tag, ahead):
    sender, receiver = pair
    receive = receiver.start([], [(receiver.room(4 * PIECE_NBYTES), 0)], tag)
    assert poked(receive) == [False]
    assert receive.waiting_for() == (0,)
    piece = sample(PIECE_NBYTES)
    sent = [sender.transport.start([(piece, 1)], [], tag) for _ in range(3)]
    assert [exchange.test() for exchange in sent] == [True] * ahead + [False] * (3 - ahead)


def test_what_is_sent_is_what_earlier_work_of_the_queue_makes(pair, stand_in):
    sender, receiver = pair
    nbytes = 2 * PIECE_NBYTES + 1
    source, made = sender.filled(np.zeros(nbytes, np.uint8)), sender.filled(sample(nbytes))
    target = receiver.room(nbytes)
    with held_up(stand_in, sender.queue) as release:
        sender.queue.copy(source.address, made.address, nbytes)
        send = sender.start([(source, 1)], [], COLLECTIVE)
        receive = receiver.start([], [(target, 0)], COLLECTIVE)
        assert poked(send, receive) == [False, False]
        assert send.waiting_for() == ()  # it is the GPU that is waited for
        release()
        sender.finish(send, receive)
    assert np.array_equal(receiver.held(target), sample(nbytes))


def test_a_receive_is_complete_when_its_copies_are_given_and_its_slots_are_free_when_they_are_over(
    pair, stand_in
):
    sender, receiver = pair
    target, copy = receiver.room(2 * PIECE_NBYTES - 5), receiver.room(2 * PIECE_NBYTES - 5)
    source = sender.filled(sample(target.size))
    with held_up(stand_in, receiver.queue) as release:
        receiver.queue.copy(copy.address, target.address, target.size)  # what is read there before
        receive = receiver.start([], [(target, 0)], COLLECTIVE)
        send = sender.start([(source, 1)], [], COLLECTIVE)
        sender.finish(send, receive)
        pinned_nbytes = receiver.pool.nbytes
        others = [receiver.pool.take(PIECE_NBYTES, receiver.queue, needed=True) for _ in range(2)]
        assert receiver.pool.nbytes == pinned_nbytes + 2 * PIECE_NBYTES
        release()
        receiver.queue.synchronize()
        others += [receiver.pool.take(PIECE_NBYTES, receiver.queue, needed=True) for _ in range(2)]
        assert receiver.pool.nbytes == pinned_nbytes + 2 * PIECE_NBYTES
    assert len({slot.address for slot in others}) == 4
    assert np.array_equal(receiver.held(target), sample(target.size))
    assert (receiver.held(copy) == 7).all()


def test_a_receive_whose_queue_is_held_up_keeps_two_slots_and_no_more(pair, stand_in):
    sender, receiver = pair
    nbytes = 5 * PIECE_NBYTES
    source, target = sender.filled(sample(nbytes)), receiver.room(nbytes)
    with held_up(stand_in, receiver.queue) as release:
        receive = receiver.start([], [(target, 0)], COLLECTIVE)
        send = sender.start([(source, 1)], [], COLLECTIVE)
        assert poked(send, receive) == [False, False]
        assert receiver.pool.nbytes == 2 * PIECE_NBYTES
        release()
        sender.finish(send, receive)
    assert np.array_equal(receiver.held(target), sample(nbytes))


def test_slots_come_back_and_the_pool_does_not_grow_over_many_exchanges():
    nbytes = 2 * PIECE_NBYTES + 3

    def work(rank):
        other = 1 - rank.number
        sizes = set()
        source, target = rank.filled(sample(nbytes)), rank.room(nbytes)
        for _ in range(50):
            rank.finish(
                rank.start([(source, other), (source[:9], other)], [(target, other), (target[:9], other)])
            )
            rank.queue.synchronize()
            sizes.add(rank.pool.nbytes)
        return sizes

    for sizes in run(2, work):
        # Two slots for each direction, and one allocation for small ones.
        assert max(sizes) <= 5 * PIECE_NBYTES


def test_a_pool_keeps_its_bound_when_exchanges_follow_each_other_without_a_pause(monkeypatch):
    monkeypatch.setenv("STAND_IN_JITTER_US", "500")
    nbytes = PIECE_NBYTES + 3

    def work(rank):
        other = 1 - rank.number
        source, target = rank.filled(sample(nbytes)), rank.room(nbytes)
        for _ in range(50):
            rank.finish(rank.start([(source, other)], [(target, other)]))
        return rank.pool.nbytes, rank.held(target)

    for pinned_nbytes, found in run(2, work, most_nbytes=8 * PIECE_NBYTES):
        assert pinned_nbytes <= 8 * PIECE_NBYTES
        assert np.array_equal(found, sample(nbytes))
