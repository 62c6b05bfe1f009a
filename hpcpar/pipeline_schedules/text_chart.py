"""Draw a timetable as a text chart: one line for each rank, time from left to right, to scale.

rank 0   F0─F1─······B0════F2─B1════···B2════
rank 1      F0─B0════F1─B1════F2─B2════

F1─     forward of microbatch 1; f1─ through the rank's second stage (fourth, sixth ...)
B1════  backward: whole, or the input's gradient alone where a W follows
W1~     the weights' gradients
···     idle, between a rank's first action and its last
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hpcpar.pipeline_schedules.action import Action, Kind
from hpcpar.pipeline_schedules.timetable import Timed, Timetable

FILL: dict[Kind, str] = {"F": "─", "B": "═", "W": "~"}

IDLE = "·"

Paint = Callable[[Kind, str], str]


def text_chart(
    timetable: Timetable,
    *,
    width: int = 160,
    peaks: Sequence[float] | None = None,
    paint: Paint | None = None,
) -> str:
    """Draw the chart, and below it bubble rate, cost and, if given, peaks of memory.

    width    columns of a line. Where they do not suffice, a microbatch's number loses its first digits, then
             all; an action shorter than half a column may vanish
    peaks    chunks of each rank; a chunk is one microbatch's activations of one stage
    paint    (kind, text of a cell) -> coloured text
    """
    names = [f"rank {rank}   " for rank in range(len(timetable.rows))]
    gutter = max(map(len, names), default=0)
    per_second = _columns_per_second(timetable, max(1, width - gutter))
    lines = [
        f"{name:<{gutter}}{_line(row, timetable.origin_s, per_second, paint)}".rstrip()
        for name, row in zip(names, timetable.rows, strict=True)
    ]
    return "\n".join([*lines, "", *_footer(timetable, per_second, peaks)]) + "\n"


def _columns_per_second(timetable: Timetable, room: int) -> float:
    """Choose the scale: the shortest action gets whole columns, one more than its label needs if they fit."""
    lasting = [each for row in timetable.rows for each in row if each.seconds > 0]
    if not lasting:
        return 0.0
    shortest_s = min(each.seconds for each in lasting)
    wanted = 2 + max(len(str(each.action.microbatch)) for each in lasting)
    fitting = math.floor(room * shortest_s / timetable.seconds + 1e-9)
    return min(wanted, fitting) / shortest_s if fitting else room / timetable.seconds


def _line(row: Sequence[Timed], origin_s: float, per_second: float, paint: Paint | None) -> str:
    stages = sorted({each.action.stage for each in row})
    line = ""
    at = 0
    for timed in row:
        start, end = (math.floor((s - origin_s) * per_second + 0.5) for s in (timed.start_s, timed.end_s))
        start = max(start, at)  # an action that overlaps the one before begins where that ends
        text = _cell(timed.action, stages.index(timed.action.stage), max(0, end - start))
        line += (IDLE if line else " ") * (start - at) + (paint(timed.action.kind, text) if paint else text)
        at = max(start, end)
    return line


def _cell(action: Action, place: int, columns: int) -> str:
    letter = action.kind.lower() if place % 2 else action.kind
    digits = str(action.microbatch)
    shown = digits[max(0, len(digits) - columns + 1) :]
    return f"{letter}{shown}".ljust(columns, FILL[action.kind])[:columns]


def _footer(timetable: Timetable, per_second: float, peaks: Sequence[float] | None) -> list[str]:
    rate = f"bubble rate {timetable.bubble_rate:.2%}, cost {timetable.cost_s:.4g} s"
    if per_second:
        rate += f", a column {1 / per_second:.4g} s"
    if peaks is None:
        return [rate]
    return [rate, f"chunks alive at most, by rank: {'  '.join(f'{peak:g}' for peak in peaks)}"]
