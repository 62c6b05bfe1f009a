"""How DistributedOptimizer's gradients travel: compressed, grouped, sparse, beside others, some ranks gone.

What ranks find is gathered first and asserted after, so that no rank fails alone while others wait.
"""

from __future__ import annotations

import gc
import json
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, SparseAdam

import hpcpar.horovod.torch as hvd
from hpcpar.errors import OperationError
from hpcpar.horovod.basics import the_context
from hpcpar.horovod.torch.compression import Compressor
from tests.grid import pairwise
from tests.horovod.torch.training import (
    ROUNDING,
    ROWS,
    STEPS,
    assert_as_alone,
    distance,
    errors_everywhere,
    model_of,
)

pytestmark = pytest.mark.mpi


@pytest.fixture(autouse=True)
def _initialized(hvd: ModuleType) -> None:
    """All tests here train."""


def sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=0.01)


def rows_of(number: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return (
        torch.randn(ROWS, 6, generator=generator, dtype=torch.float64),
        torch.randn(ROWS, 3, generator=generator, dtype=torch.float64),
    )


def loss_of(model: nn.Module, number: int, rank: int) -> Tensor:
    x, y = rows_of(number, rank)
    return F.mse_loss(model(x), y)


def here() -> list[int]:
    return [hvd.rank()]


def all_ranks() -> list[int]:
    return list(range(hvd.size()))


def train(
    model: nn.Module,
    optimizer: Optimizer,
    ranks: list[int],
    *,
    steps: range = range(STEPS),
    passes: int = 1,
    loss: Callable[[nn.Module, int, int], Tensor] = loss_of,
) -> None:
    """On the mean of the ranks' losses."""
    for step in steps:
        optimizer.zero_grad()
        for number in range(passes):
            for rank in ranks:
                (loss(model, 10 * step + number, rank) / len(ranks)).backward()
        optimizer.step()


def wrapped(
    make: Callable[[Any], Optimizer] = sgd, seed: int = 0, **options: Any
) -> tuple[nn.Sequential, Any]:
    model = model_of(seed)
    return model, hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), **options)


def alone(make: Callable[[Any], Optimizer] = sgd, seed: int = 0, **options: Any) -> nn.Sequential:
    """One process that has all ranks' rows."""
    model = model_of(seed)
    train(model, make(model.parameters()), all_ranks(), **options)
    return model


def sum_of_ranks() -> float:
    """Whether collectives go on working: 0 + 1 + …"""
    return hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum).item()


def expected_sum() -> float:
    return hvd.size() * (hvd.size() - 1) / 2


# Groups


GROUPS: dict[str, Callable[[nn.Sequential], Any]] = {
    "one": lambda model: 1,
    "two": lambda model: 2,
    "more than parameters": lambda model: 100,
    "one list": lambda model: [list(model.parameters())],
    "the first with the last": lambda model: [[model[0].weight, model[2].bias], [model[0].bias]],
    "an empty one": lambda model: [[], [model[2].weight]],
    "tuples": lambda model: ((model[2].bias, model[2].weight),),
    "a stranger": lambda model: [[model[0].bias, torch.ones(3)]],
}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_groups_change_nothing_in_the_result(groups: Callable[[nn.Sequential], Any]) -> None:
    model = model_of()
    options = {"groups": groups(model), "backward_passes_per_step": 2}
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), **options)
    train(model, optimizer, here(), passes=2)
    assert_as_alone(model, alone(passes=2))


def test_groups_of_several_types_are_reduced_each_in_its_own() -> None:
    parameters = [
        nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.bfloat16)
    ]
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=1.0), groups=[parameters])
    for _ in range(2):
        optimizer.zero_grad()
        sum((parameter * (2 * hvd.rank() + 1)).sum().double() for parameter in parameters).backward()
        optimizer.step()
    assert [parameter.grad.tolist() for parameter in parameters] == [[hvd.size()] * 2] * 3


def test_num_groups_is_the_old_name_and_says_so() -> None:
    model = model_of()
    with pytest.warns(DeprecationWarning, match="groups") as told:
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), num_groups=2)
    train(model, optimizer, here())
    assert_as_alone(model, alone())
    assert len(told) == 1


def test_every_gradient_is_an_allreduce_in_the_timeline(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    model, optimizer = wrapped()
    context = the_context()
    context.start_timeline(str(path), mark_cycles=False)
    train(model, optimizer, here(), steps=range(3))
    context.stop_timeline()
    if hvd.rank() or hvd.size() == 1:
        return
    events = json.loads(path.read_text())
    named = {each["pid"]: each["args"].get("name", "") for each in events if each["name"] == "process_name"}
    of_tensor: dict[str, list[str]] = {name: [] for name, _ in model.named_parameters()}
    for event in events:
        tensor = named.get(event["pid"], "").removeprefix("allreduce.")
        if event["ph"] in "BE" and tensor in of_tensor:
            of_tensor[tensor].append(event["ph"] + " " + event["name"])
    step = ["B NEGOTIATE_ALLREDUCE", "E NEGOTIATE_ALLREDUCE", "B ALLREDUCE", "B MPI_ALLREDUCE"]
    step += ["E MPI_ALLREDUCE", "E ALLREDUCE"]
    assert of_tensor == dict.fromkeys(of_tensor, 3 * step)


# Compression


NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16}


def reduced(gradient: Tensor, **options: Any) -> list[Tensor]:
    """What ranks see of their gradients after synchronize, in the first step and in a later one."""
    parameter = nn.Parameter(torch.zeros_like(gradient))
    optimizer = hvd.DistributedOptimizer(SGD([parameter], lr=1.0), **options)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        (parameter * gradient).sum().backward()
        optimizer.synchronize()
        found.append(parameter.grad.clone())
        with optimizer.skip_synchronize():
            optimizer.step()
    return found


