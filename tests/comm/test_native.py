"""MPI's own collectives by the house's calls: equal to the serial computation, and told about like ours."""

from __future__ import annotations

from hashlib import sha256
from itertools import product

import numpy as np
import pytest
import torch

from hpcpar import partition
from hpcpar.comm import Communicator, run_loopback
from hpcpar.comm.executors import native
from hpcpar.comm.select import ANY, NATIVES, Table, parse_overrides
from hpcpar.comm.watch import Watch
from hpcpar.errors import MismatchError, OperationError
from hpcpar.transport import loopback

COUNTS = (0, 1, 5, 1001)
OPS = {"sum": np.add, "average": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}
BITS = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "min": np.minimum,
    "max": np.maximum,
}
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float32", "float64")
COMPLEX = ("complex64", "complex128")


def piece(rank, count, dtype="int64"):
    """Small whole numbers, so that every order of summation is exact."""
    return np.random.default_rng(rank).integers(0 if dtype == "bool" else 1, 3, size=count).astype(dtype)


def cases():
    """(element type, op) that MPI can do."""
    yield from product(INTEGERS, {**OPS, **BITS}.keys() - {"average"})
    yield from product(FLOATS, OPS)
    yield from product(COMPLEX, ("sum", "average", "product"))
    yield from product(("bool",), BITS)


def reduced(inputs, op):
    total = {**OPS, **BITS}[op].reduce(inputs, axis=0, dtype=inputs[0].dtype)
    return (total / len(inputs)).astype(total.dtype) if op == "average" else total


@pytest.fixture
def native_world(world):
    """The job's ranks in a world of their own, so that the account has the calls alone."""
    comm = Communicator.over(type(world._transport).world())
    yield comm
    comm.free()


@pytest.mark.mpi
def test_reductions_of_every_type_and_op_equal_the_serial_computation(native_world, assert_true):
    comm, checks = native_world, []
    for (dtype, op), count in product(sorted(cases()), COUNTS):
        inputs = [piece(rank, count, dtype) for rank in range(comm.size)]
        mine, total = inputs[comm.rank], reduced(inputs, op)
        start, stop = partition.bounds(count, comm.size)[comm.rank]
        out, shard = np.empty_like(mine), np.empty(stop - start, mine.dtype)
        what = f"{op} of {count} {dtype}"
        checks += [
            (f"allreduce, {what}", comm.allreduce(mine.copy(), op, algorithm="native"), total),
            (f"allreduce out, {what}", comm.allreduce(mine, op, out=out, algorithm="native"), total),
            (
                f"reduce_scatter, {what}",
                comm.reduce_scatter(mine.copy(), op, algorithm="native"),
                total[start:stop],
            ),
            (
                f"reduce_scatter out, {what}",
                comm.reduce_scatter(mine, op, out=shard, algorithm="native"),
                total[start:stop],
            ),
            (f"input, {what}", mine, piece(comm.rank, count, dtype)),
        ]
    assert_true(checks)


@pytest.mark.mpi
def test_pieces_of_any_size_are_reduced_and_scattered(native_world, assert_true):
    comm, checks = native_world, []
    counts = [3 * rank % 4 for rank in range(comm.size)]
    inputs = [piece(rank, sum(counts)) for rank in range(comm.size)]
    start, stop = partition.offsets(counts)[comm.rank : comm.rank + 2]
    found = comm.reduce_scatter(inputs[comm.rank].copy(), counts=counts, algorithm="native")
    checks.append(("reduce_scatter of uneven pieces", found, reduced(inputs, "sum")[start:stop]))
    assert_true(checks)


@pytest.mark.mpi
def test_data_of_every_type_moves(native_world, assert_true):
    comm, checks = native_world, []
    for dtype, count in product((*INTEGERS, *FLOATS, *COMPLEX, "bool", "float16"), COUNTS):
        checks += list(_moved(comm, dtype, count))
    assert_true(checks)


def _moved(comm, dtype, count):
    shards = [piece(rank, count, dtype) for rank in range(comm.size)]
    whole, mine = np.concatenate(shards), shards[comm.rank]
    yield f"allgather {count} {dtype}", comm.allgather(mine, algorithm="native"), whole
    in_place = np.zeros_like(whole)
    own = in_place[count * comm.rank : count * (comm.rank + 1)]
    own[...] = mine
    yield f"allgather in place {dtype}", comm.allgather(own, out=in_place, algorithm="native"), whole
    for root in range(comm.size):
        buffer = shards[root].copy() if comm.rank == root else np.zeros_like(mine)
        found = comm.broadcast(buffer, root, algorithm="native")
        yield f"broadcast {count} {dtype} from {root}", found, shards[root]
    inputs = [piece(rank, count * comm.size, dtype) for rank in range(comm.size)]
    expected = np.concatenate([x.reshape(comm.size, count)[comm.rank] for x in inputs])
    yield f"alltoall {count} {dtype}", comm.alltoall(inputs[comm.rank], algorithm="native"), expected


