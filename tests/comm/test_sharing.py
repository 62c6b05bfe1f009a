"""Opening memory that ranks share: all or none, with one warning; and nothing stays behind."""

from __future__ import annotations

import errno
import gc
import logging
import os
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from hpcpar.comm import Communicator, run_loopback, sharing
from hpcpar.comm.shm_segment import SLOTS
from hpcpar.errors import BufferTypeError, OperationError, PeerFailedError
from hpcpar.transport import peer_memory, shared_memory
from hpcpar.transport.shared_memory import PREFIX

OPTIONS = {"shared_memory": True}


@pytest.fixture(autouse=True)
def _not_warned_yet(monkeypatch):
    monkeypatch.setattr(sharing, "_warned", False)


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Where the memory is made, instead of /dev/shm, where others make theirs."""
    monkeypatch.setattr(shared_memory, "DIRECTORY", tmp_path)
    return tmp_path


@pytest.fixture
def no_collection():
    """What only cyclic references keep stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("allocate", [Communicator.allocate_shared, Communicator.allocate_common])
def test_a_shape_is_whole_numbers_from_0_on(allocate):
    def work(comm):
        told = []
        for shape in (-3, (2, -1), 2.5):
            with pytest.raises(PeerFailedError, match="give whole numbers, 0 or more"):
                allocate(comm, shape, "float32")
            told.append(shape)
        return told, allocate(comm, np.int64(3), "float32").shape, allocate(comm, (2, 0), "float32").shape

    assert run_loopback(2, work, **OPTIONS) == [([-3, (2, -1), 2.5], (3,), (2, 0))] * 2


