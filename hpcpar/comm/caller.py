"""From a collective that was asked for to an operation under way: what all calls have in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from hpcpar import partition
from hpcpar.algorithms.registry import ALGORITHMS, Algorithm
from hpcpar.comm import arena, native
from hpcpar.comm.accounting import Trace, Traffic, TrafficRow
from hpcpar.comm.arena import Arena
from hpcpar.comm.board import BoardStep, Posts, board_steps, suits
from hpcpar.comm.compiled import LANE_TAGS, LARGEST_NBYTES, Lane, LaneGroup, Lanes
from hpcpar.comm.device_steps import device_steps
from hpcpar.comm.devices import Devices, lead_caller
from hpcpar.comm.operation import (
    BoundStep,
    LooseStep,
    Offsets,
    Operation,
    Plan,
    PlannedStep,
    Run,
    ScratchPool,
    Spaces,
    copying,
    itemsize_of,
    plan,
)
from hpcpar.comm.out_of_place import Kept, apart, fill, is_same, overlap, reading, redirected
from hpcpar.comm.progress import Handle, Progress
from hpcpar.comm.reductions import finish
from hpcpar.comm.select import ANY, NATIVE, Table, choose, segments_for
from hpcpar.comm.shared import Extent, SharedStep, extent, regions_for, shared_steps
from hpcpar.comm.tokens import Mailroom
from hpcpar.comm.tuning import Tuning
from hpcpar.comm.watch import Watch
from hpcpar.errors import BufferTypeError, OperationError
from hpcpar.transport.buffers import Binding, HostBuffer, Mark, bind, fingerprint, is_still, mark
from hpcpar.transport.gpu.memory import DeviceBuffer, Queue, bind_device, is_on_device
from hpcpar.transport.interface import COLLECTIVE_TAGS, NativeCall, Octets, Transport
from hpcpar.units import KiB, MiB

MOST_SIGHTED = 512
"""Calls that have been seen; what comes once only is not worth remembering."""
MOST_RECIPES = 512
KEPT_NBYTES = 32 * MiB
"""What the remembered calls of a communicator take in shared memory, roughly; then all are forgotten."""
BORROWED_NBYTES = 4 * MiB
"""Up to so much a copy of what a call may not change is had from memory that is kept: new pages cost as much
as copying."""
CALLS_REMEMBERED = 2048
"""After so many others a call is forgotten: its arrays are most likely gone."""
CALLS_BETWEEN_SWEEPS = 256

IN_PART_FROM_NBYTES = 64 * KiB
"""Of a whole array on several nodes: what is smaller is all persistent messages, which start quicker."""

ATTEMPTS_AT_ONCE = 1000
"""How often a remembered call looks for what is to come before the wait gets patient, and each look dear.

