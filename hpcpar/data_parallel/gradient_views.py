"""Buckets of whole gradients, and the views of them that parameters have as `.grad`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hpcpar.data_parallel.buckets import Bucket
from hpcpar.data_parallel.parameters import view_like
from hpcpar.data_parallel.reduction import Pending
from hpcpar.errors import OperationError


@dataclass(slots=True)
class BucketState:
    """State of one bucket in the current round.

    missing   members whose gradient of the current backward has not arrived
    handle    the all-reduce under way; None before it leaves and after it has been awaited
    version   torch's count of writes to `flat` when it left
    """

    bucket: Bucket
    flat: Tensor
    missing: int = 0
    handle: Pending | None = None
    version: int = 0


class GradientViews:
    """Views of the buckets' memory, one for each parameter.

    state_of    by parameter, the state of its bucket
    addresses   of the views' memory, to tell a `.grad` that somebody has replaced
    """

    def __init__(
        self, names: Sequence[str], parameters: Sequence[Tensor], states: Sequence[BucketState]
    ) -> None:
        self._names = names
        self._parameters = parameters
        self.state_of = {index: state for state in states for index in state.bucket.members}
        self._views = [self._cut(index) for index in range(len(parameters))]
        self.addresses = [view.data_ptr() for view in self._views]

    def of(self, index: int) -> Tensor:
        """Return a parameter's view; cut it anew if somebody has set its `.data`."""
        if self._views[index].data_ptr() != self.addresses[index]:
            self._views[index] = self._cut(index)
        return self._views[index]

    def _cut(self, index: int) -> Tensor:
        """Return a view in the parameter's present shape."""
        parameter, state = self._parameters[index], self.state_of[index]
        start, stop = state.bucket.ranges[index]
        flat = state.flat
        if (parameter.dtype, parameter.device, parameter.numel()) != (flat.dtype, flat.device, stop - start):
            raise OperationError(
                f"{self._names[index]} has {parameter.numel()} elements of {parameter.dtype} on "
                f"{parameter.device}, its bucket room for {stop - start} of {flat.dtype} on "
                f"{flat.device}: change the model first, then build the DistributedOptimizer"
            )
        return view_like(flat, start, stop, parameter)
