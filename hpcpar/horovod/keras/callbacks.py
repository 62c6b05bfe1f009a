"""Horovod's callbacks for Keras: common start, metrics over all ranks, learning rates that warm up.

model.fit(..., callbacks=[
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1 * hvd.size()),
    keras.callbacks.EarlyStopping(patience=3),
])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras

from hpcpar.horovod.keras.averaged_metrics import (
    average_from_now_on,
    average_no_longer,
    average_numbers,
    is_averaged,
)
from hpcpar.horovod.torch.functions import broadcast_parameters
from hpcpar.horovod.torch.mpi_ops import rank, size

Logs = dict[str, Any] | None


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Give every rank the root's weights and optimizer state before the first step of `fit`; collective.

    Horovod does so after the first step, which ranks then have taken from different weights. Here the
    optimizer is built first, so that its state is there to be broadcast.

    root_rank        rank whose values all others get
    device           accepted because Horovod has it; variables are where they are
    local_variables  variables (one or several) that stay as they are on each rank
    """

    def __init__(
        self,
        root_rank: int,
        device: str = "",
        local_variables: keras.Variable | Iterable[keras.Variable] | None = None,
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        local = [local_variables] if isinstance(local_variables, keras.Variable) else local_variables or []
        self._local: list[keras.Variable] = []
        for variable in local:
            self.register_local_var(variable)

    def register_local_var(self, variable: keras.Variable) -> None:
        """Leave this variable as it is on each rank; ValueError if it is none."""
        if not isinstance(variable, keras.Variable):
            raise ValueError(
                f"local_variables has a {type(variable).__name__}, where BroadcastGlobalVariablesCallback "
                f"needs keras.Variable, such as those of layer.weights"
            )
        self._local.append(variable)

    def on_train_begin(self, logs: Logs = None) -> None:
        if self.broadcast_done:
            return
        optimizer = self.model.optimizer
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        local = {id(variable) for variable in self._local}
        # Not `model.variables`: the states of random generators may differ, as dropout on ranks should.
        variables = [v for v in [*self.model.weights, *optimizer.variables] if id(v) not in local]
        # Without paths: Keras numbers layers as they are made, and a rank may have made more.
        broadcast_parameters([variable.value for variable in variables], self.root_rank)
        self.broadcast_done = True


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Compute losses and metrics over the samples of all ranks, in `fit`, its validation, and `evaluate`.

    Every callback sees them, wherever this one is in the list, and so do the returned history and results:
    Keras's own metrics exactly as one process with all samples would have them (see `metrics`), others as
    the mean over ranks. Numbers that a callback before this one adds to the logs are averaged, too.
    Logs within an epoch (progress bars) are those of the rank.

    device   accepted because Horovod has it
    errors   HorovodInternalError on every rank when ranks have different metrics

    Given to `evaluate(callbacks=[...])`, that call is collective: every rank makes it.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device
        self._in_fit = False

    def on_train_begin(self, logs: Logs = None) -> None:
        self._in_fit = True
        average_from_now_on(self.model, "fit")

    def on_train_end(self, logs: Logs = None) -> None:
        self._in_fit = False
        average_no_longer(self.model)

    def on_test_begin(self, logs: Logs = None) -> None:
        if not self._in_fit:
            average_from_now_on(self.model, "evaluate")

    def on_test_end(self, logs: Logs = None) -> None:
        if not self._in_fit:
            average_no_longer(self.model)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        # What came from metrics is the same on all ranks already, so that its mean changes nothing.
        if logs and is_averaged(self.model):
            logs.update(average_numbers(logs))


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Set the learning rate to `initial_lr * multiplier(epoch)` in the epochs from start_epoch to end_epoch.

    initial_lr           learning rate that is multiplied; required
    multiplier           function of the epoch, or a constant c, which stands for c ** (epoch - start_epoch)
    start_epoch          first epoch that it sets
    end_epoch            first epoch that it no longer sets; None: it always does
    staircase            True: at the start of each epoch, whose number is whole; False: before each batch,
                         for epoch + batch / steps_per_epoch
    momentum_correction  for the batch of a change multiply the momentum by new / old learning rate
                         (arXiv 1706.02677), where the optimizer has one
    steps_per_epoch      batches of an epoch on this rank; found from `fit` where None
    errors               ValueError without initial_lr, or when steps_per_epoch cannot be found

    Logs the learning rate as "lr".
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError(
                f"{type(self).__name__} was given initial_lr=None; give it the learning rate that the "
                f"multiplier is of, such as 0.1 * hvd.size()"
            )
        self.initial_lr = initial_lr
        self.multiplier = (
            multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        )
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self._momentum: float | None = None  # to go back to after the batch

    def on_train_begin(self, logs: Logs = None) -> None:
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = self.params.get("steps")
        if not self.steps_per_epoch:
            raise ValueError(
                f"{type(self).__name__} needs the number of batches of an epoch, which this data does not "
                f"tell; give it steps_per_epoch="
            )

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        is_over = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if self.current_epoch < self.start_epoch or is_over:
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._set_learning_rate(self.current_epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set_learning_rate(self.current_epoch)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if self._momentum is not None:
            _inner(self.model.optimizer).momentum = self._momentum
            self._momentum = None

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if logs is not None:
            logs["lr"] = learning_rate(self.model.optimizer)

    def _set_learning_rate(self, epoch: float) -> None:
        optimizer = _inner(self.model.optimizer)
        before, after = learning_rate(optimizer), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = after
        if self.momentum_correction and getattr(optimizer, "momentum", None) and before:
            self._momentum = optimizer.momentum
            optimizer.momentum = self._momentum * after / before


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate from initial_lr / size to initial_lr over the first epochs, batch by batch.

        lr(epoch) = initial_lr / size * ((size - 1) / warmup_epochs * epoch + 1)    (arXiv 1706.02677)

    with epoch = number of the epoch + (batch + 1) / steps_per_epoch: the last batch has initial_lr itself.

    warmup_epochs    epochs until it is reached
    verbose          1: rank 0 prints when it is
    other arguments  as of LearningRateScheduleCallback
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            done = epoch + 1 / self.steps_per_epoch
            return ((size() - 1) / warmup_epochs * done + 1) / size()

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and rank() == 0 and self.end_epoch is not None and epoch == self.end_epoch - 1:
            lr = learning_rate(self.model.optimizer)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {lr:g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Save the model whenever the monitored metric is the best so far; rank 0 alone writes.

    filepath         file that it is saved to; may be set as an attribute until training begins
    other arguments  as of keras.callbacks.ModelCheckpoint
    errors           ValueError when training begins without a filepath
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str | None = None,
    ) -> None:
        suffix = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(
            filepath or f"unset{suffix}",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        if filepath is None:
            self.filepath = None

    def on_train_begin(self, logs: Logs = None) -> None:
        if self.filepath is None:
            raise ValueError("BestModelCheckpoint has no filepath; give it filepath='best.keras'")

    def _save_model(self, epoch: int, batch: int | None, logs: Logs) -> None:
        if rank() == 0:
            super()._save_model(epoch, batch, logs)


def learning_rate(optimizer: keras.optimizers.Optimizer) -> float:
    """Return the present learning rate as a number, also that of a schedule."""
    return float(keras.ops.convert_to_numpy(_inner(optimizer).learning_rate))


def learning_rates(optimizer: keras.optimizers.Optimizer) -> list[float]:
    """Return the present learning rate in a list, or those of a MultiOptimizer's several optimizers."""
    return [learning_rate(each) for each in getattr(_inner(optimizer), "optimizers", [optimizer])]


def _inner(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Return the optimizer that a LossScaleOptimizer holds, else itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)
