"""Submission of torch tensors to the engine: arguments checked, tickets made, handles kept.

collective(arguments) ──> checks ──> tickets ──> engine.submit ──> handle ──> synchronize
"""

from __future__ import annotations

import itertools
import math
import operator
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcpar.horovod import adasum, basics
from hpcpar.horovod.engine import Engine
from hpcpar.horovod.exceptions import HorovodInternalError
from hpcpar.horovod.negotiation import TensorRequest
from hpcpar.horovod.operations import Ticket
from hpcpar.horovod.process_sets import ProcessSet, global_process_set
from hpcpar.horovod.util import num_rank_is_power_2
from hpcpar.uncompiled import uncompiled

Average, Sum, Adasum, Min, Max, Product = range(6)
OPS = ("average", "sum", "adasum", "min", "max", "product")
_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
REDUCIBLE = _INTEGERS | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
MOVABLE = REDUCIBLE | {torch.bool, torch.complex64, torch.complex128}
DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in MOVABLE}


class Form(NamedTuple):
    """Variant of a collective: of one tensor or of a group, into new tensors or in place."""

    is_group: bool = False
    in_place: bool = False


class _Outstanding(NamedTuple):
    """Operations of one handle.

    given   in place: the caller's tensors, which are the result, rather than our views of them
    """

    engine: Engine
    tickets: list[Ticket]
    is_group: bool
    given: list[Tensor] | None


_outstanding: dict[int, _Outstanding] = {}
_numbers = itertools.count()


def submit(engine: Engine, tickets: list[Ticket], is_group: bool, given: list[Tensor] | None = None) -> int:
    """Ask the engine for operations, and return their handle."""
    engine.submit(tickets)
    handle = next(_numbers)
    _outstanding[handle] = _Outstanding(engine, tickets, is_group, given)
    return handle


@uncompiled
def poll(handle: int) -> bool:
    """Make progress without blocking; return True if an operation is done and `synchronize` will not wait.

    errors   ValueError for a handle that is unknown or was synchronized before
    """
    found = _outstanding.get(handle)
    if found is None:
        raise ValueError(f"handle {handle!r} was not created, or has been synchronized")
    done = [found.engine.poll(ticket) for ticket in found.tickets]
    return all(done)


@uncompiled
def synchronize(handle: int) -> Any:
    """Wait for an operation, and return its result; None for an unknown or synchronized handle.

    errors   HorovodInternalError: ranks that disagree, on all of them; a lost peer; a stall; a shutdown.
             ValueError: what cannot be done although all ranks ask for the same
    """
    found = _outstanding.pop(handle, None)
    if found is None:
        return None
    results: list[Any] = []
    errors = []
    for ticket in found.tickets:
        try:
            results.append(found.engine.wait(ticket))
        except (HorovodInternalError, ValueError) as error:  # the others of its group are waited for as well
            errors.append(error)
    if errors:
        raise errors[0]
    if found.given is not None:
        results = list(found.given)
    return results if found.is_group else results[0]


def tickets_for(
    engine: Engine, kind: str, tensors: Sequence[Tensor], name: str | None, form: Form, **told: Any
) -> list[Ticket]:
    """Make the tickets of one call, which belong together if it is a group; `told` as for `ticket_for`."""
    if not form.is_group:
        return [ticket_for(engine, kind, tensors[0], name, form.in_place, **told)]
    if not tensors:
        raise ValueError(f"a grouped {kind} of no tensors was asked for; give at least one")
    devices = {"GPU" if tensor.is_cuda else "CPU" for tensor in tensors}
    if len(devices) > 1:
        raise HorovodInternalError(
            f"a grouped {kind} of tensors on CPU and GPU was asked for; group those of one kind of device"
        )
    count = len(tensors)
    full, serial = engine.unnamed(kind) if name is None else (f"{kind}.{name}", 0)
    base = full.removeprefix(f"{kind}.")
    names = [f"{base}_{number}of{count}" for number in range(1, count + 1)]
    told |= {"group": (full, count), "serial": serial}
    return [
        ticket_for(engine, kind, tensor, one, form.in_place, **told)
        for tensor, one in zip(tensors, names, strict=True)
    ]


