"""The calls of CUDA's kernels: with stand-ins that demand, and give, what the operators do; on GPUs below.

The stand-ins compute by the plain form, but read memory as the operators do: the log-sum-exp as contiguous,
`out` as [B, N, A, D], whatever their strides say.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hpcpar.context_parallel import fused_cuda, kernel
from hpcpar.context_parallel.block import AttentionBlock
from hpcpar.context_parallel.fused_cuda import fused_kernel
from hpcpar.context_parallel.kernel import FOR_CUDA, PLAIN, Kernel
from tests.context_parallel.test_context_parallel import MASKS, error, parallel, serial, tensors


def require_aligned(*inputs: Tensor) -> None:
    for tensor in inputs:
        assert tensor.shape[-1] % 8 == 0
        assert tensor.stride(-1) == 1
        assert not any(stride % 8 for stride in (*tensor.stride()[:-1], tensor.storage_offset()))


def by_token(tensor: Tensor) -> Tensor:
    """A copy that lies in memory as [B, N, A, D]."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def read_by_token(tensor: Tensor) -> Tensor:
    """The tensor that a kernel sees which takes it to lie in memory as [B, N, A, D]."""
    _, heads, count, size = tensor.shape
    return tensor.as_strided(tensor.shape, (count * heads * size, size, heads * size, 1))


def flash(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, *, scale: float) -> Any:
    require_aligned(q, k, v)
    assert dropout == 0.0
    out, lse = PLAIN.forward(q, torch.stack((k, v)), AttentionBlock(scale, causal))
    return by_token(out), lse, None, None, q.shape[2], k.shape[2], None, None, None


def flash_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: float
) -> Any:
    require_aligned(gradient, q, k, v, out)
    assert rest[:5] == (None, None, q.shape[2], k.shape[2], 0.0)
    lse = lse.as_strided(q.shape[:-1], (q.shape[1] * q.shape[2], q.shape[2], 1))
    return PLAIN.backward(gradient, q, torch.stack((k, v)), (out, lse), AttentionBlock(scale, rest[5]))


def allowed_by(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    if bias is None:
        return None
    assert bias.shape == (*q.shape[:3], k.shape[2])
    assert bias.dtype == q.dtype
    assert bias.stride(-1) == 1
    assert bias.stride(-2) % 16 == 0
    assert torch.isfinite(bias * 1.4427).all(), "the kernel multiplies it by log2(e)"
    return bias[0, 0] == 0


def efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    with_lse: bool,
    dropout: float,
    causal: bool,
    **rest: Any,
) -> Any:
    require_aligned(q, k, v)
    assert q.shape[1] == k.shape[1] == v.shape[1]
    assert with_lse
    assert dropout == 0.0
    allowed = allowed_by(bias, q, k)
    out, lse = PLAIN.forward(q, torch.stack((k, v)), AttentionBlock(rest["scale"], causal, allowed))
    if allowed is not None:
        out.masked_fill_(~allowed.any(-1)[:, None], torch.nan)
    return by_token(out), torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf), None, None


