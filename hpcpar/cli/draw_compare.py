"""`hpcpar draw compare llama3-8b --ranks 8`: what each approach to parallelism needs, sends and changes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from hpcpar.cli import picture
from hpcpar.errors import ConfigError, LayoutError
from hpcpar.planner.approaches import Approach, Batch, approaches, estimate_of, with_experts
from hpcpar.planner.cluster import Cluster, machine_names
from hpcpar.planner.memory import STATE
from hpcpar.planner.model_shapes import ModelShape
from hpcpar.planner.shapes import ITEMSIZE
from hpcpar.planner.stage_memory import ACTIVATIONS, WORKING
from hpcpar.units import GiB, MiB, format_duration, format_nbytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUMBER = click.IntRange(min=1)

PURPOSES = (*STATE, ACTIVATIONS, WORKING)

HEADINGS = dict(zip(PURPOSES, ("weights", "gradients", "optimizer", "activations", "working"), strict=True))

WIDTHS = {purpose: len(heading) + 2 for purpose, heading in HEADINGS.items()}

SEQUENCES_PER_RANK = 4
"""Sequences of a step for each rank, where none are given."""

LONGEST_SEQUENCE = 8192
"""Longest sequence that is taken where none is given, as `hpcpar plan` has it."""


class Figures(NamedTuple):
    """Figures of an approach, planned or measured; None where there are none.

    memory       bytes of the rank that needs most, by purpose
    sent_nbytes  by a rank in a step
    step_s       seconds of a step
    twice        (sent, seconds) with twice the global batch, over these
    calls        of collectives and messages in a step, of the rank that makes most
    """

    memory: Mapping[str, float]
    sent_nbytes: float | None
    step_s: float | None
    twice: tuple[float, float] | None = None
    calls: float | None = None


class Compared(NamedTuple):
    """An approach, planned and perhaps measured; `refused` says why it cannot be planned.

    changes   parts of the program that take another form
    """

    name: str
    layout: str
    changes: str
    planned: Figures | None
    measured: Figures | None = None
    refused: str | None = None


@click.command()
@click.argument("model", required=False)
@click.option("--ranks", type=NUMBER, default=8, help="That each approach uses.")
@click.option("--machine", default="h100-dgx", help=f"{', '.join(machine_names())}, or a .toml file.")
@click.option("--batch", type=NUMBER, help="Sequences of an optimizer step [default: 4 a rank].")
@click.option("--microbatch", type=NUMBER, default=1, help="Sequences that a rank computes at once, at most.")
@click.option("--sequence", type=NUMBER, help="Tokens of a sequence [default: the model's, at most 8192].")
@click.option("--precision", type=click.Choice(list(ITEMSIZE)), default="bfloat16", help="Of the model.")
@click.option(
    "--measured",
    type=click.Path(exists=True, path_type=Path, dir_okay=False),
    help="Lines of `hpcpar bench compare --json`, in the place of MODEL: planned beside measured.",
)
@picture.output_options()
def compare(
    model: str | None,
    measured: Path | None,
    output: picture.Output | None,
    ranks: int,
    machine: str,
    **batch: Any,
) -> None:
    """Draw what approaches to parallelism need on as many ranks: memory, bytes, time; and what they change.

    MODEL is a preset (llama3-8b), a Hugging Face config.json, or a TOML file. Without experts, a mixture of 8
    stands in its place in the lines of experts. x2 is what twice the batch sends, over what the batch sends.
    """
    if (model is None) == (measured is None):
        raise click.UsageError("name a MODEL, or the file of a measured comparison: --measured FILE")
    if measured is not None:
        title, found = read(measured)
    else:
        title, found = planned(str(model), ranks, machine, **batch)
    click.echo(f"{title}\n\n{table(found)}\n\n{changes(found)}")
    picture.write(output, lambda: figure_of(found, title))


def planned(
    model: str,
    ranks: int,
    machine: str,
    *,
    batch: int | None,
    microbatch: int,
    sequence: int | None,
    precision: str,
) -> tuple[str, list[Compared]]:
    """Return a title, and every approach as the planner sees it.

    errors   ConfigError for a model, a machine or a precision that there is not
    """
    shape, cluster = ModelShape.named(model), Cluster.named(machine).with_devices(ranks)
    cluster.device.peak(precision)
    size = Batch(
        batch or SEQUENCES_PER_RANK * ranks,
        microbatch,
        sequence or min(shape.max_sequence, LONGEST_SEQUENCE),
        precision,
    )
    found = []
    for each in approaches(ranks):
        # A model with experts shows them in all lines.
        if not (shape.experts is not None and each.has_experts and "ep" not in each.given()):
            found.append(_planned(each, with_experts(shape) if each.has_experts else shape, cluster, size))
    title = (
        f"{shape.name} on {ranks} ranks of {cluster.name}: "
        f"{size.global_batch} sequences of {size.sequence} tokens, {precision}"
    )
    return title, found


def _planned(approach: Approach, model: ModelShape, cluster: Cluster, batch: Batch) -> Compared:
    try:
        one, two = (estimate_of(approach, model, cluster, size) for size in (batch, batch.twice))
    except (LayoutError, ConfigError) as error:
        return Compared(approach.name, "", approach.changes, None, refused=str(error))
    sent, sent_twice = (sum(axis.nbytes for axis in each.traffic) for each in (one, two))
    figures = Figures(
        one.worst.purposes, sent, one.step_s, (sent_twice / sent if sent else 1.0, two.step_s / one.step_s)
    )
    lacks = f"{format_nbytes(one.over_nbytes)} more than a device has" if one.over_nbytes > 0 else None
    return Compared(approach.name, str(one.strategy.layout), approach.changes, figures, refused=lacks)


def read(path: Path) -> tuple[str, list[Compared]]:
    """Read a measured comparison; ConfigError for another file."""
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return of_records(records)
    except (OSError, KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} has no lines of a comparison ({type(error).__name__}: {error}); write them by "
            "hpcpar run -n 4 -- -m hpcpar bench compare --json FILE"
        ) from error


def of_records(records: Sequence[Mapping[str, Any]]) -> tuple[str, list[Compared]]:
    """Return a title, and approaches as measured by `hpcpar bench compare`."""
    title = f"{records[0]['run']}, measured on {records[0]['ranks']} ranks"
    return title, [_measured(record) for record in records]


def _measured(record: Mapping[str, Any]) -> Compared:
    ranks, steps = record["ranks"], len(record["steps_s"])
    figures = {line["what"]: line for line in record["prediction"]["figures"]}

    def memory(which: str) -> dict[str, float]:
        return {what: figures[what][which] or 0 for what in (*STATE, ACTIVATIONS)}

    sent, step = figures["bytes sent"]["predicted"], figures["step"]["predicted"]
    one = Figures(memory("predicted"), None if sent is None else sent / steps / ranks, step)
    two = Figures(
        memory("measured"),
        record["nbytes_sent"] / ranks,
        record["step_s"],
        None if record["twice"] is None else tuple(record["twice"]),
        record["calls"],
    )
    known = {each.name: each.changes for each in approaches(ranks)}
    return Compared(record["name"], record["layout"], known.get(record["name"], ""), one, two)


# --- tables ---------------------------------------------------------------------------------------


def purposes_of(found: Iterable[Compared]) -> list[str]:
    """Return the purposes of memory that any approach has a figure for, in order."""
    every = [figures for each in found for figures in (each.planned, each.measured) if figures is not None]
    return [purpose for purpose in PURPOSES if any(purpose in figures.memory for figures in every)]


def unit_of(found: Iterable[Compared]) -> tuple[int, str]:
    """Return the unit in which the largest memory is a number that can be read."""
    memory = [sum(each.planned.memory.values()) for each in found if each.planned is not None]
    return (GiB, "GiB") if max(memory, default=0) >= GiB else (MiB, "MiB")


def table(found: Sequence[Compared]) -> str:
    """Tabulate memory, bytes and time as planned; where measured, that stands under it."""
    purposes, (unit, name) = purposes_of(found), unit_of(found)
    head = "".join(f"{HEADINGS[purpose]:>{WIDTHS[purpose]}}" for purpose in purposes)
    calls = "  calls" if any(each.measured is not None for each in found) else ""
    lines = [f"{name:<30}{head}{'sum':>9} {'sent':>9}{'x2':>6}{'step':>11}{'x2':>6}{calls}"]
    for each in found:
        if each.planned is None:
            lines.append(f"{each.name:<30}  cannot be: {each.refused}")
            continue
        lines.append(_line(each.name, each.planned, purposes, unit, is_over=each.refused is not None))
        if each.measured is not None:
            lines.append(_line(f"  measured: {each.layout}", each.measured, purposes, unit))
    if any(each.refused is not None and each.planned is not None for each in found):
        lines.append("* more than a device has")
    return "\n".join(line.rstrip() for line in lines)


def _line(name: str, figures: Figures, purposes: Sequence[str], unit: int, *, is_over: bool = False) -> str:
    memory = {purpose: figures.memory.get(purpose, 0) / unit for purpose in purposes}
    sent = "-" if figures.sent_nbytes is None else f"{figures.sent_nbytes / unit:.1f}"
    step = "-" if figures.step_s is None else format_duration(figures.step_s)
    twice = ("", "") if figures.twice is None else tuple(f"{ratio:.2f}" for ratio in figures.twice)
    calls = "" if figures.calls is None else f"{figures.calls:>7,.0f}"
    cells = "".join(f"{value:>{WIDTHS[purpose]}.1f}" for purpose, value in memory.items())
    total = f"{sum(memory.values()):>9.1f}{'*' if is_over else ' '}"
    return f"{name:<30}{cells}{total}{sent:>9}{twice[0]:>6}{step:>11}{twice[1]:>6}{calls}"


def changes(found: Sequence[Compared]) -> str:
    """List what each approach changes in a program, which is its complexity."""
    return "\n".join(["changes in the program:", *(f"  {each.name:<28}  {each.changes}" for each in found)])


# --- the picture ----------------------------------------------------------------------------------


HATCH = "////"
"""Of measured bars."""


def figure_of(found: Sequence[Compared], title: str) -> Figure:
    """Return a figure with a row for each approach.

                      GiB on the rank that needs most      GiB sent     seconds of a step
    data parallel     |weights|grad|optimizer      |act|   |====        |===
    ZeRO-3            |w|g|o|act|                          |======      |====
    """
    from matplotlib.patches import Patch

    is_measured = any(each.measured is not None for each in found)
    inches = 1.3 + len(found) * (0.46 if is_measured else 0.3)
    figure = picture.new_figure(inches)
    memory, sent, time = figure.subplots(1, 3, sharey=True, width_ratios=(2.2, 1, 1))
    colour_of = dict(zip(PURPOSES, (*picture.STATE_COLOURS, picture.ACTIVATIONS, picture.IDLE), strict=True))
    unit, name = unit_of(found)
    for row, each in enumerate(found):
        if each.planned is None:
            memory.text(0, row, f" cannot be: {_short(each.refused)}", va="center", fontsize=7)
        mark = "" if each.refused is None else "*"
        for figures, bar in bars_of(each, row):
            _draw_memory(memory, figures, bar, colour_of, unit, "" if bar.hatch else mark)
            ratio = "" if figures.twice is None else f" x{figures.twice[0]:.2f}"
            if figures.sent_nbytes is not None:
                _draw_bar(sent, figures.sent_nbytes / unit, bar, picture.COMMUNICATION, ratio)
            if figures.step_s is not None:
                _draw_bar(time, figures.step_s, bar, picture.MEASURED, "")
    is_over = any(each.planned is not None and each.refused is not None for each in found)
    over = "\n* more than a device has" if is_over else ""
    for axes, label in (
        (memory, f"{name} on the rank that needs most{over}"),
        (sent, f"{name} sent by a rank\nand ratio at twice the batch"),
        (time, "seconds of a step"),
    ):
        picture.tidy_rows(axes, [each.name for each in found])
        axes.set_xlabel(label, fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        axes.margins(x=0.2)
        axes.set_xlim(left=0)
    handles = picture.patches({HEADINGS[each]: colour_of[each] for each in purposes_of(found)})
    if is_measured:
        handles.append(Patch(facecolor="white", edgecolor="black", hatch=HATCH, label="measured"))
    picture.legend(figure, handles)
    figure.suptitle(title, fontsize=10)
    return figure


class BarPlace(NamedTuple):
    """Middle and height of a bar in rows, and its hatching."""

    middle: float
    height: float
    hatch: str = ""


def bars_of(each: Compared, row: int) -> list[tuple[Figures, BarPlace]]:
    """Return the figures of a row, planned above measured, with the places of their bars."""
    if each.planned is None:
        return []
    if each.measured is None:
        return [(each.planned, BarPlace(row, 0.7))]
    return [(each.planned, BarPlace(row - 0.2, 0.36)), (each.measured, BarPlace(row + 0.2, 0.36, HATCH))]


def _short(text: str | None) -> str:
    """Return a reason as far as it fits."""
    return "" if text is None else text if len(text) < 60 else f"{text[:58]}…"


def _draw_memory(
    axes: Axes, figures: Figures, bar: BarPlace, colour_of: dict[str, picture.Colour], unit: float, mark: str
) -> None:
    left = 0.0
    for purpose, colour in colour_of.items():
        width = figures.memory.get(purpose, 0) / unit
        axes.barh(
            bar.middle, width, left=left, height=bar.height, color=colour, hatch=bar.hatch, edgecolor="white"
        )
        left += width
    axes.text(left, bar.middle, f" {left:.3g}{mark}", va="center", fontsize=7)


def _draw_bar(axes: Axes, value: float, bar: BarPlace, colour: picture.Colour, more: str) -> None:
    """Draw a bar with its figure, and more words."""
    axes.barh(bar.middle, value, height=bar.height, color=colour, hatch=bar.hatch, edgecolor="white")
    axes.text(value, bar.middle, f" {value:.3g}{more}", va="center", fontsize=7)
