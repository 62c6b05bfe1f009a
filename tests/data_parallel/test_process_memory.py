from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpcpar.data_parallel import process_memory as module
from hpcpar.data_parallel.process_memory import ProcessMemory, process_memory
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
