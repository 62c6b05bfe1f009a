"""The picture of `hpcpar draw overlap`: a step as it was, and the same work one after the other.

as it was      rank 0   computing       |forward|backward     |optimizer|
                        communication          |grad||grad|
one by one     rank 0                   |forward|backward|grad|grad|optimizer|
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpcpar.cli.picture import (
    BACKWARD,
    COMMUNICATION,
    FORWARD,
    IDLE,
    WEIGHTS,
    draw_spans,
    legend,
    new_figure,
    patches,
    tidy_rows,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hpcpar.cli.draw_overlap import RankStep, TimeSpan

COLOUR_OF = {"forward": FORWARD, "backward": BACKWARD, "optimizer": WEIGHTS}
LARGEST = 8
"""Ranks that are drawn."""


def draw(ranks: Sequence[RankStep], step: int) -> Figure:
    """Return a figure of the step as it was, over the step with one thing after another."""
    from hpcpar.cli.draw_overlap import durations, one_by_one_s

    shown = ranks[:LARGEST]
    figure = new_figure(1.6 + 0.62 * len(shown) * 1.5)
    was, would = figure.subplots(2, 1, sharex=True, height_ratios=(2 * len(shown), len(shown)))
    origin_s = min(each.start_s for each in shown)
    for place, each in enumerate(shown):
        for span in each.compute:
            if span.name in COLOUR_OF:
                draw_spans(
                    was, 2 * place, [(span.start_s - origin_s, span.stop_s - origin_s)], COLOUR_OF[span.name]
                )
        for span in each.standing:
            draw_spans(was, 2 * place, [(span.start_s - origin_s, span.stop_s - origin_s)], IDLE)
        for span in each.in_flight:
            draw_spans(was, 2 * place + 1, [(span.start_s - origin_s, span.stop_s - origin_s)], COMMUNICATION)
        _one_by_one(would, place, each, sum(durations(ranks, each)))
    names = [f"rank {each.rank} {what}" for each in shown for what in ("computing", "communication")]
    saved_s = max(one_by_one_s(ranks, each) for each in shown) - max(each.seconds for each in shown)
    for axes, labels, title in (
        (was, names, f"step {step} as it was"),
        (would, [f"rank {each.rank}" for each in shown], f"one by one: {saved_s * 1e3:.1f} ms longer"),
    ):
        tidy_rows(axes, labels)
        axes.set_title(title, fontsize=9, loc="left", pad=3)
    would.set_xlabel("ms")
    colours = {**COLOUR_OF, "communication": COMMUNICATION, "stands still": IDLE}
    legend(figure, patches(colours))
    return figure


def _one_by_one(axes: Axes, place: int, step: RankStep, communication_s: float) -> None:
    """Draw computing without its waits, and all communication between backward and optimizer."""
    from hpcpar.cli.draw_overlap import common, seconds_of, union

    standing = union(step.standing)

    def own_s(spans: Sequence[TimeSpan]) -> float:
        covered = union(spans)
        return seconds_of(covered) - seconds_of(common(covered, standing))

    at_s = 0.0
    rest = [span for span in step.compute if span.name not in COLOUR_OF]
    of = {name: [span for span in step.compute if span.name == name] for name in COLOUR_OF}
    parts = [
        (own_s(rest), IDLE),
        (own_s(of["forward"]), COLOUR_OF["forward"]),
        (own_s(of["backward"]), COLOUR_OF["backward"]),
        (communication_s, COMMUNICATION),
        (own_s(of["optimizer"]), COLOUR_OF["optimizer"]),
    ]
    for seconds, colour in parts:
        draw_spans(axes, place, [(at_s, at_s + seconds)], colour)
        at_s += seconds
