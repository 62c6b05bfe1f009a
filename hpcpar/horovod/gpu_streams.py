"""The engine's GPU stream, ordered after the caller's stream that makes tensors and before its later use.

    caller's stream   make tensors ──event─┐                              ┌─wait── use results
    engine's stream                        └─wait── pack, reduce, unpack ─┴─event

The engine moves on whenever some call lets it, in whatever stream that caller works in. A communicator orders
the stream in which a handle is waited for, and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from hpcpar.horovod.operations import ReadyOp, Ticket

T = TypeVar("T")


def in_this_stream(device: torch.device, call: Callable[[], T]) -> Callable[[], T]:
    """Bind a call to the stream in which the caller works on this device now."""
    if device.type != "cuda":
        return call
    stream = torch.cuda.current_stream(device)

    def later() -> T:
        with torch.cuda.stream(stream):
            return call()

    return later


class GpuStreams:
    """The engine's streams, one for each GPU that its tensors are on."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def asked(self, ticket: Ticket) -> None:
        """Record an event after which the ticket's tensor is made, in the caller's stream."""
        if ticket.tensor is not None:
            ticket.made = torch.cuda.current_stream(ticket.tensor.device).record_event()

    @contextmanager
    def working_on(self, items: Sequence[ReadyOp]) -> Iterator[None]:
        """Have torch work in the engine's stream, once the tensors of these operations have been made."""
        tickets = [item.ticket for item in items if item.ticket is not None]
        tensors = [ticket.tensor for ticket in tickets if ticket.tensor is not None]
        if not tensors and not torch.cuda.is_available():  # this rank has joined, and brings zeros
            yield
            return
        device = tensors[0].device if tensors else torch.device("cuda", torch.cuda.current_device())
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for ticket in tickets:
                if ticket.made is not None:
                    stream.wait_event(ticket.made)
                    ticket.made = None
                    for tensor in (ticket.tensor, ticket.output):
                        if tensor is not None and tensor.is_cuda:
                            tensor.record_stream(stream)
            yield

    def finished(self, items: Sequence[ReadyOp]) -> None:
        """Record an event after which these operations' results are there, in the engine's stream."""
        tickets = [item.ticket for item in items if item.ticket is not None]
        if tickets:
            event = torch.cuda.current_stream().record_event()
            for ticket in tickets:
                ticket.finished = event

    def taken(self, ticket: Ticket) -> None:
        """Order the caller's stream after the result."""
        if ticket.finished is None:
            return
        results = ticket.result if isinstance(ticket.result, tuple) else (ticket.result,)
        for result in results:
            if isinstance(result, torch.Tensor) and result.is_cuda:
                stream = torch.cuda.current_stream(result.device)
                stream.wait_event(ticket.finished)
                result.record_stream(stream)