def mappings(directory):
    """How many of this process's mappings were made there."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(f"{directory}/{PREFIX}" in line for line in lines)


def sums(comm):
    """Some calls, and whether they were right."""
    total = sum(range(1, comm.size + 1))
    tensor, right = torch.empty(3000), []
    for _ in range(2 * SLOTS):
        tensor.fill_(comm.rank + 1)
        right.append(set(comm.allreduce(tensor).tolist()) == {total})
        right.append(comm.allgather(np.array([comm.rank])).tolist() == list(range(comm.size)))
    return all(right)


# Whether memory is shared.


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_of_one_node_share_memory_and_so_do_all_that_are_split_from_them(size):
    def work(comm):
        part = comm.split(0, key=-comm.rank)
        return comm._calls.is_all_shared, part._calls.is_all_shared, sums(comm), sums(part)

    shares = size > 1
    assert run_loopback(size, work, **OPTIONS) == [(shares, shares, True, True)] * size


def test_ranks_on_several_nodes_share_memory_in_part_and_those_of_one_node_in_all():
    def work(comm):
        node = comm.split_by_node()
        shared = comm.shares_memory, comm._calls.is_all_shared, node._calls.is_all_shared
        return *shared, sums(comm), sums(node)

    assert run_loopback(4, work, nodes=(0, 1, 0, 1), **OPTIONS) == [(True, False, True, True, True)] * 4


def test_nobody_shares_memory_who_was_not_asked_to(directory):
    def work(comm):
        return comm._calls.segment, comm.split(0)._calls.segment

    assert run_loopback(2, work) == [(None, None)] * 2


def test_a_communicator_says_whether_it_shares_memory():
    assert run_loopback(2, lambda comm: comm.share_memory()) == [True, True]
    assert run_loopback(2, lambda comm: comm.share_memory(), nodes=(0, 1)) == [False, False]
    assert not Communicator.alone().share_memory()


def test_calls_that_were_remembered_before_are_right_after():
    def work(comm):
        tensor, right = torch.zeros(10), []
        for call in range(4 * SLOTS):
            if call == 2 * SLOTS:
                comm.share_memory()
            tensor.fill_(call)
            right.append(comm.allreduce(tensor)[3].item() == 2 * call)
        return all(right) and comm._calls.is_all_shared

    assert run_loopback(2, work) == [True, True]


# Where it is not to be had.


def no_room(monkeypatch, directory):
    def full(descriptor, offset, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    return f"of shared memory in {directory} are not to be had: No space left"


def no_place(monkeypatch, directory):
    monkeypatch.setattr(shared_memory, "DIRECTORY", directory / "nowhere")
    return "nowhere cannot be written to"


def other_containers(monkeypatch, directory):
    def gone(path, own):
        return shared_memory_attach(path + "-of-another-container", own)

    shared_memory_attach = shared_memory.attach
    monkeypatch.setattr(shared_memory, "attach", gone)
    return "containers that have each a"


HINDRANCES = [no_room, no_place, other_containers]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("hinder", HINDRANCES)
def test_where_memory_cannot_be_shared_all_ranks_exchange_by_messages_after_one_warning(
    hinder, size, directory, monkeypatch, caplog
):
    words = hinder(monkeypatch, directory)

    def work(comm):
        array = comm.allocate_shared(5, "int32")
        array += comm.rank
        comm.allreduce(array)
        comm.free_shared(array)
        part = comm.split(0)
        return (
            comm._calls.segment,
            part._calls.segment,
            comm.share_memory(),
            sums(comm),
            sums(part),
            array.tolist(),
        )

    with caplog.at_level(logging.WARNING, logger="hpcpar"):
        found = run_loopback(size, work, **OPTIONS)
    assert found == [(None, None, False, True, True, [sum(range(size))] * 5)] * size
    (record,) = caplog.records
    assert words in record.message
    assert "exchange by MPI" in record.message
    assert "HPCPAR_SHARED_MEMORY=0 asks for that without a warning" in record.message
    assert os.listdir(directory) == []


def test_one_rank_that_cannot_share_is_enough(directory, monkeypatch, caplog):
    real = shared_memory.hindrance
    asked = []

    def one_of_them():
        asked.append(1)
        return "the second one to be asked does not want to" if len(asked) == 2 else real()

    monkeypatch.setattr(shared_memory, "hindrance", one_of_them)
    with caplog.at_level(logging.WARNING, logger="hpcpar"):
        assert (
            run_loopback(3, lambda comm: (comm._calls.segment, sums(comm)), **OPTIONS) == [(None, True)] * 3
        )
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "does not want to" in caplog.text
    assert os.listdir(directory) == []


def test_arrays_that_there_is_no_room_for_are_ordinary_ones(directory, monkeypatch, caplog):
    def work(comm):
        comm.barrier()
        if comm.rank == 0:
            no_room(monkeypatch, directory)
        array = comm.allocate_shared(40_000, "float64")
        for _ in range(2 * SLOTS):
            array[:] = comm.rank + 1
            comm.allreduce(array)
        numbers = list(comm._calls.segment.arrays)
        comm.free_shared(array)
        return set(array.tolist()), numbers, comm._calls.is_all_shared

    with caplog.at_level(logging.WARNING, logger="hpcpar"):
        assert run_loopback(2, work, **OPTIONS) == [({3.0}, [], True)] * 2
    assert len(caplog.records) == 1


def test_processes_that_may_not_read_each_other_share_memory_all_the_same(monkeypatch):
    monkeypatch.setattr(peer_memory, "can_read", lambda *of_peer: False)

    def work(comm):
        array = np.zeros(100_000)
        for _ in range(2 * SLOTS):
            array[:] = comm.rank + 1
            comm.broadcast(array, root=1)
        return comm._calls.is_all_shared, comm._calls.segment.pids, set(array.tolist())

    assert run_loopback(2, work, **OPTIONS) == [(True, (), {2.0})] * 2


# Arrays.


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        (7, "float32", ((7,), np.dtype("float32"))),
        ((2, 3), np.int16, ((2, 3), np.dtype("int16"))),
        ([2, 3], torch.bfloat16, ((2, 3), torch.bfloat16)),
        ((), torch.float64, ((), torch.float64)),
        ((0, 4), "complex64", ((0, 4), np.dtype("complex64"))),
    ],
)
@pytest.mark.parametrize("shares", [True, False])
def test_a_shared_array_has_the_shape_and_type_that_was_asked_for_and_is_zero(shape, dtype, expected, shares):
    def work(comm):
        array = comm.allocate_shared(shape, dtype)
        return (tuple(array.shape), array.dtype), bool((array != 0).any())

    assert run_loopback(2, work, shared_memory=shares) == [(expected, False)] * 2


def test_ranks_may_ask_for_arrays_of_different_sizes_which_do_not_overlap():
    def work(comm):
        array = comm.allocate_shared(1 + 37 * comm.rank, "uint8")
        array[...] = comm.rank + 1
        comm.barrier()
        whole = comm._calls.segment.arrays[1].octets
        found = array.tolist(), np.bincount(whole, minlength=4)[1:].tolist()
        comm.barrier()
        return found

    for rank, (array, counted) in enumerate(run_loopback(3, work, **OPTIONS)):
        assert array == [rank + 1] * (1 + 37 * rank)
        assert counted == [1, 38, 75]


def test_the_others_see_what_a_rank_writes_to_its_shared_array():
    def work(comm):
        array = comm.allocate_shared(16, "int64")
        array[:] = 5 + comm.rank
        comm.barrier()
        found = set(comm._calls.segment.arrays[1].octets.view("int64").tolist()) - {0}  # whole pages
        comm.barrier()
        return found

    assert run_loopback(2, work, **OPTIONS) == [{5, 6}] * 2


def test_the_memory_of_freed_arrays_goes_with_the_last_reference_to_them(directory):
    def work(comm):
        comm.barrier()
        before = mappings(directory)
        comm.barrier()
        kept = []
        for dtype in ("float64", torch.float64) * 3:
            array = comm.allocate_shared(40_000, dtype)
            for _ in range(2 * SLOTS):
                array[:] = comm.rank
                comm.allreduce(array)
            kept.append(array[:2] + 0)
            comm.free_shared(array)
            del array
        comm.barrier()
        after = mappings(directory)
        comm.barrier()
        return after - before, [x.tolist() for x in kept], os.listdir(directory)

    assert run_loopback(2, work, **OPTIONS) == [(0, [[1.0, 1.0]] * 6, [])] * 2


def test_new_arrays_in_the_place_of_freed_ones_are_right():
    def work(comm):
        addresses, right = [], []
        for call in range(12):
            make = (comm.allocate_shared, lambda count, dtype: np.zeros(count, dtype))[call % 4 == 3]
            array = make(300_000, "float64")
            addresses.append(array.ctypes.data)
            for again in range(SLOTS + 2):
                array[:] = call + again + comm.rank
                comm.allreduce(array)
                right.append(array[0] == array[-1] == 2 * (call + again) + 1)
            if call % 4 < 3:
                comm.free_shared(array)
            del array
        return all(right), len(set(addresses)) < len(addresses)

    assert run_loopback(2, work, **OPTIONS) == [(True, True)] * 2


def test_an_array_that_was_freed_but_is_still_held_is_an_ordinary_one():
    def work(comm):
        array, right = comm.allocate_shared(40_000, "float64"), []
        for call in range(4 * SLOTS):
            if call == 2 * SLOTS:
                comm.free_shared(array)
            array[:] = comm.rank + call
            comm.allreduce(array)
            right.append(array[0] == array[-1] == 2 * call + 1)
        return all(right), comm._calls.segment.arrays

    assert run_loopback(2, work, **OPTIONS) == [(True, {})] * 2


def test_arrays_of_different_allocations_are_not_freed_and_every_rank_is_told():
    def work(comm):
        first, second = (comm.allocate_shared(100, "float64") for _ in range(2))
        with pytest.raises(OperationError, match=r"different allocations: number \[1, 2\]") as caught:
            comm.free_shared(second if comm.rank else first)
        numbers = list(comm._calls.segment.arrays)
        with pytest.raises(OperationError, match="different allocations"):
            comm.free_shared(np.zeros(100) if comm.rank else first)
        comm.free_shared(second)
        return caught.type, numbers, list(comm._calls.segment.arrays), sums(comm)

    assert run_loopback(2, work, **OPTIONS) == [(OperationError, [1, 2], [1], True)] * 2


def test_a_rank_whose_array_has_no_elements_frees_it_with_the_others():
    def work(comm):
        array = comm.allocate_shared(1000 * comm.rank, "float64")
        comm.free_shared(array)
        return comm._calls.segment.arrays

    assert run_loopback(3, work, **OPTIONS) == [{}] * 3


def test_part_of_a_shared_array_stands_for_the_whole_when_it_is_freed():
    def work(comm):
        array = comm.allocate_shared(1000, torch.float32)
        comm.free_shared(array[100:200])
        return comm._calls.segment.arrays

    assert run_loopback(2, work, **OPTIONS) == [{}] * 2


def test_a_type_that_cannot_be_communicated_is_refused():
    with pytest.raises(BufferTypeError, match="elements of type object"):
        Communicator.alone().allocate_shared(3, object)


def test_free_lets_go_of_all_that_was_shared(directory, no_collection):
    def work(comm):
        comm.barrier()
        before = mappings(directory)
        comm.barrier()
        with comm.split(0) as part:
            array = part.allocate_shared(40_000, torch.float64)
            array += 1
            for _ in range(2 * SLOTS):
                part.broadcast(array)
        del array, part
        comm.barrier()
        after = mappings(directory)
        comm.barrier()
        return after - before, sums(comm)

    assert run_loopback(2, work, **OPTIONS) == [(0, True)] * 2


# What is left behind.


def test_the_memory_has_no_name_as_soon_as_all_have_it(directory):
    def work(comm):
        comm.barrier()
        names = os.listdir(directory)
        comm.allocate_shared(10_000, "float64")
        comm.barrier()
        return names + os.listdir(directory), mappings(directory) >= 2

    assert run_loopback(2, work, **OPTIONS) == [([], True)] * 2


PROGRAM = """
import os, signal, sys
import numpy as np
import hpcpar
from hpcpar.transport import shared_memory
from pathlib import Path

