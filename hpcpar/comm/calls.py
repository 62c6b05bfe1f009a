"""All calls of one communicator: found in the cache by their request, or compiled; then started.

Request ──> cache ── hit ───────────────────────────────────────────> CompiledCollective
              └── miss ─> bind arguments ─> choose ─> plan ─> executor ────┘
"""

from __future__ import annotations

import copy
import operator
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from hpcpar.algorithms.registry import ALGORITHMS, Algorithm
from hpcpar.comm import agree
from hpcpar.comm.collectives import COLLECTIVES, MESSAGES, ROOTED
from hpcpar.comm.compiled import AtEnd, CompiledCollective, Handle, Turn
from hpcpar.comm.compiling import compile_collective
from hpcpar.comm.compiling_messages import compile_message
from hpcpar.comm.devices import Devices
from hpcpar.comm.executors import native
from hpcpar.comm.executors.message import Signature
from hpcpar.comm.request import (
    NO_ARRAY,
    Asked,
    Key,
    Request,
    is_fixed,
    is_used_in_place,
    memory_of,
    rank_of,
    require_name,
    scaling_of,
)
from hpcpar.comm.runtime import RECENT, Runtime
from hpcpar.comm.select import ANY, Table, choose
from hpcpar.comm.shm_segment import ShmSegment
from hpcpar.comm.tokens import Mailroom
from hpcpar.comm.tuning import Tuning
from hpcpar.errors import MismatchError, OperationError
from hpcpar.transport.buffers import write_counter
from hpcpar.transport.interface import COLLECTIVE_TAGS, Transport
from hpcpar.units import MiB

if TYPE_CHECKING:
    from hpcpar.comm.communicator import Communicator

CACHED = 512
"""Compiled collectives that a communicator keeps."""
CACHED_NBYTES = 64 * MiB
"""Memory of their own that these take together: landing memory and copies of what a call may not change."""


