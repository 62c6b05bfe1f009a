from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcpar.data_parallel.buckets import Extent, assign
from hpcpar.errors import OperationError
from hpcpar.units import MiB


def floats(*numels: int) -> list[Extent]:
    return [Extent(numel, 4, "float32") for numel in numels]


def test_buckets_fill_from_the_last_parameter_back() -> None:
    #   parameters   0    1   2   3   4       bytes 40 8 8 8 8
    #   buckets     [2 ] [   1    ] [0]       first 8, others 24
    buckets = assign(floats(10, 2, 2, 2, 2), bucket_bytes=24, first_bucket_bytes=8)
    assert [bucket.members for bucket in buckets] == [(4,), (3, 2, 1), (0,)]
    assert [bucket.edges for bucket in buckets] == [(0, 2), (0, 2, 4, 6), (0, 10)]
    assert [bucket.nbytes for bucket in buckets] == [8, 24, 40]


def test_every_kind_has_buckets_of_its_own_numbered_by_when_they_are_complete() -> None:
    half = Extent(2, 2, "float16")
    single = Extent(2, 4, "float32")
    buckets = assign([single, half, single, half])
    assert [bucket.members for bucket in buckets] == [(3, 1), (2, 0)]
    assert [bucket.kind for bucket in buckets] == ["float16", "float32"]
    buckets = assign([half, single, single])
    assert [bucket.members for bucket in buckets] == [(2, 1), (0,)]


def test_no_parameters_need_no_buckets() -> None:
    assert assign([]) == ()


def test_a_parameter_larger_than_the_limit_is_a_bucket_by_itself() -> None:
    assert [b.members for b in assign(floats(1, 100, 1), bucket_bytes=8, first_bucket_bytes=8)] == [
        (2,),
        (1,),
        (0,),
    ]


def test_the_default_first_bucket_is_small() -> None:
    quarter = MiB // 16
    buckets = assign(floats(*[quarter] * 200))
    assert buckets[0].nbytes == 1 * MiB
    assert buckets[1].nbytes == 25 * MiB


def test_a_bucket_of_no_bytes_is_refused() -> None:
    with pytest.raises(OperationError, match="bucket_bytes=0: a bucket holds at least 1 byte"):
        assign(floats(1), bucket_bytes=0)


extents = st.lists(
    st.builds(Extent, st.integers(0, 50), st.just(4), st.sampled_from(["a", "b"])), max_size=30
)


@given(extents, st.integers(1, 300), st.integers(1, 100))
def test_every_parameter_is_in_one_bucket_and_limits_hold(
    found: list[Extent], limit: int, first: int
) -> None:
    buckets = assign(found, bucket_bytes=limit, first_bucket_bytes=first)
    assert sorted(member for bucket in buckets for member in bucket.members) == list(range(len(found)))
    seen: set[object] = set()
    for bucket in sorted(buckets, key=lambda bucket: -bucket.members[0]):
        sizes = [found[member].numel for member in bucket.members]
        assert bucket.numel == sum(sizes)
        assert {found[member].kind for member in bucket.members} == {bucket.kind}
        assert list(bucket.members) == sorted(bucket.members, reverse=True)
        assert sum(size > 0 for size in sizes) <= 1 or bucket.nbytes <= (
            limit if bucket.kind in seen else first
        )
        seen.add(bucket.kind)
    assert [min(bucket.members) for bucket in buckets] == sorted(
        (min(bucket.members) for bucket in buckets), reverse=True
    )
