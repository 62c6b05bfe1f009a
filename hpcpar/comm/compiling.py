"""Compile a request: choose the algorithm, plan, and bind the plan to memory by an executor."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from hpcpar import partition
from hpcpar.algorithms.registry import Algorithm
from hpcpar.comm.arguments import Arguments, Kept, copy_to
from hpcpar.comm.blocks import Action
from hpcpar.comm.compiled import CompiledCollective, ExecutorStep, StepSequence, Turn
from hpcpar.comm.device_steps import device_steps
from hpcpar.comm.devices import lead_caller
from hpcpar.comm.executors import native
from hpcpar.comm.executors.message import PERSISTENT_NBYTES, TURNS, MessageProgram, MessageStep, Signature
from hpcpar.comm.executors.shared_binding import NodeLayout, Schedules, bind_steps, is_short
from hpcpar.comm.executors.shared_call import SharedCall
from hpcpar.comm.plan import (
    NOT_COUNTED,
    Offsets,
    Plan,
    PlannedStep,
    plan,
    reading_input,
    received_elsewhere,
    writes_all,
)
from hpcpar.comm.reductions import finishing
from hpcpar.comm.request import Request
from hpcpar.comm.select import NATIVE, segments_for
from hpcpar.comm.shm_segment import ShmSegment
from hpcpar.comm.spaces import Spaces, copying, itemsize_of
from hpcpar.errors import MismatchError
from hpcpar.transport.buffers import HostBuffer
from hpcpar.transport.gpu.device_buffer import DeviceBuffer
from hpcpar.transport.interface import CALL_TAGS, NativeCall
from hpcpar.units import KiB, MiB

if TYPE_CHECKING:
    from hpcpar.comm.calls import Calls

KEPT_COPY_NBYTES = 4 * MiB
"""A call that works on a larger copy of its input is not kept."""

IN_PART_FROM_NBYTES = 64 * KiB
"""On several nodes, arrays from this size on use shared memory within each node; shorter ones travel by
persistent messages, which start sooner."""

FRESH_TAGS = CALL_TAGS // 2
"""Below: tags of calls with fresh requests; from here to CALL_TAGS: tags of persistent ones."""

CALLS_TOLD_APART = 256
"""Calls with fresh requests that may be under way at once."""


NOTHING = HostBuffer(np.empty(0, dtype=np.uint8), "uint8", 1)
"""Data of a barrier."""


def _require_counts(calls: Calls, compiled: CompiledCollective, expected: int, found: int) -> None:
    """Refuse a step of an uneven all-to-all that brought fewer bytes, and tell all ranks."""
    if found != expected:
        text = (
            f"rank {calls.transport.world_ranks[calls.rank]} expected {expected} bytes in a step of "
            f"{compiled.described}, but {found} came: send_counts and receive_counts must fit"
        )
        calls.runtime.watch.note_mismatch(calls.comm_id, compiled.number, text)
        raise MismatchError(text)


def _refuse(calls: Calls, compiled: CompiledCollective, text: str) -> None:
    """End a call that has been begun, and tell all ranks."""
    if isinstance(compiled.executor, SharedCall):
        raise compiled.executor.failed(text)
    calls.runtime.watch.note_mismatch(calls.comm_id, compiled.number, text)
    raise MismatchError(text)


def compile_collective(
    calls: Calls, request: Request, arguments: Arguments, described: str, buffer: Any, out: Any
) -> CompiledCollective:
    spaces = arguments.spaces
    whole = next(iter(spaces.values()), NOTHING)
    algorithm = calls.choose(
        request.collective,
        whole.octets.size,
        uneven=arguments.uneven,
        named=request.algorithm,
        dtype=whole.dtype,
        op=arguments.op,
        on_device=isinstance(whole, DeviceBuffer),
    )
    if algorithm.name == NATIVE:
        return _by_mpi(calls, request, arguments, described)
    segments = segments_for(algorithm, whole.octets.size)
    offsets = arguments.offsets
    if offsets is not None and segments > 1:
        offsets = tuple((space, partition.refined(edges, segments)) for space, edges in offsets)
    chunks = max(1, algorithm.chunks(calls.size, segments, calls.transport.nodes))
    cut = offsets or (("data", partition.offsets(partition.counts(whole.count, chunks))),)
    work_chunks = algorithm.work_chunks(calls.size)
    if work_chunks:
        cut, spaces = _with_work(cut, spaces, work_chunks)
    arguments.reads_input = (
        arguments.reads_input
        and not isinstance(whole, DeviceBuffer)
        and _can_read_input(calls, algorithm, arguments.root or 0, segments)
    )
    bound = algorithm, calls.rank, calls.size, arguments.root or 0, segments, cut, calls.transport.nodes
    kept = arguments.kept
    planned = plan(*bound, reads_input=arguments.reads_input and arguments.lent is not None)
    if arguments.reads_input and arguments.lent is not None:
        if kept is not None or writes_all(planned, whole.count):
            spaces = {**spaces, "input": arguments.lent}
            arguments.first = []
        else:
            planned = plan(*bound)
    copy_nbytes = 0
    if kept is not None:
        planned, spaces, copy_nbytes = _apart(calls, arguments, kept, planned, spaces)
    compiled = new_compiled(calls, request, described, algorithm.name, planned, spaces)
    compiled.result = arguments.result
    compiled.nbytes = copy_nbytes
    arguments.last = [*arguments.last, *_divided(calls, arguments), *arguments.at_end]
    compiled.is_cached = arguments.same_everywhere and copy_nbytes <= KEPT_COPY_NBYTES
    if arguments.refused:
        arguments.first = [partial(_refuse, calls, compiled, arguments.refused)]
    _bind_steps(calls, compiled, arguments, algorithm, segments, cut, planned, spaces)
    return compiled


def _apart(
    calls: Calls, arguments: Arguments, kept: Kept, planned: Plan, spaces: Spaces
) -> tuple[Plan, Spaces, int]:
    """Receive elsewhere than in data that must stay as they are; also returns the bytes of a copy of them."""
    target, whole = kept.target, next(iter(spaces.values()))
    if not planned.received:
        if target is not None:
            arguments.last[:0] = copy_to(target, whole.part(*arguments.own))
        return planned, spaces, 0
    if target is not None:
        # Messages of one step by two executors are two sums: the second one adds to the first.
        is_filled = calls.shares_in_part
        elsewhere = received_elsewhere(planned, ("data", *arguments.own), is_filled=is_filled)
        if elsewhere is not None:
            if is_filled:
                arguments.first.extend(copy_to(target, whole.part(*arguments.own)))
            return elsewhere, {**spaces, "output": target}, 0
    work = whole.scratch(whole.count)
    if "input" not in spaces:
        arguments.first.append(copying(work.octets, whole.octets))
    if target is not None:
        arguments.last.insert(0, copying(target.octets, work.part(*arguments.own).octets))
    return planned, {**spaces, "data": work}, whole.octets.size


def _can_read_input(calls: Calls, algorithm: Algorithm, root: int, segments: int) -> bool:
    """True if ranks need not copy their input first. The same on all ranks that share memory."""
    segment = calls.segment
    if segment is not None and not calls.is_all_shared:
        return False  # messages of one step by two executors are two sums: both would begin with the input
    nodes = calls.transport.nodes
    return all(
        reading_input(algorithm.schedule(rank, calls.size, root=root, segments=segments, nodes=nodes))
        is not None
        for rank in ([calls.rank] if segment is None else segment.ranks)
    )


def new_compiled(
    calls: Calls, request: Request, described: str, by: str, planned: Plan, spaces: Spaces
) -> CompiledCollective:
    itemsize = itemsize_of(spaces)
    compiled = CompiledCollective(
        request.collective,
        calls.name,
        calls.runtime,
        calls.transport.world_ranks,
        calls.traffic.row(calls.label or request.collective),
        described=described,
        by=by,
        traffic=(planned.messages, planned.sent * itemsize, planned.received * itemsize),
    )
    compiled.comm_id = calls.comm_id
    compiled.called = request.name
    return compiled


def _bind_steps(
    calls: Calls,
    compiled: CompiledCollective,
    arguments: Arguments,
    algorithm: Algorithm,
    segments: int,
    cut: Offsets,
    planned: Plan,
    spaces: Spaces,
) -> None:
    """Choose the executor, and have it bind the plan to memory."""
    whole = next(iter(spaces.values()), NOTHING)
    op, nbytes = arguments.op, whole.octets.size
    # All ranks have the same words; messages of calls with other words do not meet.
    digest = crc32(f"{compiled.described} by {algorithm.name}".encode())
    first_tag = digest % (FRESH_TAGS // CALLS_TOLD_APART) * CALLS_TOLD_APART
    tags = range(first_tag, first_tag + CALLS_TOLD_APART)
    scratch = calls.runtime.scratch
    require = None if arguments.same_everywhere else partial(_require_counts, calls, compiled)
    fresh = partial(MessageStep, require=require)
    if isinstance(whole, DeviceBuffer):
        tag = tags[calls.count[0] % CALLS_TOLD_APART]
        bind_device_steps(calls, compiled, arguments, planned, spaces, tag)
        return
    layout = _layout(calls, arguments, algorithm, segments, cut, whole)
    call = None if layout is None else _shared_call(calls, compiled, arguments, layout, spaces, nbytes)
    if call is not None:
        elsewhere: dict[int, ExecutorStep] = {}
        for step in planned.steps:
            beyond = _beyond(step, call.segment)
            if beyond is not None:
                elsewhere[step.index] = fresh(calls.transport, beyond, spaces, op, tags, scratch)
        if (
            "input" not in spaces
            and arguments.lent is not None
            and not elsewhere
            and call.lend(arguments.lent, arguments.own, planned)
        ):
            arguments.first = []
        bind_steps(call, planned, op, elsewhere, arguments.first, arguments.last)
        compiled.executor = call
    elif (
        calls.size > 1
        and arguments.same_everywhere
        and nbytes <= PERSISTENT_NBYTES
        and not _is_in_part(calls, arguments, algorithm, whole)  # here a rank is alone on its node
    ):
        program = MessageProgram(
            calls.transport, planned.steps, spaces, op, scratch, _signature(calls, digest)
        )
        compiled.executor = StepSequence((), arguments.first, arguments.last, program)
        compiled.nbytes += program.nbytes
    else:
        steps = [fresh(calls.transport, step, spaces, op, tags, scratch) for step in planned.steps]
        compiled.executor = StepSequence(steps, arguments.first, arguments.last)


def bind_device_steps(
    calls: Calls,
    compiled: CompiledCollective,
    arguments: Arguments,
    planned: Plan,
    spaces: Spaces,
    tag: int,
) -> None:
    """Bind a plan to device memory, for one call: a kernel's start hides what could be prepared."""
    devices, whole = calls.runtime.devices, next(iter(spaces.values()))
    assert devices is not None, "no array is seen as a device's without them"
    assert isinstance(whole, DeviceBuffer)
    steps, end = device_steps(devices, calls.transport, calls.mailroom, planned, spaces, arguments.op, tag)
    # Whoever begins with it may be in another thread than this one.
    first = [whole.queue.use, *arguments.first] if arguments.first else ()
    compiled.executor = StepSequence(
        [native.PostedStep(step) for step in steps], first, [*arguments.last, end]
    )
    compiled.is_cached = False
    compiled.lead = partial(lead_caller, whole)


