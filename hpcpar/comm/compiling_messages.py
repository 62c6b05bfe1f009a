"""Compile a point-to-point message: one step, by a message of MPI or by what devices do."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from hpcpar.algorithms.step import Space
from hpcpar.comm.arguments import Arguments, view
from hpcpar.comm.compiled import CompiledCollective, Turn
from hpcpar.comm.compiling import bind_device_steps, new_compiled
from hpcpar.comm.executors.peer_message import PeerMessage
from hpcpar.comm.plan import Message, PlannedStep, counted
from hpcpar.comm.request import Request, is_fixed, is_used_in_place, rank_of
from hpcpar.errors import MismatchError
from hpcpar.transport.buffers import write_counter
from hpcpar.transport.gpu.device_buffer import DeviceBuffer
from hpcpar.transport.interface import COLLECTIVE_TAGS

if TYPE_CHECKING:
    from hpcpar.comm.calls import Calls


def compile_message(calls: Calls, request: Request, array: Any) -> CompiledCollective:
    """Compile one point-to-point message. From the second time on it uses a persistent request."""
    receives = request.collective == "recv"
    whom = "the sender" if receives else "the receiver"
    binding = view(calls, array, writable=receives)
    host = binding.host
    peer = rank_of(request.peer, calls.size, whom, calls.name)
    tag = COLLECTIVE_TAGS + calls.user_tag(request.tag)
    what = f"recv from rank {peer}" if receives else f"send to rank {peer}"
    calls.require_usable(what)
    space: Space = "output" if receives else "input"
    message = Message(peer, ((space, 0, host.count),), host.count)
    step = PlannedStep((), () if receives else (message,), (message,) if receives else ())
    planned, spaces = counted((step,)), {space: host}
    compiled = new_compiled(calls, request, what, "", planned, spaces)
    compiled.collective, compiled.is_message = what, True
    if receives:
        compiled.count_write = write_counter(array)
    else:
        compiled.result = lambda buffer, out: None
    last = [binding.write_back] if receives and binding.write_back is not None else []
    if isinstance(host, DeviceBuffer):
        compiled.receive = (peer, tag) if receives else None
        arguments = Arguments()
        if receives:
            arguments.last = [partial(_require_length, compiled, host.octets.size), *last]
        bind_device_steps(calls, compiled, arguments, planned, spaces, tag)
        return compiled
    turn = refuse = None
    if receives:
        turn = calls.receives.setdefault((peer, tag), Turn())
        refuse = partial(_refuse, calls, compiled, peer, f"{host.dtype}[{host.count}]")
    side = PeerMessage(calls.transport, peer, tag, host, turn=turn, refuse=refuse, last=last)
    compiled.executor, compiled.nbytes = side, side.nbytes
    compiled.receive = (peer, tag) if receives and not side.is_short else None
    compiled.is_cached = request.input is not None and is_used_in_place(array) and is_fixed(request)
    return compiled


def _refuse(
    calls: Calls, compiled: CompiledCollective, peer: int, expected: str, found: str
) -> MismatchError:
    """Tell all ranks that a message is not the one that this rank receives; the error for this rank."""
    sender, own = calls.transport.world_ranks[peer], calls.transport.world_ranks[calls.rank]
    text = (
        f"rank {own} expected {expected} in {compiled.name}, but rank {sender} sent {found}: sender and "
        f"receiver must name the same type and number of elements"
    )
    if sender != own:
        calls.runtime.watch.refuse(calls.transport.world_ranks, calls.comm_id, text)
    return MismatchError(text)


def _require_length(compiled: CompiledCollective, expected_nbytes: int) -> None:
    """Refuse a message that brought more or fewer bytes."""
    found = compiled.executor.received_nbytes()
    if found != expected_nbytes:
        raise MismatchError(
            f"{compiled.name} expected {expected_nbytes} bytes, but {found} came; "
            f"sender and receiver must name the same number of bytes"
        )
