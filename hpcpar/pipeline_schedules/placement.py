"""Which rank has which stages.

    loop   3 ranks, 6 stages   rank 0: 0 3   rank 1: 1 4   rank 2: 2 5
    v      3 ranks, 6 stages   rank 0: 0 5   rank 1: 1 4   rank 2: 2 3

In a loop every rank sends its last stage's output on to the next rank, round and round. In a V the way leads
to the last rank and back again, so that the first rank has both the first stage and the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Shape = Literal["loop", "v"]


@dataclass(frozen=True)
class Placement:
    """The stages of every rank, in rising order."""

    stages: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.stages)

    @property
    def per_rank(self) -> int:
        return len(self.stages[0])

    @property
    def rank_of_stage(self) -> dict[int, int]:
        """As a Schedule's of the same stages."""
        return {stage: rank for rank, stages in enumerate(self.stages) for stage in stages}


def loop(ranks: int, stages_per_rank: int = 1) -> Placement:
    """Stage s on rank s modulo ranks."""
    return Placement(tuple(tuple(range(rank, ranks * stages_per_rank, ranks)) for rank in range(ranks)))


def v_shape(ranks: int) -> Placement:
    """Stages s and 2 · ranks - 1 - s on rank s."""
    return Placement(tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks)))
