"""Collectives over the loopback transport, and over MPI, equal the serial computation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcpar.algorithms.registry import ALGORITHMS
from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import BufferTypeError, MismatchError, OperationError
from tests.grid import checkered


@pytest.mark.smoke
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_every_collective_and_algorithm_equals_the_serial_computation(size, exchange, truths, assert_true):
    for checks in run_loopback(size, lambda comm: list(truths(comm)), **exchange):
        assert_true(checks)


@pytest.mark.mpi
def test_every_collective_over_mpi_equals_the_serial_computation(any_world, truths, assert_true):
    assert_true(list(truths(any_world.unchecked(truths.__name__))))


@pytest.mark.mpi(min_size=2)
def test_one_world_shares_memory_and_the_other_does_not(world, world_of_messages):
    assert world._calls.is_all_shared
    assert not world_of_messages._calls.is_all_shared


@pytest.mark.mpi
def test_long_messages_over_mpi_travel_in_pieces(world):
    from hpcpar.transport.mpi import MpiTransport

    transport = MpiTransport.world(max_message_nbytes=5000)
    comm = Communicator.over(transport)
    total = comm.allreduce(np.arange(5000.0) + comm.rank, algorithm="ring")
    received = np.empty(7777)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.sendrecv(np.full(7777, float(comm.rank)), right, received, left)
    comm.free()
    np.testing.assert_array_equal(total, comm.size * np.arange(5000.0) + sum(range(comm.size)))
    np.testing.assert_array_equal(received, float(left))


def test_the_order_of_summation_is_the_same_in_every_run_and_however_ranks_exchange(exchange):
    def work(comm):
        values = np.random.default_rng(comm.rank).standard_normal(999)
        return [comm.allreduce(values.copy(), algorithm=name).tobytes() for name in ALGORITHMS["allreduce"]]

    assert run_loopback(4, work, **exchange) == run_loopback(4, work)


def test_a_nan_on_one_rank_reaches_all_in_sum_min_and_max(exchange):
    def work(comm):
        values = np.array([np.nan if comm.rank == 1 else 1.0])
        return [np.isnan(comm.allreduce(values.copy(), op))[0] for op in ("sum", "min", "max", "average")]

    assert run_loopback(3, work, **exchange) == [[True] * 4] * 3


def test_arrays_that_are_not_contiguous_get_the_result_too(exchange):
    def work(comm):
        matrix = np.arange(12.0).reshape(3, 4)
        comm.allreduce(matrix[:, 1])
        tensor = torch.arange(12.0).reshape(3, 4)
        comm.allreduce(tensor.t())
        return matrix, tensor.numpy()

    for matrix, tensor in run_loopback(2, work, **exchange):
        expected = np.arange(12.0).reshape(3, 4)
        np.testing.assert_array_equal(tensor, 2 * expected)
        expected[:, 1] *= 2
        np.testing.assert_array_equal(matrix, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.bool])
def test_a_single_element_may_have_any_stride(dtype, exchange):
    def work(comm):
        column = torch.ones(1, 8, dtype=dtype)[:, 0]
        nothing = comm.allgather(torch.ones(0, dtype=dtype)[::2])
        return comm.allreduce(column, "max").tolist(), comm.allgather(column).tolist(), nothing.tolist()

    assert run_loopback(2, work, **exchange) == [([1], [1, 1], [])] * 2


def test_a_root_only_gives_and_may_have_its_elements_in_one_place(exchange):
    def work(comm):
        return comm.broadcast(torch.full((1,), 5.0).expand(4) if comm.rank == 0 else torch.zeros(4)).tolist()

    assert run_loopback(2, work, **exchange) == [[5.0] * 4] * 2


@pytest.mark.parametrize(("algorithm", "shift"), checkered([None, "bruck", "direct", "pairwise"], [0, 1000]))
def test_the_output_of_an_alltoall_may_overlap_its_input(algorithm, shift, exchange):
    count = 3000

    def work(comm):
        memory = np.zeros(comm.size * count + shift, dtype=int)
        given, out = memory[: comm.size * count], memory[shift:]
        right = []
        for _ in range(3):  # often enough to be remembered
            given[:] = np.repeat(np.arange(comm.size), count) + 10 * comm.rank
            comm.alltoall(given, out=out, algorithm=algorithm)
            right.append((out == np.repeat(10 * np.arange(comm.size) + comm.rank, count)).all())
            comm.barrier()
        return right

    assert run_loopback(3, work, **exchange) == [[True] * 3] * 3


@pytest.mark.parametrize("algorithm", [None, "ring", "direct"])
def test_the_output_of_a_reduce_scatter_may_lie_anywhere_in_its_input(algorithm, exchange):
    count = 3000

    def work(comm):
        right = []
        for first in (0, count // 2, count, 2 * count):
            for _ in range(3):  # often enough to be remembered
                whole = np.repeat(np.arange(comm.size), count) + 10 * comm.rank
                comm.reduce_scatter(whole, out=whole[first : first + count], algorithm=algorithm)
                right.append((whole[first : first + count] == 3 * comm.rank + 30).all())
        return right

    assert run_loopback(3, work, **exchange) == [[True] * 12] * 3


def test_a_shard_that_is_its_own_piece_of_out_is_gathered_in_place(exchange):
    def work(comm):
        whole = np.zeros(3 * comm.size)
        own = whole[3 * comm.rank : 3 * comm.rank + 3]
        own[:] = comm.rank
        return comm.allgather(own, out=whole) is whole, whole

    for same, whole in run_loopback(3, work, **exchange):
        assert same
        np.testing.assert_array_equal(whole, np.repeat(np.arange(3.0), 3))


def test_reduce_scatter_in_place_returns_a_view_of_the_own_piece(exchange):
    def work(comm):
        buffer = np.ones(10)
        own = comm.reduce_scatter(buffer)
        return np.shares_memory(own, buffer), own.tolist()

    expected = [(True, [3.0] * 4), (True, [3.0] * 3), (True, [3.0] * 3)]
    assert run_loopback(3, work, **exchange) == expected


def test_a_parameter_that_requires_a_gradient_can_be_reduced_and_broadcast(exchange):
    def work(comm):
        parameter = torch.nn.Parameter(torch.full((2, 2), float(comm.rank + 1)))
        comm.allreduce(parameter)
        comm.broadcast(parameter, root=1)
        return parameter.requires_grad, parameter.tolist()

    assert run_loopback(2, work, **exchange) == [(True, [[3.0, 3.0], [3.0, 3.0]])] * 2


def test_autograd_refuses_what_it_has_saved_and_a_call_has_written_to(exchange):
    """Every call that writes to a tensor counts as a write; ranks that only send keep what they have."""
    ones = torch.ones(8)
    calls = {
        "allreduce": lambda comm, y: comm.allreduce(y),
        "start_allreduce": lambda comm, y: comm.start_allreduce(y).wait(),
        "allreduce of every second": lambda comm, y: comm.allreduce(y[::2]),
        "allreduce, out": lambda comm, y: comm.allreduce(ones, out=y),
        "reduce_scatter": lambda comm, y: comm.reduce_scatter(y),
        "reduce_scatter, out": lambda comm, y: comm.reduce_scatter(ones.repeat(2), out=y),
        "allgather": lambda comm, y: comm.allgather(ones[:4], out=y),
        "alltoall": lambda comm, y: comm.alltoall(ones, out=y),
        "scatter": lambda comm, y: comm.scatter(ones.repeat(2), out=y, root=0),
        "sendrecv": lambda comm, y: comm.sendrecv(ones, 1 - comm.rank, y, 1 - comm.rank),
        "broadcast to 1": lambda comm, y: comm.broadcast(y, root=0),
        "reduce to 1": lambda comm, y: comm.reduce(y, root=1),
        "reduce to 1, out": lambda comm, y: comm.reduce(ones, root=1, out=y),
        "gather to 1": lambda comm, y: comm.gather(ones[:4], root=1, out=y),
    }

    def work(comm):
        for name, call in calls.items():
            for _ in range(2):  # compiled, and from the cache
                saved = torch.ones(8, requires_grad=True).exp()
                call(comm, saved.detach())
                if "to 1" in name and comm.rank == 0:
                    saved.sum().backward()
                else:
                    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                        saved.sum().backward()
        with torch.inference_mode():  # tensors without a count
            return comm.allreduce(torch.ones(1)).item()

    assert run_loopback(2, work, **exchange) == [2.0, 2.0]


def alone() -> Communicator:
    return Communicator.alone()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda c: c.allreduce([1, 2]), BufferTypeError, "builtins.list"),
        (lambda c: c.allreduce(np.array(["a"])), BufferTypeError, "<U1"),
        (lambda c: c.allreduce(np.array([1.0], dtype=">f8")), BufferTypeError, "native byte order"),
        (lambda c: c.allreduce(torch.ones(2).to(torch.float8_e4m3fn)), BufferTypeError, "float8_e4m3fn"),
        (lambda c: c.allreduce(torch.ones(2).to_sparse()), BufferTypeError, "to_dense"),
        (lambda c: c.allreduce(torch.ones(2, device="meta")), BufferTypeError, "meta device"),
        (lambda c: c.allreduce(np.broadcast_to(np.ones(1), 3)), BufferTypeError, "read-only"),
        (lambda c: c.allreduce(np.ones(1), "mean"), OperationError, "sum, average, min"),
        (lambda c: c.allreduce(np.ones(1, int), "average"), OperationError, "would round"),
        (lambda c: c.allreduce(np.ones(1), "and"), OperationError, "bool and integers"),
        (lambda c: c.allreduce(np.ones(1, complex), "max"), OperationError, "no order"),
        (lambda c: c.allreduce(np.ones(1, bool)), OperationError, "'or', 'and' or 'xor'"),
        (lambda c: c.allreduce(np.ones(1), algorithm="rong"), OperationError, "ring"),
        (lambda c: c.allreduce(np.ones(3), out=np.ones(2)), OperationError, "the result has 3"),
        (lambda c: c.allreduce(np.ones(3), out=np.ones(3, int)), OperationError, "float64"),
        (lambda c: c.broadcast(np.ones(1), root=5), OperationError, "ranks 0 to 0"),
        (lambda c: c.reduce_scatter(np.ones(3), counts=[2]), OperationError, "add up to 2"),
        (lambda c: c.allgather(np.ones(3), counts=[2]), OperationError, "which has 3"),
        (lambda c: c.allgather(np.ones(3), counts=[3, 4]), OperationError, "one whole number >= 0"),
        (lambda c: c.allgather(np.ones(3), counts=[3.7]), OperationError, "one whole number >= 0"),
        (
            lambda c: c.allgather(np.ones(3), counts=3, out=np.ones(3)),
            OperationError,
            "whole number >= 0.* 3",
        ),
        (lambda c: c.reduce_scatter(np.ones(3), counts=3), OperationError, "one whole number >= 0"),
        (lambda c: c.alltoall(np.ones(3), send_counts=3), OperationError, "one whole number >= 0"),
        (lambda c: c.alltoall(np.ones(3), receive_counts=[2]), OperationError, "give both, or neither"),
        (lambda c: c.scatter(np.ones(3), out=np.ones(2)), OperationError, "3 elements"),
        (lambda c: c.scatter(np.ones(1), 0.0, out=np.ones(1)), OperationError, r"rank 0\.0, but"),
        (lambda c: c.gather(np.ones(1), "0"), OperationError, "rank '0', but"),
        (lambda c: c.reduce(np.ones(1), root=None), OperationError, "rank None, but"),
        (lambda c: c.broadcast(np.ones(1), root=[0]), OperationError, r"rank \[0\], but"),
        (lambda c: c.broadcast_object(1, root=None), OperationError, "rank None, but"),
        (lambda c: c.allreduce(np.ones(1), ["sum"]), OperationError, "unknown op"),
        (lambda c: c.allreduce(np.ones(1), prescale_factor=[2]), OperationError, "give a number"),
        (lambda c: c.algorithm_for("sum", 1), OperationError, "there is no collective 'sum'; there are allr"),
        (
            lambda c: c.algorithm_for("allreduce", "x"),
            OperationError,
            "of 'x' bytes was asked for",
        ),
        (
            lambda c: c.allreduce(np.ones(2), prescale_factor=np.ones(2)),
            OperationError,
            r"array\(\[1., 1.\]\); give a n",
        ),
        (
            lambda c: c.allreduce(np.ones(1), prescale_factor=10**400),
            OperationError,
            "…; give a number",
        ),
        (lambda c: c.allreduce(np.ones(1), postscale_factor=10**5000), OperationError, "bits; give a number"),
        (lambda c: c.allreduce(np.ones(1), compression=np.ones(2)), OperationError, "float16, bfloat16"),
        (lambda c: c.allreduce(np.ones(1), algorithm=5), OperationError, "algorithm 5.*there are ring"),
        (lambda c: c.allreduce(np.ones(1), algorithm=["ring"]), OperationError, "there are ring"),
        (lambda c: c.allreduce(np.ones(1), np.ones(2)), OperationError, "unknown op array"),
        (lambda c: c.reduce(np.ones(1), op=np.ones(2)), OperationError, "unknown op array"),
        (
            lambda c: c.reduce(np.ones(1), root=np.zeros(2, int), out=np.ones(1)),
            OperationError,
            r"rank array\(\[0, 0\]\), but",
        ),
        (lambda c: c.allreduce(np.ones(1), name=np.ones(2)), OperationError, "name array.*give a str"),
        (lambda c: c.barrier(name=5), OperationError, "barrier has the name 5; give a str"),
        (lambda c: c.group(5), OperationError, r"group\(5\) was asked for; give the ranks"),
        (lambda c: c.group(None), OperationError, r"group\(None\) was asked for; give the ranks"),
        (
            lambda c: c.scatter_object(str(i) for i in range(1)),
            OperationError,
            "generator; give a seq",
        ),
        (lambda c: c.allocate_shared(3, "nosuch"), BufferTypeError, "'nosuch'; known are"),
    ],
)
def test_bad_arguments_are_named(call, error, words):
    with pytest.raises(error, match=words):
        call(alone())


def test_a_factor_that_is_an_array_of_one_may_change_between_calls():
    for factor in (torch.tensor(1.0), np.array(1.0)):
        comm, total = alone(), np.ones(1)
        for _ in range(3):  # often enough to be remembered
            comm.allreduce(total, prescale_factor=factor)
        factor *= 2
        assert comm.allreduce(total, prescale_factor=factor) == 2


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_roots_counts_peers_and_tags_that_are_arrays_may_change_between_calls(make):
    """Each call is made often enough to be remembered, before the number changes in place."""

    def work(comm):
        found, data, out = [], np.ones(2), np.zeros(2)
        root = make(0)
        for changed in range(2):
            root += changed
            for _ in range(3):
                data[:] = comm.rank
                comm.broadcast(data, root)
            found.append(data[0])
        counts = [make(2), make(0)]
        for changed in range(2):
            counts[0] -= changed
            counts[1] += changed
            for _ in range(3):
                comm.reduce_scatter(np.ones(2), counts=counts, out=out[: int(counts[comm.rank])])
            found.append(out.tolist())
            out[:] = 0
        peer, tag = make(1 - comm.rank), make(0)
        for changed in range(2):
            tag += changed
            data[:] = 10 * comm.rank + changed
            for _ in range(3):
                comm.sendrecv(data, peer, out, peer, tag)
            handle = comm.start_send(data, peer, int(tag))
            comm.recv(out, int(peer), tag)
            handle.wait()
            found.append(out[0])
        return found

    both = [0.0, 1.0], [[2.0, 2.0], [2.0, 0.0]], [[0.0, 0.0], [2.0, 0.0]]
    assert run_loopback(2, work, timeout_s=10) == [
        [*both[0], *both[1], 10.0, 11.0],
        [*both[0], *both[2], 0.0, 1.0],
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(4, 4)[:, :3],
        lambda: torch.ones(4, 3).t(),
        lambda: torch.ones(4, 4, dtype=torch.bfloat16)[:, :3],
        lambda: np.ones((4, 4))[:, :3],
        lambda: torch.ones(12),
    ],
)
def test_a_reduce_scatter_that_was_started_returns_the_sums_of_any_layout(make, exchange):
    def work(comm):
        handle = comm.start_reduce_scatter(make())
        return handle.wait().tolist(), handle.wait().tolist(), comm.reduce_scatter(make()).tolist()

    assert run_loopback(2, work, **exchange) == [([2.0] * 6,) * 3] * 2


@pytest.mark.parametrize("make", [np.ones, torch.ones])
def test_an_array_in_another_shape_than_before_is_the_call_of_that_shape(make):
    """One rank has the memory of an earlier call in another shape, the other one fresh memory."""

    def work(comm):
        array = make(6)
        comm.allreduce(array)
        comm.allreduce(array.reshape(2, 3) if comm.rank else make((2, 3)))
        told = ""
        try:
            comm.allreduce(array if comm.rank else make((2, 3)))
            comm.barrier()
        except MismatchError as error:
            told = str(error)
        return "allreduce(float" in told or "different calls" in told

    for check in (False, True):
        assert run_loopback(2, work, check=check, shared_memory=True, timeout_s=10) == [True, True]


def test_an_alltoall_that_does_not_divide_says_what_is_left_over():
    with pytest.raises(OperationError, match="leaves 1 over"):
        run_loopback(2, lambda comm: comm.alltoall(np.ones(3)))


def test_an_algorithm_that_needs_equal_pieces_says_which_can_do_uneven_ones():
    with pytest.raises(OperationError, match="pairwise"):
        run_loopback(2, lambda comm: comm.alltoall(np.ones(3), send_counts=[1, 2], algorithm="bruck"))


@pytest.mark.mpi(min_size=2)
def test_unknown_element_types_on_one_rank_are_an_error_on_all(checked_world):
    buffer = np.ones(4) if checked_world.rank else np.array(["a"] * 4)
    try:
        checked_world.allreduce(buffer)
        told = ""
    except MismatchError as error:
        told = str(error)
    everywhere = checked_world.allgather_object(told)
    assert all("rank 0 asked for allreduce, and failed" in text and "<U1" in text for text in everywhere)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_direct_sums_of_16_bit_types_are_rounded_once(dtype, exchange):
    unit = torch.finfo(dtype).eps / 2

    def work(comm):
        mine = torch.randn(500, generator=torch.Generator().manual_seed(comm.rank)).to(dtype)
        return mine.double(), comm.allreduce(mine.clone(), algorithm="direct").double()

    pieces, totals = zip(*run_loopback(4, work, **exchange), strict=True)
    exact = torch.stack(pieces).sum(0)
    for total in totals:
        assert ((total - exact).abs() <= unit * exact.abs() + 1e-6).all()
