"""Before data move, every rank says what it is about to do, so that they do the same or fail together.

Only the rank with the first stage has seen the inputs. From what all have said each rank knows how many
microbatches there are, and whether a pass of the same shapes has been before.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import numpy as np

from hpcpar.comm import Communicator
from hpcpar.errors import MismatchError

KINDS = ("step", "evaluate")

_DIGEST_NBYTES = 16
_OPEN = -1


class Opened(NamedTuple):
    """What all ranks are about to do.

    key   the same for passes whose messages have the same shapes
    """

    microbatches: int
    key: bytes


def open_pass(
    comm: Communicator, kind: str, microbatches: int | None, description: str, error: Exception | None
) -> Opened:
    """Agree on the next pass. Collective.

    microbatches   None: this rank takes the number that others have
    description    of all that the shapes of this rank's messages follow from
    error          what is wrong with this rank's arguments
    cost           one all-gather of 40 bytes a rank
    errors         PeerFailedError on every rank when one has an error, MismatchError when they differ in what
                   they are about to do
    """
    digest = hashlib.blake2b(description.encode(), digest_size=_DIGEST_NBYTES).digest()
    mine = np.array([error is not None, KINDS.index(kind), _OPEN if microbatches is None else microbatches])
    said = np.concatenate([mine.astype(np.int64), np.frombuffer(digest, np.int64)])
    everyone = comm.unchecked("agreement").allgather(said).reshape(comm.size, -1)
    if everyone[:, 0].any():
        comm.agree(error, f"pipeline {kind}")
    _require_same(comm, "was asked for", [KINDS[int(number)] for number in everyone[:, 1]])
    known = {rank: int(number) for rank, number in enumerate(everyone[:, 2]) if number != _OPEN}
    _require_same(comm, "was given microbatches:", known)
    return Opened(next(iter(known.values())), everyone[:, 1:].tobytes())


def _require_same(comm: Communicator, what: str, said: Any) -> None:
    by_rank = said if isinstance(said, dict) else dict(enumerate(said))
    if len(set(by_rank.values())) > 1:
        told = "; ".join(f"rank {rank} {what} {each}" for rank, each in by_rank.items())
        raise MismatchError(
            f"ranks of {comm.name!r} are not about to do the same in their pipeline: {told}. Every rank must "
            "call step and evaluate in the same order, with inputs and targets of as many microbatches"
        )
