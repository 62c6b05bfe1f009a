"""Horovod's API for Keras, on Keras 3 with its torch backend: `import hpcpar.horovod.keras as hvd`.

hvd.init()
model.compile(loss="mse", optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size())))
model.fit(x_of_this_rank, y_of_this_rank, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

One module for `horovod.keras` and `horovod.tensorflow.keras`, with the longer argument lists of the second.
Arguments that the two have in different orders go by name.
"""

from __future__ import annotations

from hpcpar.horovod.keras.backend import require_torch

require_torch()  # before the first import of keras, below

from hpcpar.horovod import basics  # noqa: E402
from hpcpar.horovod.basics import *  # noqa: E402, F403  its __all__ is the list of queries
from hpcpar.horovod.keras import callbacks, data, elastic, value_collectives  # noqa: E402
from hpcpar.horovod.keras.keras_optimizer import DistributedOptimizer, PartialDistributedOptimizer  # noqa: E402
from hpcpar.horovod.keras.models import load_model  # noqa: E402
from hpcpar.horovod.keras.value_collectives import *  # noqa: E402, F403
from hpcpar.horovod.process_sets import (  # noqa: E402
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from hpcpar.horovod.torch.compression import Compression  # noqa: E402
from hpcpar.horovod.torch.mpi_ops import Adasum, Average, Max, Min, Product, Sum  # noqa: E402

__all__ = [
    *basics.__all__,
    *value_collectives.__all__,
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "callbacks",
    "data",
    "elastic",
    "global_process_set",
    "load_model",
    "remove_process_set",
]
