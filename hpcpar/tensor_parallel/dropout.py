"""Dropout with a random stream of its own; it saves a mask of one byte per element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from hpcpar.autograd.random_by_place import kept_by_place
from hpcpar.errors import ConfigError
from hpcpar.tensor_parallel.random_streams import STREAMS, RandomStreams, Stream


class Dropout(nn.Module):
    """Zero elements with a probability, and scale the others so that the mean stays; off in eval mode.

    stream   "same" for a tensor that all tp ranks hold, "different" for a sharded one
    places   gives the places of the tokens of tensors [B, N, H] in their sequence: what is dropped of a token
             then depends on its place, and not on which rank has it; None: it depends on the stream alone
    errors   ConfigError for a probability outside [0, 1), or an unknown stream
    """

    def __init__(
        self,
        probability: float,
        streams: RandomStreams,
        stream: Stream,
        places: Callable[[], Tensor] | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= probability < 1:
            raise ConfigError(f"dropout={probability}: give a probability from 0 to below 1")
        if stream not in STREAMS:
            raise ConfigError(f"there is no random stream {stream!r}; there are {' and '.join(STREAMS)}")
        self.probability = probability
        self.random_streams = streams
        self.stream: Stream = stream
        self._places = places

    @property
    def is_active(self) -> bool:
        """True in training, with a probability above 0."""
        return self.training and self.probability > 0

    def forward(self, tensor: Tensor) -> Tensor:
        if not self.is_active:
            return tensor
        kept = 1 - self.probability
        if self._places is None:
            mask = torch.empty(tensor.shape, dtype=torch.bool, device=tensor.device)
            mask.bernoulli_(kept, generator=self.random_streams.generator(self.stream))
        else:
            rows, _, columns = (torch.arange(size, device=tensor.device) for size in tensor.shape)
            places = self._places().to(tensor.device)
            mask = kept_by_place(self.random_streams.seed("same"), (rows, places), columns, kept)
        return _Masked.apply(tensor, mask, 1 / kept)  # type: ignore[no-any-return, no-untyped-call]

    def extra_repr(self) -> str:
        return f"{self.probability}, stream={self.stream!r}"


class _Masked(Function):
    """tensor · mask · scale: linear and its own backward, so it can be differentiated repeatedly."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return (tensor * mask).mul_(scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return _Masked.apply(gradient, mask, ctx.scale), None, None  # type: ignore[no-untyped-call]
