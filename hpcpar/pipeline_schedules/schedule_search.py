"""Search a schedule for measured times and a memory limit by the zero-bubble paper's heuristic.

    rank 0   0F0 0F1 0F2 0F3 0F4 0B0 0W0 0F5 0B1 0W1 0F6 ...     F = B = W, at most five microbatches
    rank 1       1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1W0 1F5 ...     alive: no rank waits once it has
    rank 2           2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 ...     started
             warm-up         one forward, one backward; W where it fits

In a round every rank, the last one first, runs one forward and one backward. The end of what these wait for
is known by then: the gradient is of this round, the input of an earlier one. So one sweep yields both the
order and its times, which equal those of `simulate`. W runs

    in an idle gap at least as long as itself;
    in a shorter one, where idling would make this rank's span the longest of all;
    before a forward that would not fit into memory;
    at the end, for what is left.

The paper leaves some choices open. All are tried, and the cheapest order is taken.

    bubble rate of 8 ranks, 24 microbatches       memory of 8      of 16 microbatches
    F 29.718, B 29.444, W 19.927, hop 0.527       0.1323           0.0029     as printed for ZB-1p and ZB-2p

The result depends on the arguments alone, so ranks that pass the same arguments get the same schedule.
Measured times differ from rank to rank; ranks agree on them first.

source   Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 3.1
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product

from hpcpar.errors import ScheduleError
from hpcpar.pipeline_schedules.action import Action, Kind
from hpcpar.pipeline_schedules.one_f_one_b import one_f_one_b
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule
from hpcpar.pipeline_schedules.pipeline_simulation import Durations, simulate
from hpcpar.pipeline_schedules.zero_bubble import zb_h1, zb_h2

ROUNDING = 1e-9
"""Relative difference below which two times are equal: sums in another order differ by rounding."""


def automatic(
    ranks: int,
    microbatches: int,
    durations: Durations,
    memory_limit: float | None = None,
    *,
    kept_after_backward: float = 1.0,
) -> Schedule:
    """Return the schedule of least simulated cost that was found: one stage per rank, every backward split.

    durations             seconds of F, B, W and a hop: for all stages, or for each
    memory_limit          microbatches that may be alive on a rank, from 1; None: no limit. The paper's ZB-1p
                          has as many as ranks, its ZB-2p twice that
    kept_after_backward   share of a microbatch's memory held between B and W, 0 to 1. With 1 a schedule is
                          within the limit as `prove` counts. The paper counts the inputs of a layer's
                          products, 32 / (34 + 5as/h), which is less than a half of its models' memory
    cost                  up to a second at 32 ranks and 96 microbatches
    errors                ScheduleError for a limit that lets no forward run, and other impossible numbers
    """
    problem = _problem(ranks, microbatches, durations, memory_limit, kept_after_backward)
    best = _best_of_grid(problem)
    cost_s, rows = best.cost_s, best.rows
    # Where stages differ much, a fixed pattern is better now and then.
    for pattern in _patterns(problem):
        pattern_s = simulate(pattern, durations).cost_s
        if pattern_s < cost_s * (1 - ROUNDING):
            cost_s, rows = pattern_s, pattern.rows
    return Schedule(rows, "automatic")


@dataclass(frozen=True)
class SearchProblem:
    """Numbers that a schedule is searched for; one stage per rank.

    forward_s, backward_s, weight_s   of each stage; backward_s computes the input's gradient alone
    hop_s                             from an action's end to the start of its dependent on the next rank
    memory_limit                      microbatches alive on a rank, 1 to all of them
    kept_after_backward               share of a microbatch's memory that its W frees
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
        """Seconds of one microbatch's F, B and W."""
        return self.forward_s[stage] + self.backward_s[stage] + self.weight_s[stage]

    @property
    def epsilon_s(self) -> float:
        """Time too short to tell from rounding."""
        return ROUNDING * max(map(self.work_s, range(self.ranks)))

    @property
    def most_alive(self) -> int:
        """Whole microbatches within the memory limit."""
        return int(self.memory_limit + ROUNDING)


def _problem(
    ranks: int,
    microbatches: int,
    durations: Durations,
    memory_limit: float | None,
    kept_after_backward: float,
) -> SearchProblem:
    if ranks < 1 or microbatches < 1:
        raise ScheduleError(
            f"asked for {ranks} ranks and {microbatches} microbatches: a schedule needs at least one of each"
        )
    if memory_limit is not None and not memory_limit >= 1:
        raise ScheduleError(
            f"memory_limit is {memory_limit} microbatches alive on a rank, so that no forward can run: "
            f"give 1 or more; 1F1B takes {min(ranks, microbatches)}"
        )
    if not 0 <= kept_after_backward <= 1:
        raise ScheduleError(
            f"kept_after_backward is {kept_after_backward}: give a share of its memory, from 0 to 1"
        )
    forward_s, backward_s, weight_s = map(tuple, durations.of_stages(ranks))
    limit = microbatches if memory_limit is None else min(memory_limit, microbatches)
    return SearchProblem(
        microbatches, forward_s, backward_s, weight_s, durations.hop_s, limit, kept_after_backward
    )


