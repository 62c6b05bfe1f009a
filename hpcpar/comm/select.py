"""Which algorithm a collective uses: the caller's, else the environment's, else a table's.

A table is built in, or measured on this machine by `hpcpar bench tune` (`hpcpar/comm/tuning.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from hpcpar.algorithms.cost import Cost
from hpcpar.algorithms.registry import ALGORITHMS, Algorithm, find
from hpcpar.algorithms.step import Step
from hpcpar.comm.shm_segment import post_nbytes
from hpcpar.errors import ConfigError, OperationError
from hpcpar.units import KiB, MiB, format_nbytes

Rules = tuple[tuple[float, str], ...]
"""(largest bytes of the whole array, algorithm) in rising order; the last one's limit is infinite."""

ANY = "any"
"""The element type that stands for all that have no rules of their own."""


@dataclass(frozen=True, eq=False)
class Table:
    """Algorithms by collective, element type and bytes of the whole array.

    source   where the table comes from, for people
    rules    collective -> element type, or ANY -> rules
    """

    source: str
    rules: Mapping[str, Mapping[str, Rules]]

    def name(self, collective: str, nbytes: int, dtype: str = ANY) -> str | None:
        """Name of the algorithm to use; None where the table has nothing to say."""
        by_dtype = self.rules.get(collective, {})
        rules = by_dtype.get(dtype) or by_dtype.get(ANY)
        return None if rules is None else next(name for limit, name in rules if nbytes <= limit)


UP_TO: dict[str, Rules] = {
    "allreduce": ((32 * KiB, "recursive_doubling"), (float("inf"), "ring")),
    "reduce_scatter": ((float("inf"), "ring"),),
    "allgather": ((32 * KiB, "bruck"), (float("inf"), "ring")),
    "broadcast": ((float("inf"), "binomial"),),
    "reduce": ((float("inf"), "binomial"),),
    "gather": ((float("inf"), "binomial"),),
    "scatter": ((float("inf"), "binomial"),),
    "alltoall": ((4 * KiB, "bruck"), (float("inf"), "pairwise")),
    "barrier": ((float("inf"), "dissemination"),),
}
"""The rules that hold where nothing was measured.

Latency counts for small arrays, so those take the algorithms of ⌈log₂ n⌉ rounds; bytes count for
large ones, and the ring and the pairwise exchange send the fewest.
"""

IN_SHARED_MEMORY: dict[str, Rules] = {
    "allreduce": ((64 * KiB, "recursive_doubling"), (float("inf"), "direct")),
    "reduce_scatter": ((float("inf"), "direct"),),
    "allgather": ((float("inf"), "direct"),),
    "broadcast": ((float("inf"), "direct"),),
    "reduce": ((float("inf"), "direct"),),
    "gather": ((float("inf"), "direct"),),
    "scatter": ((float("inf"), "direct"),),
    "alltoall": ((float("inf"), "direct"),),
}
"""What holds instead where all ranks exchange through memory of theirs: nobody is far away.

A piece for several ranks is laid out once, and the pieces of several ranks are summed in one pass.
"""

FEW_RANKS = 16
"""Up to so many that share memory sum short arrays in one step: a look at everybody
takes them less time than ⌈log₂ n⌉ rounds of waiting."""

IN_SHARED_MEMORY_BY_HALVES: dict[str, Rules] = {
    "allreduce": ((64 * KiB, "recursive_doubling"), (MiB, "rabenseifner"), (float("inf"), "direct")),
}
"""The same for 2, 4, 8 … ranks: as long as waiting counts, it is quicker to wait for one rank at a time."""

BUILT_IN = Table("built in", {collective: {ANY: rules} for collective, rules in UP_TO.items()})

ON_NODES: dict[str, Rules] = {
    "allreduce": ((32 * KiB, "recursive_doubling"), (float("inf"), "hierarchical_pipelined")),
    "reduce_scatter": ((float("inf"), "hierarchical_pipelined"),),
    "allgather": ((32 * KiB, "bruck"), (float("inf"), "hierarchical_pipelined")),
}
"""What holds instead on several nodes of several ranks: each byte crosses once for each node, not rank."""

