"""Simulate schedules under the α-β-γ model, and compare the algorithms of a collective.

All ranks begin at second 0 and walk through their schedules by the rules of `step`: a message of n
bytes starts when both ends have posted it and lasts α + βn of the link between them; a rank has one
port, full duplex, so its sends go one after another, and so do its receives; after its last message
a step combines, γ a byte. Copies within a rank are free.

A comparison simulates where all ranks together send few messages, and takes the closed form beyond:
16,384 ranks in a ring send half a billion. Pipelined algorithms get the best number of segments.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from hpcpar.algorithms.cost import TwoLevelCost
from hpcpar.algorithms.registry import ALGORITHMS, Algorithm, require_collective
from hpcpar.algorithms.step import Receive, Send, Step
from hpcpar.algorithms.topology import Topology
from hpcpar.errors import ScheduleError
from hpcpar.partition import counts

SIMULATED_MESSAGES = 2000
"""Most messages of all ranks together that are simulated."""
MOST_SEGMENTS = 4096


@dataclass(frozen=True)
class SimulatedCost:
    """Seconds until the last rank has finished, and the bytes and messages that each rank sends."""

    seconds: float
    nbytes_sent: tuple[int, ...]
    messages: tuple[int, ...]
    nbytes_between_nodes: int


def simulate(
    algorithm: Algorithm,
    size: int,
    nbytes: int,
    topology: Topology,
    root: int = 0,
    segments: int = 1,
) -> SimulatedCost:
    """Run the schedules of all ranks against the clock.

    nbytes   the whole vector: S in the closed forms, what one rank's buffer holds; cut as equally as can be
    """
    nodes = topology.nodes(size)
    chunks = algorithm.chunks(size, segments, nodes)
    chunk_nbytes = counts(nbytes, chunks) if chunks else ()
    schedules = algorithm.schedules(size, root=root, segments=segments, nodes=nodes)
    return _Clock(schedules, chunk_nbytes, topology).run()


def analytic(algorithm: Algorithm, size: int, nbytes: float, topology: Topology, segments: int = 1) -> float:
    """Seconds by the closed form, for any number of ranks at once.

    It equals `simulate` where the bytes divide equally, all nodes are full, the links between nodes are
    not faster than those within, and the root is rank 0. For algorithms that walk through powers of two
    the nodes and the ranks on each must be such powers, too. Elsewhere, for `direct` exchanges and for
    the double binary tree, it is an estimate.
    """
    inside, between = _cost_on(topology, algorithm, size, segments)
    latency_s = inside.messages * topology.intra.alpha_s + between.messages * topology.inter.alpha_s
    per_byte_s = (
        inside.sent * topology.intra.beta_s_per_byte
        + between.sent * topology.inter.beta_s_per_byte
        + (inside.combined + between.combined) * topology.gamma_s_per_byte
    )
    return latency_s + nbytes * per_byte_s


def _cost_on(topology: Topology, algorithm: Algorithm, size: int, segments: int) -> TwoLevelCost:
    per_node = min(size, topology.ranks_per_node)
    return algorithm.cost_on_nodes(-(-size // per_node), per_node, segments)


@dataclass(eq=False)
class _SimulatedRank:
    rank: int
    steps: Sequence[Step]
    at: int = -1
    open: int = 0  # messages of this step that have not started yet
    last_end: float = 0.0  # of the messages of this step
    port_out_free: float = 0.0
    port_in_free: float = 0.0


@dataclass(frozen=True, order=True)
class _Event:
    """Something that may happen at `time`: at the same time steps come first, then messages as listed."""

    time: float
    position: int  # -1: a step begins; otherwise a message, by its place among its sender's sends
    rank: int  # whose step, or who sends
    peer: int = -1
    nbytes: int = field(default=0, compare=False)


class _Clock:
    def __init__(
        self, schedules: Sequence[Sequence[Step]], chunk_nbytes: Sequence[int], topology: Topology
    ) -> None:
        self.topology = topology
        self.chunk_nbytes = chunk_nbytes
        self.work_nbytes = max(chunk_nbytes, default=0)
        self.ranks = [_SimulatedRank(rank, steps) for rank, steps in enumerate(schedules)]
        self.sends: dict[tuple[int, int], deque[tuple[int, int]]] = defaultdict(deque)  # (position, bytes)
        self.receives: dict[tuple[int, int], int] = defaultdict(int)  # posted and not matched
        self.events = [_Event(0.0, -1, rank) for rank in range(len(schedules))]
        self.nbytes_sent = [0] * len(schedules)
        self.messages = [0] * len(schedules)
        self.nbytes_between_nodes = 0

    def run(self) -> SimulatedCost:
        seconds = 0.0
        while self.events:
            event = heapq.heappop(self.events)
            seconds = max(seconds, event.time)
            if event.position < 0:
                self._begin_step(self.ranks[event.rank], event.time)
            else:
                self._try_to_start(event)
        for one in self.ranks:
            if one.at < len(one.steps):
                raise ScheduleError(f"rank {one.rank} never ends its step {one.at}; `prove` says why")
        return SimulatedCost(
            seconds, tuple(self.nbytes_sent), tuple(self.messages), self.nbytes_between_nodes
        )

    def _begin_step(self, me: _SimulatedRank, now: float) -> None:
        me.at += 1
        if me.at == len(me.steps):
            return
        step = me.steps[me.at]
        me.open, me.last_end = len(step.sends) + len(step.receives), now
        if not me.open:
            heapq.heappush(self.events, _Event(now, -1, me.rank))
        for position, send in enumerate(step.sends):
            self.sends[me.rank, send.to].append((position, self._nbytes(send)))
            self._match(me.rank, send.to, now)
        for receive in step.receives:
            self.receives[receive.source, me.rank] += 1
            self._match(receive.source, me.rank, now)

    def _match(self, source: int, to: int, now: float) -> None:
        if self.sends[source, to] and self.receives[source, to]:
            self.receives[source, to] -= 1
            position, nbytes = self.sends[source, to].popleft()
            heapq.heappush(self.events, _Event(now, position, source, to, nbytes))

    def _try_to_start(self, message: _Event) -> None:
        """Let the message go if both ports are free now; otherwise let it try again when they are."""
        sender, receiver = self.ranks[message.rank], self.ranks[message.peer]
        free = max(message.time, sender.port_out_free, receiver.port_in_free)
        if free > message.time:
            again = _Event(free, message.position, message.rank, message.peer, message.nbytes)
            heapq.heappush(self.events, again)
            return
        end = free + self.topology.link(message.rank, message.peer).seconds(message.nbytes)
        sender.port_out_free = receiver.port_in_free = end
        self.nbytes_sent[message.rank] += message.nbytes
        self.messages[message.rank] += 1
        if not self.topology.same_node(message.rank, message.peer):
            self.nbytes_between_nodes += message.nbytes
        for one in (sender, receiver):
            self._message_ends(one, end)

    def _message_ends(self, me: _SimulatedRank, end: float) -> None:
        me.open -= 1
        me.last_end = max(me.last_end, end)
        if me.open == 0:
            combined = sum(self._nbytes(one) for one in me.steps[me.at].receives if one.combine)
            folded = me.last_end + self.topology.gamma_s_per_byte * combined
            heapq.heappush(self.events, _Event(folded, -1, me.rank))

    def _nbytes(self, message: Send | Receive) -> int:
        if message.space == "work":
            return self.work_nbytes * len(message.chunks)
        return sum(self.chunk_nbytes[chunk] for chunk in message.chunks)


@dataclass(frozen=True)
class AlgorithmTime:
    """Seconds that one algorithm takes for a vector of `nbytes`, and how they were found."""

    algorithm: str
    ranks: int
    nbytes: int
    segments: int
    simulated: bool
    seconds: float


@dataclass(frozen=True)
class Crossover:
    """From `nbytes` on (within a hundredth) another algorithm is the fastest."""

    nbytes: int
    before: str
    after: str


def estimate(
    algorithm: Algorithm,
    ranks: int,
    nbytes: int,
    topology: Topology,
) -> AlgorithmTime:
    """Estimate the seconds of one algorithm."""
    segments = best_segments(algorithm, ranks, nbytes, topology)
    # About as many messages as a rank sends are on the critical path.
    messages = sum(level.messages for level in _cost_on(topology, algorithm, ranks, segments))
    simulated = ranks * messages <= SIMULATED_MESSAGES
    if simulated:
        seconds = simulate(algorithm, ranks, nbytes, topology, segments=segments).seconds
    else:
        seconds = analytic(algorithm, ranks, nbytes, topology, segments)
    return AlgorithmTime(algorithm.name, ranks, nbytes, segments, simulated, seconds)


def estimates(collective: str, ranks: int, nbytes: int, topology: Topology) -> tuple[AlgorithmTime, ...]:
    """All algorithms of a collective, in the registry's order; OperationError if there is none."""
    require_collective(collective)
    return tuple(
        estimate(algorithm, ranks, nbytes, topology) for algorithm in ALGORITHMS[collective].values()
    )


