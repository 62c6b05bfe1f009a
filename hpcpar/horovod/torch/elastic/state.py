"""`TorchState`: what a training is made of, saved in memory at commits and the same on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hpcpar.autograd.held_parameter import set_own_gradient
from hpcpar.horovod.exceptions import HostsUpdatedInterrupt
from hpcpar.horovod.torch.elastic.sampler import ElasticSampler
from hpcpar.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hpcpar.horovod.torch.mpi_ops import Max, allreduce

ROOT = 0
ONLY_REMOVED = 1
CHANGED = 2


class StateHandler:
    """How values of one type are saved, restored and made the same on all ranks."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keep a copy in memory."""
        self.saved = copy.deepcopy(self.value)

    def restore(self) -> None:
        """Go back to the copy."""
        self.value = copy.deepcopy(self.saved)

    def sync(self) -> None:
        """Take rank 0's. Collective."""
        self.value = broadcast_object(self.value, ROOT)

    def reset(self) -> None:
        """Horovod has started anew. Collective."""

    def set_value(self, value: Any) -> None:
        """Handle this one from now on."""
        self.value = value
        self.save()


class StateDictHandler(StateHandler):
    """What is told by its `state_dict` and stays where it is: a scheduler, which holds its optimizer."""

    def save(self) -> None:
        self.saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self.saved))

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), ROOT))


class ModelStateHandler(StateDictHandler):
    """Parameters and buffers of a module."""

    def restore(self) -> None:
        self.value.load_state_dict(self.saved)

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), ROOT)


class OptimizerStateHandler(StateDictHandler):
    """State and options of an optimizer, wrapped as DistributedOptimizer or not."""

    def restore(self) -> None:
        # An optimizer keeps the tensors that it loads, and would write into the copy at its next step.
        load = getattr(self.value, "_load_later", self.value.load_state_dict)
        load(copy.deepcopy(self.saved))

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, ROOT)

    def reset(self) -> None:
        for group in self.value.param_groups:
            for parameter in group["params"]:
                set_own_gradient(parameter, None)  # ranks of a failed engine wait for no average
        if hasattr(self.value, "_distribute_again"):
            self.value._distribute_again()


class SamplerStateHandler(StateHandler):
    """An ElasticSampler: `sync` adds up what all ranks have processed, and shares out the rest."""

    def save(self) -> None:
        self.saved = self.value.state_dict()

    def restore(self) -> None:
        self.value._set(self.saved)

    def sync(self) -> None:
        states = allgather_object(self.value.state_dict(), "elastic.sampler")
        root = states[ROOT]
        # A rank whose last commit is of another epoch than the root's counts like the root.
        alike = [all(state[key] == root[key] for key in ("epoch", "history")) for state in states]
        counts = [(state if same else root)["recorded"] for state, same in zip(states, alike, strict=True)]
        self.value._set(root)
        self.value._begin_share(counts)
        self.save()

    def reset(self) -> None:
        self.sync()


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, StateDictHandler),
    (torch.amp.GradScaler, StateDictHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """(type, handler) pairs; the first whose type a value is an instance of handles it."""
    return _registry


def set_handler_registry(registry: Sequence[tuple[type, type[StateHandler]]]) -> None:
    """Replace them, for states that are made from now on."""
    global _registry  # that is what it is for
    _registry = list(registry)


class TorchState:
    """Model, optimizer and whatever else a training needs in order to go on, as attributes.

        state = TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0)
        state.epoch += 1
        state.commit()

    Modules, optimizers, their schedulers, gradient scalers and ElasticSamplers are handled as what they are
    (see `get_handler_registry`), in their places; all else is copied and sent as a Python object. Saved at
    once, and by every `sync`.
    Raises ValueError for a name that a state itself uses.

    commit_count   how often `commit` was called
    """

    commit_count = 0

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        taken = [name for name in kwargs if hasattr(type(self), name) or name.startswith("_")]
        if taken:
            raise ValueError(f"TorchState uses {', '.join(taken)} itself; choose other names for your values")
        self._handlers: dict[str, StateHandler] = {}
        self._objects: list[str] = []
        self._saved: dict[str, Any] = {}
        self._hosts_changed = 0
        self._reset_callbacks: list[Callable[[], Any]] = []
        for name, value in {"model": model, "optimizer": optimizer, **kwargs}.items():
            setattr(self, name, value)
            kind = _handler_for(value)
            if kind is not None:
                self._handlers[name] = kind(value)
            elif name in kwargs:
                self._objects.append(name)
        self.save()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None:
            handler.set_value(value)

    def save(self) -> None:
        """Keep a copy of everything in this rank's memory."""
        for handler in self._handlers.values():
            handler.save()
        self._saved = copy.deepcopy({name: getattr(self, name) for name in self._objects})

    def restore(self) -> None:
        """Go back to what was saved last, on this rank."""
        for name, handler in self._handlers.items():
            handler.restore()
            super().__setattr__(name, handler.value)
        for name, value in copy.deepcopy(self._saved).items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Take rank 0's values, and save them. Collective."""
        for name, handler in self._handlers.items():
            handler.sync()
            super().__setattr__(name, handler.value)
        values = {name: getattr(self, name) for name in self._objects}
        for name, value in broadcast_object(values, ROOT, "elastic.objects").items():
            setattr(self, name, value)
        self.save()

    def commit(self) -> None:
        """Save, as a point to go back to; then `check_host_updates`. Collective, because of that."""
        self.save()
        self.commit_count += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks if any was told that hosts have changed. Collective."""
        own = torch.tensor([self._hosts_changed], device="cpu")
        found = int(allreduce(own, name="elastic.hosts", op=Max))
        if found:
            self._hosts_changed = 0
            raise HostsUpdatedInterrupt(skip_sync=found == ONLY_REMOVED)

    def on_hosts_updated(self, timestamp: float = 0, update_res: int = CHANGED) -> None:
        """Tell that hosts have changed; may be called by a signal handler.

        update_res   1: hosts were only removed, 2 or 3: some were added

        Nobody calls this by itself under MPI, whose jobs keep their ranks: it makes them start anew at
        the next commit, and nothing else.
        """
        self._hosts_changed = max(self._hosts_changed, update_res)

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Functions to call after each new start, on every rank, in this order."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Horovod has started anew: connect optimizers and samplers to it, call the callbacks. Collective."""
        self._hosts_changed = 0
        for handler in self._handlers.values():
            handler.reset()
        for callback in self._reset_callbacks:
            callback()


def _handler_for(value: Any) -> type[StateHandler] | None:
    return next((handler for kind, handler in _registry if isinstance(value, kind)), None)
