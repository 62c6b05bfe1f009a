"""Where the bytes went: one line for each communicator and collective, beside what theory says.

    communicator  collective   calls   messages       sent   theory   waited
    dp            allreduce     2000       8000   7.63 GiB   exactly   12.1 s
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from hpcpar.comm import Communicator, Traffic
from hpcpar.units import format_duration, format_nbytes

Theory = Mapping[tuple[str, str], int]
"""(communicator, collective) -> bytes that all ranks together have to send."""


@dataclass(frozen=True, slots=True)
class TrafficLine:
    """One collective on the communicators of one name, of all ranks together.

    calls            of the rank with the most
    messages         sent by all ranks
    nbytes_sent      by all ranks
    nbytes_theory    that theory says all ranks send; None where none is given
    seconds_waited   of the rank that stood still longest
    """

    communicator: str
    collective: str
    calls: int
    messages: int
    nbytes_sent: int
    nbytes_theory: int | None
    seconds_waited: float

    @property
    def deviation(self) -> int | None:
        """Bytes sent beyond the theory; 0 = exactly."""
        return None if self.nbytes_theory is None else self.nbytes_sent - self.nbytes_theory


def gather_traffic(
    comm: Communicator, traffics: Mapping[str, Traffic], theory: Theory
) -> list[TrafficLine]:
    """The lines of all ranks' counts, the same on every rank; collective.

    traffics   this rank's, by communicator, taken before the gathering itself is counted
    """
    mine = [
        (name, row.collective, row.calls, row.messages, row.nbytes_sent, row.seconds_waited)
        for name, traffic in traffics.items()
        for row in traffic.rows()
    ]
    return merge(comm.allgather_object(mine), theory)


def merge(of_ranks: Sequence[Sequence[tuple[str, str, int, int, int, float]]], theory: Theory) -> list[TrafficLine]:
    """Sum messages and bytes over ranks, and take the largest of calls and of time waited."""
    totals: dict[tuple[str, str], list[Any]] = {}
    for rows in of_ranks:
        for name, collective, calls, messages, nbytes, waited_s in rows:
            total = totals.setdefault((name, collective), [0, 0, 0, 0.0])
            total[0] = max(total[0], calls)
            total[1] += messages
            total[2] += nbytes
            total[3] = max(total[3], waited_s)
    return [
        TrafficLine(*key, calls, messages, nbytes, theory.get(key), waited_s)
        for key, (calls, messages, nbytes, waited_s) in totals.items()
        if messages
    ]


def table(lines: Sequence[TrafficLine], *, size: int) -> Table:
    """The lines for people; `size` is the number of ranks."""
    shown = Table(title=f"Traffic of {size} ranks together")
    for heading in ("communicator", "collective"):
        shown.add_column(heading)
    for heading in ("calls", "messages", "sent", "theory", "sent - theory", "longest wait"):
        shown.add_column(heading, justify="right")
    for line in lines:
        shown.add_row(
            line.communicator,
            line.collective,
            f"{line.calls:,}",
            f"{line.messages:,}",
            format_nbytes(line.nbytes_sent),
            "" if line.nbytes_theory is None else format_nbytes(line.nbytes_theory),
            "" if line.deviation is None else f"{line.deviation:,} B",
            format_duration(line.seconds_waited),
        )
    return shown


def as_records(lines: Sequence[TrafficLine]) -> list[dict[str, Any]]:
    """The lines as plain values, for a JSON file."""
    return [asdict(line) for line in lines]
