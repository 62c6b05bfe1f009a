"""Fully sharded models: the same numbers to the last bit, few gathered units, and clear errors."""

from __future__ import annotations

import copy
import functools
import gc
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer, fully_shard, summon_full_parameters
from hpcpar.data_parallel.fsdp_unit import FsdpUnit
from hpcpar.data_parallel.zero3 import FullyShardedState, sharding_in
from hpcpar.errors import (
    MismatchError,
    OperationError,
    PeerFailedError,
    ShardedParameterError,
)
from hpcpar.parameter_info import info_of, note
from tests.data_parallel.staged import ResidualLayer, error_of, fill, ranks, staged, whole
from tests.grid import checkered

STEPS = 3


class Network(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module] = ResidualLayer, count: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.layers = nn.ModuleList(layer() for _ in range(count))
        self.head = nn.Linear(4, 3, bias=False)
        fill(self, 4, dtype=torch.float32)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def batch(number: int, rank: int) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(100 * number + rank))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def optimizer_of(model: nn.Module, comm: Communicator, **options: Any) -> DistributedOptimizer:
    return DistributedOptimizer(sgd(model), model.named_parameters(), comm, **options)


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Course(NamedTuple):
    outputs: list[Tensor]
    gradients: list[Tensor]
    parameters: list[Tensor]


Loss = Callable[[nn.Module, Tensor], Tensor]


def plain_loss(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs).square().mean()


def trained(
    comm: Communicator,
    build: Callable[[], nn.Module],
    *,
    stage: int = 3,
    loss_of: Loss = plain_loss,
    same_batch: bool = False,
    microbatches: int = 1,
    **options: Any,
) -> Course:
    """Losses, the whole gradients of the first step, and parameters at the end."""
    model = build()
    if stage == 3:
        fully_shard(model, comm, **options)
    optimizer = optimizer_of(model, comm, zero_stage=stage)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    outputs, gradients = [], []
    for step in range(STEPS):
        for number in range(microbatches):
            loss = loss_of(model, batch(10 * step + number, 0 if same_batch else comm.rank))
            outputs.append(loss.detach())
            if number < microbatches - 1:
                with optimizer.no_sync():
                    loss.backward()
            else:
                loss.backward()
        if not step:
            pieces = [(n, e.start, g.clone()) for n, e, g in optimizer.named_gradients()]
            everywhere = [pieces] if stage == 0 else comm.allgather_object(pieces)
            found = sorted((each for of_rank in everywhere for each in of_rank), key=lambda each: each[:2])
            gradients = [
                torch.cat([g for n, _, g in found if n == name] or [torch.empty(0)]) for name in names
            ]
        optimizer.step()
        optimizer.zero_grad()
    return Course(outputs, gradients, whole(model))


def assert_follows(
    build: Callable[[], nn.Module], *, size: int = 2, loss_of: Loss = plain_loss, **options: Any
) -> None:
    """On two ranks sums have no order, so that all is equal to the last bit.

    Stage 2 sums microbatches after averaging, as stage 3 does; without any it is that of whole parameters.
    """
    microbatches = options.pop("microbatches", 1)
    work = functools.partial(trained, build=build, loss_of=loss_of, microbatches=microbatches)
    reference = 2 if microbatches > 1 else 0
    expected = run_loopback(size, functools.partial(work, stage=reference))
    for found, other in zip(run_loopback(size, functools.partial(work, **options)), expected, strict=True):
        assert same(found.outputs, other.outputs)
        assert same(found.gradients, other.gradients)
        assert same(found.parameters, other.parameters)
        assert not same(found.parameters, list(build().parameters()))


def assert_same_in_stage_3(
    body: Callable[[Communicator, int], list[Tensor]], reference: int = 0
) -> list[list[Tensor]]:
    """Run a program on two ranks in stage 3 and in another; return what it gives in stage 3."""
    expected = run_loopback(2, lambda comm: body(comm, reference))
    found = run_loopback(2, lambda comm: body(comm, 3))
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))
    return found


def sharding(model: nn.Module) -> FullyShardedState:
    found = model.__dict__["_hpcpar_sharding"]
    assert isinstance(found, FullyShardedState)
    return found


@contextmanager
def gathered(model: nn.Module) -> Iterator[Callable[[], list[str]]]:
    """A function that tells which units are gathered or about to be."""
    yield lambda: [unit.name for unit in sharding(model).units if unit.is_allocated]


# --- the same numbers -----------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("size", [1, 2, 4])
def test_outputs_and_gradients_are_those_of_the_whole_model_to_the_last_bit(size: int) -> None:
    # All ranks have the same batch, and sums of 2 or 4 equal numbers are exact.
    results = run_loopback(size, lambda comm: trained(comm, Network, same_batch=True))
    expected = trained(Communicator.alone(), Network, stage=0)
    for found in results:
        assert same(found.outputs, expected.outputs)
        assert same(found.gradients, expected.gradients)
        assert same(found.parameters, expected.parameters)


