"""Reductions with factors before and after, and reductions that travel as 16-bit numbers.

    result = postscale · (op over the ranks of prescale · x), ÷ p for an average

**Factors.** A sum is multiplied once, at its end, by prescale · postscale, where that is equivalent: one pass
over memory and one rounding instead of two. This holds for sums and averages of float32, float64, bfloat16
and complex numbers, unless the product of the factors leaves their range. Otherwise prescale is applied first
and postscale last, each rounded once:

    float16     a sum overflows at 65504, which prescale is there to prevent
    integers    each product is truncated (Horovod's rule), and the sum of truncated products is another
    other ops   the minimum of the negated is not the negated minimum

An average divides once, at its end, after the factor. float32 and wider types round for each of the two,
16-bit types once for both. Compressed elements follow the type that they travel as.

**Compression.** The array is encoded, reduced as 16-bit numbers by any algorithm, and decoded; all ranks
decode the same bits. float16 has 11 significant bits: numbers above 65504 arrive as infinity, those below
6·10^-5 with fewer digits, those below 3·10^-8 as zero. bfloat16 has 8 significant bits and the range of
float32.
With u = 2^-11 or 2^-8, and numbers in the normal range, a sum over p ranks is within

    |error| <= ((1 + u)^(hops + 1) - 1) · Σ|prescale · x|,   about (hops + 1)·u·Σ|prescale · x|

of the exact one: u for encoding each number, and u for each hop that rounds a partial sum: p - 1 in a ring,
⌈log₂p⌉ in a binomial tree or by doubling, one in the direct algorithm. Near zero float16's fixed spacing adds
(p + hops)·2^-25. Postscale and the division of an average apply to decoded numbers, in their own type. A
partial sum beyond 65504 is infinite in float16, whatever comes after: prescale keeps it inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcpar.comm.blocks import tensor
from hpcpar.comm.reductions import finish, require_scale, scale
from hpcpar.comm.spaces import ScratchPool
from hpcpar.errors import OperationError
from hpcpar.transport.buffers import Binding, HostBuffer, tensor_on
from hpcpar.transport.gpu.memory import DeviceBuffer
from hpcpar.transport.interface import Octets

WIRES = ("float16", "bfloat16")
"""Element types to travel as."""
ENCODABLE = ("float32", "float64")
"""Element types that can travel as another."""

SMALLEST_NORMAL = 2.0**-126
LARGEST_POWER = 2.0**127
"""Limits of float32 and bfloat16: a factor between the two keeps all its digits in every type."""

_NUMBERS = (float, int)

LINEAR = ("bfloat16", "float32", "float64", "complex64", "complex128")


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors of the input before it travels, and of the result."""

    before: float = 1.0
    after: float = 1.0


@dataclass(frozen=True, slots=True)
class Rescaling:
    """Arguments of a reduction beyond the operation itself.

    compression   element type to travel as; None: as it is
    """

    prescale: float = 1.0
    postscale: float = 1.0
    compression: str | None = None

    @classmethod
    def of(cls, prescale_factor: float, postscale_factor: float, compression: str | None) -> Rescaling:
        """Check a caller's arguments; OperationError unless the factors are numbers."""
        return cls(
            _number("prescale_factor", prescale_factor),
            _number("postscale_factor", postscale_factor),
            compression,
        )

    def __str__(self) -> str:
        """Text that ranks compare; empty for the defaults."""
        return "".join(
            f", {name}={value}"
            for name, value, usual in (
                ("prescale_factor", self.prescale, 1.0),
                ("postscale_factor", self.postscale, 1.0),
                ("compression", self.compression, None),
            )
            if value != usual
        )

    def factors(self, op: str, dtype: str) -> Factors:
        """Split the factors between input and result, for elements of this type.

        errors   OperationError for a factor without meaning for the type, or one that cannot be compressed
        """
        require_scale(self.prescale, dtype)
        require_scale(self.postscale, dtype)
        if self.compression is not None:
            require_wire(self.compression, dtype)
        if _is_linear(op, self.compression or dtype) and _is_harmless(self.prescale * self.postscale):
            return Factors(after=self.prescale * self.postscale)
        return Factors(self.prescale, self.postscale)