def ticket_for(
    engine: Engine, kind: str, tensor: Tensor, name: str | None, in_place: bool = False, **told: Any
) -> Ticket:
    """Describe one tensor's operation to the other ranks, under its name or the next number.

    told   more of its TensorRequest: op, root, prescale, postscale, group, content, serial
    """
    if name is None:
        full, told["serial"] = engine.unnamed(kind)
    else:
        full = f"{kind}.{name}"
    device = "GPU" if tensor.is_cuda else "CPU"
    request = TensorRequest(full, kind, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), device, **told)
    if in_place or tensor.requires_grad:
        tensor = tensor.detach()
    return Ticket(request, tensor, tensor if in_place else None)


def engine_of(process_set: ProcessSet) -> Engine:
    """Return a process set's engine; an error before init(), and on ranks that do not belong to it."""
    engine: Engine | None = getattr(process_set, "_engine", None)
    if engine is not None:
        return engine
    if not basics.is_initialized():
        raise HorovodInternalError("Horovod has not been initialized; call hvd.init() first.")
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_set={process_set!r}; give a ProcessSet, or leave it out for all ranks")
    if process_set.process_set_id is None:
        raise ValueError(
            f"{process_set} is not registered; use hvd.add_process_set or hvd.init(process_sets=…)"
        )
    raise ValueError(f"rank {basics.rank()} does not belong to {process_set}, and cannot communicate in it")


def op_called(op: int | None, average: bool | None) -> str:
    """Return the name of the operation that `op`, or the older `average`, asks for."""
    if average is None and type(op) is int and 0 <= op < len(OPS):
        return OPS[op]
    if average is not None:
        if op is not None:
            raise ValueError("both average and op were given; op says it all")
        warnings.warn("average is deprecated; give op=Average or op=Sum", DeprecationWarning, stacklevel=5)
        op = Average if average else Sum
    if op is None:
        op = Average
    if op not in range(len(OPS)):
        raise ValueError(f"op {op!r} is not one of Average, Sum, Adasum, Min, Max, Product")
    return OPS[op]


def require_adasum(process_set: ProcessSet) -> None:
    """Refuse Adasum where it is not defined: NotImplementedError."""
    if process_set is not global_process_set:
        raise NotImplementedError("Adasum is defined over all ranks here; it was asked for on a process set")
    if not num_rank_is_power_2(basics.size()):
        raise NotImplementedError(
            f"Adasum needs a number of ranks that is a power of two; there are {basics.size()}"
        )


