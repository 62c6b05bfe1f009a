"""DistributedOptimizer against one process that sees all ranks' rows, in float64 and to rounding.

What ranks find is gathered first and asserted after, so that no rank fails alone while others wait.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.checkpoint import checkpoint

import hpcpar.horovod.torch as hvd
from hpcpar.horovod import basics
from tests.grid import pairwise
from tests.horovod.torch.training import (
    OPTIMIZERS,
    REDUCTIONS,
    ROUNDING,
    ROWS,
    STEPS,
    Branches,
    Make,
    Share,
    alone,
    assert_as_alone,
    backward,
    batch,
    bits,
    distance,
    errors_everywhere,
    model_of,
    of_ranks,
    part,
    train,
    whole,
    wrapped,
)

every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
every_pair = pytest.mark.parametrize(("make", "stage"), pairwise(OPTIMIZERS.values(), [None, 1, 2]))
"""Every optimizer with every stage of ZeRO; `None` averages whole gradients."""


@pytest.fixture(autouse=True)
def _initialized(request: pytest.FixtureRequest) -> None:
    """Initialize Horovod for tests that train here; the others start jobs of their own."""
    if request.node.get_closest_marker("mpi"):
        request.getfixturevalue("hvd")
        if "stage" in request.fixturenames and request.node.callspec.params["stage"]:
            request.getfixturevalue("small_buckets")


@pytest.fixture
def small_buckets(hvd: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make buckets so small that these models have several."""
    context = basics.the_context()
    monkeypatch.setattr(context, "knobs", replace(context.knobs, fusion_threshold_nbytes=300))


# Equality with one process


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("make", "passes", "op"), pairwise(OPTIMIZERS.values(), [1, 2, 3], ["Average", "Sum"])
)
def test_training_is_that_of_one_process_with_all_rows(make: Make, passes: int, op: str) -> None:
    reduction = REDUCTIONS[op]
    model, optimizer = wrapped(make, op=getattr(hvd, op), backward_passes_per_step=passes)
    train(model, optimizer, part, passes=passes, reduction=reduction)
    reference, _ = alone(make, passes=passes, reduction=reduction)
    assert_as_alone(model, reference)


@pytest.mark.mpi
@every_optimizer
@pytest.mark.parametrize("factor", [0.25, 3.0, 1000.0])
def test_dividing_before_and_after_the_sum_is_an_average_too(make: Make, factor: float) -> None:
    model, optimizer = wrapped(make, gradient_predivide_factor=factor, backward_passes_per_step=2)
    train(model, optimizer, part, passes=2)
    assert_as_alone(model, alone(make, passes=2)[0])


@pytest.mark.mpi
@pytest.mark.parametrize("fused", [False, True])
def test_kernels_over_all_parameters_at_once_read_the_reduced_gradients(fused: bool) -> None:
    def make(parameters: Any) -> Optimizer:
        return AdamW(parameters, lr=0.01, fused=fused, foreach=not fused)

    model, optimizer = wrapped(make)
    train(model, optimizer, part)
    assert_as_alone(model, alone(make)[0])


@pytest.mark.mpi
def test_names_of_more_parameters_than_it_holds_are_welcome() -> None:
    model, reference = model_of(), model_of()
    optimizer = hvd.DistributedOptimizer(SGD(model[0].parameters(), lr=0.1), model.named_parameters())
    train(model, optimizer, part)
    train(reference, SGD(reference[0].parameters(), lr=0.1), whole)
    assert_as_alone(model, reference)


@pytest.mark.mpi
def test_a_parameter_used_twice_is_reduced_once() -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(
            nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False), nn.Linear(6, 3)
        )
        model[2].weight = model[0].weight
        return model.double()

    torch.manual_seed(1)
    model = tied()
    reference = copy.deepcopy(model)
    names = list(model.named_parameters(remove_duplicate=False))
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["AdamW"](model.parameters()), names)
    train(model, optimizer, part)
    train(reference, OPTIMIZERS["AdamW"](reference.parameters()), whole)
    assert len(names) == 4
    assert_as_alone(model, reference)


@pytest.mark.mpi
@pytest.mark.parametrize("passes", [1, 2])
def test_stepping_before_all_passes_reduces_what_there_is(passes: int) -> None:
    model, optimizer = wrapped(backward_passes_per_step=3)
    train(model, optimizer, part, passes=passes)
    assert_as_alone(model, alone(passes=passes)[0])


@pytest.mark.mpi
def test_the_number_of_passes_can_change_between_steps() -> None:
    model, optimizer = wrapped()
    reference, other = alone(steps=range(2))
    train(model, optimizer, part, steps=range(2))
    for passes, steps in ((3, range(2, 4)), (1, range(4, 6)), (2, range(6, 8))):
        optimizer.set_backward_passes_per_step(passes)
        train(model, optimizer, part, steps=steps, passes=passes)
        train(reference, other, whole, steps=steps, passes=passes)
    assert_as_alone(model, reference)


@pytest.mark.mpi
def test_gradients_may_add_up_over_steps() -> None:
    model, optimizer = wrapped()
    reference = model_of()
    other = OPTIMIZERS["SGD"](reference.parameters())
    for step in range(STEPS):
        backward(model, part, step)
        optimizer.step()
        backward(reference, whole, step)
        other.step()
    assert_as_alone(model, reference)


@pytest.mark.mpi
def test_a_second_step_without_a_backward_takes_the_same_average_again() -> None:
    model, optimizer = wrapped()
    reference, other = model_of(), None
    other = OPTIMIZERS["SGD"](reference.parameters())
    for step in range(3):
        train(model, optimizer, part, steps=range(step, step + 1))
        optimizer.step()
        train(reference, other, whole, steps=range(step, step + 1))
        other.step()
    assert_as_alone(model, reference)


