"""Which algorithm a collective uses when the caller names none."""

from __future__ import annotations

from collections.abc import Mapping

from hpcpar.algorithms.catalogue import ALGORITHMS, Algorithm, find
from hpcpar.errors import OperationError
from hpcpar.units import KiB

UP_TO: dict[str, tuple[tuple[float, str], ...]] = {
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
"""For each collective: (largest bytes of the whole array, algorithm), in rising order.

Latency counts for small arrays, so those take the algorithms of ⌈log₂ n⌉ rounds; bytes count for
large ones, and the ring and the pairwise exchange send the fewest.
"""

UNEVEN = {"reduce_scatter": "ring", "allgather": "ring", "gather": "binomial", "scatter": "binomial"}
UNEVEN |= {"alltoall": "pairwise"}
"""What to use when ranks hold pieces of different sizes."""


SEGMENT_NBYTES = 128 * KiB
MOST_SEGMENTS = 64


def choose(
    collective: str, nbytes: int, *, uneven: bool, named: str | None, overrides: Mapping[str, str]
) -> Algorithm:
    """The algorithm named by the caller, else by HPCPAR_ALGORITHM, else the table's.

    nbytes   of the whole array, the same on every rank
    errors   OperationError for a name that does not exist, or that cannot do pieces of uneven size
    """
    if named is not None:
        algorithm = find(collective, named)
        if uneven and not algorithm.uneven:
            able = ", ".join(name for name, a in ALGORITHMS[collective].items() if a.uneven)
            raise OperationError(
                f"{collective} by {named!r} needs pieces of equal size on all ranks, but the counts differ; "
                f"these can do it: {able}"
            )
        return algorithm
    override = overrides.get(collective)
    if override is not None:
        algorithm = find(collective, override)
        if algorithm.uneven or not uneven:
            return algorithm
    if uneven:
        return find(collective, UNEVEN[collective])
    return find(collective, next(name for limit, name in UP_TO[collective] if nbytes <= limit))


def segments_for(algorithm: Algorithm, nbytes: int) -> int:
    """Into how many segments a pipelined algorithm cuts an array of `nbytes`; 1 for the others."""
    if not algorithm.segmented:
        return 1
    return max(1, min(MOST_SEGMENTS, nbytes // SEGMENT_NBYTES))


def parse_overrides(text: str | None) -> dict[str, str]:
    """HPCPAR_ALGORITHM: "allreduce=ring,broadcast=binomial".

    errors   OperationError that says what there is
    """
    overrides: dict[str, str] = {}
    for item in (text or "").replace(" ", "").split(","):
        if not item:
            continue
        collective, _, name = item.partition("=")
        if collective not in ALGORITHMS or not name:
            raise OperationError(
                f"HPCPAR_ALGORITHM has {item!r}; write collective=algorithm, separated by commas, with a "
                f"collective of {', '.join(ALGORITHMS)}"
            )
        find(collective, name)
        overrides[collective] = name
    return overrides
