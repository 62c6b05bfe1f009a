"""`TorchState`: what a training is made of, saved in memory at commits and the same on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
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
from hpcpar.horovod.torch.mpi_ops import Max, allreduce, rank

ROOT = 0


class HostUpdateResult:
    """Changes of the hosts, in Horovod's numbers."""

    no_update, removed, added, mixed = range(4)


class StateHandler:
    """Handler that saves, restores and synchronizes values of one type, as Python objects.

    save, restore   keep a copy of the value in memory, and go back to it
    sync            take rank 0's value; collective
    reset           called when Horovod has started anew; collective
    set_value       handle this value from now on
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        self.saved = copy.deepcopy(self.value)

    def restore(self) -> None:
        self.value = copy.deepcopy(self.saved)

    def sync(self) -> None:
        self.value = broadcast_object(self.value, ROOT)

    def reset(self) -> None:
        pass

    def set_value(self, value: Any) -> None:
        self.value = value
        self.save()


class StateDictHandler(StateHandler):
    """Handler of objects kept in place and read by `state_dict`, such as schedulers."""

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


def _broadcast_named(value: Any) -> Any:
    return broadcast_object(value, ROOT, "elastic.objects")


class State:
    """State that a training needs to go on; a subclass implements `save`, `restore` and `sync`.

    save, restore   keep a copy of everything in this rank's memory, and go back to it
    sync            take rank 0's values, and save them; collective
    reset           called when Horovod has started anew; collective
    commit_count    number of calls of `commit`

    bcast_object returns rank 0's object on every rank; get_rank is for compatibility.
    """

    commit_count = 0

    def __init__(
        self, bcast_object: Callable[[Any], Any] = _broadcast_named, get_rank: Callable[[], int] = rank
    ) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._hosts_changed = 0
        self._reset_callbacks: list[Callable[[], Any]] = []

    def save(self) -> None:
        pass

    def restore(self) -> None:
        pass

    def sync(self) -> None:
        pass

    def reset(self) -> None:
        pass

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
            raise HostsUpdatedInterrupt(skip_sync=found == HostUpdateResult.removed)

    def on_hosts_updated(self, timestamp: float = 0, update_res: int = HostUpdateResult.added) -> None:
        """Tell that hosts have changed; may be called by a signal handler.

        update_res   1: hosts were only removed, 2 or 3: some were added

        Nobody calls this by itself under MPI, whose jobs keep their ranks: it makes them start anew at
        the next commit, and nothing else.
        """
        self._hosts_changed = max(self._hosts_changed, update_res)

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Call these functions after each new start, on every rank, in this order."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Horovod has started anew: `reset`, and then the callbacks. Collective."""
        self._hosts_changed = 0
        self.reset()
        for callback in self._reset_callbacks:
            callback()


class ObjectState(State):
    """Python objects as attributes, copied when they are saved and sent as objects.

    Raises ValueError for a name that a state itself uses.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = _broadcast_named,
        get_rank: Callable[[], int] = rank,
        **kwargs: Any,
    ) -> None:
        self._require_free(kwargs)
        super().__init__(bcast_object, get_rank)
        self._objects = list(kwargs)
        self._set(kwargs)
        ObjectState.save(self)

    def save(self) -> None:
        self._saved = copy.deepcopy({name: getattr(self, name) for name in self._objects})

    def restore(self) -> None:
        self._set(copy.deepcopy(self._saved))

    def sync(self) -> None:
        values = {name: getattr(self, name) for name in self._objects}
        self._set(self._bcast_object(values))
        self.save()

    def _require_free(self, names: Iterable[str]) -> None:
        taken = [name for name in names if hasattr(type(self), name) or name.startswith("_")]
        if taken:
            raise ValueError(
                f"{type(self).__name__} uses {', '.join(taken)} itself; choose other names for your values"
            )

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


class TorchState(ObjectState):
    """Model, optimizer and whatever else a training needs in order to go on, as attributes.

        state = TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0)
        state.epoch += 1
        state.commit()

    Modules, optimizers, their schedulers, gradient scalers and ElasticSamplers are handled as what they are
    (see `get_handler_registry`), in their places; all else is copied and sent as a Python object. Saved at
    once, and by every `sync`.
    Raises ValueError for a name that a state itself uses.
    """

    def __init__(
        self,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        self._require_free(kwargs)
        self._handlers: dict[str, StateHandler] = {}
        values = {"model": model, "optimizer": optimizer, **kwargs}
        kinds = {
            name: kind for name, value in values.items() if (kind := self.handler_for(value)) is not None
        }
        super().__init__(**{name: value for name, value in kwargs.items() if name not in kinds})
        self._set({name: value for name, value in values.items() if name not in self._objects})
        self._handlers = {name: kind(values[name]) for name, kind in kinds.items()}
        self.save()

    @staticmethod
    def handler_for(value: Any) -> type[StateHandler] | None:
        """Return the class that handles this value; None for one that is a Python object to us."""
        return next((handler for kind, handler in _registry if isinstance(value, kind)), None)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None:
            handler.set_value(value)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        self._handle(lambda handler: handler.restore())
        super().restore()

    def sync(self) -> None:
        self._handle(lambda handler: handler.sync())
        super().sync()

    def _handle(self, call: Callable[[StateHandler], None]) -> None:
        for name, handler in self._handlers.items():
            call(handler)
            super().__setattr__(name, handler.value)

    def reset(self) -> None:
        for handler in self._handlers.values():
            handler.reset()
