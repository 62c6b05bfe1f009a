"""Every call of torch.distributed gives what gloo gives."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed import ReduceOp

import hpcpar
from hpcpar.errors import MismatchError, OperationError, StallError
from hpcpar.torch_backend.process_group import ProcessGroup

pytestmark = [pytest.mark.mpi]

SHAPES = [(), (0,), (5,), (3, 4), (70_000,)]
REDUCED = [torch.int32, torch.int64, torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64]
Call = Callable[[Any], Any]


def mine(
    group: Any, shape: tuple[int, ...] = (6,), dtype: torch.dtype = torch.float32, salt: int = 0
) -> Tensor:
    """Small whole numbers, so that every order of addition gives the same."""
    generator = torch.Generator().manual_seed(100 * salt + group.rank())
    return torch.randint(1, 4, shape, generator=generator).to(dtype)


def assert_same(ours: Any, gloo: Any, call: Call) -> None:
    found, expected = call(ours), call(gloo)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other), f"{one} is not {other}"
        else:
            assert one == other


@pytest.mark.parametrize("dtype", REDUCED)
@pytest.mark.parametrize("op", ["SUM", "PRODUCT", "MIN", "MAX"])
def test_all_reduce(ours, gloo, dtype, op) -> None:
    def call(group: Any) -> list[Tensor]:
        found = []
        for salt, shape in enumerate(SHAPES):
            for is_async in (False, True):
                tensor = mine(group, shape, dtype, salt)
                work = distributed.all_reduce(tensor, getattr(ReduceOp, op), group, async_op=is_async)
                if work is not None:
                    work.wait()
                found.append(tensor)
        return found

    assert_same(ours, gloo, call)


@pytest.mark.parametrize("op", ["BAND", "BOR", "BXOR"])
def test_bits(ours, gloo, op) -> None:
    def call(group: Any) -> list[Tensor]:
        tensor = torch.arange(40, dtype=torch.int64) * (group.rank() + 3)
        distributed.all_reduce(tensor, getattr(ReduceOp, op), group)
        return [tensor]

    assert_same(ours, gloo, call)


def test_averages_products_and_flags(ours) -> None:
    rank, size = ours.rank(), ours.size()
    tensor = torch.full((5,), float(rank + 1))
    distributed.all_reduce(tensor, ReduceOp.AVG)
    assert tensor.tolist() == [(size + 1) / 2] * 5
    tensor = torch.full((5,), float(rank + 1))
    distributed.all_reduce(tensor, distributed._make_nccl_premul_sum(3.0))
    assert tensor.tolist() == [3.0 * size * (size + 1) / 2] * 5
    for dtype in (torch.int64, torch.float32):  # integers beyond what float32 tells apart
        tensor = torch.full((2,), 2**25 + 1, dtype=dtype)
        distributed.reduce(tensor, 0, distributed._make_nccl_premul_sum(3.0))
        if rank == 0:
            assert torch.equal(tensor, torch.full((2,), 2**25 + 1, dtype=dtype) * 3 * size)
    for op, expected in ((ReduceOp.SUM, True), (ReduceOp.PRODUCT, size == 1), (ReduceOp.MIN, size == 1)):
        flags = torch.tensor([rank == 0, False])
        distributed.all_reduce(flags, op)
        assert flags.tolist() == [expected, False]


def test_what_cannot_be_added_up_is_refused_and_moved(ours) -> None:
    eighths = torch.arange(8).to(torch.float8_e4m3fn)
    with pytest.raises(OperationError, match="float8_e4m3fn by SUM"):
        distributed.all_reduce(eighths)
    with pytest.raises(OperationError, match=r"sparse_csr tensor by SUM .*sparse_coo, and by SUM"):
        distributed.all_reduce(torch.eye(2).to_sparse_csr())
    received = torch.zeros(8 * ours.size()).to(torch.float8_e4m3fn)
    distributed.all_gather_into_tensor(received, eighths)
    assert torch.equal(received.float(), torch.arange(8).float().repeat(ours.size()))
    exchanged = torch.zeros(2 * ours.size()).to(torch.float8_e4m3fn)
    distributed.all_to_all_single(exchanged, torch.full((2 * ours.size(),), 2.0).to(torch.float8_e4m3fn))
    assert (exchanged.float() == 2.0).all()


def test_sums_of_sparse_tensors(ours, gloo) -> None:
    def call(group: Any) -> list[Tensor]:
        places = torch.tensor([[0, group.rank() + 1, group.rank()]])
        values = torch.arange(6, dtype=torch.float32).view(3, 2)
        tensor = torch.sparse_coo_tensor(places, values, (group.size() + 1, 2))
        distributed.all_reduce(tensor, group=group)
        return [tensor.to_dense()]

    assert_same(ours, gloo, call)


def every_call(group: Any, dtype: torch.dtype) -> list[Any]:
    rank, size = group.rank(), group.size()
    root = size - 1
    found: list[Any] = []

    def keep(work: Any, *tensors: Tensor) -> None:
        if work is not None:
            work.wait()
        found.extend(tensors)

    for is_async in (False, True):
        options = {"group": group, "async_op": is_async}
        tensor = mine(group, (4, 3), dtype)
        keep(distributed.broadcast(tensor, root, **options), tensor)
        tensor = mine(group, (4, 3), dtype).t()
        keep(distributed.broadcast(tensor, 0, **options), tensor)
        tensor = mine(group, (5,), dtype)
        work = distributed.reduce(tensor, root, **options)
        keep(work, *([tensor] if rank == root else []))
        pieces = [torch.zeros(2, 3, dtype=dtype) for _ in range(size)]
        keep(distributed.all_gather(pieces, mine(group, (2, 3), dtype), **options), *pieces)
        whole = torch.zeros(2 * size, 3, dtype=dtype)
        keep(distributed.all_gather_into_tensor(whole, mine(group, (2, 3), dtype), **options), whole)
        into = pieces if rank == root else None
        keep(distributed.gather(mine(group, (2, 3), dtype), into, root, **options), *(into or []))
        given = [mine(group, (3,), dtype, salt) for salt in range(size)] if rank == root else None
        tensor = torch.zeros(3, dtype=dtype)
        keep(distributed.scatter(tensor, given, root, **options), tensor)
        tensor = torch.zeros(3, dtype=dtype)
        given = [mine(group, (3,), dtype, salt) for salt in range(size)]
        keep(distributed.reduce_scatter(tensor, given, **options), tensor)
        tensor = torch.zeros(2, 3, dtype=dtype)
        keep(distributed.reduce_scatter_tensor(tensor, mine(group, (2 * size, 3), dtype), **options), tensor)
        tensor = torch.zeros(2 * size, 3, dtype=dtype)
        keep(distributed.all_to_all_single(tensor, mine(group, (2 * size, 3), dtype), **options), tensor)
        sent, received = [rank + to for to in range(size)], [rank + source for source in range(size)]
        tensor = torch.zeros(sum(received), 2, dtype=dtype)
        source = mine(group, (sum(sent), 2), dtype)
        keep(distributed.all_to_all_single(tensor, source, received, sent, **options), tensor)
        keep(distributed.barrier(**options))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_every_call(ours, gloo, dtype) -> None:
    assert_same(ours, gloo, lambda group: every_call(group, dtype))


def test_lists_of_pieces_of_different_lengths(ours) -> None:
    rank, size = ours.rank(), ours.size()
    pieces = [torch.zeros(source + 1) for source in range(size)]
    distributed.all_gather(pieces, torch.full((rank + 1,), float(rank)))
    assert [piece.tolist() for piece in pieces] == [[float(source)] * (source + 1) for source in range(size)]
    tensor = torch.zeros(rank + 1)
    distributed.reduce_scatter(tensor, [torch.ones(to + 1) for to in range(size)])
    assert tensor.tolist() == [float(size)] * (rank + 1)
    received = [torch.zeros(source + 1) for source in range(size)]
    distributed.all_to_all(received, [torch.full((rank + 1,), float(rank)) for _ in range(size)])
    assert [each.tolist() for each in received] == [[float(source)] * (source + 1) for source in range(size)]


def test_objects(ours, gloo) -> None:
    def call(group: Any) -> list[Any]:
        rank, size = group.rank(), group.size()
        everything: list[Any] = [None] * size
        distributed.all_gather_object(everything, {"rank": rank, "text": "x" * 100 * rank}, group=group)
        one = ["from 0", 1] if rank == 0 else [None, None]
        distributed.broadcast_object_list(one, 0, group=group)
        gathered = [None] * size if rank == 0 else None
        distributed.gather_object(rank, gathered, 0, group=group)
        scattered: list[Any] = [None]
        distributed.scatter_object_list(scattered, list(range(size)) if rank == 0 else None, 0, group=group)
        return [*everything, *one, gathered, *scattered]

    assert_same(ours, gloo, call)


def test_messages_with_tags_in_any_order(ours) -> None:
    rank, size = ours.rank(), ours.size()
    after, before = (rank + 1) % size, (rank - 1) % size
    works = [distributed.isend(torch.full((3,), 10.0 * tag + rank), after, tag=tag) for tag in (1, 2)]
    found = {tag: torch.zeros(3) for tag in (2, 1)}
    for tag, tensor in found.items():
        works.append(distributed.irecv(tensor, before, tag=tag))
    for work in works:
        work.wait()
    assert {tag: tensor[0].item() for tag, tensor in found.items()} == {2: 20.0 + before, 1: 10.0 + before}
    received = torch.zeros(4)
    ops = [
        distributed.P2POp(distributed.isend, torch.full((4,), float(rank)), after),
        distributed.P2POp(distributed.irecv, received, before),
    ]
    for work in distributed.batch_isend_irecv(ops):
        work.wait()
    assert received.tolist() == [float(before)] * 4


@pytest.mark.mpi(min_size=2)
def test_a_message_from_whoever_sends_first(ours) -> None:
    rank, size = ours.rank(), ours.size()
    if rank:
        distributed.send(torch.full((3,), float(rank)), 0, tag=7)
        return
    seen = {}
    for _ in range(size - 1):
        tensor = torch.zeros(3)
        source = distributed.recv(tensor, tag=7)
        seen[source] = tensor.tolist()
    assert seen == {source: [float(source)] * 3 for source in range(1, size)}


def test_calls_together(ours) -> None:
    size = ours.size()
    with distributed._coalescing_manager(async_ops=True) as together:
        first, second = torch.ones(4), torch.ones(3)
        distributed.all_reduce(first)
        distributed.all_reduce(second)
    together.wait()
    assert (first[0].item(), second[0].item()) == (size, size)
    with distributed._coalescing_manager(device=torch.device("cpu"), async_ops=True) as together:
        distributed.broadcast(first, 0)
        distributed.all_reduce(second)
    together.wait()
    assert second[0].item() == size * size


@pytest.mark.mpi(min_size=2)
def test_groups_of_some_ranks_are_made_by_their_members(ours) -> None:
    rank, size = ours.rank(), ours.size()
    last = distributed.new_group([0, size - 1])
    alone = distributed.new_group([0])
    if rank in (0, size - 1):
        tensor = torch.ones(3)
        distributed.all_reduce(tensor, group=last)
        assert tensor.tolist() == [2.0] * 3
        assert distributed.get_process_group_ranks(last) == [0, size - 1]
        assert hpcpar.communicator_of(last).world_ranks == (0, size - 1)
    if rank == 0:
        tensor = torch.ones(3)
        distributed.all_reduce(tensor, group=alone)
        assert tensor.tolist() == [1.0] * 3
    else:
        assert not isinstance(alone, ProcessGroup)


@pytest.mark.mpi(min_size=3)
def test_members_that_have_made_different_numbers_of_groups_make_one_together(ours) -> None:
    """torch names a group that its members alone make by how many groups each of them has."""
    rank = ours.rank()
    for ranks in ([0, 1], [0, 2]):
        if rank in ranks:
            group = distributed.new_group(ranks, use_local_synchronization=True)
            tensor = torch.full((2,), float(rank))
            distributed.all_reduce(tensor, group=group)
            assert tensor.tolist() == [float(sum(ranks))] * 2


@pytest.mark.mpi(min_size=2)
def test_different_calls_are_named_on_every_rank(ours) -> None:
    group = distributed.new_group()
    tensor = torch.ones(8 if group.rank() else 9)
    with pytest.raises(MismatchError, match=r"does allreduce\(float32\[[89]\], op=sum\)"):
        distributed.all_reduce(tensor, group=group)


@pytest.mark.mpi(min_size=2)
def test_a_work_that_does_not_end_in_its_time_names_who_is_missing(ours) -> None:
    group = distributed.new_group()
    late = range(1, group.size())
    if group.rank() == 0:
        work = distributed.barrier(group, async_op=True)
        try:
            with pytest.raises(StallError, match=r"the timeout of 0\.2 s: it waits for ranks? [1-3]"):
                work.wait(timedelta(seconds=0.2))
        finally:
            for rank in late:
                distributed.send(torch.ones(1), rank, tag=9)
        assert work.wait()
    else:
        distributed.recv(torch.ones(1), 0, tag=9)
        distributed.barrier(group)


@pytest.mark.mpi(min_size=2)
def test_the_timeout_of_a_group_and_of_a_call(ours) -> None:
    group = distributed.new_group(timeout=timedelta(seconds=0.3))
    if group.rank() == 0:
        for call in (distributed.barrier, lambda group: distributed.all_reduce(torch.ones(1), group=group)):
            with pytest.raises(StallError, match=r"the timeout of 0\.3 s"):
                call(group)
        with pytest.raises(StallError, match=r"the timeout of 0\.3 s: it waits for ranks? 1"):
            distributed.recv(torch.ones(1), group=group)
        distributed.send(torch.ones(1), 1, tag=9)
    elif group.rank() == 1:
        distributed.recv(torch.ones(1), 0, tag=9)
    group.abort()


@pytest.mark.mpi(min_size=2)
def test_a_monitored_barrier_names_who_is_missing(ours) -> None:
    group = distributed.new_group()
    group.monitored_barrier(timedelta(seconds=60))
    last = group.size() - 1
    if group.rank() != last:
        with pytest.raises(StallError, match=f"rank {last} .*did not come to monitored_barrier"):
            group.monitored_barrier(timedelta(seconds=0.3))
        distributed.send(torch.ones(1), last, tag=9)
    else:
        for source in range(last):
            distributed.recv(torch.ones(1), source, tag=9)
    group.abort()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda n: distributed.all_gather_into_tensor(torch.ones(n + 1), torch.ones(1)), "elements where"),
        (lambda n: distributed.reduce_scatter_tensor(torch.ones(2), torch.ones(n)), "elements where"),
        (
            lambda n: distributed.all_to_all_single(torch.ones(3), torch.ones(3), [3] * (n + 1), [1]),
            "split sizes",
        ),
    ],
)
def test_lengths_that_do_not_fit_are_refused_before_anything_moves(ours, call, says) -> None:
    with pytest.raises((OperationError, RuntimeError), match=says):
        call(ours.size())


def test_pieces_that_are_not_as_long_as_what_is_gathered_are_refused_at_the_root(ours) -> None:
    rank, size = ours.rank(), ours.size()
    pieces = [torch.zeros(2) for _ in range(size)] if rank == 0 else None
    if rank == 0:  # as many elements in all, where there are several ranks
        lengths = [1, *[2] * (size - 2), 3][:size]
        with pytest.raises(OperationError, match=r"gather among .* elements where 2 are needed"):
            distributed.gather(torch.ones(2), [torch.zeros(length) for length in lengths], 0)
    distributed.gather(torch.full((2,), float(rank)), pieces, 0)
    assert pieces is None or [piece.tolist() for piece in pieces] == [[float(of)] * 2 for of in range(size)]
