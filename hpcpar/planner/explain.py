"""The rules of thumb, step by step with figures, and where the search departs from them.

    1  the model fits a device                     data parallel
    2  it does not                                 tensor parallel, up to the devices of a node
    3  it still does not                           pipeline across nodes, or ZeRO-3
    4  devices are left                            data parallel for the rest

Each step takes the best strategy that its layout allows (microbatch, recomputation, ZeRO, schedule), so that
what differs from the search's layout is the layout's doing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hpcpar.planner.estimate import Estimate
from hpcpar.planner.rules import layout_refusal
from hpcpar.planner.search import PlanRequest, SearchResult, divisors, layouts_of, search
from hpcpar.units import GiB, format_duration

SAME = 0.02
"""Share of the step's time below which two layouts count as equally fast: less than predictions err."""


@dataclass(frozen=True)
class RuleStep:
    """A step of the walk: the rule, what was found, and the layout where one fits."""

    rule: str
    found: str
    estimate: Estimate | None = None


@dataclass(frozen=True)
class Walk:
    """The rules' steps, the layout that they end with (None: with none), and the search's beside it."""

    steps: tuple[RuleStep, ...]
    by_rule: Estimate | None
    searched: Estimate | None

    def departure(self) -> str:
        """Say where the search departs from the rules, and why."""
        if self.searched is None:
            return "no layout fits, whatever the rules"
        if self.by_rule is None:
            return f"the rules of thumb end without a layout; the search found {self.searched.strategy}"
        ours, rules = self.searched, self.by_rule
        if ours.strategy == rules.strategy:
            return "the search agrees with the rules of thumb"
        gain = 1 - ours.step_s / rules.step_s
        if abs(gain) < SAME:
            return (
                f"the search found {ours.strategy}, {gain:.1%} faster: less than predictions err, so the "
                "rules of thumb are as good"
            )
        told = difference(rules, ours)
        return (
            f"the search departs: {ours.strategy} takes {format_duration(ours.step_s)} where the rules' "
            f"{rules.strategy} takes {format_duration(rules.step_s)} ({gain:.0%} less). {told}"
        )


def walk(request: PlanRequest, plan: SearchResult) -> Walk:
    """Follow the rules of thumb for a request, and compare with its plan."""
    steps: list[RuleStep] = []
    for follow in (_data_parallel, _tensor_parallel, _across_nodes):
        steps.append(follow(request))
        if steps[-1].estimate is not None:
            break
    found = steps[-1].estimate
    steps.append(_the_rest(request, found))
    return Walk(tuple(steps), found, plan.ranked[0] if plan.ranked else None)


def _best(request: PlanRequest, **degrees: int | tuple[int, ...]) -> SearchResult:
    """Search the layouts of these degrees; those that the request fixes otherwise are none."""
    fixed = dict(request.fixed)
    for axis, degree in degrees.items():
        allowed = degree if isinstance(degree, tuple) else (degree,)
        fixed[axis] = tuple(one for one in allowed if request.allows(axis, one))
    return search(replace(request, fixed=fixed), top=1)


def _reason(plan: SearchResult) -> str:
    """Return why none of a plan's layouts can be: what lacks least memory, or the first reason."""
    if not plan.rejected:
        return "it is not among the layouts that --fix allows"
    lacking = [one for one in plan.rejected if one.kind == "memory"]
    return min(lacking, key=lambda one: one.over_nbytes).reason if lacking else plan.rejected[0].reason


def _told(estimate: Estimate) -> str:
    return (
        f"{estimate.strategy}: {estimate.peak_nbytes / GiB:.1f} of "
        f"{estimate.cluster.device.memory_nbytes / GiB:.0f} GiB, {format_duration(estimate.step_s)} a step"
    )


def _data_parallel(request: PlanRequest) -> RuleStep:
    rule = "the model fits a device: data parallel"
    plan = _best(request, pp=1, cp=1, tp=1, zero_stage=(0, 1, 2))
    if plan.ranked:
        return RuleStep(rule, f"it fits. {_told(plan.best)}", plan.best)
    return RuleStep(rule, f"it does not: {_reason(plan)}")


def _tensor_parallel(request: PlanRequest) -> RuleStep:
    rule = "it does not: tensor parallel, up to the devices of a node"
    plan = None
    for tp in _degrees_in_node(request):
        plan = _best(request, pp=1, cp=1, tp=tp, zero_stage=(0, 1, 2))
        if plan.ranked:
            return RuleStep(rule, f"it fits from tp={tp} on. {_told(plan.best)}", plan.best)
    if plan is None:
        return RuleStep(rule, "no degree of tp within a node divides the model")
    return RuleStep(rule, f"it does not fit up to tp={max(_degrees_in_node(request))}: {_reason(plan)}")