shared_memory.DIRECTORY = Path(sys.argv[1])
world = hpcpar.init()
assert world._calls.is_all_shared
array = world.allocate_shared(50_000, "float64")
part = world.split(0)
for step in range(200):
    array[:] = 1
    world.allreduce(array)
    handle = part.start_allreduce(np.ones(200_000))
    if step == 50 and world.rank == 1:
        {mistake}
    handle.wait()
print("end")
"""

ENDS_WITHIN_S = 30


@pytest.mark.parametrize(
    ("mistake", "ends_well"),
    [
        ("pass", True),
        ("os.kill(os.getpid(), signal.SIGKILL)", False),
        ("raise ValueError('only here')", False),
    ],
)
def test_no_file_stays_however_the_job_ends(mistake, ends_well, tmp_path, run_ranks):
    script, directory = tmp_path / "script.py", tmp_path / "memory"
    directory.mkdir()
    script.write_text(PROGRAM.replace("{mistake}", mistake))
    started_s = time.monotonic()
    done: subprocess.CompletedProcess[str] = run_ranks(3, str(script), str(directory))
    assert time.monotonic() - started_s < ENDS_WITHIN_S
    assert (done.returncode == 0, done.stdout.count("end")) == (ends_well, 3 * ends_well), done.stderr
    assert os.listdir(directory) == []


@pytest.mark.parametrize(("variable", "shares"), [("0", False), ("1", True)])
def test_the_environment_says_whether_a_world_shares_memory(
    variable, shares, tmp_path, run_ranks, monkeypatch
):
    monkeypatch.setenv("HPCPAR_SHARED_MEMORY", variable)
    script = tmp_path / "script.py"
    script.write_text(
        "import numpy as np, hpcpar; world = hpcpar.init(); part = world.split(0)\n"
        "total = world.allreduce(np.ones(5000)).sum()\n"
        "shared = world._calls.is_all_shared, part._calls.is_all_shared\n"
        "told = world.allgather_object((*shared, float(total)))\n"
        "if world.rank == 0: print(told)"
    )
    done = run_ranks(2, str(script))
    assert done.stdout.strip() == str([(shares, shares, 10000.0)] * 2), done.stderr


def test_where_processes_find_no_room_one_of_them_warns_and_the_job_goes_on(tmp_path, run_ranks):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, hpcpar, numpy as np; from pathlib import Path\n"
        "from hpcpar.transport import shared_memory\n"
        "shared_memory.DIRECTORY = Path('/nowhere')\n"
        "world = hpcpar.init(); part = world.split(world.rank % 2)\n"
        "total = world.allreduce(part.allreduce(np.ones(1)))\n"
        "shared = world._calls.is_all_shared, part._calls.is_all_shared\n"
        "told = world.allgather_object((*shared, float(total[0])))\n"
        "if world.rank == 0: print(told)"
    )
    done = run_ranks(4, str(script))
    assert done.stdout.strip() == str([(False, False, 8.0)] * 4), done.stderr
    assert done.stderr.count("as they cannot share memory") == 1


def test_memory_that_no_rank_uses_any_more_is_given_back_by_the_next_allocation():
    def work(comm):
        kept, gone = comm.allocate_shared(1000, "float64"), comm.allocate_shared(1000, "float64")
        part = gone[5:10] if comm.rank == 0 else None
        del gone
        third = comm.allocate_shared(10, "float64")
        held = len(comm._calls.segment.arrays)
        del part
        fourth = comm.allocate_shared(10, "float64")
        for array in (kept, third, fourth):
            array[:] = comm.rank
            comm.allreduce(array)
        return held, len(comm._calls.segment.arrays), {float(x) for a in (kept, third, fourth) for x in a}

    assert run_loopback(3, work, **OPTIONS) == [(3, 3, {3.0})] * 3


def test_an_error_of_one_rank_is_everybodys_when_memory_is_allocated_or_given_back():
    def work(comm):
        array, raised = comm.allocate_shared(10, "float64"), []
        for ask in (
            lambda: comm.allocate_shared(10, "float64" if comm.rank else "datetime64[s]"),
            lambda: comm.free_shared(array if comm.rank else "no array"),
        ):
            with pytest.raises(PeerFailedError) as error:
                ask()
            raised.append("rank 0" in str(error.value))
        return raised, sums(comm)

    assert run_loopback(2, work, **OPTIONS) == [([True, True], True)] * 2


def test_processors_that_reorder_stores_have_fences(monkeypatch):
    monkeypatch.setattr(shared_memory, "keeps_order", lambda: False)
    fences = []

    def work(comm):
        fence = comm._calls.segment.fence
        comm._calls.segment.fence = lambda: fences.append(comm.rank) or fence()
        return sums(comm)

    assert run_loopback(2, work, **OPTIONS) == [True] * 2
    assert set(fences) == {0, 1}
