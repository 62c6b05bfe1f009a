"""Tables and sentences of `hpcpar plan`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from hpcpar.planner.estimate import Estimate
from hpcpar.planner.explain import Walk, by_part
from hpcpar.planner.search import PlanRequest, Rejected, SearchResult
from hpcpar.planner.step_time import COMPUTE
from hpcpar.units import GiB, format_duration

if TYPE_CHECKING:
    from hpcpar.planner.remedies import Remedy
    from hpcpar.planner.validate import Validation

GROUPS = {
    "compute": COMPUTE,
    "in layers": ("tensor parallel", "context parallel", "expert parallel"),
    "pipeline": ("pipeline", "bubble"),
    "dp": ("data parallel",),
}
"""Parts of a step that share a column of the table; what is left is "other"."""


def show_plan(plan: SearchResult, *, tokens: float | None, top: int) -> None:
    """Print the ranking."""
    request = plan.request
    click.echo(header(request))
    if not plan.ranked:
        click.echo(f"none of {plan.layouts} layouts fits")
        return
    shown = plan.ranked[:top]
    has = {
        "ep": request.model.experts is not None,
        "schedule": any(one.strategy.layout.pp > 1 for one in shown),
        "hours": tokens is not None,
    }
    table = _table(
        ["#", "pp", "dp", "cp", "tp", *(["ep", "etp"] if has["ep"] else []), "ZeRO", "mb"],
        [*(["schedule"] if has["schedule"] else []), "recompute"],
        [
            "GiB",
            "",
            "step",
            *GROUPS,
            "other",
            "tokens/s",
            "MFU",
            *(["device-h", "MWh"] if has["hours"] else []),
        ],
    )
    for number, one in enumerate(shown, 1):
        table.add_row(*_row(number, one, has, tokens))
    _print(table)
    best = plan.best
    click.echo(f"\nfastest: {best.strategy}")
    click.echo(f"  memory of stage {best.worst.rank}, the fullest: {_purposes(best)}")
    click.echo(f"  MFU counts {best.mfu_convention}")
    if any(one.tight for one in shown):
        click.echo(
            "  tight: fits, with less than 8 % of the device left; measured runs slow down or end there"
        )
    if tokens is not None:
        click.echo(f"  {tokens:,.0f} tokens take {best.seconds_for(tokens) / 86_400:,.1f} days")


def header(request: PlanRequest) -> str:
    """Name model, machine and step."""
    model, cluster = request.model, request.cluster
    active = model.parameters(active=True)
    some = f" ({active / 1e9:.1f} B of them active)" if active != model.parameters() else ""
    return (
        f"{model.name}, {model.parameters() / 1e9:.4g} B parameters{some}, on {cluster.name}: "
        f"{cluster.nodes:,} x {cluster.devices_per_node} {cluster.device.name} of "
        f"{cluster.device.memory_nbytes / GiB:.0f} GiB\n"
        f"steps of {request.global_batch:,} x {request.sequence:,} tokens in {request.precision}"
    )


def _row(number: int, one: Estimate, has: dict[str, bool], tokens: float | None) -> list[str]:
    strategy, layout = one.strategy, one.strategy.layout
    cells = [str(number), *(str(layout.degree(axis)) for axis in ("pp", "dp", "cp", "tp"))]
    if has["ep"]:
        cells += [str(layout.ep), str(layout.etp)]
    cells += [str(strategy.zero_stage), str(strategy.microbatch)]
    if has["schedule"]:
        several = f" x{strategy.chunks_per_rank}" if strategy.chunks_per_rank > 1 else ""
        cells.append(f"{strategy.schedule}{several}" if layout.pp > 1 else "-")
    cells.append(strategy.recompute.mode)
    cells += [f"{one.peak_nbytes / GiB:.1f}", "tight" if one.tight else "", format_duration(one.step_s)]
    cells += _shares(one)
    cells += [f"{one.tokens_per_s:,.0f}", f"{one.mfu:.1%}"]
    if tokens is not None:
        cells += [f"{one.device_hours(tokens):,.0f}", f"{one.energy_kwh(tokens) / 1000:,.1f}"]
    return cells


def _shares(one: Estimate) -> list[str]:
    """Format the shares of the step by group of parts."""
    parts = dict(one.parts())
    of_groups = [sum(parts.pop(name, 0.0) for name in names) for names in GROUPS.values()]
    return [f"{seconds / one.step_s:.0%}" for seconds in (*of_groups, sum(parts.values()))]


def _purposes(one: Estimate) -> str:
    named = [f"{nbytes / GiB:.1f} GiB {what}" for what, nbytes in one.worst.purposes.items() if nbytes]
    host = one.worst.host_nbytes
    return ", ".join([*named, *([f"{host / GiB:.1f} GiB on the host"] if host else [])])


def show_rejected(plan: SearchResult, *, every: bool) -> None:
    """Print how many layouts cannot be, by kind of reason with an example; or all of them."""
    if not plan.rejected:
        return
    kinds = plan.rejected_by_kind()
    click.echo(f"\n{len(plan.rejected):,} of {plan.layouts:,} layouts cannot be:")
    for kind, ones in kinds.items():
        if every:
            click.echo(f"{kind}:")
            for one in sorted(ones, key=lambda one: one.over_nbytes):
                click.echo(f"  {one.layout}: {one.reason}")
        else:
            example = _nearest(ones)
            click.echo(f"  {len(ones):>6,} {kind}, as {example.layout}: {example.reason}")
    if not every:
        click.echo("  --rejected lists them all")


def _nearest(ones: Sequence[Rejected]) -> Rejected:
    """Return the layout that lacks least memory, or the first."""
    return min(ones, key=lambda one: one.over_nbytes)


def show_walk(walk: Walk) -> None:
    """Print the rules of thumb, step by step."""
    click.echo("\nrules of thumb:")
    for number, step in enumerate(walk.steps, 1):
        click.echo(f"  {number}. {step.rule}\n     {step.found}")
    click.echo(f"  {walk.departure()}")


def show_remedies(found: SearchResult, remedies: Sequence[Remedy]) -> None:
    """Print the changes with which a layout fits, or why no single one would do."""
    request = found.request
    if not found.layouts:
        fixed = ", ".join(f"{key}={','.join(map(str, values))}" for key, values in request.fixed.items())
        dense = "; a dense model has no ep" if request.model.experts is None and "ep" in request.fixed else ""
        click.echo(
            f"\nno layout of {request.cluster.size} devices has {fixed}: degrees multiply to that{dense}"
        )
    if not remedies:
        lacks_memory = any(one.over_nbytes for one in found.rejected)
        advice = (
            "take a smaller model or devices with more memory" if lacks_memory else "see the reasons above"
        )
        click.echo(f"\nno single change would make one fit; {advice}")
        return
    click.echo("\nthe smallest change with which one fits:")
    click.echo(f"  {remedies[0].text}")
    for one in remedies[1:]:
        click.echo(f"  or {one.text}")


def show_comparison(one: Estimate, other: Estimate) -> None:
    """Print two layouts by part."""
    click.echo(f"A: {one.strategy}\nB: {other.strategy}")
    table = _table([], ["part"], ["A", "B", "B - A"])
    for name, (mine, theirs) in by_part(one, other).items():
        table.add_row(name, format_duration(mine), format_duration(theirs), _signed(theirs - mine))
    table.add_row(
        "step", *map(format_duration, (one.step_s, other.step_s)), _signed(other.step_s - one.step_s)
    )
    table.add_section()
    for purpose in dict.fromkeys([*one.worst.purposes, *other.worst.purposes]):
        mine, theirs = (each.worst.purposes.get(purpose, 0) / GiB for each in (one, other))
        table.add_row(purpose, f"{mine:.1f} GiB", f"{theirs:.1f} GiB", f"{theirs - mine:+.1f} GiB")
    axes = [{traffic.axis: traffic for traffic in each.traffic} for each in (one, other)]
    for axis in dict.fromkeys([*axes[0], *axes[1]]):
        sent = [each[axis].nbytes / GiB if axis in each else 0.0 for each in axes]
        table.add_row(
            f"sent on {axis}", f"{sent[0]:.1f} GiB", f"{sent[1]:.1f} GiB", f"{sent[1] - sent[0]:+.1f} GiB"
        )
    table.add_row(
        "tokens/s",
        f"{one.tokens_per_s:,.0f}",
        f"{other.tokens_per_s:,.0f}",
        f"{other.tokens_per_s / one.tokens_per_s - 1:+.1%}",
    )
    table.add_row("MFU", f"{one.mfu:.1%}", f"{other.mfu:.1%}", f"{100 * (other.mfu - one.mfu):+.1f} points")
    _print(table)


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{format_duration(abs(seconds))}"


def show_scaling(plans: Sequence[SearchResult], *, tokens: float | None) -> None:
    """Print the fastest layout on each number of nodes; efficiency beside the first that fits."""
    click.echo(header(plans[0].request).partition("\n")[2])
    table = _table(
        ["nodes", "devices"],
        ["fastest layout"],
        ["GiB", "step", "tokens/s", "efficiency", "MFU", *(["device-h"] if tokens else [])],
    )
    first = next((plan.best for plan in plans if plan.ranked), None)
    for plan in plans:
        cluster = plan.request.cluster
        cells = [f"{cluster.nodes:,}", f"{cluster.size:,}"]
        if not plan.ranked:
            table.add_row(*cells, f"none of {plan.layouts} fits")
            continue
        one = plan.best
        assert first is not None, "this one fits"
        efficiency = one.tokens_per_device_s / first.tokens_per_device_s
        cells += [str(one.strategy), f"{one.peak_nbytes / GiB:.1f}", format_duration(one.step_s)]
        cells += [f"{one.tokens_per_s:,.0f}", f"{efficiency:.1%}", f"{one.mfu:.1%}"]
        table.add_row(*cells, *([f"{one.device_hours(tokens):,.0f}"] if tokens else []))
    _print(table)


def show_validation(found: Validation, *, as_json: bool) -> None:
    """Print errors and regret of predictions, and the rows that are furthest off."""
    if as_json:
        rows = [
            {
                "line": one.row.line,
                "measured_s": one.row.step_s,
                "predicted_s": one.predicted_s,
                "tight": one.tight,
            }
            for one in found.judged
        ]
        told = {"summary": found.summary(), "constants": dict(found.constants), "rows": rows}
        click.echo(json.dumps(told, indent=1))
        return
    click.echo(found.summary())
    table = _table(["line"], ["layout"], ["measured", "predicted", "error", ""])
    for one in sorted(found.judged, key=lambda one: -abs(one.error))[:10]:
        table.add_row(
            str(one.row.line),
            f"{one.row.model.name} {one.row.strategy}",
            format_duration(one.row.step_s),
            format_duration(one.predicted_s),
            f"{one.error:+.1%}",
            "tight" if one.tight else "",
        )
    click.echo("furthest off:")
    _print(table)


def _table(numbers: Sequence[str], words: Sequence[str], more: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in words:
        table.add_column(heading, no_wrap=True)
    for heading in more:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    return table


def _print(table: Table) -> None:
    from hpcpar.cli.console import own_console

    # Otherwise columns would be cut to a terminal's width, and numbers lose their units.
    table.width = Console(width=1000).measure(table).maximum
    own_console().print(table, crop=False, soft_wrap=True)