def _degrees_in_node(request: PlanRequest) -> list[int]:
    """Return the degrees of tp above 1 within a node that divide the model."""
    found = []
    for tp in divisors(request.cluster.devices_per_node)[1:]:
        some = next(layouts_of(replace(request, fixed={**request.fixed, "tp": (tp,)})), None)
        if some is None or not request.allows("tp", tp):
            continue
        refusal = layout_refusal(
            request.model,
            request.cluster,
            replace(some, pp=1, dp=some.pp * some.dp, ep=1, etp=1),
            global_batch=request.cluster.size,
            sequence=request.sequence,
        )
        if refusal is None or refusal.kind not in ("heads", "ffn"):
            found.append(tp)
    return found


def _across_nodes(request: PlanRequest) -> RuleStep:
    """Take the smallest pipeline that fits with tp of a node; and ZeRO-3, with and without tp."""
    rule = "it still does not: pipeline across nodes, or ZeRO-3"
    tp = max(_degrees_in_node(request), default=1)
    pipelined: Estimate | None = None
    tried: SearchResult | None = None
    for pp in divisors(request.cluster.size // tp)[1:]:
        if pp > request.model.layers:
            break
        tried = _best(request, pp=pp, cp=1, tp=tp)
        if tried.ranked:
            pipelined = tried.best
            break
    sharded = _best(request, pp=1, cp=1, tp=(1, tp), zero_stage=3)
    told = []
    if pipelined is not None:
        told.append(f"a pipeline of {pipelined.strategy.layout.pp} fits: {_told(pipelined)}")
    elif tried is not None:
        told.append(f"no pipeline fits: {_reason(tried)}")
    if sharded.ranked:
        told.append(f"ZeRO-3 fits: {_told(sharded.best)}")
    else:
        told.append(f"ZeRO-3 does not: {_reason(sharded)}")
    both = [one for one in (pipelined, *sharded.ranked) if one is not None]
    best = min(both, key=lambda one: one.step_s, default=None)
    if len(both) == 2 and best is not None:
        told.append("the pipeline is faster" if best is pipelined else "ZeRO-3 is faster")
    return RuleStep(rule, "; ".join(told), best)


def _the_rest(request: PlanRequest, found: Estimate | None) -> RuleStep:
    rule = "devices that are left: data parallel"
    if found is None:
        return RuleStep(
            rule, "no layout of the rules fits; the search has context and expert parallelism, too"
        )
    layout = found.strategy.layout
    own = request.global_batch // layout.dp
    return RuleStep(
        rule,
        f"dp={layout.dp}: {request.cluster.size} devices over pp={layout.pp} x tp={layout.tp}, "
        f"{own} sequences of {request.global_batch} on each",
    )


# --- two layouts by part --------------------------------------------------------------------------


def by_part(one: Estimate, other: Estimate) -> dict[str, tuple[float, float]]:
    """Return the seconds of both by part; parts that neither has are left out."""
    mine, theirs = one.parts(), other.parts()
    names = dict.fromkeys([*mine, *theirs])
    pairs = {name: (mine.get(name, 0.0), theirs.get(name, 0.0)) for name in names}
    return {name: pair for name, pair in pairs.items() if max(pair) > 0}


def difference(one: Estimate, other: Estimate) -> str:
    """Say of which parts the difference between two steps is made, largest first."""
    changes = {name: after - before for name, (before, after) in by_part(one, other).items()}
    total = other.step_s - one.step_s
    named = [
        f"{name} {'+' if change > 0 else '-'}{format_duration(abs(change))}"
        for name, change in sorted(changes.items(), key=lambda item: -abs(item[1]))
        if abs(change) >= 0.05 * abs(total)
    ]
    memory = (other.peak_nbytes - one.peak_nbytes) / GiB
    return f"By part: {', '.join(named) or 'all alike'}; memory {memory:+.1f} GiB"


def records(estimate: Estimate, *, tokens: float | None = None) -> Mapping[str, Any]:
    """Return an estimate as plain values for JSON."""
    strategy, layout = estimate.strategy, estimate.strategy.layout
    worst = estimate.worst
    found: dict[str, Any] = {
        "layout": layout.degrees,
        "strategy": str(strategy),
        "zero_stage": strategy.zero_stage,
        "microbatch": strategy.microbatch,
        "recompute": strategy.recompute.mode,
        "schedule": strategy.schedule if layout.pp > 1 else None,
        "stages_per_rank": strategy.chunks_per_rank,
        "sequence_parallel": strategy.sequence_parallel,
        "offload": strategy.offload,
        "memory": {
            "worst_stage": worst.rank,
            "nbytes": estimate.peak_nbytes,
            "of": estimate.cluster.device.memory_nbytes,
            "purposes": dict(worst.purposes),
            "host_nbytes": worst.host_nbytes,
            "tight": estimate.tight,
        },
        "step_s": estimate.step_s,
        "parts_s": dict(estimate.parts()),
        "traffic": [vars(one) for one in estimate.traffic],
        "tokens_per_s": estimate.tokens_per_s,
        "mfu": estimate.mfu,
        "mfu_counts": estimate.mfu_convention,
    }
    if tokens is not None:
        found["tokens"] = tokens
        found["device_hours"] = estimate.device_hours(tokens)
        found["energy_kwh"] = estimate.energy_kwh(tokens)
    return found