def efficient_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
    scale: float,
) -> Any:
    require_aligned(gradient, q, k, v, out)
    assert rest[2:4] == (0.0, [True, True, True, False])
    count = q.shape[2]
    assert lse.is_contiguous()
    assert lse.shape[-1] == -(-count // 32) * 32
    assert (lse[..., count:] == torch.inf).all()
    block = AttentionBlock(scale, rest[4], allowed_by(bias, q, k))
    of_inputs = PLAIN.backward(
        gradient, q, torch.stack((k, v)), (read_by_token(out), lse[..., :count]), block
    )
    return *of_inputs, None


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU of compute capability 8.0 would choose for bfloat16, computed by stand-ins on the CPU."""
    for stand_in in (flash, flash_backward, efficient, efficient_backward):
        monkeypatch.setattr(fused_cuda, f"_{stand_in.__name__.upper()}", stand_in)

    def chosen(block: AttentionBlock) -> Kernel:
        name = fused_kernel(torch.bfloat16, 16, block.allowed is not None, (8, 0))
        assert name
        return FOR_CUDA[name]

    monkeypatch.setattr(
        kernel,
        "FOR_CPU",
        Kernel(
            lambda queries, keys, block: chosen(block).forward(queries, keys, block),
            lambda *inputs: chosen(inputs[-1]).backward(*inputs),
        ),
    )


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("size", "method", "heads", "key_heads"),
    [(1, "exchange", 4, 2), (3, "exchange", 8, 8), (3, "ring", 8, 1), (4, "allgather", 8, 2)],
)
def test_blocks_of_both_kernels_make_the_attention_of_one_process(
    mask: str, size: int, method: str, heads: int, key_heads: int
) -> None:
    whole = tensors(heads, key_heads, torch.float64)
    assert error(parallel(size, whole, MASKS[mask], method), serial(whole, MASKS[mask])) <= 5e-15


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", ["flash", "efficient"])
@pytest.mark.parametrize("size", [12, 16])
@pytest.mark.parametrize("causal", [True, False])
def test_heads_of_any_size_and_memory_in_any_order_are_brought_into_form(
    name: str, size: int, causal: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(3, 33, 6, 2 * size, generator=generator, dtype=torch.float64)
    # Every other element, of tensors that lie by token.
    queries, gradient = (heads[..., ::2].transpose(1, 2) + number for number in (0, 1))
    keys = heads[:, :, :2, 1::2].transpose(1, 2).expand(2, -1, -1, -1, -1)
    block = AttentionBlock(0.3, causal)
    out, lse = PLAIN.forward(queries, keys, block)
    merged = out + 1, (lse + 1).transpose(0, 1).contiguous().transpose(0, 1)
    found = [*FOR_CUDA[name].forward(queries, keys, block)]
    found += FOR_CUDA[name].backward(
        gradient.sum(-1, keepdim=True).expand_as(out), queries, keys, merged, block
    )
    true = [out, lse]
    true += PLAIN.backward(gradient.sum(-1, keepdim=True).expand_as(out), queries, keys, merged, block)
    assert error(found, true) <= 1e-15


@pytest.mark.usefixtures("stand_ins")
def test_a_row_without_keys_counts_as_nothing() -> None:
    queries, keys, values, _ = tensors(4, 2, torch.float32, length=20)
    allowed = torch.ones(20, 20, dtype=torch.bool).tril(-1)
    out, lse = fused_cuda.efficient(
        queries, torch.stack((keys, values)), AttentionBlock(1.0, allowed=allowed)
    )
    assert (out[:, :, 0] == 0).all()
    assert (lse[:, :, 0] == -torch.inf).all()
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse[:, :, 1:]).all()


@pytest.mark.parametrize(
    ("dtype", "head_size", "is_masked", "capability", "name"),
    [
        (torch.bfloat16, 128, False, (9, 0), "flash"),
        (torch.bfloat16, 128, True, (9, 0), "efficient"),
        (torch.bfloat16, 256, False, (9, 0), "efficient"),
        (torch.bfloat16, 128, False, (7, 5), None),
        (torch.float16, 128, False, (7, 5), "efficient"),
        (torch.float32, 128, False, (9, 0), "efficient"),
        (torch.float32, 128, False, (6, 1), None),
        (torch.float64, 128, False, (9, 0), None),
    ],
)
def test_the_kernel_is_one_that_the_gpu_has(
    dtype: torch.dtype, head_size: int, is_masked: bool, capability: tuple[int, int], name: str | None
) -> None:
    assert fused_kernel(dtype, head_size, is_masked, capability) == name


@pytest.mark.parametrize("name", ["flash", "efficient"])
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(8, 8, 16), (8, 2, 20), (4, 2, 16)])
def test_the_operators_of_this_torch_take_the_arguments_and_give_the_shapes(
    name: str, heads: int, key_heads: int, size: int
) -> None:
    queries = torch.empty(2, heads, 33, size, device="meta", dtype=torch.bfloat16)
    keys = torch.empty(2, 2, key_heads, 40, size, device="meta", dtype=torch.bfloat16)
    allowed = torch.ones(33, 40, dtype=torch.bool, device="meta") if name == "efficient" else None
    block = AttentionBlock(0.1, allowed=allowed)
    out, lse = FOR_CUDA[name].forward(queries, keys, block)
    assert (out.shape, out.dtype) == (queries.shape, queries.dtype)
    assert (lse.shape, lse.dtype) == (queries.shape[:-1], torch.float32)
    gradients = FOR_CUDA[name].backward(out, queries, keys, (out, lse), block)
    assert [tensor.shape for tensor in gradients] == [queries.shape, keys.shape[1:], keys.shape[1:]]
