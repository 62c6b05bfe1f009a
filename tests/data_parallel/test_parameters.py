from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import broadcast_parameters, fully_shard
from hpcpar.data_parallel.parameters import agree_on_parameters, describe, distinct, view_like
from hpcpar.errors import MismatchError, OperationError
from hpcpar.mesh import Mesh
from hpcpar.tensor_parallel import Column, parallelize
from tests.data_parallel.staged import ranks, staged


def test_a_shared_tensor_is_kept_once_under_its_first_name() -> None:
    shared, other = torch.zeros(2), torch.zeros(2)
    kept = distinct([("a", shared), ("b", other), ("c", shared), ("a", shared)])
    assert [name for name, _ in kept] == ["a", "b"]


def test_one_name_for_two_tensors_is_refused() -> None:
    with pytest.raises(OperationError, match="two parameters are called 'weight'; give each its own name"):
        distinct([("weight", torch.zeros(1)), ("weight", torch.zeros(1))])


def test_parameters_without_names_are_refused() -> None:
    with pytest.raises(OperationError, match=r"pass model\.named_parameters\(\), not model\.parameters\(\)"):
        distinct(nn.Linear(2, 2).parameters())  # type: ignore[arg-type]


def test_a_description_says_shape_type_order_and_whether_frozen() -> None:
    assert describe(("w", nn.Parameter(torch.zeros(2, 3)))) == "w [2, 3] float32"
    assert (
        describe(("w", torch.zeros(3, 2, dtype=torch.bfloat16).t()))
        == "w [2, 3] bfloat16 with strides [1, 2]"
    )
    assert describe(("w", nn.Parameter(torch.zeros(2), requires_grad=False))) == "w [2] float32 (frozen)"


@pytest.mark.parametrize(
    "like",
    [
        torch.zeros(()),
        torch.zeros(2, 3),
        torch.zeros(3, 2).t(),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(4, 6)[:, ::2],
        torch.zeros(3, 1).expand(3, 4),
        torch.zeros(0, 3),
    ],
    ids=["scalar", "plain", "transposed", "channels last", "with holes", "overlapping", "empty"],
)
def test_views_have_the_shape_of_their_parameter_and_cover_their_part_of_the_buffer(
    like: torch.Tensor,
) -> None:
    flat = torch.zeros(like.numel() + 5)
    view = view_like(flat, 2, 2 + like.numel(), like)
    assert view.shape == like.shape
    view.fill_(1)
    assert flat.tolist() == [0, 0, *[1] * like.numel(), 0, 0, 0]


def test_views_of_dense_parameters_have_their_strides() -> None:
    like = torch.zeros(3, 2).t()
    assert view_like(torch.zeros(6), 0, 6, like).stride() == like.stride()


def refused(comm: Communicator, named: list[tuple[str, torch.Tensor]]) -> str:
    with pytest.raises((MismatchError, OperationError)) as caught:
        agree_on_parameters(named, comm)
    return str(caught.value)


def test_a_different_shape_on_one_rank_is_told_on_every_rank() -> None:
    def check(comm: Communicator) -> str:
        return refused(comm, [("a", torch.zeros(2)), ("b", torch.zeros(3 if comm.rank == 2 else 4))])

    messages = run_loopback(3, check)
    assert len(set(messages)) == 1
    assert (
        "1 of 3 ranks have other parameters than rank 0: rank 2: number 1 is b [3] float32 where rank 0 has "
        "b [4] float32. Build the same model in the same order on every rank"
    ) in messages[0]


def test_a_parameter_too_few_or_too_many_is_named() -> None:
    def check(comm: Communicator) -> str:
        return refused(comm, [(name, torch.zeros(1)) for name in ("ab", "a", "abc")[comm.rank]])

    message = run_loopback(3, check)[0]
    assert "rank 1: has 1 of them, rank 0 has 2; the first missing is b [1] float32" in message
    assert "rank 2: has 3 of them, rank 0 has 2; the first extra is c [1] float32" in message


def test_equal_lists_are_agreed_on() -> None:
    run_loopback(3, lambda comm: agree_on_parameters([("a", torch.zeros(2))], comm))


@pytest.mark.parametrize("called", [0, 1])
def test_a_lazy_parameter_without_a_shape_is_named_on_every_rank(called: int) -> None:
    def check(comm: Communicator) -> str:
        model = nn.LazyLinear(2)
        if comm.rank < called:
            model(torch.zeros(1, 3))
        return refused(comm, list(model.named_parameters()))

    expected = "rank 1: number 0 is weight without a shape" if called else "weight has no shape yet"
    assert all(expected in message for message in run_loopback(2, check))


@ranks(4)
def test_parts_of_a_parameter_are_not_taken_for_replicas(world: Communicator) -> None:
    mesh = Mesh(world, tp=2)
    linear = nn.Linear(2, 4, bias=False)
    nn.init.ones_(linear.weight)
    model = parallelize(nn.Sequential(linear), {"0": Column(gather_output=True)}, mesh)
    programs: list[Callable[[], object]] = [
        lambda: broadcast_parameters(model, world),
        lambda: fully_shard(model, world),
        lambda: staged(model, torch.optim.SGD(model.parameters()), world, 0),
        lambda: staged(model, torch.optim.SGD(model.parameters()), world, 1),
    ]
    for program in programs:
        with pytest.raises(
            MismatchError, match=r"^0\.weight is split over .* pass the communicator of replicas"
        ):
            program()
    broadcast_parameters(model, mesh.dp)
    assert model[0].weight.sum() == 4.0
