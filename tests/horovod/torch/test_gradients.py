"""Reduction of DistributedOptimizer's gradients: compressed, grouped, beside others, of optimizers that go.

What ranks find is gathered first and asserted after, so that no rank fails alone while others wait.
"""

from __future__ import annotations

import gc
import json
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import hpcpar.horovod.torch as hvd
from hpcpar.errors import OperationError
from hpcpar.horovod.basics import the_context
from hpcpar.horovod.torch.compression import Compressor
from tests.grid import pairwise
from tests.horovod.torch.training import (
    NARROW,
    ROUNDING,
    STEPS,
    EverySecond,
    adamw,
    all_ranks,
    assert_as_alone,
    backward,
    distance,
    errors_everywhere,
    expected_sum,
    here,
    loss_of,
    model_alone,
    model_of,
    part,
    rows_of,
    sgd,
    sum_of_ranks,
    train,
    whole,
    wrapped,
)

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("hvd")]


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
    train(model, optimizer, part, passes=2)
    assert_as_alone(model, model_alone(passes=2))


def test_num_groups_is_the_old_name_and_says_so() -> None:
    model = model_of()
    with pytest.warns(DeprecationWarning, match="groups") as told:
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), num_groups=2)
    train(model, optimizer, part)
    assert_as_alone(model, model_alone())
    assert len(told) == 1


