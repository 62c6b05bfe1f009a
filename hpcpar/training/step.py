"""One optimizer step, and one look at held-out text. Shape letters: B batch, S sequence."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcpar.comm import Communicator, Trace
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.models import Llama
from hpcpar.partition import bounds
from hpcpar.training.timeline import span


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step measured.

    loss_share      this rank's share of the mean loss in nats: summed over dp ranks, it is the loss
    gradient_norm   of the whole averaged gradient before clipping, the same on every rank
    """

    loss_share: Tensor
    gradient_norm: Tensor


def train_step(
    model: Llama,
    optimizer: DistributedOptimizer,
    tokens: Tensor,
    targets: Tensor,
    *,
    microbatches: int,
    global_tokens: int,
    clip_norm: float,
    trace: Trace | None = None,
) -> StepResult:
    """Forward, backward, and the optimizer on the gradient of the whole global batch's mean loss.

    tokens, targets   [B, S], this dp rank's part of the global batch; B may differ between them
    microbatches      into how many parts they are cut, the same on every rank; a part may be empty
    global_tokens     in the global batch, over all dp ranks
    clip_norm         largest norm of the gradient; inf = no clipping

    Each microbatch's loss is a sum divided by `global_tokens`, so parts of unequal size on the ranks
    give the same gradient as one process with the whole batch.
    """
    ranks = optimizer.dp_comm.size
    optimizer.zero_grad(set_to_none=False)
    loss_share = torch.zeros((), dtype=torch.float64, device=tokens.device)
    for number, (start, stop) in enumerate(bounds(len(tokens), microbatches)):
        last = number == microbatches - 1
        with nullcontext() if last else optimizer.no_sync():
            with span(trace, "forward", microbatch=number):
                logits = model(tokens[start:stop])
                loss = model.loss(logits, targets[start:stop], reduction="sum") / global_tokens
            with span(trace, "backward", microbatch=number):
                # The optimizer averages over ranks where the global mean asks for a sum.
                optimizer.scale_loss(loss * ranks).backward()  # type: ignore[no-untyped-call]
        loss_share += loss.detach()
    with span(trace, "wait for gradients"):
        optimizer.synchronize()
    with span(trace, "optimizer"):
        norm = optimizer.clip_grad_norm_(clip_norm)
        optimizer.step()
    return StepResult(loss_share, norm)


@torch.no_grad()
def held_out_loss(model: Llama, batches: Iterable[tuple[Tensor, Tensor]], dp_comm: Communicator) -> float:
    """Mean loss in nats per token over all dp ranks' batches of (tokens, targets) [B, S]; collective.

    Each rank brings as many batches, of which some may be empty. Ranks that share layers have the same ones.
    """
    totals = torch.zeros(2, dtype=torch.float64)
    was_training = model.training
    model.eval()
    try:
        for tokens, targets in batches:
            totals[0] += model.loss(model(tokens), targets, reduction="sum").double().cpu()
            totals[1] += targets.numel()
    finally:
        model.train(was_training)
    dp_comm.allreduce(totals)
    return float(totals[0] / totals[1])
