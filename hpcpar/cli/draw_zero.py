"""`hpcpar draw zero --parameters 7.5e9 --ranks 64`: what each stage of ZeRO leaves on a rank; its traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import click

from hpcpar.cli import picture
from hpcpar.planner.memory import STATE, StateWidths, model_state_nbytes
from hpcpar.planner.shapes import ITEMSIZE
from hpcpar.units import GiB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OPTIMIZERS = {"adamw": 2, "sgd": 1}
"""Values of state for each parameter."""


class ZeroStageMemory(NamedTuple):
    """Bytes on each rank in a stage of ZeRO, and its traffic.

    nbytes    by part of the model state
    traffic   parameters that a rank sends in a step, over (p - 1)/p
    """

    stage: int
    nbytes: Mapping[str, int]
    traffic: int


def stages(
    parameters: int, ranks: int, *, precision: str, optimizer: str, microbatches: int
) -> list[ZeroStageMemory]:
    """Compute all stages, by the planner's formulas."""
    widths = StateWidths.of(precision, moments=OPTIMIZERS[optimizer])
    traffic = (2, 2, microbatches + 1, 3 * microbatches)
    return [
        ZeroStageMemory(
            stage,
            model_state_nbytes(parameters, widths, stage=stage, ranks=ranks),
            traffic[stage] * parameters,
        )
        for stage in range(4)
    ]


def number(context: click.Context, parameter: click.Parameter, value: str) -> int:
    """Read 7.5e9, 7.5B or 7500M."""
    text = value.strip().lower()
    scale = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}.get(text[-1:], 1.0)
    try:
        found = round(float(text[:-1] if scale != 1 else text) * scale)
    except (ValueError, OverflowError) as error:
        raise click.BadParameter(f"{value!r}: give a number, as in 7.5e9 or 7.5B") from error
    if found < 1:
        raise click.BadParameter(f"{value!r}: give at least 1")
    return found


@click.command()
@click.option("--parameters", default="7.5B", callback=number, help="Of the model: 7.5e9 or 7.5B.")
@click.option("--ranks", type=click.IntRange(min=1), default=64, help="Of data parallelism.")
@click.option(
    "--precision",
    type=click.Choice(["bfloat16", "float16", "float32", "float64"]),
    default="bfloat16",
    help="Of parameters and gradients; 16-bit types have float32 master weights.",
)
@click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), default="adamw", help="SGD with momentum.")
@click.option("--microbatches", type=click.IntRange(min=1), default=1, help="Of a step, for the traffic.")
@picture.output_options()
def zero(
    parameters: int,
    ranks: int,
    precision: str,
    optimizer: str,
    microbatches: int,
    output: picture.Output | None,
) -> None:
    """Draw the stages of ZeRO: memory of the model state on each rank, and traffic of a step.

    Activations come on top (`hpcpar draw activations`). Source: Rajbhandari et al. 2020, arXiv 1910.02054,
    figure 1.
    """
    found = stages(parameters, ranks, precision=precision, optimizer=optimizer, microbatches=microbatches)
    title = f"{parameters:,} parameters in {precision}, {optimizer}, {ranks} ranks"
    click.echo(f"{title}\n\n{table(found, ranks, precision)}")
    picture.write(output, lambda: figure_of(found, title))


def table(found: Sequence[ZeroStageMemory], ranks: int, precision: str) -> str:
    """Tabulate GiB on a rank by part, and the bytes that a rank sends in a step."""
    lines = [f"{'GiB on a rank':<15}" + "".join(f"{part:>17}" for part in STATE) + f"{'sum':>10}{'sent':>12}"]
    for stage, nbytes, traffic in found:
        sent = traffic * ITEMSIZE[precision] * (ranks - 1) / ranks / GiB
        parts = "".join(f"{nbytes[part] / GiB:>17.2f}" for part in STATE)
        name = f"stage {stage}" if stage else "no ZeRO"
        lines.append(f"{name:<15}{parts}{sum(nbytes.values()) / GiB:>10.2f}{sent:>12.2f}")
    return "\n".join([*lines, "", "sent: by each rank in a step"])


def figure_of(found: Sequence[ZeroStageMemory], title: str) -> Figure:
    """Return a figure with a bar for each stage."""
    figure = picture.new_figure(2.8)
    axes = figure.subplots()
    left = [0.0] * len(found)
    for part, colour in zip(STATE, picture.STATE_COLOURS, strict=True):
        widths = [each.nbytes[part] / GiB for each in found]
        axes.barh(range(len(found)), widths, left=left, color=colour, label=part, height=0.7)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    for place, total in enumerate(left):
        axes.text(total, place, f" {total:.3g} GiB", va="center", fontsize=8)
    names = [f"ZeRO stage {each.stage}" if each.stage else "no ZeRO" for each in found]
    picture.tidy_rows(axes, names)
    axes.set_xlim(0, max(left) * 1.12)
    axes.set_xlabel("GiB of model state on each rank")
    axes.set_title(title, fontsize=9, loc="left")
    axes.legend(fontsize=8, loc="lower right")
    return figure
