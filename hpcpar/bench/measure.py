"""Time calls in turn, and check their results.

Candidates run in turn within each round, so that noise of the machine reaches all of them. A round's time
is the slowest rank's mean over its iterations, after a barrier; the report has the median of the rounds
and their spread. Results are checked in a separate, untimed pass.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from hpcpar.errors import HpcparError, OperationError
from hpcpar.units import GB, busbw_factor

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

Place = Literal["in", "out"]
"""In place, or out of place."""

Kind = Literal["numpy", "torch"]

PLACES: dict[str, tuple[Place, ...]] = {
    "allreduce": ("in", "out"),
    "reduce_scatter": ("out", "in"),
    "allgather": ("in", "out"),
    "broadcast": ("in",),
    "reduce": ("in", "out"),
    "alltoall": ("out",),
    "send": ("out",),
    "send_window": ("out",),
}
"""Collectives that can be measured, with their places, the usual one first.

send          half of a round trip between rank 0 and the last rank: latency
send_window   WINDOW messages at once from rank 0 to the last rank, and a word back: bandwidth
"""

COPY = "copy"
"""ResultRow of a copy within memory, on all ranks at once."""

MEMORY_COPY = "memory_copy"
"""The only candidate of the COPY row."""

IN_EQUAL_PIECES = ("reduce_scatter", "allgather", "alltoall")
WINDOW = 16
DTYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8")
ON_HOST = torch.device("cpu")
PIECE = 1 << 22
"""Elements written or compared at a time, so that the check needs little memory."""
FEWEST, MOST = 2, 2000
"""Limits of a round's iterations."""


