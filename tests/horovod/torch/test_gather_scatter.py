"""All-gathers, broadcasts, all-to-alls and reduce-scatters, against the same done in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.grid import checkered

pytestmark = pytest.mark.mpi

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MOVABLE = (*INTEGERS, *FLOATS, torch.bool, torch.complex64, torch.complex128)

ROWS: dict[str, Callable[[int], int]] = {
    "even": lambda rank: 3,
    "uneven": lambda rank: 2 * rank + 1,
    "none on rank 0": lambda rank: rank,
    "only on rank 0": lambda rank: 4 if rank == 0 else 0,
    "none": lambda rank: 0,
    "many on rank 0": lambda rank: 20_000 if rank == 0 else 1,
}


def last(hvd: Any) -> int:
    return hvd.size() - 1


# ---------------------------------------------------------------- all-gather


@pytest.mark.parametrize(("rows", "tail"), checkered(ROWS, [(), (2,), (2, 3), (0,)]), ids=str)
def test_an_allgather_puts_all_ranks_rows_one_after_the_other(hvd, brought, assert_same, rows, tail):
    of_ranks = [brought(rank, (ROWS[rows](rank), *tail)) for rank in range(hvd.size())]
    own = of_ranks[hvd.rank()].clone()
    found = hvd.allgather(own)
    later = hvd.synchronize(hvd.allgather_async(own, name="rows"))
    expected = torch.cat(of_ranks)
    assert_same([("rows", found, expected), ("later", later, expected), ("input", own, of_ranks[hvd.rank()])])


@pytest.mark.parametrize("dtype", MOVABLE)
def test_every_type_can_be_gathered_broadcast_and_exchanged(hvd, brought, assert_same, dtype):
    size, rank = hvd.size(), hvd.rank()
    of_ranks = [(brought(r, (size, 2), torch.int64) - 1).to(dtype) for r in range(size)]
    own = of_ranks[rank]
    found = {
        "allgather": hvd.allgather(own),
        "broadcast": hvd.broadcast(own, last(hvd)),
        "broadcast in place": hvd.broadcast_(own.clone(), last(hvd)),
        "alltoall": hvd.alltoall(own),
    }
    expected = {
        "allgather": torch.cat(of_ranks),
        "broadcast": of_ranks[-1],
        "broadcast in place": of_ranks[-1],
        "alltoall": torch.stack([x[rank] for x in of_ranks]),
    }
    assert_same([(what, found[what], expected[what]) for what in found])


def test_many_allgathers_of_changing_lengths_may_be_under_way(hvd, brought, assert_same):
    def of(rank: int, k: int) -> Tensor:
        return brought(rank, ((rank + k) % 4, 3), MOVABLE[k % len(MOVABLE)], k)

    handles = [hvd.allgather_async(of(hvd.rank(), k), name=f"gather.{k}") for k in range(40)]
    polled = [hvd.poll(handle) for handle in handles]
    found = [hvd.synchronize(handle) for handle in reversed(handles)][::-1]
    assert_same([("not all were done at once", False in polled, True)])
    assert_same(
        [(f"{k}", x, torch.cat([of(rank, k) for rank in range(hvd.size())])) for k, x in enumerate(found)]
    )


def test_the_lengths_of_one_name_may_change_from_step_to_step(hvd, assert_same):
    checks = []
    for step in range(8):
        lengths = [(rank * step + step) % 5 for rank in range(hvd.size())]
        found = hvd.allgather(torch.full((lengths[hvd.rank()],), hvd.rank()), name="changing")
        expected = torch.repeat_interleave(torch.arange(hvd.size()), torch.tensor(lengths))
        checks.append((f"step {step}", found, expected))
    assert_same(checks)


def test_a_process_set_gathers_among_its_ranks(hvd, half, brought, assert_same):
    of_ranks = [brought(rank, (rank + 1, 2)) for rank in half.ranks]
    found = hvd.allgather(of_ranks[half.rank()], process_set=half)
    pair = hvd.grouped_allgather([of_ranks[half.rank()], of_ranks[half.rank()][:, 0]], process_set=half)
    expected = torch.cat(of_ranks)
    assert_same([("one", found, expected), ("first", pair[0], expected), ("second", pair[1], expected[:, 0])])


def test_grouped_allgathers_are_a_list_in_the_given_order(hvd, brought, assert_same):
    def of(rank: int) -> list[Tensor]:
        shapes = [(rank, 2), (3,), (rank + 1, 1, 2)]
        return [brought(rank, shape, MOVABLE[3 + k], k) for k, shape in enumerate(shapes)]

    everyones = [of(rank) for rank in range(hvd.size())]
    found = hvd.grouped_allgather(everyones[hvd.rank()])
    later = hvd.synchronize(hvd.grouped_allgather_async(tuple(everyones[hvd.rank()]), name="together"))
    expected = [torch.cat(of_ranks) for of_ranks in zip(*everyones, strict=True)]
    assert_same([("a list", isinstance(found, list), True)])
    assert_same([(f"{k}", x, expected[k]) for k, x in enumerate(found)])
    assert_same([(f"later {k}", x, expected[k]) for k, x in enumerate(later)])


def test_rows_in_any_order_of_memory_are_moved(hvd, brought, assert_same):
    size, rank = hvd.size(), hvd.rank()
    of_ranks = [brought(r, (2, 4 * size, 3)).transpose(0, 1) for r in range(size)]
    own = of_ranks[rank]
    images = [brought(r, (size, 3, 4, 5)).to(memory_format=torch.channels_last) for r in range(size)]
    in_place = own.clone(memory_format=torch.preserve_format)
    hvd.broadcast_(in_place, last(hvd))
    total = sum(of_ranks)
    found = [
        ("allgather", hvd.allgather(own), torch.cat(of_ranks)),
        ("broadcast", hvd.broadcast(own, 0), of_ranks[0]),
        ("in place", in_place, of_ranks[-1]),
        ("alltoall", hvd.alltoall(own), torch.cat([x[4 * rank : 4 * rank + 4] for x in of_ranks])),
        ("reducescatter", hvd.reducescatter(own, op=hvd.Sum), total[4 * rank : 4 * rank + 4]),
        ("images", hvd.allgather(images[rank]), torch.cat(images)),
        ("image", hvd.broadcast(images[rank], last(hvd)), images[-1]),
        ("input", own, of_ranks[rank]),
    ]
    assert_same(found)


# ---------------------------------------------------------------- broadcast


@pytest.mark.parametrize("shape", [(), (1,), (17, 3), (0,), (2, 0), (400_000,)], ids=str)
def test_a_broadcast_brings_every_roots_tensor_to_all(hvd, brought, assert_same, shape):
    checks = []
    for root in range(hvd.size()):
        own = brought(hvd.rank(), shape)
        before, expected = own.clone(), brought(root, shape)
        found = hvd.broadcast(own, root)
        checks += [(f"from {root}", found, expected), ("input", own.clone(), before)]
        same = hvd.broadcast_(own, root)
        checks += [("same object", same is own, True), (f"in place from {root}", own, expected)]
    assert_same(checks)


def test_broadcasts_from_all_roots_may_be_under_way_at_once(hvd, assert_same):
    size = hvd.size()
    own = [torch.full((5,), hvd.rank() * 100 + k) for k in range(3 * size)]
    handles = [hvd.broadcast_async_(x, k % size, name=f"from.{k}") for k, x in enumerate(own)]
    new = [hvd.broadcast_async(torch.tensor(hvd.rank()), k % size) for k in range(3 * size)]
    found = [hvd.synchronize(handle) for handle in handles]
    also = [hvd.synchronize(handle) for handle in new]
    assert all(a is b for a, b in zip(found, own, strict=True))
    assert_same([(f"{k}", x, torch.full((5,), (k % size) * 100 + k)) for k, x in enumerate(own)])
    assert_same([(f"new {k}", x, torch.tensor(k % size)) for k, x in enumerate(also)])


def test_the_root_of_a_broadcast_in_a_process_set_is_a_rank_of_the_job(hvd, half, assert_same):
    checks = []
    for root in half.ranks:
        own = torch.tensor([hvd.rank()])
        checks.append((f"from {root}", hvd.broadcast(own, root, process_set=half), torch.tensor([root])))
        hvd.broadcast_(own, root_rank=root, process_set=half)
        checks.append((f"in place from {root}", own, torch.tensor([root])))
    assert_same(checks)


def test_a_parameter_can_be_broadcast_in_place(hvd):
    parameter = torch.nn.Parameter(torch.full((3,), float(hvd.rank())))
    assert hvd.broadcast_(parameter, last(hvd)) is parameter
    assert parameter.requires_grad
    assert torch.equal(parameter.data, torch.full((3,), float(last(hvd))))


# ---------------------------------------------------------------- all-to-all


def exchanged(of_ranks: list[Tensor], splits: list[list[int]], rank: int) -> Tensor:
    """Return the rows that come to a rank."""
    return torch.cat([torch.split(x[: sum(s)], s)[rank] for x, s in zip(of_ranks, splits, strict=True)])


MATRICES: dict[str, Callable[[int, int], int]] = {
    "one each": lambda source, to: 1,
    "uneven": lambda source, to: (source + 2 * to) % 4,
    "nothing to itself": lambda source, to: 0 if source == to else 2,
    "all to rank 0": lambda source, to: 3 if to == 0 else 0,
    "rank 0 sends nothing": lambda source, to: 2 * source,
    "nothing": lambda source, to: 0,
    "much": lambda source, to: 3000 * (source + 1),
}


@pytest.mark.parametrize(("matrix", "tail"), checkered(MATRICES, [(), (3,), (2, 2)]), ids=str)
def test_an_alltoall_with_splits_brings_rows_and_how_many_from_each(hvd, brought, assert_same, matrix, tail):
    size, rank = hvd.size(), hvd.rank()
    splits = [[MATRICES[matrix](source, to) for to in range(size)] for source in range(size)]
    of_ranks = [brought(r, (sum(splits[r]), *tail)) for r in range(size)]
    own = torch.tensor(splits[rank], dtype=torch.int32)
    rows, received = hvd.alltoall(of_ranks[rank], splits=own)
    later, also = hvd.synchronize(hvd.alltoall_async(of_ranks[rank], own, name="exchange"))
    listed, _ = hvd.alltoall(of_ranks[rank], splits=splits[rank])
    array, _ = hvd.alltoall(of_ranks[rank], splits=own.numpy())
    expected = exchanged(of_ranks, splits, rank)
    counts = torch.tensor([s[rank] for s in splits], dtype=torch.int32)
    assert_same([("rows", rows, expected), ("later", later, expected), ("as a list", listed, expected)])
    assert_same([("as an array", array, expected)])
    assert_same([("received", received, counts), ("received later", also, counts)])


def test_an_alltoall_without_splits_is_a_tensor_alone_and_a_pair_when_asynchronous(hvd, brought, assert_same):
    size, rank = hvd.size(), hvd.rank()
    of_ranks = [brought(r, (2 * size, 3)) for r in range(size)]
    found = hvd.alltoall(of_ranks[rank])
    later, received = hvd.synchronize(hvd.alltoall_async(of_ranks[rank]))
    empty = hvd.alltoall(torch.zeros(0, 4))
    expected = torch.cat([x[2 * rank : 2 * rank + 2] for x in of_ranks])
    assert_same([("rows", found, expected), ("later", later, expected), ("none", empty, torch.zeros(0, 4))])
    assert_same([("received", received, torch.full((size,), 2, dtype=torch.int32))])


def test_rows_beyond_the_splits_stay_at_home(hvd, assert_same):
    size, rank = hvd.size(), hvd.rank()
    own = torch.arange(size + 3) + 100 * rank
    found, received = hvd.alltoall(own, splits=torch.ones(size, dtype=torch.int32))
    assert_same([("rows", found, torch.arange(size) * 100 + rank), ("each", received.tolist(), [1] * size)])


def test_a_process_set_exchanges_among_its_ranks(hvd, half, assert_same):
    size, place = half.size(), half.rank()
    own = torch.arange(size) + 10 * place
    found = hvd.alltoall(own, process_set=half)
    rows, received = hvd.alltoall(own, splits=[1] * size, process_set=half)
    expected = torch.arange(size) * 10 + place
    assert_same([("even", found, expected), ("with splits", rows, expected)])
    assert_same([("received", received.tolist(), [1] * size)])


def test_many_alltoalls_may_be_under_way(hvd, assert_same):
    size, rank = hvd.size(), hvd.rank()
    handles = [
        hvd.alltoall_async(torch.full((size * k,), rank * 100 + k), name=f"all.{k}") for k in range(15)
    ]
    found = [hvd.synchronize(handle)[0] for handle in handles]
    expected = [torch.repeat_interleave(torch.arange(size) * 100 + k, k) for k in range(15)]
    assert_same([(f"{k}", x, expected[k]) for k, x in enumerate(found)])


# ---------------------------------------------------------------- reduce-scatter


def own_rows(total: Tensor, rank: int, size: int) -> Tensor:
    """The rank's part: the first ranks have a row more."""
    more = total.shape[0] % size
    lengths = [total.shape[0] // size + (r < more) for r in range(size)]
    return torch.split(total, lengths)[rank]


@pytest.mark.parametrize(
    ("rows", "tail"),
    checkered(["equal", "one more", "fewer than ranks", "one", "none", "many"], [(), (3,), (2, 2)]),
    ids=str,
)
def test_a_reducescatter_leaves_every_rank_its_rows(hvd, brought, assert_same, rows, tail):
    size, rank = hvd.size(), hvd.rank()
    lengths = {
        "equal": 2 * size,
        "one more": 2 * size + 1,
        "fewer than ranks": size - 1,
        "one": 1,
        "none": 0,
        "many": 100_003,
    }
    of_ranks = [brought(r, (lengths[rows], *tail)) for r in range(size)]
    own = of_ranks[rank].clone()
    total = sum(of_ranks)
    found = {
        "sum": hvd.reducescatter(own, op=hvd.Sum),
        "later": hvd.synchronize(hvd.reducescatter_async(own, op=hvd.Sum, name="part")),
        "average": hvd.reducescatter(own),
    }
    expected = {"sum": total, "later": total, "average": total / size}
    assert_same([(what, x, own_rows(expected[what], rank, size)) for what, x in found.items()])
    assert_same([("input", own, of_ranks[rank])])


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS)
def test_every_type_is_reduced_and_scattered(hvd, brought, assert_same, dtype):
    size, rank = hvd.size(), hvd.rank()
    of_ranks = [brought(r, (size + 1, 5), dtype) for r in range(size)]
    summed = hvd.reducescatter(of_ranks[rank], op=hvd.Sum)
    averaged = hvd.reducescatter(of_ranks[rank], op=hvd.Average)
    total = sum(of_ranks)
    is_float = dtype.is_floating_point
    mean = total / size if is_float else torch.div(total, size, rounding_mode="trunc")
    assert_same(
        [("sum", summed, own_rows(total, rank, size)), ("mean", averaged, own_rows(mean, rank, size))]
    )


