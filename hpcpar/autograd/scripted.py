"""Layers of torch.jit, which call others where no hook is called."""

from __future__ import annotations

import torch
from torch import nn

from hpcpar.errors import OperationError


def refuse_scripted(model: nn.Module, instead: str) -> None:
    """OperationError where a model has layers that torch.jit made.

    instead   a way out besides the module that they were made of
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            made_of = getattr(module, "original_name", type(module).__name__)
            raise OperationError(
                f"{name or 'the model'} ({made_of}) was made by torch.jit.script or torch.jit.trace, whose "
                f"layers nobody can watch; {instead}, or use the module that it was made of, which "
                "torch.compile makes fast, too"
            )
