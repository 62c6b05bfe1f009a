"""Check that ranks agree on replicated tensors: the same batch, random numbers and gradients.

    column layer    its input; embedding: its tokens                       in forward
    norm            its weight                                             in forward
    any weight      not the same: ranks with one seed may draw one shard   in forward, once
    row layer       the gradient of its output: by other labels, masks     in backward
    gathered        the gradient of what a column layer gathers            in backward

Ranks with different batches or seeds would train on a mixture, and replicated parameters would diverge. So a
layer compares the fingerprint of a tensor over the ranks in its first calls, and then every 128th time.
"""

from __future__ import annotations

import copy
import math
import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpcpar.errors import LayoutError, MismatchError
from hpcpar.uncompiled import uncompiled

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

FIRST = 2
"""First calls, all of which are checked."""

EVERY = 128
"""Later calls: one in so many is checked."""

TOLERANCE = {torch.float16: 0.03, torch.bfloat16: 0.03, torch.float32: 1e-3, torch.float64: 1e-3}
"""Relative to a tensor's norm: rounding on unequal processors; integers have none."""

ADVICE = (
    "ranks that share layers work on one batch, with the same random numbers: choose each rank's samples by "
    "mesh.dp.rank of mesh.dp.size, and seed by mesh.dp.rank (torch.manual_seed(seed + mesh.dp.rank))"
)


class Sameness:
    """Checks of one tensor of a layer, which must be the same on all ranks.

    what     names the tensor in errors: "the input of a column-parallel layer"
    cost     of a check: an all-gather of 40 bytes, counted as agreement, and one pass over the tensor
    """

    def __init__(self, comm: Communicator, what: str) -> None:
        self._comm, self._what = comm, what
        self._calls = 0

    @uncompiled
    def require(self, tensor: Tensor) -> None:
        """Check a tensor, if it is due. Collective.

        errors   MismatchError on every rank if the tensors differ by more than rounding
        """
        if self._is_due():
            self._compare(tensor)

    @uncompiled
    def require_of_gradient(self, tensor: Tensor) -> None:
        """Check a tensor's gradient, if it is due; errors as `require`. Collective, in backward."""
        if tensor.requires_grad and self._is_due():
            tensor.register_hook(self._compare)  # type: ignore[no-untyped-call]

    @uncompiled
    def require_shards(self, weight: Tensor) -> None:
        """Check, in the first call, that ranks hold different shards of a weight. Collective.

        errors   LayoutError on every rank if any has the values of rank 0, unless all of these are one number
        """
        if self._calls or not self._is_due():
            return
        everyone = fingerprints(weight, self._comm)
        copies = (everyone[1:] == everyone[0]).all(dim=1).nonzero()
        if len(copies) and weight.numel() and not (weight == weight.flatten()[0]).all():
            raise LayoutError(
                f"{self._what} has the same values on ranks 0 and {int(copies[0]) + 1} of "
                f"{self._comm.name!r}, which hold different shards of it, so that what they compute would "
                f"always be the same. If each drew its shard by one seed, draw the whole: hpcpar."
                f"tensor_parallel.draw_shard(layer.weight, torch.nn.init.xavier_uniform_). If one rank sent "
                f"its own to all, as DistributedDataParallel does, give that the ranks of dp alone: "
                f"process_group=hpcpar.process_group_of(mesh.dp)"
            )

    @uncompiled
    def require_parts(self, given: Tensor, made: Tensor) -> None:
        """Check that ranks pass different inputs, or gradients, through a module with Norm(of_heads=True).

        Ranks that share a head have equal inputs, but then the gradients of their outputs differ. Collective.
        errors   in backward, LayoutError on every rank if both are the same on all
        """
        if not made.requires_grad or not self._is_due():
            return
        if different(fingerprints(given, self._comm), given.dtype) is None:
            made.register_hook(self._require_parts)  # type: ignore[no-untyped-call]

    def _require_parts(self, gradient: Tensor) -> None:
        everyone = fingerprints(gradient, self._comm)
        if everyone[0, 1] and different(everyone, gradient.dtype) is None:
            raise LayoutError(
                f"{self._what} has the style Norm(of_heads=True), which adds up the parts that ranks have of "
                f"its parameters' gradients, but all {self._comm.size} ranks of {self._comm.name!r} have the "
                f"whole: it lies before the column layers or after the row layer; give it the style Norm()"
            )

    def __deepcopy__(self, memo: Any) -> Sameness:
        return copy.copy(self)  # with the same communicator

    def _is_due(self) -> bool:
        if self._comm.size == 1:
            return False
        self._calls += 1
        return self._calls <= FIRST or self._calls % EVERY == 0

    def _compare(self, tensor: Tensor) -> None:
        everyone = fingerprints(tensor, self._comm)
        other = different(everyone, tensor.dtype)
        if other is not None:
            raise MismatchError(
                f"{self._what} is not the same on all ranks of {self._comm.name!r}: of shape "
                f"{list(tensor.shape)} here, with norm {everyone[0, 1]:.6g} on rank 0 and "
                f"{everyone[other, 1]:.6g} on rank {other}; {ADVICE}"
            )


@uncompiled
@torch.no_grad()
def fingerprints(tensor: Tensor, comm: Communicator) -> Tensor:
    """Gather [ranks, 5] in float64: shape, norm, and three weighted sums. Collective."""
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    elif not values.is_floating_point():
        values = values.double()
    length = values.shape[-1] if values.dim() else 1
    rows = values.reshape(math.prod(values.shape[:-1]), length)
    if rows.element_size() < 4:
        rows = rows.float()
    told = [float(zlib.crc32(repr(tuple(tensor.shape)).encode())), torch.linalg.vector_norm(rows).item()]
    for frequency in (1.1, 7.7, 29.3):
        left, right = (
            torch.arange(1, count + 1, device=rows.device).mul(frequency).square().sin().to(rows.dtype)
            for count in rows.shape
        )
        told.append((left @ (rows @ right)).item())
    everyone: Tensor = comm.unchecked("agreement").allgather(torch.tensor(told, dtype=torch.float64))
    return everyone.view(comm.size, -1)


def different(everyone: Tensor, dtype: torch.dtype) -> int | None:
    """First rank whose fingerprint differs from rank 0's by more than rounding; None if all agree."""
    first = everyone[0]
    margin = TOLERANCE.get(dtype, 1e-9) * first[1].abs()
    for rank, other in enumerate(everyone):
        # Equal infinities and NaN count as equal: they are not this check's to report.
        close = torch.isclose(other, first, rtol=0.0, atol=float(margin.nan_to_num()), equal_nan=True)
        if not close.all():
            return rank
    return None