def require_type(what: str, tensor: Tensor, known: set[torch.dtype]) -> None:
    """Refuse tensors that cannot be sent, and what is none: ValueError."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{what} of a {type(tensor).__name__} was asked for; give torch.as_tensor(…) of it")
    if tensor.dtype not in known:
        raise ValueError(
            f"{what} of {tensor.dtype} was asked for. Tensor type {tensor.type()} is not supported"
        )
    if tensor.layout is not torch.strided:
        raise ValueError(f"{what} of a {tensor.layout} tensor was asked for; use sparse_allreduce_async")
    if tensor.is_meta:
        raise ValueError(
            f"{what} of a tensor on the meta device was asked for, which has no values; give it memory "
            f"before, as by module.to_empty(device='cpu')"
        )


def factors_of(before: float, after: float, tensors: Sequence[Tensor]) -> dict[str, float]:
    """Return both factors as floats; ValueError for non-numbers, and for infinite ones with integers."""
    before, after = float(before), float(after)
    if not (math.isfinite(before) and math.isfinite(after)):
        for tensor in tensors:
            if not tensor.is_floating_point():
                raise ValueError(
                    f"prescale_factor={before} and postscale_factor={after} were given for {tensor.dtype}; "
                    f"integers take finite factors"
                )
    return {"prescale": before, "postscale": after}


def require_own_elements(what: str, tensor: Tensor) -> None:
    """Refuse to write a result into a tensor whose elements share memory: ValueError."""
    if tensor.is_contiguous():
        return
    strides = tensor.stride()
    if 0 not in strides or tensor.numel() < 2:
        return
    if any(step == 0 and length > 1 for step, length in zip(strides, tensor.shape, strict=True)):
        raise ValueError(
            f"{what} in place of an expanded tensor was asked for (shape {list(tensor.shape)}, strides "
            f"{list(strides)}), whose elements share memory; give its clone()"
        )


def splits_of(tensor: Tensor, splits: Tensor | Sequence[int] | None, size: int) -> list[int]:
    """Return the rows for each rank; ValueError for splits that the tensor does not have."""
    if not tensor.dim():
        return []  # which is told on every rank
    length = tensor.shape[0]
    if splits is None:
        if length % size:
            raise ValueError(
                f"an alltoall of {length} rows over {size} ranks: they cannot be split evenly; give splits"
            )
        return [length // size] * size
    if isinstance(splits, Tensor) and splits.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"splits are {splits.dtype}; give whole numbers as torch.int32")
    try:
        rows = [operator.index(n) for n in (splits.tolist() if isinstance(splits, Tensor) else splits)]
    except TypeError as error:
        raise ValueError(
            f"splits {splits!r} are no whole numbers; give rows for each of {size} ranks"
        ) from error
    if len(rows) != size or any(count < 0 for count in rows):
        raise ValueError(f"splits {rows} do not give a number of rows for each of {size} ranks")
    if sum(rows) > length:
        raise ValueError(f"splits {rows} ask for {sum(rows)} rows, but the tensor has {length}")
    return rows


def start_allreduce(
    form: Form,
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin an all-reduce of each tensor; return the handle."""
    engine = engine_of(process_set)
    chosen = op_called(op, average)
    by_adasum = chosen == "adasum"
    what, reducible = ("an Adasum", set(adasum.DTYPES)) if by_adasum else ("an all-reduce", REDUCIBLE)
    for tensor in tensors:
        require_type(what, tensor, reducible)
        if form.in_place:
            require_own_elements(what, tensor)
    if by_adasum:
        require_adasum(process_set)
    factors = factors_of(prescale_factor, postscale_factor, tensors)
    tickets = tickets_for(engine, "allreduce", tensors, name, form, op=chosen, **factors)
    return submit(engine, tickets, form.is_group, list(tensors) if form.in_place else None)


def start_allgather(
    form: Form,
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to gather each tensor's rows; return the handle."""
    engine = engine_of(process_set)
    for tensor in tensors:
        require_type("an allgather", tensor, MOVABLE)
    return submit(engine, tickets_for(engine, "allgather", tensors, name, form), form.is_group)


def start_broadcast(
    form: Form,
    tensors: Sequence[Tensor],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to send the tensor of `root_rank`, a rank of the job; return the handle."""
    engine = engine_of(process_set)
    (tensor,) = tensors
    ranks = process_set.ranks or []
    if root_rank not in ranks:
        raise ValueError(f"root_rank={root_rank} is not among the ranks {ranks} of the process set")
    require_type("a broadcast", tensor, MOVABLE)
    if form.in_place:
        require_own_elements("a broadcast", tensor)
    ticket = ticket_for(engine, "broadcast", tensor, name, form.in_place, root=ranks.index(root_rank))
    return submit(engine, [ticket], form.is_group, [tensor] if form.in_place else None)


def start_reducescatter(
    form: Form,
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin a reduce-scatter of each tensor; return the handle."""
    engine = engine_of(process_set)
    chosen = op_called(op, None)
    if chosen not in ("average", "sum"):
        raise HorovodInternalError(f"a reducescatter with op {chosen} was asked for; it does Average and Sum")
    for tensor in tensors:
        require_type("a reducescatter", tensor, REDUCIBLE)
    factors = factors_of(prescale_factor, postscale_factor, tensors)
    tickets = tickets_for(engine, "reducescatter", tensors, name, form, op=chosen, **factors)
    return submit(engine, tickets, form.is_group)
