"""`hpcpar draw fsdp runs/traced`: when units of ZeRO-3 were gathered, used and freed, and what that hid."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from hpcpar.cli import picture
from hpcpar.cli.draw_memory import passes_of
from hpcpar.cli.draw_overlap import Interval, TimeSpan, common, seconds_of, union
from hpcpar.cli.draw_overlap import step_of as overlap_of
from hpcpar.cli.run_timeline import Event, bounds_of_step, events_of, of_rank, rank_of_run, step_of_run
from hpcpar.errors import ConfigError
from hpcpar.units import format_nbytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 84
"""Of the drawing as text."""

LARGEST = 24
"""Units that are drawn."""


class UnitPass(NamedTuple):
    """One time that a unit was gathered, used and freed; seconds from the start of the step.

    gather     from the allocation of its memory until its values are there and used; nbytes of its parameters
    in_flight  when its all-gathers were under way
    hidden_s   of that, when the program did not stand still for any communication
    waited     when the program stood still for it, the end of `gather`
    freed_s    when its memory was given back
    """

    unit: str
    gather: TimeSpan
    in_flight: Sequence[Interval]
    hidden_s: float
    waited: Interval
    freed_s: float

    @property
    def in_flight_s(self) -> float:
        return seconds_of(self.in_flight)


class FsdpStep(NamedTuple):
    """Units of one rank over a step, in the order of their gathers.

    passes   forwards (F) and backwards (B) of microbatches
    """

    rank: int
    seconds: float
    units: Sequence[UnitPass]
    passes: Sequence[TimeSpan]

    @property
    def names(self) -> list[str]:
        """Names of units, in the order of their first gathers."""
        return list(dict.fromkeys(each.unit for each in self.units))

    @property
    def in_flight_s(self) -> float:
        return sum(each.in_flight_s for each in self.units)

    @property
    def hidden_s(self) -> float:
        return sum(each.hidden_s for each in self.units)

    @property
    def peak_nbytes(self) -> int:
        """Bytes of units that are gathered or about to be, at most."""
        changes = [(round(each.gather.start_s, 9), each.gather.nbytes) for each in self.units]
        changes += [(round(each.freed_s, 9), -each.gather.nbytes) for each in self.units]
        held = most = 0
        for _, nbytes in sorted(changes):
            held += nbytes
            most = max(most, held)
        return most


@click.command()
@step_of_run
@rank_of_run
@picture.output_options()
def fsdp(run: Path, step: int, rank: int, output: picture.Output | None) -> None:
    """Draw gather, use and free of ZeRO-3's units over a step of RUN, an output directory of `hpcpar train`.

    The run must be one with optimizer.zero_stage=3 that recorded its first steps:
    `hpcpar train … optimizer.zero_stage=3 output.timeline_steps=3`. A gather is hidden while the program
    stands still for nothing. On CPUs the same cores do both: what is hidden is waiting, and not the copies.
    """
    found = read(run, step)
    shown = of_rank(found, rank)
    click.echo(f"{table(found, step)}\n\n{chart(shown)}")
    picture.write(output, lambda: figure_of(shown, step))


def read(run: Path, step: int) -> list[FsdpStep]:
    """Read a step of each rank; ConfigError for a run without units, or with fewer steps."""
    return [step_of(rank, events, step) for rank, events in events_of(run).items()]


def step_of(rank: int, events: Sequence[Event], step: int) -> FsdpStep:
    """Return a step of one rank; ConfigError where it has no units in it, or fewer steps."""
    from hpcpar.data_parallel.fsdp_unit import GATHER, HOLD, UNITS

    first_s, last_s = bounds_of_step(events, step)
    spans = [event for event in events if event["ph"] == "X" and first_s <= event["ts"] / 1e6 < last_s]
    of_units = sorted((each for each in spans if each["cat"] == UNITS), key=lambda each: each["ts"])
    if not of_units:
        raise ConfigError(
            f"step {step} has no units of ZeRO-3; record it by hpcpar train … optimizer.zero_stage=3 "
            "output.timeline_steps=3"
        )
    allgathers = [
        _interval(each, first_s)
        for each in spans
        if each["cat"] == "communication" and each["name"].startswith("allgather ")
    ]
    standing = [
        (start - first_s, stop - first_s) for start, stop in union(overlap_of(rank, events, step).standing)
    ]
    holds: dict[str, list[Interval]] = defaultdict(list)
    for each in of_units:
        if each["name"].startswith(f"{HOLD} "):
            holds[each["name"].removeprefix(f"{HOLD} ")].append(_interval(each, first_s))
    units = []
    for each in of_units:
        if each["name"].startswith(f"{GATHER} "):
            unit = each["name"].removeprefix(f"{GATHER} ")
            (begin_s, ready_s), told = _interval(each, first_s), each["args"]
            # Its all-gathers began while it was being started; units start one after the other.
            own = [one for one in allgathers if begin_s <= one[0] <= begin_s + told["starting_s"]]
            freed_s = next((stop for start, stop in holds[unit] if start >= ready_s - 1e-6), last_s - first_s)
            waited = (ready_s - told["waited_s"], ready_s)
            hidden_s = seconds_of(own) - seconds_of(common(own, standing))
            gather = TimeSpan(unit, begin_s, ready_s, told["nbytes"])
            units.append(UnitPass(unit, gather, own, hidden_s, waited, freed_s))
    return FsdpStep(rank, last_s - first_s, units, list(passes_of(events, first_s, last_s)))


def _interval(event: Event, first_s: float) -> Interval:
    start_s = event["ts"] / 1e6 - first_s
    return start_s, start_s + event["dur"] / 1e6


def parts_of(unit: UnitPass, passes: Sequence[TimeSpan]) -> dict[str, list[Interval]]:
    """Return when a unit was held during forwards (F), during backwards (B), and besides ("")."""
    held = [(unit.gather.stop_s, unit.freed_s)]
    found = {kind: common(held, union(each for each in passes if each.name == kind)) for kind in "FB"}
    found[""] = held
    return found


def table(found: Sequence[FsdpStep], step: int) -> str:
    """Tabulate gathers of each rank: number, bytes at most, time under way, and how much was hidden."""
    head = ("gathers", "at most", "in flight", "hidden", "waited", "step")
    lines = [f"{'step ' + str(step):<10}" + "".join(f"{each:>12}" for each in head)]
    for each in found:
        share = f"{each.hidden_s / each.in_flight_s:.0%}" if each.in_flight_s else "-"
        waited_s = seconds_of(unit.waited for unit in each.units)
        lines.append(
            f"rank {each.rank:<5}{len(each.units):>12}{format_nbytes(each.peak_nbytes):>12}"
            f"{each.in_flight_s * 1e3:>9.1f} ms{share:>12}{waited_s * 1e3:>9.1f} ms"
            f"{each.seconds * 1e3:>9.1f} ms"
        )
    return "\n".join(lines)


def chart(found: FsdpStep) -> str:
    """Draw a line for each unit: gathered (g), held in forward (F) and in backward (B), sharded (·)."""
    names = found.names[:LARGEST]
    width = max(map(len, names))
    lines = []
    for name in names:
        cells = ""
        passes = [each for each in found.units if each.unit == name]
        for column in range(COLUMNS):
            begin, end = (found.seconds * edge / COLUMNS for edge in (column, column + 1))
            cells += _cell(passes, found.passes, (begin, end))
        lines.append(f"{name:<{width}}  {cells}")
    more = len(found.names) - len(names)
    lines += [f"and {more} more"] if more else []
    lines.append(
        f"rank {found.rank}: g being gathered, F held in forward, B in backward, - besides, · sharded"
    )
    return "\n".join(lines)


def _cell(units: Sequence[UnitPass], passes: Sequence[TimeSpan], cell: Interval) -> str:
    """Return the letter of what a unit did longest in a cell's time."""
    spent: dict[str, float] = defaultdict(float)
    for unit in units:
        gather = [(unit.gather.start_s, unit.gather.stop_s)]
        spent["g"] += seconds_of(common(gather, [cell]))
        parts = {
            kind or "-": seconds_of(common(each, [cell])) for kind, each in parts_of(unit, passes).items()
        }
        parts["-"] -= parts["F"] + parts["B"]
        for letter, seconds in parts.items():
            spent[letter] += seconds
    spent["·"] = cell[1] - cell[0] - sum(spent.values())
    return max(spent, key=lambda letter: spent[letter])


