"""Read and write schedules as text: in a plain format, and in that of torch's schedule runtime.

    plain   # one line for each rank; - is an idle slot; a comment goes from # to the end
            0F0 0F1 0B0 0F2 0B1 0B2
            -   1F0 1B0 1F1 1B1 1F2 1B2

    torch   0F0,0F1,,0B0,0F2,0B1,0B2
            ,1F0,1I0,1W0,1F1,(1F2;1B1)OVERLAP_F_B,1B2

The letters differ: torch writes I for the input's part of a split backward, which is B here where a W
follows; torch's B is always a whole backward. A pair that torch overlaps is read as its two actions in their
order. The actions of a lowered schedule (SEND_F, RECV_B, UNSHARD, REDUCE_GRAD and the like) follow from the
others, so they are skipped, and so are idle slots.

source   torch.distributed.pipelining.schedules: `_Action.from_str`, `_dump_csv`, `_load_csv`
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from hpcpar.errors import ScheduleError
from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule

TextFormat = Literal["plain", "torch"]

IDLE = "-"

_PLAIN = re.compile(r"(\d+)([FBW])(\d+)")
_TORCH = re.compile(r"(\d+)([FBIW])(\d+)")
_LOWERED = re.compile(r"\d+((SEND|RECV|WAIT_SEND)_[FB]\d+|UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD)")
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")

_EXPECTED: dict[TextFormat, str] = {
    "plain": f"an action such as 2F0, 2B0 or 2W0 (stage, kind, microbatch), or {IDLE} for an idle slot",
    "torch": "an action of torch's schedules such as 2F0, 2B0, 2I0 or 2W0, or an empty cell",
}


class _Word(NamedTuple):
    """Word of the text and its position, counted from 1."""

    text: str
    line: int
    column: int


class _Read(NamedTuple):
    action: Action
    letter: str
    word: _Word


def read(path: Path) -> Schedule:
    """Read a file in either format; the schedule is named as the file is.

    errors   ScheduleError that names file, line and column, what was expected and what was found
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{path} is no text: byte {error.start} is not UTF-8") from error
    form: TextFormat | None = "torch" if path.suffix == ".csv" else None
    return parse(text, name=path.stem, source=str(path), form=form)


def parse(text: str, *, name: str = "", source: str = "text", form: TextFormat | None = None) -> Schedule:
    """Parse a schedule.

    source   name of the text in errors
    form     format; None: torch's where there is a comma
    errors   ScheduleError as for `read`
    """
    lines = [line.partition("#")[0] for line in text.splitlines()]
    if form is None:
        form = "torch" if any("," in line for line in lines) else "plain"
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
    """Write a file: in torch's format if its name ends in .csv, else in the plain one."""
    path.write_text(format(schedule, "torch" if path.suffix == ".csv" else "plain"), encoding="utf-8")


def format(schedule: Schedule, form: TextFormat = "plain") -> str:
    """Format a schedule; `parse` reads back an equal one."""
    if form == "torch":
        # torch accepts an empty line for an idle rank, but other CSV readers skip it.
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


def _words(line: str, number: int, form: TextFormat) -> Iterator[_Word]:
    """Yield the words of a line, without idle slots."""
    if form == "plain":
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


def _understood(word: _Word, form: TextFormat, source: str) -> _Read:
    found = (_PLAIN if form == "plain" else _TORCH).fullmatch(word.text)
    if found is None:
        hint = ""
        if form == "plain" and _TORCH.fullmatch(word.text):
            hint = ": I belongs to torch's form, which has commas; here B is that part where a W follows"
        raise _error(source, word, f"expected {_EXPECTED[form]}, found {word.text!r}{hint}")
    stage, letter, microbatch = found.groups()
    kind = "B" if letter == "I" else letter
    return _Read(Action.parse(f"{stage}{kind}{microbatch}"), letter, word)


def _check_places(rows: Sequence[Sequence[_Read]], source: str) -> None:
    """Refuse an action twice and a stage on two ranks, while both positions can still be named."""
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
    """Refuse torch's I without W and W without I: an I alone would be read as a whole backward."""
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
