"""Recomputation: gradients as without it bit for bit, streams where they would stand without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpar import watch_activations
from hpcpar.autograd import Recompute, copy_to, recompute, reduce_from
from hpcpar.autograd.recompute import first_time
from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import ConfigError


class Streams:
    """One generator, in the form that `recompute` asks for."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def state_dict(self) -> dict[str, Tensor]:
        return {"only": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.generator.set_state(state["only"])


class Block(nn.Module):
    """A product, dropout and tanh, of which backward keeps something each."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.weight = nn.Parameter(torch.randn(6, 6, generator=generator))
        self.streams = streams
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        product = functional.linear(x, self.weight)
        mask = torch.empty(product.shape, dtype=torch.bool).bernoulli_(0.5, generator=self.streams.generator)
        return torch.tanh(product * mask) * torch.rand((), generator=self.streams.generator)


@dataclass
class Step:
    loss: Tensor
    gradients: list[Tensor]
    state: Tensor
    calls: int


Run = Callable[[Block, Tensor], Tensor]


def step(run: Run, *, blocks: int = 2, backwards: int = 1) -> Step:
    """Forward through some blocks and backward, and where the streams stand then."""
    streams = Streams(3)
    layers = nn.ModuleList(Block(streams) for _ in range(blocks))
    x = torch.linspace(-1, 1, 24).view(4, 6).requires_grad_()
    hidden = x
    for layer in layers:
        assert isinstance(layer, Block)
        hidden = run(layer, hidden)
    loss = hidden.square().sum()
    for number in range(backwards):
        loss.backward(retain_graph=number + 1 < backwards)
    gradients = [each.grad for each in (x, *layers.parameters()) if each.grad is not None]
    return Step(loss.detach(), gradients, streams.generator.get_state(), sum(each.calls for each in layers))


def plainly(layer: Block, x: Tensor) -> Tensor:
    y: Tensor = layer(x)
    return y


def anew(layer: Block, x: Tensor) -> Tensor:
    return recompute(layer, x, streams=layer.streams)


def require_equal(found: Step, expected: Step) -> None:
    assert torch.equal(found.loss, expected.loss)
    assert len(found.gradients) == len(expected.gradients)
    assert all(map(torch.equal, found.gradients, expected.gradients))
    assert torch.equal(found.state, expected.state)


@pytest.mark.parametrize("backwards", [1, 2])
def test_gradients_and_streams_are_as_without_recomputation_bit_for_bit(backwards: int) -> None:
    expected, found = step(plainly, backwards=backwards), step(anew, backwards=backwards)
    require_equal(found, expected)
    assert (expected.calls, found.calls) == (2, 2 + 2 * backwards)


def test_a_recomputation_within_a_recomputation_draws_the_same_too() -> None:
    def nested(layer: Block, x: Tensor) -> Tensor:
        return recompute(lambda each: anew(layer, each), x, streams=layer.streams)

    found = step(nested)
    require_equal(found, step(plainly))


def test_without_the_streams_other_numbers_are_drawn_so_the_tests_above_bite() -> None:
    found = step(lambda layer, x: recompute(layer, x))
    assert not all(map(torch.equal, found.gradients, step(plainly).gradients))


def test_steps_follow_each_other_as_without_recomputation() -> None:
    def train(run: Run) -> list[Tensor]:
        streams = Streams(3)
        layer = Block(streams)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            run(layer, torch.ones(4, 6)).sum().backward()
            optimizer.step()
        return [*layer.parameters(), streams.generator.get_state()]

    assert all(map(torch.equal, train(anew), train(plainly)))


def test_the_input_alone_is_kept() -> None:
    layer = Block(Streams(0))
    x = torch.ones(4, 6, requires_grad=True)
    with watch_activations(layer) as activations:
        y = recompute(layer, x, streams=layer.streams)
        assert activations.nbytes <= x.nbytes + 8  # and an empty tensor of torch's own
        y.sum().backward()


def test_where_no_gradient_is_wanted_the_function_is_simply_called() -> None:
    layer = Block(Streams(0))
    with torch.no_grad():
        assert not recompute(layer, torch.ones(4, 6), streams=layer.streams).requires_grad
    assert layer.calls == 1


def test_the_process_generator_is_set_back_unless_streams_are_given_or_it_is_not_to_be() -> None:
    def gradient(**options: Any) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        x = torch.ones(1000, requires_grad=True)
        y = recompute(lambda each: functional.dropout(each, 0.5).sin(), x, **options)
        y.sum().backward()
        assert x.grad is not None
        return x.grad, torch.get_rng_state()

    torch.manual_seed(0)
    x = torch.ones(1000, requires_grad=True)
    functional.dropout(x, 0.5).sin().sum().backward()
    state = torch.get_rng_state()
    assert x.grad is not None
    for options in ({}, {"streams": Streams(0), "preserve_default_generator": True}):
        found, after = gradient(**options)
        assert torch.equal(found, x.grad)
        assert torch.equal(after, state)
    for options in ({"streams": Streams(0)}, {"preserve_default_generator": False}):
        assert not torch.equal(gradient(**options)[0], x.grad)


def test_an_error_in_the_recomputation_leaves_the_streams_where_they_were() -> None:
    streams, calls = Streams(0), []

    def fails_the_second_time(x: Tensor) -> Tensor:
        calls.append(torch.rand((), generator=streams.generator))
        if len(calls) == 2:
            raise RuntimeError("once was enough")
        return (x * calls[-1]).tanh()

    y = recompute(fails_the_second_time, torch.ones(2, requires_grad=True), streams=streams)
    torch.rand(7, generator=streams.generator)
    state = streams.generator.get_state()
    with pytest.raises(RuntimeError, match="once was enough"):
        y.sum().backward()
    assert torch.equal(streams.generator.get_state(), state)
    assert torch.equal(calls[0], calls[1])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_collectives_in_a_recomputed_function_are_repeated_on_all_ranks(size: int) -> None:
    def work(comm: Communicator) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(comm.rank)
        weight = torch.randn(5, 5, generator=generator, dtype=torch.float64)

        def parallel(x: Tensor) -> Tensor:
            partial = torch.tanh(copy_to(x, comm) @ weight.requires_grad_())
            return torch.sin(reduce_from(partial, comm))

        found: dict[str, Any] = {}
        for name in ("plain", "anew"):
            x = torch.linspace(-1, 1, 15, dtype=torch.float64).view(3, 5).requires_grad_()
            weight.grad = None
            run = (lambda f, each: recompute(f, each)) if name == "anew" else (lambda f, each: f(each))
            before = comm.traffic.row("allreduce").calls
            run(parallel, run(parallel, x)).sum().backward()
            calls = comm.traffic.row("allreduce").calls - before
            found[name] = (x.grad, weight.grad, calls)
        return found

    for found in run_loopback(size, work):
        *expected, calls = found["plain"]
        *gradients, repeated = found["anew"]
        assert all(map(torch.equal, gradients, expected))
        # Two layers: a sum in forward and one in backward each; the sum of forward once more.
        assert (calls, repeated) == ((4, 6) if size > 1 else (0, 0))


# --- which layers ---------------------------------------------------------------------------------


def test_a_count_of_layers_means_the_first_ones() -> None:
    assert [Recompute("full", 2).of_layer(number, 4) for number in range(4)] == [
        "full",
        "full",
        "none",
        "none",
    ]


@pytest.mark.parametrize("layers", [None, 3])
def test_all_layers_are_recomputed_when_all_or_no_number_is_given(layers: int | None) -> None:
    assert {Recompute("selective", layers).of_layer(number, 3) for number in range(3)} == {"selective"}


def test_by_default_or_for_no_layers_nothing_is_recomputed() -> None:
    assert Recompute().of_layer(0, 1) == "none"
    assert Recompute("full", 0).of_layer(0, 1) == "none"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("some",), "no mode 'some'; there are none, selective, full"),
        (("full", -1), "layers=-1; give 0 or more"),
        (("full", "2"), "layers='2'"),
        (("full", 1.5), "layers=1.5"),
    ],
)
def test_a_mistake_is_answered_with_what_there_is(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Recompute(*arguments)


def test_more_layers_than_there_are_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="layers=5, but the model has 4"):
        Recompute("full", 5).of_layer(0, 4)


def test_what_happens_the_first_time_does_not_happen_again() -> None:
    """Each call of a microbatch gets its own results back, in whichever order backward comes."""
    drawn: list[int] = []

    def draw() -> int:
        drawn.append(len(drawn))
        return drawn[-1]

    def layer(x: Tensor) -> Tensor:
        return torch.sin(x * (1 + first_time(draw))) * torch.cos(x + first_time(draw))

    x = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    losses = [recompute(layer, x) for _ in range(3)]
    assert drawn == list(range(6))
    for number in (2, 0, 1):
        x.grad = None
        losses[number].backward(retain_graph=True)
        losses[number].backward()  # recomputes once more
        y = x.detach().clone().requires_grad_()
        (torch.sin(y * (1 + 2 * number)) * torch.cos(y + 2 * number + 1)).backward()
        assert x.grad is not None
        assert y.grad is not None
        torch.testing.assert_close(x.grad, 2 * y.grad)
    assert drawn == list(range(6))
    assert first_time(draw) == 6  # as ever where nothing is recomputed
