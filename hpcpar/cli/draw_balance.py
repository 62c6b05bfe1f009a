"""`hpcpar draw balance runs/a runs/b`: how evenly runs loaded their experts, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import click

from hpcpar.cli import balance_picture, picture
from hpcpar.errors import ConfigError, HpcparError


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
    try:
        found = [read(run) for run in runs]
        click.echo(table(found, after))
    except HpcparError as error:
        raise click.ClickException(str(error)) from error
    picture.write(output, lambda: balance_picture.draw(found))


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
