"""`hpcpar bench soak`: many mixed collectives, every result checked, memory looked at before and after.

All ranks draw the same calls from the same seed: which collective, on which communicator, of how many
elements of which type, in place or not, in kept or in fresh memory, one by one or several under way at
once and waited for in an order of each rank's own.

What rank r passes at element i is a small whole number that depends on both: (i + shift + r) % PERIOD. So
a reduction over the ranks repeats with the same period, PERIOD numbers computed serially stand for all
of its elements, and what any result must be is a slice of an array that is made once. All sums are
exact in every element type, so a result is right or wrong, never nearly right.

Memory is what the system says is resident, after Python's garbage and the C library's freed memory have
been given back: what is left is held by somebody. Set beside each other are two medians: of the looks in
the tenth of the calls after the warm-up, which is the first tenth, and of those in the last tenth. Three
things would make them differ though nothing leaks:

    plans, programs   a communicator keeps them within its budgets; they come and go with the sizes that
                      are drawn, and are full long before the warm-up ends
    scratch           a pool keeps the largest pieces that were ever lent at once. Drawn sizes would still
                      make it grow after 100,000 calls, now and then, to 8 pieces of 1 MiB at most: so
                      calls that need as many and as large ones come first, before the count begins
    the looks         where MPI brings UCX, that keeps a note of every stretch of memory that is given
                      back to the system: a look costs 10 to 40 kB, which do not come back. So the looks
                      are few, and as many however many the calls
"""

from __future__ import annotations

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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hpcpar import partition
from hpcpar.comm.spaces import ScratchPool
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
"""Library and element type."""

OPS = ("sum", "average", "min", "max", "product")
INTEGER_OPS = ("sum", "min", "max", "product", "and", "or")

LARGEST_NBYTES = 1 * MiB
"""Of the whole array of a collective."""

SMALLNESS = 2
"""The number of bytes is 2 to the power of 20·u^SMALLNESS, u even in 0 to 1: half of them are below 32."""

KEPT_COUNTS = (0, 1, 2, 7, 60, 128, 1_000, 5_040, 30_000, 131_072)
"""Elements of the buffers that are used again and again."""

KEPT_SLOTS = 2
"""Of each kept buffer, so that two calls under way at once do not share one."""

MOST_AT_ONCE = 6
AT_ONCE = 0.25
"""How often several calls are under way at once, where one is the rule."""

PERIOD = 13
POISON = 99
"""What is in memory that a result is to be written to: no result holds it."""

EXACT_IN_BFLOAT16 = 256
"""Whole numbers up to this one are exact in every element type."""

ALIKE = 0.2
"""How many of those are calls of one kind, which take turns among the same few tags."""

LOOKS = 20
"""Three of them in either tenth that counts; each has its price in memory, see above."""

CALLS_BETWEEN_LOOKS = 100
"""At least: a look takes as long as some 50 calls."""

FEWEST_TO_COMPARE = 10 * CALLS_BETWEEN_LOOKS
"""Calls of which either tenth that counts has a look."""

WARM_UP = 0.1
"""Fraction of the calls; and of those on either end whose looks at memory count."""

TOLD = 5
"""Wrong results that are described."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """How many calls, and where the random numbers begin."""

    calls: int = 100_000
    seed: int = 0


@dataclass(frozen=True)
class Call:
    """One collective, the same on every rank.

    comm     index of the communicator: the world, its parts, the world in reverse order
    count    elements of the whole array, before it is made to fit the ranks
    root     a number of any size, of which each communicator takes the rest by its own
    slot     which of the kept buffers; None for fresh memory
    uneven   ranks have pieces of different sizes, where the collective can do that
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


def draw(options: Options, comms: int) -> Iterator[list[Call]]:
    """Calls one by one, or several that are under way at once; in all as many as asked for."""
    chance = random.Random(options.seed)
    left = options.calls
    while left:
        at_once = min(left, chance.randint(2, MOST_AT_ONCE) if chance.random() < AT_ONCE else 1)
        if chance.random() < ALIKE:
            first = _draw(chance, comms, KEPT_SLOTS)
            group = [replace(first, shift=chance.randrange(PERIOD)) for _ in range(at_once)]
        else:
            group = [_draw(chance, comms, slot) for slot in range(at_once)]
        left -= len(group)
        yield group


