"""Fail together: what one rank cannot do, no rank goes on without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


@contextmanager
def together(comm: Communicator, doing: str) -> Iterator[None]:
    """Run a block that may fail on some ranks only; if it does, raise on all. Collective.

        with together(comm, "reading the data"):
            text = path.read_text()                  # no collective inside the block

    errors   PeerFailedError naming the ranks and what they met; a rank's own error is its cause
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # whatever it is, the other ranks must hear of it before it goes on
        failure = error
    comm.agree(failure, doing)
