"""Tokens that a rank routes, and tokens that its experts see, where ranks share layers or sequences.

Shape letters: B batch, S sequence between the layers, S' of what this rank routes, S" of what it dispatches,
H hidden, k experts of a token. What is in between the layers is [B, S, H].

                                    between     routed      dispatched                  combined
    experts whole                   all         own part    own part                    gather_from
    … with sequence parallelism     own part    own part    own part                    nothing
    experts split over tp           all         all         all, by copy_to             reduce_from
    … with sequence parallelism     own part    own part    all, by gather_from         reduce_scatter_to

Whole experts spread over the ranks of tp as well, so each of these brings its part of the tokens. The parts
of an expert see the tokens of all tp ranks. Each token's weights go the way of its hidden values, so that the
router gets their gradient once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcpar.autograd import copy_to, gather_from, reduce_from, reduce_scatter_to, scatter_to
from hpcpar.autograd.weight_grad_mode import stand_in
from hpcpar.context_parallel import ContextParallel
from hpcpar.partition import bounds
from hpcpar.tensor_parallel import TensorParallel

SEQUENCE = 1
"""Dim of S in [B, S, H]."""

REPLICA = 1 << 32
"""Distance between the positions of replicas: more tokens than one has in a microbatch."""


@dataclass(frozen=True, eq=False)
class ExpertTokens:
    """Takes tokens to a layer's router and experts, and back.

    tp              ranks that share each layer; None: one
    split_experts   over them, as the other layers; False: each rank of tp has whole experts
    context         ranks that share each sequence; None: each has whole ones
    replica         this rank's place among those with other sequences (its dp coordinate), by which tokens
                    are ordered
    """

    tp: TensorParallel | None = None
    split_experts: bool = False
    context: ContextParallel | None = None
    replica: int = 0

    @property
    def are_shared_out(self) -> bool:
        """True where each rank of tp routes tokens of its own."""
        tp = self.tp
        return tp is not None and tp.size > 1 and (tp.sequence_parallel or not self.split_experts)

    def routed(self, hidden: Tensor) -> Tensor:
        """[B, S, H] -> [B, S', H]"""
        if self.tp is None or self.split_experts or self.tp.sequence_parallel:
            return hidden
        return scatter_to(hidden, self.tp.comm, SEQUENCE)

    def summed(self, weight: Tensor) -> Tensor:
        """Wrap the router's weight: ranks of tp that route other tokens sum its gradients."""
        return copy_to(stand_in(weight), self.tp.comm) if self.tp and self.are_shared_out else weight

    def dispatched(self, tensor: Tensor) -> Tensor:
        """[B, S', …] -> [B, S", …]; integers and bools, too, without gradients."""
        if self.tp is None or not self.split_experts:
            return tensor
        if self.tp.sequence_parallel:
            return self._gathered(tensor, tensor.shape[SEQUENCE] * self.tp.size)
        return copy_to(tensor, self.tp.comm) if tensor.is_floating_point() else tensor

    def combined(self, outputs: Tensor, hidden: Tensor) -> Tensor:
        """[B, S", H] -> [B, S, H], as `hidden` is"""
        tp = self.tp
        if tp is None:
            return outputs
        if self.split_experts:
            if tp.sequence_parallel:
                return reduce_scatter_to(outputs, tp.comm, SEQUENCE)
            return reduce_from(outputs, tp.comm)
        if tp.sequence_parallel:
            return outputs
        return gather_from(outputs, tp.comm, SEQUENCE, length=hidden.shape[SEQUENCE])

    def _gathered(self, tensor: Tensor, length: int) -> Tensor:
        """Gather tp ranks' parts of the sequence, whose gradients are parts of a sum."""
        assert self.tp is not None
        if tensor.dtype == torch.bool:  # which MPI does not know
            return self._gathered(tensor.to(torch.uint8), length).bool()
        return gather_from(tensor, self.tp.comm, SEQUENCE, "partial", length=length)

    # --- places of the tokens in their sequences ---------------------------------------------------

    def lengths(self, hidden: Tensor) -> Sequence[int]:
        """Return the tokens of each sequence in a row of the batch: of each document, or of the whole row."""
        documents = None if self.context is None else self.context.mask.documents
        return [self._whole_length(hidden)] if documents is None else documents

    def sequence_of(self, hidden: Tensor, *, whole: bool = False) -> Tensor:
        """Return the number of each routed token's sequence, int64 [B·S'].

        whole   of all tokens of the batch's sequences, in order
        """
        lengths = self.lengths(hidden)
        of_place = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
        of_place = of_place.to(hidden.device)
        rows = torch.arange(len(hidden), device=hidden.device).unsqueeze(-1) * len(lengths)
        return (rows + (of_place if whole else of_place[self._own_places(hidden)])).flatten()

    def positions(self, dispatched: Tensor, hidden: Tensor) -> Tensor | None:
        """Return the global places of dispatched tokens, int64 [B·S"]; None: they follow the ranks' order."""
        is_part = self.tp is not None and self.tp.size > 1 and not self.split_experts
        if not is_part and (self.context is None or self.context.comm.size == 1):
            return None
        places = self._places(hidden)
        if is_part:
            places = self._own_part(places)
        rows = torch.arange(len(dispatched), device=dispatched.device).unsqueeze(-1)
        return (self.replica * REPLICA + rows * self._whole_length(hidden) + places.to(rows.device)).flatten()

    def over_whole_sequences(self, tensor: Tensor, hidden: Tensor) -> Tensor:
        """Return routed tokens' values [B, S', …] of all tokens of their sequences, in order; collective."""
        tensor = tensor.detach()
        if self.tp is not None and self.are_shared_out:
            tensor = self._gathered(tensor, self._length(hidden))
        return tensor if self.context is None else self.context.unshard(tensor, SEQUENCE)

    def own(self, whole: Tensor, hidden: Tensor) -> Tensor:
        """Return the routed tokens' part of [B, whole sequence, …]."""
        return whole.index_select(SEQUENCE, self._own_places(hidden))

    def _length(self, hidden: Tensor) -> int:
        """Return the tokens of a sequence on all ranks of tp."""
        ranks = self.tp.size if self.tp is not None and self.tp.sequence_parallel else 1
        return hidden.shape[SEQUENCE] * ranks

    def _whole_length(self, hidden: Tensor) -> int:
        return self._length(hidden) if self.context is None else self.context.mask.length

    def _places(self, hidden: Tensor) -> Tensor:
        """Return the places in their sequence of the tokens that the ranks of tp have, int64."""
        if self.context is None:
            return torch.arange(self._length(hidden), device=hidden.device)
        return self.context.places().to(hidden.device)

    def _own_part(self, places: Tensor) -> Tensor:
        assert self.tp is not None
        start, stop = bounds(len(places), self.tp.size)[self.tp.rank]
        return places[start:stop]

    def _own_places(self, hidden: Tensor) -> Tensor:
        places = self._places(hidden)
        return self._own_part(places) if self.are_shared_out else places
