"""The machine's description that `bench fit --machine` writes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from hpcpar.bench import device_speed
from hpcpar.bench.device_speed import DeviceSpeed, machine_toml, write_machine
from hpcpar.errors import OperationError
from hpcpar.planner.cluster import Cluster
from hpcpar.units import GiB

SPEED = DeviceSpeed("CPU, 1 threads", 8 * GiB, {"float32": 1e11, "bfloat16": 2e10}, 40.0, 0.4, 1e10, 2e-6)
LINKS = {"alpha_intra": 2e-6, "beta_intra": 1e-10, "alpha_inter": 3e-5, "beta_inter": 1e-9}


def written(path: Path, parameters: dict[str, float]) -> Cluster:
    write_machine(path, machine_toml("mine", SPEED, parameters, nodes=3, ranks_per_node=4))
    return Cluster.read(path)


def test_the_planner_reads_what_is_written(tmp_path: Path) -> None:
    found = written(tmp_path / "new" / "machine.toml", LINKS)
    assert (found.name, found.nodes, found.devices_per_node) == ("mine", 3, 4)
    assert found.device.memory_nbytes == 8 * GiB
    assert found.device.peak("float32") == pytest.approx(1e11)
    assert found.device.efficiency.depth == 40
    assert found.device.launch_s == pytest.approx(2e-6)
    assert found.node.alpha_s == pytest.approx(2e-6)
    assert found.node.bandwidth == pytest.approx(1e10)
    assert found.fabric.bandwidth == pytest.approx(1e9)


def test_a_level_that_was_not_measured_is_taken_for_the_other(tmp_path: Path) -> None:
    found = written(tmp_path / "machine.toml", {"alpha_intra": 2e-6, "beta_intra": 1e-10})
    assert found.fabric.bandwidth == found.node.bandwidth
    with pytest.raises(OperationError, match="do not tell the bandwidth"):
        machine_toml("mine", SPEED, {"alpha_intra": 1e-6}, nodes=1, ranks_per_node=2)


def test_a_place_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(OperationError, match="cannot be written"):
        write_machine(Path("/dev/null/machine.toml"), "")


def test_this_process_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_speed, "SECONDS", 0.01)
    monkeypatch.setattr(device_speed, "STEP_SECONDS", 0.01)
    found = device_speed.measure(1)
    assert found.peak_flops.keys() == {"float32", "float64", "bfloat16"}
    assert all(1e8 < rate < 1e14 for rate in found.peak_flops.values())
    assert 1e8 < found.memory_bandwidth < 1e13
    assert 0 < found.launch_s < 1e-2
    assert found.depth >= 0
    assert 0 < found.reached <= 1


def test_training_steps_tell_share_launch_and_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = replace(SPEED, reached=0.7, depth=24.0, launch_s=1e-4)
    monkeypatch.setattr(device_speed, "_training_step", lambda config, dtype, device, batch: (config, batch))
    monkeypatch.setattr(
        device_speed,
        "_seconds",
        lambda step, *_: device_speed._predicted_s(step[0], "float32", truth, step[1]),
    )
    found = device_speed._in_training(SPEED, "cpu")
    # The kernels of the step that tells the launch are taken at their full rate.
    assert found.launch_s == pytest.approx(1e-4, rel=0.1)
    assert found.reached == pytest.approx(0.7, rel=0.03)
    assert abs(found.depth - 24) <= 8


def test_more_ranks_than_cores_share_the_time_of_those(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, processes: int, mp_context: object) -> None:
            started.append(processes)
            super().__init__(processes)

    monkeypatch.setattr(device_speed, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(device_speed, "measure", lambda threads: SPEED)
    monkeypatch.setattr(device_speed.os, "sched_getaffinity", lambda process: {0, 1})
    pair, four = (device_speed.measure_together(ranks, 1) for ranks in (2, 4))
    assert started == [2, 2]
    assert pair.peak_flops == SPEED.peak_flops
    assert four.peak_flops == {name: rate / 2 for name, rate in SPEED.peak_flops.items()}
    assert four.memory_bandwidth == SPEED.memory_bandwidth / 2
    assert four.launch_s == 2 * SPEED.launch_s
    assert (pair.ranks_per_core, four.ranks_per_core) == (1, 2)
