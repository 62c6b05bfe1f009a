"""Send and receive between two ranks of a communicator."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from hpcpar.comm.caller import Caller, Family
from hpcpar.comm.compiled import CompiledStep
from hpcpar.comm.operation import Message, Operation, PlannedStep, bill
from hpcpar.comm.progress import Handle
from hpcpar.errors import OperationError
from hpcpar.transport.buffers import Binding, fingerprint
from hpcpar.transport.gpu.memory import DeviceBuffer
from hpcpar.transport.interface import COLLECTIVE_TAGS, Prepared, Transport

MOST_REMEMBERED = 256
"""Messages whose requests a communicator keeps."""
MOST_SIGHTED = 512
"""Messages that have been seen; what comes once only is not worth remembering."""


class Messages:
    """Messages of the same memory, to or from the same rank, under the same tag, that come repeatedly."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, tuple[Operation, Prepared]] = OrderedDict()
        self._sighted: set[Hashable] = set()

    def find(self, key: Hashable) -> Operation | None:
        """The operation of such a message, if it is known and not under way."""
        known = self._known.get(key)
        if known is None or not known[0].done:
            return None
        self._known.move_to_end(key)
        return known[0]

    def is_due(self, key: Hashable) -> bool:
        """Whether it is worth remembering, and there is room; from now on it has been seen."""
        if key in self._known:
            return False
        if key in self._sighted:
            return len(self._known) < MOST_REMEMBERED or self._make_room()
        if len(self._sighted) >= MOST_SIGHTED:
            self._sighted.clear()
        self._sighted.add(key)
        return False

    def add(self, key: Hashable, operation: Operation, prepared: Prepared) -> None:
        self._known[key] = operation, prepared

    def _make_room(self) -> bool:
        """Forget the one that was used longest ago of those that are not under way."""
        oldest = next((key for key, (operation, _) in self._known.items() if operation.done), None)
        if oldest is None:
            return False
        self._known.pop(oldest)[1].free()
        return True

    def free(self) -> None:
        for _, prepared in self._known.values():
            prepared.free()
        self._known.clear()


