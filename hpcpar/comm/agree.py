"""Agreement: do all ranks want the same thing, and has any of them failed?"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hpcpar.comm import objects
from hpcpar.errors import MismatchError, PeerFailedError

if TYPE_CHECKING:
    from hpcpar.comm.communicator import Communicator

DIGEST_NBYTES = 16


def require_same(comm: Communicator, description: str) -> None:
    """Raise on every rank unless all of them pass the same description. Collective.

    cost     one all-reduce of 32 bytes; on a mismatch one all-gather of the descriptions
    errors   MismatchError that says which world ranks asked for what
    """
    if is_same_everywhere(comm, description):
        return
    descriptions = objects.gathered(comm, description, "agreement", "different calls")
    raise MismatchError(
        f"ranks of communicator {comm.name!r} made different calls in the same place: "
        f"{_who_asked_for_what(comm.world_ranks, descriptions)}. Every rank must make the same calls in the "
        f"same order."
    )


def is_same_everywhere(comm: Communicator, description: str) -> bool:
    """Return on every rank whether all of them pass the same description. Collective.

    A bitwise AND over a digest and over its complement keeps every bit of both only when all
    digests are equal; and when they are not, every rank sees it, whichever it holds.

    cost     one all-reduce of 32 bytes
    """
    digest = np.frombuffer(
        hashlib.blake2b(description.encode(), digest_size=DIGEST_NBYTES).digest(), np.uint8
    )
    mine = np.concatenate([digest, ~digest])
    common = mine.copy()
    comm.unchecked("agreement").allreduce(common, "and", algorithm="recursive_doubling")
    return np.array_equal(common, mine)


def require_success(comm: Communicator, error: BaseException | None, doing: str) -> None:
    """Fail together: when any rank passes an error, every rank raises. Collective.

    errors   PeerFailedError naming the ranks and their messages; on a rank that failed itself, its
             own error is the cause. On a communicator of one rank, that error itself
    """
    if comm.size == 1 and error is not None:
        raise error
    message = None if error is None else f"{type(error).__name__}: {error}"
    messages = objects.gathered(comm, message, "agreement", "agree")
    failed = {rank: text for rank, text in enumerate(messages) if text is not None}
    if failed:
        told = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
        raise PeerFailedError(
            f"{doing}: failed on {len(failed)} of {comm.size} ranks of {comm.name!r}. {told}"
        ) from error


def _who_asked_for_what(world_ranks: Sequence[int], descriptions: list[str]) -> str:
    asked: dict[str, list[int]] = {}
    for rank, description in zip(world_ranks, descriptions, strict=True):
        asked.setdefault(description, []).append(rank)
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} asked for {description}"
        for description, ranks in asked.items()
    )