With more ranks than cores, those that wait at length keep others from the core that they wait for.
"""

ROOTED = tuple(
    each + kind for each in ("broadcast", "reduce", "gather", "scatter") for kind in ("", "_object")
)
"""Calls that need a root: None is no rank."""

NOTHING = HostBuffer(np.empty(0, dtype=np.uint8), np.empty(0, dtype=np.uint8), "uint8", 1)
"""What a barrier communicates."""


@dataclass
class Family:
    """What a communicator shares with all that are split from it.

    check       agree on every collective before data moves
    overrides   algorithm by collective, from HPCPAR_ALGORITHM
    tuning      measured tables, from which each communicator takes its own
    trace       where to note what moved when, or None
    shares_memory, stage_nbytes   as `Communicator.share_memory` was asked for
    devices     GPUs, after `Communicator.share_devices`
    end_job     as `Communicator.end_job`, for ranks that are processes
    """

    transport: Transport
    watch: Watch
    check: bool = False
    overrides: Mapping[str, str] = field(default_factory=dict)
    tuning: Tuning = field(default_factory=Tuning)
    trace: Trace | None = None
    shares_memory: bool = False
    stage_nbytes: int | None = None
    devices: Devices | None = None
    traffics: dict[str, Traffic] = field(default_factory=dict)
    scratch: ScratchPool = field(default_factory=ScratchPool)
    end_job: Callable[[str, int], None] | None = None

    def __post_init__(self) -> None:
        self.progress = Progress(self.transport, self.watch)

    def register(self, name: str) -> tuple[str, Traffic]:
        """A name of its own, and an empty account, for a new communicator."""
        unique, number = name, 1
        while unique in self.traffics:
            number += 1
            unique = f"{name}#{number}"
        return unique, self.traffics.setdefault(unique, Traffic())

    def forget(self, name: str) -> None:
        """Drop an account, and so free its name."""
        self.traffics.pop(name, None)


@dataclass
class Call:
    """One collective as it is being asked for.

    described   what all ranks must agree on, beside the collective's name, root and algorithm
    own         elements of the data that are this rank's share of a reduce-scatter
    factor      what a reduction is multiplied by at its end, where it says what is `averaged`
    key         what a blocking call with the same meaning on the same memory would have, too; None if
                nothing can be remembered of it
    """

    collective: str
    op: str = "sum"
    root: int | None = None
    algorithm: str | None = None
    described: str = ""
    own: tuple[int, int] = (0, 0)
    key: Hashable = None
    factor: float = 1.0

    @property
    def combines(self) -> bool:
        """Whether elements are combined, so that it matters of which type they are, and how."""
        return self.collective in ("allreduce", "reduce_scatter", "reduce")

    def __str__(self) -> str:
        root = "" if self.root is None else f"root={self.root}"
        algorithm = "" if self.algorithm is None else f"algorithm={self.algorithm}"
        return f"{self.collective}({', '.join(filter(None, (self.described, root, algorithm)))})"


class Recipe:
    """All that was worked out for a call, without a reference to the arrays that it was worked out for.

    group     its lanes; None where it goes through shared memory
    regions   there: into how many the stage is divided
    own       elements of the data that are this rank's share, in a reduce-scatter
    posts     how it goes over the board; None: it does not
    lent      data that the call only reads, and works on in memory that is the recipe's own
    is_taken  whether an operation is under way in that memory
    last_used number of the call that used it last
    """

    def __init__(
        self,
        collective: str,
        op: str,
        group: LaneGroup | None,
        planned: Plan,
        spaces: Spaces,
        first: tuple[HostBuffer, HostBuffer] | None,
        delivered: tuple[HostBuffer, HostBuffer] | None,
        averaged: HostBuffer | None,
        size: int,
        account: TrafficRow,
        regions: int,
        own: tuple[int, int],
        lent: HostBuffer | None = None,
        posts: Posts | None = None,
    ) -> None:
        self.collective = collective
        self.op = op
        self.group = group
        self.planned = planned
        self.spaces = spaces
        self.regions = regions
        self.own = own
        self.lent = lent
        self.posts = posts
        self.is_taken = False
        self.address = tuple(buffer.address for buffer in spaces.values())
        self.account = account
        self.first = None if first is None else copying(first[0].octets, first[1].octets)
        self.written = None if first is None else extent(first[0].octets)
        self.finish = _then(
            None if delivered is None else copying(delivered[0].octets, delivered[1].octets),
            None if averaged is None else partial(finish, op, averaged, size),
        )
        self.operations: dict[int, Operation] = {}
        self.programs: list[Program | None] = [None] * arena.LANES
        self.is_closed = False
        self.last_used = 0
        itemsize = itemsize_of(spaces)
        self.tally = account.open(planned.messages, planned.sent * itemsize, planned.received * itemsize)

    @property
    def is_alive(self) -> bool:
        return not self.is_closed and (self.group is None or self.group.alive)

    def ended(self, operation: Operation) -> None:
        """What is to be done when the operation is over."""
        if self.finish is not None:
            self.finish()
        self.is_taken = False
        self.tally.calls += 1
        if self.is_closed:  # while this was under way
            self.close()

    def close(self) -> None:
        """It will not be used again, but perhaps be referred to: what is large goes."""
        self.is_closed = True
        if not self.is_taken:  # else what is under way still works there
            self.spaces, self.first = {}, None
        self.operations.clear()
        self.programs.clear()
        self.account.close(self.tally)
        self.tally.calls = 0

    def beside(self, lent: HostBuffer) -> Recipe:
        """The same in other memory, for one call while the own is taken."""
        work = lent.scratch(lent.count) if "input" in self.spaces else lent.copy()
        other = Recipe(
            self.collective,
            self.op,
            self.group,
            self.planned,
            {**self.spaces, "data": work},
            None,
            None,
            None,
            1,
            self.account,
            self.regions,
            self.own,
            posts=self.posts,
        )
        other.is_closed = True
        return other


Seen = dict[int, tuple[Recipe, Hashable, Mark, Mark | None]]
"""By the identity of a tensor: the last call on it, its meaning, and how to tell that it is the same."""


AtOnce = Callable[[int, Callable[[int], None]], bool]
"""A step from `post` to `settle`, given how often to look for what is to come, and what to do in between."""


@dataclass(slots=True)
class Program:
    """What a recipe comes to in one lane of shared memory."""

    steps: Sequence[SharedStep | BoardStep]
    at_once: Sequence[AtOnce]
    operation: Operation


class Caller(ABC):
    """What every collective needs: the transport, the family, the account and the call number."""

    rank: int
    size: int
    name: str
    traffic: Traffic

    def __init__(self, transport: Transport, family: Family, name: str) -> None:
        self._transport = transport
        self._family = family
        self._checked = family.check
        self._label: str | None = None
        self._lanes = Lanes(LANE_TAGS, COLLECTIVE_TAGS - LANE_TAGS)
        self._recipes: dict[Hashable, Recipe] = {}
        self._seen: dict[str, Seen] = defaultdict(dict)
        self._sighted: set[Hashable] = set()
        self._latest: Recipe | None = None
        self._kept_nbytes = [0]
        self._swept = [0]
        self._evictions = 0
        self._arena: Arena | None = None
        self._shares_in_part = False
        self._mailroom = Mailroom(transport)
        self._under_way = family.progress.under_way
        self._pause = transport.pause
        self._table = family.tuning.table(transport.nodes)
        self._found_on_device: tuple[Devices, Tuning, Table] | None = None
        self._abandoned: list[Operation] = []
        self._calls = [0]  # shared with unchecked copies, so that every call has a tag of its own
        self.name, self.traffic = family.register(name)
        self.rank = transport.rank
        self.size = transport.size

    def _view(
        self, array: Any, *, writable: bool, what: str = "buffer", beside: HostBuffer | None = None
    ) -> Binding:
        """See an array as flat memory, on its GPU where the ranks can reach each other's.

        beside   what else the call works on: both must be of one kind, and share a queue
        errors   as `bind`
        """
        devices = self._family.devices
        if devices is None or not is_on_device(array):
            binding = bind(array, writable=writable, what=what)
        elif isinstance(beside, DeviceBuffer):
            queue = partial(_queue_beside, beside, what)
            binding = bind_device(array, queue, writable=writable, what=what)
        else:
            devices.cuda.use(devices.ordinal)  # a thread that has used none could not even ask where it lies
            binding = bind_device(array, devices.queue, writable=writable, what=what)
        if beside is not None and isinstance(binding.host, DeviceBuffer) != isinstance(beside, DeviceBuffer):
            here, there = ("a GPU", "the host") if isinstance(beside, DeviceBuffer) else ("the host", "a GPU")
            raise BufferTypeError(
                f"{what} is in the memory of {there}, the other array of the call in that of {here}: move "
                f"one of them, so that both are in one place"
            )
        return binding

    def _view_out(self, out: Any, count: int, beside: HostBuffer) -> Binding:
        """An `out` argument: it must be writable and have the result's length and element type."""
        binding = self._view(out, writable=True, what="out", beside=beside)
        if binding.host.count != count or binding.host.dtype != beside.dtype:
            raise OperationError(
                f"out has {binding.host.count} elements of {binding.host.dtype}; "
                f"the result has {count} of {beside.dtype}: give an array of that length and type"
            )
        return binding

    def algorithm_for(
        self,
        collective: str,
        nbytes: int,
        *,
        uneven: bool = False,
        named: str | None = None,
        dtype: str = ANY,
        op: str = "sum",
        on_device: bool = False,
    ) -> str:
        """Name of the algorithm that a collective of `nbytes`, of the whole array, would run by.

        uneven   the ranks' pieces are not equally large
        named    what the caller of the collective would ask for
        dtype    element type; ANY: one that every algorithm can do
        on_device   the array is on a GPU
        errors   OperationError where the collective would raise it, and for one that there is not
        """
        if collective not in ALGORITHMS:
            raise OperationError(f"there is no collective {collective!r}; there are {', '.join(ALGORITHMS)}")
        return self._choose(
            collective,
            nbytes,
            uneven=uneven,
            named=named,
            dtype=dtype,
            op=op,
            on_device=on_device and self._family.devices is not None,  # else it is copied to the host
        ).name

    def native_obstacle(
        self, collective: str, nbytes: int, *, dtype: str = ANY, op: str = "sum"
    ) -> str | None:
        """Why algorithm="native", MPI's own, cannot do such a collective here; None: it can."""
        dtype = "float64" if dtype == ANY else dtype
        return native.obstacle(self._transport, collective, op, dtype, nbytes, named=True)

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
            overrides=self._family.overrides,
            table=self._device_table if on_device else self._table,
            dtype=dtype,
            obstacle="the array is on a GPU, which only the algorithms of hpcpar are trusted with"
            if on_device
            else native.obstacle(self._transport, collective, op, known, whole, named=named is not None),
        )

    @property
    def _device_table(self) -> Table:
        """What arrays on GPUs are reduced by."""
        devices, tuning = self._family.devices, self._family.tuning
        assert devices is not None, "no array is seen as a device's without them"
        if self._found_on_device is None or self._found_on_device[:2] != (devices, tuning):
            all_pull = all(devices.reach(rank) == "pull" for rank in self._transport.world_ranks)
            table = tuning.table_on_device(self._transport.nodes, all_pull=all_pull)
            self._found_on_device = devices, tuning, table
        return self._found_on_device[2]

    def choose_by(self, tuning: Tuning) -> None:
        """Choose by these tables from now on, here and on all that will be split. The same on every rank."""
        self._family.tuning = tuning
        self._table = tuning.table(self._transport.nodes, shared_memory=self._is_all_shared)
        self._forget(list(self._recipes))

    def _share(self, found: Arena | None) -> None:
        """Exchange through this memory from now on. Collective: all ranks have opened their node's."""
        self._arena = found
        self._shares_in_part = found is None or found.size < self.size
        self.choose_by(self._family.tuning)

    @property
    def _is_all_shared(self) -> bool:
        """Whether all ranks of the communicator exchange through memory that they share."""
        return self._arena is not None and self._arena.size == self.size

    @abstractmethod
    def _require_same(self, description: str) -> None:
        """Raise MismatchError on every rank unless all pass the same description."""

    @contextmanager
    def _asking(self, call: Call) -> Iterator[Call]:
        """Look at the arguments inside; in checked mode all ranks agree on them before data moves.

        An error in one rank's arguments is then everybody's, so that nobody waits for that rank.
        """
        self._require_not_freed(call.collective)
        try:
            if call.root is not None or call.collective in ROOTED:
                self._require_peer(call.root, f"the root of {call.collective}")
            yield call
        except Exception as error:
            if self._checked:
                self._require_same(f"{call.collective}, and failed: {error or type(error).__name__}")
            raise
        if self._checked:
            self._require_same(str(call))

    def _start(
        self,
        call: Call,
        spaces: Spaces,
        offsets: Offsets | None,
        result: Callable[[], Any],
        *,
        uneven: bool = False,
        same_everywhere: bool = True,
        first: tuple[HostBuffer, HostBuffer] | None = None,
        prepare: Callable[[], None] | None = None,
        averaged: HostBuffer | None = None,
        kept: Kept | None = None,
        write_back: Callable[[], None] | None = None,
    ) -> Handle:
        """Choose the algorithm, bind its schedule to the spaces, and set it going.

        offsets      where the chunks of each space start; None: as the algorithm cuts the data
        uneven       the pieces of the ranks are not equally large
        same_everywhere  every rank passes the same offsets, so that calls can be told apart by them
        first        (target, source) of a copy to begin with
        prepare      what else is to be done before; such a call must have no key
        averaged     what is divided or multiplied at the end
        kept         the data are only read; else they are worked on in place
        write_back   brings a result from host memory to where the caller has it
        """
        whole = next(iter(spaces.values()), NOTHING)
        nbytes = whole.octets.size
        algorithm = self._choose(
            call.collective,
            nbytes,
            uneven=uneven,
            named=call.algorithm,
            dtype=whole.dtype,
            op=call.op,
            same_everywhere=same_everywhere,
            on_device=isinstance(whole, DeviceBuffer),
        )
        delivered: tuple[HostBuffer, HostBuffer] | None = None
        borrowed: Octets | None = None
        recipe: Recipe | None = None

        def on_done() -> None:
            if recipe is not None:
                recipe.is_taken = False
            if delivered is not None:
                fill(*delivered)
            if borrowed is not None:
                self._family.scratch.give_back(borrowed)
            if averaged is not None:
                finish(call.op, averaged, self.size, call.factor)
            if write_back is not None:
                write_back()

        def begin(first: tuple[HostBuffer, HostBuffer] | None) -> None:
            if first is not None:
                fill(*first)
            if prepare is not None:
                prepare()

        if algorithm.name == NATIVE:
            begin(first)
            if kept is not None:
                spaces, delivered, borrowed = apart(kept, call.own, spaces, None)
                fill(spaces["data"], whole)
            return self._start_native(call, spaces, offsets, result, on_done, even=not uneven)
        segments = segments_for(algorithm, nbytes)
        if offsets is not None and segments > 1:
            offsets = tuple((space, partition.refined(edges, segments)) for space, edges in offsets)
        chunks = max(1, algorithm.chunks(self.size, segments, self._transport.nodes))
        cut = offsets or (("data", partition.offsets(partition.counts(whole.count, chunks))),)
        work_chunks = algorithm.work_chunks(self.size)
        if work_chunks:
            cut, spaces = _with_work(cut, spaces, work_chunks)
        planned = plan(algorithm, self.rank, self.size, call.root or 0, segments, cut, self._transport.nodes)
        posts = None
        if self._is_posted(algorithm, whole, cut, combines=call.combines) and same_everywhere:
            what = f"{whole.count} {whole.dtype}, op={call.op}" if call.combines else f"{nbytes} bytes"
            root = "" if call.root is None else f", root={call.root}"
            posts = Posts(planned, f"{call.collective} of {what}{root}, by {algorithm.name}")
        is_apart = False
        if kept is not None and planned.received:
            elsewhere = _delivering(kept, call.own, planned, spaces)
            if elsewhere is not None:
                planned, spaces = elsewhere
            else:
                # Shorter ones are kept with what is remembered of the call, longer ones not worth keeping.
                scratch = self._family.scratch if LARGEST_NBYTES < nbytes <= BORROWED_NBYTES else None
                spaces, delivered, borrowed = apart(kept, call.own, spaces, scratch)
                is_apart, first = True, (spaces["data"], whole)
        # Where some messages of a step go by shared memory and others by MPI, each sum would begin anew.
        is_here = not isinstance(whole, DeviceBuffer) and not self._shares_in_part
        if first is not None and prepare is None and is_here:
            planned, spaces, first = _reading(planned, spaces, first, call.own, fills=not is_apart)
        begin(first)
        lane: Lane | arena.Lane | None = None
        group, regions = None, 0
        # Where ranks have other sizes than their peers, they could not choose alike by them.
        is_long = nbytes >= IN_PART_FROM_NBYTES or not same_everywhere
        if isinstance(whole, DeviceBuffer):
            pass  # each call for itself: what a kernel takes to start hides what could be prepared
        elif self._is_all_shared or (self._shares_in_part and is_long and not algorithm.ordered):
            regions = regions_for(algorithm, self.size, call.root or 0, segments, self._transport.nodes)
            lane = self._shared_lane()
        elif self.size > 1 and same_everywhere and nbytes <= LARGEST_NBYTES:
            signature = (call.collective, algorithm.name, call.root, call.op, whole.dtype, cut)
            group = self._lanes.group(signature, planned, nbytes, whole.itemsize, self._family.progress.wait)
            lane = self._lanes.next(group)
        is_lasting = lane is not None and not (regions and self._shares_in_part)
        is_small = not is_apart or nbytes <= LARGEST_NBYTES  # its memory would be kept
        if is_lasting and is_small and same_everywhere and call.key is not None:
            recipe = self._remember(
                call, group, planned, spaces, whole, first, delivered, averaged, regions, is_apart, posts
            )
        return self._go(
            call.collective,
            planned,
            spaces,
            result,
            on_done,
            op=call.op,
            by=algorithm.name,
            lane=lane,
            regions=regions,
            posts=posts,
            written=None if first is None or is_same(*first) or not regions else extent(first[0].octets),
        )

    def _is_posted(self, algorithm: Algorithm, whole: HostBuffer, cut: Offsets, *, combines: bool) -> bool:
        """Whether a call goes over the board. The same on every rank."""
        if self._arena is None or not self._is_all_shared or isinstance(whole, DeviceBuffer):
            return False
        is_short = whole.octets.size <= self._arena.post_nbytes
        return is_short and suits(algorithm, self.size, cut, whole.itemsize, combines=combines)

    def _shared_lane(self) -> arena.Lane | None:
        """The lane of shared memory whose turn it is; None on a rank that is alone on its node."""
        return None if self._arena is None else self._arena.lanes[self._calls[0] % arena.LANES]

    def _start_native(
        self,
        call: Call,
        spaces: Spaces,
        offsets: Offsets | None,
        result: Callable[[], Any],
        on_done: Callable[[], None],
        *,
        even: bool,
    ) -> Handle:
        """Leave the call to MPI, as an operation of one step."""
        data = next(iter(spaces.values()))
        asked = NativeCall(call.collective, None, data, op=call.op, root=call.root or 0, even=even)
        roll = native.Roll(self._family.watch, self._transport.world_ranks, self.name, self._calls[0])
        step = native.native_step(self._transport, roll, asked, spaces, offsets)
        self.traffic.row(self._label or call.collective).calls_by_mpi += 1
        return self._go(
            call.collective, native.NOT_COUNTED, spaces, result, on_done, op=call.op, by=NATIVE, steps=(step,)
        )

    def _remember(
        self,
        call: Call,
        group: LaneGroup | None,
        planned: Plan,
        spaces: Spaces,
        whole: HostBuffer,
        first: tuple[HostBuffer, HostBuffer] | None,
        delivered: tuple[HostBuffer, HostBuffer] | None,
        averaged: HostBuffer | None,
        regions: int,
        is_apart: bool,
        posts: Posts | None,
    ) -> Recipe | None:
        """Keep what was worked out for a call that comes a second time: its like need not do it again."""
        if call.key not in self._sighted:
            if len(self._sighted) >= MOST_SIGHTED:
                self._sighted.clear()
            self._sighted.add(call.key)
            return None
        if self._lanes.evictions != self._evictions:
            # Recipes of lanes that made room are of no more use, and keep memory to land in.
            self._evictions = self._lanes.evictions
            self._forget([key for key, recipe in self._recipes.items() if not recipe.is_alive])
        if self._calls[0] - self._swept[0] > CALLS_BETWEEN_SWEEPS:
            self._swept[0] = self._calls[0]
            oldest = self._calls[0] - CALLS_REMEMBERED
            self._forget([key for key, recipe in self._recipes.items() if recipe.last_used < oldest])
        if len(self._recipes) >= MOST_RECIPES or self._kept_nbytes[0] >= KEPT_NBYTES:
            self._forget(list(self._recipes))
        self._forget([call.key] if call.key in self._recipes else [])
        if is_apart:
            self._kept_nbytes[0] += spaces["data"].octets.size
        recipe = self._recipes[call.key] = Recipe(
            call.collective,
            call.op,
            group,
            planned,
            # The caller's arrays are to be free to go; work space and memory apart are nobody's but ours.
            {
                space: buffer if space == "work" or (is_apart and space == "data") else buffer.unowned()
                for space, buffer in spaces.items()
            },
            _unowned(first),
            _unowned(delivered),
            None if averaged is None or call.op != "average" else averaged.unowned(),
            self.size,
            self.traffic.row(self._label or call.collective),
            regions,
            call.own,
            whole.unowned() if is_apart and delivered is None else None,
            posts,
        )
        recipe.last_used = self._calls[0]
        recipe.is_taken = True
        return recipe

    def _forget(self, keys: Sequence[Hashable]) -> None:
        """Drop what is remembered of these calls."""
        for key in keys:
            self._recipes.pop(key).close()
        if not self._recipes:
            self._kept_nbytes[0] = 0

    def _key(self, collective: str, meaning: Hashable, array: Any = None, other: Any = None) -> Hashable:
        """What calls with the same meaning on the same memory have in common; None: nothing."""
        mine = () if array is None else fingerprint(array)
        its = None if other is None else fingerprint(other)
        if mine is None or (other is not None and its is None):
            return None
        return self._label, collective, meaning, mine, its

    def _remembered(
        self, collective: str, meaning: Hashable, array: Any = None, other: Any = None
    ) -> Recipe | None:
        """What is remembered of a call with this meaning on the same memory, where it may be used."""
        if self._family.trace is not None:
            return None
        # The same tensor objects as last time are the quickest to tell.
        seen = self._seen[collective].get(id(array))
        if seen is not None:
            recipe, known, of_array, of_other = seen
            is_other = other is None if of_other is None else is_still(of_other, other)
            if known == meaning and is_other and is_still(of_array, array) and not recipe.is_closed:
                return recipe
        try:
            found = None if self._checked else self._recipes.get(self._key(collective, meaning, array, other))
        except TypeError:  # an argument without a hash, such as a list; whoever looks at it will tell
            return None
        if found is None or not found.is_alive:
            return None
        marks = mark(array), None if other is None else mark(other)
        if found.group is None and marks[0] is not None and (other is None or marks[1] is not None):
            if len(self._seen[collective]) >= MOST_RECIPES:
                self._seen[collective].clear()
            self._seen[collective][id(array)] = (found, meaning, marks[0], marks[1])
        return found

    def _run(self, recipe: Recipe, memory: object = None) -> None:
        """Do a remembered call, and return when it is done.

        memory   the arrays, kept alive until it is over, also where an error ends the wait before
        """
        self._latest = recipe
        calls = self._calls
        number = recipe.last_used = calls[0]
        program = recipe.programs[number % arena.LANES]
        if program is None or self._under_way:
            operation = self._restarted(recipe, memory)
            self._family.progress.run(operation)
            recipe.account.seconds_waited += time.perf_counter() - operation.started_s
            return
        # Nothing is under way, so the lane is free.
        calls[0] = number + 1
        if recipe.first is not None:
            recipe.first()
        for index, at_once in enumerate(program.at_once):
            if not at_once(ATTEMPTS_AT_ONCE, self._pause):
                recipe.is_taken = True
                operation = program.operation
                operation.resume(number, index, program.steps[index], memory)
                self._family.progress.run(operation)
                recipe.account.seconds_waited += time.perf_counter() - operation.started_s
                return
        if recipe.finish is not None:
            recipe.finish()
        recipe.tally.calls += 1
        assert self._arena is not None, "programs are bound to it"
        if self._arena.seconds_waited:
            recipe.account.seconds_waited += self._arena.seconds_waited
            self._arena.seconds_waited = 0.0

    def _start_known(self, recipe: Recipe, result: Any, memory: object) -> Handle:
        """Set a remembered call going. What is in `memory` is kept alive until it is done."""
        operation = self._restarted(recipe, memory)
        outcome = Handle(self._family.progress, operation, lambda: result, recipe.account)
        self._family.progress.add(operation)
        return outcome

    def _restarted(self, recipe: Recipe, memory: object = None) -> Operation:
        """An operation for a remembered call that is to be made now: that of its lane, if it is free."""
        number = recipe.last_used = self._calls[0]
        self._calls[0] = number + 1
        if recipe.is_taken and recipe.lent is not None:
            recipe = recipe.beside(recipe.lent)
        recipe.is_taken = True
        if recipe.first is not None:
            recipe.first()
        lane: Lane | arena.Lane
        if recipe.group is not None:
            lane = self._lanes.next(recipe.group)
        else:
            assert self._arena is not None, "what is remembered for shared memory goes with it"
            lane = self._arena.lanes[number % arena.LANES]
        operation = recipe.operations.get(lane.tag)
        if operation is None:
            operation = recipe.operations[lane.tag] = self._bind(recipe, lane, number, memory)
        elif not operation.done:
            return self._bind(recipe, lane, number, memory)
        elif isinstance(lane, Lane) and operation.steps is not lane.compiled(recipe.address):
            operation = recipe.operations[lane.tag] = self._bind(recipe, lane, number, memory)
        else:
            operation.restart(number, memory)
        return operation

    def _bind(self, recipe: Recipe, lane: Lane | arena.Lane, number: int, memory: object) -> Operation:
        """A recipe bound to a lane; in shared memory what the lane's first call is bound to is a program."""
        steps = self._bound(
            recipe.planned,
            recipe.spaces,
            recipe.op,
            lane.tag,
            lane,
            recipe.regions,
            recipe.written,
            recipe.posts,
        )
        operation = Operation(
            self._transport,
            steps,
            recipe.ended,
            what=recipe.collective,
            number=number,
            comm=self.name,
            memory=memory,
            lane=lane,
        )
        if isinstance(lane, arena.Lane) and not recipe.is_closed and recipe.programs[lane.tag] is None:
            shared = [step for step in steps if isinstance(step, (SharedStep, BoardStep))]
            self._kept_nbytes[0] += sum(step.nbytes for step in shared)
            recipe.programs[lane.tag] = Program(shared, [step.at_once for step in shared], operation)
        return operation

    def _go(
        self,
        what: str,
        planned: Plan,
        spaces: Spaces,
        result: Callable[[], Any],
        on_done: Callable[[], None],
        *,
        op: str = "sum",
        by: str = "",
        row: str | None = None,
        tag: int | None = None,
        lane: Lane | arena.Lane | None = None,
        regions: int = 0,
        written: Extent | None = None,
        posts: Posts | None = None,
        steps: Sequence[BoundStep] | None = None,
        expected_nbytes: int | None = None,
    ) -> Handle:
        """Make the operation, count it, trace it, and bring it as far as it goes without waiting.

        steps   what is done; None: the plan's, on this memory
        """
        number = self._calls[0]
        if tag is None:
            tag = lane.tag if isinstance(lane, Lane) else number % LANE_TAGS
            self._calls[0] += 1
        account = self.traffic.row(self._label or row or what)
        itemsize = itemsize_of(spaces)
        buffer = next(iter(spaces.values()), NOTHING)
        if isinstance(buffer, DeviceBuffer):
            result = partial(_after, buffer, result)

        def ended(operation: Operation) -> None:
            on_done()
            if isinstance(buffer, DeviceBuffer):
                buffer.queue.afterwards(lambda: spaces)
            account.count(planned.messages, planned.sent * itemsize, planned.received * itemsize)
            trace = self._family.trace
            if trace is not None:
                trace.add(
                    f"{what} {self.name}",
                    "communication",
                    operation.started_s,
                    time.perf_counter(),
                    nbytes_sent=planned.sent * itemsize,
                    algorithm=by,
                )

        operation = Operation(
            self._transport,
            self._bound(planned, spaces, op, tag, lane, regions, written, posts) if steps is None else steps,
            ended,
            what=what,
            number=number,
            comm=self.name,
            memory=spaces,
            lane=lane,
            expected_nbytes=expected_nbytes,
        )
        self._family.progress.add(operation)
        return Handle(self._family.progress, operation, result, account)

    def _bound(
        self,
        planned: Plan,
        spaces: Spaces,
        op: str,
        tag: int,
        lane: Lane | arena.Lane | None,
        regions: int = 0,
        written: Extent | None = None,
        posts: Posts | None = None,
    ) -> Sequence[BoundStep]:
        """The plan's steps on this memory: shared, compiled where it was seen before, or for this call."""

        if isinstance(next(iter(spaces.values()), None), DeviceBuffer):
            devices = self._family.devices
            assert devices is not None, "no array is seen as a device's without them"
            return device_steps(devices, self._transport, self._mailroom, planned, spaces, op, tag)

        def loosely(step: PlannedStep) -> LooseStep:
            return LooseStep(self._transport, step, spaces, op, tag, self._family.scratch)

        if isinstance(lane, arena.Lane) and posts is not None:
            return board_steps(lane, planned, spaces, op, posts)
        if isinstance(lane, arena.Lane):
            return shared_steps(lane, planned, spaces, op, regions, written, loosely)
        steps = None if lane is None else lane.program(self._transport, planned, spaces, op)
        return steps or [loosely(step) for step in planned.steps]

    def _require_not_freed(self, what: str) -> None:
        if self._lanes.are_freed:
            raise OperationError(
                f"{what} was asked for on communicator {self.name!r}, which has been freed: make all calls "
                "before `free()`"
            )

    def _require_peer(self, peer: Any, what: str) -> None:
        if not hasattr(peer, "__index__") or not 0 <= peer < self.size:
            raise OperationError(
                f"{what} is rank {peer!r}, but communicator {self.name!r} has ranks 0 to {self.size - 1}"
            )


