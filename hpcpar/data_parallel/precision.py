"""Mixed precision: in which types parameters, gradients, master weights and moments are kept.

    bytes per parameter    parameters   gradients   master weights   Adam's moments
    float32                4            4           -                4 + 4            16
    bfloat16, float16      2            2           4                4 + 4            16
    the same, moments      2            2           4                2 + 2            12

Small steps are lost when they are added to 16-bit weights, so the optimizer works on float32 master weights,
of which the parameters are a rounded copy. Gradients of float16 underflow, so its loss is scaled.
source   Micikevicius et al. 2018, Mixed Precision Training, arXiv 1710.03740, sections 3.1 and 3.2
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hpcpar.errors import OperationError

INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
LARGEST_SCALE = 2.0**24
CHUNK = 2**16


def dtype_named(name: str | torch.dtype, what: str) -> torch.dtype:
    """A real floating-point type by its name; OperationError for anything else."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else name
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise OperationError(
            f"{what}={name!r} is no type to train in; give float64, float32, bfloat16 or float16"
        )
    return dtype


@dataclass(frozen=True, init=False)
class Precision:
    """Element types of parameters, sums and moments, by name or as torch.dtype.

    parameters   of the model, and of its gradients; of 16 bits: there are float32 master weights
    reduction    what gradients are summed over ranks and kept in after that; None: as they are
    moments      what the optimizer's state of one value per element is kept in between steps; None: as the
                 optimizer makes it. bfloat16 halves it; it is rounded as `narrowed` says. float16 is refused:
                 the square of a gradient below 0.0002 is 0 there, and Adam's step then nearly without bounds
    loss_scale   "dynamic", a number, or None for no scaling; by default dynamic for float16 alone
    """

    parameters: torch.dtype
    reduction: torch.dtype | None
    moments: torch.dtype | None
    loss_scale: float | str | None

    def __init__(
        self,
        parameters: str | torch.dtype,
        *,
        reduction: str | torch.dtype | None = None,
        moments: str | torch.dtype | None = None,
        loss_scale: float | str | None = "default",
    ) -> None:
        kept = dtype_named(parameters, "parameters")
        if loss_scale == "default":
            loss_scale = "dynamic" if kept == torch.float16 else None
        if moments in ("float16", torch.float16):
            raise OperationError(
                f"moments={moments!r} cannot hold the squares of small gradients, and steps would grow out "
                "of bounds; give bfloat16, or leave it out"
            )
        is_number = isinstance(loss_scale, int | float) and 0 < loss_scale < 2.0**127
        if not (loss_scale is None or loss_scale == "dynamic" or is_number):
            raise OperationError(f'loss_scale={loss_scale!r}; give "dynamic", a number above 0, or None')
        values = {
            "parameters": kept,
            "reduction": None if reduction is None else dtype_named(reduction, "reduction"),
            "moments": None if moments is None else dtype_named(moments, "moments"),
            "loss_scale": loss_scale,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, value: Precision | str | torch.dtype | None) -> Precision | None:
        """Return the Precision of a type's name; None and a Precision are returned as they are."""
        if value is None or isinstance(value, Precision):
            return value
        return cls(dtype_named(value, "precision"))


def master_dtype(parameters: torch.dtype, precision: Precision | None) -> torch.dtype:
    """Return the type of master weights: the parameters' own, or float32 for those of 16 bits if asked."""
    return torch.float32 if precision is not None and parameters.itemsize < 4 else parameters


def narrowed(value: Tensor, dtype: torch.dtype, step: int) -> Tensor:
    """The value in a shorter type, which is right on average over steps where that is bfloat16.

    Adam's second moment falls by 1/1000 a step. The nearest bfloat16, of 8 bits, is the one that it had, so
    it would never fall. Here a number is rounded up or down, with the probability by which it is nearer to
    one or the other: chance is a hash of its bits and of the step, the same on any rank and after a restart.
    What bfloat16 can hold stays as it is.
    """
    if dtype != torch.bfloat16 or value.dtype != torch.float32:
        return value.to(dtype)
    found = torch.empty_like(value, dtype=dtype)
    salt = step * 0x3C6EF372 % 2**31
    # A part at a time, which stays in the processor's cache.
    parts = torch.split(value.reshape(-1), CHUNK), torch.split(found.view(-1), CHUNK)
    for part, kept in zip(*parts, strict=True):
        bits = part.view(torch.int32)
        chance = (bits + salt).mul_(-1640531535)
        chance.bitwise_xor_(chance >> 15).mul_(-2048144789).bitwise_right_shift_(16).bitwise_and_(0xFFFF)
        kept.copy_(chance.add_(bits).bitwise_and_(-0x10000).view(torch.float32))
    return found


class LossScaler:
    """The factor that a loss is multiplied by so that its gradients do not underflow; counts skipped steps.

    dynamic   halved when a gradient overflows, whose step is then skipped; doubled after GROWTH_INTERVAL
              steps without. All ranks call `update` with the same, and so keep the same scale
    skipped   steps that were skipped, in all
    in_a_row  steps since the last one that was taken, but those after which a smaller scale may help
    """

    def __init__(self, scale: float | str | None) -> None:
        self.dynamic = scale == "dynamic"
        self.scale = INITIAL_SCALE if self.dynamic else 1.0 if scale is None else float(scale)
        self.skipped = self.in_a_row = 0
        self._good = 0

    @property
    def is_scaling(self) -> bool:
        return self.dynamic or self.scale != 1.0

    def update(self, *, overflow: bool) -> None:
        """Adapt the scale to a step that was skipped for its overflow, or taken."""
        if overflow:
            self.skipped += 1
            self._good = 0
            if self.dynamic and self.scale > 1.0:
                self.scale = max(1.0, self.scale / 2)
            else:
                self.in_a_row += 1
            return
        self._good += 1
        self.in_a_row = 0
        if self.dynamic and self._good % GROWTH_INTERVAL == 0:
            self.scale = min(LARGEST_SCALE, self.scale * 2)

    def state_dict(self) -> dict[str, float]:
        return {
            "dynamic": self.dynamic,
            "scale": self.scale,
            "good": self._good,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a saved scale. One that was fixed says nothing about what a dynamic one should be."""
        self.skipped = int(state["skipped"])
        if self.dynamic and state["dynamic"]:
            self.scale, self._good = state["scale"], int(state["good"])
