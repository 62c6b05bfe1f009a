"""Collectives and messages on real GPUs, by each way.

`hpcpar run -n 2 -- -m pytest --with-mpi -m gpu tests/comm/test_device_gpu.py`; any number of ranks may share
a GPU. What can be tested without one is in test_device_collectives.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from hpcpar.comm import Communicator
from hpcpar.comm.devices import QUEUES
from hpcpar.launch.binding import gpu_for
from hpcpar.transport.gpu.queue import INTERPROCESS_EVENTS
from tests.comm.device_cases import CASES, Make, to_host, values

# The first test that asks what MPI can do waits for a probe of two ranks.
pytestmark = [pytest.mark.mpi, pytest.mark.gpu, pytest.mark.timeout(300)]

A_SECOND = 2_000_000_000
"""Cycles of a GPU, about."""

WAYS = ("pull", "mpi", "staged")


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def devices(world: Communicator, way: str) -> Iterator[Communicator]:
    """All ranks, whose device memory moves in one way alone; this rank's GPU is torch's and CuPy's."""
    from hpcpar.transport.mpi import MpiTransport

    here = [rank for rank, node in enumerate(world.nodes) if node == world.nodes[world.rank]]
    ordinal = gpu_for(here.index(world.rank), torch.cuda.device_count(), len(here))
    assert ordinal is not None
    torch.cuda.set_device(ordinal)
    if way == "mpi" and (why := world.broadcast_object(mpi_obstacle() if world.rank == 0 else None)):
        pytest.skip(why)
    comm = Communicator.over(MpiTransport.world())
    assert comm.share_devices(way, lambda: True)
    yield comm
    comm.free()


def mpi_obstacle() -> str | None:
    """Why messages cannot go by MPI, as a probe finds it."""
    from hpcpar.cli.doctor.facts import find_awareness
    from hpcpar.transport.mpi_library import library_facts, memory_kinds

    found = find_awareness(library_facts()["library"], memory_kinds())
    return None if found.point_to_point else f"MPI does not take device pointers: {found}"


def torch_tensor(host: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(host)).cuda()


def cupy_array(host: np.ndarray) -> object:
    import cupy

    cupy.cuda.Device(torch.cuda.current_device()).use()
    return cupy.asarray(host)


@pytest.fixture(params=["torch", "cupy"])
def make(request: pytest.FixtureRequest) -> Make:
    if request.param == "torch":
        return torch_tensor
    pytest.importorskip("cupy", reason="needs CuPy: pip install hpcpar[cuda13] or hpcpar[cuda12]")
    return cupy_array


def total(comm: Communicator, count: int) -> np.ndarray:
    return np.sum([values(rank, count) for rank in range(comm.size)], axis=0)


def assert_on_all_ranks(comm: Communicator, found: np.ndarray, expected: np.ndarray) -> None:
    """Compared after every rank has its result, so that none fails alone."""
    wrong = int((found != expected).sum()) if found.shape == expected.shape else found.size
    assert comm.allgather_object(wrong) == [0] * comm.size


@pytest.mark.parametrize("case", CASES)
def test_arrays_on_gpus_get_what_numpy_arrays_get(devices: Communicator, case: str, make: Make) -> None:
    CASES[case](devices, make=make)


@pytest.mark.parametrize("algorithm", ["ring", "direct", "recursive_doubling", "rabenseifner", "binomial"])
def test_every_algorithm_sums_on_gpus(devices: Communicator, algorithm: str) -> None:
    for count in (1, 1000, 3_000_001):
        tensor = torch_tensor(values(devices.rank, count))
        devices.allreduce(tensor, algorithm=algorithm)
        assert_on_all_ranks(devices, to_host(tensor), total(devices, count))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64, torch.uint8]
)
@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_every_element_type_is_reduced_as_on_the_host(
    devices: Communicator, dtype: torch.dtype, op: str
) -> None:
    host = torch.from_numpy(values(devices.rank, 4099)).to(dtype)
    tensor = host.cuda()
    devices.allreduce(tensor, op)
    devices.allreduce(host, op)
    assert_on_all_ranks(devices, tensor.cpu().double().numpy(), host.double().numpy())


def test_averages_of_bfloat16_are_rounded_once(devices: Communicator) -> None:
    host = (torch.from_numpy(values(devices.rank, 5000)) / 3).to(torch.bfloat16)
    tensor = host.cuda()
    devices.allreduce(tensor, "average", algorithm="direct")
    devices.allreduce(host, "average", algorithm="direct")
    assert_on_all_ranks(devices, tensor.cpu().float().numpy(), host.float().numpy())


def test_flags_are_combined(devices: Communicator) -> None:
    flags = torch.tensor([devices.rank == 0, False, True], device="cuda")
    odd = flags.clone()
    devices.allreduce(flags, "or")
    assert flags.tolist() == [True, False, True]
    devices.allreduce(odd, "xor")
    assert odd.tolist() == [True, False, devices.size % 2 == 1]


def test_tensors_with_gaps_are_written_back(devices: Communicator) -> None:
    whole = torch_tensor(np.zeros((40, 50), "float32"))
    for view in (whole[:, ::2], whole.t()[3:7], whole[5]):
        whole.zero_()
        view += devices.rank + 1
        assert devices.allreduce(view) is view
        expected = sum(range(1, devices.size + 1))
        assert float(view.min()) == float(view.max()) == expected
        assert int((whole != 0).sum()) == view.numel(), "nothing beside it is touched"


