"""The weight of a batch in the average of gradients, where ranks have batches of different sizes.

    batch of 7 on 4 ranks     rows      2    2    2    1
                              weight   8/7  8/7  8/7  4/7     rows * ranks / 7

With it the mean over ranks of gradients of means is the gradient of the mean over all 7 samples.
"""

from __future__ import annotations

import torch


class GradientWeight:
    """Factor of the present batch's gradients: samples of this rank * ranks / samples of all; else 1.

    Set by the data that `fit` reads, applied by the hooks that DistributedOptimizer has put on its variables.
    """

    def __init__(self) -> None:
        self.value = 1.0
        self._owner: object | None = None

    def set(self, owner: object, value: float) -> None:
        """Weight the gradients of the batch that this owner hands out now."""
        self._owner, self.value = owner, value

    def reset(self, owner: object) -> None:
        """Weight by 1 again, unless other data has set the weight meanwhile."""
        if self._owner is owner:
            self._owner, self.value = None, 1.0

    def apply(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the weighted gradient; None, as a torch hook does, to leave it as it is."""
        return None if self.value == 1.0 else gradient * self.value


gradient_weight = GradientWeight()
"""The one of this process, in which one batch is trained on at a time."""
