"""The zero-bubble paper's heuristic: forwards, backwards and weights' parts put in order in one pass.

    rank 0   0F0 0F1 0F2 0F3 0F4 0B0 0W0 0F5 0B1 0W1 0F6 ...     F = B = W, and five microbatches
    rank 1       1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1W0 1F5 ...     alive at the most: no rank ever
    rank 2           2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 ...     waits once it has started
             warm-up         by turns a forward and a backward; W where there is room

In a turn every rank, the last one first, does one forward and one backward. What these wait for has its time
by then: the gradient is of the same turn, the input of an earlier one. So the order and its times come out
together, and the times are those that `price` gives.

W goes
    into an idle gap at least as long as itself;
    into a shorter one, where idling would make this rank's span the longest of all;
    before a forward that would not fit into memory;
    to the end, with what is left.

source   Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 3.1
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hpcpar.pipeline_schedules.action import Action, Kind

# The same times, summed in another order, differ by rounding: less than this share of them is nothing.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Pipeline:
    """What is to be put in order: one stage per rank.

    forward_s, backward_s, weight_s   of each stage; backward_s is the input's part
    hop_s                             from an action's end to the start of what needs it on the next rank
    memory_limit                      microbatches alive on a rank, 1 to all of them
    kept_after_backward               of a microbatch's memory, what only its W gives back
    """

    microbatches: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    hop_s: float
    memory_limit: float
    kept_after_backward: float

    @property
    def ranks(self) -> int:
        return len(self.forward_s)

    def work_s(self, stage: int) -> float:
        """Of one microbatch."""
        return self.forward_s[stage] + self.backward_s[stage] + self.weight_s[stage]

    @property
    def instant_s(self) -> float:
        """Time too short to tell from rounding."""
        return ROUNDING * max(map(self.work_s, range(self.ranks)))


@dataclass(frozen=True)
class Way:
    """What the heuristic leaves open.

    warm_up            forwards of each rank before its first backward; no more than on the rank before it
    postpone_forward   a rank two or more forwards ahead of the next does its backward first, where that need
                       not wait (section 3.1, the second binary hyper-parameter)
    use_short_gaps     W may go into a gap that is too short for it, as in the paper it always may
    """

    warm_up: tuple[int, ...]
    postpone_forward: bool = False
    use_short_gaps: bool = True


def warm_up(pipeline: Pipeline, *, delay_backward: bool, leave_room: bool) -> tuple[int, ...]:
    """How many forwards each rank does before its first backward: those that it has time for until then.

    delay_backward   one more, where the rank would idle for part of it, so that its first backward starts
                     late (section 3.1, the first binary hyper-parameter)
    leave_room       a rank's memory is not filled before the ranks that it gets its inputs from could be a
                     forward ahead of each other, as the paper demands; where memory is very short,
                     filling it can be better
    """
    # Until the backwards begin, a forward runs as soon as its input is there.
    ends: list[list[float]] = []
    for stage, seconds in enumerate(pipeline.forward_s):
        free_s: float = 0
        row: list[float] = []
        for microbatch in range(pipeline.microbatches):
            arrived_s = ends[stage - 1][microbatch] + pipeline.hop_s if stage else 0
            free_s = max(free_s, arrived_s) + seconds
            row.append(free_s)
        ends.append(row)

    counts = [1] * pipeline.ranks
    gradient_s = ends[-1][0]
    for stage in reversed(range(pipeline.ranks)):
        if stage < pipeline.ranks - 1:
            most = limit = int(pipeline.memory_limit + ROUNDING)
            if leave_room:
                most = min(limit, max(limit, pipeline.ranks) - stage)
            most = min(most, pipeline.microbatches)
            count = min(most, counts[stage + 1] + 1)
            while count < most and ends[stage][count] <= gradient_s + pipeline.instant_s:
                count += 1
            if delay_backward and count < most and ends[stage][count - 1] < gradient_s - pipeline.instant_s:
                count += 1
            counts[stage] = count
        start_s = max(gradient_s, ends[stage][counts[stage] - 1])
        gradient_s = start_s + pipeline.backward_s[stage] + pipeline.hop_s
    return tuple(counts)


@dataclass
class _Rank:
    """How far one rank has come.

    span_s   its span at least: all its work, and how long it has idled
    alive    microbatches in its memory
    """

    span_s: float
    row: list[Action] = field(default_factory=list)
    forward_ends: list[float] = field(default_factory=list)
    backward_ends: list[float] = field(default_factory=list)
    weights: int = 0
    alive: float = 0
    end_s: float = 0


class Order:
    """The rows that the heuristic makes in one way, and their cost.

    below_s   it is given up, half done, as soon as it is certain not to cost less than this
    """

    def __init__(self, pipeline: Pipeline, way: Way, below_s: float = math.inf) -> None:
        self._pipeline = pipeline
        self._way = way
        self._instant_s = pipeline.instant_s
        self._memory_limit = pipeline.memory_limit + ROUNDING
        self._ranks = [
            _Rank(pipeline.microbatches * pipeline.work_s(stage)) for stage in range(pipeline.ranks)
        ]
        self._warm_up()
        while self._goes_on() and self.cost_s < below_s:
            for stage in reversed(range(pipeline.ranks)):
                self._turn_forward(stage)
                self._turn_backward(stage)
        for stage, rank in enumerate(self._ranks):
            while rank.weights < len(rank.backward_ends):
                self._weight(stage)

    @property
    def rows(self) -> tuple[tuple[Action, ...], ...]:
        return tuple(tuple(rank.row) for rank in self._ranks)

    @property
    def cost_s(self) -> float:
        """The longest span of a rank; of an order that was given up, no more than that."""
        return max(rank.span_s for rank in self._ranks)

    def _warm_up(self) -> None:
        for stage, count in enumerate(self._way.warm_up):
            for _ in range(count):
                self._turn_forward(stage)
        for stage in reversed(range(self._pipeline.ranks)):
            self._turn_backward(stage)

    def _goes_on(self) -> bool:
        return len(self._ranks[0].backward_ends) < self._pipeline.microbatches

    def _turn_forward(self, stage: int) -> None:
        """The next forward, where its input is sent and memory allows it."""
        rank = self._ranks[stage]
        if len(rank.forward_ends) == self._pipeline.microbatches:
            return
        input_s = self._input_s(stage)
        if input_s is None or (self._way.postpone_forward and self._backward_goes_first(stage)):
            return
        while rank.alive + 1 > self._memory_limit and rank.weights < len(rank.backward_ends):
            self._weight(stage)
        if rank.alive + 1 <= self._memory_limit:
            self._use_gap(stage, input_s)
            self._do(stage, "F", len(rank.forward_ends), input_s, self._pipeline.forward_s[stage])
            rank.forward_ends.append(rank.end_s)
            rank.alive += 1

    def _turn_backward(self, stage: int) -> None:
        """The next backward, where its gradient is sent."""
        rank = self._ranks[stage]
        gradient_s = self._gradient_s(stage)
        if gradient_s is not None:
            self._use_gap(stage, gradient_s)
            self._do(stage, "B", len(rank.backward_ends), gradient_s, self._pipeline.backward_s[stage])
            rank.backward_ends.append(rank.end_s)
            rank.alive -= 1 - self._pipeline.kept_after_backward

    def _weight(self, stage: int) -> None:
        rank = self._ranks[stage]
        self._do(stage, "W", rank.weights, rank.end_s, self._pipeline.weight_s[stage])
        rank.weights += 1
        rank.alive -= self._pipeline.kept_after_backward

    def _do(self, stage: int, kind: Kind, microbatch: int, ready_s: float, seconds: float) -> None:
        """Append an action; it starts when the rank is free and what it needs is there."""
        rank = self._ranks[stage]
        start_s = max(rank.end_s, ready_s)
        if rank.row:
            rank.span_s += start_s - rank.end_s
        rank.row.append(Action(stage, kind, microbatch))
        rank.end_s = start_s + seconds

    def _input_s(self, stage: int) -> float | None:
        """When the input of the next forward arrives; None where that is not known yet."""
        if stage == 0:
            return 0
        microbatch = len(self._ranks[stage].forward_ends)
        ends = self._ranks[stage - 1].forward_ends
        return ends[microbatch] + self._pipeline.hop_s if microbatch < len(ends) else None

    def _gradient_s(self, stage: int) -> float | None:
        """When the gradient for the next backward arrives; None where that is not known yet."""
        rank = self._ranks[stage]
        microbatch = len(rank.backward_ends)
        if microbatch == len(rank.forward_ends):
            return None
        if stage == self._pipeline.ranks - 1:
            return 0
        ends = self._ranks[stage + 1].backward_ends
        return ends[microbatch] + self._pipeline.hop_s if microbatch < len(ends) else None

    def _backward_goes_first(self, stage: int) -> bool:
        if stage == self._pipeline.ranks - 1:
            return False
        rank, following = self._ranks[stage : stage + 2]
        if len(rank.forward_ends) - len(following.forward_ends) < 2:
            return False
        gradient_s = self._gradient_s(stage)
        return gradient_s is not None and gradient_s <= rank.end_s + self._instant_s

    def _use_gap(self, stage: int, until_s: float) -> None:
        """Do W while the rank would wait, where that is worth it."""
        rank = self._ranks[stage]
        weight_s = self._pipeline.weight_s[stage] - self._instant_s
        while rank.weights < len(rank.backward_ends):
            gap_s = until_s - rank.end_s
            if gap_s <= self._instant_s or (gap_s < weight_s and not self._fills_short_gap(rank, gap_s)):
                return
            self._weight(stage)

    def _fills_short_gap(self, rank: _Rank, gap_s: float) -> bool:
        return self._way.use_short_gaps and rank.span_s + gap_s > self.cost_s + self._instant_s
