"""How DistributedOptimizer's gradients travel: in buckets, by a schedule that all ranks keep.

The first step is taken after its backward: only then is it known which gradients there are, and which
are sparse. From then on the buckets of `hpcpar.data_parallel` leave while backward runs. A step asks the
engine once, at its first bucket, whether all ranks have come to it (ranks that have joined take part with
zeros); then each bucket is one collective, in the same order on all ranks, on a communicator of this
optimizer's own.

    backward   ... dW3 ─── dW2 ─── dW1 ...
    engine         "step of optimizer 1?" ─ ─ all ranks have asked
    buckets        [dW3 dW2] waits ─ ─ ─ ─ ─ ─ > leaves     [dW1] leaves
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hpcpar.data_parallel.gradients import GradientSynchronizer
from hpcpar.data_parallel.parameters import Named, describe
from hpcpar.errors import BufferTypeError
from hpcpar.horovod.negotiation import Request
from hpcpar.horovod.responses import Ticket
from hpcpar.horovod.torch.compression import Compression

if TYPE_CHECKING:
    from hpcpar.comm import Communicator
    from hpcpar.horovod.engine import Engine
    from hpcpar.horovod.process_sets import ProcessSet

_ELEMENTWISE = (Compression.none, Compression.fp16, Compression.bf16)
"""Compressors that may be given whole buckets; a user's own one sees each parameter's gradient by itself."""


@dataclass(frozen=True)
class Ways:
    """How gradients are reduced.

    op               "average" or "sum"
    predivide        what a gradient is divided by before the sum; after it the average is divided by the rest
    bucket_bytes     most bytes of a bucket
    groups           gradients that are to be reduced together
    """

    op: str
    compression: Any
    predivide: float
    bucket_bytes: int
    groups: Sequence[Sequence[Tensor]]
    sparse_as_dense: bool


class _BucketUnderWay:
    """A bucket that leaves as soon as all ranks have come to the step."""

    def __init__(self, schedule: Schedule, begin: Callable[[], Any], finish: Callable[[Any], None]) -> None:
        self._schedule = schedule
        self._begin = begin
        self._finish = finish
        self._handle: Any = None

    def leave(self) -> None:
        self._handle = self._begin()

    def wait(self) -> None:
        self._schedule.await_all()
        self._finish(self._handle.wait())


class Schedule:
    """The reduction of one synchronizer's buckets, once all ranks have asked for the step. A `Reduction`.

    name      by which ranks match the step
    content   what must be the same on all ranks
    """

    def __init__(self, engine: Engine, comm: Communicator, ways: Ways, name: str, content: str) -> None:
        self._engine = engine
        self._comm = comm
        self._ways = ways
        self._request = Request(name, "schedule", content=content)
        self._ticket: Ticket | None = None
        self._is_open = False
        self._waiting: list[_BucketUnderWay] = []

    def start(self, flat: Tensor) -> _BucketUnderWay:
        ways, compression = self._ways, self._ways.compression
        packed, context = compression.compress(flat)

        def begin() -> Any:
            return self._comm.start_allreduce(
                packed, ways.op, prescale_factor=1.0 / ways.predivide, postscale_factor=ways.predivide
            )

        def finish(reduced: Tensor) -> None:
            if reduced is not flat:
                flat.copy_(compression.decompress(reduced, context))

        return self._admit(_BucketUnderWay(self, begin, finish))

    def start_map(self, bits: Any) -> _BucketUnderWay:
        def close(_: Any) -> None:
            self._is_open, self._ticket = False, None

        return self._admit(_BucketUnderWay(self, lambda: self._comm.start_allreduce(bits, "or"), close))

    def await_all(self) -> None:
        """Wait until all ranks have come to the step, or have joined."""
        if not self._is_open and self._ticket is not None:
            self._engine.wait(self._ticket)

    def open(self) -> None:
        """All ranks have: what has gathered leaves."""
        self._is_open = True
        waiting, self._waiting = self._waiting, []
        for bucket in waiting:
            bucket.leave()

    def _admit(self, bucket: _BucketUnderWay) -> _BucketUnderWay:
        if self._is_open:
            bucket.leave()
            return bucket
        self._waiting.append(bucket)
        if self._ticket is None:
            self._ticket = Ticket(self._request, on_ready=self.open)
            self._engine.submit([self._ticket])
            self._engine.poll(self._ticket)
        return bucket


class Gradients:
    """Reduces the gradients of an optimizer's parameters; see the module.

    named    every parameter of the optimizer, by name; more may be added
    number   which of the process set's optimizers this is, counted alike on all ranks
    """

    def __init__(
        self, named: Sequence[Named], process_set: ProcessSet, engine: Engine, ways: Ways, passes: int
    ) -> None:
        self.named = list(named)
        self.passes = passes
        self._engine = engine
        self._process_set = process_set
        self._ways = ways
        self._name = engine.next_optimizer()
        self._synchronizers: list[GradientSynchronizer] = []
        self._covered: set[int] = set()
        self._sparse: set[int] = set()
        self._layouts = 0
        self._passed: dict[int, int] = {}
        self._counters = [self._count(name, p) for name, p in self.named if p.requires_grad]
        self._engine.serve[self._layout_name] = self._lay_out_nothing

    @property
    def is_under_way(self) -> bool:
        """Whether gradients are being reduced that nobody has waited for."""
        return any(synchronizer.round_open for synchronizer in self._synchronizers)

    def set_passes(self, passes: int) -> None:
        """Reduce the sum of so many backwards from now on."""
        self.passes = passes
        self.reset()
        for synchronizer in self._synchronizers:
            synchronizer.passes = passes

    def reset(self) -> None:
        """Backwards are counted from zero again."""
        self._passed.clear()

    def synchronize(self) -> None:
        """Every gradient becomes its reduction over all ranks; collective, once a step."""
        waits = [
            _sparse_allreduce(f"{self._name}.{name}", parameter, self._ways, self._process_set)
            for name, parameter in self.named
            if id(parameter) in self._sparse
        ]
        for synchronizer in self._synchronizers:
            if not synchronizer.synchronized:
                synchronizer.synchronize()
        for wait in waits:
            wait()
        if any(p.requires_grad and id(p) not in self._covered and self._is_new(p) for _, p in self.named):
            self._lay_out()
            self.reset()

    def zero(self, *, set_to_none: bool) -> None:
        """Forget the gradients."""
        for synchronizer in self._synchronizers:
            synchronizer.zero(set_to_none=set_to_none)

    def _is_new(self, parameter: Tensor) -> bool:
        # In the first step all are, with a gradient or without one: ranks may differ in that.
        return not self._synchronizers or parameter.grad is not None

    @property
    def _layout_name(self) -> str:
        return f"{self._name}.layout.{self._layouts}"

    def _lay_out(self) -> None:
        """Put parameters that are in no bucket yet into buckets, and reduce their gradients. Collective."""
        fresh = [(name, p) for name, p in self.named if p.requires_grad and id(p) not in self._covered]
        lines = "\n".join(describe(pair) for pair in fresh)
        digest = hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()
        content = f"{len(fresh)} parameters, {sum(p.numel() for _, p in fresh):,} elements, digest {digest}"
        made: list[GradientSynchronizer] = []
        ticket = Ticket(
            Request(self._layout_name, "schedule", content=content),
            on_ready=lambda: made.extend(self._make(fresh)),
        )
        self._engine.submit([ticket])
        self._engine.wait(ticket)
        waits = [
            _sparse_allreduce(f"{self._name}.{name}", parameter, self._ways, self._process_set)
            for name, parameter in fresh
            if id(parameter) in self._sparse
        ]
        for synchronizer in made:
            synchronizer.synchronize()
        for wait in waits:
            wait()

    def _lay_out_nothing(self) -> None:
        """This rank has joined before the first step: it is laid out as the others' is, and brings zeros."""
        fresh = [(name, p) for name, p in self.named if p.requires_grad and id(p) not in self._covered]
        self._make(fresh)

    def _make(self, fresh: Sequence[Named]) -> list[GradientSynchronizer]:
        """On all ranks, in the same place: agree on what is sparse, and make buckets for the rest."""
        sparse = self._agree_on_sparse(fresh)
        dense = [(name, p) for name, p in fresh if id(p) not in sparse]
        self._covered.update(id(p) for _, p in fresh)
        self._layouts += 1
        for counter in self._counters:
            counter.remove()
        self._counters.clear()
        self._engine.serve[self._layout_name] = self._lay_out_nothing
        self._sparse |= sparse
        if not dense:
            return []
        comm = self._engine.borrow_communicator(self)
        step = f"{self._name}.step.{self._layouts}"
        schedule = Schedule(self._engine, comm, self._ways, step, f"{len(dense)} parameters")
        is_known = self._ways.compression in _ELEMENTWISE
        synchronizer = GradientSynchronizer(
            dense,
            comm,
            bucket_bytes=max(1, self._ways.bucket_bytes) if is_known else 1,
            first_bucket_bytes=max(1, min(self._ways.bucket_bytes, 1 << 20)) if is_known else 1,
            passes=self.passes,
            groups=self._ways.groups if is_known else (),
            sparse_as_dense=self._ways.sparse_as_dense,
            reduction=schedule,
        )

        def serve() -> None:
            schedule.open()
            synchronizer.reduce_nothing()

        self._engine.serve[step] = serve
        self._synchronizers.append(synchronizer)
        return [synchronizer]

    def _agree_on_sparse(self, fresh: Sequence[Named]) -> set[int]:
        """Parameters whose gradient is sparse on some rank, and dense on none."""
        kinds = np.zeros(len(fresh), dtype=np.uint8)
        for index, (_, parameter) in enumerate(fresh):
            if parameter.grad is not None and not self._ways.sparse_as_dense:
                kinds[index] = 2 if parameter.grad.is_sparse else 1
        self._engine.agree_on(kinds)
        for kind, (name, _) in zip(kinds, fresh, strict=True):
            if kind == 3:
                raise BufferTypeError(
                    f"the gradient of {name} is sparse on one rank and dense on another; make it one of the "
                    f"two on all, or pass sparse_as_dense=True"
                )
        return {id(p) for kind, (_, p) in zip(kinds, fresh, strict=True) if kind == 2}

    def _count(self, name: str, parameter: Tensor) -> Any:
        """Before there are buckets, backwards are only counted."""

        def hook(_: Tensor) -> None:
            self._passed[id(parameter)] = self._passed.get(id(parameter), 0) + 1
            if self._passed[id(parameter)] > self.passes:
                raise too_many_gradients(name, self.passes)

        return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def too_many_gradients(name: str, passes: int) -> AssertionError:
    """What is raised for one backward too many."""
    return AssertionError(
        f"Gradients were computed more than backward_passes_per_step times before call to step(): that of "
        f"{name} for the time number {passes + 1}. Increase backward_passes_per_step to accumulate gradients "
        f"locally, or call step() after each {passes}."
    )


def _sparse_allreduce(
    name: str, parameter: Tensor, ways: Ways, process_set: ProcessSet
) -> Callable[[], None]:
    """Begin to reduce a sparse gradient; returns what waits for it."""
    from hpcpar.horovod.torch import mpi_ops

    gradient = parameter.grad
    if gradient is None:
        gradient = torch.sparse_coo_tensor(
            torch.empty((1, 0), dtype=torch.int64),
            parameter.new_empty((0, *parameter.shape[1:])),
            parameter.shape,
        ).coalesce()
    packed, context = ways.compression.compress(gradient)
    op = mpi_ops.Average if ways.op == "average" else mpi_ops.Sum
    wait = mpi_ops.sparse_allreduce_async(packed, name, op, process_set)

    def finish() -> None:
        parameter.grad = ways.compression.decompress(wait(), context)

    return finish
