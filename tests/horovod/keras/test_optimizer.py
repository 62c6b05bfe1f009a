"""DistributedOptimizer for Keras against one process that sees all ranks' samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest

from tests.horovod.keras.training import compare

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("hvd")]

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "weight decay": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.01),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05),
    "global_clipnorm": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.05),
    "EMA": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2),
    "accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=3),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_is_that_of_one_process_with_all_samples(make: Callable[[], Any]) -> None:
    compare(make)
