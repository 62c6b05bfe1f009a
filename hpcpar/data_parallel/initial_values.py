"""Initial values of a fully sharded model, a unit at a time."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hpcpar.data_parallel.broadcast import broadcast_tensors
from hpcpar.data_parallel.bucket_shards import Shard
from hpcpar.data_parallel.buckets import Bucket
from hpcpar.data_parallel.parameters import Layout, agree_on_parameters, distinct, view_as
from hpcpar.data_parallel.replica_comms import ReplicaComms
from hpcpar.data_parallel.unit_plan import Entry, Place
from hpcpar.errors import OperationError
from hpcpar.seeds import parameter_seed

Values = Callable[[str, Tensor], Tensor]
"""(name of a parameter or buffer, itself, perhaps on the meta device) -> its whole value, on all ranks alike.

Of buffers it is asked for those of the meta device, and may say None, or raise KeyError, where it knows none.
"""

_DRAWING = threading.Lock()
"""Ranks that are threads of one process share the generator that modules draw from."""


class InitialValues:
    """Source of initial values: a function, rank 0's parameters, or the modules' reset_parameters."""

    def __init__(self, model: nn.Module, comms: ReplicaComms, values: Values | None) -> None:
        self._model = model
        self._comms = comms
        self._comm = dp_comm = comms.dp_comm
        self._values = values
        self._drawn: dict[tuple[int, str], Tensor] = {}
        self._seed = dp_comm.broadcast_object(int(torch.randint(2**31, ()).item()))
        self._name_of = {id(module): name for name, module in model.named_modules()}

    def shard(
        self,
        entries: list[Entry],
        bucket: Bucket,
        layouts: Sequence[Layout],
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """This rank's shard of a block. Collective where values are rank 0's."""
        comm = self._comms.of(bucket.replicas)
        is_local = self._values is not None or all(parameter.is_meta for _, parameter, _ in entries)
        whole = None
        if is_local or comm.rank == 0:
            whole = torch.zeros(bucket.numel, dtype=dtype, device=device)
            given = self._values is not None  # by who may fail on one rank alone
            with comm.together("making initial values") if given else nullcontext():
                for (name, parameter, owners), layout, (start, stop) in zip(
                    entries, layouts, pairwise(bucket.edges), strict=True
                ):
                    value = self._value(name, parameter, owners)
                    # A value that lies in a file is read where it is copied, and other ranks' parts are not.
                    if not is_local or (start < shard.stop and shard.start < stop):
                        view_as(whole, start, stop, layout).copy_(value)
        if is_local:
            assert whole is not None, "just filled"
            return whole[shard.start : shard.stop]
        own = torch.empty(shard.stop - shard.start, dtype=dtype, device=device)
        counts = [shard.stop - shard.start] * comm.size
        for_all = None if whole is None else whole.repeat(comm.size // self._comms.shards(bucket.replicas))
        scattered: Tensor = comm.scatter(for_all, out=own, counts=counts)
        return scattered

    def fill_buffers(self, device: torch.device | str | None) -> None:
        """Make those of the meta device what values tell, or else what their module makes. Collective.

        Others become rank 0's, as parameters do, where values do not tell those.
        """
        given = self._values is not None
        if not given:
            buffers = distinct(self._model.named_buffers())
            real = [(name, buffer) for name, buffer in buffers if not buffer.is_meta]
            agree_on_parameters(real, self._comm, "buffers")
            broadcast_tensors([buffer for _, buffer in real], self._comm)
        with self._comm.together("making buffers") if given else nullcontext():
            for name, module in self._model.named_modules():
                own = [
                    key for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta
                ]
                told = {key: self._told(f"{name}.{key}".lstrip("."), module._buffers[key]) for key in own}
                if any(value is None for value in told.values()):
                    self._reset(module, torch.device(device or "cpu"))
                for key, value in told.items():
                    if value is not None:
                        module._buffers[key] = value.detach().to(
                            device or "cpu", module._buffers[key].dtype, copy=True
                        )

    def _told(self, name: str, buffer: Any) -> Tensor | None:
        if self._values is None:
            return None
        try:
            value: Tensor | None = self._values(name, buffer)
        except KeyError:
            return None
        if value is not None:
            _require_shape(name, value, buffer)
        return value

    def _value(self, name: str, parameter: nn.Parameter, owners: list[Place]) -> Tensor:
        if self._values is not None:
            value = self._values(name, parameter)
            _require_shape(name, value, parameter)
            return value
        if not parameter.is_meta:
            return parameter.detach()
        module, own_name = owners[0]
        if (id(module), own_name) not in self._drawn:
            self._reset(module, torch.device("cpu"))
        return self._drawn.pop((id(module), own_name))

    def _reset(self, module: nn.Module, device: torch.device) -> None:
        """Let a module draw its own parameters and buffers, the same on all ranks."""
        reset = self._drawing(module)
        held = dict(module._parameters)
        made = {
            name: _unmade(buffer, device)
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.is_meta
        }
        module._buffers.update(made)
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
        for name in made:
            if _is_unmade(module._buffers[name]):
                raise self._refusal(module, f"does not make its buffer {name} anew")
        for name, value in drawn.items():
            before = held[name]
            if before is not None and before.is_meta:
                self._drawn[id(module), name] = value.detach()

    def _drawing(self, module: nn.Module) -> Callable[[], Any]:
        """A module's way to make its parameters and buffers."""
        owner = self._transformers_model_of(module)
        reset: Callable[[], Any] | None = getattr(module, "reset_parameters", None)
        if owner is not None and any(p is not None and p.is_meta for p in module._parameters.values()):
            raise self._refusal(module, "gets its values by rules of transformers, for the model as a whole")
        if reset is None and owner is not None:
            return lambda: owner._init_weights(module)
        if reset is None:
            raise self._refusal(module, "has no reset_parameters() to make its values")
        return reset

    def _transformers_model_of(self, module: nn.Module) -> Any:
        """The innermost model of Hugging Face's transformers around a module; None: it is in none."""
        name = self._name_of[id(module)]
        around = [each for each in self._name_of.values() if each == "" or f"{name}.".startswith(f"{each}.")]
        for each in sorted(around, key=len, reverse=True):
            found = self._model.get_submodule(each)
            made_by = {kind.__module__ for kind in type(found).__mro__}
            if "transformers.modeling_utils" in made_by and hasattr(found, "_init_weights"):
                return found
        return None

    def _refusal(self, module: nn.Module, why: str) -> OperationError:
        name, own = self._name_of[id(module)], [*module._parameters.items(), *module._buffers.items()]
        missing = [f"{name}.{key}".lstrip(".") for key, tensor in own if tensor is not None]
        given = (
            f"values= did not tell {missing[0]!r}, a buffer: let it answer for all of {', '.join(missing)}"
            if self._values is not None
            else f"pass values=, which tells {', '.join(missing)}"
        )
        return OperationError(
            f"{name or 'the model'} ({type(module).__name__}) is on the meta device and {why}; {given}, as "
            "by values=lambda name, _: whole[name] with whole = {**dict(built.named_parameters()), "
            "**dict(built.named_buffers())} of a model built on a real device, or build this one there"
        )


def _require_shape(name: str, value: Tensor, expected: Tensor) -> None:
    if value.shape != expected.shape:
        raise OperationError(
            f"values({name!r}) gave a tensor of shape {list(value.shape)} for one of {list(expected.shape)}; "
            "give the whole one"
        )


def _unmade(buffer: Tensor, device: torch.device) -> Tensor:
    """Memory for a buffer, of values that nobody makes."""
    made = torch.empty_like(buffer, device=device)
    if buffer.is_floating_point() or buffer.is_complex():
        return made.fill_(math.nan)
    return made if buffer.dtype is torch.bool else made.fill_(torch.iinfo(buffer.dtype).min)


def _is_unmade(buffer: Any) -> bool:
    if buffer is None or buffer.dtype is torch.bool:
        return False
    unmade = _unmade(buffer, buffer.device)
    return bool(((buffer == unmade) | (buffer != buffer)).any())
