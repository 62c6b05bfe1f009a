"""`hpcpar draw memory runs/traced`: a rank's memory over a step of a run, measured and planned."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from hpcpar.cli import picture
from hpcpar.cli.draw_overlap import TimeSpan
from hpcpar.cli.run_timeline import (
    Event,
    bounds_of_step,
    events_of,
    kind_of,
    of_rank,
    rank_of_run,
    step_of_run,
)
from hpcpar.errors import ConfigError
from hpcpar.planner.memory import STATE
from hpcpar.planner.stage_memory import ACTIVATIONS
from hpcpar.units import GiB, MiB, format_nbytes

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 72
"""Of the drawing as text."""

LEVELS = " ▁▂▃▄▅▆▇█"

Series = Sequence[tuple[float, float]]
"""(seconds from the start of the step, bytes from then on), in order."""


class StepMemory(NamedTuple):
    """Memory of one rank in a step.

    state        bytes by part of the model state
    activations  that autograd has saved; gathered: units of ZeRO-3 that are unsharded, or about to be
    passes       forwards (F) and backwards (B) of microbatches, from the start of the step
    planned      bytes on the fullest rank, by the planner: state by part, and activations at most; empty
                 where the run has no prediction
    """

    rank: int
    seconds: float
    state: Mapping[str, float]
    activations: Series
    gathered: Series
    passes: Sequence[TimeSpan]
    planned: Mapping[str, float]

    @property
    def state_nbytes(self) -> float:
        return sum(self.state.values())

    @property
    def peak_nbytes(self) -> float:
        """Bytes of all that is drawn, at most."""
        times = [at for at, _ in (*self.activations, *self.gathered)]
        return self.state_nbytes + max(
            (value_at(self.activations, at) + value_at(self.gathered, at) for at in times), default=0.0
        )

    @property
    def planned_activations(self) -> Series:
        """Planned bytes along the measured passes: up in a forward, down in a backward; straight between."""
        alive = most = 0
        for span in self.passes:
            alive += {"F": 1, "B": -1}[span.name]
            most = max(most, alive)
        if ACTIVATIONS not in self.planned or not most:
            return []
        each, alive, found = self.planned[ACTIVATIONS] / most, 0, [(0.0, 0.0)]
        for span in self.passes:
            found.append((span.start_s, alive * each))
            alive += 1 if span.name == "F" else -1
            found.append((span.stop_s, alive * each))
        return [*found, (self.seconds, alive * each)]


@click.command()
@step_of_run
@rank_of_run
@picture.output_options()
def memory(run: Path, step: int, rank: int, output: picture.Output | None) -> None:
    """Draw a rank's memory over a step of RUN, an output directory of `hpcpar train`, or its timeline.json.

    The run must have recorded its first steps: `hpcpar train … output.timeline_steps=3`. Activations are what
    autograd saved; they rise in forward and fall in backward, above weights, gradients and optimizer state.
    Planned figures are those of the run's summary.json, for the fullest rank.
    """
    found = read(run, step)
    shown = of_rank(found, rank)
    click.echo(f"{table(found, step)}\n\n{chart(shown)}")
    picture.write(output, lambda: figure_of(shown, step))


def read(run: Path, step: int) -> list[StepMemory]:
    """Read a step of each rank; ConfigError for a file without counters of memory, or with fewer steps."""
    planned = _planned(run)
    return [_step_of(rank, events, step, planned) for rank, events in events_of(run).items()]


def _planned(run: Path) -> dict[str, float]:
    """Return the planner's figures from the summary beside the timeline; empty where there are none."""
    path = (run if run.is_dir() else run.parent) / "summary.json"
    if not path.is_file():
        return {}
    figures = (json.loads(path.read_text(encoding="utf-8")).get("prediction") or {}).get("figures", [])
    wanted = (*STATE, ACTIVATIONS)
    return {
        each["what"]: each["predicted"] for each in figures if each["what"] in wanted and each["predicted"]
    }


def _step_of(rank: int, events: Sequence[Event], step: int, planned: Mapping[str, float]) -> StepMemory:
    first_s, last_s = bounds_of_step(events, step)
    counters = [event for event in events if event["ph"] == "C"]
    states = [event["args"] for event in counters if event["name"] == "model state"]
    if not states:
        raise ConfigError(
            "the timeline has no counters of memory; record it anew by hpcpar train … output.timeline_steps=3"
        )
    # The state is counted after each step: that of the step before is what this one begins with.
    state = states[max(0, step - 2)]
    activations = [
        (event["ts"] / 1e6 - first_s, event["args"]["nbytes"])
        for event in counters
        if event["name"] == "activations" and first_s <= event["ts"] / 1e6 < last_s
    ]
    return StepMemory(
        rank,
        last_s - first_s,
        {what: state[what] for what in STATE},
        activations,
        list(_gathered(events, first_s, last_s)),
        list(passes_of(events, first_s, last_s)),
        planned,
    )


def passes_of(events: Sequence[Event], first_s: float, last_s: float) -> Iterator[TimeSpan]:
    """Yield forwards and backwards in order, named F and B."""
    for event in sorted(events, key=lambda each: each["ts"]):
        start_s = event["ts"] / 1e6
        if event["ph"] != "X" or event["cat"] != "compute" or not first_s <= start_s < last_s:
            continue
        kind = kind_of(event["name"])
        if kind in ("F", "B"):
            start_s -= first_s
            yield TimeSpan(kind, start_s, start_s + event["dur"] / 1e6)


