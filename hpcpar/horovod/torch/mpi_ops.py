"""Horovod's collectives of torch tensors, in their synchronous, asynchronous and in-place forms.

*   Operations are matched by `name`; without one, by the order of calls.
*   Several threads may ask and wait at once, under names, also beside a DistributedOptimizer's steps.
*   `x_async` returns a handle for `poll` and `synchronize`; `x(...)` is both, and knows its gradient.
*   `process_set` is a ProcessSet; roots of broadcasts are ranks of the whole job.
*   Errors in this rank's own arguments are raised by the call. What ranks do not agree on is a
    HorovodInternalError on every one of them, at `synchronize`.

Each collective has one function `start_x(form, tensors, ...)` in submission.py, from which `_public` makes
the public ones; those that block and know their gradient have an autograd function, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hpcpar.horovod import basics
from hpcpar.horovod.basics import *  # noqa: F403  its __all__ is the list of queries
from hpcpar.horovod.basics import HorovodBasics, rank
from hpcpar.horovod.exceptions import HorovodInternalError  # noqa: F401  scripts import it from here
from hpcpar.horovod.negotiation import TensorRequest
from hpcpar.horovod.operations import Ticket
from hpcpar.horovod.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from hpcpar.horovod.torch.compression import Compression
from hpcpar.horovod.torch.submission import (
    MOVABLE,
    Adasum,
    Average,
    Form,
    Max,
    Min,
    Product,
    Sum,
    engine_of,
    poll,
    require_type,
    splits_of,
    start_allgather,
    start_allreduce,
    start_broadcast,
    start_reducescatter,
    submit,
    synchronize,
    ticket_for,
)
from hpcpar.horovod.util import get_average_backwards_compatibility_fun, num_rank_is_power_2  # noqa: F401
from hpcpar.uncompiled import uncompiled

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "Sum"]
__all__ += basics.__all__
__all__ += ["add_process_set", "global_process_set", "remove_process_set"]
__all__ += ["allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "sparse_allreduce_async"]
__all__ += ["grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"]
__all__ += ["allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async"]
__all__ += ["alltoall", "alltoall_async", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_"]
__all__ += ["grouped_reducescatter", "grouped_reducescatter_async", "reducescatter", "reducescatter_async"]
__all__ += ["barrier", "join", "poll", "synchronize"]

_basics = HorovodBasics()
handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(_basics)


def _public(name: str, doc: str) -> Callable[..., Any]:
    """Make a public function, with a signature and a docstring of its own; its name tells its form.

    grouped_…   takes a list of tensors
    …_async     returns a handle, else the result
    …_          in place

    Those that block and return new tensors have a gradient, and `compression` if they reduce.
    """
    start, _ = _COLLECTIVES[next(kind for kind in _COLLECTIVES if kind in name)]
    function = _FUNCTIONS.get(name)
    form = Form(is_group=name.startswith("grouped_"), in_place=name.endswith("_"))
    blocking = "_async" not in name
    _, first, *others = inspect.signature(start).parameters.values()
    if not form.is_group:
        first = first.replace(name="tensor", annotation="Tensor")
    place: int | None = None
    if function is not None and any(each.name == "op" for each in others):
        place = 1 + [each.name for each in others].index("name")
        compression = others[0].replace(name="compression", default=Compression.none, annotation=Any)
        others.insert(place, compression)
    result = ("list[Tensor]" if form.is_group else "Tensor") if blocking else "int"
    signature = inspect.Signature([first, *others], return_annotation=result)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not args:
            args = (signature.bind(**kwargs).arguments[first.name],)
            del kwargs[first.name]
        tensors, rest = (args[0] if form.is_group else args[:1]), args[1:]
        if function is None:
            handle = start(form, tensors, *rest, **kwargs)
            return synchronize(handle) if blocking else handle
        # By hand: Signature.bind takes longer than all else here.
        ordered = [*rest, *(kwargs.pop(each.name, each.default) for each in others[len(rest) :])]
        is_short = any(value is inspect.Parameter.empty for value in ordered)
        if kwargs or is_short or len(rest) > len(others):
            signature.bind(None, *rest, **kwargs)  # raises TypeError
        compression = Compression.none if place is None else ordered.pop(place)
        return _run(function, start, form, tensors, compression, tuple(ordered))

    call.__name__ = call.__qualname__ = name
    call.__doc__ = doc
    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in (first, *others)} | {"return": result}
    return uncompiled(call)


def _run(
    function: Any,
    start: Callable[..., int],
    form: Form,
    tensors: Sequence[Tensor],
    compression: Any,
    arguments: tuple[Any, ...],
) -> Any:
    """Compress, apply the collective, by its autograd function where a gradient is needed, and decompress."""
    tensors = list(tensors)
    pairs = [compression.compress(tensor) for tensor in tensors]
    packed = [tensor for tensor, _ in pairs]
    if compression is not Compression.none:  # only what reduces has one
        arguments = _dividing_first(start, packed, tensors, arguments)
    if torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in packed):
        found = function.apply(*arguments, *packed) if form.is_group else function.apply(*packed, *arguments)
    else:
        found = synchronize(start(form, packed, *arguments))
    if not form.is_group:
        return compression.decompress(found, pairs[0][1])
    return [compression.decompress(each, context) for each, (_, context) in zip(found, pairs, strict=True)]


def _dividing_first(
    start: Callable[..., int], packed: Sequence[Tensor], given: Sequence[Tensor], arguments: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Divide before the sum, for averages of tensors narrowed to float16: a sum may leave its range."""
    told = dict(zip(list(inspect.signature(start).parameters)[2:], arguments, strict=True))
    kinds = {(narrow.dtype, of.dtype is torch.float16) for narrow, of in zip(packed, given, strict=True)}
    is_average = told["op"] == Average or (told["op"] is None and told.get("average") is not False)
    if kinds != {(torch.float16, False)} or not is_average:
        return arguments
    before = told["prescale_factor"] / (told["process_set"].size() or 1)
    changed = {"average": None, "op": Sum, "prescale_factor": before}
    return tuple(changed.get(name, value) for name, value in told.items())


