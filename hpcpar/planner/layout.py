"""Layout: degrees of parallelism on named axes, and the coordinates of each rank. Integers only.

Axes, outermost first, so that neighbours along `tp` are neighbours in rank:

    rank = ((pp · DP + dp) · CP + cp) · TP + tp

    pp=2, dp=2, tp=2        tp0 tp1        tp0 tp1
                      dp0    0   1   dp0    4   5
                      dp1    2   3   dp1    6   7
                          pp0            pp1

Expert parallelism adds no ranks: `ep` is folded out of dp × cp × tp. A stage's ranks are numbered

    (dp·CP + cp)·TP + tp = (edp·EP + ep)·ETP + etp        ETP is 1 (experts are whole) or TP (each is split)

Each run of EP·ETP neighbours holds the experts once, and ranks along `edp` hold the same parts of the same
experts. So {dp, cp, tp} and {edp, ep, etp} are two views of the same ranks.

`dp_shard` adds none either: dp is read as dp_replicate × dp_shard, where each run of dp_shard neighbours,
with their cp ranks, shares one set of ZeRO's shards (HSDP).
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpcpar.errors import LayoutError

AXES = ("pp", "dp", "cp", "tp")
"""The axes whose degrees multiply to the number of ranks, outermost first."""

DEGREES = (*AXES, "ep", "etp", "dp_shard")
"""Degrees that a user sets."""

FOLDED_AXES = ("pp", "edp", "ep", "etp")
"""The view of experts: dp × cp × tp read as edp × ep × etp."""


class Coordinates(NamedTuple):
    """Coordinates of one rank on every axis."""

    pp: int
    dp: int
    cp: int
    tp: int
    edp: int
    ep: int
    etp: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees of parallelism of `size` ranks.

    ep    ranks that the experts are spread over; it divides dp × cp × tp / etp
    etp   ranks that each expert is split over: 1, or tp
    dp_shard   dp ranks that share a set of ZeRO's shards; it divides dp. None: all of dp
    errors   LayoutError for a degree below 1, or one that does not divide
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    dp_shard: int | None = None

    def __post_init__(self) -> None:
        for axis in DEGREES:
            degree = getattr(self, axis)
            if not _is_degree(degree) and (axis, degree) != ("dp_shard", None):
                raise LayoutError(f"{axis}={degree!r}: a degree is a whole number of at least 1")
        if self.dp % (self.dp_shard or self.dp):
            raise LayoutError(
                f"dp_shard={self.dp_shard} must divide dp={self.dp}, of which it is a part; "
                + _nearest_divisors("dp_shard", self.dp_shard or 1, self.dp)
            )
        if self.etp not in (1, self.tp):
            raise LayoutError(
                f"etp={self.etp}: experts are whole (etp=1) or split as the other layers are (etp={self.tp}, "
                f"as tp={self.tp}); use one of these"
            )
        whole = self.dp * self.cp * self.tp // self.etp
        if whole % self.ep:
            over = "dp x cp" if self.etp == self.tp else "dp x cp x tp"
            raise LayoutError(
                f"ep={self.ep} is folded out of {over} = {whole} ranks and must divide them; "
                + _nearest_divisors("ep", self.ep, whole)
            )

    def __str__(self) -> str:
        """Format the degrees above 1: "pp=2 x dp=2 x tp=3, ep=2"."""
        product = _product_text({axis: self.degree(axis) for axis in AXES})
        folded = [f"{axis}={self.degree(axis)}" for axis in ("ep", "etp") if self.degree(axis) > 1]
        folded += [] if self.shard_ranks is None else [f"dp_shard={self.dp_shard}"]
        return ", ".join([product, *folded])

    @classmethod
    def fit(cls, world_size: int, **degrees: int | None) -> Layout:
        """Build the layout of exactly `world_size` ranks with the given degrees.

        One of pp, dp, cp, tp may be None or -1 and is derived from the others; without such a one, dp is
        derived unless given. `ep=None` or `ep=-1` spreads the experts over all ranks of a stage, and
        `dp_shard=None` or -1 the shards over all of dp. Other degrees default to 1.
        errors   LayoutError that names a degree that fits
        """
        for axis in degrees:
            check_axis(axis, DEGREES)
        given = {axis: None if degree == -1 else degree for axis, degree in degrees.items()}
        for axis, degree in given.items():
            if degree is not None and not _is_degree(degree):
                raise LayoutError(
                    f"{axis}={degree!r}: a degree is a whole number of at least 1 (or -1: derived)"
                )
        product = _derive({axis: given[axis] for axis in AXES if axis in given}, world_size)
        etp = given.get("etp", 1) or product["tp"]
        expert = given.get("ep", 1)
        spread = product["dp"] * product["cp"] * product["tp"] // etp
        ep = spread if expert is None else expert
        return cls(**product, ep=ep, etp=etp, dp_shard=given.get("dp_shard"))

    @property
    def size(self) -> int:
        """Number of ranks: pp · dp · cp · tp."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def edp(self) -> int:
        """Number of ranks that hold the same parts of the same experts: dp · cp · tp / (ep · etp)."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    @property
    def shard_ranks(self) -> int | None:
        """Neighbours of dp × cp that share a set of shards: dp_shard · cp; None for all of them."""
        return None if self.dp_shard in (None, self.dp) else (self.dp_shard or 1) * self.cp

    @property
    def degrees(self) -> dict[str, int]:
        """Degrees as a user sets them; without dp_shard where shards are over all of dp."""
        return {axis: degree for axis in DEGREES if (degree := getattr(self, axis)) is not None}

    def shard_groups(self) -> tuple[tuple[int, ...], ...]:
        """Partition the ranks into groups that share a set of shards, each in rank order."""
        size = self.shard_ranks or self.dp * self.cp
        return tuple(
            group[start : start + size]
            for group in self.groups("dp", "cp")
            for start in range(0, len(group), size)
        )

    def degree(self, axis: str) -> int:
        """Degree of `axis`."""
        check_axis(axis, Coordinates._fields)
        degree: int = getattr(self, axis)
        return degree

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of `rank` (0 … size-1) on every axis."""
        if not 0 <= rank < self.size:
            raise LayoutError(
                f"rank {rank} is not in the layout {self}, which has ranks 0 to {self.size - 1}"
            )
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        rest, etp = divmod((dp * self.cp + cp) * self.tp + tp, self.etp)
        edp, ep = divmod(rest, self.ep)
        return Coordinates(pp, dp, cp, tp, edp, ep, etp)

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Partition the ranks into groups that differ only along `axes`, each in rank order.

        Layout(pp=2, tp=2).groups("tp") == ((0, 1), (2, 3))
        Layout(pp=2, tp=2).groups("pp") == ((0, 2), (1, 3))
        """
        members: dict[int, list[int]] = {}
        for rank in range(self.size):
            members.setdefault(self.group_index(rank, *axes), []).append(rank)
        return tuple(tuple(group) for _, group in sorted(members.items()))

    def group_index(self, rank: int, *axes: str) -> int:
        """Index of the rank's group in `groups(*axes)`: its coordinates on all other axes as one number."""
        coordinates = self.coordinates(rank)
        index = 0
        for axis in _other_axes(axes):
            index = index * self.degree(axis) + getattr(coordinates, axis)
        return index


