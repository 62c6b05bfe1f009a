"""From a request to a compiled collective: validate once, choose the algorithm, plan, bind to an executor.

Request ──> cache ── hit ───────────────────────────────────────────> CompiledCollective
              └── miss ─> bind arguments ─> choose ─> plan ─> executor ────┘
"""

from __future__ import annotations

import copy
import operator
from functools import partial
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from hpcpar import partition
from hpcpar.algorithms.registry import ALGORITHMS, Algorithm
from hpcpar.algorithms.step import Space
from hpcpar.comm import agree
from hpcpar.comm.blocks import Action
from hpcpar.comm.collectives import COLLECTIVES, ROOTED, Arguments, copy_to, view
from hpcpar.comm.compiled import CompiledCollective, ExecutorStep, Handle, Turn
from hpcpar.comm.device_steps import device_steps
from hpcpar.comm.devices import Devices, lead_caller
from hpcpar.comm.executors import native
from hpcpar.comm.executors.message import PERSISTENT_NBYTES, TURNS, MessageProgram, MessageStep, Signature
from hpcpar.comm.executors.shared_binding import Layout, is_short, shared_steps
from hpcpar.comm.executors.shared_memory import SharedCall
from hpcpar.comm.plan import (
    NOT_COUNTED,
    Message,
    Offsets,
    Plan,
    PlannedStep,
    counted,
    plan,
    received_elsewhere,
)
from hpcpar.comm.reductions import finishing
from hpcpar.comm.request import NO_ARRAY, NUMBERS, Key, Request, is_used_in_place, rank_of, scaling_of
from hpcpar.comm.runtime import RECENT, Runtime
from hpcpar.comm.select import ANY, NATIVE, Table, choose, segments_for
from hpcpar.comm.shm_segment import ShmSegment
from hpcpar.comm.spaces import Spaces, copying, itemsize_of
from hpcpar.comm.tokens import Mailroom
from hpcpar.comm.tuning import Tuning
from hpcpar.errors import MismatchError, OperationError
from hpcpar.transport.buffers import HostBuffer
from hpcpar.transport.gpu.memory import DeviceBuffer
from hpcpar.transport.interface import COLLECTIVE_TAGS, NativeCall, Transport
from hpcpar.units import KiB, MiB

if TYPE_CHECKING:
    from hpcpar.comm.communicator import Communicator

CACHED = 512
"""Compiled collectives that a communicator keeps."""
CACHED_NBYTES = 64 * MiB
"""Memory of their own that these take together: landing memory and copies of what a call may not change."""
KEPT_COPY_NBYTES = 4 * MiB
"""A call that works on a larger copy of its input is not kept."""

IN_PART_FROM_NBYTES = 64 * KiB
"""On several nodes, arrays from this size on use shared memory within each node; shorter ones travel by
persistent messages, which start sooner."""

FRESH_TAGS = COLLECTIVE_TAGS // 2
"""Below: tags of calls with fresh requests; from here to COLLECTIVE_TAGS: tags of persistent ones."""

CALLS_TOLD_APART = 256
"""Calls with fresh requests that may be under way at once."""


NOTHING = HostBuffer(np.empty(0, dtype=np.uint8), np.empty(0, dtype=np.uint8), "uint8", 1)
"""Data of a barrier."""