def typed(array: Any, host: HostBuffer) -> str:
    """Element type, shape and kind of memory, as ranks compare them: float32[1024, 1024] on a GPU."""
    return f"{host.dtype}{list(array.shape)}{' on a GPU' if isinstance(host, DeviceBuffer) else ''}"


def _queue_beside(beside: DeviceBuffer, what: str, ordinal: int | None) -> Queue:
    """The queue of a call, for another array of it; BufferTypeError if that is on another GPU."""
    if ordinal not in (None, beside.queue.ordinal):
        raise BufferTypeError(
            f"{what} is on GPU {ordinal}, the other array of the call on GPU {beside.queue.ordinal}: move "
            f"one of them, so that both are in one place"
        )
    return beside.queue


def _after(buffer: DeviceBuffer, result: Callable[[], Any]) -> Any:
    """The result, for whoever works in the caller's stream from now on."""
    lead_caller(buffer)
    return result()


def _unowned(copy: tuple[HostBuffer, HostBuffer] | None) -> tuple[HostBuffer, HostBuffer] | None:
    """A copy to be made again, without a reference to memory; None where there is nothing to copy."""
    return None if copy is None or is_same(*copy) else (copy[0].unowned(), copy[1].unowned())


def _then(one: Callable[[], None] | None, other: Callable[[], None] | None) -> Callable[[], None] | None:
    """Both, one after the other."""
    if one is None or other is None:
        return one or other

    def both() -> None:
        one()
        other()

    return both