# --- gradients ------------------------------------------------------------------------------------


def _differentiable(name: str) -> type[torch.autograd.Function]:
    """Make an autograd function: apply(tensor, *arguments), or apply(*arguments, *tensors) of a group."""
    group, kind = name.removeprefix("Horovod").startswith("Grouped"), name.lower()
    kind = next(known for known in _COLLECTIVES if known in kind)
    start, gradients_of = _COLLECTIVES[kind]
    form = Form(is_group=group)
    count = len(inspect.signature(start).parameters) - 2

    def forward(ctx: Any, *given: Any) -> Any:
        arguments, tensors = (given[:count], given[count:]) if form.is_group else (given[1:], given[:1])
        ctx.arguments, ctx.shapes = arguments, [tensor.shape for tensor in tensors]
        result = synchronize(start(form, tensors, *arguments))
        return tuple(result) if form.is_group else result

    def backward(ctx: Any, *gradients: Tensor) -> Any:
        back, nothing = gradients_of(ctx, gradients), (None,) * count
        return (*nothing, *back) if form.is_group else (*back, *nothing)

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward), "__module__": __name__}
    function = _FUNCTIONS[f"grouped_{kind}" if group else kind] = type(
        name, (torch.autograd.Function,), members
    )
    return function


def _allreduce_gradients(ctx: Any, gradients: tuple[Tensor, ...]) -> Sequence[Tensor]:
    """All-reduce the gradients by the same operation and factors (Horovod's convention)."""
    average, _, op, prescale, postscale, process_set = ctx.arguments
    scaling = {"prescale_factor": prescale, "postscale_factor": postscale}
    if len(gradients) == 1:
        return [allreduce(gradients[0], average, op=op, **scaling, process_set=process_set)]
    reduced: list[Tensor] = grouped_allreduce(gradients, average, op=op, **scaling, process_set=process_set)
    return reduced


def _allgather_gradients(ctx: Any, gradients: tuple[Tensor, ...]) -> Sequence[Tensor]:
    """Average over the ranks, and take the rows that this rank gave."""
    _, process_set = ctx.arguments
    pairs = zip(gradients, ctx.shapes, strict=True)
    return [_own_rows(gradient, shape[0], process_set) for gradient, shape in pairs]


def _own_rows(gradient: Tensor, rows: int, process_set: ProcessSet) -> Tensor:
    reduced = _averaged(gradient, process_set)
    everyones: list[int] = allgather(torch.tensor([rows]), process_set=process_set).tolist()
    own = process_set.rank()
    assert own is not None, "it took part in the forward"
    return reduced.narrow(0, sum(everyones[:own]), rows)


def _averaged(gradient: Tensor, process_set: ProcessSet) -> Tensor:
    """Average over the ranks; a complex gradient by its parts, because all-reduces take real ones."""
    if gradient.is_complex():
        parts = torch.view_as_real(gradient.resolve_conj())
        return torch.view_as_complex(_averaged(parts, process_set))
    reduced: Tensor = allreduce(gradient, op=Average, process_set=process_set)
    return reduced


