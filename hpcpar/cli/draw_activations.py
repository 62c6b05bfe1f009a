"""`hpcpar draw activations --tp 4`: what a layer keeps for backward, measured beside the paper's formulas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from hpcpar.cli import picture
from hpcpar.planner.activations import ACTIVATION_KINDS, LayerShape
from hpcpar.units import MiB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hpcpar.bench.layer_activations import MeasuredActivations

NUMBER = click.IntRange(min=1)


@click.command()
@click.option("--tp", type=NUMBER, default=4, help="Ranks that share a layer.")
@click.option("--sequence", type=NUMBER, default=512, help="Tokens of a sequence.")
@click.option("--batch", type=NUMBER, default=2, help="Sequences of a microbatch.")
@click.option("--hidden", type=NUMBER, default=512, help="Hidden size.")
@click.option("--heads", type=NUMBER, default=8, help="Attention heads.")
@picture.output_options()
def activations(
    tp: int, sequence: int, batch: int, hidden: int, heads: int, output: picture.Output | None
) -> None:
    """Show what a transformer layer keeps from forward to backward, on each rank.

    Without parallelism, with tensor parallelism (TP), with sequence parallelism beside it (SP), and with the
    attention core or the whole layer computed anew in backward. All ranks are threads of this process.
    """
    # torch is imported by this command alone.
    from hpcpar.bench import layer_activations as measuring

    shape = LayerShape(sequence, batch, hidden, heads)
    found = measuring.measure(shape, tp)
    title = measuring.title(shape, tp)
    click.echo(f"{title}\n\n{measuring.table(found)}")
    picture.write(output, lambda: figure_of(found, title))


# --- the picture ----------------------------------------------------------------------------------


COLOURS = {
    kind: picture.shade(picture.ACTIVATIONS, place, len(ACTIVATION_KINDS))
    for place, kind in enumerate(ACTIVATION_KINDS)
}

BAR_INCHES = 0.62
HEIGHT = 0.36


def figure_of(found: Sequence[MeasuredActivations], title: str) -> Figure:
    """Return a figure with two bars for each technique.

        none               ▐██████████████████████████████████████
                           ▐▒▒▒▒▒░░░░░░░░░░░░▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓
        TP+SP+selective    ▐█████
                           ▐▒▒░░░
        full               ▐██

    source   Korthikanti et al. 2022, arXiv 2205.05198, table 2 and figure 7
    """
    figure = picture.new_figure(1.5 + BAR_INCHES * len(found))
    axes = figure.add_subplot()
    for place, each in enumerate(found):
        _draw_bars(axes, place, each)
    axes.set_yticks(range(len(found)), [each.way for each in found])
    axes.invert_yaxis()
    axes.set_xlabel("MiB on each rank")
    axes.grid(axis="x", alpha=0.3)
    axes.margins(x=0.34)  # room for the formulas
    axes.set_xlim(left=0)
    axes.set_axisbelow(True)
    axes.set_title(title, fontsize=9)
    parts = {f"formula: {part}": colour for part, colour in COLOURS.items()}
    picture.legend(figure, picture.patches({"measured": picture.MEASURED} | parts), columns=3)
    return figure


def _draw_bars(axes: Axes, place: int, shown: MeasuredActivations) -> None:
    axes.barh(place - HEIGHT / 2, shown.nbytes / MiB, height=HEIGHT, color=picture.MEASURED)
    left = 0.0
    for part, nbytes in shown.parts.items():
        axes.barh(
            place + HEIGHT / 2,
            nbytes / MiB,
            left=left / MiB,
            height=HEIGHT,
            color=COLOURS[part],
            edgecolor="white",
            linewidth=0.6,
        )
        left += nbytes
    axes.text(
        max(shown.nbytes, shown.formula_nbytes) / MiB,
        place,
        f"  measured {shown.nbytes / MiB:.3g} MiB\n  {shown.formula} = {shown.formula_nbytes / MiB:.3g} MiB",
        va="center",
        fontsize=8,
    )
