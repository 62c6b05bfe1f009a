"""The collectives as a user calls them: methods of `Communicator`.

*   Arrays are NumPy arrays, torch tensors or CuPy arrays of any shape, seen as flat; empty ones too.
*   Without `out` the work is done in place where the input is as large as the result; with `out` the
    input is left as it was.
*   Arrays that are not contiguous, and device arrays, are copied to host memory and the result back.
*   Ranks that make different calls get a MismatchError; to be told what each asked for, there is checked mode
    (`HPCPAR_CHECK=1`).
*   The order of summation depends on the algorithm and on the number of ranks alone, and all ranks
    end with identical bits.
*   `start_x(...)` returns a `Handle` at once; `x(...)` starts the same and waits. All ranks must start
    the collectives of one communicator in the same order.
*   `name` tells calls apart that are otherwise alike, as two gradients of one shape: ranks that make them in
    different orders get a MismatchError. Errors of the call have it, too. A program's names should be few,
    and return: each is compiled once.
*   `algorithm` names one of `hpcpar.algorithms`; None chooses by size.
*   `algorithm="native"` is the MPI library's own, where it has one (allreduce, reduce_scatter, allgather,
    broadcast, alltoall), and OperationError where it cannot: over loopback, or in sums of 16-bit floating
    point. It works on host memory like all others. The order of summation, identical bits on all ranks, and
    what becomes of a NaN in min and max are then as the library has them; its messages are not counted.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpcpar.comm.compiled import Handle
from hpcpar.comm.request import PLAIN, counts_of

if TYPE_CHECKING:
    from hpcpar.comm.communicator import Communicator


def start_allreduce(
    self: Communicator,
    buffer: Any,
    op: str = "sum",
    *,
    out: Any = None,
    algorithm: str | None = None,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: str | None = None,
) -> Handle:
    """Reduce all ranks' buffers; every rank gets the result.

    buffer            same shape and element type on every rank
    op                sum, average, min, max, product; and, or, xor on bool (logical) and integers (bits)
    prescale_factor   every rank's buffer is multiplied by it first, and
    postscale_factor  the result at the end; how it rounds: `hpcpar/comm/half_precision.py`
    compression       float16 or bfloat16: float32 and float64 travel and are summed as these, within the
                      error that `hpcpar/comm/half_precision.py` states; a rank alone sends and loses nothing
    result            out, or buffer when out is None
    errors            OperationError, BufferTypeError; MismatchError on every rank
    """
    asked = op, None, algorithm, (prescale_factor, postscale_factor, compression), None, name
    return self._calls.start("allreduce", asked, buffer, out)


def allreduce(
    self: Communicator,
    buffer: Any,
    op: str = "sum",
    *,
    out: Any = None,
    algorithm: str | None = None,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: str | None = None,
) -> Any:
    """`start_allreduce` and wait."""
    asked = op, None, algorithm, (prescale_factor, postscale_factor, compression), None, name
    return self._calls.run("allreduce", asked, buffer, out)


def start_reduce_scatter(
    self: Communicator,
    buffer: Any,
    op: str = "sum",
    *,
    counts: Sequence[int] | None = None,
    out: Any = None,
    algorithm: str | None = None,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Reduce all ranks' buffers; rank r gets the r-th piece of the result.

    counts            elements of each rank's piece; None: as equal as can be, larger ones first
    prescale_factor, postscale_factor   as of an all-reduce
    result            out, which may lie in buffer; or, when out is None, this rank's piece as a flat
                      view of buffer, whose other pieces then hold partial sums
    """
    asked = op, None, algorithm, (prescale_factor, postscale_factor, None), counts_of(counts), name
    return self._calls.start("reduce_scatter", asked, buffer, out)


