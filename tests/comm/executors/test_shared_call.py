"""Collectives through shared memory: repeated, under way together, short and long; always right."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

from hpcpar import partition
from hpcpar.algorithms.registry import ALGORITHMS
from hpcpar.comm import Communicator, calls, collectives, run_loopback, select
from hpcpar.comm.arguments import copy_to
from hpcpar.comm.executors import shared_reads
from hpcpar.comm.executors.shared_call import SharedCall
from hpcpar.comm.shm_segment import SLOTS
from hpcpar.errors import StallError
from hpcpar.transport import loopback
from hpcpar.units import MiB
from tests import soak
from tests.grid import pairwise

SIZES = [2, 3, 4]

TIMES = 10
"""A call is bound to the last slot of the memory at the eighth time."""

LONG = {"shared_memory": True, "post_nbytes": 64}
"""All but the shortest calls are long ones, which read where arrays lie."""
USUAL = {"shared_memory": True}


@pytest.fixture(autouse=True)
def sums_in_pieces(monkeypatch):
    """Let short arrays, too, be summed in several pieces where they are read from private memory."""
    monkeypatch.setattr(shared_reads, "SUMMED_AT_ONCE_NBYTES", 10_000)


def values(rank, count, call):
    """Small whole numbers, so that sums are exact, and others for every rank and call."""
    return (np.arange(count) * 7 + 3 * rank + call) % 5


def put(array, numbers):
    array[...] = torch.from_numpy(numbers) if isinstance(array, torch.Tensor) else numbers


def numpy_of(array):
    return array.detach().numpy().copy() if isinstance(array, torch.Tensor) else array.copy()


def remembered(comm, data, out, gathered, times):
    """Each collective that is remembered, on these arrays again and again: (what, found, expected).

    data, out   of the same number of elements, which the number of ranks divides
    gathered    that many from every rank
    """
    count, last = len(data), comm.size - 1
    start, stop = partition.bounds(count, comm.size)[comm.rank]
    for call in range(times):
        inputs = [values(rank, count, call) for rank in range(comm.size)]
        total, mine = np.sum(inputs, axis=0), inputs[comm.rank]
        put(data, mine)
        yield f"allreduce {call}, out", numpy_of(comm.allreduce(data, out=out)), total
        yield f"average {call}, out", numpy_of(comm.allreduce(data, "average", out=out)), total / comm.size
        yield f"allgather {call}", numpy_of(comm.allgather(data, out=gathered)), np.concatenate(inputs)
        pieces = [x.reshape(comm.size, -1)[comm.rank] for x in inputs]
        yield f"alltoall {call}", numpy_of(comm.alltoall(data, out=out)), np.concatenate(pieces)
        own = out[start:stop]
        yield f"reduce_scatter {call}, out", numpy_of(comm.reduce_scatter(data, out=own)), total[start:stop]
        yield f"input {call}", numpy_of(data), mine
        yield f"max {call}, in place", numpy_of(comm.allreduce(data, "max")), np.max(inputs, axis=0)
        put(data, mine)
        yield f"broadcast {call}", numpy_of(comm.broadcast(data, last)), inputs[last]
        put(data, mine)
        for root, algorithm in product((0, last), ("binomial", "ring", "direct")):
            found = comm.reduce(data, "average", root, out=out, algorithm=algorithm)
            expected = total / comm.size if comm.rank == root else None
            yield f"reduce {call} to {root}", None if found is None else numpy_of(found), expected
            yield f"input {call} of a reduce", numpy_of(data), mine
        found = comm.reduce(data, "max", last)
        expected = np.max(inputs, axis=0) if comm.rank == last else mine
        yield f"reduce {call}, in place", numpy_of(data), expected
        yield f"reduce {call}, in place, result", found is data, comm.rank == last
        put(data, mine)
        yield f"average {call}, in place", numpy_of(comm.allreduce(data, "average")), total / comm.size
        put(data, mine)
        yield f"reduce_scatter {call}", numpy_of(comm.reduce_scatter(data)), total[start:stop]
        comm.barrier()


def shared_slice(comm, count):
    """The middle of an array that is shared."""
    return comm.allocate_shared(count + 1000, "float64")[300 : 300 + count]


def each_rank_its_own_kind(comm, count):
    """Shared on rank 0, torch's own on the last, NumPy's own on those between."""
    array = comm.allocate_shared(count, "float64")
    if comm.rank == 0:
        return array
    return torch.zeros(count, dtype=torch.float64) if comm.rank == comm.size - 1 else np.zeros(count)


KINDS = {
    "numpy": lambda comm, count: np.zeros(count),
    "torch": lambda comm, count: torch.zeros(count, dtype=torch.float64),
    "shared numpy": lambda comm, count: comm.allocate_shared(count, "float64"),
    "shared torch": lambda comm, count: comm.allocate_shared((count,), torch.float64),
    "shared slice": shared_slice,
    "mixed": each_rank_its_own_kind,
}


def remembered_on(comm, kind, count, times=TIMES):
    count = -(-count // comm.size) * comm.size
    arrays = [KINDS[kind](comm, n) for n in (count, count, comm.size * count)]
    return list(remembered(comm, *arrays, times))


@pytest.mark.parametrize(
    ("kind", "count", "size", "way"), pairwise(KINDS, [5, 2000, 12_000], SIZES, ["long", "usual", "messages"])
)
def test_remembered_calls_are_right_in_one_piece_in_several_and_read_where_they_lie(
    kind, count, size, way, quick_looks, assert_true
):
    options = {"long": LONG, "usual": USUAL, "messages": {}}
    for checks in run_loopback(size, lambda comm: remembered_on(comm, kind, count), **options[way]):
        assert_true(checks)


@pytest.mark.parametrize("kind", ["torch", "mixed"])
def test_long_messages_are_right_even_where_what_is_fresh_is_read_by_the_peers(
    kind, quick_looks, assert_true
):
    count = 2 * MiB // 8 + 1000
    for checks in run_loopback(2, lambda comm: remembered_on(comm, kind, count, times=6), **LONG):
        assert_true(checks)


@pytest.mark.mpi
@pytest.mark.parametrize("count", [5, 12_000])
@pytest.mark.parametrize("kind", ["numpy", "torch", "shared torch", "mixed"])
def test_remembered_calls_over_mpi_are_right(kind, count, any_world, assert_true):
    assert_true(remembered_on(any_world.unchecked("remembered"), kind, count))


@pytest.mark.mpi
def test_long_messages_over_mpi_are_right(any_world, assert_true):
    count = any_world.size * MiB // 8 + 1000
    data = np.zeros(count)
    checks = []
    comm = any_world.unchecked("long")
    for call in range(6):
        data[:] = values(comm.rank, count, call)
        found = comm.allreduce(data).copy()
        checks.append((call, found, sum(values(rank, count, call) for rank in range(comm.size))))
    assert_true(checks)


@pytest.mark.parametrize(
    ("size", "dtype", "count"), pairwise(SIZES, [torch.float16, torch.bfloat16, torch.float32], [7, 5000])
)
def test_remembered_sums_have_identical_bits_on_all_ranks_and_in_all_calls(count, dtype, size, quick_looks):
    def work(comm):
        fresh = torch.randn(count, generator=torch.Generator().manual_seed(comm.rank)).to(dtype)
        own, shareable = torch.empty(count, dtype=dtype), comm.allocate_shared(count, dtype)
        bits = {name: [] for name in ALGORITHMS["allreduce"]}
        for name, found in bits.items():
            for buffer in [own] * 6 + [shareable] * 6:
                buffer[:] = fresh
                comm.allreduce(buffer, "average", algorithm=name)
                found.append(buffer.view(torch.uint8).numpy().tobytes())
        return bits

    ranks = run_loopback(size, work, **LONG)
    alone = run_loopback(size, work)
    for name, found in ranks[0].items():
        assert {bits for rank in ranks for bits in rank[name]} == {found[0]}, name
        assert found[0] == alone[0][name][0], name


CHANGES = {
    "resized": lambda tensor: tensor.resize_(30),
    "replaced": lambda tensor: setattr(tensor, "data", torch.zeros(100)),
    "shortened": lambda tensor: setattr(tensor, "data", tensor.data[:40]),
    "of another type": lambda tensor: setattr(tensor, "data", tensor.data.view(torch.int32)),
    "another's": lambda tensor: tensor.set_(torch.zeros(60)),
    "transposed": lambda tensor: setattr(tensor, "data", torch.zeros(10, 10).t()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_changes_under_its_name_is_seen(change, exchange):
    def work(comm):
        tensor = torch.zeros(100)
        kept = tensor.data  # so that its memory goes to nobody else
        for _ in range(TIMES):
            comm.allreduce(tensor)
        CHANGES[change](tensor)
        results = []
        for call in range(TIMES):
            tensor.fill_(comm.rank + call)
            comm.allreduce(tensor)
            results.append(tensor.unique().tolist())
        return results, kept.sum().item() if change == "replaced" else 0.0

    expected = [[3 + 3 * call] for call in range(TIMES)]
    assert run_loopback(3, work, **exchange) == [(expected, 0.0)] * 3


def test_arrays_that_are_freed_and_made_again_are_right_whatever_memory_they_get(exchange):
    def work(comm):
        checks = []
        for call in range(6 * SLOTS):
            make = (np.zeros, lambda n: torch.zeros(n, dtype=torch.float64))[(call // 3 + comm.rank) % 2]
            array = make(30 + 400 * (call % 3))
            array[:] = comm.rank + call
            comm.allreduce(array)
            checks.append((float(array[0]), float(array[-1])) == (3 + 3 * call,) * 2)
            del array
        return checks

    assert all(all(checks) for checks in run_loopback(3, work, **exchange))


def test_a_tensor_is_not_kept_alive_by_what_is_remembered_of_it(exchange):
    def work(comm):
        array, tensor = np.ones(1000), torch.ones(1000)
        for _ in range(3 * SLOTS):
            comm.allreduce(array)
            comm.allreduce(tensor)
        references = weakref.ref(array), weakref.ref(tensor)
        del array, tensor
        gc.collect()
        return [reference() is None for reference in references]

    assert run_loopback(2, work, **exchange) == [[True, True]] * 2


def test_more_calls_than_are_kept_make_room(sharing, monkeypatch):
    monkeypatch.setattr(calls, "CACHED", 3)

    def work(comm):
        tensors = [torch.zeros(100 + number) for number in range(7)]
        right = []
        for call in range(2 * TIMES):
            for tensor in tensors[: 2 if call % 2 else 7]:
                tensor.fill_(call + comm.rank)
                right.append(set(comm.allreduce(tensor).tolist()) == {2 * call + 1})
        assert len(comm._calls.cache) <= 3
        return right

    assert all(all(right) for right in run_loopback(2, work, **sharing))


def test_calls_that_are_traced_are_right_and_noted(sharing):
    from hpcpar.comm import Trace

    def work(comm):
        tensor = torch.zeros(10)
        found = []
        for call in range(2 * TIMES):
            comm.trace = Trace() if call == TIMES else comm.trace
            tensor.fill_(call)
            found.append(comm.allreduce(tensor)[0].item())
        return found, sum(event.category == "communication" for event in comm.trace.events)

    expected = [2.0 * call for call in range(2 * TIMES)], TIMES
    assert run_loopback(2, work, **sharing) == [expected] * 2


# Several at once.


def test_more_calls_under_way_than_lanes_wait_for_their_turn(exchange):
    def work(comm):
        other = comm.split(0, key=-comm.rank)
        buffers = [np.full(200, comm.rank + call, dtype=float) for call in range(5 * SLOTS)]
        handles = [(other if call % 3 else comm).start_allreduce(b) for call, b in enumerate(buffers)]
        for index in np.random.default_rng(comm.rank).permutation(len(handles)):
            handles[index].wait()
        return [set(b.tolist()) for b in buffers]

    expected = [{3.0 + 3 * call} for call in range(5 * SLOTS)]
    assert run_loopback(3, work, **exchange) == [expected] * 3


def test_remembered_calls_take_their_turn_behind_those_under_way(exchange):
    def work(comm):
        tensor, right = torch.zeros(500), []
        for call in range(4 * SLOTS):
            started = [np.full(700, call + number + comm.rank) for number in range(call % (2 * SLOTS))]
            handles = [comm.start_allreduce(array) for array in started]
            tensor.fill_(call + comm.rank)
            right.append(set(comm.allreduce(tensor).tolist()) == {3 * call + 3})
            for handle in reversed(handles):
                handle.wait()
            right += [set(a.tolist()) == {3 * (call + n) + 3} for n, a in enumerate(started)]
        return right

    assert all(all(right) for right in run_loopback(3, work, **exchange))


@pytest.mark.parametrize("size", SIZES)
def test_a_stage_that_is_divided_differently_from_call_to_call_is_not_written_before_it_is_read(
    size, sharing
):
    """An alltoall sends something else to each, an allreduce in its second step the same to all."""

    def work(comm):
        inputs = [values(rank, 60 * size, 0) for rank in range(size)]
        pieces = np.concatenate([x.reshape(size, -1)[comm.rank] for x in inputs])
        total, checks = np.sum(inputs, axis=0), []
        kept, out = inputs[comm.rank].copy(), np.empty(60 * size, dtype=int)
        for call in range(6 * SLOTS):
            # Fresh arrays, then the same ones; one or two of each, so that the lanes change hands.
            mine = inputs[comm.rank].copy() if call < 2 * SLOTS else kept
            for _ in range(1 + call % 2):
                checks.append((f"alltoall {call}", comm.alltoall(mine, out=out).copy(), pieces))
            checks.append((f"broadcast {call}", comm.broadcast(mine, algorithm="ring").copy(), inputs[0]))
            mine[:] = inputs[comm.rank]
            checks.append((f"allreduce {call}", comm.allreduce(mine, algorithm="direct").copy(), total))
            mine[:] = inputs[comm.rank]
            if call % 3 == 0:
                comm.barrier()
        return checks

    for checks in run_loopback(size, work, **sharing):
        for what, found, expected in checks:
            np.testing.assert_array_equal(found, expected, err_msg=what)


SLOW_S = 0.15
"""Longer than a call looks for what is to come before it goes on piece by piece."""


@pytest.mark.parametrize("kind", ["torch", "shared torch"])
@pytest.mark.parametrize("count", [10, 2000, 12_000])
def test_slow_ranks_get_what_was_sent_and_not_what_the_sender_has_next(count, kind, quick_looks):
    def work(comm):
        tensor, found = KINDS[kind](comm, count), []
        for call in range(4 * SLOTS):
            if comm.rank and call >= 3 * SLOTS:
                time.sleep(SLOW_S if call == 3 * SLOTS else 0.01)
            tensor.fill_(call if comm.rank == 0 else -1)
            comm.broadcast(tensor)
            found.append(set(tensor.tolist()))
        return found

    expected = [{float(call)} for call in range(4 * SLOTS)]
    assert run_loopback(3, work, **LONG) == [expected] * 3


def test_slow_ranks_get_what_was_sent_before_the_stage_is_divided_anew(quick_looks):
    """To each its own lies in the stage when the same for all is to be laid out."""

    def work(comm):
        whole, out, same, found = np.empty(30), np.empty(10), np.empty(200), []
        for call in range(4 * SLOTS):
            name = "scatter" if call // SLOTS % 2 == 0 else "broadcast"
            if comm.rank:
                time.sleep(0.05 if call % SLOTS == 0 else 0.0)
            if name == "scatter":
                whole[:] = np.repeat(call + np.arange(3), 10)
                comm.scatter(whole if comm.rank == 0 else None, out=out, algorithm="direct")
            else:
                same[:] = call if comm.rank == 0 else -1
                comm.broadcast(same, algorithm="direct")
            found.append(set((out if name == "scatter" else same).tolist()))
        return found

    for rank, found in enumerate(run_loopback(3, work, **LONG)):
        assert found == [{call + rank * (call // SLOTS % 2 == 0)} for call in range(4 * SLOTS)]


@pytest.mark.parametrize("size", SIZES)
def test_several_messages_between_two_ranks_in_one_step_keep_their_order(size, sharing, monkeypatch):
    """As those of algorithms that pass on whole segments: of 512 bytes here, and some of them in pieces."""
    monkeypatch.setattr(select, "SEGMENT_NBYTES", 512)
    monkeypatch.setattr(select, "NODES_SEGMENT_NBYTES", 4096)
    segmented = [
        (collective, name)
        for collective in ("allreduce", "broadcast")
        for name, algorithm in ALGORITHMS[collective].items()
        if algorithm.segmented
    ]
    assert ("allreduce", "double_binary") in segmented

    def work(comm):
        data, checks = torch.empty(1500, dtype=torch.int64), []
        for (collective, name), call in product(segmented, range(SLOTS + 2)):
            inputs = [values(rank, 1500, call) for rank in range(size)]
            put(data, inputs[comm.rank])
            getattr(comm, collective)(data, algorithm=name)
            expected = np.sum(inputs, axis=0) if collective == "allreduce" else inputs[0]
            checks.append((f"{collective} by {name} {call}", numpy_of(data), expected))
        return checks

    for checks in run_loopback(size, work, **sharing):
        for what, found, expected in checks:
            np.testing.assert_array_equal(found, expected, err_msg=what)


@pytest.mark.parametrize(("seed", "size", "post_nbytes"), pairwise([1, 2], SIZES, [1024, None]))
def test_random_programs_equal_the_serial_computation(seed, size, post_nbytes, quick_looks):
    options = {"shared_memory": True, "post_nbytes": post_nbytes}
    report, *_ = run_loopback(
        size, lambda comm: soak.run(soak.Options(150, seed, name_algorithms=True), comm), **options
    )
    assert report.wrong == 0, report.described


# Counting.


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("make", [np.ones, torch.ones])
def test_remembered_calls_are_counted_as_the_theory_says(size, make, exchange):
    """840 elements of 8 bytes divide by every size; between the resets nothing is left over."""
    nbytes, some = 840 * 8, size - 1

    def work(comm):
        data, out = make(840, dtype=torch.float64 if make is torch.ones else float), make(840)
        out, gathered = data + 0, make(840 * size, dtype=data.dtype)
        calls = {
            "allreduce": lambda: comm.allreduce(data, "max", algorithm="ring"),
            "broadcast": lambda: comm.broadcast(data, algorithm="direct"),
            "allgather": lambda: comm.allgather(data, out=gathered, algorithm="direct"),
            "reduce_scatter": lambda: comm.reduce_scatter(data, "max", algorithm="direct"),
            "alltoall": lambda: comm.alltoall(data, out=out, algorithm="direct"),
            "reduce": lambda: comm.reduce(data, out=out if comm.rank == 0 else None, algorithm="direct"),
            "barrier": lambda: comm.barrier(),
        }
        bills = []
        for times in (1, 3, 9):
            for call in calls.values():
                for _ in range(times):
                    call()
            rows = {row.collective: row for row in comm.traffic.rows()}
            bills.append(
                {name: (r.calls, r.messages, r.nbytes_sent, r.nbytes_received) for name, r in rows.items()}
            )
            comm.traffic.reset()
        return bills, comm.traffic.rows(), comm.traffic.nbytes_sent()

    rounds = (size - 1).bit_length()
    results = run_loopback(size, work, **exchange)
    for rank, (bills, rows, sent) in enumerate(results):
        assert (rows, sent) == ([], 0)
        for times, bill in zip((1, 3, 9), bills, strict=True):
            vector, chunk = times * some * nbytes, times * some * nbytes // size
            bill.pop("shared memory", None)
            assert bill == {
                "allreduce": (times, times * 2 * some, 2 * chunk, 2 * chunk),
                "broadcast": (
                    times,
                    times * some * (rank == 0),
                    vector * (rank == 0),
                    times * nbytes * (rank > 0),
                ),
                "allgather": (times, times * some, vector, vector),
                "reduce_scatter": (times, times * some, chunk, chunk),
                "alltoall": (times, times * some, chunk, chunk),
                "reduce": (
                    times,
                    times * (rank > 0),
                    times * nbytes * (rank > 0),
                    vector * (rank == 0),
                ),
                "barrier": (times, times * rounds, 0, 0),
            }


def test_what_was_counted_stays_when_a_call_is_no_longer_remembered(sharing):
    def work(comm):
        data = torch.ones(100)
        for _ in range(TIMES):
            comm.allreduce(data, algorithm="ring")
        before = comm.traffic.nbytes_sent("allreduce")
        comm._calls.forget_all()
        after = comm.traffic.nbytes_sent("allreduce")
        comm.allreduce(data, algorithm="ring")
        return before, after, comm.traffic.nbytes_sent("allreduce"), comm.traffic.row("allreduce").calls

    assert run_loopback(2, work, **sharing) == [(4000, 4000, 4400, 11)] * 2


# Ranks that read their input instead of copying it first.


@pytest.mark.parametrize(
    ("algorithm", "size", "sharing"),
    pairwise([*ALGORITHMS["allreduce"]], [2, 3, 4, 5], [USUAL, LONG, {"shared_memory": False}]),
)
def test_sums_are_right_whichever_ranks_give_out_and_leave_their_input(algorithm, size, sharing):
    def work(comm):
        inputs = [values(rank, 1000, 0).astype(np.float32) for rank in range(size)]
        found = []
        for giving_out in (range(size), range(0, size, 2), range(1, size, 2)):
            for _ in range(2):
                data, out = inputs[comm.rank].copy(), np.full(1000, np.nan, np.float32)
                if comm.rank in giving_out:
                    result = comm.allreduce(data, out=out, algorithm=algorithm)
                    assert np.array_equal(data, inputs[comm.rank])
                else:
                    result = comm.allreduce(data, algorithm=algorithm)
                found.append(result.copy())
                shifted = np.concatenate([inputs[comm.rank], out[:1]])
                found.append(comm.allreduce(shifted[:-1], out=shifted[1:], algorithm=algorithm).copy())
        return np.sum(inputs, axis=0), found

    for total, found in run_loopback(size, work, **sharing):
        assert all(np.array_equal(each, total) for each in found)


@pytest.mark.parametrize("sharing", [USUAL, LONG, {"shared_memory": False}])
@pytest.mark.parametrize("algorithm", ["ring", "one_shot", "rabenseifner", "recursive_doubling", "binomial"])
def test_a_sum_with_out_copies_its_input_nowhere(algorithm, sharing, monkeypatch):
    def work(comm):
        data, out = np.full(1000, 1.0), np.full(1000, np.nan)
        comm.allreduce(data, out=out, algorithm=algorithm)
        found = [out.copy()]
        if algorithm in ALGORITHMS["reduce"]:
            comm.reduce(data, root=1, out=out, algorithm=algorithm)
            found += [out] if comm.rank == 1 else []
        return all(np.array_equal(each, np.full(1000, comm.size)) for each in found)

    def spoiling(target, source):
        """Leave nothing of a sum that begins with a copy."""
        return [partial(target.octets.fill, 255)] if target.count == 1000 else copy_to(target, source)

    monkeypatch.setattr(collectives, "copy_to", spoiling)
    assert run_loopback(3, work, **sharing) == [True] * 3


# Ranks that never come.


def stalled(size, function, timeout_s=1.0, post_nbytes=None):
    """Call `function(comm)` on all ranks but the last, which never comes; the stall of each, by rank."""
    release, told = threading.Event(), {}

    def work(transport):
        comm = Communicator.over(transport, timeout_s=timeout_s)
        comm.share_memory(post_nbytes)
        if comm.rank == size - 1:
            release.wait(30)
            return
        try:
            function(comm)
        except StallError as error:
            told[comm.rank] = str(error)
        if len(told) == size - 1:
            release.set()
        # Ranks that are asked answer only while they wait.
        release.wait(5)

    loopback.run(size, work)
    return told


SILENT = "rank 2 does not answer: it is busy outside of communication, stopped, or dead"


def test_a_rank_that_never_comes_is_named_by_those_who_wait_for_what_it_sends():
    told = stalled(3, lambda comm: comm.allreduce(np.ones(10), algorithm="direct"))
    for rank in (0, 1):
        assert f"rank {rank} waits in allreduce (call 9 of 'world'), step 1 of 2, for rank 2" in told[rank]
        assert SILENT in told[rank]


def test_the_chain_of_who_waits_for_whom_is_followed_through_shared_memory():
    told = stalled(3, lambda comm: comm.broadcast(np.ones(10), 2, algorithm="ring"))
    assert "rank 0 waits in broadcast" in told[0]
    assert SILENT in told[0]
    assert SILENT in told[1]


@pytest.mark.parametrize("count", [10, 100_000])
def test_a_rank_that_does_not_take_what_is_sent_is_named(count):
    """A few pieces may wait in the stage; a message that is read where it lies may not."""
    told = stalled(2, lambda comm: [comm.broadcast(np.ones(count), algorithm="direct") for _ in range(30)])
    assert "rank 0 waits in broadcast" in told[0]
    assert "for rank 1; rank 1 does not answer" in told[0]


def test_a_rank_that_has_not_read_what_was_posted_is_named():
    """Ranks run ahead of each other by a few calls only: what was posted is not written over unread."""

    def work(comm):
        for _ in range(100 * SLOTS):
            comm.broadcast(np.ones(1), algorithm="direct")

    told = stalled(3, work)
    assert "rank 0 waits in broadcast" in told[0]
    assert f"for rank 2; {SILENT}" in told[0]


def test_a_short_call_counts_the_time_for_which_it_waited():
    is_asked = threading.Event()

    def work(comm):
        tensor = torch.zeros(10)
        for _ in range(TIMES):
            comm.allreduce(tensor)
        comm.traffic.reset()
        if comm.rank == 1:
            is_asked.wait(60)
            time.sleep(0.2)
        is_asked.set()
        comm.allreduce(tensor)
        return comm.traffic.row("allreduce").seconds_waited

    waited = run_loopback(2, work, shared_memory=True)
    assert waited[0] > 0.1
    assert waited[0] > waited[1]


def test_a_call_that_a_handler_ends_before_it_counts_leaves_its_slot(monkeypatch):
    """Another call gets its number, by an executor that uses no slot; later ones must not wait for it."""
    begin, ended = SharedCall.begin, []

    def interrupted(call: SharedCall, number: int) -> None:
        begin(call, number)
        if [number] == ended and call.rank == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(SharedCall, "begin", interrupted)

    def work(comm):
        data = np.ones(10)
        comm.allreduce(data)
        comm.barrier()
        if comm.rank == 0:
            ended.append(comm.calls)
            with pytest.raises(KeyboardInterrupt):
                comm.allreduce(data)
        comm._calls.count[0] += 1
        for _ in range(2 * SLOTS):
            comm.allreduce(data)
        return data[0]

    assert run_loopback(2, work, shared_memory=True, timeout_s=20) == [2.0 ** (2 * SLOTS + 1)] * 2