@dataclass(frozen=True)
class Choices:
    """Choices that the heuristic leaves open.

    warm_up            forwards of each rank before its first backward; no more than on the rank before it
    postpone_forward   a rank two or more forwards ahead of the next runs its backward first, where that need
                       not wait (section 3.1, the second binary hyper-parameter)
    use_short_gaps     W may run in a gap that is too short for it, as in the paper it always may
    """

    warm_up: tuple[int, ...]
    postpone_forward: bool = False
    use_short_gaps: bool = True


# --- search ---------------------------------------------------------------------------------------


def _best_of_grid(problem: SearchProblem) -> HeuristicOrder:
    """Try all combinations of the heuristic's choices; return the first order of least cost."""
    both = (False, True)
    starts = (
        warm_up_counts(problem, delay_backward=delay, leave_room=room)
        for room, delay in product((True, False), both)
    )
    candidates = dict.fromkeys(
        Choices(start, postpone, short) for start, postpone, short in product(starts, both, (True, False))
    )
    first, *others = candidates
    best = HeuristicOrder(problem, first)
    for choices in others:
        below_s = best.cost_s * (1 - ROUNDING)
        order = HeuristicOrder(problem, choices, below_s)
        best = order if order.cost_s < below_s else best
    return best


def _patterns(problem: SearchProblem) -> Iterator[Schedule]:
    """Yield 1F1B with W after each B, ZB-H1 and ZB-H2, each within the memory limit."""
    limit = problem.most_alive
    whole = one_f_one_b(problem.ranks, problem.microbatches, memory_limit=limit)
    yield Schedule(tuple(tuple(_with_split_backwards(row)) for row in whole.rows))
    yield zb_h1(problem.ranks, problem.microbatches, memory_limit=limit)
    yield zb_h2(problem.ranks, problem.microbatches, memory_limit=limit)


def _with_split_backwards(row: Iterable[Action]) -> Iterator[Action]:
    for action in row:
        yield action
        if action.kind == "B":
            yield Action(action.stage, "W", action.microbatch)


# --- heuristic ------------------------------------------------------------------------------------


def warm_up_counts(problem: SearchProblem, *, delay_backward: bool, leave_room: bool) -> tuple[int, ...]:
    """Count the forwards that each rank has time for before its first backward.

    delay_backward   one more, where the rank would idle for part of it, so that its first backward starts
                     late (section 3.1, the first binary hyper-parameter)
    leave_room       keep memory for ranks that send inputs to be a forward ahead of each other, as the paper
                     demands; where memory is very short, filling it can be better
    """
    ends = _forward_ends(problem)
    counts = [1] * problem.ranks
    gradient_s = ends[-1][0]
    for stage in reversed(range(problem.ranks)):
        if stage < problem.ranks - 1:
            limit = most = problem.most_alive
            if leave_room:
                most = min(limit, max(limit, problem.ranks) - stage)
            most = min(most, problem.microbatches)
            count = min(most, counts[stage + 1] + 1)
            while count < most and ends[stage][count] <= gradient_s + problem.epsilon_s:
                count += 1
            if delay_backward and count < most and ends[stage][count - 1] < gradient_s - problem.epsilon_s:
                count += 1
            counts[stage] = count
        start_s = max(gradient_s, ends[stage][counts[stage] - 1])
        gradient_s = start_s + problem.backward_s[stage] + problem.hop_s
    return tuple(counts)


def _forward_ends(problem: SearchProblem) -> list[list[float]]:
    """End of each stage's forwards, if nothing but forwards ran: each starts when its input arrives."""
    ends: list[list[float]] = []
    for stage, seconds in enumerate(problem.forward_s):
        free_s: float = 0
        row: list[float] = []
        for microbatch in range(problem.microbatches):
            arrived_s = ends[stage - 1][microbatch] + problem.hop_s if stage else 0
            free_s = max(free_s, arrived_s) + seconds
            row.append(free_s)
        ends.append(row)
    return ends


@dataclass
class _RankState:
    """Progress of one rank.

    span_s   lower bound of its span: all its work, and its idle time so far
    alive    microbatches in its memory
    """

    span_s: float
    row: list[Action] = field(default_factory=list)
    forward_ends: list[float] = field(default_factory=list)
    backward_ends: list[float] = field(default_factory=list)
    weights: int = 0
    alive: float = 0
    end_s: float = 0


