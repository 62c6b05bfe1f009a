"""Checked mode: ranks that ask for different things are told who asked for what."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import MismatchError, PeerFailedError
from tests.grid import checkered


def what_each_rank_is_told(size, call):
    """The message of the MismatchError on every rank; None where there was none."""

    def work(comm):
        try:
            call(comm)
        except MismatchError as error:
            return str(error)
        return None

    return run_loopback(size, work, check=True)


MISTAKES = {
    "shape": lambda c: c.allreduce(np.ones(100 if c.rank else 99)),
    "shape of equal length": lambda c: c.allreduce(np.ones((2, 3) if c.rank else (3, 2))),
    "dtype": lambda c: c.allreduce(np.ones(4, np.float32 if c.rank else np.int32)),
    "dtype of equal bytes": lambda c: c.allreduce(np.ones(4) if c.rank else np.ones(8, np.float32)),
    "op": lambda c: c.allreduce(np.ones(4), "sum" if c.rank else "max"),
    "root": lambda c: c.broadcast(np.ones(4), root=min(c.rank, 1)),
    "collective": lambda c: c.allreduce(np.ones(4)) if c.rank else c.broadcast(np.ones(4)),
    "algorithm": lambda c: c.allreduce(np.ones(4), algorithm="ring" if c.rank else None),
    "algorithm that there is not": lambda c: c.allreduce(np.ones(4), algorithm="rings" if c.rank else None),
    "counts": lambda c: c.allgather(np.ones(c.rank), counts=None),
    "receive counts": lambda c: c.alltoall(
        np.ones(c.size), send_counts=[1] * c.size, receive_counts=[1 + (c.rank == 0)] * c.size
    ),
    "receive counts that are wrong alike": lambda c: c.alltoall(
        np.ones(c.size), send_counts=[1] * c.size, receive_counts=[2] * c.size
    ),
    "receive counts of no type": lambda c: c.alltoall(
        np.ones(c.size), send_counts=[1] * c.size, receive_counts=None if c.rank else 1
    ),
    "counts of no type": lambda c: c.reduce_scatter(np.ones(c.size), counts=None if c.rank else 1),
    "object call": lambda c: c.broadcast_object(1) if c.rank else c.allgather_object(1),
    "bad argument": lambda c: c.allreduce(np.ones(4) if c.rank else "text"),
    "argument of no type": lambda c: c.broadcast(np.ones(4), root=0 if c.rank else "0"),
    "object that cannot be sent": lambda c: c.broadcast_object(lambda: 1),
    "objects that cannot be sent": lambda c: c.allgather_object(1 if c.rank else lambda: 1),
}


@pytest.mark.parametrize(("mistake", "size"), checkered(MISTAKES, [2, 3, 4]))
def test_a_mismatch_is_told_on_every_rank(mistake, size):
    told = what_each_rank_is_told(size, MISTAKES[mistake])
    assert all(text is not None and "rank 0 asked for" in text for text in told), told
    assert len(set(told)) == 1


def test_the_message_names_the_ranks_and_what_they_asked_for():
    text = what_each_rank_is_told(3, lambda c: c.allreduce(torch.ones(2, 3 + (c.rank == 1))))[0]
    assert "ranks 0, 2 asked for allreduce(float32[2, 3], op=sum)" in text
    assert "rank 1 asked for allreduce(float32[2, 4], op=sum)" in text


def test_the_message_repeats_calls_without_data_as_they_were_made():
    told = what_each_rank_is_told(2, lambda c: c.broadcast_object(1) if c.rank else c.barrier())
    assert "rank 0 asked for barrier(); rank 1 asked for broadcast_object(root=0)." in told[0]


def test_a_matching_call_after_a_mismatch_works():
    def work(comm):
        with pytest.raises(MismatchError):
            comm.allreduce(np.ones(1 + comm.rank))
        return comm.allreduce(np.ones(2)).tolist()

    assert run_loopback(3, work, check=True) == [[3.0, 3.0]] * 3


@pytest.mark.mpi(min_size=2)
def test_different_shapes_on_two_ranks_raise_on_every_rank_over_mpi(checked_world):
    try:
        checked_world.allreduce(np.ones(100 if checked_world.rank else 99))
        told = ""
    except MismatchError as error:
        told = str(error)
    for text in checked_world.allgather_object(told):
        assert "rank 0 asked for allreduce(float64[99], op=sum)" in text
        assert "asked for allreduce(float64[100], op=sum)" in text


def test_when_one_rank_fails_all_fail_and_know_why():
    def work(comm):
        own = FileNotFoundError("no /data/train.txt") if comm.rank == 2 else None
        try:
            comm.agree(own, "opening the data")
        except PeerFailedError as error:
            return str(error), error.__cause__ is own
        return None

    told = run_loopback(3, work)
    assert all(
        "opening the data" in text and "rank 2: FileNotFoundError: no /data" in text for text, _ in told
    )
    assert all(caused for _, caused in told)


def test_when_nobody_fails_nothing_happens():
    assert run_loopback(3, lambda comm: comm.agree(None, "opening the data")) == [None] * 3


def test_agreements_are_counted_apart_from_the_work():
    def work(comm):
        comm.allreduce(np.ones(8), algorithm="ring")
        return comm.traffic.nbytes_sent(), comm.traffic.nbytes_sent("agreement")

    assert run_loopback(2, work, check=True) == [(64, 32), (64, 32)]


def test_a_block_that_fails_on_one_rank_fails_on_all():
    def work(comm):
        try:
            with comm.together("opening the safe"):
                if comm.rank == 1:
                    raise FileNotFoundError("no key")
        except PeerFailedError as error:
            return str(error), repr(error.__cause__)
        return "nothing", "raised"

    told = run_loopback(3, work)
    assert all("opening the safe" in text and "rank 1: FileNotFoundError: no key" in text for text, _ in told)
    assert [cause for _, cause in told] == ["None", "FileNotFoundError('no key')", "None"]


def test_a_block_that_succeeds_everywhere_raises_nowhere():
    def work(comm):
        with comm.together("counting"):
            value = comm.rank + 1
        return value

    assert run_loopback(2, work) == [1, 2]


def test_a_rank_alone_gets_its_own_error():
    with pytest.raises(ValueError, match="wrong"), Communicator.alone().together("trying"):
        raise ValueError("wrong")