def _layout(
    calls: Calls,
    arguments: Arguments,
    algorithm: Algorithm,
    segments: int,
    cut: Offsets,
    whole: HostBuffer,
) -> NodeLayout | None:
    """The schedules of a node's ranks, as each of them knows them; None where they use messages."""
    if calls.segment is None or not (calls.is_all_shared or _is_in_part(calls, arguments, algorithm, whole)):
        return None
    nodes, root = calls.transport.nodes, arguments.root or 0
    schedules = Schedules(algorithm, calls.size, root, segments, nodes, arguments.reads_input)
    return NodeLayout(schedules, cut, whole.itemsize, is_uneven=not arguments.same_everywhere)


def _is_in_part(calls: Calls, arguments: Arguments, algorithm: Algorithm, whole: HostBuffer) -> bool:
    """True if nodes use their shared memory, and messages between them. The same on every rank."""
    is_long = whole.octets.size >= IN_PART_FROM_NBYTES or not arguments.same_everywhere
    return calls.shares_in_part and calls.reads_private and is_long and not algorithm.ordered


def _shared_call(
    calls: Calls,
    compiled: CompiledCollective,
    arguments: Arguments,
    layout: NodeLayout,
    spaces: Spaces,
    nbytes: int,
) -> SharedCall | None:
    """The call in shared memory; None where it is too long for a body, and memory cannot be read."""
    segment = calls.segment
    assert segment is not None
    short = calls.is_all_shared and is_short(segment, layout, nbytes, combines=arguments.combines)
    if not short and not segment.pids:
        return None
    described = f"{compiled.described}, by {layout.schedules.algorithm.name}"
    tell = partial(calls.runtime.watch.note_mismatch, calls.comm_id)
    call = SharedCall(segment, layout, calls.rank, spaces, described, is_short=short, tell=tell)
    if layout.is_uneven:
        call.table = arguments.table(segment.ranks)
    return call