@dataclass(frozen=True)
class Case:
    """Collective, size and type of one row.

    count    elements of the whole array, a multiple of `size`
    size     ranks
    """

    collective: str
    count: int
    dtype: str
    kind: Kind
    size: int

    @classmethod
    def of(cls, collective: str, nbytes: int, dtype: str, kind: Kind, size: int) -> Case:
        """Round `nbytes` down to equal pieces of whole elements, at least one each."""
        if dtype not in DTYPES or (kind == "numpy" and dtype == "bfloat16"):
            raise OperationError(
                f"no {kind} arrays of {dtype}; there are {', '.join(DTYPES)} (bfloat16: torch)"
            )
        pieces = size if collective in IN_EQUAL_PIECES else 1
        count = max(1, nbytes // itemsize(dtype) // pieces) * pieces
        return cls(collective, count, dtype, kind, size)

    @property
    def nbytes(self) -> int:
        return self.count * itemsize(self.dtype)

    @property
    def share(self) -> int:
        """Elements of one rank's piece."""
        return self.count // self.size

    def own(self, rank: int) -> slice:
        return slice(rank * self.share, (rank + 1) * self.share)


def itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


@dataclass(frozen=True)
class Buffers:
    """Arrays of one case on one rank: the whole array, this rank's piece, and another whole array.

    shared   from `comm.allocate_shared`
    """

    whole: Any
    shard: Any
    other: Any
    shared: bool = False

    @classmethod
    def of(
        cls, case: Case, comm: Communicator, *, shared: bool = False, device: torch.device = ON_HOST
    ) -> Buffers:
        """Allocate; collective for shared memory. OperationError where the ranks cannot share memory."""
        if shared and not comm.shares_memory:
            raise OperationError(
                f"the ranks of communicator {comm.name!r} share no memory; measure ordinary memory instead"
            )

        dtype = getattr(torch, case.dtype)

        def empty(count: int) -> Any:
            if shared:
                return comm.allocate_shared(count, dtype if case.kind == "torch" else case.dtype)
            made = torch.zeros(count, dtype=dtype, device=device)
            return made if case.kind == "torch" else made.numpy()

        return cls(empty(case.count), empty(max(1, case.share))[: case.share], empty(case.count), shared)

    def clear(self) -> None:
        """Write zeros, so that repeated sums stay finite."""
        for array in (self.whole, self.shard, self.other):
            tensor(array).zero_()


def tensor(array: Any) -> torch.Tensor:
    """Return a flat tensor over the array's memory."""
    seen = array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
    return seen.reshape(-1)


@dataclass(frozen=True)
class Candidate:
    """Repeatable call.

    name     in the table: "ring", "mpi", "gloo"
    result   returns the array of the call's result on this rank; None where it has no result
    close    frees requests and the like
    """

    name: str
    run: Callable[[], object]
    result: Callable[[], Any]
    close: Callable[[], object] = lambda: None


def partner(comm: Communicator) -> int | None:
    """Return this rank's partner in a ping-pong of rank 0 and the last rank; None on the ranks between."""
    last = comm.size - 1
    return {0: last, last: 0}.get(comm.rank) if last else None


def ping_pong(
    comm: Communicator, send: Callable[[], object], receive: Callable[[], object]
) -> Callable[[], object]:
    """Return a call in which rank 0 sends and then receives, and its partner the other way round."""
    first, second = (send, receive) if comm.rank == 0 else (receive, send)
    return lambda: (first(), second())


def contribution(rank: int, start: int, stop: int, device: torch.device = ON_HOST) -> torch.Tensor:
    """Return elements start to stop of this rank's input: integers from 1 to 7."""
    return torch.arange(start, stop, device=device) % 3 + (rank % 5 + 1)


def expected(case: Case, rank: int, start: int, stop: int, device: torch.device = ON_HOST) -> torch.Tensor:
    """Return elements start to stop of this rank's correct result."""
    at = torch.arange(start, stop, device=device)
    share = max(1, case.share)
    match case.collective:
        case "allreduce" | "reduce":
            return _summed(case.size, at)
        case "reduce_scatter":
            return _summed(case.size, at + rank * share)
        case "allgather":
            return at % 3 + (at // share % 5 + 1)
        case "broadcast":
            return at % 3 + 1
        case "alltoall":
            return (rank * share + at % share) % 3 + (at // share % 5 + 1)
        case "send":
            return contribution(case.size - 1 if rank == 0 else 0, start, stop, device)
        case "send_window":
            return contribution(0, start, stop, device)
    raise OperationError(f"nothing is known of {case.collective!r}; there are {', '.join(PLACES)}")


def _summed(size: int, at: torch.Tensor) -> torch.Tensor:
    return size * (at % 3) + sum(rank % 5 + 1 for rank in range(size))


def wrong_elements(candidate: Candidate, case: Case, comm: Communicator, buffers: Buffers) -> int:
    """Run once on small integers; return the number of wrong elements over all ranks. Collective."""
    _fill(case, comm.rank, buffers)
    candidate.run()
    found = candidate.result()
    wrong = 0
    if found is not None:
        flat = tensor(found)
        length = case.share if case.collective == "reduce_scatter" else case.count
        wrong = abs(flat.numel() - length)
        for start in range(0, min(flat.numel(), length), PIECE):
            stop = min(start + PIECE, flat.numel(), length)
            # Compare on the result's device: on a GPU that takes a hundredth of the time.
            wanted = expected(case, comm.rank, start, stop, flat.device)
            wrong += _unlike(flat[start:stop], wanted, case.size)
    return int(comm.allreduce(np.array([wrong]))[0])


def _fill(case: Case, rank: int, buffers: Buffers) -> None:
    whole, own = tensor(buffers.whole), case.own(rank)
    tensor(buffers.other).fill_(99)
    for start in range(0, case.count, PIECE):
        stop = min(start + PIECE, case.count)
        whole[start:stop] = contribution(rank, start, stop, whole.device).to(whole.dtype)
    tensor(buffers.shard)[:] = whole[own] if case.share else 0
    if case.collective == "allgather":
        whole[: own.start] = 99
        whole[own.stop :] = 99


def _unlike(found: torch.Tensor, wanted: torch.Tensor, size: int) -> int:
    target = wanted.to(found.dtype)
    if not found.is_floating_point() or torch.equal(target.to(wanted.dtype), wanted):
        # Every partial sum is a smaller integer, so it is exact in this type.
        return int(torch.count_nonzero(found != target))
    tolerance = size * torch.finfo(found.dtype).eps
    return int(torch.count_nonzero(((found.double() - wanted) / wanted).abs() > tolerance))


@dataclass(frozen=True)
class Timing:
    """Seconds of one call in each round, on the slowest rank; and of the longest single call."""

    rounds_s: tuple[float, ...]
    iterations: int
    longest_call_s: float | None = None

    @property
    def median_s(self) -> float:
        return statistics.median(self.rounds_s)

    def scaled(self, factor: float) -> Timing:
        """Multiply all seconds by `factor`, for calls that contain several operations."""
        longest_s = None if self.longest_call_s is None else self.longest_call_s * factor
        return Timing(tuple(seconds * factor for seconds in self.rounds_s), self.iterations, longest_s)


@dataclass(frozen=True)
class ResultRow:
    """One measured row; seconds are of one call.

    algorithm        the candidate's name
    chose            the algorithm that the candidate selected by size
    longest_call_s   over all calls and ranks; None unless calls were timed one by one
    """

    collective: str
    algorithm: str
    chose: str
    ranks: int
    nbytes: int
    count: int
    dtype: str
    kind: str
    place: str
    iterations: int
    median_s: float
    fastest_s: float
    slowest_s: float
    algbw_gb_per_s: float
    busbw_gb_per_s: float
    wrong: int
    longest_call_s: float | None = None


def time_round(
    run: Callable[[], object], iterations: int, comm: Communicator, *, singly: bool = False
) -> tuple[float, float]:
    """Return seconds of one call, and of the longest call, on the slowest rank. Collective.

    singly   read the clock after each call; otherwise the longest call is unknown, and 0
    """
    clock = time.perf_counter
    comm.barrier()
    started_s = clock()
    if singly:
        stamps = [started_s]
        for _ in range(iterations):
            run()
            stamps.append(clock())
        longest_s = max(later - earlier for earlier, later in pairwise(stamps))
    else:
        for _ in range(iterations):
            run()
        longest_s = 0.0
    mine = np.array([(clock() - started_s) / iterations, longest_s])
    slowest, longest = comm.allreduce(mine, "max")
    return float(slowest), float(longest)


def measure(
    candidates: Mapping[Any, Callable[[], object]],
    comm: Communicator,
    *,
    rounds: int,
    round_s: float,
    singly: bool = False,
) -> dict[Any, Timing]:
    """Time all candidates, in turn within each round. Collective.

    round_s   approximate length of one candidate's part of a round
    """
    iterations = {}
    for key, run in candidates.items():
        first_s, _ = time_round(run, FEWEST, comm)  # compiles plans and touches pages
        warm_s, _ = time_round(run, max(FEWEST, min(50, int(round_s / 10 / first_s))), comm)
        iterations[key] = max(FEWEST, min(MOST, int(round_s / warm_s)))
    measured: dict[Any, list[tuple[float, float]]] = {key: [] for key in candidates}
    for _ in range(rounds):
        for key, run in candidates.items():
            measured[key].append(time_round(run, iterations[key], comm, singly=singly))
    return {
        key: Timing(
            tuple(seconds for seconds, _ in pairs),
            iterations[key],
            max(longest for _, longest in pairs) if singly else None,
        )
        for key, pairs in measured.items()
    }


def row(case: Case, candidate: str, place: Place, timing: Timing, wrong: int, chose: str = "") -> ResultRow:
    """Make a row of the table, with its bandwidths (GB = 1e9 bytes)."""
    messages = WINDOW if case.collective == "send_window" else 1
    algbw = messages * case.nbytes / timing.median_s / GB
    known_as = "send" if case.collective in ("send", "send_window", COPY) else case.collective
    return ResultRow(
        collective=case.collective,
        algorithm=candidate,
        chose=chose,
        ranks=case.size,
        nbytes=case.nbytes,
        count=case.count,
        dtype=case.dtype,
        kind=case.kind,
        place=place,
        iterations=timing.iterations,
        median_s=timing.median_s,
        fastest_s=min(timing.rounds_s),
        slowest_s=max(timing.rounds_s),
        algbw_gb_per_s=algbw,
        busbw_gb_per_s=algbw * busbw_factor(known_as, case.size),
        wrong=wrong,
        longest_call_s=timing.longest_call_s,
    )


def copy_candidate(case: Case, buffers: Buffers) -> Candidate:
    """Copy the whole array within memory on every rank at once: the ceiling of the bus bandwidth.

    Every byte that a rank sends is read and written by some processor at least once.
    """
    source, target = tensor(buffers.whole), tensor(buffers.other)
    return Candidate(MEMORY_COPY, lambda: target.copy_(source), lambda: None)


def usable(candidates: Sequence[Candidate], comm: Communicator) -> list[Candidate]:
    """Return the candidates that run without an error on all ranks. Collective."""
    working = []
    for candidate in candidates:
        failed = np.zeros(1)
        try:
            candidate.run()
        except HpcparError:
            raise  # an error of hpcpar is a bug, not an unsupported case
        except (RuntimeError, ValueError, TypeError):
            failed[0] = 1
        if comm.allreduce(failed)[0] == 0:
            working.append(candidate)
        else:
            candidate.close()
    return working
