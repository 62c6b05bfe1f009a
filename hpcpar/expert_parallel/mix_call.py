"""One call of `ExpertParallel.mix` on one rank: what fits, and what must be the same on all ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hpcpar.expert_parallel.exchange import POSITIONS


class MixCall(NamedTuple):
    """Arguments of `ExpertParallel.mix`."""

    hidden: Tensor
    experts: Tensor
    weights: Tensor
    kept: Tensor | None
    positions: Tensor | None

    def part(self, tokens: slice) -> MixCall:
        """Return the call for some of the tokens."""
        return MixCall(*(None if each is None else each[tokens] for each in self))  # type: ignore[arg-type]

    def problem(self, count: int) -> str | None:
        """Say what does not fit so many experts, and what would; None: all does."""
        hidden, experts, weights, kept, positions = self
        if hidden.dim() != 2 or experts.dim() != 2 or not hidden.is_floating_point():
            return (
                f"hidden {list(hidden.shape)} of {hidden.dtype} and experts {list(experts.shape)} were "
                "given; they must be [T, H] of floating point and [T, k]"
            )
        tokens, slots = experts.shape
        if len(hidden) != tokens or weights.shape != experts.shape or not slots:
            return (
                f"hidden {list(hidden.shape)}, experts {list(experts.shape)} and weights "
                f"{list(weights.shape)} were given; they must be [T, H], [T, k] and [T, k]"
            )
        if experts.dtype != torch.int64 or not weights.is_floating_point():
            return (
                f"experts of {experts.dtype} and weights of {weights.dtype} were given; they must be int64 "
                "and floating point"
            )
        if kept is not None and (kept.shape != experts.shape or kept.dtype != torch.bool):
            return f"kept {list(kept.shape)} of {kept.dtype} was given; it must be [T, k] of bool"
        if positions is not None and (positions.shape != (tokens,) or positions.dtype != torch.int64):
            return (
                f"positions {list(positions.shape)} of {positions.dtype} were given; they must be [T] int64"
            )
        for what, numbers, limit in (("experts", experts, count), ("positions", positions, POSITIONS)):
            if numbers is not None and numbers.numel():
                least, most = (int(number) for number in numbers.aminmax())
                if least < 0 or most >= limit:
                    return f"{what} from {least} to {most} were given; they must be from 0 to {limit - 1}"
        return None

    def described(self) -> str:
        """Describe what must be the same on all ranks."""
        hidden, experts, weights, _, positions = self
        gradients = [name for name, of in (("hidden", hidden), ("weights", weights)) if of.requires_grad]
        with_gradients = f"gradients of {gradients}" if torch.is_grad_enabled() else "without gradients"
        return (
            f"tokens [T, {hidden.shape[1]}] of {hidden.dtype} with {experts.shape[1]} experts each, weights "
            f"of {weights.dtype}, {'no ' if positions is None else ''}positions, {with_gradients}"
        )