@pytest.mark.mpi
@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_may_be_computed_again_in_backward(reentrant: bool) -> None:
    def steps(model: nn.Module, optimizer: Optimizer, share: Share) -> None:
        for step in range(3):
            x, y = batch(step)
            optimizer.zero_grad()
            hidden = checkpoint(model[:2], share(x).requires_grad_(), use_reentrant=reentrant)
            F.mse_loss(model[2](hidden), share(y)).backward()
            optimizer.step()

    model, optimizer = wrapped()
    reference = model_of()
    steps(model, optimizer, part)
    steps(reference, OPTIMIZERS["SGD"](reference.parameters()), whole)
    assert_as_alone(model, reference)


@pytest.mark.mpi
def test_gradients_of_several_buckets_leave_during_backward_and_are_those_of_one_process() -> None:
    def wide() -> nn.Sequential:
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(6, 500), nn.Tanh(), nn.Linear(500, 400), nn.Linear(400, 3)).double()

    model, reference = wide(), wide()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["AdamW"](model.parameters()), model.named_parameters())
    train(model, optimizer, part)
    train(reference, OPTIMIZERS["AdamW"](reference.parameters()), whole)
    assert_as_alone(model, reference)


@pytest.mark.mpi
def test_channels_last_parameters_and_gradients_keep_their_memory_order() -> None:
    def net() -> nn.Sequential:
        torch.manual_seed(2)
        layers = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 2), nn.Flatten(), nn.Linear(18, 1)
        )
        return layers.double().to(memory_format=torch.channels_last)

    def steps(model: nn.Module, optimizer: Optimizer, share: Share) -> None:
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            images = torch.randn(ROWS * hvd.size(), 3, 6, 6, generator=generator, dtype=torch.float64)
            optimizer.zero_grad()
            model(share(images).to(memory_format=torch.channels_last)).square().mean().backward()
            optimizer.step()

    model, reference = net(), net()
    steps(model, hvd.DistributedOptimizer(OPTIMIZERS["SGD"](model.parameters())), part)
    steps(reference, OPTIMIZERS["SGD"](reference.parameters()), whole)
    assert_as_alone(model, reference)
    for layer in (model[0], model[2]):
        assert layer.weight.stride() == layer.weight.grad.stride()
        assert layer.weight.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.mpi
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


@pytest.mark.mpi
def test_parameters_of_several_types_are_reduced_each_in_its_own() -> None:
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    parameters = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes]
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=1.0))
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


def rank_loss(model: Branches, step: int, rank: int) -> Tensor | None:
    x, y = (rows[ROWS * rank : ROWS * (rank + 1)] for rows in batch(step))
    used = uses(step, rank)
    return F.mse_loss(model(x, used), y) if used else None


def branch_steps(
    model: Branches, optimizer: Optimizer, ranks: range, *, set_to_none: bool
) -> list[list[bool]]:
    """Train on the mean of the ranks' losses; which parameters had gradients after each step."""
    seen = []
    for step in range(6):
        optimizer.zero_grad(set_to_none=set_to_none)
        for rank in ranks:
            loss = rank_loss(model, step, rank)
            if loss is not None:
                (loss / len(ranks)).backward()
        optimizer.step()
        seen.append([parameter.grad is not None for parameter in model.parameters()])
    return seen


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("make", "set_to_none", "stage"), pairwise(OPTIMIZERS.values(), [True, False], [None, 1, 2])
)
def test_parameters_without_a_gradient_on_some_ranks_or_all_are_as_in_one_process(
    make: Make, set_to_none: bool, stage: int | None
) -> None:
    model, reference = Branches(), Branches()
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), zero_stage=stage)
    own = range(hvd.rank(), hvd.rank() + 1)
    seen = branch_steps(model, optimizer, own, set_to_none=set_to_none)
    expected = branch_steps(
        reference, make(reference.parameters()), range(hvd.size()), set_to_none=set_to_none
    )
    assert_as_alone(model, reference)
    assert stage or seen == expected


@pytest.mark.mpi
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


@pytest.mark.mpi
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


@pytest.mark.mpi
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
    """Whether the first and the last layer are frozen in a step."""
    return ((False, True), (False, False), (True, False), (True, False), (False, False), (False, True))[step]


@pytest.mark.mpi
@every_optimizer
@pytest.mark.parametrize("when", ["everywhere", "with a gradient on one rank only"])
def test_requires_grad_may_flip_between_steps(make: Make, when: str) -> None:
    def steps(model: nn.Module, optimizer: Optimizer, ranks: range) -> None:
        for step in range(6):
            for layer, is_frozen in zip((model[0], model[2]), frozen(step), strict=True):
                layer.requires_grad_(not is_frozen)
            optimizer.zero_grad()
            for rank in ranks:
                x, y = (rows[ROWS * rank : ROWS * (rank + 1)] for rows in batch(step))
                hidden = model[1](model[0](x))
                skips = when != "everywhere" and rank > 0 and step < 3
                out = hidden[:, :3] if skips else model[2](hidden)
                loss = F.mse_loss(out, y)
                if loss.requires_grad:
                    (loss / len(ranks)).backward()
            optimizer.step()

    model, optimizer = wrapped(make)
    reference = model_of()
    steps(model, optimizer, range(hvd.rank(), hvd.rank() + 1))
    steps(reference, make(reference.parameters()), range(hvd.size()))
    assert_as_alone(model, reference)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("make", "after", "where"), pairwise(OPTIMIZERS.values(), [0, 2], ["everywhere", "on one rank"])
)
def test_a_param_group_added_after_wrapping_is_reduced(make: Make, after: int, where: str) -> None:
    def steps(model: Branches, optimizer: Optimizer, ranks: range) -> None:
        for step in range(5):
            if step == after:
                optimizer.add_param_group({"params": list(model.b.parameters()), "lr": 0.002})
            optimizer.zero_grad()
            for rank in ranks:
                x, y = (rows[ROWS * rank : ROWS * (rank + 1)] for rows in batch(step))
                both = step >= after and (where == "everywhere" or rank == hvd.size() - 1)
                (F.mse_loss(model(x, "ab" if both else "a"), y) / len(ranks)).backward()
            optimizer.step()

    model, reference = Branches(), Branches()
    optimizer = hvd.DistributedOptimizer(make(model.a.parameters()), model.a.named_parameters())
    steps(model, optimizer, range(hvd.rank(), hvd.rank() + 1))
    steps(reference, make(reference.a.parameters()), range(hvd.size()))
    assert len(optimizer._parameter_names) == 4
    assert_as_alone(model, reference)