@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_a_reducescatter_is_scaled_before_and_after(hvd, brought, assert_same, op):
    size, rank = hvd.size(), hvd.rank()
    whole = [brought(r, (2 * size + 1, 2), torch.int32) for r in range(size)]
    floats = [x.double() for x in whole]
    factors = {"prescale_factor": 1.5, "postscale_factor": 0.5}
    kind = getattr(hvd, op)
    own = whole[rank].clone()
    found = hvd.reducescatter(own, op=kind, **factors)
    real = hvd.reducescatter(floats[rank], op=kind, **factors)
    total = sum((x.double() * 1.5).trunc() for x in whole)
    total = (total * 0.5).trunc()
    total = (total / size).trunc() if op == "Average" else total
    truth = sum(floats) * 0.75 / (size if op == "Average" else 1)
    assert_same(
        [("integers", found, own_rows(total.to(torch.int32), rank, size)), ("input", own, whole[rank])]
    )
    # Products and one division in another order: a unit in the last place for each.
    torch.testing.assert_close(real, own_rows(truth, rank, size), rtol=1e-15, atol=0)


def test_a_process_set_reduces_and_scatters_among_its_ranks(hvd, half, brought, assert_same):
    of_ranks = [brought(r, (5, 2), torch.int64) for r in half.ranks]
    own = of_ranks[half.rank()]
    found = hvd.reducescatter(own, op=hvd.Sum, process_set=half)
    (grouped,) = hvd.grouped_reducescatter([own], op=hvd.Sum, process_set=half)
    expected = own_rows(sum(of_ranks), half.rank(), half.size())
    assert_same([("one", found, expected), ("grouped", grouped, expected)])


