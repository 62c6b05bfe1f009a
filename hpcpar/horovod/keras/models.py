"""Saved models, loaded for training that goes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras

from hpcpar.horovod.keras.optimizer import DistributedOptimizer
from hpcpar.horovod.torch.compression import Compression


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Load a saved Keras model, and distribute its optimizer, which keeps its state.

    filepath            what keras.saving.load_model takes: a `.keras` file, or an older `.h5`
    custom_optimizers   classes of optimizers that are not Keras's own
    custom_objects      other classes and functions, by name
    compression         of the DistributedOptimizer
    returns             the model; it may have been saved on another number of ranks
    errors              as of keras.saving.load_model

    Each rank reads the file. For other options of DistributedOptimizer, load by keras.saving.load_model, and
    set `model.optimizer = DistributedOptimizer(model.optimizer, …)`.
    """
    named = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()}
    model = keras.saving.load_model(filepath, custom_objects={**named, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model
