"""Placement of stages on ranks: a loop or a V.

    loop   3 ranks, 6 stages   rank 0: 0 3   rank 1: 1 4   rank 2: 2 5
    v      3 ranks, 6 stages   rank 0: 0 5   rank 1: 1 4   rank 2: 2 3

In a loop every rank sends its output on to the next rank, round and round. In a V activations go to the last
rank and back again, so the first rank has both the first stage and the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Shape = Literal["loop", "v"]


@dataclass(frozen=True)
class StagePlacement:
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
        """Rank of each stage, as `Schedule.rank_of_stage`."""
        return {stage: rank for rank, stages in enumerate(self.stages) for stage in stages}


@lru_cache(maxsize=1024)
def loop(ranks: int, stages_per_rank: int = 1) -> StagePlacement:
    """Stage s on rank s modulo ranks."""
    return StagePlacement(tuple(tuple(range(rank, ranks * stages_per_rank, ranks)) for rank in range(ranks)))


@lru_cache(maxsize=1024)
def v_shape(ranks: int) -> StagePlacement:
    """Stages s and 2 · ranks - 1 - s on rank s."""
    return StagePlacement(tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks)))
