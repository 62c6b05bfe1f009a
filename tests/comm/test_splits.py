"""Groups: communicators that their members make, while other ranks do something else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import MismatchError, OperationError, StallError
from hpcpar.transport import loopback

Found = dict[str, Any]


def use(comm: Communicator) -> Found:
    """Where this rank is in a communicator, and what its collectives give."""
    place = comm.world_ranks[comm.rank]
    return {
        "rank": comm.rank,
        "world ranks": comm.world_ranks,
        "sum": comm.allreduce(np.full(5, 10.0**place)).tolist(),
        "long sum": comm.allreduce(np.full(100_000, 10.0**place))[-1],
        "gathered": comm.allgather(np.array([place])).tolist(),
        "objects": comm.allgather_object(place),
    }


def expected_of(ranks: Sequence[int], me: int) -> Found:
    total = sum(10.0**rank for rank in ranks)
    return {
        "rank": list(ranks).index(me),
        "world ranks": tuple(ranks),
        "sum": [total] * 5,
        "long sum": total,
        "gathered": list(ranks),
        "objects": list(ranks),
    }


def orders(size: int) -> list[list[int]]:
    """Groups to make one after the other: in order, reversed, of one rank, and of all but one."""
    everybody = list(range(size))
    return [
        everybody,
        everybody[::-1],
        [size - 1],
        *([r for r in everybody if r != out] for out in everybody),
    ]


def groups_in_turn(comm: Communicator) -> list[tuple[Any, Any]]:
    """Each rank makes and frees those that it is in, without waiting for the ranks that are not."""
    found = []
    for ranks in orders(comm.size):
        if comm.rank in ranks:
            with comm.group(ranks) as part:
                found.append((use(part), expected_of(ranks, comm.rank)))
                assert part.shares_memory == (comm.shares_memory and len(ranks) > 1)
    return found


def all_equal(pairs: Sequence[tuple[Any, Any]]) -> None:
    assert pairs
    for found, expected in pairs:
        assert found == expected


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_group_has_the_ranks_in_the_order_given(size: int, exchange: dict[str, Any]) -> None:
    for pairs in run_loopback(size, groups_in_turn, **exchange):
        all_equal([pair for pair in pairs if pair[1]["world ranks"]])


@pytest.mark.mpi
def test_a_group_over_mpi_has_the_ranks_in_the_order_given(any_world: Communicator) -> None:
    for pairs in any_world.allgather_object(groups_in_turn(any_world)):
        all_equal(pairs)


def while_one_sleeps(comm: Communicator) -> tuple[Any, Any, bool]:
    """The last rank does nothing at all until the others have told it, by a message, that they are done."""
    ranks, last = list(range(comm.size - 1))[::-1], comm.size - 1
    if comm.rank == last:
        time.sleep(0.5)
        comm.recv(np.empty(1), 0)
        return None, None, True
    started_s = time.monotonic()
    with comm.group(ranks, name="busy") as part:
        found = use(part)
    is_early = time.monotonic() - started_s < 60
    if comm.rank == 0:
        comm.send(np.ones(1), last)
    return found, expected_of(ranks, comm.rank), is_early


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_group_is_made_while_a_rank_outside_sleeps(size: int, exchange: dict[str, Any]) -> None:
    for found, expected, is_early in run_loopback(size, while_one_sleeps, **exchange):
        assert (found, is_early) == (expected, True)


@pytest.mark.mpi(min_size=2)
def test_a_group_over_mpi_is_made_while_a_rank_outside_never_comes(any_world: Communicator) -> None:
    """The rank outside waits for a message that the members send after they have used and freed the group."""
    for found, expected, is_early in any_world.allgather_object(while_one_sleeps(any_world)):
        assert (found, is_early) == (expected, True)


def neighbours(comm: Communicator) -> list[tuple[Any, Any]]:
    """Groups of each two neighbours are there at once; rank r makes the one with r - 1 first."""
    pairs = [[low, low + 1] for low in range(comm.size - 1)]
    parts = [comm.group(ranks, tag=number) for number, ranks in enumerate(pairs) if comm.rank in ranks]
    mine = [ranks for ranks in pairs if comm.rank in ranks]
    found = [(use(part), expected_of(ranks, comm.rank)) for part, ranks in zip(parts, mine, strict=True)]
    for part in parts:
        part.free()
    return found


@pytest.mark.mpi(min_size=2)
def test_overlapping_groups_over_mpi_exist_at_once(any_world: Communicator) -> None:
    for pairs in any_world.allgather_object(neighbours(any_world)):
        all_equal(pairs)


def test_overlapping_groups_exist_at_once(exchange: dict[str, Any]) -> None:
    for pairs in run_loopback(4, neighbours, **exchange):
        all_equal(pairs)


def made_in_two_threads(comm: Communicator) -> list[tuple[Any, Any]]:
    """Ranks begin two groups of the same members at once, odd ranks the second first."""
    ranks = list(range(comm.size))
    tags = (1, 2) if comm.rank % 2 == 0 else (2, 1)
    made: dict[int, Communicator] = {}
    began = threading.Event()

    def make_first() -> None:
        began.set()
        made[tags[0]] = comm.group(ranks if tags[0] == 1 else ranks[::-1], tag=tags[0])

    thread = threading.Thread(target=make_first)
    thread.start()
    began.wait()
    time.sleep(0.05)  # so that the first has begun; either order is right
    made[tags[1]] = comm.group(ranks if tags[1] == 1 else ranks[::-1], tag=tags[1])
    thread.join()
    found = [
        (use(made[1]), expected_of(ranks, comm.rank)),
        (use(made[2]), expected_of(ranks[::-1], comm.rank)),
    ]
    made[1].free()
    made[2].free()
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_groups_that_are_begun_in_different_orders_are_told_apart_by_tag(size: int) -> None:
    for pairs in run_loopback(size, made_in_two_threads):
        all_equal(pairs)


@pytest.mark.mpi(min_size=2)
def test_groups_over_mpi_begun_in_different_orders_are_told_apart_by_tag(
    world_of_messages: Communicator,
) -> None:
    from hpcpar.transport.mpi_library import library_facts

    if library_facts()["thread_level"] != "multiple":
        pytest.skip("this MPI takes calls of one thread only")
    for pairs in world_of_messages.allgather_object(made_in_two_threads(world_of_messages)):
        all_equal(pairs)


def test_a_group_of_a_group_has_its_parents_ranks() -> None:
    def work(comm: Communicator) -> Any:
        if comm.rank == 1:
            return None
        outer = comm.group([3, 2, 0])
        if comm.rank == 2:
            return None
        inner = outer.group([2, 0])
        return inner.rank, inner.world_ranks, inner.name, inner.allreduce(np.array([comm.rank])).tolist()

    name = "world.[3, 2, 0].[2, 0]"
    assert run_loopback(4, work) == [(0, (0, 3), name, [3]), None, None, (1, (0, 3), name, [3])]


@pytest.mark.parametrize(
    ("ranks", "tag", "words"),
    [
        ([0, 5], 0, "a member of the group is rank 5, but communicator 'world' has ranks 0 to 1"),
        ([0, 1.0], 0, r"a member of the group is rank 1\.0"),
        ([0, -1], 0, "is rank -1"),
        ([0, 1, 1, 0], 0, r"group\(\[0, 1, 1, 0\]\) was asked for, which has ranks 0, 1 more than once"),
        ([1], 0, r"rank 0 of world asked for group\(\[1\]\), which it is not in"),
        ([], 0, r"asked for group\(\[\]\), which it is not in"),
        ([0], -1, "group by tag=-1 was asked for: give a whole number from 0 on"),
        ([0], "a", "group by tag='a'"),
    ],
)
def test_a_group_that_cannot_be_is_named(ranks: Any, tag: Any, words: str) -> None:
    def work(comm: Communicator) -> None:
        if comm.rank == 0:
            with pytest.raises(OperationError, match=words):
                comm.group(ranks, tag=tag)

    run_loopback(2, work)


def test_a_group_of_what_has_been_freed_is_refused() -> None:
    part = Communicator.alone().split(0, name="part")
    assert part is not None
    part.free()
    with pytest.raises(OperationError, match="'part', which has been freed"):
        part.group([0])


def told(call: Callable[[], Any], kind: type[Exception]) -> str:
    try:
        return f"nothing, but {call()!r}"
    except kind as error:
        return str(error)


def test_members_that_pass_another_order_are_told_so_on_every_rank() -> None:
    def work(comm: Communicator) -> str:
        ranks = [0, 1, 2] if comm.rank else [0, 2, 1]
        return told(lambda: comm.group(ranks), MismatchError)

    found = run_loopback(3, work)
    assert all("passed the ranks in another order" in text for text in found), found
    assert found[0].startswith("rank 0 called group([0, 2, 1], tag=0) of world")


def stall_of_rank_1(size: int, work: Callable[[Communicator], str | None]) -> str:
    """What rank 1 says after two seconds; the others are away from communication until it has said so."""
    has_said = threading.Event()

    def call(transport: loopback.LoopbackTransport) -> str | None:
        comm = Communicator.over(transport, timeout_s=2)
        try:
            found = work(comm)
            if comm.rank != 1:
                has_said.wait(60)
        finally:
            if comm.rank == 1:
                has_said.set()
        return found

    return str(loopback.run(size, call)[1])


def test_a_member_that_does_not_come_is_named_by_its_world_rank() -> None:
    def work(comm: Communicator) -> str | None:
        part = comm.split(comm.rank % 2, name="odd")
        assert part is not None
        if comm.rank == 1:
            return told(lambda: part.group([0, 1]), StallError)
        return None

    found = stall_of_rank_1(4, work)
    assert "group([0, 1], tag=0) of odd, round 1 of 1, for rank 3" in found
    assert "rank 3 does not answer" in found


def mismatched(comm: Communicator) -> tuple[str, str]:
    """Make calls of different lengths in a group: the error, and the group's name."""
    part = comm.group([comm.size - 1, 1])
    is_first = part.rank == 0
    return told(lambda: part.allreduce(np.ones(3 + is_first), algorithm="ring"), MismatchError), part.name


def mismatched_of_4(**options: bool) -> list[tuple[str, str]]:
    """What ranks 1 and 3 of four are told of such calls."""
    found = run_loopback(4, lambda comm: mismatched(comm) if comm.rank in (1, 3) else None, **options)
    return list(filter(None, found))


def test_a_mismatch_inside_a_group_names_world_ranks() -> None:
    for text, name in mismatched_of_4():
        assert name == "world.[3, 1]"
        assert "allreduce(float64[4]" in text
        assert "allreduce(float64[3]" in text
        assert "rank 3 called" in text
        assert "rank 1 called" in text


def test_a_mismatch_in_memory_that_a_group_shares_names_world_ranks() -> None:
    texts = [text for text, _ in mismatched_of_4(shared_memory=True)]
    assert any("rank 3 does something else" in text or "rank 1 does something else" in text for text in texts)
    assert not any("rank 0 " in text for text in texts), texts


def test_a_mismatch_inside_a_group_in_checked_mode_names_world_ranks() -> None:
    for text, _ in mismatched_of_4(check=True):
        assert "rank 3 asked for allreduce(float64[4]" in text
        assert "rank 1 asked for allreduce(float64[3]" in text


def test_a_stall_inside_a_group_names_world_ranks() -> None:
    def work(comm: Communicator) -> str | None:
        if comm.rank not in (1, 3):
            return None
        part = comm.group([3, 1])
        return told(lambda: part.allreduce(np.ones(3)), StallError) if comm.rank == 1 else None

    assert "for rank 3; rank 3 does not answer" in stall_of_rank_1(4, work)


@pytest.mark.mpi
def test_a_communicator_for_which_mpi_has_no_room_says_what_to_free(world: Communicator) -> None:
    """MPICH has room for 2,048; Open MPI for more than anybody makes."""
    from mpi4py import MPI

    taken = []
    try:
        for _ in range(2100):
            taken.append(MPI.COMM_WORLD.Dup())
    except MPI.Exception:
        for make in (lambda: world.group(range(world.size)), lambda: world.split(0)):
            with pytest.raises(OperationError, match=r"(?s)another communicator.*call `free\(\)`"):
                make()
    for comm in taken:
        comm.Free()
    for part in (world.group(range(world.size)), world.split(0)):
        assert part.size == world.size
        part.free()


@pytest.mark.mpi
@pytest.mark.parametrize("tag", [255, 256, 2**32 - 1])
def test_a_group_over_mpi_takes_any_tag(world: Communicator, tag: int) -> None:
    with world.group(range(world.size), tag=tag) as part:
        assert part.allreduce(np.ones(1, dtype=int)).tolist() == [world.size]
