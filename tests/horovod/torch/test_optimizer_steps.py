"""Steps of DistributedOptimizer: closures, scalers and clipping between backward and step, misuse.

What ranks find is gathered first and asserted after, so that no rank fails alone while others wait.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer

import hpcpar.horovod.torch as hvd
from tests.grid import pairwise
from tests.horovod.torch.training import (
    OPTIMIZERS,
    REDUCTIONS,
    ROUNDING,
    STEPS,
    alone,
    assert_as_alone,
    backward,
    batch,
    bits,
    compare,
    errors_everywhere,
    model_of,
    of_ranks,
    part,
    train,
    whole,
    wrapped,
)

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("by_stage")]


# Steps with a closure


def closure_steps(
    model: nn.Module, optimizer: Optimizer, ranks: list[int], *, as_number: bool = False
) -> list[float]:
    """Return the losses that `step` returned."""
    losses = []
    for step in range(3):

        def closure(step: int = step) -> Any:
            optimizer.zero_grad()
            loss = backward(model, of_ranks(ranks), step)
            return loss.item() if as_number else loss

        loss = optimizer.step(closure)
        losses.append(loss.item() if isinstance(loss, Tensor) else loss)
    return losses


CLOSURE_OPTIMIZERS = {
    **OPTIMIZERS,
    "a number": OPTIMIZERS["SGD"],
    "LBFGS": lambda parameters: LBFGS(parameters, lr=0.3, max_iter=4),
    "LBFGS with line search": lambda parameters: LBFGS(parameters, max_iter=4, line_search_fn="strong_wolfe"),
}


@pytest.mark.parametrize(
    ("name", "stage"), [*((name, None) for name in CLOSURE_OPTIMIZERS), ("AdamW", 1), ("a number", 2)]
)
def test_a_step_with_a_closure_is_that_of_one_process_and_returns_its_loss(
    name: str, stage: int | None
) -> None:
    def steps(model: nn.Module, optimizer: Optimizer, ranks: list[int]) -> list[float]:
        losses = []
        for _ in range(1 if "LBFGS" in name else 2):  # steps with and without a closure may alternate
            losses += closure_steps(model, optimizer, ranks, as_number=name == "a number")
            if "LBFGS" not in name:
                train(model, optimizer, of_ranks(ranks))
        return losses

    # LBFGS divides by differences of gradients, which makes rounding larger.
    bound = 1e-9 if "LBFGS" in name else ROUNDING
    losses, expected, _ = compare(steps, CLOSURE_OPTIMIZERS[name], bound=bound, zero_stage=stage)
    assert losses == pytest.approx(expected, abs=1e-9)
    assert hvd.allgather_object(losses) == [losses] * hvd.size()


def test_a_closure_may_return_nothing() -> None:
    def steps(model: nn.Module, optimizer: Optimizer, ranks: list[int]) -> list[Any]:
        def closure() -> None:
            optimizer.zero_grad()
            backward(model, of_ranks(ranks), 0)

        return [optimizer.step(closure) for _ in range(2)]

    found, *_ = compare(steps)
    assert found == [None, None]


def test_a_closure_with_several_backwards_reduces_their_sum() -> None:
    def steps(model: nn.Module, optimizer: Optimizer, ranks: list[int]) -> None:
        for step in range(3):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                first, second = (backward(model, of_ranks(ranks), 10 * step + n) for n in range(2))
                return first + second

            optimizer.step(closure)

    compare(steps, backward_passes_per_step=2)


# Gradients between backward and step


@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_can_be_clipped_after_synchronize(passes: int) -> None:
    def steps(model: nn.Module, optimizer: Any, ranks: list[int]) -> list[float]:
        norms = []
        for step in range(STEPS):
            optimizer.zero_grad()
            for number in range(passes):
                backward(model, of_ranks(ranks), 10 * step + number)
            getattr(optimizer, "synchronize", lambda: None)()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
            with getattr(optimizer, "skip_synchronize", nullcontext)():
                optimizer.step()
        return norms

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        norms, expected, _ = compare(steps, backward_passes_per_step=passes)
    assert norms == pytest.approx(expected, abs=ROUNDING)
    assert min(expected) > 0.1, "nothing was clipped"
    assert [str(warning.message) for warning in told] == []


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_by_a_scaler_that_has_seen_one_ranks_gradients_is_an_error_everywhere(
    fused: bool, unscales: bool, needs_two: None
) -> None:
    model, optimizer = wrapped(lambda parameters: SGD(parameters, lr=0.1, fused=fused))
    backward(model, part, 0)
    optimizer.step()  # from now on gradients are reduced while backward runs
    scaler = torch.amp.GradScaler("cpu")
    optimizer.zero_grad()
    x, _ = batch(0)
    scaler.scale(model(part(x)).sum() * (float("inf") if hvd.rank() else 1.0)).backward()
    if unscales:
        scaler.unscale_(optimizer)
    told = errors_everywhere(lambda: scaler.step(optimizer))
    optimizer.synchronize()
    assert ["before optimizer.synchronize()" in text for _, text in told] == [True] * hvd.size()


def test_a_gradient_scaler_unscales_after_synchronize() -> None:
    def steps(model: nn.Module, optimizer: Any, ranks: list[int]) -> float:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        is_wrapped = hasattr(optimizer, "synchronize")
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = (of_ranks(ranks)(rows) for rows in batch(step))
            spoil = float("inf") if step == 2 and 0 in ranks else 1.0
            scaler.scale(F.mse_loss(model(x), y) * spoil).backward()
            if is_wrapped:
                optimizer.synchronize()
                scaler.unscale_(optimizer)
            with optimizer.skip_synchronize() if is_wrapped else nullcontext():
                scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    scale, expected, _ = compare(steps)
    assert scale == expected


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

    def steps(model: nn.Module, optimizer: Any, ranks: list[int]) -> None:
        for step in range(4):
            if zeroed != "not at all" or step != skipped + 1:
                (model if zeroed == "by the model" else optimizer).zero_grad()
            backward(model, of_ranks(ranks), step, reduction)
            if step != skipped:
                optimizer.step()
            else:
                getattr(optimizer, "synchronize", lambda: None)()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it does not know why there was no step
        compare(steps, op=getattr(hvd, op))


@pytest.mark.filterwarnings("ignore:optimizer.step:UserWarning")
def test_a_step_after_synchronize_reduces_sparse_gradients_and_newcomers_once(needs_two: None) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(6, 2, sparse=True, dtype=torch.float64)
            self.scale, self.late, self.never = (
                nn.Parameter(torch.ones((), dtype=torch.float64)) for _ in range(3)
            )

    def steps(model: Table, optimizer: Any, ranks: list[int]) -> None:
        for step in range(4):
            optimizer.zero_grad()
            x = of_ranks(ranks)(batch(step)[0])
            loss = (x @ model.table(torch.arange(6))).sum() * model.scale
            (loss + x.sum() * model.late if step >= 2 else loss).backward()
            getattr(optimizer, "synchronize", lambda: None)()
            optimizer.step()

    compare(steps, lambda parameters: SGD(parameters, lr=0.01), Table, op=hvd.Sum)


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


def test_an_error_inside_skip_synchronize_ends_it() -> None:
    model, optimizer = wrapped()
    with pytest.raises(ZeroDivisionError), optimizer.skip_synchronize():
        _ = 1 / 0
    train(model, optimizer, part)
    assert_as_alone(model, alone()[0])


def test_a_step_inside_skip_synchronize_waits_for_synchronize(needs_two: None) -> None:
    model, optimizer = wrapped()
    told = []
    for step in range(2):  # in the second one buckets leave while backward runs
        optimizer.zero_grad()
        backward(model, part, 10 * step)
        with optimizer.skip_synchronize():
            told += errors_everywhere(optimizer.step)
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
    assert ["call optimizer.synchronize() after backward()" in text for _, text in told] == [True] * len(told)
    assert_as_alone(model, alone(steps=range(2))[0])


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


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_impossible_arguments_are_refused(case: str) -> None:
    options, told = IMPOSSIBLE[case]
    model = model_of()
    with pytest.raises(ValueError, match=f"(?s){told}"):
        hvd.DistributedOptimizer(SGD(model.parameters(), lr=1.0), **options(model))
