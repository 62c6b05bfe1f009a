"""One optimizer step, and one look at held-out text. Shape letters: B batch, S sequence.

Who computes is a `Worker`: this rank with the whole model, or with the ranks of a pipeline. It leaves the sum
of all microbatches' gradients; what follows is the same for both.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

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

    loss_share      this rank's share of the mean loss in nats: summed over dp and pp ranks, it is the loss
    gradient_norm   of the whole averaged gradient before clipping, the same on every rank
    """

    loss_share: Tensor
    gradient_norm: Tensor


class Worker(Protocol):
    """What computes losses and gradients of a dp rank's sequences; collective over those that share it."""

    @property
    def optimizer(self) -> DistributedOptimizer:
        """Of the parameters that it has."""
        ...

    def accumulate(self, tokens: Tensor, targets: Tensor, trace: Trace | None) -> Tensor:
        """Add the gradients of the global batch's mean loss; this rank's share of that, in float64.

        tokens, targets   [B, S], this dp rank's part of the global batch; B may differ between them
        """
        ...

    def summed_losses(self, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, int]:
        """Of (tokens, targets) [B, S] this rank's share of the losses' sum, and of tokens; no gradients."""
        ...


@dataclass(frozen=True)
class WholeModel:
    """All layers on this rank, or on those that share each of them, as a `Worker`.

    microbatches    into how many parts a batch is cut, the same on every rank; a part may be empty
    global_tokens   in the global batch, over all dp ranks

    Each microbatch's loss is a sum divided by `global_tokens`, so parts of unequal size on the ranks
    give the same gradient as one process with the whole batch.
    """

    model: Llama
    optimizer: DistributedOptimizer
    microbatches: int
    global_tokens: int

    def accumulate(self, tokens: Tensor, targets: Tensor, trace: Trace | None) -> Tensor:
        """One microbatch after another; averages travel while the last one's backward runs."""
        optimizer, ranks = self.optimizer, self.optimizer.dp_comm.size
        loss_share = torch.zeros((), dtype=torch.float64, device=tokens.device)
        for number, (start, stop) in enumerate(bounds(len(tokens), self.microbatches)):
            last = number == self.microbatches - 1
            with nullcontext() if last else optimizer.no_sync():
                with span(trace, "forward", microbatch=number):
                    logits = self.model(tokens[start:stop])
                    loss = self.model.loss(logits, targets[start:stop], reduction="sum") / self.global_tokens
                with span(trace, "backward", microbatch=number):
                    # The optimizer averages over ranks where the global mean asks for a sum.
                    optimizer.scale_loss(loss * ranks).backward()  # type: ignore[no-untyped-call]
            loss_share += loss.detach()
        return loss_share

    @torch.no_grad()
    def summed_losses(self, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, int]:
        """One batch after another."""
        total, tokens_seen = 0.0, 0
        was_training = self.model.training
        self.model.eval()
        try:
            for tokens, targets in batches:
                total += self.model.loss(self.model(tokens), targets, reduction="sum").item()
                tokens_seen += targets.numel()
        finally:
            self.model.train(was_training)
        return total, tokens_seen


def train_step(
    worker: Worker,
    tokens: Tensor,
    targets: Tensor,
    *,
    clip_norm: float,
    trace: Trace | None = None,
) -> StepResult:
    """Forward, backward, and the optimizer on the gradient of the whole global batch's mean loss.

    tokens, targets   [B, S], this dp rank's part of the global batch; B may differ between them
    clip_norm         largest norm of the gradient; inf = no clipping
    """
    optimizer = worker.optimizer
    optimizer.zero_grad(set_to_none=False)
    loss_share = worker.accumulate(tokens, targets, trace)
    with span(trace, "wait for gradients"):
        optimizer.synchronize()
    with span(trace, "optimizer"):
        norm = optimizer.clip_grad_norm_(clip_norm)
        optimizer.step()
    return StepResult(loss_share, norm)


def held_out_loss(
    worker: Worker, batches: Iterable[tuple[Tensor, Tensor]], losses_comm: Communicator
) -> float:
    """Mean loss in nats per token over all dp ranks' batches of (tokens, targets) [B, S]; collective.

    losses_comm   over all that have a share of the losses

    Each rank brings as many batches, of which some may be empty. Ranks that share layers have the same ones.
    """
    totals = torch.tensor(worker.summed_losses(batches), dtype=torch.float64)
    losses_comm.allreduce(totals)
    return float(totals[0] / totals[1])
