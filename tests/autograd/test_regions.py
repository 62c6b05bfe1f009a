"""Regions: what each makes of small tensors, that its backward is its transpose, and twice so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hpcpar.autograd import all_to_all, copy_to, gather_from, reduce_from, reduce_scatter_to, scatter_to
from hpcpar.comm import Communicator
from hpcpar.comm import run_loopback as run
from hpcpar.errors import MismatchError, OperationError
from tests.grid import checkered

SIZES = [1, 2, 3, 4]


def values(comm: Communicator, *shape: int) -> Tensor:
    """Other integers on each rank: sums of them are exact."""
    generator = torch.Generator().manual_seed(comm.rank)
    return torch.randint(-9, 9, shape, generator=generator).double()


Region = Callable[[Tensor, Communicator], Tensor]
# Of tensors that differ on every rank, and whose gradients differ: the backward is the transpose.
ON_ALL_RANKS: dict[str, tuple[Region, tuple[int, ...]]] = {
    "gather, first dim": (lambda x, c: gather_from(x, c, 0, "partial"), (2, 3)),
    "gather, inner dim": (lambda x, c: gather_from(x, c, 1, "partial"), (2, 3, 2)),
    "gather, last dim": (lambda x, c: gather_from(x, c, -1, "partial"), (2, 3)),
    "reduce-scatter, first dim": (lambda x, c: reduce_scatter_to(x, c, 0), (12, 2)),
    "reduce-scatter, inner dim": (lambda x, c: reduce_scatter_to(x, c, 1), (2, 12, 2)),
    "reduce-scatter, uneven": (lambda x, c: reduce_scatter_to(x, c, 1), (2, 5)),
    "reduce-scatter, less than ranks": (lambda x, c: reduce_scatter_to(x, c, 0), (2, 3)),
    "all-to-all": (lambda x, c: all_to_all(x, c, 2, 1), (2, 3, 12)),
    "all-to-all, other way": (lambda x, c: all_to_all(x, c, 0, 1), (12, 3)),
}
# Of tensors that are the same on all ranks, before or after.
OF_THE_SAME: dict[str, tuple[Region, tuple[int, ...]]] = {
    "copy": (copy_to, (2, 3)),
    "reduce": (reduce_from, (2, 3)),
    "scatter": (lambda x, c: scatter_to(x, c, 1), (2, 12)),
    "scatter, uneven": (lambda x, c: scatter_to(x, c, 1), (2, 5)),
    "gather": (lambda x, c: gather_from(x, c, -1), (2, 3)),
    "gather, uneven": (
        lambda x, c: gather_from(x[:, : 2 if c.rank < 1 else 1], c, 1, length=c.size + 1),
        (2, 2),
    ),
}
EVERY = ON_ALL_RANKS | OF_THE_SAME


@pytest.mark.parametrize("size", SIZES)
def test_each_does_what_its_name_says(size: int) -> None:
    def made(comm: Communicator) -> None:
        own = torch.full((2, 3), float(comm.rank + 1))
        everyone = torch.arange(1, size + 1).double()
        assert torch.equal(copy_to(own, comm), own)
        assert torch.equal(reduce_from(own, comm), torch.full((2, 3), float(everyone.sum())))
        whole = torch.arange(2 * size).double().view(2, size)
        assert torch.equal(scatter_to(whole, comm, 1), whole[:, comm.rank : comm.rank + 1])
        assert torch.equal(gather_from(own[:, :1], comm, 1).double(), everyone.expand(2, size))
        assert torch.equal(gather_from(own[:1], comm, 0).double(), everyone[:, None].expand(size, 3))
        assert torch.equal(
            reduce_scatter_to(whole + comm.rank, comm, 1),
            (whole[:, comm.rank : comm.rank + 1] * size) + sum(range(size)),
        )
        # Element [r, s] goes from rank r to rank s.
        sent = torch.arange(size).double()[:, None] + 10 * comm.rank
        received = torch.arange(size).double() * 10 + comm.rank
        assert torch.equal(all_to_all(sent, comm, 0, 1), received[None])

    run(size, made)


@pytest.mark.parametrize("name", sorted(EVERY.keys() - {"copy"}))
def test_what_a_region_gives_may_be_changed_in_place(name: str) -> None:
    """But for a copy, which lies in the memory of what it is a copy of."""
    region, shape = EVERY[name]

    def back(comm: Communicator, double: Callable[[Tensor], Tensor]) -> Tensor:
        x = values(comm, *shape).requires_grad_()
        double(region(x, comm)).sum().backward()
        return x.grad

    assert all(run(2, lambda comm: torch.equal(back(comm, lambda y: y.mul_(2)), back(comm, lambda y: y * 2))))


@pytest.mark.parametrize(("name", "size"), checkered(ON_ALL_RANKS, SIZES))
def test_the_backward_is_the_transpose(name: str, size: int) -> None:
    """<A x, y> = <x, Aᵀ y>, both summed over ranks."""
    region, shape = ON_ALL_RANKS[name]

    def products(comm: Communicator) -> tuple[float, float]:
        x = values(comm, *shape).requires_grad_()
        made = region(x, comm)
        y = values(comm, *made.shape)
        (back,) = torch.autograd.grad(made, x, y)
        return float((made * y).sum().detach()), float((x * back).sum().detach())

    forward, backward = map(sum, zip(*run(size, products), strict=True))
    assert forward == backward


@pytest.mark.parametrize("size", SIZES)
def test_conjugates_of_the_same_have_each_other_as_backward(size: int) -> None:
    def check(comm: Communicator) -> None:
        same = torch.arange(24).double().view(2, 12)
        x = values(comm, 2, 12).requires_grad_()
        (of_copy,) = torch.autograd.grad(copy_to(x, comm), x, values(comm, 2, 12))
        assert torch.equal(of_copy, reduce_from(values(comm, 2, 12), comm))
        (of_sum,) = torch.autograd.grad(reduce_from(x, comm), x, same)
        assert torch.equal(of_sum, same)
        part = scatter_to(x, comm, 1)
        (of_part,) = torch.autograd.grad(part, x, values(comm, *part.shape))
        assert torch.equal(of_part, gather_from(values(comm, *part.shape), comm, 1))
        own = values(comm, 2, 12 // size).requires_grad_()
        (of_whole,) = torch.autograd.grad(gather_from(own, comm, 1), own, same[:, : 12 // size * size])
        assert torch.equal(of_whole, scatter_to(same[:, : 12 // size * size], comm, 1))

    run(size, check)


@pytest.mark.parametrize(("name", "size"), checkered(EVERY, SIZES))
def test_gradients_of_gradients_are_those_of_the_conjugate(name: str, size: int) -> None:
    """A region is linear: what its backward makes of y has, as a function of y, the region as backward."""
    region, shape = EVERY[name]

    def check(comm: Communicator) -> None:
        x = values(comm, *shape).requires_grad_()
        made = region(x, comm)
        y = torch.ones_like(made).requires_grad_()
        (back,) = torch.autograd.grad(made, x, y, create_graph=True)
        z = torch.full(shape, 2.0, dtype=torch.float64)  # the same on all ranks
        (twice,) = torch.autograd.grad(back, y, z)
        assert torch.equal(twice, region(z, comm))

    run(size, check)


@pytest.mark.parametrize(("name", "size"), checkered(EVERY, [1, 2, 3]))
def test_inputs_and_gradients_stay_as_they_were(name: str, size: int) -> None:
    region, shape = EVERY[name]

    def check(comm: Communicator) -> None:
        x = values(comm, *shape).requires_grad_()
        made = region(x, comm)
        y = values(comm, *made.shape)
        made.backward(y)  # type: ignore[no-untyped-call]
        assert torch.equal(x.detach(), values(comm, *shape))
        assert torch.equal(y, values(comm, *made.shape))

    run(size, check)


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_are_those_of_the_collective(size: int) -> None:
    def counted(comm: Communicator) -> dict[str, int]:
        x = torch.ones(4, 64, 128, dtype=torch.float64, requires_grad=True)
        for region in (
            copy_to(x, comm),
            gather_from(x, comm, 1, "partial"),
            reduce_scatter_to(x, comm, 1),
            all_to_all(x, comm, 1, 0),
        ):
            region.sum().backward()  # type: ignore[no-untyped-call]
        return {row.collective: row.nbytes_sent for row in comm.traffic.rows() if row.nbytes_sent}

    nbytes = 4 * 64 * 128 * 8
    share = nbytes // size * (size - 1)
    for traffic in run(size, counted):
        assert traffic == {
            "allreduce": 2 * share,
            "allgather": nbytes * (size - 1) + share,
            "reduce_scatter": nbytes * (size - 1) + share,
            "alltoall": 2 * share,
        }


def test_bad_dims_and_shards_are_named() -> None:
    def check(comm: Communicator) -> None:
        x = torch.ones(2, 3)
        with pytest.raises(OperationError, match=r"dim 2 was asked for of a tensor of shape \[2, 3\]"):
            scatter_to(x, comm, 2)
        with pytest.raises(OperationError, match="to divide and to join along the same dim 1"):
            all_to_all(x, comm, 1, -1)
        with pytest.raises(
            MismatchError, match=r"3 elements do not divide among the 2 ranks .* 2 or 4 would"
        ):
            all_to_all(x, comm, 1, 0)
        with pytest.raises(MismatchError, match=r"of 9 elements along dim 1, rank \d of 2 should have"):
            gather_from(x, comm, 1, length=9)
        with pytest.raises(OperationError, match='give "same" or "partial"'):
            gather_from(x, comm, 1, "both")  # type: ignore[arg-type]

    run(2, check)


def test_in_compiled_code_a_region_is_as_it_is_written() -> None:
    # The compiler would trace into what ranks say to each other, and give up.
    def body(comm: Communicator) -> tuple[list[float], list[float]]:
        def layer(x: Tensor) -> Tensor:
            return reduce_from(copy_to(x * 2, comm) * (comm.rank + 1), comm) + 1

        x = torch.ones(2, requires_grad=True)
        output = torch.compile(layer, backend="eager")(x)
        output.sum().backward()
        assert x.grad is not None
        return output.tolist(), x.grad.tolist()

    # The compiler takes seconds to import: before anybody waits.
    torch.compile(torch.neg, backend="eager")(torch.ones(()))
    assert run(2, body) == [([7.0, 7.0], [6.0, 6.0])] * 2
