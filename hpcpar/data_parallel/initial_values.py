"""Where the first values of a fully sharded model come from, a unit at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hpcpar.data_parallel.buckets import Bucket
from hpcpar.data_parallel.parameters import Layout, view_as
from hpcpar.data_parallel.shards import Shard
from hpcpar.data_parallel.units import Place
from hpcpar.errors import OperationError
from hpcpar.seeds import parameter_seed

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

Values = Callable[[str, Tensor], Tensor]
"""(a parameter's name, itself, perhaps on the meta device) -> its whole value, the same on all ranks."""

_DRAWING = threading.Lock()
"""Ranks that are threads of one process share the generator that modules draw from."""


class InitialValues:
    """Where initial values come from: a function, rank 0's parameters, or the modules' reset_parameters."""

    def __init__(self, model: nn.Module, dp_comm: Communicator, values: Values | None) -> None:
        self._model = model
        self._comm = dp_comm
        self._values = values
        self._drawn: dict[tuple[int, str], Tensor] = {}
        self._seed = dp_comm.broadcast_object(int(torch.randint(2**31, ()).item()))
        self._name_of = {id(module): name for name, module in model.named_modules()}

    def shard(
        self,
        entries: list[tuple[str, nn.Parameter, list[Place]]],
        bucket: Bucket,
        layouts: Sequence[Layout],
        places: Sequence[tuple[int, int]],
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """This rank's shard of a block. Collective where values are rank 0's."""
        is_local = self._values is not None or all(parameter.is_meta for _, parameter, _ in entries)
        whole = None
        if is_local or self._comm.rank == 0:
            whole = torch.zeros(bucket.numel, dtype=dtype, device=device)
            given = self._values is not None  # by who may fail on one rank alone
            with self._comm.together("making initial values") if given else nullcontext():
                for (name, parameter, owners), layout, (start, stop) in zip(
                    entries, layouts, places, strict=True
                ):
                    view_as(whole, start, stop, layout).copy_(self._value(name, parameter, owners))
        if is_local:
            assert whole is not None, "just filled"
            return whole[shard.start : shard.stop]
        own = torch.empty(shard.stop - shard.start, dtype=dtype, device=device)
        counts = [shard.stop - shard.start] * self._comm.size
        scattered: Tensor = self._comm.scatter(whole, out=own, counts=counts)
        return scattered

    def fill_buffers(self, device: torch.device | str | None) -> None:
        """Buffers of the meta device become those that reset_parameters makes."""
        for module in self._model.modules():
            if any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
                self._reset(module, torch.device(device or "cpu"))

    def _value(self, name: str, parameter: nn.Parameter, owners: list[Place]) -> Tensor:
        if self._values is not None:
            value = self._values(name, parameter)
            if value.shape != parameter.shape:
                raise OperationError(
                    f"values({name!r}) gave a tensor of shape {list(value.shape)} for a parameter of "
                    f"{list(parameter.shape)}; give the whole parameter's"
                )
            return value
        if not parameter.is_meta:
            return parameter.detach()
        module, own_name = owners[0]
        if (id(module), own_name) not in self._drawn:
            self._reset(module, torch.device("cpu"))
        return self._drawn.pop((id(module), own_name))

    def _reset(self, module: nn.Module, device: torch.device) -> None:
        """Let a module draw its own parameters and buffers, the same on all ranks."""
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            raise OperationError(
                f"{self._name_of[id(module)] or 'the model'} ({type(module).__name__}) is on the meta device "
                "and has no reset_parameters() to draw its values; pass values=, or build it on a real device"
            )
        held = dict(module._parameters)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
        drawn = {
            name: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=device))
            for name, p in held.items()
            if p is not None
        }
        module._parameters.update(drawn)
        try:
            with _DRAWING, torch.random.fork_rng(devices=[]), torch.enable_grad():
                torch.manual_seed(parameter_seed(self._name_of[id(module)], self._seed))
                reset()
        finally:
            module._parameters.update(held)
        for name, value in drawn.items():
            before = held[name]
            if before is not None and before.is_meta:
                self._drawn[id(module), name] = value.detach()
