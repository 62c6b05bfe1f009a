"""Operations under way, and what it means to wait for one of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from hpcpar.comm.accounting import TrafficRow
from hpcpar.comm.operation import Operation
from hpcpar.comm.watch import Waited, Watch
from hpcpar.transport.interface import Transport

ATTEMPTS_BETWEEN_LOOKS = 128

ATTEMPTS_ALONE = 100
"""How often an operation that nothing else is under way beside is tested before the wait gets patient."""


class Progress:
    """All operations of one rank, on every communicator of a family.

    under_way   those that have not ended; always the same list
    Nothing happens in the background: data moves while the program is in `poke`, `test` or `wait`. That
    costs no thread and never fights for the interpreter lock. Several threads of the program may be there,
    each with communicators of its own: one at a time moves what all of them have under way.
    """

    def __init__(self, transport: Transport, watch: Watch) -> None:
        self._transport = transport
        self._watch = watch
        self.under_way: list[Operation] = []
        self._lock = threading.RLock()

    def add(self, operation: Operation) -> None:
        """Take an operation under way, and bring it as far as it goes without waiting."""
        with self._lock:
            if not self._advance(operation):
                self.under_way.append(operation)

    def run(self, operation: Operation) -> None:
        """Bring an operation to its end at once; `add` and `wait`, short of all that need not be done."""
        if not self.under_way:
            for attempt in range(ATTEMPTS_ALONE):
                with self._lock:
                    if operation.advance():
                        return
                self._transport.pause(attempt)
        self.add(operation)
        self.wait(operation)

    def poke(self) -> None:
        """Advance everything that is under way; never blocks."""
        if self.under_way:
            with self._lock:
                self.under_way[:] = [each for each in self.under_way if not self._advance(each)]

    def wait(self, operation: Operation) -> None:
        """Return when the operation is complete; its error, or a StallError, is raised here."""
        attempt = 0
        outcome = operation.outcome
        started_s = time.perf_counter()
        while True:
            self.poke()
            if outcome.done or outcome.error is not None:
                break
            attempt += 1
            self._transport.pause(attempt)
            if attempt % ATTEMPTS_BETWEEN_LOOKS == 0:
                self._watch.look(operation, time.perf_counter() - started_s)
        if outcome.error is not None:
            raise outcome.error

    def give_up(self, comm: str) -> list[Operation]:
        """Advance the operations under way on this communicator no more, and return them."""
        with self._lock:
            given_up = [operation for operation in self.under_way if operation.comm == comm]
            self.under_way[:] = [operation for operation in self.under_way if operation.comm != comm]
        return given_up

    def wait_until(self, condition: Callable[[], bool], waited: Waited) -> None:
        """Return when `condition()`, which pokes and may start operations, holds; errors tell of `waited`."""
        attempt = 0
        started_s = time.perf_counter()
        while not condition():
            attempt += 1
            self._transport.pause(attempt)
            if attempt % ATTEMPTS_BETWEEN_LOOKS == 0:
                self._watch.look(waited, time.perf_counter() - started_s)

    @staticmethod
    def _advance(operation: Operation) -> bool:
        """True when there is nothing left to do; an error is kept for whoever waits."""
        try:
            return operation.advance()
        except Exception as error:
            operation.outcome.error = error
            return True


class Handle:
    """A collective or a message under way: `wait()` for its result, or `test()` and go on.

    The buffers that were handed over must neither be written nor, unless they are only sent, be
    read before `wait()` has returned.
    """

    def __init__(
        self, progress: Progress, operation: Operation, result: Callable[[], Any], row: TrafficRow
    ) -> None:
        self._progress = progress
        self._operation = operation
        self._outcome = operation.outcome  # the operation itself may be used again
        self._result = result
        self._row = row

    def test(self) -> bool:
        """Make progress on everything under way; True when this one is complete."""
        self._progress.poke()
        return self.done

    @property
    def done(self) -> bool:
        """Whether it is complete, as far as is known without making progress; its error is raised."""
        if self._outcome.error is not None:
            raise self._outcome.error
        return self._outcome.done

    def waiting_for(self) -> tuple[int, ...]:
        """World ranks whose messages are missing."""
        return () if self._outcome.done else self._operation.waiting_for()

    def wait(self) -> Any:
        """Block until complete; returns the result. A second call returns it again.

        errors   StallError after the communicator's timeout_s, naming who waits for whom
                 PeerLeftError when a rank that is waited for has ended
        """
        if self._outcome.error is not None:
            raise self._outcome.error
        if not self._outcome.done:
            started_s = time.perf_counter()
            self._progress.wait(self._operation)
            self._row.seconds_waited += time.perf_counter() - started_s
        return self._result()
