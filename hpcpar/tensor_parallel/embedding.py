"""Vocabulary-parallel embedding. Shape letters: B batch, S sequence, H hidden, p ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpar.autograd import reduce_from, reduce_scatter_to
from hpcpar.autograd.dim_collectives import require_dividing
from hpcpar.errors import DataError, LayoutError
from hpcpar.tensor_parallel.axis import TensorParallel
from hpcpar.tensor_parallel.products import SEQUENCE
from hpcpar.tensor_parallel.sameness import Sameness
from hpcpar.tensor_parallel.split import (
    Divided,
    draw_shard,
    padded_length,
    place,
    require_divisible,
    split_evenly,
)

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


class VocabParallelEmbedding(Divided):
    """Embedding table [vocabulary, H], its rows divided: ranks sum their lookups, 0 for foreign tokens.

    pad             pad a vocabulary that does not divide with unused rows at its end; False: LayoutError
    padding_token   token whose row is zeros at first and gets no gradient, as torch.nn.Embedding's
                    padding_idx; a negative one counts from the vocabulary's end; None: none
    tp, draw        as in ColumnParallelLinear; initial values are those of torch.nn.Embedding

    input    tokens [B, S], the same on all ranks
    output   [B, S, H]; with sequence parallelism this rank's shard [B, S/p, H]
    errors   DataError, on every rank, for a token outside the vocabulary (checked on a CPU only);
             MismatchError for a sequence that does not divide under sequence parallelism; LayoutError for a
             padding_token outside the vocabulary
    """

    def __init__(
        self,
        vocabulary: int,
        hidden_size: int,
        tp: TensorParallel | Communicator,
        *,
        pad: bool = True,
        padding_token: int | None = None,
        draw: bool = True,
    ) -> None:
        super().__init__()
        self.tp = TensorParallel.of(tp)
        self.vocabulary = vocabulary
        if padding_token is not None:
            if not -vocabulary <= padding_token < vocabulary:
                raise LayoutError(
                    f"padding_token={padding_token} is outside a vocabulary of {vocabulary}; give the number "
                    f"of its row, or None"
                )
            padding_token %= vocabulary
        self.padding_token = padding_token
        size = self.tp.size
        if not pad:
            require_divisible(vocabulary, size, "vocabulary")
        self.split = split_evenly(vocabulary, size, padded=padded_length(vocabulary, size))
        self.weight = nn.Parameter(torch.empty(self.split.shard_length(self.tp.rank), hidden_size))
        place(self.weight, self.split, self.tp.comm)
        self.shards = Sameness(self.tp.comm, "the weight of a vocabulary-parallel embedding")
        self.sameness = Sameness(self.tp.comm, "the tokens of a vocabulary-parallel embedding")
        if draw:
            self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw normal values for the whole table, the same for any number of ranks."""

        def fill(whole: Tensor) -> None:
            whole.normal_(generator=generator)
            if self.padding_token is not None:
                whole[self.padding_token] = 0.0

        draw_shard(self.weight, fill)

    def forward(self, tokens: Tensor) -> Tensor:
        self.require_own_shard()
        self.sameness.require(tokens)
        if tokens.device.type == "cpu" and tokens.numel():
            self._require_known(tokens)
        if self.tp.size == 1:
            return functional.embedding(tokens, self.weight, self.padding_token)
        first = self.split.parts[self.tp.rank][0][0]
        own = tokens - first
        foreign = (own < 0) | (own >= self.split.held(self.tp.rank))
        rows = functional.embedding(own.masked_fill(foreign, 0), self.weight, self._own_padding_token)
        rows = rows.masked_fill(foreign.unsqueeze(-1), 0.0)
        if not self.tp.sequence_parallel:
            return reduce_from(rows, self.tp.comm)
        require_dividing(rows, self.tp.comm, SEQUENCE, "a sequence")
        return reduce_scatter_to(rows, self.tp.comm, SEQUENCE)

    @property
    def _own_padding_token(self) -> int | None:
        """Index of the padding token's row in this rank's shard, if it is here."""
        ((start, stop),) = self.split.parts[self.tp.rank]
        token = self.padding_token
        return token - start if token is not None and start <= token < stop else None

    def _require_known(self, tokens: Tensor) -> None:
        lowest, highest = torch.aminmax(tokens)
        if lowest < 0 or highest >= self.vocabulary:
            wrong = lowest if lowest < 0 else highest
            raise DataError(
                f"token {int(wrong)} is outside a vocabulary of {self.vocabulary}; use the tokenizer that "
                f"the model was made for, or a model with a larger vocabulary"
            )

    def extra_repr(self) -> str:
        rows, hidden = self.weight.shape
        return f"{rows} of {self.vocabulary}, {hidden}"
