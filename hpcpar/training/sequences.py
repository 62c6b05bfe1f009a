"""Documents in a batch, the ranks that share its sequences, and the targets that its loss is divided by.

Shape letters: B batch, S whole sequence.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpcpar.context_parallel import ContextParallel, Mask
from hpcpar.tensor_parallel.cross_entropy import IGNORED

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


@dataclass(frozen=True)
class Sequences:
    """The rows [B, S] of a batch: each one text, or documents of which none sees another.

    global_tokens     targets of the global batch, over all dp ranks; None: they are counted in each step
    context           ranks that share each sequence; None: each rank has whole ones
    end_of_document   token at the end of each packed document; None: a row is one text
    """

    global_tokens: int | None
    context: ContextParallel | None = None
    end_of_document: int | None = None

    def using(self, tokens: Tensor) -> AbstractContextManager[None]:
        """Let the model's attention be within the documents of these tokens."""
        return self.with_mask(self.mask(tokens)) if self.context is not None else nullcontext()

    def with_mask(self, mask: Mask) -> AbstractContextManager[None]:
        """Let the model's attention have this mask."""
        return self.context.using(mask) if self.context is not None else nullcontext()

    def mask(self, tokens: Tensor) -> Mask:
        """Return the mask of a row, or of all rows one after the other where they hold packed documents."""
        if self.end_of_document is None:
            return Mask(tokens.shape[1])
        ends = tokens == self.end_of_document
        ends[:, -1:] = True
        stops = torch.nonzero(ends.flatten()).flatten() + 1
        lengths = torch.diff(stops, prepend=stops.new_zeros(1)).tolist()
        return Mask(tokens.numel(), documents=tuple(lengths))

    def own_length(self, length: int) -> int | None:
        """Return this rank's tokens of a sequence; None where that depends on the documents in it."""
        if self.context is None or self.context.comm.size == 1:
            return length
        if self.end_of_document is not None:
            return None
        with self.context.using(Mask(length)):
            return len(self.context.places())

    def targets(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Leave out the targets that are the first tokens of another document."""
        if self.end_of_document is None:
            return targets
        return targets.masked_fill(tokens == self.end_of_document, IGNORED)

    def global_targets(self, targets: Tensor, comm: Communicator) -> int:
        """Count the targets of the global batch, of which [B, S] are this dp rank's; collective over `comm`.

        comm   of all dp and cp ranks; those that share sequences have the same targets
        """
        if self.global_tokens is not None:
            return self.global_tokens
        count = torch.tensor([int((targets != IGNORED).sum())])
        comm.allreduce(count)
        return int(count) // (self.context.comm.size if self.context else 1)

    def own_targets(self, targets: Tensor) -> int:
        """Count this rank's part of the targets [B, S]."""
        own = targets if self.context is None else self.context.own_tokens(targets)
        return int((own != IGNORED).sum())
