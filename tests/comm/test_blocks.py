"""Blocks cover an array once, scratch is a thread's own, and NumPy keeps quiet."""

from __future__ import annotations

import threading
import warnings

import numpy as np
import pytest
import torch

from hpcpar.comm import blocks
from hpcpar.transport.buffers import bind


@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 35])
def test_blocks_cover_every_element_once_in_order(count):
    covered = [index for start, stop in blocks.spans(count, 10) for index in range(start, stop)]
    assert covered == list(range(count))
    pieces = blocks.cut(np.arange(count), 10)
    assert np.concatenate(pieces).tolist() == covered
    assert all(len(piece) <= 10 for piece in pieces)


def test_scratch_of_one_count_is_the_same_memory_each_time_and_two_blocks_do_not_overlap():
    first, second = blocks.float_blocks(100)
    again, _ = blocks.float_blocks(7)
    first.tensor.fill_(1)
    second.tensor.fill_(2)
    assert first.array.tolist() == [1.0] * 100
    assert again.array.tolist() == [1.0] * 7


def test_many_different_counts_keep_few_views():
    for count in range(1, 500):
        found, _ = blocks.float_blocks(count)
        assert found.array.size == len(found.tensor) == count


def test_each_thread_has_scratch_of_its_own():
    mine, _ = blocks.float_blocks(10)
    mine.array[:] = 1
    other = threading.Thread(target=lambda: blocks.float_blocks(10)[0].array.fill(2))
    other.start()
    other.join()
    assert mine.array.tolist() == [1.0] * 10


def test_an_overflow_is_silent_inside_and_loud_outside():
    big, finite = np.full(3, 3e38, dtype=np.float32), np.full(3, 3e38, dtype=np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        blocks.silent(np.add, big, big, big)()
        blocks.silent(np.multiply, finite, finite, product := np.empty_like(finite))()
        blocks.silent(np.minimum, finite, product, smaller := np.empty_like(finite))()
        with pytest.raises(RuntimeWarning):
            np.multiply(np.float32(3e38), np.float32(10))
    assert np.isinf(big).all()
    assert np.isinf(product).all()
    assert (smaller == finite).all()


def test_the_thread_wide_setting_of_older_numpy_is_silent_too():
    big = np.full(3, 3e38, dtype=np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        blocks._run_in_errstate(np.add, big, big, out=big)
    assert np.isinf(big).all()


@pytest.mark.parametrize("count", [0, 5])
def test_read_only_memory_becomes_a_tensor_without_a_copy_or_a_warning(count):
    array = np.ones(count, dtype=np.float16)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seen = blocks.tensor(bind(array, writable=False).host)
    assert seen.tolist() == [1.0] * count
    assert count == 0 or seen.data_ptr() == array.ctypes.data


def test_a_tensor_stays_what_it_is():
    values = torch.ones(3, dtype=torch.bfloat16)
    assert blocks.tensor(bind(values, writable=True).host).data_ptr() == values.data_ptr()
