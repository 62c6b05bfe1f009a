"""The learning rate of every step, as a pure function of the step: a resumed run needs no state."""

from __future__ import annotations

import math


def learning_rate(
    step: int, *, steps: int, peak: float, warmup_steps: int = 0, final_fraction: float = 0.0
) -> float:
    """Return the learning rate of step 0 … steps - 1.

    It rises linearly to `peak` at step `warmup_steps` (from above 0 at the first step), then falls along half
    a cosine to `final_fraction`·`peak` at the last step.

          peak    .-'''-.
                /         `.
               /            `-.
              0  warm-up       steps - 1

    source   Loshchilov and Hutter 2017, arXiv 1608.03983
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    progress = (step - warmup_steps) / max(1, steps - 1 - warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return peak * (final_fraction + (1 - final_fraction) * cosine)