@pytest.mark.parametrize(
    ("dtype", "op", "name"), pairwise([torch.float32, torch.float64], ["Average", "Sum"], NARROW), ids=str
)
def test_compressed_gradients_are_off_by_their_last_places_only(
    name: str, op: str, dtype: torch.dtype
) -> None:
    brought = [
        torch.randn(500, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in all_ranks()
    ]
    found = reduced(brought[hvd.rank()], compression=getattr(hvd.Compression, name), op=getattr(hvd, op))
    exact, lengths = torch.stack(brought).sum(0), torch.stack(brought).abs().sum(0)
    factor = 1.0 / hvd.size() if op == "Average" else 1.0
    # Each value is rounded once, and each of the partial sums; the average once more.
    bound = torch.finfo(NARROW[name]).eps / 2 * (hvd.size() + 1) * lengths * factor
    if hvd.size() == 1:
        bound = torch.zeros_like(bound)
    told = hvd.allgather_object([gradient.numpy().tobytes() for gradient in found])
    assert all(gradient.dtype == dtype for gradient in found)
    assert all(bool(((gradient - exact * factor).abs() <= bound + 1e-7).all()) for gradient in found)
    assert all(other == told[0] for other in told)


@pytest.mark.parametrize("predivide", [1.0, 4.0])
def test_an_average_of_what_fits_into_float16_fits_and_a_spike_is_held_at_its_end(predivide: float) -> None:
    spike = 7e4 if hvd.rank() == 0 else 6e4
    gradient = torch.tensor([spike, -spike, 4e4, 6.5e4, 1.0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what was held, once in a process
        found = reduced(gradient, compression=hvd.Compression.fp16, gradient_predivide_factor=predivide)
    held = 7e4 if hvd.size() == 1 else (65504 + 6e4 * (hvd.size() - 1)) / hvd.size()
    for average in found:
        assert average.tolist() == pytest.approx([held, -held, 4e4, 6.5e4, 1.0], rel=2e-3)


def test_infinity_stays_infinity_so_that_scalers_see_it() -> None:
    gradient = torch.tensor([float("inf") if hvd.rank() == 0 else 1.0, float("nan"), 1.0])
    found = reduced(gradient, compression=hvd.Compression.fp16)
    assert [[str(value) for value in average.tolist()] for average in found] == [["inf", "nan", "1.0"]] * 2


class Recording(Compressor):
    """Tells what it was given, and needs on the way back what it made on the way there."""

    given: list[tuple[int, ...]]
    returned: list[tuple[int, ...]]

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:  # type: ignore[override]
        cls.given.append(tuple(tensor.shape))
        return tensor.flip(0) * 2, (tensor.shape, hvd.rank())

    @classmethod
    def decompress(cls, tensor: Tensor, ctx: Any) -> Tensor:  # type: ignore[override]
        shape, rank = ctx
        cls.returned.append((*tensor.shape, rank))
        return tensor.reshape(shape).flip(0) / 2


class EverySecond(Compressor):
    """Sends half of the values, in float32; the others count as zero."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor.flatten()[::2].float(), tensor

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        result = torch.zeros_like(ctx)
        result.view(-1)[::2] = tensor.to(ctx.dtype)
        return result


@pytest.mark.parametrize("options", [{}, {"groups": 1}, {"backward_passes_per_step": 2}], ids=str)
def test_a_compressor_of_the_users_own_sees_each_gradient_in_its_shape(
    options: dict[str, Any], needs_two: None
) -> None:
    Recording.given, Recording.returned = [], []
    model, optimizer = wrapped(compression=Recording, **options)
    passes = options.get("backward_passes_per_step", 1)
    train(model, optimizer, here(), passes=passes)
    shapes = sorted(tuple(parameter.shape) for parameter in model.parameters()) * STEPS
    assert_as_alone(model, alone(passes=passes))
    assert sorted(Recording.given) == sorted(shapes)
    assert sorted(Recording.returned) == sorted((*shape, hvd.rank()) for shape in shapes)


def test_a_compressor_may_send_fewer_values() -> None:
    values = torch.arange(1.0, 8.0, dtype=torch.float64).view(7, 1)
    found = reduced(values * (hvd.rank() + 1), compression=EverySecond)
    kept = torch.tensor([1.0, 0.0] * 3 + [1.0], dtype=torch.float64).view(7, 1)
    expected = values * (hvd.size() + 1) / 2 * (kept if hvd.size() > 1 else 1.0)
    for average in found:
        assert torch.allclose(average, expected, rtol=1e-6)


def test_a_compressor_given_as_an_instance_works() -> None:
    class Scaled(Compressor):
        def __init__(self, scale: float) -> None:
            self.scale = scale

        def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:  # type: ignore[override]
            return tensor * self.scale, None

        def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:  # type: ignore[override]
            return tensor / self.scale

    model, optimizer = wrapped(compression=Scaled(64.0))
    train(model, optimizer, here())
    assert_as_alone(model, alone())


# Sparse gradients


class Bag(nn.Module):
    """A table, of which each rank looks up other rows, some twice, and a head."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table = nn.Embedding(9, 3, sparse=sparse).double()
        self.head = nn.Linear(3, 1).double()

    def forward(self, indices: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(indices)))


def lookup_loss(model: nn.Module, number: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    indices = torch.randint(0, 9, (4 + rank,), generator=generator)
    return model(torch.cat([indices, indices[:1]])).square().mean()


def absent_loss(model: nn.Module, number: int, rank: int) -> Tensor:
    """Step 0: nobody looks anything up; step 1: rank 0 alone; step 2: nobody; then all but rank 0."""
    looks_up = [False, rank == 0, False, rank > 0 or hvd.size() == 1][number // 10]
    assert isinstance(model, Bag)
    return lookup_loss(model, number, rank) if looks_up else model.head(torch.ones(2, 3).double()).mean()


class Both(Optimizer):
    """An optimizer of the table and one of the head, stepped together."""

    def __init__(self, *optimizers: Any) -> None:
        self.optimizers = optimizers

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()


SPARSE: dict[str, Callable[[Bag, Callable[[Any, str], Any]], Optimizer]] = {
    "SGD": lambda model, wrap: wrap(SGD(model.parameters(), lr=0.1), ""),
    "SparseAdam": lambda model, wrap: Both(
        wrap(SparseAdam(model.table.parameters(), lr=0.01), "table."),
        wrap(SGD(model.head.parameters(), lr=0.1, momentum=0.9), "head."),
    ),
}


def wrapping(model: Bag, **options: Any) -> Callable[[Any, str], Any]:
    def wrap(optimizer: Optimizer, prefix: str) -> Any:
        named = [(name, p) for name, p in model.named_parameters() if name.startswith(prefix)]
        return hvd.DistributedOptimizer(optimizer, named, **options)

    return wrap


def not_wrapped(optimizer: Optimizer, _: str) -> Any:
    return optimizer


@pytest.mark.parametrize(
    ("loss", "passes", "as_dense", "make"),
    pairwise([lookup_loss, absent_loss], [1, 2], [False, True], SPARSE.values()),
)
def test_sparse_gradients_are_those_of_one_process_and_sparse_however_they_travel(
    make: Callable[[Bag, Any], Optimizer],
    as_dense: bool,
    passes: int,
    loss: Callable[[nn.Module, int, int], Tensor],
) -> None:
    model, reference = Bag(sparse=True), Bag(sparse=True)
    options = {"backward_passes_per_step": passes, "sparse_as_dense": as_dense}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, make(model, wrapping(model, **options)), here(), passes=passes, loss=loss)
    gradient = model.table.weight.grad
    train(reference, make(reference, not_wrapped), all_ranks(), passes=passes, loss=loss)
    assert_as_alone(model, reference)
    assert gradient.layout is torch.sparse_coo
    assert gradient.sparse_dim() == reference.table.weight.grad.sparse_dim() == 1


@pytest.mark.parametrize("as_dense", [False, True])
def test_rows_of_sparse_gradients_that_add_up_to_zero_are_there_as_in_one_process(as_dense: bool) -> None:
    parameter = nn.Parameter(torch.zeros(5, 2))
    optimizer = hvd.DistributedOptimizer(SGD([parameter], lr=1.0), op=hvd.Sum, sparse_as_dense=as_dense)
    sign = {0: 1.0, 1: -1.0}.get(hvd.rank(), 0.0)
    (F.embedding(torch.tensor([2, 4]), parameter, sparse=True) * sign).sum().backward()
    optimizer.synchronize()
    expected = 0.0 if hvd.size() > 1 else 1.0
    found = parameter.grad.coalesce()
    assert found.indices().tolist() == [[2, 4]]
    assert found.values().tolist() == [[expected] * 2] * 2


@pytest.mark.parametrize("as_dense", [False, True])
def test_gradients_that_are_sparse_in_all_dimensions_need_not_be_on_every_rank(as_dense: bool) -> None:
    def steps(parameter: nn.Parameter, optimizer: Optimizer, ranks: list[int]) -> None:
        for step in range(3):
            optimizer.zero_grad()
            for rank in ranks:
                if rank == step % hvd.size() or rank == 0:
                    places = torch.tensor([[rank % 2, 2]])
                    loss = torch.gather(parameter, 1, places, sparse_grad=True).sum() * (1 + rank)
                    (loss / hvd.size()).backward()
            optimizer.step()

    one, two = (nn.Parameter(torch.ones(2, 3, dtype=torch.float64)) for _ in range(2))
    wrapped = hvd.DistributedOptimizer(SGD([one], lr=0.5), op=hvd.Sum, sparse_as_dense=as_dense)
    steps(one, wrapped, here())
    steps(two, SGD([two], lr=0.5), all_ranks())
    assert torch.allclose(one, two, rtol=0, atol=ROUNDING)
    assert (one.grad is None) == (two.grad is None)
    if one.grad is not None:
        assert one.grad.sparse_dim() == two.grad.sparse_dim() == 2


FORMS = {
    "sparse, dense, sparse": [[True], [False], [True]],
    "dense, sparse, dense": [[False], [True], [False]],
    "sparse, then dense on the last rank": [[True], [True, False], [True]],
    "dense, then sparse on the last rank": [[False], [False, True], [False]],
}


@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("forms", FORMS.values(), ids=FORMS)
def test_gradients_may_be_sparse_in_one_step_and_dense_in_another(
    forms: list[list[bool]], as_dense: bool
) -> None:
    """Over ranks as over the backwards of one process: what is dense somewhere is dense in sum."""

    def steps(parameter: nn.Parameter, optimizer: Optimizer, ranks: list[int]) -> list[bool]:
        found = []
        for step, form in enumerate(forms):
            optimizer.zero_grad()
            for rank in ranks:
                is_sparse = form[-1] if rank == hvd.size() - 1 else form[0]
                rows = F.embedding(torch.tensor([step, rank % 4]), parameter, sparse=is_sparse)
                (rows.square().sum() / hvd.size()).backward()
            optimizer.step()
            assert parameter.grad is not None
            found.append(parameter.grad.is_sparse)
        return found

    one, two = (nn.Parameter(torch.ones(4, 2, dtype=torch.float64)) for _ in range(2))
    told = steps(
        one, hvd.DistributedOptimizer(SGD([one], lr=0.1), op=hvd.Sum, sparse_as_dense=as_dense), here()
    )
    expected = steps(two, SGD([two], lr=0.1), all_ranks())
    assert torch.allclose(one, two, rtol=0, atol=ROUNDING)
    # What has a bucket stays dense.
    assert told == (expected if forms[0] == [True] or hvd.size() == 1 else [False] * 3)


def test_sparse_on_one_rank_and_dense_on_another_is_dense_as_dense_ones(needs_two: None) -> None:
    parameter = nn.Parameter(torch.zeros(3, 2))
    optimizer = hvd.DistributedOptimizer(SGD([parameter], lr=1.0), sparse_as_dense=True)
    values = torch.ones(3, 2)
    parameter.grad = values if hvd.rank() == 0 else values.to_sparse()
    optimizer.step()
    assert parameter.grad.layout is torch.strided
    assert parameter.tolist() == (-values).tolist()


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients_can_be_compressed(name: str, as_dense: bool) -> None:
    model, reference = Bag(sparse=True), Bag(sparse=True)
    options = {"compression": getattr(hvd.Compression, name), "sparse_as_dense": as_dense}
    train(model, SPARSE["SGD"](model, wrapping(model, **options)), here(), loss=lookup_loss)
    train(reference, SGD(reference.parameters(), lr=0.1), all_ranks(), loss=lookup_loss)
    assert_as_alone(model, reference, STEPS * 0.1 * 8 * torch.finfo(NARROW[name]).eps)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_sparse_gradients_can_be_zeroed_either_way(set_to_none: bool) -> None:
    model, reference = Bag(sparse=True), Bag(sparse=True)
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1))
    other = SGD(reference.parameters(), lr=0.1)
    for each, its, ranks in ((model, optimizer, here()), (reference, other, all_ranks())):
        for step in range(3):
            for rank in ranks:
                (lookup_loss(each, step, rank) / len(ranks)).backward()
            its.step()
            its.zero_grad(set_to_none=set_to_none)
    assert_as_alone(model, reference)


def test_sparse_on_one_rank_and_dense_on_another_is_an_error_everywhere_and_nothing_else_fails(
    needs_two: None,
) -> None:
    parameter = nn.Parameter(torch.zeros(3, 2))
    optimizer = hvd.DistributedOptimizer(SGD([parameter], lr=1.0), [("table", parameter)])
    values = torch.ones(3, 2)
    parameter.grad = values if hvd.rank() == 0 else values.to_sparse()
    told = errors_everywhere(optimizer.step)
    working = sum_of_ranks()
    model, other = wrapped()
    train(model, other, here())
    assert_as_alone(model, alone())
    assert all("HorovodInternalError" in kinds for kinds, _ in told)
    assert all("table" in text and "sparse_as_dense" in text for _, text in told)
    assert working == expected_sum()
    assert not any("STALL" in text for _, text in told), "it took as long as a stall"


def test_more_sparse_backwards_than_declared_are_an_error_in_later_steps_too(needs_two: None) -> None:
    model = Bag(sparse=True)
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model.named_parameters())
    train(model, optimizer, here(), loss=lookup_loss, steps=range(2))
    optimizer.zero_grad()
    model.table(torch.tensor([1])).sum().backward()
    told = errors_everywhere(lambda: model.table(torch.tensor([1])).sum().backward())
    optimizer.step()
    assert all("AssertionError" in kinds and "table.weight" in text for kinds, text in told)


