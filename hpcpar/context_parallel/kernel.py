"""Attention of a block of queries to a block of keys, with what is needed to merge blocks.

Shape letters: B batch, A heads, K key-value heads, N queries, M keys, D head size.

    out = softmax(Q Kᵀ scale) V of this block's keys alone      lse = log Σ exp(Q Kᵀ scale), [B, A, N]

    merged   lse' = log(exp lse₁ + exp lse₂)     out' = out₁ exp(lse₁ - lse') + out₂ exp(lse₂ - lse')

A block's gradients are right if backward gets the merged out and lse of all blocks: P = exp(Q Kᵀ scale -
lse'), and the sum of P · dP over all keys is dO · out' (Dao et al. 2022, FlashAttention, arXiv 2205.14135,
appendix B).

torch's fused kernels are used where they can be: for CPUs here, for CUDA in `fused_cuda.py`. A row whose keys
are all masked has lse 0 in the one for CPUs, which is made -inf. The plain form takes the rest: dropout of
attention weights, a scale of 0 or below, float64 on GPUs, old GPUs, AMD's, other devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hpcpar.context_parallel.block import AttentionBlock, AttentionGradients, KeysValues, wide
from hpcpar.context_parallel.fused_cuda import (
    efficient,
    efficient_backward,
    flash,
    flash_backward,
    fused_kernel,
)

_FOR_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FOR_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Kernel(NamedTuple):
    """Attention of a block and its backward, with the arguments of `attend` and of `attend_backward`."""

    forward: Callable[[Tensor, KeysValues, AttentionBlock], tuple[Tensor, Tensor]]
    backward: Callable[
        [Tensor, Tensor, KeysValues, tuple[Tensor, Tensor], AttentionBlock], AttentionGradients
    ]


def attend(queries: Tensor, keys_values: KeysValues, block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """Return out [B, A, N, D] in the queries' type, and lse [B, A, N] in float32, or float64 for such.

    queries [B, A, N, D], keys and values [B, K, M, D] with A a multiple of K; N and M at least 1
    """
    return kernel_for(queries, block).forward(queries, keys_values, block)


def attend_backward(
    gradient: Tensor,
    queries: Tensor,
    keys_values: KeysValues,
    merged: tuple[Tensor, Tensor],
    block: AttentionBlock,
) -> AttentionGradients:
    """Return the block's part of the gradients, given the out and lse merged over all blocks.

    gradient, out   [B, A, N, D], in the queries' type
    """
    return kernel_for(queries, block).backward(gradient, queries, keys_values, merged, block)


def kernel_for(queries: Tensor, block: AttentionBlock) -> Kernel:
    """Return the kernel that computes this block."""
    if block.weights is not None or block.scale <= 0:  # fused ones scale what a causal mask sets to -inf
        return PLAIN
    device = queries.device
    if device.type == "cpu":
        return FOR_CPU
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        name = fused_kernel(queries.dtype, queries.shape[-1], block.allowed is not None, capability)
        return FOR_CUDA[name] if name else PLAIN
    return PLAIN


def merge(out: Tensor, lse: Tensor, of_block: Tensor, lse_of_block: Tensor) -> None:
    """Merge a block into `out` and `lse`, in place; a row without keys in either counts as nothing."""
    merged = torch.logaddexp(lse, lse_of_block)
    known = merged != -torch.inf
    for tensor, weight in ((out, lse), (of_block, lse_of_block)):
        factor = torch.where(known, (weight - merged).exp(), 0.0).unsqueeze(-1)
        if tensor is out:
            out.mul_(factor)
        else:
            out.add_(tensor * factor)
    lse.copy_(merged)


def _for_cpu(queries: Tensor, keys_values: KeysValues, block: AttentionBlock) -> tuple[Tensor, Tensor]:
    mask = _additive(block, queries.dtype)
    out, lse = _FOR_CPU(queries, *keys_values, 0.0, block.causal, attn_mask=mask, scale=block.scale)
    if block.allowed is not None:
        lse.masked_fill_(~block.allowed.any(-1), -torch.inf)
    return out, lse


def _for_cpu_backward(
    gradient: Tensor,
    queries: Tensor,
    keys_values: KeysValues,
    merged: tuple[Tensor, Tensor],
    block: AttentionBlock,
) -> AttentionGradients:
    inputs = (gradient, queries, *keys_values, *merged)
    mask = _additive(block, queries.dtype)
    return AttentionGradients(
        *_FOR_CPU_BACKWARD(*inputs, 0.0, block.causal, attn_mask=mask, scale=block.scale)
    )


def _additive(block: AttentionBlock, dtype: torch.dtype) -> Tensor | None:
    if block.allowed is None:
        return None
    zeros = torch.zeros(block.allowed.shape, dtype=dtype, device=block.allowed.device)
    return zeros.masked_fill_(~block.allowed, -torch.inf)


def _scores(queries: Tensor, keys: Tensor, block: AttentionBlock) -> Tensor:
    """Return the scaled scores [B, K, A/K, N, M], -inf where queries and keys do not attend."""
    grouped = torch.unflatten(queries.to(wide(queries.dtype)), 1, (keys.shape[1], -1))
    scores = (grouped * block.scale) @ keys.to(grouped.dtype).unsqueeze(2).transpose(-1, -2)
    if block.causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(later, -torch.inf)
    if block.allowed is not None:
        scores.masked_fill_(~block.allowed, -torch.inf)
    return scores


def _plain(queries: Tensor, keys_values: KeysValues, block: AttentionBlock) -> tuple[Tensor, Tensor]:
    keys, values = keys_values
    scores = _scores(queries, keys, block)
    lse = scores.logsumexp(-1)
    # A row without keys: its scores are all -inf, from which -inf is not to be taken.
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp_()
    if block.weights is not None:
        weights *= torch.unflatten(block.weights, 1, (keys.shape[1], -1))
    out = weights @ values.to(weights.dtype).unsqueeze(2)
    return out.flatten(1, 2).to(queries.dtype), lse.flatten(1, 2)


def _plain_backward(
    gradient: Tensor,
    queries: Tensor,
    keys_values: KeysValues,
    merged: tuple[Tensor, Tensor],
    block: AttentionBlock,
) -> AttentionGradients:
    (keys, values), (out, lse) = keys_values, merged
    groups = (keys.shape[1], -1)
    probabilities = (_scores(queries, keys, block) - torch.unflatten(lse, 1, groups).unsqueeze(-1)).exp_()
    upstream = torch.unflatten(gradient.to(probabilities.dtype), 1, groups)
    of_weights = upstream @ values.to(probabilities.dtype).unsqueeze(2).transpose(-1, -2)
    weights = probabilities
    if block.weights is not None:
        multiplied = torch.unflatten(block.weights, 1, groups)
        of_weights, weights = of_weights * multiplied, probabilities * multiplied
    of_values = (weights.transpose(-1, -2) @ upstream).sum(2)
    mean = (upstream * torch.unflatten(out.to(upstream.dtype), 1, groups)).sum(-1, keepdim=True)
    of_scores = probabilities * (of_weights - mean) * block.scale
    of_queries = (of_scores @ keys.to(of_scores.dtype).unsqueeze(2)).flatten(1, 2)
    of_keys = (of_scores.transpose(-1, -2) @ torch.unflatten(queries.to(of_scores.dtype), 1, groups)).sum(2)
    return AttentionGradients(
        of_queries.to(queries.dtype), of_keys.to(keys.dtype), of_values.to(values.dtype)
    )


PLAIN = Kernel(_plain, _plain_backward)

FOR_CPU = Kernel(_for_cpu, _for_cpu_backward)

FOR_CUDA = {"flash": Kernel(flash, flash_backward), "efficient": Kernel(efficient, efficient_backward)}