class Calls:
    """All calls of one communicator on this rank.

    cache     compiled collectives by request: the only cache on the way of a call
    segment   memory shared with the other ranks of the node; None: there is none
    tag       of the `group` that made the communicator
    receives  turns of messages from one rank under one tag
    """

    def __init__(self, transport: Transport, runtime: Runtime, name: str, tag: int | None = None) -> None:
        self.transport = transport
        self.runtime = runtime
        self.progress = runtime.progress
        self.rank, self.size = transport.rank, transport.size
        self.name, self.traffic = runtime.register(name)
        self.comm_id, self.recent = runtime.identify(transport.world_ranks, tag)
        self.checked = runtime.check
        self.label: str | None = None
        self.cache: dict[Key, CompiledCollective] = {}
        self.count = [0]  # shared with unchecked views, so that every call has a number of its own
        self.segment: ShmSegment | None = None
        self.shares_in_part = self.reads_private = False
        self.state = {"freed": False}
        self.latest: CompiledCollective | None = None
        self.abandoned: list[object] = []
        self.signatures: dict[int, Signature] = {}
        self.receives: dict[tuple[int, int], Turn] = {}
        self.mailroom = Mailroom(transport)
        self._table = runtime.tuning.table(transport.nodes)
        self._on_device: tuple[Devices, Tuning, Table] | None = None
        runtime.calls.add(self)

    # Starting ----------------------------------------------------------------------------------------------

    def run(self, collective: str, asked: Asked, buffer: Any = None, out: Any = None) -> Any:
        """Start a call and wait for it; its result."""
        progress = self.progress
        if progress.lock._is_owned():  # as `is_inside`, in half the time
            self.require_usable(collective)
        try:
            compiled = self._started(collective, asked, buffer, out)
            progress.run(compiled)
        except BaseException:
            self._go_on(buffer, out)
            raise
        self.latest = None
        if compiled.lead is not None:
            compiled.lead()
        result = compiled.result
        return (buffer if out is None else out) if result is None else result(buffer, out)

    def start(self, collective: str, asked: Asked, buffer: Any = None, out: Any = None) -> Handle:
        """Start a call, and bring it as far as it goes without waiting."""
        if self.progress.lock._is_owned():
            self.require_usable(collective)
        try:
            compiled = self._started(collective, asked, buffer, out)
            result = compiled.result
            if result is None:
                found = buffer if out is None else out
            else:
                found = result(buffer, out) if type(result) is not AtEnd else partial(result, buffer, out)
            compiled.memory = buffer, out
            handle = compiled.handle = Handle(self.progress, compiled, found)
            self.progress.add(compiled)
        except BaseException:
            self._go_on(buffer, out)
            raise
        self.latest = None
        return handle

    def _started(self, collective: str, asked: Asked, buffer: Any, out: Any) -> CompiledCollective:
        key = (
            collective,
            NO_ARRAY if buffer is None else memory_of(buffer),
            NO_ARRAY if out is None else memory_of(out),
            self.label,
            asked,
        )
        try:
            compiled = self.cache.get(key)
        except TypeError:  # an argument without a hash, which is refused when it is validated
            compiled = None
        if compiled is None or compiled.is_under_way:
            compiled = self._compiled(Request(*key[:4], *asked), buffer, out)
            if compiled.is_cached:
                self.keep(key, compiled)
        is_counted = not compiled.is_message
        if self.checked and is_counted:
            self.require_same(compiled.described)
        if compiled.count_write is not None:
            compiled.count_write(buffer if out is None else out)
        if self.runtime.trace is not None:
            compiled.started_s = time.perf_counter()
        count = self.count
        number = count[0]
        turn = compiled.executor.begin(number)
        # No call of a function from here on: a signal handler finds the call either not begun, or begun.
        if is_counted:  # else it is a message: ranks make different numbers of these
            count[0] = number + 1
            self.recent[number % RECENT] = number, compiled.described
        self.latest = compiled
        compiled.number = number
        compiled.turn = turn
        if turn is not None:
            turn.queue += [compiled]
        compiled.is_under_way = True
        return compiled

    def _go_on(self, *memory: Any) -> None:
        """Leave a call, which an error of a signal handler ends, to whoever makes progress next."""
        if self.segment is not None:
            self.segment.withdraw(self.count[0])
        latest = self.latest
        if latest is not None and latest.is_under_way:
            latest.memory = memory
            self.progress.leave(latest)

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
        self.runtime.calls.add(view)  # also where this is all that is left of the communicator
        return view

    def require_usable(self, what: str) -> None:
        """Refuse calls on a freed communicator, in a forked process, and in the middle of another call."""
        if self.state["freed"]:
            raise OperationError(
                f"{what} was asked for on communicator {self.name!r}, which has been freed: make all calls "
                "before `free()`"
            )
        self.progress.require_outside(what)

    # Compiling ---------------------------------------------------------------------------------------------

    def _compiled(self, request: Request, buffer: Any, out: Any) -> CompiledCollective:
        """Validate a request and compile it; in checked mode all ranks hear of an error."""
        if request.collective in MESSAGES:
            return compile_message(self, request, buffer)
        self.require_usable(request.collective)
        try:
            root = request.root
            if root is not None or request.collective in ROOTED:
                root = rank_of(root, self.size, f"the root of {request.collective}", self.name)
            require_name(request)
            scaled = request._replace(scaling=scaling_of(request.scaling))
            arguments = COLLECTIVES[request.collective](self, scaled, root, buffer, out)
            arguments.root = root
            words = [arguments.described, "" if root is None else f"root={root}"]
            words.append("" if request.algorithm is None else f"algorithm={request.algorithm}")
            words.append("" if request.name is None else f"name={request.name!r}")
            described = f"{request.collective}({', '.join(filter(None, words))})"
            compiled = compile_collective(self, request, arguments, described, buffer, out)
        except MismatchError:  # which all ranks have
            raise
        except Exception as error:
            if self.checked:
                self.require_same(f"{request.collective}, and failed: {error or type(error).__name__}")
            raise
        compiled.count_write = write_counter(arguments.written)
        is_cacheable = (
            arguments.is_cacheable
            and is_fixed(request)
            and request.input is not None
            and request.output is not None
            and all(
                is_used_in_place(array)
                for array, memory in ((buffer, request.input), (out, request.output))
                if memory is not NO_ARRAY
            )
        )
        compiled.is_cached = compiled.is_cached and is_cacheable
        return compiled

    def keep(self, key: Key, compiled: CompiledCollective) -> None:
        if key in self.cache:  # under way: it will be used again
            compiled.is_cached = False
            return
        self.cache[key] = compiled
        is_over = compiled.nbytes and sum(each.nbytes for each in self.cache.values()) > CACHED_NBYTES
        if is_over or len(self.cache) > CACHED:
            idle = [
                (each.number, key)
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

    # Messages ----------------------------------------------------------------------------------------------

    def probe(self, tag: Any) -> int | None:
        """Find a message that has come, as `Communicator.probe`."""
        self.require_usable("probe")
        found = COLLECTIVE_TAGS + self.user_tag(tag)
        self.progress.poke()
        # Of a long message the later pieces may come before receives are posted for them: no message of that
        # rank is found until the receive has ended.
        receives = [each.receive for each in self.progress.under_way if each.comm == self.name]
        receiving = {receive[0] for receive in receives if receive is not None and receive[1] == found}
        offered = self.mailroom.offered(found)
        if offered is not None or not receiving:
            return self.transport.probe(found) if offered is None else offered
        others = (rank for rank in range(self.size) if rank not in receiving)
        return next((rank for rank in others if self.transport.probe(found, rank) is not None), None)

    def user_tag(self, tag: Any) -> int:
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
        try:
            nbytes = operator.index(nbytes)
        except TypeError:
            raise OperationError(
                f"the algorithm for {collective} of {nbytes!r} bytes was asked for; give a whole number"
            ) from None
        on_device = on_device and self.runtime.devices is not None  # else it is copied to the host
        return self.choose(
            collective, nbytes, uneven=uneven, named=named, dtype=dtype, op=op, on_device=on_device
        ).name

    def choose(
        self,
        collective: str,
        nbytes: int,
        *,
        uneven: bool,
        named: str | None,
        dtype: str,
        op: str,
        on_device: bool = False,
    ) -> Algorithm:
        known = "float64" if dtype == ANY else dtype
        # Of an uneven all-to-all each rank has another length.
        whole = None if uneven and collective == "alltoall" else nbytes
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
