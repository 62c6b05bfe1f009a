"""The key of the cache: the same for calls on the same memory alike, and for no others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcpar.comm.request import is_used_in_place, memory_of


@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
def test_memory_is_its_address_shape_and_type(make):
    array, other = make(6), make(6)
    assert memory_of(array) == memory_of(array[:]) == memory_of(array.reshape(2, 3).reshape(6))
    assert memory_of(array) != memory_of(array.reshape(2, 3)), "ranks compare the shape"
    assert len({memory_of(x) for x in (array, array[1:], array[:5], other)}) == 4
    assert not is_used_in_place(array[::2])


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: setattr(tensor, "data", torch.zeros(6)),
        lambda tensor: setattr(tensor, "data", tensor.data[:4]),
        lambda tensor: setattr(tensor, "data", tensor.data.view(torch.int32)),
        lambda tensor: setattr(tensor, "data", tensor.data.view(2, 3).t()),
        lambda tensor: tensor.resize_(600),
        lambda tensor: tensor.set_(torch.zeros(6)),
    ],
)
def test_a_tensor_that_has_changed_under_its_name_has_other_memory(change):
    tensor = torch.zeros(6)
    before, kept = memory_of(tensor), tensor.data  # kept, so that no other memory comes to the same place
    change(tensor)
    assert memory_of(tensor) != before
    assert kept.numel() == 6


def test_conjugated_and_negated_views_of_the_same_memory_are_told_apart():
    tensor = torch.zeros(2, dtype=torch.complex64)
    assert memory_of(tensor.conj()) != memory_of(tensor)
    assert not is_used_in_place(tensor.conj())
    one = torch.zeros(1, dtype=torch.complex64)
    assert memory_of(one.conj().imag) != memory_of(one.imag)


@pytest.mark.parametrize(
    "array",
    [
        np.ma.masked_array([1.0, 2.0], [False, True]),
        torch.zeros(4).to_sparse(),
        np.broadcast_to(np.zeros(1), (4,)),
        np.empty(0),
        "text",
    ],
)
def test_what_is_not_used_in_place_has_no_memory_to_be_known_by(array):
    assert memory_of(array) is None
