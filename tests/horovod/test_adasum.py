"""Adasum against its definition, computed in one place in float64."""

from __future__ import annotations

import math
from itertools import pairwise, product, starmap

import pytest
import torch

from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import OperationError
from hpcpar.horovod.adasum import BLOCK_COUNT, Halving, adasum, halvings
from tests import grid

SIZES = (1, 2, 4, 8)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BATCHES = {
    "nothing": [0],
    "one number": [1],
    "fewer than ranks": [1, 2],
    "ragged": [5, 0, 17, 1, 40, 3],
    "longer than a block": [3 * BLOCK_COUNT + 5, 7],
}


def pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    ab, aa, bb = (float(x @ y) for x, y in ((a, b), (a, a), (b, b)))
    return (1 - ab / (2 * aa) if aa else 1) * a + (1 - ab / (2 * bb) if bb else 1) * b


def serial(vectors: list[torch.Tensor]) -> torch.Tensor:
    """The tree (0 ⊕ 1) ⊕ (2 ⊕ 3) …"""
    level = [vector.double() for vector in vectors]
    while len(level) > 1:
        level = [pair(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def edges_of(counts: list[int]) -> list[int]:
    return [sum(counts[:i]) for i in range(len(counts) + 1)]


def brought(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """A common part, so that dot products are not near zero, and one of the rank's own."""
    common = torch.randn(count, generator=torch.Generator().manual_seed(100))
    own = torch.randn(count, generator=torch.Generator().manual_seed(rank))
    return ((rank + 1) * common + own).to(dtype)


def reduce_all(size: int, vectors: list[torch.Tensor], edges: list[int]) -> list[torch.Tensor]:
    def work(comm: Communicator) -> torch.Tensor:
        flat = vectors[comm.rank].clone()
        adasum(comm, flat, edges)
        return flat

    return run_loopback(size, work)


def expected(vectors: list[torch.Tensor], edges: list[int]) -> torch.Tensor:
    parts = [serial([vector[start:stop] for vector in vectors]) for start, stop in pairwise(edges)]
    return torch.cat(parts) if parts else torch.empty(0)


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative to the length of the truth, in units of the type's last place."""
    length = float(truth.double().norm())
    distance = float((found.double() - truth).norm())
    return distance / (length or 1.0) / torch.finfo(found.dtype).eps


def test_four_ranks_halve_four_elements_as_drawn() -> None:
    assert [halvings(rank, 4, 4) for rank in range(4)] == [
        [Halving(1, slice(0, 2), slice(2, 4)), Halving(2, slice(0, 1), slice(1, 2))],
        [Halving(1, slice(2, 4), slice(0, 2)), Halving(2, slice(2, 3), slice(3, 4))],
        [Halving(1, slice(0, 2), slice(2, 4)), Halving(2, slice(1, 2), slice(0, 1))],
        [Halving(1, slice(2, 4), slice(0, 2)), Halving(2, slice(3, 4), slice(2, 3))],
    ]


def test_what_a_rank_keeps_its_partner_gives_and_the_last_parts_are_the_whole() -> None:
    for size, count in product([1, 2, 4, 8, 64], [0, 1, 5, 64, 1001]):
        walks = [halvings(rank, size, count) for rank in range(size)]
        for rank, walk in enumerate(walks):
            for number, level in enumerate(walk):
                partner = walks[rank ^ level.distance][number]
                assert (partner.kept, partner.given) == (level.given, level.kept)
        last = [walk[-1].kept if walk else slice(0, count) for walk in walks]
        assert sorted(element for part in last for element in range(count)[part]) == list(range(count))


@pytest.mark.parametrize(("batch", "size", "dtype"), grid.pairwise(BATCHES, SIZES, DTYPES), ids=str)
def test_it_is_the_tree_of_pairs_on_every_tensor(batch: str, size: int, dtype: torch.dtype) -> None:
    edges = edges_of(BATCHES[batch])
    vectors = [brought(rank, edges[-1], dtype) for rank in range(size)]
    results = reduce_all(size, vectors, edges)
    truth = expected(vectors, edges)
    assert all(torch.equal(result, results[0]) for result in results), "ranks differ in bits"
    # One rounding on each level, which later levels carry on. In float64 the dot products of 100,000
    # elements round no less, in both computations.
    bound = (100 if dtype == torch.float64 else 1) * math.log2(size)
    assert all(error(results[0][part], truth[part]) <= bound for part in starmap(slice, pairwise(edges)))


@pytest.mark.parametrize("size", SIZES)
def test_orthogonal_vectors_are_summed(size: int) -> None:
    vectors = [torch.zeros(8) for _ in range(size)]
    for rank, vector in enumerate(vectors):
        vector[rank] = rank + 1
    results = reduce_all(size, vectors, [0, 8])
    assert [result.tolist() for result in results] == [torch.stack(vectors).sum(0).tolist()] * size


@pytest.mark.parametrize("size", SIZES)
def test_parallel_vectors_are_averaged_whatever_their_lengths(size: int) -> None:
    direction = torch.arange(1.0, 8.0)
    vectors = [direction * 4.0**rank for rank in range(size)]
    results = reduce_all(size, vectors, [0, 7])
    assert all(error(result, torch.stack(vectors).double().mean(0)) <= 4 for result in results)


@pytest.mark.parametrize("size", SIZES)
def test_a_vector_of_zeros_changes_nothing(size: int) -> None:
    vectors = [torch.zeros(5) for _ in range(size)]
    vectors[size // 2] = torch.tensor([1.0, -2.0, 0.0, 4.0, 1e-30])
    results = reduce_all(size, vectors, [0, 5])
    nothing = reduce_all(size, [torch.zeros(5)] * size, [0, 5])
    assert [result.tolist() for result in results] == [vectors[size // 2].tolist()] * size
    assert [result.tolist() for result in nothing] == [[0.0] * 5] * size


def test_a_batch_gives_what_its_tensors_give_one_by_one() -> None:
    counts = [5, 0, 17, 1, 40, 3]
    edges = edges_of(counts)
    vectors = [brought(rank, edges[-1], torch.float64) for rank in range(4)]
    together = reduce_all(4, vectors, edges)[0]
    alone = [
        reduce_all(4, [vector[start:stop].clone() for vector in vectors], [0, stop - start])[0]
        for start, stop in pairwise(edges)
    ]
    as_one = reduce_all(4, vectors, [0, edges[-1]])[0]
    assert torch.allclose(together, torch.cat(alone), rtol=1e-12, atol=0)
    assert not torch.allclose(together, as_one, rtol=1e-3)


def extremes(size: int, dtype: torch.dtype) -> dict[str, list[torch.Tensor]]:
    """Parallel vectors near the smallest normal number, and with lengths from there to √max."""
    limits = torch.finfo(dtype)
    tiny, root = limits.tiny, math.sqrt(limits.max)
    generator = torch.Generator().manual_seed(2)
    direction = torch.randn(1024, generator=generator, dtype=torch.float64)
    factors = torch.randn(size, generator=generator, dtype=torch.float64)
    spread = [root ** ((i + 1) / size) * tiny ** ((size - i - 1) / size) for i in range(size)]
    spread = [spread[(3 * i + 1) % size] for i in range(size)]
    return {
        "tiny": [(direction * tiny * float(factor)).to(dtype) for factor in factors],
        "spread": [(direction * factor).to(dtype) for factor in spread],
    }


@pytest.mark.parametrize(("dtype", "size"), grid.checkered(DTYPES[:3], SIZES), ids=str)
def test_tiny_and_huge_parallel_vectors_come_out_as_their_mean(size: int, dtype: torch.dtype) -> None:
    for what, vectors in extremes(size, dtype).items():
        results = reduce_all(size, vectors, [0, 1024])
        mean = torch.stack(vectors).double().mean(0)
        unavoidable = error(serial(vectors).to(dtype), mean)
        # Numbers below the smallest normal have few digits left, so the vectors are not quite parallel:
        # Horovod's test allows 100 last places.
        assert error(results[0], mean) < min(unavoidable + 3, 100), what
        assert all(torch.equal(result, results[0]) for result in results), what


def test_what_lies_outside_the_edges_is_left_as_it_is() -> None:
    vectors = [brought(rank, 20, torch.float32) for rank in range(4)]
    results = reduce_all(4, vectors, [3, 9, 17])
    inside = reduce_all(4, [vector[3:17].clone() for vector in vectors], [0, 6, 14])
    for result, vector in zip(results, vectors, strict=True):
        assert torch.equal(result[3:17], inside[0])
        assert torch.equal(result[:3], vector[:3])
        assert torch.equal(result[17:], vector[17:])


def test_every_second_element_of_a_tensor_can_be_reduced() -> None:
    vectors = [brought(rank, 20, torch.float32) for rank in range(4)]

    def work(comm: Communicator) -> torch.Tensor:
        whole = vectors[comm.rank].clone()
        adasum(comm, whole[::2], [0, 10])
        return whole

    results = run_loopback(4, work)
    dense = reduce_all(4, [vector[::2].clone() for vector in vectors], [0, 10])[0]
    for result, vector in zip(results, vectors, strict=True):
        assert torch.allclose(result[::2], dense, rtol=1e-6)
        assert torch.equal(result[1::2], vector[1::2])


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_counted_bytes_equal_the_stated_cost(size: int) -> None:
    def work(comm: Communicator) -> int:
        adasum(comm, torch.ones(64), [0, 10, 64])
        return comm.traffic.nbytes_sent("adasum")

    levels = size.bit_length() - 1
    stated = 2 * (64 * 4) * (size - 1) // size + 24 * 2 * levels * (levels + 1) // 2
    assert run_loopback(size, work) == [stated] * size


@pytest.mark.parametrize("size", [3, 5, 6, 7])
def test_it_refuses_ranks_that_are_no_power_of_two(size: int) -> None:
    def work(comm: Communicator) -> str:
        with pytest.raises(OperationError) as caught:
            adasum(comm, torch.ones(4), [0, 4])
        return str(caught.value)

    assert all(f"Adasum among {size} ranks" in told for told in run_loopback(size, work))


@pytest.mark.parametrize(
    ("flat", "edges", "told"),
    [
        (torch.ones(2, 2), [0, 4], "shape [2, 2]"),
        (torch.ones(4, dtype=torch.int32), [0, 4], "torch.int32"),
        (torch.ones(4, device="meta"), [0, 4], "on meta"),
        (torch.ones(4), [0, 5], "edges [0, 5] in 4 elements"),
        (torch.ones(4), [0, 3, 2, 4], "ascend"),
        (torch.ones(4), [-1, 4], "ascend"),
        (torch.ones(4), [0], "two or more"),
    ],
)
def test_wrong_arguments_are_named(flat: torch.Tensor, edges: list[int], told: str) -> None:
    with pytest.raises(OperationError) as caught:
        adasum(Communicator.alone(), flat, edges)
    assert told in str(caught.value)


@pytest.mark.mpi
def test_ranks_of_mpi_form_the_same_tree(any_world: Communicator) -> None:
    edges = edges_of([5, 0, 17, 1, 4000, 3])
    failures = []
    for dtype in DTYPES:
        vectors = [brought(rank, edges[-1], dtype) for rank in range(any_world.size)]
        flat = vectors[any_world.rank].clone()
        if any_world.size == 3:
            with pytest.raises(OperationError):
                adasum(any_world, flat, edges)
            continue
        adasum(any_world, flat, edges)
        truth = expected(vectors, edges)
        same = any_world.allgather_object(bytes(flat.view(torch.uint8).numpy()))
        failures += [dtype] if error(flat, truth) > 100 or len(set(same)) > 1 else []
    assert any_world.allgather_object(failures) == [[]] * any_world.size


@pytest.mark.mpi
def test_extremes_over_mpi_come_out_as_their_mean(world: Communicator) -> None:
    errors = {}
    for dtype in DTYPES[:3]:
        for what, vectors in extremes(world.size, dtype).items():
            flat = vectors[world.rank].clone()
            if world.size != 3:
                adasum(world, flat, [0, 1024])
                errors[what, dtype] = error(flat, torch.stack(vectors).double().mean(0))
    everywhere = world.allgather_object(errors)
    assert all(found < 100 for errors in everywhere for found in errors.values())