def reduce_scatter(
    self: Communicator,
    buffer: Any,
    op: str = "sum",
    *,
    counts: Sequence[int] | None = None,
    out: Any = None,
    algorithm: str | None = None,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """`start_reduce_scatter` and wait."""
    asked = op, None, algorithm, (prescale_factor, postscale_factor, None), counts_of(counts), name
    return self._calls.run("reduce_scatter", asked, buffer, out)


def start_allgather(
    self: Communicator,
    shard: Any,
    *,
    counts: Sequence[int] | None = None,
    out: Any = None,
    algorithm: str | None = None,
    name: str | None = None,
) -> Handle:
    """Give every rank all ranks' shards, one after the other.

    counts   elements of each rank's shard; None: all as many as this one
    out      flat array for all of them; `shard` may be its own piece of it, and then is not copied
    result   out, or a new one-dimensional array
    """
    asked = None, None, algorithm, PLAIN, counts_of(counts), name
    return self._calls.start("allgather", asked, shard, out)


def allgather(
    self: Communicator,
    shard: Any,
    *,
    counts: Sequence[int] | None = None,
    out: Any = None,
    algorithm: str | None = None,
    name: str | None = None,
) -> Any:
    """`start_allgather` and wait."""
    asked = None, None, algorithm, PLAIN, counts_of(counts), name
    return self._calls.run("allgather", asked, shard, out)


def start_broadcast(
    self: Communicator, buffer: Any, root: int = 0, *, algorithm: str | None = None, name: str | None = None
) -> Handle:
    """Copy the root's buffer into every rank's. In place.

    buffer   same shape and element type on every rank
    result   buffer
    """
    return self._calls.start("broadcast", (None, root, algorithm, PLAIN, None, name), buffer)


def broadcast(
    self: Communicator, buffer: Any, root: int = 0, *, algorithm: str | None = None, name: str | None = None
) -> Any:
    """`start_broadcast` and wait."""
    return self._calls.run("broadcast", (None, root, algorithm, PLAIN, None, name), buffer)


def _at_root(comm: Communicator, root: Any, out: Any) -> Any:
    """`out` on the root, None elsewhere; a root that is no rank is refused when the request is validated."""
    try:
        return out if operator.index(root) == comm.rank else None
    except TypeError:
        return None


def start_reduce(
    self: Communicator,
    buffer: Any,
    op: str = "sum",
    root: int = 0,
    *,
    out: Any = None,
    algorithm: str | None = None,
    name: str | None = None,
) -> Handle:
    """Reduce all ranks' buffers; the root gets the result, the other ranks' stay as they were.

    result   on the root out, or buffer when out is None; None elsewhere
    """
    into = None if out is None else _at_root(self, root, out)
    return self._calls.start("reduce", (op, root, algorithm, PLAIN, None, name), buffer, into)


def reduce(
    self: Communicator,
    buffer: Any,
    op: str = "sum",
    root: int = 0,
    *,
    out: Any = None,
    algorithm: str | None = None,
    name: str | None = None,
) -> Any:
    """`start_reduce` and wait."""
    into = None if out is None else _at_root(self, root, out)
    return self._calls.run("reduce", (op, root, algorithm, PLAIN, None, name), buffer, into)


def start_gather(
    self: Communicator,
    shard: Any,
    root: int = 0,
    *,
    counts: Sequence[int] | None = None,
    out: Any = None,
    algorithm: str | None = None,
    name: str | None = None,
) -> Handle:
    """Give the root all ranks' shards, one after the other.

    counts   elements of each rank's shard, known to all; None: all as many as this one
    result   on the root out, or a new one-dimensional array; None elsewhere
    """
    asked = None, root, algorithm, PLAIN, counts_of(counts), name
    return self._calls.start("gather", asked, shard, out)


def gather(
    self: Communicator,
    shard: Any,
    root: int = 0,
    *,
    counts: Sequence[int] | None = None,
    out: Any = None,
    algorithm: str | None = None,
    name: str | None = None,
) -> Any:
    """`start_gather` and wait."""
    return start_gather(self, shard, root, counts=counts, out=out, algorithm=algorithm, name=name).wait()


def start_scatter(
    self: Communicator,
    buffer: Any,
    root: int = 0,
    *,
    counts: Sequence[int] | None = None,
    out: Any,
    algorithm: str | None = None,
    name: str | None = None,
) -> Handle:
    """Give rank r the r-th piece of the root's buffer.

    buffer   on the root; ignored elsewhere (pass None)
    counts   elements of each rank's piece, known to all; None: all as many as out has
    out      this rank's piece
    result   out
    """
    asked = None, root, algorithm, PLAIN, counts_of(counts), name
    return self._calls.start("scatter", asked, buffer, out)


def scatter(
    self: Communicator,
    buffer: Any,
    root: int = 0,
    *,
    counts: Sequence[int] | None = None,
    out: Any,
    algorithm: str | None = None,
    name: str | None = None,
) -> Any:
    """`start_scatter` and wait."""
    return start_scatter(self, buffer, root, counts=counts, out=out, algorithm=algorithm, name=name).wait()


def start_alltoall(
    self: Communicator,
    buffer: Any,
    *,
    out: Any = None,
    send_counts: Sequence[int] | None = None,
    receive_counts: Sequence[int] | None = None,
    algorithm: str | None = None,
    name: str | None = None,
) -> Handle:
    """Send the j-th piece of every rank's buffer to rank j, which gets rank r's as its own r-th.

    send_counts      elements for each rank; None: equal pieces
    receive_counts   elements from each rank; None: the ranks ask each other first
    result           out, which may overlap buffer, or a new one-dimensional array; buffer is not
                     written to otherwise
    """
    counts = None
    if send_counts is not None or receive_counts is not None:
        counts = counts_of(send_counts), counts_of(receive_counts)
    return self._calls.start("alltoall", (None, None, algorithm, PLAIN, counts, name), buffer, out)


def alltoall(
    self: Communicator,
    buffer: Any,
    *,
    out: Any = None,
    send_counts: Sequence[int] | None = None,
    receive_counts: Sequence[int] | None = None,
    algorithm: str | None = None,
    name: str | None = None,
) -> Any:
    """`start_alltoall` and wait."""
    counts = None
    if send_counts is not None or receive_counts is not None:
        counts = counts_of(send_counts), counts_of(receive_counts)
    return self._calls.run("alltoall", (None, None, algorithm, PLAIN, counts, name), buffer, out)


def start_barrier(self: Communicator, *, algorithm: str | None = None, name: str | None = None) -> Handle:
    """Complete once every rank has started it."""
    return self._calls.start("barrier", (None, None, algorithm, PLAIN, None, name))


def barrier(self: Communicator, *, algorithm: str | None = None, name: str | None = None) -> None:
    """`start_barrier` and wait."""
    self._calls.run("barrier", (None, None, algorithm, PLAIN, None, name))