# --- the picture ----------------------------------------------------------------------------------


WAITED = picture.ACTIVATIONS
"""Colour of standing still for a gather."""

HELD = {"": picture.IDLE, "F": picture.FORWARD, "B": picture.BACKWARD}


def figure_of(found: FsdpStep, step: int) -> Figure:
    """Return a figure with a row for each unit.

    layer 0   |~~|FFFF|            ~~~|BBBB|
    layer 1     ~~~~~~|FFFF|   ~~~|BBBB|           ~ gather under way
    layer 2         ~~~~~~~|FFFF|BBBB|
    """
    names = found.names[:LARGEST]
    figure = picture.new_figure(1.4 + 0.34 * len(names))
    axes = figure.subplots()
    for unit in found.units:
        if unit.unit not in names:
            continue
        row = names.index(unit.unit)
        parts = parts_of(unit, found.passes)
        for kind in HELD:  # all of it first
            picture.draw_spans(axes, row, parts[kind], HELD[kind])
        picture.draw_spans(axes, row, [(unit.gather.start_s, unit.gather.stop_s)], picture.IDLE, height=0.2)
        picture.draw_spans(axes, row, unit.in_flight, picture.COMMUNICATION, height=0.4)
        picture.draw_spans(axes, row, [unit.waited], WAITED, height=0.4)
    picture.tidy_rows(axes, names)
    axes.set_xlim(0, found.seconds * 1e3)
    axes.set_xlabel("ms")
    hidden = f"{found.hidden_s / found.in_flight_s:.0%}" if found.in_flight_s else "none"
    axes.set_title(
        f"step {step} of rank {found.rank}: {len(found.units)} gathers, "
        f"{found.in_flight_s * 1e3:.1f} ms under way, {hidden} of it hidden",
        fontsize=10,
        loc="left",
    )
    colours = {
        "all-gather under way": picture.COMMUNICATION,
        "stands still for it": WAITED,
        "held in forward": picture.FORWARD,
        "in backward": picture.BACKWARD,
        "memory allocated": picture.IDLE,
    }
    picture.legend(figure, picture.patches(colours))
    return figure