def _signature(calls: Calls, digest: int) -> Signature:
    number = digest % (FRESH_TAGS // TURNS)
    found = calls.signatures.get(number)
    if found is None:
        first = FRESH_TAGS + number * TURNS
        found = calls.signatures[number] = Signature(first, [Turn() for _ in range(TURNS)])
    return found


def _by_mpi(calls: Calls, request: Request, arguments: Arguments, described: str) -> CompiledCollective:
    """Leave the call to MPI, as one step."""
    spaces, kept = arguments.spaces, arguments.kept
    first, last = arguments.first, arguments.last
    data = next(iter(spaces.values()))
    if kept is not None:
        work = data.scratch(data.count)
        first.append(copying(work.octets, data.octets))
        if kept.target is not None:
            last.insert(0, copying(kept.target.octets, work.part(*arguments.own).octets))
        spaces, data = {**spaces, "data": work}, work
    asked = NativeCall(
        request.collective,
        None,
        data,
        op=arguments.op,
        root=arguments.root or 0,
        even=not arguments.uneven,
    )
    participants = native.Participants(
        calls.runtime.watch, calls.transport.world_ranks, calls.comm_id, calls.count[0]
    )
    step = native.native_step(calls.transport, participants, asked, spaces, arguments.offsets)
    compiled = new_compiled(calls, request, described, NATIVE, NOT_COUNTED, spaces)
    compiled.result = arguments.result
    last = [*last, *_divided(calls, arguments), *arguments.at_end]
    compiled.executor = StepSequence([native.PostedStep(step)], first, last)
    compiled.row.calls_by_mpi += 1
    return compiled


def _divided(calls: Calls, arguments: Arguments) -> list[Action]:
    """Divide an average by the number of ranks, and multiply by a factor."""
    is_divided = arguments.op == "average" and calls.size > 1
    if arguments.averaged is None or not (is_divided or arguments.factor != 1.0):
        return []
    return finishing(arguments.op, arguments.averaged, calls.size, arguments.factor)


def _beyond(step: PlannedStep, segment: ShmSegment) -> PlannedStep | None:
    """The messages of a step to and from other nodes; None: there are none."""
    sends = tuple(message for message in step.sends if message.peer not in segment.local)
    receives = tuple(message for message in step.receives if message.peer not in segment.local)
    return PlannedStep((), sends, receives, step.index) if sends or receives else None


def _with_work(offsets: Offsets, spaces: Spaces, chunks: int) -> tuple[Offsets, Spaces]:
    """Add scratch of `chunks` chunks, each as large as the first chunk of the first space."""
    edges = offsets[0][1]
    count = edges[1] - edges[0]
    work = next(iter(spaces.values())).scratch(count * chunks)
    work_edges = tuple(range(0, count * chunks + 1, count)) if count else (0,) * (chunks + 1)
    return (*offsets, ("work", work_edges)), {**spaces, "work": work}
