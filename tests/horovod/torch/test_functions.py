from __future__ import annotations

import copy
import importlib.util
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hpcpar.horovod.torch as hvd
from hpcpar.errors import PeerFailedError
from hpcpar.horovod.torch import functions
from tests.grid import pairwise


@pytest.fixture(autouse=True)
def _initialized() -> None:
    hvd.init()


def last() -> int:
    return hvd.size() - 1


def message_of(kind: type[Exception], call: Callable[[], Any]) -> str:
    """Return the text of the error with which the call fails."""
    try:
        call()
    except kind as error:
        return str(error)
    return "no error"


class Assorted(nn.Module):
    """Tensors of many kinds, all different on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.weight = nn.Parameter(torch.randn(5, 3, generator=generator))
        self.tied = self.weight
        self.order = nn.Parameter(torch.randn(3, 4, generator=generator).t())
        self.images = nn.Parameter(
            torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last)
        )
        self.frozen = nn.Parameter(torch.randn(2, generator=generator), requires_grad=False)
        self.narrow = nn.Parameter(torch.randn(7, generator=generator).bfloat16())
        self.empty = nn.Parameter(torch.zeros(0, 2))
        self.register_buffer("steps", torch.tensor(rank))
        self.register_buffer("mask", torch.tensor([rank == 0, rank == 1]))
        self.register_buffer("phase", torch.complex(torch.tensor([1.0]), torch.tensor([float(rank)])))
        self.register_buffer(
            "mirrored", torch.complex(torch.tensor([1.0]), torch.tensor([float(rank)])).conj()
        )
        self.register_buffer("negated", self.mirrored.imag)
        self.register_buffer("quarter", torch.tensor([rank + 1.0]).to(torch.float8_e4m3fn))
        self.register_buffer("places", torch.arange(rank, rank + 3).expand(2, 3))
        self.register_buffer("tokens", torch.tensor([rank, 65535], dtype=torch.uint16))
        self.register_buffer("seeds", torch.tensor([rank], dtype=torch.uint64))
        self.register_buffer("hashes", torch.tensor(rank, dtype=torch.uint32))


@pytest.mark.mpi
@pytest.mark.parametrize("root", [0, last])
@pytest.mark.parametrize(
    "given",
    [
        lambda model: model.state_dict(),
        lambda model: list(model.named_parameters()) + list(model.named_buffers()),
        lambda model: [*model.parameters(), *model.buffers()],
    ],
    ids=["dict", "pairs", "tensors"],
)
def test_every_tensor_becomes_the_roots(root: int | Callable[[], int], given: Any) -> None:
    root_rank = root if isinstance(root, int) else root()
    model, expected = Assorted(hvd.rank()), Assorted(root_rank).state_dict()
    strides = model.images.stride()
    hvd.broadcast_parameters(given(model), root_rank=root_rank)
    found = model.state_dict()
    wrong = [name for name in expected if found[name].cpu().tolist() != expected[name].cpu().tolist()]
    assert wrong == []
    assert model.images.stride() == strides
    assert model.tied is model.weight


@pytest.mark.parametrize("params", [nn.Linear(1, 1).named_parameters(), "weights", None, {1, 2}])
def test_other_collections_are_refused(params: Any) -> None:
    with pytest.raises(ValueError, match="invalid params of type"):
        hvd.broadcast_parameters(params, root_rank=0)


@pytest.mark.parametrize(
    ("value", "kind"), [(3, "int"), (torch.eye(2).to_sparse(), "torch.sparse_coo")], ids=["int", "sparse"]
)
def test_what_is_no_dense_tensor_is_refused_by_name(value: Any, kind: str) -> None:
    with pytest.raises(ValueError, match=f"'epoch' is of type {kind}"):
        hvd.broadcast_parameters({"weight": torch.ones(1), "epoch": value}, root_rank=0)


@pytest.mark.mpi
def test_entries_that_are_none_are_left_out() -> None:
    weight = torch.tensor([float(hvd.rank())])
    hvd.broadcast_parameters(OrderedDict(bias=None, weight=weight), root_rank=last())
    assert weight.tolist() == [last()]


@pytest.mark.mpi
def test_different_models_are_an_error_on_every_rank() -> None:
    if hvd.size() == 1:
        pytest.skip("one rank agrees with itself")
    odd = hvd.rank() == last()
    shapes = message_of(
        hvd.HorovodInternalError,
        lambda: hvd.broadcast_parameters(nn.Linear(3, 4 if odd else 5).state_dict(), root_rank=0),
    )
    names = message_of(
        hvd.HorovodInternalError,
        lambda: hvd.broadcast_parameters(nn.Linear(3, 4, bias=not odd).state_dict(), root_rank=0),
    )
    afterwards = hvd.broadcast_object(hvd.rank(), last())
    assert f"number 0 is bias [5] float32 on rank 0 and bias [4] float32 on rank {last()}" in shapes
    assert f"rank 0 has 2, rank {last()} has 1" in names
    assert afterwards == last()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
    "AdamW, tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p),
}


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    torch.manual_seed(5)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().sum().backward()
        optimizer.step()


def state_of(optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy({key: optimizer.state_dict()[key] for key in ("state", "param_groups")})


def same(found: Any, expected: Any) -> bool:
    """Equality of nested dicts and lists with tensors, types included."""
    if type(found) is not type(expected):
        return False
    if isinstance(expected, torch.Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def wrapped(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    result: torch.optim.Optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters()
    )
    return result


@pytest.mark.mpi
@pytest.mark.parametrize(("name", "wraps", "steps_elsewhere"), pairwise(OPTIMIZERS, [False, True], [0, 1]))
def test_state_and_options_become_the_roots(name: str, wraps: bool, steps_elsewhere: int) -> None:
    expected_model = model_of(last())
    expected = OPTIMIZERS[name](expected_model.parameters())
    train(expected_model, expected, 3)
    model = model_of(hvd.rank())
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 3 if hvd.rank() == last() else steps_elsewhere)
    if hvd.rank() != last():
        optimizer.param_groups[0]["lr"] = 7
    optimizer = wrapped(optimizer, model) if wraps else optimizer
    parameters = copy.deepcopy(model.state_dict())
    hvd.broadcast_optimizer_state(optimizer, root_rank=last())
    found = state_of(optimizer)
    assert same(found["state"], state_of(expected)["state"])
    assert same(found["param_groups"], state_of(expected)["param_groups"])
    assert same(model.state_dict(), parameters)


@pytest.mark.mpi
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_after_a_fresh_root_is_that_of_one_process(name: str) -> None:
    alone = model_of(0)
    train(alone, OPTIMIZERS[name](alone.parameters()), 3)
    model = model_of(0)
    optimizer = OPTIMIZERS[name](model.parameters())
    if hvd.rank() != 0:
        optimizer.state[next(model.parameters())]["step"] = torch.tensor(100.0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, optimizer, 3)
    assert same(model.state_dict(), alone.state_dict())


@pytest.mark.mpi
def test_parameters_without_state_have_gradients_of_zeros_afterwards() -> None:
    weight, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).int(), requires_grad=False)
    given = nn.Parameter(torch.ones(3))
    given.grad = torch.full((3,), 5.0)
    optimizer = torch.optim.SGD([weight, frozen, given], lr=0.1, momentum=0.9, weight_decay=0.1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.0, 0.0]
    assert frozen.grad is None
    assert given.grad.tolist() == [5.0, 5.0, 5.0]
    assert weight.tolist() == [1.0, 1.0]


class Peculiar(torch.optim.Optimizer):
    """Keeps numbers, None, lists and dicts of tensors, and something that belongs to no parameter."""

    def __init__(self, params: Any, rank: int) -> None:
        super().__init__(params, {"scales": (0.5 + rank, rank), "schedule": None if rank == 0 else "other"})
        if rank == 0:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter] = {
                    "count": 3,
                    "nothing": None,
                    "rows": [torch.arange(4), (torch.tensor(2.0), True)],
                    "wide": {"sum": parameter.detach().double() * 2, "none": torch.empty(0)},
                }
            self.state["all"] = {"norm": torch.tensor([9.0])}  # type: ignore[index]
        else:
            self.param_groups[0]["more"] = 1
            self.state[self.param_groups[0]["params"][0]] = {"count": 1.5, "rows": [torch.zeros(4).long()]}


@pytest.mark.mpi
def test_any_structure_of_state_arrives() -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    optimizer, expected = Peculiar(parameters, hvd.rank()), Peculiar(parameters, 0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert same(state_of(optimizer), state_of(expected))


@pytest.mark.mpi
def test_tensors_that_are_there_are_overwritten_in_place() -> None:
    model = model_of(hvd.rank())
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 1)
    before = [values["exp_avg"] for values in optimizer.state.values()]
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    after = [values["exp_avg"] for values in optimizer.state.values()]
    assert [old is new for old, new in zip(before, after, strict=True)] == [True] * 4


@pytest.mark.mpi
def test_optimizers_of_different_parameters_are_an_error_on_every_rank() -> None:
    if hvd.size() == 1:
        pytest.skip("one rank agrees with itself")
    parameters = [nn.Parameter(torch.ones(3 + hvd.rank()))]
    message = message_of(
        hvd.HorovodInternalError,
        lambda: hvd.broadcast_optimizer_state(torch.optim.SGD(parameters, lr=0.1), root_rank=0),
    )
    assert "number 0 is group 0 [3] float32 on rank 0 and group 0 [4] float32 on rank 1" in message


def test_lbfgs_is_refused() -> None:
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS([nn.Parameter(torch.ones(1))]), root_rank=0)


@pytest.mark.mpi
@pytest.mark.parametrize("name", [None, "settings"])
def test_an_object_arrives_everywhere(name: str | None) -> None:
    expected = {"hello": 123, 0: [1, 2], "long": "x" * 100_000, "tensor": 1.5}
    found = hvd.broadcast_object(expected if hvd.rank() == last() else {}, root_rank=last(), name=name)
    nothing = hvd.broadcast_object(None, root_rank=0, name=name)
    assert found == expected
    assert nothing is None


@pytest.mark.mpi
def test_objects_of_all_ranks_arrive_in_rank_order() -> None:
    found = hvd.allgather_object({"rank": hvd.rank(), "text": "x" * 1000 * hvd.rank()})
    assert found == [{"rank": rank, "text": "x" * 1000 * rank} for rank in range(hvd.size())]


@pytest.mark.mpi
def test_an_object_that_cannot_be_pickled_is_an_error_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "_pickler", lambda: pickle)
    culprit: Any = (lambda: 1) if hvd.rank() == last() else 1
    sent = message_of(PeerFailedError, lambda: hvd.broadcast_object(culprit, root_rank=last()))
    gathered = message_of(PeerFailedError, lambda: hvd.allgather_object(culprit))
    afterwards = hvd.allgather_object(hvd.rank())
    assert f"broadcast_object: rank {last()} cannot pickle its object: " in sent
    assert f"allgather_object: rank {last()} cannot pickle its object: " in gathered
    assert afterwards == list(range(hvd.size()))


@pytest.mark.mpi
def test_who_cannot_pickle_in_a_process_set_is_named_by_the_rank_in_the_job(
    monkeypatch: pytest.MonkeyPatch, half: hvd.ProcessSet
) -> None:
    monkeypatch.setattr(functions, "_pickler", lambda: pickle)
    culprit: Any = (lambda: 1) if hvd.rank() == half.ranks[-1] else 1
    told = message_of(PeerFailedError, lambda: hvd.allgather_object(culprit, process_set=half))
    assert f"allgather_object: rank {half.ranks[-1]} cannot pickle its object: " in told


@pytest.mark.mpi
@pytest.mark.skipif(importlib.util.find_spec("cloudpickle") is None, reason="needs cloudpickle")
def test_cloudpickle_carries_functions() -> None:
    offset = hvd.rank()
    found = [function(1) for function in hvd.allgather_object(lambda number: number + offset)]
    assert found == [1 + rank for rank in range(hvd.size())]
