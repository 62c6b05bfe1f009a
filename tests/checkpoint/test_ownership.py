from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from hpcpar.checkpoint.ownership import RankCoordinates, WritePlan
from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import CheckpointError, PeerFailedError
from hpcpar.tensor_parallel.split import Heads, Split, place, split_evenly, split_sections


def parameter(split: Split | None, comm: Communicator) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(1))
    if split is not None:
        place(made, split, comm)
    return made


def who_writes(coordinates: list[RankCoordinates], split: Split | None, *, sharded: bool) -> list[int]:
    """The ranks that write a parameter."""

    def body(comm: Communicator) -> bool:
        return WritePlan(coordinates, comm).writes(parameter(split, comm), sharded=sharded)

    return [rank for rank, writes in enumerate(run_loopback(len(coordinates), body)) if writes]


def grid(tp: int, dp: int) -> list[RankCoordinates]:
    """Coordinates of tp x dp ranks, tp innermost."""
    return [RankCoordinates(t, tp, d, dp, "tp", "dp") for d in range(dp) for t in range(tp)]


def test_of_two_by_two_ranks_those_write_that_the_drawing_shows() -> None:
    sharded = grid(2, 2)
    split, shared = split_evenly(4, 2), split_sections((Heads(1, 2),), 2)
    assert who_writes(sharded, split, sharded=True) == [0, 1, 2, 3]
    assert who_writes(sharded, split, sharded=False) == [0, 1]
    for replica in (shared, None):
        assert who_writes(sharded, replica, sharded=True) == [0, 2]
        assert who_writes(sharded, replica, sharded=False) == [0]


def test_replicas_that_nothing_is_sharded_over_are_told_apart_by_their_rank() -> None:
    plain = [RankCoordinates(t, 2, tp="tp") for t in (0, 1, 1, 0, 0, 1)]
    assert who_writes(plain, split_evenly(4, 2), sharded=False) == [0, 1]
    assert who_writes(plain, None, sharded=False) == [0]
    swapped = [RankCoordinates(t, 2, tp="tp") for t in (1, 1, 0, 0)]
    assert who_writes(swapped, None, sharded=False) == [2]


def test_each_of_shared_heads_is_written_by_the_first_that_has_it() -> None:
    kv = split_sections((Heads(2, 3),), 4)
    assert who_writes(grid(4, 1), kv, sharded=True) == [0, 2]


def test_a_parameter_over_one_rank_only_is_a_replica() -> None:
    assert who_writes(grid(2, 1), split_evenly(4, 1), sharded=False) == [0]


@pytest.mark.parametrize(
    ("coordinates", "message"),
    [
        (grid(2, 2)[:2], "sharded over the 2 ranks of 'dp' and split over the 2 ranks of 'tp' .* all 4"),
        (grid(2, 2)[::2], "was to be saved by the 2 of 'world'"),
        ([*grid(1, 2), *grid(1, 2)], "sharded over the 2 ranks of 'dp'"),
        ([replace(each, dp="") for each in grid(2, 1)[:1] * 2], "what is split over the 2 ranks of 'tp'"),
    ],
)
def test_ranks_of_which_some_are_missing_or_too_many_are_refused(
    coordinates: list[RankCoordinates], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        run_loopback(len(coordinates), lambda comm: WritePlan(coordinates, comm))


def test_a_model_that_is_split_over_two_communicators_is_refused_and_both_are_named() -> None:
    def body(comm: Communicator) -> None:
        first, second = comm.split(comm.rank // 2, name="tp"), comm.split(comm.rank % 2, name="ep")
        assert first is not None
        assert second is not None
        model = nn.Module()
        model.a = parameter(split_evenly(4, 2), first)
        model.b = parameter(split_evenly(4, 2), second)
        with comm.together("looking"):
            RankCoordinates.of(model, None)

    with pytest.raises(PeerFailedError, match="a is split over 'tp' and b over 'ep'"):
        run_loopback(4, body)
