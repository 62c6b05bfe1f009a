"""Soak test: many mixed collectives, every result checked, memory watched.

    hpcpar run -n 3 tests/soak.py --calls 100000 --max-drift 5

All ranks draw the same calls from the same seed: collective, communicator, count, element type, in
place or not, in reused, shared or fresh memory, one by one or several outstanding at once. Each rank waits
for those in an order of its own. The exit status is 1 after a wrong result, or when memory grew by more than
--max-drift MB.

Rank r contributes (i + shift + r) % PERIOD at element i. A reduction over the ranks repeats with the same
period, so PERIOD serially computed numbers give every correct result as a slice of one array. All sums are
exact in every element type: a result is right or wrong, never nearly right.

Memory is the resident size after garbage collection and malloc_trim. The drift is the median of the samples
in the last tenth of the calls less that of the second tenth. Three effects could change it without a leak:

    cached plans   stay within the communicator's budget, which fills during the first tenth
    scratch        a pool keeps its largest buffers, up to 8 of 1 MiB; `filling` calls need all of them before
                   the count begins
    samples        UCX records each region that is returned to the system, 10 to 40 kB per sample; the number
                   of samples does not depend on the number of calls
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import operator
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hpcpar import partition
from hpcpar.algorithms.registry import ALGORITHMS
from hpcpar.errors import OperationError
from hpcpar.units import MiB, format_duration

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

COLLECTIVES = (
    *("allreduce", "reduce_scatter", "allgather", "broadcast", "reduce"),
    *("alltoall", "barrier", "gather", "scatter", "send", "sendrecv"),
)

ARRAYS = (
    *(("numpy", "float32"), ("numpy", "int64"), ("numpy", "float64")),
    *(("torch", "float32"), ("torch", "int64"), ("torch", "float64"), ("torch", "bfloat16")),
)
"""Array library and element type."""

OPS = ("sum", "average", "min", "max", "product")
INTEGER_OPS = ("sum", "min", "max", "product", "and", "or", "xor")

LARGEST_NBYTES = 1 * MiB
"""Size limit of a collective's whole array."""

SMALLNESS = 2
"""Sizes are 2**(20·u**SMALLNESS) bytes with u uniform in 0 to 1: half of them are below 32."""

KEPT_COUNTS = (0, 1, 2, 7, 60, 128, 1_000, 5_040, 30_000, 131_072)
"""Element counts of the reused buffers."""

KEPT_SLOTS = 2
"""Copies of each reused buffer: two outstanding calls never share one. The last lies in shared memory."""

MOST_AT_ONCE = 6
AT_ONCE = 0.25
"""Probability that several calls are outstanding at once."""

PERIOD = 13
POISON = 99
"""Initial value of output buffers; no correct result contains it."""

EXACT_IN_BFLOAT16 = 256
"""Largest integer up to which all integers are exact in every element type."""

ALIKE = 0.2
"""Share of the groups whose calls are all alike, and compete for the same tags."""

SAMPLES = 20
"""Memory samples in all: two or three in each tenth that counts."""

CALLS_BETWEEN_SAMPLES = 100
"""Lower limit: a sample takes as long as some 50 calls."""

FEWEST_TO_COMPARE = 10 * CALLS_BETWEEN_SAMPLES
"""Calls needed for a sample in both tenths."""

WARM_UP = 0.1
"""Fraction of the calls that warm up; the windows of the two medians are as long."""

DESCRIBED = 5
"""Wrong results that the report describes."""

