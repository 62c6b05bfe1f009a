"""Optimizers whose steps, or states, would be wrong on parts of parameters are refused on them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hpcpar.autograd import copy_to
from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import OperationError
from hpcpar.tensor_parallel import Column, ColumnParallelLinear, parallelize

INPUT = torch.linspace(-1, 2, 12, dtype=torch.float64).view(3, 4)

NEEDED = {"Adafactor": "rows and columns", "Muon": "the whole matrix", "LBFGS": "all parameters"}


def backward(layer: nn.Module) -> Tensor:
    layer.zero_grad()
    loss: Tensor = layer(INPUT).square().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


@pytest.mark.parametrize("name", NEEDED)
def test_an_optimizer_that_needs_more_than_elements_is_refused_where_a_matrix_is_divided(name: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip("this torch does not have it")

    def step(comm: Communicator, size: int) -> None:
        layer = ColumnParallelLinear(4, 6, comm, bias=False).double()
        optimizer = getattr(torch.optim, name)(layer.parameters())
        backward(layer)
        if size == 1:
            optimizer.step(lambda: backward(layer))
            return
        with pytest.raises(OperationError, match=f"^{name} was to step .* but its? .*{NEEDED[name]}"):
            optimizer.step(lambda: backward(layer))

    run_loopback(2, lambda comm: step(comm, 2))
    run_loopback(1, lambda comm: step(comm, 1))


@pytest.mark.parametrize("is_summed", [True, False])
def test_whole_parameters_of_which_ranks_have_parts_of_the_gradient_are_refused(is_summed: bool) -> None:
    """An adapter beside a column-parallel layer: each rank uses a part of the second matrix alone."""

    def step(comm: Communicator) -> None:
        layer = ColumnParallelLinear(4, 6, comm).double()
        first, second = (torch.arange(1.0, 9.0).view(shape).double() for shape in ((2, 4), (4, 2)))
        adapter = nn.Parameter(first / 9)
        optimizer = torch.optim.SGD([adapter, *layer.parameters()])
        entered = copy_to(adapter, comm) if is_summed else adapter
        own = (INPUT @ entered.T @ second[:2].T)[:, comm.rank : comm.rank + 1]
        (layer(INPUT) + own).square().sum().backward()  # type: ignore[no-untyped-call]
        if is_summed:
            optimizer.step()
            return
        with pytest.raises(OperationError, match=r"shape \[2, 4\] that all ranks .* have whole, .*copy_to"):
            optimizer.step()

    run_loopback(2, step)


@pytest.mark.parametrize("size", [1, 2])
def test_an_optimizer_made_before_layers_were_divided_is_told_so(size: int) -> None:
    def step(comm: Communicator) -> None:
        model = nn.Sequential(nn.Linear(4, 6)).double()
        with torch.no_grad():
            model[0].weight.copy_(torch.arange(24.0).view(6, 4))
            model[0].bias.zero_()
        optimizer = torch.optim.SGD(model.parameters())
        backward(parallelize(model, {"0": Column()}, comm))
        with pytest.raises(OperationError, match="make the optimizer after parallelize"):
            optimizer.step()

    run_loopback(size, step)


def test_a_rank_loads_the_state_of_its_own_shards_and_of_no_others() -> None:
    def load(comm: Communicator) -> bool:
        layer = ColumnParallelLinear(4, 6, comm).double()
        optimizers = [torch.optim.Adam(layer.parameters()) for _ in range(2)]
        backward(layer)
        optimizers[0].step()
        states = comm.allgather_object(optimizers[0].state_dict())
        for rank, state in enumerate(states):
            if rank != comm.rank:
                with pytest.raises(OperationError, match=r"\[rank, size\] .* moments of other shards"):
                    optimizers[1].load_state_dict(state)
        with pytest.raises(OperationError, match="one that has whole ones"):
            torch.optim.Adam(nn.Linear(4, 3).parameters()).load_state_dict(states[comm.rank])
        optimizers[1].load_state_dict(states[comm.rank])
        loaded, saved = (each.state[layer.weight]["exp_avg"] for each in optimizers[::-1])
        return torch.equal(loaded, saved)

    assert run_loopback(2, load) == [True] * 2
    whole = torch.optim.Adam(nn.Linear(4, 3).parameters())
    assert whole.state_dict().keys() == {"state", "param_groups"}
