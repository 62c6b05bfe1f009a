"""Loads of a model's experts in a training step, the losses that balance them, and biases.

Shape letters: T tokens on this rank, E experts, k experts of a token, N sequences.

    each microbatch    count, and attach the losses                         in every layer's forward
    each step          balancing.finish_step()                              after the optimizer's

Counts are summed over ranks where a loss or a bias needs those of all; all else is of this rank's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from hpcpar.autograd.dim_collectives import summed
from hpcpar.autograd.recompute import first_time
from hpcpar.comm import Communicator
from hpcpar.expert_parallel.expert_loads import Balance, updated_bias
from hpcpar.expert_parallel.losses import attach, balance_loss, counts_of, z_loss
from hpcpar.expert_parallel.routing import Routing
from hpcpar.planner.experts import Experts
from hpcpar.uncompiled import uncompiled


class Biased(Protocol):
    """A router with or without biases [E]."""

    e_score_correction_bias: Tensor | None


@dataclass(frozen=True)
class LayerBalance:
    """Balance of a layer's experts in a step, and its auxiliary losses, with their coefficients."""

    loads: Balance
    balance_loss: float
    z_loss: float


class _Layer:
    """Sums of a layer over a step's microbatches so far, on this rank."""

    def __init__(self, router: Biased, experts: int) -> None:
        self.router, self.experts = router, experts
        self.reset()

    def reset(self) -> None:
        # On the CPU also where the model is built on the meta device.
        self.counts = torch.zeros(self.experts, dtype=torch.int64, device="cpu")
        self.global_counts = torch.zeros_like(self.counts)
        self.dropped = torch.zeros((), dtype=torch.int64, device="cpu")
        self.losses = torch.zeros(2, dtype=torch.float64, device="cpu")


