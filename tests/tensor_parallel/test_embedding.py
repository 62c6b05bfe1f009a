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


@pytest.mark.parametrize("padding", [None, 4, -1])
def test_first_values_and_the_padding_token_are_those_of_the_serial_embedding(
    size: int, padding: int | None
) -> None:
    """torch.nn.Embedding has zeros in the row of its padding, which get no gradient."""

    def drawn(comm: Communicator) -> list[Tensor]:
        layer = VocabParallelEmbedding(23, 6, comm, padding_token=padding)
        layer.reset_parameters(torch.Generator().manual_seed(1))
        layer(torch.tensor([[0, 4, 22, 22, 8]])).sum().backward()
        return [gather_whole(layer.weight), gather_whole(layer.weight, layer.weight.grad)]

    serial = nn.Embedding(23, 6, padding_idx=padding)
    expected = torch.empty(23, 6).normal_(generator=torch.Generator().manual_seed(1))
    if padding is not None:
        expected[padding] = 0.0
    serial(torch.tensor([[0, 4, 22, 22, 8]])).sum().backward()
    for weight, gradient in run_loopback(size, drawn):
        assert torch.equal(weight, expected)
        assert torch.equal(gradient, serial.weight.grad)


def test_what_does_not_fit_is_named() -> None:
    def check(comm: Communicator) -> None:
        with pytest.raises(LayoutError, match=r"vocabulary=23 does not divide among tp=2 ranks"):
            VocabParallelEmbedding(23, 6, comm, pad=False)
        with pytest.raises(LayoutError, match=r"padding_token=23 is outside a vocabulary of 23"):
            VocabParallelEmbedding(23, 6, comm, padding_token=23)
        layer = VocabParallelEmbedding(23, 6, comm)
        with pytest.raises(MismatchError, match=r"the tokens of .* embedding is not the same on all ranks"):
            layer(torch.tensor([[0, 22 + comm.rank]]))  # also where one rank has a token that there is not
        for token in (23, -1):
            with pytest.raises(DataError, match=rf"token {token} is outside a vocabulary of 23"):
                layer(torch.tensor([[0, token]]))
        sequence = VocabParallelEmbedding(24, 6, TensorParallel(comm, sequence_parallel=True))
        with pytest.raises(MismatchError, match=r"a sequence: 3 elements do not divide .* 2 or 4 would"):
            sequence(torch.zeros(2, 3, dtype=torch.long))

    run_loopback(2, check)
