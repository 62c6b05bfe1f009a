"""Gradients that are made where they travel from: in every stage the same as those that are copied."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from hpcpar.autograd import fused_layers
from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer
from tests.autograd.modules import Made
from tests.data_parallel.staged import ranks, staged, whole

pytestmark = pytest.mark.usefixtures("gradients_of_any_size_are_added_in_place")

WEIGHTS = {23 * 8, 29 * 8, 31 * 29}
"""Sizes that nothing else has."""


class Course(NamedTuple):
    parameters: list[Tensor]
    made: set[int]


def trained(comm: Communicator, stage: int) -> Course:
    """Three steps of two microbatches; and the sizes of weights that the last backward made tensors of."""
    model = nn.Sequential(nn.Embedding(23, 8), nn.Linear(8, 29), nn.Tanh(), nn.Linear(29, 31, bias=False))
    model.double()
    generator = torch.Generator().manual_seed(0)  # the process's own is every thread's
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    optimizer = staged(
        model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), comm, stage, model=model
    )

    def backward(seed: int) -> None:
        tokens = torch.randint(23, (2, 3), generator=torch.Generator().manual_seed(seed + comm.rank))
        model(tokens).square().mean().backward()

    for step in range(3):
        with optimizer.no_sync():
            backward(10 * step)
        with Made() as found:
            backward(10 * step + 5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step > 0)
    optimizer.wait_for_parameters()
    return Course(whole(model), found.numels & WEIGHTS)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_backward_makes_no_gradient_outside_of_its_bucket(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run_loopback(2, partial(trained, stage=stage))
    monkeypatch.setattr(fused_layers, "LEAST_NBYTES", math.inf)
    copied = run_loopback(2, partial(trained, stage=stage))
    for mine, other in zip(found, copied, strict=True):
        assert mine.made == set()
        assert other.made == WEIGHTS  # so that the line above can fail
        torch.testing.assert_close(mine.parameters, other.parameters, rtol=1e-12, atol=1e-12)


@ranks(2)
def test_layers_are_as_they_were_when_the_optimizer_is_closed_and_not_before(comm: Communicator) -> None:
    model = nn.Linear(4, 4)
    optimizer = DistributedOptimizer(
        torch.optim.SGD([model.weight], lr=0.1), model.named_parameters(), comm, model=model
    )
    is_changed = ["forward" in vars(model)]
    optimizer.add_param_group({"params": [model.bias]})
    is_changed += ["forward" in vars(model)]
    optimizer.close()
    assert [*is_changed, "forward" in vars(model)] == [True, True, False]
