"""`hpcpar draw balance runs/a runs/b`: how evenly runs loaded their experts, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import click

from hpcpar.cli import picture
from hpcpar.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class RunBalance(NamedTuple):
    """Loads of a run's experts: the fullest expert's over the mean, 1 where all have the same.

    layers          numbers of the layers with experts
    max_over_mean   [steps][layers]
    """

    name: str
    layers: Sequence[int]
    steps: Sequence[int]
    max_over_mean: Sequence[Sequence[float]]

    def of_layer(self, place: int, after: int = 0) -> list[float]:
        """Return the loads of the layer in this place of `layers`, from step `after` on."""
        pairs = zip(self.steps, self.max_over_mean, strict=True)
        return [of_step[place] for step, of_step in pairs if step >= after]


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--after", type=click.IntRange(min=0), default=0, help="Step from which on the table counts.")
@picture.output_options()
def balance(runs: tuple[Path, ...], after: int, output: picture.Output | None) -> None:
    """Draw the balance of experts in RUNS, output directories of `hpcpar train`.

    The load of a layer's fullest expert over the mean load, of all tokens of a step: the factor by which the
    rank that has it lags behind.
    """
    found = [read(run) for run in runs]
    click.echo(table(found, after))
    picture.write(output, lambda: figure_of(found))


def read(run: Path) -> RunBalance:
    """Read a run's metrics; ConfigError where it has no steps with experts."""
    from hpcpar.training.metrics import records_of

    path = run / "metrics.jsonl"
    records = [record for record in records_of(path) if "experts" in record] if path.is_file() else []
    if not records:
        raise ConfigError(
            f"{path} has no steps of a model with experts; name the output directory of a run with experts"
        )
    experts = [record["experts"] for record in records]
    return RunBalance(
        run.name,
        experts[0]["layer"],
        [record["step"] for record in records],
        [of_step["max_over_mean"] for of_step in experts],
    )


def table(found: Sequence[RunBalance], after: int) -> str:
    """Return a line for each run and layer; ConfigError for a run without steps from `after` on."""
    lines = [f"{'run':<20}{'layer':>6}{'first step':>12}{'median':>9}{'worst':>9}   of steps from {after} on"]
    for run in found:
        for place, layer in enumerate(run.layers):
            late = run.of_layer(place, after)
            if not late:
                raise ConfigError(
                    f"--after {after}, but {run.name} has steps up to {run.steps[-1]}; give an earlier one"
                )
            first = run.of_layer(place)[0]
            lines.append(f"{run.name:<20}{layer:>6}{first:>12.2f}{median(late):>9.2f}{max(late):>9.2f}")
    return "\n".join(lines)


# --- the picture ----------------------------------------------------------------------------------


LIMIT = 1.5
"""Load over the mean that is drawn as a line: with more, a rank lags by half a step."""


def figure_of(found: Sequence[RunBalance]) -> Figure:
    """Return a figure with a panel for each run."""
    figure = picture.new_figure(3.6)
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, run in zip(panels, found, strict=True):
        _panel(axes, run)
    panels[0].set_ylabel("load of the fullest expert / mean load")
    return figure


def _panel(axes: Axes, run: RunBalance) -> None:
    for place, layer in enumerate(run.layers):
        axes.plot(run.steps, run.of_layer(place), linewidth=0.9, label=f"layer {layer}")
    axes.axhline(LIMIT, color="black", linestyle="--", linewidth=0.8)
    axes.set_title(run.name, fontsize=10)
    axes.set_xlabel("step")
    axes.set_ylim(bottom=1.0)
    if len(run.layers) <= 8:
        axes.legend(fontsize=7, loc="upper right")