@pytest.mark.parametrize("prefetch", [0, 1, 7])
def test_gathering_ahead_changes_nothing(prefetch: int) -> None:
    assert_follows(Network, prefetch=prefetch, microbatches=2)


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
def test_a_precision_is_that_of_other_stages(precision: str) -> None:
    dtype = getattr(torch, precision)

    def body(comm: Communicator, stage: int) -> list[Tensor]:
        model = Network()
        optimizer = staged(model, sgd(model), comm, stage, precision=precision)
        for step in range(STEPS):
            plain_loss(model, batch(step, comm.rank).to(dtype)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole(model)

    assert all(each[0].dtype == dtype for each in assert_same_in_stage_3(body, 2))


def nested(name: str, module: nn.Module) -> bool:
    return name in ("layers.0", "layers.1", "layers.1.inner", "layers.3.outer", "head")


POLICIES: dict[str, Callable[[str, nn.Module], bool]] = {
    "linear layers": lambda name, module: isinstance(module, nn.Linear),
    "nested": nested,
    "one": lambda name, module: name == "layers.2",
}


@pytest.mark.parametrize("policy", POLICIES)
def test_units_may_be_chosen(policy: str) -> None:
    assert_follows(Network, policy=POLICIES[policy])


class Recomputing(Network):
    def __init__(self, inside: bool) -> None:
        super().__init__(Inside if inside else ResidualLayer)
        self.inside = inside

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        if self.inside:
            for layer in self.layers:
                hidden = layer(hidden)
        else:
            for first, second in (self.layers[:2], self.layers[2:]):
                hidden = torch.utils.checkpoint.checkpoint(
                    lambda value, a=first, b=second: b(a(value)), hidden, use_reentrant=False
                )
        return self.head(hidden)


class Inside(ResidualLayer):
    def forward(self, inputs: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, inputs, use_reentrant=False)


@pytest.mark.parametrize("policy", [None, "linear layers"])
@pytest.mark.parametrize("inside", [True, False], ids=["inside units", "around units"])
def test_activations_may_be_recomputed(inside: bool, policy: str | None) -> None:
    assert_follows(lambda: Recomputing(inside), policy=None if policy is None else POLICIES[policy])


class Twice(Network):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layers[0](self.embed(inputs))
        return self.head(self.layers[1](hidden) + self.layers[0](hidden) + self.layers[1](hidden))


class Tied(Network):
    """The root's matrix is used by the root twice; one of layer 0 and 2 is the same, and so the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(torch.ones(3, 4))
        self.unembed = nn.Linear(4, 3, bias=False)
        self.unembed.weight = self.head.weight
        self.layers[2].outer.weight = self.layers[0].outer.weight
        fill(self, 4, dtype=torch.float32)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + functional.linear(self.embed(inputs), self.unembed.weight)


class Mixture(nn.Module):
    """Two experts, of which a batch may need one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 2)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        shares, chosen = self.router(hidden).softmax(-1).max(-1)
        result = hidden
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            if len(rows):
                result = result.index_add(0, rows, shares[rows, None] * torch.tanh(expert(hidden[rows])))
        return result


class Leaving(Network):
    """Calls all layers, but may leave out what some in a row have made."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        kept = hidden
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden)
            if not (1 <= number <= 4 and inputs[0, 0] > 0):
                kept = kept + hidden
            hidden = kept
        return self.head(kept)


class Results(nn.Module):
    """Dictionaries, tuples and lists come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Telling() for _ in range(3))
        fill(self, 4, dtype=torch.float32)

    def forward(self, inputs: Tensor) -> Any:
        state = {"hidden": (inputs, [inputs * 2]), "step": 0}
        for layer in self.layers:
            state = layer(state, scale=inputs)
        return state


class Telling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.other = nn.Linear(3, 3)

    def forward(self, state: Any, scale: Tensor) -> Any:
        first, (second,) = state["hidden"]
        return {"hidden": (self.linear(first) * scale, [self.other(second)]), "step": state["step"] + 1}


def test_units_may_take_and_return_tuples_and_dictionaries() -> None:
    def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
        first, (second,) = model(inputs)["hidden"]
        return (first * second).square().mean()

    assert_follows(Results, loss_of=loss_of)


class Opaque:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Hiding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Opaque:
        return Opaque(self.linear(inputs))


class Hidden(nn.Module):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.layers = nn.ModuleList(Hiding() for _ in range(2))
        self.layers.requires_grad_(not frozen)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        for layer in self.layers:
            hidden = layer(hidden).value
        return hidden


@pytest.mark.parametrize("frozen", [False, True])
def test_a_unit_whose_backward_could_not_be_seen_coming_is_refused(frozen: bool) -> None:
    # Frozen parameters are needed in backward, too: their memory is freed by then.
    model = fully_shard(Hidden(frozen), Communicator.alone())
    with pytest.raises(OperationError, match=r"unit 'layers.0' returned a Opaque without a tensor"):
        model(torch.ones(1, 3))
    with torch.no_grad():
        assert model(torch.ones(1, 3)).shape == (1, 4)


class Partly(Network):
    """As with LoRA: the first layer frozen wholly, the others but for one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)
        for layer in self.layers[1:]:
            layer.inner.requires_grad_(False)
        self.head.requires_grad_(False)


class Frozen(Network):
    """All frozen but what comes first, so that gradients pass through frozen units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.requires_grad_(False)
        self.head.requires_grad_(False)


class Unpacking(ResidualLayer):
    def forward(self, packed: Any) -> Tensor:
        return super().forward(packed.value)


class Packing(Network):
    """Gradients of frozen layers' inputs come of which nobody can tell, as the inputs are in objects."""

    def __init__(self) -> None:
        super().__init__(Unpacking)
        for layer in self.layers:
            layer.inner.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        for layer in self.layers:
            hidden = layer(Opaque(hidden))
        return self.head(hidden)


class Last(Network):
    """All frozen but what comes last, so that no gradient passes through frozen units."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.layers[:3].requires_grad_(False)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("build", [Partly, Packing, Frozen, Last])
def test_parameters_may_be_frozen(build: Callable[[], nn.Module], microbatches: int) -> None:
    assert_follows(build, microbatches=microbatches)


def test_a_model_that_was_frozen_after_it_was_sharded_can_be_called() -> None:
    model = fully_shard(Network(), Communicator.alone())
    plain_loss(model, batch(0, 0)).backward()
    model.requires_grad_(False)
    assert torch.equal(model(batch(1, 0)), Network()(batch(1, 0)))
    inputs = [batch(1, 0).requires_grad_() for _ in range(2)]
    for network, given in zip((model, Network()), inputs, strict=True):
        plain_loss(network, given).backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)  # type: ignore[arg-type]


def test_a_unit_may_return_tensors_that_have_no_gradient() -> None:
    class Deciding(ResidualLayer):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs).argmax(-1)

    model = Network()
    model.layers.append(Deciding())
    fully_shard(model, Communicator.alone())
    assert model.layers[4](torch.ones(2, 4)).shape == (2,)


class Weighted(nn.Module):
    """A layer whose input's gradient comes before those of its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.full((4,), 2.0))
        self.second = nn.Parameter(torch.full((4,), 3.0))
        self.third = nn.Parameter(torch.full((4,), 5.0))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.first * self.second * self.third * inputs