SCRATCH_BUFFERS = 8
"""Buffers that a communicator's scratch pool keeps of each size."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """Number of calls, the seed of the random numbers, and whether calls name algorithms.

    So many more schedules take longer than a tenth of the calls to be cached, which looks like a drift.
    """

    calls: int = 100_000
    seed: int = 0
    name_algorithms: bool = False


@dataclass(frozen=True)
class Call:
    """One collective, the same on every rank.

    comm        index of the communicator: world, halves, world in reverse order
    count       elements of the whole array, before rounding to the number of ranks
    root        taken modulo the communicator's size
    slot        copy of the reused buffer; None for fresh memory
    uneven      ranks have pieces of different sizes, where the collective allows it
    algorithm   None, or where it cannot do such pieces: the communicator's choice
    """

    collective: str
    comm: int
    kind: str
    dtype: str
    op: str
    count: int
    root: int
    shift: int
    in_place: bool
    slot: int | None
    uneven: bool
    algorithm: str | None = None


def draw(options: Options, comms: int) -> Iterator[list[Call]]:
    """Yield groups of calls, each group outstanding at once; `options.calls` in all."""
    chance = random.Random(options.seed)
    left = options.calls
    while left:
        at_once = min(left, chance.randint(2, MOST_AT_ONCE) if chance.random() < AT_ONCE else 1)
        if chance.random() < ALIKE:
            first = _draw(chance, comms, KEPT_SLOTS, options)
            group = [replace(first, shift=chance.randrange(PERIOD)) for _ in range(at_once)]
        else:
            group = [_draw(chance, comms, slot, options) for slot in range(at_once)]
        left -= len(group)
        yield group


def _draw(chance: random.Random, comms: int, slot: int, options: Options) -> Call:
    kind, dtype = chance.choice(ARRAYS)
    kept = slot < KEPT_SLOTS and chance.random() < 0.5
    itemsize = getattr(torch, dtype).itemsize
    nbytes = 2 ** (math.log2(LARGEST_NBYTES) * chance.random() ** SMALLNESS)
    fresh = 0 if chance.random() < 0.03 else int(nbytes) // itemsize
    collective = chance.choice(COLLECTIVES)
    return Call(
        collective=collective,
        comm=chance.randrange(comms),
        kind=kind,
        dtype=dtype,
        op=chance.choice(INTEGER_OPS if dtype == "int64" else OPS),
        count=min(chance.choice(KEPT_COUNTS), LARGEST_NBYTES // itemsize) if kept else fresh,
        root=chance.randrange(1 << 16),
        shift=chance.randrange(PERIOD),
        in_place=chance.random() < 0.5,
        slot=slot if kept else None,
        uneven=chance.random() < 0.3,
        algorithm=chance.choice([None, *ALGORITHMS.get(collective, ())]) if options.name_algorithms else None,
    )


def filling(size: int) -> Iterator[list[Call]]:
    """Yield groups of reductions to each rank in turn that use all buffers of the root's scratch pool.

    The root receives whole arrays. Only some calls of one kind run at once, so each group has two kinds.
    """
    count = LARGEST_NBYTES // torch.float32.itemsize
    for root in range(size):
        yield [
            Call("reduce", 0, "torch", "float32", op, count, root, 0, True, None, False)
            for op in ("sum", "max")
            for _ in range(SCRATCH_BUFFERS // 2)
        ]


def value(position: int, op: str) -> int:
    """Return the pattern at a position; for products only 1 and 2, which stay exact."""
    return 1 + position % PERIOD % 2 if op == "product" else position % PERIOD


def reduced(op: str, size: int, position: int) -> float:
    """Reduce the ranks' numbers at one position serially."""
    numbers = [value(position + rank, op) for rank in range(size)]
    match op:
        case "sum":
            return sum(numbers)
        case "average":
            return sum(numbers) / size
        case "min":
            return min(numbers)
        case "max":
            return max(numbers)
        case "product":
            return math.prod(numbers)
        case "and":
            return reduce(operator.and_, numbers)
        case "or":
            return reduce(operator.or_, numbers)
        case "xor":
            return reduce(operator.xor, numbers)
    raise OperationError(f"nothing is known of op {op!r}; there are {', '.join(INTEGER_OPS)}, average")


class Patterns:
    """Long arrays by element type; all inputs and all results are slices of them."""

    def __init__(self, sizes: Sequence[int]) -> None:
        if max(sizes) * (PERIOD - 1) > EXACT_IN_BFLOAT16:
            raise OperationError(
                f"the sums of {max(sizes)} ranks are not exact in bfloat16, so results could not be checked; "
                f"take at most {EXACT_IN_BFLOAT16 // (PERIOD - 1)}"
            )
        self._passed: dict[tuple[str, str], Any] = {}
        self._reduced: dict[tuple[str, str, int], Any] = {}
        for dtype in dict.fromkeys(dtype for _, dtype in ARRAYS):
            for op in ("sum", "product"):
                self._passed[dtype, op] = _long(dtype, [value(i, op) for i in range(PERIOD)])
            for op in INTEGER_OPS if dtype == "int64" else OPS:
                for size in sizes:
                    numbers = [reduced(op, size, i) for i in range(PERIOD)]
                    self._reduced[dtype, op, size] = _long(dtype, numbers)

    def passed(self, call: Call, rank: int, start: int, stop: int, *, op: str = "sum") -> torch.Tensor:
        """Return a rank's input, elements start to stop."""
        at = (call.shift + rank) % PERIOD
        long = self._passed[call.dtype, "product" if op == "product" else "sum"]
        part: torch.Tensor = long[at + start : at + stop]
        return part

    def result(self, call: Call, size: int, start: int, stop: int) -> torch.Tensor:
        """Return the correct result of the call's reduction, elements start to stop."""
        part: torch.Tensor = self._reduced[call.dtype, call.op, size][call.shift + start : call.shift + stop]
        return part


