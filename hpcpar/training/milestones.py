"""Steps after which a run logs, evaluates or saves: pure functions of the configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpcpar.training.config import Config


@dataclass(frozen=True)
class Milestones:
    """Steps of a run between which something happens.

    first_step   steps that an earlier run had done

    log, evaluate and checkpoint every 2, 4 and 0 steps of 5, from step 1 on:

        steps       1 | 2 3 | 4 |         intervals (1, 2), (2, 4), (4, 5)
        evaluated           x   x         after a multiple of 4, and at the end
    """

    config: Config
    first_step: int

    @property
    def steps(self) -> int:
        """Steps done when the run ends."""
        return self.config.train.last_step

    @property
    def steps_left(self) -> int:
        return max(0, self.steps - self.first_step)

    @property
    def traced_until(self) -> int:
        """Step that ends the timeline."""
        return min(self.first_step + self.config.output.timeline_steps, self.steps)

    def is_evaluated(self, steps_done: int) -> bool:
        """Return True if the held-out loss is taken after so many steps."""
        return steps_done == self.steps or is_due(steps_done, self.config.train.evaluate_every)

    def is_saved(self, steps_done: int) -> bool:
        """Return True if there is a checkpoint after so many steps, whatever the time."""
        return steps_done == self.steps or is_due(steps_done, self.config.output.checkpoint_every)

    def intervals(self) -> list[tuple[int, int]]:
        """Return the steps that are left, cut wherever something happens between two of them."""
        train, output = self.config.train, self.config.output
        periods = (output.log_every, train.evaluate_every, output.checkpoint_every)
        return list(intervals(self.first_step, self.steps, periods, also=(self.traced_until,)))


def intervals(
    first: int, last: int, periods: Sequence[int], *, also: Sequence[int] = ()
) -> Iterator[tuple[int, int]]:
    """Cut steps first … last - 1 after every multiple of each period (0 = never) and at `also`.

    intervals(3, 10, (4, 0, 5)) gives (3, 4), (4, 5), (5, 8), (8, 10)
    """
    start = first
    for stop in range(first + 1, last + 1):
        if stop == last or stop in also or any(is_due(stop, period) for period in periods):
            yield start, stop
            start = stop


def is_due(steps_done: int, period: int) -> bool:
    """Return True after every `period` steps; never for 0."""
    return period > 0 and steps_done % period == 0
