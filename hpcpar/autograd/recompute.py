"""Activations computed anew for backward instead of kept, with the same random numbers as the first time.

    forward     x ─ function ─ y          kept: x, and where the streams stood
    backward    x ─ function ─            the streams go back there first, and return to where they were after

source   Chen et al. 2016, Training deep nets with sublinear memory cost, arXiv 1604.06174;
         Korthikanti et al. 2022, arXiv 2205.05198, section 5 (selective)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hpcpar.autograd.weight_grad_mode import DeferredGradients, under_way
from hpcpar.errors import OperationError
from hpcpar.uncompiled import uncompiled

T = TypeVar("T")


class Streams(Protocol):
    """Random-number generators that can be set back: `hpcpar.tensor_parallel.RandomStreams`."""

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...


def recompute(
    function: Callable[..., T],
    *tensors: Tensor,
    streams: Streams | None = None,
    preserve_default_generator: bool | None = None,
) -> T:
    """function(*tensors), keeping these alone; what backward needs of the rest is computed once more.

    streams                      what the function draws from: it draws the same numbers again, and they then
                                 stand where they would have stood without recomputation
    preserve_default_generator   the same for torch's own, which is the process's; None: without `streams`
    weights' gradients           that are deferred in the first forward are so in this one
    collective                   as the function is, and once more in backward up to the last tensor that
                                 backward needs: all ranks recompute, or none
    """
    if not torch.is_grad_enabled():
        return function(*tensors)
    if preserve_default_generator is None:
        preserve_default_generator = streams is None
    results = _FirstResults()
    again = _AsBefore(streams, under_way(), results)
    result: T = checkpoint(
        function,
        *tensors,
        use_reentrant=False,
        preserve_rng_state=preserve_default_generator,
        context_fn=lambda: (results.noted(), again),
    )
    return result


@uncompiled
def first_time(function: Callable[[], T]) -> T:
    """function(), or where activations are recomputed, what it returned in the first forward.

    For what must happen once whatever is recomputed: counting, or communication whose result is small.
    errors   OperationError in a backward that recomputes by other means, such as torch's checkpoint
    """
    results = _RESULTS.get()
    if results is None and torch._C._current_graph_task_id() != -1:
        raise OperationError(
            "a layer that counts its tokens once is computed in backward, where torch's own checkpoint would "
            "count them twice; recompute by hpcpar.autograd.recompute, or build Llama(recompute=…)"
        )
    return function() if results is None else results.next(function)


@uncompiled
def require_set_back(streams: Streams) -> None:
    """Refuse to draw in a backward from streams that do not stand where they did in the first forward.

    errors   OperationError in a backward that recomputes without them, or by other means
    """
    if torch._C._current_graph_task_id() != -1 and _SET_BACK.get() is not streams:
        raise OperationError(
            "dropout is computed again in backward, where it would drop other values than in forward, as what"
            " recomputes it does not know its random streams; take "
            "hpcpar.autograd.recompute(function, *tensors, streams=dropout.random_streams)"
        )


class _FirstResults:
    """Results of `first_time` in one first forward, in the order of the calls."""

    def __init__(self) -> None:
        self._results: list[Any] = []
        self._next = 0

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note results of what is computed inside, or return those of an earlier time."""
        token, self._next = _RESULTS.set(self), 0
        try:
            yield
        finally:
            _RESULTS.reset(token)

    def next(self, function: Callable[[], T]) -> T:
        if self._next == len(self._results):
            self._results.append(function())
        self._next += 1
        result: T = self._results[self._next - 1]
        return result


_RESULTS: ContextVar[_FirstResults | None] = ContextVar("results of the first forward", default=None)


_SET_BACK: ContextVar[Streams | None] = ContextVar("streams that stand as in forward", default=None)


class _AsBefore:
    """Context of a recomputation: random streams, deferred gradients and results as in the first forward.

    Entered once for every backward, of which a retained graph may have several.
    """

    def __init__(
        self, streams: Streams | None, deferred: DeferredGradients | None, results: _FirstResults
    ) -> None:
        self._streams, self._results = streams, results
        self._first = {} if streams is None else streams.state_dict()
        self._deferred = deferred
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._results.noted())
            if self._streams is not None:
                stack.callback(self._streams.load_state_dict, self._streams.state_dict())
                self._streams.load_state_dict(self._first)
                stack.callback(_SET_BACK.reset, _SET_BACK.set(self._streams))
            if self._deferred is not None:
                # Each product keeps for backward what it kept the first time.
                stack.enter_context(self._deferred.recording(again=True))
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)
