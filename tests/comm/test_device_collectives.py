"""Collectives and messages on device memory, by each way, over a stand-in for the CUDA driver."""

from __future__ import annotations

import gc
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hpcpar.comm import Communicator, run_loopback
from hpcpar.comm.collectives import view
from hpcpar.comm.devices import QUEUES, TRIAL_NBYTES
from hpcpar.comm.select import ANY
from hpcpar.comm.tuning import Entry, Tuning
from hpcpar.errors import BufferTypeError, CudaError, MismatchError, OperationError
from hpcpar.transport.buffers import octets_at
from hpcpar.transport.gpu.cuda_driver import driver
from hpcpar.transport.loopback import LoopbackTransport
from tests.comm import device_cases
from tests.comm.device_cases import CASES, on_device, values
from tests.grid import pairwise

RunRanks = Callable[..., subprocess.CompletedProcess[str]]


def shared(way: str, function):
    def body(comm: Communicator):
        assert comm.share_devices(way)
        return function(comm)

    return body


@pytest.mark.parametrize(("case", "way", "size"), pairwise(CASES, ["pull", "staged"], [1, 2, 3, 4]))
def test_arrays_on_devices_get_what_arrays_on_hosts_get(kernels, case: str, way: str, size: int) -> None:
    run_loopback(size, shared(way, CASES[case]), check=True)


@pytest.fixture
def takes_pointers(stand_in, monkeypatch) -> None:
    """Messages between ranks that are threads take device pointers, as a CUDA-aware MPI's do."""

    def reachable(messages):
        return [(at_hand(octets), peer) for octets, peer in messages]

    def at_hand(octets: np.ndarray) -> np.ndarray:
        address = stand_in.load().stand_in_reach(octets.ctypes.data, octets.size) if octets.size else None
        return octets if address is None else octets_at(address, octets.size)

    post = LoopbackTransport.post
    monkeypatch.setattr(
        LoopbackTransport,
        "post",
        lambda self, sends, receives, tag: post(self, reachable(sends), reachable(receives), tag),
    )


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_messages_that_take_device_pointers_bring_the_same(
    kernels, takes_pointers, case: str, size: int
) -> None:
    run_loopback(size, shared("mpi", CASES[case]), check=True)


@pytest.mark.parametrize("way", ["pull", pytest.param("mpi", id="pointers"), "staged"])
def test_a_message_that_waits_for_its_bytes_holds_up_none_but_those_of_its_tag(
    kernels, takes_pointers, stand_in, way: str
) -> None:
    def body(comm: Communicator) -> list[int]:
        made = driver().stream()
        arrays = [on_device(np.full(9, 10 * comm.rank + k)) for k in range(3)]
        arrays[0].stream = made
        idle = on_device(np.zeros(9))
        for _ in range(QUEUES + 1):  # else what earlier calls kept is given back meanwhile
            comm.allreduce(idle)
        comm.barrier()
        if comm.rank == 1:
            late, also_late = (comm.start_recv(array, 0, tag=5) for array in arrays[:2])
            found = [int(comm.recv(arrays[2], 0, tag=6).to_host()[0])]
            comm.send_object("arrived", 0)
            return found + [int(handle.wait().to_host()[0]) for handle in (late, also_late)]
        with stand_in.Gate(made):
            sends = [comm.start_send(array, 1, tag) for array, tag in zip(arrays, (5, 5, 6), strict=True)]
            assert comm.recv_object(1) == "arrived"
        for send in sends:
            send.wait()
        return []

    gc.collect()  # while a stream is held up, to give memory back would wait for it
    assert run_loopback(2, shared(way, body)) == [[], [2, 0, 1]]


def test_bytes_are_free_when_they_have_been_read_themselves_and_not_others_of_their_tag(kernels) -> None:
    """The second message is read before the first, which its sender then may not write to yet."""
    posted, sent, read, looked = (threading.Event() for _ in range(4))

    def body(comm: Communicator) -> list[int]:
        arrays = [on_device(np.full(9, 5 + 10 * comm.rank + k)) for k in range(2)]
        if comm.rank == 1:
            receives = [comm.start_recv(array, 0, tag=5) for array in arrays]
            posted.set()
            sent.wait(10)
            assert receives[1]._compiled.advance()
            read.set()
            looked.wait(10)
            return [int(receive.wait().to_host()[0]) for receive in receives]
        posted.wait(10)
        sends = [comm.start_send(array, 1, tag=5) for array in arrays]
        sent.set()
        read.wait(10)
        comm.poke()
        for send, array in zip(sends, arrays, strict=True):
            if send.done:
                send.wait()
                array.put(np.zeros(9, int))
        looked.set()
        for send in sends:
            send.wait()
        return []

    assert run_loopback(2, shared("pull", body)) == [[], [5, 6]]


