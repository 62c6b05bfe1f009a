from __future__ import annotations

import json
import math
from itertools import pairwise, permutations
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hpcpar.checkpoint.files import (
    PiecesRecord,
    ShardReader,
    ShardWriter,
    StoredPiece,
    StoredRegion,
    StoredTensor,
    WrittenShard,
    as_record,
    from_record,
    joined,
)
from hpcpar.checkpoint.local_tensor import LocalTensor, Region, contiguous_layout
from hpcpar.data_parallel.parameters import Layout, in_memory_order
from hpcpar.errors import CheckpointError


def written(directory: Path, value: Tensor, layout: Layout, cuts: list[int]) -> StoredTensor:
    """A tensor in pieces that end at the cuts, each in a file of its own."""
    flat = in_memory_order(value, layout)
    pieces = []
    for number, (start, stop) in enumerate(pairwise([0, *cuts, value.numel()])):
        save_file({"w": flat[start:stop].clone()}, directory / f"{number}.safetensors")
        piece = StoredPiece(start, stop, f"{number}.safetensors")
        part = StoredRegion(Region.whole(layout[0]), layout[1], (piece,))
        pieces.append(WrittenShard("w", value.dtype, layout[0], part))
    return joined(reversed(pieces))["w"]


def in_pieces(name: str, dtype: torch.dtype, layout: Layout, *extracts: StoredPiece) -> StoredTensor:
    """A tensor of one part, the whole."""
    return StoredTensor(name, dtype, layout[0], (StoredRegion(Region.whole(layout[0]), layout[1], extracts),))


def layouts(shape: tuple[int, ...]) -> list[Layout]:
    """All orders in which a tensor of a shape can lie in memory."""
    found = []
    for order in permutations(range(len(shape))):
        strides, step = [0] * len(shape), 1
        for dim in order:
            strides[dim] = step
            step *= shape[dim]
        found.append((shape, tuple(strides)))
    return found


