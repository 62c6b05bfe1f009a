from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpcpar.data_parallel import process_memory as module
from hpcpar.data_parallel.process_memory import (
    ProcessMemory,
    available_on_node,
    available_to_process,
    process_memory,
)
from hpcpar.units import KiB, MiB


def test_fields_are_read_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, rollup = tmp_path / "status", tmp_path / "rollup"
    status.write_text("VmPeak:\t 9 kB\nVmHWM:\t    300 kB\nVmRSS:\t    200 kB\n")
    rollup.write_text("0-1 ---p [rollup]\nRss:   200 kB\nPss:    70 kB\nPss_Dirty:  1 kB\n")
    monkeypatch.setattr(module, "STATUS", status)
    monkeypatch.setattr(module, "ROLLUP", rollup)
    assert process_memory() == ProcessMemory(200 * KiB, 300 * KiB, 70 * KiB, None, None)


def test_a_system_that_says_nothing_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STATUS", tmp_path / "nothing")
    monkeypatch.setattr(module, "ROLLUP", tmp_path / "nothing")
    assert process_memory(torch.device("cpu")) == ProcessMemory(None, None, None, None, None)


@pytest.mark.skipif(not module.STATUS.exists(), reason="Linux tells it")
def test_memory_that_is_touched_is_resident() -> None:
    before = process_memory().resident_nbytes
    touched = torch.ones(64 * MiB, dtype=torch.uint8)
    after = process_memory()
    assert before is not None
    assert after.resident_nbytes is not None
    assert after.resident_nbytes - before > touched.nbytes // 2
    assert (after.peak_resident_nbytes or 0) >= after.resident_nbytes


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("0::/job/step", {"job/memory.max": 900, "job/memory.current": 700, "job/step/memory.max": "max"}),
        (
            "3:cpu:/\n7:memory:/job/step",
            {"memory/job/memory.limit_in_bytes": 900, "memory/job/memory.usage_in_bytes": 700},
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_a_node_has_what_its_control_groups_leave(
    own: str, files: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SYSTEM", tmp_path / "meminfo")
    monkeypatch.setattr(module, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(module, "GROUPS", tmp_path / "groups")
    assert available_on_node() is None
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:       1 kB\n")
    (tmp_path / "own").write_text(f"{own}\n")
    assert available_on_node() == KiB
    for name, value in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    assert available_on_node() == 200
    for path in list((tmp_path / "groups").rglob("job")):
        (path / "memory.stat").write_text("inactive_file 50\ntotal_inactive_file 50\n")
    assert available_on_node() == 250  # a cache gives way


def test_a_process_may_map_what_its_limit_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STATUS", tmp_path / "status")
    (tmp_path / "status").write_text("VmSize:\t 3 kB\n")
    monkeypatch.setattr(module.resource, "getrlimit", lambda _: (5 * KiB, 9 * KiB))
    assert available_to_process() == 2 * KiB
    monkeypatch.setattr(module.resource, "getrlimit", lambda _: (module.resource.RLIM_INFINITY,) * 2)
    assert available_to_process() is None