@pytest.mark.mpi
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


@pytest.mark.mpi
@every_pair
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


@pytest.mark.mpi
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


@pytest.mark.mpi
def test_step_hooks_run_once_a_step_and_see_reduced_gradients() -> None:
    model = model_of()
    base = SGD(model.parameters(), lr=0.1)
    calls: list[Any] = []

    def tell(what: str) -> Callable[..., None]:
        return lambda *_: calls.append((what, torch.cat([p.grad.flatten() for p in model.parameters()])))

    base.register_step_pre_hook(tell("before"))
    optimizer = hvd.DistributedOptimizer(base, model.named_parameters())
    optimizer.register_step_post_hook(tell("after"))
    kinds = []
    for step in range(3):
        train(model, optimizer, part, steps=range(step, step + 1))
        kinds.append([what for what, _ in calls[2 * step :]])
        optimizer.load_state_dict(optimizer.state_dict())
    seen = hvd.allgather_object([gradient.numpy().tobytes() for _, gradient in calls])
    assert kinds == [["before", "after"]] * 3
    assert all(other == seen[0] for other in seen)


@pytest.mark.mpi
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


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("schedule", "before", "stage"), pairwise(SCHEDULERS.values(), [True, False], [None, 1, 2])
)
def test_learning_rate_schedulers_work_and_warn_of_nothing(
    schedule: Callable[[Optimizer], Any], before: bool, stage: int | None
) -> None:
    make = OPTIMIZERS["SGD"]

    def steps(model: nn.Module, optimizer: Optimizer, scheduler: Any, share: Share) -> None:
        for step in range(5):
            train(model, optimizer, share, steps=range(step, step + 1))
            arguments = (1.0,) if isinstance(scheduler, ReduceLROnPlateau) else ()
            scheduler.step(*arguments)
            if step == 2:
                optimizer.load_state_dict(optimizer.state_dict())

    model, reference = model_of(), model_of()
    base, other = make(model.parameters()), make(reference.parameters())
    scheduler = schedule(base) if before else None
    optimizer = hvd.DistributedOptimizer(base, model.named_parameters(), zero_stage=stage)
    scheduler = scheduler or schedule(optimizer)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        steps(model, optimizer, scheduler, part)
    steps(reference, other, schedule(other), whole)
    assert_as_alone(model, reference)
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in other.param_groups]
    assert [str(warning.message) for warning in told] == []


@pytest.mark.mpi
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


# Steps with a closure


def closure_steps(
    model: nn.Module, optimizer: Optimizer, share: Share, *, as_number: bool = False
) -> list[float]:
    """Losses that `step` returned."""
    losses = []
    for step in range(3):

        def closure(step: int = step) -> Any:
            optimizer.zero_grad()
            loss = backward(model, share, step)
            return loss.item() if as_number else loss

        loss = optimizer.step(closure)
        losses.append(loss.item() if isinstance(loss, Tensor) else loss)
    return losses


CLOSURE_OPTIMIZERS = {
    **OPTIMIZERS,
    "SGD, returning a number": OPTIMIZERS["SGD"],
    "LBFGS": lambda parameters: LBFGS(parameters, lr=0.3, max_iter=4),
    "LBFGS with line search": lambda parameters: LBFGS(parameters, max_iter=4, line_search_fn="strong_wolfe"),
}


@pytest.mark.mpi
@pytest.mark.parametrize("name", CLOSURE_OPTIMIZERS)
def test_a_step_with_a_closure_is_that_of_one_process_and_returns_its_loss(name: str) -> None:
    make = CLOSURE_OPTIMIZERS[name]
    model, optimizer = wrapped(make)
    reference = model_of()
    losses = closure_steps(model, optimizer, part, as_number="number" in name)
    expected = closure_steps(reference, make(reference.parameters()), whole)
    # LBFGS divides by differences of gradients, which makes rounding larger.
    assert_as_alone(model, reference, 1e-9 if isinstance(optimizer, LBFGS) else ROUNDING)
    assert losses == pytest.approx(expected, abs=1e-9)
    assert hvd.allgather_object(losses) == [losses] * hvd.size()


@pytest.mark.mpi
def test_a_closure_may_return_nothing() -> None:
    model, optimizer = wrapped()
    reference = model_of()
    other = OPTIMIZERS["SGD"](reference.parameters())
    for each, of, share in ((model, optimizer, part), (reference, other, whole)):

        def closure(each: nn.Module = each, of: Optimizer = of, share: Any = share) -> None:
            of.zero_grad()
            backward(each, share, 0)

        assert [of.step(closure) for _ in range(2)] == [None, None]
    assert_as_alone(model, reference)


@pytest.mark.mpi
def test_steps_with_and_without_a_closure_may_alternate() -> None:
    model, optimizer = wrapped()
    reference = model_of()
    other = OPTIMIZERS["SGD"](reference.parameters())
    for _ in range(2):
        closure_steps(model, optimizer, part)
        train(model, optimizer, part)
        closure_steps(reference, other, whole)
        train(reference, other, whole)
    assert_as_alone(model, reference)


@pytest.mark.mpi
def test_a_closure_with_several_backwards_reduces_their_sum() -> None:
    def steps(model: nn.Module, optimizer: Optimizer, share: Share) -> None:
        for step in range(3):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                return backward(model, share, 10 * step) + backward(model, share, 10 * step + 1)

            optimizer.step(closure)

    model, optimizer = wrapped(backward_passes_per_step=2)
    reference = model_of()
    steps(model, optimizer, part)
    steps(reference, OPTIMIZERS["SGD"](reference.parameters()), whole)
    assert_as_alone(model, reference)


# Gradients between backward and step


@pytest.mark.mpi
@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_can_be_clipped_after_synchronize(passes: int) -> None:
    def steps(model: nn.Module, optimizer: Any, share: Share) -> list[float]:
        norms = []
        for step in range(STEPS):
            optimizer.zero_grad()
            for number in range(passes):
                backward(model, share, 10 * step + number)
            if optimizer is not other:
                optimizer.synchronize()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
            with nullcontext() if optimizer is other else optimizer.skip_synchronize():
                optimizer.step()
        return norms

    model, optimizer = wrapped(backward_passes_per_step=passes)
    reference = model_of()
    other = OPTIMIZERS["SGD"](reference.parameters())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        norms = steps(model, optimizer, part)
    expected = steps(reference, other, whole)
    assert_as_alone(model, reference)
    assert norms == pytest.approx(expected, abs=ROUNDING)
    assert min(expected) > 0.1, "nothing was clipped"
    assert [str(warning.message) for warning in told] == []


@pytest.mark.mpi
def test_a_fused_step_by_a_scaler_that_has_seen_one_ranks_gradients_is_an_error_everywhere(
    needs_two: None,
) -> None:
    model, optimizer = wrapped(lambda parameters: SGD(parameters, lr=0.1, fused=True))
    scaler = torch.amp.GradScaler("cpu")
    x, _ = batch(0)
    scaler.scale(model(part(x)).sum() * (float("inf") if hvd.rank() else 1.0)).backward()
    told = errors_everywhere(lambda: scaler.step(optimizer))
    optimizer.synchronize()
    assert ["before optimizer.synchronize()" in text for _, text in told] == [True] * hvd.size()


@pytest.mark.mpi
def test_a_gradient_scaler_unscales_after_synchronize() -> None:
    def scaled(model: nn.Module, optimizer: Any, share: Share, *, distributed: bool) -> float:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = batch(step)
            spoil = float("inf") if step == 2 and (hvd.rank() == 0 or not distributed) else 1.0
            scaler.scale(F.mse_loss(model(share(x)), share(y)) * spoil).backward()
            if distributed:
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    model, optimizer = wrapped()
    reference = model_of()
    scale = scaled(model, optimizer, part, distributed=True)
    expected = scaled(reference, OPTIMIZERS["SGD"](reference.parameters()), whole, distributed=False)
    assert_as_alone(model, reference)
    assert scale == expected


@pytest.mark.mpi
@pytest.mark.parametrize(("op", "stage"), [("Average", None), ("Sum", None), ("Sum", 1), ("Sum", 2)])
def test_a_step_after_synchronize_warns_exactly_once_and_reduces_nothing_twice(
    op: str, stage: int | None, needs_two: None
) -> None:
    reduction = REDUCTIONS[op]
    model, optimizer = wrapped(op=getattr(hvd, op), zero_stage=stage)
    told = []
    for step in range(3):
        optimizer.zero_grad()
        backward(model, part, 10 * step, reduction)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.synchronize()
            optimizer.synchronize()
            optimizer.step()
        told.append([(warning.category, str(warning.message)) for warning in caught])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, part, steps=range(3, 5), reduction=reduction)
    assert_as_alone(model, alone(steps=range(5), reduction=reduction)[0])
    assert [[category for category, _ in warning] for warning in told] == [[UserWarning]] * 3
    assert "skip_synchronize" in told[0][0][1]
    assert [str(warning.message) for warning in caught] == []


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("op", "zeroed"),
    [
        ("Average", "by the model"),
        ("Sum", "by the model"),
        ("Average", "by the optimizer"),
        ("Average", "not at all"),  # a sum would be summed once more, as in Horovod
    ],
)
@pytest.mark.parametrize("skipped", [0, 1], ids=["the first step", "a later step"])
def test_gradients_that_come_after_a_skipped_step_are_reduced(
    op: str, zeroed: str, skipped: int, needs_two: None
) -> None:
    reduction = REDUCTIONS[op]

    def steps(model: nn.Module, optimizer: Any, share: Share, *, is_ours: bool) -> None:
        for step in range(4):
            if zeroed != "not at all" or step != skipped + 1:
                (model if zeroed == "by the model" else optimizer).zero_grad()
            backward(model, share, step, reduction)
            if step != skipped:
                optimizer.step()
            elif is_ours:
                optimizer.synchronize()

    model, optimizer = wrapped(op=getattr(hvd, op))
    reference = model_of()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it does not know why there was no step
        steps(model, optimizer, part, is_ours=True)
    steps(reference, OPTIMIZERS["SGD"](reference.parameters()), whole, is_ours=False)
    assert_as_alone(model, reference)


@pytest.mark.mpi
@pytest.mark.filterwarnings("ignore:optimizer.step:UserWarning")
def test_a_step_after_synchronize_reduces_sparse_gradients_and_newcomers_once(needs_two: None) -> None:
    def steps(optimizer: Any, share: Share, *, is_ours: bool) -> None:
        for step in range(4):
            optimizer.zero_grad()
            x = batch(step)[0]
            loss = (share(x) @ table(torch.arange(6))).sum() * scale
            if step >= 2:
                loss = loss + share(x).sum() * late
            loss.backward()
            if is_ours:
                optimizer.synchronize()
            optimizer.step()

    def parameters() -> tuple[nn.Embedding, nn.Parameter, nn.Parameter, nn.Parameter]:
        torch.manual_seed(0)
        one, two, never = (nn.Parameter(torch.ones((), dtype=torch.float64)) for _ in range(3))
        return nn.Embedding(6, 2, sparse=True, dtype=torch.float64), one, two, never

    table, scale, late, never = parameters()
    model = nn.ParameterList([table.weight, scale, late, never])
    steps(
        hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.01), op=hvd.Sum),
        part,
        is_ours=True,
    )
    table, scale, late, never = parameters()
    reference = nn.ParameterList([table.weight, scale, late, never])
    steps(SGD(reference.parameters(), lr=0.01), whole, is_ours=False)
    assert_as_alone(model, reference)


@pytest.mark.mpi
def test_what_an_optimizer_was_wrapped_with_can_be_read_and_the_passes_set() -> None:
    model, optimizer = wrapped(gradient_predivide_factor=2.0, sparse_as_dense=True)
    told = (optimizer.op, optimizer.gradient_predivide_factor, optimizer.sparse_as_dense)
    assert told == (hvd.Average, 2.0, True)
    assert optimizer.process_set is hvd.global_process_set
    for name in ("op", "gradient_predivide_factor", "sparse_as_dense", "process_set"):
        with pytest.raises(AttributeError, match=rf"{name}=None is for hvd\.DistributedOptimizer"):
            setattr(optimizer, name, None)
    for wrong in (0, 1.5, "2"):
        with pytest.raises(ValueError, match="backward_passes_per_step="):
            optimizer.backward_passes_per_step = wrong
    reference, other = alone(steps=range(0))
    for step, passes in ((0, 2), (1, 1), (2, 3)):
        optimizer.backward_passes_per_step = passes
        train(model, optimizer, part, passes=passes, steps=range(step, step + 1))
        train(reference, other, whole, passes=passes, steps=range(step, step + 1))
        assert optimizer.backward_passes_per_step == passes
    assert_as_alone(model, reference)


@pytest.mark.mpi
def test_an_optimizers_own_zero_grad_need_not_know_arguments() -> None:
    class Own(SGD):
        def zero_grad(self) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    model, optimizer = wrapped(lambda parameters: Own(parameters, lr=0.1))
    train(model, optimizer, part)
    reference, _ = alone(lambda parameters: SGD(parameters, lr=0.1))
    assert_as_alone(model, reference)


@pytest.mark.mpi
def test_an_error_inside_skip_synchronize_ends_it() -> None:
    model, optimizer = wrapped()
    with pytest.raises(ZeroDivisionError), optimizer.skip_synchronize():
        _ = 1 / 0
    train(model, optimizer, part)
    assert_as_alone(model, alone()[0])


@pytest.mark.mpi
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_leaves_what_was_asked_for(set_to_none: bool) -> None:
    model, optimizer = wrapped()
    found = []
    for step in range(2):
        backward(model, part, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        found.append([None if p.grad is None else p.grad.count_nonzero().item() for p in model.parameters()])
    assert found == [[None if set_to_none else 0] * 4] * 2


# Misuse


@pytest.mark.mpi
@pytest.mark.parametrize(("taken", "passes", "stage"), [*pairwise([0, 2], [1, 2, 3], [None]), (0, 2, 1)])
def test_more_backwards_than_declared_are_an_error_everywhere_and_training_goes_on(
    passes: int, taken: int, stage: int | None, needs_two: None
) -> None:
    model, optimizer = wrapped(backward_passes_per_step=passes, zero_stage=stage)
    train(model, optimizer, part, passes=passes, steps=range(taken))
    optimizer.zero_grad()
    for number in range(passes):
        backward(model, part, number)
    told = errors_everywhere(lambda: backward(model, part, passes))
    optimizer.step()
    # What came too late may have been added to what was on its way, on some ranks only.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, optimizer, part, passes=passes, steps=range(taken, taken + 2))
    same = hvd.allgather_object(bits(model))
    assert all("AssertionError" in kinds for kinds, _ in told)
    assert all("Gradients were computed more than backward_passes_per_step times" in text for _, text in told)
    assert all("2." in text or "0." in text for _, text in told), "no parameter is named"
    assert len(set(same)) == 1


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("taken", "set_to_none", "stage"), [*pairwise([0, 2], [True, False], [None]), (2, True, 1), (2, True, 2)]
)
def test_zero_grad_while_gradients_are_under_way_is_an_error_and_training_goes_on(
    taken: int, set_to_none: bool, stage: int | None, needs_two: None
) -> None:
    model, optimizer = wrapped(zero_stage=stage)
    train(model, optimizer, part, steps=range(taken))
    optimizer.zero_grad()
    backward(model, part, 10 * taken)
    told = errors_everywhere(lambda: optimizer.zero_grad(set_to_none=set_to_none))
    optimizer.step()
    train(model, optimizer, part, steps=range(taken + 1, taken + 2))
    assert_as_alone(model, alone(steps=range(taken + 2))[0])
    assert all("AssertionError" in kinds for kinds, _ in told)
    assert all("step()" in text and "synchronize()" in text for _, text in told)


