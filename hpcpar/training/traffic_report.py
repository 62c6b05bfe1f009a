"""Traffic of a run by communicator and collective, beside the theory.

communicator  collective   calls   messages       sent     theory   sent - theory
dp            allreduce    1,600      6,400    4.8 GiB    4.8 GiB             0 B
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from hpcpar.comm import Communicator
from hpcpar.training.expected_traffic import ExpectedTraffic
from hpcpar.units import format_duration, format_nbytes


@dataclass(frozen=True, slots=True)
class TrafficLine:
    """Traffic of one collective on the communicators of one name, summed over ranks.

    calls            largest number of any rank
    messages         sent by all ranks
    nbytes_sent      by all ranks
    nbytes_theory    by theory, of all ranks; None where there is none
    seconds_waited   longest of any rank
    calls_by_mpi     calls that MPI ran as a whole, in messages that are not counted
    """

    communicator: str
    collective: str
    calls: int
    messages: int
    nbytes_sent: int
    nbytes_theory: int | None
    seconds_waited: float
    calls_by_mpi: int = 0

    @property
    def deviation(self) -> int | None:
        """Bytes sent beyond the theory."""
        return None if self.nbytes_theory is None else self.nbytes_sent - self.nbytes_theory

    def with_sent(self, nbytes_sent: int) -> TrafficLine:
        """Return the line with other bytes, as of some steps."""
        return replace(self, nbytes_sent=nbytes_sent)


def gather_traffic(comm: Communicator, theory: ExpectedTraffic) -> list[TrafficLine]:
    """Return the counts of all ranks on all communicators of the run, the same on every rank. Collective.

    theory   of the communicators that this rank is in; that of each one's rank 0 counts
    """
    # Read before the gathering itself is counted.
    mine = [
        (name, row.collective, row.calls, row.messages, row.nbytes_sent, row.seconds_waited, row.calls_by_mpi)
        for name, traffic in comm.traffics().items()
        for row in traffic.rows()
    ]
    told = {(on.name, collective): n for (on, collective), n in theory.items() if on.rank == 0}
    of_ranks = comm.allgather_object((mine, told))
    total: Counter[tuple[str, str]] = Counter()
    for _, told in of_ranks:
        total.update(told)
    return _plainly_named(merge([rows for rows, _ in of_ranks], total))


def _plainly_named(lines: list[TrafficLine]) -> list[TrafficLine]:
    """Leave out the numbers of names that only communicators of earlier runs shared: dp#2 becomes dp."""
    names = {line.communicator for line in lines}
    plain = {name: name.partition("#")[0] for name in names}
    shared = {name for name, times in Counter(plain.values()).items() if times > 1}
    return [
        line if plain[line.communicator] in shared else replace(line, communicator=plain[line.communicator])
        for line in lines
    ]


def merge(
    of_ranks: Sequence[Sequence[tuple[str, str, int, int, int, float, int]]],
    theory: Mapping[tuple[str, str], int],
) -> list[TrafficLine]:
    """Sum messages and bytes over ranks; take the largest number of calls and time waited.

    theory   (communicator, collective) -> bytes that all ranks must send

    A collective that sent nothing, not even by MPI, has no line.
    """
    totals: dict[tuple[str, str], list[Any]] = {}
    for rows in of_ranks:
        for name, collective, calls, messages, nbytes, waited_s, by_mpi in rows:
            total = totals.setdefault((name, collective), [0, 0, 0, 0.0, 0])
            total[0] = max(total[0], calls)
            total[1] += messages
            total[2] += nbytes
            total[3] = max(total[3], waited_s)
            total[4] = max(total[4], by_mpi)
    return [
        TrafficLine(*key, calls, messages, nbytes, theory.get(key), waited_s, by_mpi)
        for key, (calls, messages, nbytes, waited_s, by_mpi) in totals.items()
        if messages or by_mpi
    ]


def table(lines: Sequence[TrafficLine], *, size: int) -> Table:
    """Return the lines as a table, to be printed with crop=False; `size` is the number of ranks."""
    # Narrow enough for 80 columns, the width of a batch job's output.
    shown = Table(title=f"Traffic of {size} ranks together", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("comm", "collective"):
        shown.add_column(heading, no_wrap=True)
    for heading in ("calls", "messages", "sent", "theory", "beyond it", "waited"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        shown.add_row(
            line.communicator,
            line.collective,
            f"{line.calls:,}",
            f"{line.messages:,}" if line.messages or not line.calls_by_mpi else "MPI's",
            format_nbytes(line.nbytes_sent),
            "" if line.nbytes_theory is None else format_nbytes(line.nbytes_theory),
            "" if line.deviation is None else f"{line.deviation:,} B",
            format_duration(line.seconds_waited),
        )
    # Otherwise columns would be cut to a terminal's width, and numbers lose their units.
    shown.width = Console(width=1000).measure(shown).maximum
    return shown


def as_records(lines: Sequence[TrafficLine]) -> list[dict[str, Any]]:
    """Return the lines as plain values for a JSON file."""
    return [asdict(line) for line in lines]
