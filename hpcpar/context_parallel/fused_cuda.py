"""torch's fused attention kernels for CUDA, called with a block's mask and the merged output of all blocks.

Shape letters: B batch, A heads, K key-value heads, N queries, M keys, D head size.

                 types                      masks              heads K < A     log-sum-exp
    flash        float16, bfloat16          full, causal       as they are     [B, A, N]
    efficient    these and float32          any, as a bias     see `_by_group` [B, A, N up to 32's multiple]

The operators check little of what they assume. Each assumption is met here:

    rows of 16 bytes         heads whose size is no multiple of 8 are padded with zeros
    efficient's bias         its rows begin at multiples of 16 elements; a row without keys is not to be NaN
    efficient's backward     reads `out` as if it lay in memory as [B, N, A, D], and the log-sum-exp of rows
                             beyond N, which must be +inf
    flash's backward         reads the log-sum-exp as if it were contiguous

Their backward adds in no fixed order unless torch.use_deterministic_algorithms(True) is set.
source   Dao 2023, FlashAttention-2, arXiv 2307.08691; Rabe and Staats 2021, arXiv 2112.05682
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from hpcpar.context_parallel.block import AttentionBlock, AttentionGradients, KeysValues, wide

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
_EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention
_EFFICIENT_BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward

_LARGEST_FLASH_HEAD = 192
"""Some GPUs have no backward for more."""

_HEAD_MULTIPLE, _BIAS_MULTIPLE, _LSE_MULTIPLE = 8, 16, 32


def fused_kernel(
    dtype: torch.dtype, head_size: int, is_masked: bool, capability: tuple[int, int]
) -> Literal["flash", "efficient"] | None:
    """Return which kernel computes a block on a GPU of this compute capability; None: neither.

    is_masked   some queries do not see some keys, and it is not the causal triangle
    """
    is_ampere = capability >= (8, 0)
    if dtype in (torch.float16, torch.bfloat16) and is_ampere:
        return "efficient" if is_masked or head_size > _LARGEST_FLASH_HEAD else "flash"
    return "efficient" if dtype in (torch.float16, torch.float32) and capability >= (7, 0) else None


def flash(queries: Tensor, keys_values: KeysValues, block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """Return out and lse, as `attend` does."""
    size = queries.shape[-1]
    out, lse = _FLASH(*_aligned(queries, *keys_values), 0.0, block.causal, scale=block.scale)[:2]
    return out[..., :size], lse


def flash_backward(
    gradient: Tensor,
    queries: Tensor,
    keys_values: KeysValues,
    merged: tuple[Tensor, Tensor],
    block: AttentionBlock,
) -> AttentionGradients:
    """Return the block's part of the gradients, as `attend_backward` does."""
    (out, lse), size = merged, queries.shape[-1]
    lengths = queries.shape[2], keys_values[0].shape[2]
    of_inputs = _FLASH_BACKWARD(
        *_aligned(gradient, queries, *keys_values, out),
        lse.contiguous(),
        *(None, None, *lengths),  # one sequence in each row
        *(0.0, block.causal, lse, lse),  # a state of random numbers, which no dropout does not read
        scale=block.scale,
    )
    return AttentionGradients(*(tensor[..., :size] for tensor in of_inputs))


def efficient(queries: Tensor, keys_values: KeysValues, block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """Return out and lse, as `attend` does."""
    count, size = queries.shape[-2:]
    grouped, keys, values = _by_group(*_aligned(queries, *keys_values))
    bias = _bias(block, grouped)
    out, lse = _EFFICIENT(grouped, keys, values, bias, True, 0.0, block.causal, scale=block.scale)[:2]
    out, lse = out[..., :size].reshape(queries.shape), lse[..., :count].reshape(queries.shape[:-1])
    if block.allowed is not None:
        alone = ~block.allowed.any(-1)
        out.masked_fill_(alone.unsqueeze(-1), 0.0)
        lse.masked_fill_(alone, -torch.inf)
    return out, lse


def efficient_backward(
    gradient: Tensor,
    queries: Tensor,
    keys_values: KeysValues,
    merged: tuple[Tensor, Tensor],
    block: AttentionBlock,
) -> AttentionGradients:
    """Return the block's part of the gradients, as `attend_backward` does."""
    (out, lse), size = merged, queries.shape[-1]
    aligned = _aligned(queries, *keys_values, gradient, out)
    grouped, keys, values, *of_out = _by_group(*aligned)
    bias = _bias(block, grouped)
    gradient, out = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in of_out)
    lse = lse.reshape(grouped.shape[:-1])
    lse = functional.pad(lse, (0, -lse.shape[-1] % _LSE_MULTIPLE), value=torch.inf).contiguous()
    of_inputs = _EFFICIENT_BACKWARD(
        *(gradient, grouped, keys, values, bias, out, lse),
        *(lse, lse, 0.0),  # a state of random numbers, which no dropout does not read
        [True, True, True, False],
        block.causal,
        scale=block.scale,
    )
    of_queries, of_keys, of_values = (tensor[..., :size] for tensor in of_inputs[:3])
    shared = keys_values[0].shape
    if queries.shape[1] != shared[1]:  # one for each query head of a group
        of_keys, of_values = (
            tensor.sum(1, dtype=wide(tensor.dtype)).view(shared) for tensor in (of_keys, of_values)
        )
    return AttentionGradients(of_queries.reshape(queries.shape), of_keys, of_values)


def _aligned(*tensors: Tensor) -> list[Tensor]:
    """Return tensors [..., D] whose rows begin at multiples of 16 bytes, D a multiple of 8."""
    beyond = -tensors[0].shape[-1] % _HEAD_MULTIPLE
    if beyond:
        return [functional.pad(tensor, (0, beyond)) for tensor in tensors]
    return [
        tensor if _is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)
        for tensor in tensors
    ]


def _is_aligned(tensor: Tensor) -> bool:
    *others, last = tensor.stride()
    return last == 1 and not any(stride % _HEAD_MULTIPLE for stride in (*others, tensor.storage_offset()))


def _by_group(queries: Tensor, keys: Tensor, values: Tensor, *like_queries: Tensor) -> list[Tensor]:
    """Return the tensors as the kernel that knows no grouped heads takes them: K and V are not copied.

    [B, A, N, D] becomes [B·K, A/K, N, D]; keys and values [B·K, A/K, M, D], of which A/K are the same memory
    """
    heads, key_heads = queries.shape[1], keys.shape[1]
    if heads == key_heads:
        return [queries, keys, values, *like_queries]
    served = heads // key_heads
    by_query = [tensor.reshape(-1, served, *tensor.shape[2:]) for tensor in (queries, *like_queries)]
    by_key = [
        tensor.reshape(-1, 1, *tensor.shape[2:]).expand(-1, served, -1, -1) for tensor in (keys, values)
    ]
    return [by_query[0], *by_key, *by_query[1:]]


def _bias(block: AttentionBlock, queries: Tensor) -> Tensor | None:
    """Return what is added to the scores, [B, A, N, M] of one [N, M] in memory."""
    if block.allowed is None:
        return None
    rows, columns = block.allowed.shape
    wider = columns + -columns % _BIAS_MULTIPLE
    bias = torch.zeros(rows, wider, dtype=queries.dtype, device=queries.device)[:, :columns]
    # Half of the smallest number: the kernel multiplies it by log2(e), and adds a score.
    bias.masked_fill_(~block.allowed, torch.finfo(queries.dtype).min / 2)
    return bias.expand(*queries.shape[:2], -1, -1)
