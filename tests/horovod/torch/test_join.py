"""join(): ranks with less data than others, whose place zeros take."""

from __future__ import annotations

import random
import time

import pytest
import torch
from torch import Tensor

from hpcpar.horovod.exceptions import HorovodInternalError

pytestmark = pytest.mark.mpi


def steps_of(seed: int, size: int) -> list[int]:
    """Draw the number of steps that each rank has data for; some have none."""
    chance = random.Random(seed)
    return [chance.randrange(0, 7) for _ in range(size)]


def truth(of_rank: list[Tensor], steps: list[int], step: int, divisor: int = 1) -> Tensor:
    """The sum over the ranks that still have data in a step."""
    total = sum(
        (x for x, count in zip(of_rank, steps, strict=True) if step < count), torch.zeros_like(of_rank[0])
    )
    return total / divisor if total.is_floating_point() else torch.div(total, divisor, rounding_mode="trunc")


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("seed", range(6))
def test_zeros_take_the_place_of_ranks_without_data(hvd, brought, assert_same, seed, named):
    size, rank = hvd.size(), hvd.rank()
    steps = steps_of(seed, size)
    checks, lasts = [], []
    for epoch in range(3):
        found = []
        for step in range(steps[rank]):
            own = brought(rank, (5,), salt=step)
            name = f"loss.{seed}" if named else None
            found.append((hvd.allreduce(own, op=hvd.Sum, name=name), hvd.allreduce(own)))
        lasts.append(hvd.join())
        for step, (summed, averaged) in enumerate(found):
            of_ranks = [brought(r, (5,), salt=step) for r in range(size)]
            checks.append((f"{epoch} {step} sum", summed, truth(of_ranks, steps, step)))
            checks.append((f"{epoch} {step} average", averaged, truth(of_ranks, steps, step, size)))
    everyones = hvd.allgather_object(lasts)
    assert all(told == lasts for told in everyones), "every rank names the same last one"
    assert all(steps[last] == max(steps) for last in lasts), "a rank with the most data joins last"
    assert_same([*checks, ("epochs", len(lasts), 3)])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float64])
def test_every_type_and_size_may_go_on_without_some_ranks(hvd, brought, assert_same, dtype):
    """Fused ones, large ones that go alone, groups, factors, tensors without elements or dimensions."""
    size, rank = hvd.size(), hvd.rank()
    shapes = [(3,), (), (0,), (300_000,), (2, 2)]
    steps = list(range(size))
    found = []
    for step in range(steps[rank]):
        own = [brought(rank, shape, dtype, k + step) for k, shape in enumerate(shapes)]
        handles = [hvd.allreduce_async(x, op=hvd.Sum, name=f"mixed.{dtype}.{k}") for k, x in enumerate(own)]
        group = hvd.grouped_allreduce(own, op=hvd.Sum, postscale_factor=2.0, name=f"group.{dtype}")
        found.append(([hvd.synchronize(handle) for handle in handles], group))
    last = hvd.join()
    checks = [("last", last, size - 1)]
    for step, (singles, group) in enumerate(found):
        for k, shape in enumerate(shapes):
            of_ranks = [brought(r, shape, dtype, k + step) for r in range(size)]
            expected = truth(of_ranks, steps, step).to(dtype)
            checks += [(f"{shape}", singles[k], expected), (f"group {shape}", group[k], 2 * expected)]
    assert_same(checks)


def test_many_operations_under_way_in_any_order_go_on_without_some_ranks(hvd, brought, assert_same):
    size, rank = hvd.size(), hvd.rank()
    steps = [(r * 2) % 3 for r in range(size)]
    found = []
    for step in range(steps[rank]):
        order = list(range(30))
        random.Random(rank + 10 * step).shuffle(order)
        handles = {
            k: hvd.allreduce_async(brought(rank, (k,), salt=k + step), op=hvd.Sum, name=f"many.{k}")
            for k in order
        }
        found.append([hvd.synchronize(handles[k]) for k in range(30)])
    hvd.join()
    checks = [("steps", len(found), steps[rank])]
    for step, results in enumerate(found):
        for k, x in enumerate(results):
            of_ranks = [brought(r, (k,), salt=k + step) for r in range(size)]
            checks.append((f"{step} {k}", x, truth(of_ranks, steps, step)))
    assert_same(checks)


