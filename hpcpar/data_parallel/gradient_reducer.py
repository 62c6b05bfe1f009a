"""Base of the gradient reducers of all ZeRO stages: hooks, microbatches, the map of used parameters.

Ranks learn which parameters got a gradient anywhere by a map of one bit for each, or-ed over all ranks; the
digest of what a rank has written to parameters travels with it.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcpar.autograd.held_parameter import release
from hpcpar.data_parallel.buckets import Bucket
from hpcpar.data_parallel.nonfinite import quick_sum
from hpcpar.data_parallel.parameters import Named, offer_grad_buffers, watch_gradients
from hpcpar.data_parallel.replica_comms import ReplicaComms
from hpcpar.data_parallel.replicas import TOLD_NBYTES, Writes
from hpcpar.data_parallel.staging import StagingBuffer
from hpcpar.errors import BufferTypeError, OperationError
from hpcpar.parameter_info import info_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from hpcpar.comm import Communicator


@dataclass(frozen=True)
class ReplicaSet:
    """Parameters that have copies on the same ranks.

    members   their numbers
    writes    to these parameters, and to frozen ones
    """

    comm: Communicator
    members: Sequence[int]
    writes: Writes

    def map_of(self, had: Sequence[bool]) -> NDArray[np.uint8]:
        """Return the bits to be or-ed over the ranks: parameters that had a gradient, digest of writes."""
        bits = np.packbits(np.array([had[number] for number in self.members], dtype=bool))
        return np.concatenate([bits, self.writes.digest()])


class GradientReducer(ABC):
    """Averages the gradients of parameters over their replicas, in buckets, during backward.

    written               parameters whose values are compared where a rank has written to them
    compared              all ranks come to that comparison

    used                  for each parameter, 1 if it got a gradient on any rank, as of the last `synchronize`
    synchronized          gradients are averages
    used_up               nothing may be added to the averages before the next `zero`
    unapplied             factor, as of clipping, that averages are to be multiplied by before any is added
    peak_waiting_nbytes   most bytes of gradients that had come and were in no buffer yet
    """

    buckets: tuple[Bucket, ...]
    staging: Sequence[StagingBuffer] = ()
    unapplied = 1.0
    peak_waiting_nbytes = 0

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        comms: Communicator | ReplicaComms,
        written: Sequence[Named],
        *,
        compared: bool = True,
    ) -> None:
        self.names = list(names)
        self.parameters = list(parameters)
        comms = ReplicaComms.given(comms, parameters)
        self.dp_comm = comms.dp_comm
        self.comms = comms
        self.used: list[int] = []
        self.used_up = self.synchronized = False
        self._accumulating = False
        self._sets = [
            ReplicaSet(
                comms.of(replicas),
                [number for number, each in enumerate(parameters) if info_of(each).replicas is replicas],
                Writes(
                    [name for name, _ in some], [p for _, p in some], comms.of(replicas) if compared else None
                ),
            )
            for replicas, some in comms.divided(written).items()
        ]
        self._hooks: list[Any] = []
        self._sent: dict[Bucket, Tensor] = {}

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

    def compare_options(self, optimizer: Optimizer) -> None:
        """Hold the numbers in an optimizer's groups equal on all ranks, in every `synchronize`."""
        for each in self._sets:
            each.writes.optimizer = weakref.ref(optimizer)

    @property
    def sent_nonfinite(self) -> bool:
        """True where a gradient that this rank has sent since the last step was NaN or infinite."""
        return not all(total.isfinite() for total in self._sent.values())

    def _note_sent(self, bucket: Bucket, flat: Tensor) -> None:
        """Remember what is about to leave, of which an average shows nothing."""
        total = quick_sum(flat)
        self._sent[bucket] = self._sent[bucket] + total if bucket in self._sent else total

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
        self._sent.clear()
        for each in self._sets:
            each.writes.next_step()

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

    def _maps_of(self, had: Sequence[bool]) -> list[NDArray[np.uint8]]:
        """Return the map of each replica set."""
        return [each.map_of(had) for each in self._sets]

    def _read_maps(self, maps: Sequence[NDArray[np.uint8]]) -> None:
        """Take `used` from the or-ed maps."""
        self.used = [0] * len(self.parameters)
        for each, bits in zip(self._sets, maps, strict=True):
            told = np.unpackbits(bits, count=len(each.members)).tolist()
            for number, is_used in zip(each.members, told, strict=True):
                self.used[number] = is_used

    def _require_same_writes(self, maps: Sequence[NDArray[np.uint8]]) -> None:
        for each, bits in zip(self._sets, maps, strict=False):  # none where nothing was to be averaged
            each.writes.require_same(bits[-TOLD_NBYTES:])
