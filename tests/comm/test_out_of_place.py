"""Calls with `out`: the data stay as they are, and are read where they are."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from hpcpar import partition
from hpcpar.algorithms.registry import ALGORITHMS
from hpcpar.comm import operation, run_loopback, shared
from hpcpar.comm.operation import Message, Plan, PlannedStep
from hpcpar.comm.out_of_place import reading

SIZES = [2, 3, 4, 5]
TIMES = 6
"""As a call is remembered, and then bound to each of the lanes."""


def planned(collective, name, rank, size, count=60):
    algorithm = ALGORITHMS[collective][name]
    chunks = max(1, algorithm.chunks(size, 1, None))
    edges = partition.offsets(partition.counts(count, chunks))
    cut = (("data", edges),)
    if algorithm.work_chunks(size):
        cut = (*cut, ("work", tuple(range(0, count * 4, count // chunks))[: algorithm.work_chunks(size) + 1]))
    return operation.plan(algorithm, rank, size, 0, 1, cut)


def runs_of(plan, space):
    """All runs of a space that the plan reads or writes, by what it does there."""
    found = {"sent": [], "received": [], "own": [], "copied": [], "written": []}
    for step in plan.steps:
        found["sent"] += [run for message in step.sends for run in message.runs]
        found["received"] += [run for message in step.receives for run in message.runs]
        found["own"] += [run for message in step.receives for run in message.own or ()]
        found["copied"] += [source for source, _ in step.copies]
        found["written"] += [target for _, target in step.copies]
    return {what: [run[1:] for run in runs if run[0] == space] for what, runs in found.items()}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["direct", "ring", "one_shot"])
def test_an_allreduce_that_reads_its_input_copies_nothing(name, size):
    for rank in range(size):
        plan = planned("allreduce", name, rank, size)
        read = reading(plan, ("data", 0, 60), ("input", 0, 60))
        assert read is not None
        assert not any(step.copies for step in read.steps)
        found = runs_of(read, "input")
        assert sum(stop - start for start, stop in set(found["own"])) == sum(
            stop - start
            for start, stop in {
                run[1:] for step in plan.steps for m in step.receives for run in m.runs if m.combine
            }
        )
        assert (read.messages, read.sent, read.received) == (plan.messages, plan.sent, plan.received)


@pytest.mark.parametrize("size", SIZES)
def test_an_allgather_that_reads_its_input_copies_its_own_shard_once_and_sends_the_callers(size):
    for rank in range(size):
        start, stop = 60 * rank // size, 60 * (rank + 1) // size
        read = reading(
            planned("allgather", "direct", rank, size), ("data", start, stop), ("input", 0, stop - start)
        )
        assert read is not None
        assert runs_of(read, "input")["sent"] == [(0, stop - start)] * (size - 1)
        assert runs_of(read, "data")["sent"] == []
        assert runs_of(read, "data")["written"] == [(start, stop)]
        assert read.steps[0].copies == ((("input", 0, stop - start), ("data", start, stop)),)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["binomial", "ring", "direct"])
def test_a_reduce_of_data_that_are_kept_copies_nothing_on_any_rank(name, size):
    for rank in range(size):
        plan = planned("reduce", name, rank, size)
        if not plan.received:
            continue
        read = reading(plan, ("data", 0, 60), ("input", 0, 60), fills=False)
        assert read is not None
        assert not any(step.copies for step in read.steps)


def message(runs, *, combine=False):
    return Message(1, tuple(runs), sum(stop - start for _, start, stop in runs), combine)


LOW, HIGH, BOTH = ("data", 0, 5), ("data", 5, 10), ("data", 0, 10)


@pytest.mark.parametrize(
    "steps",
    {
        "nothing to do": (),
        "a message of what came and what did not": (
            PlannedStep((), (), (message([LOW]),)),
            PlannedStep((), (message([BOTH]),), ()),
        ),
        "a sum with what came and what did not": (
            PlannedStep((), (), (message([LOW]),)),
            PlannedStep((), (), (message([BOTH], combine=True),)),
        ),
        "two sums in one step of the same place": (
            PlannedStep((), (), (message([LOW], combine=True), message([BOTH], combine=True))),
        ),
        "copies of its own": (PlannedStep(((LOW, HIGH),), (), ()),),
    }.values(),
)
def test_a_plan_that_mixes_what_came_with_what_did_not_is_left_alone(steps):
    assert reading(Plan(steps, 0, 0, 0), BOTH, ("input", 0, 10)) is None


def test_what_came_is_read_where_it_is():
    steps = (
        PlannedStep((), (message([HIGH]),), (message([LOW], combine=True),)),
        PlannedStep((), (message([LOW]),), (message([LOW], combine=True), message([HIGH]))),
    )
    read = reading(Plan(steps, 0, 0, 0), BOTH, ("input", 100, 110))
    first, second = read.steps
    assert first.sends == (message([("input", 105, 110)]),)
    assert first.receives == (replace(message([LOW], combine=True), own=(("input", 100, 105),)),)
    assert second == steps[1]


@pytest.fixture
def in_pieces(monkeypatch):
    """Let even short arrays be read from private memory, and be summed in several pieces."""
    monkeypatch.setattr(shared, "PRIVATE_FROM_NBYTES", 1000)
    monkeypatch.setattr(shared, "SUMMED_AT_ONCE_NBYTES", 4096)


def numbers(rank, call, count):
    return (np.arange(count) * 7 + 3 * rank + call) % 5


def double(tensor):
    return None if tensor is None else tensor.double()


def calls_with_out(comm, dtype, count):
    """Every call with `out`, by all algorithms: what, found, expected; of the input, too."""
    start, stop = partition.bounds(count, comm.size)[comm.rank]
    data, out = torch.empty(count, dtype=dtype), torch.empty(count, dtype=dtype)
    gathered = torch.empty(count * comm.size, dtype=dtype)
    for call in range(TIMES):
        inputs = [torch.from_numpy(numbers(rank, call, count)).to(dtype) for rank in range(comm.size)]
        total = torch.stack(inputs).sum(0)
        asked = {
            **{
                ("allreduce", name): (lambda a: comm.allreduce(data, out=out, algorithm=a), total)
                for name in ALGORITHMS["allreduce"]
            },
            **{
                ("reduce_scatter", name): (
                    lambda a: comm.reduce_scatter(data, out=out[start:stop], algorithm=a),
                    total[start:stop],
                )
                for name in ALGORITHMS["reduce_scatter"]
            },
            **{
                ("allgather", name): (
                    lambda a: comm.allgather(data, out=gathered, algorithm=a),
                    torch.cat(inputs),
                )
                for name in ALGORITHMS["allgather"]
            },
            **{
                ("reduce", name): (
                    lambda a: comm.reduce(data, out=out, algorithm=a),
                    total if comm.rank == 0 else None,
                )
                for name in ALGORITHMS["reduce"]
            },
        }
        for (collective, name), (make, expected) in asked.items():
            data.copy_(inputs[comm.rank])
            out.fill_(-1)
            gathered.fill_(-1)
            found = make(name)
            same = bool(torch.equal(data, inputs[comm.rank]))
            data.fill_(77)  # others must have read it by now
            yield f"{collective} by {name}, call {call}", double(found), double(expected)
            yield f"input of {collective} by {name}, call {call}", same, True


@pytest.mark.parametrize("count", [5, 30_000])
@pytest.mark.parametrize(("size", "dtype"), [*product([2, 3, 4], [torch.float32]), (3, torch.bfloat16)])
def test_the_input_is_left_as_it_was_and_is_the_callers_again_when_the_call_ends(
    size, dtype, count, exchange, in_pieces, assert_true
):
    count = count // size * size
    found = run_loopback(size, lambda comm: list(calls_with_out(comm, dtype, count)), **exchange)
    assert_true([check for checks in found for check in checks])


@pytest.mark.mpi
@pytest.mark.parametrize("count", [5, 1200, 30_000, 300_000])
def test_the_input_over_mpi_is_left_as_it_was(count, any_world, assert_true):
    count = count // any_world.size * any_world.size
    assert_true(list(calls_with_out(any_world, torch.float32, count)))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_out_may_overlap_the_input(size, exchange):
    """As before: what lies there is summed, or gathered, as it was when the call began."""
    count = 3000

    def work(comm):
        found = []
        memory = np.empty(comm.size * count + 20)
        own = 10 + comm.rank * count
        for shift, call in product((-7, -1, 0, 1, 7), range(2)):
            inputs = [numbers(rank, call, count) for rank in range(comm.size)]
            for name in ALGORITHMS["allreduce"]:
                data, out = memory[10 : 10 + count], memory[10 + shift : 10 + shift + count]
                data[...] = inputs[comm.rank]
                comm.allreduce(data, out=out, algorithm=name)
                found.append(np.array_equal(out, sum(inputs)))
            for name in ALGORITHMS["allgather"]:
                shard, out = memory[own + shift : own + shift + count], memory[10 : 10 + comm.size * count]
                shard[...] = inputs[comm.rank]
                comm.allgather(shard, out=out, algorithm=name)
                found.append(np.array_equal(out, np.concatenate(inputs)))
        return found

    assert all(all(found) for found in run_loopback(size, work, **exchange))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("count", [3000, 30_000])
def test_some_ranks_may_give_out_and_others_not(count, size, exchange, in_pieces):
    """Bits are the same on all ranks, in whichever memory they are formed."""

    def work(comm):
        found = []
        for call in range(TIMES):
            for name in ALGORITHMS["allreduce"]:
                data = np.random.default_rng((call, comm.rank)).standard_normal(count).astype(np.float32)
                out = None if (comm.rank + call) % 2 else np.empty_like(data)
                found.append(comm.allreduce(data, out=out, algorithm=name).tobytes())
        return found

    first, *others = run_loopback(size, work, **exchange)
    assert all(other == first for other in others)
