"""Ranks that make different calls: a MismatchError on every rank, with defaults as shipped, at every size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hpcpar.comm import Communicator, run_loopback
from hpcpar.comm.shm_segment import SLOTS
from hpcpar.errors import MismatchError
from hpcpar.units import KiB, MiB
from tests.grid import pairwise

USUAL_NBYTES = [64, 256 * KiB, 4 * MiB]

Call = Callable[[Communicator, int, bool], Any]
"""Of a communicator and a number of elements; True: make the call that the other ranks do not make."""


def ones(count: int, dtype: str = "float32") -> np.ndarray:
    return np.ones(count, dtype)


CALLS: dict[str, Call] = {
    "one element more": lambda comm, n, other: comm.allreduce(ones(n + other)),
    "one element more, gathered": lambda comm, n, other: comm.allgather(ones(n + other)),
    "one element more, to a root": lambda comm, n, other: comm.reduce(ones(n + other)),
    "type": lambda comm, n, other: comm.allreduce(ones(n, "int32" if other else "float32")),
    "operation": lambda comm, n, other: comm.allreduce(ones(n), "max" if other else "sum"),
    "root": lambda comm, n, other: comm.broadcast(ones(n), root=int(other)),
    "algorithm": lambda comm, n, other: comm.allreduce(ones(n), algorithm="ring" if other else "direct"),
    "name": lambda comm, n, other: comm.allreduce(ones(n), name="second" if other else "first"),
    "collective": lambda comm, n, other: comm.reduce_scatter(ones(n)) if other else comm.allreduce(ones(n)),
}


def told(comm: Communicator, call: Call, count: int, who: int) -> str:
    """Make the call, and then others: a rank that waits for nobody hears of it in one of those."""
    try:
        call(comm, count, comm.rank == who)
        for _ in range(SLOTS + 1):
            comm.barrier()
    except MismatchError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(("difference", "size", "nbytes"), pairwise(CALLS, [2, 3], USUAL_NBYTES))
def test_a_difference_is_told_to_every_rank_that_shares_memory(difference, size, nbytes):
    found = run_loopback(
        size, lambda comm: told(comm, CALLS[difference], nbytes // 4, size - 1), shared_memory=True
    )
    assert all("something else in the same call" in text for text in found), found
    assert all("HPCPAR_CHECK=1 tells what each rank asks for" in text for text in found), found


@pytest.mark.parametrize("difference", ["operation", "root", "one element more, to a root", "name"])
def test_a_difference_between_nodes_is_told_to_every_rank_and_names_both_calls(difference):
    found = run_loopback(3, lambda comm: told(comm, CALLS[difference], 100, 1))
    assert all("rank 1 called" in text or "but rank 1 called" in text for text in found), found
    assert all("rank 0 called" in text or "rank 2 called" in text for text in found), found


def test_ranks_of_nodes_that_went_on_after_a_difference_are_right():
    def body(comm: Communicator) -> tuple[str, float]:
        found = told(comm, CALLS["operation"], 100, 1)
        with comm.split(0, comm.rank) as again:
            return found, float(again.allreduce(np.ones(3))[0])

    for text, total in run_loopback(2, body):
        assert "rank 1 called allreduce(float32[100], op=max)" in text
        assert total == 2.0


@pytest.mark.mpi
@pytest.mark.parametrize("nbytes", USUAL_NBYTES)
def test_one_element_more_over_mpi_is_told_to_every_rank(nbytes, any_world):
    with any_world.split(0, any_world.rank) as comm:
        found = any_world.allgather_object(told(comm, CALLS["one element more"], nbytes // 4, 1))
    assert comm.size == 1 or "nothing" not in found


@pytest.mark.parametrize("shared_memory", [True, False])
def test_of_calls_under_way_each_that_differs_is_told_and_the_others_are_right(shared_memory):
    def work(comm: Communicator) -> list[str]:
        handles = [comm.start_allreduce(ones(40 + (number % 2) * comm.rank)) for number in range(4)]
        found = []
        for handle in handles:
            try:
                found.append(str(handle.wait()[0]))
            except MismatchError:
                found.append("mismatch")
        return found

    found = run_loopback(2, work, shared_memory=shared_memory, timeout_s=30)
    assert found == [["2.0", "mismatch", "2.0", "mismatch"]] * 2


def of_another(comm: Communicator, n: int, other: bool) -> Any:
    """Expect of rank 0 one element more than that sends."""
    sent, expected = [n] * comm.size, [n + other, *[n] * (comm.size - 1)]
    return comm.alltoall(ones(n * comm.size), send_counts=sent, receive_counts=expected, algorithm="pairwise")


def of_itself(comm: Communicator, n: int, other: bool) -> Any:
    """Expect of itself one element more than it sends itself."""
    sent, expected = [n] * comm.size, [*[n] * (comm.size - 1), n + other]
    return comm.alltoall(ones(n * comm.size), send_counts=sent, receive_counts=expected)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("count", [3, 100_000])
@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize(
    ("call", "words"),
    [(of_another, "send_counts and receive_counts must fit"), (of_itself, "sends itself")],
    ids=["of another", "of itself"],
)
def test_counts_of_an_alltoall_that_do_not_fit_are_told_to_every_rank(
    size, count, shared_memory, call, words
):
    found = run_loopback(
        size, lambda comm: told(comm, call, count, comm.size - 1), shared_memory=shared_memory
    )
    assert all("must fit" in text or "something else" in text for text in found), found
    assert any(words in text for text in found)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("count", [3, 100_000])
def test_counts_of_an_alltoall_that_do_not_fit_over_mpi_are_told_to_every_rank(count, any_world):
    comm = any_world.split(0, any_world.rank)
    found = any_world.allgather_object(told(comm, of_another, count, comm.size - 1))
    comm.abandon()
    assert "nothing" not in found


INNER: dict[str, Call] = {
    "split": lambda comm, n, other: comm.split(0) if other else comm.barrier(),
    "share_memory": lambda comm, n, other: comm.share_memory() if other else comm.barrier(),
    "agree": lambda comm, n, other: comm.agree(None, "this") if other else comm.allgather_object(None),
    "allocate_shared": lambda comm, n, other: (
        comm.allocate_shared(n, "int8") if other else comm.allgather_object(1)
    ),
    "gather_object": lambda comm, n, other: (
        comm.gather_object(1, comm.size - 1) if other else comm.allgather_object(1)
    ),
}


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("difference", INNER)
def test_what_hpcpar_calls_itself_does_not_meet_a_call_of_the_program(difference, shared_memory):
    found = run_loopback(
        2, lambda comm: told(comm, INNER[difference], 3, 1), shared_memory=shared_memory, timeout_s=20
    )
    assert "nothing" not in found


def test_memory_in_common_is_of_one_shape_and_type():
    def work(comm: Communicator) -> list[str]:
        asks = [(3 + comm.rank, "float32"), ((3, 2), np.int8 if comm.rank else "int16")]
        return [told(comm, lambda comm, n, other, ask=ask: comm.allocate_common(*ask), 0, 0) for ask in asks]

    for texts in run_loopback(2, work, shared_memory=True):
        assert all(f"allocate_common(({length},), float32)" in texts[0] for length in (3, 4))
        assert all(f"allocate_common((3, 2), {dtype})" in texts[1] for dtype in ("int8", "int16"))