def _delivering(
    kept: Kept, own: tuple[int, int], planned: Plan, spaces: Spaces
) -> tuple[Plan, Spaces] | None:
    """A plan and memory by which the data stay as they are, and the result comes where it is wanted.

    None where that takes a copy of the data
    """
    data, target = spaces["data"], kept.target
    elsewhere = None if target is None else redirected(planned, ("data", *own))
    if target is None or elsewhere is None:
        return None
    if overlap(target, data) and not is_same(target, data.part(*own)):
        return None
    return elsewhere, {**spaces, "output": target}


def _reading(
    planned: Plan,
    spaces: Spaces,
    first: tuple[HostBuffer, HostBuffer],
    own: tuple[int, int],
    *,
    fills: bool,
) -> tuple[Plan, Spaces, tuple[HostBuffer, HostBuffer] | None]:
    """A plan and memory for which nothing has to be copied first; as they are, where there is no such plan.

    first    (target, source) of what would be copied: from elsewhere into the data, or out of the data
    returns  with what is to be copied first all the same
    """
    target, source = first
    data, read = spaces["data"], None
    if "output" in spaces:
        read = reading(planned, ("output", 0, target.count), ("data", *own))
        reads = spaces
    elif overlap(target, data) and not overlap(source, data):
        start = (target.address - data.address) // data.itemsize
        filled: Run = ("data", start, start + target.count)
        read = reading(planned, filled, ("input", 0, target.count), fills=fills)
        reads = {**spaces, "input": source}
    return (planned, spaces, first) if read is None else (read, reads, None)


def _with_work(offsets: Offsets, spaces: Spaces, chunks: int) -> tuple[Offsets, Spaces]:
    """Add scratch of `chunks` chunks, each as large as the first chunk of the first space."""
    edges = offsets[0][1]
    count = edges[1] - edges[0]
    template = next(iter(spaces.values()))
    work = template.scratch(count * chunks)
    work_edges = tuple(range(0, count * chunks + 1, count)) if count else (0,) * (chunks + 1)
    return (*offsets, ("work", work_edges)), {**spaces, "work": work}
