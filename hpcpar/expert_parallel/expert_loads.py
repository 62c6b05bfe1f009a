"""Loads of experts, their balance, and the biases that even them out.

Shape letters: E experts.
source   Wang et al. 2024, arXiv 2408.15664 (biases without a loss)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Balance:
    """Balance of a layer's experts over some tokens. Without any tokens it counts as perfect.

    max_over_mean   load of the fullest expert over the mean load: the factor by which the slowest rank lags
    variation       standard deviation of the loads over their mean
    entropy         of the loads' distribution over ln E: 1 is perfect balance, 0 all on one expert
    idle            experts that no token chose
    dropped         share of the choices that the experts had no capacity for
    """

    max_over_mean: float
    variation: float
    entropy: float
    idle: int
    dropped: float = 0.0

    @classmethod
    def of(cls, counts: Sequence[int], dropped: int = 0) -> Balance:
        """Measure counts of tokens that chose each expert, `dropped` of them in vain."""
        total = sum(counts)
        if not total:
            return cls(1.0, 0.0, 1.0, len(counts))
        mean = total / len(counts)
        variance = sum((count - mean) ** 2 for count in counts) / len(counts)
        entropy = -sum(count / total * math.log(count / total) for count in counts if count)
        return cls(
            max(counts) / mean,
            math.sqrt(variance) / mean,
            entropy / math.log(len(counts)) if len(counts) > 1 else 1.0,
            list(counts).count(0),
            dropped / total,
        )


def updated_bias(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """Raise the bias of experts below the mean load by `rate`, and lower that of those above it.

    bias     [E] float32
    counts   [E], tokens that chose each expert, of all ranks and microbatches of a step
    """
    # In integers: sign(mean - count), times E.
    missing = counts.sum() - counts * len(counts)
    return bias + rate * torch.sign(missing).to(bias.dtype)