# Ranks that do not agree


def different(what: str) -> tuple[list[tuple[str, nn.Parameter]], dict[str, Any]]:
    """Parameters and options, on the last rank others than elsewhere."""
    odd = hvd.rank() == hvd.size() - 1
    shape = (3, 2) if what == "shape" and odd else (2, 3)
    dtype = torch.float64 if what == "dtype" and odd else torch.float32
    first = nn.Parameter(torch.ones(2))
    second = nn.Parameter(torch.ones(shape, dtype=dtype), requires_grad=not (what == "frozen" and odd))
    named = [("first", first), ("seventh" if what == "name" and odd else "second", second)]
    if what == "missing" and odd:
        del named[1]
    if what == "order" and odd:
        named.reverse()
    options: dict[str, Any] = {
        "op": {"op": hvd.Sum},
        "compression": {"compression": hvd.Compression.fp16},
        "predivide": {"gradient_predivide_factor": 2.0},
        "sparse_as_dense": {"sparse_as_dense": True},
        "groups": {"groups": [[first], [second]]},
    }.get(what, {})
    return named, options if odd else {}


DIFFERENCES = {
    "shape": "second",
    "dtype": "second",
    "frozen": "second",
    "name": "seventh",
    "missing": "second",
    "order": "second",
    "op": "",
    "compression": "",
    "predivide": "",
    "sparse_as_dense": "",
    "groups": "",
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_differ_are_told_in_the_first_step_and_nothing_else_fails(
    what: str, needs_two: None
) -> None:
    named, options = different(what)
    optimizer = hvd.DistributedOptimizer(SGD([p for _, p in named], lr=1.0), named, **options)
    before = [parameter.tolist() for _, parameter in named]
    sum(p.sum().double() for _, p in named if p.requires_grad).backward()
    told = errors_everywhere(optimizer.step)
    working = sum_of_ranks()
    model, other = wrapped()
    train(model, other, here(), steps=range(2))
    after = [parameter.tolist() for _, parameter in named]
    assert_as_alone(model, alone(steps=range(2)))
    odd = str(hvd.size() - 1)
    assert all("HorovodInternalError" in kinds for kinds, _ in told), told
    assert all(DIFFERENCES[what] in text for _, text in told), told
    assert all(f"rank {odd}" in text for _, text in told), told
    assert after == before
    assert working == expected_sum()
    assert not any("STALL" in text for _, text in told), "it took as long as a stall"


def test_a_param_group_that_only_one_rank_adds_is_told(needs_two: None) -> None:
    model, optimizer = wrapped()
    train(model, optimizer, here(), steps=range(2))
    extra = nn.Parameter(torch.ones(2, dtype=torch.float64))
    if hvd.rank() == 0:
        optimizer.add_param_group({"params": [extra]})
    else:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.float64))]})
    optimizer.zero_grad()
    (loss_of(model, 0, hvd.rank()) + optimizer.param_groups[1]["params"][0].sum()).backward()
    told = errors_everywhere(optimizer.step)
    working = sum_of_ranks()
    assert all("HorovodInternalError" in kinds and "rank" in text for kinds, text in told), told
    assert working == expected_sum()