@pytest.mark.mpi
def test_shards_of_any_size_are_gathered(native_world, assert_true):
    comm = native_world
    counts = [3 * rank % 4 for rank in range(comm.size)]
    shards = [piece(rank, count) for rank, count in enumerate(counts)]
    gathered = comm.allgather(shards[comm.rank], counts=counts, algorithm="native")
    assert_true([("allgather", gathered, np.concatenate(shards))])


@pytest.mark.mpi
def test_pieces_of_any_size_are_exchanged_where_mpi_has_no_limit_to_them(native_world, assert_true):
    comm = native_world
    # Rank 0 sends equal pieces, and the others do not: all must make the same call of MPI's nevertheless.
    sent = [[(sender * to) % 3 + 1 for to in range(comm.size)] for sender in range(comm.size)]
    inputs = [piece(rank, sum(sent[rank])) for rank in range(comm.size)]
    pieces = [np.split(x, np.cumsum(c)[:-1]) for x, c in zip(inputs, sent, strict=True)]
    expected = np.concatenate([pieces[sender][comm.rank] for sender in range(comm.size)])
    if comm._transport.natives.obstacle("alltoall", "sum", "int64", None) is not None:
        with pytest.raises(OperationError, match="before version 4 MPI has a limit"):
            comm.alltoall(inputs[comm.rank], send_counts=sent[comm.rank], algorithm="native")
        return
    exchanged = comm.alltoall(inputs[comm.rank], send_counts=sent[comm.rank], algorithm="native")
    assert_true([("alltoall", exchanged, expected)])


@pytest.mark.mpi
def test_bfloat16_moves_and_is_not_summed(native_world):
    comm = native_world
    mine = torch.full((3,), float(comm.rank), dtype=torch.bfloat16)
    gathered = comm.allgather(mine, algorithm="native")
    with pytest.raises(OperationError, match="MPI knows no sum of bfloat16"):
        comm.allreduce(mine, algorithm="native")
    assert comm.native_obstacle("allreduce", 6, dtype="bfloat16") == "MPI knows no sum of bfloat16"
    assert gathered.tolist() == [float(rank) for rank in range(comm.size) for _ in range(3)]


@pytest.mark.mpi
def test_arrays_that_are_not_contiguous_get_the_result(native_world):
    comm = native_world
    tensor = torch.arange(12.0).reshape(3, 4)
    comm.allreduce(tensor.t(), algorithm="native")
    np.testing.assert_array_equal(tensor.numpy(), comm.size * np.arange(12.0).reshape(3, 4))


@pytest.mark.mpi
def test_many_under_way_at_once_beside_ours_are_waited_for_in_any_order(native_world, assert_true):
    comm, checks = native_world, []
    started = []
    for number in range(12):
        name = "native" if number % 3 else "ring"
        buffer = np.full(1000 * (number + 1), float(number + comm.rank))
        started.append((number, comm.start_allreduce(buffer, algorithm=name)))
        gathered = comm.start_allgather(np.array([number, comm.rank]), algorithm="native")
        started.append((number, gathered))
    order = np.random.default_rng(comm.rank).permutation(len(started))
    for index in order:
        number, handle = started[index]
        if index % 2:
            expected = [value for rank in range(comm.size) for value in (number, rank)]
        else:
            expected = np.full(1000 * (number + 1), sum(float(number + r) for r in range(comm.size)))
        checks.append((f"call {index}", handle.wait(), expected))
    assert_true(checks)


@pytest.mark.mpi
def test_all_ranks_hold_identical_bits(native_world):
    comm = native_world
    found = []
    for dtype, count in product(("float32", "float64", "complex64"), (3, 1001, 300_000)):
        values = np.random.default_rng(comm.rank).standard_normal(count).astype(dtype)
        found.append(sha256(comm.allreduce(values, "average", algorithm="native")).digest())
    everybody = comm.allgather_object(found)
    assert all(bits == everybody[0] for bits in everybody)


@pytest.mark.mpi
def test_calls_are_counted_and_messages_are_not(native_world):
    comm = native_world
    for _ in range(3):
        comm.allreduce(np.ones(10), algorithm="native")
    row = comm.traffic.row("allreduce")
    assert (row.calls, row.calls_by_mpi) == (3, 3)
    assert (row.messages, row.nbytes_sent, row.nbytes_received) == (0, 0, 0)


