from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpar.data_parallel.bucket_shards import Piece, Shard, shard_of
from hpcpar.data_parallel.buckets import Bucket, Extent, assign


def drawn() -> Bucket:
    """The picture of the module: w of 6 elements, b of 3, v of 6, and one of padding."""
    return Bucket((2, 1, 0), (0, 6, 9, 15), 4, "float32", padding=1)


def test_two_ranks_cut_the_bucket_as_drawn() -> None:
    assert shard_of(drawn(), 0, 2) == Shard(0, 8, (Piece(2, 0, 6, 0), Piece(1, 0, 2, 6)))
    assert shard_of(drawn(), 1, 2) == Shard(8, 16, (Piece(1, 2, 3, 0), Piece(0, 0, 6, 1)))
    assert [shard_of(drawn(), rank, 2).end for rank in (0, 1)] == [8, 7]


def test_a_bucket_of_whole_matrices_is_cut_between_them() -> None:
    bucket = Bucket((2, 1, 0), (0, 6, 10, 18), 4, "float32", counts=(10, 0, 8))
    assert [shard_of(bucket, rank, 3) for rank in range(3)] == [
        Shard(0, 10, (Piece(2, 0, 6, 0), Piece(1, 0, 4, 6))),
        Shard(10, 10, ()),
        Shard(10, 18, (Piece(0, 0, 8, 0),)),
    ]


def test_a_parameter_may_lie_on_all_ranks_and_a_rank_may_hold_padding_alone() -> None:
    bucket = Bucket((0,), (0, 5), 4, "float32", padding=3)
    shards = [shard_of(bucket, rank, 4) for rank in range(4)]
    assert [[(piece.start, piece.stop) for piece in shard.pieces] for shard in shards] == [
        [(0, 2)],
        [(2, 4)],
        [(4, 5)],
        [],
    ]
    assert [shard.end for shard in shards] == [2, 2, 1, 0]


def test_a_parameter_without_elements_is_in_no_piece() -> None:
    bucket = Bucket((0, 1), (0, 0, 4), 4, "float32")
    assert [shard_of(bucket, rank, 2).pieces for rank in (0, 1)] == [
        (Piece(1, 0, 2, 0),),
        (Piece(1, 2, 4, 0),),
    ]


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 40), max_size=12),
    st.integers(1, 9),
    st.integers(1, 200),
    st.lists(st.sampled_from(["float32", "float64"]), min_size=12, max_size=12),
)
def test_the_ranks_pieces_are_every_element_of_every_parameter_once(
    numels: list[int], size: int, bucket_bytes: int, kinds: list[str]
) -> None:
    extents = [Extent(numel, 4, kind) for numel, kind in zip(numels, kinds, strict=False)]
    buckets = assign(
        extents, bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes, shards=lambda _: size
    )
    owned: list[tuple[int, int]] = []
    for bucket in buckets:
        assert bucket.numel % size == 0
        assert bucket.padding < size
        places: list[int] = []
        for rank in range(size):
            shard = shard_of(bucket, rank, size)
            assert shard.stop - shard.start == bucket.numel // size
            offset = 0
            for piece in shard.pieces:
                assert piece.offset == offset, "pieces lie one after another"
                offset = piece.end
                edge = bucket.edges[bucket.members.index(piece.member)]
                assert shard.start + piece.offset == edge + piece.start, "where the bucket has them"
                owned += [(piece.member, element) for element in range(piece.start, piece.stop)]
                places += range(shard.start + piece.offset, shard.start + piece.end)
        assert places == list(range(bucket.edges[-1]))
    assert sorted(owned) == [(member, e) for member, numel in enumerate(numels) for e in range(numel)]
