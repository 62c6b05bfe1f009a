"""Stages are placed as drawn, each exactly once."""

from __future__ import annotations

from itertools import product

from hpcpar.pipeline_schedules.stage_placement import loop, v_shape


def test_a_loop_goes_round_and_a_v_goes_there_and_back() -> None:
    assert loop(3, 2).stages == ((0, 3), (1, 4), (2, 5))
    assert v_shape(3).stages == ((0, 5), (1, 4), (2, 3))
    assert loop(3, 2).rank_of_stage == {0: 0, 1: 1, 2: 2, 3: 0, 4: 1, 5: 2}
    assert v_shape(2).rank_of_stage == {0: 0, 1: 1, 2: 1, 3: 0}


def test_every_stage_is_on_one_rank_and_every_rank_has_equally_many() -> None:
    for ranks, per_rank in product(range(1, 6), range(1, 5)):
        for placement in (loop(ranks, per_rank), v_shape(ranks)):
            assert placement.ranks == ranks
            everything = sorted(stage for stages in placement.stages for stage in stages)
            assert everything == list(range(ranks * placement.per_rank))
            assert {len(stages) for stages in placement.stages} == {placement.per_rank}
    assert loop(4, 3).per_rank == 3
    assert v_shape(4).per_rank == 2
