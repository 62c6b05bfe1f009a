"""Every byte is counted: traffic by communicator and collective, and a trace of when it moved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class TrafficRow:
    """What one rank did in one kind of collective.

    seconds_waited   time its program stood still in it: blocking calls, and waits for handles
    calls_by_mpi     of the calls, those that were left to MPI, whose messages and bytes nobody can count
    """

    collective: str
    calls: int = 0
    messages: int = 0
    nbytes_sent: int = 0
    nbytes_received: int = 0
    seconds_waited: float = 0.0
    calls_by_mpi: int = 0


class Traffic:
    """Counts of one rank on one communicator, by collective.

    Messages within the rank itself and messages of no bytes are not messages, except the empty
    ones that a barrier is made of. The agreements of checked mode are counted as 'agreement'.
    Collectives that are left to MPI ("native") count as calls, without messages or bytes: MPI does
    not tell what it sends.
    """

    def __init__(self) -> None:
        self._rows: dict[str, TrafficRow] = {}

    def row(self, collective: str) -> TrafficRow:
        """The row of a collective, made when first asked for."""
        row = self._rows.get(collective)
        if row is None:
            row = self._rows[collective] = TrafficRow(collective)
        return row

    def rows(self) -> list[TrafficRow]:
        return list(self._rows.values())

    def nbytes_sent(self, collective: str | None = None) -> int:
        """Bytes sent in one collective, or in all but the agreements of checked mode."""
        return sum(
            row.nbytes_sent
            for name, row in self._rows.items()
            if name == collective or (collective is None and name != "agreement")
        )

    def reset(self) -> None:
        self._rows.clear()


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Something that took time on this rank; seconds of time.perf_counter()."""

    name: str
    category: str
    start_s: float
    stop_s: float
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Trace:
    """Events in the order in which they ended."""

    events: list[TraceEvent] = field(default_factory=list)

    def add(self, name: str, category: str, start_s: float, stop_s: float, **arguments: Any) -> None:
        self.events.append(TraceEvent(name, category, start_s, stop_s, arguments))
