"""Splits, nodes, names, and a communicator of one."""

from __future__ import annotations

import copy
import gc
import time

import numpy as np
import pytest

from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import OperationError


def test_a_split_orders_its_ranks_by_key_and_then_by_rank():
    def work(comm):
        half = comm.split(comm.rank % 2, key=-comm.rank, name="half")
        return half.rank, half.size, half.world_ranks, half.allgather(np.array([comm.rank])).tolist()

    assert run_loopback(5, work) == [
        (2, 3, (4, 2, 0), [4, 2, 0]),
        (1, 2, (3, 1), [3, 1]),
        (1, 3, (4, 2, 0), [4, 2, 0]),
        (0, 2, (3, 1), [3, 1]),
        (0, 3, (4, 2, 0), [4, 2, 0]),
    ]


@pytest.mark.mpi
def test_a_split_over_mpi_is_the_same_as_over_the_loopback(any_world):
    def work(comm):
        with comm.split(comm.rank % 2, key=-comm.rank) as half, half.split(0) as quarter:
            return half.rank, half.world_ranks, quarter.allreduce(np.array([comm.rank])).tolist()

    found = any_world.allgather_object(work(any_world))
    assert found == run_loopback(any_world.size, work)


def test_a_rank_without_a_color_is_in_no_new_communicator():
    def work(comm):
        some = comm.split(None if comm.rank == 1 else 0)
        return some and some.world_ranks

    assert run_loopback(3, work) == [(0, 2), None, (0, 2)]


@pytest.mark.parametrize("makes", ["split", "group"])
def test_what_was_begun_before_goes_on_on_ranks_that_wait_in_a_split_or_a_group(makes):
    def work(comm):
        total = np.ones(3000)
        handle = comm.start_allreduce(total, algorithm="ring")
        if comm.rank:
            handle.wait()
        if makes == "split":
            comm.split(0)
        elif comm.rank < 2:
            comm.group([0, 1])
        handle.wait()
        return total.tolist() == [comm.size] * 3000

    assert run_loopback(3, work) == [True] * 3


@pytest.mark.parametrize(("color", "key"), [(-1, 0), (0.5, 0), (2**40, 0), (0, 2**31), ("a", 0)])
def test_what_mpi_cannot_split_by_is_named(color, key):
    with pytest.raises(OperationError, match="give a whole number from"):
        Communicator.alone().split(color, key)


def test_nodes_are_numbered_as_they_first_appear():
    def work(comm):
        upper = comm.split(comm.rank // 2)
        return comm.nodes, upper.nodes, comm.split_by_node().world_ranks

    found = run_loopback(4, work, nodes=(7, 3, 3, 7))
    assert found[0] == ((0, 1, 1, 0), (0, 1), (0, 3))
    assert found[3] == ((0, 1, 1, 0), (0, 1), (0, 3))
    assert found[1][2] == (1, 2)


def test_communicators_of_one_name_have_accounts_of_their_own():
    def work(comm):
        first, second = comm.split(0, name="dp"), comm.split(0, name="dp")
        second.allreduce(np.ones(4))
        return list(comm.traffics()), first.traffic.nbytes_sent(), second.traffic.nbytes_sent()

    names, first, second = run_loopback(2, work)[0]
    assert names == ["world", "dp", "dp#2"]
    assert (first, second) == (0, 32)


def test_alone_does_nothing_correctly():
    comm = Communicator.alone()
    values = np.arange(4.0)
    assert comm.allreduce(values) is values
    assert comm.allgather(values).tolist() == comm.reduce_scatter(values).tolist() == [0, 1, 2, 3]
    assert comm.broadcast_object("x") == "x"
    assert comm.split(3).size == 1
    comm.barrier()
    assert comm.traffic.nbytes_sent() == 0
    assert values.tolist() == [0, 1, 2, 3]


def calls_after_free(comm: Communicator) -> list[str]:
    """What each kind of call says on a communicator that has been freed."""
    x, out = np.ones(4), np.ones(4 * comm.size)
    part = comm.split(0, name="part")
    assert part is not None
    view = part.unchecked("view")
    for _ in range(4):
        part.allgather(x, out=out)
        part.allreduce(x)
    part.free()
    said = []
    for call in (
        lambda: part.allgather(x, out=out),
        lambda: part.allreduce(x),
        lambda: view.allreduce(x),
        lambda: part.broadcast_object(1),
        lambda: part.split(0),
        part.barrier,
        lambda: part.start_send(x, 0),
        lambda: part.start_recv(x, 0),
    ):
        with pytest.raises(OperationError) as told:
            call()
        said.append(str(told.value))
    comm.barrier()
    return said


@pytest.mark.parametrize("size", [1, 3])
def test_a_call_on_what_has_been_freed_is_named(size: int) -> None:
    for said in run_loopback(size, calls_after_free):
        assert all("on communicator 'part', which has been freed" in text for text in said)
        assert said[1].startswith("allreduce was asked for")
        assert said[-2].startswith("send to rank 0 was asked for")


@pytest.mark.mpi
def test_a_call_on_what_has_been_freed_is_named_over_mpi(any_world: Communicator) -> None:
    assert all("has been freed" in text for text in calls_after_free(any_world))


def test_what_a_rank_has_under_way_when_it_ends_lives_until_all_have_ended() -> None:
    gone: list[bool] = []

    class Told(np.ndarray):
        def __del__(self) -> None:
            gone.append(True)

    def work(comm: Communicator) -> list[bool]:
        out = np.zeros(2).view(Told)
        for _ in range(4):  # often enough to be remembered, so without references of its own
            comm.allgather(out[comm.rank : comm.rank + 1], out=out)
        gone.clear()
        if comm.rank == 0:
            comm.start_allgather(out[:1], out=out)
            return []
        time.sleep(0.3)  # the other has ended
        gc.collect()
        seen = list(gone)
        comm.allgather(out[1:], out=out)
        return seen

    assert run_loopback(2, work) == [[], []]


def test_what_is_lent_is_lent_again_when_its_borrower_is_gone_on_all_ranks() -> None:
    def body(comm: Communicator) -> list[bool]:
        first = comm.lend("gradients", "of the first borrower")
        lent = first.comm.name
        second = comm.lend("gradients")
        apart = second.comm.name != lent
        if comm.rank == 1:
            held = first
        del first
        third = comm.lend("gradients")  # rank 1 has the first still
        held = None
        fourth = comm.lend("gradients")
        counted = comm.traffic.nbytes_sent("allreduce")
        fourth.comm.allreduce(np.ones(4))
        return [
            apart,
            third.comm.name != lent,
            fourth.comm.name == lent,
            comm.traffic.nbytes_sent("allreduce") > counted,
            held is None,
        ]

    assert run_loopback(2, body) == [[True] * 5] * 2


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_borrower_left_in_the_middle_of_a_call_is_not_lent_again(depth: int) -> None:
    def body(comm: Communicator) -> tuple[bool, int]:
        loan = comm.lend("gradients")
        left = loan.comm
        called = left if depth == 1 else left.lend("gradients").comm
        if comm.rank == 0:
            called.start_allreduce(np.ones(4))
        del loan
        is_another = comm.lend("gradients").comm.name != left.name
        return is_another, len(comm._runtime.progress.under_way)

    assert run_loopback(2, body) == [(True, 0)] * 2


def test_a_model_that_has_one_is_not_copied_and_what_to_do_instead_is_said() -> None:
    model = {"layer": [Communicator.alone()]}
    with pytest.raises(OperationError, match=r"communicator 'world' cannot be copied.* state_dict\(\)"):
        copy.deepcopy(model)
