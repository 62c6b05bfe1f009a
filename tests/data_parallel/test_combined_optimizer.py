"""Several optimizers as one: groups, rates, states and refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hpcpar.comm import Communicator
from hpcpar.data_parallel import CombinedOptimizer, DistributedOptimizer
from hpcpar.data_parallel.combined_optimizer import is_muon, steps_on_matrices
from hpcpar.errors import OperationError

Muon = pytest.importorskip("torch.optim._muon", reason="torch before 2.9").Muon


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def apart(model: nn.Module) -> tuple[Optimizer, AdamW]:
    parameters = list(model.parameters())
    return (
        Muon([p for p in parameters if p.dim() == 2], lr=0.02),
        AdamW([p for p in parameters if p.dim() != 2], lr=0.01),
    )


def train(model: nn.Module, optimizers: list[Optimizer], steps: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        inputs = torch.randn(5, 6, generator=generator, dtype=torch.float64)
        model(inputs).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_it_steps_as_the_optimizers_by_themselves() -> None:
    plain, combined = network(), network()
    expected = train(plain, list(apart(plain)))
    found = train(combined, [CombinedOptimizer(*apart(combined))])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_scheduler_changes_the_rates_of_all() -> None:
    model = network()
    optimizer = CombinedOptimizer(*apart(model))
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    train(model, [optimizer], steps=1)
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.005]
    assert [group["optimizer"] for group in optimizer.param_groups] == ["Muon", "AdamW"]
    assert is_muon(optimizer.optimizers[0])
    assert [steps_on_matrices(optimizer, group) for group in optimizer.param_groups] == [True, False]


def test_a_state_dict_goes_on_where_it_was_saved() -> None:
    model = network()
    optimizer = CombinedOptimizer(*apart(model))
    train(model, [optimizer])
    again = network()
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed = CombinedOptimizer(*apart(again))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    torch.testing.assert_close(train(again, [resumed]), train(model, [optimizer]), rtol=0, atol=0)


def test_a_state_dict_of_other_optimizers_is_refused() -> None:
    model = network()
    muon, adamw = apart(model)
    saved = CombinedOptimizer(muon, adamw).state_dict()
    muon, adamw = apart(network())
    with pytest.raises(OperationError, match="groups are of Muon, AdamW, and those here of AdamW, Muon"):
        CombinedOptimizer(adamw, muon).load_state_dict(saved)


def test_names_of_parameters_stay_in_the_groups() -> None:
    model = network()
    named = list(model.named_parameters())
    optimizer = CombinedOptimizer(
        Muon([(n, p) for n, p in named if p.dim() == 2]), AdamW([(n, p) for n, p in named if p.dim() != 2])
    )
    assert [group["param_names"] for group in optimizer.param_groups] == [
        ["0.weight", "2.weight"],
        ["0.bias", "2.bias"],
    ]


def test_a_group_that_is_added_names_its_optimizer() -> None:
    model, more = network(), nn.Linear(4, 4).double()
    optimizer = CombinedOptimizer(*apart(model))
    with pytest.raises(OperationError, match="name one"):
        optimizer.add_param_group({"params": list(more.parameters())})
    with pytest.raises(OperationError, match=r"shape \[4\]"):
        optimizer.add_param_group({"params": [more.weight, more.bias], "optimizer": "Muon"})
    optimizer.add_param_group({"params": [more.weight], "optimizer": "Muon", "lr": 0.5})
    optimizer.add_param_group({"params": [more.bias], "optimizer": "AdamW"})
    assert [group["optimizer"] for group in optimizer.param_groups] == ["Muon", "AdamW", "Muon", "AdamW"]
    assert (optimizer.param_groups[2]["lr"], optimizer.param_groups[3]["lr"]) == (0.5, 0.01)
    before = more.weight.detach().clone()
    train(nn.Sequential(model, more), [optimizer])
    assert not torch.equal(before, more.weight)


def test_two_of_the_same_class_none_and_a_distributed_one_are_refused() -> None:
    model = network()
    first, second = ([p] for p in list(model.parameters())[:2])
    with pytest.raises(OperationError, match="one optimizer of each class"):
        CombinedOptimizer(SGD(first, lr=0.1), SGD(second, lr=0.1))
    with pytest.raises(OperationError, match="nothing"):
        CombinedOptimizer()
    comm = Communicator.alone()
    distributed = DistributedOptimizer(AdamW(model.parameters()), model.named_parameters(), comm)
    with pytest.raises(OperationError, match="plain torch optimizers"):
        CombinedOptimizer(distributed)


def test_step_hooks_of_one_of_them_are_refused() -> None:
    muon, adamw = apart(network())
    adamw.register_step_post_hook(lambda *_: None)
    with pytest.raises(OperationError, match="step hooks"):
        CombinedOptimizer(muon, adamw)