@pytest.mark.parametrize("way", ["auto", "staged"])
def test_on_two_nodes_ranks_of_one_pull_and_the_others_are_sent_to(kernels, way: str) -> None:
    def body(comm: Communicator) -> None:
        for case in CASES.values():
            case(comm)
        device_cases.all_reduces(
            comm, (1, 5000), ("ring", "recursive_doubling", "hierarchical", "hierarchical_pipelined")
        )

    run_loopback(4, shared(way, body), nodes=[0, 0, 1, 1])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_algorithm_can_be_pulled(kernels, size: int) -> None:
    from hpcpar.algorithms.registry import ALGORITHMS

    def body(comm: Communicator) -> None:
        names = [name for name in ALGORITHMS["allreduce"] if name != "native"]
        device_cases.all_reduces(comm, (1, 777), tuple(names))

    run_loopback(size, shared("pull", body))


def test_a_thread_that_has_used_no_device_yet_may_make_the_call(kernels) -> None:
    def body(comm: Communicator) -> list[float]:
        array = on_device(values(comm.rank, 9))
        with ThreadPoolExecutor(1) as thread:
            thread.submit(comm.allreduce, array).result(60)
        return array.to_host().tolist()

    expected = (values(0, 9) + values(1, 9)).tolist()
    assert run_loopback(2, shared("staged", body)) == [expected] * 2


def test_an_array_is_kept_no_longer_than_until_the_next_call(kernels) -> None:
    """Whichever of the queues that has: memory that is not given back is missed on a GPU."""

    def body(comm: Communicator) -> list[bool]:
        kept = []
        for _ in range(3):
            array = on_device(values(comm.rank, 1000))
            there = weakref.ref(array)
            comm.allreduce(array)
            array.to_host()  # waits until the call is done
            del array
            comm.allreduce(on_device(values(comm.rank, 1)))
            kept.append(there() is not None)
        return kept

    gc.collect()
    assert run_loopback(2, shared("staged", body)) == [[False] * 3] * 2


def test_as_many_bytes_are_counted_as_on_the_host(kernels) -> None:
    def body(comm: Communicator) -> tuple[int, int]:
        comm.allreduce(on_device(values(comm.rank, 1000)), algorithm="ring")
        on_devices = comm.traffic.nbytes_sent("allreduce")
        comm.traffic.reset()
        comm.allreduce(values(comm.rank, 1000), algorithm="ring")
        return on_devices, comm.traffic.nbytes_sent("allreduce")

    for on_devices, on_hosts in run_loopback(4, shared("pull", body)):
        assert on_devices == on_hosts > 0


@pytest.mark.parametrize("way", ["pull", "staged"])
def test_what_is_compressed_is_rounded_as_on_the_host(kernels, way: str) -> None:
    run_loopback(3, shared(way, partial(device_cases.compressed, random=True)))


def test_what_is_compressed_travels_as_half_the_bytes(kernels) -> None:
    def body(comm: Communicator) -> tuple[int, int]:
        comm.allreduce(on_device(values(comm.rank, 1000)), algorithm="ring")
        whole = comm.traffic.nbytes_sent("allreduce")
        comm.traffic.reset()
        comm.allreduce(on_device(values(comm.rank, 1000)), algorithm="ring", compression="bfloat16")
        return whole, comm.traffic.nbytes_sent("allreduce")

    for whole, compressed in run_loopback(4, shared("pull", body)):
        assert whole == 2 * compressed > 0


def test_a_measured_table_of_gpus_is_chosen_by_for_arrays_on_them_alone(kernels) -> None:
    def entry(device: str, name: str) -> Entry:
        return Entry("any", 4, 4, {"allreduce": {ANY: ((float("inf"), name),)}}, device)

    def body(comm: Communicator) -> list[str]:
        def chosen() -> list[str]:
            return [comm.algorithm_for("allreduce", 4000, on_device=on) for on in (False, True)]

        before = chosen()
        comm.choose_by(Tuning((entry("cuda", "ring"),)))
        measured = chosen()
        comm.allreduce(on_device(values(comm.rank, 1000)))
        sent = comm.traffic.row("allreduce").messages
        comm.choose_by(Tuning((entry("cpu", "ring"), entry("cuda", "rabenseifner"))))
        return [*before, *measured, *chosen(), str(sent)]

    by_ring = str(2 * (4 - 1))
    built_in = ["recursive_doubling"] * 2
    expected = [*built_in, built_in[0], "ring", "ring", "rabenseifner", by_ring]
    assert run_loopback(4, shared("pull", body)) == [expected] * 4


