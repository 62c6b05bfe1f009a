"""Reduction of DistributedOptimizer's gradients in buckets that all ranks agree on.

The first step reduces after its backward: only then is it known which gradients there are, and which are
sparse. From then on the buckets of `hpcpar.data_parallel` leave while backward runs, behind a gate that opens
once all ranks have come to the step (readiness.py). Ranks that have joined take part with zeros. Each bucket
is one collective, in the same order on all ranks, on a communicator of this optimizer's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hpcpar.data_parallel.buckets import FIRST_BUCKET_BYTES, Bucket
from hpcpar.data_parallel.parameters import Named, agree_on_parameters, view_like
from hpcpar.data_parallel.reducer import Reducer
from hpcpar.data_parallel.reduction import Pending
from hpcpar.errors import BufferTypeError, GradientOrderError
from hpcpar.horovod.exceptions import HorovodInternalError
from hpcpar.horovod.negotiation import TensorRequest
from hpcpar.horovod.operations import Ticket
from hpcpar.horovod.torch.compression import Compression
from hpcpar.horovod.torch.readiness import BucketGate, OnReady
from hpcpar.horovod.torch.sparse_gradients import start_sparse
from hpcpar.planner.traffic import usage_map_nbytes
from hpcpar.uncompiled import uncompiled

if TYPE_CHECKING:
    from hpcpar.comm import Communicator
    from hpcpar.horovod.chrome_timeline import TimelineObserver
    from hpcpar.horovod.engine import Engine
    from hpcpar.horovod.process_sets import ProcessSet

_DENSE, _SPARSE = 1, 2

ADVICE = (
    "Gradients were computed more than backward_passes_per_step times before call to step(): increase "
    "backward_passes_per_step to accumulate gradients locally, or call step() or zero_grad() in between"
)


@dataclass(frozen=True)
class ReductionOptions:
    """Options of the reduction, equal on all ranks.

    op             "average" or "sum"
    predivide      what a gradient is divided by before the sum; the average is divided by the rest after it
    bucket_bytes   most bytes of a bucket
    groups         gradients that are to be reduced together
    sparse_as_dense  sparse gradients travel as dense ones; the optimizer sees sparse ones all the same
    """

    op: str
    compression: Any
    predivide: float
    bucket_bytes: int
    groups: Sequence[Sequence[Tensor]]
    sparse_as_dense: bool

    @property
    def sees_each_gradient(self) -> bool:
        """True for a user's own compressor: it gets each gradient by itself, in its shape."""
        return self.compression not in (Compression.none, Compression.fp16, Compression.bf16)

    def reduce(self, comm: Communicator, packed: Tensor, dtype: torch.dtype) -> Any:
        """Begin the reduction of gradients of this type that have been compressed."""
        op, before = self.scaled(packed, dtype, comm.size)
        return comm.start_allreduce(packed, op, prescale_factor=before, postscale_factor=self.predivide)

    def scaled(self, packed: Tensor, dtype: torch.dtype, size: int) -> tuple[str, float]:
        """Return the operation on compressed gradients of this type, and the factor before it."""
        op, before = self.op, 1.0 / self.predivide
        if op == "average" and may_overflow(packed.dtype, dtype):
            op, before = "sum", before / size
        return op, before

    def __str__(self) -> str:
        """Text that ranks compare."""
        name = getattr(self.compression, "__name__", type(self.compression).__name__)
        told = f"op={self.op}, compression={name}, gradient_predivide_factor={self.predivide}"
        told += f", groups of {[len(group) for group in self.groups]}, sparse_as_dense={self.sparse_as_dense}"
        return f"{told}, buckets of {self.bucket_bytes} bytes"


