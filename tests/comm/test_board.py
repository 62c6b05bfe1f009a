"""Short messages by posts: right whoever is ahead, the same bits everywhere, and mistakes are told."""

from __future__ import annotations

import time
import tracemalloc
from functools import reduce
from itertools import product

import numpy as np
import pytest
import torch

from hpcpar.algorithms.registry import find
from hpcpar.comm import run_loopback
from hpcpar.comm.arena import BOARD_PLACES, LANES
from hpcpar.comm.board import MOVED_NBYTES, BoardStep, suits
from hpcpar.errors import MismatchError
from hpcpar.partition import counts, offsets

SIZES = [2, 3, 4]
TIMES = 3 * LANES * BOARD_PLACES
SHARED = {"shared_memory": True}


def cut(count, size):
    return (("data", offsets(counts(count, size))),)


def goes_by_posts(comm, collective):
    """Whether the latest remembered call of that kind does."""
    recipe = [recipe for recipe in comm._recipes.values() if recipe.collective == collective][-1]
    program = next(program for program in recipe.programs if program is not None)
    return all(isinstance(step, BoardStep) for step in program.steps)


@pytest.mark.parametrize(
    ("collective", "name", "size", "expected"),
    [
        ("allreduce", "one_shot", 3, True),
        ("allreduce", "direct", 3, True),
        ("allreduce", "recursive_doubling", 2, True),
        ("allreduce", "recursive_doubling", 4, False),
        ("allreduce", "ring", 2, False),
        ("broadcast", "direct", 4, True),
        ("broadcast", "binomial", 2, False),
    ],
)
def test_exchanges_of_all_with_all_go_by_posts(collective, name, size, expected):
    assert suits(find(collective, name), size, cut(100, 1), 4, combines=True) == expected


