"""Every optimizer steps on pieces as it does on the whole, and what ranks keep is what theory says.

float64, and a tolerance of 1e-10: sums over ranks are taken in another order than in one process.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer, summon_full_parameters
from hpcpar.data_parallel.sharded_step import MASTER, is_elementwise
from hpcpar.errors import OperationError, PeerFailedError
from tests.data_parallel.staged import ResidualLayer, fill, ranks, staged, whole
from tests.grid import pairwise

SIZE = 3
STEPS = 4
SAMPLES = 12
TOLERANCE = 1e-10
STAGES = [1, 2, 3]

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": functools.partial(optim.SGD, lr=0.1),
    "sgd momentum": functools.partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "sgd nesterov": functools.partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd maximize": functools.partial(optim.SGD, lr=0.01, momentum=0.9, maximize=True, fused=True),
    "adam": functools.partial(optim.Adam, lr=0.01, weight_decay=0.1, amsgrad=True, foreach=False),
    "adam rate in a tensor": functools.partial(optim.Adam, lr=torch.tensor(0.01), foreach=False),
    "adamw fused": functools.partial(optim.AdamW, lr=0.01, fused=True),
    "adamw foreach": functools.partial(optim.AdamW, lr=0.01, foreach=True),
    "adamw plain": functools.partial(optim.AdamW, lr=0.01, foreach=False),
    "adagrad": functools.partial(optim.Adagrad, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "adagrad fused": functools.partial(optim.Adagrad, lr=0.1, fused=True),
    "rmsprop": functools.partial(optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "nadam": functools.partial(optim.NAdam, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "radam": functools.partial(optim.RAdam, lr=0.01),
    "adamax": functools.partial(optim.Adamax, lr=0.01),
    "adadelta": functools.partial(optim.Adadelta, lr=1.0),
    "asgd": functools.partial(optim.ASGD, lr=0.1, t0=1),
    "rprop": functools.partial(optim.Rprop, lr=0.01),
}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.layers = nn.ModuleList(ResidualLayer() for _ in range(2))
        self.head = nn.Linear(4, 3, bias=False)
        self.double()
        fill(self, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def batch(step: int, shape: tuple[int, ...] = (3,)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(SAMPLES, *shape, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)


def own_part(comm: Communicator, step: int, shape: tuple[int, ...] = (3,)) -> list[Tensor]:
    return [tensor.chunk(comm.size)[comm.rank] for tensor in batch(step, shape)]


def wrapped(
    model: nn.Module, optimizer: optim.Optimizer, comm: Communicator, stage: int, **options: Any
) -> DistributedOptimizer:
    """Make it with small buckets, in stage 3 on a sharded model."""
    return staged(model, optimizer, comm, stage, **{"bucket_bytes": 200, "first_bucket_bytes": 80, **options})


def assert_near(found: Iterable[Tensor], expected: Iterable[Tensor], tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(list(found), list(expected), rtol=tolerance, atol=tolerance)


Groups = Callable[[nn.Module], Any]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices and the rest, with options of their own, in an order that is not the model's."""
    return [
        {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 0.02},
        {"params": [p for p in model.parameters() if p.dim() >= 2]},
    ]


def serial(
    model: nn.Module,
    make: Callable[..., optim.Optimizer],
    *,
    groups: Groups = lambda model: model.parameters(),
    schedule: Any = None,
    steps: int = STEPS,
    shape: tuple[int, ...] = (3,),
) -> list[Tensor]:
    optimizer = make(groups(model))
    scheduler = None if schedule is None else schedule(optimizer)
    for step in range(steps):
        inputs, targets = batch(step, shape)
        functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def parallel(
    comm: Communicator,
    model: nn.Module,
    make: Callable[..., optim.Optimizer],
    stage: int,
    *,
    groups: Groups = lambda model: model.parameters(),
    schedule: Any = None,
    schedule_first: bool = False,
    steps: int = STEPS,
    shape: tuple[int, ...] = (3,),
    **options: Any,
) -> list[Tensor]:
    inner = make(groups(model))
    scheduler = schedule(inner) if schedule_first else None
    optimizer = wrapped(model, inner, comm, stage, **options)
    if schedule is not None and scheduler is None:
        scheduler = schedule(optimizer)
    for step in range(steps):
        inputs, targets = own_part(comm, step, shape)
        functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return whole(model)