@pytest.mark.mpi
def test_the_environment_and_a_table_may_say_native(native_world):
    comm = native_world
    comm._runtime.overrides = parse_overrides("allreduce=native,broadcast=native")
    comm._calls._table = Table("measured", {"allgather": {ANY: ((64.0, "native"), (float("inf"), "ring"))}})
    told = [
        comm.algorithm_for("allreduce", 8),
        comm.algorithm_for("allreduce", 8, dtype="bfloat16"),
        comm.algorithm_for("allreduce", 8, dtype="float32", op="max"),
        comm.algorithm_for("allreduce", 8, dtype="float32", op="max", named="native"),
        comm.algorithm_for("allreduce", 8, dtype="int32", op="max"),
        comm.algorithm_for("broadcast", 8, dtype="bfloat16"),
        comm.algorithm_for("allgather", 64),
        comm.algorithm_for("allgather", 65),
    ]
    comm.allreduce(np.ones(4))
    counted = [comm.traffic.nbytes_sent()]
    total = comm.allreduce(torch.full((4,), float(comm.rank + 1), dtype=torch.bfloat16))
    comm.allreduce(np.array([np.nan]), "max")
    comm.allgather(np.ones(8 // comm.size))
    counted.append(comm.traffic.nbytes_sent("allgather"))
    ours = "recursive_doubling"
    assert told == ["native", ours, ours, "native", "native", "native", "native", "ring"]
    assert counted == [0, 0]
    assert total.tolist() == [sum(range(1, comm.size + 1))] * 4
    assert comm.traffic.nbytes_sent("allreduce") > 0 or comm.size == 1


@pytest.mark.mpi(min_size=2)
def test_different_calls_are_found_out_in_checked_mode(checked_world):
    op = "sum" if checked_world.rank else "max"
    with pytest.raises(MismatchError, match="op=max"):
        checked_world.allreduce(np.ones(2), op, algorithm="native")


@pytest.mark.parametrize("collective", sorted(NATIVES))
def test_loopback_has_none_of_its_own(collective):
    with pytest.raises(OperationError, match="threads of one process"):
        Communicator.alone().algorithm_for(collective, 8, named="native")
    assert Communicator.alone().algorithm_for(collective, 8) != "native"


def test_over_loopback_a_caller_who_names_it_gets_an_error_and_a_table_is_passed_over():
    def work(comm):
        comm._runtime.overrides = {"allreduce": "native"}
        total = comm.allreduce(np.ones(3)).tolist()
        with pytest.raises(OperationError, match=r"allreduce by 'native'.*threads.*ring"):
            comm.allreduce(np.ones(3), algorithm="native")
        return total, comm.traffic.nbytes_sent() > 0

    assert run_loopback(2, work) == [([2.0] * 3, True)] * 2


def test_those_who_have_begun_the_same_call_are_not_waited_for():
    watches = [Watch(transport, 60.0) for transport in loopback.connect(3)]
    roll = native.Participants(watches[0], (0, 1, 2), "world", 7)
    roll.answer()
    found = [roll.missing((1, 2))]
    for begun in (6, 7):
        watches[1].begin("world", begun)
        watches[0]._transport.control_send(1, {"kind": "ask"})
        watches[1]._read_mail()
        watches[0]._read_mail()
        found.append(roll.missing((1, 2)))
    assert found == [(1, 2), (1, 2), (2,)]


def test_when_all_have_begun_those_that_left_are_not_accused():
    watches = [Watch(transport, 60.0) for transport in loopback.connect(3)]
    roll = native.Participants(watches[0], (0, 1, 2), "world", 7)
    for watch in watches[1:]:
        watch.begin("world", 7)
    for rank in (1, 2):
        watches[0]._transport.control_send(rank, {"kind": "ask"})
    watches[1].leave()
    watches[2]._read_mail()
    watches[0]._read_mail()
    assert roll.missing((1, 2)) == (2,)


def test_a_root_that_has_done_its_part_and_left_is_not_accused(tmp_path, run_ranks):
    """Rank 3 gets a broadcast from rank 2, which comes late: it asks the others meanwhile, which are gone."""
    script = tmp_path / "script.py"
    script.write_text(
        "import time, hpcpar; import numpy as np\n"
        "world = hpcpar.init()\n"
        "time.sleep(4 * (world.rank == 2))\n"
        "world.broadcast(np.full(3, float(world.rank == 0)), algorithm='native')\n"
        "print('end')\n"
    )
    done = run_ranks(4, str(script))
    assert (done.returncode, done.stdout.count("end")) == (0, 4), done.stderr
