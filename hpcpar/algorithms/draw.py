"""A schedule as a text picture: one column for each rank, one row for each step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest

from hpcpar.algorithms.prove import Memory, memories
from hpcpar.algorithms.registry import Algorithm
from hpcpar.algorithms.step import Copy, Receive, Send, Space, Step
from hpcpar.algorithms.topology import Nodes
from hpcpar.errors import OperationError

SIGNS = {
    "→": "2→3     chunk 2 goes to rank 3",
    "←": "2←3     chunk 2 comes from rank 3",
    "+": "+2←3    and is added to the rank's own",
    "⇒": "i3⇒o3   chunk 3 of the input is copied into the output; w: work space",
}

_LETTERS: dict[Space, str] = {"data": "", "input": "i", "output": "o", "work": "w"}

_Rows = list[dict[int, int]]  # by rank: step -> row


def draw(
    algorithm: Algorithm, size: int, root: int = 0, segments: int = 1, nodes: Nodes | None = None
) -> str:
    """The steps of all ranks; a send stands in the row of its receive.

    3→1      chunk 3 goes to rank 1            i3, o3, w3   of the input, output or work space
    2←3      chunk 2 comes from rank 3         i3⇒o3        copied
    +2←3     comes and is combined             0-3→1        several chunks in one message
    """
    if size < 1:
        raise OperationError(f"cannot draw {size} ranks; need at least one")
    schedules = algorithm.schedules(size, root=root, segments=segments, nodes=nodes)
    chunks = algorithm.chunks(size, segments, nodes)
    rows = rows_of(schedules)
    table = [["", *(f"rank {rank}" for rank in range(size))]]
    if algorithm.placed and nodes is not None:
        table.append(["", *(f"node {node}" for node in nodes)])
    table.append(["messages", *(str(sum(len(step.sends) for step in steps)) for steps in schedules)])
    table.append(["sends", *(f"{_chunks_sent(steps) / max(chunks, 1):.3g} S" for steps in schedules)])
    halves = {}
    if algorithm.collective == "allreduce":
        halves = halves_of(schedules, memories(algorithm, size, root, segments, nodes))
    headings = []
    for row in range(1 + max((row for steps in rows for row in steps.values()), default=-1)):
        headings += [(len(table), halves[row])] if row in halves else []
        cells = [
            [line for step, at in steps.items() if at == row for line in _cell(schedules[rank][step])]
            for rank, steps in enumerate(rows)
        ]
        table.extend(["", *lines] for lines in zip_longest(*cells, fillvalue=""))
        table[-max(map(len, cells))][0] = f"step {row}"
    lines = _aligned(table)
    for place, half in reversed(headings):
        lines.insert(place, f"{half}:")
    return "\n".join([title(algorithm, size, root, chunks), "", *lines, ""])


def legend(drawn: str) -> str:
    """Explain the signs that occur in what `draw` returns."""
    return "\n".join(meaning for sign, meaning in SIGNS.items() if sign in drawn)


def time_text(algorithm: Algorithm, size: int) -> str:
    """Format the closed form, each rank on a node of its own: "6α + 1.5 Sβ + 0.75 Sγ"."""
    if size == 1:
        return "0"
    cost = algorithm.cost(size, 1)
    terms = [f"{cost.messages:.3g}α"]
    terms += [f"{factor:.3g} S{sign}" for factor, sign in ((cost.sent, "β"), (cost.combined, "γ")) if factor]
    return " + ".join(terms)


def title(algorithm: Algorithm, size: int, root: int, chunks: int) -> str:
    what = [f"{size} ranks" if size > 1 else "1 rank"]
    if chunks:
        what.append(f"a vector S of {chunks} chunks" if chunks > 1 else "a vector S of 1 chunk")
    if algorithm.rooted:
        what.append(f"root {root}")
    return f"{algorithm.collective} {algorithm.name}: {', '.join(what)}"


def rows_of(schedules: Sequence[Sequence[Step]]) -> _Rows:
    """The row of every step of every rank: as early as its own previous step and its partners allow."""
    partners = partners_of(schedules)
    rows: _Rows = [dict.fromkeys(range(len(steps)), 0) for steps in schedules]
    earliest = [dict(of_rank) for of_rank in rows]
    changed = True
    while changed:
        changed = False
        for rank, steps in enumerate(schedules):
            for step in range(len(steps)):
                earliest[rank][step] = rows[rank][step - 1] + 1 if step else 0
                row = max([earliest[rank][step], *(earliest[r][s] for r, s in partners[rank, step])])
                changed |= row != rows[rank][step]
                rows[rank][step] = row
    return rows


def partners_of(schedules: Sequence[Sequence[Step]]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(rank, step) -> the (rank, step) at the other end of each of its messages."""
    senders: dict[tuple[int, int], list[int]] = defaultdict(list)
    receivers: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, steps in enumerate(schedules):
        for at, step in enumerate(steps):
            for send in step.sends:
                senders[rank, send.to].append(at)
            for receive in step.receives:
                receivers[receive.source, rank].append(at)
    partners: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for (source, to), sent in senders.items():
        for sent_at, received_at in zip(sent, receivers[source, to], strict=True):
            partners[source, sent_at].append((to, received_at))
            partners[to, received_at].append((source, sent_at))
    return partners


