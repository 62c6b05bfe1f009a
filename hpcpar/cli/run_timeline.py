"""A run's timeline.json as the drawings of a step read it: events by rank, and the bounds of a step."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from hpcpar.errors import ConfigError

Event = dict[str, Any]
"""An event of the file: ph is X for a span and C for a counter; ts and dur are in microseconds."""

ACTION = re.compile(r"\d+([FBW])\d+")
"""Name of a pipeline's action in a timeline: stage, kind, microbatch."""

FIRST_OF_STEP, LAST_OF_STEP = "data", "optimizer"


def events_of(run: Path) -> dict[int, list[Event]]:
    """Read spans and counters by rank, from a run's output directory or its file.

    errors   ConfigError for a file that is no timeline
    """
    path = run / "timeline.json" if run.is_dir() else run
    try:
        of_rank: dict[int, list[Event]] = defaultdict(list)
        for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]:
            if event["ph"] in "XC":
                of_rank[event["pid"]].append(event)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is no timeline of a run ({type(error).__name__}: {error}); record one by hpcpar train … "
            "output.timeline_steps=3"
        ) from error
    return dict(sorted(of_rank.items()))


def kind_of(name: str) -> str | None:
    """Return F, B or W of a forward, a backward or a pipeline's action; None for what is none of them."""
    action = ACTION.fullmatch(name)
    return {"forward": "F", "backward": "B"}.get(name) if action is None else action[1]


def bounds_of_step(events: Sequence[Event], step: int) -> tuple[float, float]:
    """Return the seconds at which a step of a rank begins and ends; ConfigError where it has fewer steps.

    What is between two steps is in neither: evaluation, sums of losses, a checkpoint.
    """
    compute = [event for event in events if event["ph"] == "X" and event["cat"] == "compute"]
    starts = sorted(event["ts"] / 1e6 for event in compute if event["name"] == FIRST_OF_STEP)
    ends = sorted((event["ts"] + event["dur"]) / 1e6 for event in compute if event["name"] == LAST_OF_STEP)
    steps = list(zip(starts, ends, strict=False))
    if step > len(steps):
        raise ConfigError(
            f"--step {step}, but the timeline has {len(steps)} steps; give one of them, or record more by "
            "output.timeline_steps"
        )
    return steps[step - 1]


Command = TypeVar("Command", bound=Callable[..., Any])


def step_of_run(command: Command) -> Command:
    """Give a command the argument RUN and the option --step."""
    step = click.option(
        "--step", type=click.IntRange(min=1), default=2, help="Of those recorded; 1 has all first calls."
    )
    return click.argument("run", type=click.Path(exists=True, path_type=Path))(step(command))


rank_of_run = click.option("--rank", type=click.IntRange(min=0), default=0, help="That is drawn.")

OfRank = TypeVar("OfRank")


def of_rank(found: Sequence[OfRank], rank: int) -> OfRank:
    """Return what is found of a rank; ConfigError where the run had fewer."""
    if rank >= len(found):
        raise ConfigError(f"--rank {rank}, but the run had ranks 0 to {len(found) - 1}")
    return found[rank]
