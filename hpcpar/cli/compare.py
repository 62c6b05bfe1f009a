"""`hpcpar compare RUN RUN …`: runs of the trainer side by side, as a table, JSON or loss curves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from hpcpar.cli import picture
from hpcpar.errors import HpcparError
from hpcpar.units import format_duration, format_nbytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hpcpar.training.compared_runs import ReadRun

NOT_SAID = "-"


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of the table.")
@picture.output_options("Loss curves (.svg, .png, .pdf).")
def compare(runs: tuple[Path, ...], as_json: bool, output: picture.Output | None) -> None:
    """Compare output directories of `hpcpar train`: what differs between the runs, and what came of it.

    Shown are the keys of the configuration and the versions that differ, losses, the time of a step (median
    and quartiles), tokens/s, the memory of the fullest rank, and the bytes that rank 0 sent in a step.
    """
    from hpcpar.cli.console import own_console
    from hpcpar.training import compared_runs

    try:
        read = [compared_runs.read_run(run) for run in runs]
        found = compared_runs.compare(read)
    except HpcparError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        own_console().print(table(found), crop=False)
    picture.write(output, lambda: figure_of(read), err=as_json)


def table(found: dict[str, Any]) -> Table:
    """Return facts that differ and results as a table with a column for each run."""
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    shown.add_column("", overflow="fold")
    for run in found["runs"]:
        shown.add_column(run, overflow="fold", justify="right")
    for key, values in found["differs"].items():
        shown.add_row(key, *(NOT_SAID if value is None else _plain(value) for value in values))
    if len(found["runs"]) > 1:
        shown.add_row("" if found["differs"] else "nothing differs")
    for name, texts in _results(found["results"]):
        if set(texts) != {NOT_SAID}:
            shown.add_row(name, *texts)
    return shown


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _results(results: dict[str, list[Any]]) -> Iterator[tuple[str, list[str]]]:
    """Yield the results for people, with units."""
    for name, values in results.items():
        label = LABELS.get(name, name.replace("nbytes_sent,", "sent in a step,"))
        yield label, [NOT_SAID if value is None else _shown(name, value) for value in values]


LABELS = {
    "after step": "  after step",
    "step_s": "step, median",
    "step_s, quartiles": "  quartiles",
    "tokens_per_s": "tokens/s",
    "mfu": "MFU",
    "peak_nbytes": "memory, fullest rank",
}


def _shown(name: str, value: Any) -> str:
    if name.endswith("loss"):
        return f"{value:.4f}"
    if name == "step_s":
        return format_duration(value)
    if name == "step_s, quartiles":
        return " to ".join(map(format_duration, value))
    if "nbytes" in name:
        return format_nbytes(value)
    if name == "mfu":
        return f"{value:.1%}"
    return f"{value:,.0f}" if isinstance(value, (int, float)) else str(value)


# --- the picture ----------------------------------------------------------------------------------


DECAY = 0.9
"""Of the running mean, the thick line."""

LONG_S = 300.0
"""Training that lasted longer has an axis in minutes."""


def figure_of(runs: Sequence[ReadRun]) -> Figure:
    """Return a figure of losses over steps, and over time.

    thin     each step's loss; thick: its running mean; points: held-out losses
    """
    from hpcpar.training.metrics import running_mean

    figure = picture.new_figure(4.5)
    over_steps, over_time = figure.subplots(1, 2, sharey=True)
    longest_s = max((ends[-1] for run in runs if (ends := run.seconds())), default=0.0)
    unit_s, unit = (60.0, "min") if longest_s > LONG_S else (1.0, "s")
    for number, run in enumerate(runs):
        colour = picture.rank_colour(number)
        times = {
            step["step"] + 1: end_s / unit_s for step, end_s in zip(run.steps, run.seconds(), strict=True)
        }
        losses = {step["step"] + 1: step["loss"] for step in run.steps if step["loss"] is not None}
        held_out = {each["step"]: each["held_out_loss"] for each in run.held_out}
        for axes, place in ((over_steps, {step: float(step) for step in times}), (over_time, times)):
            x = [place[step] for step in losses]
            axes.plot(x, list(losses.values()), color=colour, alpha=0.25, linewidth=0.8)
            axes.plot(x, running_mean(list(losses.values()), DECAY), color=colour, label=str(run.directory))
            evaluated = [step for step in held_out if step in place]
            axes.plot(
                [place[step] for step in evaluated], [held_out[step] for step in evaluated], "o", color=colour
            )
    over_steps.set(xlabel="step", ylabel="loss (nats per token); points: held out")
    over_time.set_xlabel(f"training time ({unit})")
    for axes in (over_steps, over_time):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    return figure