# Ranks without data


def join_reference(make: Callable[[Any], Optimizer], steps_of: list[int], passes: int) -> list[nn.Sequential]:
    """The model after each step: ranks that have joined bring zeros, and still count in the average."""
    model = model_of()
    optimizer = make(model.parameters())
    kept = [model_of()]
    for step in range(max(steps_of)):
        optimizer.zero_grad()
        for rank in [rank for rank in all_ranks() if steps_of[rank] > step]:
            for number in range(passes):
                (loss_of(model, 10 * step + number, rank) / hvd.size()).backward()
        optimizer.step()
        kept.append(model_of())
        kept[-1].load_state_dict(model.state_dict())
    return kept


STEPS_OF: dict[str, Callable[[int], int]] = {
    "rank 0 has none": lambda rank: 2 * rank,
    "the last one has none": lambda rank: 2 * (hvd.size() - 1 - rank),
    "all but rank 0 have one": lambda rank: 4 if rank == 0 else 1,
    "all have as many": lambda rank: 3,
    "nobody has any": lambda rank: 0,
}


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("steps_of", STEPS_OF.values(), ids=STEPS_OF)
def test_ranks_that_have_joined_bring_zeros_and_training_goes_on_afterwards(
    steps_of: Callable[[int], int], passes: int
) -> None:
    counts = [steps_of(rank) for rank in all_ranks()]
    model, optimizer = wrapped(backward_passes_per_step=passes)
    train(model, optimizer, here(), steps=range(counts[hvd.rank()]), passes=passes)
    last = hvd.join()
    expected = join_reference(sgd, counts, passes)
    own = distance(model, expected[counts[hvd.rank()]])
    # All of them have the same again, and the same state, and go on together.
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    hvd.broadcast_optimizer_state(optimizer, root_rank=last)
    together = distance(model, expected[max(counts)])
    again = range(max(counts), max(counts) + 3)
    train(model, optimizer, here(), steps=again, passes=passes)
    reference = model_of()
    other = sgd(reference.parameters())
    for step in range(again.stop):
        other.zero_grad()
        for rank in [rank for rank in all_ranks() if step in again or counts[rank] > step]:
            for number in range(passes):
                (loss_of(reference, 10 * step + number, rank) / hvd.size()).backward()
        other.step()
    assert_as_alone(model, reference)
    told = hvd.allgather_object((own, together, last))
    assert max(max(distances) for *distances, _ in told) <= ROUNDING
    assert {last for *_, last in told} == {last}
    assert counts[last] == max(counts)