@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_grouped_reducescatters_are_a_list_in_the_given_order(hvd, brought, assert_same, op):
    size, rank = hvd.size(), hvd.rank()
    shapes = [(2 * size, 3), (1,), (size + 1, 2, 2)]
    of_tensors = [[brought(r, s, torch.float64, k) for r in range(size)] for k, s in enumerate(shapes)]
    own = [of_ranks[rank] for of_ranks in of_tensors]
    kind = getattr(hvd, op)
    factors = {"prescale_factor": 2.0, "postscale_factor": 0.5}
    found = {
        "now": hvd.grouped_reducescatter(own, op=kind),
        "scaled": hvd.grouped_reducescatter(own, op=kind, **factors),
        "later": hvd.synchronize(hvd.grouped_reducescatter_async(tuple(own), op=kind, name="parts")),
    }
    truths = [sum(of_ranks) / (size if op == "Average" else 1) for of_ranks in of_tensors]
    assert_same([(f"{what} is a list", isinstance(x, list), True) for what, x in found.items()])
    assert_same(
        [
            (f"{what} {k}", x, own_rows(truths[k], rank, size))
            for what, results in found.items()
            for k, x in enumerate(results)
        ]
    )


@pytest.mark.parametrize("which", ["fp16", "bf16"])
def test_compressed_reducescatters_come_back_in_their_own_type(hvd, brought, assert_same, which):
    size, rank = hvd.size(), hvd.rank()
    of_ranks = [brought(r, (size, 4), torch.float64) for r in range(size)]
    compression = getattr(hvd.Compression, which)
    found = hvd.reducescatter(of_ranks[rank], op=hvd.Sum, compression=compression)
    (grouped,) = hvd.grouped_reducescatter([of_ranks[rank]], op=hvd.Sum, compression=compression)
    expected = own_rows(sum(of_ranks), rank, size)
    assert_same([("one", found, expected), ("grouped", grouped, expected)])