def _broadcast_gradients(ctx: Any, gradients: tuple[Tensor, ...]) -> Sequence[Tensor]:
    root_rank, _, process_set = ctx.arguments
    reduced = _averaged(gradients[0], process_set)
    if rank() != root_rank:
        # Zeros with a history: a backward through this one is collective, too.
        reduced = reduced.masked_fill(torch.ones_like(reduced, dtype=torch.bool), 0)
    return [reduced]


def _reducescatter_gradients(ctx: Any, gradients: tuple[Tensor, ...]) -> Sequence[Tensor]:
    """Gather the gradients of all ranks' rows; of a sum, times the number of ranks (Horovod's convention)."""
    _, op, process_set, prescale, postscale = ctx.arguments
    factor = prescale * postscale * (process_set.size() if op == Sum else 1)
    scaled = [gradient * factor if factor != 1 else gradient for gradient in gradients]
    return [allgather(gradient, process_set=process_set) for gradient in scaled]


_GradientsOf = Callable[[Any, tuple[Tensor, ...]], Sequence[Tensor]]
_COLLECTIVES: dict[str, tuple[Callable[..., int], _GradientsOf]] = {
    "allreduce": (start_allreduce, _allreduce_gradients),
    "allgather": (start_allgather, _allgather_gradients),
    "broadcast": (start_broadcast, _broadcast_gradients),
    "reducescatter": (start_reducescatter, _reducescatter_gradients),
}
"""Kind -> its start, and the gradients of its tensors from those of its results.

The latter are given the context of an autograd function with `arguments` and `shapes`.
"""
_FUNCTIONS: dict[str, type[torch.autograd.Function]] = {}

HorovodAllreduce = _differentiable("HorovodAllreduce")
HorovodGroupedAllreduce = _differentiable("HorovodGroupedAllreduce")
HorovodAllgather = _differentiable("HorovodAllgather")
HorovodGroupedAllgather = _differentiable("HorovodGroupedAllgather")
HorovodBroadcast = _differentiable("HorovodBroadcast")
HorovodReducescatter = _differentiable("HorovodReducescatter")
HorovodGroupedReducescatter = _differentiable("HorovodGroupedReducescatter")


# --- public functions -----------------------------------------------------------------------------

allreduce_async = _public(
    "allreduce_async",
    """Begin an all-reduce into a new tensor; returns a handle.

    average   old way to say op=Average or op=Sum
    op        Average (the default), Sum, Adasum, Min, Max, Product. An average divides exactly, unlike a
              product by the reciprocal; integers are summed in 32 bits or more and truncated
    prescale_factor, postscale_factor   multiplied before and after; integers in float64, truncated
    errors    ValueError for types that cannot be reduced (by Adasum: all but real floating point), factors
              that make no sense, and a name that is under way
              NotImplementedError for Adasum on a number of ranks that is no power of two, or a process set
    """,
)
allreduce_async_ = _public("allreduce_async_", "Begin an all-reduce in place; see `allreduce_async`.")
grouped_allreduce_async = _public(
    "grouped_allreduce_async", "Begin all-reduces done together; returns one handle."
)
grouped_allreduce_async_ = _public(
    "grouped_allreduce_async_", "Begin all-reduces in place that are done together."
)
allreduce_ = _public("allreduce_", "All-reduce in place, without a gradient.")
grouped_allreduce_ = _public("grouped_allreduce_", "All-reduce several tensors together, in place.")
allgather_async = _public(
    "allgather_async",
    "Begin to gather the rows of all ranks' tensors, whose first dimensions may differ.",
)
grouped_allgather_async = _public(
    "grouped_allgather_async", "Begin all-gathers done together; returns one handle."
)
broadcast_async = _public(
    "broadcast_async",
    "Begin to send the root's tensor to all ranks, into a new tensor. root_rank: of the whole job.",
)
broadcast_async_ = _public("broadcast_async_", "Begin to send the root's tensor to all ranks, in place.")
broadcast_ = _public("broadcast_", "Replace the tensor by the root's on every rank, without a gradient.")
reducescatter_async = _public(
    "reducescatter_async",
    """Begin a reduce-scatter: every rank gets its rows of the reduction.

    op        Average or Sum
    result    rows, as equal as can be; the first ranks have one more
    errors    ValueError for a tensor without dimensions, HorovodInternalError for another op
    """,
)
grouped_reducescatter_async = _public(
    "grouped_reducescatter_async",
    "Begin reduce-scatters done together; returns one handle, whose result is a list.",
)
allreduce = _public(
    "allreduce",
    """All-reduce into a new tensor; see `allreduce_async`. Its gradient is an all-reduce of the gradients.

    compression   how it travels: Compression.none, .fp16, .bf16, or a Compressor of your own
    """,
)
grouped_allreduce = _public(
    "grouped_allreduce", "All-reduce several tensors together, into new tensors; see `allreduce`."
)
allgather = _public(
    "allgather",
    """Gather the rows of all ranks' tensors, in rank order.

    Its gradient is the average over the ranks of the gradients of this rank's rows (Horovod's convention).
    errors   ValueError for a tensor without dimensions or of a type that cannot be sent
    """,
)
grouped_allgather = _public("grouped_allgather", "Gather the rows of several tensors together.")
broadcast = _public(
    "broadcast",
    """Return the root's tensor, on every rank.

    Its gradient is the average of the gradients on the root, and zero elsewhere (Horovod's convention).
    errors   ValueError for a root that is not in the process set
    """,
)
reducescatter = _public(
    "reducescatter",
    "Return this rank's rows of the reduction; see `reducescatter_async`. Its gradient is an all-gather.",
)
grouped_reducescatter = _public("grouped_reducescatter", "Reduce-scatter several tensors together.")