def test_epochs_of_uneven_length_follow_each_other() -> None:
    def steps_of(epoch: int, rank: int) -> int:
        return 1 + (epoch * 7 + rank * 5) % 4

    model, optimizer = wrapped(lambda parameters: SGD(parameters, lr=0.05))
    reference = model_of()
    other = SGD(reference.parameters(), lr=0.05)
    lasts = []
    for epoch in range(5):
        for step in range(steps_of(epoch, hvd.rank())):
            optimizer.zero_grad()
            loss_of(model, 10 * epoch + step, hvd.rank()).backward()
            optimizer.step()
            hvd.allreduce(torch.ones(1))
            hvd.allreduce(torch.ones(1), name="metric")
        lasts.append(hvd.join())
        hvd.broadcast_parameters(model.state_dict(), root_rank=lasts[-1])
    for epoch in range(5):
        for step in range(4):
            active = [rank for rank in all_ranks() if steps_of(epoch, rank) > step]
            other.zero_grad()
            for rank in active:
                (loss_of(reference, 10 * epoch + step, rank) / hvd.size()).backward()
            if active:
                other.step()
    assert_as_alone(model, reference)
    assert hvd.allgather_object(lasts) == [lasts] * hvd.size()


@pytest.mark.parametrize(
    "options", [{"op": "Sum"}, {"compression": "fp16"}, {"compression": EverySecond}], ids=str
)
def test_joined_ranks_bring_zeros_with_every_way_of_reducing(options: dict[str, Any]) -> None:
    compression = options.get("compression", "none")
    chosen = getattr(hvd.Compression, compression) if isinstance(compression, str) else compression
    op = getattr(hvd, options.get("op", "Average"))
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(SGD([parameter], lr=1.0), compression=chosen, op=op)
    found = []
    for _ in range(hvd.rank()):
        optimizer.zero_grad()
        (parameter * 12).sum().backward()
        optimizer.step()
        found.append(parameter.grad.item())
    last = hvd.join()
    factor = 1.0 if op == hvd.Sum else 1.0 / hvd.size()
    expected = [12.0 * (hvd.size() - 1 - step) * factor for step in range(hvd.rank())]
    assert found == pytest.approx(expected, rel=1e-3)
    assert last == hvd.size() - 1


