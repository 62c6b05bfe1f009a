"""`hpcpar draw overlap runs/traced`: communication that a run hid behind its computing, and what it saved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from hpcpar.cli import picture
from hpcpar.cli.run_timeline import Event, bounds_of_step, events_of, kind_of, step_of_run
from hpcpar.units import MiB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Interval = tuple[float, float]


class TimeSpan(NamedTuple):
    """Something that took time; seconds from the start of the timeline."""

    name: str
    start_s: float
    stop_s: float
    nbytes: int = 0


class RankStep(NamedTuple):
    """One step of one rank.

    compute     forward, backward, optimizer, …
    in_flight   communication, from its start to its end
    standing    when the program waited for communication and did nothing else
    waits       all such times of the rank: the next step waits for what is in flight at this one's end
    """

    rank: int
    compute: Sequence[TimeSpan]
    in_flight: Sequence[TimeSpan]
    standing: Sequence[TimeSpan]
    waits: Sequence[Interval]

    @property
    def start_s(self) -> float:
        return min(span.start_s for span in self.compute)

    @property
    def seconds(self) -> float:
        return max(span.stop_s for span in self.compute) - self.start_s

    @property
    def in_flight_s(self) -> float:
        return seconds_of(union(self.in_flight))

    @property
    def standing_s(self) -> float:
        return seconds_of(union(self.standing))

    @property
    def hidden_s(self) -> float:
        """Time of communication under way in which the program went on."""
        return self.in_flight_s - seconds_of(common(union(self.in_flight), self.waits))


def union(spans: Iterable[TimeSpan]) -> list[Interval]:
    """Return the times that at least one span covers, in order, none touching the next."""
    found: list[Interval] = []
    for span in sorted(spans, key=lambda each: each.start_s):
        if found and span.start_s <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], span.stop_s)
        else:
            found.append((span.start_s, span.stop_s))
    return found


def common(these: Sequence[Interval], those: Sequence[Interval]) -> list[Interval]:
    """Return the times that are in both."""
    pairs = [(max(a, c), min(b, d)) for a, b in these for c, d in those]
    return [(start, stop) for start, stop in pairs if start < stop]


def seconds_of(intervals: Iterable[Interval]) -> float:
    return sum(stop - start for start, stop in intervals)


@click.command()
@step_of_run
@picture.output_options()
def overlap(run: Path, step: int, output: picture.Output | None) -> None:
    """Draw how RUN hid communication behind computing: an output directory of `hpcpar train`, or its file.

    The run must have recorded its first steps: `hpcpar train … output.timeline_steps=3`. Communication is in
    flight from its start to its end, and hidden while the program does something else meanwhile. On CPUs the
    same cores do both: what is hidden is waiting, and not the copies and sums.
    """
    ranks = read(run, step)
    click.echo(table(ranks, step))
    picture.write(output, lambda: figure_of(ranks, step))


def read(run: Path, step: int) -> list[RankStep]:
    """Read a step of each rank; ConfigError for a file that is no timeline, or has fewer steps."""
    return [step_of(rank, events, step) for rank, events in events_of(run).items()]


def step_of(rank: int, events: Sequence[Event], step: int) -> RankStep:
    """Return a step of one rank; ConfigError where it has fewer steps."""
    spans: dict[str, list[TimeSpan]] = defaultdict(list)
    for event in events:
        if event["ph"] != "X":
            continue
        start_s, arguments = event["ts"] / 1e6, event.get("args", {})
        span = TimeSpan(event["name"], start_s, start_s + event["dur"] / 1e6, arguments.get("nbytes_sent", 0))
        spans[event["cat"]].append(span)
        if arguments.get("blocking") or event["name"].startswith("wait "):
            spans["waiting"].append(span)
    first_s, last_s = bounds_of_step(events, step)
    compute, in_flight, standing = (
        [span for span in spans[kind] if first_s <= span.start_s < last_s]
        for kind in ("compute", "communication", "waiting")
    )
    return RankStep(rank, compute, in_flight, standing, union(spans["waiting"]))


def one_by_one_s(ranks: Sequence[RankStep], rank: RankStep) -> float:
    """Return what the step would take on a rank if it waited for each communication before it goes on.

    A collective then takes as long as on the rank that came to it last, and waited for nobody.
    """
    return rank.seconds - rank.standing_s + sum(durations(ranks, rank))


def durations(ranks: Sequence[RankStep], rank: RankStep) -> list[float]:
    """Return the shortest time of each of a rank's communications on any rank that made as many."""
    seconds: list[float] = []
    for name in dict.fromkeys(span.name for span in rank.in_flight):
        of_ranks = [[s.stop_s - s.start_s for s in each.in_flight if s.name == name] for each in ranks]
        own = [s.stop_s - s.start_s for s in rank.in_flight if s.name == name]
        alike = [each for each in of_ranks if len(each) == len(own)]
        seconds += [min(of_call) for of_call in zip(*alike, strict=True)]
    return seconds


