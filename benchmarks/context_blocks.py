"""Blocks of context parallelism on a GPU: torch's fused kernels beside the plain form.

    python benchmarks/context_blocks.py [--tokens 4096] [--batch 2] [--heads 16] [--head-size 128]

Forward and backward of all blocks of one rank of two, causal, exchange, bfloat16, without communication.
Prints one line: milliseconds of both, median of 10, and how many times as fast the fused ones are.
"""

from __future__ import annotations

import argparse
from statistics import median

import torch
from torch import Tensor

from hpcpar.context_parallel.block import AttentionBlock
from hpcpar.context_parallel.context_plan import balanced
from hpcpar.context_parallel.kernel import PLAIN, Kernel, kernel_for
from hpcpar.context_parallel.mask import Mask


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("tokens", 4096), ("batch", 2), ("heads", 16), ("head-size", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    fused, plain = (median(times(options, is_fused)) for is_fused in (True, False))
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {options.batch} x {options.tokens} "
        f"tokens, {options.heads} heads of {options.head_size}, bfloat16, 1 rank of 2: fused {fused:.2f} ms, "
        f"plain {plain:.2f} ms, {plain / fused:.1f} times as fast"
    )


def times(options: argparse.Namespace, is_fused: bool) -> list[float]:
    """Return the milliseconds of ten repeats, after three that are not counted."""
    plan = balanced(Mask(options.tokens), 2)
    shape = options.batch, options.heads, plan.counts[1], options.head_size
    queries, gradient = torch.randn(2, *shape, device="cuda", dtype=torch.bfloat16)
    owners = [torch.randn(2, *shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    blocks = [
        (slice(*task.queries), owners[owner][..., slice(*task.keys), :], task.kind == "causal")
        for owner in range(2)
        for task in plan.tasks[1][owner]
    ]

    def step() -> None:
        for rows, keys, causal in blocks:
            block = AttentionBlock(options.head_size**-0.5, causal)
            kernel = kernel_for(queries, block) if is_fused else PLAIN
            both_ways(kernel, queries[:, :, rows], keys, gradient[:, :, rows], block)

    found = []
    for _ in range(13):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        stop.record()
        stop.synchronize()
        found.append(start.elapsed_time(stop))
    return found[3:]


def both_ways(kernel: Kernel, queries: Tensor, keys: Tensor, gradient: Tensor, block: AttentionBlock) -> None:
    merged = kernel.forward(queries, keys, block)
    kernel.backward(gradient, queries, keys, merged, block)


if __name__ == "__main__":
    main()
