"""Bytes that autograd saves from forward for backward, counted in its saved-tensor hooks.

    with watch_activations(model) as activations:
        loss(model(tokens)).backward()
    activations.peak_nbytes

forward     x ─ Linear ─ y ─ tanh ─ z        Linear saves x and its weight, tanh saves z
saved       x            x          x z      the weight is a parameter, y is saved by none
backward                 x          x z
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hpcpar.data_parallel.zero3 import sharding_in

if TYPE_CHECKING:
    from hpcpar.comm import Trace


class Activations:
    """Bytes of storages that autograd holds for backward: `nbytes` now, `peak_nbytes` at most.

    parameters   storages that are not counted
    trace        takes the bytes whenever they change, as the counter "activations"
    """

    def __init__(self, parameters: set[int], trace: Trace | None = None) -> None:
        self.nbytes = 0
        self.peak_nbytes = 0
        self._parameters = parameters
        self._trace = trace
        self._holders: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Tensor | _Saved:
        """Count a tensor that autograd saves."""
        if storage_id(tensor) in self._parameters:
            return tensor
        return _Saved(tensor, self)

    @staticmethod
    def unpack(saved: Tensor | _Saved) -> Tensor:
        """Return a saved tensor to backward."""
        return saved.tensor if isinstance(saved, _Saved) else saved

    def hold(self, storage: int, nbytes: int) -> None:
        holders = self._holders.get(storage, 0)
        self._holders[storage] = holders + 1
        if not holders:
            self._change(nbytes)

    def let_go(self, storage: int, nbytes: int) -> None:
        self._holders[storage] -= 1
        if not self._holders[storage]:
            del self._holders[storage]
            self._change(-nbytes)

    def _change(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        if self._trace is not None:
            self._trace.count("activations", nbytes=self.nbytes)


class _Saved:
    """A tensor that is counted until autograd drops it."""

    __slots__ = ("_nbytes", "_storage", "_watch", "tensor")

    def __init__(self, tensor: Tensor, watch: Activations) -> None:
        self.tensor = tensor
        self._watch = watch
        self._storage = storage_id(tensor)
        self._nbytes = storage_nbytes(tensor)
        watch.hold(self._storage, self._nbytes)

    def __del__(self) -> None:
        self._watch.let_go(self._storage, self._nbytes)


@contextmanager
def watch_activations(model: nn.Module, trace: Trace | None = None) -> Iterator[Activations]:
    """Count the storages that a microbatch's forward saves for its backward, each once.

    trace   takes the bytes whenever they change

    The model's parameters are not counted, nor the kernels' temporary memory. Tensors that
    torch.utils.checkpoint recomputes pass by its own hooks and are not counted; those that it keeps are.
    """
    sharding = sharding_in(model)
    if sharding is None:
        memory: list[Tensor] = list(model.parameters())
    else:
        memory = [held.flat for unit in sharding.units for held in unit.groups]
    activations = Activations({storage_id(tensor) for tensor in memory}, trace)
    with torch.autograd.graph.saved_tensors_hooks(activations.pack, activations.unpack):
        yield activations


def storage_id(tensor: Tensor) -> int:
    """Return an identity common to all tensors of a storage, also while its memory is freed."""
    return tensor.untyped_storage()._cdata if _has_storage(tensor) else id(tensor)


def storage_nbytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's whole storage; 0 on the meta device."""
    if tensor.is_meta:
        return 0
    return tensor.untyped_storage().nbytes() if _has_storage(tensor) else tensor.nbytes


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided
