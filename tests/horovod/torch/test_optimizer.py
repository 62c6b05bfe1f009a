"""DistributedOptimizer against one process that sees all ranks' rows, in float64 and to rounding.

What ranks find is gathered first and asserted after, so that no rank fails alone while others wait.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.checkpoint import checkpoint

import hpcpar.horovod.torch as hvd
from tests.grid import pairwise
from tests.horovod.torch.training import (
    OPTIMIZERS,
    REDUCTIONS,
    ROWS,
    STEPS,
    Branches,
    Make,
    adamw,
    all_ranks,
    alone,
    assert_as_alone,
    backward,
    batch,
    bits,
    compare,
    here,
    model_of,
    of_ranks,
    part,
    rows_of,
    sgd,
    train,
    train_on,
    whole,
    wrapped,
)

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("by_stage")]

every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


# Equality with one process


@pytest.mark.parametrize(
    ("make", "passes", "op", "stage"),
    pairwise(OPTIMIZERS.values(), [1, 2, 3], ["Average", "Sum"], [None, 1, 2]),
)
def test_training_is_that_of_one_process_with_all_rows(
    make: Make, passes: int, op: str, stage: int | None
) -> None:
    reduction = REDUCTIONS[op]
    model, optimizer = wrapped(make, op=getattr(hvd, op), backward_passes_per_step=passes, zero_stage=stage)
    train(model, optimizer, part, passes=passes, reduction=reduction)
    buckets = len(optimizer.sharded.blocks) if stage else 2
    reference, _ = alone(make, passes=passes, reduction=reduction)
    assert_as_alone(model, reference)
    assert buckets > 1


@every_optimizer
@pytest.mark.parametrize("factor", [0.25, 3.0, 1000.0])
def test_dividing_before_and_after_the_sum_is_an_average_too(make: Make, factor: float) -> None:
    model, optimizer = wrapped(make, gradient_predivide_factor=factor, backward_passes_per_step=2)
    train(model, optimizer, part, passes=2)
    assert_as_alone(model, alone(make, passes=2)[0])


@pytest.mark.parametrize("fused", [False, True])
def test_kernels_over_all_parameters_at_once_read_the_reduced_gradients(fused: bool) -> None:
    def make(parameters: Any) -> Optimizer:
        return AdamW(parameters, lr=0.01, fused=fused, foreach=not fused)

    model, optimizer = wrapped(make)
    train(model, optimizer, part)
    assert_as_alone(model, alone(make)[0])


def test_names_of_more_parameters_than_it_holds_are_welcome() -> None:
    model, reference = model_of(), model_of()
    optimizer = hvd.DistributedOptimizer(SGD(model[0].parameters(), lr=0.1), model.named_parameters())
    train(model, optimizer, part)
    train(reference, SGD(reference[0].parameters(), lr=0.1), whole)
    assert_as_alone(model, reference)


def test_a_parameter_used_twice_is_reduced_once() -> None:
    def tied() -> nn.Sequential:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False))
        model[2].weight = model[0].weight
        return model.append(nn.Linear(6, 3)).double()

    model, reference = tied(), tied()
    names = list(model.named_parameters(remove_duplicate=False))
    optimizer = hvd.DistributedOptimizer(adamw(model.parameters()), names)
    train(model, optimizer, part)
    train(reference, adamw(reference.parameters()), whole)
    assert len(names) == 4
    assert_as_alone(model, reference)


@pytest.mark.parametrize(("passes", "stage"), pairwise([1, 2], [None, 1, 2]))
def test_the_number_of_passes_can_change_and_a_step_may_come_early(passes: int, stage: int | None) -> None:
    model, optimizer = wrapped(backward_passes_per_step=3, zero_stage=stage)
    reference, other = alone(passes=passes, steps=range(2))
    train(model, optimizer, part, passes=passes, steps=range(2))
    for now, steps in ((3, range(2, 4)), (1, range(4, 6)), (2, range(6, 8))):
        optimizer.set_backward_passes_per_step(now)
        train(model, optimizer, part, steps=steps, passes=now)
        train(reference, other, whole, steps=steps, passes=now)
    assert_as_alone(model, reference)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=f"backward_passes_per_step={wrong}"):
            optimizer.set_backward_passes_per_step(wrong)


def test_gradients_may_add_up_over_steps() -> None:
    def steps(model: nn.Module, optimizer: Optimizer, ranks: list[int]) -> None:
        for step in range(STEPS):
            backward(model, of_ranks(ranks), step)
            optimizer.step()

    compare(steps)


def test_a_second_step_without_a_backward_takes_the_same_average_again() -> None:
    def steps(model: nn.Module, optimizer: Optimizer, ranks: list[int]) -> None:
        for step in range(3):
            train(model, optimizer, of_ranks(ranks), steps=range(step, step + 1))
            optimizer.step()

    compare(steps)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_may_be_computed_again_in_backward(reentrant: bool) -> None:
    def steps(model: nn.Sequential, optimizer: Optimizer, ranks: list[int]) -> None:
        for step in range(3):
            x, y = (of_ranks(ranks)(rows) for rows in batch(step))
            optimizer.zero_grad()
            hidden = checkpoint(model[:2], x.requires_grad_(), use_reentrant=reentrant)
            F.mse_loss(model[2](hidden), y).backward()
            optimizer.step()

    compare(steps)


def test_gradients_of_several_buckets_leave_during_backward_and_are_those_of_one_process() -> None:
    def wide() -> nn.Sequential:
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(6, 500), nn.Tanh(), nn.Linear(500, 400), nn.Linear(400, 3)).double()

    compare(lambda model, optimizer, ranks: train(model, optimizer, of_ranks(ranks)), adamw, wide)


def test_channels_last_parameters_and_gradients_keep_their_memory_order() -> None:
    def net() -> nn.Sequential:
        torch.manual_seed(2)
        layers = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 2), nn.Flatten(), nn.Linear(18, 1)
        )
        return layers.double().to(memory_format=torch.channels_last)

    def steps(model: nn.Module, optimizer: Optimizer, ranks: list[int]) -> None:
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            images = torch.randn(ROWS * hvd.size(), 3, 6, 6, generator=generator, dtype=torch.float64)
            optimizer.zero_grad()
            own = of_ranks(ranks)(images).to(memory_format=torch.channels_last)
            model(own).square().mean().backward()
            optimizer.step()

    *_, model = compare(steps, build=net)
    for layer in (model[0], model[2]):
        assert layer.weight.stride() == layer.weight.grad.stride()
        assert layer.weight.grad.is_contiguous(memory_format=torch.channels_last)


def test_parameters_of_unusual_shape_and_memory_order_are_reduced() -> None:
    parameters = [
        nn.Parameter(torch.ones(4, 6).t()),
        nn.Parameter(torch.ones(8)[::2]),
        nn.Parameter(torch.tensor(1.0)),
        nn.Parameter(torch.ones(0, 3)),
        nn.Parameter(torch.ones(3, dtype=torch.complex64)),
    ]
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=1.0))
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        sum((parameter * (2 * hvd.rank() + 1)).sum().real for parameter in parameters).backward()
        optimizer.step()
        found.append([sorted(set(parameter.grad.real.flatten().tolist())) for parameter in parameters])
    assert found == [[[hvd.size()], [hvd.size()], [hvd.size()], [], [hvd.size()]]] * 2


@pytest.mark.parametrize("is_group", [False, True])
def test_parameters_of_several_types_are_reduced_each_in_its_own(is_group: bool) -> None:
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    parameters = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes]
    groups = [parameters] if is_group else None
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=1.0), groups=groups)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        for parameter in parameters:
            (parameter * (2 * hvd.rank() + 1)).sum().backward()
        optimizer.step()
        found.append([(p.grad.dtype, p.grad.tolist()) for p in parameters])
    assert found == [[(dtype, [hvd.size()] * 3) for dtype in dtypes]] * 2


# Parameters without a gradient


def uses(step: int, rank: int) -> str:
    """Which layers a rank uses: all kinds of differences between ranks and steps."""
    last = hvd.size() - 1
    return [
        "ab" if rank == 0 else "a",
        "a",
        "abc" if rank == last else "b",
        "b" if rank == 0 else "c",
        "" if rank == 0 else "ac",
        "abc",
    ][step]


@pytest.mark.parametrize(
    ("make", "set_to_none", "stage"), pairwise(OPTIMIZERS.values(), [True, False], [None, 1, 2])
)
def test_parameters_without_a_gradient_on_some_ranks_or_all_are_as_in_one_process(
    make: Make, set_to_none: bool, stage: int | None
) -> None:
    def steps(model: Branches, optimizer: Optimizer, ranks: list[int]) -> list[list[bool]]:
        """Return which parameters had gradients after each step."""
        seen = []
        for step in range(6):
            optimizer.zero_grad(set_to_none=set_to_none)
            for rank in ranks:
                x, y = rows_of(step, rank)
                if used := uses(step, rank):
                    (F.mse_loss(model(x, used), y) / len(ranks)).backward()
            optimizer.step()
            seen.append([parameter.grad is not None for parameter in model.parameters()])
        return seen

    seen, expected, _ = compare(steps, make, Branches, zero_stage=stage)
    assert stage or seen == expected


def test_a_step_without_any_backward_changes_nothing_and_waits_for_nothing() -> None:
    model, optimizer = wrapped()
    before = bits(model)
    optimizer.step()
    after = bits(model)
    train(model, optimizer, part)
    optimizer.zero_grad()
    optimizer.step()
    assert after == before
    assert_as_alone(model, alone()[0])


def test_a_parameter_that_never_gets_a_gradient_leaves_nothing_behind_in_each_step() -> None:
    model = Branches()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model.named_parameters())
    engine = hvd.global_process_set._engine
    kept = []
    for step in range(6):
        optimizer.zero_grad()
        model(batch(step)[0], "ab").sum().backward()
        optimizer.step()
        kept.append(len(engine.steps.serve))
    assert kept[2:] == [kept[2]] * 4


@pytest.mark.parametrize(("taken", "stage"), [(1, None), (3, None), (1, 1), (1, 2)])
def test_gradients_put_there_by_hand_are_reduced_like_autograds(taken: int, stage: int | None) -> None:
    model, optimizer = wrapped(lambda parameters: SGD(parameters, lr=1.0), zero_stage=stage)
    reference = model_of()
    train(model, optimizer, part, steps=range(taken - 1))
    train(reference, SGD(reference.parameters(), lr=1.0), whole, steps=range(taken - 1))
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        parameter.grad = torch.full_like(parameter, float(hvd.rank()))
        other.data -= (hvd.size() - 1) / 2
    optimizer.step()
    assert_as_alone(model, reference)


def frozen(step: int) -> tuple[bool, bool]:
    """Return True for each of the first and last layer that is frozen in a step."""
    return ((False, True), (False, False), (True, False), (True, False), (False, False), (False, True))[step]


@every_optimizer
@pytest.mark.parametrize("when", ["everywhere", "with a gradient on one rank only"])
def test_requires_grad_may_flip_between_steps(make: Make, when: str) -> None:
    def loss(model: nn.Sequential, number: int, rank: int) -> Tensor | None:
        step = number // 10
        for layer, is_frozen in zip((model[0], model[2]), frozen(step), strict=True):
            layer.requires_grad_(not is_frozen)
        x, y = rows_of(step, rank)
        hidden = model[1](model[0](x))
        skips = when != "everywhere" and rank > 0 and step < 3
        found = F.mse_loss(hidden[:, :3] if skips else model[2](hidden), y)
        return found if found.requires_grad else None

    compare(lambda model, optimizer, ranks: train_on(model, optimizer, ranks, loss, steps=range(6)), make)


@pytest.mark.parametrize(
    ("make", "after", "where"), pairwise(OPTIMIZERS.values(), [0, 2], ["everywhere", "on one rank"])
)
def test_a_param_group_added_after_wrapping_is_reduced(make: Make, after: int, where: str) -> None:
    def steps(model: Branches, optimizer: Any, ranks: list[int]) -> int:
        def loss(model: Branches, number: int, rank: int) -> Tensor:
            x, y = rows_of(number // 10, rank)
            both = number // 10 >= after and (where == "everywhere" or rank == hvd.size() - 1)
            return F.mse_loss(model(x, "ab" if both else "a"), y)

        for step in range(5):
            if step == after:
                optimizer.add_param_group({"params": list(model.b.parameters()), "lr": 0.002})
            train_on(model, optimizer, ranks, loss, steps=range(step, step + 1))
        return len(getattr(optimizer, "_parameter_names", ()))

    model, reference = Branches(), Branches()
    optimizer = hvd.DistributedOptimizer(make(model.a.parameters()), model.a.named_parameters())
    assert steps(model, optimizer, here()) == 4
    steps(reference, make(reference.a.parameters()), all_ranks())
    assert_as_alone(model, reference)


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_a_param_group_added_to_the_wrapped_optimizer_is_reduced_too(
    op: str, after: int, needs_two: None
) -> None:
    if op == "Adasum" and hvd.size() == 3:
        pytest.skip("Adasum is for powers of two")
    model = Branches()
    base = OPTIMIZERS["SGD"](model.a.parameters())
    optimizer = hvd.DistributedOptimizer(base, model.a.named_parameters(), op=getattr(hvd, op))
    for step in range(5):
        if step == after:
            base.add_param_group({"params": list(model.b.parameters())})
        optimizer.zero_grad()
        x, y = batch(step)
        F.mse_loss(model(part(x), "ab" if step >= after else "a"), part(y)).backward()
        optimizer.step()
    same = hvd.allgather_object(bits(model))
    assert len(set(same)) == 1, "ranks differ"
    assert len(optimizer._parameter_names) == 4


# What the wrapped optimizer was stays


@pytest.mark.parametrize(("make", "stage"), pairwise(OPTIMIZERS.values(), [None, 1, 2]))
def test_it_is_an_instance_of_its_own_class_of_the_same_name(make: Make, stage: int | None) -> None:
    model, optimizer = wrapped(make, zero_stage=stage)
    kind = type(make(model.parameters()))
    assert isinstance(optimizer, kind)
    assert type(optimizer) is not kind
    assert type(optimizer).__name__ == kind.__name__
    assert optimizer.defaults == make(model.parameters()).defaults
    assert "lr" in repr(optimizer)
    assert set(optimizer._parameter_names.values()) == {name for name, _ in model.named_parameters()}
    assert all(optimizer._parameter_names[parameter] == name for name, parameter in model.named_parameters())


@every_optimizer
def test_state_from_before_wrapping_is_kept(make: Make) -> None:
    model, base = alone(make, steps=range(2))
    optimizer = hvd.DistributedOptimizer(base, model.named_parameters())
    train(model, optimizer, part, steps=range(2, 5))
    reference, other = alone(make, steps=range(5))
    assert_as_alone(model, reference)
    for parameter, same in zip(model.parameters(), reference.parameters(), strict=True):
        assert optimizer.state[parameter].keys() == other.state[same].keys()
    assert optimizer.state_dict()["param_groups"] == other.state_dict()["param_groups"]


@pytest.mark.parametrize("stage", [None, 1, 2])
def test_step_hooks_run_once_a_step_and_see_reduced_gradients(stage: int | None) -> None:
    model = model_of()
    base = SGD(model.parameters(), lr=0.1)
    calls: list[Any] = []

    def tell(what: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            gradients = [] if stage else [p.grad.flatten() for p in model.parameters()]
            calls.append((what, torch.cat([torch.zeros(1), *gradients])))

        return hook

    base.register_step_pre_hook(tell("before"))
    optimizer = hvd.DistributedOptimizer(base, model.named_parameters(), zero_stage=stage)
    optimizer.register_step_post_hook(tell("after"))
    kinds = []
    for step in range(3):
        train(model, optimizer, part, steps=range(step, step + 1))
        kinds.append([what for what, _ in calls[2 * step :]])
        optimizer.load_state_dict(optimizer.state_dict())
    seen = hvd.allgather_object([gradient.numpy().tobytes() for _, gradient in calls])
    assert kinds == [["before", "after"]] * 3
    assert all(other == seen[0] for other in seen)


def test_state_dict_hooks_from_before_wrapping_run() -> None:
    model = model_of()
    base = SGD(model.parameters(), lr=0.1)
    calls = []
    base.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    base.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    optimizer = hvd.DistributedOptimizer(base)
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["saved", "loaded"]


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": lambda optimizer: StepLR(optimizer, 2, gamma=0.5),
    "CosineAnnealingLR": lambda optimizer: CosineAnnealingLR(optimizer, 5),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=6),
    "ReduceLROnPlateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
}


@pytest.mark.parametrize(
    ("schedule", "before", "stage"), pairwise(SCHEDULERS.values(), [True, False], [None, 1, 2])
)
def test_learning_rate_schedulers_work_and_warn_of_nothing(
    schedule: Callable[[Optimizer], Any], before: bool, stage: int | None
) -> None:
    made = []

    def make(parameters: Any) -> Optimizer:
        optimizer = sgd(parameters)
        made.append(schedule(optimizer) if before else None)
        return optimizer

    def steps(model: nn.Module, optimizer: Optimizer, ranks: list[int]) -> list[float]:
        scheduler = made[-1] or schedule(optimizer)
        for step in range(5):
            train(model, optimizer, of_ranks(ranks), steps=range(step, step + 1))
            scheduler.step(*((1.0,) if isinstance(scheduler, ReduceLROnPlateau) else ()))
            if step == 2:
                optimizer.load_state_dict(optimizer.state_dict())
        return [group["lr"] for group in optimizer.param_groups]

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        rates, expected, _ = compare(steps, make, zero_stage=stage)
    assert rates == expected
    assert [str(warning.message) for warning in told] == []


@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_a_scheduler_made_before_wrapping_goes_on_after_load_state_dict(op: str, needs_two: None) -> None:
    if op == "Adasum" and hvd.size() == 3:
        pytest.skip("Adasum is for powers of two")
    model = model_of()
    base = OPTIMIZERS["SGD"](model.parameters())
    scheduler = StepLR(base, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(base, model.named_parameters(), op=getattr(hvd, op))
    rates = []
    for step in range(4):
        if step == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(model, optimizer, part, steps=range(step, step + 1))
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.05 / 2, 0.05 / 4, 0.05 / 8, 0.05 / 16]
    assert base.state is optimizer.state