def _is_degree(degree: object) -> bool:
    return isinstance(degree, int) and not isinstance(degree, bool) and degree >= 1


def check_axis(axis: str, known: Sequence[str]) -> None:
    """Raise LayoutError for an axis that there is none of."""
    if axis not in known:
        near = difflib.get_close_matches(axis, known, n=1, cutoff=0.4) or sorted(
            name for name in known if sorted(name) == sorted(axis)
        )
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise LayoutError(f"there is no axis {axis!r}: the axes are {', '.join(known)}{hint}")


def _other_axes(axes: Sequence[str]) -> tuple[str, ...]:
    """Axes that are fixed within a group along `axes`, outermost first."""
    for axis in axes:
        check_axis(axis, Coordinates._fields)
    folded = {"ep", "edp", "etp"} & set(axes)
    if folded and {"dp", "cp", "tp"} & set(axes):
        raise LayoutError(
            f"axes {', '.join(axes)} overlap: edp, ep and etp are another view of dp x cp x tp; "
            "combine edp, ep and etp with each other, or dp, cp and tp"
        )
    return tuple(axis for axis in (FOLDED_AXES if folded else AXES) if axis not in axes)


def _derive(given: Mapping[str, int | None], world_size: int) -> dict[str, int]:
    """Complete the degrees of all AXES, so that their product is `world_size`."""
    unknown = [axis for axis, degree in given.items() if degree is None]
    if not unknown and "dp" not in given:
        unknown = ["dp"]
    if len(unknown) > 1:
        raise LayoutError(
            f"{' and '.join(unknown)} are both to be derived: give all but one of them a degree"
        )
    known = {axis: degree for axis, degree in given.items() if degree is not None}
    product = math.prod(known.values())
    degrees = dict.fromkeys(AXES, 1) | known
    if unknown and world_size % product == 0:
        return degrees | {unknown[0]: world_size // product}
    if unknown:
        raise LayoutError(
            f"{_product_text(known)} does not divide the job's {world_size} ranks, so {unknown[0]} cannot be "
            f"derived; {_cure(known, world_size, exactly=False)}"
        )
    if product != world_size:
        raise LayoutError(
            f"{_product_text(known)} = {product} ranks, but the job has {world_size}; "
            + _cure(known, world_size, exactly=True)
        )
    return degrees


def _product_text(degrees: Mapping[str, int]) -> str:
    above_one = [f"{axis}={degrees[axis]}" for axis in AXES if degrees.get(axis, 1) > 1]
    return " x ".join(above_one) or "dp=1"


def _cure(degrees: Mapping[str, int], world_size: int, *, exactly: bool) -> str:
    """Advise one other degree that makes the product equal, or divide, the number of ranks, or a job size."""
    product = math.prod(degrees.values())
    for axis in ("dp", "tp", "pp", "cp") if exactly else ("tp", "cp", "pp", "dp"):
        own = degrees.get(axis, 1)
        degree, rest = divmod(world_size, product // own)
        if not rest and exactly:
            return f"try {axis}={degree}"
        if not rest and own > 1:
            return _nearest_divisors(axis, own, degree)
    return f"start {product} ranks" if exactly else f"start a multiple of {product} ranks"


def _nearest_divisors(axis: str, asked: int, number: int) -> str:
    """Advise "try ep=2 or ep=4": the divisors of `number` on either side of the one asked for."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < asked][-1:]
    above = [d for d in divisors if d > asked][:1]
    return "try " + " or ".join(f"{axis}={d}" for d in below + above)


def placement(nodes: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """Order the job's ranks so that the inner axes stay inside a node if they can.

    nodes    node of every rank of the job
    returns  order, with order[mesh rank] = rank of the job
    steps    join ranks of one node to tp groups, these to cp, these to dp_shard, these to dp groups; join the
             rest across nodes. A job whose ranks are already in such an order keeps it.
    """
    blocks: list[tuple[int, ...]] = [(rank,) for rank in range(len(nodes))]
    shard = layout.dp_shard or layout.dp
    for degree in (layout.tp, layout.cp, shard, layout.dp // shard):
        blocks = _join_within_nodes(blocks, degree, nodes)
    return tuple(rank for block in blocks for rank in block)


def _join_within_nodes(
    blocks: list[tuple[int, ...]], degree: int, nodes: Sequence[int]
) -> list[tuple[int, ...]]:
    """Join blocks `degree` at a time, within a node if it has enough of them."""
    by_node: dict[int, list[tuple[int, ...]]] = {}
    crossing: list[tuple[int, ...]] = []
    for block in sorted(blocks, key=lambda block: (nodes[block[0]], block[0])):
        homes = {nodes[rank] for rank in block}
        (by_node.setdefault(nodes[block[0]], []) if len(homes) == 1 else crossing).append(block)
    joined: list[tuple[int, ...]] = []
    for members in by_node.values():
        whole = len(members) - len(members) % degree
        joined += _joined(members[:whole], degree)
        crossing += members[whole:]
    joined += _joined(sorted(crossing, key=lambda block: (nodes[block[0]], block[0])), degree)
    return sorted(joined, key=lambda block: (nodes[block[0]], block[0]))


def _joined(blocks: Sequence[tuple[int, ...]], degree: int) -> list[tuple[int, ...]]:
    return [
        tuple(rank for block in blocks[start : start + degree] for rank in block)
        for start in range(0, len(blocks), degree)
    ]


def crossing_reason(nodes: Sequence[int], layout: Layout) -> str | None:
    """Explain why an axis crosses nodes that should not, and what to do; None if none does.

    nodes  node of every *mesh* rank, in mesh order
    tp should always stay inside a node; cp and ep if a node is large enough to hold them.
    """
    per_node = Counter(nodes)
    largest = max(per_node.values(), default=0)
    for axis, span in (("tp", layout.tp), ("cp", layout.cp * layout.tp), ("ep", layout.ep * layout.etp)):
        groups = layout.groups(axis)
        crossing = [group for group in groups if len({nodes[rank] for rank in group}) > 1]
        if not crossing or (axis != "tp" and span > largest):
            continue
        found = (
            f"{axis}={layout.degree(axis)} crosses nodes in {len(crossing)} of {len(groups)} groups "
            f"({_group_text(crossing[0], nodes)}{', …' if len(crossing) > 1 else ''})"
        )
        if span > largest:
            fits = max(d for d in range(1, largest + 1) if layout.tp % d == 0)
            return (
                f"{found}: the largest node holds {largest} of the job's ranks. Its traffic will take the "
                f"network; use tp={fits}, or start at least {span} ranks on every node"
            )
        sizes = ", ".join(str(count) for _, count in sorted(per_node.items()))
        return (
            f"{found}: the nodes hold {sizes} ranks, not all multiples of {span}. Its traffic will take the "
            f"network; start the same multiple of {span} ranks on every node"
        )
    return None


def _group_text(group: Sequence[int], nodes: Sequence[int]) -> str:
    """Format "mesh ranks 0, 1 on node 0 and 2, 3 on node 1"."""
    members: dict[int, list[int]] = {}
    for rank in group:
        members.setdefault(nodes[rank], []).append(rank)
    parts = (f"{', '.join(map(str, ranks))} on node {node}" for node, ranks in sorted(members.items()))
    return f"mesh ranks {' and '.join(parts)}"