@pytest.mark.parametrize("shape", [(1,), (7,), (1, 5), (4, 3), (2, 3, 4), (3, 1, 2)])
def test_any_elements_in_any_memory_order_come_out_of_any_pieces(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    numel = math.prod(shape)
    value = torch.arange(numel, dtype=torch.float64).reshape(shape)
    for number, layout in enumerate(layouts(shape)):
        for way, cuts in enumerate(([], [numel // 2], sorted({numel // 3, numel // 2, numel - 1}))):
            directory = tmp_path / f"{number}-{way}"
            directory.mkdir()
            stored, files = written(directory, value, layout, cuts), ShardReader(directory)
            assert stored.whole(files).equal(value)
            for wanted in layouts(shape):
                expected = in_memory_order(value, wanted)
                for start, stop in ((0, numel), (numel // 4, numel // 2 + 1), (numel - 1, numel), (1, 1)):
                    assert stored.elements(files, LocalTensor.whole(wanted), start, stop).equal(
                        expected[start:stop]
                    )


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 0), (5,), (4, 3), (2, 3, 4)])
def test_whole_tensors_are_read_by_the_element(shape: tuple[int, ...], tmp_path: Path) -> None:
    value = torch.rand(shape)
    save_file({"w": value}, tmp_path / "all.safetensors")
    files = ShardReader(tmp_path)
    stored = files.all_in("all.safetensors")["w"]
    assert (stored.shape, stored.dtype) == (shape, torch.float32)
    assert stored.whole(files).equal(value)
    for start in range(value.numel()):
        for stop in range(start, value.numel() + 1):
            found = stored.elements(files, LocalTensor.whole(contiguous_layout(shape)), start, stop)
            assert found.equal(value.reshape(-1)[start:stop])


def test_more_files_than_may_be_open_are_read(tmp_path: Path) -> None:
    value = torch.arange(50)
    stored = written(tmp_path, value, contiguous_layout((50,)), list(range(1, 50)))
    files = ShardReader(tmp_path)
    assert stored.whole(files).equal(value)
    assert stored.whole(files).equal(value)
    assert len(files._open) == 16


def test_gaps_overlaps_and_missing_ends_are_named() -> None:
    def stored(*extracts: tuple[int, int]) -> StoredTensor:
        return in_pieces(
            "w", torch.float32, contiguous_layout((6,)), *(StoredPiece(*pair, "f") for pair in extracts)
        )

    assert stored((0, 4), (4, 6)).shape == (6,)
    with pytest.raises(CheckpointError, match=r"of w there are elements 5 … 5 in f, where those from 4 on"):
        stored((0, 4), (5, 6))
    with pytest.raises(CheckpointError, match=r"elements 3 … 5 in f, where those from 4 on"):
        stored((0, 4), (3, 6))
    with pytest.raises(CheckpointError, match="of the 6 elements of w there are only 4"):
        stored((0, 4))


def test_ranks_that_disagree_about_a_tensor_are_found_out() -> None:
    pieces = [
        WrittenShard(
            "w", dtype, (2,), StoredRegion(Region.whole((2,)), (1,), (StoredPiece(place, place + 1, "f"),))
        )
        for place, dtype in enumerate((torch.float32, torch.float64))
    ]
    with pytest.raises(CheckpointError, match="ranks have w in several forms"):
        joined(pieces)


def test_what_is_written_down_is_what_is_read_again() -> None:
    parts = (
        StoredRegion(
            Region((((0, 2), (4, 5)), ((0, 2),))), (1, 3), (StoredPiece(0, 4, "a"), StoredPiece(4, 6, "b"))
        ),
        StoredRegion(Region((((1, 4),), ((0, 2),))), (2, 1), (StoredPiece(0, 6, "c"),)),
    )
    stored = StoredTensor("w", torch.bfloat16, (5, 2), parts)
    content = {"model": {"w": json.loads(json.dumps(as_record(stored)))}}
    assert from_record("w", PiecesRecord.model_validate(content).model["w"]) == stored


def test_a_file_that_is_gone_is_an_error_that_names_it(tmp_path: Path) -> None:
    stored = in_pieces("w", torch.float32, contiguous_layout((2,)), StoredPiece(0, 2, "gone.safetensors"))
    with pytest.raises(CheckpointError, match=r"cannot read w in .*gone.safetensors"):
        stored.whole(ShardReader(tmp_path))


WAYS: dict[str, tuple[int, list[list[tuple[int, int]]]]] = {
    "whole": (0, [[(0, 6)]]),
    "two halves of rows": (0, [[(0, 3)], [(3, 6)]]),
    "fused sections": (0, [[(0, 2), (4, 5)], [(2, 4), (5, 6)]]),
    "a shared section": (0, [[(0, 2), (4, 6)], [(2, 4), (4, 6)]]),
    "columns": (1, [[(0, 1)], [(1, 4)], [(4, 4)]]),
    "backwards": (1, [[(2, 4), (0, 2)]]),
}


def holdings(way: str, padding: int = 0) -> list[LocalTensor]:
    """Describe each part of a tensor of shape (6, 4), in two memory orders."""
    dim, ranges = WAYS[way]
    found = []
    for along in ranges:
        part = Region.of([along if n == dim else [(0, length)] for n, length in enumerate((6, 4))])
        shape = tuple(length + (padding if n == dim else 0) for n, length in enumerate(part.shape))
        found += [
            LocalTensor((6, 4), part, layout) for layout in (contiguous_layout(shape), (shape, (1, shape[0])))
        ]
    return found


def in_memory(value: Tensor, holding: LocalTensor) -> Tensor:
    """Return a rank's part of a tensor, flat in memory order, with zeros for padding."""
    rows, columns = (
        [n for start, stop in along for n in range(start, stop)] for along in holding.region.ranges
    )
    shard = torch.zeros(holding.layout[0], dtype=value.dtype)
    shard[: len(rows), : len(columns)] = value[rows][:, columns]
    return in_memory_order(shard, holding.layout)


@pytest.mark.parametrize("saved_padding", [0, 2])
@pytest.mark.parametrize("saver", WAYS)
def test_any_part_comes_out_of_any_other_parts(saver: str, saved_padding: int, tmp_path: Path) -> None:
    value = torch.arange(1, 25, dtype=torch.float64).reshape(6, 4)
    written = []
    in_both_orders = holdings(saver, saved_padding)
    # Each part once, in the one order or the other by turns.
    for rank in range(len(in_both_orders) // 2):
        holding = in_both_orders[2 * rank + rank % 2]
        flat = in_memory(value, holding)
        for piece, (start, stop) in enumerate(pairwise([0, flat.numel() // 3, flat.numel()])):
            files = ShardWriter(tmp_path, "model", 10 * rank + piece, common=False)
            files.add("w", flat[start:stop], holding, start)
            written += files.finish().shards
    stored, read = joined(written)["w"], ShardReader(tmp_path)
    assert stored.whole(read).equal(value)
    for loader in WAYS:
        for padding in (0, 1):
            for holding in holdings(loader, padding):
                expected = in_memory(value, holding)
                assert stored.local(read, holding).shape == holding.layout[0]
                numel = expected.numel()
                for start, stop in ((0, numel), (numel // 4, numel // 2), (numel // 3, numel), (0, 0)):
                    assert stored.elements(read, holding, start, stop).equal(expected[start:stop])


def test_the_very_part_that_was_saved_is_read_alone_and_of_others_what_overlaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = torch.arange(24.0).reshape(6, 4)
    written = []
    for rank, holding in enumerate(holdings("two halves of rows")[::2]):
        files = ShardWriter(tmp_path, "model", rank, common=False)
        files.add("w", in_memory(value, holding), holding, 0)
        written += files.finish().shards
    stored, read = joined(written)["w"], []
    flat = ShardReader.flat

    def noted(self: ShardReader, file: str, name: str, start: int, stop: int) -> Tensor:
        read.append((file, start, stop))
        return flat(self, file, name, start, stop)

    monkeypatch.setattr(ShardReader, "flat", noted)
    first, second = (f"model.rank{rank:05d}.000.safetensors" for rank in range(2))
    stored.elements(ShardReader(tmp_path), holdings("two halves of rows")[2], 2, 5)
    assert read == [(second, 2, 5)]
    read.clear()
    stored.local(ShardReader(tmp_path), holdings("fused sections")[0])
    assert read == [(first, 0, 8), (second, 4, 8)]


def test_a_part_that_no_rank_had_is_named() -> None:
    def stored(*rows: list[tuple[int, int]]) -> StoredTensor:
        parts = [Region.of([along, [(0, 2)]]) for along in rows]
        return StoredTensor(
            "w",
            torch.float32,
            (6, 2),
            tuple(StoredRegion(p, (2, 1), (StoredPiece(0, p.numel, "f"),)) for p in parts),
        )

    stored([(0, 2), (4, 6)], [(1, 5)])
    with pytest.raises(
        CheckpointError, match=r"of w of shape \(6, 2\) no rank had what begins at 2 along dim 0"
    ):
        stored([(0, 2), (4, 6)], [(3, 5)])
    with pytest.raises(CheckpointError, match="no rank had what begins at 5 along dim 0"):
        stored([(0, 3)], [(3, 5)])
    with pytest.raises(CheckpointError, match=r"of the 4 elements of w\[0:2, 0:2\] there are only 3"):
        StoredTensor(
            "w",
            torch.float32,
            (6, 2),
            (StoredRegion(Region((((0, 2),), ((0, 2),))), (2, 1), (StoredPiece(0, 3, "f"),)),),
        )
