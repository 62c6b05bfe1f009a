"""Training by `fit` that goes on after a failed collective: `KerasState`, its callbacks, and `run`.

    state = hvd.elastic.KerasState(model, epoch=0, batch=0)

    @hvd.elastic.run
    def train(state):
        model.fit(data, initial_epoch=state.epoch, epochs=epochs, callbacks=[
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=100),
        ])

    train(state)

Callbacks act in the order of the list: one that updates the state goes before the one that commits it. What
MPI allows, and what it does not, tells `hpcpar.horovod.torch.elastic`, whose `run` this is.
"""

from __future__ import annotations

from typing import Any

import keras

from hpcpar.autograd.held_parameter import set_own_gradient
from hpcpar.horovod.keras.callbacks import Logs
from hpcpar.horovod.torch.elastic import run, run_fn
from hpcpar.horovod.torch.elastic.state import ROOT, StateHandler, TorchState
from hpcpar.horovod.torch.functions import broadcast_parameters

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
    "run_fn",
]


class VariablesHandler(StateHandler):
    """Variables of a model, or of an optimizer."""

    def save(self) -> None:
        self.saved = [variable.value.detach().clone() for variable in self.value.variables]

    def restore(self) -> None:
        for variable, saved in zip(self.value.variables, self.saved, strict=True):
            variable.assign(saved)

    def sync(self) -> None:
        # A model's `weights`: states of random generators stay each rank's own.
        shared = getattr(self.value, "weights", None) or self.value.variables
        broadcast_parameters([variable.value for variable in shared], ROOT)

    def reset(self) -> None:
        held: list[Any] = [self.value, getattr(self.value, "inner_optimizer", None)]
        for optimizer in held:
            if hasattr(optimizer, "_distribute"):  # its buckets belong to the engine that has failed
                for variable in optimizer._trainable_variables:
                    set_own_gradient(variable.value, None)
                optimizer._distribute()


class KerasState(TorchState):
    """Model, optimizer and whatever else a training needs in order to go on, as attributes.

    model      a built Keras model
    optimizer  the one that was compiled into the model, where None; it is built if it was not
    kwargs     Python objects, such as epoch=0 and batch=0; saved and sent as they are
    errors     ValueError for a model that is not built, and for a name that a state itself uses
    """

    def __init__(self, model: keras.Model, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise ValueError(
                f"KerasState was given model {model.name!r}, which has no variables yet; call "
                f"model.build(input_shape) before"
            )
        optimizer = model.optimizer if optimizer is None else optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        super().__init__(model, optimizer, **kwargs)

    @staticmethod
    def handler_for(value: Any) -> type[StateHandler] | None:
        if isinstance(value, keras.Model | keras.optimizers.Optimizer):
            return VariablesHandler
        return TorchState.handler_for(value)


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Commit the state after every so many batches, and at the end of each epoch. Collective.

    state               a KerasState
    batches_per_commit  batches from one commit to the next
    """

    def __init__(self, state: TorchState, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Logs = None) -> None:
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.batches_remaining = self.batches_per_commit
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Set `state.batch` to the number of the last batch, and to 0 at the end of an epoch."""

    def __init__(self, state: TorchState) -> None:
        super().__init__()
        self.state: Any = state

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Add 1 to `state.epoch` at the end of each epoch.

    Right for fit(epochs=total - state.epoch), as Horovod's programs call it, and for
    fit(initial_epoch=state.epoch, epochs=total).
    """

    def __init__(self, state: TorchState) -> None:
        super().__init__()
        self.state: Any = state

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self.state.epoch += 1
