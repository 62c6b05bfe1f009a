"""All algorithms of a collective side by side, for any number of ranks: seconds, fastest, crossovers.

Each is priced by the event simulation where all ranks together send few messages, and by the closed
form beyond: 16,384 ranks in a ring send half a billion. Pipelined algorithms are given the number of
segments that is best for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hpcpar.algorithms.catalogue import ALGORITHMS, Algorithm
from hpcpar.algorithms.price import Topology, analytic, price
from hpcpar.errors import OperationError

SIMULATED_MESSAGES = 2000
MOST_SEGMENTS = 4096


@dataclass(frozen=True)
class Estimate:
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
    *,
    simulated_messages: int = SIMULATED_MESSAGES,
) -> Estimate:
    """What one algorithm takes.

    simulated_messages   run the event simulation if all ranks together send at most so many
    """
    segments = best_segments(algorithm, ranks, nbytes, topology)
    simulated = ranks * _messages(algorithm, ranks, topology, segments) <= simulated_messages
    if simulated:
        seconds = price(algorithm, ranks, nbytes, topology, segments=segments).seconds
    else:
        seconds = analytic(algorithm, ranks, nbytes, topology, segments)
    return Estimate(algorithm.name, ranks, nbytes, segments, simulated, seconds)


def estimates(collective: str, ranks: int, nbytes: int, topology: Topology) -> tuple[Estimate, ...]:
    """All algorithms of a collective, in the catalogue's order; OperationError if there is none."""
    if collective not in ALGORITHMS:
        raise OperationError(f"no collective {collective!r}; there are {', '.join(ALGORITHMS)}")
    return tuple(
        estimate(algorithm, ranks, nbytes, topology) for algorithm in ALGORITHMS[collective].values()
    )


def fastest(found: Sequence[Estimate]) -> Estimate:
    """The one of least seconds; of equals the first."""
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
    """Where the fastest algorithm changes between the first and the last of rising sizes.

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


def _messages(algorithm: Algorithm, ranks: int, topology: Topology, segments: int) -> float:
    """About how many messages a rank sends: those on the critical path, of all levels."""
    per_node = min(ranks, topology.ranks_per_node)
    inside, between = algorithm.bill_on_nodes(-(-ranks // per_node), per_node, segments)
    return inside.messages + between.messages
