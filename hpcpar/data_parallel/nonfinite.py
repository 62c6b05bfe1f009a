"""Decide on steps whose gradients are NaN or infinite, and say which ranks brought that to which parameter.

An average does not tell which rank brought what it is made of. So each reducer keeps the sum of every bucket
that it sends: NaN or infinite where an element is, for one reading of the gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpcpar.errors import DivergenceError

if TYPE_CHECKING:
    from hpcpar.comm import Communicator
    from hpcpar.data_parallel.average_gradients import AverageGradients
    from hpcpar.data_parallel.builder import OptimizerOptions, Parts
    from hpcpar.data_parallel.parameters import Named
    from hpcpar.data_parallel.precision import LossScaler

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NonfiniteGradients:
    """Non-finite gradients of a step, described the same on all ranks.

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


class NonfiniteCheck:
    """Decides whether a step is taken, the same on all ranks, as `nonfinite` and `skip_limit` say.

    found   why the last step was skipped; None: it was taken
    """

    def __init__(
        self,
        named: Sequence[Named],
        parts: Parts,
        averages: AverageGradients,
        scaler: LossScaler,
        options: OptimizerOptions,
        dp_comm: Communicator,
    ) -> None:
        self.found: NonfiniteGradients | None = None
        self._place = {name: number for number, (name, _) in enumerate(named)}
        self._parts = parts
        self._averages = averages
        self._scaler = scaler
        self._options = options
        self._dp_comm = dp_comm

    def skips_step(self) -> bool:
        """Return True if all ranks skip the step. Collective.

        errors   DivergenceError on every rank: by default for any gradient that is not finite; else for the
                 last of `skip_limit` such steps in a row
        """
        scaler = self._scaler
        found = self.found = self._look()
        scaler.update(overflow=found is not None)
        if found is None:
            return False
        if self._options.nonfinite == "error" and not scaler.is_scaling:
            raise DivergenceError(
                f"{found}, so no rank has taken the step, and parameters are as they were. Look for the "
                "first layer or sample whose output is not finite, or lower the learning rate; "
                'nonfinite="skip" leaves such steps out on all ranks, nonfinite="step" takes them, as torch '
                "does"
            )
        if scaler.in_a_row >= self._options.skip_limit:
            raise DivergenceError(
                f"{found}; that was number {scaler.in_a_row} of such steps in a row (skip_limit). No rank "
                "has taken them, and parameters are as they were before. Look for the first layer or sample "
                "whose output is not finite, or lower the learning rate"
            )
        if self._world_rank == min(found.ranks, default=self._dp_comm.world_ranks[0]):
            scale = f"; the loss scale is {scaler.scale:g} now" if scaler.is_scaling else ""
            logger.warning("a step is skipped (%d so far): %s%s", scaler.skipped, found, scale)
        return True

    @property
    def _world_rank(self) -> int:
        return self._dp_comm.world_ranks[self._dp_comm.rank]

    def _look(self) -> NonfiniteGradients | None:
        averages, update = self._averages, self._parts.update
        if self._scaler.is_scaling:
            return self._described() if averages.has_overflow() else None
        if self._options.nonfinite == "step" or (averages.total is not None and averages.total.isfinite()):
            return None
        is_due = update is not None or any(p.grad is not None for p in self._parts.reducer.parameters)
        if not is_due or (averages.total is None and averages.are_finite()):
            return None
        found = self._described()
        return None if found.parameter is None else found  # finite gradients may have a norm that is not

    def _described(self) -> NonfiniteGradients:
        """Return what all ranks have found in their averages, and in what they have sent. Collective."""
        own = ((self._place[name], name) for name in self._averages.nonfinite_names())
        mine = (self._world_rank, min(own, default=None), self._parts.reducer.sent_nonfinite)
        told = self._parts.norm.gathered(mine)
        names = [(*first, rank) for rank, first, _ in told if first is not None]
        return NonfiniteGradients(
            min(names)[1] if names else None, tuple(sorted(rank for rank, _, sent in told if sent))
        )
