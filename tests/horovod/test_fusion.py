"""The fusion buffer: who lies where, that nobody lies on another, and the arithmetic of factors."""

from __future__ import annotations

import random
from collections import deque
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpar.horovod.fusion import ALIGNED, MOST_LAYOUTS, FusedLayout, FusionBuffer, copy_all, divide, scale

DTYPES = (torch.uint8, torch.bool, torch.int16, torch.bfloat16, torch.float32, torch.int64, torch.complex128)


def buffer_of(nbytes: int) -> FusionBuffer:
    return FusionBuffer(torch.zeros(nbytes, dtype=torch.uint8))


def span(layout: FusedLayout) -> tuple[int, int]:
    return layout.start, layout.start + layout.flat.nbytes


# a [2], b [], c [0], d [2, 2] of float32:
#
#   flat    a a b d d d d
#
def test_tensors_lie_side_by_side_in_the_given_order():
    buffer = buffer_of(1024)
    layout = buffer.take(torch.float32, ((2,), (), (0,), (2, 2)))
    assert layout is not None
    layout.flat.copy_(torch.arange(7.0))
    a, b, c, d = layout.views
    assert (a.tolist(), b.item(), c.tolist(), d.tolist()) == ([0, 1], 2, [], [[3, 4], [5, 6]])


def test_what_comes_alone_lies_where_it_lay_the_last_time():
    buffer = buffer_of(1024)
    first = buffer.take(torch.float32, ((3,), (4,)))
    assert first is not None
    buffer.give_back(first)
    second = buffer.take(torch.float32, ((3,), (4,)))
    assert second is first
    assert first.start == 0


def test_two_at_once_of_the_same_shapes_lie_apart():
    buffer = buffer_of(1024)
    first, second = (buffer.take(torch.float32, ((5,),)) for _ in range(2))
    assert first is not None
    assert second is not None
    first.flat.fill_(1)
    second.flat.fill_(2)
    assert first.flat.tolist() == [1] * 5
    assert second.start == ALIGNED


def test_there_is_no_room_until_others_give_it_back():
    buffer = buffer_of(256)
    whole = buffer.take(torch.uint8, ((256,),))
    assert whole is not None
    assert buffer.take(torch.uint8, ((1,),)) is None
    buffer.give_back(whole)
    assert buffer.take(torch.uint8, ((1,),)) is not None


def test_what_has_no_elements_disturbs_no_one():
    """A layout without elements never takes the next one's space."""
    buffer = buffer_of(512)
    first = buffer.take(torch.float32, ((8,),))
    nothing = buffer.take(torch.int32, ((0,),))
    second = buffer.take(torch.float64, ((8,),))
    assert first is not None
    assert nothing is not None
    assert second is not None
    buffer.give_back(first)
    buffer.give_back(nothing)
    second.flat.fill_(2)
    third = buffer.take(torch.int64, ((30,),))
    if third is not None:
        third.flat.fill_(3)
    assert second.flat.tolist() == [2] * 8
    buffer.give_back(second)


def test_layouts_that_are_kept_are_limited():
    buffer = buffer_of(1 << 16)
    for count in range(3 * MOST_LAYOUTS):
        layout = buffer.take(torch.uint8, ((count,),))
        assert layout is not None
        buffer.give_back(layout)
    assert len(buffer._layouts) <= MOST_LAYOUTS


@settings(deadline=None)
@given(seed=st.integers(0, 2**32))
def test_nobody_ever_lies_on_another(seed):
    """Taken and given back in order, as the engine does; all stay aligned and inside."""
    chance = random.Random(seed)
    buffer = buffer_of(4096)
    taken: deque[tuple[FusedLayout, float]] = deque()
    for number in range(60):
        if taken and chance.random() < 0.45:
            layout, mark = taken.popleft()
            assert all(value == mark for value in layout.flat.tolist())
            buffer.give_back(layout)
        shapes = tuple((chance.choice((0, 0, 1, 3, 40)),) for _ in range(chance.randrange(1, 4)))
        layout_ = buffer.take(chance.choice((torch.uint8, torch.int16, torch.float64)), shapes)
        if layout_ is not None:
            layout_.flat.fill_(number)
            taken.append((layout_, number))
        spans = sorted(span(layout) for layout, _ in taken if layout.flat.numel())
        assert all(start % ALIGNED == 0 and stop <= buffer.nbytes for start, stop in spans)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
    while taken:
        buffer.give_back(taken.popleft()[0])
    assert buffer.take(torch.uint8, ((4096,),)) is not None, "all has been given back"


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_finds_room(dtype):
    buffer = buffer_of(1024)
    buffer.take(torch.uint8, ((3,),))
    layout = buffer.take(dtype, ((3,), (2, 2)))
    assert layout is not None
    assert layout.flat.dtype == dtype
    assert [view.shape for view in layout.views] == [(3,), (2, 2)]


# (values, factor, expected)
SCALED = [
    ([7, -7, 1, 0], 0.5, [3, -3, 0, 0]),
    ([10, -10, 3, -3], 0.3, [3, -3, 0, 0]),
    ([3, 5, -5, 1], 1.5, [4, 7, -7, 1]),
    ([1, 2, 3, -4], -1.0, [-1, -2, -3, 4]),
    ([1, 2, 3, -4], 0.0, [0, 0, 0, 0]),
]


@pytest.mark.parametrize(("values", "factor", "expected"), SCALED)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_integers_are_scaled_in_float64_and_truncated_towards_zero(dtype, values, factor, expected):
    tensor = torch.tensor(values, dtype=dtype)
    scale(tensor, factor)
    assert tensor.tolist() == expected


def test_large_integers_are_left_alone_by_a_factor_of_one():
    tensor = torch.tensor([2**62 + 1])
    scale(tensor, 1.0)
    assert tensor.item() == 2**62 + 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_are_scaled_in_float32(dtype):
    tensor = torch.arange(1, 200, dtype=torch.float32).to(dtype)
    expected = (tensor.float() * 0.1).to(dtype)
    scale(tensor, 0.1)
    assert torch.equal(tensor, expected)


def test_division_is_exact_for_floats_and_truncated_for_integers():
    floats, whole = torch.arange(1.0, 400.0), torch.tensor([-7, -6, -1, 0, 1, 6, 7])
    divide(floats, 3)
    divide(whole, 3)
    assert torch.equal(floats, torch.arange(1.0, 400.0) / 3)
    assert whole.tolist() == [-2, -2, 0, 0, 0, 2, 2]


def test_tensors_in_any_order_of_memory_are_copied():
    values = torch.arange(120.0).reshape(2, 3, 4, 5)
    sources = [values.to(memory_format=torch.channels_last), values.transpose(0, 3), values[..., ::2]]
    targets = [torch.empty(source.shape) for source in sources]
    copy_all(targets, sources)
    copy_all(targets[:1], sources[:1])
    assert all(torch.equal(a, b) for a, b in zip(targets, sources, strict=True))
