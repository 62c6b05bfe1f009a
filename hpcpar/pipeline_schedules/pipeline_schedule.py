"""A pipeline schedule as a value: a row of actions for each rank.

    rank 0   0F0 0F1 0B0 0F2 0B1 0B2
    rank 1       1F0 1B0 1F1 1B1 1F2 1B2

An action depends on others:

    sFm   (s-1)Fm                 its input
    sBm   sFm and (s+1)Bm         its saved activations, and the gradient of its output
    sWm   sBm

The placement of stages decides which of these values travel between ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from hpcpar.errors import ScheduleError
from hpcpar.pipeline_schedules.action import Action


@dataclass(frozen=True)
class Schedule:
    """A row of actions for each rank.

    name     for errors and drawings
    errors   ScheduleError where a stage is on two ranks
    """

    rows: tuple[tuple[Action, ...], ...]
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        homes = self.rank_of_stage
        for rank, row in enumerate(self.rows):
            for action in row:
                home = homes[action.stage]
                if home != rank:
                    raise ScheduleError(
                        f"{action} is in the row of rank {rank}, but rank {home} has stage {action.stage}: "
                        "give all actions of a stage to one rank"
                    )

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @cached_property
    def stages(self) -> int:
        """Number of them: one more than the largest in any action."""
        return 1 + max((action.stage for action in self.actions()), default=-1)

    @cached_property
    def microbatches(self) -> int:
        """Number of them: one more than the largest in any action."""
        return 1 + max((action.microbatch for action in self.actions()), default=-1)

    @cached_property
    def rank_of_stage(self) -> dict[int, int]:
        """Rank whose row has each stage's actions."""
        homes: dict[int, int] = {}
        for rank, row in enumerate(self.rows):
            for action in row:
                homes.setdefault(action.stage, rank)
        return homes

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages on a rank, in rising order."""
        return tuple(sorted(stage for stage, home in self.rank_of_stage.items() if home == rank))

    def actions(self) -> Iterator[Action]:
        """Yield all actions, row by row."""
        for row in self.rows:
            yield from row

    def is_split(self, stage: int, microbatch: int) -> bool:
        """True if this backward is split: B for the input's gradient, W for the weights'."""
        return (stage, microbatch) in self._split

    @cached_property
    def _split(self) -> frozenset[tuple[int, int]]:
        return frozenset((a.stage, a.microbatch) for a in self.actions() if a.kind == "W")

    def needs(self, action: Action) -> tuple[Action, ...]:
        """Actions that must have ended before this one can start."""
        stage, kind, microbatch = action
        if kind == "F":
            return () if stage == 0 else (Action(stage - 1, "F", microbatch),)
        if kind == "W":
            return (Action(stage, "B", microbatch),)
        own = Action(stage, "F", microbatch)
        return (own,) if stage == self.stages - 1 else (own, Action(stage + 1, "B", microbatch))
