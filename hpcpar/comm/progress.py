"""Drive what is under way: `poke` never blocks, `wait` does.

Nothing happens in the background: data moves while the program is in `poke`, `test` or `wait`. That costs no
thread and never fights for the interpreter lock. Several threads of the program may be there, each with
communicators of its own: one at a time advances what all of them have under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import RLock
from typing import Any

from hpcpar.comm.compiled import Awaited, CompiledCollective, Handle
from hpcpar.comm.watch import Waited, Watch
from hpcpar.errors import OperationError
from hpcpar.transport.interface import Transport

ATTEMPTS_BETWEEN_LOOKS = 128

LOOKS = 40
"""Looks of a wait for one call at a word of shared memory before it pauses, where each rank has its own core.
A look costs 60 ns."""

LOOKS_AT_A_WORD = 32
"""Pauses of a wait for one call after which it is advanced although the word that it awaits is as it was."""

NOTHING_AWAITED: Awaited = ((1,), 0, 0)
"""A word that is never as it was."""


class Progress:
    """All calls of one rank that are under way, on every communicator of a job.

    looks       of a wait for one call at a word of shared memory before it pauses
    is_forked   the process was forked from the rank, and is none itself

    A thread that owns the lock and asks for progress is in a handler or a finalizer inside of another call.
    """

    def __init__(self, transport: Transport, watch: Watch) -> None:
        self._transport = transport
        self._watch = watch
        self.looks = 1
        self.is_forked = False
        self.under_way: list[CompiledCollective] = []
        self.lock: Any = RLock()
        # Advanced first: an exception of a handler may have left it between two uses of common scratch.
        self._latest: CompiledCollective | None = None

    @property
    def is_inside(self) -> bool:
        """True in a call that a signal handler or a finalizer makes inside of another call's progress."""
        return bool(self.lock._is_owned())

    def leave_to_parent(self) -> None:
        """In a forked process: the calls under way are the rank's, whose memory and messages these are."""
        self.is_forked = self._transport.size > 1  # alone, it is a job of its own
        self.under_way.clear()
        self._latest = None
        self.lock = RLock()  # another thread may have held it

    def require_rank(self, what: str) -> None:
        """Refuse a call in a process that was forked from a rank."""
        if self.is_forked:
            raise OperationError(
                f"{what} was asked for in a process forked from rank {self._transport.rank}, which cannot be "
                f"that rank, too: make the call in the rank itself, and return to it what is to be "
                f"communicated"
            )

    def require_outside(self, what: str) -> None:
        """Refuse a call in a forked process, and one that would wait for the call that it interrupts."""
        self.require_rank(what)
        if self.is_inside:
            raise OperationError(
                f"{what} was asked for by a signal handler or a finalizer, in the middle of another call of "
                f"the same thread, which it would wait for: note in the handler that it is due, and make the "
                f"call after that one has returned"
            )

    def add(self, compiled: CompiledCollective) -> None:
        """Take a started call under way, and bring it as far as it goes without waiting."""
        # First into the list: an exception in between leaves it where `poke` finds it.
        self.under_way.append(compiled)
        self._advance([compiled])

    def leave(self, compiled: CompiledCollective) -> None:
        """Take a call under way that an exception of a handler has left."""
        if compiled not in self.under_way:
            self.under_way.append(compiled)
            self._latest = compiled

    def _advance(self, calls: Sequence[CompiledCollective], looks: int = 1) -> None:
        with self.lock:
            latest = self._latest
            for compiled in calls if latest is None else [latest, *calls]:
                self._latest = compiled
                # Another thread may have brought it to its end already.
                if compiled.advance(looks) and compiled in self.under_way:
                    self.under_way.remove(compiled)
            self._latest = None

    def run(self, compiled: CompiledCollective) -> None:
        """Bring a started call to its end; its error is raised here."""
        lock = self.lock
        if not self.under_way:  # the usual case: most end at the first attempt, without the list
            with lock:
                compiled.advance(self.looks)
        if compiled.is_under_way:
            self.under_way.append(compiled)
            self.wait(compiled)
        if compiled.error is not None:
            raise compiled.error

    def poke(self) -> None:
        """Advance everything that is under way; never blocks. Does nothing inside of another call."""
        if self.under_way and not self.is_inside:
            self._advance(list(self.under_way))

    def wait(self, compiled: CompiledCollective, handle: Handle | None = None) -> None:
        """Return when the call has ended. A StallError, or an error of a handler, is raised here."""
        self.require_outside("waiting for a call")
        attempt = 0
        started_s = time.perf_counter()
        try:
            while True:
                under_way = list(self.under_way)
                is_alone = len(under_way) == 1
                self._advance(under_way, self.looks if is_alone else 1)
                if handle.is_done if handle is not None else not compiled.is_under_way:
                    return
                # Whoever looks at one word of memory holds no lock meanwhile: other threads go on.
                awaited = compiled.executor.awaited if is_alone else None
                words, word, value = awaited or NOTHING_AWAITED
                for _ in range(LOOKS_AT_A_WORD):
                    attempt += 1
                    self._transport.pause(attempt, drives_messages=awaited is None)
                    if attempt % ATTEMPTS_BETWEEN_LOOKS == 0:
                        self._watch.look(compiled, time.perf_counter() - started_s, compiled.call)
                    if words[word] != value:
                        break
        finally:
            stopped_s = time.perf_counter()
            compiled.row.seconds_waited += stopped_s - started_s
            trace = compiled.runtime.trace
            if trace is not None:
                trace.add(f"{compiled.collective} {compiled.comm}", "waiting", started_s, stopped_s)

    def give_up(self, comm: str) -> list[CompiledCollective]:
        """Advance the calls under way on this communicator no more, and return them."""
        given_up = [each for each in self.under_way if each.comm == comm]
        for each in given_up:
            self.under_way.remove(each)
        return given_up

    def wait_until(self, condition: Callable[[], bool], waited: Waited) -> None:
        """Return when `condition()`, which pokes and may start calls, holds; errors tell of `waited`."""
        self.require_outside("waiting")
        attempt = 0
        started_s = time.perf_counter()
        while not condition():
            attempt += 1
            self._transport.pause(attempt)
            if attempt % ATTEMPTS_BETWEEN_LOOKS == 0:
                self._watch.look(waited, time.perf_counter() - started_s)