@pytest.mark.parametrize("way", ["pull", "staged"])
def test_bfloat16_is_summed_in_float32(kernels, way: str) -> None:
    bits = np.array([0x3F80, 0x3B80, 0x4000], dtype=np.uint16)  # 1, 2^-8, 2

    def body(comm: Communicator) -> np.ndarray:
        array = device_cases.DeviceArray.from_host(bits, dtype="bfloat16")
        return comm.allreduce(array, algorithm="direct").to_host()

    for found in run_loopback(3, shared(way, body)):
        assert found.tolist() == [0x4040, 0x3C40, 0x40C0]  # 3, 3·2^-8, 6


def test_arrays_of_one_call_are_in_one_place(kernels) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(BufferTypeError, match=r"out is in the memory of the host.*a GPU"):
            comm.unchecked("mixed").allreduce(on_device(values(0, 4)), out=np.zeros(4, "float32"))
        with pytest.raises(BufferTypeError, match="give out"):
            comm.unchecked("no out").allgather(on_device(values(0, 4)))
        with pytest.raises(OperationError, match="on a GPU"):
            comm.unchecked("native").allreduce(on_device(values(0, 4)), algorithm="native")

    run_loopback(1, shared("pull", body))


def test_arrays_of_one_call_are_on_one_gpu(kernels, monkeypatch) -> None:
    monkeypatch.setenv("STAND_IN_DEVICES", "2")

    def body(comm: Communicator) -> None:
        assert comm._runtime.devices.ordinal == comm.rank
        here, there, nowhere = (
            device_cases.DeviceArray.from_host(np.zeros(count, "float32"), ordinal=ordinal)
            for count, ordinal in ((4, 1), (4, 0), (0, 0))
        )
        with pytest.raises(BufferTypeError, match=r"out is on GPU 0, the other array of the call on GPU 1"):
            comm.unchecked("two").allreduce(here, out=there)
        counts = [4, 0]
        comm.unchecked("none").reduce_scatter(here, counts=counts, out=nowhere if comm.rank else here[:])
        assert view(comm._calls, nowhere, writable=True).host.queue.ordinal == comm.rank

    run_loopback(2, shared("staged", body))


def test_a_host_array_that_meets_a_device_array_is_named(kernels) -> None:
    def body(comm: Communicator) -> None:
        array = values(0, 4) if comm.rank else on_device(values(0, 4))
        with pytest.raises(MismatchError, match="on a GPU"):
            comm.allreduce(array)

    run_loopback(2, shared("pull", body), check=True)


@pytest.mark.parametrize("way", ["pull", "staged"])
def test_a_message_of_another_length_is_named(kernels, way: str) -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.start_send(on_device(values(0, 30)), 1)
        else:
            with pytest.raises(MismatchError, match=r"120|expect"):
                comm.recv(on_device(np.zeros(40, "float32")), 0)
        comm.barrier()  # the sender makes progress meanwhile

    run_loopback(2, shared(way, body))


def test_memory_that_cannot_be_shown_is_copied_first(kernels, stand_in) -> None:
    def body(comm: Communicator) -> None:
        array = stand_in.DeviceArray.from_host(values(comm.rank, 500), alloc=stand_in.alloc_pooled)
        comm.allreduce(array)
        expected = values(0, 500) + values(1, 500)
        np.testing.assert_array_equal(array.to_host(), expected)

    run_loopback(2, shared("pull", body))


@pytest.mark.parametrize("way", ["pull", "staged"])
def test_no_host_waits_for_a_device_in_calls_that_follow_each_other(kernels, stand_in, way: str) -> None:
    def body(comm: Communicator) -> int:
        arrays = [on_device(values(comm.rank, 4000)) for _ in range(4)]
        comm.barrier()
        before = stand_in.calls("cuStreamSynchronize") + stand_in.calls("cuEventSynchronize")
        for _ in range(10):
            for array in arrays:
                comm.allreduce(array, "max")
        comm.barrier()
        after = stand_in.calls("cuStreamSynchronize") + stand_in.calls("cuEventSynchronize")
        comm.barrier()
        return after - before

    assert run_loopback(2, shared(way, body)) == [0, 0]