class HeuristicOrder:
    """Rows that the heuristic makes by given choices, and their cost.

    below_s   give the order up, unfinished, once it is certain to cost at least this
    """

    def __init__(self, problem: SearchProblem, choices: Choices, below_s: float = math.inf) -> None:
        self._problem = problem
        self._choices = choices
        self._epsilon_s = problem.epsilon_s
        self._memory_limit = problem.memory_limit + ROUNDING
        self._ranks = [_RankState(problem.microbatches * problem.work_s(s)) for s in range(problem.ranks)]
        for stage, count in enumerate(choices.warm_up):
            for _ in range(count):
                self._next_forward(stage)
        for stage in reversed(range(problem.ranks)):
            self._next_backward(stage)
        while len(self._ranks[0].backward_ends) < problem.microbatches and self.cost_s < below_s:
            for stage in reversed(range(problem.ranks)):
                self._next_forward(stage)
                self._next_backward(stage)
        for stage, rank in enumerate(self._ranks):
            while rank.weights < len(rank.backward_ends):
                self._weight(stage)

    @property
    def rows(self) -> tuple[tuple[Action, ...], ...]:
        return tuple(tuple(rank.row) for rank in self._ranks)

    @property
    def cost_s(self) -> float:
        """The longest span of a rank; a lower bound for an order that was given up."""
        return max(rank.span_s for rank in self._ranks)

    def _next_forward(self, stage: int) -> None:
        """Append the next forward, if its input has been sent and memory allows it."""
        rank = self._ranks[stage]
        if len(rank.forward_ends) == self._problem.microbatches:
            return
        input_s = self._input_s(stage)
        if input_s is None or (self._choices.postpone_forward and self._backward_goes_first(stage)):
            return
        while rank.alive + 1 > self._memory_limit and rank.weights < len(rank.backward_ends):
            self._weight(stage)
        if rank.alive + 1 <= self._memory_limit:
            self._fill_gap(stage, input_s)
            self._append(stage, "F", len(rank.forward_ends), input_s, self._problem.forward_s[stage])
            rank.forward_ends.append(rank.end_s)
            rank.alive += 1

    def _next_backward(self, stage: int) -> None:
        """Append the next backward, if its gradient has been sent."""
        rank = self._ranks[stage]
        gradient_s = self._gradient_s(stage)
        if gradient_s is not None:
            self._fill_gap(stage, gradient_s)
            self._append(stage, "B", len(rank.backward_ends), gradient_s, self._problem.backward_s[stage])
            rank.backward_ends.append(rank.end_s)
            rank.alive -= 1 - self._problem.kept_after_backward

    def _weight(self, stage: int) -> None:
        rank = self._ranks[stage]
        self._append(stage, "W", rank.weights, rank.end_s, self._problem.weight_s[stage])
        rank.weights += 1
        rank.alive -= self._problem.kept_after_backward

    def _append(self, stage: int, kind: Kind, microbatch: int, ready_s: float, seconds: float) -> None:
        """Append an action; it starts when the rank is free and its inputs are there."""
        rank = self._ranks[stage]
        start_s = max(rank.end_s, ready_s)
        if rank.row:
            rank.span_s += start_s - rank.end_s
        rank.row.append(Action(stage, kind, microbatch))
        rank.end_s = start_s + seconds

    def _input_s(self, stage: int) -> float | None:
        """Arrival of the next forward's input; None while unknown."""
        if stage == 0:
            return 0
        microbatch = len(self._ranks[stage].forward_ends)
        ends = self._ranks[stage - 1].forward_ends
        return ends[microbatch] + self._problem.hop_s if microbatch < len(ends) else None

    def _gradient_s(self, stage: int) -> float | None:
        """Arrival of the next backward's gradient; None while unknown."""
        rank = self._ranks[stage]
        microbatch = len(rank.backward_ends)
        if microbatch == len(rank.forward_ends):
            return None
        if stage == self._problem.ranks - 1:
            return 0
        ends = self._ranks[stage + 1].backward_ends
        return ends[microbatch] + self._problem.hop_s if microbatch < len(ends) else None

    def _backward_goes_first(self, stage: int) -> bool:
        if stage == self._problem.ranks - 1:
            return False
        rank, following = self._ranks[stage : stage + 2]
        if len(rank.forward_ends) - len(following.forward_ends) < 2:
            return False
        gradient_s = self._gradient_s(stage)
        return gradient_s is not None and gradient_s <= rank.end_s + self._epsilon_s

    def _fill_gap(self, stage: int, until_s: float) -> None:
        """Run W while the rank would wait, where that pays."""
        rank = self._ranks[stage]
        weight_s = self._problem.weight_s[stage] - self._epsilon_s
        while rank.weights < len(rank.backward_ends):
            gap_s = until_s - rank.end_s
            if gap_s <= self._epsilon_s:
                return
            fills_short_gap = (
                self._choices.use_short_gaps and rank.span_s + gap_s > self.cost_s + self._epsilon_s
            )
            if gap_s < weight_s and not fills_short_gap:
                return
            self._weight(stage)
