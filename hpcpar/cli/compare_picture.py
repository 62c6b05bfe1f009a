"""The picture of `hpcpar compare`: losses of runs over steps, and over the time that they trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpcpar.cli.picture import new_figure, rank_colour
from hpcpar.training.compared_runs import ReadRun
from hpcpar.training.metrics import running_mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DECAY = 0.9
"""Of the running mean, the thick line."""

LONG_S = 300.0
"""Training that lasted longer has an axis in minutes."""


def draw(runs: Sequence[ReadRun]) -> Figure:
    """Return a figure of losses over steps, and over time.

    thin     each step's loss; thick: its running mean; points: held-out losses
    """
    figure = new_figure(4.5)
    over_steps, over_time = figure.subplots(1, 2, sharey=True)
    longest_s = max((ends[-1] for run in runs if (ends := run.seconds())), default=0.0)
    unit_s, unit = (60.0, "min") if longest_s > LONG_S else (1.0, "s")
    for number, run in enumerate(runs):
        colour = rank_colour(number)
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