@pytest.mark.parametrize(("name", "stage"), zip(OPTIMIZERS, itertools.cycle(STAGES)))
def test_every_elementwise_optimizer_of_torch_steps_on_pieces(name: str, stage: int) -> None:
    expected = serial(Network(), OPTIMIZERS[name])
    start = [parameter.detach() for parameter in Network().parameters()]
    assert all((a - b).abs().max() > 1e-4 for a, b in zip(start, expected, strict=True))
    for found in run_loopback(SIZE, lambda comm: parallel(comm, Network(), OPTIMIZERS[name], stage)):
        assert_near(found, expected)


class Scaled(Network):
    """With a parameter without dimensions, whose moments look like counters."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * self.log_scale.exp()


@pytest.mark.parametrize(
    ("way", "name", "stage"),
    pairwise(
        ["its own state", "its own part", "the plain one's", "wrapped late"],
        ["sgd momentum", "adamw fused", "asgd"],
        STAGES,
    ),
)
def test_the_state_of_a_parameter_without_dimensions_goes_on(way: str, name: str, stage: int) -> None:
    expected = serial(Scaled(), OPTIMIZERS[name])

    def body(comm: Communicator) -> list[Tensor]:
        model = Scaled()
        inner = OPTIMIZERS[name](model.parameters())
        is_plain = way in ("the plain one's", "wrapped late")
        for step in range(STEPS // 2 if is_plain else 0):
            inputs, targets = batch(step)
            functional.mse_loss(model(inputs), targets).backward()
            inner.step()
            inner.zero_grad()
        state = inner.state_dict()
        if way != "wrapped late":
            inner = OPTIMIZERS[name](model.parameters())
        optimizer = wrapped(model, inner, comm, stage)
        for step in range(STEPS // 2 if is_plain else 0, STEPS):
            if step == STEPS // 2 and way == "its own part":
                optimizer.load_sharded_state_dict(optimizer.sharded_state_dict())
            elif step == STEPS // 2 and way != "wrapped late":
                optimizer.load_state_dict(state if is_plain else optimizer.state_dict())
            inputs, targets = own_part(comm, step)
            functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole(model)

    for found in run_loopback(SIZE, body):
        assert_near(found, expected)


@pytest.mark.parametrize(
    ("name", "stage", "first"), pairwise(["sgd momentum", "adamw fused"], [0, *STAGES], [True, False])
)
def test_groups_keep_their_options_and_schedulers_change_them(name: str, stage: int, first: bool) -> None:
    def schedule(optimizer: optim.Optimizer) -> Any:
        return optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def body(comm: Communicator) -> list[Tensor]:
        return parallel(
            comm,
            Network(),
            OPTIMIZERS[name],
            stage,
            groups=two_groups,
            schedule=schedule,
            schedule_first=first,
        )

    plain = serial(Network(), OPTIMIZERS[name])
    expected = serial(Network(), OPTIMIZERS[name], groups=two_groups, schedule=schedule)
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(plain, expected, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = run_loopback(SIZE, body)
    for found in results:
        assert_near(found, expected)


@pytest.mark.parametrize("stage", [0, *STAGES])
@ranks(2)
def test_hooks_of_the_optimizer_are_called_once_a_step(comm: Communicator, stage: int) -> None:
    model = Network()
    optimizer = wrapped(model, OPTIMIZERS["adamw fused"](model.parameters()), comm, stage)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    for step in range(2):
        inputs, targets = own_part(comm, step)
        functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert called == ["before", "after"] * 2


@pytest.mark.parametrize(("stage", "overlap"), [(0, False), (1, True), (2, False), (2, True)])
def test_a_hook_for_after_a_step_finds_and_may_change_whole_parameters(stage: int, overlap: bool) -> None:
    def course(model: nn.Module, optimizer: optim.Optimizer, comm: Communicator) -> list[Tensor]:
        def clamp(*_: Any) -> None:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-0.2, 0.2)

        optimizer.register_step_post_hook(clamp)
        for step in range(3):
            optimizer.zero_grad()
            inputs, targets = own_part(comm, step)
            functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        return whole(model)

    def body(comm: Communicator) -> list[Tensor]:
        model = Network()
        optimizer = staged(
            model,
            OPTIMIZERS["adamw fused"](model.parameters()),
            comm,
            stage,
            model=model,
            overlap_allgather=overlap,
            bucket_bytes=200,
        )
        return course(model, optimizer, comm)

    reference = Network()
    inner = OPTIMIZERS["adamw fused"](reference.parameters())
    expected = course(reference, inner, Communicator.alone())
    for found in run_loopback(2, body):
        assert_near(found, expected)


@pytest.mark.filterwarnings("error")
@ranks(4)
def test_a_rank_without_a_piece_knows_that_it_has_stepped(comm: Communicator) -> None:
    # Five elements on four ranks: two each, and the last one has padding alone.
    value = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    inner = optim.SGD([value], lr=1.0)
    scheduler = optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    optimizer = DistributedOptimizer(inner, [("value", value)], comm, zero_stage=1)
    for _ in range(2):
        value.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert value.tolist() == [-1.5] * 5


# --- parameters of all kinds --------------------------------------------------------------------------


class Odd(nn.Module):
    """Frozen parameters, a tied matrix, a matrix in channels_last, and what not every rank or step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 2, dtype=torch.float64)
        self.frozen = nn.Linear(4, 4, dtype=torch.float64).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))
        self.tied = nn.Linear(4, 4, bias=False, dtype=torch.float64)
        self.twin = nn.Linear(4, 4, bias=False, dtype=torch.float64)
        self.twin.weight = self.tied.weight
        self.scale = nn.Parameter(torch.empty((), dtype=torch.float64))
        self.sometimes = nn.Parameter(torch.empty(3, dtype=torch.float64))
        self.never = nn.Parameter(torch.empty(3, dtype=torch.float64))
        self.head = nn.Linear(4, 3, dtype=torch.float64)
        fill(self, 3)
        self.conv.to(memory_format=torch.channels_last)

    def forward(self, inputs: Tensor, use: bool = False) -> Tensor:
        hidden = self.frozen(self.tied(self.conv(inputs).mean((2, 3))))
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        out = self.head(self.twin(hidden)) * self.scale
        return out + self.sometimes if use else out


