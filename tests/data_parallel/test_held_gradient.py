"""`.grad` until zero_grad(): what changes it in place changes the step, what would read a shard is refused.

Programs of many such actions are in test_random_programs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer, Precision, fully_shard
from hpcpar.errors import DivergenceError, OperationError
from tests.data_parallel.staged import fill, ranks, whole

KINDS: dict[str, dict[str, Any]] = {
    "0": {},
    "0 managed": {"precision": Precision("float64")},
    "1": {"zero_stage": 1},
    "2": {"zero_stage": 2},
    "3": {},
}
every_kind = pytest.mark.parametrize("kind", KINDS)
of_shards = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "0"])


def model_of() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    fill(model, 1, 1.0)
    return model


def distributed(kind: str, comm: Communicator, **options: Any) -> tuple[nn.Module, DistributedOptimizer]:
    model = model_of()
    if kind == "3":
        fully_shard(model, comm)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, DistributedOptimizer(
        inner, model.named_parameters(), comm, bucket_bytes=100, **KINDS[kind], **options
    )


def backward(model: nn.Module, comm: Communicator, step: int = 0, scale: float = 1.0) -> None:
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    (model(x[comm.rank :: comm.size]).square().sum(1).mean() * scale).backward()


def like(parameter: Tensor, seed: int = 3) -> Tensor:
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


CHANGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mul_": lambda g, p: g.mul_(0.5),
    "div_ by a tensor of no dimension": lambda g, p: g.div_(torch.tensor(3.0)),
    "add_ of a tensor": lambda g, p: g.add_(like(p), alpha=0.1),
    "add_ that is broadcast": lambda g, p: g.add_(torch.arange(p.shape[-1], dtype=torch.float64)),
    "clamp_": lambda g, p: g.clamp_(min=-0.05, max=0.1),
    "masked_fill_": lambda g, p: g.masked_fill_(like(p) > 0, 0.25),
    "copy_": lambda g, p: g.copy_(like(p)),
    "data.mul_": lambda g, p: g.data.mul_(-2.0),
    "detach().neg_": lambda g, p: g.detach().neg_(),
    "foreach": lambda g, p: torch._foreach_mul_([g], 0.25),
    "zero_": lambda g, p: g.zero_(),
}


@every_kind
def test_what_changes_each_element_in_place_changes_the_step(kind: str) -> None:
    """One process after another, each change on gradients of its own."""

    def course(model: nn.Module, optimizer: Any, comm: Communicator) -> list[Tensor]:
        found = []
        for number, change in enumerate(CHANGES.values()):
            backward(model, comm, number)
            for parameter in model.parameters():
                assert parameter.grad is not None
                assert parameter.grad.shape == parameter.shape
                change(parameter.grad, torch.empty(parameter.shape))
                parameter.grad *= 1.5
            optimizer.step()
            optimizer.zero_grad()
            assert all(parameter.grad is None for parameter in model.parameters())
            found += whole(model)
        return found

    reference = model_of()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    expected = course(reference, plain, Communicator.alone())
    for found in run_loopback(2, lambda comm: course(*distributed(kind, comm), comm)):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@of_shards
def test_what_would_need_the_whole_gradient_is_refused(kind: str) -> None:
    reads: list[Callable[[Tensor], Any]] = [
        lambda g: g.norm(),
        lambda g: g + 1,
        lambda g: float(g.sum()),
        lambda g: g.clone(),
        lambda g: g.isnan().any(),
        lambda g: g[0],
        lambda g: g.__setitem__(0, 0.0),
        lambda g: g.tolist(),
        lambda g: g.numpy(),
        lambda g: g.T,
        lambda g: torch.stack([g]),
        lambda g: torch.equal(g, g),
        lambda g: g.normal_(),
        lambda g: g.add_(g),
    ]
    model, optimizer = distributed(kind, Communicator.alone())
    backward(model, Communicator.alone())
    gradient = next(model.parameters()).grad
    assert gradient is not None
    for read in reads:
        with pytest.raises(OperationError, match="named_gradients"):
            read(gradient)
    optimizer.step()


@every_kind
def test_clipping_some_parameters_or_those_of_two_optimizers_is_as_in_one_process(kind: str) -> None:
    def course(models: list[tuple[nn.Module, Any]], comm: Communicator) -> list[Tensor]:
        found = []
        for step in range(2):
            for model, _ in models:
                backward(model, comm, step)
            first, second = (list(model.parameters()) for model, _ in models)
            found += [nn.utils.clip_grad_norm_(parameter, 0.1) for parameter in first[:2]]
            found.append(nn.utils.clip_grad_norm_(first[2:] + second, 0.2, norm_type=3.0))
            for model, optimizer in models:
                optimizer.step()
                optimizer.zero_grad()
                found += whole(model)
        return found

    models = [model_of() for _ in range(2)]
    plain = [(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)) for model in models]
    expected = course(plain, Communicator.alone())
    for found in run_loopback(2, lambda comm: course([distributed(kind, comm) for _ in range(2)], comm)):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("by", ["torch", "own", "both"])
@pytest.mark.parametrize(("kind", "scale"), [("0", None), ("2", None), ("2", 64.0), ("3", None)])
def test_clipping_after_each_microbatch_clips_the_sum_so_far(kind: str, scale: float | None, by: str) -> None:
    def course(model: nn.Module, optimizer: Any, comm: Communicator, scale: float = 1.0) -> list[Tensor]:
        for step in range(4):
            backward(model, comm, step, scale)
            if by == "torch" or not isinstance(optimizer, DistributedOptimizer):
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            else:
                optimizer.clip_grad_norm_(0.5)
            for parameter in model.parameters() if by == "both" else ():
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        return whole(model)

    def body(comm: Communicator) -> list[Tensor]:
        options = {} if scale is None else {"precision": Precision("float64", loss_scale=scale)}
        return course(*distributed(kind, comm, **options), comm, scale or 1.0)

    model = model_of()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected = course(model, plain, Communicator.alone())
    for found in run_loopback(2, body):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@every_kind
def test_a_hook_that_comes_after_the_gradient_has_left_is_refused(kind: str) -> None:
    model, _optimizer = distributed(kind, Communicator.alone())

    def scale(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2.0)

    next(model.parameters()).register_post_accumulate_grad_hook(scale)
    with pytest.raises(OperationError, match="was used in the backward that had sent it"):
        backward(model, Communicator.alone())


@every_kind
@pytest.mark.parametrize("nonfinite", ["error", "skip", "step"])
@pytest.mark.parametrize("by_closure", [False, True])
@ranks(2)
def test_a_gradient_that_is_not_finite_on_one_rank_is_everybodys(
    comm: Communicator, kind: str, nonfinite: str, by_closure: bool
) -> None:
    model, optimizer = distributed(kind, comm, nonfinite=nonfinite)
    before, told = whole(model), ""

    def closure() -> Tensor:
        x = torch.ones(4, 3, dtype=torch.float64)
        x[0] = float("inf") if comm.rank == 1 else 1.0
        loss: Tensor = model(x).square().sum()
        loss.backward()
        return loss

    try:
        optimizer.step(closure) if by_closure else (closure(), optimizer.step())
    except DivergenceError as error:
        told = str(error)
    after = whole(model)
    model.zero_grad()
    if nonfinite != "step":  # training goes on
        backward(model, comm)
        optimizer.step()
    unchanged = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert unchanged == (nonfinite != "step")
    assert optimizer.scaler.skipped == (nonfinite != "step")
    expected = "the average gradient of 0.weight is not finite: NaN or infinity came from rank 1, so no rank"
    assert told.startswith(expected) == (nonfinite == "error")
    if nonfinite != "step":
        assert all(value.isfinite().all() for value in whole(model))


@pytest.mark.parametrize("clip", ["torch", "own"])
@every_kind
def test_a_norm_that_is_not_finite_stops_the_step(kind: str, clip: str) -> None:
    """Clipping multiplies by what is no number, and does not hide it."""
    model, optimizer = distributed(kind, Communicator.alone())
    backward(model, Communicator.alone())
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(float("nan"))
    if clip == "own":
        optimizer.clip_grad_norm_(1.0)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(DivergenceError, match='nonfinite="skip"'):
        optimizer.step()


@of_shards
def test_a_model_is_converted_with_its_gradients_as_torch_does(kind: str) -> None:
    model, optimizer = distributed(kind, Communicator.alone())
    backward(model, Communicator.alone())
    optimizer.step()
    model.to("cpu").double()
    assert next(model.parameters()).grad is not None


@every_kind
def test_a_compiled_model_accumulates_as_one_that_is_not(kind: str) -> None:
    def course(compiled: bool) -> list[Tensor]:
        model, optimizer = distributed(kind, Communicator.alone())
        called = torch.compile(model, backend="eager") if compiled else model
        for step in range(2):
            with optimizer.no_sync():
                backward(called, Communicator.alone(), 2 * step)
            backward(called, Communicator.alone(), 2 * step + 1)
            optimizer.step()
            optimizer.zero_grad()
        return whole(model)

    for one, other in zip(course(True), course(False), strict=True):
        torch.testing.assert_close(one, other)
