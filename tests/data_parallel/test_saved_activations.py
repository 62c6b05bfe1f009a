"""What autograd saves, counted by hand on a layer. Shape letters: B batch, I inputs, O outputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import fully_shard, watch_activations

B, I, O = 5, 3, 2  # noqa: E741
FLOAT = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(I, O)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.linear(inputs))


def test_a_linear_saves_its_input_and_tanh_its_output_and_parameters_are_not_counted() -> None:
    layer = Layer()
    # The input needs a gradient, so the weight is saved, too.
    with watch_activations(layer) as activations:
        loss = layer(torch.ones(B, I, requires_grad=True)).sum()
        assert activations.nbytes == FLOAT * (B * I + B * O)
        loss.backward()
    assert activations.nbytes == 0
    assert activations.peak_nbytes == FLOAT * (B * I + B * O)


def test_the_same_memory_counts_once_however_many_look_into_it() -> None:
    shared = torch.ones(B, I)
    layers = nn.ModuleList(Layer() for _ in range(2))
    with watch_activations(layers) as activations:
        sum(layer(view).sum() for layer, view in zip(layers, (shared, shared[:]), strict=True)).backward()
    assert activations.peak_nbytes == FLOAT * (B * I + 2 * B * O)


def test_the_peak_is_of_one_microbatch_where_each_is_done_with_before_the_next() -> None:
    layer = Layer()
    with watch_activations(layer) as activations:
        for _ in range(3):
            layer(torch.ones(B, I)).sum().backward()
    assert activations.peak_nbytes == FLOAT * (B * I + B * O)


def test_gradients_are_as_without_anybody_watching() -> None:
    torch.manual_seed(0)
    layer, inputs = Layer(), torch.randn(B, I)
    layer(inputs).sum().backward()
    expected = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    with watch_activations(layer):
        layer(inputs).sum().backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(layer.parameters(), expected, strict=True))


def test_a_recomputed_layer_keeps_its_input_alone() -> None:
    layer = Layer()
    with watch_activations(layer) as activations:
        inputs = torch.ones(B, I, requires_grad=True)
        loss = checkpoint(layer, inputs, use_reentrant=False, preserve_rng_state=False).sum()
        assert activations.nbytes <= FLOAT * B * I + 8  # and an empty tensor of torch's own
        loss.backward()


@pytest.mark.parametrize("size", [1, 2])
def test_gathered_units_are_parameters_and_no_activations(size: int) -> None:
    def work(comm: Communicator) -> int:
        model = nn.Sequential(Layer(), nn.Linear(O, O))
        fully_shard(model, comm, policy=lambda name, module: name in ("0", "1"))
        with watch_activations(model) as activations:
            model(torch.ones(B, I)).sum().backward()
        return activations.peak_nbytes

    # The second layer's input is what tanh saved.
    assert run_loopback(size, work) == [FLOAT * (B * I + B * O)] * size