def test_a_joined_rank_does_its_part_for_two_optimizers_and_unused_parameters() -> None:
    models = [model_of(0), model_of(1)]
    optimizers = [hvd.DistributedOptimizer(sgd(model.parameters())) for model in models]
    references = [model_of(0), model_of(1)]
    others = [sgd(model.parameters()) for model in references]
    for step in range(1 + hvd.rank()):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model[0](rows_of(step, hvd.rank())[0]).square().mean().backward()
        for optimizer in reversed(optimizers):
            optimizer.step()
    hvd.join()
    for step in range(hvd.size()):
        for model, other in zip(references, others, strict=True):
            other.zero_grad()
            for rank in range(step, hvd.size()):
                (model[0](rows_of(step, rank)[0]).square().mean() / hvd.size()).backward()
            other.step()
    for model, reference in zip(models, references, strict=True):
        hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)
        assert_as_alone(model, reference)


@pytest.mark.parametrize("least", [1, 0], ids=["after some steps", "before its first step"])
def test_a_joined_rank_brings_zeros_also_for_optimizers_that_it_has_let_go(least: int) -> None:
    parameter = nn.Parameter(torch.zeros(2))

    def epoch(steps: int) -> list[float]:
        optimizer = hvd.DistributedOptimizer(SGD([parameter], lr=1.0), [("p", parameter)])
        found = []
        for _ in range(steps):
            optimizer.zero_grad()
            (parameter * hvd.size()).sum().backward()
            optimizer.step()
            found.append(parameter.grad[0].item())
        return found

    found, expected = [], []
    for number in range(3):
        counts = [least + (number + rank) % 3 for rank in all_ranks()]
        found += epoch(counts[hvd.rank()])
        hvd.join()
        expected += [sum(count > step for count in counts) for step in range(counts[hvd.rank()])]
    assert found == expected


def test_named_and_unnamed_collectives_and_steps_go_on_after_a_join() -> None:
    model, optimizer = wrapped()
    sums = []
    for epoch in range(3):
        handles = [hvd.allreduce_async(torch.ones(1), name=name, op=hvd.Sum) for name in "ab"]
        handles.append(hvd.allreduce_async(torch.ones(1), op=hvd.Sum))
        train(model, optimizer, here(), steps=range(epoch, epoch + 1))
        sums += [hvd.synchronize(handle).item() for handle in handles]
        hvd.join()
    assert_as_alone(model, alone(steps=range(3)))
    assert sums == [hvd.size()] * 9


@pytest.mark.parametrize("taken", [0, 1], ids=["in the first step", "in a later step"])
@pytest.mark.parametrize("what", ["sparse gradients", "Adasum"])
def test_what_cannot_be_reduced_with_a_joined_rank_is_an_error_that_changes_nothing(
    what: str, taken: int, needs_two: None
) -> None:
    if what == "Adasum" and hvd.size() == 3:
        pytest.skip("Adasum is for powers of two")
    table = nn.Embedding(5, 2, sparse=what != "Adasum")
    op = hvd.Adasum if what == "Adasum" else hvd.Average
    optimizer = hvd.DistributedOptimizer(SGD(table.parameters(), lr=1.0), table.named_parameters(), op=op)

    def step() -> None:
        optimizer.zero_grad()
        table(torch.tensor([1])).sum().backward()
        optimizer.step()

    for _ in range(taken):
        step()
    told = None
    before = table.weight.tolist()
    if hvd.rank() > 0:
        with pytest.raises(hvd.HorovodInternalError) as caught:
            step()
        told = str(caught.value)
    after = table.weight.tolist()
    hvd.join()
    working = sum_of_ranks()
    assert told is None or "rank 0 had joined" in told
    assert after == before
    assert working == expected_sum()


@pytest.mark.parametrize("taken", [0, 1], ids=["in the first step", "in a later step"])
def test_who_has_joined_brings_zeros_to_sparse_gradients_that_travel_as_dense_ones(taken: int) -> None:
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(SGD(table.parameters(), lr=0.0), sparse_as_dense=True)
    found = []
    for _ in range(taken + (hvd.rank() > 0)):
        optimizer.zero_grad()
        table(torch.tensor([1, hvd.rank() % 5])).sum().backward()
        optimizer.step()
        found.append(table.weight.grad.to_dense()[1, 0].item())
    hvd.join()
    with_row_1 = sum(1 + (rank % 5 == 1) for rank in all_ranks()) / hvd.size()
    expected = [with_row_1] * taken + [with_row_1 - 1 / hvd.size()] * (hvd.rank() > 0)
    assert found == pytest.approx(expected)


def test_large_gradients_of_a_joined_rank_are_out_of_the_way_when_the_next_epoch_begins() -> None:
    parameter = nn.Parameter(torch.zeros(300_000))
    optimizer = hvd.DistributedOptimizer(SGD([parameter], lr=0.0))
    wrong = []
    for epoch in range(8):
        for _ in range(2 if (hvd.rank() + epoch) % 2 else 1):
            optimizer.zero_grad()
            parameter.sum().backward()
            optimizer.step()
        hvd.join()
        optimizer.zero_grad()
        (parameter.sum() * (epoch + hvd.rank())).backward()
        optimizer.step()
        expected = epoch + (hvd.size() - 1) / 2
        wrong.append(int((parameter.grad != expected).sum()))
        hvd.barrier()
    assert wrong == [0] * 8


# Beside others


