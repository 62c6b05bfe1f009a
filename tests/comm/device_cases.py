"""What every way of moving device memory has to get right, for ranks that are threads, of MPI, or scripts.

Values are small whole numbers, so that every order of summation gives the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np

from hpcpar import partition
from hpcpar.comm import Communicator
from tests.transport.gpu.cuda_stand_in import DeviceArray

COUNTS = (0, 1, 7, 1000, 40_001)


Make = Callable[[np.ndarray], Any]
"""Makes of a host array one on a device: the stand-in's, or torch's, or CuPy's."""


def values(rank: int, count: int, dtype: str = "float32") -> np.ndarray:
    return ((np.arange(count) * (rank + 3) + rank) % 11 + 1).astype(dtype)


def on_device(host: np.ndarray) -> DeviceArray:
    return DeviceArray.from_host(host)


def to_host(array: Any) -> np.ndarray:
    """What an array of any kind holds, once the caller's stream has come so far."""
    if isinstance(array, DeviceArray):
        return array.to_host()
    return array.get() if hasattr(array, "get") else array.cpu().numpy()


def put(array: Any, host: np.ndarray) -> None:
    """Give an array other values in the caller's stream, perhaps later."""
    if isinstance(array, DeviceArray):
        array.put(host, wait=False)
    elif hasattr(array, "set"):
        array.set(host)
    else:
        import torch

        array.copy_(torch.from_numpy(host).pin_memory(), non_blocking=True)


def all_reduces(
    comm: Communicator, counts: tuple[int, ...] = COUNTS, algorithms: tuple = (None,), make: Make = on_device
) -> None:
    ranks = range(comm.size)
    for count in counts:
        for op, fold in (("sum", np.sum), ("max", np.max), ("average", np.mean)):
            expected = fold(np.stack([values(r, count) for r in ranks]), axis=0).astype("float32")
            for algorithm in algorithms:
                array = make(values(comm.rank, count))
                assert comm.allreduce(array, op, algorithm=algorithm) is array
                np.testing.assert_array_equal(to_host(array), expected, err_msg=f"{op} by {algorithm}")
        array, out = make(values(comm.rank, count)), make(np.zeros(count, "float32"))
        comm.allreduce(array, out=out, prescale_factor=2.0, postscale_factor=0.5)
        np.testing.assert_array_equal(to_host(out), np.sum([values(r, count) for r in ranks], axis=0))
        np.testing.assert_array_equal(to_host(array), values(comm.rank, count))


def compressed(comm: Communicator, *, make: Make = on_device, random: bool = False) -> None:
    """What travels as 16 bits has the bits that it has on the host.

    random   numbers that are rounded: if all messages move in one way, sums are made in the hosts' order
    """
    for count, wire, dtype, algorithm in product(
        (0, 1, 40_001), ("float16", "bfloat16"), ("float32", "float64"), ("ring", "direct")
    ):
        mine = values(comm.rank, count, dtype)
        if random:
            mine = np.random.default_rng(comm.rank).standard_normal(count).astype(dtype)
        for op, before, after in (("sum", 1.0, 1.0), ("average", 0.25, 3.3), ("max", -1.5, 1.0)):
            options = {"prescale_factor": before, "postscale_factor": after, "compression": wire}
            expected = comm.allreduce(mine.copy(), op, algorithm=algorithm, **options)
            for in_place in (True, False):
                array = make(mine)
                out = None if in_place else make(np.zeros(count, dtype))
                found = to_host(comm.allreduce(array, op, out=out, algorithm=algorithm, **options))
                np.testing.assert_array_equal(found, expected, err_msg=f"{op} of {dtype} as {wire}")
                if not in_place:
                    np.testing.assert_array_equal(to_host(array), mine)


def reduce_scatters(comm: Communicator, *, make: Make = on_device) -> None:
    for count in COUNTS:
        for pieces in (partition.counts(count, comm.size), uneven(count, comm.size)):
            edges = partition.offsets(pieces)
            own = slice(edges[comm.rank], edges[comm.rank + 1])
            expected = np.sum([values(r, count) for r in range(comm.size)], axis=0)[own]
            array = make(values(comm.rank, count))
            shard = comm.reduce_scatter(array, counts=pieces)
            np.testing.assert_array_equal(to_host(shard), expected)
            array, out = make(values(comm.rank, count)), make(np.zeros(own.stop - own.start, "f4"))
            comm.reduce_scatter(array, counts=pieces, out=out)
            np.testing.assert_array_equal(to_host(out), expected)
            np.testing.assert_array_equal(to_host(array), values(comm.rank, count))