def fastest(found: Sequence[AlgorithmTime]) -> AlgorithmTime:
    """The estimate of least seconds; of equals the first."""
    return min(found, key=lambda one: one.seconds)


def best_segments(algorithm: Algorithm, ranks: int, nbytes: int, topology: Topology) -> int:
    """The power of two of segments, none empty, that the closed form finds fastest; 1 if not pipelined."""
    if not algorithm.segmented:
        return 1
    choices = [1 << power for power in range(MOST_SEGMENTS.bit_length()) if 1 << power <= max(1, nbytes)]
    return min(choices, key=lambda segments: analytic(algorithm, ranks, nbytes, topology, segments))


def crossovers(
    collective: str, ranks: int, sizes: Sequence[int], topology: Topology
) -> tuple[Crossover, ...]:
    """Find where the fastest algorithm changes between the first and the last of rising sizes.

    Between two neighbours of `sizes` with different winners the changes are found by bisection; one
    that comes and goes between neighbours with the same winner is not seen.
    """

    def winner(nbytes: int) -> str:
        return fastest(estimates(collective, ranks, nbytes, topology)).algorithm

    return tuple(_changes(winner, sizes))


def _changes(winner: Callable[[int], str], sizes: Sequence[int]) -> Iterator[Crossover]:
    winners = [winner(nbytes) for nbytes in sizes]
    for index in range(len(sizes) - 1):
        at, before = sizes[index], winners[index]
        while before != winners[index + 1]:
            at = _first_other(winner, before, at, sizes[index + 1])
            after = winner(at)
            yield Crossover(at, before, after)
            before = after


def _first_other(winner: Callable[[int], str], before: str, low: int, high: int) -> int:
    """A size above `low` with another winner, at most a hundredth (or a byte) above one without."""
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if winner(middle) == before else (low, middle)
    return high
