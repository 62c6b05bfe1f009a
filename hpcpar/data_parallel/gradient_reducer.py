"""Base of the gradient reducers of all ZeRO stages: hooks, microbatches, the map of used parameters.

Ranks learn which parameters got a gradient anywhere by a map of one bit for each, or-ed over all ranks; the
digest of what a rank has written to parameters travels with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcpar.autograd.held_parameter import release
from hpcpar.data_parallel.buckets import Bucket
from hpcpar.data_parallel.parameters import offer_grad_buffers, watch_gradients
from hpcpar.data_parallel.replicas import TOLD_NBYTES, Writes
from hpcpar.data_parallel.staging import StagingBuffer
from hpcpar.errors import BufferTypeError, OperationError

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


class GradientReducer(ABC):
    """Averages the gradients of parameters over `dp_comm`, in buckets, during backward.

    used                  for each parameter, 1 if it got a gradient on any rank, as of the last `synchronize`
    synchronized          gradients are averages
    used_up               nothing may be added to the averages before the next `zero`
    peak_waiting_nbytes   most bytes of gradients that had come and were in no buffer yet
    """

    buckets: tuple[Bucket, ...]
    staging: Sequence[StagingBuffer] = ()
    peak_waiting_nbytes = 0

    def __init__(
        self, names: Sequence[str], parameters: Sequence[Tensor], dp_comm: Communicator, writes: Writes
    ) -> None:
        self.names = list(names)
        self.parameters = list(parameters)
        self.dp_comm = dp_comm
        self.used: list[int] = []
        self.used_up = self.synchronized = False
        self._accumulating = False
        self._writes = writes
        self._hooks: list[Any] = []

    def _watch(self) -> None:
        self._hooks = [
            *watch_gradients(self.parameters, self._on_gradient),
            *offer_grad_buffers(self.parameters, self._grad_buffer),
        ]

    @abstractmethod
    def _on_gradient(self, index: int) -> None:
        """Take the gradient that autograd has added to `.grad` of a parameter."""

    @abstractmethod
    def _grad_buffer(self, index: int) -> Tensor | None:
        """Return memory to make a parameter's gradient in, so that nobody need copy it."""

    @property
    @abstractmethod
    def flats(self) -> list[Tensor]:
        """Flat memory of each bucket's averages on this rank: all of them, or its shard."""

    @property
    @abstractmethod
    def round_open(self) -> bool:
        """True if there are gradients that no `synchronize` has waited for."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until every gradient is an average; collective, once after the last backward before a step."""

    @abstractmethod
    def zero(self, *, set_to_none: bool = True) -> None:
        """Forget all gradients, or fill them with zeros; await what is under way first. Collective then."""

    @abstractmethod
    def has_taken(self, index: int) -> bool:
        """Return whether the backward under way, or the last one, has brought a gradient to be averaged."""

    @abstractmethod
    def forget(self, index: int) -> None:
        """Step as if a parameter had got no gradient, on any rank; once the gradients are averages."""

    @property
    def staging_nbytes(self) -> int:
        return sum(buffer.memory.nbytes for buffer in self.staging)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate inside: for all microbatches but the last. Stages 2 and 3 send all the same."""
        outer, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = outer

    def next_step(self) -> None:
        """Note that a step was taken: gradients must be averaged again, even if no backward follows."""
        self.synchronized = False
        self._writes.next_step()

    def close(self) -> None:
        """Take the hooks off the parameters; gradients stay where they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for parameter in self.parameters:
            release(parameter)

    def _require_new_gradients(self) -> None:
        if self._accumulating:
            raise OperationError(
                "gradients were to be averaged inside no_sync(); leave it for the last microbatch's "
                "backward, then step"
            )
        if self.synchronized:
            raise OperationError(
                "the gradients are averages already; call synchronize() once after each backward "
                "(step and clip_grad_norm_ call it if nobody has)"
            )

    def _require_dense(self, index: int, gradient: Tensor) -> None:
        if gradient.layout is not torch.strided:
            raise BufferTypeError(
                f"the gradient of {self.names[index]} is {gradient.layout}, but buckets hold dense ones; "
                "build the layer with sparse=False"
            )

    def _map_of(self, had: Sequence[bool]) -> NDArray[np.uint8]:
        """Return the bits to be or-ed over all ranks: parameters that had a gradient, digest of writes."""
        return np.concatenate([np.packbits(np.array(had, dtype=bool)), self._writes.digest()])

    def _read_map(self, bits: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Take `used` from the or-ed map; return the digests."""
        self.used = np.unpackbits(bits, count=len(self.parameters)).tolist()
        return bits[-TOLD_NBYTES:]