def test_a_unit_of_which_a_part_was_frozen_after_it_was_sharded_stays_until_its_gradients_are_there() -> None:
    model = nn.Sequential(Weighted())
    fully_shard(model, Communicator.alone(), policy=lambda name, module: name == "0")
    optimizer = optimizer_of(model, Communicator.alone())
    model[0].first.requires_grad_(False)
    model(torch.ones(4, requires_grad=True)).sum().backward()
    found = {name: gradient.tolist() for name, _, gradient in optimizer.named_gradients()}
    assert found == {"0.second": [10.0] * 4, "0.third": [6.0] * 4}


class Stopped(nn.Module):
    """A layer whose backward needs a weight's values after the weight's own gradient is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(4))
        self.second = nn.Parameter(torch.empty(4))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.first.detach() * self.second.detach() + self.first * 2 + self.second * 3


class Dropping(Network):
    """Layers that are left out now and then, the same on all ranks: 1 comes in the second forward only."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        order = [[0, 2, 3], [3, 1, 0], [2, 1]][self.calls % 3]
        self.calls += 1
        hidden = self.embed(inputs)
        for number in order:
            hidden = self.layers[number](hidden)
        return self.head(hidden)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "experts that some ranks use": lambda: Network(Mixture, count=6),
    "units called twice, or not at all": Twice,
    "layers whose result some ranks leave out": lambda: Leaving(count=7),
    "tied parameters": Tied,
    "another order in every forward": Dropping,
    "values that backward needs last": lambda: Network(Stopped),
}


@pytest.mark.parametrize(("name", "prefetch"), checkered(MODELS, [0, 1, 3]))
def test_units_may_be_used_in_any_way(name: str, prefetch: int) -> None:
    leaves_out = [batch(10 * step, rank)[0, 0] > 0 for step in range(STEPS) for rank in range(2)]
    assert 0 < sum(leaves_out) < len(leaves_out)
    assert_follows(MODELS[name], prefetch=prefetch)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_may_come_between_forward_and_backward(context: Any) -> None:
    def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
        loss = plain_loss(model, inputs)
        model.eval()
        with context():
            model(inputs + 1)
        model.train()
        return loss

    assert_follows(Network, loss_of=loss_of)