def _long(dtype: str, numbers: Sequence[float]) -> torch.Tensor:
    # Rounding to float64 and then to the type equals rounding once: the types have less than half of
    # float64's digits, or are float64.
    period = torch.tensor(numbers, dtype=torch.float64).to(getattr(torch, dtype))
    count = LARGEST_NBYTES // period.element_size() + 2 * PERIOD
    return period.repeat(count // PERIOD + 1)[:count].contiguous()


class Memory:
    """Input and output buffers: reused ones, made at the start, and fresh ones."""

    def __init__(self, comm: Communicator) -> None:
        self._kept: dict[tuple[Any, ...], Any] = {}
        for (kind, dtype), role in product(ARRAYS, ("input", "output")):
            most = LARGEST_NBYTES // getattr(torch, dtype).itemsize
            counts = list(dict.fromkeys(min(count, most) for count in KEPT_COUNTS))
            shared = comm.allocate_shared(sum(counts), getattr(torch, dtype) if kind == "torch" else dtype)
            for count, start in zip(counts, partition.offsets(counts), strict=False):
                for slot in range(KEPT_SLOTS - 1):
                    self._kept[kind, dtype, count, slot, role] = _array(kind, dtype, count)
                self._kept[kind, dtype, count, KEPT_SLOTS - 1, role] = shared[start : start + count]

    def buffer(self, call: Call, count: int, role: str) -> Any:
        """Return a buffer full of POISON: part of a reused one, or fresh."""
        if call.slot is None:
            return _array(call.kind, call.dtype, count)
        whole = self._kept.get((call.kind, call.dtype, call.count, call.slot, role))
        if whole is None or len(whole) < count:
            return _array(call.kind, call.dtype, count)
        buffer = whole[:count]
        tensor(buffer).fill_(POISON)
        return buffer


def _array(kind: str, dtype: str, count: int) -> Any:
    made = torch.full((count,), POISON, dtype=getattr(torch, dtype))
    return made if kind == "torch" else made.numpy()


def tensor(array: Any) -> torch.Tensor:
    """Return a tensor over the array's memory."""
    return array if isinstance(array, torch.Tensor) else torch.from_numpy(array)


@dataclass
class Ready:
    """A call with its buffers and its correct results.

    method      of the communicator; "start_" + method is the non-blocking form
    expected    (array, start, stop, correct elements)
    returned    the object that the call must return; None if any
    """

    method: str = ""
    arguments: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)
    expected: list[tuple[Any, int, int, torch.Tensor]] = field(default_factory=list)
    returned: Any = None
    result_is: Callable[[Any], list[tuple[Any, int, int, torch.Tensor]]] | None = None

    def expect(self, array: Any, start: int, right: torch.Tensor) -> None:
        """Require these elements from `start` on."""
        self.expected.append((array, start, start + right.numel(), right))

    def is_right(self, result: Any) -> bool:
        if self.returned is not None and result is not self.returned:
            return False
        expected = self.expected if self.result_is is None else self.expected + self.result_is(result)
        return all(torch.equal(tensor(array)[start:stop], right) for array, start, stop, right in expected)


