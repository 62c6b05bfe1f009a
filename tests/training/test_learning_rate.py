from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpar.training.learning_rate import learning_rate


def test_a_small_schedule_by_hand() -> None:
    rates = [learning_rate(step, steps=8, peak=1.0, warmup_steps=3, final_fraction=0.2) for step in range(8)]
    assert rates == pytest.approx(
        [0.25, 0.5, 0.75, 1.0, 0.2 + 0.8 * 0.8535534, 0.6, 0.2 + 0.8 * 0.1464466, 0.2]
    )


@settings(deadline=None)
@given(steps=st.integers(1, 300), warmup=st.integers(0, 300), final=st.floats(0, 1), peak=st.floats(1e-6, 10))
def test_it_climbs_to_the_peak_and_then_only_falls(
    steps: int, warmup: int, final: float, peak: float
) -> None:
    warmup = min(warmup, steps - 1)
    rates = [
        learning_rate(step, steps=steps, peak=peak, warmup_steps=warmup, final_fraction=final)
        for step in range(steps)
    ]
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1])
    assert rates[warmup] == pytest.approx(peak)
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert all(0 <= rate <= peak * (1 + 1e-12) for rate in rates)
    assert rates[0] > 0


def test_one_step_is_trained_at_the_full_rate() -> None:
    assert learning_rate(0, steps=1, peak=0.5) == 0.5
