"""Named parameters: each once, under one name, and the same list on every rank."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hpcpar.autograd.grad_accumulation_fusion import GradBufferOffer
from hpcpar.autograd.split_norms import split_over_of
from hpcpar.data_parallel.buckets import Extent
from hpcpar.errors import MismatchError, OperationError
from hpcpar.parameter_info import info_of
from hpcpar.planner.matrix_owners import matrix_cost
from hpcpar.uncompiled import uncompiled

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

Named = tuple[str, Tensor]


def distinct(named: Iterable[Named]) -> list[Named]:
    """The (name, tensor) pairs, a tensor shared by several modules once, under its first name.

    Raises OperationError when one name stands for two tensors.
    """
    by_name: dict[str, Tensor] = {}
    seen: set[int] = set()
    kept: list[Named] = []
    for pair in named:
        name, tensor = _pair(pair)
        if by_name.setdefault(name, tensor) is not tensor:
            raise OperationError(
                f"two parameters are called {name!r}; give each its own name, for example by a prefix "
                "for each model: [('encoder.' + name, p) for name, p in encoder.named_parameters()]"
            )
        if id(tensor) not in seen:
            seen.add(id(tensor))
            kept.append((name, tensor))
    return kept


def _pair(pair: object) -> Named:
    match pair:
        case (str() as name, Tensor() as tensor):
            return name, tensor
    raise OperationError(
        f"found {type(pair).__name__} where a (name, parameter) pair is needed; "
        "pass model.named_parameters(), not model.parameters()"
    )


def extent(tensor: Tensor, *, is_matrix: bool = False) -> Extent:
    """Return the size of a tensor in a flat buffer of its element type, device and replicas.

    is_matrix   one rank is to own it whole, and its cost is that of the whole matrix
    """
    kind, info = (tensor.dtype, tensor.device), info_of(tensor)
    shape = tensor.shape if info.split is None else info.split.whole_shape(tensor.shape)
    cost = matrix_cost(shape) if is_matrix else 0
    return Extent(tensor.numel(), tensor.element_size(), kind, info.replicas, cost)


def describe(named: Named) -> str:
    """Name, shape, element type and, for an unusual one, memory order: "head.weight [8, 4] float32"."""
    name, tensor = named
    if is_lazy(tensor):
        return f"{name} without a shape"
    text = f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    if not tensor.is_contiguous():
        text += f" with strides {list(tensor.stride())}"
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return f"{text} (frozen)" if frozen else text


def agree_on_parameters(named: Sequence[Named], comm: Communicator, what: str = "parameters") -> None:
    """Hold every rank's list equal to rank 0's: names, order, shapes, element types, frozen or not.

    Collective. Raises MismatchError on every rank, which names the ranks and their first difference; or a
    parameter that is split over some of the ranks, whose parts are not to be averaged or overwritten.
    """
    for name, parameter in named:
        for other in split_over_of(parameter):
            both = sorted({*comm.world_ranks} & {*other.world_ranks})
            if len(both) > 1:
                raise MismatchError(
                    f"{name} is split over {other.name!r}: ranks {both} of the job have different parts of "
                    f"it, but are in {comm.name!r}, too, whose ranks are to have the same {what}; pass the "
                    f"communicator of replicas, such as mesh.dp"
                )
    mine = [describe(pair) for pair in named]
    digest = hashlib.sha256("\n".join(mine).encode()).digest()
    if len(set(comm.allgather_object(digest))) == 1:
        lazy = next((name for name, tensor in named if is_lazy(tensor)), None)
        if lazy is not None:
            raise OperationError(
                f"{lazy} has no shape yet, as one of torch.nn.LazyLinear before the first forward; call the "
                "model once on every rank, then do this"
            )
        return
    # Only now do whole lists travel; on thousands of ranks a digest each is cheap, a list is not.
    reference: list[str] = comm.broadcast_object(mine if comm.rank == 0 else None, root=0)
    found = comm.allgather_object(_first_difference(mine, reference))
    wrong = [f"rank {rank}: {text}" for rank, text in enumerate(found) if text]
    raise MismatchError(
        f"{len(wrong)} of {comm.size} ranks have other {what} than rank 0: {'; '.join(wrong[:4])}"
        f"{'; …' if len(wrong) > 4 else ''}. Build the same model in the same order on every rank"
    )


def _first_difference(mine: Sequence[str], reference: Sequence[str]) -> str | None:
    for index, (own, expected) in enumerate(zip(mine, reference, strict=False)):
        if own != expected:
            return f"number {index} is {own} where rank 0 has {expected}"
    common = min(len(mine), len(reference))
    if len(mine) == len(reference):
        return None
    kind, odd = ("missing", reference) if len(mine) < len(reference) else ("extra", mine)
    return f"has {len(mine)} of them, rank 0 has {len(reference)}; the first {kind} is {odd[common]}"


Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides of a tensor whose elements fill their memory."""