class Builder:
    """Makes the buffers and expected results of calls on one rank."""

    def __init__(self, patterns: Patterns, memory: Memory) -> None:
        self._patterns = patterns
        self._memory = memory

    def _how(self, call: Call, comm: Communicator) -> dict[str, Any]:
        """Return the algorithm's name, if it can do the call's pieces."""
        even = not call.uneven and call.count % comm.size == 0
        known = call.algorithm is not None and (even or ALGORITHMS[call.collective][call.algorithm].uneven)
        return {"algorithm": call.algorithm} if known else {}

    def ready(self, call: Call, comm: Communicator) -> list[Ready]:
        """Return the call's parts on this rank: one; for messages none, one or two."""
        made = getattr(self, f"_{call.collective}")(call, comm)
        return made if isinstance(made, list) else [made]

    def _input(self, call: Call, comm: Communicator, count: int, *, op: str = "sum") -> Any:
        """Return a buffer with this rank's input."""
        buffer = self._memory.buffer(call, count, "input")
        tensor(buffer).copy_(self._patterns.passed(call, comm.rank, 0, count, op=op))
        return buffer

    def _allreduce(self, call: Call, comm: Communicator) -> Ready:
        buffer = self._input(call, comm, call.count, op=call.op)
        right = self._patterns.result(call, comm.size, 0, call.count)
        out = None if call.in_place else self._memory.buffer(call, call.count, "output")
        named = {"out": out, **self._how(call, comm)}
        ready = Ready("allreduce", (buffer, call.op), named, returned=buffer if out is None else out)
        ready.expect(ready.returned, 0, right)
        if out is not None:
            ready.expect(buffer, 0, self._patterns.passed(call, comm.rank, 0, call.count, op=call.op))
        return ready

    def _reduce(self, call: Call, comm: Communicator) -> Ready:
        root = call.root % comm.size
        buffer = self._input(call, comm, call.count, op=call.op)
        passed = self._patterns.passed(call, comm.rank, 0, call.count, op=call.op)
        out = None
        if comm.rank == root and not call.in_place:
            out = self._memory.buffer(call, call.count, "output")
        ready = Ready("reduce", (buffer, call.op, root), {"out": out, **self._how(call, comm)})
        if comm.rank == root:
            ready.returned = buffer if out is None else out
            ready.expect(ready.returned, 0, self._patterns.result(call, comm.size, 0, call.count))
        if comm.rank != root or out is not None:
            ready.expect(buffer, 0, passed)
        return ready

    def _reduce_scatter(self, call: Call, comm: Communicator) -> Ready:
        counts = partition.counts(call.count, comm.size)
        if call.uneven and call.count:
            counts = (*counts[1:-1], 0, counts[0] + counts[-1]) if comm.size > 1 else counts
        edges = partition.offsets(counts)
        start, stop = edges[comm.rank], edges[comm.rank + 1]
        right = self._patterns.result(call, comm.size, start, stop)
        buffer = self._input(call, comm, call.count, op=call.op)
        named: dict[str, Any] = {"counts": counts if call.uneven else None, **self._how(call, comm)}
        if call.in_place:
            ready = Ready("reduce_scatter", (buffer, call.op), named)
            ready.result_is = lambda piece: [(piece, 0, len(piece), right)]
            ready.expect(buffer, start, right)
            return ready
        out = self._memory.buffer(call, stop - start, "output")
        ready = Ready("reduce_scatter", (buffer, call.op), {**named, "out": out}, returned=out)
        ready.expect(out, 0, right)
        ready.expect(buffer, 0, self._patterns.passed(call, comm.rank, 0, call.count, op=call.op))
        return ready

    def _shards(self, call: Call, comm: Communicator) -> tuple[int, ...]:
        """Return the elements of each rank's shard; uneven shards grow with the rank."""
        share = call.count // comm.size
        if not call.uneven or share < comm.size:
            return (share,) * comm.size
        return tuple(share - comm.size + 1 + rank for rank in range(comm.size))

    def _allgather(self, call: Call, comm: Communicator) -> Ready:
        counts = self._shards(call, comm)
        named: dict[str, Any] = {"counts": counts if call.uneven else None, **self._how(call, comm)}
        edges = partition.offsets(counts)
        if call.in_place:
            out = self._memory.buffer(call, edges[-1], "output")
            shard = out[edges[comm.rank] : edges[comm.rank + 1]]
            tensor(shard).copy_(self._patterns.passed(call, comm.rank, 0, counts[comm.rank]))
            ready = Ready("allgather", (shard,), {**named, "out": out}, returned=out)
            for rank, start in enumerate(edges[:-1]):
                ready.expect(out, start, self._patterns.passed(call, rank, 0, counts[rank]))
            return ready
        return self._gathered(call, comm, Ready("allgather", (), named), counts)

    def _gather(self, call: Call, comm: Communicator) -> Ready:
        counts = self._shards(call, comm)
        root = call.root % comm.size
        ready = Ready(
            "gather", (), {"root": root, "counts": counts if call.uneven else None, **self._how(call, comm)}
        )
        if comm.rank != root:
            ready.arguments = (self._input(call, comm, counts[comm.rank]),)
            return ready
        return self._gathered(call, comm, ready, counts)

    def _gathered(self, call: Call, comm: Communicator, ready: Ready, counts: Sequence[int]) -> Ready:
        """Expect all shards in a new array that the call returns."""
        edges = partition.offsets(counts)
        ready.arguments = (self._input(call, comm, counts[comm.rank]),)
        ready.result_is = lambda whole: [
            (whole, start, start + counts[rank], self._patterns.passed(call, rank, 0, counts[rank]))
            for rank, start in enumerate(edges[:-1])
        ]
        return ready

    def _scatter(self, call: Call, comm: Communicator) -> Ready:
        counts = self._shards(call, comm)
        edges, root = partition.offsets(counts), call.root % comm.size
        start, stop = edges[comm.rank], edges[comm.rank + 1]
        buffer = self._input(call, comm, edges[-1]) if comm.rank == root else None
        out = self._memory.buffer(call, stop - start, "output")
        named = {"counts": counts if call.uneven else None, "out": out, **self._how(call, comm)}
        ready = Ready("scatter", (buffer, root), named, returned=out)
        ready.expect(out, 0, self._patterns.passed(call, root, start, stop))
        return ready

    def _alltoall(self, call: Call, comm: Communicator) -> Ready:
        share = call.count // comm.size
        buffer = self._input(call, comm, share * comm.size)
        at = comm.rank * share
        if call.in_place:  # an all-to-all has no in-place form; test the form that returns a new array
            ready = Ready("alltoall", (buffer,), self._how(call, comm))
            ready.result_is = lambda whole: [
                (whole, rank * share, (rank + 1) * share, self._patterns.passed(call, rank, at, at + share))
                for rank in range(comm.size)
            ]
            return ready
        out = self._memory.buffer(call, share * comm.size, "output")
        named: dict[str, Any] = {"out": out, **self._how(call, comm)}
        if call.uneven:
            named |= {"send_counts": (share,) * comm.size, "receive_counts": (share,) * comm.size}
        ready = Ready("alltoall", (buffer,), named, returned=out)
        for rank in range(comm.size):
            ready.expect(out, rank * share, self._patterns.passed(call, rank, at, at + share))
        return ready

    def _broadcast(self, call: Call, comm: Communicator) -> Ready:
        root = call.root % comm.size
        if comm.rank == root:
            buffer = self._input(call, comm, call.count)
        else:
            buffer = self._memory.buffer(call, call.count, "input")
        ready = Ready("broadcast", (buffer, root), self._how(call, comm), returned=buffer)
        ready.expect(buffer, 0, self._patterns.passed(call, root, 0, call.count))
        return ready

    def _barrier(self, call: Call, comm: Communicator) -> Ready:
        return Ready("barrier", (), self._how(call, comm) if call.collective == "barrier" else {})

    def _send(self, call: Call, comm: Communicator) -> list[Ready]:
        """Send from one rank to another; the other ranks do nothing."""
        sender = call.root % comm.size
        receiver = (sender + 1 + call.shift % max(1, comm.size - 1)) % comm.size
        if sender == receiver:
            return [self._barrier(call, comm)]
        if comm.rank == sender:
            return [Ready("send", (self._input(call, comm, call.count), receiver, call.shift % 4))]
        if comm.rank == receiver:
            return [self._receive(call, comm, sender)]
        return []

    def _sendrecv(self, call: Call, comm: Communicator) -> list[Ready]:
        """Send from every rank to the one `root` places further; alone, to itself."""
        distance = call.root % comm.size
        to, source = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
        buffer = self._input(call, comm, call.count)
        receive = self._receive(call, comm, source)
        return [receive, Ready("send", (buffer, to, call.shift % 4))]

    def _receive(self, call: Call, comm: Communicator, source: int) -> Ready:
        out = self._memory.buffer(call, call.count, "output")
        ready = Ready("recv", (out, source, call.shift % 4), returned=out)
        ready.expect(out, 0, self._patterns.passed(call, source, 0, call.count))
        return ready


