from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.errors import OperationError
from hpcpar.planner.traffic import usage_map_nbytes
from tests.data_parallel.staged import ranks, staged


def linear(seed: int = 0) -> nn.Linear:
    model = nn.Linear(3, 2, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return model


def distributed(model: nn.Module, comm: Communicator, **options: float) -> DistributedOptimizer:
    return DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5, **options), model.named_parameters(), comm
    )


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_unscales_and_skips_steps_that_overflow(fused: bool) -> None:
    def course(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for factor in (1.0, math.inf, 2.0):
            scaler.scale(model(torch.ones(3, dtype=torch.float64)).square().sum() * factor).backward()
            if isinstance(optimizer, DistributedOptimizer):
                optimizer.synchronize()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [*(p.detach().clone() for p in model.parameters()), torch.tensor(scaler.get_scale())]

    model, reference = linear(), linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
    found = course(model, DistributedOptimizer(inner, model.named_parameters(), Communicator.alone()))
    expected = course(reference, torch.optim.SGD(reference.parameters(), lr=0.01, fused=fused))
    torch.testing.assert_close(found, expected)


def test_a_gradient_scaler_steps_on_averages() -> None:
    def course(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: range) -> list[torch.Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for factors in ((1.0, 3.0), (2.0, math.inf), (3.0, 4.0)):
            loss = sum(model(torch.full((3,), 1.0 + r)).sum() * factors[r] for r in ranks)
            scaler.scale(loss / len(ranks)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [*(p.detach().clone() for p in model.parameters()), torch.tensor(scaler.get_scale())]

    def body(comm: Communicator) -> list[torch.Tensor]:
        model = linear()
        return course(model.float(), distributed(model, comm), range(comm.rank, comm.rank + 1))

    reference = linear().float()
    expected = course(reference, torch.optim.SGD(reference.parameters(), lr=0.5), range(2))
    for found in run_loopback(2, body):
        torch.testing.assert_close(found, expected)


def test_horovods_call_without_a_communicator_is_told_what_to_pass() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(
        OperationError, match=r"no communicator.* pass hpcpar\.init\(\).*hpcpar\.horovod\.torch"
    ):
        DistributedOptimizer(torch.optim.SGD(model.parameters()), named_parameters=model.named_parameters())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_gradient_scaler_that_sees_no_gradients_is_refused(stage: int, fused: bool) -> None:
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
    optimizer = DistributedOptimizer(inner, model.named_parameters(), Communicator.alone(), zero_stage=stage)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(torch.ones(3, dtype=torch.float64)).sum()).backward()
    optimizer.synchronize()
    with pytest.raises(OperationError, match=r"no gradients to unscale.*use precision='float16'"):
        scaler.step(optimizer)


def test_a_fixed_loss_scale_is_not_loaded_into_a_dynamic_one_nor_the_other_way_round() -> None:
    def scaled(precision: str) -> DistributedOptimizer:
        model = linear()
        return staged(
            model, torch.optim.SGD(model.parameters()), Communicator.alone(), 0, precision=precision
        )

    dynamic, fixed = scaled("float16"), scaled("bfloat16")
    before = dynamic.scaler.scale
    dynamic.scaler.update(overflow=True)
    fixed.load_state_dict(dynamic.state_dict())
    assert (fixed.scaler.scale, fixed.scaler.skipped) == (1.0, 1)
    dynamic.load_state_dict(scaled("bfloat16").state_dict())
    assert dynamic.scaler.scale == before / 2
    other = scaled("float16")
    other.load_state_dict(dynamic.state_dict())
    assert other.scaler.scale == before / 2


def test_nothing_to_clip_has_norm_zero() -> None:
    frozen = linear().requires_grad_(False)
    optimizer = distributed(frozen, Communicator.alone())
    assert optimizer.clip_grad_norm_(1.0).item() == 0.0


def test_clipping_and_stepping_wait_once() -> None:
    def body(comm: Communicator) -> int:
        model = linear()
        optimizer = distributed(model, comm)
        comm.traffic.reset()
        model(torch.ones(3, dtype=torch.float64)).sum().backward()
        optimizer.synchronize()
        optimizer.clip_grad_norm_(1.0)
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        return comm.traffic.nbytes_sent()

    found = run_loopback(2, body)
    expected = distributed(linear(), Communicator.alone()).reducer.buckets[0].nbytes
    assert sum(found) == 2 * (expected + usage_map_nbytes(2))


@ranks(2)
def test_every_step_synchronizes_once_though_a_rank_has_no_new_gradient(comm: Communicator) -> None:
    model = linear()
    optimizer = distributed(model, comm)
    for step in range(3):
        if comm.rank == step % 2:
            model.bias.sum().backward()
        optimizer.step()
    # 1/2 after the first step; each later one adds 1 on one of the two ranks.
    assert model.bias.grad.tolist() == [1.5, 1.5]


def test_a_closure_takes_the_same_path_on_every_rank() -> None:
    target = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)

    def fit(comm: Communicator, targets: torch.Tensor) -> tuple[list[float], int]:
        guess = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        optimizer = DistributedOptimizer(
            torch.optim.LBFGS([guess], max_iter=10, line_search_fn="strong_wolfe"), [("guess", guess)], comm
        )
        calls = []

        def closure() -> torch.Tensor:
            calls.append(1)
            optimizer.zero_grad()
            loss = ((guess - targets) ** 4).mean()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return guess.tolist(), len(calls)

    found = run_loopback(2, lambda comm: fit(comm, target * (1 + 2 * comm.rank)))
    assert found[0] == found[1]
    # The average of (g - t)^4 and (g - 3t)^4 is least at g = 2t.
    assert found[0][0] == pytest.approx((2 * target).tolist(), rel=1e-2)


class Climbing(torch.optim.SGD):
    """Steps by what the closure finds uphill, as SAM does."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        climbed = [parameter.grad.clone() for parameter in parameters]
        with torch.no_grad():
            torch._foreach_add_(parameters, climbed)
            self.zero_grad()
            with torch.enable_grad():
                loss = closure()
            torch._foreach_sub_(parameters, climbed)
        super().step()
        return loss


def test_a_closure_is_called_where_the_inner_optimizer_calls_it() -> None:
    def body(comm: Communicator | None, rows: torch.Tensor) -> list[float]:
        guess = nn.Parameter(torch.ones(4, dtype=torch.float64))
        optimizer: Any = Climbing([guess], lr=0.1)
        if comm is not None:
            optimizer = DistributedOptimizer(optimizer, [("guess", guess)], comm)

        def closure() -> torch.Tensor:
            loss = ((guess - rows) ** 4).mean()
            loss.backward()
            return loss

        for _ in range(2):
            closure()
            optimizer.step(closure)
            optimizer.zero_grad()
        return guess.tolist()

    rows = torch.arange(8, dtype=torch.float64).reshape(2, 4) / 4
    expected = body(None, rows)
    for found in run_loopback(2, lambda comm: body(comm, rows[comm.rank])):
        assert found == pytest.approx(expected, rel=1e-12)


@ranks(2)
def test_parameters_added_later_are_averaged_too(comm: Communicator) -> None:
    first, second = linear(), linear(1)
    optimizer = distributed(first, comm)
    inputs = torch.ones(3, dtype=torch.float64)
    with optimizer.no_sync():
        first(inputs).sum().backward()
    optimizer.add_param_group({"params": second.named_parameters("second"), "lr": 0.1})
    (second(first.bias.new_ones(3)).sum() * (comm.rank + 1) + first(inputs).sum()).backward()
    optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    assert [first.bias.grad.tolist(), second.bias.grad.tolist()] == [[2.0, 2.0], [1.5, 1.5]]


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6), reason="torch's optimizers take no names yet"
)
@pytest.mark.parametrize("stage", [0, 1])
def test_parameters_may_be_added_to_an_optimizer_that_knows_names(stage: int) -> None:
    first, second = linear(), linear(1)
    inner = torch.optim.SGD(first.named_parameters(), lr=0.5)
    optimizer = DistributedOptimizer(inner, first.named_parameters(), Communicator.alone(), zero_stage=stage)
    optimizer.add_param_group({"params": second.named_parameters("second")})
    assert inner.param_groups[1]["param_names"] == ["second.weight", "second.bias"]
    start = second.bias.detach().clone()
    second.bias.sum().backward()
    optimizer.step()
    torch.testing.assert_close(second.bias.detach(), start - 0.5)


def test_what_makes_no_sense_is_refused() -> None:
    alone = Communicator.alone()
    model, other = linear(), linear(1)
    optimizer, under_way = distributed(model, alone), distributed(other, alone)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    both = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    named = [*model.named_parameters()]
    twice = [*named, *other.named_parameters()]
    other.bias.sum().backward()
    unnamed = r"2 of the optimizer's 2 parameters have no name \(shapes \[2, 3\], \[2\]"
    later = r"call it between step\(\) and the next backward"
    for words, call in (
        (r"where a torch\.optim\.Optimizer is needed", lambda: DistributedOptimizer(model, named, alone)),  # type: ignore[arg-type]
        (r"where a torch\.optim\.Optimizer is needed", lambda: DistributedOptimizer(optimizer, named, alone)),
        (r"1 of the .* no name \(shapes \[2\]\); pass", lambda: DistributedOptimizer(sgd, named[:1], alone)),
        (
            "two parameters are called 'weight'",
            lambda: DistributedOptimizer(both, twice, alone),
        ),
        (unnamed, lambda: optimizer.add_param_group({"params": [*linear().parameters()]})),
        (later, lambda: under_way.add_param_group({"params": linear().named_parameters("new")})),
        (r"save its state_dict\(\), and load that into one", lambda: copy.deepcopy(optimizer)),
        (r"save its state_dict\(\), and load that into one", lambda: pickle.dumps(optimizer)),
    ):
        with pytest.raises(OperationError, match=words):
            call()
    with optimizer.no_sync():
        model.bias.sum().backward()
        with pytest.raises(OperationError, match=r"inside no_sync\(\); leave it for the last microbatch"):
            optimizer.step()


def test_only_parameters_that_the_optimizer_holds_are_averaged() -> None:
    model = linear()
    optimizer = DistributedOptimizer(
        torch.optim.SGD([model.bias], lr=0.1), model.named_parameters(), Communicator.alone()
    )
    assert optimizer.reducer.names == ["bias"]


def test_it_says_what_it_is() -> None:
    text = repr(distributed(linear(), Communicator.alone()))
    assert text.startswith("DistributedOptimizer over 1 ranks of SGD (")


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_may_use_two_models_in_different_backwards(stage: int, check: bool) -> None:
    def body(comm: Communicator) -> list[list[float]]:
        models = linear(), linear()
        one, other = (
            DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters(), comm, zero_stage=stage
            )
            for model in models
        )
        start = models[0].bias.detach().clone()
        inputs = torch.ones(1, 3, dtype=torch.float64)
        for _ in range(2):
            losses = models[0](inputs).sum(), 100 * models[1](inputs).sum()
            (losses[1] if comm.rank == 1 else sum(losses)).backward()
            if comm.rank != 1:
                comm.poke()
            one.step()
            other.step()
            one.zero_grad()
            other.zero_grad()
        return [(model.bias - start).tolist() for model in models]

    assert run_loopback(2, body, check=check) == [[[-0.5] * 2, [-100.0] * 2]] * 2


@pytest.mark.parametrize("stage", [0, 1, 2])
@ranks(2)
def test_named_gradients_are_those_that_have_been_clipped(comm: Communicator, stage: int) -> None:
    model = linear()
    optimizer = staged(model, torch.optim.SGD(model.parameters(), lr=1.0), comm, stage)
    start = model.bias.detach().clone()
    model(torch.full((1, 3), 10.0, dtype=torch.float64)).sum().backward()
    optimizer.clip_grad_norm_(1e-3)
    largest = [gradient.abs().max().item() for _, _, gradient in optimizer.named_gradients()]
    for _, _, gradient in optimizer.named_gradients():
        gradient.add_(1.0)
    optimizer.clip_grad_norm_(1e9)
    optimizer.step()
    assert (start - model.bias).tolist() == pytest.approx([1.0] * 2, abs=1e-3)
    assert all(value < 1e-3 for value in largest)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_two_live_optimizers_over_the_same_parameters_are_refused_until_one_is_closed_or_gone(
    stage: int,
) -> None:
    def body(comm: Communicator) -> str:
        model = linear()

        def make() -> DistributedOptimizer:
            return staged(model, torch.optim.SGD(model.parameters(), lr=0.5), comm, stage)

        def step(optimizer: DistributedOptimizer) -> None:
            model.bias.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        optimizer = make()
        optimizer = make()
        step(optimizer)
        other = make()
        with pytest.raises(OperationError) as caught:
            other.synchronize()
        with pytest.raises(OperationError, match=r"call close\(\)"):
            optimizer.synchronize()
        optimizer.close()
        step(other)
        other.close()
        step(make())
        return str(caught.value)

    expected = "the gradients of weight are averaged by two DistributedOptimizers"
    for told in run_loopback(2, body):
        assert told.startswith(expected)
        assert "call close()" in told


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_that_are_tied_by_their_memory_alone_are_refused(stage: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(OperationError, match=r"1\.weight and 0\.weight are two parameters in the same"):
        staged(model, torch.optim.SGD(model.parameters(), lr=0.5), Communicator.alone(), stage)


@pytest.mark.parametrize("stage", [1, 2])
@ranks(2)
def test_a_parameter_whose_memory_was_replaced_is_named(comm: Communicator, stage: int) -> None:
    model = linear()
    optimizer = staged(model, torch.optim.SGD(model.parameters(), lr=0.5), comm, stage)
    model.bias.data = torch.zeros(2, dtype=torch.float64)
    model(torch.ones(3, dtype=torch.float64)).sum().backward()
    with pytest.raises(
        OperationError, match=r"^the memory of bias was replaced after .*then call optimizer\.take_parameters"
    ):
        optimizer.step()
