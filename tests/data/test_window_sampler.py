from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpar.data import Sampler
from hpcpar.errors import DataError

SAMPLER = Sampler(tokens=10 * 8 + 1, sequence=8, global_batch=4, seed=3)


def test_windows_and_steps_are_counted_as_drawn() -> None:
    assert (SAMPLER.windows, SAMPLER.steps_per_epoch) == (10, 2)
    assert Sampler(10 * 8, 8, 4).windows == 9  # the last window would have no token after it
    assert [SAMPLER.position(step)[0] for step in range(5)] == [0, 0, 1, 1, 2]


@settings(deadline=None)
@given(
    windows=st.integers(1, 60),
    global_batch=st.integers(1, 9),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 3),
)
def test_an_epoch_visits_no_window_twice(windows: int, global_batch: int, seed: int, epoch: int) -> None:
    if windows < global_batch:
        return
    sampler = Sampler(windows * 5 + 1, 5, global_batch, seed)
    first = epoch * sampler.steps_per_epoch
    visited = np.concatenate([sampler.batch(first + step) for step in range(sampler.steps_per_epoch)])
    assert len(set(visited.tolist())) == len(visited) == sampler.steps_per_epoch * global_batch
    assert visited.min() >= 0
    assert visited.max() < windows


@settings(deadline=None)
@given(step=st.integers(0, 100), dp_size=st.integers(1, 7), global_batch=st.integers(1, 12))
def test_the_shards_of_any_number_of_ranks_are_the_same_batch(
    step: int, dp_size: int, global_batch: int
) -> None:
    sampler = Sampler(1000, 8, global_batch, seed=1)
    shards = [sampler.shard(step, rank, dp_size) for rank in range(dp_size)]
    assert np.concatenate(shards).tolist() == sampler.batch(step).tolist()
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_a_step_depends_on_nothing_that_came_before() -> None:
    resumed = Sampler(**SAMPLER.__dict__)
    assert [SAMPLER.batch(step).tolist() for step in range(6)][5] == resumed.batch(5).tolist()


@settings(deadline=None)
@given(
    windows=st.integers(9, 60),
    batches=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    steps=st.integers(0, 20),
    seed=st.integers(0, 5),
)
def test_going_on_with_another_batch_no_window_of_an_epoch_is_visited_twice(
    windows: int, batches: tuple[int, int], steps: int, seed: int
) -> None:
    before, after = (Sampler(windows * 5 + 1, 5, batch, seed) for batch in batches)
    epoch, place = before.position(steps)
    going_on = after.going_on_from(steps, epoch, place)
    visited: dict[int, list[int]] = {}
    for sampler, first, last in ((before, 0, steps), (going_on, steps, steps + 2 * windows)):
        for step in range(first, last):
            visited.setdefault(sampler.position(step)[0], []).extend(sampler.batch(step).tolist())
    assert all(len(set(each)) == len(each) for each in visited.values())
    assert len(visited[epoch]) > windows - batches[1] or not place
    same = before.going_on_from(steps, epoch, place)
    assert all(same.batch(n).tolist() == before.batch(n).tolist() for n in range(steps, steps + windows))


def test_as_drawn_a_smaller_batch_takes_up_what_the_larger_one_would_have_had() -> None:
    order = [*SAMPLER.batch(0), *SAMPLER.batch(1)]
    going_on = Sampler(10 * 8 + 1, 8, 2, seed=3).going_on_from(1, *SAMPLER.position(1))
    assert [*going_on.batch(1), *going_on.batch(2)] == order[4:]
    assert (going_on.position(3)[0], going_on.position(4)) == (0, (1, 0))
    with pytest.raises(DataError, match="there is no step 0: steps count from 1"):
        going_on.batch(0)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    big = Sampler(tokens=100_001, sequence=10, global_batch=100, seed=0)
    other = Sampler(tokens=100_001, sequence=10, global_batch=100, seed=1)
    assert big.batch(0).tolist() != big.batch(big.steps_per_epoch).tolist()
    assert big.batch(0).tolist() != other.batch(0).tolist()


def test_too_little_text_says_how_much_is_needed() -> None:
    with pytest.raises(DataError, match="4 windows of 8 tokens needs 33 tokens, but there are 32"):
        Sampler(tokens=32, sequence=8, global_batch=4)


def test_impossible_steps_ranks_and_sizes_are_named() -> None:
    with pytest.raises(DataError, match="there is no step -1"):
        SAMPLER.batch(-1)
    with pytest.raises(DataError, match="dp_rank=2 is not a rank of a communicator of size 2"):
        SAMPLER.shard(0, 2, 2)
    with pytest.raises(DataError, match="sequence=0 and global_batch=4"):
        Sampler(100, 0, 4)


def test_a_block_that_sequences_do_not_fill_is_refused_with_one_that_they_do() -> None:
    with pytest.raises(
        DataError, match=r"a block of 40 tokens is not cut into sequences of 16; .* 32 or another"
    ):
        Sampler(tokens=1000, sequence=16, global_batch=2, block=40)
    with pytest.raises(DataError, match="needs 129 tokens, but there are 128"):
        Sampler(tokens=128, sequence=16, global_batch=5, block=64)
