"""The vocabulary-parallel embedding is the serial one, trained."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import DataError, LayoutError, MismatchError
from hpcpar.tensor_parallel import TensorParallel, VocabParallelEmbedding, gather_whole
from tests.grid import pairwise
from tests.tensor_parallel.conftest import OPTIMIZERS, SIZES, WAYS


def tokens(vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (2, 12), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("size", "way", "vocabulary", "optimizer"), pairwise(SIZES, WAYS, [24, 23, 2], OPTIMIZERS)
)
def test_it_is_the_serial_embedding(
    compare: Callable[..., None], size: int, way: str, optimizer: str, vocabulary: int
) -> None:
    """Vocabularies that do not divide, and ranks with nothing but padding, are included."""
    compare(
        size,
        nn.Embedding(vocabulary, 6),
        lambda tp: VocabParallelEmbedding(vocabulary, 6, tp),
        tokens(vocabulary),
        way,
        optimizer,
    )


def test_first_values_are_those_of_the_serial_embedding(size: int) -> None:
    def drawn(comm: Communicator) -> Tensor:
        layer = VocabParallelEmbedding(23, 6, comm)
        layer.reset_parameters(torch.Generator().manual_seed(1))
        return gather_whole(layer.weight)

    whole = torch.empty(23, 6).normal_(generator=torch.Generator().manual_seed(1))
    assert all(torch.equal(weight, whole) for weight in run_loopback(size, drawn))


def test_what_does_not_fit_is_named() -> None:
    def check(comm: Communicator) -> None:
        with pytest.raises(LayoutError, match=r"vocabulary=23 does not divide among tp=2 ranks"):
            VocabParallelEmbedding(23, 6, comm, pad=False)
        layer = VocabParallelEmbedding(23, 6, comm)
        for token in (23, -1):
            with pytest.raises(DataError, match=rf"token {token} is outside a vocabulary of 23"):
                layer(torch.tensor([[0, token]]))
        sequence = VocabParallelEmbedding(24, 6, TensorParallel(comm, sequence_parallel=True))
        with pytest.raises(MismatchError, match=r"a sequence: 3 elements do not divide .* 2 or 4 would"):
            sequence(torch.zeros(2, 3, dtype=torch.long))

    run_loopback(2, check)
