"""A barrier that names the ranks that do not come.

rank 0    hear of ranks 1 … p-1, or wait no longer ──► tell those that came who is missing, if any
others    tell rank 0 ──────────────────────────────► hear of rank 0
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from hpcpar.comm import Communicator
from hpcpar.errors import StallError

TAG = 23_997
"""Of its messages, which a program's own with this tag would be taken for."""


def monitored_barrier(comm: Communicator, limit_s: float, *, name_all: bool) -> None:
    """Return when all ranks have come. Nothing can be done with a communicator after its error.

    name_all   wait for all ranks, to name every missing one; otherwise the first one is named
    errors     StallError on every rank that came
    """
    if comm.rank == 0:
        _watch_others(comm, limit_s, name_all)
    else:
        _report(comm, limit_s)


def _watch_others(comm: Communicator, limit_s: float, name_all: bool) -> None:
    others = range(1, comm.size)
    word = {rank: torch.zeros(1, dtype=torch.int64) for rank in others}
    arrivals = {rank: comm.start_recv(word[rank], rank, TAG) for rank in others}
    _poll(lambda: all(arrival.test() for arrival in arrivals.values()), limit_s)
    missing = [rank for rank, arrival in arrivals.items() if not arrival.test()]
    first = torch.tensor([missing[0] if missing else 0])
    for answer in [comm.start_send(first, rank, TAG) for rank in others if rank not in missing]:
        answer.wait()
    if missing:
        named = missing if name_all else missing[:1]
        raise StallError(
            f"rank{'s' if len(named) > 1 else ''} {', '.join(map(str, named))} of {comm.name!r} did not come "
            f"to monitored_barrier within its timeout of {limit_s:g} s: look at what "
            f"{'they do' if len(named) > 1 else 'it does'} before"
        )


def _report(comm: Communicator, limit_s: float) -> None:
    comm.start_send(torch.zeros(1, dtype=torch.int64), 0, TAG).wait()
    first = torch.zeros(1, dtype=torch.int64)
    answer = comm.start_recv(first, 0, TAG)
    # Rank 0 may have come as much later, and waits as long from then on.
    if not _poll(answer.test, 2 * limit_s):
        raise StallError(
            f"rank 0 of {comm.name!r} did not come to monitored_barrier within its timeout of {limit_s:g} s"
        )
    if first.item():
        raise StallError(
            f"rank {first.item()} of {comm.name!r} did not come to monitored_barrier within its timeout of "
            f"{limit_s:g} s, as rank 0 says"
        )


def _poll(condition: Callable[[], bool], limit_s: float) -> bool:
    """Wait for a condition that makes progress; False if it does not hold in time."""
    until_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(0)
    return True
