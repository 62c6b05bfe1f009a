"""Who waits for whom: ranks that wait ask each other, on a channel beside the data.

A rank answers while it waits in hpcpar itself. So silence means: busy with something else,
stopped, or dead, and the chain of answers ends at the culprit.

A question tells which call its rank waits in. Messages of different calls never meet (their tags differ), so
a rank that has made another call under this number says so, and all ranks of the communicator hear of it.
"""

from __future__ import annotations

import logging
import math
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from hpcpar.comm.whereabouts import Place, here, locate
from hpcpar.errors import MismatchError, PeerLeftError, StallError
from hpcpar.transport.interface import Transport
from hpcpar.units import format_duration

SECONDS_BETWEEN_LOOKS = 0.05
ASK_AFTER_S = 0.5
ANSWER_WITHIN_S = 1.0
SHOW_AFTER_S = 1.0
STALL_WARN_S = 60.0
WARNED_OF = 4
"""Missing ranks that a warning tells of: each may take `ANSWER_WITHIN_S`."""

log = logging.getLogger("hpcpar")


NO_NUMBER = -1
"""Of a point-to-point message."""


class Waited(Protocol):
    """Interface of an operation that the watch looks at."""

    @property
    def name(self) -> str: ...

    def waiting_for(self) -> tuple[int, ...]: ...

    def progress(self) -> str: ...


class Call(NamedTuple):
    """A collective as ranks tell each other of it, or a message.

    comm_id   the same on all ranks of a communicator, and only there
    number    of the collective in this communicator; NO_NUMBER: a message
    """

    comm_id: int
    number: int
    described: str


