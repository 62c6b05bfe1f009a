"""Seconds from the first forward to the last backward of a pipeline.

Small schedules are simulated action by action (`pipeline_schedules.simulate`). Larger ones follow closed
forms, which tests compare with the simulation. With T_r = Σ F + B + W of rank r's stages, T the largest:

    m·T + Σ of the other ranks' T_r               naive in its way, GPipe, 1F1B (T_r equal: (p - 1)·T)
    … the last sum divided by v                   interleaved
    … with F + B - W instead of F + B + W         zb-h1, automatic
    … with F                                      zb-h2: F of the first microbatch, as steps end together
    … with F of a chunk                           zb-v, dualpipe-v

With few microbatches the first one's way through all stages, and a stage's time for each of the others, take
longer; on average over stages:

    Σ F + B + W of all stages · (1 + (m - 1) / stages)      GPipe, 1F1B, interleaved
    Σ F + B of all stages · (1 + (m - 1) / p) + the last W  where W need not wait for anybody
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from hpcpar.pipeline_schedules.pipeline_schedule import Schedule
from hpcpar.pipeline_schedules.pipeline_simulation import Durations, simulate
from hpcpar.pipeline_schedules.schedule_registry import make
from hpcpar.planner.rules import SPLIT_BACKWARD
from hpcpar.planner.stages import stages_of_ranks
from hpcpar.planner.strategy import Strategy

SIMULATED = 64
"""Most forwards (microbatches · stages) of a schedule that is simulated."""


@lru_cache(maxsize=256)
def _schedule(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    return make(name, ranks, microbatches, stages_per_rank=stages_per_rank)


def small_schedule(strategy: Strategy) -> Schedule | None:
    """Return the schedule, action by action; None where it is long, or depends on times."""
    m = strategy.microbatches
    if m * strategy.stages > SIMULATED or strategy.schedule == "automatic":
        return None
    return _schedule(strategy.schedule, strategy.layout.pp, m, strategy.chunks_per_rank)


def span_s(
    strategy: Strategy,
    forward: Sequence[float],
    backward: Sequence[float],
    weight: Sequence[float],
    hop_s: float,
) -> float:
    """Return the seconds of all microbatches on all stages.

    forward, backward, weight   seconds of F, B and W of one microbatch by stage
    hop_s                       of a message between two ranks
    """
    p, m = strategy.layout.pp, strategy.microbatches
    if p == 1:
        return m * (forward[0] + backward[0] + weight[0])
    schedule = small_schedule(strategy)
    if schedule is not None:
        rows = simulate(schedule, Durations(forward, backward, weight, hop_s)).rows
        return max(row[-1].end_s for row in rows if row)
    return closed_span_s(strategy, forward, backward, weight, hop_s)


def closed_span_s(
    strategy: Strategy,
    forward: Sequence[float],
    backward: Sequence[float],
    weight: Sequence[float],
    hop_s: float,
) -> float:
    """Return the seconds by the schedule's closed form."""
    p, m, v = strategy.layout.pp, strategy.microbatches, strategy.chunks_per_rank
    ranks = stages_of_ranks(strategy)
    times = [sum(forward[s] + backward[s] + weight[s] for s in held) for held in ranks]
    slowest = max(range(p), key=times.__getitem__)
    others = [held for rank, held in enumerate(ranks) if rank != slowest]

    def total(*signs: int) -> float:
        f, b, w = signs
        return sum(f * forward[s] + b * backward[s] + w * weight[s] for held in others for s in held)

    hops = 2 * (strategy.stages - 1) * hop_s
    if strategy.schedule == "naive":
        return m * (sum(times) + hops)
    if strategy.schedule in SPLIT_BACKWARD:
        fill = (sum(forward) + sum(backward)) * (1 + (m - 1) / p) + weight[0]
    else:
        fill = (sum(forward) + sum(backward) + sum(weight)) * (1 + (m - 1) / strategy.stages)
    idle = {
        "zb-h1": lambda: total(1, 1, -1),
        "automatic": lambda: total(1, 1, -1),
        "zb-h2": lambda: max(total(1, 1, -2), total(1, 0, 0)),
        "zb-v": lambda: total(1, 0, 0) / 2,
        "dualpipe-v": lambda: total(1, 0, 0) / 2,
    }.get(strategy.schedule, lambda: total(1, 1, 1) / v)()
    return max(m * times[slowest] + max(0.0, idle), fill) + hops
