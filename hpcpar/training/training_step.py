"""One optimizer step, and the held-out loss. Shape letters: B batch, S whole sequence.

A `Worker` computes the sum of all microbatches' gradients: this rank with the whole model, or the ranks of a
pipeline. The rest of a step is the same for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hpcpar.comm import Communicator, Trace
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.data_parallel.nonfinite import NonfiniteGradients
from hpcpar.models import Llama
from hpcpar.models.balancing import Balancing, LayerBalance
from hpcpar.partition import bounds
from hpcpar.training.sequences import Sequences
from hpcpar.training.step_timeline import span


@dataclass(frozen=True, slots=True)
class StepResult:
    """Loss and gradient norm of a step.

    loss_share      this rank's share of the mean loss in nats; its sum over dp and pp ranks is the loss
    gradient_norm   of the whole averaged gradient before clipping, the same on every rank
    balance         of the experts of this rank's layers, by layer; empty without experts
    skipped         why no rank has taken the step; None: all have
    """

    loss_share: Tensor
    gradient_norm: Tensor
    balance: Mapping[int, LayerBalance]
    skipped: NonfiniteGradients | None


class Worker(Protocol):
    """Computes losses and gradients of a dp rank's sequences; collective over the model's ranks."""

    @property
    def optimizer(self) -> DistributedOptimizer:
        """Optimizer of this rank's parameters."""
        ...

    @property
    def balancing(self) -> Balancing | None:
        """Balances the loads of the model's experts; None: it has none."""
        ...

    def accumulate(self, tokens: Tensor, targets: Tensor, trace: Trace | None) -> Tensor:
        """Add the gradients of the global batch's mean loss; return this rank's share of it, in float64.

        tokens, targets   [B, S], this dp rank's part of the global batch; B may differ between them
        """
        ...

    def summed_losses(self, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, int]:
        """Return this rank's share of the losses' sum over (tokens, targets) [B, S], and of tokens."""
        ...


@dataclass(frozen=True)
class WholeModel:
    """A `Worker` with all layers on this rank, or on the tp ranks that share each layer.

    microbatches    number of parts of a batch, the same on every rank; a part may be empty
    sequences       the documents in a batch, and its targets

    Each microbatch's loss is a sum divided by the number of targets of the global batch, so parts of unequal
    size on the ranks give the same gradient as one process with the whole batch.
    """

    model: Llama
    optimizer: DistributedOptimizer
    microbatches: int
    sequences: Sequences

    @property
    def balancing(self) -> Balancing | None:
        return self.model.balancing

    def accumulate(self, tokens: Tensor, targets: Tensor, trace: Trace | None) -> Tensor:
        """Run one microbatch after another; average gradients during the last one's backward."""
        optimizer, ranks = self.optimizer, self.optimizer.dp_comm.size
        loss_share = torch.zeros((), dtype=torch.float64, device=tokens.device)
        in_all = self.sequences.global_targets(targets, optimizer.dp_comm)
        for number, (start, stop) in enumerate(bounds(len(tokens), self.microbatches)):
            last = number == self.microbatches - 1
            masked = self.sequences.using(tokens[start:stop])
            with nullcontext() if last else optimizer.no_sync(), masked:
                with span(trace, "forward", microbatch=number):
                    logits = self.model(tokens[start:stop])
                    loss = self.model.loss(logits, targets[start:stop], reduction="sum") / in_all
                with span(trace, "backward", microbatch=number):
                    # The optimizer averages over ranks where the global mean asks for a sum.
                    optimizer.scale_loss(loss * ranks).backward()  # type: ignore[no-untyped-call]
            loss_share += loss.detach()
        return loss_share

    @torch.no_grad()
    def summed_losses(self, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, int]:
        """Evaluate one batch after another, without gradients."""
        total, tokens_seen = 0.0, 0
        was_training = self.model.training
        self.model.eval()
        try:
            for tokens, targets in batches:
                with self.sequences.using(tokens):
                    total += self.model.loss(self.model(tokens), targets, reduction="sum").item()
                    tokens_seen += self.sequences.own_targets(targets)
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
    """Step the optimizer on the gradient of the global batch's mean loss.

    tokens, targets   [B, S], this dp rank's part of the global batch; B may differ between them
    clip_norm         largest norm of the gradient; inf = no clipping
    errors            DivergenceError: of the optimizer's `step`
    """
    optimizer = worker.optimizer
    optimizer.zero_grad(set_to_none=False)
    if worker.balancing is not None:
        worker.balancing.gradient_scale = optimizer.dp_comm.size * optimizer.scaler.scale
    loss_share = worker.accumulate(tokens, targets, trace)
    with span(trace, "wait for gradients"):
        optimizer.synchronize()
    with span(trace, "optimizer"):
        norm = optimizer.clip_grad_norm_(clip_norm)
        optimizer.step()
    skipped, balance = optimizer.last_skip, {}
    if worker.balancing is not None:
        balance = worker.balancing.finish_step(is_taken=skipped is None)
    return StepResult(loss_share, norm, balance, skipped)


def held_out_loss(
    worker: Worker, batches: Iterable[tuple[Tensor, Tensor]], losses_comm: Communicator
) -> float:
    """Return the mean loss in nats per token over all dp ranks' (tokens, targets) [B, S]. Collective.

    losses_comm   over all ranks with a share of the losses

    Every rank brings the same number of batches, some of them perhaps empty. Ranks that share layers bring
    the same batches.
    """
    totals = torch.tensor(worker.summed_losses(batches), dtype=torch.float64)
    losses_comm.allreduce(totals)
    return float(totals[0] / totals[1])