class Residual(nn.Module):
    """A layer whose own gradients are complete before the frozen values' work for the input's is done."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.empty(4), requires_grad=False)
        self.inner = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.frozen + self.inner(inputs.detach())


class Detaching(Network):
    """A network of which one forward may leave out the gradients of what comes into its layers."""

    def __init__(self) -> None:
        super().__init__(Residual)
        self.detaches = False

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        hidden = hidden.detach() if self.detaches else hidden
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


@pytest.mark.parametrize("has_graph", [False, True], ids=["no_grad", "with a graph"])
def test_a_forward_in_between_leaves_frozen_values_where_backward_needs_them(has_graph: bool) -> None:
    def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
        found = model(inputs)
        model.detaches = True  # type: ignore[assignment]
        with torch.set_grad_enabled(has_graph):
            target = model(inputs + 1).detach()
        model.detaches = False  # type: ignore[assignment]
        return (found - target).square().mean()

    assert_follows(Detaching, loss_of=loss_of)


@ranks(2)
def test_an_evaluation_may_come_first(comm: Communicator) -> None:
    model = fully_shard(Network(), comm)
    with torch.no_grad():
        first = model(batch(0, 0))
    loss = plain_loss(model, batch(0, 0))
    loss.backward()
    assert torch.equal(first.square().mean(), loss.detach())


def test_two_forwards_may_have_one_backward_and_one_forward_two() -> None:
    def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
        return plain_loss(model, inputs) + plain_loss(model, inputs + 1)

    assert_follows(Network, loss_of=loss_of)

    def body(comm: Communicator, stage: int) -> list[Tensor]:
        model = Network()
        optimizer = staged(model, sgd(model), comm, stage)
        loss = plain_loss(model, batch(0, comm.rank))
        with optimizer.no_sync():
            loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        return whole(model)

    assert_same_in_stage_3(body)


def penalty(model: nn.Module, inputs: Tensor) -> Tensor:
    inputs = inputs.clone().requires_grad_()
    (of_inputs,) = torch.autograd.grad(model(inputs).square().sum(), inputs, create_graph=True)
    return of_inputs.square().sum()


def penalized_loss(model: nn.Module, inputs: Tensor) -> Tensor:
    loss = plain_loss(model, inputs)
    return loss + (penalty(model, inputs) + penalty(model, inputs + 1)) / 1e5


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_gradient_may_be_differentiated(microbatches: int) -> None:
    assert_follows(Network, loss_of=penalized_loss, microbatches=microbatches)


@pytest.mark.usefixtures("gradients_of_any_size_are_added_in_place")
def test_a_gradient_may_be_differentiated_where_products_are_made_in_buckets() -> None:
    def body(comm: Communicator, stage: int) -> list[Tensor]:
        return trained(comm, Network, stage=stage, loss_of=penalized_loss).parameters

    expected = run_loopback(2, lambda comm: body(comm, 0))
    for found, other in zip(run_loopback(2, lambda comm: body(comm, 3)), expected, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-4, atol=1e-5)  # sums in another order


def test_what_is_gathered_for_differentiating_a_gradient_goes_with_it_or_with_the_step() -> None:
    model = fully_shard(Network(), Communicator.alone())
    optimizer = optimizer_of(model, Communicator.alone())
    with gathered(model) as now:
        penalty(model, batch(0, 0)).backward()
        assert now() == []
        penalty(model, batch(0, 0))
        assert len(now()) == 5
        with torch.no_grad():
            model(batch(1, 0))
        assert len(now()) == 5
        optimizer.step()
        assert now() == []
        plain_loss(model, batch(0, 0)).backward()
        assert now() == []


@pytest.mark.parametrize("first", [True, False], ids=["in the first forward", "later"])
def test_after_an_error_in_a_forward_training_goes_on(first: bool) -> None:
    class Failing(ResidualLayer):
        fails = False

        def forward(self, inputs: Tensor) -> Tensor:
            if self.fails:
                raise KeyError("in this layer")
            return super().forward(inputs)

    def body(comm: Communicator, stage: int) -> list[Tensor]:
        model = Network(Failing)
        optimizer = staged(model, sgd(model), comm, stage)
        for step in range(STEPS):
            if step == (0 if first else 1):
                model.layers[1].fails = True
                with pytest.raises(KeyError):
                    model(batch(step, comm.rank))
                model.layers[1].fails = False
            plain_loss(model, batch(step, comm.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if stage == 3:
            with pytest.raises(ShardedParameterError):
                model.layers[1].inner.weight.sum()
        return whole(model)

    assert_same_in_stage_3(body)


def test_after_an_error_in_a_backward_training_goes_on() -> None:
    def body(comm: Communicator, stage: int) -> list[Tensor]:
        model = Network()
        optimizer = staged(model, sgd(model), comm, stage)

        def fail(_: Tensor) -> None:
            raise KeyError("in the middle")

        def spoil(module: nn.Module, args: Any, output: Tensor) -> None:
            output.register_hook(fail)

        for step in range(STEPS):
            if step == 1 and stage == 3:
                handle = model.layers[1].register_forward_hook(spoil)
                loss = plain_loss(model, batch(step, comm.rank))
                with pytest.raises(KeyError):
                    loss.backward()
                handle.remove()
                optimizer.zero_grad()
            plain_loss(model, batch(step, comm.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole(model)

    assert_same_in_stage_3(body)


# --- as few gathered units as promised ------------------------------------------------------------------


@pytest.mark.parametrize("inside", [None, True], ids=["plain", "recomputed"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_only_the_root_the_last_the_current_and_those_ahead_are_gathered(
    prefetch: int, inside: bool | None
) -> None:
    count = 9

    def body(comm: Communicator) -> tuple[list[int], list[str]]:
        model = Network(Inside if inside else ResidualLayer, count=count)
        fully_shard(model, comm, prefetch=prefetch)
        optimizer = optimizer_of(model, comm)
        counts: list[int] = []

        def note(*_: Any) -> None:
            here = [unit for unit in sharding(model).units if unit.is_allocated]
            counts.append(len(here))
            # What is not here has no memory.
            for unit in sharding(model).units:
                held = sum(each.flat.untyped_storage().nbytes() for each in unit.groups)
                assert held == (unit.nbytes if unit in here else 0)

        def note_in_backward(module: nn.Module, args: Any, output: Tensor) -> None:
            output.register_hook(note)

        for layer in model.layers:
            layer.register_forward_hook(note_in_backward)
            for part in (layer.inner, layer.outer):
                part.register_forward_hook(note)
        for step in range(3):
            if step == 1:  # the order is known
                counts.clear()
            plain_loss(model, batch(step, comm.rank)).backward()
            note()
            optimizer.step()
            optimizer.zero_grad()
        return counts, [unit.name for unit in sharding(model).units if unit.is_allocated]

    for counts, at_the_end in run_loopback(2, body):
        assert at_the_end == []
        # The root, the current one, those ahead, and the last one, or in backward the one before.
        assert max(counts) <= 1 + 1 + 1 + prefetch
        assert max(counts) >= 2 + prefetch, "those ahead are on their way"
        assert counts[-1] == 0


def test_the_first_forward_gathers_nothing_ahead_and_a_backward_frees_all() -> None:
    model = fully_shard(Network(), Communicator.alone())
    with gathered(model) as now:
        assert now() == []
        loss = plain_loss(model, batch(0, 0))
        assert now() == ["", "layers.3"]
        loss.backward()
        assert now() == []
        with torch.no_grad():
            model(batch(0, 0))
        assert now() == []


def test_a_unit_with_a_parameter_that_gets_no_gradient_goes_when_the_next_one_comes() -> None:
    class Unused(ResidualLayer):
        def __init__(self) -> None:
            super().__init__()
            self.never = nn.Parameter(torch.ones(2))

    model = fully_shard(Network(Unused, count=6), Communicator.alone(), prefetch=0)
    counts: list[int] = []

    def note(_: Tensor) -> None:
        counts.append(sum(unit.is_allocated for unit in sharding(model).units))

    def note_in_backward(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(note)

    for layer in model.layers:
        layer.register_forward_hook(note_in_backward)
    for _ in range(2):
        counts.clear()
        plain_loss(model, batch(0, 0)).backward()
    assert counts == [2, 3, 3, 3, 3, 3]
    assert not any(unit.is_allocated for unit in sharding(model).units)


# --- parameters that are not there ----------------------------------------------------------------------


def absent() -> tuple[Network, nn.Parameter]:
    model = Network()
    fully_shard(model, Communicator.alone())
    return model, model.layers[1].inner.weight


USES: dict[str, Callable[[nn.Parameter], Any]] = {
    "sum": lambda p: p.sum(),
    "plus": lambda p: p + 1,
    "one plus": lambda p: 1 + p,
    "item": lambda p: p[0, 0],
    "linear": lambda p: functional.linear(torch.ones(2, 4), p),
    "matmul": lambda p: torch.ones(4, 5) @ p,
    "cat": lambda p: torch.cat([torch.ones(5, 4), p]),
    "stack": lambda p: torch.stack((p, p)),
    "norm": lambda p: nn.utils.get_total_norm([p]),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "to": lambda p: p.to(torch.float64),
    "clone": lambda p: p.clone(),
    "deepcopy": lambda p: copy.deepcopy(p),
    "detach": lambda p: p.detach().sum(),
    "data": lambda p: p.data.sum(),
    "list": lambda p: p.tolist(),
    "numpy": lambda p: p.detach().numpy(),
    "float": lambda p: float(p[0, 0]),
    "equal": lambda p: torch.equal(p, torch.zeros(5, 4)),
    "allclose": lambda p: torch.allclose(torch.zeros(5, 4), p),
    "any": lambda p: bool((p > 0).any()),
}

WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "zero_": lambda p: p.zero_(),
    "mul_": lambda p: p.mul_(2),
    "div_": lambda p: p.div_(2),
    "clamp_": lambda p: p.clamp_(0, 1),
    "copy_": lambda p: p.copy_(torch.ones(5, 4)),
    "normal_": lambda p: nn.init.normal_(p),
    "trunc_normal_": lambda p: nn.init.trunc_normal_(p),
    "kaiming_uniform_": lambda p: nn.init.kaiming_uniform_(p),
    "orthogonal_": lambda p: nn.init.orthogonal_(p),
    "item": lambda p: p.__setitem__(0, 1.0),
    "augmented": lambda p: p.__iadd__(1.0),
    "foreach": lambda p: torch._foreach_mul_([p], 2.0),
    "out": lambda p: torch.add(torch.ones(5, 4), 1, out=p),
    "data": lambda p: p.data.fill_(0.0),
}


def test_what_is_not_there_cannot_be_used() -> None:
    _, parameter = absent()
    for name, use in [*USES.items(), *WRITES.items()]:
        with pytest.raises(ShardedParameterError) as caught, torch.no_grad():
            use(parameter)
        assert "layers.1.inner.weight was used by" in str(caught.value), name
        assert "outside of its unit 'layers.1', where a rank has only a shard of it" in str(caught.value), (
            name
        )


def test_what_says_nothing_about_values_can_be_asked() -> None:
    model, parameter = absent()
    assert parameter.shape == (5, 4)
    assert (parameter.numel(), parameter.dim(), parameter.size(0), parameter.ndim) == (20, 2, 5, 2)
    assert (parameter.dtype, parameter.device.type) == (torch.float32, "cpu")
    assert (parameter.requires_grad, parameter.grad, parameter.is_leaf) == (True, None, True)
    assert parameter.nbytes == 80
    assert parameter.is_floating_point()
    assert not parameter.is_meta
    assert parameter in {parameter}
    assert parameter is model.layers[1].inner.weight
    assert isinstance(parameter, nn.Parameter)
    assert torch.zeros_like(parameter).sum() == 0
    assert "layers.1.inner.weight" in repr(parameter)
    parameter.requires_grad_(False)
    assert "Linear(in_features=4" in repr(model)


def test_a_parameter_without_elements_is_always_there() -> None:
    model = nn.Linear(3, 0)
    fully_shard(model, Communicator.alone())
    assert model.weight.detach().tolist() == []
    assert model(torch.ones(2, 3)).shape == (2, 0)


class Stealing(Network):
    def forward(self, inputs: Tensor) -> Tensor:
        return functional.linear(super().forward(inputs), self.layers[1].inner.weight[:, :3])


def test_a_weight_of_another_unit_is_no_silent_mistake() -> None:
    def body(comm: Communicator) -> str:
        model = fully_shard(Stealing(), comm)
        try:
            model(batch(0, 0))
        except ShardedParameterError as error:
            return str(error)
        return "computed"

    for told in run_loopback(2, body):
        assert "layers.1.inner.weight was used by __getitem__ outside of its unit 'layers.1'" in told
        assert "choose a unit around all modules that use it (policy=)" in told


def test_a_state_dict_is_refused_but_for_within_summon() -> None:
    model, _ = absent()
    for module in (model, model.layers[0]):
        with pytest.raises(ShardedParameterError, match=r"summon_full_parameters\(model\)"):
            module.state_dict()
    with summon_full_parameters(model):
        found = {name: value.clone() for name, value in model.state_dict().items()}
    expected = Network().state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    with pytest.raises(RuntimeError, match="was used by copy_ outside of its unit"):
        model.load_state_dict(expected)


# --- summoned -------------------------------------------------------------------------------------------


def test_what_is_written_back_is_trained_on_and_what_is_not_is_forgotten() -> None:
    def body(comm: Communicator) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        model = fully_shard(Network(), comm, precision="bfloat16")
        optimizer = optimizer_of(model, comm)
        start = whole(model)
        with summon_full_parameters(model, write_back=False), torch.no_grad():
            model.head.weight.fill_(7.0)
        forgotten = whole(model)
        assert same(forgotten, start)
        plain_loss(model, batch(0, comm.rank).bfloat16()).backward()
        optimizer.step()
        optimizer.zero_grad()
        masters = [master.clone() for master in optimizer.update.masters]  # type: ignore[union-attr]
        with summon_full_parameters(model), torch.no_grad():
            model.head.weight.fill_(7.0)
            model.layers[2].inner.bias[1] = 5.0
        optimizer.step()  # without a gradient: nothing but that masters follow
        after = [master.clone() for master in optimizer.update.masters]  # type: ignore[union-attr]
        return masters, after, whole(model)

    changed = 0
    for masters, after, found in run_loopback(2, body):
        for before, now in zip(masters, after, strict=True):
            moved = before != now
            changed += int(moved.sum())
            assert set(now[moved].tolist()) <= {7.0, 5.0}
        assert found[-1].eq(7.0).all()
        assert found[2 + 2 * 3 + 1].tolist()[1] == 5.0
    # Masters are finer than parameters: those of what was not written to stay as they are.
    assert changed == 12 + 1


def test_what_is_written_back_before_there_is_an_optimizer_is_what_it_steps_on() -> None:
    def body(comm: Communicator) -> tuple[list[Tensor], list[Tensor]]:
        written, fresh = (fully_shard(Network(), comm, precision="bfloat16") for _ in range(2))
        with summon_full_parameters(written), torch.no_grad():
            written.head.weight.fill_(7.0)
        masters = []
        for model in (written, fresh):
            optimizer = optimizer_of(model, comm)
            masters.append(torch.cat(optimizer.update.masters))  # type: ignore[union-attr]
            optimizer.param_groups[0]["lr"] = 1e-6
            plain_loss(model, batch(0, comm.rank).bfloat16()).backward()
            optimizer.step()
        return masters, whole(written)

    changed = 0
    for (written, fresh), found in run_loopback(2, body):
        moved = written != fresh
        changed += int(moved.sum())
        assert written[moved].eq(7.0).all()
        assert found[-1].eq(7.0).all()
    # What was not written to is as it was given, and not rounded.
    assert changed == 12


@pytest.mark.parametrize("writes", ["rank 1 alone", "other values", "the last of its shard"])
def test_ranks_that_write_different_values_are_told_so_and_nothing_is_kept(writes: str) -> None:
    def body(comm: Communicator) -> tuple[str, bool]:
        model = fully_shard(Network(), comm)
        start = whole(model)
        try:
            with summon_full_parameters(model), torch.no_grad():
                if writes == "other values":
                    model.head.weight.fill_(float(comm.rank))
                elif comm.rank == 1:
                    model.head.weight.view(-1)[-1 if writes.startswith("the last") else 0] = 5.0
        except OperationError as error:
            return str(error), same(whole(model), start)
        return "", False

    for told, is_as_before in run_loopback(3, body):
        assert "ranks wrote different values to parameters" in told
        assert "head.weight" in told
        assert is_as_before


@ranks(2)
def test_weights_that_others_stood_in_for_go_on_from_their_masters(comm: Communicator) -> None:
    model = fully_shard(Network(), comm, precision="bfloat16")
    optimizer = optimizer_of(model, comm)
    plain_loss(model, batch(0, comm.rank).bfloat16()).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = torch.cat(optimizer.update.masters)  # type: ignore[union-attr]
    own = whole(model)
    for weights in ([torch.full_like(each, 0.5) for each in own], own):  # averages, to evaluate them
        with summon_full_parameters(model), torch.no_grad():
            for parameter, value in zip(model.parameters(), weights, strict=True):
                parameter.copy_(value)
        plain_loss(model, batch(1, comm.rank).bfloat16())
    optimizer.step()  # without a gradient
    assert torch.equal(before, torch.cat(optimizer.update.masters))  # type: ignore[union-attr]


@ranks(2)
def test_a_model_may_be_called_while_it_is_summoned(comm: Communicator) -> None:
    model = fully_shard(Network(), comm)
    optimizer = optimizer_of(model, comm)
    reference = Network()
    with summon_full_parameters(model, write_back=True):
        with torch.no_grad():
            found = [model(batch(0, 0))]
            model.embed.weight.mul_(2)
            reference.embed.weight.mul_(2)
        with summon_full_parameters(model):
            found.append(model(batch(0, 0)).detach())
        plain_loss(model, batch(0, 0)).backward()
        inside = same([p.detach() for p in model.parameters()], [p.detach() for p in reference.parameters()])
    optimizer.zero_grad()
    expected = [Network()(batch(0, 0)), reference(batch(0, 0))]
    after = same(whole(model), [p.detach() for p in reference.parameters()])
    with pytest.raises(ShardedParameterError):
        model.embed.weight.sum()
    assert inside
    assert after
    assert same(found, [each.detach() for each in expected])


def test_a_copy_of_a_summoned_model_is_an_ordinary_one() -> None:
    def body(comm: Communicator) -> list[list[Tensor]]:
        model = fully_shard(Network(), comm)
        optimizer = optimizer_of(model, comm)
        with summon_full_parameters(model):
            copied = copy.deepcopy(model)
        plain_loss(model, batch(0, comm.rank)).backward()
        optimizer.step()
        if comm.rank == 0:  # alone
            plain_loss(copied, batch(0, 0)).backward()
            torch.save(copied, io.BytesIO())
        gradients = [p.grad for p in copied.parameters() if p.grad is not None]
        return [list(copied.state_dict().values()), gradients, whole(fully_shard(copied, comm))]

    reference = Network()
    plain_loss(reference, batch(0, 0)).backward()
    results = run_loopback(2, body)
    for values, _, sharded_again in results:
        assert same(values, [p.detach() for p in reference.parameters()])
        assert same(sharded_again, values)
    assert same(results[0][1], [p.grad for p in reference.parameters() if p.grad is not None])


def test_a_model_that_is_not_summoned_is_not_copied_and_none_is_saved_whole() -> None:
    model, parameter = absent()
    with pytest.raises(ShardedParameterError, match=r"look at it inside `with hpcpar\.summon_full"):
        copy.deepcopy(model)
    with pytest.raises(OperationError, match=r"save its state_dict\(\) or a copy"):
        torch.save(model, io.BytesIO())
    for whole_or_part in (model, parameter):
        with summon_full_parameters(model), pytest.raises(OperationError, match="was to be saved as a whole"):
            torch.save(whole_or_part, io.BytesIO())


def test_summoning_ends_after_an_error_and_a_plain_model_is_left_as_it_is() -> None:
    model, parameter = absent()
    with pytest.raises(KeyError), summon_full_parameters(model):
        raise KeyError
    with pytest.raises(ShardedParameterError):
        parameter.sum()
    plain = nn.Linear(2, 2)
    with summon_full_parameters(plain, write_back=True):
        plain.weight.data.fill_(1.0)
    assert plain.weight.sum() == 4


# --- building -------------------------------------------------------------------------------------------


class Drawn(nn.Module):
    """Parameters and buffers that reset_parameters makes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def value_of(name: str, parameter: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("size", [1, 3])
def test_a_model_on_the_meta_device_gets_the_values_that_a_function_gives(size: int) -> None:
    asked: list[str] = []

    def values(name: str, parameter: Tensor) -> Tensor:
        asked.append(name)
        return value_of(name, parameter)

    def body(comm: Communicator) -> tuple[list[Tensor], bool]:
        with torch.device("meta"):
            model = Drawn()
        fully_shard(model, comm, values=values)
        return whole(model), any(buffer.is_meta for buffer in model.buffers())

    expected = [value_of(name, parameter) for name, parameter in Drawn().named_parameters()]
    for found, has_meta in run_loopback(size, body):
        assert same(found, expected)
        assert not has_meta
    assert sorted(asked) == sorted(list(Drawn().state_dict()) * size)


def test_what_was_noted_on_a_parameter_of_the_meta_device_is_on_the_one_in_its_place() -> None:
    with torch.device("meta"):
        model = Drawn()
    note(model.head.weight, split="by rows")
    fully_shard(model, Communicator.alone(), values=value_of)
    assert not model.head.weight.is_meta
    assert info_of(model.head.weight).split == "by rows"


def test_values_may_replace_those_of_a_model_that_is_there() -> None:
    found = whole(fully_shard(Drawn(), Communicator.alone(), values=value_of))
    assert same(found, [value_of(name, parameter) for name, parameter in Drawn().named_parameters()])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_model_on_the_meta_device_is_drawn_the_same_on_all_ranks(size: int) -> None:
    def body(comm: Communicator) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        with torch.device("meta"):
            model = Drawn()
        fully_shard(model, comm)
        optimizer = optimizer_of(model, comm)
        drawn = whole(model)
        plain_loss(model, batch(0, comm.rank)).backward()
        optimizer.step()
        return drawn, list(model.buffers()), whole(model)

    first, *others = run_loopback(size, body)
    for other in others:
        assert same(other[0], first[0])
        assert same(other[2], first[2])
    for (name, _), value in zip(Drawn().named_parameters(), first[0], strict=True):
        if "norm" not in name:  # at most 1/√inputs, as torch's Linear draws them
            assert 0.05 < value.abs().max().item() <= 0.58
    assert not torch.equal(first[0][2], first[0][4]), "every layer is drawn by itself"
    assert [buffer.shape for buffer in first[1]] == [(4,), (4,), ()]


def test_what_cannot_be_drawn_is_named_and_needs_values() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

    with torch.device("meta"):
        model = nn.Sequential(Own())
    with pytest.raises(OperationError, match=r"0 \(Own\) is on the meta device and has no reset_parameters"):
        fully_shard(model, Communicator.alone())
    fully_shard(model, Communicator.alone(), values=lambda name, p: torch.full(p.shape, 3.0))
    assert [value.tolist() for value in whole(model)] == [[3.0, 3.0]]


class Turning(nn.Module):
    """Has a buffer that is not saved and that nothing but its constructor makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("angles", torch.arange(2) + 0.5, persistent=False)
        self.register_buffer("places", torch.arange(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs) * self.angles + self.places


@pytest.mark.parametrize("size", [1, 2])
def test_values_are_asked_for_buffers_of_the_meta_device(size: int) -> None:
    built = Turning()
    told = {**dict(built.named_parameters()), **dict(built.named_buffers())}

    def body(comm: Communicator) -> Tensor:
        with torch.device("meta"):
            model = Turning()
        fully_shard(model, comm, values=lambda name, _: told[name])
        assert model.places.dtype is torch.int64
        return model(torch.ones(1, 2)).detach()

    assert all(torch.equal(found, built(torch.ones(1, 2))) for found in run_loopback(size, body))


@pytest.mark.parametrize("answer", ["KeyError", "None"])
def test_a_buffer_that_values_do_not_know_is_named_on_every_rank(answer: str) -> None:
    told: dict[str, Any] = dict(Turning().named_parameters())

    def values(name: str, _: Tensor) -> Any:
        return told[name] if answer == "KeyError" else told.get(name)

    def body(comm: Communicator) -> None:
        with torch.device("meta"):
            model = Turning()
        with pytest.raises(
            PeerFailedError, match=r"values= did not tell 'angles', a buffer: .* angles, places"
        ):
            fully_shard(model, comm, values=values)

    run_loopback(2, body)


def test_buffers_that_are_there_become_rank_0s() -> None:
    def body(comm: Communicator) -> Tensor:
        model = Turning()
        model.angles += comm.rank
        return fully_shard(model, comm).angles

    assert [found.tolist() for found in run_loopback(2, body)] == [[0.5, 1.5]] * 2


def test_a_hugging_face_model_on_the_meta_device_makes_the_buffers_that_are_not_saved() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=10
    )
    built = transformers.LlamaForCausalLM(config).eval()
    saved, tokens = built.state_dict(), torch.arange(6).view(2, 3)

    def body(comm: Communicator) -> Tensor:
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config).eval()
        with pytest.raises(OperationError, match=r"by rules of transformers, .* pass values="):
            fully_shard(model, comm)
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config).eval()
        fully_shard(model, comm, values=lambda name, _: saved[name])
        with torch.no_grad():
            return model(tokens).logits

    with torch.no_grad():
        expected = built(tokens).logits
    for found in run_loopback(2, body):
        torch.testing.assert_close(found, expected)


def test_values_of_another_shape_are_refused() -> None:
    with pytest.raises(
        OperationError, match=r"values\('weight'\) gave a tensor of shape \[3\] for .* \[2, 2\]"
    ):
        fully_shard(nn.Linear(2, 2), Communicator.alone(), values=lambda name, p: torch.ones(3))


@ranks(3)
def test_values_that_fail_on_one_rank_are_an_error_on_all(comm: Communicator) -> None:
    def values(name: str, parameter: Tensor) -> Tensor:
        if comm.rank == 1 and name == "layers.1.inner.bias":
            raise FileNotFoundError("part-7.bin")
        return torch.ones(parameter.shape)

    error = error_of(lambda: fully_shard(Network(), comm, values=values))
    assert isinstance(error, PeerFailedError)
    assert "failed on 1 of 3 ranks" in str(error)
    assert "rank 1: FileNotFoundError: part-7.bin" in str(error)


@pytest.mark.parametrize(
    ("options", "others"),
    [
        ({"policy": POLICIES["nested"]}, {"policy": POLICIES["linear layers"]}),
        ({"prefetch": 1}, {"prefetch": 2}),
        ({"precision": "bfloat16"}, {}),
    ],
)
@ranks(3)
def test_a_rank_that_shards_another_way_is_an_error_on_all(
    comm: Communicator, options: Any, others: Any
) -> None:
    error = error_of(lambda: fully_shard(Network(), comm, **(others if comm.rank == 1 else options)))
    assert isinstance(error, MismatchError)


@ranks(3)
def test_rank_0s_values_become_everybodys(comm: Communicator) -> None:
    torch.manual_seed(comm.rank)
    model = Network()
    with torch.no_grad():
        model.head.weight.fill_(float(comm.rank + 1))
    found = whole(fully_shard(model, comm))
    assert found[-1].eq(1.0).all()


def test_parameters_keep_their_identity_and_their_optimizers() -> None:
    model = Network()
    before = list(model.parameters())
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model, Communicator.alone())
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    optimizer = DistributedOptimizer(inner, model.named_parameters(), Communicator.alone())
    assert optimizer.zero_stage == 3
    plain_loss(model, batch(0, 0)).backward()
    optimizer.step()
    assert not same(whole(model), [p.detach() for p in Network().parameters()])


def test_a_second_optimizer_takes_over_from_one_that_was_closed_or_forgotten() -> None:
    for close in (True, False):
        model = fully_shard(Network(), Communicator.alone())
        first = optimizer_of(model, Communicator.alone())
        plain_loss(model, batch(0, 0)).backward()
        first.step()
        first.zero_grad()
        before = whole(model)
        if close:
            first.close()
        del first
        gc.collect()
        second = optimizer_of(model, Communicator.alone())
        plain_loss(model, batch(1, 0)).backward()
        second.step()
        assert not any(torch.equal(a, b) for a, b in zip(before, whole(model), strict=True))


@pytest.mark.parametrize("reshard", ["unit", "step"])
def test_a_stage_is_gathered_for_each_microbatch_or_once_a_step(reshard: Literal["unit", "step"]) -> None:
    # Two microbatches are between forward and backward, as in a pipeline; two steps, and an evaluation.
    def trained_by(comm: Communicator, options: dict[str, Any] | None) -> tuple[list[Tensor], list[int]]:
        model, gathers = Network(), []
        if options is not None:
            fully_shard(model, comm, stages=[model], **options)
        optimizer = optimizer_of(model, comm, backward_passes_per_step=2)
        for step in range(2):
            losses = [plain_loss(model, batch(2 * step + number, 0)) for number in range(2)]
            for loss in losses:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(batch(0, 0))
            if (sharding := sharding_in(model)) is not None:
                gathers.append(sharding.gathers)
                assert not any(unit.is_allocated for unit in sharding.units)
        return whole(model), gathers

    expected, _ = trained_by(Communicator.alone(), None)
    units = 5  # the root and four layers
    in_step = units if reshard == "step" else 2 * 2 * units
    for found, gathers in run_loopback(2, lambda comm: trained_by(comm, {"reshard": reshard})):
        assert gathers == [in_step + units, 2 * (in_step + units)]
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True))


def test_an_optimizer_of_some_parameters_is_refused() -> None:
    model = fully_shard(Network(), Communicator.alone())
    inner = torch.optim.SGD(list(model.parameters())[:-2], lr=0.1)
    with pytest.raises(OperationError, match=r"but head\.weight and 1 others are missing"):
        DistributedOptimizer(inner, model.named_parameters(), Communicator.alone())


def test_what_makes_no_sense_is_refused() -> None:
    model = fully_shard(Network(), Communicator.alone())
    with pytest.raises(OperationError, match="the model is fully sharded already"):
        fully_shard(model, Communicator.alone())
    with pytest.raises(OperationError, match="prefetch=-1; give 0 or more units"):
        fully_shard(Network(), Communicator.alone(), prefetch=-1)
    with pytest.raises(OperationError, match='reshard=\'layer\'; give "unit" or "step"'):
        fully_shard(Network(), Communicator.alone(), reshard="layer")  # type: ignore[arg-type]
    network = Network()
    with pytest.raises(OperationError, match=r"layers\.0\.\S+ is a parameter of the model and of none"):
        fully_shard(network, Communicator.alone(), stages=[network.embed, network.head])
    with pytest.raises(OperationError, match=r"embed\.weight is a parameter of two stages of this rank"):
        fully_shard(network, Communicator.alone(), stages=[network, network.embed])
    with pytest.raises(OperationError, match="zero_stage=2, but the model is fully sharded"):
        optimizer_of(model, Communicator.alone(), zero_stage=2)
    with pytest.raises(OperationError, match="give it to fully_shard"):
        optimizer_of(model, Communicator.alone(), precision="bfloat16")
    with pytest.raises(OperationError, match="zero_stage=3 needs a model that is sharded"):
        optimizer_of(Network(), Communicator.alone(), zero_stage=3)
    both = [*model.named_parameters("a"), *fully_shard(Network(), Communicator.alone()).named_parameters("b")]
    with pytest.raises(OperationError, match="belong to several fully sharded models"):
        DistributedOptimizer(torch.optim.SGD([p for _, p in both], lr=0.1), both, Communicator.alone())


def test_a_steps_graph_goes_with_the_step_and_does_not_wait_for_the_garbage_collector() -> None:
    model = fully_shard(Network(), Communicator.alone())
    optimizer = optimizer_of(model, Communicator.alone())
    gc.collect()
    gc.disable()
    try:
        for number in range(2):
            plain_loss(model, batch(number, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kept = [type(each).__name__ for each in gc.garbage if "Backward" in type(each).__name__]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert kept == []


@ranks(3)
def test_units_have_the_memory_of_their_parameters_and_padding(comm: Communicator) -> None:
    model = fully_shard(Network(count=2), comm)
    units: list[FsdpUnit] = sharding(model).units
    # Root: 12 + 4 + 12 = 28 elements, 30 on three ranks; a layer: 20 + 5 + 20 = 45.
    assert [(unit.name, unit.nbytes, sum(h.block.own.nbytes for h in unit.groups)) for unit in units] == [
        ("", 120, 40),
        ("layers.0", 180, 60),
        ("layers.1", 180, 60),
    ]


@pytest.mark.mpi
@pytest.mark.parametrize("build", [Network, Partly, Tied], ids=lambda build: build.__name__)
def test_on_mpi_too_it_is_the_same(world: Communicator, build: Callable[[], nn.Module]) -> None:
    expected = trained(world, build, stage=2, microbatches=2)
    found = trained(world, build, microbatches=2)
    # More than two ranks' sums have an order.
    near = all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-5)
        for a, b in zip(found.parameters, expected.parameters, strict=True)
    )
    equal = world.size > 2 or same(found.parameters, expected.parameters)
    assert world.allgather_object((near, equal)) == [(True, True)] * world.size