class Watch:
    """One rank's eye on its peers. Ranks are world ranks here.

    timeout_s   how long a wait may last before it is called a stall
    stall_warn_s   after which time of a wait the log says who is missing
    places      processes of the ranks of the job, as far as they are known
    recent      tells what this rank has called under a number on a communicator; None: nothing, or long ago
    inspectors  called at each look with the ranks that are missing: to say more of a wait, or to end it by
                an error
    """

    def __init__(self, transport: Transport, timeout_s: float, stall_warn_s: float = STALL_WARN_S) -> None:
        self.timeout_s = timeout_s
        self.stall_warn_s = stall_warn_s
        self.places: Sequence[Place] = ()
        self._warned_s = -math.inf
        self._shown = 0
        self._transport = transport
        self._rank = transport.world_ranks[transport.rank]
        self._state: dict[str, Any] = {"text": "is not in a collective", "for": (), "left": False}
        self._answers: dict[int, dict[str, Any]] = {}
        self._begun: dict[int, int] = {}
        self._unanswered: dict[int, list[float]] = {}  # by rank: times of the questions
        self._looked_s = 0.0
        self._asked_s = 0.0
        self.recent: Callable[[int, int], str | None] = lambda comm_id, number: None
        self._mismatches: dict[int, dict[int, str]] = {}  # by communicator and number of the call
        self._raised: dict[int, int] = {}
        self._refused: dict[int, str] = {}  # by communicator: what a rank has found in a message
        self.inspectors: list[Callable[[tuple[int, ...]], None]] = []

    def look(self, operation: Waited, waited_s: float, call: Call | None = None) -> None:
        """Called now and then by a rank that has waited for `waited_s` seconds.

        call     the collective or message that is waited for, if it is one
        errors   MismatchError, PeerLeftError, StallError
        """
        now_s = time.monotonic()
        if now_s - self._looked_s < SECONDS_BETWEEN_LOOKS:
            return
        self._looked_s = now_s
        missing = operation.waiting_for()
        for inspect in self.inspectors:
            inspect(missing)
        self._state = {
            "text": f"waits in {operation.name}, {operation.progress()}, for {_ranks(missing)}",
            "for": missing,
            "left": False,
        }
        # Answers of an earlier look: what such a rank still had under way has arrived since.
        gone = [rank for rank in missing if self.has_left(rank)]
        self._read_mail()
        if call is not None:
            self._require_same(call)
        if gone:
            raise PeerLeftError(
                f"{_ranks(gone)} came to the end of the program while rank {self._rank} "
                f"{self._state['text']}. Every rank must make the same calls: look for a return, "
                f"sys.exit or a shorter loop on {_ranks(gone)}."
            )
        if waited_s > self.timeout_s:
            raise StallError(self._who_waits_for_whom(waited_s))
        if waited_s > self.stall_warn_s and self._warned_s < now_s - waited_s:
            self._warned_s = now_s
            self._warn(operation, missing, waited_s)
        if waited_s > SHOW_AFTER_S:
            self._show_error(operation)
        if waited_s > ASK_AFTER_S and now_s - self._asked_s > ASK_AFTER_S:
            self._asked_s = now_s
            for rank in missing[:4]:
                self._send_question(rank, call)

    def _warn(self, operation: Waited, missing: tuple[int, ...], waited_s: float) -> None:
        """Log which ranks a wait is for, and where these are."""
        told = "; ".join(self._whereabouts(rank) for rank in missing[:WARNED_OF])
        more = f"; and {len(missing) - WARNED_OF} more" if len(missing) > WARNED_OF else ""
        log.warning(
            f"rank {self._rank} has waited {format_duration(waited_s)} in {operation.name}, "
            f"{operation.progress()}, for {_ranks(missing)}: {told}{more}. It will be an error after "
            f"timeout_s={self.timeout_s:g}"
        )

    def _whereabouts(self, rank: int) -> str:
        """Describe what a rank does, on which host, and at which line of its program if that can be found."""
        answer = self._ask(rank)
        found = locate(self.places[rank]) if answer is None and self.places else None
        at = found if answer is None else answer.get("at")
        who = f"rank {rank}" + (f" ({self.places[rank]})" if self.places else "")
        text = "does not answer" if answer is None else answer["text"]
        return f"{who} {text}{f'; its program is at {at}' if at else ''}"

    def _show_error(self, operation: Waited) -> None:
        """Log the error during whose handling this rank waits: a barrier in `finally` must not hide it."""
        error = sys.exc_info()[1]
        if error is not None and id(error) != self._shown:
            self._shown = id(error)
            lines = "".join(traceback.format_exception(error))
            log.warning(f"rank {self._rank} waits in {operation.name} while it handles this error:\n{lines}")

    def _require_same(self, call: Call) -> None:
        """Raise the MismatchError that this or another rank has found in such a call, or in one before.

        Also of a message on that communicator.
        """
        if call.comm_id in self._refused:
            raise MismatchError(self._refused.pop(call.comm_id))
        told = self._mismatches.get(call.comm_id, {})
        for number in sorted(number for number in told if number <= call.number):
            text = told.pop(number)
            if number > self._raised.get(call.comm_id, -1):
                self._raised[call.comm_id] = number
                raise MismatchError(text)

    def _compare(self, rank: int, call: Call) -> None:
        """Tell all others of another rank's call unless this rank's of the same number is the same."""
        own = None if call.number == NO_NUMBER else self.recent(call.comm_id, call.number)
        if own in (None, call.described):
            return
        text = (
            f"rank {rank} called {call.described}, but rank {self._rank} called {own}: all ranks of a "
            f"communicator must make the same calls in the same order, with arrays of the same size and type"
        )
        self._mismatches.setdefault(call.comm_id, {})[call.number] = text
        self._tell(call.comm_id, call.number, text)

    def note_mismatch(self, comm_id: int, number: int, text: str) -> None:
        """Tell the others of a difference that this rank has found, and raises an error for."""
        self._raised[comm_id] = number
        self._tell(comm_id, number, text)

    def refuse(self, ranks: Sequence[int], comm_id: int, text: str) -> None:
        """Tell all other ranks of a message's communicator that this rank raises an error for it."""
        for rank in ranks:
            if rank != self._rank:
                self._transport.control_send(rank, {"kind": "refused", "comm_id": comm_id, "text": text})

    def _tell(self, comm_id: int, number: int, text: str) -> None:
        for other in self._transport.world_ranks:
            if other != self._rank:
                told = {"kind": "mismatch", "comm_id": comm_id, "number": number, "text": text}
                self._transport.control_send(other, told)

    def begin(self, comm_id: int, number: int) -> None:
        """Note a call that MPI carries out as a whole, for those who ask: which, of which communicator."""
        self._begun[comm_id] = number

    def has_begun(self, rank: int, comm_id: int, number: int) -> bool:
        """True if a rank has told that it has begun such a call, or a later one of that communicator."""
        told: int = self._answers.get(rank, {}).get("begun", {}).get(comm_id, -1)
        return told >= number

    def has_left(self, rank: int) -> bool:
        """True if a rank has told that it has come to its end."""
        return bool(self._answers.get(rank, {}).get("left"))

    def leave(self) -> None:
        """Answer what has come in: this rank has come to its end."""
        self._state = {"text": "has come to the end of its program", "for": (), "left": True}
        self._read_mail()

    def depart(self) -> None:
        """Tell all others, unasked, that this rank makes no more calls: who waits for it need not."""
        self.leave()
        for rank in self._transport.world_ranks:
            if rank != self._rank:
                self._transport.control_send(rank, {"kind": "answer", "begun": self._begun, **self._state})

    def _send_question(self, rank: int, call: Call | None = None) -> None:
        self._transport.control_send(rank, {"kind": "ask", "call": call})
        self._unanswered.setdefault(rank, []).append(time.monotonic())

    def settle(self) -> None:
        """Receive the last answers, as all ranks are at their ends: UCX warns of messages not taken."""
        until_s = time.monotonic() + ANSWER_WITHIN_S
        self._read_mail()
        while any(self._unanswered.values()) and time.monotonic() < until_s:
            time.sleep(0.002)
            self._read_mail()

    def _read_mail(self) -> None:
        for rank, message in self._transport.control_receive():
            if message["kind"] == "mismatch":
                told = self._mismatches.setdefault(message["comm_id"], {})
                told.setdefault(message["number"], message["text"])
            elif message["kind"] == "refused":
                self._refused[message["comm_id"]] = message["text"]
            elif message["kind"] == "ask":
                if message.get("call") is not None:
                    self._compare(rank, Call(*message["call"]))
                answer = {"kind": "answer", "begun": self._begun, "at": here(), **self._state}
                self._transport.control_send(rank, answer)
            else:
                self._answers[rank] = message
                if "at" in message and self._unanswered.get(rank):  # else it was told unasked
                    del self._unanswered[rank][0]

    def _who_waits_for_whom(self, waited_s: float) -> str:
        """Follow the chain from this rank: each one asked names the next."""
        story = [f"rank {self._rank} {self._state['text']}"]
        seen = {self._rank}
        missing = self._state["for"]
        while missing:
            rank = missing[0]
            if rank in seen:
                story.append(f"so they wait for each other ({_ranks(sorted(seen))})")
                break
            seen.add(rank)
            answer = self._ask(rank)
            if answer is None:
                found = locate(self.places[rank]) if self.places else None
                story.append(
                    f"rank {rank} does not answer: it is busy outside of communication, stopped, or dead"
                    + (f" (at {found})" if found else "")
                )
                break
            story.append(f"rank {rank} {answer['text']}")
            missing = answer["for"]
        return (
            f"no progress for {format_duration(waited_s)} (timeout_s={self.timeout_s:g}): "
            f"{'; '.join(story)}. "
            f"If the wait is legitimate, raise the timeout by timeout_s in hpcpar.init() or HPCPAR_TIMEOUT_S."
        )

    def _ask(self, rank: int) -> dict[str, Any] | None:
        """Return a rank's answer; None if this or an earlier question stays open for `ANSWER_WITHIN_S`."""
        self._read_mail()
        self._answers.pop(rank, None)
        self._send_question(rank)
        deadline_s = self._unanswered[rank][0] + ANSWER_WITHIN_S
        while rank not in self._answers and time.monotonic() < deadline_s:
            time.sleep(0.002)
            self._read_mail()
        return self._answers.get(rank)


def _ranks(ranks: Any) -> str:
    names = [str(rank) for rank in ranks]
    if len(names) > 8:
        names = [*names[:8], f"… ({len(ranks)} in all)"]
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names) or 'none'}"