def gathers_and_scatters(comm: Communicator, *, make: Make = on_device) -> None:
    for count in COUNTS:
        pieces = uneven(count, comm.size)
        edges = partition.offsets(pieces)
        whole = values(0, count)
        own = whole[edges[comm.rank] : edges[comm.rank + 1]]
        for root in range(comm.size):
            array = make(whole if comm.rank == root else np.zeros(count, "float32"))
            np.testing.assert_array_equal(to_host(comm.broadcast(array, root)), whole)
            out = make(np.zeros(count, "float32")) if comm.rank == root else None
            comm.gather(make(own), root, counts=pieces, out=out)
            if out is not None:
                np.testing.assert_array_equal(to_host(out), whole)
            out = make(np.zeros(own.size, "float32"))
            comm.scatter(make(whole) if comm.rank == root else None, root, counts=pieces, out=out)
            np.testing.assert_array_equal(to_host(out), own)
            array = make(values(comm.rank, count))
            comm.reduce(array, root=root)
            expected = np.sum([values(r, count) for r in range(comm.size)], axis=0)
            np.testing.assert_array_equal(
                to_host(array), expected if comm.rank == root else values(comm.rank, count)
            )
        gathered = make(np.zeros(count, "float32"))
        comm.allgather(make(own), counts=pieces, out=gathered)
        np.testing.assert_array_equal(to_host(gathered), whole)


def all_to_alls(comm: Communicator, *, make: Make = on_device) -> None:
    for each in (0, 1, 333, 9000):
        out = make(np.zeros(each * comm.size, "int64"))
        comm.alltoall(make(values(comm.rank, each * comm.size, "int64")), out=out)
        parts = [
            values(r, each * comm.size, "int64").reshape(comm.size, -1)[comm.rank] for r in range(comm.size)
        ]
        np.testing.assert_array_equal(to_host(out), np.concatenate(parts))
    table = [[(a + 2 * b) % 5 * 300 for b in range(comm.size)] for a in range(comm.size)]
    sent, received = table[comm.rank], [row[comm.rank] for row in table]
    out = make(np.zeros(sum(received), "float64"))
    comm.alltoall(make(values(comm.rank, sum(sent), "float64")), send_counts=sent, out=out)
    expected = [
        np.split(values(r, sum(table[r]), "float64"), np.cumsum(table[r]))[comm.rank]
        for r in range(comm.size)
    ]
    np.testing.assert_array_equal(to_host(out), np.concatenate(expected))


def messages(comm: Communicator, *, make: Make = on_device) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for count in (0, 5, 100_000):
        out = make(np.zeros(count, "float32"))
        comm.sendrecv(make(values(comm.rank, count)), right, out, left)
        np.testing.assert_array_equal(to_host(out), values(left, count))
    # Several under one tag, in both directions at once, with the receives asked for in order.
    outs = [make(np.zeros(50 + k, "float32")) for k in range(6)]
    receives = [comm.start_recv(out, left, tag=3) for out in outs]
    sends = [comm.start_send(make(values(comm.rank + k, 50 + k)), right, tag=3) for k in range(6)]
    for k, receive in enumerate(receives):
        np.testing.assert_array_equal(to_host(receive.wait()), values(left + k, 50 + k))
    for send in sends:
        send.wait()


def probed(comm: Communicator, *, make: Make = on_device) -> None:
    """A message is found until its receive begins, and no piece of it later. Both ways under one tag."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for count in (5, 1_500_000):  # the longer one travels in three pieces where it is staged
        out = make(np.zeros(count, "float32"))
        send = comm.start_send(make(values(comm.rank, count)), right, tag=8)
        deadline_s = time.monotonic() + 60
        while (source := comm.probe(8)) is None and time.monotonic() < deadline_s:
            time.sleep(0.0005)
        receive, found = comm.start_recv(out, left, tag=8), []
        while not receive.test():
            found.append(comm.probe(8))
        np.testing.assert_array_equal(to_host(receive.wait()), values(left, count))
        send.wait()
        found.append(comm.probe(8))
        assert (source, set(found)) == (left, {None})
        comm.barrier()


def at_once(comm: Communicator, rounds: int = 12, *, make: Make = on_device) -> None:
    """Calls that overlap, whose arrays the caller's stream changes before and after."""
    arrays = [make(values(comm.rank + k, 3000)) for k in range(5)]
    expected = [np.sum([values(r + k, 3000) for r in range(comm.size)], axis=0) for k in range(5)]
    for round_number in range(rounds):
        handles = [comm.start_allreduce(array) for array in arrays]
        for k in (3, 0, 4, 1, 2):
            handles[k].wait()
            np.testing.assert_array_equal(to_host(arrays[k]), expected[k], err_msg=f"round {round_number}")
            put(arrays[k], values(comm.rank + k, 3000))


def uneven(count: int, size: int) -> tuple[int, ...]:
    """Pieces of which one is empty where there are several."""
    pieces = list(partition.counts(count, max(1, size - 1)))
    return tuple([*pieces, 0] if size > 1 else pieces)


CASES: dict[str, Callable[..., None]] = {
    "all-reduce": all_reduces,
    "compressed": compressed,
    "reduce-scatter": reduce_scatters,
    "gather and scatter": gathers_and_scatters,
    "all-to-all": all_to_alls,
    "messages": messages,
    "messages that are probed for": probed,
    "several at once": at_once,
}
