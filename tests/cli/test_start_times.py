"""Times of imports, and the waiting in them."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from hpcpar.cli.start_times import Elapsed, StartTimes, process_age_s, time_import


def test_sleeping_while_importing_is_waiting_and_computing_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "sleepy_module.py").write_text("import time\ntime.sleep(0.4)\n")
    (tmp_path / "busy_module.py").write_text(
        "import time\nend = time.thread_time() + 0.4\nwhile time.thread_time() < end: pass\n"
    )
    slept, worked = time_import("sleepy_module"), time_import("busy_module")
    assert slept.waited_s > 0.35
    assert worked.wall_s > 0.35
    # What the thread stands in line for a core is no waiting either, however busy the machine is.
    assert worked.waited_s < 0.2
    assert "sleepy_module" in sys.modules


def test_a_module_that_cannot_be_imported_takes_what_it_takes() -> None:
    assert time_import("no_such_module_at_all").wall_s < 1.0


def test_all_imports_are_added_up() -> None:
    assert StartTimes(imports={"a": Elapsed(1.0, 0.25), "b": Elapsed(2.0, 0.5)}).imported == (3.0, 0.75)


def test_a_process_knows_its_age() -> None:
    first = process_age_s()
    time.sleep(0.1)
    assert first > 0
    assert 0.05 < process_age_s() - first < 5.0