def test_arrays_of_cupy_with_gaps_are_written_back(devices: Communicator) -> None:
    pytest.importorskip("cupy")
    whole = cupy_array(np.zeros((40, 50), "float32"))
    whole[:, ::2] += devices.rank + 1
    devices.allreduce(whole[:, ::2])
    expected = sum(range(1, devices.size + 1))
    assert (to_host(whole)[:, ::2] == expected).all()
    assert not to_host(whole)[:, 1::2].any()


def test_memory_of_torch_and_cupy_is_one_by_dlpack(devices: Communicator) -> None:
    cupy = pytest.importorskip("cupy")
    tensor = torch_tensor(values(devices.rank, 1000))
    array = cupy.from_dlpack(tensor)
    assert array.data.ptr == tensor.data_ptr()
    torch.cuda.synchronize()
    devices.allreduce(array)
    cupy.cuda.get_current_stream().synchronize()
    assert_on_all_ranks(devices, to_host(tensor), total(devices, 1000))


def on_a_side_stream(devices: Communicator, stream: torch.cuda.Stream, tensor: torch.Tensor) -> bool:
    """Slow work, the call, and more work, all queued in the caller's stream; whether the host got ahead."""
    slow = torch.cuda.Event()
    with torch.cuda.stream(stream):
        tensor.zero_()
        torch.cuda._sleep(A_SECOND)
        slow.record()
        tensor += devices.rank + 1
        handle = devices.start_allreduce(tensor)
        handle.wait()
        is_ahead = not slow.query()
        tensor *= 2
    return is_ahead


def test_work_queued_before_the_call_is_seen_and_work_after_wait_comes_after_it(
    devices: Communicator, way: str
) -> None:
    tensor = torch.zeros(1_000_000, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    # Each queue's memory and all of its events are made, and opened by peers, for which a driver may wait.
    for _ in range(QUEUES * INTERPROCESS_EVENTS):
        devices.allreduce(tensor, "max")
    torch.cuda.synchronize()
    is_ahead = on_a_side_stream(devices, stream, tensor)
    stream.synchronize()
    expected = 2 * sum(range(1, devices.size + 1))
    assert_on_all_ranks(devices, to_host(tensor), np.full(1_000_000, expected, "float32"))
    if way == "pull":
        assert all(devices.allgather_object(is_ahead)), "the host has waited for the GPU"


def test_the_stream_in_which_the_caller_waits_is_the_one_that_is_ordered(devices: Communicator) -> None:
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        tensor = torch.full((100_000,), float(devices.rank + 1), device="cuda")
        torch.cuda._sleep(A_SECOND // 10)
        handle = devices.start_allreduce(tensor)
    with torch.cuda.stream(second):
        handle.wait()
        found = tensor.clone()
    second.synchronize()
    expected = np.full(100_000, sum(range(1, devices.size + 1)), "float32")
    assert_on_all_ranks(devices, to_host(found), expected)


def test_calls_follow_one_another_without_the_host_waiting(devices: Communicator) -> None:
    """Each doubles what the one before left: 2 ranks 2**20, 3 ranks 3**20, exact in float64."""
    tensor = torch.ones(200_003, dtype=torch.float64, device="cuda")
    for _ in range(20):
        devices.start_allreduce(tensor).wait()
    expected = np.full(200_003, float(devices.size) ** 20)
    assert_on_all_ranks(devices, to_host(tensor), expected)


def test_tensors_that_are_freed_and_made_again_are_not_mixed_up(devices: Communicator) -> None:
    """Addresses come back with other contents; at a base that peers have open, with another allocation."""
    for turn in range(12):
        count = 300_000 + 50_000 * (turn % 5)
        tensor = torch_tensor(values(devices.rank + turn, count))
        devices.allreduce(tensor)
        expected = np.sum([values(rank + turn, count) for rank in range(devices.size)], axis=0)
        assert_on_all_ranks(devices, to_host(tensor), expected)
        del tensor
        if turn % 3 == 2:
            torch.cuda.empty_cache()


def test_what_init_chose_by_itself_works(world: Communicator, devices: Communicator) -> None:
    tensor = torch_tensor(values(world.rank, 70_000))
    world.allreduce(tensor)
    assert_on_all_ranks(world, to_host(tensor), total(world, 70_000))


def test_axes_of_a_mesh_have_the_ways_of_the_world(devices: Communicator) -> None:
    half = devices.split(devices.rank % 2, name="half")
    assert half is not None
    with half:
        tensor = torch_tensor(values(devices.rank, 9000))
        half.allreduce(tensor)
        members = range(devices.rank % 2, devices.size, 2)
        expected = np.sum([values(rank, 9000) for rank in members], axis=0)
        assert_on_all_ranks(devices, to_host(tensor), expected)


def raises(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return ""


def test_arrays_in_two_kinds_of_memory_are_refused_on_every_rank(devices: Communicator) -> None:
    tensor, out = torch.ones(5, device="cuda"), torch.ones(5)
    found = raises(lambda: devices.allreduce(tensor, out=out))
    assert set(devices.allgather_object(found)) == {"BufferTypeError"}
