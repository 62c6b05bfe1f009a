"""Every byte is counted: traffic by communicator and collective, and a trace of when it moved."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Tally:
    """Count of one call that is made again and again with the same messages and bytes."""

    messages: int
    nbytes_sent: int
    nbytes_received: int
    calls: int = 0


class TrafficRow:
    """Traffic of one rank in one kind of collective.

    seconds_waited   time its program stood still in it: blocking calls, and waits for handles; of short calls
                     through shared memory, which cost no more than a look at the clock, the waiting alone
    calls_by_mpi     of the calls, those that were left to MPI, whose messages and bytes nobody can count
    """

    def __init__(self, collective: str) -> None:
        self.collective = collective
        self._tallies: set[Tally] = set()
        self.reset()

    def count(self, messages: int, nbytes_sent: int, nbytes_received: int, calls: int = 1) -> None:
        """Note calls, each with so many messages and bytes."""
        self._calls += calls
        self._messages += calls * messages
        self._nbytes_sent += calls * nbytes_sent
        self._nbytes_received += calls * nbytes_received

    def open(self, messages: int, nbytes_sent: int, nbytes_received: int) -> Tally:
        """For calls that come often: whoever makes them counts only how many, until `close`."""
        tally = Tally(messages, nbytes_sent, nbytes_received)
        self._tallies.add(tally)
        return tally

    def close(self, tally: Tally) -> None:
        """Take over what was counted there."""
        self._tallies.discard(tally)
        self.count(tally.messages, tally.nbytes_sent, tally.nbytes_received, tally.calls)

    def reset(self) -> None:
        self.seconds_waited = 0.0
        self.calls_by_mpi = 0
        self._calls = self._messages = self._nbytes_sent = self._nbytes_received = 0
        for tally in self._tallies:
            tally.calls = 0

    @property
    def calls(self) -> int:
        return self._calls + sum(tally.calls for tally in self._tallies)

    @property
    def messages(self) -> int:
        return self._messages + sum(tally.calls * tally.messages for tally in self._tallies)

    @property
    def nbytes_sent(self) -> int:
        return self._nbytes_sent + sum(tally.calls * tally.nbytes_sent for tally in self._tallies)

    @property
    def nbytes_received(self) -> int:
        return self._nbytes_received + sum(tally.calls * tally.nbytes_received for tally in self._tallies)


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
        """Rows of all collectives that were completed at least once, or waited for."""
        return [row for row in self._rows.values() if row.calls or row.seconds_waited]

    def nbytes_sent(self, collective: str | None = None) -> int:
        """Bytes sent in one collective, or in all but the agreements of checked mode."""
        return sum(
            row.nbytes_sent
            for name, row in self._rows.items()
            if name == collective or (collective is None and name != "agreement")
        )

    def reset(self) -> None:
        for row in self._rows.values():
            row.reset()


COUNTER = "counter"
"""Category of values that hold from a time on."""


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

    def count(self, name: str, **values: float) -> None:
        """Note values that hold from now on."""
        now_s = time.perf_counter()
        self.events.append(TraceEvent(name, COUNTER, now_s, now_s, values))
