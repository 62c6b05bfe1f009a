"""Which GPU a rank takes among those of its node, and that ranks which share one are told."""

from __future__ import annotations

import logging
import threading

import pytest

from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import CudaError
from hpcpar.planner.traffic import allreduce_nbytes
from hpcpar.transport.gpu import kernels as gpu_kernels
from hpcpar.transport.gpu.cuda_driver import CudaDriver, driver
from tests.comm.device_cases import on_device, values


def opened(size: int, caplog: pytest.LogCaptureFixture, nodes: list[int] | None = None) -> list[str]:
    """Warnings of GPUs that are shared, from ranks that are threads."""
    with caplog.at_level(logging.WARNING, logger="hpcpar"):
        run_loopback(size, lambda comm: comm.share_devices("auto"), nodes=nodes)
    return [record.getMessage() for record in caplog.records if "share" in record.getMessage()]


def test_ranks_that_share_a_gpu_are_told_once(kernels, caplog) -> None:
    found = opened(3, caplog)
    assert len(found) == 1
    assert "node 0: 3 ranks of this node share 1 GPU:" in found[0]
    assert "--ntasks-per-node=1" in found[0]


def test_one_rank_per_gpu_is_nothing_to_be_told_of(kernels, caplog, monkeypatch) -> None:
    monkeypatch.setenv("STAND_IN_DEVICES", "2")
    assert opened(2, caplog) == []


def test_gpus_are_counted_on_each_node_by_itself(kernels, caplog) -> None:
    assert opened(2, caplog, nodes=[0, 1]) == []
    found = opened(3, caplog, nodes=[0, 1, 1])
    assert len(found) == 1
    assert "node 1: 2 ranks" in found[0]


def test_each_rank_works_on_the_gpu_of_its_place_on_the_node(kernels, monkeypatch) -> None:
    monkeypatch.setenv("STAND_IN_DEVICES", "2")
    used: list[int] = []
    find = gpu_kernels.kernels
    monkeypatch.setattr(gpu_kernels, "kernels", lambda ordinal: (used.append(ordinal), find(ordinal))[1])
    run_loopback(5, lambda comm: comm.share_devices("staged"), nodes=[0, 0, 0, 1, 1])
    assert sorted(used) == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("refused", ["stream", "event", "alloc_pinned", "alloc"])
def test_where_a_rank_has_no_room_for_a_trial_none_pulls(kernels, monkeypatch, refused: str) -> None:
    """On a GPU that another program has filled; the other ranks must not be left in the trial."""
    allowed, second = getattr(CudaDriver, refused), []

    def full(cuda: CudaDriver, *arguments, **options) -> int:
        if threading.get_ident() in second:
            raise CudaError("the device's memory is full")
        return allowed(cuda, *arguments, **options)

    monkeypatch.setattr(CudaDriver, refused, full)

    def body(comm: Communicator) -> tuple[str, ...]:
        second.extend([threading.get_ident()] * comm.rank)
        assert comm.share_devices("auto")
        return comm._runtime.devices.reaches

    assert run_loopback(2, body) == [("staged", "staged")] * 2


def test_a_device_is_known_by_its_identity_whatever_its_number(stand_in, monkeypatch) -> None:
    monkeypatch.setenv("STAND_IN_DEVICES", "2")
    cuda = driver()
    assert cuda.identity(0) == cuda.identity(0) != cuda.identity(1)
    assert len(bytes.fromhex(cuda.identity(1))) == 16


@pytest.mark.parametrize("size", [3, 4])
def test_the_algorithm_that_is_said_to_be_chosen_sends_what_is_counted(kernels, size: int) -> None:
    def body(comm: Communicator) -> list[tuple[int, int]]:
        comm.share_devices("staged")
        counted = []
        for count in (1, 500, 200_000):
            comm.traffic.reset()
            comm.allreduce(on_device(values(comm.rank, count)))
            sent = sum(comm.unchecked("sum").allgather_object(comm.traffic.nbytes_sent("allreduce")))
            counted.append((sent, allreduce_nbytes(comm, 4 * count, dtype="float32", on_device=True)))
        return counted

    for sent, expected in run_loopback(size, body)[0]:
        assert sent == expected


def test_where_devices_are_not_shared_arrays_on_them_are_like_those_of_the_host() -> None:
    def body(comm: Communicator) -> tuple[str, str]:
        return comm.algorithm_for("allreduce", 8), comm.algorithm_for("allreduce", 8, on_device=True)

    for host, device in run_loopback(4, body, shared_memory=True):
        assert host == device
