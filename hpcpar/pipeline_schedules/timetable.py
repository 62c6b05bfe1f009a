"""When every action of a schedule started and ended: priced beforehand, or measured in a run.

Bubble rates come in the field's two forms, of the same idle time:

    bubble_rate    (cost - work) / cost     of the time, how much is idle (arXiv 2401.10241)
    bubble_ratio   (cost - work) / work     idle time beside the ideal, as in (p - 1)/m (arXiv 2104.04473)

where cost is the longest span of a rank, from its own first start to its own last end, and work the mean of
what ranks were busy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hpcpar.pipeline_schedules.action import Action


class Timed(NamedTuple):
    """An action, and when it ran."""

    action: Action
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Timetable:
    """Every rank's actions with their times, in the order in which it did them."""

    rows: tuple[tuple[Timed, ...], ...]

    @property
    def seconds(self) -> float:
        """From the first start of all to the last end of all."""
        timed = [each for row in self.rows for each in row]
        if not timed:
            return 0.0
        return max(each.end_s for each in timed) - min(each.start_s for each in timed)

    def span_s(self, rank: int) -> float:
        """From a rank's own first start to its own last end."""
        row = self.rows[rank]
        return row[-1].end_s - row[0].start_s if row else 0.0

    def busy_s(self, rank: int) -> float:
        return sum(each.seconds for each in self.rows[rank])

    def idle_s(self, rank: int) -> float:
        """Within its span."""
        return self.span_s(rank) - self.busy_s(rank)

    @property
    def cost_s(self) -> float:
        """The longest span of a rank."""
        return max((self.span_s(rank) for rank in range(len(self.rows))), default=0.0)

    @property
    def work_s(self) -> float:
        """What ranks were busy, in the mean."""
        return sum(self.busy_s(rank) for rank in range(len(self.rows))) / max(1, len(self.rows))

    @property
    def bubble_rate(self) -> float:
        return (self.cost_s - self.work_s) / self.cost_s if self.cost_s else 0.0

    @property
    def bubble_ratio(self) -> float:
        return (self.cost_s - self.work_s) / self.work_s if self.work_s else 0.0
