"""The memory of a node's ranks: who writes where, and when it may be written again."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest

from hpcpar.algorithms.registry import ALGORITHMS
from hpcpar.comm.arena import (
    ALIGNED,
    ARENA_NBYTES,
    BOARD_PLACES,
    BOARDS_NBYTES,
    DIRECT,
    LANES,
    LARGEST_POST_NBYTES,
    LARGEST_STAGE_NBYTES,
    PAIR_WORDS,
    PLACES,
    POST_HEAD_NBYTES,
    PRIVATE,
    SERIAL_SHIFT,
    SLOTS,
    TAIL,
    WORD_NBYTES,
    Arena,
    arena_nbytes,
    least_stage_nbytes,
    post_nbytes,
    stage_nbytes,
)
from hpcpar.comm.shared import regions_for
from hpcpar.transport.shared_memory import create

STAGE = 1024

SHARED_FROM_NBYTES = 8192


@pytest.fixture
def arenas(tmp_path):
    """What each of a number of ranks has of one arena."""

    def make(size, stage=STAGE, **others):
        _, segment = create(arena_nbytes(size, stage), tmp_path)
        return [Arena(segment, rank, range(size), stage, **others) for rank in range(size)]

    return make


def some_memory(nbytes, tmp_path):
    return create(nbytes, tmp_path)[1]


def test_few_ranks_have_stages_that_fit_the_cache_and_more_ranks_share_what_there_is():
    assert stage_nbytes(2) == stage_nbytes(16) == LARGEST_STAGE_NBYTES
    assert LANES * 64 * stage_nbytes(64) <= ARENA_NBYTES


@pytest.mark.parametrize("size", [2, 3, 16, 64, 177, 192, 256, 1024])
def test_a_stage_has_room_for_something_else_to_every_rank(size):
    arena = Arena.__new__(Arena)
    arena.stage = stage_nbytes(size)
    assert arena.stage >= least_stage_nbytes(size)
    for regions in (1, 2, size - 1, size):
        assert arena.slot_nbytes(regions) * regions * SLOTS <= arena.stage
        assert arena.slot_nbytes(regions) % ALIGNED == 0


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 16])
def test_no_algorithm_sends_more_different_things_at_once_than_there_are_ranks(size):
    for algorithms in ALGORITHMS.values():
        for algorithm in algorithms.values():
            for segments in (1, 3, 8) if algorithm.segmented else (1,):
                assert 1 <= regions_for(algorithm, size, 0, segments, (0,) * size) <= size


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_word_and_every_stage_has_one_writer_and_all_are_inside(size, arenas):
    heads, tails, stages = [], [], []
    for arena in arenas(size):
        for lane in arena.lanes:
            heads += [word + offset for word in lane.heads_out for offset in range(1 + PLACES)]
            tails += [word + TAIL for word in lane.heads_in]
            stages.append(lane.slot_place(0, STAGE))
    words = heads + tails
    assert len(set(words)) == len(words)
    assert min(words) >= 0
    assert max(words) * WORD_NBYTES < min(stages)
    assert sorted(stages) == [min(stages) + number * STAGE for number in range(LANES * size)]
    assert max(stages) + STAGE < arena_nbytes(size, STAGE)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_rank_has_places_of_its_own_on_each_board_behind_the_stages(size, arenas):
    posts = []
    for arena in arenas(size):
        for lane in arena.lanes:
            for number in range(BOARD_PLACES):
                word = lane.post_word(number, arena.rank) * WORD_NBYTES
                octets = lane.post(number, arena.rank, 0, arena.post_nbytes)
                assert word % ALIGNED == 0
                assert octets.size == arena.post_nbytes
                posts.append((word, word + POST_HEAD_NBYTES + arena.post_nbytes))
    posts.sort()
    last_stage = max(lane.slot_place(0, STAGE) for arena in arenas(size) for lane in arena.lanes)
    assert posts[0][0] >= last_stage + STAGE
    assert posts[-1][1] <= arena_nbytes(size, STAGE)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(posts))


def test_what_one_rank_posts_is_what_the_others_read(arenas):
    every = arenas(3)
    for writer in every:
        for number in range(BOARD_PLACES):
            writer.lanes[1].post(number, writer.rank, 0, 8)[:] = 10 * number + writer.rank
    for reader, rank, number in product(every, range(3), range(BOARD_PLACES)):
        octets = reader.lanes[1].post(number + BOARD_PLACES, rank, 4, 8)
        assert octets.tolist() == [10 * number + rank] * 4


def test_many_ranks_have_shorter_posts():
    assert post_nbytes(2) == post_nbytes(8) == LARGEST_POST_NBYTES
    assert LANES * BOARD_PLACES * 128 * post_nbytes(128) <= BOARDS_NBYTES
    assert post_nbytes(128) >= 1024


def test_what_one_rank_sends_with_is_what_the_other_receives_with(arenas):
    every = arenas(3)
    for sender in every:
        for receiver in every:
            for out, into in zip(sender.lanes, receiver.lanes, strict=True):
                assert out.heads_out[receiver.rank] == into.heads_in[sender.rank]


def test_heads_and_tails_lie_in_cache_lines_of_their_own():
    assert TAIL * WORD_NBYTES % 64 == PAIR_WORDS * WORD_NBYTES % 64 == 0
    assert TAIL > PLACES


def test_a_place_in_the_arena_is_the_same_bytes_for_all(arenas):
    mine, its = arenas(2)
    place = mine.lanes[2].slot_place(3, 64)
    mine.memory(place, 64)[...] = 7
    assert its.memory(place, 64).tolist() == [7] * 64
    assert its.memory(place - 64, 192).sum() == 7 * 64


def add(arena, segment):
    arena.add(segment, segment.octets)


def test_a_place_in_an_array_is_found_by_its_number(arenas, tmp_path):
    mine, its = arenas(2)
    for arena in (mine, its):
        for _ in range(3):
            add(arena, some_memory(4 * SHARED_FROM_NBYTES, tmp_path))
    array = mine.arrays[2].octets[100 : 100 + SHARED_FROM_NBYTES]
    assert mine.array_number(array) == 2
    place = mine.place_of(array, SHARED_FROM_NBYTES, 10**9)
    assert place == DIRECT | 2 << SERIAL_SHIFT | 100
    its.arrays[2].octets[100 : 100 + 8] = 5
    assert its.memory(place, SHARED_FROM_NBYTES).sum() == 40


def test_an_array_has_to_lie_inside_as_a_whole(arenas, tmp_path):
    arena, _ = arenas(2)
    segment = some_memory(4 * SHARED_FROM_NBYTES, tmp_path)
    apart = segment.octets[: 2 * SHARED_FROM_NBYTES]
    half = type(segment).__new__(type(segment))
    half.octets, half.address = segment.octets[:SHARED_FROM_NBYTES], segment.address
    add(arena, half)
    assert arena.array_number(half.octets) == 1
    assert arena.array_number(apart) is None
    assert arena.array_number(segment.octets[SHARED_FROM_NBYTES:]) is None


def test_small_messages_are_laid_out_even_if_the_others_can_see_them(arenas, tmp_path):
    arena, _ = arenas(2, pids=(1, 2))
    add(arena, some_memory(4 * SHARED_FROM_NBYTES, tmp_path))
    assert arena.place_of(arena.arrays[1].octets[: SHARED_FROM_NBYTES - 1], SHARED_FROM_NBYTES, 10**9) is None


def test_private_memory_is_named_by_its_address_where_it_may_be_read(arenas):
    octets = np.zeros(100, dtype=np.uint8)
    reading, staged = arenas(2, pids=(1, 2))[0], arenas(2)[0]
    assert reading.place_of(octets, 1, 100) == DIRECT | PRIVATE | octets.ctypes.data
    assert reading.place_of(octets, 1, 101) is None
    assert staged.place_of(octets, 1, 100) is None


def test_what_was_dropped_is_not_found_and_its_number_is_not_used_again(arenas, tmp_path):
    arena, _ = arenas(2)
    segments = [some_memory(2 * SHARED_FROM_NBYTES, tmp_path) for _ in range(2)]
    add(arena, segments[0])
    arena.drop(1)
    assert arena.array_number(segments[0].octets) is None
    add(arena, segments[1])
    assert arena.array_number(segments[1].octets) == 2


def test_landing_memory_grows_and_is_used_again(arenas):
    arena, _ = arenas(2)
    small = arena.landing(100)
    assert small.size == 100
    assert np.shares_memory(arena.landing(50), small)
    assert arena.landing(1000).size == 1000


def test_one_operation_at_a_time_is_in_a_lane(arenas):
    lane = arenas(2)[0].lanes[0]
    first, second = object(), object()
    assert [lane.enter(first), lane.enter(second), lane.enter(first)] == [True, False, True]
    lane.leave()
    assert [lane.enter(second), lane.enter(first)] == [True, False]


def test_a_stage_is_divided_anew_only_when_all_has_been_read(arenas):
    arena, _ = arenas(2)
    lane = arena.lanes[0]
    tail = lane.heads_out[1] + TAIL
    lane.hazards[2] = [(tail, 1)]
    assert lane.divide(1)  # as it is
    assert not lane.divide(3)
    assert lane.regions == 1
    arena.words[tail] = 1
    assert lane.divide(3)
    assert (lane.regions, len(lane.hazards)) == (3, 3 * SLOTS)
    assert not any(lane.hazards)


def test_ranks_that_have_not_read_a_piece_are_known_by_the_words_that_it_waits_for(arenas):
    arena = arenas(4)[2]
    lane = arena.lanes[1]
    hazards = [(lane.heads_out[rank] + TAIL, rank) for rank in (0, 1, 3)]
    arena.words[lane.heads_out[1] + TAIL] = 1
    assert lane.behind(hazards) == {3}


def test_memory_of_which_nothing_is_left_is_unused(arenas, tmp_path):
    arena, _ = arenas(2)
    segment = some_memory(4096, tmp_path)
    own = segment.part(0, 64)
    arena.add(segment, own)
    view = own[10:20].view(np.uint16)
    del own
    assert arena.unused() == set()
    del view
    assert arena.unused() == {1}