class Normed(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first, self.norm, self.last = nn.Linear(6, 5), norm(5), nn.Linear(5, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def test_collectives_of_synchronized_normalisation_run_inside_backward() -> None:
    model, reference = Normed(hvd.SyncBatchNorm), Normed(nn.BatchNorm1d)
    reference.load_state_dict(model.state_dict())
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    other = sgd(reference.parameters())
    metrics = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step, hvd.rank())
        loss.backward()
        metrics.append(hvd.allreduce(loss.detach()).item())
        optimizer.step()
        together = [
            torch.cat(parts) for parts in zip(*(rows_of(step, rank) for rank in all_ranks()), strict=True)
        ]
        other.zero_grad()
        F.mse_loss(reference(together[0]), together[1]).backward()
        other.step()
    assert_as_alone(model, reference, 1e-10)
    assert hvd.allgather_object(metrics) == [metrics] * hvd.size()
    assert torch.allclose(model.norm.running_var, reference.norm.running_var, atol=1e-10)


def test_collectives_may_be_under_way_across_backward_and_step_in_different_orders() -> None:
    model, optimizer = wrapped()
    sums: list[float] = []
    inside: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        early = hvd.rank() % 2 == 0
        value = torch.tensor([float(hvd.rank() + step)])
        handles = [hvd.allreduce_async(value, name="early", op=hvd.Sum)] if early else []
        x, y = rows_of(10 * step, hvd.rank())
        hidden = model[1](model[0](x))
        hidden.register_hook(
            lambda _, v=value: inside.append(hvd.allreduce(v, name="inside", op=hvd.Sum).item())
        )
        F.mse_loss(model[2](hidden), y).backward()
        if not early:
            handles = [hvd.allreduce_async(value, name="early", op=hvd.Sum)]
        handles.insert(hvd.rank() % 2, hvd.allreduce_async(value * 2, name="late", op=hvd.Sum))
        optimizer.step()
        sums.append(sum(hvd.synchronize(handle).item() for handle in handles))
    assert_as_alone(model, alone())
    each = [expected_sum() + hvd.size() * step for step in range(STEPS)]
    assert sums == [3 * value for value in each]
    assert inside == each


def test_two_optimizers_may_be_interleaved() -> None:
    def steps(models: list[nn.Sequential], optimizers: list[Any], ranks: list[int]) -> None:
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for model in models:
                for rank in ranks:
                    x, y = rows_of(step, rank)
                    # The last layer of the second model is used from the second step on, and by odd ranks.
                    if model is models[0] or (step and rank % 2):
                        loss = F.mse_loss(model(x), y)
                    else:
                        loss = model[0](x).square().mean()
                    (loss / len(ranks)).backward()
            for optimizer in reversed(optimizers):
                optimizer.step()

    models, references = [model_of(0), model_of(1)], [model_of(0), model_of(1)]
    makes = (sgd, adamw)
    steps(
        models,
        [hvd.DistributedOptimizer(make(m.parameters())) for make, m in zip(makes, models, strict=True)],
        here(),
    )
    steps(references, [make(m.parameters()) for make, m in zip(makes, references, strict=True)], all_ranks())
    for model, reference in zip(models, references, strict=True):
        assert_as_alone(model, reference)


def test_backwards_of_two_optimizers_may_come_in_different_orders_on_the_ranks() -> None:
    models, references = [model_of(0), model_of(1)], [model_of(0), model_of(1)]
    optimizers = [hvd.DistributedOptimizer(sgd(model.parameters())) for model in models]
    for step in range(STEPS):
        for index in (0, 1) if hvd.rank() % 2 else (1, 0):
            optimizers[index].zero_grad()
            loss_of(models[index], 10 * step, hvd.rank()).backward()
        for optimizer in optimizers:
            optimizer.step()
    for model, reference in zip(models, references, strict=True):
        train(reference, sgd(reference.parameters()), all_ranks())
        assert_as_alone(model, reference)


def test_one_loss_may_go_through_the_models_of_two_optimizers() -> None:
    def steps(encoder: nn.Module, head: nn.Module, optimizers: list[Any], ranks: list[int]) -> None:
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for rank in ranks:
                x, y = rows_of(step, rank)
                (F.mse_loss(head(encoder(x)), y) / len(ranks)).backward()
            for optimizer in optimizers:
                optimizer.step()

    made = []
    for wrap, ranks in ((hvd.DistributedOptimizer, here()), (lambda optimizer: optimizer, all_ranks())):
        model = model_of()
        optimizers = [wrap(sgd(model[0].parameters())), wrap(adamw(model[2].parameters()))]
        steps(model[:2], model[2], optimizers, ranks)
        made.append(model)
    assert_as_alone(*made)


# Any training


@dataclass(frozen=True)
class Program:
    """A training drawn at random, the same on all ranks; `trainings` optimizers step in a common loop."""

    trainings: int
    passes: int
    op: str
    options: dict[str, Any]
    set_to_none: bool
    steps_of: tuple[tuple[int, ...], ...]

    @classmethod
    def drawn(cls, seed: int) -> Program:
        draw = random.Random(seed)
        op = draw.choice(["Average", "Sum"])
        predivide = {"gradient_predivide_factor": 3.0} if op == "Average" and draw.random() < 0.5 else {}
        return cls(
            trainings=draw.choice([1, 2]),
            passes=draw.choice([1, 2, 3]),
            op=op,
            options={"groups": draw.choice([None, 1, 2]), **predivide},
            set_to_none=draw.random() < 0.5,
            steps_of=tuple(tuple(draw.randrange(4) for _ in all_ranks()) for _ in range(2)),
        )

    def losses(self, models: list[Any], rank: int, seed: str) -> Iterator[Tensor]:
        """One for each model that this rank uses in this pass: some of its layers."""
        draw = random.Random(f"{seed} {rank}")
        for model in models:
            used = [layer for layer in model if draw.random() < 0.4]
            x = torch.tensor([[draw.gauss(0, 1) for _ in range(4)]], dtype=torch.float64)
            if used:
                yield sum(layer(x) for layer in used).square().mean()

    def run(
        self,
        models: list[Any],
        optimizers: list[Any],
        ranks: list[int],
        scale: float = 1.0,
        after_epoch: Callable[[list[Any]], None] = lambda models: None,
    ) -> None:
        """What these ranks do of it."""
        for epoch, counts in enumerate(self.steps_of):
            for step in range(max(counts[rank] for rank in ranks)):
                for optimizer in optimizers:
                    optimizer.zero_grad(set_to_none=self.set_to_none)
                for number in range(self.passes):
                    for rank in ranks:
                        if counts[rank] > step:
                            for loss in self.losses(models, rank, f"{epoch} {step} {number}"):
                                (loss * scale).backward()
                for optimizer in optimizers[:: -1 if step % 2 else 1]:
                    optimizer.step()
            after_epoch(models)


def joined_and_together_again(models: list[Any]) -> None:
    last = hvd.join()
    for model in models:
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)