def _gathered(events: Sequence[Event], first_s: float, last_s: float) -> Iterator[tuple[float, float]]:
    """Yield the bytes of units of ZeRO-3 whenever they change."""
    changes: list[tuple[float, float]] = []
    for event in events:
        if event["ph"] == "X" and event["cat"] == "units":
            start_s, nbytes = event["ts"] / 1e6 - first_s, event["args"]["nbytes"]
            # A unit is held from when its gather ends: the same time but for rounding, and freed first.
            stop_s = round(start_s + event["dur"] / 1e6, 9)
            changes += [(round(start_s, 9), nbytes), (stop_s, -nbytes)]
    total = 0.0
    for at_s, nbytes in sorted(changes):
        total += nbytes
        if 0 <= at_s < last_s - first_s:
            yield at_s, total


def value_at(series: Series, at_s: float) -> float:
    """Return the value that holds at a time; 0 before the first one."""
    value = 0.0
    for time_s, nbytes in series:
        if time_s > at_s:
            break
        value = nbytes
    return value


# --- as text --------------------------------------------------------------------------------------


def table(found: Sequence[StepMemory], step: int) -> str:
    """Tabulate the state, and activations and gathered units at most, of each rank; and what was planned."""
    head = "".join(f"{what:>17}" for what in STATE)
    lines = [f"{'step ' + str(step):<10}{head}{'activations':>14}{'gathered':>12}{'at most':>12}"]
    for each in found:
        state = "".join(f"{format_nbytes(each.state[what]):>17}" for what in STATE)
        activations, gathered = (
            format_nbytes(max((nbytes for _, nbytes in series), default=0.0))
            for series in (each.activations, each.gathered)
        )
        lines.append(
            f"rank {each.rank:<5}{state}{activations:>14}{gathered:>12}{format_nbytes(each.peak_nbytes):>12}"
        )
    planned = found[0].planned
    if planned:
        state = "".join(f"{format_nbytes(planned.get(what, 0.0)):>17}" for what in STATE)
        lines.append(f"{'planned':<10}{state}{format_nbytes(planned.get(ACTIVATIONS, 0.0)):>14}")
    return "\n".join(lines)


def chart(found: StepMemory) -> str:
    """Draw activations over the step as a line of blocks, under the passes that they belong to."""
    most = max((nbytes for _, nbytes in found.activations), default=0.0) or 1.0
    cells, passes = "", ""
    for column in range(COLUMNS):
        begin, end = (found.seconds * edge / COLUMNS for edge in (column, column + 1))
        within = [nbytes for at, nbytes in found.activations if begin <= at < end]
        highest = max([value_at(found.activations, begin), *within])
        cells += LEVELS[round(highest / most * (len(LEVELS) - 1))]
        middle = (begin + end) / 2
        passes += next((each.name for each in found.passes if each.start_s <= middle < each.stop_s), "·")
    return (
        f"activations of rank {found.rank}, at most {format_nbytes(most)}, in {found.seconds * 1e3:.1f} ms\n"
        f"{cells}\n{passes}\nF forward, B backward, · neither"
    )


# --- the picture ----------------------------------------------------------------------------------


BAND = 0.04
"""Height of the band of passes, of the picture's."""


def figure_of(found: StepMemory, step: int) -> Figure:
    """Return a figure of memory over the time of the step.

    GiB  |      /|   - - planned
         |    _/ |_     activations
         |___/______|___
         | optimizer state, gradients, parameters
           F      B
    """
    unit, name = (GiB, "GiB") if found.peak_nbytes >= GiB else (MiB, "MiB")
    figure = picture.new_figure(4.2)
    axes = figure.subplots()
    times = sorted({0.0, found.seconds, *(at for at, _ in (*found.activations, *found.gathered))})
    layers = [
        *(
            (what, [found.state[what]] * len(times), colour)
            for what, colour in zip(STATE, picture.STATE_COLOURS, strict=True)
        ),
        ("activations", [value_at(found.activations, at) for at in times], picture.ACTIVATIONS),
        ("gathered units", [value_at(found.gathered, at) for at in times], picture.COMMUNICATION),
    ]
    under = [0.0] * len(times)
    milliseconds = [at * 1e3 for at in times]
    for _, values, colour in layers:
        over = [below + value / unit for below, value in zip(under, values, strict=True)]
        axes.fill_between(milliseconds, under, over, step="post", color=colour, linewidth=0)
        under = over
    handles: list[Artist] = [
        *picture.patches({what: colour for what, values, colour in layers if any(values)})
    ]
    if found.planned:
        handles.append(_draw_planned(axes, found, unit))
    top = max(under) * 1.12
    _draw_passes(axes, found, top)
    axes.set_xlim(0, found.seconds * 1e3)
    axes.set_ylim(0, top)
    axes.set_xlabel("ms; above: blue forward, orange backward")
    axes.set_ylabel(f"{name} of rank {found.rank}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"memory of rank {found.rank} in step {step}", fontsize=10, loc="left")
    picture.legend(figure, handles, columns=3)
    return figure


def _draw_planned(axes: Axes, found: StepMemory, unit: int) -> Artist:
    """Draw what was planned as a dashed line, and return it."""
    base = sum(found.planned.get(what, 0.0) for what in STATE)
    outline = found.planned_activations or [(0.0, 0.0), (found.seconds, 0.0)]
    (line,) = axes.plot(
        [at * 1e3 for at, _ in outline],
        [(base + nbytes) / unit for _, nbytes in outline],
        color="black",
        linestyle="--",
        linewidth=1.2,
        label="planned for the fullest rank, without gathered units",
    )
    return line


def _draw_passes(axes: Axes, found: StepMemory, top: float) -> None:
    for span in found.passes:
        axes.broken_barh(
            [(span.start_s * 1e3, (span.stop_s - span.start_s) * 1e3)],
            (top * (1 - BAND), top * BAND),
            facecolor=picture.FORWARD if span.name == "F" else picture.BACKWARD,
            edgecolor="white",
            linewidth=0.3,
        )