def test_every_gradient_is_an_allreduce_in_the_timeline(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    model, optimizer = wrapped()
    context = the_context()
    context.start_timeline(str(path), mark_cycles=False)
    train(model, optimizer, part, steps=range(3))
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


def reduced(gradient: Tensor, **options: Any) -> list[Tensor]:
    """Return the gradients after synchronize, in the first step and in a later one."""
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


@pytest.mark.parametrize("options", [{}, {"groups": 1}, {"backward_passes_per_step": 2}], ids=str)
def test_a_compressor_of_the_users_own_sees_each_gradient_in_its_shape(
    options: dict[str, Any], needs_two: None
) -> None:
    Recording.given, Recording.returned = [], []
    model, optimizer = wrapped(compression=Recording, **options)
    passes = options.get("backward_passes_per_step", 1)
    train(model, optimizer, part, passes=passes)
    shapes = sorted(tuple(parameter.shape) for parameter in model.parameters()) * STEPS
    assert_as_alone(model, model_alone(passes=passes))
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
    train(model, optimizer, part)
    assert_as_alone(model, model_alone())


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
    train(model, other, part, steps=range(2))
    after = [parameter.tolist() for _, parameter in named]
    assert_as_alone(model, model_alone(steps=range(2)))
    odd = str(hvd.size() - 1)
    assert all("HorovodInternalError" in kinds for kinds, _ in told), told
    assert all(DIFFERENCES[what] in text for _, text in told), told
    assert all(f"rank {odd}" in text for _, text in told), told
    assert after == before
    assert working == expected_sum()
    assert not any("STALL" in text for _, text in told), "it took as long as a stall"


def test_a_param_group_that_only_one_rank_adds_is_told(needs_two: None) -> None:
    model, optimizer = wrapped()
    train(model, optimizer, part, steps=range(2))
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
    assert_as_alone(model, model_alone())
    each = [expected_sum() + hvd.size() * step for step in range(STEPS)]
    assert sums == [3 * value for value in each]
    assert inside == each


def two_models() -> nn.ModuleList:
    return nn.ModuleList([model_of(0), model_of(1)])


def compare_two(steps: Callable[[Any, list[Any], list[int]], None]) -> None:
    """Hold steps(models, optimizers, ranks) of two wrapped optimizers to one process of all ranks."""
    models, references = two_models(), two_models()
    pairs = list(zip((sgd, adamw), models, strict=True))
    steps(models, [hvd.DistributedOptimizer(make(model.parameters())) for make, model in pairs], here())
    pairs = list(zip((sgd, adamw), references, strict=True))
    steps(references, [make(model.parameters()) for make, model in pairs], all_ranks())
    assert_as_alone(models, references)


@pytest.mark.parametrize("stage", [None, 1])
def test_buckets_that_wait_for_late_ranks_are_not_taken_for_written_to(stage: int | None) -> None:
    model, optimizer = wrapped(zero_stage=stage)
    for step in range(2):
        optimizer.zero_grad()
        time.sleep(0.2 * hvd.rank())
        backward(model, part, 10 * step)
        hvd.barrier()  # rank 0's buckets leave here, after it has handed them over
        optimizer.step()
    assert_as_alone(model, model_alone(steps=range(2)))


def test_two_optimizers_may_be_interleaved() -> None:
    def steps(models: Any, optimizers: list[Any], ranks: list[int]) -> None:
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for model in models:
                for rank in ranks:
                    x, y = rows_of(step, rank)
                    # The last layer of the second model is used from the second step on, and by odd ranks.
                    is_whole = model is models[0] or (step and rank % 2)
                    loss = F.mse_loss(model(x), y) if is_whole else model[0](x).square().mean()
                    (loss / len(ranks)).backward()
            for optimizer in reversed(optimizers):
                optimizer.step()

    compare_two(steps)


def test_backwards_of_two_optimizers_may_come_in_different_orders_on_the_ranks() -> None:
    def steps(models: Any, optimizers: list[Any], ranks: list[int]) -> None:
        for step in range(STEPS):
            for index in (0, 1) if ranks[-1] % 2 else (1, 0):
                optimizers[index].zero_grad()
                for rank in ranks:
                    (loss_of(models[index], 10 * step, rank) / len(ranks)).backward()
            for optimizer in optimizers:
                optimizer.step()

    compare_two(steps)


def test_one_loss_may_go_through_the_models_of_two_optimizers() -> None:
    def steps(models: Any, optimizers: list[Any], ranks: list[int]) -> None:
        encoder, head = models[0][:2], models[1][2]
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for rank in ranks:
                x, y = rows_of(step, rank)
                (F.mse_loss(head(encoder(x)), y) / len(ranks)).backward()
            for optimizer in optimizers:
                optimizer.step()

    compare_two(steps)


# Optimizers that come and go


@pytest.fixture(scope="module")
def frozen_heap() -> Iterator[None]:
    """Keep older objects out of each collection, which would take most of the time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def without_garbage(frozen_heap: None) -> Iterator[None]:
    """Collect what was dropped before, on all ranks alike."""
    gc.collect()
    yield
    gc.collect()


def test_communicators_of_optimizers_that_are_gone_are_lent_again(without_garbage: None) -> None:
    engine = hvd.global_process_set._engine
    held, told = [], []
    for seed in range(10):
        model, optimizer = wrapped(seed=seed)
        train(model, optimizer, part, steps=range(2))
        reference = model_alone(seed=seed, steps=range(2))
        told.append(distance(model, reference))
        del model, optimizer
        gc.collect()
        steps = engine.steps
        held.append((len(steps._loans), len(steps.serve) - len(steps._retired)))
    assert max(told) <= ROUNDING
    assert held == [held[0]] * 10


def test_a_dropped_optimizer_is_gone_with_its_hooks(without_garbage: None) -> None:
    model, optimizer = wrapped()
    train(model, optimizer, part, steps=range(2))
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
    train(model, optimizer, part, steps=range(taken))
    del optimizer
    again = hvd.DistributedOptimizer(adamw(model.parameters()), model.named_parameters())
    train(model, again, part, steps=range(taken, 5))
    reference = model_alone(steps=range(taken))
    train(reference, adamw(reference.parameters()), whole, steps=range(taken, 5))
    assert_as_alone(model, reference)


@pytest.mark.parametrize("taken", [0, 2], ids=["before its first step", "after two steps"])
def test_an_optimizer_may_be_wrapped_again_with_other_settings(taken: int, without_garbage: None) -> None:
    model = model_of()
    base = sgd(model.parameters())
    optimizer = hvd.DistributedOptimizer(base, model.named_parameters())
    train(model, optimizer, part, steps=range(taken))
    optimizer = hvd.DistributedOptimizer(base, model.named_parameters(), backward_passes_per_step=2)
    train(model, optimizer, part, steps=range(taken, 5), passes=2)
    reference = model_of()
    other = sgd(reference.parameters())
    train(reference, other, whole, steps=range(taken))
    train(reference, other, whole, steps=range(taken, 5), passes=2)
    assert_as_alone(model, reference)


def test_an_optimizer_that_some_ranks_have_forgotten_already_does_no_harm(without_garbage: None) -> None:
    model, optimizer = wrapped()
    train(model, optimizer, part, steps=range(2))
    kept = optimizer if hvd.rank() == 0 else None
    del optimizer
    gc.collect()
    second, its_optimizer = wrapped(seed=1)
    train(second, its_optimizer, part)
    assert_as_alone(second, model_alone(seed=1))
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
