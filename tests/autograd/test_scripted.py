"""Layers of torch.jit are refused where hooks have to see what is called, and are no matter elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer, fully_shard
from hpcpar.errors import OperationError, PeerFailedError
from hpcpar.pipeline_parallel import Pipeline
from hpcpar.pipeline_schedules import schedule_registry

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

SCRIPTED: dict[str, Callable[[], nn.Module]] = {
    "a layer": lambda: nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 3))),
    "the model": lambda: torch.jit.script(nn.Sequential(nn.Linear(3, 3))),
    "a trace": lambda: torch.jit.trace(nn.Sequential(nn.Linear(3, 3)), torch.ones(1, 3)),
}

every_kind = pytest.mark.parametrize("build", SCRIPTED.values(), ids=SCRIPTED)


def wrapped(of: nn.Module, comm: Communicator, **options: object) -> DistributedOptimizer:
    inner = torch.optim.SGD(of.parameters(), lr=0.1)
    return DistributedOptimizer(inner, of.named_parameters(), comm, **options)


@every_kind
def test_a_model_that_is_to_be_watched_may_have_none(build: Callable[[], nn.Module]) -> None:
    match = r"(1|the model) \((Linear|Sequential)\) was made by torch\.jit.*"
    model = build()  # by one thread: torch.jit is not for several

    def body(comm: Communicator) -> None:
        with pytest.raises(OperationError, match=match + "leave model= out"):
            wrapped(model, comm, model=model, zero_stage=1)
        with pytest.raises(OperationError, match=match + "zero_stage=2"):
            fully_shard(model, comm)

    run_loopback(2, body)


@every_kind
@pytest.mark.parametrize("stage", [0, 2])
def test_without_the_model_they_train(build: Callable[[], nn.Module], stage: int) -> None:
    model = build()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = wrapped(model, Communicator.alone(), zero_stage=stage)
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_a_pipeline_refuses_them_on_every_rank() -> None:
    stages = [nn.Linear(3, 3), SCRIPTED["a layer"]()]
    match = r"1 \(Linear\) was made by torch\.jit.*give stage 1 without"

    def body(comm: Communicator) -> None:
        with pytest.raises(PeerFailedError, match=match):
            Pipeline({comm.rank: stages[comm.rank]}, schedule_registry.make("1f1b", 2, microbatches=2), comm)

    run_loopback(2, body)