def odd_course(
    model: Odd, optimizer: optim.Optimizer, comm: Communicator, *, set_to_none: bool = True
) -> None:
    """`sometimes` is used in steps 1 and 2, on rank 0's samples alone."""
    for step in range(STEPS):
        inputs, targets = own_part(comm, step, (2, 3, 3))
        if comm.size == 1:
            first, second = inputs.tensor_split([SAMPLES // SIZE])
            found = torch.cat([model(first, use=step in (1, 2)), model(second)])
        else:
            found = model(inputs, use=step in (1, 2) and comm.rank == 0)
        functional.mse_loss(found, targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


@pytest.mark.parametrize(
    ("stage", "name", "set_to_none"),
    pairwise([0, *STAGES], ["sgd momentum", "adamw fused", "adamw foreach"], [True, False]),
)
def test_odd_parameters_are_stepped_on_as_in_one_process(name: str, set_to_none: bool, stage: int) -> None:
    def body(comm: Communicator) -> tuple[list[Tensor], list[str]]:
        model = Odd()
        optimizer = wrapped(model, OPTIMIZERS[name](model.parameters()), comm, stage)
        odd_course(model, optimizer, comm, set_to_none=set_to_none)
        optimizer.zero_grad()
        with summon_full_parameters(model):
            assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
        return whole(model), [n for n, p in model.named_parameters() if p.grad is not None]

    reference = Odd()
    optimizer = OPTIMIZERS[name](reference.parameters())
    odd_course(reference, optimizer, Communicator.alone(), set_to_none=set_to_none)
    expected = [parameter.detach() for parameter in reference.parameters()]
    start = dict(Odd().named_parameters())
    untouched = {n for n, p in reference.named_parameters() if torch.equal(p, start[n])}
    assert untouched == {"never", "frozen.weight", "frozen.bias"}
    for found, with_gradients in run_loopback(SIZE, body):
        assert_near(found, expected)
        assert with_gradients == []


class Mixed(nn.Module):
    """float64 and float32 in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(3, 4, dtype=torch.float64)
        self.layers = nn.ModuleList([nn.Linear(4, 4, dtype=torch.float32)])
        self.head = nn.Linear(4, 3, dtype=torch.float64)
        fill(self, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.wide(inputs)).float()
        return self.head(torch.tanh(self.layers[0](hidden)).double())


@pytest.mark.parametrize("stage", [0, *STAGES])
def test_element_types_may_be_mixed(stage: int) -> None:
    make = OPTIMIZERS["adamw foreach"]
    expected = serial(Mixed(), make)
    for found in run_loopback(SIZE, lambda comm: parallel(comm, Mixed(), make, stage)):
        assert [p.dtype for p in found] == [p.dtype for p in expected]
        assert_near(found, expected, 1e-5)  # float32


@pytest.mark.parametrize("stage", STAGES)
def test_complex_parameters_are_stepped_on_by_their_parts(stage: int) -> None:
    def rotated(comm: Communicator, stage: int) -> Tensor:
        value = nn.Parameter(torch.arange(5.0).to(torch.complex128) * (1 + 2j))
        model = nn.Module()
        model.value = value
        model.forward = lambda inputs: (model.value * inputs).abs().square().sum()  # type: ignore[method-assign]
        optimizer = wrapped(model, optim.Adam([model.value], lr=0.1, foreach=False), comm, stage)
        for _ in range(3):
            model(torch.tensor(1.0 + comm.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        (found,) = whole(model)
        return found

    expected = run_loopback(2, lambda comm: rotated(comm, 0))[0]
    for found in run_loopback(2, lambda comm: rotated(comm, stage)):
        assert found.dtype == torch.complex128
        assert_near([found], [expected])


def test_a_complex_parameter_has_no_16_bits() -> None:
    value = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(OperationError, match="value is of complex64"):
        DistributedOptimizer(
            optim.SGD([value], lr=1.0), [("value", value)], Communicator.alone(), precision="bfloat16"
        )


# --- what may be done between a backward and a step ----------------------------------------------------


def backward(comm: Communicator, model: nn.Module, step: int = 0) -> None:
    inputs, targets = own_part(comm, step)
    functional.mse_loss(model(inputs), targets).backward()


@pytest.mark.parametrize("stage", [0, *STAGES])
def test_gradients_that_are_edited_are_those_that_are_stepped_on(stage: int) -> None:
    def body(comm: Communicator) -> tuple[list[Tensor], dict[str, int]]:
        model = Network()
        optimizer = wrapped(model, OPTIMIZERS["adamw fused"](model.parameters()), comm, stage)
        backward(comm, model)
        seen: dict[str, int] = {}
        for name, elements, gradient in optimizer.named_gradients():
            assert gradient.shape == (elements.stop - elements.start,)
            seen[name] = seen.get(name, 0) + gradient.numel()
            if name.startswith("layers.0"):
                gradient.mul_(-3.0)
        optimizer.step()
        return whole(model), seen

    model = Network()
    optimizer = OPTIMIZERS["adamw fused"](model.parameters())
    backward(Communicator.alone(), model)
    for parameter in model.layers[0].parameters():
        parameter.grad.mul_(-3.0)
    optimizer.step()
    results = run_loopback(SIZE, body)
    for found, _ in results:
        assert_near(found, [parameter.detach() for parameter in model.parameters()])
    times = SIZE if stage == 0 else 1
    totals = {name: sum(seen.get(name, 0) for _, seen in results) for name, _ in model.named_parameters()}
    assert totals == {name: times * parameter.numel() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("stage", "waits"), [(1, True), (2, True), (3, True), (2, False), (3, False)])
def test_a_gradient_that_is_set_when_its_bucket_has_left_is_an_error(stage: int, waits: bool) -> None:
    model = Network()
    optimizer = wrapped(model, OPTIMIZERS["sgd"](model.parameters()), Communicator.alone(), stage)
    backward(Communicator.alone(), model)
    if waits:
        optimizer.synchronize()
    with pytest.raises(OperationError, match=r"the gradient of head\.weight was to be replaced"):
        model.head.weight.grad = torch.ones(3, 4, dtype=torch.float64)


@pytest.mark.parametrize("stage", [0, *STAGES])
def test_a_parameter_that_was_frozen_when_the_optimizer_was_made_may_not_get_a_gradient(stage: int) -> None:
    model = Network()
    model.head.requires_grad_(False)
    optimizer = wrapped(model, OPTIMIZERS["sgd"](model.parameters()), Communicator.alone(), stage)
    model.head.requires_grad_(True)
    backward(Communicator.alone(), model)
    with pytest.raises(OperationError, match=r"head\.weight was frozen when its optimizer was made"):
        optimizer.step()


@pytest.mark.parametrize("forgets", [None, True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_uses_gradients_up_and_says_so_unless_they_are_forgotten(
    stage: int, forgets: bool | None
) -> None:
    # In one process the next backward would add to what the last step has used; shards keep no such sum.
    # Nor need they where that backward is of another network's loss: a GAN calls netD.zero_grad() after it.
    def body(comm: Communicator) -> str:
        model = Network()
        optimizer = wrapped(model, OPTIMIZERS["sgd"](model.parameters()), comm, stage)
        backward(comm, model)
        optimizer.step()
        backward(comm, model)
        if forgets is not None:
            model.zero_grad(set_to_none=forgets)
        try:
            optimizer.step()
        except OperationError as error:
            return str(error)
        return "call zero_grad() after each step(), as was done"

    for told in run_loopback(2, body):
        assert "call zero_grad() after each step()" in told
        assert told.endswith("as was done") == (forgets is not None)


@pytest.mark.parametrize("stage", [0, *STAGES])
def test_a_closure_is_called_once_and_its_average_loss_comes_back(stage: int) -> None:
    def body(comm: Communicator) -> tuple[float, int, list[Tensor]]:
        model = Network()
        optimizer = wrapped(model, OPTIMIZERS["adamw fused"](model.parameters()), comm, stage)
        calls = []

        def closure() -> Tensor:
            calls.append(1)
            optimizer.zero_grad()
            inputs, targets = own_part(comm, len(calls))
            loss = functional.mse_loss(model(inputs), targets)
            loss.backward()
            return loss

        for _ in range(2):
            loss = optimizer.step(closure)
        return float(loss), len(calls), whole(model)

    expected = body(Communicator.alone())
    for loss, calls, found in run_loopback(SIZE, body):
        assert loss == pytest.approx(expected[0], rel=1e-12)
        assert calls == 2
        assert_near(found, expected[2])


@pytest.mark.parametrize("precision", [None, "bfloat16"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_group_that_is_added_later_leaves_the_states_of_others(stage: int, precision: str | None) -> None:
    def body(comm: Communicator, is_plain: bool = False) -> list[Tensor]:
        model = Network()
        late = [p for name, p in model.named_parameters() if name.startswith("layers.1")]
        early = [p for p in model.parameters() if not any(p is q for q in late)]
        inner = optim.AdamW(early, lr=0.01)
        optimizer = inner if is_plain else wrapped(model, inner, comm, stage, precision=precision)
        if precision is not None:
            model.bfloat16()  # the late ones, too; they have no memory of the optimizer's as yet
        for step in range(STEPS):
            if step == 2:
                with pytest.raises(ValueError, match="more than one parameter group"):
                    optimizer.add_param_group({"params": early[:1]})  # and nothing has changed
                optimizer.add_param_group({"params": late, "lr": 0.05})
            inputs, targets = own_part(comm, step)
            dtype = torch.bfloat16 if precision else torch.float64
            functional.mse_loss(model(inputs.to(dtype)), targets.to(dtype)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step < 2:  # theirs belong to nobody
                for parameter in late:
                    parameter.grad = None
        return whole(model)

    if precision is not None:
        # model.bfloat16() may not take parameters out of the optimizer's memory: they are of that type.
        first, *others = run_loopback(SIZE, body)
        assert all(torch.equal(a, b) for other in others for a, b in zip(other, first, strict=True))
        return
    expected = body(Communicator.alone(), is_plain=True)
    plain = serial(Network(), functools.partial(optim.AdamW, lr=0.01))
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(plain, expected, strict=True))
    for found in run_loopback(SIZE, body):
        assert_near(found, expected)


@pytest.mark.parametrize("stage", [0, *STAGES])
def test_parameters_may_be_moved_between_groups_and_taken_out(stage: int) -> None:
    def course(model: nn.Module, optimizer: Any, comm: Communicator) -> list[Tensor]:
        for step in range(3):
            first, second = optimizer.param_groups
            if step == 1:
                first["params"].append(second["params"].pop())
            if step == 2:
                del second["params"][0]
            backward(comm, model, step)
            optimizer.step()
            optimizer.zero_grad()
            model.zero_grad()
        return whole(model)

    def body(comm: Communicator) -> list[Tensor]:
        model = Network()
        inner = OPTIMIZERS["sgd momentum"](two_groups(model))
        return course(model, wrapped(model, inner, comm, stage), comm)

    model = Network()
    expected = course(model, OPTIMIZERS["sgd momentum"](two_groups(model)), Communicator.alone())
    for found in run_loopback(SIZE, body):
        assert_near(found, expected)


@pytest.mark.parametrize("stage", STAGES)
def test_a_state_of_another_shape_is_refused_on_every_rank(stage: int) -> None:
    """A step on it would fail on ranks that own some of it, and others would wait for them."""

    def body(comm: Communicator) -> None:
        model = Network()
        optimizer = wrapped(model, OPTIMIZERS["sgd momentum"](model.parameters()), comm, stage)
        backward(comm, model)
        optimizer.step()
        state = optimizer.state_dict()
        next(iter(state["state"].values()))["momentum_buffer"] = torch.ones(2, 3)
        with pytest.raises(PeerFailedError, match=r"momentum_buffer of \S+ has shape \[2, 3\] in the state"):
            optimizer.load_state_dict(state)

    run_loopback(SIZE, body)


def test_counters_are_no_elements() -> None:
    assert is_elementwise(torch.ones(1), 1)
    assert not is_elementwise(torch.tensor(3.0), 1)
    assert not is_elementwise(torch.ones(2), 1)
    assert not is_elementwise(3.0, 1)
    assert MASTER == "master_weight"