def test_every_rank_may_join_first_with_names_known_and_new(hvd, assert_same):
    size, rank = hvd.size(), hvd.rank()
    checks = []
    for first in range(size):
        for attempt in range(2):  # the second time the names are known
            if rank != first:
                found = hvd.allreduce(torch.full((3,), float(rank)), op=hvd.Sum, name=f"first.{first}")
                checks.append(
                    (f"{first} {attempt}", found, torch.full((3,), float(sum(range(size)) - first)))
                )
            last = hvd.join()
            checks.append(("not the first one, if there are others", last != first or size == 1, True))
    assert_same(checks)


def test_a_join_of_all_at_once_is_over_at_once(hvd):
    began = time.perf_counter()
    lasts = [hvd.join() for _ in range(20)]
    took_s = time.perf_counter() - began
    everyones = hvd.allgather_object(lasts)
    assert all(told == lasts for told in everyones)
    assert all(0 <= last < hvd.size() for last in lasts)
    assert took_s < 15, "each of them waited for something"


def test_all_kinds_work_unnamed_after_an_uneven_join(hvd, assert_same):
    """The automatic names are counted by process set, and anew after a join."""
    size, rank = hvd.size(), hvd.rank()
    checks = []
    for epoch in range(3):
        for _ in range(rank + epoch):
            hvd.allreduce(torch.ones(1))
        hvd.join()
        own = torch.arange(size) + rank
        checks += [
            ("allreduce", hvd.allreduce(own, op=hvd.Sum), size * torch.arange(size) + sum(range(size))),
            ("allgather", hvd.allgather(torch.tensor([rank])), torch.arange(size)),
            ("broadcast", hvd.broadcast(torch.tensor(rank), size - 1), torch.tensor(size - 1)),
            ("alltoall", hvd.alltoall(own), torch.arange(size) + rank),
            ("group", hvd.grouped_allreduce([torch.ones(1)], op=hvd.Sum)[0], torch.full((1,), float(size))),
        ]
        hvd.barrier()
    assert_same(checks)


def test_process_sets_of_unequal_use_do_not_disturb_unnamed_operations(hvd, assert_same):
    """One set does two operations, the others more, and all ranks go on together; joined unevenly as well."""
    size, rank = hvd.size(), hvd.rank()
    if size == 1:
        pytest.skip("one rank has no other process set")
    sets = [hvd.add_process_set(list(range(size - 1))), hvd.add_process_set([size - 1])]
    own = sets[rank == size - 1]
    checks = []
    for epoch in range(2):
        for step in range(2 + 3 * (rank == size - 1)):
            found = hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum, process_set=own)
            checks.append((f"part {step}", found, torch.tensor([float(sum(own.ranks))])))
        together = hvd.allreduce(torch.tensor([rank]), op=hvd.Sum)
        checks.append((f"all {epoch}", together, torch.tensor([sum(range(size))])))
        for _ in range(rank):
            hvd.allreduce(torch.ones(1))
        hvd.join()
        hvd.barrier(process_set=own)
        gathered = hvd.allgather(torch.tensor([rank]))
        checks.append((f"after {epoch}", gathered, torch.arange(size)))
    for process_set in sets:
        hvd.remove_process_set(process_set)
    assert_same(checks)


REFUSED = {
    "allgather": lambda hvd, name: hvd.allgather_async(torch.ones(2), name=name),
    "broadcast": lambda hvd, name: hvd.broadcast_async(torch.ones(2), 0, name=name),
    "alltoall": lambda hvd, name: hvd.alltoall_async(torch.ones(hvd.size()), name=name),
    "reducescatter": lambda hvd, name: hvd.reducescatter_async(torch.ones(hvd.size()), name=name),
    "grouped allgather": lambda hvd, name: hvd.grouped_allgather_async([torch.ones(2)] * 2, name=name),
    "min": lambda hvd, name: hvd.allreduce_async(torch.ones(2), op=hvd.Min, name=name),
    "max": lambda hvd, name: hvd.allreduce_async(torch.ones(2), op=hvd.Max, name=name),
    "product": lambda hvd, name: hvd.allreduce_async(torch.ones(2), op=hvd.Product, name=name),
    "Adasum": lambda hvd, name: hvd.allreduce_async(torch.ones(2), op=hvd.Adasum, name=name),
}


