"""Gradients that travel narrower than they are: `Compression.none`, `.fp16` and `.bf16`.

A compressor is a class with two static methods; `DistributedOptimizer` and `allreduce` call `compress`
before and `decompress` after the reduction. Users subclass `Compressor` for their own.

What does not fit. float16 ends at 65504. A *finite* value beyond it becomes ±65504, not inf, for

- an inf in one gradient is an inf in the sum on every rank, and then NaN in all weights: a single spike
  ends the training. Held at the end of the range it acts as clipping by value would, with the right sign;
- an error would be raised on the rank with the spike alone, inside its backward pass, and leave the
  others waiting; and counting what does not fit makes a GPU's host wait for every gradient.

It does not go unsaid: the first time that it happens on a CPU tensor, where the count is cheap, a warning
tells how many values it was. True inf and NaN stay what they are, so loss scalers still see them.

The *sum* of values that fit may leave the range again: 2 ranks with 40000 each. `compress` does not know
the operation, so that is for the reduction to hold: `op=Average` is safe where the division by the number
of ranks comes before the sum (`prescale_factor=1/size`, or `gradient_predivide_factor=size` of
`DistributedOptimizer`): a mean of values that fit fits. With `op=Sum` an inf in the result means what it
says. `Compression.bf16` has float32's range and needs none of this care, for 8 bits of mantissa, not 11.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch


class Compressor:
    """The interface, and what it does unless a subclass says otherwise: nothing."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return a tensor to send in place of this one, and what `decompress` will need on this rank.

        It must have the same shape and dtype on all ranks, and sums of it must mean sums. Must not write
        to `tensor`.
        """
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the reduced tensor in the original's dtype."""
        return tensor


class NoneCompressor(Compressor):
    """Sends tensors as they are."""


class FP16Compressor(Compressor):
    """float32 and float64 as float16, held within ±65504; all other dtypes as they are."""

    narrow = torch.float16

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Narrow float32 and float64; of a sparse tensor the values, at the same indices. Differentiable."""
        if tensor.dtype not in (torch.float32, torch.float64):
            return tensor, tensor.dtype
        if not tensor.is_sparse:
            return _narrow(tensor, cls.narrow), tensor.dtype
        values = _narrow(tensor._values(), cls.narrow)
        coalesced = tensor.is_coalesced()
        narrow = torch.sparse_coo_tensor(
            tensor._indices(), values, tensor.shape, is_coalesced=coalesced, check_invariants=False
        )
        return narrow, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class BF16Compressor(FP16Compressor):
    """float32 and float64 as bfloat16, held within ±3.39e38; all other dtypes as they are."""

    narrow = torch.bfloat16


class Compression:
    """The compressors to choose from, by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def _narrow(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor in `dtype`; finite values stay finite."""
    limit = torch.finfo(dtype).max
    if tensor.device.type == "cpu":
        if tensor.numel() == 0:
            return tensor.to(dtype)
        low, high = torch.aminmax(tensor.detach())
        if low >= -limit and high <= limit:  # false where there is a NaN
            return tensor.to(dtype)
        _warn_of_clamping(tensor, dtype, limit)
    clamped = tensor.clamp(-limit, limit).to(dtype)  # NaN passes through clamp
    return torch.where(tensor.isinf(), tensor.to(dtype), clamped)


def _warn_of_clamping(tensor: torch.Tensor, dtype: torch.dtype, limit: float) -> None:
    """Say how many values do not fit, once for each dtype."""
    magnitude = tensor.detach().abs()
    beyond = int(((magnitude > limit) & magnitude.isfinite()).sum())
    if beyond and dtype not in _warned:
        _warned.add(dtype)
        warnings.warn(
            f"compression to {str(dtype).removeprefix('torch.')}: {beyond} of {tensor.numel()} values are "
            f"beyond ±{limit:g} and were held there; clip or scale the gradients, or use Compression.bf16 "
            f"(said once)",
            stacklevel=4,
        )


_warned: set[torch.dtype] = set()