@dataclass(frozen=True, eq=False)
class OwnPiece:
    """Elements of a parameter, in the order in which they lie in memory, that this rank owns.

    layout        of the whole parameter
    start, stop   the elements
    """

    name: str
    parameter: Tensor
    layout: Layout
    start: int
    stop: int


def layout_of(tensor: Tensor) -> Layout:
    """A tensor's own layout where it is dense, in whatever order; else that of its contiguous copy.

    A gradient that lies in memory as its parameter does keeps the optimizer's element-wise kernels fast.
    """
    if _is_dense(tensor):
        return tuple(tensor.shape), tuple(tensor.stride())
    return tuple(tensor.shape), tuple(torch.empty(tensor.shape, device="meta").stride())


def view_as(flat: Tensor, start: int, stop: int, layout: Layout) -> Tensor:
    """Elements start to stop of a flat buffer, seen in a layout."""
    return flat[start:stop].as_strided(*layout)


def view_like(flat: Tensor, start: int, stop: int, tensor: Tensor) -> Tensor:
    return view_as(flat, start, stop, layout_of(tensor))


def in_memory_order(tensor: Tensor, layout: Layout) -> Tensor:
    """A tensor's elements, flat, in the order in which they would lie in memory in this layout."""
    laid = torch.empty_strided(*layout, dtype=tensor.dtype, device=tensor.device)
    laid.copy_(tensor.detach())
    return laid.as_strided((laid.numel(),), (1,))


def watch_gradients(parameters: Sequence[Tensor], tell: Callable[[int], None]) -> list[Any]:
    """Hooks by which a method hears the number of each parameter that has got a gradient; to be removed.

    They die with the method's object: a forgotten one must not answer in the next one's stead.
    """
    call = uncompiled(_weakly(tell))
    return [
        parameter.register_post_accumulate_grad_hook(partial(call, number))  # type: ignore[no-untyped-call]
        for number, parameter in enumerate(parameters)
    ]


def offer_grad_buffers(
    parameters: Sequence[Tensor], buffer: Callable[[int], Tensor | None]
) -> list[GradBufferOffer]:
    """Let backwards put the gradient of the parameter of this number where a method says; to be removed.

    They die with the method's object, as `watch_gradients`.
    """
    call = _weakly(buffer)
    return [GradBufferOffer(parameter, partial(call, number)) for number, parameter in enumerate(parameters)]


def _weakly(method: Callable[[int], Any]) -> Callable[..., Any]:
    """Return a function that calls a method with its first argument while the method's object lives."""
    reference = weakref.WeakMethod(method)

    def call(number: int, *_: object) -> Any:
        alive = reference()
        return None if alive is None else alive(number)

    return call


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill their memory without holes or overlaps, in whatever order."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length == 0:
            return False
        if length > 1:
            if stride != expected:
                return False
            expected *= length
    return True


def nested_values(value: Any) -> Iterator[Any]:
    """Yield what lies in tuples, lists and dictionaries, at any depth."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from nested_values(each)
    elif isinstance(value, dict):
        yield from nested_values(list(value.values()))
    else:
        yield value
