"""Batch normalisation over the batches of all ranks together, as if they were one.

Forward    every rank makes the mean m_r and the sum of squared deviations M_r of its n_r values per channel;
           one all-gather of (n_r, m_r, M_r); then, with N = Σ n_r,

               m = Σ n_r m_r / N        M = Σ M_r + n_r (m_r - m)²        variance = M / N

           This is the pairwise update of Chan, Golub, LeVeque (1979) for many parts. The sums Σ x and
           Σ x², which a single all-reduce could add, lose all digits of the variance where the mean is
           large beside it.
Backward   one all-reduce of Σ dy and Σ dy (x - m) per channel.

Both exchange 64-bit values, 2C + 1 and 2C for C channels, so that counts are exact and the order of ranks
does not show. Batches may differ in size between ranks, and some may be empty.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from hpcpar.horovod.process_sets import ProcessSet, global_process_set
from hpcpar.horovod.torch.mpi_ops import Sum, allgather, allreduce
from hpcpar.uncompiled import uncompiled


class SyncBatchNorm(_BatchNorm):
    """`torch.nn.BatchNorm1d`, `2d` and `3d` whose batch is that of all ranks of `process_set`.

    Input [B, C] or [B, C, ...], on CPU or GPU, the same C and the same calls on every rank. Outputs,
    running statistics and gradients are those of one process's BatchNorm on the batches put together;
    gradients of weight and bias are this rank's part of the sum, to be reduced like all others.

    In evaluation mode, on one rank, and on ranks outside of the process set nothing is exchanged.
    Forward and backward are collective in training: if the input needs a gradient on one rank, then on all.
    Raises ValueError on every rank when all batches together have fewer than 2 values per channel.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self._members = _Members(process_set)

    @property
    def process_set(self) -> ProcessSet:
        """The ranks whose batches are put together."""
        return self._members.process_set

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.size(1) != self.num_features:
            raise ValueError(
                f"SyncBatchNorm({self.num_features}) needs an input of shape [B, {self.num_features}, ...], "
                f"not {list(input.shape)}"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        if not (self.training and self._is_shared()):
            return super().forward(input)
        return self._forward_together(input)

    @uncompiled
    def _forward_together(self, input: torch.Tensor) -> torch.Tensor:
        count, mean, deviations = _merged(
            allgather(_moments(input), _name("forward", self), self.process_set)
        )
        if count < 2:
            raise ValueError(
                f"SyncBatchNorm needs more than 1 value per channel when training; all "
                f"{self.process_set.size()} ranks together have {count:g}, "
                f"the input here is {list(input.shape)}"
            )
        self._track(mean, deviations / (count - 1))
        output: torch.Tensor = _Normalize.apply(
            input, self.weight, self.bias, mean, deviations / count, count, self
        )  # type: ignore[no-untyped-call]
        return output

    def _is_shared(self) -> bool:
        """Whether there is another rank to put the batch together with."""
        included = self.process_set.included()
        if included is None:
            raise ValueError(
                "SyncBatchNorm in training mode before hvd.init(), or on a process set that is not "
                "registered: it has to know the ranks"
            )
        return included and (self.process_set.size() or 1) > 1

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, unbiased_variance: torch.Tensor) -> None:
        """Move the running statistics as BatchNorm does."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        weight = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.mul_(1 - weight).add_(weight * mean)
        self.running_var.mul_(1 - weight).add_(weight * unbiased_variance)


class _Members:
    """Keeps a process set out of copies and pickles of the layer: it holds what is this process's own."""

    def __init__(self, process_set: ProcessSet) -> None:
        self.process_set = process_set

    def __deepcopy__(self, memo: Any) -> _Members:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        ranks = None if self.process_set is global_process_set else self.process_set.ranks
        return _members_of, (ranks,)


def _members_of(ranks: list[int] | None) -> _Members:
    """All ranks; or a process set that has to be registered again where it is read."""
    return _Members(global_process_set if ranks is None else ProcessSet(ranks))


class _Normalize(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias, with the mean and variance of all ranks' x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        count: float,
        layer: SyncBatchNorm,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(variance + layer.eps))
        ctx.count, ctx.layer = count, layer
        dtype = _computed_in(x)
        weight, bias = (None if t is None else t.to(dtype) for t in (weight, bias))
        return F.batch_norm(x, mean.to(dtype), variance.to(dtype), weight, bias, eps=layer.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        channels = [1, -1] + [1] * (x.dim() - 2)
        dtype = _computed_in(x)
        g = dy.to(dtype)
        centred = x.to(dtype) - mean.to(dtype).view(channels)
        sums = torch.stack([_channel_sum(g), _channel_sum(g * centred)]).double()
        dx = dweight = dbias = None
        if weight is not None:
            dweight, dbias = (sums[1] * scale).to(weight.dtype), sums[0].to(weight.dtype)
        if ctx.needs_input_grad[0]:
            name, members = _name("backward", ctx.layer), ctx.layer.process_set
            total = allreduce(sums, name=name, op=Sum, process_set=members) / ctx.count
            along_mean = total[0].to(dtype).view(channels)
            along_x = (total[1] * scale * scale).to(dtype).view(channels)
            gain = (scale if weight is None else scale * weight).to(dtype).view(channels)
            dx = ((g - along_mean - centred * along_x) * gain).to(x.dtype)
        return dx, dweight, dbias, None, None, None, None


def _moments(x: torch.Tensor) -> torch.Tensor:
    """Of this rank's values, by channel: count, means, sums of squared deviations. [1, 1 + 2C], 64-bit."""
    x = x.detach().to(_computed_in(x))
    channels = x.size(1)
    count = x.numel() // channels
    moments = torch.zeros(1, 1 + 2 * channels, dtype=torch.float64, device=x.device)
    if count > 0:
        variance, mean = torch.var_mean(x, dim=_all_but_channels(x), correction=0)
        moments[0, 0] = count
        moments[0, 1 : 1 + channels] = mean
        moments[0, 1 + channels :] = variance.double() * count
    return moments


def _merged(moments: torch.Tensor) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Of all ranks' values together: count, means [C], sums of squared deviations [C]."""
    counts, (means, deviations) = moments[:, :1], moments[:, 1:].chunk(2, dim=1)
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    return float(total), mean, (deviations + counts * (means - mean).square()).sum(0)


def _name(direction: str, layer: SyncBatchNorm) -> str:
    return f"sync_batch_norm.{direction}.{layer.num_features}"


def _computed_in(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _channel_sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum(dim=_all_but_channels(x))


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]