class Balancing:
    """Balances the experts of all layers of a rank: one object for its whole model.

    sizes             the model's experts
    comm              ranks with other tokens of the global batch: those of dp x cp, and of tp where they
                      share out the tokens (`ExpertTokens.are_shared_out`); None: this rank has all of them
    sequence_comm     ranks with other tokens of the same sequences: those of cp, and of tp likewise
    tokens_per_step   of the global batch, on all ranks and in all microbatches: a microbatch counts by its
                      share of them. None: each forward is a batch by itself
    gradient_scale    by how much the model's loss, a mean over the global batch, is multiplied before
                      `backward`: these losses are as well

    expert_loads      rows that came to this rank's experts over those of its tokens, on average over its
                      layers, in each forward of the last step

    Set tokens_per_step and gradient_scale before the forwards of a step. Losses and counts are of forwards in
    training with gradients alone, once for each also where activations are recomputed. With losses that take
    counts of other ranks, a layer's forward is collective over these.
    """

    def __init__(
        self,
        sizes: Experts,
        comm: Communicator | None = None,
        sequence_comm: Communicator | None = None,
        *,
        tokens_per_step: int | None = None,
    ) -> None:
        self.sizes = sizes
        self.comm, self.sequence_comm = comm, sequence_comm
        self.tokens_per_step = tokens_per_step
        self.gradient_scale: float | Tensor = 1.0
        self.expert_loads: list[float] = []
        self._forwards: list[float] = []
        self._loads: dict[int, float] = {}
        self._layers: dict[int, _Layer] = {}

    def fresh(self) -> Balancing:
        """Return one without layers, for a trial of the model that is not to count."""
        return Balancing(self.sizes, self.comm, self.sequence_comm, tokens_per_step=self.tokens_per_step)

    def add_layer(self, number: int, router: Biased) -> None:
        """Balance the experts of the model's layer `number`, too."""
        self._layers[number] = _Layer(router, self.sizes.count)

    @uncompiled
    def applied(
        self,
        number: int,
        routing: Routing,
        logits: Tensor,
        sequence_of: Tensor | None,
        sequences: int,
        kept: Tensor | None = None,
    ) -> Routing:
        """Count a forward's choices, and attach the layer's losses to its weights.

        logits        [T, E]
        sequence_of   [T] int64, number of each token's sequence, of `sequences`; None where there is no
                      balance loss of sequences
        kept          [T, k], False where an expert dropped the token
        """
        layer, sizes = self._layers[number], self.sizes
        count = partial(self._count, layer, routing.experts, sequence_of, sequences, kept)
        counts, tokens = first_time(count)
        zero = logits.new_zeros(())
        balance = z = zero
        if sizes.balance_loss:
            balance = sizes.balance_loss * balance_loss(routing, sizes, counts, tokens, sequence_of)
        if sizes.z_loss:
            z = sizes.z_loss * z_loss(logits, tokens)
        if not (sizes.balance_loss or sizes.z_loss):
            return routing
        first_time(partial(self._note_losses, layer, torch.stack((balance, z)).detach()))
        return replace(routing, weights=attach(routing.weights, balance + z, self.gradient_scale))

    def _count(
        self, layer: _Layer, experts: Tensor, sequence_of: Tensor | None, sequences: int, kept: Tensor | None
    ) -> tuple[Tensor, int]:
        """Add to the step's counts; return those of the balance loss, and the tokens of the mean."""
        sizes = self.sizes
        own = counts_of(experts, sizes.count)
        layer.counts += own[0].cpu()
        if kept is not None:
            layer.dropped += (~kept).sum().cpu()
        counts = own
        if sequence_of is not None:
            counts = _summed(counts_of(experts, sizes.count, sequence_of, sequences), self.sequence_comm)
        elif sizes.balance_loss:
            counts = _summed(own, self.comm)
        if sizes.balance_loss and sizes.balance_over == "global":
            layer.global_counts += counts[0].cpu()
            counts = layer.global_counts.to(counts.device, copy=True).unsqueeze(0)
        return counts, self._tokens_of_mean(len(experts))

    def _tokens_of_mean(self, own: int) -> int:
        if self.tokens_per_step is not None:
            return self.tokens_per_step
        return max(1, int(_summed(torch.tensor(own), self.comm)))

    def note_rows(self, number: int, received: int, own: int) -> None:
        """Note how many rows came to this rank's experts of layer `number` in a forward.

        own   rows of this rank's tokens, which went to all ranks' experts: T·k
        """
        if number in self._loads:
            self._note_forward()
        self._loads[number] = received / max(1, own)

    def _note_forward(self) -> None:
        if self._loads:
            self._forwards.append(sum(self._loads.values()) / len(self._loads))
            self._loads.clear()

    def _note_losses(self, layer: _Layer, losses: Tensor) -> None:
        layer.losses += losses.double().cpu()

    def finish_step(self, *, is_taken: bool = True) -> dict[int, LayerBalance]:
        """Update the biases, and return the balance of each of this rank's layers in the step. Collective.

        is_taken   False: the optimizer has skipped this step, and biases stay as they are, too

        To be called once an optimizer step, by all ranks of `comm`, which have the same layers. The balance
        and the biases are the same on all of them.
        """
        layers = self._layers.values()
        if not layers:
            return {}
        self._note_forward()
        self.expert_loads, self._forwards = self._forwards, []
        counts = torch.stack([torch.cat((layer.counts, layer.dropped[None])) for layer in layers])
        losses = torch.stack([layer.losses for layer in layers])
        counts, losses = _summed(counts, self.comm), _summed(losses, self.comm)
        found = {}
        for (number, layer), of_layer, (balance, z) in zip(
            self._layers.items(), counts, losses.tolist(), strict=True
        ):
            if is_taken:
                self._update_bias(layer.router, of_layer[:-1])
            *loads, dropped = of_layer.tolist()
            found[number] = LayerBalance(Balance.of(loads, dropped), balance, z)
            layer.reset()
        return found

    @torch.no_grad()
    def _update_bias(self, router: Biased, counts: Tensor) -> None:
        bias = router.e_score_correction_bias
        if bias is not None and self.sizes.bias_rate:
            bias.copy_(updated_bias(bias, counts.to(bias.device), self.sizes.bias_rate))


def _summed(tensor: Tensor, comm: Communicator | None) -> Tensor:
    return tensor if comm is None else summed(tensor, comm, consume=True)