class PointToPoint(Caller):
    """Messages meet by sender and tag, in the order in which they were sent.

    A message must be exactly as long as the buffer that it arrives for: MismatchError otherwise.
    """

    def __init__(self, transport: Transport, family: Family, name: str) -> None:
        super().__init__(transport, family, name)
        self._messages = Messages()

    def start_send(self, buffer: Any, to: int, tag: int = 0) -> Handle:
        """Send an array's elements; the buffer may be changed once the handle is complete."""
        known = self._known_message("send", buffer, to, tag)
        if known is None:
            return self._start_send(buffer, to, tag)
        return self._start_again(known, "send", buffer)

    def send(self, buffer: Any, to: int, tag: int = 0) -> None:
        """`start_send` and wait. It may return only when the receiver has posted its receive."""
        if to == self.rank:
            raise OperationError(
                f"rank {to} would wait for itself in send; use start_send, or sendrecv, towards oneself"
            )
        known = self._known_message("send", buffer, to, tag)
        if known is None:
            self._start_send(buffer, to, tag).wait()
        else:
            self._do_again(known, "send", buffer)

    def start_recv(self, buffer: Any, source: int, tag: int = 0) -> Handle:
        """Receive into an array; `wait()` returns it."""
        known = self._known_message("recv", buffer, source, tag)
        if known is None:
            return self._start_recv(buffer, source, tag)
        return self._start_again(known, "recv", buffer)

    def recv(self, buffer: Any, source: int, tag: int = 0) -> Any:
        """`start_recv` and wait."""
        known = self._known_message("recv", buffer, source, tag)
        if known is None:
            return self._start_recv(buffer, source, tag).wait()
        self._do_again(known, "recv", buffer)
        return buffer

    def sendrecv(self, buffer: Any, to: int, out: Any, source: int, tag: int = 0) -> Any:
        """Send one array and receive another at once, so that a ring of ranks cannot deadlock.

        result   out, which must not overlap buffer
        """
        receive = self.start_recv(out, source, tag)
        send = self.start_send(buffer, to, tag)
        send.wait()
        return receive.wait()

    def _start_send(self, buffer: Any, to: int, tag: int) -> Handle:
        source = self._view(buffer, writable=False)
        self._require_peer(to, "the receiver")
        message = Message(to, (("input", 0, source.host.count),), source.host.count)
        step = PlannedStep((), (message,), ())
        return self._message("send", f"send to rank {to}", buffer, source, step, to, tag)

    def _start_recv(self, buffer: Any, source: int, tag: int) -> Handle:
        target = self._view(buffer, writable=True)
        self._require_peer(source, "the sender")
        message = Message(source, (("output", 0, target.host.count),), target.host.count)
        step = PlannedStep((), (), (message,))
        return self._message("recv", f"recv from rank {source}", buffer, target, step, source, tag)

    def _message(
        self, row: str, what: str, buffer: Any, binding: Binding, step: PlannedStep, peer: int, tag: int
    ) -> Handle:
        """Set a message going that is not known; at second sight it is known from then on."""
        self._require_not_freed(what)
        full_tag, host = self._tag(tag), binding.host
        receives = bool(step.receives)
        expected_nbytes = host.octets.size if receives else None
        key = self._message_key(row, buffer, peer, tag)
        if key is not None and not isinstance(host, DeviceBuffer) and self._messages.is_due(key):
            octets = host.unowned().octets
            prepared = self._transport.prepare(
                [] if receives else [(octets, peer)], [(octets, peer)] if receives else [], full_tag
            )
            operation = Operation(
                self._transport,
                [CompiledStep((), prepared, ())],
                self._counting(row, host.octets.size, receives),
                what=what,
                number=self._calls[0],
                comm=self.name,
                memory=buffer,
                expected_nbytes=expected_nbytes,
            )
            self._messages.add(key, operation, prepared)
            return self._under_way_as(operation, row, buffer)
        return self._go(
            what,
            bill((step,)),
            {"output" if receives else "input": host},
            lambda: buffer if receives else None,
            (binding.write_back if receives else None) or (lambda: None),
            row=row,
            tag=full_tag,
            expected_nbytes=expected_nbytes,
        )

    def _known_message(self, row: str, buffer: Any, peer: int, tag: int) -> Operation | None:
        """The operation of a message that was made before, if it may be made again now."""
        key = self._message_key(row, buffer, peer, tag)
        return None if key is None else self._messages.find(key)

    def _message_key(self, row: str, buffer: Any, peer: int, tag: int) -> Hashable:
        """What messages have in common that are the same but for what the memory holds; None: nothing."""
        if self._family.trace is not None or type(peer) is not int or type(tag) is not int:
            return None
        where = fingerprint(buffer)
        return None if where is None else (self._label, row, peer, tag, where)

    def _counting(self, row: str, nbytes: int, receives: bool) -> Callable[[Operation], None]:
        """What is done at the end of a message that is known."""
        name = self._label or row
        figures = (0, 0, nbytes) if receives else (1, nbytes, 0)
        return lambda _: self.traffic.row(name).count(*figures)

    def _do_again(self, operation: Operation, row: str, buffer: Any) -> None:
        """A known message, to its end."""
        operation.restart(self._calls[0], buffer)
        self._family.progress.run(operation)
        waited_s = time.perf_counter() - operation.started_s
        self.traffic.row(self._label or row).seconds_waited += waited_s

    def _start_again(self, operation: Operation, row: str, buffer: Any) -> Handle:
        """A known message, set going."""
        operation.restart(self._calls[0], buffer)
        return self._under_way_as(operation, row, buffer)

    def _under_way_as(self, operation: Operation, row: str, buffer: Any) -> Handle:
        progress, account = self._family.progress, self.traffic.row(self._label or row)
        handle = Handle(progress, operation, lambda: buffer if row == "recv" else None, account)
        progress.add(operation)
        return handle

    def _tag(self, tag: int) -> int:
        largest = self._transport.max_tag - COLLECTIVE_TAGS
        if not hasattr(tag, "__index__") or not 0 <= tag <= largest:
            raise OperationError(f"tag {tag!r}: this MPI has room for tags 0 to {largest}")
        return COLLECTIVE_TAGS + tag
