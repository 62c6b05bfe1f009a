"""Stop in good order when the machine asks: all ranks after the same step, however the signals reach them.

    with hpcpar.Preemption(world) as preemption:
        for step in range(first_step, steps):
            train_one_step(step)
            if preemption.is_agreed():
                save(step + 1)
                sys.exit(preemption.exit_status)      # 75: start me again; 130 after Ctrl-C

A rank that is signalled cannot stop at once: others may be a collective behind it, or may get their
signal later, or none. So after each step all ranks reduce one byte to its maximum, "has any been asked to
stop?", without waiting for it: they look at the answer after the next step, when it has long been there.

    rank 0   step 7 ─ 0? ─ step 8 ─ 7: no ─ 0? ─ step 9 ─ 8: yes, stop
    rank 1   step 7 ─ 0? ─ step 8 ─ 7: no ─ 1? ─ step 9 ─ 8: yes, stop
                             ^ SIGUSR1
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import numpy as np

from hpcpar.comm.communicator import Communicator
from hpcpar.comm.compiled import Handle
from hpcpar.launch.signals import SAME_WITHIN_S, SIGNALS, START_AGAIN, SignalListener, tell_launcher

log = logging.getLogger("hpcpar")

QUESTION_NBYTES = 1

INTERRUPT_SAME_WITHIN_S = 0.3
"""A terminal sends Ctrl-C to every process, and mpiexec hands it on; nobody presses it twice so soon."""

START_IT_AGAIN, INTERRUPTED = 1, 2
"""The answers that ask for a stop: by the machine, and by a person."""


def _nothing() -> None: ...


class Preemption:
    """Agreement among all ranks of `comm` whether this job is to stop. Making one is collective.

    signals     that ask for it, on any rank; () = `request()` alone does. Where there are some it takes
                the main thread; `hpcpar.launch.signals` tells what becomes of their handlers meanwhile. Or
                a SignalListener that is there already, and stays: what it has heard asks, too
    requested   what this rank has heard for itself: the signal, or None

    The first signal asks. One that comes more than 5 s after it ends the whole job at once, with status
    128 and the signal's number, also while the main thread is blocked in C.

    cost        for each call of `is_agreed` an all-reduce of one byte that nobody waits for
    delay       the step in which the signal arrives and one more
    """

    def __init__(
        self, comm: Communicator, signals: Sequence[signal.Signals] | SignalListener = SIGNALS
    ) -> None:
        own = comm.split(0, name="preemption")
        assert own is not None, "every rank is in it"
        self.comm = own
        self.requested: str | None = None
        self._agreed = 0
        self._question = np.zeros(QUESTION_NBYTES, dtype=np.uint8)
        self._answer: Handle | None = None
        self._stop_listening = _nothing
        if isinstance(signals, SignalListener):
            signals.tell(self._hear, self._end_at_once)
            self._stop_listening = signals.tell
        elif signals:
            self._stop_listening = SignalListener(signals, self._hear, self._end_at_once).close
        if signals:
            tell_launcher()

    @property
    def exit_status(self) -> int:
        """Status for a program that stops to end with: 75, "start me again", or 130 after Ctrl-C."""
        return 128 + signal.SIGINT if self._agreed == INTERRUPTED else START_AGAIN

    @property
    def has_agreed(self) -> bool:
        """True once all ranks have agreed to stop; asks nothing, and so costs nothing."""
        return bool(self._agreed)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Within it Ctrl-C asks for a stop, too, and a second one ends the job at once. Main thread only.

        Where SIGINT is ignored, as in a shell's background, it stays so.
        """
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            yield
            return
        within_s = INTERRUPT_SAME_WITHIN_S
        with SignalListener((signal.SIGINT,), self._hear, self._end_at_once, same_within_s=within_s):
            yield

    def request(self, why: str = "the program") -> None:
        """Ask for a stop, as a signal would; on any rank, from any thread."""
        self.requested = self.requested or why

    def is_agreed(self) -> bool:
        """Call it once after each step: True on every rank after the same one. Collective.

        From then on it stays True, and costs nothing.
        """
        self.settle()
        if not self._agreed:
            why = self.requested  # read once: the listener's thread may set it at any moment
            asked = INTERRUPTED if why == signal.SIGINT.name else START_IT_AGAIN
            self._question[0] = 0 if why is None else asked
            self._answer = self.comm.start_allreduce(self._question, "max")
        return bool(self._agreed)

    def settle(self) -> None:
        """Wait for the question that is under way, if one is: so that its bytes are counted. Collective."""
        if self._answer is not None:
            self._answer.wait()
            self._answer = None
            self._agreed = int(self._question[0])

    def close(self) -> None:
        """Signals are handled as before. Collective, for the last question may still be under way."""
        self._stop_listening()
        self.settle()
        self.comm.free()

    def __enter__(self) -> Preemption:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:  # `close` is collective, and the other ranks may never come to it
            self._stop_listening()

    def _hear(self, number: signal.Signals) -> None:
        self.request(number.name)
        # A thousand ranks hear it; one of them is enough to tell people.
        if self.comm.rank == 0:
            within_s = INTERRUPT_SAME_WITHIN_S if number == signal.SIGINT else SAME_WITHIN_S
            log.warning(
                f"{number.name}: the job will stop after this step or the next; another one, later than "
                f"{within_s:g} s from now, ends it at once"
            )

    def _end_at_once(self, number: signal.Signals) -> None:
        self.comm.end_job(f"{number.name}, after it had been asked to stop already", 128 + number)
