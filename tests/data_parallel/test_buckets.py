from __future__ import annotations

import pytest
from hypothesis import given, settings
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


def test_the_default_first_bucket_is_small() -> None:
    quarter = MiB // 16
    buckets = assign(floats(*[quarter] * 200))
    assert buckets[0].nbytes == 1 * MiB
    assert buckets[1].nbytes == 25 * MiB


def test_matrices_have_buckets_of_their_own_and_lie_by_their_owners() -> None:
    #   0: a vector; 1, 2 and 3: matrices that cost 9, 4 and 4, of which rank 0 owns 1, and rank 1 the others
    extents = [
        Extent(3, 4, "float32"),
        *(Extent(n, 4, "float32", cost=c) for n, c in [(6, 9), (4, 4), (4, 4)]),
    ]
    vectors, matrices = sorted(assign(extents, shards=lambda _: 2), key=lambda bucket: len(bucket.members))
    assert (vectors.members, vectors.padding, vectors.counts) == ((0,), 1, None)
    assert (matrices.members, matrices.edges, matrices.padding) == ((1, 3, 2), (0, 6, 10, 14), 0)
    assert matrices.counts == (6, 8)
    assert [matrices.shard_range(rank, 2) for rank in (0, 1)] == [(0, 6), (6, 14)]
    assert [vectors.shard_range(rank, 2) for rank in (0, 1)] == [(0, 2), (2, 4)]


def test_matrices_are_as_others_where_nothing_is_sharded() -> None:
    extents = [Extent(3, 4, "float32"), Extent(6, 4, "float32", cost=9)]
    (bucket,) = assign(extents)
    assert (bucket.members, bucket.counts) == ((1, 0), None)


def test_owners_are_balanced_over_all_buckets_among_the_ranks_with_copies() -> None:
    matrices = [Extent(4, 4, "float32", cost=2) for _ in range(6)]
    experts = [Extent(4, 4, "float32", "edp", 2) for _ in range(3)]
    buckets = assign(
        [*matrices, *experts],
        bucket_bytes=16,
        first_bucket_bytes=16,
        shards=lambda replicas: 3 if replicas is None else 1,
    )
    owned = [
        sum(bucket.counts[rank] for bucket in buckets if bucket.counts and bucket.replicas is None)
        for rank in range(3)
    ]
    assert owned == [8, 8, 8]
    assert {bucket.counts for bucket in buckets if bucket.replicas} == {(4,)}


def test_a_bucket_of_no_bytes_is_refused() -> None:
    with pytest.raises(OperationError, match="bucket_bytes=0: a bucket holds at least 1 byte"):
        assign(floats(1), bucket_bytes=0)


def test_a_group_has_a_bucket_of_its_own_whatever_its_size() -> None:
    #   parameters    0   1   2   3   4   5        of 8 bytes each, 8 at most in a bucket
    #   groups        a       a       b   b
    #   buckets       3   2   3   1   0   0
    buckets = assign(floats(*[2] * 6), bucket_bytes=8, first_bucket_bytes=8, groups=[[2, 0], [4, 5]])
    assert [bucket.members for bucket in buckets] == [(5, 4), (3,), (1,), (2, 0)]
    assert [bucket.edges for bucket in buckets] == [(0, 2, 4), (0, 2), (0, 2), (0, 2, 4)]


def test_a_group_of_two_kinds_has_a_bucket_of_each() -> None:
    half, single = Extent(2, 2, "float16"), Extent(2, 4, "float32")
    buckets = assign([half, single, half, single, single], groups=[[0, 1, 2, 3]])
    assert [bucket.members for bucket in buckets] == [(4,), (3, 1), (2, 0)]


extents = st.lists(
    st.builds(Extent, st.integers(0, 50), st.just(4), st.sampled_from(["a", "b"])), max_size=30
)


@settings(deadline=None)
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


@settings(deadline=None)
@given(extents, st.integers(1, 300), st.lists(st.integers(0, 4), max_size=30))
def test_what_is_grouped_shares_a_bucket_with_its_kind_and_with_nothing_else(
    found: list[Extent], limit: int, chosen: list[int]
) -> None:
    # 0: in no group
    number_of = dict(zip(range(len(found)), chosen, strict=False))
    groups = [[i for i, number in number_of.items() if number == wanted] for wanted in range(1, 5)]
    buckets = assign(found, bucket_bytes=limit, first_bucket_bytes=limit, groups=groups)
    of_bucket = {member: bucket for bucket in buckets for member in bucket.members}
    assert sorted(member for bucket in buckets for member in bucket.members) == list(range(len(found)))
    for group in groups:
        for kind in {found[member].kind for member in group}:
            together = [member for member in group if found[member].kind == kind]
            assert {of_bucket[member].members for member in together} == {tuple(reversed(together))}
    alone = [index for index in range(len(found)) if not number_of.get(index)]
    others = assign([found[index] for index in alone], bucket_bytes=limit, first_bucket_bytes=limit)
    assert [tuple(alone[member] for member in bucket.members) for bucket in others] == [
        bucket.members for bucket in buckets if set(bucket.members) <= set(alone)
    ]
