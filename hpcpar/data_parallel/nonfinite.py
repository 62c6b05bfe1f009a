"""Gradients that are NaN or infinite: of which parameter, and which ranks brought them.

An average does not tell who brought what it is made of. So each reducer keeps the sum of every bucket that it
sends: it is NaN or infinite where an element is, and costs one reading of the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class NonfiniteGradients:
    """What keeps all ranks from taking a step, the same on all of them.

    parameter   the first one whose average gradient is NaN or infinite; None: clipping has hidden it
    ranks       of the job, those whose own gradients were not finite; none: only their sum is not
    """

    parameter: str | None
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        what = (
            "an average gradient" if self.parameter is None else f"the average gradient of {self.parameter}"
        )
        if not self.ranks:
            return f"{what} is not finite, though each rank's own are: their sum is too large"
        names = ", ".join(map(str, self.ranks[:8])) + (", …" if len(self.ranks) > 8 else "")
        return f"{what} is not finite: NaN or infinity came from rank{'s' * (len(self.ranks) > 1)} {names}"


def quick_sum(flat: Tensor) -> Tensor:
    """Return the sum in the elements' own type, which is the fastest; in float32 where that is float16.

    NaN or infinite where an element is. It may overflow, too.
    """
    return flat.sum(dtype=torch.float32 if flat.dtype == torch.float16 else None)


def is_finite(flat: Tensor) -> bool:
    """Return whether every element is finite."""
    longest = torch.promote_types(flat.dtype, torch.float64)
    return bool(quick_sum(flat).isfinite() or flat.sum(dtype=longest).isfinite())
