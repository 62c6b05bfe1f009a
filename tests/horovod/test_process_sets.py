"""Process sets: how they are made, known, shared and removed."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from hpcpar.horovod.engine import Engine
from hpcpar.horovod.process_sets import ProcessSet


def test_a_set_that_is_not_registered_knows_its_ranks_and_nothing_else():
    one = ProcessSet([4, 0, 2])
    assert one.ranks == [0, 2, 4]
    assert (one.process_set_id, one.mpi_comm) == (None, None)
    assert (one.size(), one.rank(), one.included()) == (None, None, None)
    assert "[0, 2, 4]" in str(one)


@pytest.mark.parametrize("wrong", [[0, "1"], [0.0], [None], ["0"], [[0]], 3, None, "01"], ids=str)
def test_ranks_are_whole_numbers(wrong):
    with pytest.raises(ValueError, match="rank"):
        ProcessSet(wrong)


def test_any_sequence_of_ranks_will_do():
    assert ProcessSet(range(3)).ranks == ProcessSet((2, 1, 0)).ranks == [0, 1, 2]


@pytest.mark.mpi
def test_the_global_set_is_all_ranks(hvd):
    every = hvd.global_process_set
    assert every.process_set_id == 0
    assert every.ranks == list(range(hvd.size()))
    assert (every.size(), every.rank(), every.included()) == (hvd.size(), hvd.rank(), True)
    assert hvd.remove_process_set(every) is False
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=every).item() == hvd.size()


@pytest.mark.mpi
@pytest.mark.usefixtures("needs_two")
def test_a_registered_set_knows_its_place_and_forgets_it_when_it_is_removed(hvd, error_of):
    one = hvd.ProcessSet([hvd.size() - 1])
    same = hvd.add_process_set(one)
    seen = (one.process_set_id, one.ranks, one.size(), one.included(), str(one))
    rank = error_of(one.rank) or one.rank()
    removed = hvd.remove_process_set(one)
    gone = (one.process_set_id, one.size(), one.rank(), one.included())
    again = hvd.remove_process_set(one)
    number, ranks, size, included, text = seen
    is_member = hvd.rank() == hvd.size() - 1
    assert same is one
    assert number is not None
    assert number > 0
    assert (ranks, size, included) == ([hvd.size() - 1], 1, is_member)
    assert f"process_set_id={number}" in text
    assert f"ranks={ranks}" in text
    assert rank == 0 if is_member else type(rank) is ValueError
    assert (removed, again) == (True, False)
    assert gone == (None, None, None, None)


@pytest.mark.mpi
@pytest.mark.usefixtures("needs_two")
def test_a_set_is_made_of_a_list_or_of_a_set_and_may_come_again(hvd):
    numbers = []
    for asked in ([0], hvd.ProcessSet([0]), range(1), (0,)):
        made = hvd.add_process_set(asked)
        numbers.append(made.process_set_id)
        hvd.remove_process_set(made)
    everyones = hvd.allgather_object(numbers)
    assert all(told == numbers for told in everyones), "every rank gives the same numbers"
    assert len(set(numbers)) == len(numbers), "a number is never used again"


@pytest.mark.mpi
@pytest.mark.usefixtures("needs_two")
@pytest.mark.parametrize("who", ["all ranks", "one rank"])
def test_impossible_sets_are_refused_on_every_rank_and_all_goes_on(hvd, error_of, who):
    """Also where only one rank asks for what cannot be."""
    first = hvd.add_process_set([0])
    size = hvd.size()
    wrong = {
        "there already": [0],
        "all ranks, there already": list(range(size)),
        "beyond the last": [0, size],
        "below 0": [-1],
        "none": [],
        "twice": [1, 1],
        "no numbers": ["0"],
    }
    errors = {}
    for what, ranks in wrong.items():
        asked = ranks if who == "all ranks" or hvd.rank() == 0 else [1]
        errors[what] = error_of(lambda asked=asked: hvd.add_process_set(asked))
    hvd.remove_process_set(first)
    after = hvd.allreduce(torch.ones(1), op=hvd.Sum)
    assert {what: type(error) for what, error in errors.items()} == dict.fromkeys(wrong, ValueError)
    assert "exists" in str(errors["there already"])
    assert str(size) in str(errors["beyond the last"])
    assert after.item() == size


@pytest.mark.mpi
@pytest.mark.usefixtures("needs_two")
def test_ranks_that_ask_for_different_sets_are_told_so_on_every_rank(hvd, error_of):
    error = error_of(lambda: hvd.add_process_set([0] if hvd.rank() == 0 else [1]))
    after = hvd.allreduce(torch.ones(1), op=hvd.Sum)
    assert type(error) is ValueError
    assert "[0]" in str(error)
    assert "[1]" in str(error)
    assert after.item() == hvd.size()


@pytest.mark.mpi
@pytest.mark.usefixtures("needs_two")
def test_a_set_may_be_a_communicator_of_mpi4py(hvd):
    from mpi4py import MPI

    part = MPI.COMM_WORLD.Split(hvd.rank() % 2, -hvd.rank())
    own = hvd.add_process_set(part)
    part.Free()
    found = hvd.allreduce(torch.tensor([hvd.rank()]), op=hvd.Sum, process_set=own)
    members, place = own.ranks, own.rank()
    hvd.remove_process_set(own)
    others = [rank for rank in range(hvd.size()) if rank % 2 != hvd.rank() % 2]
    other = next(p for p in hvd_sets(hvd) if p.ranks == others)
    hvd.remove_process_set(other)
    mine = list(range(hvd.rank() % 2, hvd.size(), 2))
    assert members == mine
    assert place == mine.index(hvd.rank())
    assert found.item() == sum(mine)


def hvd_sets(hvd):
    from hpcpar.horovod import basics

    return list(basics.the_context().process_sets.values())


@pytest.mark.mpi
@pytest.mark.usefixtures("needs_two")
def test_sets_may_be_added_and_removed_while_operations_are_under_way(hvd):
    """One rank adds first and waits then; the others the other way round. So it is with removing."""
    found = []
    for turn in range(hvd.size()):
        handle = hvd.allreduce_async(torch.tensor([turn]), op=hvd.Sum, name=f"meanwhile.{turn}")
        if hvd.rank() == turn:
            made = hvd.add_process_set([0])
            found.append(hvd.synchronize(handle).item())
        else:
            found.append(hvd.synchronize(handle).item())
            made = hvd.add_process_set([0])
        handle = hvd.allreduce_async(torch.tensor([turn]), op=hvd.Sum, name=f"meanwhile.{turn}")
        if hvd.rank() != turn:
            hvd.remove_process_set(made)
            found.append(hvd.synchronize(handle).item())
        else:
            found.append(hvd.synchronize(handle).item())
            hvd.remove_process_set(made)
    assert found == [turn * hvd.size() for turn in range(hvd.size()) for _ in range(2)]


@pytest.mark.mpi
@pytest.mark.usefixtures("needs_two")
def test_sets_that_come_and_go_leave_nothing_behind(hvd):
    """MPI has room for about two thousand communicators; a set has two, and memory for fusion."""
    before = engines_alive()
    for turn in range(60):
        made = hvd.add_process_set([turn % hvd.size()])
        if made.included():
            hvd.allreduce(torch.ones(1), process_set=made)
        assert hvd.remove_process_set(made)
    assert len(hvd_sets(hvd)) == 1
    from hpcpar.horovod import basics

    assert len(basics.the_context().engine_group.engines) == 1
    assert engines_alive() <= before


@pytest.mark.mpi
def test_a_set_removed_with_operations_under_way_is_forgotten(hvd):
    """The stall inspector has nothing more to say of it."""
    if hvd.size() < 3:
        pytest.skip("two ranks that are not all")
    before = engines_alive()
    pair = hvd.add_process_set([0, 1])
    if pair.included():
        with pytest.raises(RuntimeError, match="removed"):
            raise_first(hvd, pair)
    else:
        hvd.remove_process_set(pair)
    assert engines_alive() <= before


def raise_first(hvd, pair):
    """Ask once more, remove the set, and wait."""
    handle = hvd.allreduce_async(torch.ones(1), name=f"lost.{hvd.rank()}", process_set=pair)
    hvd.remove_process_set(pair)
    hvd.synchronize(handle)


def engines_alive() -> int:
    gc.collect()
    return sum(type(one) is Engine for one in gc.get_objects())


@pytest.mark.mpi
def test_every_subset_of_the_ranks_may_be_a_set_at_the_same_time(hvd):
    """Each rank works in all of its own, in an order of its own, asynchronously."""
    size, rank = hvd.size(), hvd.rank()
    subsets = [[r for r in range(size) if bits >> r & 1] for bits in range(1, 2**size - 1)]
    sets = [hvd.add_process_set(ranks) for ranks in subsets]
    mine = [one for one in sets if one.included()]
    random.Random(rank).shuffle(mine)
    found = []
    for step in range(3):
        handles = [
            hvd.allreduce_async(torch.tensor([rank + step]), op=hvd.Sum, process_set=one) for one in mine
        ]
        found += [
            (hvd.synchronize(handle).item(), sum(one.ranks) + step * one.size())
            for one, handle in zip(mine, handles, strict=True)
        ]
    for one in sets:
        hvd.remove_process_set(one)
    assert all(result == expected for result, expected in found)
    assert len(found) == 3 * max(2 ** (size - 1) - 1, 0)
