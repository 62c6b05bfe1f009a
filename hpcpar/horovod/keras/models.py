"""Saved models, loaded for training that goes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras

from hpcpar.horovod.keras.keras_optimizer import DistributedOptimizer
from hpcpar.horovod.torch.compression import Compression


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Load a saved Keras model, and distribute its optimizer, which keeps its state.

    filepath            of a `.keras` file
    custom_optimizers   classes of optimizers that are not Keras's own
    custom_objects      other classes and functions, by name
    compression         of the DistributedOptimizer
    returns             the model; it may have been saved on another number of ranks
    errors              ValueError for an `.h5` file, from which Keras 3 restores no optimizer; else as of
                        keras.saving.load_model

    Each rank reads the file. For other options of DistributedOptimizer, load by keras.saving.load_model, and
    set `model.optimizer = DistributedOptimizer(model.optimizer, …)`.
    """
    named = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()}
    model = keras.saving.load_model(filepath, custom_objects={**named, **(custom_objects or {})})
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return model
    if optimizer.built and model.trainable_variables and not optimizer._trainable_variables:
        raise ValueError(
            f"{filepath}: Keras 3 restores no optimizer's state from an .h5 file, and cannot train what it "
            f"has loaded. Save as .keras; or load by load_model(…, compile=False) of keras.saving and compile"
        )
    model.optimizer = DistributedOptimizer(optimizer, compression=compression)
    return model
