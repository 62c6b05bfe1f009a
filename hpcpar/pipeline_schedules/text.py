"""Schedules as text, in and out: the house's form, and that of torch's schedule runtime.

    house   # one line for each rank; - is an idle slot; after # all is comment
            0F0 0F1 0B0 0F2 0B1 0B2
            -   1F0 1B0 1F1 1B1 1F2 1B2

    torch   0F0,0F1,,0B0,0F2,0B1,0B2
            ,1F0,1I0,1W0,1F1,(1F2;1B1)OVERLAP_F_B,1B2

The letters differ: torch writes I for the part of the backward that gives the input's gradient, which is
B here where a W follows, and B always for the whole of it. A pair that torch overlaps is read as its two
actions in their order. What torch adds when it lowers a schedule (SEND_F, RECV_B, UNSHARD, REDUCE_GRAD and
their like) follows from the actions, so it is skipped. Idle slots are, too: what waits follows as well.

source   torch.distributed.pipelining.schedules: `_Action.from_str`, `_dump_csv`, `_load_csv`
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from hpcpar.errors import ScheduleError
from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.schedule import Schedule

Form = Literal["house", "torch"]

IDLE = "-"

_HOUSE = re.compile(r"(\d+)([FBW])(\d+)")
_TORCH = re.compile(r"(\d+)([FBIW])(\d+)")
_LOWERED = re.compile(r"\d+((SEND|RECV|WAIT_SEND)_[FB]\d+|UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD)")
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")

_EXPECTED: dict[Form, str] = {
    "house": f"an action such as 2F0, 2B0 or 2W0 (stage, kind, microbatch), or {IDLE} for an idle slot",
    "torch": "an action of torch's schedules such as 2F0, 2B0, 2I0 or 2W0, or an empty cell",
}


class _Word(NamedTuple):
    """A piece of the text and where it begins, counted from 1."""

    text: str
    line: int
    column: int


class _Read(NamedTuple):
    action: Action
    letter: str
    word: _Word


def read(path: Path) -> Schedule:
    """The schedule of a file, in either form, named as the file is.

    errors   ScheduleError that names file, line and column, what was expected and what is there
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{path} is no text: byte {error.start} is not UTF-8") from error
    form: Form | None = "torch" if path.suffix == ".csv" else None
    return parse(text, name=path.stem, source=str(path), form=form)


def parse(text: str, *, name: str = "", source: str = "text", form: Form | None = None) -> Schedule:
    """The schedule that is written so.

    source   what errors call the text
    form     torch's where there is a comma, unless it is given
    errors   ScheduleError as for `read`
    """
    lines = [line.partition("#")[0] for line in text.splitlines()]
    if form is None:
        form = "torch" if any("," in line for line in lines) else "house"
    rows = [
        [
            _understood(word, form, source)
            for word in _words(line, number, form)
            if not (form == "torch" and _LOWERED.fullmatch(word.text))
        ]
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not rows:
        raise ScheduleError(f"{source}: expected a line of actions for each rank, found none")
    _check_places(rows, source)
    if form == "torch":
        _check_halves(rows, source)
    return Schedule(tuple(tuple(found.action for found in row) for row in rows), name)


def write(schedule: Schedule, path: Path) -> None:
    """Write it into a file: in torch's form where the name ends in .csv, else in the house's."""
    path.write_text(format(schedule, "torch" if path.suffix == ".csv" else "house"), encoding="utf-8")


def format(schedule: Schedule, form: Form = "house") -> str:
    """The text from which `parse` reads the same schedule."""
    if form == "torch":
        # torch takes a line without a cell for a rank too, but other readers of CSV skip it.
        lines = [",".join(_letter_of_torch(schedule, each) for each in row) or "," for row in schedule.rows]
    else:
        lines = [" ".join(map(str, row)) or IDLE for row in schedule.rows]
        if schedule.name:
            lines.insert(0, f"# {schedule.name}")
    return "\n".join(lines) + "\n"


def _letter_of_torch(schedule: Schedule, action: Action) -> str:
    stage, kind, microbatch = action
    half = kind == "B" and schedule.is_split(stage, microbatch)
    return f"{stage}{'I' if half else kind}{microbatch}"


def _words(line: str, number: int, form: Form) -> Iterator[_Word]:
    """What stands in a line, without what is idle."""
    if form == "house":
        for found in re.finditer(r"\S+", line):
            if found[0] != IDLE:
                yield _Word(found[0], number, found.start() + 1)
        return
    for cell in re.finditer(r"[^,]+", line):
        inside = cell[0].strip(' \t"')
        start = cell.start() + cell[0].find(inside)
        pair = _OVERLAPPED.fullmatch(inside)
        if pair is None:
            if inside:
                yield _Word(inside, number, start + 1)
            continue
        for half in re.finditer(r"[^;\s]+", pair[1]):
            yield _Word(half[0], number, start + 1 + pair.start(1) + half.start())


def _understood(word: _Word, form: Form, source: str) -> _Read:
    found = (_HOUSE if form == "house" else _TORCH).fullmatch(word.text)
    if found is None:
        hint = ""
        if form == "house" and _TORCH.fullmatch(word.text):
            hint = ": I belongs to torch's form, which has commas; here B is that part where a W follows"
        raise _error(source, word, f"expected {_EXPECTED[form]}, found {word.text!r}{hint}")
    stage, letter, microbatch = found.groups()
    kind = "B" if letter == "I" else letter
    return _Read(Action.parse(f"{stage}{kind}{microbatch}"), letter, word)


def _check_places(rows: Sequence[Sequence[_Read]], source: str) -> None:
    """No action twice, and no stage on two ranks, where both places can still be named."""
    first: dict[Action, _Word] = {}
    home: dict[int, tuple[int, _Word]] = {}
    for rank, row in enumerate(rows):
        for action, _, word in row:
            if action in first:
                raise _error(
                    source, word, f"expected {word.text} once, found it again after {_at(first[action])}"
                )
            first[action] = word
            owner, place = home.setdefault(action.stage, (rank, word))
            if owner != rank:
                raise _error(
                    source,
                    word,
                    f"expected all actions of stage {action.stage} in the line of rank {owner}, where "
                    f"{_at(place)} has {place.text}; found {word.text} in that of rank {rank}",
                )


def _check_halves(rows: Sequence[Sequence[_Read]], source: str) -> None:
    """torch's I and W come in pairs: without its W an I would be read as a whole backward."""
    for row in rows:
        halves = {(letter, action.stage, action.microbatch) for action, letter, _ in row}
        for action, letter, word in row:
            other = {"I": "W", "W": "I"}.get(letter)
            if other and (other, action.stage, action.microbatch) not in halves:
                missing = f"{action.stage}{other}{action.microbatch}"
                raise _error(source, word, f"expected {missing} in the line of {word.text}, found none")


def _at(word: _Word) -> str:
    return f"{word.line}:{word.column}"


def _error(source: str, word: _Word, what: str) -> ScheduleError:
    return ScheduleError(f"{source}:{_at(word)}: {what}")