class AllreduceBuckets:
    """All-reduces compressed buckets on a communicator of the optimizer's own. A `Reduction`.

    named        parameters in the order of the buckets' members
    is_newcomer  tells whether a parameter without bucket has a gradient now
    newcomers    True where there was one on some rank in the last step
    """

    def __init__(
        self,
        comm: Communicator,
        options: ReductionOptions,
        observer: TimelineObserver,
        named: Sequence[Named],
        is_newcomer: Callable[[], bool],
    ) -> None:
        self.newcomers = False
        self._comm, self._options, self._observer = comm, options, observer
        self._named = named
        self._is_newcomer = is_newcomer

    def start(self, flat: Tensor, bucket: Bucket) -> Pending:
        options, gradient = self._options, flat
        if options.sees_each_gradient:
            _, parameter = self._named[bucket.members[0]]
            gradient = view_like(flat, 0, flat.numel(), parameter)
        packed, context = options.compression.compress(gradient)
        self._observer.bucket_leaves([name for name, _ in self._shown(bucket)])
        handle = options.reduce(self._comm, packed, flat.dtype)

        def finish() -> None:
            reduced = handle.wait()
            if reduced is not flat:
                gradient.copy_(options.compression.decompress(reduced, context))
            self._observer.bucket_done(
                [(name, str(p.dtype).removeprefix("torch."), p.shape) for name, p in self._shown(bucket)]
            )

        return _Waitable(finish)

    def start_map(self, bits: Any) -> Pending:
        """Return a pending map, sent when it is waited for: only then have all gradients come."""

        def finish() -> None:
            told = np.append(bits, np.uint8(self._is_newcomer()))
            self._comm.allreduce(told, "or")
            bits[:] = told[:-1]
            self.newcomers = bool(told[-1])

        return _Waitable(finish)

    def show_asked(self, bucket: Bucket) -> None:
        """Record each gradient as an all-reduce of its own, as Horovod's timeline does."""
        for name, _ in self._shown(bucket):
            self._observer.asked(name, "allreduce")

    def _shown(self, bucket: Bucket) -> list[Named]:
        members = [self._named[member] for member in bucket.members]
        return [(f"allreduce.{name}", parameter) for name, parameter in members]


class _Waitable(NamedTuple):
    """A reduction under way, as the function that completes it."""

    wait: Callable[[], None]


def _bringing_zeros(
    comm: Communicator, options: ReductionOptions, parameters: Sequence[Tensor], buckets: Sequence[Bucket]
) -> Callable[[], None]:
    """Make what a rank that has joined does in the others' steps, without their optimizer.

    It begins all of a step's collectives, which are done when the others have come to them.
    """
    options = replace(options, groups=())
    count = len(parameters)
    firsts = [parameters[bucket.members[0]] for bucket in buckets]
    shapes = [
        (tuple(first.shape) if options.sees_each_gradient else (bucket.numel,), first.dtype, first.device)
        for bucket, first in zip(buckets, firsts, strict=True)
    ]

    def bring() -> None:
        for shape, dtype, device in shapes:
            packed, _ = options.compression.compress(torch.zeros(shape, dtype=dtype, device=device))
            options.reduce(comm, packed, dtype)
        comm.start_allreduce(np.zeros(usage_map_nbytes(count) + 1, dtype=np.uint8), "or")

    return bring


