"""Proof that schedules are right: all ranks are run symbolically, by the rules of `step`, without data.

A chunk holds a `Value`: which chunk it is, the contributions of which ranks are in it, and in which
order they were combined. Sends are not buffered, so a schedule that relies on buffering deadlocks
here. What is shown, for one size, root, number of segments and placement on nodes:

- every rank ends with what its collective promises, every contribution in it exactly once;
- after an all-reduce the result of every rank is the same expression tree, with the same left and right
  operands, so all ranks hold the same bits (no operation is taken as commutative or associative);
- no rank waits for ever, no message is left over, and both ends agree on its number of chunks;
- nothing undefined is sent or combined; no chunk is overwritten while it is sent, or twice at once.

A barrier is proved by causality: a message says of whom its sender had heard when the step began.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from hpcpar.algorithms.registry import Algorithm, require_collective
from hpcpar.algorithms.step import Receive, Send, Space, Step
from hpcpar.algorithms.topology import Nodes
from hpcpar.errors import OperationError, ScheduleError


def prove(
    algorithm: Algorithm,
    size: int,
    root: int = 0,
    segments: int = 1,
    nodes: Nodes | None = None,
    *,
    seen: Sequence[list[Memory]] | None = None,
) -> None:
    """Run the schedules of all `size` ranks; ScheduleError with the rank and the step if one is wrong.

    seen   as for `prove_schedules`
    """
    prove_schedules(
        algorithm.collective,
        algorithm.schedules(size, root=root, segments=segments, nodes=nodes),
        root=root,
        chunks=algorithm.chunks(size, segments, nodes),
        work_chunks=algorithm.work_chunks(size),
        name=algorithm.name,
        seen=seen,
    )


def memories(
    algorithm: Algorithm, size: int, root: int = 0, segments: int = 1, nodes: Nodes | None = None
) -> list[list[Memory]]:
    """Prove the schedules; return what each rank holds before each of its steps, and at the end.

    memories(find("allreduce", "ring"), 4)[rank][step]["data"][chunk]
    errors   as `prove`
    """
    seen: list[list[Memory]] = [[] for _ in range(size)]
    prove(algorithm, size, root, segments, nodes, seen=seen)
    return seen


def prove_schedules(
    collective: str,
    schedules: Sequence[Sequence[Step]],
    *,
    root: int = 0,
    chunks: int | None = None,
    work_chunks: int | None = None,
    name: str = "schedule",
    seen: Sequence[list[Memory]] | None = None,
) -> None:
    """Run one schedule for each rank, from wherever they come; ScheduleError if they are wrong.

    chunks, work_chunks   how many there are in the data (or input) and work space; None: as many as
                          the schedules name, or one for each rank where the collective demands it
    seen                  gets what each rank holds before each of its steps, and at the end
    """
    require_collective(collective)
    if not 0 <= root < len(schedules):
        raise OperationError(f"root {root} is none of the {len(schedules)} ranks that have a schedule")
    if chunks is None:
        per_rank = collective in ("reduce_scatter", "allgather", "gather", "scatter", "alltoall")
        chunks = len(schedules) if per_rank else _chunks_named(schedules, "data")
    if work_chunks is None:
        work_chunks = _chunks_named(schedules, "work")
    promise = _Promise(collective, len(schedules), root, chunks, work_chunks)
    _Interpreter(f"{collective} {name} on {len(schedules)} ranks", promise, schedules, seen).run()


class Value(NamedTuple):
    """The content of a chunk; in an all-to-all, `chunk` is source · size + destination."""

    chunk: int
    ranks: int  # bit r: the contribution of rank r is in it
    order: int  # equal numbers: the same expression tree


Memory = dict[Space, list[Value | None]]


@dataclass(frozen=True)
class _Promise:
    """Content before and after a collective."""

    collective: str
    size: int
    root: int
    chunks: int
    work_chunks: int

    @property
    def share(self) -> int:
        """Chunks that belong to each rank, where chunks belong to ranks: more than one if pipelined."""
        return max(1, self.chunks // self.size)

    def before(self, rank: int) -> Memory:
        """Memory of `rank` at the start."""
        work: list[Value | None] = [None] * self.work_chunks
        if self.collective == "alltoall":
            own = (Value(rank * self.size + to, 1 << rank, rank) for to in range(self.size))
            return {"input": list(own), "output": [None] * self.size, "work": work}
        return {"data": [self._start(rank, chunk) for chunk in range(self.chunks)], "work": work}

    def _start(self, rank: int, chunk: int) -> Value | None:
        match self.collective:
            case "allgather" | "gather":
                has = chunk // self.share == rank
            case "broadcast" | "scatter":
                has = rank == self.root
            case _:
                has = True
        return Value(chunk, 1 << rank, rank) if has else None

    def after(self, rank: int) -> Iterator[tuple[Space, int, int, int]]:
        """The required content of `rank`: (space, place, chunk, mask of the ranks that contributed)."""
        everyone = (1 << self.size) - 1
        everything, own = range(self.chunks), range(rank * self.share, (rank + 1) * self.share)
        match self.collective:
            case "reduce" | "gather" if rank != self.root:
                return
            case "allreduce" | "reduce":
                yield from (("data", chunk, chunk, everyone) for chunk in everything)
            case "reduce_scatter":
                yield from (("data", chunk, chunk, everyone) for chunk in own)
            case "allgather" | "gather":
                yield from (("data", chunk, chunk, 1 << chunk // self.share) for chunk in everything)
            case "broadcast":
                yield from (("data", chunk, chunk, 1 << self.root) for chunk in everything)
            case "scatter":
                yield from (("data", chunk, chunk, 1 << self.root) for chunk in own)
            case "alltoall":
                yield from (("output", s, s * self.size + rank, 1 << s) for s in range(self.size))


@dataclass(eq=False)
class _ProvedRank:
    """One rank on its way through its schedule."""

    rank: int
    steps: Sequence[Step]
    memory: Memory
    heard_of: int
    at: int = -1
    open: dict[int, Send | Receive] = field(default_factory=dict)  # of this step, by position in it
    says: int = 0  # whom it had heard of when the step began
    arrived: dict[int, list[Value]] = field(default_factory=dict)  # by the same position

    @property
    def finished(self) -> bool:
        return self.at >= len(self.steps)


_Posted = dict[tuple[int, int], deque[tuple[_ProvedRank, int]]]
"""From one rank to another: ends of messages that wait for their counterpart, each by rank and position."""


class _Interpreter:
    def __init__(
        self,
        title: str,
        promise: _Promise,
        schedules: Sequence[Sequence[Step]],
        seen: Sequence[list[Memory]] | None = None,
    ) -> None:
        self.title = title
        self.seen = seen
        self.promise = promise
        self.ranks = [
            _ProvedRank(rank, steps, promise.before(rank), 1 << rank) for rank, steps in enumerate(schedules)
        ]
        self.sends: _Posted = defaultdict(deque)
        self.receives: _Posted = defaultdict(deque)
        self.orders: dict[tuple[int, int], int] = {}

    def run(self) -> None:
        ready = deque(self.ranks)
        while ready:
            me = ready.popleft()
            self._finish_step(me)
            if self.seen is not None:
                self.seen[me.rank].append({space: list(values) for space, values in me.memory.items()})
            me.at += 1
            if not me.finished:
                ready.extend(self._begin_step(me))
        if any(not one.finished for one in self.ranks):
            self._fail_stuck()
        for one in self.ranks:
            self._check_promise(one)
        if self.promise.collective == "allreduce":
            self._check_same_order()

    def _begin_step(self, me: _ProvedRank) -> list[_ProvedRank]:
        """Copy, then post all sends and receives; the ranks whose step is complete now."""
        step = me.steps[me.at]
        self._check_step(me, step)
        for copy in step.copies:
            values = self._read(me, "copies", copy.space, copy.chunks)
            for chunk, value in zip(copy.into, values, strict=True):
                self._write(me, copy.into_space, chunk, value)
        me.says = me.heard_of
        me.open = dict(enumerate((*step.sends, *step.receives)))
        complete: list[_ProvedRank] = [] if me.open else [me]
        for position, send in enumerate(step.sends):
            self.sends[me.rank, send.to].append((me, position))
            complete += self._match(me.rank, send.to)
        for position, receive in enumerate(step.receives, start=len(step.sends)):
            self.receives[receive.source, me.rank].append((me, position))
            complete += self._match(receive.source, me.rank)
        return complete

    def _match(self, source: int, to: int) -> list[_ProvedRank]:
        """Let a message go whose two ends are both posted; the ranks whose step is complete by it."""
        posted, expected = self.sends[source, to], self.receives[source, to]
        if not (posted and expected):
            return []
        (sender, sends), (receiver, receives) = posted.popleft(), expected.popleft()
        send, receive = sender.open.pop(sends), receiver.open.pop(receives)
        if len(send.chunks) != len(receive.chunks):
            self._fail(
                receiver,
                f"expects {len(receive.chunks)} chunks from rank {sender.rank}, "
                f"which sends {len(send.chunks)} in its step {sender.at}",
            )
        receiver.arrived[receives] = self._read(sender, "sends", send.space, send.chunks)
        receiver.heard_of |= sender.says
        return [one for one in (sender, receiver) if not one.open]

    def _finish_step(self, me: _ProvedRank) -> None:
        """Overwrite and combine with what has arrived, in the order in which the step lists its receives."""
        step = me.steps[me.at] if me.arrived else Step()
        operands: dict[tuple[Space, int], list[tuple[int, Value]]] = defaultdict(list)
        for position in sorted(me.arrived):
            receive = step.receives[position - len(step.sends)]
            for chunk, value in zip(receive.chunks, me.arrived[position], strict=True):
                if receive.combine:
                    operands[receive.space, chunk].append((receive.source, value))
                else:
                    self._write(me, receive.space, chunk, value)
        for (space, chunk), received in operands.items():
            (own,) = self._read(me, "combines into", space, (chunk,))
            received.insert(step.own_turn, (received[0][0], own))
            total = received[0][1]
            for source, value in received[1:]:
                total = self._combined(me, source, chunk, total, value)
            self._write(me, space, chunk, total)
        me.arrived.clear()

    def _combined(self, me: _ProvedRank, source: int, chunk: int, left: Value, right: Value) -> Value:
        if left.chunk != right.chunk:
            self._fail(me, f"combines chunk {right.chunk} of rank {source} into chunk {left.chunk}")
        twice = left.ranks & right.ranks
        if twice:
            self._fail(
                me,
                f"combines what rank {source} sent into chunk {chunk}, "
                f"which has the contribution of {_named(twice)} already",
            )
        order = self.orders.setdefault((left.order, right.order), self.promise.size + len(self.orders))
        return Value(left.chunk, left.ranks | right.ranks, order)

    def _read(self, me: _ProvedRank, verb: str, space: Space, chunks: Sequence[int]) -> list[Value]:
        memory = me.memory[space]
        values = [value for value in (memory[chunk] for chunk in chunks) if value is not None]
        if len(values) < len(chunks):
            empty = next(chunk for chunk in chunks if memory[chunk] is None)
            self._fail(me, f"{verb} chunk {empty} of {space}, which holds nothing yet")
        return values

    def _write(self, me: _ProvedRank, space: Space, chunk: int, value: Value) -> None:
        if space == "data" and value.chunk != chunk:
            self._fail(me, f"puts what is chunk {value.chunk} elsewhere into the place of chunk {chunk}")
        me.memory[space][chunk] = value

    def _check_step(self, me: _ProvedRank, step: Step) -> None:
        """Check the peers, places and races of a single step."""
        for send in step.sends:
            self._check_peer(me, send.to)
            self._check_places(me, send.space, send.chunks)
        for receive in step.receives:
            self._check_peer(me, receive.source)
            self._check_places(me, receive.space, receive.chunks, written=True)
        for copy in step.copies:
            self._check_places(me, copy.space, copy.chunks)
            self._check_places(me, copy.into_space, copy.into, written=True)
            if len(copy.chunks) != len(copy.into):
                self._fail(me, f"copies {len(copy.chunks)} chunks into {len(copy.into)}")
        if step.receives:
            self._check_races(me, step)

    def _check_peer(self, me: _ProvedRank, peer: int) -> None:
        if not 0 <= peer < len(self.ranks) or peer == me.rank:
            self._fail(me, f"speaks to rank {peer}; its peers are the others of {len(self.ranks)} ranks")

    def _check_places(
        self, me: _ProvedRank, space: Space, chunks: Sequence[int], *, written: bool = False
    ) -> None:
        found = len(me.memory.get(space, ()))
        if chunks and not (min(chunks) >= 0 and max(chunks) < found):
            wrong = next(chunk for chunk in chunks if not 0 <= chunk < found)
            self._fail(me, f"names chunk {wrong} of {space}, which has {found} chunks")
        if written and space == "input":
            self._fail(me, "writes to the input, which belongs to the caller")

    def _check_races(self, me: _ProvedRank, step: Step) -> None:
        sent = {(send.space, chunk) for send in step.sends for chunk in send.chunks}
        overwritten: set[tuple[Space, int]] = set()
        combined: set[tuple[Space, int]] = set()
        for receive in step.receives:
            for place in ((receive.space, chunk) for chunk in receive.chunks):
                if place in overwritten or (place in combined and not receive.combine):
                    self._fail(me, f"chunk {place[1]} of {place[0]} is written twice at once")
                if place in sent and not receive.combine:
                    self._fail(me, f"chunk {place[1]} of {place[0]} is overwritten while it is sent")
                (combined if receive.combine else overwritten).add(place)

    def _check_promise(self, me: _ProvedRank) -> None:
        for space, place, chunk, ranks in self.promise.after(me.rank):
            value = me.memory[space][place]
            if value is None:
                self._fail(me, f"chunk {place} of {space} was never received")
            if value.chunk != chunk:
                self._fail(me, f"chunk {place} of {space} holds chunk {value.chunk} instead of {chunk}")
            if value.ranks != ranks:
                missing, foreign = ranks & ~value.ranks, value.ranks & ~ranks
                wrong = f"has the contribution of {_named(foreign)}, which does not belong there"
                if missing:
                    wrong = f"lacks the contribution of {_named(missing)}"
                self._fail(me, f"chunk {place} of {space} {wrong}")
        unheard = (1 << len(self.ranks)) - 1 & ~me.heard_of
        if self.promise.collective == "barrier" and unheard:
            self._fail(me, f"leaves the barrier without having heard of {_named(unheard)}")

    def _check_same_order(self) -> None:
        first = self.ranks[0].memory["data"]
        for one in self.ranks:
            for chunk, (value, expected) in enumerate(zip(one.memory["data"], first, strict=True)):
                if value and expected and value.order != expected.order:
                    self._fail(one, f"chunk {chunk} was combined in another order than on rank 0")

    def _fail(self, me: _ProvedRank, what: str) -> NoReturn:
        where = "at the end" if me.finished else f"step {me.at}"
        raise ScheduleError(f"{self.title}: rank {me.rank}, {where}: {what}")

    def _fail_stuck(self) -> NoReturn:
        """Follow who waits for whom from the first rank that is stuck, until it closes or ends."""
        me = next(one for one in self.ranks if not one.finished)
        chain: list[_ProvedRank] = []
        while not me.finished and me not in chain:
            chain.append(me)
            me = self.ranks[_peer(next(iter(me.open.values())))]
        if me.finished:
            chain = chain[-1:]
            end = f", but rank {me.rank} has finished its schedule"
        else:
            chain = chain[chain.index(me) :]
            end = ""
        waits = "; ".join(
            f"rank {one.rank} (step {one.at}) waits to {_described(next(iter(one.open.values())))}"
            for one in chain
        )
        raise ScheduleError(f"{self.title}: deadlock: {waits}{end}")


def _chunks_named(schedules: Sequence[Sequence[Step]], space: Space) -> int:
    named = (
        chunk for steps in schedules for step in steps for where, chunk in _places(step) if where == space
    )
    return 1 + max(named, default=-1)


def _places(step: Step) -> Iterator[tuple[Space, int]]:
    """Every chunk that a step names."""
    messages: tuple[Send | Receive, ...] = (*step.sends, *step.receives)
    for message in messages:
        yield from ((message.space, chunk) for chunk in message.chunks)
    for copy in step.copies:
        yield from ((copy.space, chunk) for chunk in copy.chunks)
        yield from ((copy.into_space, chunk) for chunk in copy.into)


def _peer(message: Send | Receive) -> int:
    return message.to if isinstance(message, Send) else message.source


def _described(message: Send | Receive) -> str:
    match message.chunks:
        case ():
            what = "a signal"
        case (chunk,):
            what = f"chunk {chunk}"
        case chunks:
            what = f"chunks {', '.join(map(str, chunks[:8]))}{', …' if len(chunks) > 8 else ''}"
    if isinstance(message, Send):
        return f"send {what} to rank {message.to}"
    return f"receive {what} from rank {message.source}"


def _named(mask: int) -> str:
    """The ranks of a mask in words: "rank 3", "ranks 1, 2, 5", "ranks 0, 1, 2, 3 and 29 more"."""
    ranks = [rank for rank in range(mask.bit_length()) if mask >> rank & 1]
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:4]))
    return f"ranks {shown}" + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
