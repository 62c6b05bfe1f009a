"""MPI's own collectives, nonblocking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcpar.transport.buffers import HostBuffer
from hpcpar.transport.interface import Exchange, NativeCall
from hpcpar.transport.mpi_library import MPI, explained

MPI_TYPES = {
    "bool": MPI.UINT8_T,  # one byte, 0 or 1: bit by bit is logical
    "int8": MPI.INT8_T,
    "int16": MPI.INT16_T,
    "int32": MPI.INT32_T,
    "int64": MPI.INT64_T,
    "uint8": MPI.UINT8_T,
    "uint16": MPI.UINT16_T,
    "uint32": MPI.UINT32_T,
    "uint64": MPI.UINT64_T,
    "float32": MPI.FLOAT,
    "float64": MPI.DOUBLE,
    "complex64": MPI.C_FLOAT_COMPLEX,
    "complex128": MPI.C_DOUBLE_COMPLEX,
}
"""MPI's element types for reductions. It has no 16-bit floating point."""

MPI_OPS = {
    "sum": MPI.SUM,
    "average": MPI.SUM,
    "min": MPI.MIN,
    "max": MPI.MAX,
    "product": MPI.PROD,
    "and": MPI.BAND,
    "or": MPI.BOR,
    "xor": MPI.BXOR,
}

REDUCTIONS = ("allreduce", "reduce_scatter")

MOST_OF_MPI_3 = 2**31 - 1
"""Elements, or bytes of what is only moved, that a call of MPI 3 can name; MPI 4 has larger counts."""


class _NativeExchange:
    """One of MPI's own collectives under way."""

    def __init__(self, request: MPI.Request, others: tuple[int, ...]) -> None:
        self._request = request
        self._others = others
        self._done = False

    def test(self) -> bool:
        if not self._done:
            try:
                self._done = self._request.Test()
            except MPI.Exception as error:
                self._done = True
                raise explained(error, self._others) from error
        return self._done

    def waiting_for(self) -> tuple[int, ...]:
        return () if self._done else self._others

    def received_nbytes(self) -> int:
        raise AssertionError("the lengths of collectives are agreed, and MPI tells none of its own")


class MpiNatives:
    """MPI's own collectives on one communicator."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self._others = tuple(r for r in range(comm.Get_size()) if r != comm.Get_rank())
        self._has_large_counts = MPI.Get_version() >= (4, 0)

    def obstacle(self, collective: str, op: str, dtype: str, nbytes: int | None) -> str | None:
        itemsize = 1
        if collective in REDUCTIONS:
            known = MPI_TYPES.get(dtype, MPI.DATATYPE_NULL)
            if known == MPI.DATATYPE_NULL:
                return f"MPI knows no {op} of {dtype}"
            itemsize = known.Get_size()
        if self._has_large_counts:
            return None
        if nbytes is None:
            return "before version 4 MPI has a limit to pieces, and no rank knows all of them"
        if nbytes // itemsize > MOST_OF_MPI_3:
            what = "elements" if collective in REDUCTIONS else "bytes"
            return f"before version 4 MPI takes at most {MOST_OF_MPI_3:,} {what}"
        return None

    def start(self, call: NativeCall) -> Exchange:
        try:
            return _NativeExchange(self._begin(call), self._others)
        except MPI.Exception as error:
            raise explained(error, self._others) from error

    def _begin(self, call: NativeCall) -> MPI.Request:
        comm, op = self._comm, MPI_OPS[call.op]
        match call.collective:
            case "allreduce":
                return comm.Iallreduce(_typed(call.source), _typed(call.target), op)
            case "reduce_scatter":
                source, target = _typed(call.source), _typed(call.target)
                if not call.even:
                    return comm.Ireduce_scatter(source, target, list(call.source_counts), op)
                source[1] = call.target.count  # mpi4py counts the elements of one piece, as MPI does
                return comm.Ireduce_scatter_block(source, target, op)
            case "allgather":
                begin = comm.Iallgather if call.even else comm.Iallgatherv
                return begin(_bytes(call.source), _pieces(call.target, call.target_counts, call.even))
            case "broadcast":
                return comm.Ibcast(_bytes(call.target), call.root)
            case "alltoall":
                assert call.source is not None
                outgoing = _pieces(call.source, call.source_counts, call.even)
                incoming = _pieces(call.target, call.target_counts, call.even)
                return (comm.Ialltoall if call.even else comm.Ialltoallv)(outgoing, incoming)
        raise AssertionError(f"{call.collective} is none of those that are left to MPI")


def _typed(buffer: HostBuffer | None) -> Any:
    """A buffer for mpi4py with its element type."""
    return MPI.IN_PLACE if buffer is None else [buffer.octets, buffer.count, MPI_TYPES[buffer.dtype]]


def _bytes(buffer: HostBuffer | None) -> Any:
    """A buffer for mpi4py as bytes."""
    return MPI.IN_PLACE if buffer is None else [buffer.octets, buffer.octets.size, MPI.BYTE]


def _pieces(buffer: HostBuffer, counts: Sequence[int], even: bool) -> Any:
    """A buffer for mpi4py as bytes, one piece for each rank."""
    nbytes = [count * buffer.itemsize for count in counts]
    return [buffer.octets, nbytes[0] if even else nbytes, MPI.BYTE]
