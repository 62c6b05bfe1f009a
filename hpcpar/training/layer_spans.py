"""Forward and backward of each layer of a model, as events of a timeline.

    layers      |model.layers.0|model.layers.1|  … |model.layers.1|model.layers.0|
                 forward                            backward

A layer's backward goes from when the gradient of its output is there until that of its input is. Hooks of
modules and tensors see both, and change neither.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hpcpar.comm import Trace
from hpcpar.models.llama import DecoderLayer

LAYERS = "layers"
"""Category of the events."""


@contextmanager
def layer_spans(model: nn.Module, trace: Trace | None) -> Iterator[None]:
    """Record the layers that compute within the block; do nothing without a trace."""
    handles = []
    if trace is not None:
        for name, module in model.named_modules():
            if isinstance(module, DecoderLayer):
                watch = _LayerWatch(name, trace)
                handles += [
                    module.register_forward_pre_hook(watch.before, prepend=True),
                    module.register_forward_hook(watch.after),
                ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _LayerWatch:
    """Hooks of one layer."""

    def __init__(self, name: str, trace: Trace) -> None:
        self._name = name
        self._trace = trace
        self._start_s = 0.0

    def before(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._start_s = time.perf_counter()

    def after(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        self._trace.add(self._name, LAYERS, self._start_s, time.perf_counter(), direction="forward")
        hidden = inputs[0]
        if not (output.requires_grad and hidden.requires_grad):
            return
        started_s: list[float] = []

        def begin(_: Tensor) -> None:
            started_s.append(time.perf_counter())

        def end(_: Tensor) -> None:
            # A backward that is parted into B and W may come to one of the two alone.
            if started_s:
                now_s = time.perf_counter()
                self._trace.add(self._name, LAYERS, started_s.pop(), now_s, direction="backward")

        output.register_hook(begin)  # type: ignore[no-untyped-call]
        hidden.register_hook(end)
