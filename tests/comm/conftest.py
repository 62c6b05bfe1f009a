"""The serial truth: every collective against the same computation in one place."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from hpcpar import partition
from hpcpar.algorithms.registry import ALGORITHMS
from hpcpar.comm import Communicator
from hpcpar.errors import StallError
from hpcpar.transport.loopback import LoopbackTransport

COUNTS = (0, 1, 3, 10, 1000)
SMALL_STAGE_NBYTES = 1024
"""Slots of 256 bytes or less: messages go in many pieces."""

REDUCE = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}

Checks = list[tuple[str, Any, Any]]
"""(what, found, expected): compared after all ranks have finished, so that none fails alone."""


def piece(rank: int, count: int, dtype: str = "int64") -> np.ndarray:
    """What rank `rank` brings: small whole numbers, so that every order of summation is exact."""
    return np.random.default_rng(rank).integers(1, 4, size=count).astype(dtype)


def reductions(comm: Communicator) -> Iterator[tuple[str, Any, Any]]:
    for count, op, root in product(COUNTS, REDUCE, range(comm.size)):
        inputs = [piece(rank, count) for rank in range(comm.size)]
        total = REDUCE[op].reduce(inputs, axis=0)
        mine = inputs[comm.rank]
        for algorithm in ALGORITHMS["reduce"]:
            found = comm.reduce(mine.copy(), op, root, algorithm=algorithm)
            expected = total if comm.rank == root else None
            yield f"reduce {op} {count} to {root} by {algorithm}", found, expected
        if root:
            continue
        for algorithm in ALGORITHMS["allreduce"]:
            out = np.empty_like(mine)
            yield (
                f"allreduce {op} {count} by {algorithm}",
                comm.allreduce(mine.copy(), op, algorithm=algorithm),
                total,
            )
            yield (
                f"allreduce out by {algorithm}",
                comm.allreduce(mine, op, out=out, algorithm=algorithm),
                total,
            )
        start, stop = partition.bounds(count, comm.size)[comm.rank]
        for algorithm in ALGORITHMS["reduce_scatter"]:
            found = comm.reduce_scatter(mine.copy(), op, algorithm=algorithm)
            yield f"reduce_scatter {op} {count} by {algorithm}", found, total[start:stop]
        yield "inputs of calls with out", mine, piece(comm.rank, count)


def gathers(comm: Communicator) -> Iterator[tuple[str, Any, Any]]:
    uneven = [(3 * rank) % 4 for rank in range(comm.size)]
    for counts, root in product(([5] * comm.size, [0] * comm.size, uneven), range(comm.size)):
        shards = [piece(rank, count) for rank, count in enumerate(counts)]
        mine, whole = shards[comm.rank], np.concatenate(shards)
        for algorithm in ALGORITHMS["allgather"]:
            yield (
                f"allgather {counts} by {algorithm}",
                comm.allgather(mine, counts=counts, algorithm=algorithm),
                whole,
            )
        for algorithm in ALGORITHMS["gather"]:
            found = comm.gather(mine, root, counts=counts, algorithm=algorithm)
            yield f"gather {counts} to {root} by {algorithm}", found, whole if comm.rank == root else None
        for algorithm in ALGORITHMS["scatter"]:
            out = np.empty_like(mine)
            source = whole if comm.rank == root else None
            comm.scatter(source, root, counts=counts, out=out, algorithm=algorithm)
            yield f"scatter {counts} from {root} by {algorithm}", out, mine
        for algorithm in ALGORITHMS["broadcast"]:
            buffer = whole.copy() if comm.rank == root else np.zeros_like(whole)
            yield (
                f"broadcast from {root} by {algorithm}",
                comm.broadcast(buffer, root, algorithm=algorithm),
                whole,
            )


def exchanges(comm: Communicator) -> Iterator[tuple[str, Any, Any]]:
    for count in (0, 1, 4):
        inputs = [piece(rank, count * comm.size) for rank in range(comm.size)]
        expected = np.concatenate([x.reshape(comm.size, count)[comm.rank] for x in inputs])
        for algorithm in ALGORITHMS["alltoall"]:
            found = comm.alltoall(inputs[comm.rank], algorithm=algorithm)
            yield f"alltoall {count} by {algorithm}", found, expected
    counts = [[(sender + 2 * to) % 3 for to in range(comm.size)] for sender in range(comm.size)]
    inputs = [piece(rank, sum(counts[rank])) for rank in range(comm.size)]
    pieces = [np.split(x, np.cumsum(c)[:-1]) for x, c in zip(inputs, counts, strict=True)]
    expected = np.concatenate([pieces[sender][comm.rank] for sender in range(comm.size)])
    incoming = [counts[sender][comm.rank] for sender in range(comm.size)]
    for algorithm, receive_counts in product(("pairwise", "direct"), (None, incoming)):
        found = comm.alltoall(
            inputs[comm.rank],
            send_counts=counts[comm.rank],
            receive_counts=receive_counts,
            algorithm=algorithm,
        )
        yield f"alltoall uneven by {algorithm}", found, expected


def element_types(comm: Communicator) -> Iterator[tuple[str, Any, Any]]:
    """Every element type, as NumPy array and as torch tensor, reduced and gathered."""
    for dtype in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"):
        yield from _one_type(comm, dtype, np.asarray)
    for dtype in ("float16", "float32", "float64", "complex64", "complex128"):
        yield from _one_type(comm, dtype, np.asarray)
        yield from _one_type(comm, dtype, torch.from_numpy)
    yield from _one_type(comm, "float32", lambda x: torch.from_numpy(x).to(torch.bfloat16))
    for op, expected in (("or", True), ("and", comm.size == 1), ("xor", True)):
        flags = np.array([comm.rank == 0, False])
        yield f"bool {op}", comm.allreduce(flags, op), np.array([expected, False])
    bits = np.array([1 << comm.rank], dtype=np.uint8)
    yield "bits or", comm.allreduce(bits, "or"), np.array([2**comm.size - 1])
    numbers = [piece(rank, 9) for rank in range(comm.size)]
    yield "bits xor", comm.allreduce(numbers[comm.rank].copy(), "xor"), np.bitwise_xor.reduce(numbers)


def _one_type(comm: Communicator, dtype: str, wrap: Callable[[Any], Any]) -> Iterator[tuple[str, Any, Any]]:
    inputs = [piece(rank, 7, dtype) for rank in range(comm.size)]
    total = np.add.reduce(inputs, axis=0, dtype=dtype)
    found = comm.allreduce(wrap(inputs[comm.rank].copy()))
    yield f"allreduce of {dtype}", _numpy(found), total
    yield f"allgather of {dtype}", _numpy(comm.allgather(wrap(inputs[comm.rank]))), np.concatenate(inputs)
    if dtype.startswith(("float", "complex")):
        mean = comm.allreduce(wrap(inputs[comm.rank].copy()), "average")
        tolerance = 0.02 if "bfloat16" in str(mean.dtype) or dtype == "float16" else 1e-6
        yield f"average of {dtype}", np.allclose(_numpy(mean), total / comm.size, rtol=tolerance), True


def _numpy(array: Any) -> np.ndarray:
    if isinstance(array, torch.Tensor):
        return array.to(torch.float32).numpy() if array.dtype == torch.bfloat16 else array.numpy()
    return np.asarray(array)


EXCHANGES: dict[str, dict[str, Any]] = {
    "messages": {},
    "shared memory": {"shared_memory": True},
    "small stages": {"shared_memory": True, "post_nbytes": SMALL_STAGE_NBYTES},
}


@pytest.fixture
def checked_world() -> Iterator[Communicator]:
    """The communicator over all ranks of this job in checked mode, for tests marked `mpi`."""
    import hpcpar

    comm = hpcpar.init(check=True)
    yield comm
    comm.free()


@pytest.fixture
def kernels(stand_in: Any) -> Iterator[None]:
    """Kernels that compute on the stand-in's device memory."""
    from hpcpar.transport.gpu import kernels as gpu_kernels
    from tests.transport.gpu import kernel_stand_in

    gpu_kernels.use_instead(kernel_stand_in.StandInKernels())
    yield
    gpu_kernels.use_instead(None)


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loopback rank that waits sleeps until a message comes; of shared memory nobody tells it."""

    def pause(transport: LoopbackTransport, attempt: int, *, drives_messages: bool = True) -> None:
        if transport._exchanger.aborted:
            raise StallError("another rank of this process ended the job")
        time.sleep(0.0 if attempt < 50 else 0.001)

    monkeypatch.setattr(LoopbackTransport, "pause", pause)


@pytest.fixture(params=EXCHANGES)
def exchange(request: pytest.FixtureRequest, quick_looks: None) -> dict[str, Any]:
    """How the ranks of `run_loopback` exchange, in turn: its arguments."""
    return EXCHANGES[request.param]


@pytest.fixture(params=[name for name, options in EXCHANGES.items() if options])
def sharing(request: pytest.FixtureRequest, quick_looks: None) -> dict[str, Any]:
    """The same where they share memory."""
    return EXCHANGES[request.param]


@pytest.fixture(params=[reductions, gathers, exchanges, element_types], ids=lambda group: group.__name__)
def truths(request: pytest.FixtureRequest) -> Callable[[Communicator], Iterator[tuple[str, Any, Any]]]:
    """Groups of collectives in turn, each a generator of (what, found, expected)."""
    return request.param


@pytest.fixture
def assert_true() -> Callable[[Checks], None]:
    """Compare after the fact; integers exactly."""

    def check(checks: Checks) -> None:
        assert checks, "nothing was compared"
        for what, found, expected in checks:
            if expected is None:
                assert found is None, what
            else:
                np.testing.assert_array_equal(np.asarray(found), expected, err_msg=what)

    return check
