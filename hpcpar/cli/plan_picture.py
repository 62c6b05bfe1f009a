"""Pictures of `hpcpar plan`: layouts by part of the step, and scaling over nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpcpar.cli.picture import new_figure
from hpcpar.cli.plan_tables import header
from hpcpar.planner.search import SearchResult
from hpcpar.units import GiB

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_plan(plan: SearchResult) -> Figure:
    """Return a figure of the ranked layouts: the step by part, the fullest rank's memory by purpose."""
    ranked = plan.ranked[::-1]
    figure = new_figure(2.2 + 0.45 * len(ranked))
    times, memory = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    names = [str(one.strategy).replace(", ", "\n", 1) for one in ranked]
    parts = [name for name in ranked[0].parts() if any(one.parts()[name] > 0 for one in ranked)]
    left = [0.0] * len(ranked)
    for part in parts:
        seconds = [one.parts()[part] for one in ranked]
        times.barh(names, seconds, left=left, label=part, height=0.7)
        left = [before + more for before, more in zip(left, seconds, strict=True)]
    times.set_xlabel("seconds of a step")
    times.tick_params(axis="y", labelsize=7)
    left = [0.0] * len(ranked)
    for purpose in ranked[0].worst.purposes:
        gib = [one.worst.purposes.get(purpose, 0) / GiB for one in ranked]
        memory.barh(names, gib, left=left, label=purpose, height=0.7)
        left = [before + more for before, more in zip(left, gib, strict=True)]
    memory.axvline(ranked[0].cluster.device.memory_nbytes / GiB, color="black", linestyle="--")
    memory.set_xlabel("GiB of the fullest rank;\ndashed: the device's")
    for axes in (times, memory):
        axes.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    figure.suptitle(header(plan.request), fontsize=9)
    return figure


def draw_scaling(plans: Sequence[SearchResult]) -> Figure:
    """Return a figure of tokens/s and MFU of the fastest layout over nodes; dashed: ideal scaling."""
    fitting = [plan for plan in plans if plan.ranked]
    figure = new_figure(4)
    speed, share = figure.subplots(1, 2)
    nodes = [plan.request.cluster.nodes for plan in fitting]
    if fitting:
        tokens = [plan.best.tokens_per_s for plan in fitting]
        speed.loglog(nodes, tokens, "o-", label="predicted")
        speed.loglog(nodes, [tokens[0] * each / nodes[0] for each in nodes], "k--", label="ideal")
        speed.legend()
        share.semilogx(nodes, [100 * plan.best.mfu for plan in fitting], "o-")
        for plan, number in zip(fitting, nodes, strict=True):
            label = str(plan.best.strategy.layout)
            share.annotate(label, (number, 100 * plan.best.mfu), fontsize=7, rotation=20)
    speed.set(xlabel="nodes", ylabel="tokens/s")
    share.set(xlabel="nodes", ylabel="MFU in %", ylim=(0, None))
    figure.suptitle(header(plans[0].request).partition("\n")[2], fontsize=9)
    return figure
