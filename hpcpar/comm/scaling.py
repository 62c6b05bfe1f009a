"""Factors before and after a reduction, and what is reduced in fewer bits than it has.

    result = postscale · (op over the ranks of prescale · x), ÷ p for an average

Where that comes to the same, a sum is multiplied once, at its end, by prescale · postscale: one pass over
memory and one rounding instead of two of each. It does so for sums and averages of float32, float64,
bfloat16 and complex numbers, which have range to spare, unless the product of the factors leaves it. It
does not for the rest, where prescale is applied first and postscale last, each rounded once:

    float16     a sum leaves its range at 65504: to keep it inside is what prescale is there for
    integers    each product is truncated (Horovod's rule), and the sum of those is another one
    others      the minimum of the negated is not the negated minimum

An average divides once, at its end, after the factor. float32 and wider types round for each of the two,
16-bit types once for both. What is compressed goes by the type that it travels as.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcpar.comm.reductions import require_scale
from hpcpar.comm.wire import require_wire
from hpcpar.errors import OperationError

SMALLEST_NORMAL = 2.0**-126
LARGEST_POWER = 2.0**127
"""Of float32 and bfloat16. A factor between the two keeps all its digits in every type that is multiplied."""

_NUMBERS = (float, int)

LINEAR = ("bfloat16", "float32", "float64", "complex64", "complex128")


@dataclass(frozen=True, slots=True)
class Factors:
    """What the input is multiplied by before it travels, and the result after."""

    before: float = 1.0
    after: float = 1.0


@dataclass(frozen=True, slots=True)
class Rescaling:
    """What a caller asks for beyond the reduction itself.

    compression   element type to travel as; None: as it is
    """

    prescale: float = 1.0
    postscale: float = 1.0
    compression: str | None = None

    @classmethod
    def of(cls, prescale_factor: float, postscale_factor: float, compression: str | None) -> Rescaling:
        """From a caller's arguments; OperationError for what is no number."""
        return cls(
            _number("prescale_factor", prescale_factor),
            _number("postscale_factor", postscale_factor),
            compression,
        )

    def __str__(self) -> str:
        """As ranks compare it: nothing where nothing is asked for."""
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
        """How the factors are applied to elements of this type.

        errors   OperationError for a factor without meaning for the type, or one that cannot be compressed
        """
        require_scale(self.prescale, dtype)
        require_scale(self.postscale, dtype)
        if self.compression is not None:
            require_wire(self.compression, dtype)
        if _is_linear(op, self.compression or dtype) and _is_harmless(self.prescale * self.postscale):
            return Factors(after=self.prescale * self.postscale)
        return Factors(self.prescale, self.postscale)


def is_plain(prescale_factor: float, postscale_factor: float, compression: str | None) -> bool:
    """Whether nothing beyond the reduction itself is asked for: by numbers, as arrays of one may change."""
    return (
        compression is None
        and type(prescale_factor) in _NUMBERS
        and type(postscale_factor) in _NUMBERS
        and prescale_factor == 1.0
        and postscale_factor == 1.0
    )


def _number(what: str, value: float) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise OperationError(f"{what} is {value!r}; give a number") from error


def _is_linear(op: str, dtype: str) -> bool:
    return op in ("sum", "average") and dtype in LINEAR


def _is_harmless(factor: float) -> bool:
    return SMALLEST_NORMAL <= abs(factor) <= LARGEST_POWER
