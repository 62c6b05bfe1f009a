"""Floating point that travels as 16 bits: half the bytes of float32, and what is lost by it.

    float16    11 significant bits, up to 65504; larger numbers arrive as infinity, those below 6·10^-5
               with fewer digits, and those below 3·10^-8 as zero
    bfloat16   8 significant bits, the range of float32

A number x arrives within u·|x|, u = 2^-11 or 2^-8, where it is in the normal range of the wire.
A sum of p ranks' encoded numbers is within u·Σ|x| of the sum of the numbers, before it is rounded itself.
"""

from __future__ import annotations

import numpy as np

from hpcpar.comm.blocks import tensor
from hpcpar.errors import OperationError
from hpcpar.transport.buffers import HostBuffer, tensor_on
from hpcpar.transport.gpu.memory import DeviceBuffer
from hpcpar.transport.interface import Octets

WIRES = ("float16", "bfloat16")
"""Element types to travel as."""
ENCODABLE = ("float32", "float64")
"""Element types that can travel as another."""


def require_wire(wire: str, dtype: str) -> None:
    """Refuse a wire type that does not exist, or elements that have nothing to gain from it."""
    if wire not in WIRES:
        raise OperationError(f"unknown wire type {wire!r}; known are {', '.join(WIRES)}")
    if dtype not in ENCODABLE:
        raise OperationError(
            f"{dtype} cannot travel as {wire}; {' and '.join(ENCODABLE)} can. Leave it as it is"
        )


def wire_buffer(wire: str, octets: Octets) -> HostBuffer:
    """Bytes as elements of a wire type, sharing memory. A whole number of them: two bytes each."""
    if wire == "float16":
        return HostBuffer(octets.view(np.float16), octets, wire, 2)
    import torch

    return HostBuffer(tensor_on(octets, torch.bfloat16), octets, wire, 2)


def encode(source: HostBuffer, wire: str, octets: Octets | None = None) -> HostBuffer:
    """The elements rounded to the wire type, to nearest, ties to even.

    octets   memory to write to, two bytes for each element; None: fresh
    errors   OperationError for another wire type, other elements, or memory of another size
    """
    require_wire(wire, source.dtype)
    if octets is None:
        octets = np.empty(2 * source.count, dtype=np.uint8)
    if octets.size != 2 * source.count:
        raise OperationError(
            f"{source.count} elements as {wire} take {2 * source.count} bytes, but {octets.size} are given"
        )
    encoded = wire_buffer(wire, octets)
    tensor(encoded).copy_(tensor(source))
    return encoded


def decode(encoded: HostBuffer, target: HostBuffer) -> None:
    """target = the numbers that the encoded elements stand for, exactly."""
    _require_same_count(encoded, target)
    tensor(target).copy_(tensor(encoded))


def convert_on_device(
    source: DeviceBuffer, target: DeviceBuffer, *, factor: float = 1.0, divisor: int = 1
) -> None:
    """target = source × factor ÷ divisor by a kernel, given to the queue: as `encode` and `decode` round.

    Both are of floating point, and of one length. Factor and division are those of the wider type.
    """
    _require_same_count(source, target)
    queue = target.queue
    queue.cuda.use(queue.ordinal)
    queue.kernels.convert(
        target.dtype,
        target.address,
        source.dtype,
        source.address,
        source.count,
        factor=factor,
        divisor=divisor,
        stream=queue.stream,
    )


def _require_same_count(encoded: HostBuffer, target: HostBuffer) -> None:
    if encoded.count != target.count:
        raise OperationError(f"{encoded.count} encoded elements do not fit {target.count}")
