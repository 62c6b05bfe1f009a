"""Gradients that are sparse: each travels by itself, sparse or as a dense one, and stays sparse.

    rank 0          rank 1          what the optimizer sees on both
    rows 1 and 4    rows 4 and 7    rows 1, 4 and 7
    none            row 2           row 2
    dense           row 2           dense, as the sum in one process is (refused in the first step, unless
                                    sparse_as_dense)

With sparse_as_dense: an all-reduce of a dense copy, and one of the rows that each rank has. Else two
all-gathers, of indices and of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpcpar.horovod.torch import mpi_ops

if TYPE_CHECKING:
    from hpcpar.data_parallel.parameters import Named
    from hpcpar.horovod.process_sets import ProcessSet
    from hpcpar.horovod.torch.gradients import ReductionOptions


def start_sparse(
    sparse: Sequence[Named], name: str, options: ReductionOptions, process_set: ProcessSet
) -> list[Callable[[], None]]:
    """Begin to reduce gradients of parameters that had sparse ones; returns what waits for each. Collective.

    One all-reduce tells first of what form each is in this step, also to ranks that have none of it.

    name   of the optimizer, the same on all ranks
    """
    if not sparse:
        return []
    forms = [_form(parameter) for _, parameter in sparse]
    # A sum, which a rank that has joined adds nothing to.
    told = mpi_ops.allreduce(torch.cat(forms), name=f"{name}.sparse", op=mpi_ops.Sum, process_set=process_set)
    waits = []
    for (of, parameter), ranks in zip(sparse, torch.split(told, [len(form) for form in forms]), strict=True):
        one = _One(f"{name}.{of}", parameter, options, process_set)
        found = ranks.nonzero().flatten().tolist()
        if 0 in found:
            waits.append(_set_by(one.start_dense(), parameter))
        elif found and options.sparse_as_dense:
            waits.append(_set_by(one.start_as_dense(found[-1]), parameter))
        elif found:
            waits.append(_set_by(one.start_sparse(found[-1]), parameter))
    return waits


@dataclass(frozen=True)
class _One:
    """The reduction of one parameter's gradient, under a name."""

    name: str
    parameter: Tensor
    options: ReductionOptions
    process_set: ProcessSet

    def start_sparse(self, sparse_dims: int) -> Callable[[], Tensor]:
        gradient = self.parameter.grad
        if gradient is None:
            gradient = torch.sparse_coo_tensor(
                torch.empty((sparse_dims, 0), dtype=torch.int64, device=self.parameter.device),
                self.parameter.new_empty((0, *self.parameter.shape[sparse_dims:])),
                self.parameter.shape,
                is_coalesced=True,
                check_invariants=False,
            )
        packed, context = self.options.compression.compress(gradient)
        op = mpi_ops.Average if self.options.op == "average" else mpi_ops.Sum
        wait = mpi_ops.sparse_allreduce_async(packed, self.name, op, self.process_set)
        return lambda: self.options.compression.decompress(wait(), context)

    def start_dense(self) -> Callable[[], Tensor]:
        own = self.parameter.grad
        gradient = torch.zeros_like(self.parameter) if own is None else own.to_dense()
        packed, context = self.options.compression.compress(gradient)
        op, before = self.options.scaled(packed, gradient.dtype, self.process_set.size() or 1)
        handle = mpi_ops.allreduce_async(
            packed,
            name=self.name,
            op=mpi_ops.Average if op == "average" else mpi_ops.Sum,
            prescale_factor=before,
            postscale_factor=self.options.predivide,
            process_set=self.process_set,
        )
        return lambda: self.options.compression.decompress(mpi_ops.synchronize(handle), context)

    def start_as_dense(self, sparse_dims: int) -> Callable[[], Tensor]:
        """Reduce a dense copy; the result has every row that a rank's has, also those that add up to 0."""
        own, shape = self.parameter.grad, self.parameter.shape[:sparse_dims]
        counting = torch.uint8 if (self.process_set.size() or 1) < 256 else torch.int32
        present = torch.zeros(shape, dtype=counting, device=self.parameter.device)
        if own is not None:
            present[tuple(own._indices())] = 1
        wait = self.start_dense()
        handle = mpi_ops.allreduce_async_(
            present, name=f"{self.name}.rows", op=mpi_ops.Sum, process_set=self.process_set
        )

        def finish() -> Tensor:
            total = wait()
            rows = mpi_ops.synchronize(handle).nonzero().t()
            return torch.sparse_coo_tensor(
                rows, total[tuple(rows)], total.shape, is_coalesced=True, check_invariants=False
            )

        return finish


def _form(parameter: Tensor) -> Tensor:
    """One-hot code of a gradient's form: 0 dense, k sparse in k dimensions; all zeros without gradient."""
    form = torch.zeros(parameter.dim() + 1, dtype=torch.int32, device="cpu")
    gradient = parameter.grad
    if gradient is not None:
        form[gradient.sparse_dim() if gradient.is_sparse else 0] = 1
    return form


def _set_by(wait: Callable[[], Tensor], parameter: Tensor) -> Callable[[], None]:
    def finish() -> None:
        parameter.grad = wait()

    return finish
