"""Messages between two ranks: methods of `Communicator`.

Messages meet by sender and tag, in the order in which they were sent. A message must have the element type
and the number of elements of the buffer that it arrives for: MismatchError otherwise on the receiver, and on
all others in what they wait for next on this communicator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcpar.comm.arguments import overlap
from hpcpar.comm.compiled import Handle
from hpcpar.comm.request import PLAIN, rank_of
from hpcpar.errors import OperationError
from hpcpar.transport.buffers import bind
from hpcpar.transport.gpu.device_buffer import is_on_device

if TYPE_CHECKING:
    from hpcpar.comm.communicator import Communicator


def start_send(self: Communicator, buffer: Any, to: int, tag: int = 0) -> Handle:
    """Send an array's elements; the buffer may be changed once the handle is complete."""
    return self._calls.start("send", (None, None, None, PLAIN, None, None, to, tag), buffer)


def send(self: Communicator, buffer: Any, to: int, tag: int = 0) -> None:
    """`start_send` and wait. It may return only when the receiver has posted its receive."""
    if to == self.rank:
        raise OperationError(
            f"rank {to} would wait for itself in send; use start_send, or sendrecv, towards oneself"
        )
    self._calls.run("send", (None, None, None, PLAIN, None, None, to, tag), buffer)


def start_recv(self: Communicator, buffer: Any, source: int, tag: int = 0) -> Handle:
    """Receive into an array; `wait()` returns it."""
    return self._calls.start("recv", (None, None, None, PLAIN, None, None, source, tag), buffer)


def recv(self: Communicator, buffer: Any, source: int, tag: int = 0) -> Any:
    """`start_recv` and wait."""
    return self._calls.run("recv", (None, None, None, PLAIN, None, None, source, tag), buffer)


def sendrecv(self: Communicator, buffer: Any, to: int, out: Any, source: int, tag: int = 0) -> Any:
    """Send one array and receive another at once, so that a ring of ranks cannot deadlock.

    result   out; where it shares memory with buffer, a copy of buffer is sent
    """
    rank_of(source, self.size, "the sender", self.name)  # before anything is sent
    if not is_on_device(buffer) and not is_on_device(out):
        here, there = bind(buffer, writable=False).host, bind(out, writable=True, what="out")
        # What comes for an array that is not contiguous is written there before all may have been sent.
        if overlap(here, there.host) or there.write_back is not None:
            buffer = here.copy().elements
    send = start_send(self, buffer, to, tag)  # first: a copy that it makes is made before anything comes
    receive = start_recv(self, out, source, tag)
    send.wait()
    return receive.wait()


def probe(self: Communicator, tag: int = 0) -> int | None:
    """Make progress and look for a message that has come with this tag, without waiting or receiving it.

    result   rank of this communicator that sent it, its own for one to itself; None: there is none. A
             `start_recv` from that rank with this tag, before the next probe, receives the message
    errors   OperationError for a tag that MPI has no room for
    """
    return self._calls.probe(tag)