def halves_of(schedules: Sequence[Sequence[Step]], seen: Sequence[Sequence[Memory]]) -> dict[int, str]:
    """Divide an all-reduce into rows that sum and rows that hand sums on: the first of each -> its name.

    A reduce-scatter and an all-gather, where most ranks have sums between them, each of other chunks; else a
    reduce and a broadcast. Empty where ranks still sum when others hand on, or every rank ends with its sums.

    seen   what each rank holds before each of its steps, and at the end, as `memories` returns it
    """
    rows = rows_of(schedules)
    summing, handing_on = (
        [
            of_rank[at]
            for of_rank, steps in zip(rows, schedules, strict=True)
            for at, step in enumerate(steps)
            for receive in step.receives
            if receive.combine == combine
        ]
        for combine in (True, False)
    )
    if not handing_on or max(summing, default=-1) >= (second := min(handing_on)):
        return {}
    every, sums = (1 << len(schedules)) - 1, []
    for of_rank, memory in zip(rows, seen, strict=True):
        done = sum(row < second for row in of_rank.values())
        sums.append(sum(value is not None and value.ranks == every for value in memory[done]["data"]))
    # Each chunk's sum is on one rank only, and most ranks have some.
    is_scattered = sum(sums) == len(seen[0][0]["data"]) and 2 * sum(map(bool, sums)) > len(sums)
    names = ("reduce-scatter", "all-gather") if is_scattered else ("reduce", "broadcast")
    return dict(zip((0, second), names, strict=True))


def _cell(step: Step) -> list[str]:
    """The lines of one step: copies, then each send beside a receive."""
    sends, receives = map(_sent, step.sends), map(_received, step.receives)
    messages = [f"{send}  {receive}".strip() for send, receive in zip_longest(sends, receives, fillvalue="")]
    return [*map(_copied, step.copies), *messages]


def _sent(send: Send) -> str:
    return f"{_chunks(send.chunks, send.space)}→{send.to}"


def _received(receive: Receive) -> str:
    plus = "+" if receive.combine else ""
    return f"{plus}{_chunks(receive.chunks, receive.space)}←{receive.source}"


def _copied(copy: Copy) -> str:
    return f"{_chunks(copy.chunks, copy.space)}⇒{_chunks(copy.into, copy.into_space)}"


def _chunks(chunks: Sequence[int], space: Space) -> str:
    """Runs of chunks: (0, 1, 2, 5) of the work space is "w0-2,5"."""
    runs: list[list[int]] = []
    for chunk in chunks:
        if runs and chunk == runs[-1][-1] + 1:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    return _LETTERS[space] + ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _chunks_sent(steps: Sequence[Step]) -> int:
    return sum(len(send.chunks) for step in steps for send in step.sends)


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table)
    return [line.rstrip() for line in lines]