def _draw(chance: random.Random, comms: int, slot: int) -> Call:
    kind, dtype = chance.choice(ARRAYS)
    kept = slot < KEPT_SLOTS and chance.random() < 0.5
    itemsize = getattr(torch, dtype).itemsize
    nbytes = 2 ** (math.log2(LARGEST_NBYTES) * chance.random() ** SMALLNESS)
    fresh = 0 if chance.random() < 0.03 else int(nbytes) // itemsize
    return Call(
        collective=chance.choice(COLLECTIVES),
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
    )


def filling(size: int) -> Iterator[list[Call]]:
    """On the world, calls that need all the scratch there can be: on one rank after the other, as the root.

    It receives the whole array of every reduction, and of each kind only some go on at once.
    """
    count = LARGEST_NBYTES // torch.float32.itemsize
    for root in range(size):
        yield [
            Call("reduce", 0, "torch", "float32", op, count, root, 0, True, None, False)
            for op in ("sum", "max")
            for _ in range(ScratchPool.KEPT // 2)
        ]


def value(position: int, op: str) -> int:
    """What stands at a position of the pattern; for a product only 1 and 2, so that it stays exact."""
    return 1 + position % PERIOD % 2 if op == "product" else position % PERIOD


def reduced(op: str, size: int, position: int) -> float:
    """The serial computation: what the ranks' numbers at one position make."""
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
    raise OperationError(f"nothing is known of op {op!r}; there are {', '.join(INTEGER_OPS)}, average")


class Patterns:
    """Long arrays that all inputs and all results are slices of, by element type."""

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
        """What a rank passes as elements start to stop."""
        at = (call.shift + rank) % PERIOD
        long = self._passed[call.dtype, "product" if op == "product" else "sum"]
        part: torch.Tensor = long[at + start : at + stop]
        return part

    def result(self, call: Call, size: int, start: int, stop: int) -> torch.Tensor:
        """What a reduction by the call's op must give as elements start to stop."""
        part: torch.Tensor = self._reduced[call.dtype, call.op, size][call.shift + start : call.shift + stop]
        return part


def _long(dtype: str, numbers: Sequence[float]) -> torch.Tensor:
    # The average is rounded once to float64 and once to the type: as well as once, as the type's digits
    # are less than half of those of float64 (for float64 itself there is nothing more to round).
    period = torch.tensor(numbers, dtype=torch.float64).to(getattr(torch, dtype))
    count = LARGEST_NBYTES // period.element_size() + 2 * PERIOD
    return period.repeat(count // PERIOD + 1)[:count].contiguous()


class Memory:
    """Buffers to pass: kept ones, all made at the start, and fresh ones."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], Any] = {}
        for kind, dtype in ARRAYS:
            most = LARGEST_NBYTES // getattr(torch, dtype).itemsize
            for count in dict.fromkeys(min(count, most) for count in KEPT_COUNTS):
                for slot in range(KEPT_SLOTS):
                    for role in ("input", "output"):
                        self._kept[kind, dtype, count, slot, role] = _array(kind, dtype, count)

    def buffer(self, call: Call, count: int, role: str) -> Any:
        """Full of POISON: the first elements of a kept buffer, or as many fresh ones."""
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
    """The same memory as a tensor."""
    return array if isinstance(array, torch.Tensor) else torch.from_numpy(array)


@dataclass
class Ready:
    """A call with its memory, and what must be found after it.

    method      of the communicator, blocking; "start_" before it begins the same
    expected    (array, elements from, to, what they must be)
    returned    what the call must return, to the identity of its memory; None for not looked at
    """

    method: str = ""
    arguments: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)
    expected: list[tuple[Any, int, int, torch.Tensor]] = field(default_factory=list)
    returned: Any = None
    result_is: Callable[[Any], list[tuple[Any, int, int, torch.Tensor]]] | None = None

    def expect(self, array: Any, start: int, right: torch.Tensor) -> None:
        """Elements from `start` on must be these."""
        self.expected.append((array, start, start + right.numel(), right))

    def is_right(self, result: Any) -> bool:
        if self.returned is not None and result is not self.returned:
            return False
        expected = self.expected if self.result_is is None else self.expected + self.result_is(result)
        return all(torch.equal(tensor(array)[start:stop], right) for array, start, stop, right in expected)


class Builder:
    """Makes calls ready on one rank."""

    def __init__(self, patterns: Patterns, memory: Memory) -> None:
        self._patterns = patterns
        self._memory = memory

    def ready(self, call: Call, comm: Communicator) -> list[Ready]:
        """The call's parts on this rank: one; for messages one, two or none."""
        made = getattr(self, f"_{call.collective}")(call, comm)
        return made if isinstance(made, list) else [made]

    def _input(self, call: Call, comm: Communicator, count: int, *, op: str = "sum") -> Any:
        """This rank's contribution, as elements 0 to count."""
        buffer = self._memory.buffer(call, count, "input")
        tensor(buffer).copy_(self._patterns.passed(call, comm.rank, 0, count, op=op))
        return buffer

    def _allreduce(self, call: Call, comm: Communicator) -> Ready:
        buffer = self._input(call, comm, call.count, op=call.op)
        right = self._patterns.result(call, comm.size, 0, call.count)
        out = None if call.in_place else self._memory.buffer(call, call.count, "output")
        ready = Ready("allreduce", (buffer, call.op), {"out": out}, returned=buffer if out is None else out)
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
        ready = Ready("reduce", (buffer, call.op, root), {"out": out})
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
        named = {"counts": counts if call.uneven else None}
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
        """Elements of each rank's shard; uneven ones grow with the rank, as far as there is room."""
        share = call.count // comm.size
        if not call.uneven or share < comm.size:
            return (share,) * comm.size
        return tuple(share - comm.size + 1 + rank for rank in range(comm.size))

    def _allgather(self, call: Call, comm: Communicator) -> Ready:
        counts = self._shards(call, comm)
        named: dict[str, Any] = {"counts": counts if call.uneven else None}
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
        ready = Ready("gather", (), {"root": root, "counts": counts if call.uneven else None})
        if comm.rank != root:
            ready.arguments = (self._input(call, comm, counts[comm.rank]),)
            return ready
        return self._gathered(call, comm, ready, counts)

    def _gathered(self, call: Call, comm: Communicator, ready: Ready, counts: Sequence[int]) -> Ready:
        """All shards come into a new array, made here."""
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
        named = {"counts": counts if call.uneven else None, "out": out}
        ready = Ready("scatter", (buffer, root), named, returned=out)
        ready.expect(out, 0, self._patterns.passed(call, root, start, stop))
        return ready

    def _alltoall(self, call: Call, comm: Communicator) -> Ready:
        share = call.count // comm.size
        buffer = self._input(call, comm, share * comm.size)
        at = comm.rank * share
        if call.in_place:  # there is no such thing: instead, what comes back is a new array
            ready = Ready("alltoall", (buffer,))
            ready.result_is = lambda whole: [
                (whole, rank * share, (rank + 1) * share, self._patterns.passed(call, rank, at, at + share))
                for rank in range(comm.size)
            ]
            return ready
        out = self._memory.buffer(call, share * comm.size, "output")
        named: dict[str, Any] = {"out": out}
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
        ready = Ready("broadcast", (buffer, root), returned=buffer)
        ready.expect(buffer, 0, self._patterns.passed(call, root, 0, call.count))
        return ready

    def _barrier(self, call: Call, comm: Communicator) -> Ready:
        return Ready("barrier")

    def _send(self, call: Call, comm: Communicator) -> list[Ready]:
        """From one rank to another; the others have nothing to do."""
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
        """Every rank to one behind it, however far; alone, to itself."""
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
    """What came of it.

    wrong        results that were not right, over all ranks
    warm_nbytes  of each rank, resident memory after the warm-up; 0 where it was not seen
    end_nbytes   the same at the end
    course       at every look, for each rank, calls made and resident memory
    told         some of the wrong results, in words
    """

    calls: int
    seed: int
    ranks: int
    seconds: float
    wrong: int
    warm_nbytes: list[int]
    end_nbytes: list[int]
    course: list[list[tuple[int, int]]]
    told: list[str]

    @property
    def drift_mb(self) -> list[float | None]:
        """Growth of each rank since the warm-up, in MB = 1e6 bytes; None where it was not seen."""
        pairs = zip(self.warm_nbytes, self.end_nbytes, strict=True)
        return [(end - warm) / 1e6 if end and warm else None for warm, end in pairs]


class Soak:
    """One rank's part in it."""

    def __init__(self, options: Options, comms: Sequence[Communicator]) -> None:
        self._comms = comms
        self._builder = Builder(Patterns([comm.size for comm in comms]), Memory())
        self._own_order = random.Random(f"{options.seed} {comms[0].rank}")
        self.wrong = 0
        self.told: list[str] = []
        self.done = 0

    def do(self, group: Sequence[Call]) -> None:
        """Make these calls, and look at what they leave behind."""
        if len(group) == 1:
            self._one(group[0])
        else:
            self._at_once(group)
        self.done += len(group)

    def fill(self) -> None:
        """Have all scratch lent that ever will be; these calls are checked, but do not count."""
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
            self._look(call, receive, result)
            return
        for ready in parts:
            self._look(call, ready, getattr(comm, ready.method)(*ready.arguments, **ready.named))

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
            self._look(call, ready, handle.wait())

    def _look(self, call: Call, ready: Ready, result: Any) -> None:
        if ready.is_right(result):
            return
        self.wrong += 1
        if len(self.told) < TOLD:
            comm = self._comms[call.comm]
            self.told.append(f"rank {comm.rank} of {comm.name}, after {self.done} calls: {call}")


def split(world: Communicator) -> list[Communicator]:
    """The world, its ranks of even and of odd number, and the world in reverse order. Collective."""
    halves = world.split(world.rank % 2, name="soak halves")
    backwards = world.split(0, key=-world.rank, name="soak backwards")
    assert halves is not None
    assert backwards is not None
    return [world, halves, backwards]


def run(options: Options, world: Communicator, say: Say = lambda line: None) -> Report:
    """Make all calls, and say on rank 0 how it goes. Collective."""
    speak = say if world.rank == 0 else lambda line: None
    comms = split(world)
    soak = Soak(options, comms)
    between = max(CALLS_BETWEEN_LOOKS, options.calls // LOOKS)
    course: list[tuple[int, int]] = []
    soak.fill()
    started_s = time.perf_counter()
    for group in draw(options, len(comms)):
        soak.do(group)
        if soak.done >= between * (len(course) + 1):
            course.append((soak.done, settled_nbytes()))
            if len(course) % (LOOKS // 10) == 0:
                passed_s = time.perf_counter() - started_s
                speak(f"# {soak.done:>9,} calls in {format_duration(passed_s)}, {soak.wrong} wrong on rank 0")
    seconds = float(world.allreduce(np.array([time.perf_counter() - started_s]), "max")[0])
    everyone = world.allgather_object((soak.wrong, soak.told, course))
    for comm in comms[1:]:
        comm.free()
    courses = [course for _, _, course in everyone]
    return Report(
        calls=options.calls,
        seed=options.seed,
        ranks=world.size,
        seconds=seconds,
        wrong=sum(wrong for wrong, _, _ in everyone),
        warm_nbytes=[between_calls(one, options.calls, WARM_UP, 2 * WARM_UP) for one in courses],
        end_nbytes=[between_calls(one, options.calls, 1 - WARM_UP, 1) for one in courses],
        course=[list(looks) for looks in zip(*courses, strict=True)],
        told=[text for _, texts, _ in everyone for text in texts][:TOLD],
    )


def between_calls(course: Sequence[tuple[int, int]], calls: int, start: float, stop: float) -> int:
    """The median of what was seen between two fractions of all calls; 0 where nothing was."""
    seen = [nbytes for done, nbytes in course if start * calls <= done <= stop * calls + MOST_AT_ONCE]
    return int(statistics.median(seen)) if seen else 0


def settled_nbytes() -> int:
    """Resident memory once all that is free has been given back."""
    gc.collect()
    give_freed_memory_back()
    return resident_nbytes()


def give_freed_memory_back() -> None:
    """What the C library keeps of freed memory is nobody's (glibc only)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident_nbytes() -> int:
    """Memory of this process that is in RAM; elsewhere than on Linux its largest so far; 0 if unknown."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        pass
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def table(report: Report) -> list[str]:
    """The report as lines to print."""
    lines = [
        "#",
        f"# {report.calls:,} mixed collectives on {report.ranks} ranks in {format_duration(report.seconds)} "
        f"({report.seconds / max(1, report.calls) * 1e6:.0f} us each): {report.wrong} wrong",
        *(f"# wrong: {text}" for text in report.told),
        f"#{'rank':>6}{'warm (MB)':>12}{'end (MB)':>12}{'drift (MB)':>12}",
    ]
    for rank, drift in enumerate(report.drift_mb):
        warm, end = report.warm_nbytes[rank] / 1e6, report.end_nbytes[rank] / 1e6
        grown = "not seen" if drift is None else f"{drift:+.2f}"
        lines.append(f" {rank:>6}{warm:>12.1f}{end:>12.1f}{grown:>12}")
    return lines