@uncompiled
def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None = None,
    op: int | None = Average,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], Tensor]:
    """Begin a sum or average of sparse tensors; returns a function that waits for the result.

    Two all-gathers, of the indices and of the values; what several ranks hold is added up when the
    result is coalesced.
    errors   ValueError for other operations; HorovodInternalError, by the function that waits, on every rank
             where shapes differ
    """
    if op not in (Average, Sum):
        raise ValueError(f"a sparse all-reduce sums or averages; op {op} was asked for")
    if not getattr(tensor, "is_sparse", False):
        raise ValueError("a sparse all-reduce of what is not sparse was asked for; give tensor.to_sparse()")
    tensor = tensor.coalesce() if not tensor.is_coalesced() else tensor
    engine = engine_of(process_set)
    require_type("a sparse all-reduce", tensor.values(), MOVABLE)
    chosen = name if name is not None else engine.unnamed("sparse_allreduce")[0]
    content = f"a sparse tensor of shape {list(tensor.shape)}"
    parts = {"indices": tensor.indices().t().contiguous(), "values": tensor.values()}
    tickets = [
        ticket_for(engine, "allgather", part, f"{chosen}.{which}", content=content)
        for which, part in parts.items()
    ]
    handle = submit(engine, tickets, is_group=True)

    def wait() -> Tensor:
        positions, found = synchronize(handle)
        if op == Average:
            found = found / process_set.size()
        return torch.sparse_coo_tensor(positions.t(), found, tensor.shape, check_invariants=False)

    return wait


@uncompiled
def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to send rows to every rank; the handle's result is (rows received, how many from each rank).

    splits   rows for each rank, int32 or int64; None: equal pieces
    errors   ValueError for splits of another type or number, or more rows than there are
    """
    engine = engine_of(process_set)
    require_type("an alltoall", tensor, MOVABLE)
    rows = splits_of(tensor, splits, engine.size)
    ticket = ticket_for(engine, "alltoall", tensor, name)
    ticket.splits = rows
    return submit(engine, [ticket], is_group=False)


@uncompiled
def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Exchange rows with every rank; see `alltoall_async`.

    returns   the rows received, in the order of the ranks; and, where splits are given, how many came
              from each (int32). Its gradient goes the way back
    """
    if getattr(tensor, "requires_grad", False) and torch.is_grad_enabled():
        output, received = HorovodAlltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    else:
        output, received = synchronize(alltoall_async(tensor, splits, name, process_set))
    return output if splits is None else (output, received)


@uncompiled
def join(device: int = -1) -> int:
    """Contribute zeros to the others' sums, as this rank has no more data, until all ranks have joined.

    device    for compatibility; the zeros are made where they are needed
    returns   the rank that joined last, the same on every rank
    """
    return engine_of(global_process_set).join()


@uncompiled
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the process set have come here."""
    engine = engine_of(process_set)
    name, serial = engine.unnamed("barrier")
    ticket = Ticket(TensorRequest(name, "barrier", serial=serial))
    engine.submit([ticket])
    engine.wait(ticket)


class HorovodAlltoall(torch.autograd.Function):
    """Rows to every rank; the gradients of the rows received go back to their senders."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        output, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.received, ctx.process_set, ctx.rows = received, process_set, tensor.shape[0]
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        back, _ = alltoall(gradient, ctx.received, process_set=ctx.process_set)
        if back.shape[0] < ctx.rows:  # rows that were sent to nobody
            back = torch.cat([back, back.new_zeros((ctx.rows - back.shape[0], *back.shape[1:]))])
        return back, None, None, None