@pytest.mark.usefixtures("needs_two")
@pytest.mark.parametrize("case", REFUSED)
def test_what_zeros_cannot_stand_for_raises_while_a_rank_has_joined_and_all_goes_on(hvd, error_of, case):
    size, rank = hvd.size(), hvd.rank()
    if case == "Adasum" and size == 3:
        pytest.skip("Adasum is for powers of two")
    found = []
    for joined in (0, size - 1):
        name = f"refused.{case}.{joined}".replace(" ", "_")
        error = after = None
        if rank != joined:
            error = error_of(lambda name=name: hvd.synchronize(REFUSED[case](hvd, name)))
            after = hvd.allreduce(torch.ones(2), op=hvd.Sum, name=f"{name}.after")
        hvd.join()
        again = hvd.synchronize(REFUSED[case](hvd, name))  # nobody has joined any more
        found.append((joined, name, error, after, again))
    for joined, name, error, after, again in found:
        assert again is not None
        if rank != joined:
            assert isinstance(error, HorovodInternalError), error
            for word in (name, f"rank {joined}", "join"):
                assert word in str(error), str(error)
            assert torch.equal(after, torch.ones(2) * (size - 1))


@pytest.mark.usefixtures("needs_two")
def test_ranks_that_disagree_while_one_has_joined_are_told_so(hvd, error_of):
    if hvd.size() < 3:
        pytest.skip("two that disagree, and one that has joined")
    error = after = None
    if hvd.rank() != 0:
        own = torch.ones(3 if hvd.rank() == 1 else 4)
        error = error_of(lambda: hvd.allreduce(own, name="disagree", op=hvd.Sum))
        after = hvd.allreduce(torch.ones(1), op=hvd.Sum)
    hvd.join()
    if hvd.rank() != 0:
        assert "rank 1 sent a tensor of shape [3]" in str(error)
        assert after.item() == hvd.size() - 1


def test_operations_that_are_awaited_after_the_join_are_right(hvd, half):
    """A rank may ask, join, and wait then; the others have gone on to something else."""
    size, rank = hvd.size(), hvd.rank()
    own = [torch.full((count,), 1.0 + rank) for count in (10, 1_000_000, 100_000, 100_000, 100_000)]
    handles = [hvd.allreduce_async(x, op=hvd.Sum, name=f"left.{k}") for k, x in enumerate(own) if rank == 0]
    last = hvd.join()
    found = [hvd.synchronize(handle) for handle in handles]
    hvd.barrier(process_set=half)
    hvd.barrier()
    assert 0 <= last < size
    for x, result in zip(own, found, strict=False):
        assert torch.equal(result, x)


def test_a_rank_that_joins_while_a_round_is_under_way_parts_from_no_one(hvd):
    """Asking, joining at once, and waiting for the result later, in many rhythms."""
    size, rank = hvd.size(), hvd.rank()
    chance = random.Random(rank)
    found = []
    for turn in range(40):
        handle = hvd.allreduce_async(torch.tensor([float(rank + turn)]), op=hvd.Sum, name=f"turn.{turn}")
        for _ in range(chance.randrange(0, 4)):
            hvd.poll(handle)
        hvd.join()
        found.append(hvd.synchronize(handle).item())
    assert found == [float(sum(range(size)) + size * turn) for turn in range(40)]


def test_gradients_may_be_missing_on_ranks_without_data(hvd, assert_same):
    """Backward through an all-reduce is an all-reduce as well, for which zeros stand in."""
    size, rank = hvd.size(), hvd.rank()
    gradient = None
    if rank == 0:
        own = torch.ones(3, requires_grad=True)
        hvd.allreduce(own, op=hvd.Average).sum().backward()
        gradient = own.grad
    hvd.join()
    if rank == 0:
        assert_same([("gradient", gradient, torch.full((3,), 1.0) / size)])


@pytest.mark.mpi
def test_who_joins_after_a_failure_is_told_of_it(hvd, error_of):
    hvd.global_process_set._engine.fail("it has ended")
    error = error_of(hvd.join)
    hvd.shutdown()
    hvd.init()
    assert (type(error), str(error)) == (hvd.HorovodInternalError, "it has ended")