@pytest.mark.parametrize("seed", range(6))
def test_any_training_is_that_of_one_process(seed: int) -> None:
    program = Program.drawn(seed)

    def made() -> list[nn.ModuleList]:
        torch.manual_seed(seed)
        return [nn.ModuleList(nn.Linear(4, 4).double() for _ in range(5)) for _ in range(program.trainings)]

    models, references = made(), made()
    optimizers = [
        hvd.DistributedOptimizer(
            SGD(model.parameters(), lr=0.05),
            model.named_parameters(),
            op=getattr(hvd, program.op),
            backward_passes_per_step=program.passes,
            **program.options,
        )
        for model in models
    ]
    program.run(models, optimizers, here(), after_epoch=joined_and_together_again)
    scale = 1.0 / hvd.size() if program.op == "Average" else 1.0
    program.run(references, [SGD(model.parameters(), lr=0.05) for model in references], all_ranks(), scale)
    for model, reference in zip(models, references, strict=True):
        assert_as_alone(model, reference)


# Optimizers that come and go


@pytest.fixture(scope="module")
def frozen_heap() -> Iterator[None]:
    """What there is already is not looked at by each collection: it would take most of the time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def without_garbage(frozen_heap: None) -> Iterator[None]:
    """What was dropped before is gone, on all ranks alike."""
    gc.collect()
    yield
    gc.collect()


def test_communicators_of_optimizers_that_are_gone_are_lent_again(without_garbage: None) -> None:
    engine = hvd.global_process_set._engine
    held, told = [], []
    for seed in range(10):
        model, optimizer = wrapped(seed=seed)
        train(model, optimizer, here(), steps=range(2))
        reference = alone(seed=seed, steps=range(2))
        told.append(distance(model, reference))
        del model, optimizer
        gc.collect()
        held.append((len(engine.steps._loans), len(engine.steps.serve)))
    assert max(told) <= ROUNDING
    assert held == [held[0]] * 10


def test_a_dropped_optimizer_is_gone_with_its_hooks(without_garbage: None) -> None:
    model, optimizer = wrapped()
    train(model, optimizer, here(), steps=range(2))
    gradients = weakref.ref(optimizer._gradients) if optimizer._gradients else lambda: None
    optimizer = weakref.ref(optimizer)
    gc.collect()
    assert optimizer() is None
    assert gradients() is None


@pytest.mark.parametrize("taken", [0, 2], ids=["before its first step", "after two steps"])
def test_a_model_may_be_wrapped_again_when_its_optimizer_is_dropped(
    taken: int, without_garbage: None
) -> None:
    model, optimizer = wrapped()
    train(model, optimizer, here(), steps=range(taken))
    del optimizer
    again = hvd.DistributedOptimizer(adamw(model.parameters()), model.named_parameters())
    train(model, again, here(), steps=range(taken, 5))
    reference = alone(steps=range(taken))
    train(reference, adamw(reference.parameters()), all_ranks(), steps=range(taken, 5))
    assert_as_alone(model, reference)


@pytest.mark.parametrize("taken", [0, 2], ids=["before its first step", "after two steps"])
def test_an_optimizer_may_be_wrapped_again_with_other_settings(taken: int, without_garbage: None) -> None:
    model = model_of()
    base = sgd(model.parameters())
    optimizer = hvd.DistributedOptimizer(base, model.named_parameters())
    train(model, optimizer, here(), steps=range(taken))
    optimizer = hvd.DistributedOptimizer(base, model.named_parameters(), backward_passes_per_step=2)
    train(model, optimizer, here(), steps=range(taken, 5), passes=2)
    reference = model_of()
    other = sgd(reference.parameters())
    train(reference, other, all_ranks(), steps=range(taken))
    train(reference, other, all_ranks(), steps=range(taken, 5), passes=2)
    assert_as_alone(model, reference)


def test_an_optimizer_that_some_ranks_have_forgotten_already_does_no_harm(without_garbage: None) -> None:
    model, optimizer = wrapped()
    train(model, optimizer, here(), steps=range(2))
    kept = optimizer if hvd.rank() == 0 else None
    del optimizer
    gc.collect()
    second, its_optimizer = wrapped(seed=1)
    train(second, its_optimizer, here())
    assert_as_alone(second, alone(seed=1))
    assert (kept is None) == (hvd.rank() > 0)


def test_a_forward_that_writes_to_its_weights_by_the_batch_is_an_error_on_every_rank() -> None:
    torch.manual_seed(0)
    model = nn.Embedding(2 * hvd.size(), 4, max_norm=1.0)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    told = ""
    try:
        for _ in range(2):  # the first step's gradients are reduced before there are buckets
            optimizer.zero_grad()
            model(torch.arange(2) + 2 * hvd.rank()).square().sum().backward()
            optimizer.step()
    except OperationError as error:
        told = str(error)
    found = hvd.allgather_object(told)
    expected = "written to (to weight here), and ranks now have different values"
    assert all(expected in each for each in found) == (hvd.size() > 1)
