"""Prepared collectives give what ordinary ones give, and notice when they have to look again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcpar.comm import Trace, run_loopback
from hpcpar.comm.collectives import PREPARED
from hpcpar.errors import MismatchError, OperationError

TIMES = 7
"""The first calls are remembered; the lanes of shared memory are each bound at their own first one."""


def in_turn(comm, prepared):
    """What each collective gives, prepared or not, again and again on other numbers."""
    size, rank, count = comm.size, comm.rank, 4
    whole, other, out = torch.zeros(count * size), torch.zeros(count * size), torch.zeros(count * size)
    shard, array = torch.zeros(count), np.zeros(3)
    asked = {
        "sum": ("allreduce", (whole,), {"out": out}),
        "average": ("allreduce", (whole, "average"), {"out": out}),
        "in place": ("allreduce", (array, "max"), {}),
        "piece": ("reduce_scatter", (whole,), {"out": shard}),
        "own view": ("reduce_scatter", (other,), {}),
        "gathered": ("allgather", (whole[:count],), {"out": out}),
        "new": ("allgather", (whole[:count],), {}),
        "from the last": ("broadcast", (shard, size - 1), {}),
        "to the last": ("reduce", (whole, "average", size - 1), {"out": out}),
        "exchanged": ("alltoall", (whole,), {"out": out}),
        "barrier": ("barrier", (), {}),
    }
    calls = {
        what: comm.prepare(name, *arguments, **options)
        if prepared
        else lambda name=name, arguments=arguments, options=options: getattr(comm, name)(
            *arguments, **options
        )
        for what, (name, arguments, options) in asked.items()
    }
    for number in range(TIMES):
        for what, call in calls.items():
            for each in (whole, other, shard, torch.from_numpy(array)):
                each.copy_(torch.arange(each.numel()) + 10 * rank + 100 * number)
            result = call()
            yield f"{what} {number}", None if result is None else torch.as_tensor(result).tolist()


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_they_give_what_ordinary_calls_give_also_to_ranks_that_make_these(size, shared_memory):
    def work(comm):
        ordinary = dict(in_turn(comm, prepared=False))
        return ordinary, dict(in_turn(comm, prepared=True)), dict(in_turn(comm, prepared=comm.rank == 0))

    for ordinary, prepared, mixed in run_loopback(size, work, shared_memory=shared_memory):
        assert prepared == ordinary
        assert mixed == ordinary


@pytest.mark.mpi
def test_they_give_what_ordinary_calls_give_over_mpi(any_world):
    comm = any_world.unchecked("prepared")
    assert dict(in_turn(comm, prepared=True)) == dict(in_turn(comm, prepared=False))


def on_two(work, **options):
    return run_loopback(2, work, shared_memory=True, **options)


def test_arguments_are_looked_at_no_more_once_the_call_is_remembered(monkeypatch):
    def work(comm):
        x = torch.ones(3)
        call = comm.prepare("allreduce", x)
        for _ in range(TIMES):
            call()
        monkeypatch.setattr(comm, "_remembered", None)
        return call() is x, x.tolist()

    assert on_two(work) == [(True, [2.0 ** (TIMES + 1)] * 3)] * 2


def test_a_tensor_that_gets_other_memory_is_found_there():
    def work(comm):
        x = torch.ones(3)
        call = comm.prepare("allreduce", x)
        for _ in range(TIMES):
            call()
        x.data = torch.full((3,), 5.0)
        return call().tolist()

    assert on_two(work) == [[10.0] * 3] * 2


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("turn", ["conj", "t"])
def test_a_tensor_that_gets_another_view_of_its_memory_is_read_through_that(turn, prepared):
    def work(comm):
        x = torch.tensor([[1 + 2j, 3 - 4j], [5j, 6 + 7j]]) * (comm.rank + 1)
        out = torch.zeros_like(x)
        call = comm.prepare("allreduce", x, out=out) if prepared else lambda: comm.allreduce(x, out=out)
        for _ in range(TIMES):
            call()
        x.data = getattr(x.data, turn)()
        return torch.equal(call(), 3 * x / (comm.rank + 1))

    assert on_two(work) == [True, True]


def test_memory_that_is_shared_no_more_is_not_used_as_such():
    def work(comm):
        x = comm.allocate_shared(20_000, torch.float64)
        call = comm.prepare("allreduce", x)
        for _ in range(TIMES):
            x.fill_(1.0)
            call()
        comm.free_shared(x)
        x.fill_(3.0)
        return call().unique().tolist()

    assert on_two(work) == [[6.0]] * 2


def test_a_trace_shows_them():
    def work(comm):
        call = comm.prepare("allreduce", torch.ones(3))
        for _ in range(TIMES):
            call()
        comm.trace = Trace()
        call()
        return len(comm.trace.events)

    assert on_two(work) == [1, 1]


def test_ranks_still_agree_on_each_call_in_checked_mode():
    def work(comm):
        call = comm.prepare("allreduce", torch.ones(3 + comm.rank))
        with pytest.raises(MismatchError, match=r"float32\[4\]"):
            call()

    on_two(work, check=True)


def test_what_cannot_be_prepared_is_refused():
    def work(comm):
        with pytest.raises(OperationError, match=f"'gather' cannot be prepared; give one of {PREPARED[0]}, "):
            comm.prepare("gather", torch.ones(3))

    run_loopback(1, work)
