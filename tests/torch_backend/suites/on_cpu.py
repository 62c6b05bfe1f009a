"""Tests that are written for GPUs, on CPU tensors: `.cuda()`, `device=rank` and the like mean the CPU.

Most of torch's tests of DistributedDataParallel ask for two GPUs without need of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed
from torch.testing._internal.distributed import distributed_test

CPU = torch.device("cpu")


class OnCpu(TorchFunctionMode):
    """Have every torch function use the CPU where it names a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if "device" in named:
            named["device"] = placed(named["device"])
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to:
            args = (args[0], *[where(each) for each in args[1:]])
        return function(*args, **named)


def placed(device: Any) -> Any:
    return device if device is None else CPU


def where(argument: Any) -> Any:
    """An argument of `Tensor.to`: a GPU becomes the CPU, types and options stay."""
    is_number = isinstance(argument, int) and not isinstance(argument, bool)
    return CPU if is_number or isinstance(argument, (str, torch.device)) else argument


def _built(self: Any, module: nn.Module, *args: Any, **options: Any) -> None:
    options.update(device_ids=None, output_device=None)
    _BUILD(self, module, *args[2:], **options)


_TO = nn.Module.to
_BUILD = nn.parallel.DistributedDataParallel.__init__


@contextmanager
def instead_of_gpus() -> Iterator[None]:
    """Have tests of torch's class for GPUs run on CPU tensors."""

    def moved(module: nn.Module, *args: Any, **options: Any) -> nn.Module:
        return module

    def moved_to(module: nn.Module, *args: Any, **options: Any) -> nn.Module:
        return _TO(
            module, *map(where, args), **{**options, **({"device": CPU} if "device" in options else {})}
        )

    nothing = mock.Mock(return_value=None)
    with ExitStack() as stack:
        for place, name, value in (
            # A device that the conditions of the tests ask for beside CUDA.
            (common_distributed, "TEST_HPU", True),
            (common_distributed, "TEST_CUDA", False),
            (torch.cuda, "set_device", nothing),
            (torch.cuda, "synchronize", nothing),
            (torch.cuda, "manual_seed", nothing),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "device", lambda device: nullcontext()),
            (nn.Module, "cuda", moved),
            (nn.Module, "to", moved_to),
            (nn.parallel.DistributedDataParallel, "__init__", _built),
            (distributed_test, "init_multigpu_helper", lambda size, backend: {r: [r] for r in range(size)}),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        device = SimpleNamespace(device_count=lambda: 8)
        stack.enter_context(mock.patch.object(torch, "hpu", device, create=True))
        stack.enter_context(OnCpu())
        yield