class Calls:
    """All calls of one communicator on this rank.

    cache     compiled collectives by request: the only cache on the way of a call
    segment   memory shared with the other ranks of the node; None: there is none
    """

    def __init__(self, transport: Transport, runtime: Runtime, name: str) -> None:
        self.transport = transport
        self.runtime = runtime
        self.progress = runtime.progress
        self.rank, self.size = transport.rank, transport.size
        self.name, self.traffic = runtime.register(name)
        self.comm_id, self.recent = runtime.identify(transport.world_ranks)
        self.checked = runtime.check
        self.label: str | None = None
        self.cache: dict[Key, CompiledCollective] = {}
        self.count = [0]  # shared with unchecked views, so that every call has a number of its own
        self.segment: ShmSegment | None = None
        self.shares_in_part = self.reads_private = False
        self.state = {"freed": False}
        self.latest: CompiledCollective | None = None
        self.abandoned: list[CompiledCollective] = []
        self._signatures: dict[int, Signature] = {}
        self._mailroom = Mailroom(transport)
        self._table = runtime.tuning.table(transport.nodes)
        self._on_device: tuple[Devices, Tuning, Table] | None = None
        runtime.calls.add(self)

    # Starting ----------------------------------------------------------------------------------------------

    def run(self, key: Key, buffer: Any = None, out: Any = None) -> Any:
        """Start a call and wait for it; its result."""
        try:
            compiled = self._started(key, buffer, out)
            self.progress.run(compiled)
        except BaseException:
            self._go_on()
            raise
        self.latest = None
        result = compiled.result
        return (buffer if out is None else out) if result is None else result(buffer, out)

    def start(self, key: Key, buffer: Any = None, out: Any = None) -> Handle:
        """Start a call, and bring it as far as it goes without waiting."""
        try:
            compiled = self._started(key, buffer, out)
            result = compiled.result
            found = (buffer if out is None else out) if result is None else result(buffer, out)
            handle = compiled.handle = Handle(self.progress, compiled, found)
            self.progress.add(compiled)
        except BaseException:
            self._go_on()
            raise
        self.latest = None
        return handle

    def _started(self, key: Key, buffer: Any, out: Any) -> CompiledCollective:
        try:
            compiled = self.cache.get(key)
        except TypeError:  # an argument without a hash, which is refused when it is validated
            compiled = None
        if compiled is None or compiled.is_under_way:
            compiled = self._compiled(Request(*key), buffer, out)
        if self.checked:
            self.require_same(compiled.described)
        count = self.count
        number = count[0]
        compiled.begin(number, (buffer, out))
        # No call of a function from here on: a signal handler finds the call either not begun, or begun.
        count[0] = number + 1
        self.recent[number % RECENT] = number, compiled.described
        compiled.last_used = number
        self.latest = compiled
        program = compiled.program
        if program is not None:
            signature = program.signature
            signature.at = (signature.at + 1) % TURNS
        if compiled.turn is not None:
            compiled.turn.queue += [compiled]
        compiled.is_under_way = True
        return compiled

    def _go_on(self) -> None:
        """Leave a call, which an error of a signal handler ends, to whoever makes progress next."""
        latest = self.latest
        if latest is not None and latest.is_under_way and latest not in self.progress.under_way:
            self.progress.under_way.append(latest)

    def require_same(self, described: str) -> None:
        """Agree in checked mode: MismatchError on every rank unless all make the same call."""
        agree.require_same(self.face("agreement"), described)

    def face(self, label: str) -> Communicator:
        """This communicator for calls of hpcpar's own, without agreement on each."""
        from hpcpar.comm.communicator import Communicator

        return Communicator.face_of(self.unchecked(label))

    def unchecked(self, label: str | None) -> Calls:
        """These calls without agreement in checked mode, counted under another name."""
        view = copy.copy(self)
        view.checked = False
        view.label = label
        return view

    def require_usable(self, what: str) -> None:
        """Refuse calls on a freed communicator, in a forked process, and in the middle of another call."""
        if self.state["freed"]:
            raise OperationError(
                f"{what} was asked for on communicator {self.name!r}, which has been freed: make all calls "
                "before `free()`"
            )
        if self.runtime.is_forked and self.runtime.transport.size > 1:  # alone, it is a job of its own
            raise OperationError(
                f"{what} was asked for in a process forked from rank {self.rank} of {self.name!r}, which "
                f"cannot be that rank, too: make the call in the rank itself, and return to it what is to be "
                f"communicated"
            )
        self.progress.require_outside(what)

    # Compiling ---------------------------------------------------------------------------------------------

    def _compiled(self, request: Request, buffer: Any, out: Any) -> CompiledCollective:
        """Validate a request and compile it; in checked mode all ranks hear of an error."""
        self.require_usable(request.collective)
        try:
            root = request.root
            if root is not None or request.collective in ROOTED:
                root = rank_of(root, self.size, f"the root of {request.collective}", self.name)
            scaled = request._replace(scaling=scaling_of(request.scaling))
            arguments = COLLECTIVES[request.collective](self, scaled, root, buffer, out)
        except MismatchError:  # which all ranks have
            raise
        except Exception as error:
            if self.checked:
                self.require_same(f"{request.collective}, and failed: {error or type(error).__name__}")
            raise
        arguments.root = root
        words = [arguments.described, "" if root is None else f"root={root}"]
        words.append("" if request.algorithm is None else f"algorithm={request.algorithm}")
        described = f"{request.collective}({', '.join(filter(None, words))})"
        compiled = self._bound(request, arguments, described, buffer, out)
        is_cacheable = (
            arguments.is_cacheable
            and all(type(factor) in NUMBERS for factor in request.scaling[:2])  # arrays' content may change
            and request.input is not None
            and request.output is not None
            and all(
                is_used_in_place(array)
                for array, memory in ((buffer, request.input), (out, request.output))
                if memory is not NO_ARRAY
            )
        )
        if is_cacheable and compiled.is_cached:
            self._keep(request, compiled)
        else:
            compiled.is_cached = False
        return compiled

    def _keep(self, request: Request, compiled: CompiledCollective) -> None:
        if request in self.cache:  # under way: it will be used again
            compiled.is_cached = False
            return
        self.cache[request] = compiled
        if len(self.cache) > CACHED or sum(each.nbytes for each in self.cache.values()) > CACHED_NBYTES:
            idle = [
                (each.last_used, key)
                for key, each in self.cache.items()
                if not each.is_under_way and each is not compiled
            ]
            idle.sort(key=lambda found: found[0])
            for _, key in idle[: max(1, len(idle) // 4)]:
                self.cache.pop(key).free()

    def forget_all(self) -> None:
        """Drop all compiled collectives: memory goes, or another algorithm is to be chosen."""
        for compiled in self.cache.values():
            compiled.free()
        self.cache.clear()

    def _bound(
        self, request: Request, arguments: Arguments, described: str, buffer: Any, out: Any
    ) -> CompiledCollective:
        spaces = arguments.spaces
        whole = next(iter(spaces.values()), NOTHING)
        algorithm = self._choose(
            request.collective,
            whole.octets.size,
            uneven=arguments.uneven,
            named=request.algorithm,
            dtype=whole.dtype,
            op=arguments.op,
            same_everywhere=arguments.same_everywhere,
            on_device=isinstance(whole, DeviceBuffer),
        )
        first, last = list(arguments.first), list(arguments.last)
        if algorithm.name == NATIVE:
            compiled = self._by_mpi(request, arguments, described, first, last)
            return compiled
        segments = segments_for(algorithm, whole.octets.size)
        offsets = arguments.offsets
        if offsets is not None and segments > 1:
            offsets = tuple((space, partition.refined(edges, segments)) for space, edges in offsets)
        chunks = max(1, algorithm.chunks(self.size, segments, self.transport.nodes))
        cut = offsets or (("data", partition.offsets(partition.counts(whole.count, chunks))),)
        work_chunks = algorithm.work_chunks(self.size)
        if work_chunks:
            cut, spaces = _with_work(cut, spaces, work_chunks)
        planned = plan(
            algorithm, self.rank, self.size, arguments.root or 0, segments, cut, self.transport.nodes
        )
        kept = arguments.kept
        copy_nbytes = 0
        if kept is not None and planned.received:
            elsewhere, is_filled = None, False
            if kept.target is not None:
                # Messages of one step by two executors are two sums: the second one adds to the first.
                is_filled = self.shares_in_part
                elsewhere = received_elsewhere(planned, ("data", *arguments.own), is_filled=is_filled)
            if elsewhere is not None and kept.target is not None:
                if is_filled:
                    first += copy_to(kept.target, whole.part(*arguments.own))
                planned, spaces = elsewhere, {**spaces, "output": kept.target}
            else:
                work = whole.scratch(whole.count)
                copy_nbytes = whole.octets.size
                spaces = {**spaces, "data": work}
                first.append(copying(work.octets, whole.octets))
                if kept.target is not None:
                    last.insert(0, copying(kept.target.octets, work.part(*arguments.own).octets))
        elif kept is not None and kept.target is not None:
            last[:0] = copy_to(kept.target, whole.part(*arguments.own))
        compiled = self._new(request, described, algorithm.name, planned, spaces)
        compiled.result = arguments.result
        compiled.nbytes = copy_nbytes
        compiled.first = first
        compiled.last = [*last, *self._divided(arguments), *arguments.at_end]
        compiled.is_cached = arguments.same_everywhere and copy_nbytes <= KEPT_COPY_NBYTES
        self._bind_steps(compiled, arguments, algorithm, segments, cut, planned, spaces, whole)
        return compiled

    def _new(
        self, request: Request, described: str, by: str, planned: Plan, spaces: Spaces
    ) -> CompiledCollective:
        itemsize = itemsize_of(spaces)
        compiled = CompiledCollective(
            request.collective,
            self.name,
            self.runtime,
            self.transport.world_ranks,
            self.traffic.row(self.label or request.collective),
            described=described,
            by=by,
            traffic=(planned.messages, planned.sent * itemsize, planned.received * itemsize),
        )
        compiled.comm_id = self.comm_id
        return compiled

    def _bind_steps(
        self,
        compiled: CompiledCollective,
        arguments: Arguments,
        algorithm: Algorithm,
        segments: int,
        cut: Offsets,
        planned: Plan,
        spaces: Spaces,
        whole: HostBuffer,
    ) -> None:
        """Choose the executor, and have it bind the plan to memory."""
        op, nbytes = arguments.op, whole.octets.size
        # All ranks have the same words; messages of calls with other words do not meet.
        digest = crc32(f"{compiled.described} by {algorithm.name}".encode())
        fresh_tag = digest % (FRESH_TAGS // CALLS_TOLD_APART) * CALLS_TOLD_APART
        scratch = self.runtime.scratch
        if isinstance(whole, DeviceBuffer):
            self._bind_device_steps(
                compiled, planned, spaces, op, fresh_tag + self.count[0] % CALLS_TOLD_APART
            )
            return
        layout = self._layout(arguments, algorithm, segments, cut, whole)
        call = None if layout is None else self._shared_call(compiled, arguments, layout, spaces, nbytes)
        if call is not None:
            elsewhere: dict[int, ExecutorStep] = {}
            for step in planned.steps:
                beyond = _beyond(step, call.segment)
                if beyond is not None:
                    elsewhere[step.index] = MessageStep(
                        self.transport, beyond, spaces, op, fresh_tag, scratch, tags=CALLS_TOLD_APART
                    )
            if (
                arguments.lent is not None
                and not elsewhere
                and call.lend(arguments.lent, arguments.own, planned)
            ):
                compiled.first = []
            compiled.steps = shared_steps(call, planned, op, elsewhere)
        elif (
            self.size > 1
            and arguments.same_everywhere
            and nbytes <= PERSISTENT_NBYTES
            and not self._is_in_part(arguments, algorithm, whole)  # here a rank is alone on its node
        ):
            program = MessageProgram(
                self.transport, planned.steps, spaces, op, scratch, self._signature(digest)
            )
            compiled.program = program
            compiled.nbytes += program.nbytes
        else:
            compiled.steps = [
                MessageStep(self.transport, step, spaces, op, fresh_tag, scratch, tags=CALLS_TOLD_APART)
                for step in planned.steps
            ]

    def _bind_device_steps(
        self, compiled: CompiledCollective, planned: Plan, spaces: Spaces, op: str, tag: int
    ) -> None:
        """Bind a plan to device memory, for one call: a kernel's start hides what could be prepared."""
        devices, whole = self.runtime.devices, next(iter(spaces.values()))
        assert devices is not None, "no array is seen as a device's without them"
        assert isinstance(whole, DeviceBuffer)
        steps = device_steps(devices, self.transport, self._mailroom, planned, spaces, op, tag)
        compiled.steps = [native.PostedStep(step) for step in steps]
        compiled.is_cached = False
        keep = partial(whole.queue.afterwards, lambda: spaces)
        compiled.last = [*compiled.last, keep, partial(lead_caller, whole)]

    def _layout(
        self,
        arguments: Arguments,
        algorithm: Algorithm,
        segments: int,
        cut: Offsets,
        whole: HostBuffer,
    ) -> Layout | None:
        """The schedules of a node's ranks, as each of them knows them; None where they use messages."""
        if self.segment is None or not (self.is_all_shared or self._is_in_part(arguments, algorithm, whole)):
            return None
        return Layout(
            algorithm,
            self.size,
            arguments.root or 0,
            segments,
            self.transport.nodes,
            cut,
            whole.itemsize,
            is_uneven=not arguments.same_everywhere,
        )

    def _is_in_part(self, arguments: Arguments, algorithm: Algorithm, whole: HostBuffer) -> bool:
        """True if nodes use their shared memory, and messages between them. The same on every rank."""
        is_long = whole.octets.size >= IN_PART_FROM_NBYTES or not arguments.same_everywhere
        return self.shares_in_part and self.reads_private and is_long and not algorithm.ordered

    def _shared_call(
        self,
        compiled: CompiledCollective,
        arguments: Arguments,
        layout: Layout,
        spaces: Spaces,
        nbytes: int,
    ) -> SharedCall | None:
        """The call in shared memory; None where it is too long for a body, and memory cannot be read."""
        segment = self.segment
        assert segment is not None
        short = self.is_all_shared and is_short(segment, layout, nbytes, combines=arguments.combines)
        if not short and not segment.pids:
            return None
        described = f"{compiled.described}, by {layout.algorithm.name}"
        tell = partial(self.runtime.watch.note_mismatch, self.comm_id)
        call = SharedCall(segment, layout, self.rank, spaces, described, is_short=short, tell=tell)
        if layout.is_uneven:
            call.table = arguments.table(segment.ranks)
        return call

    def _signature(self, digest: int) -> Signature:
        number = digest % (FRESH_TAGS // TURNS)
        found = self._signatures.get(number)
        if found is None:
            first = FRESH_TAGS + number * TURNS
            found = self._signatures[number] = Signature(first, [Turn() for _ in range(TURNS)])
        return found

    def _by_mpi(
        self, request: Request, arguments: Arguments, described: str, first: list[Action], last: list[Action]
    ) -> CompiledCollective:
        """Leave the call to MPI, as one step."""
        spaces, kept = arguments.spaces, arguments.kept
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
            self.runtime.watch, self.transport.world_ranks, self.name, self.count[0]
        )
        step = native.native_step(self.transport, participants, asked, spaces, arguments.offsets)
        compiled = self._new(request, described, NATIVE, NOT_COUNTED, spaces)
        compiled.result = arguments.result
        compiled.steps = [native.PostedStep(step)]
        compiled.first = first
        compiled.last = [*last, *self._divided(arguments), *arguments.at_end]
        compiled.row.calls_by_mpi += 1
        return compiled

    def _divided(self, arguments: Arguments) -> list[Action]:
        """Divide an average by the number of ranks, and multiply by a factor."""
        is_divided = arguments.op == "average" and self.size > 1
        if arguments.averaged is None or not (is_divided or arguments.factor != 1.0):
            return []
        return finishing(arguments.op, arguments.averaged, self.size, arguments.factor)

    # Messages ----------------------------------------------------------------------------------------------

    def run_message(self, key: Key, array: Any) -> Any:
        """Start a point-to-point message and wait for it; the array."""
        try:
            compiled = self._message_started(key, array)
            self.progress.run(compiled)
        except BaseException:
            self._go_on()
            raise
        self.latest = None
        return array

    def start_message(self, key: Key, array: Any) -> Handle:
        """Start a point-to-point message, and bring it as far as it goes without waiting."""
        try:
            compiled = self._message_started(key, array)
            found = array if key[0] == "recv" else None
            handle = compiled.handle = Handle(self.progress, compiled, found)
            self.progress.add(compiled)
        except BaseException:
            self._go_on()
            raise
        self.latest = None
        return handle

    def _message_started(self, key: Key, array: Any) -> CompiledCollective:
        try:
            compiled = self.cache.get(key)
        except TypeError:
            compiled = None
        if compiled is None or compiled.is_under_way:
            compiled = self._message(Request(*key), array)
        # Ranks make different numbers of these: they take no call number.
        number = self.count[0]
        compiled.begin(number, (array, None))
        compiled.last_used = number
        self.latest = compiled
        compiled.is_under_way = True
        return compiled

    def _message(self, request: Request, array: Any) -> CompiledCollective:
        """Compile one point-to-point message. From the second time on it uses a persistent request."""
        receives = request.collective == "recv"
        whom = "the sender" if receives else "the receiver"
        binding = view(self, array, writable=receives)
        host = binding.host
        peer = rank_of(request.peer, self.size, whom, self.name)
        tag = COLLECTIVE_TAGS + self._user_tag(request.tag)
        what = f"recv from rank {peer}" if receives else f"send to rank {peer}"
        self.require_usable(what)
        space: Space = "output" if receives else "input"
        message = Message(peer, ((space, 0, host.count),), host.count)
        step = PlannedStep((), () if receives else (message,), (message,) if receives else ())
        planned, spaces = counted((step,)), {space: host}
        compiled = self._new(request, what, "", planned, spaces)
        compiled.collective, compiled.comm_id = what, None
        compiled.expected_nbytes = host.octets.size if receives else None
        compiled.last = [] if binding.write_back is None or not receives else [binding.write_back]
        if isinstance(host, DeviceBuffer):
            self._bind_device_steps(compiled, planned, spaces, "sum", tag)
            return compiled
        # Not planned.steps: a message of no elements travels, too.
        compiled.program = MessageProgram(
            self.transport, [step], spaces, "sum", self.runtime.scratch, Signature(tag, [None])
        )
        if request.input is not None and is_used_in_place(array) and request not in self.cache:
            compiled.is_cached = True
            self._keep(request, compiled)
        return compiled

    def _user_tag(self, tag: Any) -> int:
        largest = self.transport.max_tag - COLLECTIVE_TAGS
        try:
            found = operator.index(tag)
        except TypeError:
            found = -1
        if not 0 <= found <= largest:
            raise OperationError(f"tag {tag!r}: this MPI has room for tags 0 to {largest}")
        return found

    # Choosing ----------------------------------------------------------------------------------------------

    def algorithm_for(
        self,
        collective: str,
        nbytes: int,
        *,
        uneven: bool,
        named: str | None,
        dtype: str,
        op: str,
        on_device: bool,
    ) -> str:
        """Name of the algorithm, as `Communicator.algorithm_for`."""
        if collective not in ALGORITHMS:
            raise OperationError(f"there is no collective {collective!r}; there are {', '.join(ALGORITHMS)}")
        on_device = on_device and self.runtime.devices is not None  # else it is copied to the host
        return self._choose(
            collective, nbytes, uneven=uneven, named=named, dtype=dtype, op=op, on_device=on_device
        ).name

    def _choose(
        self,
        collective: str,
        nbytes: int,
        *,
        uneven: bool,
        named: str | None,
        dtype: str,
        op: str,
        same_everywhere: bool = True,
        on_device: bool = False,
    ) -> Algorithm:
        known = "float64" if dtype == ANY else dtype
        whole = nbytes if same_everywhere else None
        return choose(
            collective,
            nbytes,
            uneven=uneven,
            named=named,
            overrides=self.runtime.overrides,
            table=self._device_table if on_device else self._table,
            dtype=dtype,
            obstacle="the array is on a GPU, which only the algorithms of hpcpar are trusted with"
            if on_device
            else native.obstacle(self.transport, collective, op, known, whole, named=named is not None),
        )

    @property
    def _device_table(self) -> Table:
        """Algorithms for arrays on GPUs."""
        devices, tuning = self.runtime.devices, self.runtime.tuning
        assert devices is not None, "no array is seen as a device's without them"
        if self._on_device is None or self._on_device[:2] != (devices, tuning):
            all_pull = all(devices.reach(rank) == "pull" for rank in self.transport.world_ranks)
            self._on_device = devices, tuning, tuning.table_on_device(self.transport.nodes, all_pull=all_pull)
        return self._on_device[2]

    def choose_by(self, tuning: Tuning) -> None:
        """Choose by these tables from now on. The same on every rank."""
        self.runtime.tuning = tuning
        self._table = tuning.table(self.transport.nodes, shared_memory=self.is_all_shared)
        self.forget_all()

    def share(self, segment: ShmSegment | None, *, reads_private: bool) -> None:
        """Use this memory from now on. Collective: all ranks have mapped their node's."""
        self.segment = segment
        self.reads_private = reads_private
        self.shares_in_part = segment is None or segment.size < self.size
        self.choose_by(self.runtime.tuning)

    @property
    def is_all_shared(self) -> bool:
        """True if all ranks of the communicator exchange through memory that they share."""
        return self.segment is not None and self.segment.size == self.size

    # Ending ------------------------------------------------------------------------------------------------

    def free(self) -> None:
        """Give requests and memory back."""
        self.forget_all()
        self.segment = None
        self.state["freed"] = True
        self.runtime.forget(self.name)


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