@pytest.mark.mpi
@pytest.mark.parametrize("taken", [0, 2], ids=["in the first step", "in a later step"])
def test_dropping_gradients_half_way_is_refused_or_counts_anew(taken: int) -> None:
    model, optimizer = wrapped(backward_passes_per_step=2)
    train(model, optimizer, part, passes=2, steps=range(taken))
    optimizer.zero_grad()
    backward(model, part, 999)
    told = errors_everywhere(optimizer.zero_grad)
    if told[0][0]:
        optimizer.step()
    train(model, optimizer, part, passes=2, steps=range(taken, taken + 2))
    same = hvd.allgather_object(bits(model))
    assert all(not kinds or "AssertionError" in kinds for kinds, _ in told)
    assert len(set(same)) == 1


@pytest.mark.mpi
@pytest.mark.parametrize("taken", [0, 2], ids=["in the first step", "in a later step"])
@pytest.mark.parametrize("reset", ["load_state_dict", "set_backward_passes_per_step"])
def test_backwards_are_counted_anew_after(reset: str, taken: int) -> None:
    model, optimizer = wrapped(backward_passes_per_step=2)
    reference, other = alone(passes=2, steps=range(taken))
    train(model, optimizer, part, passes=2, steps=range(taken))
    optimizer.zero_grad()
    backward(model, part, 999)
    if reset == "load_state_dict":
        optimizer.load_state_dict(optimizer.state_dict())
    else:
        optimizer.set_backward_passes_per_step(2)
    told = errors_everywhere(lambda: [backward(model, part, 100 + number) for number in range(2)])
    optimizer.step()
    other.zero_grad()
    for number in (999, 100, 101):
        backward(reference, whole, number)
    other.step()
    assert_as_alone(model, reference)
    assert told == [((), "None")] * hvd.size()


IMPOSSIBLE: dict[str, tuple[Callable[[nn.Sequential], Any], str]] = {
    "one name twice": (lambda m: {"named_parameters": [("w", p) for p in m.parameters()]}, "unique.*w"),
    "too few names": (lambda m: {"named_parameters": m[0].named_parameters()}, "2 of the optimizer's 4"),
    "no names": (lambda m: {"named_parameters": []}, "named_parameters"),
    "parameters without names": (lambda m: {"named_parameters": m.parameters()}, "tuples"),
    "triples": (lambda m: {"named_parameters": [("a", p, 1) for p in m.parameters()]}, "tuples"),
    "no passes": (lambda m: {"backward_passes_per_step": 0}, "backward_passes_per_step=0"),
    "fewer than no passes": (lambda m: {"backward_passes_per_step": -1}, "backward_passes_per_step=-1"),
    "predivide with Sum": (lambda m: {"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "op=Average"),
    "predivide with Adasum": (lambda m: {"op": hvd.Adasum, "gradient_predivide_factor": 2.0}, "op=Average"),
    "predivide by nothing": (lambda m: {"gradient_predivide_factor": 0.0}, "factor=0.0.*above 0"),
    "predivide by no number": (lambda m: {"gradient_predivide_factor": float("nan")}, "factor=nan.*above 0"),
    "another op": (lambda m: {"op": hvd.Max}, "Average, Sum"),
    "no groups": (lambda m: {"groups": 0}, "groups"),
    "fewer than no groups": (lambda m: {"groups": -1}, "groups"),
    "groups as a word": (lambda m: {"groups": "two"}, "groups"),
    "groups as a fraction": (lambda m: {"groups": 1.5}, "groups"),
    "a list of parameters as groups": (lambda m: {"groups": list(m.parameters())}, "groups"),
    "names in groups": (lambda m: {"groups": [["0.weight"]]}, "groups.*str"),
    "in two groups": (lambda m: {"groups": [[m[0].weight], [m[0].weight]]}, r"\[8, 6\].*two groups"),
    "twice in a group": (lambda m: {"groups": [[m[0].bias, m[0].bias]]}, "group"),
}


@pytest.mark.mpi
@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_impossible_arguments_are_refused(case: str) -> None:
    options, told = IMPOSSIBLE[case]
    model = model_of()
    with pytest.raises(ValueError, match=f"(?s){told}"):
        hvd.DistributedOptimizer(SGD(model.parameters(), lr=1.0), **options(model))


@pytest.mark.mpi
@pytest.mark.parametrize("op", ["Average", "Adasum"])
@pytest.mark.parametrize("passes", [0, -2])
def test_an_impossible_number_of_passes_is_refused_later_too(op: str, passes: int) -> None:
    if op == "Adasum" and hvd.size() == 3:
        pytest.skip("Adasum is for powers of two")
    _, optimizer = wrapped(op=getattr(hvd, op))
    with pytest.raises(ValueError, match=f"backward_passes_per_step={passes}"):
        optimizer.set_backward_passes_per_step(passes)


# Copies


def through_pickle(things: Any) -> Any:
    return pickle.loads(pickle.dumps(things))


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("make", "copied", "after"), pairwise(OPTIMIZERS.values(), [copy.deepcopy, through_pickle], [0, 2])
)
def test_a_copy_trains_on_by_itself_as_the_original_does(
    make: Make, copied: Callable[[Any], Any], after: int
) -> None:
    model, optimizer = wrapped(make, op=hvd.Sum, backward_passes_per_step=2)
    train(model, optimizer, part, passes=2, reduction="sum", steps=range(after))
    twin, twin_optimizer = copied((model, optimizer))
    train(twin, twin_optimizer, part, passes=2, reduction="sum", steps=range(after, 4))
    untouched = bits(model)
    train(model, optimizer, part, passes=2, reduction="sum", steps=range(after, 4))
    reference, _ = alone(make, passes=2, reduction="sum", steps=range(4))
    assert_as_alone(twin, reference)
    assert_as_alone(model, reference)
    assert untouched != bits(model)
    assert type(twin_optimizer).__name__ == type(optimizer).__name__
    assert twin_optimizer.param_groups[0]["params"][0] is next(twin.parameters())


@pytest.mark.mpi
def test_a_copy_on_one_rank_alone_disturbs_nobody() -> None:
    model, optimizer = wrapped()
    train(model, optimizer, part, steps=range(2))
    kept = (copy.deepcopy(optimizer), pickle.dumps(optimizer)) if hvd.rank() == 0 else None
    if kept:
        pickle.loads(kept[1])
    second, its_optimizer = wrapped()
    train(second, its_optimizer, part)
    train(model, optimizer, part, steps=range(2, 4))
    assert_as_alone(second, alone()[0])
    assert_as_alone(model, alone()[0])


@pytest.mark.mpi
def test_an_optimizer_of_a_process_set_says_that_it_cannot_be_copied(half: Any) -> None:
    _, optimizer = wrapped(process_set=half)
    if half is hvd.global_process_set:
        assert copy.deepcopy(optimizer) is not optimizer
    else:
        with pytest.raises(ValueError, match="process set cannot be copied or pickled"):
            copy.deepcopy(optimizer)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("make", "stages"), pairwise(OPTIMIZERS.values(), [(None, None), (1, 2), (2, 1), (None, 1)])
)
def test_state_dicts_go_to_and_fro_between_stages_and_the_plain_optimizer(
    make: Make, stages: tuple[int | None, int | None], small_buckets: None
) -> None:
    model, optimizer = wrapped(make, zero_stage=stages[0])
    train(model, optimizer, part, steps=range(2))
    saved = model.state_dict(), optimizer.state_dict()
    plain = model_of(1)
    other = make(plain.parameters())
    plain.load_state_dict(saved[0])
    other.load_state_dict(copy.deepcopy(saved[1]))
    train(plain, other, whole, steps=range(2, 4))
    again, its_optimizer = wrapped(make, seed=2, zero_stage=stages[1])
    train(again, its_optimizer, part, steps=range(1))
    again.load_state_dict(saved[0])
    its_optimizer.load_state_dict(copy.deepcopy(saved[1]))
    train(again, its_optimizer, part, steps=range(2, 4))
    reference, truth = alone(make)
    assert saved[1]["param_groups"] == truth.state_dict()["param_groups"]
    assert_as_alone(plain, reference)
    assert_as_alone(again, reference)


