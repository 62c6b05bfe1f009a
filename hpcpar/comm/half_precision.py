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
from functools import partial

from hpcpar.comm.blocks import Action, tensor
from hpcpar.comm.reductions import finishing, require_scale, scaling
from hpcpar.comm.spaces import copying
from hpcpar.errors import OperationError
from hpcpar.transport.buffers import HostBuffer
from hpcpar.transport.gpu.device_buffer import DeviceBuffer
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
    if not isinstance(wire, str) or wire not in WIRES:
        raise OperationError(f"unknown wire type {wire!r}; known are {', '.join(WIRES)}")
    if dtype not in ENCODABLE:
        raise OperationError(
            f"{dtype} cannot travel as {wire}; {' and '.join(ENCODABLE)} can. Leave it as it is"
        )


def wire_buffer(wire: str, octets: Octets, beside: HostBuffer | None = None) -> HostBuffer:
    """View bytes, on the GPU where `beside` is on one, as elements of a wire type, two bytes each."""
    if isinstance(beside, DeviceBuffer):
        return DeviceBuffer(octets, wire, 2, beside.stream)
    return HostBuffer(octets, wire, 2)


def encoding(
    source: HostBuffer, target: HostBuffer, encoded: HostBuffer, factor: float = 1.0
) -> list[Action]:
    """Prepare encoded = factor × source, rounded to nearest, ties to even. On the host the product is worked
    out in `target`, the memory of the result.
    """
    if isinstance(source, DeviceBuffer) and isinstance(encoded, DeviceBuffer):
        return [partial(_convert_on_device, source, encoded, factor=factor)]
    if factor == 1.0:
        return [partial(tensor(encoded).copy_, tensor(source))]
    first = [] if source.address == target.address else [copying(target.octets, source.octets)]
    return [*first, *scaling(target, factor), partial(tensor(encoded).copy_, tensor(target))]


def decoding(
    encoded: HostBuffer, target: HostBuffer, op: str, size: int, factor: float = 1.0
) -> list[Action]:
    """Prepare target = factor × encoded, and an average ÷ the number of ranks, in target's type."""
    if isinstance(target, DeviceBuffer) and isinstance(encoded, DeviceBuffer):
        divisor = size if op == "average" else 1
        return [partial(_convert_on_device, encoded, target, factor=factor, divisor=divisor)]
    return [partial(tensor(target).copy_, tensor(encoded)), *finishing(op, target, size, factor)]


def _convert_on_device(
    source: DeviceBuffer, target: DeviceBuffer, *, factor: float = 1.0, divisor: int = 1
) -> None:
    """Queue a kernel for target = source × factor ÷ divisor; factor and division are of the wider type."""
    queue = target.queue
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