BUILT_IN_ON_NODES = Table(
    "built in, for several nodes",
    {collective: {ANY: rules} for collective, rules in (UP_TO | ON_NODES).items()},
)


@cache
def built_in_shared_memory(size: int) -> Table:
    """The rules for so many ranks that all exchange through memory of theirs."""
    rules = UP_TO | IN_SHARED_MEMORY | (IN_SHARED_MEMORY_BY_HALVES if size & (size - 1) == 0 else {})
    # A root that sums alone what is longer keeps all others waiting.
    rules |= {"reduce": ((post_nbytes(size), "direct"), (float("inf"), "binomial"))}
    if size <= FEW_RANKS:
        rules |= {"allreduce": ((post_nbytes(size), "one_shot"), *rules["allreduce"])}
    return Table(
        "built in, for shared memory", {collective: {ANY: found} for collective, found in rules.items()}
    )


BUILT_IN_IN_PLACE = Table(
    "built in, for memory read in place",
    {collective: {ANY: rules} for collective, rules in (UP_TO | IN_SHARED_MEMORY).items()},
)


def built_in(nodes: Sequence[int], *, shared_memory: bool = False) -> Table:
    """The rules that hold where nothing was measured, for ranks on these nodes.

    shared_memory   all of them are on one, and exchange through memory that they share
    """
    if shared_memory:
        return built_in_shared_memory(len(nodes))
    return BUILT_IN_ON_NODES if 1 < len(set(nodes)) < len(nodes) else BUILT_IN


def built_in_on_device(nodes: Sequence[int], *, all_pull: bool) -> Table:
    """Rules for arrays on GPUs: nobody is far away where all ranks read each other's memory."""
    return BUILT_IN_IN_PLACE if all_pull else built_in(nodes)


UNEVEN = {"reduce_scatter": "ring", "allgather": "ring", "gather": "binomial", "scatter": "binomial"}
UNEVEN |= {"alltoall": "pairwise"}
"""What to use when ranks hold pieces of different sizes."""


SEGMENT_NBYTES = 128 * KiB
MOST_SEGMENTS = 64
"""Of a chain or a tree, where every rank passes whole segments on."""

NODES_SEGMENT_NBYTES = 2 * MiB
MOST_NODES_SEGMENTS = 8
"""Of a hierarchical pipeline, where a rank's messages are only a part of its segment."""


NATIVE = "native"
"""The name of "leave it to the MPI library's own collective"."""

NO_LIBRARY = "nothing is known of a library below"


def _no_steps(rank: int, size: int) -> Iterator[Step]:
    raise OperationError("native is the MPI library's own collective, which has no steps of ours")


def _native(collective: str) -> Algorithm:
    return Algorithm(
        NATIVE, _no_steps, "1", lambda size, segments: Cost(0), estimated=True, collective=collective
    )


NATIVES = {c: _native(c) for c in ("allreduce", "reduce_scatter", "allgather", "broadcast", "alltoall")}
"""MPI's own as an answer of `choose`: not in the registry, since it can be neither proved nor simulated."""


def named_algorithm(collective: str, name: str) -> Algorithm:
    """Find an algorithm by name, "native" too; OperationError with a list of what there is."""
    if not isinstance(name, str):
        raise OperationError(
            f"{collective} by algorithm {name!r}, a {type(name).__name__}, was asked for; give a name: "
            f"there are {', '.join(names(collective))}"
        )
    if name == NATIVE and collective in NATIVES:
        return NATIVES[collective]
    return find(collective, name)


def names(collective: str) -> tuple[str, ...]:
    """All that a caller may name."""
    return (*ALGORITHMS[collective], *((NATIVE,) if collective in NATIVES else ()))


