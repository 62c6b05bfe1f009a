"""The stall inspector: reports ranks that have not asked for what others wait for, and for how long.

Every rank keeps the book of requests, so every rank that waits tells it, and not the first alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from hpcpar.horovod.exceptions import HorovodInternalError
from hpcpar.units import format_duration

if TYPE_CHECKING:
    from hpcpar.launch.horovod_settings import HorovodSettings

log = logging.getLogger("hpcpar")

MOST_SHOWN = 8


class Watched(Protocol):
    """The part of an engine that the inspector reads."""

    def late(self, missing: tuple[int, ...]) -> Iterable[tuple[str, float, tuple[int, ...]]]:
        """Operations that not all ranks have asked for: name, since when, world ranks missing.

        missing   world ranks that have not answered the last question
        """


class StallInspector:
    """Warns once of each operation that waits too long, and ends what waits much too long."""

    def __init__(self, knobs: HorovodSettings, watched: Watched) -> None:
        self._knobs = knobs
        self._watched = watched
        self._told: set[tuple[str, float]] = set()
        self._last_s = 0.0

    def inspect(self, missing: tuple[int, ...]) -> None:
        """Inspect the engine, unless it was inspected just before.

        missing  world ranks that this rank waits for just now
        errors   HorovodInternalError when a wait has lasted beyond HOROVOD_STALL_SHUTDOWN_TIME_SECONDS
        """
        now_s = time.perf_counter()
        if not self._knobs.stall_check or now_s - self._last_s < min(1.0, self._knobs.stall_check_s / 4):
            return
        self._last_s = now_s
        late = list(self._watched.late(missing))
        check_s, shutdown_s = self._knobs.stall_check_s, self._knobs.stall_shutdown_s
        lost = [(name, ranks) for name, since_s, ranks in late if 0 < shutdown_s < now_s - since_s]
        stalled = [(name, since_s, ranks) for name, since_s, ranks in late if now_s - since_s > check_s]
        if lost:
            # What is over the limit first may only follow from another wait, which tells the cause.
            others = [(name, ranks) for name, since_s, ranks in stalled if now_s - since_s <= shutdown_s]
            raise HorovodInternalError(
                f"not asked for by all ranks within {format_duration(shutdown_s)} "
                f"(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS): {_told(lost)}"
                + (f". Stalled as well: {_told(others)}" if others else "")
            )
        # A name may come again and again: each time it is another operation, by the time that it waits since.
        fresh = [(name, ranks) for name, since_s, ranks in stalled if (name, since_s) not in self._told]
        self._told = {(name, since_s) for name, since_s, _ in stalled}
        if fresh:
            log.warning(
                "stalled for more than %s: %s. Ranks may ask for operations in any order, but all ranks must "
                "ask for all of them; a rank may also be busy, stopped or dead.",
                format_duration(check_s),
                _told(fresh),
            )


def _told(late: list[tuple[str, tuple[int, ...]]]) -> str:
    shown = [
        f"{name} waits for rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        for name, missing in late[:MOST_SHOWN]
    ]
    more = [f"and {len(late) - MOST_SHOWN} more"] if len(late) > MOST_SHOWN else []
    return "; ".join([*shown, *more])
