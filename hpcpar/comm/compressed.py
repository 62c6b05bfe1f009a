"""A reduction that travels as 16 bits: encoded, reduced as 16-bit numbers, decoded.

Every algorithm can carry it, as to them it is an array of 16-bit numbers, half as long in bytes as one of
float32. All ranks decode the same bits, so they end with the same. With u = 2^-11 for float16 and 2^-8 for
bfloat16, and numbers within the wire's normal range, a sum over p ranks is within

    |error| <= ((1 + u)^(hops + 1) - 1) · Σ|prescale · x|,   about (hops + 1)·u·Σ|prescale · x|

of the exact one: u for the encoding of each number, and u more wherever a partial sum is rounded on its way:
p - 1 times in a ring, ⌈log₂p⌉ in a binomial tree or by doubling, once by the direct algorithm. To that comes
float16's fixed spacing near zero, (p + hops)·2^-25. Postscale and the division of an average are applied to
what was decoded, in its own type, and so cost no digits of the wire; the error is theirs times them.

A partial sum beyond 65504 is infinite as float16, whatever comes after: prescale keeps it inside.
"""

from __future__ import annotations

from typing import Any

from hpcpar.comm.operation import ScratchPool
from hpcpar.comm.out_of_place import fill
from hpcpar.comm.reductions import finish, scale
from hpcpar.comm.scaling import Factors
from hpcpar.comm.wire import convert_on_device, decode, encode, wire_buffer
from hpcpar.transport.buffers import Binding, HostBuffer
from hpcpar.transport.gpu.memory import DeviceBuffer


class Compressed:
    """An array in memory lent for one call, as the 16 bits that travel.

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
        """Before it travels: prescale and round. Uses the target's memory for it."""
        source = self._source
        if self._factors.before != 1.0:
            fill(self._target.host, source)
            source = self._target.host
            scale(source, self._factors.before)
        encode(source, self.encoded.dtype, self.encoded.octets)

    def decode(self, op: str, size: int) -> None:
        """When it is reduced: bring the result to where the caller has it, and the memory back."""
        decode(self.encoded, self._target.host)
        self._pool.give_back(self._octets)
        finish(op, self._target.host, size, self._factors.after)
        if self._target.write_back is not None:
            self._target.write_back()


class CompressedOnDevice:
    """The same on a GPU: one kernel before and one after, factors and division within."""

    def __init__(self, source: DeviceBuffer, target: Binding, wire: str, factors: Factors) -> None:
        self._source = source
        self._target = target
        self._factors = factors
        octets: Any = source.queue.take(2 * source.count)
        self.encoded = DeviceBuffer(source.elements, octets, wire, 2)

    def encode(self) -> None:
        """Before it travels."""
        convert_on_device(self._source, self.encoded, factor=self._factors.before)

    def decode(self, op: str, size: int) -> None:
        """When it is reduced: bring the result to where the caller has it."""
        target = self._target.host
        assert isinstance(target, DeviceBuffer), "both arrays of a call are in one place"
        divisor = size if op == "average" else 1
        convert_on_device(self.encoded, target, factor=self._factors.after, divisor=divisor)
        if self._target.write_back is not None:
            self._target.write_back()
        target.queue.afterwards(lambda: (self._source, target))
