"""Mesh: named axes of parallelism over the ranks of a job, with a communicator for each.

A `Layout` (`planner.layout`) is integers only: the degree of each axis, and the coordinates of each rank. A
`Mesh` is a layout with communicators; its ranks are ordered so that the axes with most traffic stay inside a
node.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from hpcpar.errors import MismatchError
from hpcpar.planner.layout import (
    AXES,
    DEGREES,
    FOLDED_AXES,
    Coordinates,
    Layout,
    check_axis,
    crossing_reason,
    placement,
)

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

__all__ = [
    "AXES",
    "DEGREES",
    "FOLDED_AXES",
    "Coordinates",
    "Layout",
    "Mesh",
    "crossing_reason",
    "placement",
]

logger = logging.getLogger(__name__)


class Mesh:
    """Ranks of a job on named axes, with one communicator for each axis.

    Mesh(world, tp=2)                   dp is derived
    Mesh(world, Layout(pp=2, tp=2))     or a mapping of degrees, as from a config

    `mesh.tp` joins the ranks that differ from this one along tp alone, and so do `mesh.pp`, `dp`, `cp`, `ep`,
    `edp` and `etp`; `mesh.comm("dp", "cp")` joins those that differ along dp or cp; `mesh.world` joins all of
    them.
    An axis of degree 1 has a one-rank communicator, which does nothing, correctly.

    Making a mesh is collective over `comm`.
    errors   LayoutError for degrees that do not fit the number of ranks, MismatchError if ranks ask for
             different ones; both on every rank
    """

    def __init__(
        self,
        comm: Communicator,
        layout: Layout | Mapping[str, int | None] | None = None,
        **degrees: int | None,
    ) -> None:
        self.layout = _agreed_layout(comm, layout, degrees)
        order = placement(comm.nodes, self.layout)
        # A communicator of the mesh's own, even in the same order, separates its traffic from the job's, and
        # `free` does not end the caller's.
        world = comm.split(color=0, key=order.index(comm.rank), name="mesh")
        assert world is not None, "a rank with a color is in a communicator"
        self.world = world
        self.coordinates = self.layout.coordinates(world.rank)
        self._comms: dict[frozenset[str], Communicator] = {}
        for axis in Coordinates._fields:
            self.comm(axis)
        reason = crossing_reason([comm.nodes[rank] for rank in order], self.layout)
        if reason is not None and world.rank == 0:
            logger.warning("mesh of %s: %s", self.layout, reason)

    def __repr__(self) -> str:
        return f"<Mesh {self.layout}: rank {self.rank} of {self.size}>"

    @property
    def rank(self) -> int:
        """This rank in the mesh, which may differ from its rank in the job."""
        return self.world.rank

    @property
    def size(self) -> int:
        return self.layout.size

    @property
    def pp(self) -> Communicator:
        """Stages of one pipeline."""
        return self.comm("pp")

    @property
    def dp(self) -> Communicator:
        """Replicas that see different samples."""
        return self.comm("dp")

    @property
    def cp(self) -> Communicator:
        """Ranks that share each sample's sequence."""
        return self.comm("cp")

    @property
    def replicas(self) -> Communicator:
        """Ranks with the same parameters, over which gradients are summed: dp × cp; collective."""
        return self.dp if self.layout.cp == 1 else self.comm("dp", "cp")

    @property
    def tp(self) -> Communicator:
        """Ranks that share each layer."""
        return self.comm("tp")

    @property
    def ep(self) -> Communicator:
        """Ranks that share one set of experts."""
        return self.comm("ep")

    @property
    def edp(self) -> Communicator:
        """Ranks that hold the same experts."""
        return self.comm("edp")

    @property
    def etp(self) -> Communicator:
        """Ranks that share each expert."""
        return self.comm("etp")

    def comm(self, *axes: str) -> Communicator:
        """Communicator of the ranks that differ along `axes` only, in rank order.

        Single axes are made with the mesh. The first call for a combination is collective over the mesh;
        later ones return the same communicator.
        """
        key = frozenset(axes)
        if key not in self._comms:
            color = self.layout.group_index(self.rank, *axes)
            name = "-".join(axis for axis in Coordinates._fields if axis in key)
            made = self.world.split(color=color, key=self.rank, name=name)
            assert made is not None, "a rank with a color is in a communicator"
            self._comms[key] = made
        return self._comms[key]

    def coordinate(self, axis: str) -> int:
        """This rank's coordinate along `axis`."""
        check_axis(axis, Coordinates._fields)
        place: int = getattr(self.coordinates, axis)
        return place

    @property
    def label(self) -> str:
        """Prefix of log lines: "[3/8 pp1 tp1]", with the axes of degree above 1."""
        places = [f"{axis}{self.coordinate(axis)}" for axis in AXES if self.layout.degree(axis) > 1]
        return f"[{' '.join([f'{self.rank}/{self.size}', *places])}]"

    def free(self) -> None:
        """Free all communicators of the mesh, but not the one it was made from. Collective."""
        for comm in self._comms.values():
            comm.free()
        self._comms.clear()
        self.world.free()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After an error the other ranks may not come to the collective `free`.
        if error is None:
            self.free()


def _agreed_layout(
    comm: Communicator,
    layout: Layout | Mapping[str, int | None] | None,
    degrees: Mapping[str, int | None],
) -> Layout:
    """Agree on the layout that every rank asks for, fitted to the communicator."""
    asked: dict[str, int | None] = dict(degrees)
    if isinstance(layout, Layout):
        asked = {**layout.degrees, **asked}
    elif layout is not None:
        asked = {**layout, **asked}
    everyone: Iterable[dict[str, int | None]] = comm.allgather_object(asked)
    for rank, other in enumerate(everyone):
        if other != asked:
            raise MismatchError(
                f"rank {comm.rank} asks for a mesh of {asked} but rank {rank} for {other}; "
                "give every rank the same degrees"
            )
    return Layout.fit(comm.size, **asked)