def table(ranks: Sequence[RankStep], step: int) -> str:
    """Tabulate a step by rank, and its communication by name."""
    head = f"step {step}   {'step':>10}{'in flight':>12}{'hidden':>10}{'stood still':>13}{'one by one':>12}"
    lines = [head]
    for each in ranks:
        share = f"{each.hidden_s / each.in_flight_s:.0%}" if each.in_flight_s else "-"
        lines.append(
            f"rank {each.rank:<4}{each.seconds * 1e3:>8.1f} ms{each.in_flight_s * 1e3:>9.1f} ms{share:>10}"
            f"{each.standing_s * 1e3:>10.1f} ms{one_by_one_s(ranks, each) * 1e3:>9.1f} ms"
        )
    lines += [
        "",
        f"{'of rank ' + str(ranks[0].rank):<34}{'calls':>6}{'sent':>12}{'in flight':>12}{'hidden':>10}",
    ]
    by_name: dict[str, list[TimeSpan]] = defaultdict(list)
    for span in ranks[0].in_flight:
        by_name[span.name].append(span)
    for name, spans in sorted(by_name.items()):
        covered = union(spans)
        seconds = seconds_of(covered)
        hidden = 1 - seconds_of(common(covered, ranks[0].waits)) / seconds if seconds else 0.0
        sent = sum(span.nbytes for span in spans) / MiB
        lines.append(f"{name:<34}{len(spans):>6}{sent:>8.2f} MiB{seconds * 1e3:>9.1f} ms{hidden:>10.0%}")
    lines += ["", "one by one: what the step would take if each communication were awaited at once"]
    return "\n".join(lines)


# --- the picture ----------------------------------------------------------------------------------


COLOUR_OF = {"forward": picture.FORWARD, "backward": picture.BACKWARD, "optimizer": picture.WEIGHTS}
LARGEST = 8
"""Ranks that are drawn."""


def part_of(span: TimeSpan) -> str:
    """Return the name of a span's colour; "" where it has none."""
    name = {"F": "forward", "B": "backward", "W": "backward"}.get(kind_of(span.name) or "", span.name)
    return name if name in COLOUR_OF else ""


def figure_of(ranks: Sequence[RankStep], step: int) -> Figure:
    """Return a figure of the step as it was, over the step with one thing after another.

    as it was      rank 0   computing       |forward|backward     |optimizer|
                            communication          |grad||grad|
    one by one     rank 0                   |forward|backward|grad|grad|optimizer|
    """
    shown = ranks[:LARGEST]
    figure = picture.new_figure(1.6 + 0.62 * len(shown) * 1.5)
    was, would = figure.subplots(2, 1, sharex=True, height_ratios=(2 * len(shown), len(shown)))
    origin_s = min(each.start_s for each in shown)
    for place, each in enumerate(shown):
        bars = [(2 * place, span, COLOUR_OF[part_of(span)]) for span in each.compute if part_of(span)]
        bars += [(2 * place, span, picture.IDLE) for span in each.standing]
        bars += [(2 * place + 1, span, picture.COMMUNICATION) for span in each.in_flight]
        for row, span, colour in bars:
            picture.draw_spans(was, row, [(span.start_s - origin_s, span.stop_s - origin_s)], colour)
        _one_by_one(would, place, each, sum(durations(ranks, each)))
    names = [f"rank {each.rank} {what}" for each in shown for what in ("computing", "communication")]
    saved_s = max(one_by_one_s(ranks, each) for each in shown) - max(each.seconds for each in shown)
    for axes, labels, title in (
        (was, names, f"step {step} as it was"),
        (would, [f"rank {each.rank}" for each in shown], f"one by one: {saved_s * 1e3:.1f} ms longer"),
    ):
        picture.tidy_rows(axes, labels)
        axes.set_title(title, fontsize=9, loc="left", pad=3)
    would.set_xlabel("ms")
    colours = {**COLOUR_OF, "communication": picture.COMMUNICATION, "stands still": picture.IDLE}
    picture.legend(figure, picture.patches(colours))
    return figure


def _one_by_one(axes: Axes, place: int, step: RankStep, communication_s: float) -> None:
    """Draw computing without its waits, and all communication between backward and optimizer."""
    standing = union(step.standing)

    def own_s(spans: Sequence[TimeSpan]) -> float:
        covered = union(spans)
        return seconds_of(covered) - seconds_of(common(covered, standing))

    at_s = 0.0
    rest = [span for span in step.compute if not part_of(span)]
    of = {name: [span for span in step.compute if part_of(span) == name] for name in COLOUR_OF}
    parts = [
        (own_s(rest), picture.IDLE),
        (own_s(of["forward"]), COLOUR_OF["forward"]),
        (own_s(of["backward"]), COLOUR_OF["backward"]),
        (communication_s, picture.COMMUNICATION),
        (own_s(of["optimizer"]), COLOUR_OF["optimizer"]),
    ]
    for seconds, colour in parts:
        picture.draw_spans(axes, place, [(at_s, at_s + seconds)], colour)
        at_s += seconds