def test_what_is_only_moved_goes_by_posts_while_it_is_short_and_nobody_has_nothing():
    direct = find("allgather", "direct")
    assert suits(direct, 3, cut(3 * MOVED_NBYTES // 4, 3), 4, combines=False)
    assert not suits(direct, 3, cut(3 * MOVED_NBYTES // 4 + 1, 3), 4, combines=False)
    assert suits(find("reduce_scatter", "direct"), 3, cut(3 * MOVED_NBYTES // 4 + 1, 3), 4, combines=True)
    assert not suits(direct, 3, cut(2, 3), 4, combines=False)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("nbytes", [8, 4096, 65536])
def test_short_calls_go_by_posts_and_give_what_the_serial_computation_gives(size, nbytes, quick_looks):
    count = max(1, nbytes // 8 // size) * size
    piece = min(count, MOVED_NBYTES // 8 // size * size) // size

    def work(comm):
        mine = [np.arange(count) * 3 + rank for rank in range(size)]
        pieces = [np.arange(piece) + 100 * rank for rank in range(size)]
        dealt = [np.arange(piece * size) + 1000 * rank for rank in range(size)]
        data, out = mine[comm.rank].copy(), np.empty(count // size, int)
        gathered, swapped = np.empty(piece * size, int), np.empty(piece * size, int)
        wrong = []
        for call in range(TIMES):
            root = call // LANES % size
            data[:] = mine[comm.rank] + call
            total = sum(mine) + size * call
            own = slice(comm.rank * count // size, (comm.rank + 1) * count // size)
            results = [
                (comm.reduce_scatter(data, out=out), total[own]),
                (comm.allgather(pieces[comm.rank], out=gathered), np.concatenate(pieces)),
                (
                    comm.alltoall(dealt[comm.rank], out=swapped),
                    np.concatenate([all_of.reshape(size, -1)[comm.rank] for all_of in dealt]),
                ),
            ]
            summed = comm.reduce(data, root=root)
            results.append((summed, None) if summed is None else (summed.copy(), total))
            assert (summed is not None) == (comm.rank == root)
            data[:] = mine[comm.rank] + call
            results.append((comm.allreduce(data).copy(), total))
            data[:] = mine[comm.rank] + call
            results.append((comm.broadcast(data, root, algorithm="direct").copy(), mine[root] + call))
            wrong += [
                (call, number)
                for number, (found, expected) in enumerate(results)
                if not (found is expected or np.array_equal(found, expected))
            ]
        names = ("allreduce", "reduce_scatter", "allgather", "alltoall")
        return wrong, [goes_by_posts(comm, name) for name in names]

    assert run_loopback(size, work, **SHARED) == [([], [True] * 4)] * size


@pytest.mark.parametrize("size", [3, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("sharing", [{}, SHARED, {**SHARED, "stage_nbytes": 1024}])
def test_one_shot_sums_have_the_same_bits_on_every_rank_in_the_order_of_the_ranks(
    dtype, size, sharing, quick_looks
):
    torch.manual_seed(0)
    inputs = [(torch.randn(500, dtype=torch.float64) * 3**rank).to(dtype) for rank in range(size)]

    def work(comm):
        data, found = inputs[comm.rank].clone(), []
        for _ in range(2 * LANES):
            data.copy_(inputs[comm.rank])
            found.append(comm.allreduce(data, algorithm="one_shot").clone())
        return found

    wide = torch.float32 if dtype.itemsize == 2 else dtype
    expected = reduce(torch.add, (one.to(wide) for one in inputs)).to(dtype)
    for found in run_loopback(size, work, **sharing):
        assert all(torch.equal(one, expected) for one in found)


@pytest.mark.parametrize("nodes", [(0, 0, 1), (0, 1, 1)])
def test_one_shot_sums_have_the_same_bits_across_nodes_too(nodes, quick_looks):
    """Long enough for a step that goes through memory inside of a node, and by messages between."""
    inputs = [np.random.default_rng(rank).normal(size=40_000) * 10.0**rank for rank in range(3)]

    def work(comm):
        return comm.allreduce(inputs[comm.rank].copy(), algorithm="one_shot")

    expected = inputs[0] + inputs[1] + inputs[2]
    for found in run_loopback(3, work, nodes=nodes, **SHARED):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("slow", [0, 1])
def test_ranks_that_run_ahead_write_over_nothing_that_is_unread(size, slow, quick_looks):
    def work(comm):
        data, found = np.empty(3), []
        for call in range(TIMES):
            if comm.rank == slow and call % 10 == 3:
                time.sleep(0.01)
            data[:] = call if comm.rank == 0 else -1
            found.append(comm.broadcast(data, algorithm="direct").tolist() == [call] * 3)
            data[:] = call
            comm.reduce(data, root=size - 1, algorithm="direct")
            found.append(comm.rank < size - 1 or data.tolist() == [size * call] * 3)
        return found

    assert all(all(found) for found in run_loopback(size, work, **SHARED))


@pytest.mark.parametrize("size", SIZES)
def test_several_under_way_are_right_in_whatever_order_they_are_waited_for(size, quick_looks):
    def work(comm):
        found = []
        arrays = [np.full(5, comm.rank + call) for call in range(3 * LANES * BOARD_PLACES)]
        for _ in range(3):
            handles = [comm.start_allreduce(array) for array in arrays]
            for handle in reversed(handles):
                handle.wait()
            comm.broadcast(arrays[0], size - 1)
            sums = [size * (size - 1) // 2 + size * call for call in range(len(arrays))]
            found.append([array.tolist() for array in arrays] == [[total] * 5 for total in sums])
            for call, array in enumerate(arrays):
                array[:] = comm.rank + call
        return found

    assert run_loopback(size, work, **SHARED) == [[True] * 3] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (np.ones(3), np.ones(4), "allreduce of 3 float64, op=sum"),
        (np.ones(4, np.float32), np.ones(4, np.int32), "allreduce of 4 float32, op=sum"),
    ],
)
@pytest.mark.parametrize("again", [1, 2 * LANES])
def test_other_lengths_or_types_of_short_arrays_are_an_error_on_every_rank(
    one, other, told, again, size, quick_looks
):
    def work(comm):
        for _ in range(again):
            comm.allreduce(one.copy())
        mine = one if comm.rank else other
        kept = mine.copy()
        with pytest.raises(MismatchError, match="another number or type of elements") as caught:
            comm.allreduce(mine)
        comm.barrier()
        total = comm.allreduce(np.ones(2))
        return str(caught.value), np.array_equal(mine, kept), total.tolist()

    results = run_loopback(size, work, **SHARED)
    assert told in results[1][0]
    assert "HPCPAR_CHECK=1" in results[0][0]
    assert all(result[1:] == (True, [size] * 2) for result in results)


def test_other_roots_and_other_algorithms_are_an_error_on_every_rank_that_reads(quick_looks):
    def work(comm):
        told = []
        for call in (
            lambda: comm.reduce(np.ones(2), root=min(comm.rank, 1), algorithm="direct"),
            lambda: comm.allreduce(np.ones(6), algorithm="direct" if comm.rank else "one_shot"),
        ):
            try:
                call()
            except MismatchError as error:
                told.append(str(error))
            comm.barrier()
        return told, comm.allreduce(np.ones(3)).tolist()

    results = run_loopback(3, work, **SHARED)
    assert [len(told) for told, _ in results] == [2, 2, 1]
    assert "reduce of 2 float64, op=sum, root=1, by direct" in results[1][0][0]
    assert "by one_shot" in results[0][0][1]
    assert all(total == [3] * 3 for _, total in results)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("sharing", [{}, SHARED, {**SHARED, "stage_nbytes": 1024}])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_one_shot_takes_the_first_of_equal_numbers_on_every_rank(dtype, sharing, size, quick_looks):
    """Which of 0 and -0 is the smaller one is said by their order alone; so are the bits of a NaN."""

    def work(comm):
        found = []
        for count, op in product((1, 33, 100), ("min", "max")):
            data = np.full(count, -0.0 if comm.rank % 2 else 0.0, dtype=dtype)
            found.append(comm.allreduce(data, op, algorithm="one_shot").tobytes())
        return found

    results = run_loopback(size, work, **sharing)
    assert all(found == results[0] for found in results)


def test_what_is_remembered_of_short_sums_takes_little_memory(quick_looks):
    """Partial sums lie in the result, as what the rank itself holds is summed from its post."""

    def work(comm):
        data = np.ones(2000)
        for _ in range(2 * LANES * BOARD_PLACES):
            comm.allreduce(data, "max")
        arrays = [np.ones(2000) for _ in range(20)]
        before, _ = tracemalloc.get_traced_memory()
        for array in arrays:
            for _ in range(2 * LANES * BOARD_PLACES):
                comm.allreduce(array, "max")
        after, _ = tracemalloc.get_traced_memory()
        return after - before

    tracemalloc.start()
    try:
        assert max(run_loopback(3, work, **SHARED)) < 3 * 20 * 100_000
    finally:
        tracemalloc.stop()


def test_bytes_that_are_only_moved_may_be_of_another_type(quick_looks):
    def work(comm):
        data = np.arange(4, dtype=np.uint8) if comm.rank == 0 else np.zeros(4, dtype=np.int8)
        return comm.broadcast(data).tolist()

    assert run_loopback(3, work, **SHARED) == [[0, 1, 2, 3]] * 3