@dataclass(frozen=True)
class Report:
    """Result of a soak.

    wrong        wrong results, over all ranks
    warm_nbytes  resident memory of each rank after the warm-up; 0 if unknown
    end_nbytes   resident memory of each rank at the end; 0 if unknown
    samples      by sample and rank, (calls made, resident memory)
    described    some of the wrong results, in words
    """

    calls: int
    seed: int
    ranks: int
    seconds: float
    wrong: int
    warm_nbytes: list[int]
    end_nbytes: list[int]
    samples: list[list[tuple[int, int]]]
    described: list[str]

    @property
    def drift_mb(self) -> list[float | None]:
        """Growth of each rank since the warm-up, in MB = 1e6 bytes; None if unknown."""
        pairs = zip(self.warm_nbytes, self.end_nbytes, strict=True)
        return [(end - warm) / 1e6 if end and warm else None for warm, end in pairs]


class Soak:
    """One rank's part of the soak."""

    def __init__(self, options: Options, comms: Sequence[Communicator]) -> None:
        self._comms = comms
        self._builder = Builder(Patterns([comm.size for comm in comms]), Memory(comms[0]))
        self._own_order = random.Random(f"{options.seed} {comms[0].rank}")
        self.wrong = 0
        self.described: list[str] = []
        self.done = 0

    def do(self, group: Sequence[Call]) -> None:
        """Make these calls and check their results."""
        if len(group) == 1:
            self._one(group[0])
        else:
            self._at_once(group)
        self.done += len(group)

    def fill(self) -> None:
        """Make calls that fill the scratch pool; they are checked, but not counted."""
        for group in filling(self._comms[0].size):
            self.do(group)
        self.done = 0

    def _one(self, call: Call) -> None:
        comm = self._comms[call.comm]
        parts = self._builder.ready(call, comm)
        if len(parts) == 2:
            receive, send = parts
            source, to = receive.arguments[1], send.arguments[1]
            result = comm.sendrecv(send.arguments[0], to, receive.arguments[0], source, send.arguments[2])
            self._check(call, receive, result)
            return
        for ready in parts:
            self._check(call, ready, getattr(comm, ready.method)(*ready.arguments, **ready.named))

    def _at_once(self, group: Sequence[Call]) -> None:
        under_way = []
        for call in group:
            comm = self._comms[call.comm]
            for ready in self._builder.ready(call, comm):
                start = getattr(comm, f"start_{ready.method}")
                under_way.append((call, ready, start(*ready.arguments, **ready.named)))
        self._own_order.shuffle(under_way)
        for call, ready, handle in under_way:
            if self._own_order.random() < 0.3:
                handle.test()
            self._check(call, ready, handle.wait())

    def _check(self, call: Call, ready: Ready, result: Any) -> None:
        if ready.is_right(result):
            return
        self.wrong += 1
        if len(self.described) < DESCRIBED:
            comm = self._comms[call.comm]
            self.described.append(f"rank {comm.rank} of {comm.name}, after {self.done} calls: {call}")


