from __future__ import annotations

import math
from itertools import pairwise, permutations
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hpcpar.checkpoint.piece_files import Written, joined
from hpcpar.checkpoint.stored import Extract, Files, Stored, as_record, contiguous, from_record
from hpcpar.data_parallel.parameters import Layout, in_memory_order
from hpcpar.errors import CheckpointError


def written(directory: Path, value: Tensor, layout: Layout, cuts: list[int]) -> Stored:
    """A tensor in pieces that end at the cuts, each in a file of its own."""
    flat = in_memory_order(value, layout)
    pieces = []
    for number, (start, stop) in enumerate(pairwise([0, *cuts, value.numel()])):
        save_file({"w": flat[start:stop].clone()}, directory / f"{number}.safetensors")
        pieces.append(Written("w", value.dtype, layout, Extract(start, stop, f"{number}.safetensors")))
    return joined(reversed(pieces))["w"]


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
            stored, files = written(directory, value, layout, cuts), Files(directory)
            assert stored.whole(files).equal(value)
            for wanted in layouts(shape):
                expected = in_memory_order(value, wanted)
                for start, stop in ((0, numel), (numel // 4, numel // 2 + 1), (numel - 1, numel), (1, 1)):
                    assert stored.elements(files, start, stop, wanted).equal(expected[start:stop])


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 0), (5,), (4, 3), (2, 3, 4)])
def test_whole_tensors_are_read_by_the_element(shape: tuple[int, ...], tmp_path: Path) -> None:
    value = torch.rand(shape)
    save_file({"w": value}, tmp_path / "all.safetensors")
    files = Files(tmp_path)
    stored = files.all_in("all.safetensors")["w"]
    assert (stored.shape, stored.dtype) == (shape, torch.float32)
    assert stored.whole(files).equal(value)
    for start in range(value.numel()):
        for stop in range(start, value.numel() + 1):
            found = stored.elements(files, start, stop, contiguous(shape))
            assert found.equal(value.reshape(-1)[start:stop])


def test_more_files_than_may_be_open_are_read(tmp_path: Path) -> None:
    value = torch.arange(50)
    stored = written(tmp_path, value, contiguous((50,)), list(range(1, 50)))
    files = Files(tmp_path)
    assert stored.whole(files).equal(value)
    assert stored.whole(files).equal(value)
    assert len(files._open) == 16


def test_gaps_overlaps_and_missing_ends_are_named() -> None:
    def stored(*extracts: tuple[int, int]) -> Stored:
        return Stored("w", torch.float32, contiguous((6,)), tuple(Extract(*pair, "f") for pair in extracts))

    assert stored((0, 4), (4, 6)).numel == 6
    with pytest.raises(CheckpointError, match=r"of w there are elements 5 … 5 in f, where those from 4 on"):
        stored((0, 4), (5, 6))
    with pytest.raises(CheckpointError, match=r"elements 3 … 5 in f, where those from 4 on"):
        stored((0, 4), (3, 6))
    with pytest.raises(CheckpointError, match="of the 6 elements of w there are only 4"):
        stored((0, 4))


def test_ranks_that_disagree_about_a_tensor_are_found_out() -> None:
    pieces = [
        Written("w", dtype, contiguous((2,)), Extract(place, place + 1, "f"))
        for place, dtype in enumerate((torch.float32, torch.float64))
    ]
    with pytest.raises(CheckpointError, match="ranks have w in several forms"):
        joined(pieces)


def test_what_is_written_down_is_what_is_read_again() -> None:
    stored = Stored("w", torch.bfloat16, ((3, 2), (1, 3)), (Extract(0, 4, "a"), Extract(4, 6, "b")))
    assert from_record("w", as_record(stored)) == stored


def test_a_file_that_is_gone_is_an_error_that_names_it(tmp_path: Path) -> None:
    stored = Stored("w", torch.float32, contiguous((2,)), (Extract(0, 2, "gone.safetensors"),))
    with pytest.raises(CheckpointError, match=r"cannot read w in .*gone.safetensors"):
        stored.whole(Files(tmp_path))
