"""Context parallelism on GPUs, by torch's fused kernels: no worse than the one of one process.

One process: ranks are threads that share the GPU. With ranks of their own, which share it as well:
`hpcpar run -n 2 -- -m pytest --with-mpi -m "gpu and mpi" tests/context_parallel`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hpcpar.comm import Communicator, run_loopback
from hpcpar.context_parallel import ContextParallel, Mask, kernel
from hpcpar.context_parallel.block import AttentionBlock
from hpcpar.context_parallel.kernel import PLAIN, attend, attend_backward
from hpcpar.launch.binding import gpu_for

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

LENGTH = 391
DOCUMENTS = (93, 130, 1, 167)
MASKS = {
    "causal": Mask(LENGTH),
    "full": Mask(LENGTH, causal=False),
    "window": Mask(LENGTH, window=40),
    "window on both sides": Mask(LENGTH, causal=False, window=40),
    "documents": Mask(LENGTH, documents=DOCUMENTS),
    "documents and window": Mask(LENGTH, window=23, documents=DOCUMENTS),
    "full documents": Mask(LENGTH, causal=False, documents=DOCUMENTS),
}
ROUNDING = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}


def tensors(
    heads: int, key_heads: int, dtype: torch.dtype, *, length: int = LENGTH, size: int = 64
) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output; they lie by token, as in a model."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, length, count, size) for count in (heads, key_heads, key_heads, heads)]
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [tensor.transpose(1, 2).cuda() for tensor in made]


def one_process(whole: Sequence[Tensor], mask: Mask, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients by torch's attention."""
    queries, keys, values = (tensor.to(dtype).detach().requires_grad_() for tensor in whole[:3])
    served = queries.shape[1] // keys.shape[1]
    expanded = [tensor.repeat_interleave(served, 1) for tensor in (keys, values)]
    allowed = torch.zeros(mask.length, mask.length, dtype=torch.bool)
    for query in range(mask.length):
        allowed[query, slice(*mask.keys(query))] = True
    out = functional.scaled_dot_product_attention(queries, *expanded, attn_mask=allowed.cuda())
    return [out.detach(), *torch.autograd.grad(out, (queries, keys, values), whole[3].to(dtype))]


def own_part(cp: ContextParallel, whole: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Places, and output and gradients, of this rank's tokens."""
    # In this thread: ranks that are threads would otherwise share one for the GPU, and wait for each other.
    with torch.autograd.set_multithreading_enabled(False):
        inputs = [cp.shard(tensor, 2).clone().requires_grad_() for tensor in whole[:3]]
        out = cp.attention(*inputs)
        return cp.places(), [out.detach(), *torch.autograd.grad(out, inputs, cp.shard(whole[3], 2))]


def joined(parts: Sequence[tuple[Tensor, list[Tensor]]], whole: Sequence[Tensor]) -> list[Tensor]:
    found = [torch.full_like(tensor, torch.nan) for tensor in (whole[0], *whole[:3])]
    for places, of_rank in parts:
        for tensor, part in zip(found, of_rank, strict=True):
            tensor[:, :, places.cuda()] = part.cuda()
    return found


def errors(found: Sequence[Tensor], true: Sequence[Tensor]) -> list[float]:
    pairs = zip(found, true, strict=True)
    return [float((one.double() - other.double()).norm() / other.double().norm()) for one, other in pairs]


def require_no_worse(found: Sequence[Tensor], whole: Sequence[Tensor], mask: Mask) -> None:
    """Compare with float64, beside torch's kernel for the whole sequence."""
    dtype = whole[0].dtype
    true = one_process(whole, mask, torch.float64)
    alone = errors(one_process(whole, mask, dtype), true)
    for name, by, by_one in zip(("out", "dq", "dk", "dv"), errors(found, true), alone, strict=True):
        # A block's output is rounded before it is merged, and torch may take another kernel.
        assert by <= 1.5 * by_one + ROUNDING[dtype] / 2, (name, by, by_one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("size", "method", "key_heads"),
    [
        (1, "exchange", 2),
        (2, "exchange", 2),
        (3, "ring", 8),
        (3, "allgather", 1),
        (2, "ulysses", 2),
        (4, "ulysses+exchange", 2),
    ],
)
def test_output_and_gradients_are_those_of_one_process(
    mask: str, dtype: torch.dtype, size: int, method: str, key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "PLAIN", None)  # every block is to be computed by a fused kernel
    whole = tensors(8, key_heads, dtype)
    inner = 2 if "+" in method else None

    def own(comm: Communicator) -> tuple[Tensor, list[Tensor]]:
        cp = ContextParallel(comm, method, inner=inner)  # type: ignore[arg-type]
        with cp.using(MASKS[mask]):
            return own_part(cp, whole)

    require_no_worse(joined(run_loopback(size, own), whole), whole, MASKS[mask])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(4, 4, 20), (8, 2, 72), (6, 1, 128), (4, 2, 256)])
@pytest.mark.parametrize("form", ["full", "causal", "masked"])
def test_a_block_of_a_fused_kernel_is_that_of_the_plain_form(
    dtype: torch.dtype, heads: int, key_heads: int, size: int, form: str
) -> None:
    queries, keys, values, gradient = tensors(heads, key_heads, dtype, length=77, size=size)
    if form != "causal":
        keys, values = keys[:, :, :45], values[:, :, :45]
    allowed = torch.ones(77, keys.shape[2], dtype=torch.bool, device="cuda").tril(-3)
    block = AttentionBlock(size**-0.5, form == "causal", allowed if form == "masked" else None)
    keys_values = torch.stack((keys, values))
    out, lse = attend(queries, keys_values, block)
    plain_out, plain_lse = PLAIN.forward(queries, keys_values, block)
    merged = (plain_out / 2).to(dtype), torch.where(plain_lse.isinf(), 0.0, plain_lse + 0.7)
    inputs = gradient, queries, keys_values, merged, block
    # A row without keys has -inf in both.
    assert torch.equal(lse.isinf(), plain_lse.isinf())
    known = [torch.where(each.isinf(), 0.0, each) for each in (lse, plain_lse)]
    found = [known[0], out, *attend_backward(*inputs)]
    tolerance = 5e-6 if dtype == torch.float32 else 1e-2
    assert max(errors(found, [known[1], plain_out, *PLAIN.backward(*inputs)])) <= tolerance


@pytest.mark.mpi
@pytest.mark.parametrize("method", ["exchange", "ring", "allgather", "ulysses"])
def test_ranks_that_share_a_gpu_compute_what_one_process_does(world: Communicator, method: str) -> None:
    here = [rank for rank, node in enumerate(world.nodes) if node == world.nodes[world.rank]]
    torch.cuda.set_device(gpu_for(here.index(world.rank), torch.cuda.device_count(), len(here)))
    whole = tensors(12, 2, torch.bfloat16)
    cp = ContextParallel(world, method)  # type: ignore[arg-type]
    with cp.using(MASKS["documents"]):
        places, parts = own_part(cp, whole)
    of_ranks = world.allgather_object((places, [part.cpu() for part in parts]))
    require_no_worse(joined(of_ranks, whole), whole, MASKS["documents"])
