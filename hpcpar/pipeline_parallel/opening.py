"""Before data move, every rank says what it is about to do, so that they do the same or fail together.

Only the rank with the first stage has seen the inputs, and that with the last one the targets. From what
all have said each rank knows how many microbatches there are, that inputs and targets are of one length, and
whether a pass of the same shapes has been before.
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
    comm: Communicator,
    kind: str,
    microbatches: int | None,
    length: int | None,
    description: str,
    error: Exception | None,
) -> Opened:
    """Agree on the next pass. Collective.

    microbatches   None: this rank takes the number that others have
    length         of the batch before it was divided; None: this rank was given none, or a list
    description    of all that the shapes of this rank's messages follow from
    error          what is wrong with this rank's arguments
    cost           one all-gather of 48 bytes a rank
    errors         PeerFailedError on every rank when one has an error, MismatchError when they differ in what
                   they are about to do
    """
    digest = hashlib.blake2b(description.encode(), digest_size=_DIGEST_NBYTES).digest()
    mine = np.array([error is not None, _or_open(length), KINDS.index(kind), _or_open(microbatches)])
    said = np.concatenate([mine.astype(np.int64), np.frombuffer(digest, np.int64)])
    everyone = comm.unchecked("agreement").allgather(said).reshape(comm.size, -1)
    if everyone[:, 0].any():
        comm.agree(error, f"pipeline {kind}")
    _require_same(comm, "was asked for", [KINDS[int(number)] for number in everyone[:, 2]])
    known = _known(everyone[:, 3])
    _require_same(comm, "was given microbatches:", known)
    _require_same(comm, "was given a batch of", _known(everyone[:, 1]))
    return Opened(next(iter(known.values())), everyone[:, 2:].tobytes())


def _or_open(number: int | None) -> int:
    return _OPEN if number is None else number


def _known(numbers: Any) -> dict[int, int]:
    """By rank, what has been said."""
    return {rank: int(number) for rank, number in enumerate(numbers) if number != _OPEN}


def _require_same(comm: Communicator, what: str, said: Any) -> None:
    by_rank = said if isinstance(said, dict) else dict(enumerate(said))
    if len(set(by_rank.values())) > 1:
        told = "; ".join(f"rank {rank} {what} {each}" for rank, each in by_rank.items())
        raise MismatchError(
            f"ranks of {comm.name!r} are not about to do the same in their pipeline: {told}. Every rank must "
            "call step and evaluate in the same order, with inputs and targets of as many microbatches, "
            "and of one length where they are tensors"
        )