@pytest.mark.parametrize("way", ["pull", "staged"])
def test_the_stream_in_which_a_call_is_waited_for_comes_after_it(kernels, stand_in, way: str) -> None:
    """In whichever the caller worked when it ended: alone, a rank's call does at once."""

    def body(comm: Communicator) -> list[list[float]]:
        cuda = driver()
        cuda.use(0)
        first, second, third = (cuda.stream() for _ in range(3))
        array = on_device(values(1, 1000))
        array.stream = first
        with stand_in.Gate(first) as gate:
            threading.Timer(0.5, gate.open).start()
            array.put(values(2, 1000), wait=False)
            handle = comm.start_allreduce(array)
            assert handle.test()
            found = []
            for array.stream in (second, third):
                handle.wait()
                found.append(array.to_host().tolist())
        return found

    assert run_loopback(1, shared(way, body)) == [[values(2, 1000).tolist()] * 2]


SCRIPT = Path(__file__).with_name("device_rank.py")


@pytest.mark.parametrize("size", [2, 3])
def test_random_delays_change_nothing(run_ranks: RunRanks, stand_in, monkeypatch, size: int) -> None:
    monkeypatch.setenv("STAND_IN_JITTER_US", "300")
    done = run_ranks(size, str(SCRIPT), "pull", timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all as it should be") == size


def test_a_wait_left_out_would_be_seen(run_ranks: RunRanks, stand_in, monkeypatch) -> None:
    monkeypatch.setenv("STAND_IN_JITTER_US", "300")
    monkeypatch.setenv("STAND_IN_DROP_WAITS", "1")
    done = run_ranks(2, str(SCRIPT), "pull", timeout_s=120)
    assert done.returncode != 0
    assert "Mismatched elements" in done.stderr


@contextmanager
def all_ranks(world: Communicator, way: str) -> Iterator[Communicator]:
    """A communicator whose device memory moves in one way; afterwards the world's is as it was before."""
    with world.split(0, name=f"devices {way}") as comm:
        before = comm._runtime.devices
        try:
            assert comm.share_devices(way)
            yield comm
        finally:
            comm.barrier()
            comm._runtime.devices = before


@pytest.mark.mpi
@pytest.mark.parametrize("way", ["pull", "staged"])
@pytest.mark.parametrize("case", CASES)
def test_over_mpi_arrays_on_devices_get_what_arrays_on_hosts_get(
    kernels, world: Communicator, case: str, way: str
) -> None:
    with all_ranks(world, way) as comm:
        CASES[case](comm)


@pytest.mark.mpi
@pytest.mark.parametrize("way", ["pull", "staged"])
def test_a_call_is_brought_to_its_end_by_whichever_thread(kernels, world: Communicator, way: str) -> None:
    """As one of autograd's threads does with what the main thread has begun; it has used no device yet."""
    with all_ranks(world, way) as comm:
        array = on_device(values(comm.rank, 3000))
        handle = comm.start_allreduce(array)
        with ThreadPoolExecutor(1) as thread:
            error = thread.submit(handle.wait).exception(60)
        found = array.to_host()
    assert error is None
    np.testing.assert_array_equal(found, np.sum([values(r, 3000) for r in range(world.size)], axis=0))


@pytest.mark.mpi
def test_memory_that_is_given_back_later_does_not_hinder_the_next_trial(kernels, world: Communicator) -> None:
    """What lies where something is still open here is refused: first let go of what has been done with."""
    with all_ranks(world, "pull") as comm:
        devices = comm._runtime.devices
        address = devices.cuda.alloc(TRIAL_NBYTES)
        shown = comm.allgather_object(devices.exports.export(address, TRIAL_NBYTES))
        for memory in shown:
            devices.imports.open(memory)
        devices.queue(0).afterwards(lambda: [devices.imports.release(memory) for memory in shown])
        comm.barrier()
        devices.cuda.free(address)
        again = comm.share_devices("pull")
    assert again


@pytest.mark.mpi
def test_what_another_thread_has_done_with_does_not_hinder_this_one(kernels, world: Communicator) -> None:
    """A hook in autograd's thread has read memory of a peer, which now has other memory in its place."""
    with all_ranks(world, "pull") as comm:
        devices = comm._runtime.devices

        def read(shown: list[bytes]) -> None:
            devices.cuda.use(0)
            for memory in shown:
                devices.open(memory)
            devices.queue(0).afterwards(lambda: [devices.imports.release(each) for each in shown])

        address = devices.cuda.alloc(TRIAL_NBYTES)
        shown = comm.allgather_object(devices.exports.export(address, TRIAL_NBYTES))
        with ThreadPoolExecutor(1) as thread:
            thread.submit(read, shown).result(60)
        comm.barrier()
        devices.cuda.free(address)
        address = devices.cuda.alloc(TRIAL_NBYTES)
        shown = comm.allgather_object(devices.exports.export(address, TRIAL_NBYTES))
        refused = ""
        try:
            read(shown)
        except CudaError as error:
            refused = str(error)
        told = comm.allgather_object(refused)
    assert told == [""] * world.size