def test_many_reducescatters_may_be_under_way(hvd, assert_same):
    size, rank = hvd.size(), hvd.rank()
    handles = [
        hvd.reducescatter_async(torch.arange(k) * (rank + 1), op=hvd.Sum, name=f"parts.{k}")
        for k in range(20)
    ]
    polled = [hvd.poll(handle) for handle in handles]
    found = [hvd.synchronize(handle) for handle in handles]
    factor = sum(range(1, size + 1))
    assert_same([("not all were done at once", False in polled, True)])
    assert_same([(f"{k}", x, own_rows(torch.arange(k) * factor, rank, size)) for k, x in enumerate(found)])


# ---------------------------------------------------------------- all kinds together


def test_all_kinds_may_be_under_way_together_and_awaited_in_any_order(hvd, assert_same):
    size, rank = hvd.size(), hvd.rank()
    own = torch.arange(size) + 10 * rank
    handles = {}
    for k in range(5):
        handles[f"reduce {k}"] = hvd.allreduce_async(own + k, op=hvd.Sum)
        handles[f"gather {k}"] = hvd.allgather_async(own[: rank % 2 + 1] + k)
        handles[f"cast {k}"] = hvd.broadcast_async(own + k, k % size)
        handles[f"exchange {k}"] = hvd.alltoall_async(own + k)
        handles[f"scatter {k}"] = hvd.reducescatter_async(own + k, op=hvd.Sum)
    names = sorted(handles, key=lambda name: hash((name[-1], len(name), rank)))
    found = {name: hvd.synchronize(handles[name]) for name in names}
    total = size * torch.arange(size) + 10 * sum(range(size))
    checks = []
    for k in range(5):
        gathered = torch.cat([(torch.arange(size) + 10 * r)[: r % 2 + 1] + k for r in range(size)])
        checks += [
            ("reduce", found[f"reduce {k}"], total + size * k),
            ("gather", found[f"gather {k}"], gathered),
            ("cast", found[f"cast {k}"], torch.arange(size) + 10 * (k % size) + k),
            ("exchange", found[f"exchange {k}"][0], 10 * torch.arange(size) + rank + k),
            ("scatter", found[f"scatter {k}"], (total + size * k)[rank : rank + 1]),
        ]
    assert_same(checks)


def test_barriers_pass_among_other_operations(hvd, half):
    handles = [hvd.allreduce_async(torch.tensor([k]), op=hvd.Sum) for k in range(3)]
    hvd.barrier()
    hvd.barrier(process_set=half)
    gathered = hvd.allgather(torch.tensor([hvd.rank()]))
    hvd.barrier()
    found = [hvd.synchronize(handle).item() for handle in handles]
    assert found == [0, hvd.size(), 2 * hvd.size()]
    assert gathered.tolist() == list(range(hvd.size()))
