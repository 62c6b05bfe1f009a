"""Dropout on explicit streams: what it does to the mean, who draws the same mask, and what it keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hpcpar import watch_activations
from hpcpar.autograd import recompute
from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import ConfigError, OperationError
from hpcpar.tensor_parallel.dropout import Dropout
from hpcpar.tensor_parallel.random_streams import RandomStreams, Stream


def dropout(probability: float, stream: Stream = "same", *, seed: int = 0, rank: int = 0) -> Dropout:
    return Dropout(probability, RandomStreams(seed, rank), stream)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_as_asked_and_the_mean_stays(probability: float) -> None:
    count = 100_000
    dropped = dropout(probability)(torch.ones(count, dtype=torch.float64))
    # Five standard deviations of a binomial share.
    tolerance = 5 * (probability * (1 - probability) / count) ** 0.5
    assert abs((dropped == 0).double().mean().item() - probability) < tolerance
    assert abs(dropped.mean().item() - 1) < tolerance / (1 - probability)
    kept = dropped[dropped != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - probability)))


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 0, 2), (2, 3, 5)])
def test_any_shape_will_do(shape: tuple[int, ...]) -> None:
    assert dropout(0.5)(torch.ones(shape)).shape == shape


def test_each_call_draws_a_new_mask_and_the_same_seed_the_same_masks() -> None:
    layer, again, ones = dropout(0.5), dropout(0.5), torch.ones(256)
    assert layer.is_active
    first, second = layer(ones), layer(ones)
    assert not torch.equal(first, second)
    assert torch.equal(again(ones), first)
    assert torch.equal(again(ones), second)


@pytest.mark.parametrize(("stream", "masks"), [("same", 1), ("different", 4)])
def test_tp_ranks_drop_the_same_or_not_by_the_stream(stream: Stream, masks: int) -> None:
    def work(comm: Communicator) -> tuple[float, ...]:
        return tuple(dropout(0.5, stream, rank=comm.rank)(torch.ones(256)).tolist())

    assert len(set(run_loopback(4, work))) == masks


@pytest.mark.parametrize("how", ["eval", "zero"])
def test_in_eval_mode_and_at_zero_nothing_is_done_nor_drawn(how: str) -> None:
    layer = dropout(0.5).eval() if how == "eval" else dropout(0.0)
    assert not layer.is_active
    before = layer.random_streams.state_dict()
    tensor = torch.ones(8, requires_grad=True)
    assert layer(tensor) is tensor
    assert all(torch.equal(layer.random_streams.state_dict()[name], state) for name, state in before.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_input_is_left_as_it_is_and_one_byte_for_each_element_is_kept(dtype: torch.dtype) -> None:
    layer = dropout(0.25)
    tensor = torch.ones(1000, dtype=dtype, requires_grad=True)
    with watch_activations(layer) as activations:
        dropped = layer(tensor * 1)
        assert activations.nbytes == 1000
    assert dropped.dtype == dtype
    assert bool((tensor == 1).all())


def test_gradients_are_right_the_first_and_the_second_time() -> None:
    layer = dropout(0.4)
    state = layer.random_streams.state_dict()

    def same_mask(tensor: Tensor) -> Tensor:
        layer.random_streams.load_state_dict(state)
        dropped: Tensor = layer(tensor)
        return dropped

    tensor = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(same_mask, (tensor,))
    assert torch.autograd.gradgradcheck(lambda each: same_mask(each) ** 2, (tensor,))


@pytest.mark.parametrize("way", ["reentrant", "not reentrant", "without streams", "with streams"])
def test_recomputed_it_drops_the_same_again_or_is_refused(way: str) -> None:
    layer, x = dropout(0.5), torch.ones(8, 8, requires_grad=True)
    if way.endswith("reentrant"):
        output = checkpoint(layer, x, use_reentrant=way == "reentrant")
    else:
        output = recompute(layer, x, streams=layer.random_streams if way == "with streams" else None)
    if way == "with streams":
        output.sum().backward()
        assert torch.equal(x.grad, output)
        return
    with pytest.raises(OperationError, match=r"again in backward.*streams=dropout\.random_streams"):
        output.sum().backward()


@pytest.mark.parametrize("probability", [-0.1, 1.0, 1.5, float("nan")])
def test_a_probability_outside_of_0_to_1_is_refused(probability: float) -> None:
    with pytest.raises(ConfigError, match=rf"dropout={probability}: give a probability from 0 to below 1"):
        dropout(probability)


def test_a_stream_that_there_is_not_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="'some'; there are same and different"):
        dropout(0.1, "some")  # type: ignore[arg-type]


@pytest.mark.gpu
def test_on_a_gpu_the_mask_comes_from_a_generator_there() -> None:
    layer = Dropout(0.5, RandomStreams(0, 0, "cuda"), "same")
    before = layer.random_streams.state_dict()
    ones = torch.ones(1000, device="cuda", requires_grad=True)
    dropped = layer(ones)
    layer.random_streams.load_state_dict(before)
    assert torch.equal(layer(ones), dropped)
    dropped.sum().backward()
    assert torch.equal(ones.grad, dropped.detach())
