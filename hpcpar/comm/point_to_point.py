"""Send and receive between two ranks of a communicator."""

from __future__ import annotations

from typing import Any

from hpcpar.comm.caller import Caller
from hpcpar.comm.operation import Message, PlannedStep, bill
from hpcpar.comm.progress import Handle
from hpcpar.errors import OperationError
from hpcpar.transport.interface import COLLECTIVE_TAGS


class PointToPoint(Caller):
    """Messages meet by sender and tag, in the order in which they were sent.

    A message must be exactly as long as the buffer that it arrives for: MismatchError otherwise.
    """

    def start_send(self, buffer: Any, to: int, tag: int = 0) -> Handle:
        """Send an array's elements; the buffer may be changed once the handle is complete."""
        source = self._view(buffer, writable=False).host
        self._require_peer(to, "the receiver")
        message = Message(to, (("input", 0, source.count),), source.count)
        return self._go(
            f"send to rank {to}",
            bill((PlannedStep((), (message,), ()),)),
            {"input": source},
            lambda: None,
            lambda: None,
            row="send",
            tag=self._tag(tag),
        )

    def send(self, buffer: Any, to: int, tag: int = 0) -> None:
        """`start_send` and wait. It may return only when the receiver has posted its receive."""
        if to == self.rank:
            raise OperationError(
                f"rank {to} would wait for itself in send; use start_send, or sendrecv, towards oneself"
            )
        self.start_send(buffer, to, tag).wait()

    def start_recv(self, buffer: Any, source: int, tag: int = 0) -> Handle:
        """Receive into an array; `wait()` returns it."""
        target = self._view(buffer, writable=True)
        self._require_peer(source, "the sender")
        message = Message(source, (("output", 0, target.host.count),), target.host.count)
        return self._go(
            f"recv from rank {source}",
            bill((PlannedStep((), (), (message,)),)),
            {"output": target.host},
            lambda: buffer,
            target.write_back or (lambda: None),
            row="recv",
            tag=self._tag(tag),
            expected_nbytes=target.host.octets.size,
        )

    def recv(self, buffer: Any, source: int, tag: int = 0) -> Any:
        """`start_recv` and wait."""
        return self.start_recv(buffer, source, tag).wait()

    def sendrecv(self, buffer: Any, to: int, out: Any, source: int, tag: int = 0) -> Any:
        """Send one array and receive another at once, so that a ring of ranks cannot deadlock.

        result   out, which must not overlap buffer
        """
        receive = self.start_recv(out, source, tag)
        send = self.start_send(buffer, to, tag)
        send.wait()
        return receive.wait()

    def _tag(self, tag: int) -> int:
        largest = self._transport.max_tag - COLLECTIVE_TAGS
        if not hasattr(tag, "__index__") or not 0 <= tag <= largest:
            raise OperationError(f"tag {tag!r}: this MPI has room for tags 0 to {largest}")
        return COLLECTIVE_TAGS + tag
