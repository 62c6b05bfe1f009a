"""Negotiation rounds over a communicator: all-reduce the digests, and all-gather requests where these differ.

every rank     digest of new requests ──AND──> all equal: the batch is ready        (33 bytes)
                                         └──> not equal: all-gather the requests, match them by name
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Generator
from typing import TYPE_CHECKING

import numpy as np
import torch

from hpcpar.horovod.negotiation import RECORD_NBYTES, Negotiation, Proposal, ReadyRequest

if TYPE_CHECKING:
    from hpcpar.comm import Communicator, Handle

EXACT_SIZE = 16
"""Up to this many ranks a round is one exchange of all with all, which knows exactly who is missing."""


class NegotiationRounds:
    """The rounds of one engine, one at a time.

    control       a communicator for rounds alone: they and the data overtake each other on every rank
    cycle_time_s  pause between rounds while nothing new was requested anywhere
    """

    def __init__(self, control: Communicator, cycle_time_s: float) -> None:
        self.negotiation = Negotiation(control.size, control.world_ranks)
        self.handle: Handle | None = None
        self._control = control
        self._cycle_time_s = cycle_time_s
        # A tensor, which a communicator knows again a little sooner than an array, and its bytes.
        self._record = torch.zeros(RECORD_NBYTES, dtype=torch.uint8)
        self._record_bytes = self._record.numpy().data
        self._algorithm = "one_shot" if control.size <= EXACT_SIZE else "recursive_doubling"
        self._round: Generator[Handle, None, list[ReadyRequest]] | None = None
        self._next_s = 0.0

    @property
    def under_way(self) -> bool:
        """True while a round has begun and not ended."""
        return self._round is not None

    @property
    def is_due(self) -> bool:
        """True once the pause after a round without new requests is over."""
        return time.perf_counter() >= self._next_s

    def begin(self) -> None:
        """Send this rank's new requests, as a digest."""
        self._round, self.handle = self._run(), None

    def advance(self) -> list[ReadyRequest] | None:
        """Continue the round without waiting; return what is ready once it has ended, else None."""
        assert self._round is not None, "a round has begun"
        while self.handle is None or self.handle.done:
            try:
                self.handle = next(self._round)
            except StopIteration as stop:
                self._round = self.handle = None
                ready: list[ReadyRequest] = stop.value
                return ready
        return None

    def run_blocking(self) -> list[ReadyRequest] | None:
        """Run a round of equal digests to its end; None where they differ and the round goes on."""
        self._record_bytes[:] = self.negotiation.record()
        self._control.allreduce(self._record, "and", algorithm=self._algorithm)
        ready = self.negotiation.conclude(self._record_bytes.tobytes())
        if ready is None:
            self._round = self._exchange_requests()
        return ready

    def reset(self) -> None:
        """Forget all requests and the round that is under way."""
        self.negotiation = Negotiation(self._control.size, self._control.world_ranks)
        self._round = self.handle = None

    def _run(self) -> Generator[Handle, None, list[ReadyRequest]]:
        had_news = self.negotiation.has_news
        self._record_bytes[:] = self.negotiation.record()
        yield self._control.start_allreduce(self._record, "and", algorithm=self._algorithm)
        ready = self.negotiation.conclude(self._record_bytes.tobytes())
        if ready is None:
            return (yield from self._exchange_requests())
        self._pause(had_news)
        return ready

    def _exchange_requests(self) -> Generator[Handle, None, list[ReadyRequest]]:
        """Gather every rank's new requests, and match them."""
        payload = np.frombuffer(pickle.dumps(self.negotiation.proposal()), dtype=np.uint8)
        lengths = np.empty(self._control.size, dtype=np.int64)
        yield self._control.start_allgather(np.array([payload.size], dtype=np.int64), out=lengths)
        counts = lengths.tolist()
        everything = np.empty(sum(counts), dtype=np.uint8)
        yield self._control.start_allgather(payload, counts=counts, out=everything)
        pieces = np.split(everything, np.cumsum(counts)[:-1])
        proposals: list[Proposal] = [pickle.loads(piece.tobytes()) for piece in pieces]
        self._pause(any(proposal.requests for proposal in proposals))
        return self.negotiation.conclude_proposals(proposals)

    def _pause(self, had_news: bool) -> None:
        # Ranks that only wait for others' requests must not spin.
        self._next_s = 0.0 if had_news else time.perf_counter() + max(self._cycle_time_s, 1e-4)