class Gradients:
    """Reduces the gradients of an optimizer's parameters.

    named     every parameter of the optimizer, by name; more may be added
    is_copy   made by copying or reading another, perhaps on this rank alone: it gets its name when it is used
    """

    def __init__(
        self,
        named: Sequence[Named],
        process_set: ProcessSet,
        options: ReductionOptions,
        passes: int,
        *,
        is_copy: bool = False,
    ) -> None:
        self.named = list(named)
        self.passes = passes
        engine = process_set._engine
        assert engine is not None, "this rank is included"
        self._engine, self._process_set, self._options = engine, process_set, options
        self._served: list[str] = []
        self._name = ""
        self._reducers: list[Reducer] = []
        self._reductions: list[AllreduceBuckets] = []
        self._sparse: list[Named] = []
        self._are_sparse_reduced = False
        self._covered: set[int] = set()
        self._layouts = 0
        self._passed: dict[int, int] = {}
        self._counters: dict[int, Any] = {}
        self._count_those_without_bucket()
        self.is_closed = False
        engine.users.add(self)
        weakref.finalize(self, _retire_layouts, weakref.ref(engine), self._served)
        if not is_copy:
            self._take_name()

    @property
    def is_under_way(self) -> bool:
        """True while gradients are being reduced, or wait for the first step to be."""
        is_full = any(passed >= self.passes for passed in self._passed.values())
        return is_full or any(reducer.round_open for reducer in self._reducers)

    def set_passes(self, passes: int) -> None:
        """Reduce the sum of so many backwards from now on."""
        self.passes = passes
        for reducer in self._reducers:
            reducer.passes = passes
        self.recount()

    def recount(self) -> None:
        """Count backwards from zero again."""
        self._passed.clear()
        for reducer in self._reducers:
            reducer.recount()

    def synchronize(self) -> None:
        """Replace every new gradient by its reduction over all ranks. Collective."""
        waits = [] if self._are_sparse_reduced else self._start_sparse(self._sparse)
        for reducer in self._reducers:
            if not reducer.synchronized:
                try:
                    reducer.synchronize()
                except HorovodInternalError:  # not all ranks have come, and nothing has left
                    reducer.abandon()
                    raise
        for wait in waits:
            wait()
        reductions = list(self._reductions)
        if self._without_bucket() and (not reductions or reductions[0].newcomers):
            self._lay_out()
        for reduction in reductions:
            reduction.newcomers = False
        self._are_sparse_reduced = True
        self._passed.clear()

    def next_step(self) -> None:
        """Note that a step was taken: gradients are reduced again, also where no backward follows."""
        self._are_sparse_reduced = False
        for reducer in self._reducers:
            reducer.next_step()

    def zero(self, *, set_to_none: bool) -> None:
        """Forget the gradients, and count backwards anew."""
        self._passed.clear()
        self._are_sparse_reduced = False
        for reducer in self._reducers:
            reducer.zero(set_to_none=set_to_none)

    def close(self) -> None:
        """Take the hooks off the parameters; gradients stay where they are."""
        self.is_closed = True
        for counter in self._counters.values():
            counter.remove()
        self._counters.clear()
        for reducer in self._reducers:
            reducer.close()

    def _start_sparse(self, sparse: Sequence[Named]) -> list[Callable[[], None]]:
        return start_sparse(sparse, self._name, self._options, self._process_set)

    def _take_name(self) -> None:
        self._name = self._engine.next_optimizer()
        self._serve_layout()

    def _without_bucket(self) -> list[Named]:
        return [(name, p) for name, p in self.named if p.requires_grad and id(p) not in self._covered]

    @property
    def _layout_name(self) -> str:
        return f"{self._name}.layout.{self._layouts}"

    def _lay_out(self) -> None:
        """Find buckets for the gradients that have none, but for sparse ones, and reduce them. Collective."""
        if not self._name:
            self._take_name()
        content = f"{self._options}, backward_passes_per_step={self.passes}"
        reducer, sparse = self._engine.run_together(self._layout_name, self._make, content)
        waits = self._start_sparse(sparse)
        if reducer is not None:
            reducer.synchronize()
        for wait in waits:
            wait()
        self._count_those_without_bucket()

    def _make(self) -> tuple[Reducer | None, list[Named]]:
        """Make buckets for gradients that some rank has; return their reducer and the sparse ones."""
        self._layouts += 1
        self._serve_layout()
        fresh = self._without_bucket()
        agree_on_parameters(fresh, self._engine.setup)
        kinds = self._agree_on_kinds(fresh)
        dense = [pair for pair, kind in zip(fresh, kinds, strict=True) if kind == _DENSE]
        sparse = [pair for pair, kind in zip(fresh, kinds, strict=True) if kind == _SPARSE]
        self._covered.update(id(parameter) for _, parameter in [*dense, *sparse])
        self._sparse += sparse
        for _, parameter in dense:
            if id(parameter) in self._counters:
                self._counters.pop(id(parameter)).remove()
        return self._make_reducer(dense) if dense else None, sparse

    def _make_reducer(self, dense: Sequence[Named]) -> Reducer:
        """Make the reducer of these parameters' gradients, on a communicator of its own. Collective."""
        options, engine = self._options, self._engine
        parameters = [parameter for _, parameter in dense]
        most = 1 if options.sees_each_gradient else max(1, options.bucket_bytes)
        step = f"{self._name}.step.{self._layouts}"
        comm = engine.steps.lend_communicator(self, step)
        reference = weakref.ref(self)
        reduction = AllreduceBuckets(comm, options, engine.observer, dense, lambda: _has_newcomer(reference))
        request = TensorRequest(step, "schedule", content=f"{len(dense)} parameters")

        def ask(on_ready: OnReady) -> Ticket:
            ticket = Ticket(request, on_ready=on_ready)
            engine.submit([ticket])  # not self's: the optimizer is to go with its last reference
            return ticket

        reducer = Reducer(
            dense,
            comm,
            bucket_bytes=most,
            first_bucket_bytes=min(most, FIRST_BUCKET_BYTES),
            passes=self.passes,
            groups=() if options.sees_each_gradient else options.groups,
            sparse_as_dense=True,  # where another rank's is dense, and in a later step: so the sum is, too
            reduction=BucketGate(engine, reduction, ask, reduction.show_asked),
            advice=ADVICE,
        )
        engine.steps.serve[step] = _bringing_zeros(comm, options, parameters, reducer.buckets)
        self._reducers.append(reducer)
        self._reductions.append(reduction)
        return reducer

    def _serve_layout(self) -> None:
        """Register what this rank does after join() when the others lay out their gradients."""
        reference, engine, process_set = weakref.ref(self), self._engine, self._process_set
        name, layouts, passes = self._name, self._layouts, self.passes
        fresh = self._without_bucket()
        shapes = [(of, torch.empty_like(p, device="meta"), p.device) for of, p in fresh]
        places = {id(parameter): place for place, (_, parameter) in enumerate(fresh)}
        groups = [[places[id(p)] for p in group if id(p) in places] for group in self._options.groups]
        options = replace(self._options, groups=())

        def serve() -> None:
            alive = reference()
            if alive is None:
                named = [
                    (of, nn.Parameter(torch.empty_like(shape, device=place))) for of, shape, place in shapes
                ]
                kept = replace(options, groups=[[named[place][1] for place in group] for group in groups])
                alive = Gradients(named, process_set, kept, passes, is_copy=True)
                alive._name, alive._layouts = name, layouts
            alive._make()

        _forget_layouts(weakref.ref(engine), self._served)
        self._served[:] = [self._layout_name]
        engine.steps.serve[self._layout_name] = serve

    def _agree_on_kinds(self, fresh: Sequence[Named]) -> list[int]:
        """Agree on each gradient's kind over all ranks: dense, sparse, or 0 where no rank has one."""
        kinds = np.zeros(len(fresh), dtype=np.uint8)
        for index, (_, parameter) in enumerate(fresh):
            if parameter.grad is not None:
                kinds[index] = _SPARSE if parameter.grad.is_sparse else _DENSE
        self._engine.setup.allreduce(kinds, "or")
        is_mixed = kinds == _SPARSE | _DENSE
        if is_mixed.any() and not self._options.sparse_as_dense:
            name, _ = fresh[int(is_mixed.argmax())]
            raise BufferTypeError(
                f"the gradient of {name} is sparse on one rank and dense on another; make it one of the "
                f"two on all, or pass sparse_as_dense=True"
            )
        agreed: list[int] = np.where(is_mixed, _DENSE, kinds).tolist()
        return agreed

    def _count_those_without_bucket(self) -> None:
        """Count the backwards of parameters that have no bucket yet."""
        reference = weakref.ref(self)

        def counting(name: str, parameter: Tensor) -> Any:
            @uncompiled
            def hook(_: Tensor) -> None:
                alive = reference()
                if alive is not None:
                    alive._count(name, parameter)

            return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

        for name, parameter in self._without_bucket():
            if id(parameter) not in self._counters:
                self._counters[id(parameter)] = counting(name, parameter)

    def _count(self, name: str, parameter: Tensor) -> None:
        self._are_sparse_reduced = False
        self._passed[id(parameter)] = self._passed.get(id(parameter), 0) + 1
        if self._passed[id(parameter)] > self.passes:
            raise GradientOrderError(
                f"{name} got gradient number {self._passed[id(parameter)]} before a step. {ADVICE}"
            )


def may_overflow(packed: torch.dtype, given: torch.dtype) -> bool:
    """Return True if a sum may overflow a tensor narrowed to float16: its average divides first."""
    return packed is torch.float16 and given is not torch.float16


def _has_newcomer(reference: weakref.ref[Gradients]) -> bool:
    alive = reference()
    return alive is not None and any(p.grad is not None for _, p in alive._without_bucket())


def _forget_layouts(reference: weakref.ref[Engine], names: Sequence[str]) -> None:
    """Stop serving layouts that have been made."""
    engine = reference()
    if engine is not None:
        for name in names:
            engine.steps.serve.pop(name, None)


def _retire_layouts(reference: weakref.ref[Engine], names: Sequence[str]) -> None:
    """Serve the layouts of an optimizer that is gone a while longer: others may have more data."""
    engine = reference()
    if engine is not None:
        for name in names:
            engine.steps.retire(name)
