"""The collectives of a communicator.

*   Arrays are NumPy arrays, torch tensors or CuPy arrays of any shape, seen as flat; empty ones too.
*   Without `out` the work is done in place where the input is as large as the result; with `out` the
    input is left as it was.
*   Arrays that are not contiguous, and device arrays, are copied to host memory and the result back.
*   Ranks of one node whose short arrays differ in length or type get a MismatchError, if they read each
    other's; for all others, and to be told what each asked for, there is checked mode (`HPCPAR_CHECK=1`).
*   The order of summation depends on the algorithm and on the number of ranks alone, and all ranks
    end with identical bits.
*   `start_x(...)` returns a `Handle` at once; `x(...)` is `start_x(...).wait()`. All ranks must start
    the collectives of one communicator in the same order.
*   `algorithm` names one of `hpcpar.algorithms.registry`; None chooses by size.
*   `algorithm="native"` is the MPI library's own, where it has one (allreduce, reduce_scatter, allgather,
    broadcast, alltoall), and OperationError where it cannot: over loopback, or in sums of 16-bit floating
    point. It works on host memory like all others. The order of summation, identical bits on all ranks, and
    what becomes of a NaN in min and max are then as the library has them; its messages are not counted.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from hpcpar import partition
from hpcpar.comm.caller import Call, Caller, typed
from hpcpar.comm.half_precision import Compressed, CompressedOnDevice, Factors, Rescaling, is_plain
from hpcpar.comm.out_of_place import Kept, fill, is_same, overlap
from hpcpar.comm.prepared import Prepared
from hpcpar.comm.progress import Handle
from hpcpar.comm.reductions import require_op, scale
from hpcpar.errors import OperationError
from hpcpar.transport.buffers import HostBuffer, empty_like, flat
from hpcpar.transport.gpu.memory import DeviceBuffer

PREPARED = ("allreduce", "reduce_scatter", "allgather", "broadcast", "reduce", "alltoall", "barrier")
"""What `prepare` takes."""


class Collectives(Caller):
    """Reductions, gathers, scatters, exchanges and the barrier."""

    def start_allreduce(
        self,
        buffer: Any,
        op: str = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        compression: str | None = None,
    ) -> Handle:
        """Every rank gets the reduction of all ranks' buffers.

        buffer            same shape and element type on every rank
        op                sum, average, min, max, product; and, or on bool (logical) and integers (bitwise)
        prescale_factor   what every rank's buffer is multiplied by first, and
        postscale_factor  what the result is multiplied by; how it rounds: `hpcpar/comm/half_precision.py`
        compression       float16 or bfloat16: what float32 and float64 travel and are summed as, within the
                          error that `comm/half_precision.py` states; a rank alone sends and loses nothing
        result            out, or buffer when out is None
        errors            OperationError, BufferTypeError; in checked mode MismatchError on every rank
        """
        meaning = (op, algorithm, prescale_factor, postscale_factor, compression)
        recipe = self._remembered("allreduce", meaning, buffer, out)
        if recipe is not None:
            return self._start_known(recipe, buffer if out is None else out, (buffer, out))
        plain = is_plain(prescale_factor, postscale_factor, compression)
        key = self._key("allreduce", meaning, buffer, out) if plain else None
        with self._asking(Call("allreduce", op, algorithm=algorithm, key=key)) as call:
            source = self._view(buffer, writable=out is None)
            target = source if out is None else self._view_out(out, source.host.count, source.host)
            require_op(op, source.host.dtype)
            rescaling = Rescaling.of(prescale_factor, postscale_factor, compression)
            factors = rescaling.factors(op, source.host.dtype)
            call.described = f"{typed(buffer, source.host)}, op={op}{rescaling}"
        result = buffer if out is None else out
        if compression is not None and self.size > 1:
            packed = (
                CompressedOnDevice(source.host, target, compression, factors)
                if isinstance(source.host, DeviceBuffer)
                else Compressed(source.host, target, compression, factors, self._family.scratch)
            )
            return self._start_compressed(call, packed, result)
        call.factor = factors.after
        return self._start(
            call,
            {"data": target.host},
            None,
            lambda: result,
            first=(target.host, source.host),
            prepare=_prescaling(target.host, factors),
            averaged=target.host,
            write_back=target.write_back,
        )

    def _start_compressed(self, call: Call, packed: Compressed | CompressedOnDevice, result: Any) -> Handle:
        return self._start(
            call,
            {"data": packed.encoded},
            None,
            lambda: result,
            prepare=packed.encode,
            write_back=lambda: packed.decode(call.op, self.size),
        )

    def allreduce(
        self,
        buffer: Any,
        op: str = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        compression: str | None = None,
    ) -> Any:
        """`start_allreduce` and wait."""
        meaning = (op, algorithm, prescale_factor, postscale_factor, compression)
        recipe = self._remembered("allreduce", meaning, buffer, out)
        if recipe is not None:
            self._run(recipe, (buffer, out))
            return buffer if out is None else out
        return self.start_allreduce(
            buffer,
            op,
            out=out,
            algorithm=algorithm,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            compression=compression,
        ).wait()

    def start_reduce_scatter(
        self,
        buffer: Any,
        op: str = "sum",
        *,
        counts: Sequence[int] | None = None,
        out: Any = None,
        algorithm: str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Handle:
        """Rank r gets the r-th piece of the reduction of all ranks' buffers.

        counts            elements of each rank's piece; None: as equal as can be, larger ones first
        prescale_factor, postscale_factor   as of an all-reduce
        result            out, which may lie in buffer; or, when out is None, this rank's piece as a flat
                          view of buffer, whose other pieces then hold partial sums
        """
        meaning = (op, _tuple(counts), algorithm, prescale_factor, postscale_factor)
        recipe = self._remembered("reduce_scatter", meaning, buffer, out)
        if recipe is not None:
            result = flat(buffer)[slice(*recipe.own)] if out is None else out
            return self._start_known(recipe, result, (buffer, out))
        plain = is_plain(prescale_factor, postscale_factor, None)
        key = self._key("reduce_scatter", meaning, buffer, out) if plain else None
        with self._asking(Call("reduce_scatter", op, algorithm=algorithm, key=key)) as call:
            source = self._view(buffer, writable=out is None)
            pieces = self._pieces(counts, source.host.count)
            edges = partition.offsets(pieces)
            own = edges[self.rank], edges[self.rank + 1]
            target = None if out is None else self._view_out(out, pieces[self.rank], source.host)
            require_op(op, source.host.dtype)
            rescaling = Rescaling.of(prescale_factor, postscale_factor, None)
            factors = rescaling.factors(op, source.host.dtype)
            call.described = f"{typed(buffer, source.host)}, op={op}{rescaling}, counts={list(pieces)}"
        call.own, call.factor = own, factors.after
        data, prepare = source.host, _prescaling(source.host, factors)
        if target is not None and not is_same(target.host, data.part(*own)) and overlap(target.host, data):
            data, call.key = data.copy(), None  # the result is written over pieces that have yet to be sent
        if prepare is not None and target is not None:  # the caller's input is to stay as it was
            data, prepare = data.copy(), None
            scale(data, factors.before)
        total = data.part(*own)
        return self._start(
            call,
            {"data": data},
            (("data", edges),),
            lambda: flat(buffer)[own[0] : own[1]] if out is None else out,
            uneven=_uneven(pieces),
            first=None if target is None else (target.host, total),
            prepare=prepare,
            averaged=total if target is None else target.host,
            kept=None if target is None else Kept(target.host),
            write_back=source.write_back if target is None else target.write_back,
        )

    def reduce_scatter(
        self,
        buffer: Any,
        op: str = "sum",
        *,
        counts: Sequence[int] | None = None,
        out: Any = None,
        algorithm: str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Any:
        """`start_reduce_scatter` and wait."""
        meaning = (op, _tuple(counts), algorithm, prescale_factor, postscale_factor)
        recipe = self._remembered("reduce_scatter", meaning, buffer, out)
        if recipe is not None:
            self._run(recipe, (buffer, out))
            if out is not None:
                return out
            return flat(buffer)[slice(*recipe.own)]
        return self.start_reduce_scatter(
            buffer,
            op,
            counts=counts,
            out=out,
            algorithm=algorithm,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
        ).wait()

    def start_allgather(
        self,
        shard: Any,
        *,
        counts: Sequence[int] | None = None,
        out: Any = None,
        algorithm: str | None = None,
    ) -> Handle:
        """Every rank gets all ranks' shards, one after the other.

        counts   elements of each rank's shard; None: all as many as this one
        out      flat array for all of them; `shard` may be its own piece of it, and then is not copied
        result   out, or a new one-dimensional array
        """
        key = None
        if out is not None:
            meaning = (_tuple(counts), algorithm)
            recipe = self._remembered("allgather", meaning, shard, out)
            if recipe is not None:
                return self._start_known(recipe, out, (shard, out))
            key = self._key("allgather", meaning, shard, out)
        with self._asking(Call("allgather", algorithm=algorithm, key=key)) as call:
            source = self._view(shard, writable=False, what="shard")
            pieces = self._shards(counts, source.host)
            edges = partition.offsets(pieces)
            gathered = empty_like(shard, edges[-1]) if out is None else out
            target = self._view_out(gathered, edges[-1], source.host)
            call.described = f"{source.host.dtype}, counts={list(pieces)}"
        return self._start(
            call,
            {"data": target.host},
            (("data", edges),),
            lambda: gathered,
            uneven=_uneven(pieces),
            first=(target.host.part(edges[self.rank], edges[self.rank + 1]), source.host),
            write_back=target.write_back,
        )

    def allgather(
        self,
        shard: Any,
        *,
        counts: Sequence[int] | None = None,
        out: Any = None,
        algorithm: str | None = None,
    ) -> Any:
        """`start_allgather` and wait."""
        if out is not None:
            recipe = self._remembered("allgather", (_tuple(counts), algorithm), shard, out)
            if recipe is not None:
                self._run(recipe, (shard, out))
                return out
        return self.start_allgather(shard, counts=counts, out=out, algorithm=algorithm).wait()

    def start_broadcast(self, buffer: Any, root: int = 0, *, algorithm: str | None = None) -> Handle:
        """Every rank's buffer becomes a copy of the root's. In place.

        buffer   same shape and element type on every rank
        result   buffer
        """
        recipe = self._remembered("broadcast", (root, algorithm), buffer)
        if recipe is not None:
            return self._start_known(recipe, buffer, buffer)
        key = self._key("broadcast", (root, algorithm), buffer)
        with self._asking(Call("broadcast", root=root, algorithm=algorithm, key=key)) as call:
            target = self._view(buffer, writable=self.rank != root)
            call.described = typed(buffer, target.host)
        write_back = None if self.rank == root else target.write_back
        return self._start(call, {"data": target.host}, None, lambda: buffer, write_back=write_back)

    def broadcast(self, buffer: Any, root: int = 0, *, algorithm: str | None = None) -> Any:
        """`start_broadcast` and wait."""
        recipe = self._remembered("broadcast", (root, algorithm), buffer)
        if recipe is not None:
            self._run(recipe, buffer)
            return buffer
        return self.start_broadcast(buffer, root, algorithm=algorithm).wait()

    def start_reduce(
        self,
        buffer: Any,
        op: str = "sum",
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
    ) -> Handle:
        """The root gets the reduction of all ranks' buffers; the other ranks' stay as they were.

        result   on the root out, or buffer when out is None; None elsewhere
        """
        is_root = self.rank == root
        meaning, into = (op, root, algorithm), out if is_root else None
        recipe = self._remembered("reduce", meaning, buffer, into)
        if recipe is not None:
            return self._start_known(
                recipe, (buffer if into is None else into) if is_root else None, (buffer, into)
            )
        key = self._key("reduce", meaning, buffer, into)
        with self._asking(Call("reduce", op, root, algorithm, key=key)) as call:
            in_place = is_root and out is None
            source = self._view(buffer, writable=in_place)
            target = (
                self._view_out(out, source.host.count, source.host) if is_root and out is not None else source
            )
            require_op(op, source.host.dtype)
            call.described = f"{typed(buffer, source.host)}, op={op}"
        return self._start(
            call,
            {"data": target.host},
            None,
            lambda: (buffer if out is None else out) if is_root else None,
            first=(target.host, source.host) if is_root else None,
            averaged=target.host if is_root else None,
            kept=None if is_root else Kept(),
            write_back=target.write_back if is_root else None,
        )

    def reduce(
        self,
        buffer: Any,
        op: str = "sum",
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
    ) -> Any:
        """`start_reduce` and wait."""
        is_root = self.rank == root
        into = out if is_root else None
        recipe = self._remembered("reduce", (op, root, algorithm), buffer, into)
        if recipe is not None:
            self._run(recipe, (buffer, into))
            return (buffer if into is None else into) if is_root else None
        return self.start_reduce(buffer, op, root, out=out, algorithm=algorithm).wait()

    def start_gather(
        self,
        shard: Any,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        out: Any = None,
        algorithm: str | None = None,
    ) -> Handle:
        """The root gets all ranks' shards, one after the other.

        counts   elements of each rank's shard, known to all; None: all as many as this one
        result   on the root out, or a new one-dimensional array; None elsewhere
        """
        is_root = self.rank == root
        with self._asking(Call("gather", root=root, algorithm=algorithm)) as call:
            source = self._view(shard, writable=False, what="shard")
            pieces = self._shards(counts, source.host)
            edges = partition.offsets(pieces)
            gathered = empty_like(shard, edges[-1]) if is_root and out is None else out
            target = self._view_out(gathered, edges[-1], source.host) if is_root else None
            call.described = f"{source.host.dtype}, counts={list(pieces)}"
        data = source.host.scratch(edges[-1]) if target is None else target.host
        fill(data.part(edges[self.rank], edges[self.rank + 1]), source.host)
        return self._start(
            call,
            {"data": data},
            (("data", edges),),
            lambda: gathered if is_root else None,
            uneven=_uneven(pieces),
            write_back=None if target is None else target.write_back,
        )

    def gather(
        self,
        shard: Any,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        out: Any = None,
        algorithm: str | None = None,
    ) -> Any:
        """`start_gather` and wait."""
        return self.start_gather(shard, root, counts=counts, out=out, algorithm=algorithm).wait()

    def start_scatter(
        self,
        buffer: Any,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        out: Any,
        algorithm: str | None = None,
    ) -> Handle:
        """Rank r gets the r-th piece of the root's buffer.

        buffer   on the root; ignored elsewhere (pass None)
        counts   elements of each rank's piece, known to all; None: all as many as out has
        out      this rank's piece
        result   out
        """
        with self._asking(Call("scatter", root=root, algorithm=algorithm)) as call:
            target = self._view(out, writable=True, what="out")
            pieces = self._shards(counts, target.host)
            edges = partition.offsets(pieces)
            data = target.host.scratch(edges[-1]) if self.rank != root else None
            if data is None:
                data = self._view(buffer, writable=False, beside=target.host).host
                if (data.count, data.dtype) != (edges[-1], target.host.dtype):
                    raise OperationError(
                        f"scatter has {data.count} elements of {data.dtype} to give, but the pieces are "
                        f"{edges[-1]} of {target.host.dtype} together: {list(pieces)}"
                    )
            call.described = f"{target.host.dtype}, counts={list(pieces)}"
        own = data.part(edges[self.rank], edges[self.rank + 1])

        def deliver() -> None:
            fill(target.host, own)
            if target.write_back is not None:
                target.write_back()

        return self._start(
            call,
            {"data": data},
            (("data", edges),),
            lambda: out,
            uneven=_uneven(pieces),
            write_back=deliver,
        )

    def scatter(
        self,
        buffer: Any,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        out: Any,
        algorithm: str | None = None,
    ) -> Any:
        """`start_scatter` and wait."""
        return self.start_scatter(buffer, root, counts=counts, out=out, algorithm=algorithm).wait()

    def start_alltoall(
        self,
        buffer: Any,
        *,
        out: Any = None,
        send_counts: Sequence[int] | None = None,
        receive_counts: Sequence[int] | None = None,
        algorithm: str | None = None,
    ) -> Handle:
        """Rank r sends its j-th piece to rank j, and gets rank j's r-th piece as its own j-th.

        send_counts      elements for each rank; None: equal pieces
        receive_counts   elements from each rank; None: found out by asking the others first
        result           out, which may overlap buffer, or a new one-dimensional array; buffer is not
                         written to otherwise
        """
        key = None
        if out is not None and send_counts is None and receive_counts is None:
            recipe = self._remembered("alltoall", algorithm, buffer, out)
            if recipe is not None:
                return self._start_known(recipe, out, (buffer, out))
            key = self._key("alltoall", algorithm, buffer, out)
        with self._asking(Call("alltoall", algorithm=algorithm, key=key)) as call:
            source = self._view(buffer, writable=False)
            sent = self._sent_counts(send_counts, source.host.count)
            expected = None if receive_counts is None else self._counted(receive_counts)
            if send_counts is None and expected not in (None, sent):
                raise OperationError(
                    f"receive_counts={list(expected)}, but without send_counts every rank sends {sent[0]} "
                    "elements to each: give both, or neither"
                )
            call.described = f"{source.host.dtype}, {'equal' if send_counts is None else 'uneven'} pieces"
            if send_counts is None:
                call.described += f" of {sent[0]}"
        received = sent if send_counts is None else self._received_counts(sent, expected)
        total = sum(received)
        exchanged = empty_like(buffer, total) if out is None else out
        target = self._view_out(exchanged, total, source.host)
        given = source.host
        if overlap(target.host, given):
            given, call.key = given.copy(), None  # what comes is written over pieces that have yet to be sent
        return self._start(
            call,
            {"input": given, "output": target.host},
            (("input", partition.offsets(sent)), ("output", partition.offsets(received))),
            lambda: exchanged,
            # Not _uneven(sent): a rank's own counts may be equal where another's are not.
            uneven=send_counts is not None,
            same_everywhere=send_counts is None,
            write_back=target.write_back,
        )

    def alltoall(
        self,
        buffer: Any,
        *,
        out: Any = None,
        send_counts: Sequence[int] | None = None,
        receive_counts: Sequence[int] | None = None,
        algorithm: str | None = None,
    ) -> Any:
        """`start_alltoall` and wait."""
        if out is not None and send_counts is None and receive_counts is None:
            recipe = self._remembered("alltoall", algorithm, buffer, out)
            if recipe is not None:
                self._run(recipe, (buffer, out))
                return out
        return self.start_alltoall(
            buffer, out=out, send_counts=send_counts, receive_counts=receive_counts, algorithm=algorithm
        ).wait()

    def start_barrier(self, *, algorithm: str | None = None) -> Handle:
        """Complete once every rank has started it."""
        recipe = self._remembered("barrier", algorithm)
        if recipe is not None:
            return self._start_known(recipe, None, None)
        key = self._key("barrier", algorithm)
        with self._asking(Call("barrier", algorithm=algorithm, key=key)) as call:
            pass
        return self._start(call, {}, None, lambda: None)

    def barrier(self, *, algorithm: str | None = None) -> None:
        """`start_barrier` and wait."""
        recipe = self._remembered("barrier", algorithm)
        if recipe is not None:
            self._run(recipe)
            return
        self.start_barrier(algorithm=algorithm).wait()

    def prepare(self, collective: str, *arguments: Any, **options: Any) -> Prepared:
        """A collective on these arguments, to be called again and again: `prepare("allreduce", x)()`.

        collective   allreduce, reduce_scatter, allgather, broadcast, reduce, alltoall or barrier
        arguments, options   as that takes them. Arrays may get new contents, but no new length or element
                     type; those that make a new result in every call (no `out`) gain nothing
        returns      what is called without arguments, on all ranks, and returns what the collective does

        Where ranks share memory each call spares about 1 µs of Python. Other ranks may as well make ordinary
        calls. The idea is that of MPI's persistent collectives (MPI 4.1, section 6.13).
        errors       OperationError for other collectives; in the arguments, when it is called
        """
        if collective not in PREPARED:
            raise OperationError(f"{collective!r} cannot be prepared; give one of {', '.join(PREPARED)}")
        return Prepared(self, collective, arguments, options)

    def _pieces(self, counts: Sequence[int] | None, total: int) -> tuple[int, ...]:
        """Sizes of the pieces that a whole of `total` elements is cut into."""
        if counts is None:
            return partition.counts(total, self.size)
        pieces = self._counted(counts)
        if sum(pieces) != total:
            raise OperationError(
                f"counts {list(pieces)} add up to {sum(pieces)}, but the buffer has {total} elements"
            )
        return pieces

    def _shards(self, counts: Sequence[int] | None, own: HostBuffer) -> tuple[int, ...]:
        """Sizes of all ranks' shards, of which this rank holds `own`."""
        pieces = (own.count,) * self.size if counts is None else self._counted(counts)
        if pieces[self.rank] != own.count:
            raise OperationError(
                f"counts says {pieces[self.rank]} elements for rank {self.rank}, which has {own.count}"
            )
        return pieces

    def _counted(self, counts: Sequence[int]) -> tuple[int, ...]:
        try:
            pieces = tuple(map(operator.index, counts))
        except TypeError:
            pieces = ()
        if len(pieces) != self.size or min(pieces) < 0:
            raise OperationError(
                f"counts must be one whole number >= 0 for each of the {self.size} ranks, not {counts!r}"
            )
        return pieces

    def _sent_counts(self, counts: Sequence[int] | None, total: int) -> tuple[int, ...]:
        if counts is not None:
            return self._pieces(counts, total)
        if total % self.size:
            raise OperationError(
                f"alltoall of {total} elements among {self.size} ranks leaves {total % self.size} over; "
                f"pad the buffer, or give send_counts"
            )
        return (total // self.size,) * self.size

    @abstractmethod
    def _received_counts(self, sent: tuple[int, ...], expected: tuple[int, ...] | None) -> tuple[int, ...]:
        """What the other ranks will send here: asked when unknown, and in checked mode always."""


def _tuple(counts: Sequence[int] | None) -> tuple[int, ...] | None:
    return tuple(counts) if isinstance(counts, Iterable) else counts


def _uneven(pieces: tuple[int, ...]) -> bool:
    return min(pieces) != max(pieces)


def _prescaling(data: HostBuffer, factors: Factors) -> Callable[[], None] | None:
    return None if factors.before == 1.0 else partial(scale, data, factors.before)
