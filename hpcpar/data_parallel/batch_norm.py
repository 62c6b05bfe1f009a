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

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hpcpar.autograd.own_functions import differentiated_once
from hpcpar.errors import OperationError
from hpcpar.uncompiled import uncompiled

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


class Batches(Protocol):
    """The ranks whose batches are put together."""

    def are_several(self) -> bool: ...

    def gathered(self, moments: torch.Tensor, name: str) -> torch.Tensor:
        """Every rank's [1, M], one below the other. Collective."""
        ...

    def summed(self, sums: torch.Tensor, name: str) -> torch.Tensor:
        """The sum over all ranks. Collective."""
        ...


class CommonBatchNorm(_BatchNorm):
    """BatchNorm over the batches of several ranks, which `batches` puts together."""

    batches: Batches

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.size(1) != self.num_features:
            raise ValueError(
                f"SyncBatchNorm({self.num_features}) needs an input of shape [B, {self.num_features}, ...], "
                f"not {list(input.shape)}"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        needs_batch = self.training or (self.running_mean is None and self.running_var is None)
        if not (needs_batch and self.batches.are_several()):
            return super().forward(input)
        return self._forward_together(input)

    @uncompiled
    def _forward_together(self, input: torch.Tensor) -> torch.Tensor:
        moments = self.batches.gathered(_moments(input), _name("forward", self))
        count, mean, deviations = _merged(moments)
        if count < 2:
            raise ValueError(
                f"SyncBatchNorm needs more than 1 value per channel where it normalizes by the batch; all "
                f"{len(moments)} ranks together have {count:g}, the input here is {list(input.shape)}"
            )
        self._track(mean, deviations / (count - 1))
        output: torch.Tensor = _Normalize.apply(
            input, self.weight, self.bias, mean, deviations / count, count, self
        )  # type: ignore[no-untyped-call]
        return output

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, unbiased_variance: torch.Tensor) -> None:
        """Move the running statistics as BatchNorm does."""
        if not (self.training and self.track_running_stats):
            return
        weight = self.momentum or 0.0
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                weight = 1.0 / float(self.num_batches_tracked)
        if self.running_mean is None or self.running_var is None:
            return
        self.running_mean.mul_(1 - weight).add_(weight * mean)
        self.running_var.mul_(1 - weight).add_(weight * unbiased_variance)


class SyncBatchNorm(CommonBatchNorm):
    """`torch.nn.BatchNorm1d`, `2d` and `3d` whose batch is that of all ranks of `dp_comm`.

        model = hpcpar.SyncBatchNorm.convert_sync_batchnorm(model, mesh.dp)

    Input [B, C] or [B, C, ...], on CPU or GPU, the same C and the same calls on every rank. Outputs,
    running statistics and gradients are those of one process's BatchNorm on the batches put together;
    gradients of weight and bias are this rank's part of the sum, to be reduced like all others: where losses
    are means and gradients averages, they are the serial ones.

    Forward and backward are collective where the batch is what normalizes: in training, and without running
    statistics in evaluation, too. If the input needs a gradient on one rank, then on all. Else, and on one
    rank, nothing is exchanged. A copy speaks on the same communicator; to save, take the state_dict().
    errors   ValueError on every rank when all batches together have fewer than 2 values per channel
    """

    def __init__(
        self,
        num_features: int,
        dp_comm: Communicator,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.batches = _OfCommunicator(dp_comm)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, dp_comm: Communicator) -> nn.Module:
        """Put such layers in the place of all BatchNorm in a model, with their parameters and statistics.

        Returns the model, or the new layer where the model is one. Parameters are the same objects.
        errors   OperationError for a subclass with a forward of its own, and for a lazy layer without sizes
        """
        return converted(module, lambda features, *options: cls(features, dp_comm, *options))


class _OfCommunicator:
    """The ranks of a communicator, which copies share and nobody can save."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def are_several(self) -> bool:
        return self._comm.size > 1

    def gathered(self, moments: torch.Tensor, name: str) -> torch.Tensor:
        rows: torch.Tensor = self._comm.allgather(moments.reshape(-1))
        return rows.reshape(self._comm.size, -1)

    def summed(self, sums: torch.Tensor, name: str) -> torch.Tensor:
        total: torch.Tensor = self._comm.allreduce(sums.clone())
        return total

    def __deepcopy__(self, memo: Any) -> _OfCommunicator:
        return self

    def __reduce__(self) -> Any:
        raise OperationError(
            "a model with hpcpar.SyncBatchNorm was to be saved as a whole, as by torch.save(model), which "
            "speaks on a communicator of this run; save its state_dict(), which is that of BatchNorm"
        )


def converted(module: nn.Module, make: Callable[..., CommonBatchNorm]) -> nn.Module:
    """The module, with what `make` gives for each BatchNorm's options in its place."""
    made: dict[nn.Module, nn.Module] = {}
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and is_local_batch_norm(child):
                if child not in made:
                    made[child] = _in_place_of(child, f"{type(parent).__name__}.{name}", make)
                setattr(parent, name, made[child])
    return _in_place_of(module, "the model", make) if is_local_batch_norm(module) else module


def is_local_batch_norm(module: nn.Module) -> bool:
    """True for a BatchNorm that knows this rank's batch alone, or is torch's own synchronized one."""
    return isinstance(module, _BatchNorm) and not isinstance(module, CommonBatchNorm)


def _in_place_of(module: Any, name: str, make: Callable[..., CommonBatchNorm]) -> CommonBatchNorm:
    if type(module).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        raise OperationError(
            f"{name} is a {type(module).__name__}, a BatchNorm with a forward of its own, which "
            "convert_sync_batchnorm would lose; build it from SyncBatchNorm instead"
        )
    if not module.num_features:  # torch.nn.LazyBatchNorm2d before its first call
        raise OperationError(
            f"{name} is a {type(module).__name__} that has no sizes yet; call the model once, then convert it"
        )
    layer = make(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
    layer._parameters.update(module._parameters)
    layer._buffers.update(module._buffers)
    return layer.train(module.training)


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
        layer: CommonBatchNorm,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(variance + layer.eps))
        ctx.count, ctx.layer = count, layer
        dtype = _computed_in(x)
        weight, bias = (None if t is None else t.to(dtype) for t in (weight, bias))
        return F.batch_norm(x, mean.to(dtype), variance.to(dtype), weight, bias, eps=layer.eps)

    @staticmethod
    @differentiated_once("SyncBatchNorm; take GroupNorm, or BatchNorm of each rank's batch")
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
            total = ctx.layer.batches.summed(sums, _name("backward", ctx.layer)) / ctx.count
            along_mean = total[0].to(dtype).view(channels)
            along_x = (total[1] * scale * scale).to(dtype).view(channels)
            gain = (scale if weight is None else scale * weight).to(dtype).view(channels)
            dx = ((g - along_mean - centred * along_x) * gain).to(x.dtype)
        return dx, dweight, dbias, None, None, None, None


def _moments(x: torch.Tensor) -> torch.Tensor:
    """Return count, means, sums of squared deviations of this rank's channels: [1, 1 + 2C], float64."""
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
    """Merge all ranks' moments: count, means [C], sums of squared deviations [C]."""
    counts, (means, deviations) = moments[:, :1], moments[:, 1:].chunk(2, dim=1)
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    return float(total), mean, (deviations + counts * (means - mean).square()).sum(0)


def _name(direction: str, layer: CommonBatchNorm) -> str:
    return f"sync_batch_norm.{direction}.{layer.num_features}"


def _computed_in(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _channel_sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum(dim=_all_but_channels(x))


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]