# Process sets


@pytest.mark.mpi
@pytest.mark.parametrize(("stage", "op"), [(None, "Average"), (1, "Sum"), (2, "Average")])
def test_ranks_outside_of_the_process_set_train_by_themselves(
    stage: int | None, op: str, halves: list[Any]
) -> None:
    chosen = halves[0]
    model, optimizer = wrapped(process_set=chosen, op=getattr(hvd, op), zero_stage=stage)
    own = chosen.ranks if chosen.included() else [hvd.rank()]
    train(model, optimizer, part, reduction=REDUCTIONS[op])
    reference = model_of()
    plain = OPTIMIZERS["SGD"](reference.parameters())
    train(reference, plain, of_ranks(own), reduction=REDUCTIONS[op])
    told = hvd.allgather_object((bits(model), distance(model, reference)))
    assert max(far for _, far in told) <= ROUNDING
    assert len({told[rank][0] for rank in chosen.ranks}) == 1
    assert len({own for own, _ in told}) == 1 + hvd.size() - len(chosen.ranks)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("stage", "options"), [(None, {"gradient_predivide_factor": 2.0}), (1, {}), (2, {})], ids=str
)
def test_process_sets_train_side_by_side_with_different_numbers_of_steps(
    stage: int | None, options: dict[str, Any], half: Any
) -> None:
    steps = range(2 + 3 * (min(half.ranks) % 2))
    options = {"backward_passes_per_step": 2, "zero_stage": stage, **options}
    model, optimizer = wrapped(OPTIMIZERS["AdamW"], process_set=half, **options)
    train(model, optimizer, part, passes=2, steps=steps)
    reference = model_of()
    plain = OPTIMIZERS["AdamW"](reference.parameters())
    train(reference, plain, of_ranks(half.ranks), passes=2, steps=steps)
    told = hvd.allgather_object(bits(model))
    assert distance(model, reference) <= ROUNDING
    assert len({told[rank] for rank in half.ranks}) == 1


# One rank


@pytest.mark.mpi
def test_one_rank_alone_needs_no_hooks() -> None:
    model, _optimizer = wrapped(backward_passes_per_step=1)
    hooks = [len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters()]
    assert hooks == [0 if hvd.size() == 1 else 1] * 4


# Adasum


def pair(a: Tensor, b: Tensor) -> Tensor:
    dot, aa, bb = a @ b, a @ a, b @ b
    return (1 - dot / (2 * aa) if aa else 1) * a + (1 - dot / (2 * bb) if bb else 1) * b