def _number(what: str, value: float) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise OperationError(f"{what} is {value!r}; give a number") from error


def _is_linear(op: str, dtype: str) -> bool:
    return op in ("sum", "average") and dtype in LINEAR


def _is_harmless(factor: float) -> bool:
    return SMALLEST_NORMAL <= abs(factor) <= LARGEST_POWER


def require_wire(wire: str, dtype: str) -> None:
    """Refuse a wire type that does not exist, or elements that have nothing to gain from it."""
    if wire not in WIRES:
        raise OperationError(f"unknown wire type {wire!r}; known are {', '.join(WIRES)}")
    if dtype not in ENCODABLE:
        raise OperationError(
            f"{dtype} cannot travel as {wire}; {' and '.join(ENCODABLE)} can. Leave it as it is"
        )


def wire_buffer(wire: str, octets: Octets) -> HostBuffer:
    """View bytes as elements of a wire type, two bytes each."""
    if wire == "float16":
        return HostBuffer(octets.view(np.float16), octets, wire, 2)
    import torch

    return HostBuffer(tensor_on(octets, torch.bfloat16), octets, wire, 2)


def encode(source: HostBuffer, wire: str, octets: Octets | None = None) -> HostBuffer:
    """Round the elements to the wire type, to nearest, ties to even.

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
    """Widen the encoded elements into target, exactly."""
    _require_same_count(encoded, target)
    tensor(target).copy_(tensor(encoded))


def convert_on_device(
    source: DeviceBuffer, target: DeviceBuffer, *, factor: float = 1.0, divisor: int = 1
) -> None:
    """Queue a kernel for target = source × factor ÷ divisor, which rounds as `encode` and `decode` do.

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


class Compressed:
    """The 16-bit form of an array for one call, in scratch memory.

    encoded   what is reduced
    """

    def __init__(
        self, source: HostBuffer, target: Binding, wire: str, factors: Factors, pool: ScratchPool
    ) -> None:
        self._source = source
        self._target = target
        self._factors = factors
        self._pool = pool
        self._octets = pool.take(2 * source.count)
        self.encoded = wire_buffer(wire, self._octets[: 2 * source.count])

    def encode(self) -> None:
        """Prescale and round; prescaling uses the target's memory."""
        source = self._source
        if self._factors.before != 1.0:
            if source.address != self._target.host.address:
                self._target.host.octets[...] = source.octets
            source = self._target.host
            scale(source, self._factors.before)
        encode(source, self.encoded.dtype, self.encoded.octets)

    def decode(self, op: str, size: int) -> None:
        """Widen the total into the caller's array, finish it, and return the scratch memory."""
        decode(self.encoded, self._target.host)
        self._pool.give_back(self._octets)
        finish(op, self._target.host, size, self._factors.after)
        if self._target.write_back is not None:
            self._target.write_back()


class CompressedOnDevice:
    """The 16-bit form of an array on a GPU: one kernel before and one after, factors included."""

    def __init__(self, source: DeviceBuffer, target: Binding, wire: str, factors: Factors) -> None:
        self._source = source
        self._target = target
        self._factors = factors
        octets: Any = source.queue.take(2 * source.count)
        self.encoded = DeviceBuffer(source.elements, octets, wire, 2)

    def encode(self) -> None:
        """Prescale and round."""
        convert_on_device(self._source, self.encoded, factor=self._factors.before)

    def decode(self, op: str, size: int) -> None:
        """Widen the total into the caller's array and finish it."""
        target = self._target.host
        assert isinstance(target, DeviceBuffer), "both arrays of a call are in one place"
        divisor = size if op == "average" else 1
        convert_on_device(self.encoded, target, factor=self._factors.after, divisor=divisor)
        if self._target.write_back is not None:
            self._target.write_back()
        target.queue.afterwards(lambda: (self._source, target))
