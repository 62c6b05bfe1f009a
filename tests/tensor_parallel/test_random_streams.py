"""Streams of random numbers: which ranks draw the same, and that a state brings the same numbers back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import CheckpointError
from hpcpar.tensor_parallel.random_streams import STREAMS, RandomStreams, Stream


def draw(streams: RandomStreams, stream: Stream, count: int = 64) -> Tensor:
    return torch.rand(count, generator=streams.generator(stream))


@pytest.mark.parametrize("size", [2, 4])
def test_the_one_stream_is_equal_on_all_tp_ranks_and_the_other_differs_between_any_two(size: int) -> None:
    def work(comm: Communicator) -> tuple[list[float], list[float]]:
        streams = RandomStreams(7, comm.rank)
        # Drawn in turn by threads of one process: neither stream may be the process's own.
        return draw(streams, "same").tolist(), draw(streams, "different").tolist()

    same, different = zip(*run_loopback(size, work), strict=True)
    assert all(drawn == same[0] for drawn in same)
    assert len({tuple(drawn) for drawn in (*different, same[0])}) == size + 1


def test_replicas_seeds_and_streams_draw_what_nobody_else_does() -> None:
    drawn = {
        tuple(draw(RandomStreams(seed, rank, replica=replica), "different", 4).tolist())
        for seed in range(3)
        for rank in range(3)
        for replica in range(3)
    }
    assert len(drawn) == 27
    shared = {tuple(draw(RandomStreams(0, 0, replica=replica), "same", 4).tolist()) for replica in range(3)}
    assert len(shared) == 3


def test_a_seed_gives_these_numbers_in_every_version() -> None:
    streams = RandomStreams(0, 1, replica=2)
    assert (streams.same.initial_seed(), streams.different.initial_seed()) == (
        6347993257851220592,
        1151199600800172416,
    )


def test_the_process_generator_is_neither_read_nor_moved() -> None:
    before = torch.get_rng_state()
    first = draw(RandomStreams(3, 0), "same")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(draw(RandomStreams(3, 0), "same"), first)


def test_a_state_brings_both_streams_back_and_does_not_move_with_them() -> None:
    streams, others = RandomStreams(1, 0), RandomStreams(2, 5)
    draw(streams, "same", 10)
    state = streams.state_dict()
    assert {name: tensor.dtype for name, tensor in state.items()} == dict.fromkeys(STREAMS, torch.uint8)
    first = [draw(streams, stream) for stream in STREAMS]
    others.load_state_dict(state)
    for back in (streams, others):
        back.load_state_dict(state)
        assert all(torch.equal(draw(back, s), drawn) for s, drawn in zip(STREAMS, first, strict=True))


def test_a_state_of_other_streams_is_refused_with_what_it_has() -> None:
    streams = RandomStreams(1, 0)
    with pytest.raises(CheckpointError, match="has same; it should have same and different"):
        streams.load_state_dict({"same": streams.state_dict()["same"]})
    with pytest.raises(CheckpointError, match="has nothing"):
        streams.load_state_dict({})