def combined(changes: list[Tensor]) -> Tensor:
    """Adasum of the ranks' changes of one tensor: the tree (0 ⊕ 1) ⊕ (2 ⊕ 3)."""
    level = [change.flatten() for change in changes]
    while len(level) > 1:
        level = [pair(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0].view(changes[0].shape)


def adasum_alone(make: Make, uses: Callable[[int, int], str], passes: int) -> Branches:
    """All ranks' optimizers in one process: each steps by itself, then the changes are combined."""
    models = [Branches() for _ in range(hvd.size())]
    optimizers = [make(model.parameters()) for model in models]
    for step in range(STEPS):
        before = [parameter.detach().clone() for parameter in models[0].parameters()]
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            adasum_step(model, optimizer, step, rank, uses(step, rank), passes)
        for index, old in enumerate(before):
            own = [list(model.parameters())[index] for model in models]
            new = old + combined([parameter.detach() - old for parameter in own])
            for parameter in own:
                parameter.data.copy_(new)
    return models[0]


def adasum_step(model: Branches, optimizer: Optimizer, step: int, rank: int, used: str, passes: int) -> None:
    optimizer.zero_grad()
    for number in range(passes):
        x, y = (rows[ROWS * rank : ROWS * (rank + 1)] for rows in batch(10 * step + number))
        F.mse_loss(model(x, used), y).backward()
    optimizer.step()


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("make", "passes", "use"),
    pairwise(OPTIMIZERS.values(), [1, 2], ["the same layers", "other layers on the first rank"]),
)
def test_adasum_combines_what_each_ranks_own_step_changes(make: Make, passes: int, use: str) -> None:
    if hvd.size() == 3:
        pytest.skip("Adasum is for powers of two")

    def uses(step: int, rank: int) -> str:
        return "ab" if use == "the same layers" or rank else "ac"

    model = Branches()
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters()), model.named_parameters(), op=hvd.Adasum, backward_passes_per_step=passes
    )
    for step in range(STEPS):
        adasum_step(model, optimizer, step, hvd.rank(), uses(step, hvd.rank()), passes)
    assert_as_alone(model, adasum_alone(make, uses, passes), 1e-11)


@pytest.mark.mpi
def test_adasum_among_three_ranks_is_refused_before_anything_changes() -> None:
    if hvd.size() != 3:
        pytest.skip("for three ranks")
    model = model_of()
    before = bits(model)

    def use() -> None:
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), op=hvd.Adasum)
        backward(model, part, 0)
        optimizer.step()

    told = errors_everywhere(use)
    assert all("NotImplementedError" in kinds for kinds, _ in told)
    assert bits(model) == before


@pytest.mark.mpi
def test_adasum_on_a_process_set_is_refused_before_anything_changes(half: Any, needs_two: None) -> None:
    model = model_of()
    before = bits(model)

    def use() -> None:
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), op=hvd.Adasum, process_set=half)
        backward(model, part, 0)
        optimizer.step()

    told = errors_everywhere(use)
    lone = [half.size() == 1 for half in hvd.allgather_object(half.ranks) for half in [_Sized(half)]]
    assert all(
        is_lone or "NotImplementedError" in kinds for (kinds, _), is_lone in zip(told, lone, strict=True)
    )
    assert bits(model) == before or half.size() == 1


class _Sized:
    def __init__(self, ranks: list[int]) -> None:
        self.size = lambda: len(ranks)


@pytest.mark.mpi
def test_adasum_has_no_step_without_its_combination(needs_two: None) -> None:
    if hvd.size() == 3:
        pytest.skip("Adasum is for powers of two")
    _, optimizer = wrapped(op=hvd.Adasum)
    with pytest.raises(AssertionError, match="Adasum"):
        optimizer.skip_synchronize()


@pytest.mark.mpi
def test_adasum_of_one_rank_is_an_ordinary_step() -> None:
    if hvd.size() > 1:
        pytest.skip("for one rank")
    model, optimizer = wrapped(op=hvd.Adasum)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, part, 10 * step)
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
    assert_as_alone(model, alone()[0])


@pytest.mark.mpi
def test_adasum_takes_a_closure() -> None:
    if hvd.size() == 3:
        pytest.skip("Adasum is for powers of two")
    models = [model_of(), model_of()]
    for model, with_closure in zip(models, (True, False), strict=True):
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["SGD"](model.parameters()), op=hvd.Adasum)
        for step in range(3):

            def closure(step: int = step, model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                return backward(model, part, step)

            if with_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
    assert_as_alone(*models)


# Before init, and after a new start


NOT_READY = """
import pickle
import torch
import hpcpar.horovod.torch as hvd

def wrap(**options):
    parameter = torch.nn.Parameter(torch.ones(2))
    return hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("p", parameter)], **options)

before = error_of(wrap)
hvd.init()
kept = pickle.dumps(wrap())
unknown = error_of(lambda: wrap(process_set=hvd.ProcessSet([0])))
hvd.shutdown()
read = pickle.loads(kept)
is_plain = type(read) is torch.optim.SGD
tell(before=before, unknown=unknown, read=[is_plain, len(read.param_groups[0]["params"])])
"""


def test_wrapping_needs_init_and_known_process_sets_and_a_pickle_does_not(job: Callable[..., Any]) -> None:
    (told,) = job(1, NOT_READY)
    assert told["before"][0] == "ValueError"
    assert "hvd.init()" in told["before"][2]
    assert told["unknown"][0] == "ValueError"
    assert "add_process_set" in told["unknown"][2]
    assert told["read"] == [True, 1]


NEW_START = """
import torch
import hpcpar.horovod.torch as hvd

def train(steps, optimizer, parameter):
    for step in steps:
        optimizer.zero_grad()
        (parameter * (step + hvd.rank() + 1)).sum().backward()
        optimizer.step()
    return parameter.tolist()

hvd.init()
ends = []
for stage in (None, 1, 2):
    parameter = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    base = torch.optim.SGD([parameter], lr=1.0, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(base, [("p", parameter)], zero_stage=stage)
    ends.append(train(range(2), optimizer, parameter))
    hvd.shutdown()
    hvd.init()
    ends.append(train(range(2, 4), optimizer, parameter))
tell(ends=ends)
"""


def test_an_optimizer_goes_on_after_shutdown_and_a_new_init(job: Callable[..., Any]) -> None:
    told = job(2, NEW_START)
    parameter = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    optimizer = SGD([parameter], lr=1.0, momentum=0.5)
    expected = []
    for step in range(4):
        optimizer.zero_grad()
        (parameter * (step + 1.5)).sum().backward()
        optimizer.step()
        expected.append(parameter.tolist())
    assert [of_rank["ends"] for of_rank in told] == [[expected[1], expected[3]] * 3] * 2