def split(world: Communicator) -> list[Communicator]:
    """Return the world, the even or odd ranks, and the world in reverse order. Collective."""
    halves = world.split(world.rank % 2, name="soak halves")
    backwards = world.split(0, key=-world.rank, name="soak backwards")
    assert halves is not None
    assert backwards is not None
    return [world, halves, backwards]


def run(options: Options, world: Communicator, say: Say = lambda line: None) -> Report:
    """Make all calls, and report progress on rank 0. Collective."""
    speak = say if world.rank == 0 else lambda line: None
    comms = split(world)
    soak = Soak(options, comms)
    between = max(CALLS_BETWEEN_SAMPLES, options.calls // SAMPLES)
    samples: list[tuple[int, int]] = []
    soak.fill()
    started_s = time.perf_counter()
    for group in draw(options, len(comms)):
        soak.do(group)
        if soak.done >= between * (len(samples) + 1):
            samples.append((soak.done, settled_nbytes()))
            if len(samples) % (SAMPLES // 10) == 0:
                passed_s = time.perf_counter() - started_s
                speak(f"# {soak.done:>9,} calls in {format_duration(passed_s)}, {soak.wrong} wrong on rank 0")
    seconds = float(world.allreduce(np.array([time.perf_counter() - started_s]), "max")[0])
    everyone = world.allgather_object((soak.wrong, soak.described, samples))
    for comm in comms[1:]:
        comm.free()
    by_rank = [own for _, _, own in everyone]
    return Report(
        calls=options.calls,
        seed=options.seed,
        ranks=world.size,
        seconds=seconds,
        wrong=sum(wrong for wrong, _, _ in everyone),
        warm_nbytes=[between_calls(own, options.calls, WARM_UP, 2 * WARM_UP) for own in by_rank],
        end_nbytes=[between_calls(own, options.calls, 1 - WARM_UP, 1) for own in by_rank],
        samples=[list(at_once) for at_once in zip(*by_rank, strict=True)],
        described=[text for _, texts, _ in everyone for text in texts][:DESCRIBED],
    )


def between_calls(samples: Sequence[tuple[int, int]], calls: int, start: float, stop: float) -> int:
    """Return the median of the samples between two fractions of all calls; 0 without samples."""
    seen = [nbytes for done, nbytes in samples if start * calls <= done <= stop * calls + MOST_AT_ONCE]
    return int(statistics.median(seen)) if seen else 0


def settled_nbytes() -> int:
    """Return resident memory after garbage collection and malloc_trim."""
    gc.collect()
    give_freed_memory_back()
    return resident_nbytes()


def give_freed_memory_back() -> None:
    """Return the C library's free memory to the system (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident_nbytes() -> int:
    """Return resident memory of this process, 0 if unknown."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def table(report: Report) -> list[str]:
    """Format the report."""
    lines = [
        "#",
        f"# {report.calls:,} mixed collectives on {report.ranks} ranks in {format_duration(report.seconds)} "
        f"({report.seconds / max(1, report.calls) * 1e6:.0f} us each): {report.wrong} wrong",
        *(f"# wrong: {text}" for text in report.described),
        f"#{'rank':>6}{'warm (MB)':>12}{'end (MB)':>12}{'drift (MB)':>12}",
    ]
    for rank, drift in enumerate(report.drift_mb):
        warm, end = report.warm_nbytes[rank] / 1e6, report.end_nbytes[rank] / 1e6
        grown = "not seen" if drift is None else f"{drift:+.2f}"
        lines.append(f" {rank:>6}{warm:>12.1f}{end:>12.1f}{grown:>12}")
    return lines


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Make many mixed collectives, check every result, watch memory."
    )
    parser.add_argument("--calls", type=int, default=100_000, help="(default: 100,000)")
    parser.add_argument("--seed", type=int, default=0, help="of the calls, on all ranks (default: 0)")
    parser.add_argument(
        "--max-drift", type=float, help="MB of growth per rank after the warm-up (default: any)"
    )
    parser.add_argument("--json", type=Path, help="write JSON lines too")
    options = parser.parse_args(words)
    if options.max_drift is not None and options.calls < FEWEST_TO_COMPARE:
        parser.error(
            f"--max-drift takes at least --calls {FEWEST_TO_COMPARE}, or there are no samples to compare"
        )
    return options


def main(words: Sequence[str] | None = None) -> int:
    options = parse(words)
    import hpcpar
    from hpcpar.bench.sweep import about, write_json
    from hpcpar.transport.mpi_library import library_facts

    world = hpcpar.init()
    facts = about(
        "soak", world, library_facts()["vendor"], {"calls": options.calls, "seed": options.seed}, {}
    )
    report = run(Options(options.calls, options.seed), world, lambda line: print(line, flush=True))
    drifts = [math.inf if drift is None else drift for drift in report.drift_mb]
    grown = options.max_drift is not None and max(drifts) > options.max_drift
    if world.rank == 0:
        for name, value in facts.items():
            print(f"# {name}: {value}")
        print("\n".join(table(report)))
        if grown:
            print(f"# memory grew by more than {options.max_drift:g} MB")
        if options.json is not None:
            write_json(options.json, facts, [report])
    return int(bool(report.wrong) or grown)


if __name__ == "__main__":
    sys.exit(main())