def choose(
    collective: str,
    nbytes: int,
    *,
    uneven: bool,
    named: str | None,
    overrides: Mapping[str, str],
    table: Table = BUILT_IN,
    dtype: str = ANY,
    obstacle: str | None = NO_LIBRARY,
) -> Algorithm:
    """The algorithm named by the caller, else by HPCPAR_ALGORITHM, else the table's.

    nbytes   of the whole array, the same on every rank
    dtype    element type, for tables that distinguish
    obstacle why MPI's own cannot run this call here (over loopback, for types that MPI does not know);
             None: it can. With an obstacle, HPCPAR_ALGORITHM or a table that says "native" is passed
             over for the next: they speak of all calls. A caller who names it means this one
    errors   OperationError for a name that does not exist, that cannot do pieces of uneven size, or
             that is MPI's own where that cannot run
    """
    if named is not None:
        return _require_able(named_algorithm(collective, named), uneven, obstacle)
    # A table is measured with equal pieces, and says nothing of others.
    measured = None if uneven else table.name(collective, nbytes, dtype)
    for name in (overrides.get(collective), measured):
        if name is not None and _able(named_algorithm(collective, name), uneven, obstacle):
            return named_algorithm(collective, name)
    if uneven:
        return find(collective, UNEVEN[collective])
    built_in = BUILT_IN.name(collective, nbytes)
    assert built_in is not None, f"no rules for {collective}"
    return find(collective, built_in)


def _able(algorithm: Algorithm, uneven: bool, obstacle: str | None) -> bool:
    return (algorithm.uneven or not uneven) and (obstacle is None or algorithm.name != NATIVE)


def _require_able(algorithm: Algorithm, uneven: bool, obstacle: str | None) -> Algorithm:
    """The algorithm that a caller named; OperationError that says which others can do it."""
    if _able(algorithm, uneven, obstacle):
        return algorithm
    collective = algorithm.collective
    able = ", ".join(name for name, a in ALGORITHMS[collective].items() if _able(a, uneven, obstacle))
    if algorithm.name == NATIVE:
        raise OperationError(
            f"{collective} by 'native', MPI's own, cannot be done here: {obstacle}. Name none, to have one "
            f"chosen, or one of these: {able}"
        )
    raise OperationError(
        f"{collective} by {algorithm.name!r} needs pieces of equal size on all ranks, but the counts differ; "
        f"these can do it: {able}"
    )


def segments_for(algorithm: Algorithm, nbytes: int) -> int:
    """Into how many segments a pipelined algorithm cuts an array of `nbytes`; 1 for the others."""
    if not algorithm.segmented:
        return 1
    if algorithm.name == "hierarchical_pipelined":
        return max(1, min(MOST_NODES_SEGMENTS, nbytes // NODES_SEGMENT_NBYTES))
    return max(1, min(MOST_SEGMENTS, nbytes // SEGMENT_NBYTES))


def describe(choices: Iterable[tuple[int, str]]) -> str:
    """(bytes, algorithm) in rising order for people: "bruck up to 32.0 KiB, then ring"."""
    spans: list[tuple[str, int]] = []
    for nbytes, name in choices:
        if spans and spans[-1][0] == name:
            spans[-1] = (name, nbytes)
        else:
            spans.append((name, nbytes))
    said = [f"{name} up to {format_nbytes(nbytes)}" for name, nbytes in spans[:-1]]
    return ", then ".join([*said, *(name for name, _ in spans[-1:])])


def parse_overrides(text: str | None) -> dict[str, str]:
    """HPCPAR_ALGORITHM: "allreduce=ring,broadcast=native".

    errors   ConfigError that says what there is
    """
    overrides: dict[str, str] = {}
    for item in (text or "").replace(" ", "").split(","):
        if not item:
            continue
        collective, _, name = item.partition("=")
        if collective not in ALGORITHMS or not name:
            raise ConfigError(
                f"HPCPAR_ALGORITHM has {item!r}; write collective=algorithm, separated by commas, with a "
                f"collective of {', '.join(ALGORITHMS)}"
            )
        if name not in names(collective):
            raise ConfigError(
                f"HPCPAR_ALGORITHM has {item!r}, but {collective} has no algorithm {name!r}; there are "
                f"{', '.join(names(collective))}"
            )
        overrides[collective] = name
    return overrides
