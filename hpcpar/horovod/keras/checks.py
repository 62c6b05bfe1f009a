"""Common mistakes in a distributed `fit`, made right or named; DistributedOptimizer brings them, no callback.

in the first step    the same samples on every rank: a warning
                     another learning rate on one rank: MismatchError on all
                     one file written by every rank (ModelCheckpoint, ...): rank 0 alone writes it
at epochs' ends      metrics over all ranks' samples, for EarlyStopping, ReduceLROnPlateau, the history
                     validation on some ranks alone: its results are each rank's own
                     one rank stops: all stop
                     another learning rate on one rank: MismatchError on all
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Mapping
from types import FrameType
from typing import Any

import keras
import torch

from hpcpar.errors import MismatchError
from hpcpar.horovod.keras.averaged_metrics import average_from_now_on, average_no_longer
from hpcpar.horovod.keras.callbacks import Logs, learning_rates
from hpcpar.horovod.keras.data import DataShard, digest
from hpcpar.horovod.process_sets import ProcessSet
from hpcpar.horovod.torch.functions import allgather_object
from hpcpar.horovod.torch.mpi_ops import Max, allreduce, rank, size
from hpcpar.uncompiled import uncompiled

WRITERS = {
    keras.callbacks.ModelCheckpoint: "filepath",
    keras.callbacks.BackupAndRestore: "backup_dir",
    keras.callbacks.CSVLogger: "filename",
    keras.callbacks.TensorBoard: "log_dir",
}
"""Callbacks of Keras that write, and the attribute that says where."""

_FIT = inspect.unwrap(keras.Model.fit).__code__


@uncompiled
def check_fit(optimizer: keras.optimizers.Optimizer, process_set: ProcessSet) -> None:
    """In the first step of a `fit`, compare it over ranks and add FitChecks to its callbacks. Collective.

    Keras tells an optimizer nothing of the `fit` that calls it, so that it is found on the stack of calls;
    steps of a hand-written loop are left alone, and so are trainings on some of the ranks.
    """
    fit = _running_fit()
    if fit is None or process_set.size() != size():
        return
    running = fit.f_locals
    callbacks = running["callbacks"]
    if any(isinstance(callback, FitChecks) for callback in callbacks.callbacks):
        return
    _refuse_ignored_arguments(running)
    writers = _writers(callbacks)
    # Of Keras's callbacks this one alone stops within an epoch, and on the rank alone whose loss is NaN.
    stops = any(isinstance(callback, keras.callbacks.TerminateOnNaN) for callback in callbacks.callbacks)
    given = (digest(running["data"]), learning_rates(optimizer), [path for _, path in writers])
    own = (*given, stops, running["validation_data"] is not None)
    of_ranks = allgather_object(own, "keras.checks.first_step")
    digests, rates, paths, stop, validate = zip(*of_ranks, strict=True)
    require_same_rates(rates)
    if len(set(digests)) == 1 < size() and rank() == 0:
        warnings.warn(
            f"all {size()} ranks were given the same first batch, so that each repeats the others' work: "
            f"divide the data by model.fit(hvd.data.shard(x, y, batch_size=<of all ranks together>)), "
            f"or give each rank samples of its own",
            stacklevel=2,
        )
    if rank() > 0:
        for callback, path in writers:
            if path in paths[0]:
                callbacks.callbacks.remove(callback)
    average_from_now_on(running["self"], "fit", validation=all(validate))
    checks = FitChecks(optimizer, any(stop))
    checks.set_model(running["self"])
    callbacks.callbacks.append(checks)  # the last, so that it knows what all others have decided


class FitChecks(keras.callbacks.Callback):  # type: ignore[misc]
    """Let all ranks stop together, and train with one learning rate. Collective at the end of each epoch.

    optimizer           whose learning rate is compared
    stops_within_epoch  on any rank, by a callback there
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, stops_within_epoch: bool) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.stops_within_epoch = stops_within_epoch

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if self.stops_within_epoch:
            own = torch.tensor([int(self.model.stop_training)], device="cpu")
            self.model.stop_training = bool(allreduce(own, name="keras.checks.stop", op=Max))

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        own = (bool(self.model.stop_training), learning_rates(self.optimizer))
        stops, rates = zip(*allgather_object(own, "keras.checks.epoch"), strict=True)
        require_same_rates(rates)
        self.model.stop_training = any(stops)

    def on_train_end(self, logs: Logs = None) -> None:
        average_no_longer(self.model)


def require_same_rates(rates: Any) -> None:
    """Raise MismatchError unless all ranks have the same learning rates, as each of them then does."""
    other = next((r for r, rate in enumerate(rates) if rate != rates[0]), None)
    if other is not None:
        first, second = (", ".join(f"{rate:g}" for rate in rates[r]) for r in (0, other))
        raise MismatchError(
            f"ranks train with different learning rates: rank 0 by {first}, rank {other} by {second}; set "
            f"it on every rank alike. At the start hvd.callbacks.BroadcastGlobalVariablesCallback(0) gives "
            f"all ranks that of rank 0"
        )


def warn_of_save() -> None:
    """Warn on ranks above 0 that save a model, where all may write to one file."""
    if rank() > 0:
        warnings.warn(
            f"rank {rank()} saves a model too; if all ranks write to one file they destroy it. Write "
            f"`if hvd.rank() == 0: model.save(path)`",
            stacklevel=3,
        )


def _running_fit() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _FIT:
        frame = frame.f_back
    return frame


def _writers(callbacks: Any) -> list[tuple[Any, str]]:
    """Return the callbacks that write to files, with their paths."""
    return [
        (callback, str(getattr(callback, attribute)))
        for callback in callbacks.callbacks
        for kind, attribute in WRITERS.items()
        if isinstance(callback, kind)
    ]


def _refuse_ignored_arguments(fit: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments of `fit` that Keras ignores beside a Shard."""
    if not isinstance(fit["x"], DataShard):
        return
    for name in ("y", "sample_weight", "class_weight", "batch_size"):
        if fit[name] is not None:
            raise ValueError(
                f"fit was given {name}= beside data that is divided already, which ignores it; give it to "
                f"hvd.data.shard(x, y, {name}=...)"
            )
