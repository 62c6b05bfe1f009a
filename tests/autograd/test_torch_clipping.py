"""torch's norms of gradients are those of the serial model, where ranks hold parts of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_  # before anything is split: the name that many scripts have

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.errors import OperationError
from hpcpar.mesh import Mesh
from hpcpar.pipeline_parallel import Pipeline, TiedWeights
from hpcpar.pipeline_schedules import schedule_registry
from hpcpar.tensor_parallel import Column, Plan, Row, parallelize

INPUT = torch.linspace(-1, 2, 24, dtype=torch.float64).view(3, 8)

MLP: Plan = {"0": Column(), "2": Row()}


def mlp() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.LayerNorm(8)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def backward(model: nn.Module) -> nn.Module:
    model(INPUT).square().sum().backward()
    return model


def ours(model: nn.Module, max_norm: float, kind: float) -> Tensor:
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), Communicator.alone()
    )
    backward(model)
    return optimizer.clip_grad_norm_(max_norm, kind)


WAYS: dict[str, Callable[[nn.Module, float, float], Tensor]] = {
    "imported before": lambda model, most, kind: clip_grad_norm_(backward(model).parameters(), most, kind),
    "of a list, by its module": lambda model, most, kind: nn.utils.clip_grad_norm_(
        [*backward(model).parameters()], most, norm_type=kind, foreach=False
    ),
    "the optimizer's": ours,
}


@pytest.mark.parametrize("kind", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("way", WAYS)
def test_clipping_a_divided_model_is_that_of_the_serial_one(way: str, kind: float) -> None:
    serial = mlp()
    expected = WAYS["imported before"](serial, 0.5, kind).item()

    def clipped(comm: Communicator) -> tuple[float, Tensor]:
        model = parallelize(mlp(), MLP, comm)
        return WAYS[way](model, 0.5, kind).item(), model[3].weight.grad

    for norm, gradient in run_loopback(2, clipped):
        assert norm == pytest.approx(expected, rel=1e-12)
        assert torch.allclose(gradient, serial[3].weight.grad, rtol=1e-12)


@pytest.mark.skipif(not hasattr(nn.utils, "get_total_norm"), reason="torch 2.6 and later have it")
def test_the_norm_alone_is_that_of_the_serial_model_too() -> None:
    def norms(model: nn.Module) -> list[float]:
        gradients: list[Tensor] = [parameter.grad for parameter in backward(model).parameters()]
        of: list[Iterable[Tensor] | Tensor] = [gradients, model.parameters(), gradients[0], gradients[-1]]
        return [nn.utils.get_total_norm(tensors).item() for tensors in of]

    expected = norms(mlp())
    for found in run_loopback(2, lambda comm: norms(parallelize(mlp(), MLP, comm))):
        assert found == pytest.approx(expected, rel=1e-12)


def test_rows_that_several_ranks_hold_count_once() -> None:
    plan: Plan = {"0": Column(heads=1, share_heads=True, gather_output=True)}
    expected = clip_grad_norm_(backward(mlp()[:1]).parameters(), 1.0).item()

    def norm(comm: Communicator) -> float:
        return clip_grad_norm_(backward(parallelize(mlp()[:1], plan, comm)).parameters(), 1.0).item()

    assert run_loopback(2, norm) == [pytest.approx(expected, rel=1e-12)] * 2


def test_a_norm_that_is_not_finite_on_one_rank_is_so_on_all() -> None:
    def refused(comm: Communicator) -> list[str]:
        model = backward(parallelize(mlp(), MLP, comm))
        if comm.rank == 1:
            model[0].weight.grad[0, 0] = math.nan
        found = []
        for kind in (2.0, math.inf):
            with pytest.raises(RuntimeError, match="is nan, on every rank") as caught:
                clip_grad_norm_(model.parameters(), 1.0, kind, error_if_nonfinite=True)
            found.append(str(caught.value))
        with pytest.raises(OperationError, match="norm_type=0"):
            clip_grad_norm_(model.parameters(), 1.0, 0)
        return found

    first, second = run_loopback(2, refused)
    assert first == second


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_of_one_ranks_part_skips_the_step_on_all(fused: bool) -> None:
    def stepped(comm: Communicator) -> list[tuple[bool, float]]:
        model = parallelize(mlp(), MLP, comm).float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        found = []
        for breaks in (False, True):
            scaler.scale(model(INPUT.float()).square().sum()).backward()
            if breaks and comm.rank == 1:
                model[0].weight.grad[0, 0] = math.inf
            before = model[3].weight.detach().clone()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append((not torch.equal(before, model[3].weight), scaler.get_scale()))
        return found

    assert run_loopback(2, stepped) == [[(True, 4.0), (False, 2.0)]] * 2


def test_a_parameter_without_a_gradient_on_one_rank_keeps_no_rank_waiting() -> None:
    def norm(comm: Communicator) -> float:
        model = backward(parallelize(mlp()[:1], {"0": Column()}, comm))
        if comm.rank == 0:
            model.zero_grad()
        return clip_grad_norm_(model.parameters(), 1.0).item()

    serial = backward(mlp()[:1])[0]
    expected = torch.cat([serial.weight.grad[6:].flatten(), serial.bias.grad[6:]]).norm().item()
    assert run_loopback(2, norm) == [pytest.approx(expected)] * 2


@pytest.mark.parametrize("way", [clip_grad_norm_, "optimizer"])
def test_the_norm_of_a_pipeline_is_that_of_all_stages_and_copies_count_once(way: object) -> None:
    # tp × pp = 2 × 2; the last stage's norm is a copy of the first stage's, as a tied head is.
    def whole() -> nn.Sequential:
        return nn.Sequential(nn.LayerNorm(8).double(), *mlp()[:3], nn.LayerNorm(8).double())

    serial = whole()
    serial[4].weight, serial[4].bias = serial[0].weight, serial[0].bias
    loss = serial(INPUT).square().sum()
    loss.backward()
    expected = nn.utils.clip_grad_norm_(serial.parameters(), 1.0).item()

    def norm(world: Communicator) -> float:
        mesh = Mesh(world, pp=2, tp=2)
        model = parallelize(whole(), {"1": Column(), "3": Row()}, mesh)
        stage = nn.Sequential(*(model[:1] if mesh.pp.rank == 0 else model[1:]))
        copy = stage[0] if mesh.pp.rank == 0 else stage[-1]
        tied = TiedWeights(mesh.pp, {"weight": copy.weight, "bias": copy.bias})
        # Made before the pipeline, as a program may do.
        optimizer = DistributedOptimizer(
            torch.optim.SGD(stage.parameters(), lr=1.0),
            stage.named_parameters(),
            mesh.dp,
            tied={
                name: tied.counts_here(parameter)
                for name, parameter in stage.named_parameters()
                if parameter is copy.weight or parameter is copy.bias
            },
        )
        pipeline = Pipeline(
            {mesh.pp.rank: stage},
            schedule_registry.make("gpipe", 2, 1),
            mesh.pp,
            loss=lambda output, _: output.square().sum(),
        )
        pipeline.step(INPUT, INPUT)
        tied.sum_gradients()
        if way == "optimizer":
            return optimizer.clip_grad_norm_(1.0).item()
        optimizer.synchronize()
        return clip_grad_norm_(stage.parameters(), 1.0).item()

    assert run_loopback(4, norm) == [pytest.approx(expected, rel=1e-10)] * 4


def test_what_is_not_split_has_torchs_own_norm_and_warning() -> None:
    run_loopback(2, lambda comm: parallelize(mlp(), MLP, comm))
    plain = nn.Linear(2, 2)
    plain.weight.grad = torch.full((2, 2), 2.0)
    assert clip_grad_norm_(plain.parameters(), 1.0).item() == 4.0
    assert plain.weight.grad.norm().item() == pytest.approx(1.0)
    assert clip_grad_norm_([], 1.0).item() == 0.0
    with pytest.warns(UserWarning, match="empty generator"):
        clip_grad_norm_((parameter for parameter in ()), 1.0)
