"""A Llama whose sequences ranks share writes the text of the serial one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hpcpar.comm import Communicator, run_loopback
from hpcpar.context_parallel import ContextParallel
from hpcpar.models import Llama, LlamaConfig, generate, parallel_layers
from hpcpar.tensor_parallel import RandomStreams

SMALL = LlamaConfig(
    vocab_size=23,
    hidden_size=16,
    layers=2,
    heads=8,
    kv_heads=2,
    ffn_size=24,
    max_sequence=96,
    initial_std=0.3,
)


@pytest.mark.parametrize("method", ["exchange", "ring", "allgather", "ulysses"])
def test_it_writes_the_same_text(method: str) -> None:
    prompt = torch.randint(23, (2, 5), generator=torch.Generator().manual_seed(5))
    serial = generate(Llama(SMALL, seed=1).double(), prompt, 6, seed=3)

    def written(comm: Communicator) -> Tensor:
        context = ContextParallel(comm, method)  # type: ignore[arg-type]
        layers = parallel_layers(SMALL, Communicator.alone(), context=context, streams=RandomStreams(0, 0))
        return generate(Llama(SMALL, layers, seed=1).double(), prompt, 6, seed=3)

    for text in run_loopback(4, written):
        assert text.tolist() == serial.tolist()
